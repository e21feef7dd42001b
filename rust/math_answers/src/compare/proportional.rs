//! Whether two functions of letters are equal up to a constant factor, as the two sides of one equation are.

use super::super::ball::{Complex, Context};
use super::super::expr::{Class, Evaluator, Part, Point, proportional_but_for_branches};
use super::super::fuel::{Fuel, Stop};
use super::super::modular::Residue;
use crate::equality::Equality;

/// Points at which two equations are compared, and what they are drawn with.
const POINTS: u32 = 6;
const SEED: u64 = 0x7072_6f70;
/// Whether `gold = c · answer` for a constant c other than zero, of this sign if one is given. Neither is constant.
pub(super) fn proportional(gold: Part<'_>, answer: Part<'_>, sign: Option<i32>, fuel: &Fuel) -> Equality {
    let mut letters = (Vec::new(), Vec::new());
    gold.0.letters(gold.1, &mut letters.0);
    answer.0.letters(answer.1, &mut letters.1);
    letters.0.sort_unstable();
    letters.1.sort_unstable();
    if letters.0.is_empty() || letters.0 != letters.1 {
        return Equality::Different;
    }
    if !(gold.0.class(gold.1) | answer.0.class(answer.1)).has(Class::ATOM) {
        return match proportional_functions(gold, answer, fuel) {
            Ok(false) => Equality::Different,
            Ok(true) if sign.is_none() => Equality::Equal,
            Ok(true) => quotient_has_sign(gold, answer, sign, fuel),
            Err(_) => Equality::Undecided,
        };
    }
    // The factor is the quotient at a first point; then gold = c · answer has to hold at the others.
    let sizes = f64::from(gold.0.size(gold.1)) + f64::from(answer.0.size(answer.1));
    let mut quotient: Option<Complex> = None;
    let mut agree = 0;
    let identity = proportional_but_for_branches(gold, answer, fuel);
    let bits = if identity.is_some() { 256 } else { 640 };
    for range in 0..4 * POINTS {
        let point = Point { seed: SEED, range, natural: false };
        let context = Context { bits, fuel };
        let mut left = Evaluator::new(gold.0, point, context);
        let mut right = Evaluator::new(answer.0, point, context);
        let here = match (left.value(gold.1), right.value(answer.1)) {
            (Ok(left), Ok(right)) => left.over(&right, context),
            (Err(Stop::Fuel), _) | (_, Err(Stop::Fuel)) if fuel.left() == 0 => return Equality::Undecided,
            _ => continue,
        };
        let here = match here {
            Ok(here) => here,
            // Zero at a random point: identically zero, as `0 = 0`, or too close to tell.
            Err(Stop::Undefined | Stop::Imprecise) => return Equality::Different,
            Err(Stop::Fuel | Stop::Huge { .. }) => return Equality::Undecided,
        };
        if here.contains_zero() {
            return Equality::Different;
        }
        match &quotient {
            None => {
                if sign.is_some() && (!here.is_real() || here.re.sign() != sign) {
                    return Equality::Different;
                }
                quotient = Some(here);
            }
            Some(first) => match first.minus(&here, context) {
                Ok(gap) if !gap.contains_zero() => return Equality::Different,
                Ok(gap) => {
                    let reach = left.reach.max(right.reach) as f64;
                    let needed =
                        identity.map_or(64.0 + 2.0 * (sizes + reach), |literals| 32.0 + literals + 2.0 * reach);
                    agree += u32::from(-(gap.upper().top() as f64) > needed);
                }
                Err(_) => return Equality::Undecided,
            },
        }
        if agree == POINTS {
            return Equality::Equal;
        }
    }
    Equality::Undecided
}

/// Two rational functions, not identically zero, are proportional if f(P)·g(Q) = f(Q)·g(P) for random P and Q.
fn proportional_functions(gold: Part<'_>, answer: Part<'_>, fuel: &Fuel) -> Result<bool, Stop> {
    let (f, g) = (gold.0.residue(gold.1), answer.0.residue(answer.1));
    if f == Residue::ZERO || g == Residue::ZERO {
        return Ok(false);
    }
    let (f_other, g_other) = (gold.0.residue_at(gold.1, SEED, fuel)?, answer.0.residue_at(answer.1, SEED, fuel)?);
    Ok(f * g_other == f_other * g)
}

/// Whether gold / answer has this sign, at the first random point that tells.
fn quotient_has_sign(gold: Part<'_>, answer: Part<'_>, sign: Option<i32>, fuel: &Fuel) -> Equality {
    for range in 0..POINTS {
        let point = Point { seed: SEED, range, natural: false };
        let context = Context { bits: 256, fuel };
        let values = (
            Evaluator::new(gold.0, point, context).value(gold.1),
            Evaluator::new(answer.0, point, context).value(answer.1),
        );
        if let (Ok(left), Ok(right)) = values
            && let Ok(quotient) = left.over(&right, context)
            && let Some(found) = quotient.re.sign()
        {
            return Equality::of(Some(found) == sign);
        }
    }
    Equality::Undecided
}
