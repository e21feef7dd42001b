//! Set operations, ratios, sums, products and powers.

use super::super::ast::{Constant, Node, NodeId, SetPart};
use super::super::lexer::command;
use super::super::lexer::token::Kind;
use super::{Parsed, Parser};
use crate::error::ParseError;

impl<'t> Parser<'_, 't> {
    /// `a ∪ b ∖ c`.
    pub(super) fn union(&mut self) -> Parsed<NodeId> {
        let first = self.intersection()?;
        let mut parts = vec![first];
        loop {
            if self.eat(Kind::Cup) || self.eat_cup_letter() {
                let next = self.intersection()?;
                parts.push(next);
            } else if self.eat(Kind::SetMinus) {
                let next = self.intersection()?;
                let left = self.joined(parts, Node::Union)?;
                let (left, next) = (self.as_interval(left)?, self.as_interval(next)?);
                parts = vec![self.push(Node::Difference(left, next))?];
            } else {
                return self.joined(parts, Node::Union);
            }
        }
    }

    /// `(0, 1) U (2, 3)`.
    fn eat_cup_letter(&mut self) -> bool {
        let union = matches!(self.peek(), Some(Kind::Name { name: "U", .. }))
            && matches!(self.previous(), Some(Kind::Close(_)))
            && matches!(self.kind_at(1), Some(Kind::Open(_)));
        let union = union || (self.word_at(0, "union") && matches!(self.previous(), Some(Kind::Close(_))));
        self.at += usize::from(union);
        union
    }

    fn intersection(&mut self) -> Parsed<NodeId> {
        let first = self.ratio()?;
        let mut parts = vec![first];
        while self.eat(Kind::Cap) {
            let next = self.ratio()?;
            parts.push(next);
        }
        self.joined(parts, Node::Intersection)
    }

    /// One part as it is; several are sets.
    fn joined(&mut self, mut parts: Vec<NodeId>, node: fn(Vec<NodeId>) -> Node) -> Parsed<NodeId> {
        if let [only] = parts[..] {
            return Ok(only);
        }
        for part in &mut parts {
            *part = self.as_interval(*part)?;
        }
        self.push(node(parts))
    }

    /// A pair as the interval that its place makes it.
    pub(super) fn as_interval(&mut self, id: NodeId) -> Parsed<NodeId> {
        let (items, closed) = match self.ast.node(id) {
            Node::Tuple(items) => (items, false),
            Node::Brackets(items) => (items, true),
            Node::Symbol(symbol) => {
                let mut letters = self.ast.name(*symbol).chars();
                let set = match (letters.next(), letters.next()) {
                    (Some(letter @ ('R' | 'Z' | 'N' | 'Q')), None) => command::blackboard(letter),
                    _ => None,
                };
                return match set {
                    Some(set) => self.push(Node::NamedSet { set, part: SetPart::All }),
                    None => Ok(id),
                };
            }
            _ => return Ok(id),
        };
        let &[low, high] = &items[..] else { return Ok(id) };
        self.push(Node::Interval { low, high, low_closed: closed, high_closed: closed })
    }

    /// `a : b : c`, `3 to 4`.
    fn ratio(&mut self) -> Parsed<NodeId> {
        if !self.context.set
            && let Some(time) = self.time()?
        {
            return Ok(time);
        }
        let first = self.sum()?;
        let mut parts = vec![first];
        while !self.context.set && !matches!(self.previous(), Some(Kind::Word(_))) && self.ratio_sign() {
            let next = self.sum()?;
            parts.push(next);
        }
        if parts.len() == 1 { Ok(first) } else { self.push(Node::Ratio(parts)) }
    }

    fn ratio_sign(&mut self) -> bool {
        let to = self.word_at(0, "to")
            && matches!((self.previous(), self.kind_at(1)), (Some(Kind::Number(_)), Some(Kind::Number(_))));
        if to || self.peek() == Some(Kind::Colon) {
            self.at += 1;
            return true;
        }
        false
    }

    /// Signed terms.
    pub(super) fn sum(&mut self) -> Parsed<NodeId> {
        let mut terms = Vec::new();
        let first = self.signed(Self::product)?;
        terms.push(first);
        loop {
            let sign = self.peek();
            if !matches!(sign, Some(Kind::Plus | Kind::Minus | Kind::PlusMinus | Kind::MinusPlus)) {
                break;
            }
            // `the number $-5$` is no difference.
            let apart = self.space_at(0) && !self.space_at(1);
            if apart && matches!(self.ast.node(first), Node::Text(_)) {
                return Err(ParseError::Unparseable);
            }
            self.at += 1;
            let term = self.signed(Self::product)?;
            match sign {
                Some(Kind::Plus) => terms.push(term),
                Some(Kind::Minus) => {
                    let term = self.negated(term)?;
                    terms.push(term);
                }
                sign => {
                    let flipped = sign == Some(Kind::MinusPlus);
                    let left = Some(self.added(terms)?);
                    terms = vec![self.push(Node::PlusMinus { left, right: term, flipped })?];
                }
            }
        }
        self.added(terms)
    }

    /// Any number of signs before something.
    pub(super) fn signed(&mut self, read: fn(&mut Self) -> Parsed<NodeId>) -> Parsed<NodeId> {
        let mut negative = false;
        loop {
            match self.peek() {
                Some(Kind::Minus) => negative = !negative,
                Some(Kind::Plus) => {}
                Some(sign @ (Kind::PlusMinus | Kind::MinusPlus)) => {
                    self.at += 1;
                    let right = self.nested(|parser| parser.signed(read))?;
                    let value = self.push(Node::PlusMinus { left: None, right, flipped: sign == Kind::MinusPlus })?;
                    return if negative { self.negated(value) } else { Ok(value) };
                }
                _ => break,
            }
            self.at += 1;
        }
        let value = read(self)?;
        if negative { self.negated(value) } else { Ok(value) }
    }

    fn negated(&mut self, id: NodeId) -> Parsed<NodeId> {
        match self.ast.node(id) {
            Node::Number { value, form } => {
                let (value, form) = (-value.clone(), *form);
                self.push(Node::Number { value, form })
            }
            Node::Quantity { value, unit } => {
                let (value, unit) = (*value, unit.clone());
                let value = self.negated(value)?;
                self.push(Node::Quantity { value, unit })
            }
            _ => self.push(Node::Neg(id)),
        }
    }

    /// The sum of terms; a unit behind the last is the unit of all when no other has one. `ℝ - {0}` is a difference.
    fn added(&mut self, mut terms: Vec<NodeId>) -> Parsed<NodeId> {
        let &[first, .., last] = &terms[..] else { return terms.first().copied().ok_or(ParseError::Unparseable) };
        if let (2, &Node::Neg(set)) = (terms.len(), self.ast.node(last))
            && matches!(self.ast.node(set), Node::Set(_))
        {
            let first = self.as_interval(first)?;
            return self.push(Node::Difference(first, set));
        }
        let quantity = |id: &NodeId| matches!(self.ast.node(*id), Node::Quantity { .. });
        let others = &terms[..terms.len() - 1];
        if let Node::Quantity { value, unit } = self.ast.node(last)
            && !others.iter().any(quantity)
        {
            let (value, unit) = (*value, unit.clone());
            terms.pop();
            terms.push(value);
            let value = self.push(Node::Add(terms))?;
            return self.push(Node::Quantity { value, unit });
        }
        self.push(Node::Add(terms))
    }

    /// Whether a node is ∞ or -∞.
    pub(super) fn is_infinite(&self, id: NodeId) -> bool {
        let infinite = |id: NodeId| matches!(self.ast.node(id), Node::Constant { value: Constant::Infinity, .. });
        match self.ast.node(id) {
            Node::Neg(inner) => infinite(*inner),
            _ => infinite(id),
        }
    }
}
