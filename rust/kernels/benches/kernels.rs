//! Criterion over the pure functions: `cargo bench`. Through Python, beside NumPy and others: `make bench`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rlox_grpo_kernels::advantages::{self, Baseline, Normalisation, Scaling};
use rlox_grpo_kernels::batch::packing::{self, Oversize, Packing};
use rlox_grpo_kernels::batch::padding::{self, Rectangle, Side};
use rlox_grpo_kernels::batch::prefix;
use rlox_grpo_kernels::ragged::Ragged;
use std::hint::black_box;

/// Numbers without a pattern that a predictor could learn.
fn scattered(count: usize, below: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |index| (index * 2_654_435_761) % 1_000_003 % below)
}

fn group_advantages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("group_advantages");
    for groups in [64, 512, 2_048, 8_192, 65_536] {
        let rewards: Vec<f32> = scattered(groups * 16, 1_000).map(|value| value as f32 / 7.0).collect();
        let mut out = vec![0.0; rewards.len()];
        group.throughput(Throughput::Elements(rewards.len() as u64));
        for (name, scaling) in [("group", Scaling::Group), ("batch", Scaling::Batch)] {
            let how = Normalisation { scaling, baseline: Baseline::Mean, ddof: 1, std_epsilon: 1e-4 };
            group.bench_function(BenchmarkId::new(name, groups), |bencher| {
                bencher.iter(|| advantages::group_advantages(black_box(&rewards), 16, &how, &mut out));
            });
        }
    }
    group.finish();
}

fn batch(criterion: &mut Criterion) {
    let lengths: Vec<i64> = scattered(8_192, 401).map(|extra| 800 + extra as i64).collect();
    let mut offsets = vec![0];
    for length in &lengths {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    let values: Vec<i64> = scattered(offsets[lengths.len()] as usize, 150_000).map(|token| token as i64).collect();
    let Ok(rows) = Ragged::new(&values, &offsets, "offsets") else { unreachable!("offsets are running sums") };
    let slices: Vec<&[i64]> = rows.rows().collect();
    let size = 8_192 * 1_200;
    let (mut ids, mut mask, mut positions) = (vec![0; size], vec![false; size], vec![0; size]);
    criterion.bench_function("pad 8192 x ~1000 into memory already touched", |bencher| {
        bencher.iter(|| {
            let out = Rectangle { ids: &mut ids, mask: &mut mask, positions: &mut positions };
            padding::pad(black_box(&slices), 1_200, Side::Right, 0, out)
        });
    });
    criterion.bench_function("share_prefixes 8192 x ~1000, all different", |bencher| {
        bencher.iter(|| prefix::share_prefixes(black_box(&rows)));
    });
    for padded in [false, true] {
        let how =
            Packing { token_budget: 16_384, padded, num_ranks: 8, linear_cost: 24_576, oversize: Oversize::Refuse };
        criterion.bench_function(if padded { "pack 8192 padded" } else { "pack 8192 packed" }, |bencher| {
            bencher.iter(|| packing::pack(black_box(&lengths), &how));
        });
    }
}

criterion_group!(kernels, group_advantages, batch);
criterion_main!(kernels);
