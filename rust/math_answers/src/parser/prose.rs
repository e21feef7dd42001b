//! Words where a value could stand: numbers in words, sets in words, and text that is an answer of its own.

use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::super::ast::{Comparison, Constant, NamedSet, Node, NodeId, NumberForm, SetPart};
use super::super::lexer::token::{Bracket, Kind, Style, Token};
use super::super::sentence;
use super::super::unit::Unit;
use super::super::word;
use super::{Parsed, Parser};
use crate::error::ParseError;

/// Words of one number.
const LONGEST_NUMBER: usize = 32;

impl<'t> Parser<'_, 't> {
    /// A number in words, or text up to the next separator.
    pub(super) fn words(&mut self) -> Parsed<NodeId> {
        if let Some((value, length)) = self.number_words() {
            self.at += length;
            return self.push(Node::Number { value, form: NumberForm::Words });
        }
        if let Some(amount) = self.amount_behind_currency()? {
            return Ok(amount);
        }
        // `\text{x = 5}`
        if let (Some(Kind::Word(letter)), Some(Kind::Relation(_) | Kind::Underscore)) = (self.peek(), self.kind_at(1))
            && letter.len() == 1
        {
            return self.name(letter, Style::Plain);
        }
        // `\text{Var}(X)`
        if let (Some(Kind::Word(name)), true) =
            (self.peek(), matches!(self.kind_at(1), Some(Kind::Open(Bracket::Round | Bracket::Curly))))
            && !self.space_at(1)
            && name.len() > 1
        {
            self.at += 1;
            let arguments = self.arguments()?;
            if let ("factorial", [argument]) = (name, &arguments[..]) {
                return self.push(Node::Factorial(*argument));
            }
            let name = self.ast.intern(name)?;
            return self.push(Node::Apply { name, arguments, product: false });
        }
        let start = self.at;
        while let Some(kind) = self.peek() {
            let part = match kind {
                Kind::Word(text) => self.at == start || !matches!(text, "and" | "or" | "is" | "are" | "equals"),
                Kind::Name { .. } => {
                    let sign = matches!(self.kind_at(1), Some(Kind::Caret | Kind::Underscore | Kind::Relation(_)));
                    self.space_at(0) && !sign
                }
                Kind::Number(_) | Kind::Minus => false,
                _ => false,
            };
            if !part {
                break;
            }
            self.at += 1;
        }
        let (Some(first), Some(last)) =
            (self.tokens.get(start), self.at.checked_sub(1).and_then(|at| self.tokens.get(at)))
        else {
            return Err(ParseError::Unparseable);
        };
        let text = word::folded(self.text.get(first.start..last.end).unwrap_or_default());
        if text.is_empty() {
            return Err(ParseError::Unparseable);
        }
        let meaning = self.meaning(&text)?;
        let text = self.push(Node::Text(text))?;
        match meaning {
            Some(meaning) => self.push(Node::Either(vec![meaning, text])),
            None => Ok(text),
        }
    }

    /// `USD 5`, `Rs. 5`, `US\$5`.
    fn amount_behind_currency(&mut self) -> Parsed<Option<NodeId>> {
        let Some(Kind::Word(text)) = self.peek() else { return Ok(None) };
        let period = usize::from(self.kind_at(1) == Some(Kind::Period));
        if let ("US", Some(Kind::Currency(code))) = (text, self.kind_at(1)) {
            self.at += 1;
            return self.currency(code).map(Some);
        }
        let Some(Kind::Number(_)) = self.kind_at(1 + period) else { return Ok(None) };
        let Some(code) = Unit::currency_code(text) else { return Ok(None) };
        self.at += period;
        self.currency(code).map(Some)
    }

    /// Sets and values that have a common name.
    fn meaning(&mut self, text: &str) -> Parsed<Option<NodeId>> {
        if let Some(time) = self.time_word(text)? {
            return Ok(Some(time));
        }
        let set = |set| Some(Node::NamedSet { set, part: SetPart::All });
        let node = match text {
            "no solution"
            | "no solutions"
            | "no real solution"
            | "no real solutions"
            | "no solutions exist"
            | "no solution exists"
            | "empty set"
            | "null set"
            | "none"
            | "there is no solution"
            | "there are no solutions" => Some(Node::EmptySet),
            "infinity" | "positive infinity" => Some(Node::Constant { value: Constant::Infinity, letter: None }),
            "negative infinity" => {
                let infinity = self.push(Node::Constant { value: Constant::Infinity, letter: None })?;
                Some(Node::Neg(infinity))
            }
            "all real numbers"
            | "all reals"
            | "real numbers"
            | "reals"
            | "all real x"
            | "set of all real numbers"
            | "set of real numbers"
            | "all real values" => set(NamedSet::Reals),
            "all integers" | "integers" | "set of integers" | "set of all integers" => set(NamedSet::Integers),
            "all rational numbers" | "rational numbers" => set(NamedSet::Rationals),
            "all complex numbers" | "complex numbers" => set(NamedSet::Complexes),
            "all natural numbers" | "natural numbers" => set(NamedSet::Naturals),
            "all positive integers" | "positive integers" => {
                Some(Node::NamedSet { set: NamedSet::Integers, part: SetPart::Positive })
            }
            "all primes" | "all prime numbers" | "prime numbers" | "primes" => set(NamedSet::Primes),
            _ => None,
        };
        node.map(|node| self.push(node)).transpose()
    }

    /// The value of the number words from here on, and how many they are.
    fn number_words(&self) -> Option<(RBig, usize)> {
        let word_at = |offset: usize| match self.kind_at(offset) {
            Some(Kind::Word(text)) if offset < LONGEST_NUMBER => Some(text),
            _ => None,
        };
        let first = word_at(0)?;
        if let Some((top, bottom)) = first.split_once('-')
            && let (Some(top), Some(bottom)) = (word::small_number(top), word::part(bottom))
        {
            return Some((ratio(top, bottom), 1));
        }
        if first.eq_ignore_ascii_case("half") {
            return Some((ratio(1, 2), 1));
        }
        let (mut total, mut current, mut offset) = (UBig::ZERO, 0u64, 0);
        while let Some(text) = word_at(offset) {
            if let Some(value) = word::small_number(text) {
                // `two three` are two numbers.
                let tens = current % 100;
                if offset > 0 && tens != 0 && !(tens >= 20 && tens % 10 == 0 && value < 10) {
                    break;
                }
                current += u64::from(value);
            } else if let (Some(power), true) = (word::magnitude(text), offset > 0) {
                let factor = 10u64.pow(power);
                if power == 2 {
                    current = current.checked_mul(factor)?;
                } else {
                    total += UBig::from(current) * UBig::from(factor);
                    current = 0;
                }
            } else if !(text == "and"
                && offset > 0
                && word_at(offset + 1).is_some_and(|next| {
                    word::small_number(next).is_some()
                        && (current % 100 == 0)
                        && current + u64::from(total != UBig::ZERO) > 0
                }))
            {
                break;
            }
            offset += 1;
        }
        if offset == 0 {
            return None;
        }
        let value = RBig::from(total + UBig::from(current));
        if let Some(bottom) = word_at(offset).and_then(word::part) {
            return Some((value / RBig::from(bottom), offset + 1));
        }
        Some((value, offset))
    }
}

fn ratio(top: u32, bottom: u32) -> RBig {
    RBig::from_parts(IBig::from(top), UBig::from(bottom))
}

/// Where the value starts in a sentence such as `The area is 12`: behind the last `is` or `:` that only words precede.
pub fn value_start(tokens: &[Token<'_>]) -> usize {
    const LEADS: [&str; 10] =
        ["approximately", "about", "approx", "roughly", "exactly", "only", "therefore", "thus", "so", "hence"];
    let mut start = 0;
    if matches!(tokens.first(), Some(Token { kind: Kind::Word(_), .. })) {
        let colons = tokens.iter().filter(|token| token.kind == Kind::Colon).count();
        for (at, token) in tokens.iter().enumerate() {
            match token.kind {
                Kind::Word("is" | "are" | "equals" | "be" | "was") => start = at + 1,
                Kind::Word(_) | Kind::Name { .. } | Kind::Period | Kind::Prime => {}
                Kind::Colon if colons == 1 => start = at + 1,
                // `the slope m = 2`
                Kind::Relation(relation) if start == 0 && matches!(tokens[at - 1].kind, Kind::Name { .. }) => {
                    let letter = match tokens[at - 1].kind {
                        Kind::Name { name, .. } if name.len() == 1 => name.chars().next(),
                        _ => None,
                    };
                    let says = |token: &Token<'_>| match token.kind {
                        Kind::Word(text) => {
                            !sentence::denies(text)
                                && (relation == Comparison::Equal || !sentence::restricts(text, letter))
                        }
                        _ => true,
                    };
                    start = if tokens[..at].iter().all(says) { at - 1 } else { 0 };
                    break;
                }
                _ => break,
            }
        }
        // `cannot be 5`
        if tokens[..start].iter().any(|token| matches!(token.kind, Kind::Word(text) if sentence::denies(text))) {
            return 0;
        }
        let answer = tokens[..start].iter().any(|token| {
            matches!(token.kind, Kind::Word(text) if ["answer", "the"].iter().any(|word| word.eq_ignore_ascii_case(text)))
        });
        // `Monday is a day` is no statement of a value.
        let value = tokens.get(start).is_some_and(|token| !matches!(token.kind, Kind::Word(_)))
            || matches!(tokens.get(start), Some(Token { kind: Kind::Word(text), .. }) if word::small_number(text).is_some());
        if !answer && !value {
            start = 0;
        }
    }
    if matches!(tokens.get(start), Some(Token { kind: Kind::Word(text), .. }) if text.eq_ignore_ascii_case("equal"))
        && matches!(tokens.get(start + 1), Some(Token { kind: Kind::Word("to"), .. }))
    {
        start += 2;
    }
    while let (Some(Token { kind: Kind::Word(text), .. }), Some(next)) = (tokens.get(start), tokens.get(start + 1)) {
        if matches!(next.kind, Kind::Word(_)) || !LEADS.iter().any(|lead| lead.eq_ignore_ascii_case(text)) {
            break;
        }
        start += 1;
    }
    if start < tokens.len() { start } else { 0 }
}

/// Whether tokens are prose: words, with the numbers and marks that prose has.
pub fn is_text(tokens: &[Token<'_>]) -> bool {
    let prose = tokens.iter().all(|token| {
        matches!(
            token.kind,
            Kind::Word(_)
                | Kind::Name { .. }
                | Kind::Number(_)
                | Kind::Function(_)
                | Kind::Period
                | Kind::Comma
                | Kind::Colon
                | Kind::Semicolon
                | Kind::Question
                | Kind::Bang
                | Kind::Prime
                | Kind::Minus
                | Kind::Slash
                | Kind::And
                | Kind::Ampersand
                | Kind::Circ
                | Kind::Open(Bracket::Round | Bracket::Group)
                | Kind::Close(Bracket::Round | Bracket::Group)
        )
    });
    prose && tokens.iter().any(|token| matches!(token.kind, Kind::Word(_)))
}
