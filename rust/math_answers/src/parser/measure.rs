//! Units behind a value: `cm`, `m/s^2`, `\frac{\text{km}}{\text{h}}`, counted things; and when a letter is one.

use super::super::ast::Function;
use super::super::lexer::token::{Bracket, Kind, Style};
use super::super::literal;
use super::super::unit::Unit;
use super::super::word;
use super::{Parsed, Parser};
use crate::error::ParseError;

/// Single letters that may be a unit behind a number and a space.
const LETTER_UNITS: [&str; 17] =
    ["m", "g", "s", "L", "l", "h", "N", "J", "W", "V", "A", "K", "C", "F", "T", "H", "Omega"];
/// What is measured, behind the unit at the end of an answer: `5 cm long`, `18 years old`.
const MEASURED: [&str; 14] = [
    "long",
    "wide",
    "tall",
    "high",
    "deep",
    "thick",
    "old",
    "away",
    "apart",
    "far",
    "left",
    "altogether",
    "remaining",
    "total",
];
/// Factors of one unit expression.
const MOST_FACTORS: usize = 8;

impl<'t> Parser<'_, 't> {
    /// Whether the letter here is a unit: upright, part of `m/s`, or behind a number and a space where that is chosen.
    pub(super) fn letter_unit(&self) -> bool {
        let Some(Kind::Name { name, style }) = self.peek() else { return false };
        if !matches!(self.previous(), Some(Kind::Number(_) | Kind::Close(_) | Kind::Constant(_))) {
            return false;
        }
        if name == "mu" {
            return self.prefixed_unit().is_some();
        }
        match style {
            Style::Upright => name != "e" && name != "i" && Unit::known(name).is_some(),
            Style::Bold => false,
            Style::Plain => self.choices.letter_units && self.could_be_letter_unit(),
        }
    }

    /// Whether a plain letter here is a possible unit: `5 m`, `9.8 m/s^2`.
    fn could_be_letter_unit(&self) -> bool {
        let Some(Kind::Name { name, style: Style::Plain }) = self.peek() else { return false };
        let ends = |kind: Option<Kind<'t>>| {
            matches!(
                kind,
                None | Some(Kind::Comma | Kind::Semicolon | Kind::Slash | Kind::Caret | Kind::Times | Kind::Word(_))
            )
        };
        LETTER_UNITS.contains(&name)
            && matches!(self.previous(), Some(Kind::Number(digits))
                // A coefficient has no thousands marks: `1,000.99m^2`.
                if self.space_at(0) || self.kind_at(1) == Some(Kind::Slash) || digits.contains(','))
            && (ends(self.kind_at(1)) || self.restates_letter())
    }

    /// `1800 g (1.8 kg)`, at the letter: what stands in brackets is the same amount.
    fn restates_letter(&self) -> bool {
        let unit = |offset: usize| match self.kind_at(offset) {
            Some(Kind::Name { name, .. } | Kind::Word(name)) => Unit::known(name),
            _ => None,
        };
        let (Some(Kind::Number(first)), Some(Kind::Open(Bracket::Round)), Some(Kind::Number(second))) =
            (self.previous(), self.kind_at(1), self.kind_at(2))
        else {
            return false;
        };
        let (Some(of), Some(other)) = (unit(0), unit(3)) else { return false };
        let (Ok(first), Ok(second)) = (literal::value(first), literal::value(second)) else { return false };
        of.commensurable(&other) && first.0 * of.factor == second.0 * other.factor
    }

    /// `\mu\mathrm{m}`, at the prefix.
    fn prefixed_unit(&self) -> Option<Unit> {
        match self.kind_at(1)? {
            Kind::Name { name, style: Style::Upright } | Kind::Word(name) => Unit::known(name).map(Unit::millionth),
            _ => None,
        }
    }

    /// Note that a letter here would read as a unit under the other choice.
    pub(super) fn note_letter_unit(&mut self) {
        self.seen.letter_unit |= self.could_be_letter_unit() || self.could_be_unit_fraction();
    }

    /// `5 min`, `30 sec`: names of functions without an argument.
    pub(super) fn function_as_unit(&self) -> bool {
        matches!(self.previous(), Some(Kind::Number(_)))
            && !matches!(
                self.kind_at(1),
                Some(Kind::Open(_) | Kind::Name { .. } | Kind::Caret | Kind::Frac | Kind::Constant(_))
            )
    }

    /// A product of powers of units.
    pub(super) fn unit(&mut self) -> Parsed<Option<Unit>> {
        let mut unit = Unit::one();
        let mut sign = 1;
        for count in 0..MOST_FACTORS {
            let start = self.at;
            if sign < 0 && self.opens(Bracket::Round) {
                self.at += 1;
                let inner = self.nested(Self::unit)?;
                let (Some(inner), true) = (inner, self.eat(Kind::Close(Bracket::Round))) else {
                    self.at = start;
                    break;
                };
                unit.multiply(&inner, sign);
            } else if let Some((factor, power)) = self.unit_factor(count == 0 || sign < 0)? {
                unit.multiply(&factor, power.saturating_mul(sign));
            } else {
                self.at = start;
                return Ok((count > 0 && sign > 0).then_some(unit));
            }
            if self.peek() == Some(Kind::Period) && self.kind_at(1).is_some() {
                self.at += 1;
            }
            if matches!(self.peek(), Some(Kind::Word(text)) if MEASURED.contains(&text)) && self.kind_at(1).is_none() {
                self.at += 1;
            }
            let known_follows = |parser: &Self, offset| parser.known_unit_at(offset);
            if self.eat(Kind::Slash) || self.eat_word("per") || self.eat_word("a") || self.eat_word("an") {
                sign = -1;
            } else if self.peek() == Some(Kind::Times) && known_follows(self, 1) {
                self.at += 1;
                sign = 1;
            } else if known_follows(self, 0) {
                sign = 1;
            } else {
                return Ok(Some(unit));
            }
        }
        Err(ParseError::Unparseable)
    }

    /// Whether `\frac{\text{km}}{\text{h}}` stands here; of plain letters where that is chosen.
    pub(super) fn unit_fraction(&self) -> bool {
        self.peek() == Some(Kind::Frac)
            && match (self.kind_at(1), self.kind_at(2)) {
                (Some(Kind::Open(Bracket::Group)), Some(Kind::Word(text))) => Unit::known(text).is_some(),
                (Some(Kind::Open(Bracket::Group)), Some(Kind::Name { name, style: Style::Upright })) => {
                    Unit::known(name).is_some()
                }
                _ => self.choices.letter_units && self.could_be_unit_fraction(),
            }
    }

    /// Whether `\frac{m}{s}` stands behind a number.
    fn could_be_unit_fraction(&self) -> bool {
        let letter =
            |kind| matches!(kind, Some(Kind::Name { name, style: Style::Plain }) if LETTER_UNITS.contains(&name));
        self.peek() == Some(Kind::Frac)
            && matches!(self.previous(), Some(Kind::Number(_)))
            && letter(self.kind_at(2))
            && self.kind_at(3) == Some(Kind::Close(Bracket::Group))
            && letter(self.kind_at(5))
    }

    /// A unit in braces.
    fn unit_group(&mut self) -> Parsed<Unit> {
        self.expect(Kind::Open(Bracket::Group))?;
        let grouped = self.eat(Kind::Open(Bracket::Group));
        let unit = self.nested(Self::unit)?.ok_or(ParseError::Unparseable)?;
        if grouped {
            self.expect(Kind::Close(Bracket::Group))?;
        }
        self.expect(Kind::Close(Bracket::Group))?;
        Ok(unit)
    }

    fn known_unit_at(&self, offset: usize) -> bool {
        match self.kind_at(offset) {
            Some(Kind::Word(text)) => {
                (Unit::known(text).is_some() && !word::is_function_word(text))
                    || matches!(text, "square" | "cubic" | "sq" | "cu")
            }
            Some(Kind::Name { name, .. }) => LETTER_UNITS.contains(&name) && self.space_at(offset),
            _ => false,
        }
    }

    /// A unit with its power; `anything` allows nouns that are no unit.
    fn unit_factor(&mut self, anything: bool) -> Parsed<Option<(Unit, i8)>> {
        let mut power = 1;
        for (names, exponent) in [(["square", "sq"], 2), (["cubic", "cu"], 3)] {
            if names.iter().any(|name| self.word_at(0, name))
                && matches!(self.kind_at(1), Some(Kind::Word(_) | Kind::Period))
            {
                self.at += 1;
                self.eat(Kind::Period);
                power = exponent;
                break;
            }
        }
        let unit = match self.peek() {
            Some(Kind::Frac) if self.unit_fraction() => {
                self.at += 1;
                let mut unit = self.unit_group()?;
                let below = self.unit_group()?;
                unit.multiply(&below, -1);
                unit
            }
            Some(Kind::Word(text)) => {
                // A preposition, unless nothing follows: `5 in`.
                let preposition = word::is_function_word(text) && !(text == "in" && self.ends_unit(1));
                match Unit::known(text) {
                    Some(unit) if !preposition => {
                        self.at += 1;
                        unit
                    }
                    _ => match self.noun(anything && power == 1) {
                        Some(unit) => unit,
                        None => return Ok(None),
                    },
                }
            }
            Some(Kind::Name { name: "mu", .. }) => match self.prefixed_unit() {
                Some(unit) => {
                    self.at += 2;
                    unit
                }
                None => return Ok(None),
            },
            Some(Kind::Name { name, .. }) => match Unit::known(name) {
                Some(unit) => {
                    self.at += 1;
                    unit
                }
                None => return Ok(None),
            },
            Some(Kind::Function(Function::Min)) => {
                self.at += 1;
                Unit::known("min").unwrap_or_else(Unit::one)
            }
            Some(Kind::Function(Function::Sec)) => {
                self.at += 1;
                Unit::known("s").unwrap_or_else(Unit::one)
            }
            _ => return Ok(None),
        };
        if self.eat_word("squared") {
            power = 2;
        } else if self.eat_word("cubed") {
            power = 3;
        } else if let Some(exponent) = self.unit_exponent() {
            power = exponent;
        }
        Ok(Some((unit, power)))
    }

    /// Whether nothing that a preposition needs follows.
    fn ends_unit(&self, offset: usize) -> bool {
        matches!(
            self.kind_at(offset),
            None | Some(
                Kind::Comma | Kind::Semicolon | Kind::Caret | Kind::Close(_) | Kind::Slash | Kind::Times | Kind::Period
            )
        )
    }

    /// `^2`, `^{-1}`.
    fn unit_exponent(&mut self) -> Option<i8> {
        if self.peek() != Some(Kind::Caret) {
            return None;
        }
        let mut at = 1;
        let grouped = self.kind_at(at) == Some(Kind::Open(Bracket::Group));
        at += usize::from(grouped);
        let negative = self.kind_at(at) == Some(Kind::Minus);
        at += usize::from(negative);
        let Some(Kind::Number(raw)) = self.kind_at(at) else { return None };
        let exponent = raw.parse::<i8>().ok().filter(|exponent| (1..=9).contains(exponent))?;
        at += 1;
        if grouped {
            if self.kind_at(at) != Some(Kind::Close(Bracket::Group)) {
                return None;
            }
            at += 1;
        }
        self.at += at;
        Some(if negative { -exponent } else { exponent })
    }

    /// Words that say what is counted: `different ways to arrange them` counts ways.
    fn noun(&mut self, anything: bool) -> Option<Unit> {
        if !anything {
            return None;
        }
        // `17 of those apples` counts something else, `17 such numbers` does not.
        let determiner = matches!(self.peek(), Some(Kind::Word("any" | "such" | "these" | "those")));
        if determiner && matches!(self.kind_at(1), Some(Kind::Word(text)) if !word::is_function_word(text)) {
            self.at += 1;
        }
        let mut noun = None;
        while let Some(Kind::Word(text)) = self.peek() {
            if word::is_function_word(text) || text.starts_with(|c: char| c.is_ascii_digit()) {
                break;
            }
            noun = Some(text);
            self.at += 1;
        }
        let unit = Unit::counted(noun?);
        // What the noun is about says nothing of the value, when it is prose to the end.
        let prose = |token: &super::super::lexer::token::Token<'t>| {
            matches!(token.kind, Kind::Word(text) if text != "and" && text != "or")
                || matches!(token.kind, Kind::Name { .. } | Kind::Period)
        };
        if matches!(self.peek(), Some(Kind::Word(_)))
            && self.tokens[self.at..].iter().all(prose)
            && !self.word_at(0, "per")
        {
            self.at = self.tokens.len();
        }
        Some(unit)
    }
}
