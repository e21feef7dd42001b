//! Upper bounds of absolute values: 32 bits and an exponent, always rounded up (down where the name says so).

use dashu_int::IBig;
use dashu_int::ops::{BitTest, UnsignedAbs};

/// `mantissa · 2^exponent`, with a mantissa of 0 or of exactly 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Magnitude {
    mantissa: u64,
    exponent: i64,
}

impl Magnitude {
    /// Zero.
    pub const ZERO: Self = Self { mantissa: 0, exponent: 0 };

    /// At least `mantissa · 2^exponent`.
    #[must_use]
    pub fn new(mantissa: u64, exponent: i64) -> Self {
        Self::up(u128::from(mantissa), exponent)
    }

    fn up(mantissa: u128, exponent: i64) -> Self {
        if mantissa == 0 {
            return Self::ZERO;
        }
        let bits = i64::from(128 - mantissa.leading_zeros());
        let shift = bits - 32;
        if shift <= 0 {
            return Self { mantissa: (mantissa << -shift) as u64, exponent: exponent.saturating_add(shift) };
        }
        let cut = (mantissa >> shift) as u64;
        let inexact = u64::from((u128::from(cut) << shift) != mantissa);
        let exponent = exponent.saturating_add(shift);
        // A carry out of 32 bits leaves a one and zeros.
        if cut + inexact == 1 << 32 {
            Self { mantissa: 1 << 31, exponent: exponent + 1 }
        } else {
            Self { mantissa: cut + inexact, exponent }
        }
    }

    /// An upper bound of `|mantissa · 2^exponent|`.
    #[must_use]
    pub fn above(mantissa: &IBig, exponent: i64) -> Self {
        Self::head(mantissa, exponent, 1)
    }

    /// A lower bound of `|mantissa · 2^exponent|`.
    #[must_use]
    pub fn below(mantissa: &IBig, exponent: i64) -> Self {
        Self::head(mantissa, exponent, 0)
    }

    fn head(mantissa: &IBig, exponent: i64, step: u64) -> Self {
        let excess = mantissa.bit_len().saturating_sub(32);
        if excess == 0 {
            return Self::new(u64::try_from(mantissa.clone().unsigned_abs()).unwrap_or(0), exponent);
        }
        let head = u64::try_from((mantissa >> excess).unsigned_abs()).unwrap_or(0);
        // The shift of a negative number rounds its absolute value up.
        let head = if step == 0 && *mantissa < IBig::ZERO { head - 1 } else { head + step };
        Self::new(head, exponent.saturating_add(excess as i64))
    }

    /// Whether this is zero.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.mantissa == 0
    }

    /// The exponent of the leading bit: the value is below `2^top`.
    #[must_use]
    pub fn top(self) -> i64 {
        if self.mantissa == 0 { i64::MIN / 2 } else { self.exponent + 32 }
    }

    pub(super) fn exponent(self) -> i64 {
        self.exponent
    }

    /// A lower bound of `self − other`, where it is positive.
    #[must_use]
    pub fn minus(self, other: Self) -> Option<Self> {
        if other.is_zero() {
            return (!self.is_zero()).then_some(self);
        }
        if self <= other {
            return None;
        }
        // 64 more bits, and one unit off for what the alignment cuts.
        let gap = self.exponent - other.exponent;
        let large = u128::from(self.mantissa) << 64;
        let small = u128::from(other.mantissa) << 64;
        let small = if gap >= 0 {
            if gap < 127 { (small >> gap) + 1 } else { 1 }
        } else {
            small.checked_mul(1u128.checked_shl(u32::try_from(-gap).ok()?)?)?
        };
        let rest = large.checked_sub(small)?;
        let bits = i64::from(128 - rest.leading_zeros());
        if bits == 0 {
            return None;
        }
        let shift = bits - 32;
        let mantissa = if shift >= 0 { rest >> shift } else { rest << -shift };
        Some(Self { mantissa: mantissa as u64, exponent: self.exponent - 64 + shift })
    }

    /// An upper bound of `self / other`; `other` is a lower bound and not zero.
    #[must_use]
    pub fn over(self, other: Self) -> Self {
        if self.is_zero() || other.is_zero() {
            return Self::ZERO;
        }
        let quotient = (u128::from(self.mantissa) << 64) / u128::from(other.mantissa) + 1;
        Self::up(quotient, self.exponent.saturating_sub(other.exponent).saturating_sub(64))
    }

    /// An upper bound of the root.
    #[must_use]
    pub fn root(self, degree: u32) -> Self {
        if self.is_zero() || degree == 0 {
            return Self::ZERO;
        }
        // 2^⌈top/degree⌉ is enough.
        let n = i64::from(degree);
        Self::new(1, (self.top() + n - 1).div_euclid(n))
    }

    /// The least integer that is at least `self · 2^shift`.
    pub(super) fn scaled_up(self, shift: usize) -> Option<IBig> {
        let exponent = self.exponent.checked_add(i64::try_from(shift).ok()?)?;
        let mantissa = IBig::from(self.mantissa);
        if exponent >= 0 {
            return (exponent < 1 << 20).then(|| mantissa << exponent as usize);
        }
        Some((mantissa >> exponent.unsigned_abs().min(64) as usize) + IBig::ONE)
    }

    /// As a float, for tests and guesses.
    #[must_use]
    pub fn approximate(self) -> f64 {
        self.mantissa as f64 * 2f64.powi(self.exponent.clamp(-2000, 2000) as i32)
    }
}

impl PartialOrd for Magnitude {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Magnitude {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.top(), self.mantissa).cmp(&(other.top(), other.mantissa))
    }
}

impl std::ops::Add for Magnitude {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        let (large, small) = if self.exponent >= other.exponent { (self, other) } else { (other, self) };
        if large.is_zero() {
            return small;
        }
        if small.is_zero() {
            return large;
        }
        let gap = large.exponent.saturating_sub(small.exponent);
        if gap > 64 {
            return Self::up((u128::from(large.mantissa) << 32) + 1, large.exponent - 32);
        }
        Self::up((u128::from(large.mantissa) << gap) + u128::from(small.mantissa), small.exponent)
    }
}

impl std::ops::Mul for Magnitude {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        Self::up(u128::from(self.mantissa) * u128::from(other.mantissa), self.exponent.saturating_add(other.exponent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_goes_up() {
        let third = Magnitude::new(1, 0).over(Magnitude::new(3, 0));
        assert!(third.approximate() >= 1.0 / 3.0 && third.approximate() < 0.333_333_334);
        let sum = Magnitude::new(1, 0) + Magnitude::new(1, -100);
        assert!(sum > Magnitude::new(1, 0));
        assert_eq!(Magnitude::new(3, 5) * Magnitude::new(5, -7), Magnitude::new(15, -2));
        assert_eq!(Magnitude::new(u64::from(u32::MAX), 0) + Magnitude::new(1, -1), Magnitude::new(1, 32));
        assert!(Magnitude::new(10, 0).root(3).approximate() >= 2.154);
    }

    #[test]
    fn differences_go_down() {
        let rest = Magnitude::new(5, 0).minus(Magnitude::new(3, 0)).unwrap();
        assert!(rest.approximate() <= 2.0 && rest.approximate() > 1.999_999);
        assert_eq!(Magnitude::new(3, 0).minus(Magnitude::new(3, 0)), None);
        assert_eq!(Magnitude::new(3, 0).minus(Magnitude::new(5, 0)), None);
        let near = Magnitude::new(1, 100).minus(Magnitude::new(1, -100)).unwrap();
        assert!(near < Magnitude::new(1, 100) && near > Magnitude::new(1, 99));
    }

    #[test]
    fn heads_of_long_mantissas() {
        let long = (IBig::from(1) << 100) + IBig::ONE;
        for value in [long.clone(), -long] {
            assert!(Magnitude::above(&value, 0) > Magnitude::new(1, 100));
            assert!(Magnitude::below(&value, 0) <= Magnitude::new(1, 100));
        }
        let odd = IBig::from(-5);
        assert_eq!(Magnitude::above(&odd, 0), Magnitude::below(&odd, 0));
    }
}
