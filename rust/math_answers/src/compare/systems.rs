//! Several statements together: systems of equations, solutions one by one, and the points they name.

use super::super::value::{Name, Shape, Value};
use super::Comparer;
use crate::equality::Equality;

impl Comparer<'_> {
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
            // `x_1 = 2, x_2 = 3` as the values of x.
            (Value::System { any: false, .. }, Value::List { items, shape: Shape::Bare | Shape::Set }) => {
                match indexed(&left) {
                    Some((_, values)) => self.unordered_refs(&values, &items.iter().collect::<Vec<_>>()),
                    // `x = 2, p = 3` as the values in the gold's order.
                    None if matches!(answer, Value::List { shape: Shape::Bare, .. }) => {
                        self.values_in_order(point(&left, false), Some(items.iter().collect()))
                    }
                    None => Equality::Different,
                }
            }
            (Value::List { items, shape: Shape::Bare | Shape::Set }, Value::System { any: false, .. }) => {
                match indexed(&right) {
                    Some((_, values)) => self.unordered_refs(&items.iter().collect::<Vec<_>>(), &values),
                    None => Equality::Different,
                }
            }
            (Value::System { any: false, .. }, Value::Equality { names, sides, .. })
                if indexed(&left).is_some_and(|(letter, _)| is_letter(names, &letter)) =>
            {
                match (indexed(&left), sides.last()) {
                    (Some((_, values)), Some(Value::List { items, shape: Shape::Bare | Shape::Set })) => {
                        self.unordered_refs(&values, &items.iter().collect::<Vec<_>>())
                    }
                    _ => Equality::Different,
                }
            }
            (Value::Equality { names, sides, .. }, Value::System { any: false, .. })
                if indexed(&right).is_some_and(|(letter, _)| is_letter(names, &letter)) =>
            {
                match (indexed(&right), sides.last()) {
                    (Some((_, values)), Some(Value::List { items, shape: Shape::Bare | Shape::Set })) => {
                        self.unordered_refs(&items.iter().collect::<Vec<_>>(), &values)
                    }
                    _ => Equality::Different,
                }
            }
            // `x = 1, y = 2` as the point (1, 2): in the order of the names, x before y.
            (Value::System { any: false, .. }, Value::List { items, shape: Shape::Tuple }) => {
                self.values_in_order(point(&left, true), Some(items.iter().collect()))
            }
            (Value::List { items, shape: Shape::Tuple }, Value::System { any: false, .. }) => {
                self.values_in_order(Some(items.iter().collect()), point(&right, true))
            }
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

    /// Whether values are equal one by one; those that are absent equal nothing.
    fn values_in_order(&self, golds: Option<Vec<&Value>>, answers: Option<Vec<&Value>>) -> Equality {
        match (golds, answers) {
            (Some(golds), Some(answers)) if golds.len() == answers.len() => golds
                .iter()
                .zip(answers)
                .fold(Equality::Equal, |all, (gold, answer)| all.and(self.values(gold, answer))),
            _ => Equality::Different,
        }
    }
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

/// Values of `x = …, y = …`, whose names differ: in the order of the names, or as written.
///
/// As written there are none for `y = …, x = …`: letters that follow one another are listed in the alphabet's order.
fn point<'v>(statements: &[&'v Value], by_name: bool) -> Option<Vec<&'v Value>> {
    let mut named = Vec::with_capacity(statements.len());
    for statement in statements {
        let Value::Equality { names, sides, .. } = statement else { return None };
        let ([name], [_, value]) = (&names[..], &sides[..]) else { return None };
        named.push((&name.spelling, value));
    }
    let written: Vec<&Value> = named.iter().map(|(_, value)| *value).collect();
    named.sort_by_key(|(name, _)| *name);
    if named.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return None;
    }
    let follow = |one: &str, next: &str| matches!((one.as_bytes(), next.as_bytes()), ([a], [b]) if a + 1 == *b);
    let neighbours = named.windows(2).all(|pair| follow(pair[0].0, pair[1].0));
    let by_names: Vec<&Value> = named.into_iter().map(|(_, value)| value).collect();
    if by_name {
        return Some(by_names);
    }
    let is_sorted = written.iter().zip(&by_names).all(|(one, other)| std::ptr::eq(*one, *other));
    (is_sorted || !neighbours).then_some(written)
}

/// The letter of `x_1 = …, x_2 = …`, whose indices differ, and its values.
fn indexed<'v>(statements: &[&'v Value]) -> Option<(String, Vec<&'v Value>)> {
    let mut letter: Option<&str> = None;
    let mut indices = Vec::with_capacity(statements.len());
    let mut values = Vec::with_capacity(statements.len());
    for statement in statements {
        let Value::Equality { names, sides, .. } = statement else { return None };
        let ([name], [_, value]) = (&names[..], &sides[..]) else { return None };
        let (start, index) = name.spelling.split_once('_')?;
        let number = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
        if !number || letter.is_some_and(|known| known != start) || indices.contains(&index) {
            return None;
        }
        letter = Some(start);
        indices.push(index);
        values.push(value);
    }
    (values.len() > 1).then_some((letter?.to_owned(), values))
}

fn is_letter(names: &[Name], letter: &str) -> bool {
    matches!(names, [name] if name.spelling == letter)
}
