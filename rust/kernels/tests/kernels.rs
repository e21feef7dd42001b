//! Properties of the kernels over random inputs, and the same bits from any number of threads.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use rlox_grpo_kernels::advantages::{self, Baseline, Normalisation, Scaling};
use rlox_grpo_kernels::batch::layout::{LayoutOut, RowLayout};
use rlox_grpo_kernels::batch::packing::{self, Oversize, Packing};
use rlox_grpo_kernels::batch::padding::{self, Rectangle, Side};
use rlox_grpo_kernels::batch::prefix;
use rlox_grpo_kernels::ragged::Ragged;

const GRPO: Normalisation =
    Normalisation { scaling: Scaling::Group, baseline: Baseline::Mean, ddof: 1, std_epsilon: 1e-4 };

fn advantages_of(rewards: &[f64], group_size: usize, how: &Normalisation) -> Vec<f64> {
    let mut out = vec![f64::NAN; rewards.len()];
    advantages::group_advantages(rewards, group_size, how, &mut out).unwrap();
    out
}

fn close(left: &[f64], right: &[f64], tolerance: f64) -> bool {
    left.len() == right.len() && left.iter().zip(right).all(|(a, b)| (a - b).abs() <= tolerance)
}

fn offsets_of(rows: &[Vec<i64>]) -> Vec<i64> {
    let mut offsets = vec![0];
    for row in rows {
        offsets.push(offsets[offsets.len() - 1] + row.len() as i64);
    }
    offsets
}

/// Groups of whole rewards, for which shifts and scales are exact.
fn rewards() -> impl Strategy<Value = (usize, Vec<f64>)> {
    (2usize..20, 1usize..8).prop_flat_map(|(size, groups)| {
        (Just(size), prop::collection::vec((-8i32..8).prop_map(f64::from), size * groups))
    })
}

fn normalisations() -> impl Strategy<Value = Normalisation> {
    let scaling = prop::sample::select(vec![Scaling::Group, Scaling::Batch, Scaling::None]);
    let baseline = prop::sample::select(vec![Baseline::Mean, Baseline::LeaveOneOut]);
    (scaling, baseline, 0usize..3).prop_map(|(scaling, baseline, ddof)| Normalisation {
        scaling,
        baseline,
        ddof,
        std_epsilon: 1e-4,
    })
}

proptest! {
    #[test]
    fn a_shift_of_every_reward_changes_nothing((size, rewards) in rewards(), how in normalisations(), shift in -64i32..64) {
        let shifted: Vec<f64> = rewards.iter().map(|reward| reward + f64::from(shift)).collect();
        // Whole numbers shift exactly; only the division of the mean rounds.
        prop_assert!(close(&advantages_of(&rewards, size, &how), &advantages_of(&shifted, size, &how), 1e-10));
    }

    #[test]
    fn a_scale_changes_nothing_without_epsilon((size, rewards) in rewards()) {
        let how = Normalisation { std_epsilon: 0.0, ..GRPO };
        let scaled: Vec<f64> = rewards.iter().map(|reward| reward * 8.0).collect();
        prop_assert_eq!(advantages_of(&rewards, size, &how), advantages_of(&scaled, size, &how));
    }

    #[test]
    fn each_group_sums_to_zero((size, rewards) in rewards(), how in normalisations()) {
        for group in advantages_of(&rewards, size, &how).chunks(size) {
            prop_assert!(group.iter().sum::<f64>().abs() < 1e-10);
        }
    }

    #[test]
    fn order_of_rewards_follows_into_advantages((size, rewards) in rewards(), how in normalisations()) {
        for (rewards, advantages) in rewards.chunks(size).zip(advantages_of(&rewards, size, &how).chunks(size)) {
            for (first, second) in (0..size).zip(1..size) {
                prop_assert!(rewards[first] > rewards[second] || advantages[first] <= advantages[second]);
            }
        }
    }

    #[test]
    fn a_permutation_within_groups_carries_over((size, rewards) in rewards(), how in normalisations()) {
        let reversed: Vec<f64> = rewards.chunks(size).flat_map(|group| group.iter().rev().copied()).collect();
        let advantages = advantages_of(&reversed, size, &how);
        let back: Vec<f64> = advantages.chunks(size).flat_map(|group| group.iter().rev().copied()).collect();
        prop_assert!(close(&advantages_of(&rewards, size, &how), &back, 1e-12));
    }

    #[test]
    fn a_nan_is_as_if_absent((size, rewards) in rewards(), how in normalisations()) {
        let mut offsets = vec![0];
        let mut with_nan = Vec::new();
        for group in rewards.chunks(size) {
            with_nan.push(f64::NAN);
            with_nan.extend(group);
            offsets.push(with_nan.len() as i64);
        }
        let mut out = vec![f64::NAN; with_nan.len()];
        advantages::ragged_group_advantages(&with_nan, &offsets, &how, &mut out).unwrap();
        let kept: Vec<f64> = out.chunks(size + 1).flat_map(|group| group[1..].iter().copied()).collect();
        prop_assert!(close(&kept, &advantages_of(&rewards, size, &how), 1e-12));
        prop_assert!(out.chunks(size + 1).all(|group| group[0] == 0.0));
    }

    #[test]
    fn padding_keeps_every_row(rows in prop::collection::vec(prop::collection::vec(-3i64..3, 0..9), 0..9), left: bool) {
        let slices: Vec<&[i64]> = rows.iter().map(Vec::as_slice).collect();
        let width = padding::width_for(rows.iter().map(Vec::len), 4).unwrap();
        let size = rows.len() * width;
        let (mut ids, mut mask, mut positions) = (vec![9; size], vec![true; size], vec![9; size]);
        let out = Rectangle { ids: &mut ids, mask: &mut mask, positions: &mut positions };
        padding::pad(&slices, width, if left { Side::Left } else { Side::Right }, 0, out).unwrap();
        for (index, row) in rows.iter().enumerate() {
            let range = index * width..(index + 1) * width;
            let kept: Vec<(i64, i64)> = range.clone().filter(|&at| mask[at]).map(|at| (ids[at], positions[at])).collect();
            prop_assert_eq!(kept, row.iter().copied().zip(0..).collect::<Vec<_>>());
            prop_assert!(range.filter(|&at| !mask[at]).all(|at| ids[at] == 0 && positions[at] == 0));
        }
    }

    #[test]
    fn packing_holds_each_row_once_within_the_budget(
        lengths in prop::collection::vec(0i64..60, 0..80),
        token_budget in 1i64..200,
        padded: bool,
        num_ranks in 1usize..6,
        linear_cost in prop::sample::select(vec![0u64, 1, 24_576]),
    ) {
        let how = Packing { token_budget, padded, num_ranks, linear_cost, oversize: Oversize::Alone };
        let bins = packing::pack(&lengths, &how).unwrap();
        prop_assert_eq!(bins.len() % num_ranks, 0);
        let mut seen: Vec<usize> = bins.concat();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
        for bin in &bins {
            let held: Vec<i64> = bin.iter().map(|&row| lengths[row]).collect();
            let longest = held.iter().copied().max().unwrap_or(0);
            let used = if padded { longest * held.len() as i64 } else { held.iter().sum() };
            prop_assert!(used <= token_budget || held.len() == 1);
            prop_assert!(!bin.is_empty() || lengths.len() < bins.len());
        }
        let refused = packing::pack(&lengths, &Packing { oversize: Oversize::Refuse, ..how });
        prop_assert_eq!(refused.is_err(), lengths.iter().any(|&length| length > token_budget));
    }

    #[test]
    fn shared_prompts_are_equal_and_others_are_not(rows in prop::collection::vec(prop::collection::vec(0i64..2, 0..3), 0..30)) {
        let (values, offsets) = (rows.concat(), offsets_of(&rows));
        let shared = prefix::share_prefixes(&Ragged::new(&values, &offsets, "offsets").unwrap());
        for (index, row) in rows.iter().enumerate() {
            let first = shared.first_row[shared.prompt_of_row[index] as usize] as usize;
            prop_assert_eq!(first, rows.iter().position(|other| other == row).unwrap());
        }
        for (prompt, bounds) in shared.offsets.windows(2).enumerate() {
            let members = &shared.rows[bounds[0] as usize..bounds[1] as usize];
            prop_assert!(members.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(members.iter().all(|&row| shared.prompt_of_row[row as usize] == prompt as i64));
        }
    }
}

/// The result of `work` on pools of 1, 2 and 4 threads.
fn on_pools<R: Send>(work: impl Fn() -> R + Sync) -> [R; 3] {
    [1, 2, 4].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(&work))
}

/// Values without a short binary expansion, so that any other order of addition shows.
fn awkward(count: usize) -> Vec<f64> {
    (0..count).map(|index| ((index * 2_654_435_761) % 1_000_003) as f64 / 7.0).collect()
}

#[test]
fn advantages_are_the_same_bits_on_any_number_of_threads() {
    let mut rewards = awkward(1 << 18);
    rewards[77] = f64::NAN;
    for scaling in [Scaling::Group, Scaling::Batch, Scaling::None] {
        let how = Normalisation { scaling, ..GRPO };
        let bits = || -> Vec<u64> { advantages_of(&rewards, 16, &how).into_iter().map(f64::to_bits).collect() };
        let [one, two, four] = on_pools(bits);
        assert!(one == two && two == four);
    }
}

#[test]
fn the_first_infinity_is_named_on_any_number_of_threads() {
    let mut rewards = awkward(1 << 18);
    rewards[200_000] = f64::INFINITY;
    rewards[131_073] = f64::NEG_INFINITY;
    let message = || {
        let mut out = vec![0.0; rewards.len()];
        advantages::group_advantages(&rewards, 16, &GRPO, &mut out).unwrap_err().to_string()
    };
    assert_eq!(on_pools(message), ["rewards[131073] is not finite: -inf"; 3].map(String::from));
}

#[test]
fn layouts_are_the_same_on_any_number_of_threads() {
    let lengths: Vec<usize> = (0..512).map(|row| (row * 37) % 301).collect();
    let rows: Vec<Vec<i64>> = lengths.iter().map(|&length| (0..length as i64).collect()).collect();
    let (values, offsets) = (rows.concat(), offsets_of(&rows));
    let prompts = [3, 4, 5];
    let (prompt_of_row, train, chosen) = (vec![0; 512], vec![true; 512], (0..512).collect::<Vec<i64>>());
    let filled = || {
        let completions = Ragged::new(&values, &offsets, "offsets").unwrap();
        let prompts = Ragged::new(&prompts, &[0, 3], "offsets").unwrap();
        let layout = RowLayout::new(prompts, completions, &prompt_of_row, &train, &chosen).unwrap();
        let (width, completion_width) = layout.widths(8).unwrap();
        let (size, completion_size) = (512 * width, 512 * completion_width);
        let mut ids = (vec![0; size], vec![false; size]);
        let mut completion = (vec![0; completion_size], vec![false; completion_size], vec![false; completion_size]);
        let mut prompt_lengths = vec![0; 512];
        let out = LayoutOut {
            input_ids: &mut ids.0,
            attention_mask: &mut ids.1,
            completion_ids: &mut completion.0,
            completion_mask: &mut completion.1,
            loss_mask: &mut completion.2,
            prompt_lengths: &mut prompt_lengths,
        };
        layout.fill((width, completion_width), 0, out).unwrap();
        (ids, completion, prompt_lengths)
    };
    let [one, two, four] = on_pools(filled);
    assert!(one == two && two == four);
    assert_eq!(one.1.1.iter().filter(|&&real| real).count(), lengths.iter().sum());
}
