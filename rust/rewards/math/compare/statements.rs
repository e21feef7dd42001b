//! Equations, inequalities, systems and congruences.

use dashu_int::IBig;

use super::super::ast::{Comparison, NamedSet};
use super::super::ball::Context;
use super::super::expr::identity::{Equality, compare};
use super::super::expr::{Class, Evaluator, Exprs, Id, Point};
use super::super::fuel::Stop;
use super::super::value::{Name, Shape, Value};
use super::{Comparer, is_named};

/// Points at which two equations are compared.
const POINTS: u32 = 6;

impl Comparer<'_> {
    /// Values of which at least one is an equation.
    pub(super) fn equalities(&self, gold: &Value, answer: &Value) -> Equality {
        match (gold, answer) {
            (Value::Equality { names: p, sides: left }, Value::Equality { names: q, sides: right }) => {
                let stated = self.stated_values(p, left, q, right);
                if stated == Equality::Equal { stated } else { stated.or(self.equations(left, right)) }
            }
            (Value::Equality { names, sides }, _) => match stated(names, sides, self.gold, self) {
                Some(value) => match (answer, self.is_member_of(names, answer)) {
                    (_, Some(set)) => self.values(value, set),
                    (Value::Inequality { solved: Some((name, _)), .. }, _) if !names.contains(name) => {
                        Equality::Different
                    }
                    (Value::System { .. }, _) => self.systems(gold, answer),
                    _ => self.values(value, answer),
                },
                None => Equality::Different,
            },
            (_, Value::Equality { names, sides }) => match stated(names, sides, self.answer, self) {
                Some(value) => match (gold, self.is_member_of(names, gold)) {
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

    fn is_member_of<'v>(&self, names: &[Name], value: &'v Value) -> Option<&'v Value> {
        let Value::Member { element, set, negated: false } = value else { return None };
        let [name] = names else { return None };
        (is_named(self.gold, element, &name.spelling) || is_named(self.answer, element, &name.spelling)).then_some(set)
    }

    /// Both as `name = value`.
    fn stated_values(&self, p: &[Name], left: &[Value], q: &[Name], right: &[Value]) -> Equality {
        let (Some(gold), Some(answer)) = (stated(p, left, self.gold, self), stated(q, right, self.answer, self)) else {
            return Equality::Different;
        };
        // A chain of values without a name states its last one, whatever the other side calls it.
        let same_names = p.is_empty() || q.is_empty() || (p.len() == q.len() && p.iter().all(|name| q.contains(name)));
        if same_names { self.values(gold, answer) } else { Equality::Different }
    }

    /// Both as equations: the differences of their sides are proportional.
    fn equations(&self, left: &[Value], right: &[Value]) -> Equality {
        let ([Value::Number(a), Value::Number(b)], [Value::Number(c), Value::Number(d)]) = (left, right) else {
            return Equality::Different;
        };
        let (mut gold, mut answer) = (self.gold.clone(), self.answer.clone());
        match (gold.difference(a.id, b.id, self.fuel), answer.difference(c.id, d.id, self.fuel)) {
            (Ok(left), Ok(right)) => proportional((&gold, left), (&answer, right), false, self),
            _ => Equality::Undecided,
        }
    }

    /// Inequalities: the same region of the same letter, or the same up to positive factors.
    pub(super) fn inequalities(&self, gold: &Value, answer: &Value) -> Equality {
        let (Value::Inequality { parts: left, solved: p }, Value::Inequality { parts: right, solved: q }) =
            (gold, answer)
        else {
            return Equality::Different;
        };
        if let (Some((name, gold)), Some((other, answer))) = (p, q) {
            return if name == other { self.regions(gold, answer) } else { Equality::Different };
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
        let mut exprs = self.answer.clone();
        let flipped = match (operator, sign) {
            (Less, Greater) | (Greater, Less) | (LessEqual, GreaterEqual) | (GreaterEqual, LessEqual) => true,
            _ if operator == sign => false,
            _ => return false,
        };
        let answer = if flipped { exprs.negated(answer, self.fuel) } else { Ok(answer) };
        let Ok(answer) = answer else { return false };
        let signed = !matches!(operator, NotEqual | Equal);
        proportional((self.gold, gold), (&exprs, answer), signed, self) == Equality::Equal
    }

    /// Congruences: the same class of the same modulus.
    pub(super) fn congruences(&self, gold: &Value, answer: &Value) -> Equality {
        let (Value::Congruence { left: p, right: a, modulus: m }, Value::Congruence { left: q, right: b, modulus: n }) =
            (gold, answer)
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

    /// Values of which at least one is several statements.
    pub(super) fn systems(&self, gold: &Value, answer: &Value) -> Equality {
        let (left, right) = (without_domains(gold), without_domains(answer));
        match (&left[..], &right[..]) {
            ([one], _) if !matches!(one, Value::System { .. }) && left.len() < count(gold) => {
                return self.values(one, answer);
            }
            (_, [one]) if !matches!(one, Value::System { .. }) && right.len() < count(answer) => {
                return self.values(gold, one);
            }
            _ => {}
        }
        match (gold, answer) {
            (Value::System { any: p, .. }, Value::System { any: q, .. }) => {
                if p != q {
                    return Equality::Different;
                }
                let (left, right): (Vec<Value>, Vec<Value>) =
                    (left.into_iter().cloned().collect(), right.into_iter().cloned().collect());
                self.unordered(&left, &right, false)
            }
            // `x = 1, y = 2` as the point (1, 2): in the order of the names, x before y.
            (Value::System { any: false, .. }, Value::List { items, shape: Shape::Tuple }) => match point(&left) {
                Some(values) if values.len() == items.len() => {
                    values.iter().zip(items).fold(Equality::Equal, |all, (gold, item)| all.and(self.values(gold, item)))
                }
                _ => Equality::Different,
            },
            (Value::List { items, shape: Shape::Tuple }, Value::System { any: false, .. }) => match point(&right) {
                Some(values) if values.len() == items.len() => values
                    .iter()
                    .zip(items)
                    .fold(Equality::Equal, |all, (value, item)| all.and(self.values(item, value))),
                _ => Equality::Different,
            },
            // `(x, y) = (1, 2)`
            (Value::System { any: false, .. }, Value::Equality { sides, .. }) => match &sides[..] {
                [Value::List { items: names, .. }, Value::List { items, shape: Shape::Tuple }]
                    if names.len() == items.len() =>
                {
                    let value = Value::List { items: items.clone(), shape: Shape::Tuple };
                    self.values(gold, &value)
                }
                _ => Equality::Different,
            },
            (Value::Equality { sides, .. }, Value::System { any: false, .. }) => match &sides[..] {
                [Value::List { items: names, .. }, Value::List { items, shape: Shape::Tuple }]
                    if names.len() == items.len() =>
                {
                    let value = Value::List { items: items.clone(), shape: Shape::Tuple };
                    self.values(&value, answer)
                }
                _ => Equality::Different,
            },
            _ => Equality::Different,
        }
    }
}

/// What an equality states: its last side, where the sides before are names, or equal to it for sure.
fn stated<'v>(names: &[Name], sides: &'v [Value], exprs: &Exprs, comparer: &Comparer<'_>) -> Option<&'v Value> {
    let last = sides.last()?;
    if !names.is_empty() && sides.len() == names.len() + 1 {
        return Some(last);
    }
    // A chain of calculations: what stands between must not be false.
    let within = Comparer { gold: exprs, answer: exprs, options: comparer.options, fuel: comparer.fuel };
    for side in &sides[names.len()..sides.len() - 1] {
        match (side, last) {
            (Value::Number(side), Value::Number(last)) => {
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

fn count(value: &Value) -> usize {
    match value {
        Value::System { items, .. } => items.len(),
        _ => 1,
    }
}

/// The statements without `k ∈ ℤ`, which only says what a letter stands for.
fn without_domains(value: &Value) -> Vec<&Value> {
    let Value::System { items, any: false } = value else {
        return match value {
            Value::System { items, .. } => items.iter().collect(),
            _ => vec![value],
        };
    };
    let is_domain = |item: &&Value| {
        matches!(item, Value::Member { set, negated: false, .. }
            if matches!(**set, Value::Named(NamedSet::Integers | NamedSet::Naturals, _)))
    };
    let rest: Vec<&Value> = items.iter().filter(|item| !is_domain(item)).collect();
    if rest.is_empty() { items.iter().collect() } else { rest }
}

/// Values of `x = …, y = …` in the order of the names.
fn point<'v>(statements: &[&'v Value]) -> Option<Vec<&'v Value>> {
    let mut named = Vec::with_capacity(statements.len());
    for statement in statements {
        let Value::Equality { names, sides } = statement else { return None };
        let ([name], [_, value]) = (&names[..], &sides[..]) else { return None };
        named.push((&name.spelling, value));
    }
    named.sort_by_key(|(name, _)| *name);
    named.windows(2).all(|pair| pair[0].0 != pair[1].0).then(|| named.into_iter().map(|(_, value)| value).collect())
}

/// Whether `gold = c · answer` for a constant c other than zero; with `signed`, a positive one. Neither is constant.
fn proportional(gold: (&Exprs, Id), answer: (&Exprs, Id), signed: bool, comparer: &Comparer<'_>) -> Equality {
    let mut letters = (Vec::new(), Vec::new());
    gold.0.letters(gold.1, &mut letters.0);
    answer.0.letters(answer.1, &mut letters.1);
    letters.0.sort_unstable();
    letters.1.sort_unstable();
    if letters.0.is_empty() || letters.0 != letters.1 {
        return Equality::Different;
    }
    // The factor is the quotient at a first point; then gold = c · answer has to hold as an identity.
    let fuel = comparer.fuel;
    let mut quotient: Option<super::super::ball::Complex> = None;
    let mut agree = 0;
    let mut unsure = false;
    for range in 0..4 * POINTS {
        let point = Point { seed: 0x7072_6f70, range, natural: false };
        let context = Context { bits: 640, fuel };
        let values = (
            Evaluator::new(gold.0, point, context).value(gold.1),
            Evaluator::new(answer.0, point, context).value(answer.1),
        );
        let (left, right) = match values {
            (Ok(left), Ok(right)) => (left, right),
            (Err(Stop::Fuel), _) | (_, Err(Stop::Fuel)) => return Equality::Undecided,
            (Err(_), Err(_)) => continue,
            _ => {
                unsure = true;
                continue;
            }
        };
        let here = match left.over(&right, context) {
            Ok(here) => here,
            // Zero at a random point: identically zero, as `0 = 0`, or too close to tell.
            Err(Stop::Undefined | Stop::Imprecise) => return Equality::Different,
            Err(Stop::Fuel | Stop::Huge { .. }) => return Equality::Undecided,
        };
        if here.contains_zero() {
            return Equality::Different;
        }
        match &quotient {
            None => {
                if signed && (!here.is_real() || here.re.sign() != Some(1)) {
                    return Equality::Different;
                }
                quotient = Some(here);
            }
            Some(first) => match first.minus(&here, context) {
                Ok(gap) if !gap.contains_zero() => return Equality::Different,
                Ok(gap) if -gap.upper().top() > 400 => agree += 1,
                Ok(_) => unsure = true,
                Err(_) => return Equality::Undecided,
            },
        }
        if agree == POINTS {
            return Equality::Equal;
        }
    }
    let _ = unsure;
    Equality::Undecided
}
