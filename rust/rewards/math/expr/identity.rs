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

use dashu_ratio::RBig;

use super::super::ball::{Complex, Context};
use super::super::fuel::{Fuel, Stop};
use super::super::modular::{Residue, mix};
pub use super::equality::Equality;
use super::evaluate::{Evaluator, MOST_SMALL, Point};
use super::points::{Sample, in_every_piece};
use super::separation::bits_to_separate;
use super::{Class, Id, Kind, Part};

/// Precisions, each tried when the one before decides nothing.
pub(super) const BITS: [usize; 4] = [96, 256, 640, 1600];
/// Points at which letters are tried, and those that must agree; of piecewise functions, and of letters that are natural
/// numbers, in the second column: four small numbers may all be 1 or 2, where n! is n.
const MOST_POINTS: [u32; 2] = [16, 36];
const ENOUGH_POINTS: [u32; 2] = [4, 12];

/// Whether `gold` and `answer` are the same number, or the same function of their letters where `gold` is real.
///
/// Equal is proved for rational functions (of letters, i, square roots of primes, and atoms taken as letters) but for the chance in
/// [`super::super::modular`], and for algebraic numbers by a separation bound. Otherwise equal means that the two agree
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
        return match apart(gold, answer, &sample, false, &mut 0, fuel) {
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
    let random = (0..most).map(|range| Sample { point: Point { seed, range, natural }, fixed: None });
    let (mut agree, mut level) = (0, 0);
    let mut unsure = false;
    let mut pieces = chosen.len();
    for sample in chosen.iter().cloned().chain(random) {
        match apart(gold, answer, &sample, real, &mut level, fuel) {
            Ok(Some(true)) => return Some(Equality::Different),
            Ok(Some(false)) => agree += u32::from(pieces == 0),
            // Far from the origin values may be too large to tell.
            Ok(None) => unsure |= pieces > 0 || !sample.point.is_far(),
            // No value there, or one that is too large.
            Err(Stop::Undefined | Stop::Huge { .. }) => {}
            Err(Stop::Fuel) if fuel.left() > 0 => {}
            Err(_) => return Some(Equality::Undecided),
        }
        pieces = pieces.saturating_sub(1);
        if agree == enough {
            return Some(Equality::Equal);
        }
    }
    // A narrow domain leaves fewer points: four will do if nothing speaks against it.
    match agree {
        0 if !unsure => None,
        4.. if !unsure => Some(Equality::Equal),
        _ => Some(Equality::Undecided),
    }
}

/// Whether the two differ at a point; none when no precision tells.
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
        if -(gap.upper().top() as f64) > needed {
            *level = at.min(1);
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
mod tests {
    use super::super::{Exprs, Op};
    use super::*;

    /// A reverse Polish reader of expressions, for tests alone.
    fn build(text: &str, fuel: &Fuel) -> Result<(Exprs, Id), Stop> {
        let mut exprs = Exprs::default();
        let mut stack: Vec<Id> = Vec::new();
        for word in text.split_whitespace() {
            let mut pop = || stack.pop().ok_or(Stop::Undefined);
            let id = match word {
                "+" | "-" | "*" | "/" | "^" | "C" => {
                    let (right, left) = (pop()?, pop()?);
                    match word {
                        "+" => exprs.sum(&[left, right], fuel)?,
                        "-" => exprs.difference(left, right, fuel)?,
                        "*" => exprs.product(&[left, right], fuel)?,
                        "/" => exprs.quotient(left, right, fuel)?,
                        "C" => exprs.binomial(left, right, fuel)?,
                        _ => exprs.power(left, right, fuel)?,
                    }
                }
                "pi" => exprs.pi()?,
                "e" => exprs.e()?,
                "i" => exprs.i()?,
                "sqrt" => {
                    let half = exprs.rational(RBig::from_parts_signed(1.into(), 2.into()), fuel)?;
                    let inner = pop()?;
                    exprs.power(inner, half, fuel)?
                }
                "sin" => exprs.function(Op::Sin, &[pop()?], fuel)?,
                "cos" => exprs.function(Op::Cos, &[pop()?], fuel)?,
                "arctan" => exprs.function(Op::Arctan, &[pop()?], fuel)?,
                "arcsin" => exprs.function(Op::Arcsin, &[pop()?], fuel)?,
                "ln" => exprs.function(Op::Ln, &[pop()?], fuel)?,
                "abs" => exprs.function(Op::Abs, &[pop()?], fuel)?,
                "floor" => exprs.function(Op::Floor, &[pop()?], fuel)?,
                "!" => exprs.function(Op::Factorial, &[pop()?], fuel)?,
                number if number.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
                    exprs.rational(RBig::from_str_radix(number, 10).unwrap(), fuel)?
                }
                name => exprs.symbol(name, fuel)?,
            };
            stack.push(id);
        }
        Ok((exprs, stack.pop().unwrap()))
    }

    fn check(left: &str, right: &str) -> Result<Equality, Stop> {
        let fuel = Fuel::new(10_000_000);
        let (left, right) = (build(left, &fuel)?, build(right, &fuel)?);
        Ok(compare((&left.0, left.1), (&right.0, right.1), &fuel))
    }

    #[test]
    fn equal_constants() {
        for (left, right) in [
            ("1 2 /", "3 6 /"),
            ("8 sqrt", "2 2 sqrt *"),
            ("1 3 / sqrt", "3 sqrt 3 /"),
            ("3 2 2 sqrt * + sqrt", "1 2 sqrt +"),
            ("2 sqrt 3 sqrt + 2 ^", "5 2 6 sqrt * +"),
            ("2 5 sqrt + 1 3 / ^ 2 5 sqrt - 1 3 / ^ +", "1"),
            ("-8 1 3 / ^", "-2"),
            ("-4 sqrt", "2 i *"),
            ("1 i + 2 ^", "2 i *"),
            ("e i pi * ^", "-1"),
            ("6 ln", "2 ln 3 ln +"),
            ("8 ln 2 ln /", "3"),
            ("pi 3 / cos", "1 2 /"),
            ("pi 12 / sin", "6 sqrt 2 sqrt - 4 /"),
            ("pi 5 / cos", "1 5 sqrt + 4 /"),
            ("2 pi * 7 / cos 4 pi * 7 / cos + 6 pi * 7 / cos +", "-1 2 /"),
            ("1 2 / arctan 1 3 / arctan +", "pi 4 /"),
            ("2 2024 ^", "4 1012 ^"),
            ("2 1000000 ^", "4 500000 ^"),
            ("9 9 9 9 ^ ^ ^", "3 2 9 9 9 ^ ^ * ^"),
            ("1000000000 !", "1000000000 !"),
            ("1000000000 500000000 C", "1000000000 ! 500000000 ! 2 ^ /"),
            ("20 10 C", "184756"),
            ("2 sqrt floor", "1"),
            ("10 100 ^ sqrt", "10 50 ^"),
        ] {
            assert_eq!(check(left, right), Ok(Equality::Equal), "{left} = {right}");
            assert_eq!(check(right, left), Ok(Equality::Equal), "{right} = {left}");
        }
    }

    #[test]
    fn different_constants() {
        for (left, right) in [
            ("10 20 ^", "10 20 ^ 1 +"),
            ("1 2004 ! /", "1 2006 ! /"),
            ("1 10 20 ^ /", "2 10 20 ^ /"),
            ("2 sqrt", "2 sqrt 1 10 200 ^ / +"),
            ("2 sqrt", "2 sqrt 1 10 400 ^ / +"),
            ("2 sqrt", "2 sqrt 2 -1000000000 ^ +"),
            ("2 1 3 / ^", "2 1 10 200 ^ / + 1 3 / ^"),
            ("pi 7 / cos", "pi 7 / 1 10 100 ^ / + cos"),
            ("3 1 3 / ^ pi 7 / cos *", "3 1 10 60 ^ / + 1 3 / ^ pi 7 / cos *"),
            ("pi", "355 113 /"),
            ("pi", "pi e -1000 ^ +"),
            ("2 sqrt 3 sqrt +", "5 sqrt 1 + 1 1000 / -"),
            ("e pi * sqrt", "3"),
            ("2 1000000 ^", "2 1000000 ^ 1 +"),
            ("-4 sqrt", "-2 i *"),
            ("163 sqrt pi * e 2 ^ -", "163 sqrt pi *"),
            ("e pi 163 sqrt * ^", "640320 3 ^ 744 +"),
            ("9 9 9 9 ^ ^ ^", "9"),
            ("9 9 9 9 ^ ^ ^", "0"),
            ("1 9 9 9 9 ^ ^ ^ 5 + /", "1"),
            ("9 9 9 9 9 ^ ^ ^ ^", "2 sqrt"),
            ("1 9 9 9 9 ^ ^ ^ /", "0"),
            ("9 9 9 9 ^ ^ ^", "9 9 9 9 ^ ^ ^ 1 +"),
            ("9 9 9 9 ^ ^ ^", "9 9 9 8 ^ ^ ^"),
            ("9 9 9 9 ^ ^ ^", "8 9 9 9 ^ ^ ^ 5 *"),
            ("1000000000 !", "1000000000 ! 1 +"),
        ] {
            assert_eq!(check(left, right), Ok(Equality::Different), "{left} = {right}");
        }
    }

    #[test]
    fn functions() {
        for (left, right) in [
            ("x 1 + 2 ^", "x 2 ^ 2 x * + 1 +"),
            ("x 2 ^ 1 - x 1 - /", "x 1 +"),
            ("x sin 2 ^ x cos 2 ^ +", "1"),
            ("2 x * sin", "2 x sin * x cos *"),
            ("x 2 ^ sqrt", "x abs"),
            ("e x y + ^", "e x ^ e y ^ *"),
            ("2 n 1 + ^", "2 2 n ^ *"),
            ("4 x ^", "2 2 x * ^"),
            ("x ln 2 *", "x 2 ^ ln"),
            ("-1 n 2 + ^", "-1 n ^"),
            ("n 1 + ! n ! /", "n 1 +"),
            ("1 x 2 ^ - sqrt", "x arcsin cos"),
            ("x y + z + w + 200 ^", "w x + z + y + 200 ^"),
            ("x sqrt y sqrt * 4 *", "16 x * y * sqrt"),
            ("x x ^", "e x x ln * ^"),
        ] {
            assert_eq!(check(left, right), Ok(Equality::Equal), "{left} = {right}");
        }
        for (left, right) in [
            ("x 2 ^ sqrt", "x"),
            ("x 2 ^ ln", "x ln 2 *"),
            ("x", "y"),
            ("x sqrt", "x sqrt 1 10 300 ^ / +"),
            ("x sin", "x cos"),
            ("x 200 ^", "x 201 ^"),
            ("5", "x"),
            ("-1 n ^", "1"),
            ("x 3 - abs", "3 x -"),
            ("x 1000 - abs", "1000 x -"),
            ("x 2 / floor", "x 3 / floor"),
            ("x 5 - abs x 6 - abs +", "2 x * 11 - abs"),
            ("x 100000 - abs x 100001 - abs +", "2 x * 200001 - abs"),
        ] {
            assert_eq!(check(left, right), Ok(Equality::Different), "{left} = {right}");
        }
    }

    #[test]
    fn small_natural_numbers_are_no_coincidence() {
        let letters = ('a'..='d').chain('f'..='h').chain('j'..='z').map(String::from);
        let greek = ["alpha", "beta", "gamma", "delta", "lambda", "mu", "omega"].map(String::from);
        for letter in letters.chain(greek) {
            for (left, right) in
                [(format!("{letter} !"), letter.clone()), (format!("{letter} !"), format!("{letter} 2 ^"))]
            {
                assert_eq!(check(&left, &right), Ok(Equality::Different), "{left} = {right}");
            }
        }
    }

    #[test]
    fn what_has_no_value_equals_nothing() {
        for text in ["1 0 /", "0 0 /", "0 0 ^", "1 x x - /", "0 ln", "0 -1 ^", "pi 2 / cos -1 ^", "-1 !"] {
            assert_eq!(check(text, "1"), Err(Stop::Undefined), "{text}");
        }
        assert_eq!(check("1 2 sqrt 1 + 2 ^ 3 - 2 2 sqrt * - /", "5"), Err(Stop::Undefined));
        assert_eq!(check("2 arcsin", "2 arcsin"), Ok(Equality::Different));
        assert_eq!(check("x abs 2 + arcsin", "x abs 2 + arcsin"), Ok(Equality::Different));
        assert_eq!(check("1 x sin 2 ^ x cos 2 ^ + 1 - /", "5"), Ok(Equality::Undecided));
    }

    #[test]
    fn what_cannot_be_told_is_undecided() {
        let huge = "9 9 9 9 ^ ^ ^";
        assert_eq!(check(huge, &format!("{huge} 2 sqrt +")), Ok(Equality::Undecided));
        assert_eq!(check("1000000000 !", "1000000000 999999999 ! *"), Ok(Equality::Undecided));
        assert_eq!(check(&format!("1 {huge} / 1 sin 2 ^ 1 cos 2 ^ + +"), "1"), Ok(Equality::Undecided));
        assert_eq!(check(&format!("2 sqrt 1 {huge} / +"), "2 sqrt"), Ok(Equality::Undecided));
        assert_eq!(check("1 sin 2 -1000000000 ^ +", "1 2 / sin 1 2 / cos * 2 *"), Ok(Equality::Undecided));
    }
}
