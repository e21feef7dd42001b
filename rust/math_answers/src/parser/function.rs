//! Functions, logarithms, and sums and products over a range.

use super::super::ast::{Comparison, Constant, Function, Node, NodeId, Range, Separator};
use super::super::lexer::token::{Bracket, Kind};
use super::super::literal;
use super::{Context, Parsed, Parser};
use crate::error::ParseError;
use dashu_ratio::RBig;

impl<'t> Parser<'_, 't> {
    /// A function with its power and its arguments, at its name.
    pub(super) fn function(&mut self, name: Function) -> Parsed<NodeId> {
        self.at += 1;
        let power = self.power_of_name()?;
        if matches!(name, Function::Gcd | Function::Lcm | Function::Max | Function::Min) {
            let brackets = matches!(
                self.peek(),
                Some(Kind::Open(Bracket::Round | Bracket::Curly | Bracket::Group | Bracket::Square))
            );
            if !brackets && matches!(name, Function::Max | Function::Min) {
                // `\max_{x} f(x)`, `\max f`
                self.at -= 1;
                return self.operator(if name == Function::Max { "max" } else { "min" });
            }
            let arguments = self.arguments()?;
            return self.push(Node::Function { name, arguments });
        }
        let argument = self.bare_argument(is_trigonometric(name))?;
        let inverse = power.and_then(|power| match self.ast.node(power) {
            Node::Number { value, .. } if *value == RBig::from(-1) => inverse_of(name),
            _ => None,
        });
        if let Some(name) = inverse {
            return self.push(Node::Function { name, arguments: vec![argument] });
        }
        let value = self.push(Node::Function { name, arguments: vec![argument] })?;
        self.raised(value, power)
    }

    /// `\ker T`, `\dim(V)`, `\max_{x \in S} f(x)`, at the name: an unknown function, its subscript part of the name.
    pub(super) fn operator(&mut self, name: &str) -> Parsed<NodeId> {
        self.at += 1;
        let mut name = name.to_owned();
        if self.eat(Kind::Underscore) {
            let subscript = self.subscript()?;
            name = format!("{name}_{subscript}");
        }
        let argument = self.bare_argument(false)?;
        let name = self.ast.intern(&name)?;
        self.push(Node::Apply { name, arguments: vec![argument], product: false })
    }

    pub(super) fn logarithm(&mut self, base: Option<u8>) -> Parsed<NodeId> {
        self.at += 1;
        let mut power = self.power_of_name()?;
        let base = if self.eat(Kind::Underscore) {
            Some(self.log_base()?)
        } else {
            match base {
                Some(base) => Some(self.integer(i64::from(base))?),
                None => None,
            }
        };
        if power.is_none() {
            power = self.power_of_name()?;
        }
        // `log(x, 10)`
        if base.is_none() && self.opens(Bracket::Round) && self.has_comma_inside() {
            let arguments = self.arguments()?;
            let [argument, base] = arguments[..] else { return Err(ParseError::Unparseable) };
            let value = self.push(Node::Log { base: Some(base), argument })?;
            return self.raised(value, power);
        }
        let argument = self.bare_argument(false)?;
        let value = self.push(Node::Log { base, argument })?;
        self.raised(value, power)
    }

    fn integer(&mut self, value: i64) -> Parsed<NodeId> {
        self.push(Node::Number { value: RBig::from(value), form: super::super::ast::NumberForm::Integer })
    }

    fn power_of_name(&mut self) -> Parsed<Option<NodeId>> {
        if self.eat(Kind::Caret) { self.exponent().map(Some) } else { Ok(None) }
    }

    fn raised(&mut self, value: NodeId, power: Option<NodeId>) -> Parsed<NodeId> {
        match power {
            Some(power) => self.push(Node::Pow(value, power)),
            None => Ok(value),
        }
    }

    /// The subscript of a logarithm. `\log_28` has one digit of base and the rest as argument.
    fn log_base(&mut self) -> Parsed<NodeId> {
        let argument_follows = matches!(
            self.kind_at(1),
            Some(
                Kind::Number(_)
                    | Kind::Name { .. }
                    | Kind::Open(_)
                    | Kind::Frac
                    | Kind::Sqrt
                    | Kind::Constant(_)
                    | Kind::Bar
                    | Kind::Caret
                    | Kind::Binom
                    | Kind::Function(_)
                    | Kind::Log(_)
            )
        );
        if let (Some(Kind::Number(raw)), false) = (self.peek(), argument_follows)
            && raw.len() > 1
            && raw.as_bytes()[0].is_ascii_digit()
        {
            let base = literal::value(&raw[..1])?.0;
            if let Some(token) = self.tokens.get_mut(self.at) {
                token.kind = Kind::Number(&raw[1..]);
            }
            return self.push(Node::Number { value: base, form: super::super::ast::NumberForm::Integer });
        }
        self.argument()
    }

    /// The argument of a function: in brackets or braces, or the factors up to the next sign or function.
    fn bare_argument(&mut self, angle: bool) -> Parsed<NodeId> {
        if self.opens(Bracket::Round)
            || self.opens(Bracket::Group)
            || self.opens(Bracket::Square)
            || self.opens(Bracket::Curly)
        {
            let curly = self.opens(Bracket::Curly);
            let argument = self.primary()?;
            return match self.ast.node(argument) {
                Node::Set(items) if curly && items.len() == 1 => Ok(items[0]),
                Node::Tuple(_) | Node::Set(_) => Err(ParseError::Unparseable),
                _ => Ok(argument),
            };
        }
        let negative = self.eat(Kind::Minus);
        let first = self.nested(Self::factor)?;
        let mut factors = vec![first];
        loop {
            match self.peek() {
                Some(Kind::Name { .. } | Kind::Constant(_)) if self.juxtaposed() => {
                    let factor = self.nested(Self::factor)?;
                    factors.push(factor);
                }
                Some(Kind::Frac | Kind::Sqrt)
                    if factors.len() == 1 && matches!(self.previous(), Some(Kind::Number(_))) =>
                {
                    let factor = self.nested(Self::factor)?;
                    factors.push(factor);
                }
                _ => break,
            }
        }
        let pi = factors.iter().any(|id| matches!(self.ast.node(*id), Node::Constant { value: Constant::Pi, .. }));
        let mut argument = match factors[..] {
            [only] => only,
            _ => self.push(Node::Mul { factors, implicit: true })?,
        };
        if angle && pi && self.peek() == Some(Kind::Slash) && matches!(self.kind_at(1), Some(Kind::Number(_))) {
            self.at += 1;
            let bottom = self.primary()?;
            argument = self.quotient(argument, bottom)?;
        }
        if negative { self.push(Node::Neg(argument)) } else { Ok(argument) }
    }

    /// Arguments in brackets.
    pub(super) fn arguments(&mut self) -> Parsed<Vec<NodeId>> {
        let Some(Kind::Open(bracket @ (Bracket::Round | Bracket::Curly | Bracket::Group | Bracket::Square))) =
            self.peek()
        else {
            return Err(ParseError::Unparseable);
        };
        self.at += 1;
        // `\max\left\{…\right\}` may come in a group of its own.
        if bracket == Bracket::Group && (self.opens(Bracket::Round) || self.opens(Bracket::Curly)) {
            let arguments = self.nested(Self::arguments)?;
            self.expect(Kind::Close(bracket))?;
            return Ok(arguments);
        }
        let inner = self.within(Context::default(), Self::list)?;
        self.expect(Kind::Close(bracket))?;
        Ok(match self.ast.node(inner) {
            Node::List { items, separator: Separator::Comma | Separator::Semicolon } => items.clone(),
            _ => vec![inner],
        })
    }

    /// `\sum_{k=1}^{n} k^2`, at the sign.
    pub(super) fn series(&mut self) -> Parsed<NodeId> {
        let sum = self.peek() == Some(Kind::Sum);
        self.at += 1;
        let (mut lower, mut to) = (None, None);
        for _ in 0..2 {
            if self.eat(Kind::Underscore) && self.eat(Kind::Open(Bracket::Group)) {
                if let (Some(Kind::Name { name, .. }), Some(Kind::Relation(Comparison::Equal))) =
                    (self.peek(), self.kind_at(1))
                {
                    self.at += 2;
                    let from = self.within(Context::default(), Self::sum)?;
                    lower = Some((name, from));
                } else {
                    // `1 \le k \le n`
                    let from = self.within(Context::default(), Self::sum)?;
                    self.expect(Kind::Relation(Comparison::LessEqual))?;
                    let Some(Kind::Name { name, .. }) = self.peek() else { return Err(ParseError::Unparseable) };
                    self.at += 1;
                    self.expect(Kind::Relation(Comparison::LessEqual))?;
                    lower = Some((name, from));
                    to = Some(self.within(Context::default(), Self::sum)?);
                }
                self.expect(Kind::Close(Bracket::Group))?;
            } else if self.eat(Kind::Caret) {
                to = Some(self.exponent()?);
            }
        }
        let (Some((name, from)), Some(to)) = (lower, to) else { return Err(ParseError::Unparseable) };
        let variable = self.ast.intern(name)?;
        let outside = self.context.bound.replace(name);
        let body = self.nested(Self::product);
        self.context.bound = outside;
        let range = Range { variable, from, to, body: body? };
        self.push(if sum { Node::Sum(range) } else { Node::Product(range) })
    }
}

fn is_trigonometric(name: Function) -> bool {
    use Function::{Cis, Cos, Cot, Csc, Sec, Sin, Tan};
    matches!(name, Sin | Cos | Tan | Cot | Sec | Csc | Cis)
}

fn inverse_of(name: Function) -> Option<Function> {
    use Function as F;
    Some(match name {
        F::Sin => F::Arcsin,
        F::Cos => F::Arccos,
        F::Tan => F::Arctan,
        F::Cot => F::Arccot,
        F::Sec => F::Arcsec,
        F::Csc => F::Arccsc,
        F::Sinh => F::Arsinh,
        F::Cosh => F::Arcosh,
        F::Tanh => F::Artanh,
        F::Coth => F::Arcoth,
        F::Sech => F::Arsech,
        F::Csch => F::Arcsch,
        _ => return None,
    })
}
