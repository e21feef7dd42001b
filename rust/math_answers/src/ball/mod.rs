//! Ball arithmetic: a number known to lie within a radius of a dyadic midpoint, with every rounding error counted.
//!
//! The midpoint is `mantissa · 2^exponent` on big integers, so that tiny and huge values keep their relative precision;
//! the radius is an upper bound of 32 bits. A result's ball holds the exact result for every choice of operands in
//! their balls (the inclusion property; cf. Johansson, "Arb", IEEE Trans. Comput. 66, 2017, for the layout).

mod arithmetic;
pub mod complex;
mod constants;
mod elementary;
mod magnitude;

use dashu_int::IBig;
use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

pub use complex::Complex;
pub use magnitude::Magnitude;

use super::fuel::{Fuel, Stop};

/// Exponents beyond this are not computed with: such numbers are [`Stop::Huge`], or a ball around zero.
const MOST_EXPONENT: i64 = 1 << 40;

/// A real number within `radius` of `mantissa · 2^exponent`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ball {
    mantissa: IBig,
    exponent: i64,
    radius: Magnitude,
}

/// A precision in bits and the budget that pays for it.
#[derive(Debug, Clone, Copy)]
pub struct Context<'f> {
    /// Bits of the mantissas.
    pub bits: usize,
    /// What pays.
    pub fuel: &'f Fuel,
}

impl Context<'_> {
    fn add_cost(&self) -> Result<(), Stop> {
        self.fuel.spend(6 + self.bits as u64 / 128)
    }

    /// Fitted to roots of degree 2, 3 and 17 at 96 to 1600 bits: division on degree times as many bits.
    fn root_cost(&self, degree: u32) -> Result<(), Stop> {
        let bits = self.bits as u64;
        if degree == 2 {
            return self.fuel.spend(16 + bits / 16);
        }
        let length = bits * u64::from(degree);
        self.fuel.spend(80 + length / 5 + (length / 64).pow(2) / 4)
    }

    fn product_cost(&self) -> Result<(), Stop> {
        self.fuel.spend(6 + Fuel::product(self.bits, self.bits))
    }
}

impl Ball {
    /// Zero, exactly.
    pub const ZERO: Self = Self { mantissa: IBig::ZERO, exponent: 0, radius: Magnitude::ZERO };

    /// An integer, exactly.
    #[must_use]
    pub fn integer(value: i64) -> Self {
        Self { mantissa: IBig::from(value), exponent: 0, radius: Magnitude::ZERO }
    }

    /// `mantissa · 2^exponent`, exactly.
    #[must_use]
    pub fn dyadic(mantissa: IBig, exponent: i64) -> Self {
        Self { mantissa, exponent, radius: Magnitude::ZERO }
    }

    /// Anything of an absolute value up to `radius`.
    #[must_use]
    pub fn around_zero(radius: Magnitude) -> Self {
        Self { mantissa: IBig::ZERO, exponent: 0, radius }
    }

    /// The integer `scaled / 2^bits`, known to `ulps` units in its last place.
    fn fixed(scaled: IBig, bits: usize, ulps: u64) -> Self {
        let exponent = -(bits as i64);
        Self { mantissa: scaled, exponent, radius: Magnitude::new(ulps, exponent) }
    }

    /// The nearest ball to a rational.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn rational(value: &RBig, context: Context<'_>) -> Result<Self, Stop> {
        context.product_cost()?;
        let (top, bottom) = (value.numerator(), value.denominator());
        if bottom.is_one() {
            return Self::dyadic(top.clone(), 0).rounded(context);
        }
        context.fuel.spend(Fuel::product(top.bit_len() + context.bits, bottom.bit_len()))?;
        let shift = context.bits as i64 + bottom.bit_len() as i64 - top.bit_len() as i64 + 2;
        let scaled = if shift >= 0 { top << shift as usize } else { top.clone() };
        let divisor = IBig::from(bottom.clone());
        let divisor = if shift < 0 { divisor << shift.unsigned_abs() as usize } else { divisor };
        let quotient = scaled / divisor;
        let ball = Self { mantissa: quotient, exponent: -shift, radius: Magnitude::new(1, -shift) };
        ball.rounded(context)
    }

    /// Exactly zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.mantissa.is_zero() && self.radius.is_zero()
    }

    /// Whether zero is inside.
    #[must_use]
    pub fn contains_zero(&self) -> bool {
        self.mantissa.is_zero() || self.lower().is_none()
    }

    /// The sign, where all of the ball has one: −1, 0 (exactly zero) or 1.
    #[must_use]
    pub fn sign(&self) -> Option<i32> {
        if self.is_zero() {
            return Some(0);
        }
        if self.contains_zero() {
            return None;
        }
        Some(if self.mantissa < IBig::ZERO { -1 } else { 1 })
    }

    /// How wide the ball is.
    #[must_use]
    pub fn radius(&self) -> Magnitude {
        self.radius
    }

    /// The position of the midpoint's leading bit: |midpoint| < 2^top.
    #[must_use]
    pub fn top(&self) -> i64 {
        if self.mantissa.is_zero() { i64::MIN / 2 } else { self.mantissa.bit_len() as i64 + self.exponent }
    }

    /// An upper bound of the absolute value.
    #[must_use]
    pub fn upper(&self) -> Magnitude {
        Magnitude::above(&self.mantissa, self.exponent) + self.radius
    }

    /// A positive lower bound of the absolute value, where there is one.
    #[must_use]
    pub fn lower(&self) -> Option<Magnitude> {
        Magnitude::below(&self.mantissa, self.exponent).minus(self.radius)
    }

    /// The same with more uncertainty.
    #[must_use]
    pub fn widened(mut self, by: Magnitude) -> Self {
        self.radius = self.radius + by;
        self
    }

    /// The midpoint, without its radius.
    #[must_use]
    pub fn midpoint(&self) -> Self {
        Self { radius: Magnitude::ZERO, ..self.clone() }
    }

    /// The mantissa cut to the precision, and the exponent checked.
    fn rounded(mut self, context: Context<'_>) -> Result<Self, Stop> {
        let excess = self.mantissa.bit_len().saturating_sub(context.bits);
        if excess > 0 {
            self.mantissa >>= excess;
            self.exponent = self.exponent.saturating_add(excess as i64);
            self.radius = self.radius + Magnitude::new(1, self.exponent);
        }
        if self.mantissa.is_zero() {
            self.exponent = 0;
        }
        if self.exponent.abs() > MOST_EXPONENT {
            if self.exponent < 0 {
                return Ok(Self::around_zero(self.upper()));
            }
            let huge = Stop::Huge { negative: self.mantissa < IBig::ZERO };
            return Err(if self.contains_zero() { Stop::Fuel } else { huge });
        }
        if self.radius.exponent() > 2 * MOST_EXPONENT {
            return Err(Stop::Fuel);
        }
        Ok(self)
    }

    /// Whether the ball lies below the other one (−1), above (1), or the two meet (0).
    #[must_use]
    pub fn against(&self, other: &Self, context: Context<'_>) -> i32 {
        self.minus(other, context).ok().and_then(|difference| difference.sign()).unwrap_or(0)
    }

    /// The one integer inside, or between, the ball's ends where the floor of all of it is the same.
    #[must_use]
    pub fn floor(&self) -> Option<IBig> {
        if self.exponent > 0 && !self.radius.is_zero() || self.exponent > 1 << 16 {
            return None;
        }
        let (low, high) = self.ends()?;
        (low == high).then_some(low)
    }

    /// Floors of both ends.
    fn ends(&self) -> Option<(IBig, IBig)> {
        if self.exponent >= 0 {
            let value = &self.mantissa << self.exponent as usize;
            return self.radius.is_zero().then(|| (value.clone(), value));
        }
        let shift = self.exponent.unsigned_abs() as usize;
        if shift > 1 << 16 || self.radius.exponent() > 64 {
            return None;
        }
        let radius = self.radius.scaled_up(shift)?;
        Some(((&self.mantissa - &radius) >> shift, (&self.mantissa + &radius) >> shift))
    }

    /// The midpoint as a float, for guesses only.
    #[must_use]
    pub fn approximate(&self) -> f64 {
        let excess = self.mantissa.bit_len().saturating_sub(64);
        let head = (&self.mantissa >> excess).to_f64().value();
        head * 2f64.powi((self.exponent + excess as i64).clamp(-2000, 2000) as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn with<T>(bits: usize, f: impl FnOnce(Context<'_>) -> T) -> T {
        let fuel = Fuel::new(u64::MAX);
        f(Context { bits, fuel: &fuel })
    }

    #[test]
    fn rationals_are_enclosed() {
        with(128, |context| {
            let third = Ball::rational(&RBig::from_parts_signed(1.into(), 3u8.into()), context).unwrap();
            let back = third.times(&Ball::integer(3), context).unwrap().minus(&Ball::integer(1), context).unwrap();
            assert!(back.contains_zero());
            assert!(!back.is_zero());
            assert!(back.upper() < Magnitude::new(1, -120));
            assert!(!third.contains_zero());
        });
    }

    #[test]
    fn tiny_and_huge_do_not_mix() {
        with(128, |context| {
            let tiny = Ball::dyadic(IBig::from(3), -1_000_000_000);
            let sum = Ball::integer(1).plus(&tiny, context).unwrap();
            let rest = sum.minus(&Ball::integer(1), context).unwrap();
            assert!(rest.contains_zero() && rest.upper() >= Magnitude::new(3, -1_000_000_000));
            assert_eq!(tiny.sign(), Some(1));
            assert!(Ball::dyadic(IBig::from(1), MOST_EXPONENT).times(&Ball::dyadic(1.into(), 9), context).is_err());
        });
    }

    #[test]
    fn roots_square_back() {
        for bits in [64, 128, 300] {
            with(bits, |context| {
                for degree in [2u32, 3, 7] {
                    for value in [2i64, 3, 10, 1 << 40] {
                        let root = Ball::integer(value).root(degree, context).unwrap();
                        let back = root.power(i64::from(degree), context).unwrap();
                        let rest = back.minus(&Ball::integer(value), context).unwrap();
                        assert!(rest.contains_zero(), "{value}^(1/{degree}) at {bits}");
                        assert!(rest.upper() < Magnitude::new(1, 60 - bits as i64));
                    }
                }
                assert_eq!(Ball::integer(-2).sqrt(context), Err(Stop::Undefined));
                assert!(
                    Ball::integer(4).sqrt(context).unwrap().minus(&Ball::integer(2), context).unwrap().contains_zero()
                );
            });
        }
    }

    #[test]
    fn an_uncertain_operand_widens_the_result() {
        with(128, |context| {
            let x = Ball::integer(4).widened(Magnitude::new(1, -10));
            for (result, ends) in [
                (x.times(&x, context), [4097.0 / 1024.0 * 4097.0 / 1024.0, 4095.0 / 1024.0 * 4095.0 / 1024.0]),
                (x.inverse(context), [1024.0 / 4097.0, 1024.0 / 4095.0]),
                (x.sqrt(context), [(4097f64 / 1024.0).sqrt(), (4095f64 / 1024.0).sqrt()]),
            ] {
                let result = result.unwrap();
                for end in ends {
                    let gap = (end - result.approximate()).abs();
                    assert!(gap <= result.radius().approximate() * (1.0 + 1e-9) + 1e-15, "{end}");
                }
            }
            let wide = Ball::integer(1).widened(Magnitude::new(2, 0));
            assert_eq!(Ball::integer(1).over(&wide, context), Err(Stop::Imprecise));
            assert!(wide.sqrt(context).unwrap().contains_zero());
        });
    }

    #[test]
    fn floors_need_certainty() {
        assert_eq!(Ball::dyadic(IBig::from(-3), -1).floor(), Some(IBig::from(-2)));
        assert_eq!(Ball::dyadic(IBig::from(3), 1).floor(), Some(IBig::from(6)));
        assert_eq!(Ball::integer(2).widened(Magnitude::new(1, -90)).floor(), None);
        let two_and_half = Ball::dyadic(IBig::from(5u64) << 99, -100).widened(Magnitude::new(1, -90));
        assert_eq!(two_and_half.floor(), Some(IBig::from(2)));
    }
}
