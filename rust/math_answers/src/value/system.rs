//! What several statements say together.

use super::read::{Fail, Reader};
use super::{Name, Region, Shape, Value};

impl Reader<'_> {
    /// Statements as one: solutions of one letter as its values, its inequalities as one region.
    pub(super) fn together(&mut self, items: Vec<Value>, any: bool) -> Result<Value, Fail> {
        if let Some(value) = self.solutions(&items, any) {
            return Ok(value);
        }
        if let Some(value) = self.region_of_all(&items, any)? {
            return Ok(value);
        }
        if any && items.iter().all(|item| matches!(item, Value::Region(_) | Value::Number(_))) {
            return Ok(Value::List { items, shape: Shape::Bare });
        }
        Ok(Value::System { items, any })
    }

    /// `x = 1, x = 2` as `x = 1, 2`.
    fn solutions(&self, items: &[Value], any: bool) -> Option<Value> {
        let mut values = Vec::with_capacity(items.len());
        let mut first: Option<(&Name, &Value)> = None;
        for item in items {
            let Value::Equality { names, sides, .. } = item else { return None };
            let [name] = &names[..] else { return None };
            if first.is_some_and(|(known, _)| known != name) {
                return None;
            }
            first = first.or(Some((name, sides.first()?)));
            match sides.last()? {
                Value::List { items, shape: Shape::Bare } => values.extend(items.iter().cloned()),
                other => values.push(other.clone()),
            }
        }
        let (name, side) = first?;
        // `x = 1/2 or x = 0.5` is one solution.
        let value = match values.first() {
            Some(first) if any && self.is_one_value(&values) => first.clone(),
            _ => Value::List { items: values, shape: Shape::Bare },
        };
        Some(Value::Equality { names: vec![name.clone()], sides: vec![side.clone(), value], difference: None })
    }

    fn region_of_all(&mut self, items: &[Value], any: bool) -> Result<Option<Value>, Fail> {
        let mut found: Option<(Name, Region)> = None;
        let mut parts = Vec::new();
        for item in items {
            let (name, region) = match item {
                Value::Inequality { parts: more, solved: Some((name, region)) } => {
                    parts.extend(more.iter().copied());
                    (name.clone(), region.clone())
                }
                Value::Equality { names, sides, .. } => match (&names[..], sides.last()) {
                    ([name], Some(value)) => match self.as_region(value.clone()) {
                        Ok(region) => (name.clone(), region),
                        Err(Fail::NotNumber) => return Ok(None),
                        Err(fail) => return Err(fail),
                    },
                    _ => return Ok(None),
                },
                Value::Member { element, set, negated: false } => match (self.name_of(element), &**set) {
                    (Some(name), Value::Region(region)) => (name, region.clone()),
                    _ => return Ok(None),
                },
                _ => return Ok(None),
            };
            found = Some(match found {
                None => (name, region),
                Some((known, so_far)) if known == name => {
                    let both = if any {
                        let pieces = so_far.pieces.iter().chain(&region.pieces).copied().collect();
                        let both = Region::of(pieces, self.exprs, self.fuel)?;
                        Region { solved: so_far.solved && region.solved, ..both }
                    } else {
                        match so_far.intersection(&region, self.exprs, self.fuel)? {
                            Some(both) => both,
                            None => return Ok(None),
                        }
                    };
                    (known, both)
                }
                Some(_) => return Ok(None),
            });
        }
        Ok(found.map(|solved| Value::Inequality { parts, solved: Some(solved) }))
    }
}
