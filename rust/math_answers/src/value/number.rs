//! Arithmetic nodes of the tree to expressions.

use dashu_int::IBig;
use dashu_ratio::RBig;

use super::super::ast::{Ast, Constant, DegreePart, Function, Node, NodeId, Range};
use super::super::expr::{self, Id, Op};
use super::super::fuel::Stop;
use super::read::{Fail, Reader};

/// Terms of a sum or product that are written out.
const MOST_TERMS: i64 = 4096;

impl Reader<'_> {
    /// The expression of a node.
    ///
    /// # Errors
    /// [`Fail::NotNumber`] for anything but arithmetic.
    pub(super) fn number(&mut self, node: NodeId) -> Result<Id, Fail> {
        self.fuel.spend(4)?;
        let ast = self.ast;
        let fuel = self.fuel;
        Ok(match ast.node(node) {
            Node::Number { value, .. } | Node::BaseNumeral { value, .. } => self.exprs.rational(value.clone(), fuel)?,
            Node::Constant { value, letter } => match (value, letter) {
                (_, Some(letter)) if self.bound(*letter).is_some() => self.bound(*letter).ok_or(Fail::NotNumber)?,
                (_, Some(letter)) if self.letters.contains(letter) => self.exprs.symbol(ast.name(*letter), fuel)?,
                (Constant::Pi, _) => self.exprs.pi()?,
                (Constant::E, _) => self.exprs.e()?,
                (Constant::I, _) => self.exprs.i()?,
                // ∞ alone is a value; ∞ − ∞ is none.
                (Constant::Infinity, _) => return Err(Fail::Stop(Stop::Undefined)),
            },
            Node::Symbol(symbol) => match self.bound(*symbol) {
                Some(id) => id,
                None => self.exprs.symbol(ast.name(*symbol), fuel)?,
            },
            Node::Neg(a) => {
                let a = self.number(*a)?;
                self.exprs.negated(a, fuel)?
            }
            Node::Add(items) => {
                let items = self.numbers(items)?;
                self.exprs.sum(&items, fuel)?
            }
            Node::Mul { factors, implicit } => {
                let mut values = Vec::with_capacity(factors.len());
                for factor in factors {
                    let value = self.number(*factor)?;
                    // No one writes a product with 0 without a sign: I(0) is a function's value.
                    let zero = *implicit && matches!(ast.node(*factor), Node::Number { value, .. } if value.is_zero());
                    match values.last_mut() {
                        Some((node, last)) if zero && matches!(ast.node(*node), Node::Symbol(_)) => {
                            let Node::Symbol(name) = ast.node(*node) else { continue };
                            *last = self.exprs.unknown(ast.name(*name), &[value], fuel)?;
                        }
                        _ => values.push((*factor, value)),
                    }
                }
                let values: Vec<Id> = values.into_iter().map(|(_, value)| value).collect();
                self.exprs.product(&values, fuel)?
            }
            Node::Div(a, b) => {
                let (a, b) = (self.number(*a)?, self.number(*b)?);
                self.exprs.quotient(a, b, fuel)?
            }
            Node::Pow(a, b) => {
                let (a, b) = (self.number(*a)?, self.number(*b)?);
                self.exprs.power(a, b, fuel)?
            }
            Node::Root { index, radicand } => {
                let radicand = self.number(*radicand)?;
                let exponent = match index {
                    Some(index) => {
                        let index = self.number(*index)?;
                        let minus = self.exprs.integer(-1, fuel)?;
                        self.exprs.power(index, minus, fuel)?
                    }
                    None => self.exprs.rational(ratio(1, 2), fuel)?,
                };
                self.exprs.power(radicand, exponent, fuel)?
            }
            Node::Abs(a) => self.apply(Op::Abs, *a)?,
            Node::Norm(a) => {
                if let Ok(id) = self.number(*a) {
                    return Ok(self.exprs.function(Op::Abs, &[id], fuel)?);
                }
                self.length(*a)?
            }
            Node::Floor(a) => self.apply(Op::Floor, *a)?,
            Node::Ceil(a) => self.apply(Op::Ceil, *a)?,
            Node::Factorial(a) => self.apply(Op::Factorial, *a)?,
            Node::DoubleFactorial(a) => self.apply(Op::DoubleFactorial, *a)?,
            Node::Binomial(n, k) => {
                let (n, k) = (self.number(*n)?, self.number(*k)?);
                self.exprs.binomial(n, k, fuel)?
            }
            Node::Permutations(n, k) => {
                let (n, k) = (self.number(*n)?, self.number(*k)?);
                self.exprs.permutations(n, k, fuel)?
            }
            Node::Function { name, arguments } => self.known(*name, arguments)?,
            Node::Log { base, argument } => {
                let argument = self.number(*argument)?;
                let top = self.exprs.function(Op::Ln, &[argument], fuel)?;
                let base = match base {
                    Some(base) => self.number(*base)?,
                    None if self.choices.natural_log => return Ok(top),
                    None => self.exprs.integer(10, fuel)?,
                };
                let bottom = self.exprs.function(Op::Ln, &[base], fuel)?;
                self.exprs.quotient(top, bottom, fuel)?
            }
            Node::Apply { name, arguments, .. } => {
                let arguments = self.numbers(arguments)?;
                self.exprs.unknown(ast.name(*name), &arguments, fuel)?
            }
            Node::Sum(range) => self.range(range, false)?,
            Node::Product(range) => self.range(range, true)?,
            Node::Mod(a, b) => {
                let (a, b) = (self.number(*a)?, self.number(*b)?);
                let quotient = self.exprs.quotient(a, b, fuel)?;
                let whole = self.exprs.function(Op::Floor, &[quotient], fuel)?;
                let multiple = self.exprs.product(&[b, whole], fuel)?;
                self.exprs.difference(a, multiple, fuel)?
            }
            Node::PlusMinus { left, right, flipped } => {
                let right = self.number(*right)?;
                let minus = self.minus.ok_or(Fail::NotNumber)? != *flipped;
                let right = if minus { self.exprs.negated(right, fuel)? } else { right };
                match left {
                    Some(left) => {
                        let left = self.number(*left)?;
                        self.exprs.sum(&[left, right], fuel)?
                    }
                    None => right,
                }
            }
            Node::Percent(a) => {
                let a = self.number(*a)?;
                let hundredth = self.exprs.rational(ratio(1, 100), fuel)?;
                self.exprs.product(&[a, hundredth], fuel)?
            }
            Node::Degree { value, part } => {
                let value = self.number(*value)?;
                let parts = match part {
                    DegreePart::Degree => 180,
                    DegreePart::Minute => 180 * 60,
                    DegreePart::Second => 180 * 3600,
                };
                let (unit, pi) = (self.exprs.rational(ratio(1, parts), fuel)?, self.exprs.pi()?);
                self.exprs.product(&[value, unit, pi], fuel)?
            }
            Node::Determinant(a) => self.determinant(*a)?,
            _ => return Err(Fail::NotNumber),
        })
    }

    pub(super) fn numbers(&mut self, nodes: &[NodeId]) -> Result<Vec<Id>, Fail> {
        nodes.iter().map(|node| self.number(*node)).collect()
    }

    fn apply(&mut self, op: Op, argument: NodeId) -> Result<Id, Fail> {
        let argument = self.number(argument)?;
        Ok(self.exprs.function(op, &[argument], self.fuel)?)
    }

    fn known(&mut self, name: Function, arguments: &[NodeId]) -> Result<Id, Fail> {
        let fuel = self.fuel;
        let arguments = self.numbers(arguments)?;
        let &[x, ..] = &arguments[..] else { return Err(Fail::NotNumber) };
        let exprs = &mut *self.exprs;
        let direct = match name {
            Function::Sin => Some(Op::Sin),
            Function::Cos => Some(Op::Cos),
            Function::Arcsin => Some(Op::Arcsin),
            Function::Arccos => Some(Op::Arccos),
            Function::Arctan => Some(Op::Arctan),
            Function::Ln => Some(Op::Ln),
            Function::Gcd => Some(Op::Gcd),
            Function::Lcm => Some(Op::Lcm),
            Function::Max => Some(Op::Max),
            Function::Min => Some(Op::Min),
            Function::Re => Some(Op::Re),
            Function::Im => Some(Op::Im),
            Function::Conj => Some(Op::Conj),
            Function::Arg => Some(Op::Arg),
            Function::Sgn => Some(Op::Sign),
            _ => None,
        };
        if let Some(op) = direct {
            return Ok(exprs.function(op, &arguments, fuel)?);
        }
        if arguments.len() != 1 {
            return Err(Fail::NotNumber);
        }
        let one = exprs.integer(1, fuel)?;
        Ok(match name {
            Function::Tan | Function::Cot => {
                let (sine, cosine) = (exprs.function(Op::Sin, &[x], fuel)?, exprs.function(Op::Cos, &[x], fuel)?);
                let (top, bottom) = if name == Function::Tan { (sine, cosine) } else { (cosine, sine) };
                exprs.quotient(top, bottom, fuel)?
            }
            Function::Sec | Function::Csc => {
                let op = if name == Function::Sec { Op::Cos } else { Op::Sin };
                let bottom = exprs.function(op, &[x], fuel)?;
                exprs.quotient(one, bottom, fuel)?
            }
            Function::Arccot => {
                let (pi, half) = (exprs.pi()?, exprs.rational(ratio(1, 2), fuel)?);
                let quarter = exprs.product(&[half, pi], fuel)?;
                let other = exprs.function(Op::Arctan, &[x], fuel)?;
                exprs.difference(quarter, other, fuel)?
            }
            Function::Arcsec | Function::Arccsc => {
                let inverse = exprs.quotient(one, x, fuel)?;
                let op = if name == Function::Arcsec { Op::Arccos } else { Op::Arcsin };
                exprs.function(op, &[inverse], fuel)?
            }
            Function::Exp => {
                let e = exprs.e()?;
                exprs.power(e, x, fuel)?
            }
            Function::Cis => {
                let (e, i) = (exprs.e()?, exprs.i()?);
                let turn = exprs.product(&[i, x], fuel)?;
                exprs.power(e, turn, fuel)?
            }
            Function::Sinh | Function::Csch => self.hyperbolic(x, false, name == Function::Csch)?,
            Function::Cosh | Function::Sech => self.hyperbolic(x, true, name == Function::Sech)?,
            Function::Tanh | Function::Coth => {
                let (sine, cosine) = (self.hyperbolic(x, false, false)?, self.hyperbolic(x, true, false)?);
                let (top, bottom) = if name == Function::Tanh { (sine, cosine) } else { (cosine, sine) };
                self.exprs.quotient(top, bottom, fuel)?
            }
            Function::Arsinh | Function::Arcosh | Function::Arcsch | Function::Arsech => {
                // ln(x + √(x² ± 1)); the other two of 1/x.
                let x = if matches!(name, Function::Arcsch | Function::Arsech) {
                    exprs.quotient(one, x, fuel)?
                } else {
                    x
                };
                let sign = if matches!(name, Function::Arsinh | Function::Arcsch) { 1 } else { -1 };
                let (square, unit) = (exprs.product(&[x, x], fuel)?, exprs.integer(sign, fuel)?);
                let under = exprs.sum(&[square, unit], fuel)?;
                let half = exprs.rational(ratio(1, 2), fuel)?;
                let root = exprs.power(under, half, fuel)?;
                let inner = exprs.sum(&[x, root], fuel)?;
                exprs.function(Op::Ln, &[inner], fuel)?
            }
            Function::Artanh | Function::Arcoth => {
                // ½ ln((1 + x) / (1 − x)); arcoth x = artanh 1/x.
                let x = if name == Function::Arcoth { exprs.quotient(one, x, fuel)? } else { x };
                let (top, bottom) = (exprs.sum(&[one, x], fuel)?, exprs.difference(one, x, fuel)?);
                let inner = exprs.quotient(top, bottom, fuel)?;
                let log = exprs.function(Op::Ln, &[inner], fuel)?;
                let half = exprs.rational(ratio(1, 2), fuel)?;
                exprs.product(&[half, log], fuel)?
            }
            _ => return Err(Fail::NotNumber),
        })
    }

    /// (e^x ± e^−x) / 2, or its inverse.
    fn hyperbolic(&mut self, x: Id, plus: bool, inverse: bool) -> Result<Id, Fail> {
        let (exprs, fuel) = (&mut *self.exprs, self.fuel);
        let e = exprs.e()?;
        let up = exprs.power(e, x, fuel)?;
        let minus = exprs.negated(x, fuel)?;
        let down = exprs.power(e, minus, fuel)?;
        let both = if plus { exprs.sum(&[up, down], fuel)? } else { exprs.difference(up, down, fuel)? };
        let two = exprs.integer(2, fuel)?;
        Ok(if inverse { exprs.quotient(two, both, fuel)? } else { exprs.quotient(both, two, fuel)? })
    }

    /// A sum or product with integer bounds, written out.
    fn range(&mut self, range: &Range, product: bool) -> Result<Id, Fail> {
        // What an infinite sum is worth is not known here: it equals its own text alone.
        if [range.from, range.to].iter().any(|end| is_unbounded(self.ast, *end)) {
            return Err(Fail::NotNumber);
        }
        let (first, last) = (self.number(range.from)?, self.number(range.to)?);
        let bound = |id| self.exprs.as_integer(id).and_then(|n| i64::try_from(n).ok());
        let (Some(from), Some(to)) = (bound(first), bound(last)) else {
            let (letter, id) = self.exprs.bound_letter(self.bindings.len(), self.fuel)?;
            self.bindings.push((range.variable, id));
            let body = self.number(range.body);
            self.bindings.pop();
            let range = expr::Range { letter, from: first, to: last, body: body?, product };
            return Ok(self.exprs.range(range, self.fuel)?);
        };
        let count = to.checked_sub(from).and_then(|count| count.checked_add(1)).unwrap_or(i64::MAX);
        if count > MOST_TERMS {
            return Err(Fail::Stop(Stop::Fuel));
        }
        let mut total = self.exprs.integer(i64::from(product), self.fuel)?;
        let mut terms = Vec::new();
        for k in from..=to {
            let k = self.exprs.rational(RBig::from(IBig::from(k)), self.fuel)?;
            self.bindings.push((range.variable, k));
            let term = self.number(range.body);
            self.bindings.pop();
            terms.push(term?);
            // Fold as it goes, so that numbers do not pile up.
            if terms.len() == 64 || k_is_last(terms.len(), count) {
                terms.push(total);
                total =
                    if product { self.exprs.product(&terms, self.fuel)? } else { self.exprs.sum(&terms, self.fuel)? };
                terms.clear();
            }
        }
        terms.push(total);
        Ok(if product { self.exprs.product(&terms, self.fuel)? } else { self.exprs.sum(&terms, self.fuel)? })
    }
}

fn is_unbounded(ast: &Ast, end: NodeId) -> bool {
    match ast.node(end) {
        Node::Constant { value: Constant::Infinity, .. } => true,
        Node::Neg(inner) => is_unbounded(ast, *inner),
        _ => false,
    }
}

fn k_is_last(terms: usize, count: i64) -> bool {
    i64::try_from(terms).is_ok_and(|terms| terms == count)
}

pub(super) fn ratio(top: i64, bottom: i64) -> RBig {
    RBig::from_parts_signed(IBig::from(top), IBig::from(bottom))
}
