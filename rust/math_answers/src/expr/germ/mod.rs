//! Identities of logarithms, exponentials and circular functions: expressions modulo p² at a random point.
//!
//! A letter is a random element of the rings of [`super::super::lifted`]. Logarithms are those of the rings, arctan u is
//! (ln(1 + iu) − ln(1 − iu))/2i, arcsin u is −i ln(iu + √(1 − u²)), sin u is (e^iu − e^−iu)/2i, and e^u is a product of
//! powers of random elements, one for each monomial of u. So every law of these functions holds that holds up to the
//! choice of a branch: of a root, of |u| = ±u, of multiples of π. Which branch, the balls of [`super::identity`] tell: two
//! branches differ by far more than their radius.

mod root;
mod sum;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use dashu_int::ops::{BitTest, UnsignedAbs};
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::super::fuel::{Fuel, Stop};
use super::super::lifted::Lifted;
use super::super::modular::{PRIMES, hash_integer, mix};
use super::{Class, Exprs, Id, Kind, Op, Part};

/// Random points, as the sign of a root is drawn at each.
const TRIES: u64 = 4;
/// The elements behind e^u are D-th roots, so that u and u/2 share one.
const FINEST: i64 = 120;
/// Summands of a product that is multiplied out.
const MOST_TERMS: usize = 64;
/// Numerator and denominator of the multiple of π by which two expressions may differ before their branches are known.
const MOST_TURNS: u64 = 4096;
const PI: u64 = 0x7069;
const EXP: u64 = 0x0065_7870;

/// Bits of the literals in both expressions, if they are the same up to the choice of branches and constant multiples of π.
pub(super) fn same_but_for_branches(gold: Part<'_>, answer: Part<'_>, fuel: &Fuel) -> Option<f64> {
    let mut found: [Vec<(i64, u64, bool)>; 2] = Default::default();
    for seed in 0..TRIES {
        let (mut left, mut right) = (Germ::new(gold.0, seed, fuel), Germ::new(answer.0, seed, fuel));
        let gap = left.value(gold.1).ok()?.lifted - right.value(answer.1).ok()?.lifted;
        let turns = (gap * left.pi().inverse()?).fractions(MOST_TURNS);
        for (found, turn) in found.iter_mut().zip(turns) {
            found.extend(turn);
        }
        if found[0].iter().any(|turn| found[1].contains(turn)) {
            return Some((left.literals + right.literals) as f64);
        }
        if !left.has_roots && !right.has_roots {
            return None;
        }
    }
    None
}

/// Bits of the literals in both expressions, if each is a constant multiple of the other up to the choice of branches.
#[must_use]
pub fn proportional_but_for_branches(gold: Part<'_>, answer: Part<'_>, fuel: &Fuel) -> Option<f64> {
    let at = |part: Part<'_>, seed| {
        let mut germ = Germ::new(part.0, seed, fuel);
        let value = germ.value(part.1).ok()?.lifted;
        value.is_unit().then_some((value, germ.literals))
    };
    let ((f, here), (g, there)) = (at(gold, 0)?, at(answer, 0)?);
    let ((other_f, _), (other_g, _)) = (at(gold, 1)?, at(answer, 1)?);
    let same = (f * other_g - other_f * g).is_zero_modulo_p();
    same.then_some((here + there) as f64)
}

/// A value modulo p², or modulo p alone.
#[derive(Debug, Clone, Copy)]
struct Value {
    lifted: Lifted,
    /// Whether the digit before p counts: a logarithm has none.
    exact: bool,
}

impl Value {
    fn exact(lifted: Lifted) -> Self {
        Self { lifted, exact: true }
    }

    fn times(self, other: Self) -> Self {
        Self { lifted: self.lifted * other.lifted, exact: self.exact && other.exact }
    }
}

/// A rational times what is modulo p.
type Term = (RBig, Lifted);

struct Germ<'e> {
    exprs: &'e Exprs,
    seed: u64,
    fuel: &'e Fuel,
    known: HashMap<Id, Value>,
    literals: u64,
    has_roots: bool,
}

impl<'e> Germ<'e> {
    fn new(exprs: &'e Exprs, seed: u64, fuel: &'e Fuel) -> Self {
        Self { exprs, seed, fuel, known: HashMap::new(), literals: 0, has_roots: false }
    }

    fn draw(&self, key: u64) -> Lifted {
        Lifted::draw(mix(key, self.seed))
    }

    fn pi(&self) -> Lifted {
        self.draw(PI)
    }

    fn value(&mut self, id: Id) -> Result<Value, Stop> {
        if let Some(value) = self.known.get(&id) {
            return Ok(*value);
        }
        self.fuel.spend(20)?;
        let value = self.compute(id)?;
        self.known.insert(id, value);
        Ok(value)
    }

    fn compute(&mut self, id: Id) -> Result<Value, Stop> {
        let exprs = self.exprs;
        match exprs.kind(id) {
            Kind::Rational(value) => {
                let (top, bottom) = (value.numerator().bit_len(), value.denominator().bit_len());
                self.literals += (top + bottom).saturating_sub(2) as u64;
                self.rational(value).map(Value::exact)
            }
            Kind::Pi => Ok(Value::exact(self.pi())),
            Kind::E => self.exponential(&[(RBig::ONE, Lifted::ONE)]).map(Value::exact),
            Kind::I => Ok(Value::exact(Lifted::I)),
            Kind::Symbol(letter) => Ok(Value::exact(self.draw(*letter))),
            Kind::Sum(items) => {
                let mut sum = Value::exact(Lifted::ZERO);
                for item in items {
                    let item = self.value(*item)?;
                    sum = Value { lifted: sum.lifted + item.lifted, exact: sum.exact && item.exact };
                }
                Ok(sum)
            }
            Kind::Product(items) => {
                let mut product = Value::exact(Lifted::ONE);
                for item in items {
                    product = product.times(self.value(*item)?);
                }
                Ok(product)
            }
            Kind::Power(base, exponent) => self.power(*base, *exponent),
            Kind::Function(op, arguments) => self.function(*op, arguments),
            Kind::Range(_) => Ok(Value::exact(self.draw(exprs.residue(id).key()))),
        }
    }

    fn rational(&self, value: &RBig) -> Result<Lifted, Stop> {
        let remainders = |n: &UBig| {
            PRIMES.map(|p| {
                let square = UBig::from(p) * UBig::from(p);
                u128::try_from(&(n % &square)).unwrap_or(0)
            })
        };
        self.fuel.spend(20 + (value.numerator().bit_len() + value.denominator().bit_len()) as u64 / 16)?;
        let top = Lifted::of(remainders(&value.numerator().clone().unsigned_abs()));
        let top = if *value.numerator() < IBig::ZERO { -top } else { top };
        if value.denominator().is_one() {
            return Ok(top);
        }
        self.fuel.spend(100)?;
        Ok(top * Lifted::of(remainders(value.denominator())).inverse().ok_or(Stop::Fuel)?)
    }

    /// An integer power.
    fn raised(&self, base: Value, n: i64) -> Result<Value, Stop> {
        self.fuel.spend(150)?;
        Ok(Value { lifted: base.lifted.power(n).ok_or(Stop::Fuel)?, exact: base.exact })
    }

    fn power(&mut self, base: Id, exponent: Id) -> Result<Value, Stop> {
        let exprs = self.exprs;
        let Some(r) = exprs.as_rational(exponent).cloned() else {
            if matches!(exprs.kind(base), Kind::E) {
                return self.exp(exponent, false);
            }
            // b^y = e^(y ln b), where b is no root of unity.
            let mut terms = Vec::new();
            self.log_terms(base, &RBig::ONE, &mut terms)?;
            let exponents = self.expand(exponent)?;
            let terms = self.products(&exponents, &terms)?;
            if terms.is_empty() || exprs.as_rational(base).is_some_and(|b| *b < RBig::ZERO) {
                let (base, exponent) = (self.value(base)?, self.value(exponent)?);
                return Ok(Value::exact(self.draw(mix(mix(base.lifted.key(), exponent.lifted.key()), EXP))));
            }
            return self.exponential(&terms).map(Value::exact);
        };
        // The literal of the exponent counts as any other.
        self.value(exponent)?;
        let top = i64::try_from(r.numerator()).ok().filter(|n| n.unsigned_abs() < 1 << 40).ok_or(Stop::Fuel)?;
        if r.denominator().is_one() {
            let base = self.value(base)?;
            return self.raised(base, top);
        }
        if matches!(exprs.kind(base), Kind::E) {
            return self.exponential(&[(r, Lifted::ONE)]).map(Value::exact);
        }
        if *r.denominator() == 2u8.into() {
            let root = self.root(base)?;
            return self.raised(root, top);
        }
        let base = self.value(base)?;
        let root = self.draw(mix(mix(base.lifted.key(), hash_integer(r.denominator())), 0x726f_6f74));
        self.raised(Value::exact(root), top)
    }

    fn function(&mut self, op: Op, arguments: &[Id]) -> Result<Value, Stop> {
        let &[argument, ..] = arguments else { return Err(Stop::Fuel) };
        match op {
            Op::Sin | Op::Cos => {
                let turn = self.exp(argument, true)?;
                let back = self.raised(turn, -1)?;
                let half = self.rational(&RBig::from_parts(IBig::ONE, UBig::from(2u8)))?;
                let lifted = if op == Op::Cos {
                    (turn.lifted + back.lifted) * half
                } else {
                    (back.lifted - turn.lifted) * half * Lifted::I
                };
                Ok(Value { lifted, exact: turn.exact })
            }
            Op::Ln => {
                let mut terms = Vec::new();
                self.log_terms(argument, &RBig::ONE, &mut terms)?;
                let mut sum = Lifted::ZERO;
                for (q, log) in terms {
                    sum = sum + self.rational(&q)? * log;
                }
                Ok(Value { lifted: sum, exact: false })
            }
            Op::Arctan | Op::Arcsin | Op::Arccos => {
                let x = self.value(argument)?;
                let angle = if op == Op::Arctan {
                    let turned = x.lifted * Lifted::I;
                    let up = self.log_of(Value { lifted: Lifted::ONE + turned, exact: x.exact })?;
                    let down = self.log_of(Value { lifted: Lifted::ONE - turned, exact: x.exact })?;
                    let half = self.rational(&RBig::from_parts(IBig::NEG_ONE, UBig::from(2u8)))?;
                    (up - down) * half * Lifted::I
                } else {
                    let turn = self.turn_of_sine(x)?;
                    -(self.log_of(turn)? * Lifted::I)
                };
                if op != Op::Arccos {
                    return Ok(Value { lifted: angle, exact: false });
                }
                let quarter = self.rational(&RBig::from_parts(IBig::ONE, UBig::from(2u8)))? * self.pi();
                Ok(Value { lifted: quarter - angle, exact: false })
            }
            Op::Abs if !self.exprs.class(argument).has(Class::IMAGINARY) => {
                self.has_roots = true;
                self.value(argument)
            }
            _ => {
                let mut key = 0u64;
                for argument in arguments {
                    let argument = self.value(*argument)?.lifted.key();
                    key = match op {
                        Op::Max | Op::Min | Op::Gcd | Op::Lcm => key.wrapping_add(argument),
                        _ => mix(key, argument),
                    };
                }
                Ok(Value::exact(self.draw(mix(key, op as u64 + 77))))
            }
        }
    }

    /// e^(i arcsin x) = ix + √(1 − x²).
    fn turn_of_sine(&mut self, x: Value) -> Result<Value, Stop> {
        let under = Value { lifted: Lifted::ONE - x.lifted * x.lifted, exact: x.exact };
        let root = self.any_root(under)?;
        Ok(Value { lifted: x.lifted * Lifted::I + root.lifted, exact: x.exact })
    }
}
