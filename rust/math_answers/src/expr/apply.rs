//! Functions of balls that the evaluator applies: rational powers, arcsines, factorials, common divisors.

use dashu_int::IBig;
use dashu_int::ops::{Gcd, UnsignedAbs};
use dashu_ratio::RBig;

use super::super::ball::{Ball, Complex, Context, Magnitude};
use super::super::fuel::Stop;
use super::Op;

/// Roots of a higher degree are taken through logarithms.
const MOST_DEGREE: u32 = 64;

pub(super) fn whole(value: &IBig, context: Context<'_>) -> Result<Ball, Stop> {
    Ball::rational(&RBig::from(value.clone()), context)
}

/// Some ball with both inside.
pub(super) fn meet(a: &Ball, b: &Ball) -> Ball {
    let apart = Magnitude::new(2, 0) * (a.radius() + b.radius());
    a.clone().widened(apart)
}

pub(super) fn exact_integer(value: &Ball, n: &IBig, context: Context<'_>) -> bool {
    let wide = Context { bits: context.bits + 64, ..context };
    whole(n, wide).and_then(|n| value.minus(&n, wide)).is_ok_and(|gap| gap.is_zero())
}

/// The integer that a ball is exactly.
pub(super) fn integer(value: &Complex, context: Context<'_>) -> Option<IBig> {
    let n = value.re.floor().filter(|_| value.is_real())?;
    exact_integer(&value.re, &n, context).then_some(n)
}

pub(super) fn common(op: Op, numbers: &[IBig]) -> Option<IBig> {
    let mut result = numbers.first()?.clone().unsigned_abs();
    for number in &numbers[1..] {
        let other = number.clone().unsigned_abs();
        if result.is_zero() || other.is_zero() {
            return None;
        }
        let divisor = (&result).gcd(&other);
        result = if op == Op::Gcd { divisor } else { result * other / divisor };
    }
    Some(IBig::from(result))
}

pub(super) fn rational_power(base: &Complex, r: &RBig, context: Context<'_>) -> Result<Complex, Stop> {
    let n = i64::try_from(r.numerator()).map_err(|_| Stop::Fuel)?;
    if base.is_zero() {
        return if n > 0 { Ok(base.clone()) } else { Err(Stop::Undefined) };
    }
    let degree = u32::try_from(r.denominator()).ok().filter(|degree| *degree <= MOST_DEGREE);
    match degree {
        Some(1) if n.unsigned_abs() < 1 << 40 => base.power(n, context),
        Some(2) => base.sqrt(context)?.power(n, context),
        Some(degree) if degree > 1 && base.is_real() => match base.re.sign() {
            Some(-1) if degree % 2 == 1 => {
                let root = base.re.clone().negated().root(degree, context)?.negated();
                Ok(root.power(n, context)?.into())
            }
            None if degree % 2 == 1 && n > 0 => Ok(base.re.root(degree, context)?.power(n, context)?.into()),
            Some(1) => Ok(base.re.root(degree, context)?.power(n, context)?.into()),
            _ => by_logarithm(base, r, context),
        },
        _ => by_logarithm(base, r, context),
    }
}

pub(super) fn by_logarithm(base: &Complex, r: &RBig, context: Context<'_>) -> Result<Complex, Stop> {
    let exponent = Ball::rational(r, context)?;
    base.ln(context)?.times(&exponent.into(), context)?.exp(context)
}

/// arcsin x = arctan x / √(1 − x²).
pub(super) fn arcsine(x: &Ball, context: Context<'_>) -> Result<Ball, Stop> {
    let one = Ball::integer(1);
    let square = one.minus(x, context)?.times(&one.plus(x, context)?, context)?;
    if square.is_zero() {
        let quarter = Ball::pi(context)?.times(&Ball::dyadic(IBig::ONE, -1), context)?;
        return Ok(if x.sign() == Some(1) { quarter } else { quarter.negated() });
    }
    match square.sign() {
        Some(1) => x.over(&square.sqrt(context)?, context)?.arctan(context),
        Some(_) => Err(Stop::Undefined),
        None => Err(Stop::Imprecise),
    }
}

/// n! of a natural number; of a large one by Robbins 1955: √(2πn) (n/e)^n e^d with 1/(12n + 1) < d < 1/(12n).
pub(super) fn factorial(x: &Complex, step: u32, context: Context<'_>) -> Result<Ball, Stop> {
    let n = integer(x, context).ok_or(Stop::Undefined)?;
    if n < IBig::ZERO {
        return Err(Stop::Undefined);
    }
    if let Some(small) = u32::try_from(&n).ok().filter(|n| *n <= 1000) {
        let mut product = Ball::integer(1);
        let mut k = small;
        while k > 1 {
            product = product.times(&Ball::integer(i64::from(k)), context)?;
            k = k.saturating_sub(step);
        }
        return Ok(product);
    }
    if step != 1 {
        return Err(Stop::Fuel);
    }
    let n = whole(&n, context)?;
    let turn = Ball::pi(context)?.times(&Ball::integer(2), context)?;
    let twelve = n.times(&Ball::integer(12), context)?;
    let least = Magnitude::new(1, 0).over(twelve.lower().ok_or(Stop::Imprecise)?);
    let root = turn.times(&n, context)?.sqrt(context)?;
    // d lies between 0 and 1/(12n).
    let exponent = n.ln(context)?.minus(&Ball::integer(1), context)?.times(&n, context)?.widened(least);
    root.times(&exponent.exp(context)?, context)
}
