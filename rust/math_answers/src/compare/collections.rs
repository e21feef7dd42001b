//! Lists, sets, tuples, regions and vectors.

use std::collections::HashMap;

use super::super::expr::{Class, Exprs, Id};
use super::super::value::{End, Mark, Number, Piece, Region, Shape, Value};
use super::Comparer;
use crate::equality::Equality;
use crate::expr::identity::compare;

impl Comparer<'_> {
    /// Values of which at least one is a collection or a region.
    pub(super) fn collections(&self, gold: &Value, answer: &Value) -> Equality {
        match (gold, answer) {
            (Value::List { items: left, shape: p }, Value::List { items: right, shape: q }) => {
                self.lists(left, *p, right, *q)
            }
            // A single value in braces or brackets is that value.
            (
                Value::List { items, shape: Shape::Set | Shape::Brackets | Shape::Bare },
                Value::Number(_) | Value::Text(_),
            ) if items.len() == 1 => self.values(&items[0], answer),
            (
                Value::Number(_) | Value::Text(_),
                Value::List { items, shape: Shape::Set | Shape::Brackets | Shape::Bare },
            ) if items.len() == 1 => self.values(gold, &items[0]),
            (Value::Text(text), Value::Number(number)) => Equality::of(spelled(self.answer, number, text, true)),
            (Value::Number(number), Value::Text(text)) => Equality::of(spelled(self.gold, number, text, false)),
            _ => self.regions_of(gold, answer),
        }
    }

    fn lists(&self, left: &[Value], p: Shape, right: &[Value], q: Shape) -> Equality {
        let strict = !self.options.brackets_optional;
        match (p.is_ordered(), q.is_ordered()) {
            (false, false) => {
                // A point that is listed twice is one.
                let point = |value: &Value| matches!(value, Value::List { shape: Shape::Tuple, .. });
                let points = || left.iter().chain(right).all(point);
                self.unordered(left, right, p == Shape::Set || q == Shape::Set || points())
            }
            (true, true) => {
                // With two items round and square brackets are different intervals.
                let brackets =
                    |a, b| (a, b) == (Shape::Tuple, Shape::Brackets) || (a, b) == (Shape::Brackets, Shape::Tuple);
                if strict && brackets(p, q) && left.len() == 2 {
                    Equality::Different
                } else {
                    self.ordered(left, right)
                }
            }
            _ if !strict => self.ordered(left, right),
            // `[1, 2, 3]` as the list of a programmer; `(1, 2, 3)` is a point.
            _ if (p == Shape::Brackets || q == Shape::Brackets) && left.len() != 2 => self.ordered(left, right),
            _ => Equality::Different,
        }
    }

    fn ordered(&self, left: &[Value], right: &[Value]) -> Equality {
        if left.len() != right.len() {
            return Equality::Different;
        }
        let mut all = Equality::Equal;
        for (gold, answer) in left.iter().zip(right) {
            all = all.and(self.values(gold, answer));
            if all == Equality::Different {
                break;
            }
        }
        all
    }

    fn unordered(&self, left: &[Value], right: &[Value], set: bool) -> Equality {
        if !set {
            return self.unordered_refs(&left.iter().collect::<Vec<_>>(), &right.iter().collect::<Vec<_>>());
        }
        match (distinct(left, self.gold, self), distinct(right, self.answer, self)) {
            (Some(left), Some(right)) => self.unordered_refs(&left, &right),
            _ => Equality::Undecided,
        }
    }

    /// Match items one to one.
    ///
    /// Equality is transitive, so the first partner found is as good as any. Numbers of one residue are found by a table,
    /// so that only what balls have to tell costs a comparison for each pair.
    pub(super) fn unordered_refs(&self, left: &[&Value], right: &[&Value]) -> Equality {
        if left.len() != right.len() {
            return Equality::Different;
        }
        if self.fuel.spend(20 * left.len() as u64).is_err() {
            return Equality::Undecided;
        }
        let mut plain: HashMap<u64, Vec<usize>> = HashMap::new();
        for (at, value) in right.iter().enumerate() {
            if let Some(id) = bare(value) {
                plain.entry(self.answer.residue(id).key()).or_default().push(at);
            }
        }
        let mut free = vec![true; right.len()];
        let mut rest = Vec::new();
        for value in left {
            let partner = bare(value).and_then(|id| {
                let places = plain.get_mut(&self.gold.residue(id).key())?;
                let place = places.iter().rposition(|at| self.values(value, right[*at]) == Equality::Equal)?;
                Some(places.swap_remove(place))
            });
            match partner {
                Some(at) => free[at] = false,
                None => rest.push(value),
            }
        }
        let mut open: Vec<usize> = (0..right.len()).filter(|at| free[*at]).collect();
        let mut unsure = false;
        for value in rest {
            let rational = bare_rational(value, self.gold).is_some();
            let mut partner = None;
            let mut may_have = false;
            for (place, at) in open.iter().enumerate() {
                if self.fuel.spend(4).is_err() {
                    return Equality::Undecided;
                }
                // Two rationals would have met in the table, but for a tolerance.
                if rational && self.options.tolerance.is_none() && bare_rational(right[*at], self.answer).is_some() {
                    continue;
                }
                match self.values(value, right[*at]) {
                    Equality::Equal => {
                        partner = Some(place);
                        break;
                    }
                    Equality::Undecided => may_have = true,
                    Equality::Different => {}
                }
            }
            match partner {
                Some(place) => {
                    open.swap_remove(place);
                }
                None if may_have => unsure = true,
                None => return Equality::Different,
            }
        }
        if unsure { Equality::Undecided } else { Equality::Equal }
    }

    /// A vector in a matrix and in brackets: a column is any vector, a row a vector in square or angle brackets.
    pub(super) fn vector_as_list(
        &self,
        columns: usize,
        entries: &[Id],
        items: &[Value],
        shape: Shape,
        matrix_is_gold: bool,
    ) -> Equality {
        let column = columns == 1 && matches!(shape, Shape::Tuple | Shape::Vector);
        let row = columns == entries.len() && matches!(shape, Shape::Brackets | Shape::Vector | Shape::Tuple);
        if !(column || row) || entries.len() != items.len() {
            return Equality::Different;
        }
        let mut all = Equality::Equal;
        for (entry, item) in entries.iter().zip(items) {
            let entry = Value::Number(Number { id: *entry, mark: Mark::Bare });
            all = all.and(if matrix_is_gold { self.values(&entry, item) } else { self.values(item, &entry) });
        }
        all
    }

    fn regions_of(&self, gold: &Value, answer: &Value) -> Equality {
        // Two finite lists or two single values never get here; at least one side has to be a part of the line.
        let is_region = |value: &Value| matches!(value, Value::Region(_) | Value::Inequality { .. });
        if !is_region(gold) && !is_region(answer) {
            return Equality::Different;
        }
        match (self.region(gold, self.gold), self.region(answer, self.answer)) {
            (Ok(Some(gold)), Ok(Some(answer))) => self.regions(&gold, &answer),
            (Ok(_), Ok(_)) => Equality::Different,
            _ => Equality::Undecided,
        }
    }

    pub(super) fn regions(&self, gold: &Region, answer: &Region) -> Equality {
        if gold.solved && !answer.solved && !self.options.unsolved_ok {
            return Equality::Different;
        }
        if gold.pieces.len() != answer.pieces.len() {
            // Pieces with letters in their ends may overlap, but a single one is no union of several.
            let merged = |region: &Region| region.sorted || region.pieces.len() == 1;
            return if merged(gold) && merged(answer) { Equality::Different } else { Equality::Undecided };
        }
        if gold.sorted && answer.sorted {
            let mut all = Equality::Equal;
            for (gold, answer) in gold.pieces.iter().zip(&answer.pieces) {
                all = all.and(self.pieces(*gold, *answer));
            }
            return all;
        }
        // With letters in the ends the order is not known: match.
        let mut open: Vec<Piece> = answer.pieces.clone();
        for piece in &gold.pieces {
            match open.iter().position(|other| self.pieces(*piece, *other) == Equality::Equal) {
                Some(at) => {
                    open.swap_remove(at);
                }
                None => return Equality::Different,
            }
        }
        Equality::Equal
    }

    fn pieces(&self, gold: Piece, answer: Piece) -> Equality {
        self.ends(gold.low, answer.low).and(self.ends(gold.high, answer.high))
    }

    fn ends(&self, gold: End, answer: End) -> Equality {
        match (gold, answer) {
            (End::At { id: a, closed: p }, End::At { id: b, closed: q }) => {
                if p == q {
                    self.same(a, b)
                } else {
                    Equality::Different
                }
            }
            (End::Below, End::Below) | (End::Above, End::Above) => Equality::Equal,
            _ => Equality::Different,
        }
    }
}

/// Whether a text and a letter are spelled alike: names in either case, single letters in the same one. Of a gold that is
/// the label of a choice, case does not count.
fn spelled(exprs: &Exprs, number: &Number, text: &str, text_is_gold: bool) -> bool {
    let label = text_is_gold && matches!(text.as_bytes(), [b'a'..=b'j' | b'A'..=b'J']);
    let super::super::expr::Kind::Symbol(hash) = exprs.kind(number.id) else { return false };
    let same = |name: &str| match text.len() {
        1 if label => name.eq_ignore_ascii_case(text),
        1 => name == text,
        _ => name.to_lowercase() == *text,
    };
    exprs.names().iter().any(|(known, name)| known == hash && same(name))
}

fn bare(value: &Value) -> Option<Id> {
    match value {
        Value::Number(Number { id, mark: Mark::Bare }) => Some(*id),
        _ => None,
    }
}

fn bare_rational(value: &Value, exprs: &Exprs) -> Option<Id> {
    match value {
        Value::Number(Number { id, mark: Mark::Bare }) if exprs.as_rational(*id).is_some() => Some(*id),
        _ => None,
    }
}

/// The items without repetitions; none when it cannot be told.
fn distinct<'v>(items: &'v [Value], exprs: &Exprs, comparer: &Comparer<'_>) -> Option<Vec<&'v Value>> {
    let mut seen: HashMap<u64, ()> = HashMap::new();
    let mut kept: Vec<&Value> = Vec::with_capacity(items.len());
    let mut odd: Vec<&Value> = Vec::new();
    for item in items {
        comparer.fuel.spend(10).ok()?;
        if let Some(id) = bare_rational(item, exprs) {
            if seen.insert(exprs.residue(id).key(), ()).is_none() {
                kept.push(item);
            }
            continue;
        }
        let within = Comparer { gold: exprs, answer: exprs, options: comparer.options, fuel: comparer.fuel };
        let mut repeated = false;
        for other in &odd {
            match within.values(other, item) {
                Equality::Equal => repeated = true,
                Equality::Different => {}
                Equality::Undecided => return None,
            }
        }
        if !repeated {
            odd.push(item);
            kept.push(item);
        }
    }
    // A radical may be worth a rational: √4 folds, but what only balls can tell is left.
    for item in &odd {
        let Value::Number(number) = item else { continue };
        if exprs.class(number.id).has(Class::SYMBOL) {
            continue;
        }
        for other in &kept {
            if let Some(id) = bare_rational(other, exprs)
                && compare((exprs, number.id), (exprs, id), comparer.fuel) == Equality::Equal
                && number.mark == Mark::Bare
            {
                return Some(kept.iter().copied().filter(|kept| !std::ptr::eq(*kept, *item)).collect());
            }
        }
    }
    Some(kept)
}
