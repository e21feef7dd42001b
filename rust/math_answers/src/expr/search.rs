//! A search for points where two functions of letters differ, with floats: many points for the price of one in balls.
//!
//! What is found here proves nothing: balls have the last word. Another branch of a root, a logarithm or an inverse
//! function differs by far more than floats round.

use std::collections::HashSet;

use super::super::fuel::Fuel;
use super::evaluate::{Point, WIDE};
use super::{Exprs, Id, Kind, Op, Part};

/// Points that are tried, where the budget has that many.
const MOST_POINTS: u64 = 128;
/// Points that are worth a second look.
const MOST_FOUND: usize = 3;

/// Points at which the gold seems to be real, and the answer to be not, or another number.
pub(super) fn suspects(gold: Part<'_>, answer: Part<'_>, seed: u64, fuel: &Fuel) -> Vec<Point> {
    let orders = [order(gold), order(answer)];
    let cost = 20 + 4 * (orders[0].len() + orders[1].len()) as u64;
    let points = MOST_POINTS.min(fuel.left() / 4 / cost);
    let mut found = Vec::new();
    if fuel.spend(points * cost).is_err() {
        return found;
    }
    let mut known = [vec![f64::NAN; gold.0.len()], vec![f64::NAN; answer.0.len()]];
    for range in 0..points as u32 {
        let point = Point { seed, range: WIDE + range, natural: false };
        let left = value(gold.0, &orders[0], point, &mut known[0]);
        let right = value(answer.0, &orders[1], point, &mut known[1]);
        let unreal = left.is_finite() && right.is_nan();
        if unreal || (left - right).abs() > 1e-6 * (left.abs() + right.abs()) + 1e-12 {
            found.push(point);
            if found.len() == MOST_FOUND {
                break;
            }
        }
    }
    found
}

/// The nodes of an expression, operands first.
fn order((exprs, id): Part<'_>) -> Vec<Id> {
    let mut order = Vec::new();
    let mut done = HashSet::new();
    let mut stack = vec![(id, false)];
    while let Some((id, entered)) = stack.pop() {
        if entered {
            order.push(id);
        } else if done.insert(id) {
            stack.push((id, true));
            exprs.operands(id, |operand| stack.push((operand, false)));
        }
    }
    order
}

/// The value of the last node; no number where a part is not real. `known` has a place for each node of the arena.
fn value(exprs: &Exprs, order: &[Id], point: Point, known: &mut [f64]) -> f64 {
    let mut last = f64::NAN;
    for id in order {
        let of = |id: &Id| known[id.0 as usize];
        last = match exprs.kind(*id) {
            Kind::Rational(value) => value.to_f64().value(),
            Kind::Pi => std::f64::consts::PI,
            Kind::E => std::f64::consts::E,
            Kind::Symbol(letter) => point.value(*letter).approximate(),
            Kind::Sum(items) => items.iter().map(of).sum(),
            Kind::Product(items) => items.iter().map(of).product(),
            Kind::Power(base, exponent) => power(exprs, of(base), *exponent, of(exponent)),
            Kind::Function(op, arguments) => {
                let x = arguments.first().map_or(f64::NAN, of);
                match op {
                    Op::Sin => x.sin(),
                    Op::Cos => x.cos(),
                    Op::Arcsin => x.asin(),
                    Op::Arccos => x.acos(),
                    Op::Arctan => x.atan(),
                    Op::Ln => x.ln(),
                    Op::Abs => x.abs(),
                    Op::Floor => x.floor(),
                    Op::Ceil => x.ceil(),
                    Op::Re | Op::Conj => x,
                    Op::Max => arguments.iter().map(of).fold(x, |a, b| if a >= b { a } else { b }),
                    Op::Min => arguments.iter().map(of).fold(x, |a, b| if a <= b { a } else { b }),
                    _ => f64::NAN,
                }
            }
            Kind::I | Kind::Range(_) => f64::NAN,
        };
        known[id.0 as usize] = last;
    }
    last
}

fn power(exprs: &Exprs, base: f64, exponent: Id, value: f64) -> f64 {
    let odd = |n: u64| n % 2 == 1;
    match exprs.as_rational(exponent) {
        // Real odd roots of negative numbers, as everywhere here.
        Some(r) if base < 0.0 => {
            let low = |word: &dashu_int::UBig| (word % 2u64) & 1;
            let top: dashu_int::UBig = dashu_int::ops::UnsignedAbs::unsigned_abs(r.numerator().clone());
            match (odd(low(&top)), odd(low(r.denominator()))) {
                (true, true) => -(-base).powf(value),
                (false, true) => (-base).powf(value),
                _ => f64::NAN,
            }
        }
        _ => base.powf(value),
    }
}
