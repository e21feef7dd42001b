//! Pairs of expressions, in reverse Polish notation, that are equal, different or undecided.

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
        for (left, right) in [(format!("{letter} !"), letter.clone()), (format!("{letter} !"), format!("{letter} 2 ^"))]
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
