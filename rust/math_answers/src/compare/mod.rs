//! Equality of values: what shapes may stand for each other, and how their parts are matched.

mod collections;
mod numbers;
mod proportional;
mod statements;
mod systems;

use dashu_ratio::RBig;

use super::expr::{Exprs, Id, Part};
use super::fuel::{Fuel, Stop};
use super::value::{Mark, Number, Reading, Region, Shape, Value};
use crate::equality::Equality;

/// What to do about units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Units {
    /// A missing unit is fine, a different one is wrong.
    #[default]
    MissingOk,
    /// As [`Units::MissingOk`], and units of one dimension are converted: 1 m is 100 cm.
    Convert,
    /// A unit is wrong where the other side has none.
    Exact,
    /// Units say nothing.
    Ignore,
}

impl Units {
    /// By the name that users write.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "missing_ok" => Some(Self::MissingOk),
            "convert" => Some(Self::Convert),
            "exact" => Some(Self::Exact),
            "ignore" => Some(Self::Ignore),
            _ => None,
        }
    }
}

/// What a caller may relax. The default is the strictest reading.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Options {
    /// Accept constants within this relative distance of the gold (absolute, of a gold of zero).
    pub tolerance: Option<RBig>,
    /// Whether 50% equals a bare 50, besides 0.5.
    pub percent_optional: bool,
    /// Units.
    pub units: Units,
    /// Whether a bare 52 equals 52₈, besides 42.
    pub base_optional: bool,
    /// Whether `2x = 10` and `x² < 4`, which may restate the problem, answer `x = 5` and `-2 < x < 2`.
    pub unsolved_ok: bool,
    /// Whether `123 \times 456`, which may restate the problem, answers `56088`.
    pub unevaluated_ok: bool,
    /// Whether lists in every bracket are the same: `(1, 2)`, `[1, 2]`, `{1, 2}` and `1, 2`, in their order.
    pub brackets_optional: bool,
}

/// Whether an answer is worth the same as the gold.
#[must_use]
pub fn equal(gold: &Reading, answer: &Reading, options: &Options, fuel: &Fuel) -> Equality {
    let comparer = Comparer { gold: &gold.exprs, answer: &answer.exprs, options, fuel };
    match fuel.spend(4) {
        Ok(()) => comparer.values(&gold.value, &answer.value),
        Err(_) => Equality::Undecided,
    }
}

/// Compares values of one gold with those of one answer.
struct Comparer<'c> {
    gold: &'c Exprs,
    answer: &'c Exprs,
    options: &'c Options,
    fuel: &'c Fuel,
}

impl Comparer<'_> {
    fn gold(&self, id: Id) -> Part<'_> {
        (self.gold, id)
    }

    fn answer(&self, id: Id) -> Part<'_> {
        (self.answer, id)
    }

    fn values(&self, gold: &Value, answer: &Value) -> Equality {
        if self.fuel.spend(6).is_err() {
            return Equality::Undecided;
        }
        match (gold, answer) {
            (Value::Number(gold), Value::Number(answer)) => self.numbers(gold, answer),
            (Value::Infinite { negative: a }, Value::Infinite { negative: b }) => Equality::of(a == b),
            (Value::Text(gold), Value::Text(answer)) => {
                let choices = matches!(gold.as_bytes(), [b'a'..=b'j' | b'A'..=b'J']);
                Equality::of(gold == answer || choices && gold.eq_ignore_ascii_case(answer))
            }
            (Value::Time { seconds: a, known: p, .. }, Value::Time { seconds: b, known: q, .. }) => {
                Equality::of(a == b && p == q)
            }
            (Value::Ellipsis, Value::Ellipsis) => Equality::Equal,
            (Value::Named(a, p), Value::Named(b, q)) => Equality::of(a == b && p == q),
            // Statements stand for what they state.
            (Value::Equality { .. }, _) | (_, Value::Equality { .. }) => self.equalities(gold, answer),
            (Value::System { .. }, _) | (_, Value::System { .. }) => self.systems(gold, answer),
            (Value::Member { element: a, set: s, negated: p }, Value::Member { element: b, set: t, negated: q }) => {
                let elements = self.values(a, b).or(Equality::of(false));
                if p == q { elements.and(self.values(s, t)) } else { Equality::Different }
            }
            (Value::Member { element, set, negated: false }, Value::Inequality { solved: Some((name, _)), .. }) => {
                Equality::of(is_named(self.gold, element, &name.spelling)).and(self.values(set, answer))
            }
            (Value::Inequality { solved: Some((name, _)), .. }, Value::Member { element, set, negated: false }) => {
                Equality::of(is_named(self.answer, element, &name.spelling)).and(self.values(gold, set))
            }
            (Value::Member { set, negated: false, .. }, _) => self.values(set, answer),
            (_, Value::Member { set, negated: false, .. }) => self.values(gold, set),
            (Value::Inequality { .. }, Value::Inequality { .. }) => self.inequalities(gold, answer),
            (Value::Congruence { .. }, Value::Congruence { .. }) => self.congruences(gold, answer),
            // `17 mod 5` is 2.
            (Value::Congruence { left: None, remainder: Some(id), .. }, Value::Number(number)) => {
                self.numbers(&Number { id: *id, mark: Mark::Bare }, number)
            }
            (Value::Number(number), Value::Congruence { left: None, remainder: Some(id), .. }) => {
                self.numbers(number, &Number { id: *id, mark: Mark::Bare })
            }
            (Value::Related { operator: p, sides: a }, Value::Related { operator: q, sides: b }) => {
                let straight = || self.values(&a.0, &b.0).and(self.values(&a.1, &b.1));
                let crossed = || self.values(&a.0, &b.1).and(self.values(&a.1, &b.0));
                let sides = if p.is_symmetric() { straight().or(crossed()) } else { straight() };
                Equality::of(p == q).and(sides)
            }
            (Value::Builder { element: a, conditions: p }, Value::Builder { element: b, conditions: q }) => {
                self.values(a, b).and(self.values(p, q))
            }
            (Value::Matrix { columns: a, entries: p }, Value::Matrix { columns: b, entries: q }) => {
                if a == b {
                    self.in_order(p, q)
                } else {
                    Equality::Different
                }
            }
            (Value::Matrix { columns, entries }, Value::List { items, shape }) => {
                self.vector_as_list(*columns, entries, items, *shape, true)
            }
            (Value::List { items, shape }, Value::Matrix { columns, entries }) => {
                self.vector_as_list(*columns, entries, items, *shape, false)
            }
            // A time is a ratio only beside what can be nothing else; as a gold, in lowest terms.
            (Value::Time { ratio: Some(ratio), lowest: true, .. }, _) => self.values(ratio, answer),
            (_, Value::Time { ratio: Some(ratio), .. }) => self.values(gold, ratio),
            (Value::Ratio { terms, .. }, Value::Ratio { terms: others, .. }) if terms.len() != others.len() => {
                Equality::Different
            }
            (Value::Ratio { quotients: gold, .. }, Value::Ratio { quotients: answer, .. }) => {
                self.in_order(gold, answer)
            }
            // 1 : 2 is 1/2.
            (Value::Ratio { value: Some(gold), .. }, Value::Number(Number { id, mark: Mark::Bare })) => {
                self.same(*gold, *id)
            }
            (Value::Number(Number { id, mark: Mark::Bare }), Value::Ratio { value: Some(answer), .. }) => {
                self.same(*id, *answer)
            }
            _ => self.collections(gold, answer),
        }
    }

    fn in_order(&self, gold: &[Id], answer: &[Id]) -> Equality {
        if gold.len() != answer.len() {
            return Equality::Different;
        }
        let mut all = Equality::Equal;
        for (gold, answer) in gold.iter().zip(answer) {
            all = all.and(self.same(*gold, *answer));
            if all == Equality::Different {
                break;
            }
        }
        all
    }

    fn same(&self, gold: Id, answer: Id) -> Equality {
        self.constants_within(
            gold,
            answer,
            super::expr::identity::compare(self.gold(gold), self.answer(answer), self.fuel),
        )
    }

    /// A value as a part of the line, where it is one.
    fn region(&self, value: &Value, exprs: &Exprs) -> Result<Option<Region>, Stop> {
        match value {
            Value::Region(region) | Value::Inequality { solved: Some((_, region)), .. } => Ok(Some(region.clone())),
            Value::List { items, shape: Shape::Tuple | Shape::Brackets } => {
                let Value::List { shape, .. } = value else { return Ok(None) };
                super::value::pair_region(items, *shape, exprs, self.fuel)
            }
            Value::List { items, .. } => super::value::points(items, exprs, self.fuel),
            _ => Ok(None),
        }
    }
}

fn is_named(exprs: &Exprs, value: &Value, spelling: &str) -> bool {
    match value {
        Value::Number(number) => match exprs.kind(number.id) {
            super::expr::Kind::Symbol(hash) => {
                exprs.names().iter().any(|(known, name)| known == hash && **name == *spelling)
            }
            _ => false,
        },
        _ => false,
    }
}
