//! Inequalities in one letter: where their sides differ in sign.
//!
//! The zeros and poles of the difference are found where it is built from polynomials up to degree two and absolute
//! values of linear ones; between two neighbours the sign is constant and is read off at a point.

use std::cmp::Ordering;

use dashu_int::IBig;
use dashu_ratio::RBig;

use super::super::ast::Comparison;
use super::super::ball::{Ball, Context};
use super::super::expr::order::order;
use super::super::expr::{Class, Evaluator, Exprs, Id, Kind, Op, Point};
use super::super::fuel::Stop;
use super::number::ratio;
use super::read::{Fail, Reader};
use super::{End, Name, NameKind, Piece, Region};

/// Zeros and poles that are sorted.
const MOST_BREAKS: usize = 64;

impl Reader<'_> {
    /// The one letter of all parts and the region where all of them hold; none where that is not found.
    pub(super) fn solve(&mut self, parts: &[(Id, Comparison)]) -> Result<Option<(Name, Region)>, Fail> {
        let mut letters = Vec::new();
        for (id, _) in parts {
            self.exprs.letters(*id, &mut letters);
        }
        let [letter] = letters[..] else { return Ok(None) };
        let Some((_, spelling)) = self.exprs.names().iter().find(|(hash, _)| *hash == letter) else { return Ok(None) };
        let name = Name { spelling: spelling.to_string(), kind: NameKind::Letter };
        let mut region = Region::all();
        for (id, operator) in parts {
            let Some(part) = self.solve_part(*id, *operator, letter)? else { return Ok(None) };
            match region.intersection(&part, self.exprs, self.fuel)? {
                Some(both) => region = both,
                None => return Ok(None),
            }
        }
        Ok(Some((name, region)))
    }

    fn solve_part(&mut self, id: Id, operator: Comparison, letter: u64) -> Result<Option<Region>, Fail> {
        let (mut zeros, mut poles) = (Vec::new(), Vec::new());
        if !self.breaks(id, letter, &mut zeros, &mut poles)? || zeros.len() + poles.len() > MOST_BREAKS {
            return Ok(None);
        }
        let mut breaks: Vec<(Id, bool)> = Vec::new();
        for (break_at, pole) in zeros.into_iter().map(|id| (id, false)).chain(poles.into_iter().map(|id| (id, true))) {
            let mut place = 0;
            let mut known = false;
            while let Some((other, other_is_pole)) = breaks.get_mut(place) {
                match order((self.exprs, break_at), (self.exprs, *other), self.fuel) {
                    Some(Ordering::Greater) => place += 1,
                    Some(Ordering::Less) => break,
                    Some(Ordering::Equal) => {
                        *other_is_pole |= pole;
                        known = true;
                        break;
                    }
                    None => return Ok(None),
                }
            }
            if !known {
                breaks.insert(place, (break_at, pole));
            }
        }
        let holds = |sign: Ordering| match operator {
            Comparison::Less | Comparison::LessEqual => sign == Ordering::Less,
            Comparison::Greater | Comparison::GreaterEqual => sign == Ordering::Greater,
            Comparison::NotEqual => sign != Ordering::Equal,
            _ => false,
        };
        let zero_holds = matches!(operator, Comparison::LessEqual | Comparison::GreaterEqual | Comparison::Equal);
        let mut pieces = Vec::new();
        for at in 0..=breaks.len() {
            let low = at.checked_sub(1).and_then(|at| breaks.get(at));
            let high = breaks.get(at);
            let Some(sign) = self.sign_between(id, letter, low.map(|b| b.0), high.map(|b| b.0))? else {
                return Ok(None);
            };
            if holds(sign) {
                let end = |end: Option<&(Id, bool)>, otherwise| {
                    end.map_or(otherwise, |(id, _)| End::At { id: *id, closed: false })
                };
                pieces.push(Piece { low: end(low, End::Below), high: end(high, End::Above) });
            }
            if let Some((zero, false)) = high
                && zero_holds
            {
                pieces.push(Piece::point(*zero));
            }
        }
        let region = Region::of(pieces, self.exprs, self.fuel)?;
        Ok(region.sorted.then_some(region))
    }

    /// Collect the real zeros and poles of a node; whether all of them were found.
    fn breaks(&mut self, id: Id, letter: u64, zeros: &mut Vec<Id>, poles: &mut Vec<Id>) -> Result<bool, Fail> {
        self.fuel.spend(10)?;
        if !self.exprs.contains(id, letter) {
            return Ok(!self.exprs.class(id).has(Class::IMAGINARY));
        }
        if let Some(coefficients) = self.polynomial(id, letter)? {
            return self.roots(&coefficients, zeros);
        }
        match self.exprs.kind(id).clone() {
            Kind::Product(factors) => {
                for factor in factors {
                    if !self.breaks(factor, letter, zeros, poles)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Kind::Power(base, exponent) => match self.exprs.as_integer(exponent).map(|n| *n > IBig::ZERO) {
                Some(true) => self.breaks(base, letter, zeros, poles),
                Some(false) => self.breaks(base, letter, poles, zeros),
                None => Ok(false),
            },
            Kind::Function(Op::Abs, arguments) => self.breaks(arguments[0], letter, zeros, poles),
            // c·|u| + d is zero where u = ±d/c.
            Kind::Sum(items) => {
                let (with, without): (Vec<Id>, Vec<Id>) =
                    items.iter().partition(|item| self.exprs.contains(**item, letter));
                let [term] = with[..] else { return Ok(false) };
                let rest = self.exprs.sum(&without, self.fuel)?;
                let (coefficient, inner) = match self.exprs.kind(term).clone() {
                    Kind::Function(Op::Abs, arguments) => (self.exprs.integer(1, self.fuel)?, arguments[0]),
                    Kind::Product(factors) => {
                        let (letters, constants): (Vec<Id>, Vec<Id>) =
                            factors.iter().partition(|factor| self.exprs.contains(**factor, letter));
                        let [only] = letters[..] else { return Ok(false) };
                        let Kind::Function(Op::Abs, arguments) = self.exprs.kind(only).clone() else {
                            return Ok(false);
                        };
                        (self.exprs.product(&constants, self.fuel)?, arguments[0])
                    }
                    _ => return Ok(false),
                };
                let distance = self.exprs.quotient(rest, coefficient, self.fuel)?;
                let zero = self.exprs.integer(0, self.fuel)?;
                match order((self.exprs, distance), (self.exprs, zero), self.fuel) {
                    // |u| + d with d > 0 has no zero; its sign is that at any point.
                    Some(Ordering::Greater) => return Ok(true),
                    Some(_) => {}
                    None => return Ok(false),
                }
                let (plus, minus) = (
                    self.exprs.sum(&[inner, distance], self.fuel)?,
                    self.exprs.difference(inner, distance, self.fuel)?,
                );
                Ok(self.breaks(plus, letter, zeros, poles)? && self.breaks(minus, letter, zeros, poles)?)
            }
            _ => Ok(false),
        }
    }

    /// Coefficients of a polynomial of degree up to two, from the constant on; none for anything else.
    fn polynomial(&mut self, id: Id, letter: u64) -> Result<Option<Vec<Id>>, Fail> {
        self.fuel.spend(10)?;
        let fuel = self.fuel;
        if !self.exprs.contains(id, letter) {
            return Ok(Some(vec![id]));
        }
        Ok(match self.exprs.kind(id).clone() {
            Kind::Symbol(hash) if hash == letter => {
                Some(vec![self.exprs.integer(0, fuel)?, self.exprs.integer(1, fuel)?])
            }
            Kind::Sum(items) => {
                let mut columns: [Vec<Id>; 3] = Default::default();
                for item in items {
                    let Some(coefficients) = self.polynomial(item, letter)? else { return Ok(None) };
                    for (column, coefficient) in columns.iter_mut().zip(coefficients) {
                        column.push(coefficient);
                    }
                }
                let mut coefficients = Vec::with_capacity(3);
                for column in columns {
                    coefficients.push(self.exprs.sum(&column, fuel)?);
                }
                Some(coefficients)
            }
            Kind::Product(factors) => {
                let mut product = vec![self.exprs.integer(1, fuel)?];
                for factor in factors {
                    let Some(coefficients) = self.polynomial(factor, letter)? else { return Ok(None) };
                    let Some(more) = self.convolve(&product, &coefficients)? else { return Ok(None) };
                    product = more;
                }
                Some(product)
            }
            Kind::Power(base, exponent) if self.exprs.as_integer(exponent) == Some(&IBig::from(2)) => {
                let Some(coefficients) = self.polynomial(base, letter)? else { return Ok(None) };
                self.convolve(&coefficients, &coefficients)?
            }
            _ => None,
        })
    }

    fn convolve(&mut self, left: &[Id], right: &[Id]) -> Result<Option<Vec<Id>>, Fail> {
        let mut columns: [Vec<Id>; 3] = Default::default();
        for (i, a) in left.iter().enumerate() {
            for (j, b) in right.iter().enumerate() {
                let term = self.exprs.product(&[*a, *b], self.fuel)?;
                match columns.get_mut(i + j) {
                    Some(column) => column.push(term),
                    None if self.is_zero(term) => {}
                    None => return Ok(None),
                }
            }
        }
        let mut coefficients = Vec::with_capacity(3);
        for column in columns {
            coefficients.push(self.exprs.sum(&column, self.fuel)?);
        }
        Ok(Some(coefficients))
    }

    fn is_zero(&self, id: Id) -> bool {
        self.exprs.as_rational(id).is_some_and(RBig::is_zero)
    }

    /// Real roots; whether they were found.
    fn roots(&mut self, coefficients: &[Id], zeros: &mut Vec<Id>) -> Result<bool, Fail> {
        let fuel = self.fuel;
        let zero = self.exprs.integer(0, fuel)?;
        let at = |k: usize| coefficients.get(k).copied().unwrap_or(zero);
        let (c, b, a) = (at(0), at(1), at(2));
        let sign = |exprs: &Exprs, id| order((exprs, id), (exprs, zero), fuel);
        match (sign(self.exprs, a), sign(self.exprs, b)) {
            (Some(Ordering::Equal), Some(Ordering::Equal)) => Ok(false),
            (Some(Ordering::Equal), Some(_)) => {
                let root = self.exprs.quotient(c, b, fuel)?;
                zeros.push(self.exprs.negated(root, fuel)?);
                Ok(true)
            }
            (Some(_), Some(_)) => {
                let four = self.exprs.integer(4, fuel)?;
                let (square, product) = (self.exprs.product(&[b, b], fuel)?, self.exprs.product(&[four, a, c], fuel)?);
                let discriminant = self.exprs.difference(square, product, fuel)?;
                match sign(self.exprs, discriminant) {
                    Some(Ordering::Less) => return Ok(true),
                    Some(_) => {}
                    None => return Ok(false),
                }
                let half = self.exprs.rational(ratio(1, 2), fuel)?;
                let root = self.exprs.power(discriminant, half, fuel)?;
                let (twice, minus) = (self.exprs.sum(&[a, a], fuel)?, self.exprs.negated(b, fuel)?);
                for top in [self.exprs.difference(minus, root, fuel)?, self.exprs.sum(&[minus, root], fuel)?] {
                    zeros.push(self.exprs.quotient(top, twice, fuel)?);
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// The sign of a node between two neighbouring breaks.
    fn sign_between(
        &mut self,
        id: Id,
        letter: u64,
        low: Option<Id>,
        high: Option<Id>,
    ) -> Result<Option<Ordering>, Fail> {
        for bits in [96, 400] {
            let context = Context { bits, fuel: self.fuel };
            let at =
                |id: Id| Evaluator::new(self.exprs, Point { seed: 0, range: 0, natural: false }, context).value(id);
            let ball =
                |id: Option<Id>| -> Result<Option<Ball>, Stop> { id.map(|id| Ok(at(id)?.re.midpoint())).transpose() };
            let (low, high) = (ball(low)?, ball(high)?);
            let half = Ball::dyadic(IBig::ONE, -1);
            let sample = match (low, high) {
                (None, None) => half,
                (Some(low), None) => low.plus(&Ball::integer(1), context)?,
                (None, Some(high)) => high.minus(&Ball::integer(1), context)?,
                (Some(low), Some(high)) => low.plus(&high, context)?.times(&half, context)?,
            };
            let mut evaluator = Evaluator::new(self.exprs, Point { seed: 0, range: 0, natural: false }, context);
            evaluator.fix(letter, sample.midpoint());
            match evaluator.value(id) {
                Ok(value) if value.is_real() => {
                    if let Some(sign) = value.re.sign() {
                        return Ok(Some(sign.cmp(&0)));
                    }
                }
                Ok(_) | Err(Stop::Imprecise | Stop::Undefined) => {}
                Err(stop) => return Err(stop.into()),
            }
        }
        Ok(None)
    }
}
