//! Sets: named ones, unions and the like, set builders, and collections as regions of the line.

use super::super::ast::{NamedSet, Node, NodeId, SetPart};
use super::super::expr::{Class, Exprs};
use super::super::fuel::{Fuel, Stop};
use super::read::{Fail, Reader};
use super::{End, Piece, Region, Shape, Value};

impl Reader<'_> {
    pub(super) fn named(&mut self, set: NamedSet, part: SetPart) -> Result<Value, Fail> {
        if set != NamedSet::Reals {
            return Ok(Value::Named(set, part));
        }
        let zero = |reader: &mut Self, closed| -> Result<End, Fail> {
            Ok(End::At { id: reader.exprs.integer(0, reader.fuel)?, closed })
        };
        let piece = |low, high| Piece { low, high };
        let pieces = match part {
            SetPart::All => vec![Piece::ALL],
            SetPart::Positive => vec![piece(zero(self, false)?, End::Above)],
            SetPart::NonNegative => vec![piece(zero(self, true)?, End::Above)],
            SetPart::Negative => vec![piece(End::Below, zero(self, false)?)],
            SetPart::NonPositive => vec![piece(End::Below, zero(self, true)?)],
            SetPart::NonZero => vec![piece(End::Below, zero(self, false)?), piece(zero(self, false)?, End::Above)],
        };
        Ok(Value::Region(Region { pieces, sorted: true, solved: true }))
    }

    pub(super) fn set_operation(&mut self, node: NodeId) -> Result<Value, Fail> {
        let (ast, fuel) = (self.ast, self.fuel);
        match ast.node(node) {
            Node::Union(items) => {
                let mut pieces = Vec::new();
                let mut solved = true;
                for item in items {
                    let value = self.value(*item)?;
                    let region = self.as_region(value)?;
                    pieces.extend(region.pieces);
                    solved &= region.solved;
                }
                let region = Region::of(pieces, self.exprs, fuel)?;
                Ok(Value::Region(Region { solved, ..region }))
            }
            Node::Intersection(items) => {
                let mut region = Region::all();
                for item in items {
                    let value = self.value(*item)?;
                    let other = self.as_region(value)?;
                    region = region.intersection(&other, self.exprs, fuel)?.ok_or(Fail::NotNumber)?;
                }
                Ok(Value::Region(region))
            }
            Node::Difference(left, right) => {
                let (left, right) = (self.value(*left)?, self.value(*right)?);
                let (left, right) = (self.as_region(left)?, self.as_region(right)?);
                let rest = right.complement().ok_or(Fail::NotNumber)?;
                Ok(Value::Region(left.intersection(&rest, self.exprs, fuel)?.ok_or(Fail::NotNumber)?))
            }
            _ => Err(Fail::NotNumber),
        }
    }

    /// A value as a part of the line, beside `∪` and the like: numbers are points, pairs intervals.
    pub(super) fn as_region(&mut self, value: Value) -> Result<Region, Fail> {
        match value {
            Value::Region(region) => Ok(region),
            Value::Number(number) => Ok(Region { pieces: vec![Piece::point(number.id)], sorted: true, solved: true }),
            Value::Inequality { solved: Some((_, region)), .. } => Ok(region),
            Value::List { items, shape } => {
                if let ([_, _], Shape::Tuple | Shape::Brackets) = (&items[..], shape) {
                    return pair_region(&items, shape, self.exprs, self.fuel)?.ok_or(Fail::NotNumber);
                }
                let mut pieces = Vec::with_capacity(items.len());
                for item in &items {
                    let Value::Number(number) = item else { return Err(Fail::NotNumber) };
                    pieces.push(Piece::point(number.id));
                }
                if shape.is_ordered() {
                    return Err(Fail::NotNumber);
                }
                Ok(Region::of(pieces, self.exprs, self.fuel)?)
            }
            _ => Err(Fail::NotNumber),
        }
    }

    pub(super) fn builder(&mut self, element: NodeId, conditions: NodeId) -> Result<Value, Fail> {
        let conditions = self.value(conditions)?;
        let element = self.value(element)?;
        let name = self.name_of(&element);
        let value = match (&conditions, name) {
            (Value::Inequality { solved: Some((solved, region)), .. }, Some(name)) if *solved == name => {
                Some(Value::Region(region.clone()))
            }
            (Value::Equality { names, sides, .. }, Some(name)) if *names == [name.clone()] => sides.last().cloned(),
            (Value::Member { element: inner, set, negated: false }, Some(_)) if **inner == element => {
                Some((**set).clone())
            }
            // {2kπ | k ∈ ℤ} is what `2kπ, k ∈ ℤ` lists, and {x | x = 2kπ, k ∈ ℤ} what `x = 2kπ, k ∈ ℤ` does.
            (Value::Member { .. }, None) if conditions.is_domain() => {
                Some(Value::System { items: vec![element.clone(), conditions.clone()], any: false })
            }
            (Value::System { items, any: false }, Some(name))
                if items.iter().filter(|item| item.is_domain()).count() + 1 == items.len()
                    && items
                        .iter()
                        .any(|item| matches!(item, Value::Equality { names, .. } if *names == [name.clone()])) =>
            {
                Some(conditions.clone())
            }
            // {(x, y) | y = x²} stays as it is.
            _ => None,
        };
        Ok(match value {
            Some(Value::List { items, .. }) => Value::List { items, shape: Shape::Set },
            Some(Value::Number(number)) => Value::List { items: vec![Value::Number(number)], shape: Shape::Set },
            Some(value) => value,
            None => Value::Builder { element: Box::new(element), conditions: Box::new(conditions) },
        })
    }
}

/// Two items in round or square brackets as an interval; none where the ends are no numbers or stand the wrong way.
///
/// # Errors
/// [`Stop::Fuel`]
pub fn pair_region(items: &[Value], shape: Shape, exprs: &Exprs, fuel: &Fuel) -> Result<Option<Region>, Stop> {
    let closed = shape == Shape::Brackets;
    let end = |value: &Value, high: bool| match value {
        Value::Number(number) => Some(End::At { id: number.id, closed }),
        Value::Infinite { negative } if *negative != high => Some(if high { End::Above } else { End::Below }),
        _ => None,
    };
    let [low, high] = items else { return Ok(None) };
    let (Some(low), Some(high)) = (end(low, false), end(high, true)) else { return Ok(None) };
    let region = Region::of(vec![Piece { low, high }], exprs, fuel)?;
    Ok(Some(region).filter(|region| !region.pieces.is_empty()))
}

/// Numbers as points; none where an item is no number, or has letters.
///
/// # Errors
/// [`Stop::Fuel`]
pub fn points(items: &[Value], exprs: &Exprs, fuel: &Fuel) -> Result<Option<Region>, Stop> {
    let points: Option<Vec<Piece>> = items
        .iter()
        .map(|item| match item {
            Value::Number(number) if !exprs.class(number.id).has(Class::SYMBOL) => Some(Piece::point(number.id)),
            _ => None,
        })
        .collect();
    points.map(|points| Region::of(points, exprs, fuel)).transpose()
}
