//! Products and quotients, with and without signs; mixed numbers.

use dashu_int::IBig;
use dashu_int::ops::UnsignedAbs;
use dashu_ratio::RBig;

use super::super::ast::{Function, Node, NodeId, NumberForm};
use super::super::lexer::token::{Bracket, Kind};
use super::super::literal;
use super::super::unit::Unit;
use super::{Parsed, Parser};
use crate::error::ParseError;

/// The largest exponent of ten that makes a number literal: `1.5 \times 10^{-3}`.
const LARGEST_SCIENTIFIC: i64 = 4096;

impl<'t> Parser<'_, 't> {
    /// Factors with or without signs between them, quotients, and what stands behind a value.
    pub(super) fn product(&mut self) -> Parsed<NodeId> {
        let first = self.factor()?;
        if matches!(self.ast.node(first), Node::Text(_) | Node::Either(_)) {
            return Ok(first);
        }
        let mut factors = vec![first];
        let mut implicit = true;
        loop {
            self.note_letter_unit();
            if self.eat(Kind::Times) || self.eat_word("times") {
                let factor = self.signed(Self::factor)?;
                implicit = false;
                self.times(&mut factors, factor)?;
            } else if self.eat(Kind::Slash) || self.eat(Kind::Divide) {
                let divisor = self.divisor()?;
                let left = self.multiplied(factors, implicit)?;
                factors = vec![self.quotient(left, divisor)?];
                implicit = true;
            } else if let Some(mixed) = self.mixed(&factors)? {
                let mixed = self.postfix(mixed)?;
                factors.pop();
                factors.push(mixed);
            } else if self.choose_letter(&mut factors)? || self.restated(&factors) {
            } else if self.juxtaposed() {
                let factor = self.factor()?;
                factors.push(factor);
            } else {
                let left = self.multiplied(factors, implicit)?;
                let Some(value) = self.suffix(left)? else { return Ok(left) };
                factors = vec![value];
                implicit = true;
            }
        }
    }

    fn multiplied(&mut self, factors: Vec<NodeId>, implicit: bool) -> Parsed<NodeId> {
        match factors[..] {
            [only] => Ok(only),
            _ => self.push(Node::Mul { factors, implicit }),
        }
    }

    /// Append a factor; `1.5 × 10^{-3}` is one literal.
    fn times(&mut self, factors: &mut Vec<NodeId>, factor: NodeId) -> Parsed<()> {
        if let ([only], &Node::Pow(base, exponent)) = (&factors[..], self.ast.node(factor))
            && let Node::Number { value, form: NumberForm::Integer | NumberForm::Decimal { .. } } = self.ast.node(*only)
            && matches!(self.ast.node(base), Node::Number { value, .. } if *value == RBig::from(10))
            && let Node::Number { value: exponent, form: NumberForm::Integer } = self.ast.node(exponent)
            && let Some(exponent) = small_integer(exponent).filter(|exponent| exponent.abs() <= LARGEST_SCIENTIFIC)
        {
            let value = value * literal::scaled(IBig::ONE, exponent)?;
            factors.clear();
            let literal = self.push(Node::Number { value, form: NumberForm::Scientific })?;
            factors.push(literal);
            return Ok(());
        }
        factors.push(factor);
        Ok(())
    }

    /// What follows `/`: one factor, or, where that is chosen, all that is joined to it.
    fn divisor(&mut self) -> Parsed<NodeId> {
        let first = self.signed(Self::factor)?;
        let mut factors = vec![first];
        while self.juxtaposed() && !self.space_at(0) {
            self.seen.division = true;
            if !self.choices.tight_division {
                break;
            }
            let factor = self.factor()?;
            factors.push(factor);
        }
        self.multiplied(factors, true)
    }

    /// A quotient; of integer literals it is a literal.
    pub(super) fn quotient(&mut self, top: NodeId, bottom: NodeId) -> Parsed<NodeId> {
        let integer = |node: &Node| match node {
            Node::Number { value, form: NumberForm::Integer } => Some(value.clone()),
            _ => None,
        };
        if let (Some(a), Some(b)) = (integer(self.ast.node(top)), integer(self.ast.node(bottom)))
            && !b.is_zero()
        {
            let value = a / &b;
            let lowest = value.denominator() == &b.numerator().unsigned_abs();
            return self.push(Node::Number { value, form: NumberForm::Fraction { lowest } });
        }
        self.push(Node::Div(top, bottom))
    }

    /// `3\frac12` and `3 1/2`, at the fraction.
    fn mixed(&mut self, factors: &[NodeId]) -> Parsed<Option<NodeId>> {
        let Some(&last) = factors.last() else { return Ok(None) };
        let Node::Number { value: whole, form: NumberForm::Integer } = self.ast.node(last) else { return Ok(None) };
        let Some(Kind::Number(_)) = self.previous() else { return Ok(None) };
        let whole = whole.clone();
        let start = self.at;
        let part = match (self.peek(), self.kind_at(1), self.kind_at(2)) {
            (Some(Kind::Frac), ..) => self.primary()?,
            (Some(Kind::Number(top)), Some(Kind::Slash), Some(Kind::Number(bottom))) if self.space_at(0) => {
                let more = matches!(self.kind_at(3), Some(Kind::Slash | Kind::Caret | Kind::Number(_)));
                if more || ![top, bottom].iter().all(|digits| digits.bytes().all(|byte| byte.is_ascii_digit())) {
                    return Ok(None);
                }
                self.at += 3;
                let (top, bottom) = (literal::value(top)?.0, literal::value(bottom)?.0);
                if bottom.is_zero() {
                    return Err(ParseError::Unparseable);
                }
                self.push(Node::Number { value: top / bottom, form: NumberForm::Fraction { lowest: true } })?
            }
            _ => return Ok(None),
        };
        if let Node::Number { value, form: NumberForm::Fraction { .. } } = self.ast.node(part)
            && *value > RBig::ZERO
            && *value < RBig::ONE
        {
            let value = whole + value;
            return self.push(Node::Number { value, form: NumberForm::Mixed }).map(Some);
        }
        self.at = start;
        Ok(None)
    }

    /// `1800 g (1.8 kg)`, at the bracket: the same amount in another unit says nothing new.
    fn restated(&mut self, factors: &[NodeId]) -> bool {
        let &[only] = factors else { return false };
        let Some(first) = self.amount(only) else { return false };
        let start = self.at;
        let bracket = self.eat(Kind::Open(Bracket::Round)) && matches!(self.peek(), Some(Kind::Number(_)));
        let same = bracket
            && self.bare_amount().is_some_and(|second| first.0 == second.0 && first.1.commensurable(&second.1))
            && self.eat(Kind::Close(Bracket::Round));
        if !same {
            self.at = start;
        }
        same
    }

    /// A literal and its unit, at the literal.
    fn bare_amount(&mut self) -> Option<(RBig, Unit)> {
        let Some(Kind::Number(raw)) = self.peek() else { return None };
        self.at += 1;
        let (value, _) = literal::value(raw).ok()?;
        let unit = self.unit().ok()??;
        Some((value * &unit.factor, unit))
    }

    /// A number of a unit, in the coherent units of its dimension.
    fn amount(&self, id: NodeId) -> Option<(RBig, Unit)> {
        let Node::Quantity { value, unit } = self.ast.node(id) else { return None };
        let Node::Number { value, .. } = self.ast.node(*value) else { return None };
        Some((value * &unit.factor, unit.clone()))
    }

    /// `5C2` and `5P2`, at the letter.
    fn choose_letter(&mut self, factors: &mut Vec<NodeId>) -> Parsed<bool> {
        let (Some(Kind::Number(_)), Some(Kind::Name { name: name @ ("C" | "P"), .. }), Some(Kind::Number(_))) =
            (self.previous(), self.peek(), self.kind_at(1))
        else {
            return Ok(false);
        };
        if self.space_at(0) != self.space_at(1) {
            return Ok(false);
        }
        let Some(top) = factors.pop() else { return Ok(false) };
        self.at += 1;
        let bottom = self.primary()?;
        let node = if name == "C" { Node::Binomial(top, bottom) } else { Node::Permutations(top, bottom) };
        let node = self.push(node)?;
        factors.push(node);
        Ok(true)
    }

    /// Whether a factor follows without a sign.
    pub(super) fn juxtaposed(&self) -> bool {
        match self.peek() {
            // `n2^{n}` and `n 2` are products, `x2` is not known to be one.
            Some(Kind::Number(_) | Kind::Numeral { .. }) => match self.previous() {
                Some(Kind::Name { .. } | Kind::Constant(_)) => self.space_at(0) || self.kind_at(1) == Some(Kind::Caret),
                Some(Kind::Close(_) | Kind::Bar | Kind::DoubleBar | Kind::Bang | Kind::Prime | Kind::Degree) => true,
                // `2^6 3^5`: a power beside a power.
                Some(Kind::Number(_)) => {
                    let power = self.at.checked_sub(2).and_then(|at| self.tokens.get(at));
                    self.space_at(0)
                        && self.kind_at(1) == Some(Kind::Caret)
                        && power.is_some_and(|token| token.kind == Kind::Caret)
                }
                _ => false,
            },
            Some(Kind::Name { name: "U", .. }) => {
                !(matches!(self.previous(), Some(Kind::Close(_))) && matches!(self.kind_at(1), Some(Kind::Open(_))))
            }
            Some(Kind::Name { .. }) => !self.letter_unit(),
            Some(Kind::Frac) => !self.unit_fraction(),
            Some(Kind::Function(Function::Min | Function::Sec)) => !self.function_as_unit(),
            Some(Kind::Open(Bracket::Round)) => {
                !(self.condition_follows()
                    || self.kind_at(1) == Some(Kind::Mod)
                    || self.word_at(1, "mod")
                    || self.word_at(1, "modulo")
                    || self.word_at(1, "base"))
            }
            Some(Kind::Open(Bracket::Square)) => !self.context.french,
            Some(Kind::Open(Bracket::Curly | Bracket::Angle)) => false,
            Some(Kind::Bar) => !self.context.bar && !self.context.set && self.bar_closes_later(),
            Some(Kind::DoubleBar) => !self.context.double_bar,
            Some(
                Kind::Function(_)
                | Kind::Log(_)
                | Kind::Det
                | Kind::Constant(_)
                | Kind::Binom
                | Kind::Sqrt
                | Kind::CubeRoot
                | Kind::Overline
                | Kind::Figure(_)
                | Kind::Arrow(_)
                | Kind::Sum
                | Kind::Product
                | Kind::Operator(_)
                | Kind::Open(_)
                | Kind::Enclose(_)
                | Kind::Begin(_),
            ) => true,
            _ => false,
        }
    }

    /// `a | b` is no absolute value when no other bar follows.
    fn bar_closes_later(&self) -> bool {
        const FARTHEST: usize = 64;
        self.tokens.iter().skip(self.at + 1).take(FARTHEST).any(|token| token.kind == Kind::Bar)
    }
}

/// The value of a small integer.
pub(super) fn small_integer(value: &RBig) -> Option<i64> {
    value.denominator().is_one().then(|| i64::try_from(value.numerator()).ok()).flatten()
}
