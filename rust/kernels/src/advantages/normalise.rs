//! Group-relative advantages: GRPO (arXiv:2402.03300, section 4.1.2) and its published variants.
//!
//! For the valid rewards `r` of a group, `A_i = (r_i - baseline_i) * scale`: the baseline is the group's mean, or the
//! mean of the others (RLOO, arXiv:2402.14740); the scale is `1 / (sd + std_epsilon)` over the group or over the
//! whole batch, or 1 (Dr. GRPO, arXiv:2503.20783). Means and standard deviations take two passes in `f64`.

use super::real::{Real, is_nan};
use super::sums::{all_equal, sum, sum_of_squares};
use crate::error::KernelError;
use crate::ragged::Ragged;
use crate::threads::worth_splitting;
use rayon::prelude::*;

/// Rewards per task: for fewer, a second thread costs more than it saves (an estimate; measure with `benches/kernels.rs`).
const GRAIN: usize = 1 << 15;
/// Rewards in one partial sum of the batch statistics; partial sums are combined in order.
const CHUNK: usize = 1 << 12;

/// Divisor of the centred rewards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// Standard deviation of the group.
    Group,
    /// Standard deviation of all valid rewards of the batch; the mean is still the group's.
    Batch,
    /// No division.
    None,
}

/// Value subtracted from each reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// Mean of the group.
    Mean,
    /// Mean of the group's other rewards (RLOO).
    LeaveOneOut,
}

/// Options of the normalisation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalisation {
    /// Divisor of the centred rewards.
    pub scaling: Scaling,
    /// Value subtracted from each reward.
    pub baseline: Baseline,
    /// Delta degrees of freedom: the variance divides by `count - ddof`. 1: sample variance; 0: population variance.
    pub ddof: usize,
    /// Constant added to the standard deviation.
    pub std_epsilon: f64,
}

/// Error of the inner loops: a statistic is not finite. [`diagnose`] finds the cause.
struct NotFinite;

/// Compute the advantages of groups of equal size. `rewards` is prompt-major; `out` has the same length.
///
/// A NaN reward means that the rule did not apply: the statistics leave it out and its advantage is 0. The advantage is
/// exactly 0 in a group whose valid rewards are all equal or only one, and 0 where a standard deviation is taken and
/// the group has at most `ddof` valid rewards. The result is bit-identical for any number of threads.
///
/// Example with `ddof` 1 and `std_epsilon` 0: the group `[1, NaN, 3]` has mean 2 and standard deviation `sqrt(2)`, so
/// its advantages are `[-0.707, 0, 0.707]`.
///
/// # Errors
/// [`KernelError`] for a group size of 0 or one that does not divide the rewards, an infinite reward, a `std_epsilon`
/// that is negative or not finite, an `out` of another length, and rewards whose statistics overflow.
pub fn group_advantages<T: Real>(
    rewards: &[T],
    group_size: usize,
    how: &Normalisation,
    out: &mut [T],
) -> Result<(), KernelError> {
    if group_size == 0 {
        return Err(KernelError::BadValue { argument: "group_size", value: 0.0, reason: "a group holds at least one" });
    }
    if !rewards.len().is_multiple_of(group_size) {
        return Err(KernelError::GroupSize { rewards: rewards.len(), group_size });
    }
    normalise(rewards, 0..rewards.len() / group_size, &|group| group * group_size, how, out)
}

/// Compute the advantages of groups of different sizes: group `g` is `rewards[offsets[g]..offsets[g + 1]]`.
///
/// # Errors
/// As [`group_advantages`], and [`KernelError::BadOffset`].
pub fn ragged_group_advantages<T: Real>(
    rewards: &[T],
    group_offsets: &[i64],
    how: &Normalisation,
    out: &mut [T],
) -> Result<(), KernelError> {
    let groups = Ragged::new(rewards, group_offsets, "group_offsets")?;
    normalise(rewards, 0..groups.len(), &|group| group_offsets[group] as usize, how, out)
}

fn normalise<T: Real>(
    rewards: &[T],
    groups: std::ops::Range<usize>,
    start_of: &(impl Fn(usize) -> usize + Sync),
    how: &Normalisation,
    out: &mut [T],
) -> Result<(), KernelError> {
    if !how.std_epsilon.is_finite() || how.std_epsilon < 0.0 {
        let reason = "it is added to a standard deviation, so finite and not negative";
        return Err(KernelError::BadValue { argument: "std_epsilon", value: how.std_epsilon, reason });
    }
    if out.len() != rewards.len() {
        let (length, expected) = (out.len(), rewards.len());
        return Err(KernelError::LengthMismatch { argument: "out", length, other: "rewards", expected });
    }
    let batch_scale = match how.scaling {
        Scaling::Group => Ok(None),
        Scaling::None => Ok(Some(1.0)),
        Scaling::Batch => batch_scale(rewards, how).map(Some),
    };
    let kernel = Kernel { how, batch_scale: batch_scale.map_err(|NotFinite| diagnose(rewards))? };
    kernel.split(rewards, groups, start_of, out).map_err(|NotFinite| diagnose(rewards))
}

/// The error for rewards with statistics that are not finite: the first infinity, else an overflow.
fn diagnose<T: Real>(rewards: &[T]) -> KernelError {
    let values = rewards.iter().map(|&reward| reward.into());
    match values.enumerate().find(|(_, value): &(usize, f64)| value.is_infinite()) {
        Some((index, value)) => KernelError::NotFinite { argument: "rewards", index, value },
        None => KernelError::Overflow { argument: "rewards", statistic: "mean, deviation or advantage" },
    }
}

struct Kernel<'a> {
    how: &'a Normalisation,
    /// Scale shared by all groups; None when each group has its own.
    batch_scale: Option<f64>,
}

impl Kernel<'_> {
    /// Halve the groups until a task is small. Threads split between groups, never inside a sum.
    fn split<T: Real>(
        &self,
        rewards: &[T],
        groups: std::ops::Range<usize>,
        start_of: &(impl Fn(usize) -> usize + Sync),
        out: &mut [T],
    ) -> Result<(), NotFinite> {
        let base = start_of(groups.start);
        if groups.len() > 1 && worth_splitting(rewards.len(), GRAIN) {
            let middle = groups.start + groups.len() / 2;
            let (left, right) = rewards.split_at(start_of(middle) - base);
            let (left_out, right_out) = out.split_at_mut(left.len());
            let (first, second) = rayon::join(
                || self.split(left, groups.start..middle, start_of, left_out),
                || self.split(right, middle..groups.end, start_of, right_out),
            );
            return first.and(second);
        }
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for group in groups {
                    let bounds = start_of(group) - base..start_of(group + 1) - base;
                    self.group(&rewards[bounds.clone()], &mut out[bounds])?;
                }
                Ok(())
            },
        )
    }

    #[inline(always)]
    fn group<T: Real>(&self, rewards: &[T], out: &mut [T]) -> Result<(), NotFinite> {
        if let Some(Affine { mean, scale }) = self.affine(rewards) {
            if scale == 0.0 {
                out.fill(T::default());
                return Ok(());
            }
            for (advantage, &reward) in out.iter_mut().zip(rewards) {
                *advantage = T::from_f64((reward.into() - mean) * scale);
            }
            return Ok(());
        }
        let valid: Vec<T> = rewards.iter().copied().filter(|&reward| !is_nan(reward)).collect();
        let Affine { mean, scale } = self.affine(&valid).ok_or(NotFinite)?;
        for (advantage, &reward) in out.iter_mut().zip(rewards) {
            let zero = scale == 0.0 || is_nan(reward);
            *advantage = if zero { T::default() } else { T::from_f64((reward.into() - mean) * scale) };
        }
        Ok(())
    }

    /// The map from reward to advantage, with scale 0 where the advantage is defined as 0. None when a statistic or an
    /// advantage is not finite; a NaN among the rewards is one cause.
    #[inline(always)]
    fn affine<T: Real>(&self, rewards: &[T]) -> Option<Affine> {
        let zero = Affine { mean: 0.0, scale: 0.0 };
        let Some(&first) = rewards.first() else { return Some(zero) };
        // An exact test: the squared deviations of 0.3, 0.3, 0.3 can round to more than 0, which the scale magnifies.
        if all_equal(rewards, first) {
            return first.into().is_finite().then_some(zero);
        }
        let count = rewards.len();
        let mean = sum(rewards) / count as f64;
        let squares = sum_of_squares(rewards, mean);
        let mut scale = self.batch_scale.unwrap_or_else(|| scale(squares, count, self.how));
        if self.how.baseline == Baseline::LeaveOneOut {
            // r_i - mean of the others = (r_i - mean) n / (n - 1); two rewards differ, so n > 1.
            scale *= count as f64 / (count - 1) as f64;
        }
        // No deviation exceeds the root of the squares, so single advantages are checked only near the end of the range.
        let advantage = |&reward: &T| -> f64 { T::from_f64((reward.into() - mean) * scale).into() };
        let finite = squares * scale * scale <= T::SAFE_SQUARE || rewards.iter().all(|r| advantage(r).is_finite());
        finite.then_some(Affine { mean, scale })
    }
}

struct Affine {
    mean: f64,
    scale: f64,
}

/// `1 / (sd + std_epsilon)`; 0 where no deviation is defined or the divisor is 0; NaN when the squares overflow.
#[inline(always)]
fn scale(squares: f64, count: usize, how: &Normalisation) -> f64 {
    if count <= how.ddof {
        return 0.0;
    }
    let divisor = (squares / (count - how.ddof) as f64).sqrt() + how.std_epsilon;
    match divisor {
        0.0 => 0.0,
        divisor if divisor.is_finite() => 1.0 / divisor,
        _ => f64::NAN,
    }
}

/// The scale from all valid rewards of the batch.
fn batch_scale<T: Real>(rewards: &[T], how: &Normalisation) -> Result<f64, NotFinite> {
    let parts = chunked(rewards, |chunk| {
        let sum = sum(chunk);
        if sum.is_finite() {
            return (sum, chunk.len());
        }
        let valid = chunk.iter().filter(|&&reward| !is_nan(reward));
        valid.fold((0.0, 0), |(sum, count), &reward| (sum + reward.into(), count + 1))
    });
    let (sum, count) = parts.into_iter().fold((0.0, 0), |(sum, count), part| (sum + part.0, count + part.1));
    if count == 0 {
        return Ok(0.0);
    }
    let mean: f64 = sum / count as f64;
    if !mean.is_finite() {
        return Err(NotFinite);
    }
    let squares = chunked(rewards, |chunk| {
        let squares = sum_of_squares(chunk, mean);
        if squares.is_finite() {
            return squares;
        }
        let valid = chunk.iter().filter(|&&reward| !is_nan(reward));
        valid.fold(0.0, |sum, &reward| sum + (reward.into() - mean) * (reward.into() - mean))
    });
    Ok(scale(squares.into_iter().sum(), count, how))
}

/// `part` of each chunk of fixed size, in order.
fn chunked<T: Real, P: Send>(rewards: &[T], part: impl Fn(&[T]) -> P + Sync + Send) -> Vec<P> {
    if worth_splitting(rewards.len(), GRAIN) {
        rewards.par_chunks(CHUNK).map(part).collect()
    } else {
        rewards.chunks(CHUNK).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRPO: Normalisation =
        Normalisation { scaling: Scaling::Group, baseline: Baseline::Mean, ddof: 1, std_epsilon: 1e-4 };

    fn run(rewards: &[f64], group_size: usize, how: Normalisation) -> Result<Vec<f64>, KernelError> {
        let mut out = vec![f64::NAN; rewards.len()];
        group_advantages(rewards, group_size, &how, &mut out).map(|()| out)
    }

    #[test]
    fn group_of_two_is_worked_by_hand() {
        // mean 2, squares 1 + 1, ddof 1: sd = sqrt(2); ddof 0: sd = 1.
        let sample = run(&[1.0, 3.0], 2, Normalisation { std_epsilon: 0.0, ..GRPO }).unwrap();
        assert!((sample[1] - 0.5f64.sqrt()).abs() < 1e-15 && sample[0] == -sample[1]);
        assert_eq!(run(&[1.0, 3.0], 2, Normalisation { ddof: 0, std_epsilon: 0.0, ..GRPO }).unwrap(), [-1.0, 1.0]);
    }

    #[test]
    fn constant_groups_are_exactly_zero() {
        for size in [1, 3, 7, 8, 9, 64, 1000] {
            for scaling in [Scaling::Group, Scaling::Batch, Scaling::None] {
                let how = Normalisation { scaling, std_epsilon: 0.0, ..GRPO };
                assert_eq!(run(&vec![0.3; size], size, how).unwrap(), vec![0.0; size]);
            }
        }
        let negative = run(&[-0.3, -0.3], 2, GRPO).unwrap();
        assert!(negative.iter().all(|advantage| advantage.is_sign_positive()));
    }

    #[test]
    fn nan_is_left_out_and_gets_zero() {
        let advantages = run(&[1.0, f64::NAN, 3.0, f64::NAN, f64::NAN, 5.0], 3, GRPO).unwrap();
        let alone = run(&[1.0, 3.0], 2, GRPO).unwrap();
        assert_eq!(advantages, [alone[0], 0.0, alone[1], 0.0, 0.0, 0.0]);
        assert_eq!(run(&[f64::NAN; 4], 2, Normalisation { scaling: Scaling::Batch, ..GRPO }).unwrap(), [0.0; 4]);
    }

    #[test]
    fn leave_one_out_subtracts_the_mean_of_the_others() {
        let how = Normalisation { scaling: Scaling::None, baseline: Baseline::LeaveOneOut, ..GRPO };
        // 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
        assert_eq!(run(&[1.0, 2.0, 6.0], 3, how).unwrap(), [-3.0, -1.5, 4.5]);
    }

    #[test]
    fn batch_scaling_keeps_the_mean_of_the_group() {
        // Groups (0, 2) and (4, 6): batch mean 3, squares 9 + 1 + 1 + 9 = 20, ddof 0: sd = sqrt(5).
        let how = Normalisation { scaling: Scaling::Batch, ddof: 0, std_epsilon: 0.0, ..GRPO };
        let advantages = run(&[0.0, 2.0, 4.0, 6.0], 2, how).unwrap();
        let expected = 1.0 / 5f64.sqrt();
        let off = advantages.iter().zip([-expected, expected, -expected, expected]).map(|(a, b)| (a - b).abs());
        assert!(off.fold(0.0, f64::max) < 1e-15);
    }

    #[test]
    fn ddof_that_leaves_nothing_gives_zero() {
        assert_eq!(run(&[1.0, 2.0], 2, Normalisation { ddof: 2, ..GRPO }).unwrap(), [0.0, 0.0]);
        assert_eq!(run(&[1.0, 2.0], 1, GRPO).unwrap(), [0.0, 0.0]);
        assert_eq!(run(&[], 4, GRPO).unwrap(), Vec::<f64>::new());
    }

    #[test]
    fn refusals_name_argument_index_and_value() {
        let message = |result: Result<Vec<f64>, KernelError>| result.unwrap_err().to_string();
        assert_eq!(message(run(&[0.0, 1.0, f64::INFINITY, 0.0], 2, GRPO)), "rewards[2] is not finite: inf");
        assert_eq!(message(run(&[f64::NEG_INFINITY; 2], 2, GRPO)), "rewards[0] is not finite: -inf");
        assert_eq!(message(run(&[0.0; 10], 4, GRPO)), "rewards has 10 values, which group_size 4 does not divide");
        assert!(message(run(&[0.0; 10], 0, GRPO)).contains("group_size is 0"));
        assert!(message(run(&[1e308, -1e308], 2, GRPO)).contains("overflows"));
        assert!(
            message(run(&[0.0], 1, Normalisation { std_epsilon: f64::NAN, ..GRPO })).contains("std_epsilon is NaN")
        );
    }

    #[test]
    fn advantages_outside_f32_are_refused_and_those_at_its_edge_are_not() {
        let how = Normalisation { scaling: Scaling::None, ..GRPO };
        let mut out = [0f32; 3];
        assert!(group_advantages(&[f32::MAX, -f32::MAX, -f32::MAX], 3, &how, &mut out).is_err());
        group_advantages(&[f32::MAX, 0.0, 0.0], 3, &how, &mut out).unwrap();
        assert!(out.iter().all(|advantage| advantage.is_finite()) && out[0] > 2e38);
    }

    #[test]
    fn ragged_groups_agree_with_each_group_alone() {
        let rewards = [1.0, 2.0, 4.0, 8.0, 3.0, 3.5];
        let mut out = [f64::NAN; 6];
        ragged_group_advantages(&rewards, &[0, 4, 4, 6], &GRPO, &mut out).unwrap();
        assert_eq!(out[..4], run(&rewards[..4], 4, GRPO).unwrap());
        assert_eq!(out[4..], run(&rewards[4..], 2, GRPO).unwrap());
    }
}
