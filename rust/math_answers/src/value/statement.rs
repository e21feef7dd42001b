//! Equations, inequalities, memberships, and what several of them say together.

use super::super::ast::{Comparison, Constant, Node, NodeId, Separator};

use super::super::expr::Id;
use super::super::expr::order::is_near;
use super::choices::defined_arguments;
use super::read::{Fail, Reader};
use super::{End, Mark, Name, NameKind, Piece, Region, Shape, Value};
use crate::equality::Equality;
use crate::expr::identity::compare;

impl Reader<'_> {
    /// The value of a relation, or of several.
    pub(super) fn statement(&mut self, node: NodeId) -> Result<Value, Fail> {
        let ast = self.ast;
        match ast.node(node) {
            Node::Relation { operands, operators } => {
                let depth = self.bindings.len();
                if self.choices.renamed
                    && let Some(arguments) = defined_arguments(ast, ast.node(node))
                {
                    for (at, argument) in arguments.into_iter().enumerate() {
                        let id = self.exprs.symbol(&format!("x{at}"), self.fuel)?;
                        self.bindings.push((argument, id));
                    }
                }
                let value = self.relation(operands, operators);
                self.bindings.truncate(depth);
                value
            }
            Node::Congruence { left, right, modulus } => {
                let left = Some(self.number(*left)?);
                let right = match ast.node(*right) {
                    Node::List { items, .. } | Node::Set(items) => self.numbers(items)?,
                    _ => match self.value(*right)? {
                        Value::Number(number) => vec![number.id],
                        Value::List { items, .. } => items.iter().filter_map(as_id).collect(),
                        _ => return Err(Fail::NotNumber),
                    },
                };
                Ok(Value::Congruence { left, right, modulus: self.number(*modulus)?, remainder: None })
            }
            Node::And(items) => {
                let items = self.items(items)?;
                self.together(items, false)
            }
            Node::Or(items) => {
                let items = self.items(items)?;
                self.together(items, true)
            }
            Node::List { items, separator } => {
                let statements = items.iter().filter(|item| is_statement(ast.node(**item))).count();
                let values = self.items(items)?;
                if statements == 0 {
                    // `1/4 or 0.25` is one value in two spellings.
                    if *separator == Separator::Or && self.is_one_value(&values) {
                        return values.into_iter().next().ok_or(Fail::NotNumber);
                    }
                    return Ok(Value::List { items: values, shape: Shape::Bare });
                }
                if statements < items.len() {
                    // `x = 1, 2`: the rest are further values of the first.
                    if let [Value::Equality { names, sides, .. }, rest @ ..] = &values[..]
                        && names.len() == 1
                        && let Some(last) = sides.last()
                        && statements == 1
                    {
                        let all = std::iter::once(last.clone()).chain(rest.iter().cloned()).collect();
                        let value = Value::List { items: all, shape: Shape::Bare };
                        let sides = vec![sides[0].clone(), value];
                        return Ok(Value::Equality { names: names.clone(), sides, difference: None });
                    }
                    // `kπ, k ∈ ℤ` is a value with its domain.
                    let (domains, mut rest): (Vec<Value>, Vec<Value>) = values.into_iter().partition(Value::is_domain);
                    if domains.is_empty() {
                        return Ok(Value::List { items: rest, shape: Shape::Bare });
                    }
                    let main = match rest.len() {
                        1 => rest.swap_remove(0),
                        _ => Value::List { items: rest, shape: Shape::Bare },
                    };
                    let items = std::iter::once(main).chain(domains).collect();
                    return Ok(Value::System { items, any: false });
                }
                self.together(values, *separator == Separator::Or)
            }
            _ => Err(Fail::NotNumber),
        }
    }

    /// Whether all are numbers without different units, and equal.
    pub(super) fn is_one_value(&self, values: &[Value]) -> bool {
        let [Value::Number(first), rest @ ..] = values else { return false };
        let unit = |mark: &Mark| match mark {
            Mark::Unit(unit) => Some(unit.clone()),
            _ => None,
        };
        rest.iter().all(|value| match value {
            Value::Number(number) => {
                unit(&first.mark) == unit(&number.mark)
                    && compare((self.exprs, first.id), (self.exprs, number.id), self.fuel) == Equality::Equal
            }
            _ => false,
        })
    }

    fn relation(&mut self, operands: &[NodeId], operators: &[Comparison]) -> Result<Value, Fail> {
        use Comparison::{Approx, Equal, Greater, GreaterEqual, Identical, In, Less, LessEqual, NotEqual, NotIn};
        self.letters_before_equals(operands, operators);
        let is = |operator: &Comparison| matches!(operator, Equal | Approx | Identical);
        if operators.iter().all(is) {
            // `5 = 5` calculates nothing; `52/120 = 13/30` and `1/2 = 0.5` do.
            if let [left, right] = operands
                && let (Node::Number { value: a, form: p }, Node::Number { value: b, form: q }) =
                    (self.ast.node(*left), self.ast.node(*right))
                && a == b
                && p == q
            {
                let sides = Box::new((self.value(*left)?, self.value(*right)?));
                return Ok(Value::Related { operator: operators[0], sides });
            }
            let mut sides = self.sides(operands)?;
            // `x ≈ 3.14` says 3.14; of `x = π ≈ 3.14` and `π ≈ 3.14` the exact value counts.
            if let Some(at) = operators.iter().position(|operator| *operator == Approx)
                && !self.choices.rounded
                && (at > 0 || self.name_of(&sides[0]).is_none())
            {
                if !self.is_rounded(&sides[at], &sides[at + 1..]) {
                    return Err(Fail::NotNumber);
                }
                sides.truncate(at + 1);
            } else if self.choices.rounded && sides.len() > 2 {
                sides.drain(1..sides.len() - 1);
            }
            if self.choices.rounded && self.name_of(&sides[0]).is_none() {
                sides.drain(..sides.len() - 1);
            }
            if sides.len() == 1 {
                return Ok(sides.swap_remove(0));
            }
            return self.equality(sides);
        }
        let compares = |operator: &Comparison| matches!(operator, Less | LessEqual | Greater | GreaterEqual | NotEqual);
        if operators.iter().all(|operator| compares(operator) || is(operator)) {
            // `f(x) = x > 3` is nothing that is understood; the first sides of a chain may be equal though.
            let mut parts = Vec::with_capacity(operators.len());
            let sides = self.items_one_by_one(operands)?;
            for (at, operator) in operators.iter().enumerate() {
                match (&sides[at], &sides[at + 1]) {
                    (Value::Number(left), Value::Number(right)) => {
                        parts.push((self.exprs.difference(left.id, right.id, self.fuel)?, *operator));
                    }
                    // `x < ∞` and `-∞ < x` say nothing.
                    (Value::Number(_), Value::Infinite { negative: false }) if matches!(operator, Less | LessEqual) => {
                    }
                    (Value::Infinite { negative: true }, Value::Number(_)) if matches!(operator, Less | LessEqual) => {}
                    (Value::Number(_), Value::Infinite { negative: true })
                        if matches!(operator, Greater | GreaterEqual) => {}
                    (Value::Number(number), Value::List { items, .. }) if *operator == NotEqual => {
                        for item in items {
                            let right = as_id(item).ok_or(Fail::NotNumber)?;
                            parts.push((self.exprs.difference(number.id, right, self.fuel)?, NotEqual));
                        }
                    }
                    _ => return Err(Fail::NotNumber),
                }
            }
            let solved = match sides.iter().find_map(|side| self.name_of(side)).filter(|_| parts.is_empty()) {
                Some(name) => Some((name, Region::all())),
                None => match self.solve(&parts)? {
                    None => self.bounds(&sides, operators)?,
                    Some((name, region)) => {
                        let solved = sides.iter().all(|side| self.is_solved_side(side));
                        Some((name, Region { solved, ..region }))
                    }
                },
            };
            return Ok(Value::Inequality { parts, solved });
        }
        let mut sides = self.items_one_by_one(operands)?;
        match operators {
            [In | NotIn] if sides.len() == 2 => {
                let (set, element) = (Box::new(sides.swap_remove(1)), Box::new(sides.swap_remove(0)));
                Ok(Value::Member { element, set, negated: operators[0] == NotIn })
            }
            [operator] if sides.len() == 2 => {
                let (right, left) = (sides.swap_remove(1), sides.swap_remove(0));
                Ok(Value::Related { operator: *operator, sides: Box::new((left, right)) })
            }
            // `x = y ∈ S`, `0 ≤ x ∈ ℤ`
            _ => Err(Fail::NotNumber),
        }
    }

    /// Whether constants are near what is said to be about them: `1/3 ≈ 0.33`, but not `5 ≈ 7`.
    fn is_rounded(&self, exact: &Value, rounded: &[Value]) -> bool {
        /// One significant digit is within a third.
        const SHARE: f64 = 0.35;
        let near = |value: &Value| match (exact, value) {
            (Value::Number(exact), Value::Number(value)) => {
                is_near((self.exprs, exact.id), (self.exprs, value.id), SHARE, self.fuel)
            }
            _ => true,
        };
        rounded.iter().all(near)
    }

    /// `x > a`, `a < x < b` with letters in the bounds.
    fn bounds(&mut self, sides: &[Value], operators: &[Comparison]) -> Result<Option<(Name, Region)>, Fail> {
        use Comparison::{Greater, GreaterEqual, Less, LessEqual};
        let names = sides.iter().enumerate().filter_map(|(at, side)| Some((at, self.name_of(side)?)));
        let candidates: Vec<(usize, Name)> = names.collect();
        // Of `a < x < b` the middle, of `x < a` the first one.
        let at = if sides.len() == 3 { 1 } else { candidates.first().map_or(0, |(at, _)| *at) };
        let Some((_, name)) = candidates.into_iter().find(|(place, _)| *place == at) else { return Ok(None) };
        let mut piece = Piece::ALL;
        for (place, operator) in operators.iter().enumerate() {
            let (other, ascending) = match operator {
                Less | LessEqual => (if place == at { at + 1 } else { place }, true),
                Greater | GreaterEqual => (if place == at { at + 1 } else { place }, false),
                _ => return Ok(None),
            };
            if place != at && place + 1 != at {
                return Ok(None);
            }
            let Some(id) = as_id(&sides[other]) else { return Ok(None) };
            if self.mentions(id, &name) {
                return Ok(None);
            }
            let end = End::At { id, closed: matches!(operator, LessEqual | GreaterEqual) };
            // The bound is above x where x stands on the smaller side.
            if (place == at) == ascending { piece.high = end } else { piece.low = end }
        }
        Ok(Some((name, Region { pieces: vec![piece], sorted: false, solved: true })))
    }

    /// Sides of an equation; what stands before its only `=` and has no value here, as P(A ∩ B), is a name.
    fn sides(&mut self, operands: &[NodeId]) -> Result<Vec<Value>, Fail> {
        let mut sides = Vec::with_capacity(operands.len());
        for (at, operand) in operands.iter().enumerate() {
            sides.push(match self.value(*operand) {
                Err(Fail::NotNumber) if at == 0 && operands.len() == 2 => {
                    self.fuel.spend(20 * self.ast.nodes().len() as u64)?;
                    let mut name = self.ast.clone();
                    name.set_root(*operand);
                    Value::Text(name.to_string())
                }
                value => value?,
            });
        }
        Ok(sides)
    }

    fn items_one_by_one(&mut self, nodes: &[NodeId]) -> Result<Vec<Value>, Fail> {
        nodes.iter().map(|node| self.value(*node)).collect()
    }

    /// The letters e and i alone before `=` or `∈` are letters, from then on.
    fn letters_before_equals(&mut self, operands: &[NodeId], operators: &[Comparison]) {
        if let (Some(first), Some(Comparison::Equal | Comparison::In)) = (operands.first(), operators.first())
            && let Node::Constant { value: Constant::E | Constant::I, letter: Some(letter) } = self.ast.node(*first)
            && operands.len() == 2
        {
            self.letters.push(*letter);
        }
        // `3 = i` states i as `i = 3` does.
        if let (&[first, last], [Comparison::Equal]) = (operands, operators)
            && let Node::Number { .. } = self.ast.node(first)
            && let Node::Constant { value: Constant::E | Constant::I, letter: Some(letter) } = self.ast.node(last)
        {
            self.letters.push(*letter);
        }
    }

    fn equality(&mut self, mut sides: Vec<Value>) -> Result<Value, Fail> {
        let count = sides.len();
        // Of a ratio no time is said: `AB : CD = 7:32`.
        if let [Value::Ratio { .. }, last @ Value::Time { ratio: Some(_), .. }] = &mut sides[..]
            && let Value::Time { ratio: Some(ratio), .. } = last
        {
            *last = (**ratio).clone();
        }
        let mut names: Vec<Name> = sides[..count - 1].iter().map_while(|side| self.name_of(side)).collect();
        if names.len() + 1 < count {
            // `A = ½bh = 12`: the name comes first and the last side counts; `12 = x` names last.
            names.truncate(1);
            if names.is_empty()
                && count == 2
                && let Some(name) = self.name_of(&sides[1])
            {
                names.push(name);
                sides.swap(0, 1);
            }
            if names.is_empty() {
                names.extend(match (&sides[0], &sides[count - 1]) {
                    (Value::Number(first), Value::Number(last)) => self.formula(first.id, last.id),
                    // `AE : EB = 2 : 3`
                    (Value::Ratio { value: Some(first), .. }, Value::Ratio { value: Some(last), .. }) => {
                        self.formula(*first, *last)
                    }
                    (Value::Ratio { value: Some(first), .. }, Value::Number(last)) => self.formula(*first, last.id),
                    // `B^{-1} = (…)`: what is no number cannot be moved to the other side.
                    (Value::Number(first), Value::Matrix { .. } | Value::List { .. } | Value::Region(_)) => {
                        Some(Name {
                            spelling: format!("{:x}", self.exprs.residue(first.id).key()),
                            kind: NameKind::Function,
                        })
                    }
                    _ => None,
                });
            }
        }
        if let ([name], Some(Value::Number(number))) = (&names[..], sides.last())
            && self.mentions(number.id, name)
        {
            // `x = x² − 2` states no value of x.
            names.clear();
        }
        let difference = match &sides[..] {
            [Value::Number(left), Value::Number(right)] => Some(self.exprs.difference(left.id, right.id, self.fuel)?),
            _ => None,
        };
        Ok(Value::Equality { names, sides, difference })
    }
}

pub(super) fn as_id(value: &Value) -> Option<Id> {
    match value {
        Value::Number(number) => Some(number.id),
        _ => None,
    }
}

fn is_statement(node: &Node) -> bool {
    matches!(node, Node::Relation { .. } | Node::Congruence { .. } | Node::And(_) | Node::Or(_))
}
