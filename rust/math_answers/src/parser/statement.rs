//! Lists of statements, statements, and what relates their sides.

use super::super::ast::{Comparison, Node, NodeId, Separator};
use super::super::lexer::token::{Bracket, Kind};
use super::{Context, Parsed, Parser};
use crate::error::ParseError;

/// Items and what stands between them.
#[derive(Default)]
struct Items {
    items: Vec<NodeId>,
    separators: Vec<Separator>,
}

impl<'t> Parser<'_, 't> {
    /// Everything that is left, as one answer.
    pub(super) fn root(&mut self) -> Parsed<NodeId> {
        // `= 5` and `≈ 5` go on from something outside the answer.
        if let Some(Kind::Relation(Comparison::Equal | Comparison::Approx | Comparison::To)) = self.peek() {
            self.at += 1;
        }
        let root = self.list()?;
        if self.at == self.tokens.len() { Ok(root) } else { Err(ParseError::Unparseable) }
    }

    /// Statements or values with separators, up to what is neither.
    pub(super) fn list(&mut self) -> Parsed<NodeId> {
        let mut parts = Vec::new();
        loop {
            while self.eat(Kind::Newline) {}
            let Items { items, separators } = self.items()?;
            let part = self.fold(items, separators)?;
            parts.push(part);
            if !matches!(self.peek(), Some(Kind::Semicolon | Kind::Newline)) {
                break;
            }
            while matches!(self.peek(), Some(Kind::Semicolon | Kind::Newline)) {
                self.at += 1;
            }
            if !(self.eat_word("and") || self.eat_word("or")) && self.ends_list() {
                break;
            }
        }
        match parts[..] {
            [only] => Ok(only),
            _ => self.push(Node::List { items: parts, separator: Separator::Semicolon }),
        }
    }

    fn ends_list(&self) -> bool {
        matches!(self.peek(), None | Some(Kind::Close(_) | Kind::End(_)))
    }

    /// What commas, `and` and `or` separate.
    fn items(&mut self) -> Parsed<Items> {
        let mut found = Items::default();
        loop {
            let item = self.statement()?;
            found.items.push(item);
            if self.condition_follows() {
                self.at += 1;
                let condition = self.within(Context::default(), Self::statement)?;
                self.expect(Kind::Close(Bracket::Round))?;
                found.separators.push(Separator::Comma);
                found.items.push(condition);
            }
            let Some(separator) = self.separator() else { return Ok(found) };
            if self.ends_list() {
                return Ok(found);
            }
            found.separators.push(separator);
        }
    }

    /// Whether `(k \in \mathbb{Z})` stands here.
    pub(super) fn condition_follows(&self) -> bool {
        self.opens(Bracket::Round)
            && matches!(self.kind_at(1), Some(Kind::Name { .. }))
            && self.kind_at(2) == Some(Kind::Relation(Comparison::In))
    }

    fn separator(&mut self) -> Option<Separator> {
        let mut separator = self.eat(Kind::Comma).then_some(Separator::Comma);
        while self.eat(Kind::Comma) {}
        if self.eat_word("and") || self.eat(Kind::And) || self.eat(Kind::Ampersand) {
            separator = Some(Separator::And);
        } else if self.eat_word("or") || self.eat(Kind::Or) {
            separator = Some(Separator::Or);
        }
        let qualifies =
            ["where", "with", "for", "when", "such", "provided", "if"].iter().any(|word| self.eat_word(word));
        if qualifies {
            while ["that", "all", "any", "some", "every", "each"].iter().any(|word| self.eat_word(word)) {}
            separator = separator.or(Some(Separator::Comma));
        }
        separator
    }

    pub(super) fn is_statement(&self, id: NodeId) -> bool {
        match self.ast.node(id) {
            Node::Relation { .. } | Node::Congruence { .. } | Node::And(_) | Node::Or(_) => true,
            Node::List { items, .. } => items.iter().all(|item| {
                matches!(
                    self.ast.node(*item),
                    Node::Relation { .. } | Node::Congruence { .. } | Node::And(_) | Node::Or(_)
                )
            }),
            _ => false,
        }
    }

    /// A list, a conjunction or a disjunction of what was found.
    fn fold(&mut self, mut items: Vec<NodeId>, mut separators: Vec<Separator>) -> Parsed<NodeId> {
        if let [only] = items[..] {
            return Ok(only);
        }
        if let Some(whole) = self.distribute(&items, &separators)? {
            return Ok(whole);
        }
        if let ([first, second], [Separator::And]) = (&items[..], &separators[..])
            && let Some(sum) = self.compound(*first, *second)?
        {
            return Ok(sum);
        }
        let Some(&last) = separators.last() else { return Err(ParseError::Unparseable) };
        if !items.iter().all(|item| self.is_statement(*item)) {
            let separator =
                if separators.iter().all(|separator| *separator == Separator::Comma) { Separator::Comma } else { last };
            return self.push(Node::List { items, separator });
        }
        let ors = separators.iter().filter(|separator| **separator == Separator::Or).count();
        if ors == 0
            && let Some(systems) = self.repeated_systems(&items, &separators)?
        {
            return Ok(systems);
        }
        if ors == 0 {
            return if separators.contains(&Separator::And) {
                self.push(Node::And(items))
            } else {
                self.push(Node::List { items, separator: Separator::Comma })
            };
        }
        // `x = 1, x = 2 or x = 3` has one `or` for all; in `x = 1, y = 2 or x = 2, y = 1` it binds looser than commas.
        let one_for_all = ors == 1 && last == Separator::Or && self.same_sides(&items);
        if ors == separators.len() || one_for_all {
            return self.push(Node::Or(items));
        }
        let mut parts = Vec::new();
        while !items.is_empty() {
            let end = separators.iter().position(|separator| *separator == Separator::Or).unwrap_or(separators.len());
            let rest = items.split_off((end + 1).min(items.len()));
            let more = separators.split_off((end + 1).min(separators.len()));
            separators.truncate(end);
            let part = match items[..] {
                [only] => only,
                _ if separators.contains(&Separator::And) => self.push(Node::And(items))?,
                _ => self.push(Node::List { items, separator: Separator::Comma })?,
            };
            parts.push(part);
            (items, separators) = (rest, more);
        }
        match parts[..] {
            [only] => Ok(only),
            _ => self.push(Node::Or(parts)),
        }
    }

    /// `p = 5, q = 2 and p = 7, q = 2` is two solutions, as with a semicolon: every part between two `and` is about the
    /// same letters in the same order.
    fn repeated_systems(&mut self, items: &[NodeId], separators: &[Separator]) -> Parsed<Option<NodeId>> {
        let ands = separators.iter().filter(|separator| **separator == Separator::And).count();
        let size = items.len() / (ands + 1);
        if ands == 0 || size < 2 || size * (ands + 1) != items.len() {
            return Ok(None);
        }
        let between = |at: usize| (at + 1).is_multiple_of(size);
        if separators.iter().enumerate().any(|(at, separator)| (*separator == Separator::And) != between(at)) {
            return Ok(None);
        }
        let letter = |id: NodeId| match self.ast.node(id) {
            Node::Relation { operands, operators } if operators[..] == [Comparison::Equal] => {
                match self.ast.node(operands[0]) {
                    Node::Symbol(symbol) => Some(*symbol),
                    _ => None,
                }
            }
            _ => None,
        };
        let letters: Option<Vec<_>> = items.iter().map(|item| letter(*item)).collect();
        let Some(letters) = letters else { return Ok(None) };
        let first = &letters[..size];
        let distinct = first.iter().enumerate().all(|(at, letter)| !first[..at].contains(letter));
        if !distinct || letters.chunks(size).any(|chunk| chunk != first) {
            return Ok(None);
        }
        let mut systems = Vec::with_capacity(ands + 1);
        for chunk in items.chunks(size) {
            systems.push(self.push(Node::List { items: chunk.to_vec(), separator: Separator::Comma })?);
        }
        self.push(Node::List { items: systems, separator: Separator::Semicolon }).map(Some)
    }

    /// Whether all are relations with the same left side.
    fn same_sides(&self, items: &[NodeId]) -> bool {
        let side = |id: &NodeId| match self.ast.node(*id) {
            Node::Relation { operands, .. } => operands.first().map(|operand| self.ast.node(*operand)),
            _ => None,
        };
        let first = items.first().and_then(side);
        first.is_some() && items.iter().all(|item| side(item) == first)
    }

    /// `x = 1, 2` is a relation to a list, `x ≡ 1, 2 (mod 5)` a congruence to one.
    fn distribute(&mut self, items: &[NodeId], separators: &[Separator]) -> Parsed<Option<NodeId>> {
        let [first, rest @ ..] = items else { return Ok(None) };
        if rest.iter().any(|item| self.is_statement(*item)) {
            return Ok(None);
        }
        let Node::Relation { operands, operators } = self.ast.node(*first) else { return Ok(None) };
        let (&[left, value], &[operator]) = (&operands[..], &operators[..]) else { return Ok(None) };
        let separator = separators.last().copied().unwrap_or(Separator::Comma);
        let mut values = vec![value];
        values.extend(rest);
        if let (Comparison::Identical, Some(&Node::Mod(value, modulus))) =
            (operator, rest.last().map(|last| self.ast.node(*last)))
        {
            values.pop();
            values.push(value);
            let right = self.push(Node::List { items: values, separator })?;
            return self.push(Node::Congruence { left, right, modulus }).map(Some);
        }
        let assigns = matches!(operator, Comparison::Equal | Comparison::NotEqual | Comparison::Approx)
            && matches!(
                self.ast.node(left),
                Node::Symbol(_) | Node::Text(_) | Node::Apply { .. } | Node::Constant { .. } | Node::Tuple(_)
            );
        if !assigns {
            return Ok(None);
        }
        let right = self.push(Node::List { items: values, separator })?;
        self.push(Node::Relation { operands: vec![left, right], operators: vec![operator] }).map(Some)
    }

    /// `2 hours and 30 minutes` is one quantity, in the first unit.
    pub(super) fn compound(&mut self, first: NodeId, second: NodeId) -> Parsed<Option<NodeId>> {
        if !self.continues_quantity(first, second) {
            return Ok(None);
        }
        let (Node::Quantity { value: large, unit }, Node::Quantity { value: small, unit: part }) =
            (self.ast.node(first), self.ast.node(second))
        else {
            return Ok(None);
        };
        if let (Node::Number { value: large, form }, Node::Number { value: small, .. }) =
            (self.ast.node(*large), self.ast.node(*small))
        {
            let (form, unit) = (*form, unit.clone());
            let value = large + small * &part.factor / &unit.factor;
            let value = self.push(Node::Number { value, form })?;
            return self.push(Node::Quantity { value, unit }).map(Some);
        }
        self.push(Node::Add(vec![first, second])).map(Some)
    }

    /// Whether the second is in a smaller unit of the same kind.
    fn continues_quantity(&self, first: NodeId, second: NodeId) -> bool {
        let (Node::Quantity { unit: large, value }, Node::Quantity { unit: small, .. }) =
            (self.ast.node(first), self.ast.node(second))
        else {
            return false;
        };
        matches!(self.ast.node(*value), Node::Number { .. })
            && large.commensurable(small)
            && small.factor < large.factor
            && !large.placeholder
    }

    /// A value, or values with relation signs between them.
    pub(super) fn statement(&mut self) -> Parsed<NodeId> {
        let first = self.side()?;
        let mut operands = vec![first];
        let mut operators = Vec::new();
        while let Some(operator) = self.relation() {
            let mut operand = self.side()?;
            if matches!(operator, Comparison::In | Comparison::NotIn | Comparison::Subset) {
                operand = self.as_interval(operand)?;
            }
            operators.push(operator);
            operands.push(operand);
        }
        if let Some(modulus) = self.modulus()? {
            return match (&operands[..], &operators[..]) {
                (&[left, right], [Comparison::Identical | Comparison::Equal]) => {
                    self.push(Node::Congruence { left, right, modulus })
                }
                (&[value], []) => self.push(Node::Mod(value, modulus)),
                _ => Err(ParseError::Unparseable),
            };
        }
        if let (&[left, right], [Comparison::Identical]) = (&operands[..], &operators[..])
            && let &Node::Mod(right, modulus) = self.ast.node(right)
        {
            return self.push(Node::Congruence { left, right, modulus });
        }
        if operators.is_empty() { Ok(first) } else { self.push(Node::Relation { operands, operators }) }
    }

    fn relation(&mut self) -> Option<Comparison> {
        let sign = match self.peek()? {
            Kind::Relation(Comparison::Greater) if self.context.angle => return None,
            Kind::Relation(sign) => sign,
            Kind::Colon if matches!(self.previous(), Some(Kind::Word(_))) => Comparison::Equal,
            Kind::Mid | Kind::Bar if !self.context.set && !self.context.bar && self.kind_at(1).is_some() => {
                Comparison::Divides
            }
            Kind::Word(word) => match word {
                "is" | "are" | "equals" => Comparison::Equal,
                "in" if matches!(self.kind_at(1), Some(Kind::Open(_) | Kind::NamedSet(_))) => Comparison::In,
                _ => return None,
            },
            _ => return None,
        };
        self.at += 1;
        Some(sign)
    }

    /// `\pmod{5}`, `(mod 5)`.
    fn modulus(&mut self) -> Parsed<Option<NodeId>> {
        if self.eat(Kind::PMod) {
            return self.argument().map(Some);
        }
        let is_mod = self.kind_at(1) == Some(Kind::Mod) || self.word_at(1, "mod") || self.word_at(1, "modulo");
        if !(self.opens(Bracket::Round) && is_mod) {
            return Ok(None);
        }
        self.at += 2;
        let modulus = self.within(Context::default(), Self::side)?;
        self.expect(Kind::Close(Bracket::Round))?;
        Ok(Some(modulus))
    }

    /// One side of a relation; `a mod b` binds tighter than the relation.
    pub(super) fn side(&mut self) -> Parsed<NodeId> {
        let value = self.union()?;
        if self.eat(Kind::Mod) || self.eat_word("mod") || self.eat_word("modulo") {
            let modulus = self.union()?;
            return self.push(Node::Mod(value, modulus));
        }
        Ok(value)
    }
}
