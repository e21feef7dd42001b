//! Rational functions modulo the primes at a point of the caller's choice.

use std::collections::HashMap;

use super::super::fuel::{Fuel, Stop};
use super::super::modular::{Residue, mix};
use super::{Class, Exprs, Id, Kind};

impl Exprs {
    /// The value of a rational function of letters where they are drawn with `seed`; the residue of the node itself is
    /// that of another point.
    ///
    /// # Errors
    /// [`Stop::Undefined`] for a pole, [`Stop::Fuel`] for anything but a rational function.
    pub fn residue_at(&self, id: Id, seed: u64, fuel: &Fuel) -> Result<Residue, Stop> {
        self.residue_within(id, seed, fuel, &mut HashMap::new())
    }

    fn residue_within(
        &self,
        id: Id,
        seed: u64,
        fuel: &Fuel,
        known: &mut HashMap<Id, Residue>,
    ) -> Result<Residue, Stop> {
        fuel.spend(10)?;
        if !self.class(id).has(Class::SYMBOL) {
            return if self.class(id).has(Class::ATOM) { Err(Stop::Fuel) } else { Ok(self.residue(id)) };
        }
        if let Some(residue) = known.get(&id) {
            return Ok(*residue);
        }
        let residue = match self.kind(id) {
            Kind::Symbol(letter) => return Ok(Residue::draw(mix(*letter, seed))),
            Kind::Sum(items) => {
                let mut sum = Residue::ZERO;
                for item in items {
                    sum = sum + self.residue_within(*item, seed, fuel, known)?;
                }
                sum
            }
            Kind::Product(items) => {
                let mut product = Residue::ONE;
                for item in items {
                    product = product * self.residue_within(*item, seed, fuel, known)?;
                }
                product
            }
            Kind::Power(base, exponent) => {
                fuel.spend(60)?;
                let exponent = self.as_integer(*exponent).ok_or(Stop::Fuel)?;
                self.residue_within(*base, seed, fuel, known)?.power(exponent).ok_or(Stop::Undefined)?
            }
            Kind::Rational(_) | Kind::Pi | Kind::E | Kind::I | Kind::Function(..) | Kind::Range(_) => {
                return Err(Stop::Fuel);
            }
        };
        known.insert(id, residue);
        Ok(residue)
    }
}
