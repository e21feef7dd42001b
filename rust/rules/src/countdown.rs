//! Countdown: 1 if the answer is an expression that uses each given number once and equals the target.
//!
//! The answer is the last closed `<answer>` after the last `</think>`. It may contain whole numbers, `+ - * /`,
//! `× ÷ − ·`, parentheses and unary minus, and may end in `= N` where `N` is the target. `**`, `//`, decimal points,
//! implicit products and digit grouping are not allowed. Arithmetic uses exact rationals; no interpreter is involved.
//!
//! Example: with the numbers 3, 3, 8, 8 and the target 24, `8/(3-8/3) = 24` scores 1.

use dashu_int::IBig;
use dashu_ratio::RBig;
use math_answers::characters::is_space;
use math_answers::error::ParseError;
use math_answers::extraction::{after_thinking, tagged};
use math_answers::work::looked_at;
use rlox_grpo_kernels::ragged::Ragged;

use crate::error::RuleError;
use crate::{RewardRule, Status, Verdict};

/// Largest number of tokens in an answer; a longer answer is undecided.
const MOST_TOKENS: usize = 4096;
/// Largest nesting depth of parentheses and minus signs; a deeper answer is undecided.
const DEEPEST: usize = 200;

/// Countdown rule: the numbers and the target of each row of a batch.
#[derive(Debug)]
pub struct Countdown<'a> {
    numbers: Ragged<'a, i64>,
    targets: &'a [i64],
}

impl<'a> Countdown<'a> {
    /// Row `i` must reach `targets[i]` with the numbers of row `i`.
    ///
    /// # Errors
    /// [`RuleError::RowCount`] when the two differ in length; [`RuleError::BadGold`] for a negative number.
    pub fn new(numbers: Ragged<'a, i64>, targets: &'a [i64]) -> Result<Self, RuleError> {
        if numbers.len() != targets.len() {
            return Err(RuleError::RowCount { argument: "target", rows: targets.len(), expected: numbers.len() });
        }
        for (index, row) in numbers.rows().enumerate() {
            if let Some(number) = row.iter().find(|number| **number < 0) {
                let reason = "Countdown numbers are whole and not negative";
                return Err(RuleError::BadGold { argument: "nums", index, value: number.to_string(), reason });
            }
        }
        Ok(Self { numbers, targets })
    }
}

impl RewardRule for Countdown<'_> {
    fn score(&self, row: usize, completion: &str) -> Verdict {
        let Some(answer) = tagged(after_thinking(completion), "answer") else {
            return Verdict::none(Status::NoAnswer);
        };
        match reaches(answer, self.numbers.row(row), self.targets[row]) {
            Ok(right) => Verdict::right(right),
            Err(error) => Verdict::none(error),
        }
    }
}

/// Whether `expression` uses exactly `numbers` and equals `target`.
///
/// # Errors
/// [`ParseError::Unparseable`] for text outside this grammar; [`ParseError::Undecided`] beyond the token or depth limit.
pub fn reaches(expression: &str, numbers: &[i64], target: i64) -> Result<bool, ParseError> {
    let tokens = tokenize(expression)?;
    let (tokens, stated) = match tokens.iter().position(|token| *token == Token::Equals) {
        Some(at) => (&tokens[..at], Some(tail(&tokens[at + 1..])?)),
        None => (&tokens[..], None),
    };
    check_grammar(tokens)?;
    if stated.is_some_and(|stated| stated != Some(target)) || !uses_exactly(tokens, numbers) {
        return Ok(false);
    }
    Ok(evaluate(tokens) == Some(RBig::from(target)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// A whole number; `None` when it exceeds `i64`.
    Number(Option<i64>),
    Plus,
    Minus,
    Times,
    Over,
    Open,
    Close,
    Equals,
}

fn tokenize(text: &str) -> Result<Vec<Token>, ParseError> {
    looked_at(text.len());
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '0'..='9' => rest.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len()),
            _ => c.len_utf8(),
        };
        let token = match c {
            '0'..='9' => Some(Token::Number(rest[..length].parse().ok())),
            '+' => Some(Token::Plus),
            '-' | '−' => Some(Token::Minus),
            '*' | '×' | '·' => Some(Token::Times),
            '/' | '÷' => Some(Token::Over),
            '(' => Some(Token::Open),
            ')' => Some(Token::Close),
            '=' => Some(Token::Equals),
            _ if is_space(c) => None,
            _ => return Err(ParseError::Unparseable),
        };
        if let Some(token) = token {
            if tokens.len() == MOST_TOKENS {
                return Err(ParseError::Undecided);
            }
            tokens.push(token);
        }
        rest = &rest[length..];
    }
    Ok(tokens)
}

/// The number after `=`: digits, with at most one minus sign.
fn tail(tokens: &[Token]) -> Result<Option<i64>, ParseError> {
    match *tokens {
        [Token::Number(value)] => Ok(value),
        [Token::Minus, Token::Number(value)] => Ok(value.map(|value| -value)),
        _ => Err(ParseError::Unparseable),
    }
}

/// Check that operands and operators alternate, parentheses balance and the nesting is at most [`DEEPEST`].
fn check_grammar(tokens: &[Token]) -> Result<(), ParseError> {
    let (mut depth, mut signs) = (0usize, 0usize);
    let mut operand_next = true;
    let mut deepest = 0;
    for token in tokens {
        match (token, operand_next) {
            (Token::Number(_), true) => (operand_next, signs) = (false, 0),
            (Token::Open, true) => depth += 1,
            (Token::Minus, true) => signs += 1,
            (Token::Close, false) if depth > 0 => depth -= 1,
            (Token::Plus | Token::Minus | Token::Times | Token::Over, false) => operand_next = true,
            _ => return Err(ParseError::Unparseable),
        }
        deepest = deepest.max(depth + signs);
    }
    if operand_next || depth > 0 {
        return Err(ParseError::Unparseable);
    }
    if deepest > DEEPEST { Err(ParseError::Undecided) } else { Ok(()) }
}

fn uses_exactly(tokens: &[Token], numbers: &[i64]) -> bool {
    let mut used = Vec::with_capacity(numbers.len());
    for token in tokens {
        match token {
            Token::Number(Some(value)) if used.len() < numbers.len() => used.push(*value),
            Token::Number(_) => return false,
            _ => {}
        }
    }
    let mut given = numbers.to_vec();
    used.sort_unstable();
    given.sort_unstable();
    used == given
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pending {
    Open,
    Add,
    Subtract,
    Multiply,
    Divide,
    Negate,
}

impl Pending {
    fn precedence(self) -> u8 {
        match self {
            Self::Open => 0,
            Self::Add | Self::Subtract => 1,
            Self::Multiply | Self::Divide => 2,
            Self::Negate => 3,
        }
    }
}

/// Value of tokens that passed [`check_grammar`], by two stacks without recursion; `None` for a division by zero.
fn evaluate(tokens: &[Token]) -> Option<RBig> {
    let mut values: Vec<RBig> = Vec::new();
    let mut pending: Vec<Pending> = Vec::new();
    let mut operand_next = true;
    for token in tokens {
        let operator = match (token, operand_next) {
            (Token::Number(value), _) => {
                values.push(RBig::from((*value)?));
                operand_next = false;
                continue;
            }
            (Token::Open, _) => Pending::Open,
            (Token::Minus, true) => Pending::Negate,
            (Token::Plus, _) => Pending::Add,
            (Token::Minus, false) => Pending::Subtract,
            (Token::Times, _) => Pending::Multiply,
            (Token::Over, _) => Pending::Divide,
            (Token::Close | Token::Equals, _) => {
                while let Some(operator) = pending.pop().filter(|operator| *operator != Pending::Open) {
                    apply(operator, &mut values)?;
                }
                continue;
            }
        };
        // A prefix operator waits. A binary operator first applies the waiting operators that bind at least as tightly
        // (left associativity).
        if !operand_next {
            while let Some(operator) = pending.pop_if(|waiting| waiting.precedence() >= operator.precedence()) {
                apply(operator, &mut values)?;
            }
        }
        pending.push(operator);
        operand_next = true;
    }
    while let Some(operator) = pending.pop() {
        apply(operator, &mut values)?;
    }
    values.pop()
}

fn apply(operator: Pending, values: &mut Vec<RBig>) -> Option<()> {
    let right = values.pop()?;
    let result = match operator {
        Pending::Negate => -right,
        Pending::Divide if *right.numerator() == IBig::ZERO => return None,
        Pending::Open => return None,
        _ => {
            let left = values.pop()?;
            match operator {
                Pending::Add => left + right,
                Pending::Subtract => left - right,
                Pending::Multiply => left * right,
                _ => left / right,
            }
        }
    };
    values.push(result);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(expression: &str, numbers: &[i64], target: i64) -> Result<bool, ParseError> {
        reaches(expression, numbers, target)
    }

    #[test]
    fn right_expressions() {
        for (expression, numbers, target) in [
            ("8/(3-8/3)", &[3, 3, 8, 8][..], 24),
            ("(1/49)*49", &[1, 49, 49], 1),
            ("10 - 4 - 3", &[3, 4, 10], 3),
            ("64 / 8 / 4", &[4, 8, 64], 2),
            ("2 + 3 * 4 = 14", &[2, 3, 4], 14),
            ("3 − 10 = −7", &[3, 10], -7),
            ("6 × 8 ÷ 2 · 1", &[1, 2, 6, 8], 24),
            ("-(3 - 10)", &[3, 10], 7),
            ("3--5", &[3, 5], 8),
            ("-2*-3", &[2, 3], 6),
            ("((03))", &[3], 3),
            ("\n 1\t+\u{a0}2\n", &[1, 2], 3),
            ("9223372036854775807*2-9223372036854775807", &[i64::MAX, 2, i64::MAX], i64::MAX),
        ] {
            assert_eq!(check(expression, numbers, target), Ok(true), "{expression}");
        }
    }

    #[test]
    fn wrong_expressions() {
        for (expression, numbers, target) in [
            ("1+2", &[1, 2][..], 4),
            ("1+2", &[1, 2, 2], 3),
            ("1+2+2", &[1, 2], 5),
            ("12", &[1, 2], 12),
            ("1+2=4", &[1, 2], 3),
            ("1/(2-2)", &[1, 2, 2], 0),
            ("24+1/999999", &[24, 1, 999_999], 24),
            ("99999999999999999999", &[1], 1),
            ("0*99999999999999999999", &[0, 1], 0),
        ] {
            assert_eq!(check(expression, numbers, target), Ok(false), "{expression}");
        }
    }

    #[test]
    fn text_that_is_no_expression() {
        for expression in [
            "",
            " ",
            "1 2",
            "1_2",
            "1.5*2",
            "7//2",
            "2**3",
            "2* *3",
            "9**9**9",
            "2(3)",
            "(1)(2)",
            "(1+2",
            "1+2)",
            "+1",
            "1+",
            "1+2=",
            "=3",
            "1=2=3",
            "1+2=3.0",
            "1+2=2+1",
            "１+２",
            "1+2 is 3",
            "1,2",
            "2^3",
            "x",
            "1+\0",
            "()",
            "²",
            "1\u{200b}2",
        ] {
            assert_eq!(check(expression, &[1, 2], 3), Err(ParseError::Unparseable), "{expression:?}");
        }
    }

    #[test]
    fn budgets_end_in_undecided() {
        let nested = |depth: usize| format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(check(&nested(DEEPEST), &[1], 1), Ok(true));
        assert_eq!(check(&nested(DEEPEST + 1), &[1], 1), Err(ParseError::Undecided));
        assert_eq!(check(&format!("{}1", "-".repeat(DEEPEST + 1)), &[1], 1), Err(ParseError::Undecided));
        assert_eq!(check(&"(".repeat(1_000_000), &[1], 1), Err(ParseError::Undecided));
        assert_eq!(check(&"7".repeat(1_000_000), &[7], 7), Ok(false));
    }

    #[test]
    fn the_last_closed_answer_counts() {
        let offsets = [0, 2];
        let numbers = Ragged::new(&[1, 2], &offsets, "nums").unwrap();
        let rule = Countdown::new(numbers, &[3]).unwrap();
        let score = |text: &str| rule.score(0, text);
        assert_eq!(score("<answer>9</answer> <answer>1+2</answer>").score, 1.0);
        assert_eq!(score("<answer>1+2</answer> <answer>9</answer>").score, 0.0);
        assert_eq!(score("<answer>1+2</answer> <answer>9").score, 1.0);
        assert_eq!(score("<think><answer>1+2</answer></think>").status, Status::NoAnswer);
        assert_eq!(score("<think>x</think><answer>\n1+2\n</answer>").score, 1.0);
        // A block that is never closed is reasoning to its end.
        assert_eq!(score("<think> <answer>1+2</answer>").status, Status::NoAnswer);
        assert_eq!(score("<answer>1+2</answer><think> <answer>9</answer>").score, 1.0);
        assert_eq!(score("1+2").status, Status::NoAnswer);
    }

    #[test]
    fn bad_references_are_refused() {
        let offsets = [0, 2];
        let negative = Ragged::new(&[1, -2], &offsets, "nums").unwrap();
        assert!(matches!(Countdown::new(negative, &[3]), Err(RuleError::BadGold { index: 0, .. })));
        let numbers = Ragged::new(&[1, 2], &offsets, "nums").unwrap();
        assert!(matches!(Countdown::new(numbers, &[]), Err(RuleError::RowCount { .. })));
    }
}
