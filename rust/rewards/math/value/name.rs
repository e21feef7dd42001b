//! What a statement is about: letters, functions of their arguments, formulas of letters.

use dashu_int::IBig;
use dashu_ratio::RBig;

use super::super::expr::{Class, Id, Kind, Op};
use super::read::Reader;
use super::{Name, NameKind, Shape, Value};

impl Reader<'_> {
    /// What `AB = 5`, `a + b = 5` or `dy/dx = 2x` is about: letters alone, at least two of them, worth a number; or a
    /// quotient of differentials.
    pub(super) fn formula(&self, left: Id, right: Id) -> Option<Name> {
        let mut letters = Vec::new();
        let plain = self.is_formula(left, &mut letters);
        letters.sort_unstable();
        let repeated = letters.windows(2).any(|pair| pair[0] == pair[1]);
        let d = self.exprs.names().iter().find(|(_, name)| **name == *"d").map(|(hash, _)| *hash);
        let differential = d.is_some_and(|d| letters.iter().filter(|letter| **letter == d).count() == 2);
        let constant = !self.exprs.class(right).has(Class::SYMBOL);
        (plain && letters.len() > 1 && (constant && !repeated || differential))
            .then(|| Name { spelling: format!("{:x}", self.exprs.residue(left).key()), kind: NameKind::Formula })
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

    /// Sums, products and quotients of letters; collects them.
    fn is_formula(&self, id: Id, letters: &mut Vec<u64>) -> bool {
        match self.exprs.kind(id) {
            Kind::Symbol(hash) => {
                letters.push(*hash);
                letters.len() < 64
            }
            Kind::Rational(value) => *value == RBig::NEG_ONE,
            Kind::Sum(items) | Kind::Product(items) | Kind::Function(Op::Abs, items) => {
                items.iter().all(|item| self.is_formula(*item, letters))
            }
            Kind::Power(base, exponent) => {
                self.exprs.as_integer(*exponent) == Some(&IBig::NEG_ONE) && self.is_formula(*base, letters)
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
