//! Equations, inequalities, systems and congruences.

use dashu_int::IBig;

use super::super::ast::Comparison;
use super::super::expr::order::is_near;
use super::super::expr::{Class, Exprs, Id};
use super::super::value::{Name, NameKind, Value};
use super::proportional::proportional;
use super::{Comparer, is_named};
use crate::equality::Equality;
use crate::expr::identity::compare;

/// How far, as a share, the last side of a gold's calculation may be from the others: golds round with a plain `=`.
const ROUNDED: f64 = 0.1;

impl Comparer<'_> {
    /// Values of which at least one is an equation.
    pub(super) fn equalities(&self, gold: &Value, answer: &Value) -> Equality {
        match (gold, answer) {
            (
                Value::Equality { names: p, sides: left, difference: a },
                Value::Equality { names: q, sides: right, difference: b },
            ) => {
                let stated = self.stated_values(p, left, q, right);
                // `x = 5` is the solution of the equation that `2x = 10` may only repeat.
                let solution = !p.is_empty()
                    && !is_formula(p)
                    && matches!(left.last(), Some(Value::Number(number)) if !self.gold.class(number.id).has(Class::SYMBOL));
                match (a, b) {
                    _ if stated == Equality::Equal || solution && !self.options.unsolved_ok => stated,
                    (Some(a), Some(b)) => stated.or(self.proportional(*a, *b, None)),
                    _ => stated,
                }
            }
            // `a + b = 5` is an equation; as an answer to 5 it says what a + b is. `a : b = 2 : 3` is no equation to solve.
            (Value::Equality { names, sides, .. }, _) if is_formula(names) && !is_ratio(sides) => Equality::Different,
            (Value::Equality { names, sides, .. }, _) => match stated(names, sides, self.gold, self) {
                Some(value) => match (answer, is_member_of(names, answer, self.answer)) {
                    (_, Some(set)) => self.values(value, set),
                    (Value::Inequality { solved: Some((name, _)), .. }, _) if !names.contains(name) => {
                        Equality::Different
                    }
                    (Value::System { .. }, _) => self.systems(gold, answer),
                    _ => self.values(value, answer),
                },
                None => Equality::Different,
            },
            (_, Value::Equality { names, sides, .. }) => match stated(names, sides, self.answer, self) {
                Some(value) => match (gold, is_member_of(names, gold, self.gold)) {
                    (_, Some(set)) => self.values(set, value),
                    (Value::Inequality { solved: Some((name, _)), .. }, _) if !names.contains(name) => {
                        Equality::Different
                    }
                    (Value::System { .. }, _) => self.systems(gold, answer),
                    _ => self.values(gold, value),
                },
                None => Equality::Different,
            },
            _ => Equality::Different,
        }
    }

    /// Both as `name = value`.
    fn stated_values(&self, p: &[Name], left: &[Value], q: &[Name], right: &[Value]) -> Equality {
        let (Some(gold), Some(answer)) = (stated(p, left, self.gold, self), stated(q, right, self.answer, self)) else {
            return Equality::Different;
        };
        if is_formula(p) != is_formula(q) {
            return Equality::Different;
        }
        // A chain of values without a name states its last one, whatever the other side calls it.
        let same_names = is_y(p, q)
            || is_y(q, p)
            || p.is_empty()
            || q.is_empty()
            || (p.len() == q.len() && p.iter().all(|name| q.contains(name)));
        if same_names { self.values(gold, answer) } else { Equality::Different }
    }

    /// Inequalities: the same region of the same letter, or the same up to positive factors.
    pub(super) fn inequalities(&self, gold: &Value, answer: &Value) -> Equality {
        let (Value::Inequality { parts: left, solved: p }, Value::Inequality { parts: right, solved: q }) =
            (gold, answer)
        else {
            return Equality::Different;
        };
        if let (Some((name, gold)), Some((other, answer))) = (p, q) {
            if name == other {
                return self.regions(gold, answer);
            }
            // `b > a` says of b what `a < b` says of a.
            let letters = |exprs: &Exprs, parts: &[(Id, Comparison)]| match parts {
                [(id, _)] => {
                    let mut letters = Vec::new();
                    exprs.letters(*id, &mut letters);
                    letters.len() > 1
                }
                _ => false,
            };
            if !(letters(self.gold, left) && letters(self.answer, right)) {
                return Equality::Different;
            }
        }
        if left.len() != right.len() {
            return Equality::Undecided;
        }
        let mut open: Vec<(Id, Comparison)> = right.clone();
        for (id, operator) in left {
            let partner = open.iter().position(|(other, sign)| self.one_inequality(*id, *operator, *other, *sign));
            match partner {
                Some(at) => {
                    open.swap_remove(at);
                }
                None => return Equality::Different,
            }
        }
        Equality::Equal
    }

    fn one_inequality(&self, gold: Id, operator: Comparison, answer: Id, sign: Comparison) -> bool {
        use Comparison::{Equal, Greater, GreaterEqual, Less, LessEqual, NotEqual};
        let sign = match (operator, sign) {
            (Less, Greater) | (Greater, Less) | (LessEqual, GreaterEqual) | (GreaterEqual, LessEqual) => Some(-1),
            (NotEqual, NotEqual) | (Equal, Equal) => None,
            _ if operator == sign => Some(1),
            _ => return false,
        };
        self.proportional(gold, answer, sign) == Equality::Equal
    }

    /// Whether `gold = c · answer` for a constant c other than zero, of this sign if one is given. Neither is constant.
    fn proportional(&self, gold: Id, answer: Id, sign: Option<i32>) -> Equality {
        proportional(self.gold(gold), self.answer(answer), sign, self.fuel)
    }

    /// Congruences: the same class of the same modulus.
    pub(super) fn congruences(&self, gold: &Value, answer: &Value) -> Equality {
        let (
            Value::Congruence { left: p, right: a, modulus: m, .. },
            Value::Congruence { left: q, right: b, modulus: n, .. },
        ) = (gold, answer)
        else {
            return Equality::Different;
        };
        let lefts = match (p, q) {
            (Some(p), Some(q)) => self.same(*p, *q),
            _ => Equality::Equal,
        };
        let head = lefts.and(self.same(*m, *n));
        if head != Equality::Equal {
            return head;
        }
        let reduced = |exprs: &Exprs, ids: &[Id], modulus: Id| -> Option<Vec<IBig>> {
            let modulus = Self::integer(exprs, modulus).filter(|m| *m > IBig::ZERO)?;
            let mut residues = Vec::with_capacity(ids.len());
            for id in ids {
                let rest = Self::integer(exprs, *id)? % &modulus;
                residues.push(if rest < IBig::ZERO { rest + &modulus } else { rest });
            }
            residues.sort();
            residues.dedup();
            Some(residues)
        };
        match (reduced(self.gold, a, *m), reduced(self.answer, b, *n)) {
            (Some(a), Some(b)) => Equality::of(a == b),
            _ => self.in_order(a, b),
        }
    }
}

/// The set of `x ∈ S`, where x is the one name; `exprs` is the arena of `value`.
fn is_member_of<'v>(names: &[Name], value: &'v Value, exprs: &Exprs) -> Option<&'v Value> {
    let Value::Member { element, set, negated: false } = value else { return None };
    let [name] = names else { return None };
    is_named(exprs, element, &name.spelling).then_some(set)
}

/// Whether one names a function and the other one y, its value.
fn is_y(names: &[Name], others: &[Name]) -> bool {
    matches!((names, others), ([name], [other])
        if name.kind == NameKind::Letter && name.spelling == "y" && other.kind == NameKind::Function)
}

fn is_formula(names: &[Name]) -> bool {
    names.iter().any(|name| name.kind == NameKind::Formula)
}

/// Whether the statement is about a ratio: `AE : EB = 2 : 3`.
fn is_ratio(sides: &[Value]) -> bool {
    matches!(sides.first(), Some(Value::Ratio { .. }))
}

/// What an equality states: its last side, where the sides before are names, or equal to it for sure.
fn stated<'v>(names: &[Name], sides: &'v [Value], exprs: &Exprs, comparer: &Comparer<'_>) -> Option<&'v Value> {
    let last = sides.last()?;
    if !names.is_empty() && sides.len() == names.len() + 1 {
        return Some(last);
    }
    // A chain of calculations: what stands between must not be false, but in a gold, which may round.
    let constant = |side: &Value| match side {
        Value::Number(number) => !exprs.class(number.id).has(Class::SYMBOL),
        _ => false,
    };
    if std::ptr::eq(exprs, comparer.gold) && sides[names.len()..].iter().all(constant) {
        let near = |side: &Value| match (side, last) {
            (Value::Number(side), Value::Number(last)) => {
                is_near((exprs, side.id), (exprs, last.id), ROUNDED, comparer.fuel)
            }
            _ => true,
        };
        return sides[names.len()..sides.len() - 1].iter().all(near).then_some(last);
    }
    let within = Comparer { gold: exprs, answer: exprs, options: comparer.options, fuel: comparer.fuel };
    for side in &sides[names.len()..sides.len() - 1] {
        match (side, last) {
            (Value::Number(side), Value::Number(last)) => {
                // `x² − 1 = x² − 1` says nothing.
                if names.is_empty() && exprs.is_alike(side.id, last.id) && exprs.class(last.id).has(Class::SYMBOL) {
                    return None;
                }
                let letters = (exprs.class(side.id) | exprs.class(last.id)).has(Class::SYMBOL);
                let equal = compare((exprs, side.id), (exprs, last.id), comparer.fuel);
                // With letters a side may be the formula that the last one evaluates, if a name says for what.
                if equal != Equality::Equal
                    && !(letters && !names.is_empty() && !exprs.class(last.id).has(Class::SYMBOL))
                {
                    return None;
                }
            }
            _ if within.values(side, last) == Equality::Equal => {}
            _ => return None,
        }
    }
    Some(last)
}
