//! Equations, inequalities, systems and congruences.

use dashu_int::IBig;

use super::super::ast::Comparison;
use super::super::ball::{Complex, Context};
use super::super::expr::identity::{Equality, Part, compare};
use super::super::expr::{Class, Evaluator, Exprs, Id, Point};
use super::super::fuel::{Fuel, Stop};
use super::super::modular::Residue;
use super::super::value::{Name, NameKind, Shape, Value};
use super::{Comparer, is_named};

/// Points at which two equations are compared, and what they are drawn with.
const POINTS: u32 = 6;
const SEED: u64 = 0x7072_6f70;

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
            // `a + b = 5` is an equation; as an answer to 5 it says what a + b is.
            (Value::Equality { names, .. }, _) if is_formula(names) => Equality::Different,
            (Value::Equality { names, sides, .. }, _) => match stated(names, sides, self.gold, self) {
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
            (_, Value::Equality { names, sides, .. }) => match stated(names, sides, self.answer, self) {
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

    /// Values of which at least one is several statements.
    ///
    /// What only says that a letter is an integer may be missing on one side.
    pub(super) fn systems(&self, gold: &Value, answer: &Value) -> Equality {
        let ((left, p), (right, q)) = (split_domains(gold), split_domains(answer));
        let domains = if p.is_empty() || q.is_empty() { Equality::Equal } else { self.unordered_refs(&p, &q) };
        if domains != Equality::Equal {
            return domains;
        }
        match (&left[..], &right[..]) {
            ([one], _) if !std::ptr::eq(*one, gold) => {
                return if let [other] = right[..] { self.values(one, other) } else { self.values(one, answer) };
            }
            (_, [one]) if !std::ptr::eq(*one, answer) => return self.values(gold, one),
            _ => {}
        }
        match (gold, answer) {
            (Value::System { any: p, .. }, Value::System { any: q, .. }) => {
                if p == q {
                    self.unordered_refs(&left, &right)
                } else {
                    Equality::Different
                }
            }
            // `x = 0, y = 0 or x = 1, y = 1` as points.
            (Value::System { any: true, .. }, Value::List { items, shape: Shape::Bare | Shape::Set }) => {
                self.unordered_refs(&left, &items.iter().collect::<Vec<_>>())
            }
            (Value::List { items, shape: Shape::Bare | Shape::Set }, Value::System { any: true, .. }) => {
                self.unordered_refs(&items.iter().collect::<Vec<_>>(), &right)
            }
            (Value::System { any: true, .. }, Value::Equality { sides, .. }) if is_point(sides) => {
                sides.last().map_or(Equality::Different, |value| self.values(gold, value))
            }
            (Value::Equality { sides, .. }, Value::System { any: true, .. }) if is_point(sides) => {
                sides.last().map_or(Equality::Different, |value| self.values(value, answer))
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

/// Whether one names a function and the other one y, its value.
fn is_y(names: &[Name], others: &[Name]) -> bool {
    matches!((names, others), ([name], [other])
        if name.kind == NameKind::Letter && name.spelling == "y" && other.kind == NameKind::Function)
}

fn is_formula(names: &[Name]) -> bool {
    names.iter().any(|name| name.kind == NameKind::Formula)
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
        return Some(last);
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

/// Whether the left side is a tuple of letters.
fn is_point(sides: &[Value]) -> bool {
    matches!(sides, [Value::List { shape: Shape::Tuple, .. }, _])
}

/// The statements, and those that only say that a letter is an integer.
fn split_domains(value: &Value) -> (Vec<&Value>, Vec<&Value>) {
    match value {
        Value::System { items, any: false } => {
            let (domains, rest): (Vec<&Value>, Vec<&Value>) = items.iter().partition(|item| item.is_domain());
            if rest.is_empty() { (domains, rest) } else { (rest, domains) }
        }
        Value::System { items, .. } => (items.iter().collect(), Vec::new()),
        _ => (vec![value], Vec::new()),
    }
}

/// Values of `x = …, y = …` in the order of the names.
fn point<'v>(statements: &[&'v Value]) -> Option<Vec<&'v Value>> {
    let mut named = Vec::with_capacity(statements.len());
    for statement in statements {
        let Value::Equality { names, sides, .. } = statement else { return None };
        let ([name], [_, value]) = (&names[..], &sides[..]) else { return None };
        named.push((&name.spelling, value));
    }
    named.sort_by_key(|(name, _)| *name);
    named.windows(2).all(|pair| pair[0].0 != pair[1].0).then(|| named.into_iter().map(|(_, value)| value).collect())
}

fn proportional(gold: Part<'_>, answer: Part<'_>, sign: Option<i32>, fuel: &Fuel) -> Equality {
    let mut letters = (Vec::new(), Vec::new());
    gold.0.letters(gold.1, &mut letters.0);
    answer.0.letters(answer.1, &mut letters.1);
    letters.0.sort_unstable();
    letters.1.sort_unstable();
    if letters.0.is_empty() || letters.0 != letters.1 {
        return Equality::Different;
    }
    if !(gold.0.class(gold.1) | answer.0.class(answer.1)).has(Class::ATOM) {
        return match proportional_functions(gold, answer, fuel) {
            Ok(false) => Equality::Different,
            Ok(true) if sign.is_none() => Equality::Equal,
            Ok(true) => quotient_has_sign(gold, answer, sign, fuel),
            Err(_) => Equality::Undecided,
        };
    }
    // The factor is the quotient at a first point; then gold = c · answer has to hold at the others.
    let sizes = i64::from(gold.0.size(gold.1)) + i64::from(answer.0.size(answer.1));
    let mut quotient: Option<Complex> = None;
    let mut agree = 0;
    for range in 0..4 * POINTS {
        let point = Point { seed: SEED, range, natural: false };
        let context = Context { bits: 640, fuel };
        let mut left = Evaluator::new(gold.0, point, context);
        let mut right = Evaluator::new(answer.0, point, context);
        let here = match (left.value(gold.1), right.value(answer.1)) {
            (Ok(left), Ok(right)) => left.over(&right, context),
            (Err(Stop::Fuel), _) | (_, Err(Stop::Fuel)) if fuel.left() == 0 => return Equality::Undecided,
            _ => continue,
        };
        let here = match here {
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
                if sign.is_some() && (!here.is_real() || here.re.sign() != sign) {
                    return Equality::Different;
                }
                quotient = Some(here);
            }
            Some(first) => match first.minus(&here, context) {
                Ok(gap) if !gap.contains_zero() => return Equality::Different,
                Ok(gap) if -gap.upper().top() > 64 + 2 * (sizes + left.reach.max(right.reach)) => agree += 1,
                Ok(_) => {}
                Err(_) => return Equality::Undecided,
            },
        }
        if agree == POINTS {
            return Equality::Equal;
        }
    }
    Equality::Undecided
}

/// Two rational functions, not identically zero, are proportional if f(P)·g(Q) = f(Q)·g(P) for random P and Q.
fn proportional_functions(gold: Part<'_>, answer: Part<'_>, fuel: &Fuel) -> Result<bool, Stop> {
    let (f, g) = (gold.0.residue(gold.1), answer.0.residue(answer.1));
    if f == Residue::ZERO || g == Residue::ZERO {
        return Ok(false);
    }
    let (f_other, g_other) = (gold.0.residue_at(gold.1, SEED, fuel)?, answer.0.residue_at(answer.1, SEED, fuel)?);
    Ok(f * g_other == f_other * g)
}

/// Whether gold / answer has this sign, at the first random point that tells.
fn quotient_has_sign(gold: Part<'_>, answer: Part<'_>, sign: Option<i32>, fuel: &Fuel) -> Equality {
    for range in 0..POINTS {
        let point = Point { seed: SEED, range, natural: false };
        let context = Context { bits: 256, fuel };
        let values = (
            Evaluator::new(gold.0, point, context).value(gold.1),
            Evaluator::new(answer.0, point, context).value(answer.1),
        );
        if let (Ok(left), Ok(right)) = values
            && let Ok(quotient) = left.over(&right, context)
            && let Some(found) = quotient.re.sign()
        {
            return Equality::of(Some(found) == sign);
        }
    }
    Equality::Undecided
}
