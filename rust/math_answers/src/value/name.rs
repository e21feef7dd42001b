//! What a statement is about: letters, functions of their arguments, formulas of letters.

use dashu_int::IBig;
use dashu_ratio::RBig;

use super::super::expr::{Class, Id, Kind, Op};
use super::super::lexer::command;
use super::read::Reader;
use super::{Name, NameKind, Shape, Value};

/// What [`Reader::formula`] found in the left side of a statement.
#[derive(Debug, Default)]
struct Letters {
    letters: Vec<u64>,
    /// Whether there is an absolute value or a part of a complex number.
    size: bool,
    /// Whether there is a sine or a cosine.
    functions: bool,
    /// Whether there is a power.
    powers: bool,
}

impl Reader<'_> {
    /// What `AB = 5`, `a + b = 5`, `|z| = 5`, `\sin A = 1/2` or `dy/dx = 2x` is about: a formula of letters without
    /// numbers, worth a number; or a quotient of differentials. An equation that a problem asks to solve is none: letters
    /// other than the capitals of points occur once, and functions are of an angle.
    pub(super) fn formula(&self, left: Id, right: Id) -> Option<Name> {
        let mut found = Letters::default();
        let plain = self.is_formula(left, &mut found);
        let mut letters = found.letters;
        letters.sort_unstable();
        let repeated = letters.windows(2).any(|pair| pair[0] == pair[1]);
        let spelling = |hash: u64| {
            let known = self.exprs.names().iter().find(|(known, _)| *known == hash);
            known.map_or("", |(_, name)| &**name)
        };
        let points = letters.iter().all(|letter| matches!(spelling(*letter).as_bytes(), [b'A'..=b'Z']));
        let angles = || {
            letters.iter().all(|letter| {
                let name = spelling(*letter);
                name.starts_with("angle ") || matches!(name.as_bytes(), [b'A'..=b'Z']) || command::greek(name).is_some()
            })
        };
        let differential = letters.iter().filter(|letter| spelling(**letter) == "d").count() == 2;
        let constant = !self.exprs.class(right).has(Class::SYMBOL);
        // A tangent repeats its angle.
        let simple = if found.functions { angles() } else { points || !repeated && !found.powers };
        let several = letters.len() > 1 || found.size || found.functions && !letters.is_empty();
        // The length of a segment is a name of its own: nobody solves `|AB| = 1`.
        let segment = points && !repeated && letters.len() == 2 && self.is_size_of_product(left);
        let kind = if segment { NameKind::Letter } else { NameKind::Formula };
        (plain && several && (constant && simple || differential && letters.len() > 1))
            .then(|| Name { spelling: format!("{:x}", self.exprs.residue(left).key()), kind })
    }

    fn is_size_of_product(&self, id: Id) -> bool {
        let Kind::Function(Op::Abs, inner) = self.exprs.kind(id) else { return false };
        let [Kind::Product(factors)] = [self.exprs.kind(inner[0])] else { return false };
        factors.iter().all(|factor| matches!(self.exprs.kind(*factor), Kind::Symbol(_)))
    }

    /// Whether a side of an inequality is a number, or a letter or its absolute value up to a factor.
    pub(super) fn is_solved_side(&self, side: &Value) -> bool {
        let Value::Number(number) = side else { return true };
        if !self.exprs.class(number.id).has(Class::SYMBOL) {
            return true;
        }
        let is_letter = |id: Id| match self.exprs.kind(id) {
            Kind::Symbol(_) => true,
            Kind::Function(Op::Abs, inner) => matches!(self.exprs.kind(inner[0]), Kind::Symbol(_)),
            _ => false,
        };
        match self.exprs.kind(number.id) {
            Kind::Product(factors) => factors.iter().all(|id| is_letter(*id) || self.exprs.as_rational(*id).is_some()),
            _ => is_letter(number.id),
        }
    }

    /// Sums, products and quotients of letters, their absolute values and functions of angles; collects the letters.
    fn is_formula(&self, id: Id, found: &mut Letters) -> bool {
        match self.exprs.kind(id) {
            Kind::Symbol(hash) => {
                found.letters.push(*hash);
                found.letters.len() < 64
            }
            Kind::Rational(value) => *value == RBig::NEG_ONE,
            Kind::Sum(items) | Kind::Product(items) => items.iter().all(|item| self.is_formula(*item, found)),
            Kind::Function(op, items) => {
                match op {
                    Op::Abs | Op::Re | Op::Im | Op::Arg | Op::Conj | Op::Gcd | Op::Lcm | Op::Max | Op::Min => {
                        found.size = true;
                    }
                    Op::Sin | Op::Cos => found.functions = true,
                    _ => return false,
                }
                items.iter().all(|item| self.is_formula(*item, found))
            }
            Kind::Power(base, exponent) => {
                let Some(exponent) = self.exprs.as_integer(*exponent) else { return false };
                found.powers |= *exponent != IBig::NEG_ONE;
                *exponent <= IBig::from(4) && *exponent >= IBig::NEG_ONE && self.is_formula(*base, found)
            }
            _ => false,
        }
    }

    /// The letter, or unknown function, that a value is.
    pub(super) fn name_of(&self, value: &Value) -> Option<Name> {
        match value {
            Value::Number(number) => match self.exprs.kind(number.id) {
                Kind::Symbol(hash) => match self.exprs.names().iter().find(|(known, _)| known == hash) {
                    Some((_, name)) => Some(Name { spelling: name.to_string(), kind: NameKind::Letter }),
                    None => Some(Name { spelling: format!("{hash:x}"), kind: NameKind::Function }),
                },
                _ => None,
            },
            Value::Text(text) => Some(Name { spelling: format!("“{text}”"), kind: NameKind::Letter }),
            Value::List { items, shape: Shape::Tuple } => {
                let names: Option<Vec<Name>> = items.iter().map(|item| self.name_of(item)).collect();
                let spelling = names?.iter().map(|name| name.spelling.clone()).collect::<Vec<_>>().join(",");
                Some(Name { spelling: format!("({spelling})"), kind: NameKind::Letter })
            }
            _ => None,
        }
    }

    pub(super) fn mentions(&self, id: Id, name: &Name) -> bool {
        self.exprs
            .names()
            .iter()
            .filter(|(_, known)| **known == *name.spelling)
            .any(|(hash, _)| self.exprs.contains(id, *hash))
    }
}
