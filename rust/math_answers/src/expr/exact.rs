//! Functions of rationals whose value is rational by definition.

use dashu_int::ops::{Abs, BitTest, Gcd, UnsignedAbs};
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::super::fuel::{Fuel, Stop};
use super::MOST_BITS;
use super::op::Op;

/// The exact value of a function of rationals, where it is rational by definition.
pub(super) fn exact(op: Op, numbers: &[RBig], fuel: &Fuel) -> Result<Option<RBig>, Stop> {
    let [first, ..] = numbers else { return Ok(None) };
    fuel.spend(numbers.iter().map(|n| 4 + (n.numerator().bit_len() + n.denominator().bit_len()) as u64 / 32).sum())?;
    let zero_only = |value: RBig| first.is_zero().then_some(value);
    Ok(match op {
        Op::Sin | Op::Arcsin | Op::Arctan => zero_only(RBig::ZERO),
        Op::Cos => zero_only(RBig::ONE),
        Op::Abs => Some(first.clone().abs()),
        Op::Floor => Some(RBig::from(first.floor())),
        Op::Ceil => Some(RBig::from(first.ceil())),
        Op::Sign => Some(RBig::from(first.numerator().signum())),
        Op::Max => numbers.iter().max().cloned(),
        Op::Min => numbers.iter().min().cloned(),
        Op::Gcd | Op::Lcm => {
            if !numbers.iter().all(|n| n.denominator().is_one()) {
                return Err(Stop::Undefined);
            }
            let mut result = first.numerator().clone().unsigned_abs();
            for number in &numbers[1..] {
                let other = number.numerator().clone().unsigned_abs();
                fuel.spend(40 + 4 * Fuel::product(result.bit_len(), other.bit_len()))?;
                if result.is_zero() || other.is_zero() {
                    result = if op == Op::Lcm { dashu_int::UBig::ZERO } else { result + other };
                    continue;
                }
                let divisor = (&result).gcd(&other);
                if op == Op::Gcd {
                    result = divisor;
                } else {
                    if result.bit_len() + other.bit_len() > MOST_BITS {
                        return Err(Stop::Fuel);
                    }
                    result = result * other / divisor;
                }
            }
            Some(RBig::from(result))
        }
        Op::Re | Op::Conj => Some(first.clone()),
        Op::Im => Some(RBig::ZERO),
        Op::Factorial => factorial(first, 1, fuel)?,
        Op::DoubleFactorial => factorial(first, 2, fuel)?,
        Op::Arccos | Op::Ln | Op::Arg => None,
    })
}

/// n (n − step) (n − 2·step) … where it has at most [`MOST_BITS`].
fn factorial(n: &RBig, step: u32, fuel: &Fuel) -> Result<Option<RBig>, Stop> {
    if !n.denominator().is_one() {
        return Err(Stop::Fuel);
    }
    if n.numerator() < &IBig::ZERO {
        return Err(Stop::Undefined);
    }
    let Some(n) = u32::try_from(n.numerator()).ok().filter(|n| *n < 10_000) else { return Ok(None) };
    let length = (n.max(1).ilog2() as usize + 1) * (n / step) as usize;
    if length > MOST_BITS {
        return Ok(None);
    }
    Ok(Some(RBig::from(product_down(n, n.div_ceil(step), step, fuel)?)))
}

/// `n (n − step) (n − 2 step) …`, `count` factors of at least 1: a word of factors at a time, so that there are few long
/// products.
pub(super) fn product_down(n: u32, count: u32, step: u32, fuel: &Fuel) -> Result<UBig, Stop> {
    let mut product = UBig::ONE;
    let mut chunk = 1u64;
    for place in 0..count {
        let factor = u64::from(n.saturating_sub(place.saturating_mul(step)).max(1));
        match chunk.checked_mul(factor) {
            Some(more) => chunk = more,
            None => {
                fuel.spend(4 + product.bit_len() as u64 / 256)?;
                product *= chunk;
                chunk = factor;
            }
        }
    }
    Ok(product * chunk)
}
