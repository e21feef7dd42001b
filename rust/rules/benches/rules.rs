//! Criterion over the reward rules: one sample of 1 KiB, 1 MiB of text, and a batch around the serial size.

#![allow(clippy::unwrap_used)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rlox_grpo_kernels::ragged::Ragged;
use rlox_grpo_rules::countdown::Countdown;
use rlox_grpo_rules::format::{FormatMode, TagFormat};
use rlox_grpo_rules::gsm8k::Gsm8kAnswer;
use rlox_grpo_rules::{RewardRule, score_batch};

/// A completion of about `bytes` bytes that every rule has to read to its end.
fn completion(bytes: usize) -> String {
    let thought = "Try 44 + 19 = 63, then 63 - 35 = 28, which is it. ".repeat(bytes / 50);
    format!("<think>{thought}</think>\n<answer>44 + 19 - 35</answer>")
}

fn rules(bench: &mut Criterion) {
    let numbers = Ragged::new(&[44, 19, 35], &[0, 3], "nums").unwrap();
    let countdown = Countdown::new(numbers, &[28]).unwrap();
    let gsm8k = Gsm8kAnswer::new(&["28"], false).unwrap();
    let format = TagFormat::new("think", "answer", FormatMode::Strict, "");
    let rules: [(&str, &dyn RewardRule); 3] = [("countdown", &countdown), ("gsm8k", &gsm8k), ("strict", &format)];
    for (name, rule) in rules {
        let mut group = bench.benchmark_group(name);
        for bytes in [1 << 10, 1 << 20] {
            let text = completion(bytes) + if name == "gsm8k" { "\nThe answer is $28.00." } else { "" };
            let text = if name == "gsm8k" { text.replace("answer>", "result>") } else { text };
            assert_eq!(rule.score(0, &text).score, 1.0);
            group.throughput(Throughput::Bytes(text.len() as u64));
            group.bench_with_input(BenchmarkId::from_parameter(bytes), &text, |b, text| b.iter(|| rule.score(0, text)));
        }
    }
}

fn batches(bench: &mut Criterion) {
    let format = TagFormat::new("think", "answer", FormatMode::Strict, "");
    let mut group = bench.benchmark_group("strict_batch");
    for rows in [16, 32, 64, 1024] {
        let texts: Vec<String> = (0..rows).map(|_| completion(1 << 10)).collect();
        group.bench_with_input(BenchmarkId::new("score_batch", rows), &texts, |b, texts| {
            b.iter(|| score_batch(&format, texts))
        });
        group.bench_with_input(BenchmarkId::new("serial", rows), &texts, |b, texts| {
            b.iter(|| texts.iter().map(|text| format.score(0, text).score).sum::<f64>());
        });
    }
}

criterion_group!(benches, rules, batches);
criterion_main!(benches);
