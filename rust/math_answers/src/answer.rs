//! An answer with all its readings, and the verdict on two of them.

use std::borrow::Cow;

use super::ast::{Ast, Node};
use super::compare::{Options, equal};
use super::fuel::{Fuel, Stop};
use super::mend::balanced;
use super::parse;
use super::value::{Choices, Fail, Reading, Value, has_approximations, has_dummies, read};
use super::written_out::{asks_for_numbers, is_written_out};
use crate::equality::Equality;
use crate::error::ParseError;
use crate::extraction::all_boxes;

/// Units of [`Fuel`] for reading one answer and comparing it with its gold: where all are used, 1 to 2 ms of one core.
pub const ANSWER_FUEL: u64 = 125_000;
/// Units for reading a gold, which happens once.
const GOLD_FUEL: u64 = 600_000;
/// A longer bare answer with several boxes is not read as their list.
const LONGEST_BOXED: usize = 1024;
/// Readings of one answer.
const MOST_READINGS: usize = 12;

/// A parsed answer.
#[derive(Debug, Clone)]
pub struct Answer {
    text: String,
    ast: Ast,
    readings: Vec<Reading>,
    /// Whether it says percent.
    percent: bool,
    /// What kept the other readings from having a value, if none has one.
    stop: Option<Fail>,
}

impl Answer {
    /// Read a gold.
    ///
    /// # Errors
    /// Why it cannot be one: [`ParseError::NoAnswer`] when it is empty, [`ParseError::Unparseable`] when it cannot be read or has
    /// no value, [`ParseError::Undecided`] past a bound.
    pub fn gold(text: &str) -> Result<Self, ParseError> {
        let fuel = Fuel::new(GOLD_FUEL);
        let mut gold = match parse(text) {
            Ok(ast) => Self::of(text, ast, &fuel),
            // A brace that was lost on the way into a data set; an answer with such a brace may be cut short.
            Err(ParseError::Unparseable) => Self::of(text, balanced(text).ok_or(ParseError::Unparseable)?, &fuel),
            Err(status) => return Err(status),
        };
        if has_approximations(&gold.ast) {
            let choices = Choices { rounded: true, ..Choices::default() };
            gold.readings.extend(read(&gold.ast, choices, &fuel));
        }
        match gold.stop {
            Some(Fail::Stop(Stop::Undefined)) => Err(ParseError::Unparseable),
            _ => Ok(gold),
        }
    }

    /// Read an answer.
    ///
    /// # Errors
    /// As [`parse`].
    pub fn read(text: &str, fuel: &Fuel) -> Result<Self, ParseError> {
        Ok(Self::of(text, parse(text)?, fuel))
    }

    fn of(text: &str, ast: Ast, fuel: &Fuel) -> Self {
        let mut readings = Vec::with_capacity(1);
        let mut stop = None;
        let (alternatives, logs) = ambiguities(&ast);
        let dummies = has_dummies(&ast);
        'all: for either in 0..alternatives {
            for (natural_log, renamed) in [(false, false), (true, false), (false, true), (true, true)] {
                if natural_log && !logs || renamed && !dummies {
                    continue;
                }
                if readings.len() == MOST_READINGS {
                    break 'all;
                }
                match read(&ast, Choices { either, natural_log, renamed, rounded: false }, fuel) {
                    Ok(reading) => readings.push(reading),
                    Err(Fail::Stop(Stop::Undefined)) => stop = stop.or(Some(Fail::Stop(Stop::Undefined))),
                    Err(fail) => stop = Some(fail),
                }
            }
        }
        if !readings.is_empty() {
            stop = None;
        }
        let percent = ast.nodes().iter().any(|node| matches!(node, Node::Percent(_)));
        Self { text: text.trim().to_owned(), ast, readings, percent, stop }
    }

    /// This gold, or another one: `20` where a word behind its box says percent.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        self.readings.extend(other.readings);
        self.percent |= other.percent;
        self
    }

    /// Whether it says percent, so that an answer that says it too counts with it alone.
    #[must_use]
    pub fn is_percent(&self) -> bool {
        self.percent
    }

    /// Whether it has a value, if only as words.
    #[must_use]
    pub fn has_value(&self) -> bool {
        self.stop.is_none()
    }

    /// Whether it is a number that is left to compute: `123 \times 456`, but not `\sqrt{2}`.
    #[must_use]
    pub fn is_unevaluated(&self) -> bool {
        let is_rational = |reading: &Reading| match &reading.value {
            Value::Number(number) => reading.exprs.as_rational(number.id).is_some(),
            _ => false,
        };
        !is_written_out(&self.ast) && self.readings.iter().any(is_rational)
    }

    /// Whether `answer` is this very text, which may be one that only a gold is read from.
    #[must_use]
    pub fn is_spelled(&self, answer: &str) -> bool {
        self.text == answer.trim()
    }

    /// Whether `answer` is worth the same as this gold in some reading of both.
    #[must_use]
    pub fn equals(&self, answer: &Self, options: &Options, fuel: &Fuel) -> Equality {
        if matches!(answer.stop, Some(Fail::Stop(Stop::Undefined))) {
            return Equality::Different;
        }
        if self.text == answer.text {
            return Equality::Equal;
        }
        if self.ast == answer.ast {
            return Equality::Equal;
        }
        if !options.unevaluated_ok && !is_written_out(&answer.ast) && asks_for_numbers(&self.ast) {
            return Equality::Different;
        }
        let mut verdict = Equality::Different;
        for gold in &self.readings {
            for answer in &answer.readings {
                verdict = verdict.or(equal(gold, answer, options, fuel));
                if verdict == Equality::Equal {
                    return verdict;
                }
            }
        }
        // What has no value here is itself alone.
        if self.readings.is_empty() || answer.readings.is_empty() { Equality::Undecided } else { verdict }
    }
}

/// How many alternatives there are, and whether a logarithm has no base.
fn ambiguities(ast: &Ast) -> (usize, bool) {
    let mut alternatives = 1;
    let mut logs = false;
    for node in ast.nodes() {
        match node {
            Node::Either(items) => alternatives = alternatives.max(items.len()),
            Node::Log { base: None, .. } => logs = true,
            _ => {}
        }
    }
    (alternatives, logs)
}

/// Whether two bare answers are worth the same. A text that is empty, cannot be read or has no value equals nothing;
/// one past a bound is undecided.
#[must_use]
pub fn compare(gold: &str, answer: &str, options: &Options) -> Equality {
    let of =
        |status: ParseError| if status == ParseError::Undecided { Equality::Undecided } else { Equality::Different };
    // `\boxed{1}\boxed{2}` is a list of two values, as it is in a solution.
    let several = |text: &str| {
        let boxed = text.len() <= LONGEST_BOXED && text.matches("\\boxed").nth(1).is_some();
        boxed.then(|| all_boxes(text).map(Cow::into_owned)).flatten()
    };
    // Boxes without a value, such as 1∞, are no list: the gold is then its whole text.
    let list = several(gold).and_then(|boxes| Some((Answer::gold(&boxes).ok()?, Cow::Owned(boxes))));
    let (value, read) = match list {
        Some(list) => list,
        None => match Answer::gold(gold) {
            Ok(value) => (value, Cow::Borrowed(gold)),
            Err(status) => return of(status),
        },
    };
    let answer = if gold == answer { read } else { several(answer).map_or(Cow::Borrowed(answer), Cow::Owned) };
    let fuel = Fuel::new(ANSWER_FUEL);
    match Answer::read(&answer, &fuel) {
        Ok(answer) => value.equals(&answer, options, &fuel),
        Err(_) if value.is_spelled(&answer) => Equality::Equal,
        Err(status) => of(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_side_by_side_are_a_list() {
        let verdict = |gold, answer| compare(gold, answer, &Options::default());
        for (gold, answer) in [(r"\boxed{1}\boxed{2}", "2, 1"), ("3, 4", r"\boxed{3} \boxed{4}")] {
            assert_eq!(verdict(gold, answer), Equality::Equal, "{gold}");
        }
        for (gold, answer) in
            [(r"\boxed{1}\boxed{2}", "2"), ("12", r"\boxed{1}\boxed{2}"), ("2", r"\boxed{1}\boxed{2}")]
        {
            assert_eq!(verdict(gold, answer), Equality::Different, "{gold}");
        }
    }

    #[test]
    fn a_gold_with_boxes_of_which_one_has_no_value_equals_itself() {
        let gold = r"\max max \infty$\boxed{1∞}\boxedf = 8";
        assert!(Answer::gold(gold).is_ok());
        assert_eq!(compare(gold, gold, &Options::default()), Equality::Equal);
    }

    #[test]
    fn a_gold_with_a_lost_brace_equals_itself() {
        for gold in ["} 7", r"\frac{1}{2", r"\sqrt{3}}"] {
            assert_eq!(compare(gold, gold, &Options::default()), Equality::Equal, "{gold}");
        }
        assert_eq!(compare("7", "} 7", &Options::default()), Equality::Different);
    }
}
