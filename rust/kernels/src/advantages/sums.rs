//! Sums over rewards: vectorised, with the same order of additions on every machine.
//!
//! Value `i` of a slice is added to lane `i % 8`; the eight lanes are then added in a fixed order. The values 1 to 10,
//! for example, fill the lanes with `1 + 9, 2 + 10, 3, 4, 5, 6, 7, 8`, and the sum is
//! `((10 + 5) + (12 + 6)) + ((3 + 7) + (4 + 8)) = 55`.

use super::real::Real;

/// Accumulators of a sum; a fixed number, because the number decides the order of additions.
const LANES: usize = 8;

/// Whether all values equal `first`. No early exit: the loop vectorises and no branch depends on the values.
#[inline(always)]
pub(super) fn all_equal<T: Real>(values: &[T], first: T) -> bool {
    let mut differs = [false; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            differs[lane] |= chunk[lane] != first;
        }
    }
    differs == [false; LANES] && chunks.remainder().iter().all(|&value| value == first)
}

/// Sum in `f64`.
#[inline(always)]
pub(super) fn sum<T: Real>(values: &[T]) -> f64 {
    let mut sums = [0.0; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane].into();
        }
    }
    for (lane, &value) in chunks.remainder().iter().enumerate() {
        sums[lane] += value.into();
    }
    combine(sums)
}

/// Sum of squared deviations from `mean`, in `f64`.
#[inline(always)]
pub(super) fn sum_of_squares<T: Real>(values: &[T], mean: f64) -> f64 {
    let mut sums = [0.0; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            let deviation = chunk[lane].into() - mean;
            sums[lane] += deviation * deviation;
        }
    }
    for (lane, &value) in chunks.remainder().iter().enumerate() {
        let deviation = value.into() - mean;
        sums[lane] += deviation * deviation;
    }
    combine(sums)
}

/// Add the lanes in a fixed order.
#[inline(always)]
fn combine(lanes: [f64; LANES]) -> f64 {
    ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))
}
