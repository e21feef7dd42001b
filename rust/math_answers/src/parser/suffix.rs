//! What stands behind a value: units, currencies, degrees, magnitudes, bases, counted things.

use dashu_ratio::RBig;

use super::super::ast::{DegreePart, Function, Node, NodeId, NumberForm};
use super::super::lexer::token::{Bracket, Kind};
use super::super::literal;
use super::super::unit::Unit;
use super::super::word;
use super::{Context, Parsed, Parser};
use crate::error::ParseError;

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
            "percent" | "percents" | "percentage" | "pct" => {
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
                let Some(Kind::Number(digits)) = self.previous() else { return Err(ParseError::Unparseable) };
                self.at += 1;
                return self.push(Node::Text([digits, text].concat())).map(Some);
            }
            // A time of day is text.
            "am" | "pm" | "a.m" | "p.m" | "o'clock" => return Err(ParseError::Unparseable),
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
        let digits = digits.ok_or(ParseError::Unparseable)?;
        let base = self.base().ok_or(ParseError::Unparseable)?;
        let value = literal::in_base(&digits, base).ok_or(ParseError::Unparseable)?;
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
            return Err(ParseError::Unparseable);
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
            _ => return Err(ParseError::Unparseable),
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
