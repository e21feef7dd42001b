//! The two types of a reward.

/// A reward's type: `f32` or `f64`.
pub trait Real: Copy + PartialOrd + Default + Send + Sync + Into<f64> {
    /// Bound for a squared advantage in `f64`: the root of a smaller square fits this type.
    const SAFE_SQUARE: f64;

    /// Round to this type.
    fn from_f64(value: f64) -> Self;
}

impl Real for f32 {
    const SAFE_SQUARE: f64 = 1e76;

    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Real for f64 {
    const SAFE_SQUARE: f64 = 1e300;

    fn from_f64(value: f64) -> Self {
        value
    }
}

/// Whether `value` is NaN.
#[allow(clippy::eq_op)]
pub(super) fn is_nan<T: Real>(value: T) -> bool {
    value != value
}
