//! The order of two constants, and whether one is the other one rounded.

use std::cmp::Ordering;

use super::super::ball::Context;
use super::super::fuel::Fuel;
use super::evaluate::{Evaluator, Point};
use super::identity::{BITS, compare};
use super::{Class, Part};
use crate::equality::Equality;

/// Whether two constants are real and as near as a number and what it is rounded to: within `share` of the larger. True
/// where that cannot be told, or one has letters.
#[must_use]
pub fn is_near(left: Part<'_>, right: Part<'_>, share: f64, fuel: &Fuel) -> bool {
    if (left.0.class(left.1) | right.0.class(right.1)).has(Class::SYMBOL) {
        return true;
    }
    let point = Point { seed: 0, range: 0, natural: false };
    let context = Context { bits: BITS[0], fuel };
    let value = |part: Part<'_>| Evaluator::new(part.0, point, context).value(part.1);
    let (Ok(a), Ok(b)) = (value(left), value(right)) else { return true };
    if !a.is_real() || !b.is_real() {
        return compare(left, right, fuel) != Equality::Different;
    }
    let (a, b) = (a.re.approximate(), b.re.approximate());
    !(a.is_finite() && b.is_finite()) || (a - b).abs() <= share * a.abs().max(b.abs())
}

/// The order of two real constants; none when it cannot be told, or one is not real.
#[must_use]
pub fn order(left: Part<'_>, right: Part<'_>, fuel: &Fuel) -> Option<Ordering> {
    if let (Some(left), Some(right)) = (left.0.as_rational(left.1), right.0.as_rational(right.1)) {
        return Some(left.cmp(right));
    }
    if (left.0.class(left.1) | right.0.class(right.1)).has(Class::SYMBOL) {
        return (left.0.residue(left.1) == right.0.residue(right.1)).then_some(Ordering::Equal);
    }
    if compare(left, right, fuel) == Equality::Equal {
        return Some(Ordering::Equal);
    }
    let point = Point { seed: 0, range: 0, natural: false };
    for bits in BITS {
        let context = Context { bits, fuel };
        let left = Evaluator::new(left.0, point, context).value(left.1).ok()?;
        let right = Evaluator::new(right.0, point, context).value(right.1).ok()?;
        if !left.is_real() || !right.is_real() {
            return None;
        }
        match left.re.minus(&right.re, context).ok()?.sign() {
            Some(sign) => return Some(sign.cmp(&0)),
            None => continue,
        }
    }
    None
}
