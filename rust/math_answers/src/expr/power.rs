//! Powers: of rationals, of powers and products, and those that no rule simplifies.

use dashu_int::IBig;
use dashu_int::ops::{Abs, BitTest, UnsignedAbs};
use dashu_ratio::RBig;

use super::super::fuel::{Fuel, Stop};
use super::super::modular::{Residue, hash_integer, mix};
use super::factor::{FACTORED_BELOW, factors_of};
use super::{Class, Exprs, Id, Kind, MOST_BITS};

/// Integer exponents of more bits make an atom: residues only know exponents modulo p − 1.
const MOST_EXPONENT_BITS: usize = 40;

impl Exprs {
    /// `base^exponent`.
    ///
    /// # Errors
    /// [`Stop::Undefined`] for `0^0` and negative powers of what is identically zero, [`Stop::Fuel`].
    pub fn power(&mut self, base: Id, exponent: Id, fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(8)?;
        match self.as_rational(exponent).cloned() {
            Some(value) if value.denominator().is_one() => self.integer_power(base, exponent, value.numerator(), fuel),
            Some(value) => self.fractional_power(base, exponent, &value, fuel),
            None => self.general_power(base, exponent, fuel),
        }
    }

    fn integer_power(&mut self, base: Id, exponent: Id, n: &IBig, fuel: &Fuel) -> Result<Id, Stop> {
        let identically_zero = self.residue(base) == Residue::ZERO;
        if n.is_zero() {
            return if identically_zero { Err(Stop::Undefined) } else { self.integer(1, fuel) };
        }
        if *n < IBig::ZERO && identically_zero {
            return Err(Stop::Undefined);
        }
        if n.is_one() {
            return Ok(base);
        }
        match self.kind(base).clone() {
            Kind::Rational(value) => {
                if let Some(result) = small_power(&value, n, fuel)? {
                    return self.rational(result, fuel);
                }
            }
            Kind::I => {
                let quarter = u8::try_from(&((n % IBig::from(4) + IBig::from(4)) % IBig::from(4))).unwrap_or(0);
                return match quarter {
                    0 => self.integer(1, fuel),
                    1 => Ok(base),
                    2 => self.integer(-1, fuel),
                    _ => self.negated(base, fuel),
                };
            }
            // (b^r)^n = b^(rn) for every integer n.
            Kind::Power(inner, power) => {
                let power = self.product(&[power, exponent], fuel)?;
                return self.power(inner, power, fuel);
            }
            Kind::Product(factors) => {
                let mut powers = Vec::with_capacity(factors.len());
                for factor in factors {
                    powers.push(self.power(factor, exponent, fuel)?);
                }
                return self.product(&powers, fuel);
            }
            _ => {}
        }
        if n.bit_len() > MOST_EXPONENT_BITS {
            return self.general_power(base, exponent, fuel);
        }
        fuel.spend(60)?;
        let residue = self.residue(base).power(n).ok_or(Stop::Undefined)?;
        let size = self.size(base).saturating_add(n.bit_len() as u32 + 4);
        let mut class = self.class(base);
        if *n < IBig::ZERO && class.has(Class::ATOM) {
            class = class | Class::PARTIAL;
        }
        self.push(Kind::Power(base, exponent), residue, class, size)
    }

    fn general_power(&mut self, base: Id, exponent: Id, fuel: &Fuel) -> Result<Id, Stop> {
        let positive = match self.kind(base) {
            Kind::Rational(value) if value.is_zero() => return Err(Stop::Undefined),
            Kind::Rational(value) if value.is_one() => return Ok(base),
            Kind::Rational(value) => *value > RBig::ZERO,
            // (b^r)^x = b^(rx) for b > 0 and real r.
            Kind::Power(inner, power) if self.is_positive_constant(*inner) && self.as_rational(*power).is_some() => {
                let (inner, power) = (*inner, *power);
                let exponent = self.product(&[power, exponent], fuel)?;
                return self.power(inner, exponent, fuel);
            }
            _ => false,
        };
        // b^(x + y) = b^x · b^y
        if let Kind::Sum(items) = self.kind(exponent) {
            let mut powers = Vec::with_capacity(items.len());
            for item in items.clone() {
                powers.push(self.power(base, item, fuel)?);
            }
            return self.product(&powers, fuel);
        }
        if positive
            && let Some(value) = self.as_rational(base).cloned()
            && let Some(factors) = factors_of(&value, fuel)?
        {
            let mut powers = Vec::with_capacity(factors.len());
            for (prime, times) in factors {
                let prime = self.rational(RBig::from(prime), fuel)?;
                let times = self.integer(times, fuel)?;
                let exponent = self.product(&[times, exponent], fuel)?;
                powers.push(self.atom_power(prime, exponent, fuel)?);
            }
            return self.product(&powers, fuel);
        }
        self.atom_power(base, exponent, fuel)
    }

    pub(super) fn is_positive_constant(&self, id: Id) -> bool {
        match self.kind(id) {
            Kind::Rational(value) => *value > RBig::ZERO,
            Kind::E | Kind::Pi => true,
            _ => false,
        }
    }

    /// The square root of a prime: no atom, since the fields have it.
    fn prime_root(&mut self, base: Id, exponent: &RBig, power: Id, fuel: &Fuel) -> Result<Option<Id>, Stop> {
        let half = *exponent.denominator() == 2u8.into() && exponent.numerator().is_one();
        let prime = self.as_integer(base).is_some_and(|n| *n > IBig::ONE && *n < IBig::from(FACTORED_BELOW));
        if !half || !prime || self.as_rational(power).is_none() {
            return Ok(None);
        }
        fuel.spend(150)?;
        let size = self.size(base).saturating_add(6);
        self.push(Kind::Power(base, power), self.residue(base).sqrt(), Class::default(), size).map(Some)
    }

    /// A power that no rule simplifies: `a^p` for the atom `a = base^(x/q)`, where the exponent is `(p/q)·x`.
    pub(super) fn atom_power(&mut self, base: Id, exponent: Id, fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(60)?;
        let coefficient = match self.kind(exponent) {
            Kind::Rational(value) => value.clone(),
            Kind::Product(factors) => factors.iter().find_map(|id| self.as_rational(*id)).cloned().unwrap_or(RBig::ONE),
            _ => RBig::ONE,
        };
        if let Some(root) = self.prime_root(base, &coefficient, exponent, fuel)? {
            return Ok(root);
        }
        let small = coefficient.numerator().bit_len() <= MOST_EXPONENT_BITS && !coefficient.is_zero();
        let coefficient = if small { coefficient } else { RBig::ONE };
        let scale = self.rational(coefficient.clone(), fuel)?;
        let rest = self.residue(exponent) * self.residue(scale).inverse().ok_or(Stop::Undefined)?;
        let key =
            mix(mix(self.residue(base).key(), 0x0070_6f77), mix(rest.key(), hash_integer(coefficient.denominator())));
        let residue = Residue::draw(key).power(coefficient.numerator()).ok_or(Stop::Undefined)?;
        let mut class = self.class(base) | self.class(exponent) | Class::ATOM;
        if self.class(base).has(Class::SYMBOL) {
            class = class | Class::PIECEWISE;
        }
        if !self.is_positive_constant(base) {
            class = class | Class::PARTIAL;
        }
        if self.as_rational(exponent).is_none() {
            class = class | Class::TRANSCENDENTAL;
            let negative = self.as_rational(base).is_some_and(|value| *value < RBig::ZERO);
            if negative && self.class(exponent).has(Class::SYMBOL) {
                class = class | Class::INTEGER;
            }
        }
        let size = self.size(base).saturating_add(self.size(exponent)).saturating_add(4);
        self.push(Kind::Power(base, exponent), residue, class, size)
    }
}

/// `value^n` where it has at most [`MOST_BITS`].
pub(super) fn small_power(value: &RBig, n: &IBig, fuel: &Fuel) -> Result<Option<RBig>, Stop> {
    let one = RBig::ONE;
    if value.is_zero() || *value == one {
        return Ok(Some(value.clone()));
    }
    let magnitude = n.clone().unsigned_abs();
    if *value == -one {
        return Ok(Some(if magnitude.bit(0) { value.clone() } else { RBig::ONE }));
    }
    let Ok(times) = usize::try_from(&magnitude) else { return Ok(None) };
    let longest = value.numerator().bit_len().max(value.denominator().bit_len());
    let Some(length) = longest.checked_mul(times).filter(|length| *length <= MOST_BITS) else { return Ok(None) };
    fuel.spend(10 + 2 * Fuel::product(length, length))?;
    let top = value.numerator().pow(times);
    let bottom = IBig::from(value.denominator().pow(times));
    Ok(Some(if *n < IBig::ZERO {
        let sign = top.signum();
        RBig::from_parts_signed(bottom * sign, top.abs())
    } else {
        RBig::from_parts_signed(top, bottom)
    }))
}
