//! What stands behind a value: units, currencies, degrees, magnitudes, bases, counted things.

use dashu_ratio::RBig;

use super::super::super::Status;
use super::super::ast::{DegreePart, Function, Node, NodeId, NumberForm};
use super::super::literal;
use super::super::token::{Bracket, Kind, Style};
use super::super::unit::Unit;
use super::super::word;
use super::{Context, Parsed, Parser};

/// Single letters that may be a unit behind a number and a space.
const LETTER_UNITS: [&str; 17] =
    ["m", "g", "s", "L", "l", "h", "N", "J", "W", "V", "A", "K", "C", "F", "T", "H", "Omega"];
/// Factors of one unit expression.
const MOST_FACTORS: usize = 8;

impl<'t> Parser<'_, 't> {
    /// The value together with what stands behind it; `None` when nothing of the kind does.
    pub(super) fn suffix(&mut self, value: NodeId) -> Parsed<Option<NodeId>> {
        match self.peek() {
            Some(Kind::Word(text)) => self.word_suffix(value, text),
            Some(Kind::Name { .. }) if self.letter_unit() => self.quantity(value),
            Some(Kind::Frac) if self.unit_fraction() => self.quantity(value),
            Some(Kind::Function(Function::Min | Function::Sec)) if self.function_as_unit() => self.quantity(value),
            Some(Kind::Currency(code)) => {
                if !self.is_amount(value) {
                    return Ok(None);
                }
                self.at += 1;
                self.push(Node::Quantity { value, unit: Unit::named(code) }).map(Some)
            }
            Some(Kind::Open(Bracket::Round)) if self.word_at(1, "base") => {
                self.at += 2;
                let value = self.in_base(value, 1)?;
                self.expect(Kind::Close(Bracket::Round))?;
                Ok(Some(value))
            }
            Some(Kind::Number(_)) => self.next_quantity(value),
            _ => Ok(None),
        }
    }

    fn word_suffix(&mut self, value: NodeId, text: &'t str) -> Parsed<Option<NodeId>> {
        match text.to_ascii_lowercase().as_str() {
            "percent" | "percents" | "pct" => {
                self.at += 1;
                return self.push(Node::Percent(value)).map(Some);
            }
            "per" if self.word_at(1, "cent") => {
                self.at += 2;
                return self.push(Node::Percent(value)).map(Some);
            }
            "degrees" | "degree" | "deg" => {
                self.at += 1;
                return self.degrees(value).map(Some);
            }
            "base" => {
                self.at += 1;
                return self.in_base(value, 0).map(Some);
            }
            "in" if self.word_at(1, "base") => {
                self.at += 2;
                return self.in_base(value, 0).map(Some);
            }
            "choose" => {
                self.at += 1;
                let bottom = self.factor()?;
                return self.push(Node::Binomial(value, bottom)).map(Some);
            }
            "th" | "st" | "nd" | "rd" => {
                let Some(Kind::Number(digits)) = self.previous() else { return Err(Status::Unparseable) };
                self.at += 1;
                return self.push(Node::Text([digits, text].concat())).map(Some);
            }
            // A time of day is text.
            "am" | "pm" | "a.m" | "p.m" | "o'clock" => return Err(Status::Unparseable),
            "factorial" => {
                self.at += 1;
                return self.push(Node::Factorial(value)).map(Some);
            }
            "squared" | "cubed" => {
                self.at += 1;
                let exponent = RBig::from(if text.starts_with(['s', 'S']) { 2 } else { 3 });
                let exponent = self.push(Node::Number { value: exponent, form: NumberForm::Integer })?;
                return self.push(Node::Pow(value, exponent)).map(Some);
            }
            _ => {}
        }
        if let Some(power) = word::magnitude(text) {
            self.at += 1;
            return self.magnified(value, power).map(Some);
        }
        if matches!(self.ast.node(value), Node::Text(_)) { Ok(None) } else { self.quantity(value) }
    }

    fn magnified(&mut self, value: NodeId, power: u32) -> Parsed<NodeId> {
        let ten = literal::scaled(dashu_int::IBig::ONE, i64::from(power))?;
        if let Node::Number { value, .. } = self.ast.node(value) {
            let value = value * ten;
            return self.push(Node::Number { value, form: NumberForm::Words });
        }
        // `$5 million`
        if let Node::Quantity { value, unit } = self.ast.node(value) {
            let (value, unit) = (*value, unit.clone());
            let value = self.nested(|parser| parser.magnified(value, power))?;
            return self.push(Node::Quantity { value, unit });
        }
        let ten = self.push(Node::Number { value: ten, form: NumberForm::Words })?;
        self.push(Node::Mul { factors: vec![value, ten], implicit: false })
    }

    /// `52 base 8`, behind the word; `offset` tokens before it belong to it too.
    fn in_base(&mut self, value: NodeId, offset: usize) -> Parsed<NodeId> {
        let behind = self.at;
        let words = 1 + offset + usize::from(offset == 0 && matches!(self.kind_before(2), Some(Kind::Word("in"))));
        self.at = behind.saturating_sub(words);
        let digits = self.digits_of(value);
        self.at = behind;
        let digits = digits.ok_or(Status::Unparseable)?;
        let base = self.base().ok_or(Status::Unparseable)?;
        let value = literal::in_base(&digits, base).ok_or(Status::Unparseable)?;
        self.push(Node::BaseNumeral { digits, base, value })
    }

    fn kind_before(&self, offset: usize) -> Option<Kind<'t>> {
        self.at.checked_sub(offset).and_then(|at| self.tokens.get(at)).map(|token| token.kind)
    }

    /// Whether the value can be so many of something.
    fn is_amount(&self, value: NodeId) -> bool {
        !matches!(
            self.ast.node(value),
            Node::Symbol(_)
                | Node::Text(_)
                | Node::Apply { .. }
                | Node::Quantity { .. }
                | Node::Set(_)
                | Node::Tuple(_)
                | Node::Ellipsis
                | Node::EmptySet
                | Node::NamedSet { .. }
        )
    }

    /// A value with the unit that stands here, if one does.
    fn quantity(&mut self, value: NodeId) -> Parsed<Option<NodeId>> {
        if !self.is_amount(value) {
            // `$5 dollars` and `$5 per hour`
            return self.more_of_unit(value);
        }
        let start = self.at;
        let Some(unit) = self.unit()? else {
            self.at = start;
            return Ok(None);
        };
        self.push(Node::Quantity { value, unit }).map(Some)
    }

    /// `per hour` behind an amount of money, and the currency's name behind its sign.
    fn more_of_unit(&mut self, quantity: NodeId) -> Parsed<Option<NodeId>> {
        let Node::Quantity { value, unit } = self.ast.node(quantity) else { return Ok(None) };
        let (value, mut unit) = (*value, unit.clone());
        if let Some(Kind::Word(text)) = self.peek()
            && Unit::known(text).as_ref() == Some(&unit)
        {
            self.at += 1;
            return Ok(Some(quantity));
        }
        if !(self.word_at(0, "per") || self.word_at(0, "each") || self.word_at(0, "a") || self.word_at(0, "an")) {
            return Ok(None);
        }
        self.at += 1;
        if let Some(more) = self.unit()? {
            unit.multiply(&more, -1);
        }
        self.push(Node::Quantity { value, unit }).map(Some)
    }

    /// `5 feet 6 inches`, at the second number.
    fn next_quantity(&mut self, first: NodeId) -> Parsed<Option<NodeId>> {
        if !matches!(self.ast.node(first), Node::Quantity { .. }) {
            return Ok(None);
        }
        let start = self.at;
        let value = self.primary()?;
        if let Some(second) = self.quantity(value)?
            && let Some(whole) = self.compound(first, second)?
        {
            return Ok(Some(whole));
        }
        self.at = start;
        Ok(None)
    }

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
            && matches!(self.previous(), Some(Kind::Number(_)))
            && (self.space_at(0) || self.kind_at(1) == Some(Kind::Slash))
            && ends(self.kind_at(1))
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
        self.seen.letter_unit |= self.could_be_letter_unit();
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
    fn unit(&mut self) -> Parsed<Option<Unit>> {
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
        Err(Status::Unparseable)
    }

    /// Whether `\frac{\text{km}}{\text{h}}` stands here.
    pub(super) fn unit_fraction(&self) -> bool {
        self.peek() == Some(Kind::Frac)
            && match (self.kind_at(1), self.kind_at(2)) {
                (Some(Kind::Open(Bracket::Group)), Some(Kind::Word(text))) => Unit::known(text).is_some(),
                (Some(Kind::Open(Bracket::Group)), Some(Kind::Name { name, style: Style::Upright })) => {
                    Unit::known(name).is_some()
                }
                _ => false,
            }
    }

    /// A unit in braces.
    fn unit_group(&mut self) -> Parsed<Unit> {
        self.expect(Kind::Open(Bracket::Group))?;
        let grouped = self.eat(Kind::Open(Bracket::Group));
        let unit = self.nested(Self::unit)?.ok_or(Status::Unparseable)?;
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
        let prose = |token: &super::super::token::Token<'t>| {
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

    /// Degrees of arc, or of temperature when a scale follows.
    pub(super) fn degrees(&mut self, value: NodeId) -> Parsed<NodeId> {
        let scale = match self.peek() {
            Some(Kind::Name { name, .. } | Kind::Word(name)) => match name {
                "C" | "Celsius" | "celsius" | "centigrade" => Some("degree celsius"),
                "F" | "Fahrenheit" | "fahrenheit" => Some("degree fahrenheit"),
                _ => None,
            },
            _ => None,
        };
        if let Some(scale) = scale {
            self.at += 1;
            return self.push(Node::Quantity { value, unit: Unit::named(scale) });
        }
        let degrees = self.push(Node::Degree { value, part: DegreePart::Degree })?;
        // `12° 30' 15''`
        let mut parts = vec![degrees];
        while let (Some(Kind::Number(_)), true) =
            (self.peek(), matches!(self.kind_at(1), Some(Kind::Prime | Kind::Caret)))
        {
            let primes = if self.kind_at(1) == Some(Kind::Prime) { 1 } else { 2 };
            if primes == 2 && self.kind_at(2) != Some(Kind::Prime) && self.kind_at(3) != Some(Kind::Prime) {
                break;
            }
            let value = self.primary()?;
            let part = self.minutes(value)?;
            parts.push(part);
        }
        match parts[..] {
            [only] => Ok(only),
            _ => self.push(Node::Add(parts)),
        }
    }

    /// Minutes or seconds of arc, at the primes behind a number.
    pub(super) fn minutes(&mut self, value: NodeId) -> Parsed<NodeId> {
        if !matches!(self.ast.node(value), Node::Number { .. }) {
            return Err(Status::Unparseable);
        }
        self.eat(Kind::Caret);
        let grouped = self.eat(Kind::Open(Bracket::Group));
        let mut primes = 0;
        while self.eat(Kind::Prime) {
            primes += 1;
        }
        if grouped {
            self.expect(Kind::Close(Bracket::Group))?;
        }
        self.arc_minutes(value, primes)
    }

    pub(super) fn arc_minutes(&mut self, value: NodeId, primes: u32) -> Parsed<NodeId> {
        let part = match primes {
            1 => DegreePart::Minute,
            2 => DegreePart::Second,
            _ => return Err(Status::Unparseable),
        };
        self.push(Node::Degree { value, part })
    }

    /// `\$5`, `US\$5.50`, at the sign.
    pub(super) fn currency(&mut self, code: &'static str) -> Parsed<NodeId> {
        self.at += 1;
        let negative = self.eat(Kind::Minus);
        let mut value = self.within(Context::default(), Self::product)?;
        if negative {
            value = self.push(Node::Neg(value))?;
        }
        let mut unit = Unit::named(code);
        if let Node::Quantity { value: inner, unit: more } = self.ast.node(value) {
            // `$5 per hour`: the value came with a unit of its own.
            let (inner, more) = (*inner, more.clone());
            if more != unit {
                unit.multiply(&more, 1);
            }
            value = inner;
        }
        self.push(Node::Quantity { value, unit })
    }
}
