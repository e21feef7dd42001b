//! Logarithms as sums, and exponentials of sums as products.

use dashu_int::ops::BitTest;
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::super::super::fuel::{Fuel, Stop};
use super::super::super::lifted::Lifted;
use super::super::super::modular::{hash_integer, mix};
use super::super::{Class, Id, Kind, Op};
use super::{EXP, FINEST, Germ, MOST_TERMS, Term, Value};

impl Germ<'_> {
    /// The logarithm of a value; that of a logarithm is an element of its own.
    pub(super) fn log_of(&self, value: Value) -> Result<Lifted, Stop> {
        self.fuel.spend(500)?;
        if !value.exact {
            return Ok(self.draw(mix(value.lifted.key(), 0x6c6e)));
        }
        value.lifted.logarithm().ok_or(Stop::Fuel)
    }

    /// `scale · ln id` as a sum.
    pub(super) fn log_terms(&mut self, id: Id, scale: &RBig, terms: &mut Vec<Term>) -> Result<(), Stop> {
        let exprs = self.exprs;
        match exprs.kind(id) {
            Kind::E => terms.push((scale.clone(), Lifted::ONE)),
            Kind::Product(items) => {
                for item in items {
                    self.log_terms(*item, scale, terms)?;
                }
            }
            Kind::Power(base, exponent) => {
                let mut inner = Vec::new();
                self.log_terms(*base, scale, &mut inner)?;
                let exponents = self.expand(*exponent)?;
                terms.extend(self.products(&exponents, &inner)?);
            }
            Kind::Function(Op::Abs, arguments) if !exprs.class(arguments[0]).has(Class::IMAGINARY) => {
                self.log_terms(arguments[0], scale, terms)?;
            }
            _ => {
                let value = self.value(id)?;
                let log = self.log_of(value)?;
                if log.is_unit() {
                    terms.push((scale.clone(), log));
                } else if log != Lifted::ZERO {
                    return Err(Stop::Fuel);
                }
            }
        }
        if terms.len() > MOST_TERMS { Err(Stop::Fuel) } else { Ok(()) }
    }

    pub(super) fn products(&self, left: &[Term], right: &[Term]) -> Result<Vec<Term>, Stop> {
        let count = left.len() * right.len();
        if count > MOST_TERMS {
            return Err(Stop::Fuel);
        }
        let mut terms = Vec::with_capacity(count);
        for (q, v) in left {
            for (r, w) in right {
                self.fuel.spend(
                    20 + Fuel::product(
                        q.numerator().bit_len() + q.denominator().bit_len(),
                        64 + r.numerator().bit_len() + r.denominator().bit_len(),
                    ),
                )?;
                terms.push((q * r, *v * *w));
            }
        }
        Ok(terms)
    }

    /// An expression as a sum of rationals times monomials.
    pub(super) fn expand(&mut self, id: Id) -> Result<Vec<Term>, Stop> {
        let exprs = self.exprs;
        self.fuel.spend(10)?;
        match exprs.kind(id) {
            Kind::Rational(value) => {
                self.value(id)?;
                Ok(vec![(value.clone(), Lifted::ONE)])
            }
            Kind::Sum(items) => {
                let mut terms = Vec::new();
                for item in items {
                    terms.extend(self.expand(*item)?);
                    if terms.len() > MOST_TERMS {
                        return Err(Stop::Fuel);
                    }
                }
                Ok(terms)
            }
            Kind::Product(items) => {
                let mut terms = vec![(RBig::ONE, Lifted::ONE)];
                for item in items {
                    let item = self.expand(*item)?;
                    terms = self.products(&terms, &item)?;
                }
                Ok(terms)
            }
            _ => Ok(vec![(RBig::ONE, self.value(id)?.lifted)]),
        }
    }

    /// A summand as a rational times factors.
    pub(super) fn coefficient(&self, id: Id) -> (RBig, Vec<Id>) {
        let exprs = self.exprs;
        match exprs.kind(id) {
            Kind::Rational(value) => (value.clone(), Vec::new()),
            Kind::Product(items) => {
                let rational = items.iter().find_map(|item| exprs.as_rational(*item)).cloned().unwrap_or(RBig::ONE);
                (rational, items.iter().copied().filter(|item| exprs.as_rational(*item).is_none()).collect())
            }
            _ => (RBig::ONE, vec![id]),
        }
    }

    /// e^z, or e^iz.
    pub(super) fn exp(&mut self, z: Id, turned: bool) -> Result<Value, Stop> {
        let items = match self.exprs.kind(z) {
            Kind::Sum(items) => items.clone(),
            _ => vec![z],
        };
        let mut result = Value::exact(Lifted::ONE);
        let mut rest = Vec::new();
        for item in items {
            if let Some(factor) = self.exp_of_inverse(item, turned)? {
                result = result.times(factor);
                continue;
            }
            let terms = self.expand(item)?;
            rest.extend(terms.into_iter().map(|(q, v)| (q, if turned { v * Lifted::I } else { v })));
        }
        Ok(result.times(Value::exact(self.exponential(&rest)?)))
    }

    /// e^(n ln u) and e^(ni arctan u) and the like, for an integer n.
    pub(super) fn exp_of_inverse(&mut self, item: Id, turned: bool) -> Result<Option<Value>, Stop> {
        let exprs = self.exprs;
        let (q, mut factors) = self.coefficient(item);
        let n = i64::try_from(q.numerator()).ok().filter(|n| q.denominator().is_one() && n.unsigned_abs() < 64);
        let length = factors.len();
        factors.retain(|factor| !matches!(exprs.kind(*factor), Kind::I));
        let imaginary = turned != (factors.len() < length);
        let (Some(n), [only]) = (n, &factors[..]) else { return Ok(None) };
        if turned && !imaginary {
            return Ok(None);
        }
        let Kind::Function(op, arguments) = exprs.kind(*only) else { return Ok(None) };
        let x = match op {
            Op::Ln if !imaginary => {
                let x = self.value(arguments[0])?;
                return self.raised(x, n).map(Some);
            }
            Op::Arctan | Op::Arcsin | Op::Arccos if imaginary => self.value(arguments[0])?,
            _ => return Ok(None),
        };
        let turn = match op {
            Op::Arctan => {
                let under = Value { lifted: Lifted::ONE + x.lifted * x.lifted, exact: x.exact };
                let root = self.any_root(under)?;
                let below = self.raised(root, -1)?;
                Value { lifted: Lifted::ONE + x.lifted * Lifted::I, exact: x.exact }.times(below)
            }
            Op::Arcsin => self.turn_of_sine(x)?,
            _ => {
                let turn = self.turn_of_sine(x)?;
                Value::exact(Lifted::I).times(self.raised(turn, -1)?)
            }
        };
        self.raised(turn, n).map(Some)
    }

    /// e to a sum: a power of one element for each monomial; of iπ a root of unity where the rings have it.
    pub(super) fn exponential(&self, terms: &[Term]) -> Result<Lifted, Stop> {
        let mut sums: Vec<(u64, RBig)> = Vec::new();
        for (q, v) in terms {
            self.fuel.spend(20 + sums.len() as u64)?;
            if !v.is_unit() {
                return Err(Stop::Fuel);
            }
            match sums.iter_mut().find(|(key, _)| *key == v.key()) {
                Some((_, sum)) => *sum += q,
                None => sums.push((v.key(), q.clone())),
            }
        }
        let half_turn = (self.pi() * Lifted::I).key();
        let mut product = Lifted::ONE;
        for (key, q) in sums {
            self.fuel.spend(200)?;
            let part = |finest: i64| {
                let scaled = &q * RBig::from(finest);
                scaled.denominator().is_one().then(|| i64::try_from(scaled.numerator()).ok()).flatten()
            };
            if key == half_turn
                && let Some(twelfths) = part(12)
            {
                product = product * self.twelfth()?.power(twelfths.rem_euclid(24)).ok_or(Stop::Fuel)?;
                continue;
            }
            let (base, n) = match part(FINEST) {
                Some(n) => (self.draw(mix(key, EXP)), n),
                None => {
                    let key = mix(mix(key, EXP), hash_integer(q.denominator()));
                    (self.draw(key), i64::try_from(q.numerator()).map_err(|_| Stop::Fuel)?)
                }
            };
            if n.unsigned_abs() >= 1 << 40 {
                return Err(Stop::Fuel);
            }
            product = product * base.power(n).ok_or(Stop::Fuel)?;
        }
        Ok(product)
    }

    /// e^(iπ/12) = (√6 + √2 + i(√6 − √2)) / 4.
    pub(super) fn twelfth(&self) -> Result<Lifted, Stop> {
        let root = |n: u8| self.rational_root(&RBig::from(n));
        let (two, three) = (root(2)?, root(3)?);
        let six = two * three;
        let quarter = self.rational(&RBig::from_parts(IBig::ONE, UBig::from(4u8)))?;
        Ok((six + two + (six - two) * Lifted::I) * quarter)
    }
}
