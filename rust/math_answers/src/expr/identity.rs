//! Whether two expressions are the same number or the same function.
//!
//! Worked example, `\sqrt{3+2\sqrt2}` and `1+\sqrt2`:
//! 1. Neither is a rational, so their residues are compared: the value of each expression in two finite fields, in which
//!    √2 has a value. The outer root is no square root of a prime: it is drawn as a random element of its own, and
//!    the residues differ, which proves nothing yet.
//! 2. Both are constants, so both are evaluated in balls: 2.41421356237… ± 2^-94 each. The ball of the difference holds 0,
//!    so the two are not known to differ.
//! 3. Both are algebraic numbers. Their separation bound says that a difference other than zero is larger than some
//!    2^-k, where k grows with the sizes of both, and the ball of the difference is smaller than that: they are equal.
//!
//! With `1+\sqrt2+10^{-200}` on the right the ball of the difference at 96 bits holds 0 as well, but the bound asks for a
//! smaller one; at 1600 bits the ball no longer holds 0, and the two are different. `(x+1)^2` and `x^2+2x+1` end at step 1:
//! rational functions of letters are equal where their residues are.

use std::cell::OnceCell;

use dashu_ratio::RBig;

use super::super::ball::{Complex, Context};
use super::super::fuel::{Fuel, Stop};
use super::super::modular::{Residue, mix};
use super::evaluate::{Evaluator, MOST_SMALL, Point};
use super::germ::same_but_for_branches;
use super::points::{Sample, in_every_piece, mirrored};
use super::search::suspects;
use super::separation::bits_to_separate;
use super::{Class, Id, Kind, Part};
use crate::equality::Equality;

/// Precisions, each tried when the one before decides nothing.
pub(super) const BITS: [usize; 4] = [96, 256, 640, 1600];
/// Points at which letters are tried, and those that must agree; of piecewise functions, and of letters that are natural
/// numbers, in the second column: four small numbers may all be 1 or 2, where n! is n.
const MOST_POINTS: [u32; 2] = [16, 36];
const ENOUGH_POINTS: [u32; 2] = [4, 12];
/// Points that must agree where the identity is proved up to branches.
const ENOUGH_PROVED: u32 = 8;
/// Ranges of the first points of functions of real letters, see [`Point::value`].
const ORDER: [u32; 12] = [0, 3, 8, 5, 9, 1, 6, 10, 2, 7, 11, 4];
/// Points at which they agreed that are tried again with one letter of the other sign, for piecewise functions.
const MOST_MIRRORS: usize = 2;
/// Two branches of one function differ by a multiple of π or of a value, times products of literals: bits below those
/// that a ball around zero must reach to tell that the branch is the same.
const BRANCH_BITS: f64 = 32.0;

/// Whether `gold` and `answer` are the same number, or the same function of their letters where `gold` is real.
///
/// Equal is proved for rational functions (of letters, i, square roots of primes, and atoms taken as letters) but for the chance in
/// [`super::super::modular`], and for algebraic numbers by a separation bound. An identity of logarithms, exponentials and
/// circular functions is proved by [`super::germ`] up to branches, and the branch by balls. Otherwise equal means that the two agree
/// to more bits than twice the sizes of both expressions plus the magnitudes of all intermediate values, in four random
/// points if there are letters: no such coincidence is known. Different is always proved by exact arithmetic or balls.
#[must_use]
pub fn compare(gold: Part<'_>, answer: Part<'_>, fuel: &Fuel) -> Equality {
    if let (Some(left), Some(right)) = (gold.0.as_rational(gold.1), answer.0.as_rational(answer.1)) {
        return Equality::of(left == right);
    }
    let class = gold.0.class(gold.1) | answer.0.class(answer.1);
    let same_residue = gold.0.residue(gold.1) == answer.0.residue(answer.1);
    if !class.has(Class::ATOM) {
        return Equality::of(same_residue);
    }
    if same_residue {
        return Equality::of(is_defined(gold, fuel) && is_defined(answer, fuel));
    }
    // Numbers that differ by a rational, whatever else they are made of.
    let ((left, a), (right, b)) = (split(gold), split(answer));
    if left == right && a != b && left != Residue::ZERO {
        return Equality::Different;
    }
    if !class.has(Class::SYMBOL) {
        for (zero, other) in [(gold, answer), (answer, gold)] {
            if zero.0.as_rational(zero.1).is_some_and(RBig::is_zero) && other.0.is_never_zero(other.1) {
                return Equality::Different;
            }
        }
        let sample = Sample { point: Point { seed: 0, range: 0, natural: false }, fixed: None };
        return match apart(gold, answer, &sample, false, &mut 0, &OnceCell::new(), fuel) {
            Ok(Some(true)) | Err(Stop::Undefined) => Equality::Different,
            Ok(Some(false)) => Equality::Equal,
            Ok(None) | Err(_) => Equality::Undecided,
        };
    }
    let seed = mix(gold.0.residue(gold.1).key(), answer.0.residue(answer.1).key());
    let natural = class.has(Class::INTEGER);
    let real = !gold.0.class(gold.1).has(Class::IMAGINARY);
    match at_points(gold, answer, seed, natural, real, fuel) {
        // Nowhere real: compare as complex functions.
        None => at_points(gold, answer, seed, natural, false, fuel).unwrap_or(Equality::Undecided),
        Some(equality) => equality,
    }
}

/// Compare at random points; none where the gold has a value at none of them.
fn at_points(gold: Part<'_>, answer: Part<'_>, seed: u64, natural: bool, real: bool, fuel: &Fuel) -> Option<Equality> {
    let piecewise = (gold.0.class(gold.1) | answer.0.class(answer.1)).has(Class::PIECEWISE);
    let chosen = if piecewise && !natural { in_every_piece([gold, answer], seed, fuel) } else { Vec::new() };
    let many = usize::from(piecewise || natural);
    let (most, enough) = (MOST_POINTS[many], ENOUGH_POINTS[many]);
    // Large and negative values early, so that few points of a proved identity meet them too.
    let order = |range: u32| if natural { range } else { ORDER.get(range as usize).copied().unwrap_or(range) };
    let random = (0..most).map(|range| Sample { point: Point { seed, range: order(range), natural }, fixed: None });
    let (mut agree, mut level) = (0, 0);
    let mut unsure = false;
    let mut pieces = chosen.len();
    let identity = OnceCell::new();
    let mut found: Vec<Sample> = Vec::new();
    for sample in chosen.iter().cloned().chain(random) {
        match apart(gold, answer, &sample, real, &mut level, &identity, fuel) {
            Ok(Some(true)) => return Some(Equality::Different),
            Ok(Some(false)) if pieces == 0 => {
                agree += 1;
                if found.len() < MOST_MIRRORS {
                    found.push(sample);
                }
            }
            Ok(Some(false)) => {}
            // Far from the origin values may be too large to tell.
            Ok(None) => unsure |= pieces > 0 || !sample.point.is_far(),
            // No value there, or one that is too large.
            Err(Stop::Undefined | Stop::Huge { .. }) => {}
            Err(Stop::Fuel) if fuel.left() > 0 => {}
            Err(_) => return Some(Equality::Undecided),
        }
        pieces = pieces.saturating_sub(1);
        let proved = identity.get().is_some_and(Option::is_some);
        if agree == enough || agree >= ENOUGH_PROVED && proved {
            break;
        }
    }
    // A narrow domain leaves fewer points: four will do if nothing speaks against it.
    let told = match agree {
        0 if !unsure => return None,
        _ if agree == enough || agree >= ENOUGH_PROVED && identity.get().is_some_and(Option::is_some) => true,
        _ => agree >= 4 && !unsure,
    };
    if !told {
        return Some(Equality::Undecided);
    }
    if !piecewise || natural {
        return Some(Equality::Equal);
    }
    for point in suspects(gold, answer, seed, fuel) {
        let sample = Sample { point, fixed: None };
        if apart(gold, answer, &sample, real, &mut level, &identity, fuel) == Ok(Some(true)) {
            return Some(Equality::Different);
        }
    }
    for sample in found.iter().flat_map(|sample| mirrored([gold, answer], sample)) {
        match apart(gold, answer, &sample, real, &mut level, &identity, fuel) {
            Ok(Some(true)) => return Some(Equality::Different),
            Ok(Some(false)) | Err(Stop::Undefined | Stop::Huge { .. }) => {}
            Ok(None) if sample.point.is_far() => {}
            Err(Stop::Fuel) if fuel.left() > 0 => {}
            Ok(None) | Err(_) => return Some(Equality::Undecided),
        }
    }
    Some(Equality::Equal)
}

/// Whether the two differ at a point; none when no precision tells. `identity` is what [`same_but_for_branches`] says of
/// them, once it is asked.
///
/// # Errors
/// [`Stop::Undefined`] where the gold has no value, or no real one though `real` asks for it.
///
/// `level` is the precision to start with, and becomes the one that told they agree.
fn apart(
    gold: Part<'_>,
    answer: Part<'_>,
    sample: &Sample,
    real: bool,
    level: &mut usize,
    identity: &OnceCell<Option<f64>>,
    fuel: &Fuel,
) -> Result<Option<bool>, Stop> {
    let constant = !(gold.0.class(gold.1) | answer.0.class(answer.1)).has(Class::SYMBOL);
    let proof = if constant { bits_to_separate(gold, answer) } else { None };
    let sizes = f64::from(gold.0.size(gold.1)) + f64::from(answer.0.size(answer.1));
    for (at, bits) in BITS.into_iter().enumerate().skip(*level) {
        let context = Context { bits, fuel };
        let mut left = Evaluator::new(gold.0, sample.point, context);
        let mut right = Evaluator::new(answer.0, sample.point, context);
        if let Some((letter, value)) = &sample.fixed {
            left.fix(*letter, value.clone());
            right.fix(*letter, value.clone());
        }
        let left_value = match left.value(gold.1) {
            Err(Stop::Imprecise) => continue,
            Err(stop @ Stop::Huge { negative }) => {
                let told = match right.value(answer.1) {
                    Ok(value) if value.upper().top() < MOST_SMALL => Some(true),
                    Err(Stop::Undefined) => Some(true),
                    Err(Stop::Huge { negative: other }) if other != negative => Some(true),
                    Err(Stop::Huge { .. }) => logarithms_apart(&mut left, gold.1, &mut right, answer.1, context),
                    _ => None,
                };
                return if told.is_none() && !constant { Err(stop) } else { Ok(told) };
            }
            other => other?,
        };
        if real && !left.real {
            return Err(Stop::Undefined);
        }
        let right_value = match right.value(answer.1) {
            Err(Stop::Imprecise) => continue,
            Err(Stop::Undefined) => return Ok(Some(true)),
            Err(Stop::Huge { .. }) => return Ok((left_value.upper().top() < MOST_SMALL).then_some(true)),
            other => other?,
        };
        let gap: Complex = left_value.minus(&right_value, context)?;
        if !gap.contains_zero() {
            return Ok(Some(true));
        }
        let reach = left.reach.max(right.reach) as f64;
        let needed = proof.unwrap_or(64.0 + 2.0 * (sizes + reach));
        let found = -(gap.upper().top() as f64);
        let same_branch = || {
            let literals = *identity.get_or_init(|| same_but_for_branches(gold, answer, fuel));
            literals.is_some_and(|literals| found > BRANCH_BITS + literals + reach)
        };
        if found > needed || found > BRANCH_BITS + reach && same_branch() {
            // With a proof up to branches few bits do at the next point, whatever this one took.
            *level = if identity.get().is_some_and(Option::is_some) { 0 } else { at.min(1) };
            return Ok(Some(false));
        }
        if sample.point.is_far() && needed > 640.0 && bits > 96 {
            break;
        }
    }
    Ok(None)
}

/// Whether two numbers too large to compute differ, by their logarithms.
fn logarithms_apart(
    left: &mut Evaluator<'_>,
    gold: Id,
    right: &mut Evaluator<'_>,
    answer: Id,
    context: Context<'_>,
) -> Option<bool> {
    let gap = left.logarithm(gold).ok()?.minus(&right.logarithm(answer).ok()?, context).ok()?;
    (!gap.contains_zero()).then_some(true)
}

/// The part of a sum that is no rational, by its residue, and the rational.
fn split((exprs, id): Part<'_>) -> (Residue, RBig) {
    if let Kind::Sum(items) = exprs.kind(id)
        && let Some(constant) = items.iter().find_map(|item| exprs.as_rational(*item))
    {
        let rest = items.iter().filter(|item| exprs.as_rational(**item).is_none());
        return (rest.fold(Residue::ZERO, |sum, item| sum + exprs.residue(*item)), constant.clone());
    }
    (exprs.residue(id), RBig::ZERO)
}

/// Whether an expression has a value somewhere.
fn is_defined(part: Part<'_>, fuel: &Fuel) -> bool {
    if !part.0.class(part.1).has(Class::PARTIAL) {
        return true;
    }
    let natural = part.0.class(part.1).has(Class::INTEGER);
    let points = if part.0.class(part.1).has(Class::SYMBOL) { MOST_POINTS[0] } else { 1 };
    (0..points).any(|range| {
        let point = Point { seed: 0x6465_6669, range, natural };
        let context = Context { bits: BITS[0], fuel };
        !matches!(Evaluator::new(part.0, point, context).value(part.1), Err(Stop::Undefined))
    })
}

#[cfg(test)]
mod tests;
