//! A syntax tree to a value: collections, intervals and marks; arithmetic is in `number`, statements in `statement`.

use dashu_ratio::RBig;

use super::super::ast::{Ast, Constant, DegreePart, Node, NodeId, SymbolId};
use super::super::expr::{Exprs, Id};
use super::super::fuel::{Fuel, Stop};
use super::choices::{Choices, integer_letter};
use super::{End, Mark, Number, Piece, Reading, Region, Shape, Value};

/// Why a tree gave no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fail {
    /// The budget is spent, or there is no value.
    Stop(Stop),
    /// Not arithmetic; as a whole: a construct that has no value here.
    NotNumber,
}

impl From<Stop> for Fail {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// Understand a tree.
///
/// # Errors
/// See [`Fail`].
pub fn read(ast: &Ast, choices: Choices, fuel: &Fuel) -> Result<Reading, Fail> {
    let mut exprs = Exprs::default();
    let mut signed = vec![false; ast.nodes().len()];
    for (at, node) in ast.nodes().iter().enumerate() {
        let mut found = matches!(node, Node::PlusMinus { .. });
        node.for_each_child(|child| found |= signed.get(child.index()).copied().unwrap_or(false));
        signed[at] = found;
    }
    fuel.spend(signed.len() as u64)?;
    let mut reader = Reader {
        ast,
        exprs: &mut exprs,
        fuel,
        choices,
        minus: None,
        signed: &signed,
        bindings: Vec::new(),
        letters: Vec::new(),
    };
    if choices.renamed {
        reader.rename_integers()?;
    }
    let value = reader.value(ast.root())?;
    Ok(Reading { exprs, value })
}

/// Builds the value of one tree.
pub(super) struct Reader<'r> {
    pub(super) ast: &'r Ast,
    pub(super) exprs: &'r mut Exprs,
    pub(super) fuel: &'r Fuel,
    pub(super) choices: Choices,
    /// The lower sign of every `±`, the upper one, or not said.
    pub(super) minus: Option<bool>,
    /// Which nodes have a `±` in them.
    signed: &'r [bool],
    pub(super) bindings: Vec<(SymbolId, Id)>,
    /// The letters e and i where they are letters.
    pub(super) letters: Vec<SymbolId>,
}

impl Value {
    pub(super) fn bare(id: Id) -> Self {
        Self::Number(Number { id, mark: Mark::Bare })
    }
}

impl Reader<'_> {
    pub(super) fn bound(&self, symbol: SymbolId) -> Option<Id> {
        self.bindings.iter().rev().find(|(known, _)| *known == symbol).map(|(_, id)| *id)
    }

    /// Call the integers of `k ∈ ℤ` by their order.
    fn rename_integers(&mut self) -> Result<(), Fail> {
        let ast = self.ast;
        let mut letters: Vec<SymbolId> = ast.nodes().iter().filter_map(|node| integer_letter(ast, node)).collect();
        letters.dedup();
        for (at, letter) in letters.into_iter().enumerate().take(8) {
            let id = self.exprs.symbol(&format!("ℤ{at}"), self.fuel)?;
            self.bindings.push((letter, id));
        }
        Ok(())
    }

    /// The value of any node.
    pub(super) fn value(&mut self, node: NodeId) -> Result<Value, Fail> {
        self.fuel.spend(6)?;
        let ast = self.ast;
        if self.minus.is_none()
            && self.signed.get(node.index()).copied().unwrap_or(false)
            && is_one_value(ast.node(node))
        {
            return self.both_signs(node);
        }
        match ast.node(node) {
            Node::Either(items) => {
                let item = items.get(self.choices.either).or(items.last()).ok_or(Fail::NotNumber)?;
                self.value(*item)
            }
            Node::Text(text) => Ok(Value::Text(text.clone())),
            Node::Time { seconds, known, ratio } => self.time(*seconds, *known, *ratio),
            Node::Ellipsis => Ok(Value::Ellipsis),
            Node::Constant { value: Constant::Infinity, .. } => Ok(Value::Infinite { negative: false }),
            Node::Neg(inner) if is_infinity(ast, *inner) => Ok(Value::Infinite { negative: true }),
            Node::List { .. } | Node::And(_) | Node::Or(_) | Node::Relation { .. } | Node::Congruence { .. } => {
                self.statement(node)
            }
            Node::Set(items) => Ok(Value::List { items: self.items(items)?, shape: Shape::Set }),
            Node::Tuple(items) => Ok(Value::List { items: self.items(items)?, shape: Shape::Tuple }),
            Node::Brackets(items) => Ok(Value::List { items: self.items(items)?, shape: Shape::Brackets }),
            Node::Vector(items) => Ok(Value::List { items: self.items(items)?, shape: Shape::Vector }),
            Node::Interval { low, high, low_closed, high_closed } => {
                let low = self.end(*low, *low_closed, false)?;
                let high = self.end(*high, *high_closed, true)?;
                Ok(Value::Region(Region::of(vec![Piece { low, high }], self.exprs, self.fuel)?))
            }
            Node::Matrix { .. } | Node::Transpose(_) => self.matrix_value(node),
            Node::Ratio(items) => self.ratio(items),
            Node::Union(_) | Node::Intersection(_) | Node::Difference(..) => self.set_operation(node),
            Node::EmptySet => Ok(Value::Region(Region::empty())),
            Node::NamedSet { set, part } => self.named(*set, *part),
            Node::SetBuilder { element, conditions } => self.builder(*element, *conditions),
            Node::Mod(a, b) => {
                let (a, modulus) = (self.number(*a)?, self.number(*b)?);
                let remainder = Some(self.number(node)?);
                Ok(Value::Congruence { left: None, right: vec![a], modulus, remainder })
            }
            Node::Quantity { value, unit } => match self.value(*value)? {
                Value::Number(number) => Ok(Value::Number(Number { id: number.id, mark: Mark::Unit(unit.clone()) })),
                // The unit of every item: `5, 6 cm`, `(1, 2) cm`.
                Value::List { items, shape } => {
                    let items = items.into_iter().map(|item| match item {
                        Value::Number(Number { id, mark: Mark::Bare }) => {
                            Value::Number(Number { id, mark: Mark::Unit(unit.clone()) })
                        }
                        other => other,
                    });
                    Ok(Value::List { items: items.collect(), shape })
                }
                other => Ok(other),
            },
            Node::BaseNumeral { digits, value, .. } => {
                let face = dashu_int::IBig::from_str_radix(digits, 10).ok().map(RBig::from);
                let id = self.exprs.rational(value.clone(), self.fuel)?;
                Ok(Value::Number(Number { id, mark: Mark::Base(face) }))
            }
            Node::Percent(_) | Node::Neg(_) | Node::PlusMinus { left: None, .. } if is_percent(ast, node) => {
                let hundred = self.exprs.integer(100, self.fuel)?;
                let id = self.number(node)?;
                let face = self.exprs.product(&[id, hundred], self.fuel)?;
                Ok(Value::Number(Number { id, mark: Mark::Percent(face) }))
            }
            _ => match self.number(node) {
                Ok(id) if is_angle(ast, node) => {
                    // How many degrees: the value without π/180.
                    let pi = self.exprs.pi()?;
                    let factor = self.exprs.integer(180, self.fuel)?;
                    let turns = self.exprs.quotient(id, pi, self.fuel)?;
                    let face = self.exprs.product(&[turns, factor], self.fuel)?;
                    Ok(Value::Number(Number { id, mark: Mark::Degree(face) }))
                }
                Ok(id) => Ok(Value::bare(id)),
                Err(Fail::NotNumber) => self.matrix_value(node),
                Err(fail) => Err(fail),
            },
        }
    }

    /// Items of a collection; one with a `±` counts as two.
    pub(super) fn items(&mut self, nodes: &[NodeId]) -> Result<Vec<Value>, Fail> {
        let mut items = Vec::with_capacity(nodes.len());
        for node in nodes {
            let signed = self.minus.is_none() && self.signed.get(node.index()).copied().unwrap_or(false);
            match self.value(*node)? {
                Value::List { items: both, shape: Shape::Bare } if signed => items.extend(both),
                value => items.push(value),
            }
        }
        Ok(items)
    }

    fn both_signs(&mut self, node: NodeId) -> Result<Value, Fail> {
        self.minus = Some(false);
        let upper = self.value(node);
        self.minus = Some(true);
        let lower = self.value(node);
        self.minus = None;
        Ok(Value::List { items: vec![upper?, lower?], shape: Shape::Bare })
    }

    /// An end of an interval.
    pub(super) fn end(&mut self, node: NodeId, closed: bool, high: bool) -> Result<End, Fail> {
        match self.value(node)? {
            Value::Infinite { negative } if negative != high => Ok(if high { End::Above } else { End::Below }),
            Value::Number(number) => Ok(End::At { id: number.id, closed }),
            // From ∞ down, or up to −∞.
            Value::Infinite { .. } => Err(Fail::Stop(Stop::Undefined)),
            _ => Err(Fail::NotNumber),
        }
    }

    fn ratio(&mut self, items: &[NodeId]) -> Result<Value, Fail> {
        let terms = self.numbers(items)?;
        let &[first, ref rest @ ..] = &terms[..] else { return Err(Fail::NotNumber) };
        // The point (0 : 0 : 1): by the first term that is not 0.
        let zero = |term: &&Id| self.exprs.as_rational(**term).is_some_and(|value| value.is_zero());
        let zeros = terms.iter().take_while(zero).count();
        let (by, shares) = match terms.get(zeros) {
            Some(pivot) if zeros > 0 => (*pivot, &terms[..]),
            _ => (first, rest),
        };
        let mut quotients = Vec::with_capacity(shares.len());
        for term in shares {
            quotients.push(self.exprs.quotient(*term, by, self.fuel)?);
        }
        let value = match rest {
            [second] => self.exprs.quotient(first, *second, self.fuel).ok(),
            _ => None,
        };
        Ok(Value::Ratio { terms, quotients, value })
    }
}

/// Whether a `±` inside makes two values of this node, and not of its items.
fn is_one_value(node: &Node) -> bool {
    !matches!(
        node,
        Node::List { .. }
            | Node::Set(_)
            | Node::Relation { .. }
            | Node::And(_)
            | Node::Or(_)
            | Node::Either(_)
            | Node::SetBuilder { .. }
            | Node::Union(_)
            | Node::Intersection(_)
            | Node::Difference(..)
            | Node::Quantity { .. }
    )
}

fn is_infinity(ast: &Ast, node: NodeId) -> bool {
    matches!(ast.node(node), Node::Constant { value: Constant::Infinity, .. })
}

/// A percent, or one with a sign before it.
fn is_percent(ast: &Ast, node: NodeId) -> bool {
    match ast.node(node) {
        Node::Percent(_) => true,
        Node::Neg(inner) | Node::PlusMinus { left: None, right: inner, .. } => is_percent(ast, *inner),
        _ => false,
    }
}

/// Degrees, their negative, or degrees with minutes and seconds.
fn is_angle(ast: &Ast, node: NodeId) -> bool {
    match ast.node(node) {
        Node::Degree { .. } => true,
        Node::Neg(inner) => matches!(ast.node(*inner), Node::Degree { .. }) || is_sum_of_angles(ast, *inner),
        _ => is_sum_of_angles(ast, node),
    }
}

fn is_sum_of_angles(ast: &Ast, node: NodeId) -> bool {
    let Node::Add(items) = ast.node(node) else { return false };
    let degrees = |id: &NodeId| match ast.node(*id) {
        Node::Degree { part, .. } => Some(*part),
        Node::Neg(inner) => match ast.node(*inner) {
            Node::Degree { part, .. } => Some(*part),
            _ => None,
        },
        _ => None,
    };
    items.iter().all(|item| degrees(item).is_some())
        && items.iter().any(|item| degrees(item) == Some(DegreePart::Degree))
}
