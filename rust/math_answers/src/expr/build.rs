//! Sums, products and powers, with rational arithmetic folded.

use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

use super::super::fuel::{Fuel, Stop};
use super::super::modular::{Residue, hash_integer, mix};
use super::{Class, Exprs, Id, Kind, MOST_BITS};

fn bits(value: &RBig) -> usize {
    value.numerator().bit_len() + value.denominator().bit_len()
}

/// A sum or product of rationals: products, and a greatest common divisor that is quadratic in the shorter number
/// and linear in the longer.
fn rational_cost(left: &RBig, right: &RBig) -> u64 {
    if left.denominator().is_one() && right.denominator().is_one() {
        return 4 + Fuel::product(bits(left), bits(right));
    }
    10 + 8 * Fuel::product(bits(left), bits(right))
}

impl Exprs {
    /// `Σ items`.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn sum(&mut self, items: &[Id], fuel: &Fuel) -> Result<Id, Stop> {
        let mut constant = RBig::ZERO;
        let mut rest = Vec::new();
        for &item in items {
            match self.kind(item) {
                Kind::Rational(value) if bits(value) + bits(&constant) <= MOST_BITS => {
                    fuel.spend(rational_cost(value, &constant))?;
                    constant += value;
                }
                Kind::Sum(inner) => {
                    fuel.spend(4 + inner.len() as u64)?;
                    rest.extend(inner);
                }
                _ => rest.push(item),
            }
        }
        if rest.is_empty() {
            return self.rational(constant, fuel);
        }
        if !constant.is_zero() {
            let constant = self.rational(constant, fuel)?;
            rest.push(constant);
        }
        if let [only] = rest[..] {
            return Ok(only);
        }
        fuel.spend(10 + 2 * rest.len() as u64)?;
        let residue = rest.iter().fold(Residue::ZERO, |sum, id| sum + self.residue(*id));
        if residue == Residue::ZERO {
            return self.rational(RBig::ZERO, fuel);
        }
        let class = rest.iter().fold(Class::default(), |class, id| class | self.class(*id));
        let size = rest.iter().fold(4u32, |size, id| size.saturating_add(self.size(*id)));
        self.push(Kind::Sum(rest), residue, class, size)
    }

    /// `left − right`.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn difference(&mut self, left: Id, right: Id, fuel: &Fuel) -> Result<Id, Stop> {
        let right = self.negated(right, fuel)?;
        self.sum(&[left, right], fuel)
    }

    /// `−value`.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn negated(&mut self, value: Id, fuel: &Fuel) -> Result<Id, Stop> {
        if let Kind::Rational(value) = self.kind(value) {
            let value = -value.clone();
            return self.rational(value, fuel);
        }
        let minus = self.integer(-1, fuel)?;
        self.product(&[minus, value], fuel)
    }

    /// `Π items`.
    ///
    /// # Errors
    /// [`Stop::Fuel`], [`Stop::Undefined`]
    pub fn product(&mut self, items: &[Id], fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(items.len() as u64)?;
        let mut factors = Vec::with_capacity(items.len());
        for &item in items {
            match self.kind(item) {
                Kind::Product(inner) => {
                    fuel.spend(4 + inner.len() as u64)?;
                    factors.extend(inner);
                }
                _ => factors.push(item),
            }
        }
        let mut constant = RBig::ONE;
        let mut rest: Vec<Id> = Vec::new();
        let mut kept_bits = 0;
        for item in factors {
            match self.kind(item) {
                Kind::Rational(value) if value.is_zero() => return self.rational(RBig::ZERO, fuel),
                Kind::Rational(value) if bits(value) + kept_bits <= MOST_BITS => {
                    fuel.spend(rational_cost(value, &constant))?;
                    constant *= value;
                    kept_bits = bits(&constant);
                }
                _ => rest.push(item),
            }
        }
        if self.merge_powers(&mut rest, fuel)? {
            if !constant.is_one() {
                let constant = self.rational(constant, fuel)?;
                rest.push(constant);
            }
            return self.product(&rest, fuel);
        }
        if rest.is_empty() {
            return self.rational(constant, fuel);
        }
        if !constant.is_one() {
            let constant = self.rational(constant, fuel)?;
            rest.push(constant);
        }
        if let [only] = rest[..] {
            return Ok(only);
        }
        fuel.spend(10 + 3 * rest.len() as u64)?;
        let residue = rest.iter().fold(Residue::ONE, |product, id| product * self.residue(*id));
        let class = rest.iter().fold(Class::default(), |class, id| class | self.class(*id));
        let size = rest.iter().fold(4u32, |size, id| size.saturating_add(self.size(*id)));
        self.push(Kind::Product(rest), residue, class, size)
    }

    /// Replace pairs of powers `b^r · b^s` with fractional exponents by `b^(r+s)`, and `i·i` by −1; whether there was one.
    /// A product of n powers has no pair left after about log n calls.
    ///
    /// True for principal powers, and for real odd roots where both exponents have one denominator.
    fn merge_powers(&mut self, factors: &mut Vec<Id>, fuel: &Fuel) -> Result<bool, Stop> {
        let mut seen: Vec<(u64, usize)> = Vec::new();
        let mut merged: Vec<Id> = Vec::new();
        let mut used: Vec<usize> = Vec::new();
        for at in 0..factors.len() {
            let key = match self.kind(factors[at]) {
                Kind::I => 1,
                Kind::Power(base, exponent) => match self.as_rational(*exponent) {
                    Some(exponent) if !exponent.denominator().is_one() => {
                        mix(self.residue(*base).key(), hash_integer(exponent.denominator()))
                    }
                    _ => continue,
                },
                _ => continue,
            };
            fuel.spend(4 + seen.len() as u64)?;
            let Some(place) = seen.iter().position(|(known, _)| *known == key) else {
                seen.push((key, at));
                continue;
            };
            let (_, other) = seen.swap_remove(place);
            let both = match (self.kind(factors[at]).clone(), self.kind(factors[other]).clone()) {
                (Kind::Power(base, left), Kind::Power(_, right)) => {
                    let exponent = self.sum(&[left, right], fuel)?;
                    self.power(base, exponent, fuel)?
                }
                _ => self.integer(-1, fuel)?,
            };
            used.extend([at, other]);
            merged.push(both);
        }
        if merged.is_empty() {
            return Ok(false);
        }
        used.sort_unstable();
        let mut index = 0..;
        factors.retain(|_| index.next().is_none_or(|at: usize| used.binary_search(&at).is_err()));
        factors.extend(merged);
        Ok(true)
    }

    /// `left / right`.
    ///
    /// # Errors
    /// [`Stop::Undefined`] by what is identically zero, [`Stop::Fuel`].
    pub fn quotient(&mut self, left: Id, right: Id, fuel: &Fuel) -> Result<Id, Stop> {
        let minus = self.integer(-1, fuel)?;
        let inverse = self.power(right, minus, fuel)?;
        self.product(&[left, inverse], fuel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_of_many_powers_needs_no_deep_recursion() {
        let product = || {
            let fuel = Fuel::new(1_000_000);
            let mut exprs = Exprs::default();
            let i = exprs.i().unwrap();
            let (two, half) =
                (exprs.integer(2, &fuel).unwrap(), exprs.rational(RBig::from_parts(1.into(), 2u8.into()), &fuel));
            let root = exprs.power(two, half.unwrap(), &fuel).unwrap();
            let found = exprs.product(&[vec![i; 4098], vec![root; 6]].concat(), &fuel).unwrap();
            exprs.as_rational(found).cloned()
        };
        let small_stack = std::thread::Builder::new().stack_size(128 * 1024).spawn(product).unwrap();
        assert_eq!(small_stack.join().unwrap(), Some(RBig::from(-8)));
    }
}
