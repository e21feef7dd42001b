//! A value with what is written at its shoulder and behind it: powers, factorials, degrees, primes.

use super::super::ast::{Function, Node, NodeId, SetPart};
use super::super::lexer::token::{Bracket, Kind};
use super::{Parsed, Parser};
use crate::error::ParseError;

impl<'t> Parser<'_, 't> {
    /// A primary with its powers, factorials, degrees, percent signs and subscripts.
    pub(super) fn factor(&mut self) -> Parsed<NodeId> {
        let value = self.primary()?;
        self.postfix(value)
    }

    pub(super) fn postfix(&mut self, mut value: NodeId) -> Parsed<NodeId> {
        loop {
            value = match self.peek() {
                Some(Kind::Caret) => self.power(value)?,
                // `New York City!`
                Some(Kind::Bang)
                    if matches!(self.ast.node(value), Node::Text(_)) && self.kind_at(1) != Some(Kind::Bang) =>
                {
                    self.at += 1;
                    value
                }
                Some(Kind::Bang) => {
                    self.at += 1;
                    if self.peek() == Some(Kind::Bang) && !self.space_at(0) {
                        self.at += 1;
                        self.push(Node::DoubleFactorial(value))?
                    } else {
                        self.push(Node::Factorial(value))?
                    }
                }
                Some(Kind::Percent) => {
                    self.at += 1;
                    self.push(Node::Percent(value))?
                }
                Some(Kind::Degree) => {
                    self.at += 1;
                    self.degrees(value)?
                }
                Some(Kind::Prime) => self.minutes(value)?,
                Some(Kind::Underscore) => match *self.ast.node(value) {
                    // `a^2_n` is `a_n^2`.
                    Node::Pow(base, exponent) if matches!(self.ast.node(base), Node::Symbol(_)) => {
                        let base = self.indexed(base)?;
                        self.push(Node::Pow(base, exponent))?
                    }
                    _ => self.base_numeral(value)?,
                },
                _ => return Ok(value),
            };
        }
    }

    /// What `^` makes of a value, at the caret.
    fn power(&mut self, base: NodeId) -> Parsed<NodeId> {
        self.at += 1;
        let grouped = usize::from(self.opens(Bracket::Group));
        let single = grouped == 0 || self.kind_at(2) == Some(Kind::Close(Bracket::Group));
        let length = 1 + 2 * grouped;
        // `0.003^{\prime\prime}`
        if grouped == 1
            && [self.kind_at(1), self.kind_at(2)] == [Some(Kind::Prime); 2]
            && matches!(self.ast.node(base), Node::Number { .. })
        {
            return self.minutes(base);
        }
        if let (Some(kind), true) = (self.kind_at(grouped), single) {
            let is_set = matches!(self.ast.node(base), Node::NamedSet { .. });
            let is_array = matches!(
                self.ast.node(base),
                Node::Matrix { .. } | Node::Tuple(_) | Node::Brackets(_) | Node::Vector(_)
            );
            match kind {
                Kind::Circ | Kind::Degree => {
                    self.at += length;
                    return self.degrees(base);
                }
                Kind::Prime => {
                    self.at += length;
                    return self.arc_minutes(base, 1);
                }
                Kind::Top => {
                    self.at += length;
                    return self.push(Node::Transpose(base));
                }
                Kind::Name { name: "T", .. } if is_array => {
                    self.at += length;
                    return self.push(Node::Transpose(base));
                }
                Kind::Plus | Kind::Minus | Kind::Times if is_set => {
                    self.at += length;
                    let part = match kind {
                        Kind::Plus => SetPart::Positive,
                        Kind::Minus => SetPart::Negative,
                        _ => SetPart::NonZero,
                    };
                    return self.part_of_set(base, part);
                }
                Kind::Times if matches!(self.ast.node(base), Node::Symbol(_)) => {
                    self.at += length;
                    return self.push(Node::Function { name: Function::Conj, arguments: vec![base] });
                }
                Kind::Word("th" | "st" | "nd" | "rd") => {
                    let (Some(first), Some(last)) = (self.at.checked_sub(2), self.tokens.get(self.at + grouped)) else {
                        return Err(ParseError::Unparseable);
                    };
                    let start = self.tokens.get(first).map_or(0, |token| token.start);
                    let text =
                        [self.text.get(start..self.tokens[self.at - 1].start), self.text.get(last.start..last.end)];
                    self.at += length;
                    let text = text.iter().flatten().copied().collect::<String>();
                    return self.push(Node::Text(text));
                }
                _ => {}
            }
        }
        let exponent = self.exponent()?;
        self.push(Node::Pow(base, exponent))
    }

    /// An exponent: a group, or a signed value with its own power.
    pub(super) fn exponent(&mut self) -> Parsed<NodeId> {
        self.nested(|parser| {
            if parser.opens(Bracket::Group) {
                return parser.primary();
            }
            parser.signed(|parser| {
                let value = parser.argument()?;
                if parser.eat(Kind::Caret) {
                    let exponent = parser.exponent()?;
                    return parser.push(Node::Pow(value, exponent));
                }
                Ok(value)
            })
        })
    }
}
