//! Square roots and twelfth roots of unity, with signs that agree between multiples.

use dashu_int::ops::{BitTest, Gcd, UnsignedAbs};
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::super::super::fuel::Stop;
use super::super::super::lifted::Lifted;
use super::super::super::modular::mix;
use super::super::factor::factors_of;
use super::super::{Id, Kind};
use super::{Germ, Value};

impl Germ<'_> {
    /// A square root: of a product, those of its factors; of a sum, that of its content times that of the rest.
    pub(super) fn root(&mut self, id: Id) -> Result<Value, Stop> {
        let exprs = self.exprs;
        match exprs.kind(id) {
            Kind::Product(items) => {
                let mut product = Value::exact(Lifted::ONE);
                for item in items {
                    product = product.times(self.root(*item)?);
                }
                Ok(product)
            }
            Kind::Rational(value) if *value < RBig::ZERO => {
                let value = -value.clone();
                self.value(id)?;
                Ok(Value::exact(self.rational_root(&value)? * Lifted::I))
            }
            Kind::Rational(value) => {
                self.value(id)?;
                self.rational_root(value).map(Value::exact)
            }
            Kind::Power(base, exponent) => {
                let half = exprs.as_integer(*exponent).and_then(|n| i64::try_from(n).ok()).filter(|n| n % 2 == 0);
                self.value(id)?;
                match half {
                    Some(n) => {
                        self.has_roots = true;
                        let base = self.value(*base)?;
                        self.raised(base, n / 2)
                    }
                    None => {
                        let value = self.value(id)?;
                        self.any_root(value)
                    }
                }
            }
            Kind::Sum(items) => {
                let mut content: Option<(UBig, UBig)> = None;
                for item in items {
                    let (q, _) = self.coefficient(*item);
                    let (top, bottom) = (q.numerator().clone().unsigned_abs(), q.denominator().clone());
                    self.fuel.spend(20 + (top.bit_len() + bottom.bit_len()) as u64)?;
                    content = Some(match content {
                        None => (top, bottom),
                        Some((a, b)) => {
                            let common = (&b).gcd(&bottom);
                            ((&a).gcd(&top), b * bottom / common)
                        }
                    });
                }
                let value = self.value(id)?;
                let content = content.filter(|(top, bottom)| !top.is_one() || !bottom.is_one());
                let Some((top, bottom)) = content else { return self.any_root(value) };
                let content = RBig::from_parts(IBig::from(top), bottom);
                let inverse = self.rational(&content)?.inverse().ok_or(Stop::Fuel)?;
                let rest = self.any_root(Value { lifted: value.lifted * inverse, exact: value.exact })?;
                Ok(Value::exact(self.rational_root(&content)?).times(rest))
            }
            _ => {
                let value = self.value(id)?;
                self.any_root(value)
            }
        }
    }

    pub(super) fn any_root(&mut self, value: Value) -> Result<Value, Stop> {
        self.fuel.spend(300)?;
        self.has_roots = true;
        let lifted = value.lifted.root().unwrap_or_else(|| self.draw(mix(value.lifted.key(), 0x7371_7274)));
        Ok(Value { lifted, exact: value.exact })
    }

    /// The root of a positive rational, by those of its primes.
    pub(super) fn rational_root(&self, value: &RBig) -> Result<Lifted, Stop> {
        let mut product = Lifted::ONE;
        for (prime, times) in factors_of(value, self.fuel)?.unwrap_or_default() {
            let prime = self.rational(&RBig::from(prime))?;
            self.fuel.spend(300)?;
            let root = if times % 2 == 0 { prime.power(times / 2) } else { prime.root().and_then(|r| r.power(times)) };
            product = product * root.ok_or(Stop::Fuel)?;
        }
        Ok(product)
    }
}
