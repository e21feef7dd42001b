//! Powers with fractional exponents.

use dashu_int::IBig;
use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

use super::super::fuel::{Fuel, Stop};
use super::factor::factors_of;
use super::{Exprs, Id, Kind};

impl Exprs {
    /// `base^r` for a rational r that is no integer: of rationals as a product of powers of primes with exponents
    /// between 0 and 1. Of a negative number the real root where the root is odd, as schools have it, else the
    /// principal one.
    pub(super) fn fractional_power(&mut self, base: Id, exponent: Id, r: &RBig, fuel: &Fuel) -> Result<Id, Stop> {
        let odd_root = r.denominator().bit(0);
        match self.kind(base).clone() {
            Kind::Rational(value) if value.is_zero() => {
                if *r > RBig::ZERO {
                    self.integer(0, fuel)
                } else {
                    Err(Stop::Undefined)
                }
            }
            Kind::Rational(value) if value.is_one() => Ok(base),
            Kind::Rational(value) if value < RBig::ZERO && odd_root => {
                let opposite = self.rational(-value, fuel)?;
                let root = self.power(opposite, exponent, fuel)?;
                if bit_of(r.numerator()) { self.negated(root, fuel) } else { Ok(root) }
            }
            Kind::Rational(value) if value < RBig::ZERO && *r.denominator() == 2u8.into() => {
                let opposite = self.rational(-value, fuel)?;
                let root = self.power(opposite, exponent, fuel)?;
                let i = self.i()?;
                let times = self.rational(RBig::from(r.numerator().clone()), fuel)?;
                let turn = self.power(i, times, fuel)?;
                self.product(&[turn, root], fuel)
            }
            Kind::Rational(value) if value > RBig::ZERO => match factors_of(&value, fuel)? {
                Some(factors) => self.prime_powers(factors, r, fuel),
                None => self.atom_power(base, exponent, fuel),
            },
            // (b^s)^r = b^(sr) for b > 0 and real s.
            Kind::Power(inner, power) if self.is_positive_constant(inner) && self.as_rational(power).is_some() => {
                let exponent = self.product(&[power, exponent], fuel)?;
                self.power(inner, exponent, fuel)
            }
            // (c·x)^r = c^r · x^r for c > 0.
            Kind::Product(factors) => {
                let constant = factors.iter().position(|id| self.as_rational(*id).is_some_and(|c| *c != RBig::NEG_ONE));
                let Some(at) = constant else { return self.atom_power(base, exponent, fuel) };
                let mut rest = factors;
                let constant = rest.swap_remove(at);
                let negative = self.as_rational(constant).is_some_and(|c| *c < RBig::ZERO);
                let mut left = constant;
                if negative {
                    left = self.negated(constant, fuel)?;
                    let minus = self.integer(-1, fuel)?;
                    rest.push(minus);
                }
                let left = self.power(left, exponent, fuel)?;
                let rest = self.product(&rest, fuel)?;
                let right = self.power(rest, exponent, fuel)?;
                self.product(&[left, right], fuel)
            }
            _ => self.atom_power(base, exponent, fuel),
        }
    }

    fn prime_powers(&mut self, factors: Vec<(dashu_int::UBig, i64)>, r: &RBig, fuel: &Fuel) -> Result<Id, Stop> {
        let mut powers = Vec::with_capacity(2 * factors.len());
        for (prime, times) in factors {
            fuel.spend(10)?;
            let (whole, part) = (r * RBig::from(times)).split_at_point();
            let (whole, part) = if part < RBig::ZERO { (whole - IBig::ONE, part + RBig::ONE) } else { (whole, part) };
            let prime = self.rational(RBig::from(prime), fuel)?;
            if !whole.is_zero() {
                let whole = self.rational(RBig::from(whole), fuel)?;
                powers.push(self.power(prime, whole, fuel)?);
            }
            if !part.is_zero() {
                let part = self.rational(part, fuel)?;
                powers.push(self.atom_power(prime, part, fuel)?);
            }
        }
        self.product(&powers, fuel)
    }
}

fn bit_of(value: &IBig) -> bool {
    value.trailing_zeros() == Some(0)
}
