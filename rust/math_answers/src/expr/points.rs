//! Where functions of letters are compared: random points, and for piecewise ones a point in every piece.

use std::collections::HashSet;

use super::super::ball::{Ball, Context};
use super::super::fuel::Fuel;
use super::evaluate::{Evaluator, Point};
use super::{Class, Exprs, Id, Kind, Op, Part};

/// Pieces of one function that get a point of their own.
const MOST_PIECES: usize = 64;
/// Letters whose sign is changed.
const MOST_MIRRORED: usize = 6;

/// A point with the value of one letter in its place, if that was chosen.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) point: Point,
    pub(super) fixed: Option<(u64, Ball)>,
}

/// One sample in each piece of the line, where both parts are functions of one letter that break at zeros of polynomials
/// up to degree two: absolute values, roots, logarithms, maxima. Sampling finds the pieces; it proves nothing alone.
pub(super) fn in_every_piece(parts: [Part<'_>; 2], seed: u64, fuel: &Fuel) -> Vec<Sample> {
    let mut letters = Vec::new();
    for (exprs, id) in parts {
        exprs.letters(id, &mut letters);
    }
    let [letter] = letters[..] else { return Vec::new() };
    let mut breaks: Vec<f64> = Vec::new();
    for (exprs, id) in parts {
        collect(exprs, id, letter, fuel, &mut breaks);
    }
    breaks.retain(|at| at.is_finite() && at.abs() < 1e12);
    breaks.sort_by(f64::total_cmp);
    breaks.dedup_by(|a, b| (*a - *b).abs() <= 1e-9 * (1.0 + a.abs()));
    let (Some(first), Some(last)) = (breaks.first().copied(), breaks.last().copied()) else { return Vec::new() };
    // Off the middle, where symmetric functions may meet.
    let inner = breaks.windows(2).map(|pair| pair[0] + (pair[1] - pair[0]) * 0.377);
    let samples = [first - 1.377, last + 1.377].into_iter().chain(inner);
    samples
        .take(MOST_PIECES)
        .map(|value| Sample { point: Point { seed, range: 0, natural: false }, fixed: Some((letter, dyadic(value))) })
        .collect()
}

/// A ball of exactly this float, rounded to 30 bits after the point.
fn dyadic(value: f64) -> Ball {
    Ball::dyadic(dashu_int::IBig::from((value * f64::from(1 << 30)) as i128), -30)
}

/// `sample` with one letter of the other sign, for each letter that a branch may depend on: letters that are drawn together
/// seldom have all signs, and where roots and inverse functions have another branch is most often a matter of signs.
pub(super) fn mirrored(parts: [Part<'_>; 2], sample: &Sample) -> Vec<Sample> {
    let (mut letters, mut all) = (Vec::new(), Vec::new());
    for (exprs, id) in parts {
        exprs.letters(id, &mut all);
        let mut seen = HashSet::new();
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            if !exprs.class(id).has(Class::PIECEWISE) || !seen.insert(id) {
                continue;
            }
            match exprs.kind(id) {
                Kind::Function(Op::Sin | Op::Cos | Op::Factorial, _) | Kind::Sum(_) | Kind::Product(_) => {}
                Kind::Power(_, exponent) if exprs.as_integer(*exponent).is_some() => {}
                _ => exprs.letters(id, &mut letters),
            }
            exprs.operands(id, |operand| stack.push(operand));
        }
    }
    // One letter alone is tried in every piece, and with both signs.
    if all.len() < 2 {
        return Vec::new();
    }
    let flip =
        |letter: u64| Sample { point: sample.point, fixed: Some((letter, sample.point.value(letter).negated())) };
    letters.into_iter().take(MOST_MIRRORED).map(flip).collect()
}

/// The zeros of everything under an absolute value, a root, a logarithm, of differences under a maximum, and the places
/// where the argument of an inverse function is 0, ±1 or has a pole.
fn collect(exprs: &Exprs, id: Id, letter: u64, fuel: &Fuel, breaks: &mut Vec<f64>) {
    let mut seen = HashSet::new();
    let mut stack = vec![id];
    while let Some(id) = stack.pop() {
        if !exprs.class(id).has(Class::PIECEWISE) || !seen.insert(id) {
            continue;
        }
        if breaks.len() >= MOST_PIECES || fuel.spend(4).is_err() {
            return;
        }
        match exprs.kind(id) {
            Kind::Function(Op::Abs | Op::Sign | Op::Ln | Op::Arg, arguments) => {
                zeros(&|x| at(exprs, arguments[0], letter, x, fuel), breaks);
            }
            Kind::Function(Op::Max | Op::Min, arguments) => {
                for pair in arguments.windows(2) {
                    let difference =
                        |x| Some(at(exprs, pair[0], letter, x, fuel)? - at(exprs, pair[1], letter, x, fuel)?);
                    zeros(&difference, breaks);
                }
            }
            Kind::Function(Op::Arcsin | Op::Arccos | Op::Arctan, arguments) => {
                for level in [-1.0, 0.0, 1.0] {
                    zeros(&|x| Some(at(exprs, arguments[0], letter, x, fuel)? - level), breaks);
                }
                for pole in poles(exprs, arguments[0]) {
                    zeros(&|x| at(exprs, pole, letter, x, fuel), breaks);
                }
            }
            Kind::Power(base, exponent) if exprs.as_integer(*exponent).is_none() => {
                zeros(&|x| at(exprs, *base, letter, x, fuel), breaks);
            }
            _ => {}
        }
        exprs.operands(id, |operand| stack.push(operand));
    }
}

/// What a quotient divides by.
fn poles(exprs: &Exprs, id: Id) -> Vec<Id> {
    let base = |id: &Id| match exprs.kind(*id) {
        Kind::Power(base, exponent) if exprs.as_integer(*exponent).is_some_and(|n| *n < dashu_int::IBig::ZERO) => {
            Some(*base)
        }
        _ => None,
    };
    match exprs.kind(id) {
        Kind::Product(items) => items.iter().filter_map(base).collect(),
        _ => base(&id).into_iter().collect(),
    }
}

fn at(exprs: &Exprs, id: Id, letter: u64, x: f64, fuel: &Fuel) -> Option<f64> {
    let context = Context { bits: 96, fuel };
    let mut evaluator = Evaluator::new(exprs, Point { seed: 0, range: 0, natural: false }, context);
    evaluator.fix(letter, dyadic(x));
    evaluator.value(id).ok().filter(|value| value.is_real()).map(|value| value.re.approximate())
}

/// Zeros of a function that is a polynomial of degree up to two, by its values at −1, 0, 1 and, as a check, 3.
fn zeros(f: &dyn Fn(f64) -> Option<f64>, breaks: &mut Vec<f64>) {
    let (Some(below), Some(c), Some(above), Some(check)) = (f(-1.0), f(0.0), f(1.0), f(3.0)) else { return };
    let (a, b) = ((above + below) / 2.0 - c, (above - below) / 2.0);
    let size = 1.0 + a.abs() + b.abs() + c.abs();
    if (9.0 * a + 3.0 * b + c - check).abs() > 1e-9 * size {
        return;
    }
    if a.abs() < 1e-12 * size {
        breaks.push(-c / b);
        return;
    }
    let discriminant = b * b - 4.0 * a * c;
    if discriminant >= 0.0 {
        breaks.push((-b - discriminant.sqrt()) / (2.0 * a));
        breaks.push((-b + discriminant.sqrt()) / (2.0 * a));
    }
}
