//! The value of an expression at a point, as a complex ball.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use dashu_int::IBig;
use dashu_ratio::RBig;

use super::super::ball::{Ball, Complex, Context, Magnitude};
use super::super::fuel::Stop;
use super::super::modular::mix;
use super::apply::{arcsine, common, exact_integer, factorial, integer, meet, rational_power, whole};
use super::{Exprs, Id, Kind, Op, Range};

/// Terms of a sum or product at a point.
const MOST_TERMS: i64 = 256;

/// Bits of numbers that change nothing about a huge one.
pub(super) const MOST_SMALL: i64 = 1 << 38;

/// A ball around zero of fewer bits stands for a tiny number, not for a cancellation.
const UNDERFLOW: i64 = -(1 << 30);

/// From this range on letters are as often large as small.
pub(super) const WIDE: u32 = 64;

/// Where letters get their values from: a seed, a range and whether integer letters are integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// What the values are drawn with.
    pub seed: u64,
    /// Which range they lie in, see [`Point::value`].
    pub range: u32,
    /// Whether every letter is a small natural number.
    pub natural: bool,
}

impl Point {
    /// Whether letters may have values over 8, so that powers of them may be out of reach.
    pub(super) fn is_far(self) -> bool {
        !self.natural && matches!(self.range, 4 | 7..=11)
    }

    /// The value of a letter: dyadic with 20 bits after the point, of a range that changes from point to point, so that
    /// narrow domains are met as well as both signs.
    #[must_use]
    pub fn value(self, letter: u64) -> Ball {
        let draw = mix(mix(letter, self.seed), u64::from(self.range));
        if self.natural {
            return Ball::integer(1 + (draw % (3 + 2 * u64::from(self.range))) as i64);
        }
        let unit = (draw >> 20 & 0xf_ffff) as i64 | 1;
        // From the second round on each letter has a range of its own, a small one before [`WIDE`].
        let one_of = |ranges: [u32; 12]| ranges[(draw >> 48) as usize % 12];
        let range = match self.range {
            range @ 0..12 => range,
            12..WIDE => one_of([0, 0, 3, 3, 1, 6, 2, 2, 5, 5, 1, 6]),
            _ => one_of([0, 3, 1, 6, 2, 5, 7, 7, 8, 9, 4, 11]),
        };
        let (scale, negative) = match range {
            0 => (1, false),
            1 => (4, false),
            2 => (2, draw & 1 == 1),
            3 => (1, true),
            4 => (16, false),
            5 => (8, draw & 1 == 1),
            6 => (4, true),
            7 => (64, draw & 1 == 1),
            8 => (1 << 10, false),
            9 => (1 << 10, true),
            10 => (1 << 17, false),
            _ => (1 << 24, draw & 1 == 1),
        };
        let value = Ball::dyadic(IBig::from(unit * scale), -20);
        if negative { value.negated() } else { value }
    }
}

/// Spreads node numbers over a table.
#[derive(Debug, Default, Clone)]
struct Spread(u64);

impl BuildHasher for Spread {
    type Hasher = Self;
    fn build_hasher(&self) -> Self {
        Self(0)
    }
}

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = mix(self.0, u64::from(*byte));
        }
    }
    fn write_u32(&mut self, value: u32) {
        self.0 = u64::from(value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Evaluates nodes of one arena at one point and precision, each once.
#[derive(Debug)]
pub struct Evaluator<'e> {
    exprs: &'e Exprs,
    point: Point,
    context: Context<'e>,
    known: HashMap<u32, Result<Complex, Stop>, Spread>,
    fixed: Option<(u64, Ball)>,
    /// Values of the letters of enclosing sums and products.
    bound: Vec<(u64, i64)>,
    /// The largest |log₂| of an intermediate value.
    pub reach: i64,
    /// Whether every intermediate value is real.
    pub real: bool,
}

impl<'e> Evaluator<'e> {
    /// For `exprs` at `point`.
    #[must_use]
    pub fn new(exprs: &'e Exprs, point: Point, context: Context<'e>) -> Self {
        Self { exprs, point, context, known: HashMap::default(), fixed: None, bound: Vec::new(), reach: 0, real: true }
    }

    /// Give a letter a value of the caller's choice.
    pub fn fix(&mut self, letter: u64, value: Ball) {
        self.fixed = Some((letter, value));
    }

    /// The value of a node.
    ///
    /// # Errors
    /// See [`Stop`].
    pub fn value(&mut self, id: Id) -> Result<Complex, Stop> {
        if let Some(known) = self.known.get(&id.0) {
            return known.clone();
        }
        let value = self.compute(id);
        if let Ok(value) = &value {
            // A part that may be zero says nothing about its size.
            for part in [&value.re, &value.im] {
                if !part.contains_zero() {
                    self.reach = self.reach.max(part.top().abs());
                } else if !part.is_zero() && part.upper().top() < UNDERFLOW {
                    // No precision makes a ball this small: it is a number too small to be computed with.
                    self.reach = i64::MAX / 4;
                }
            }
            self.real &= value.is_real();
        }
        self.known.insert(id.0, value.clone());
        value
    }

    fn compute(&mut self, id: Id) -> Result<Complex, Stop> {
        let context = self.context;
        context.fuel.spend(4)?;
        // The borrow of the arena outlives that of the evaluator.
        let exprs = self.exprs;
        match exprs.kind(id) {
            Kind::Rational(value) => Ok(Ball::rational(value, context)?.into()),
            Kind::Pi => Ok(Ball::pi(context)?.into()),
            Kind::E => Ok(Ball::integer(1).exp(context)?.into()),
            Kind::I => Ok(Complex::i()),
            Kind::Symbol(letter) => Ok(match &self.fixed {
                Some((fixed, value)) if fixed == letter => value.clone().into(),
                _ => match self.bound.iter().rev().find(|(bound, _)| bound == letter) {
                    Some((_, value)) => Ball::integer(*value).into(),
                    None => self.point.value(*letter).into(),
                },
            }),
            Kind::Sum(items) => self.sum(items),
            Kind::Product(items) => self.product(items),
            Kind::Power(base, exponent) => self.power(*base, *exponent),
            Kind::Function(op, arguments) => self.function(*op, arguments),
            Kind::Range(range) => self.range(range),
        }
    }

    /// A sum; one huge number among small ones stays huge.
    fn sum(&mut self, items: &[Id]) -> Result<Complex, Stop> {
        let mut sum = Complex::from(Ball::ZERO);
        let mut huge = None;
        for item in items {
            match self.value(*item) {
                Ok(value) => sum = sum.plus(&value, self.context)?,
                Err(stop @ Stop::Huge { .. }) if huge.is_none_or(|other| other == stop) => huge = Some(stop),
                Err(Stop::Huge { .. }) => return Err(Stop::Fuel),
                Err(stop) => return Err(stop),
            }
        }
        match huge {
            None => Ok(sum),
            Some(stop) if sum.upper().top() < MOST_SMALL => Err(stop),
            Some(_) => Err(Stop::Fuel),
        }
    }

    /// A product; a huge number times others stays huge, if they are not nearly as small as that is large.
    fn product(&mut self, items: &[Id]) -> Result<Complex, Stop> {
        let mut product = Complex::from(Ball::integer(1));
        let mut huge: Option<bool> = None;
        for item in items {
            match self.value(*item) {
                Ok(value) => product = product.times(&value, self.context)?,
                Err(Stop::Huge { negative }) => huge = Some(huge.unwrap_or(false) != negative),
                Err(stop) => return Err(stop),
            }
        }
        let Some(negative) = huge else { return Ok(product) };
        let small = product.re.lower().is_some_and(|least| least.top() > -MOST_SMALL);
        match product.re.sign() {
            Some(sign) if sign != 0 && small && product.is_real() => {
                Err(Stop::Huge { negative: negative != (sign < 0) })
            }
            _ => Err(Stop::Fuel),
        }
    }

    fn power(&mut self, base: Id, exponent: Id) -> Result<Complex, Stop> {
        let context = self.context;
        if let Err(Stop::Huge { negative }) = self.value(base) {
            // (−huge)^n is left alone, and so are roots; 1/huge is as good as zero.
            return match self.exprs.as_integer(exponent) {
                Some(n) if *n > IBig::ZERO && !negative => Err(Stop::Huge { negative }),
                Some(n) if *n < IBig::ZERO => Ok(Ball::around_zero(Magnitude::new(1, -(1 << 39))).into()),
                _ => Err(Stop::Fuel),
            };
        }
        if let Err(Stop::Huge { negative }) = self.value(exponent) {
            let base = self.value(base)?;
            let above_one = base.is_real() && base.re.against(&Ball::dyadic(IBig::from(5), -2), context) == 1;
            return match negative {
                false if above_one => Err(Stop::Huge { negative: false }),
                true if above_one => Ok(Ball::around_zero(Magnitude::new(1, -(1 << 36))).into()),
                _ => Err(Stop::Fuel),
            };
        }
        if self.exprs.as_integer(exponent).is_some_and(|n| *n < IBig::ZERO) && self.is_pole(base)? {
            return Ok(Ball::ZERO.into());
        }
        if let Some(rational) = self.exprs.as_rational(exponent) {
            let base = self.value(base)?;
            return rational_power(&base, rational, context);
        }
        if matches!(self.exprs.kind(base), Kind::E) {
            return self.value(exponent)?.exp(context);
        }
        let (base, exponent) = (self.value(base)?, self.value(exponent)?);
        // An exponent that turns out to be an integer, such as a natural letter.
        if exponent.is_real()
            && exponent.re.radius().is_zero()
            && let Some(n) = exponent.re.floor().filter(|n| exact_integer(&exponent.re, n, context))
        {
            return rational_power(&base, &RBig::from(n), context);
        }
        if base.is_zero() {
            return if exponent.re.sign() == Some(1) { Ok(base) } else { Err(Stop::Undefined) };
        }
        base.ln(context)?.times(&exponent, context)?.exp(context)
    }

    /// Whether this is n! of a negative integer n, so that 1/n! is zero: C(n, n + 1) = 0.
    fn is_pole(&mut self, id: Id) -> Result<bool, Stop> {
        let Kind::Function(Op::Factorial, arguments) = self.exprs.kind(id) else { return Ok(false) };
        let n = self.value(arguments[0])?;
        Ok(integer(&n, self.context).is_some_and(|n| n < IBig::ZERO))
    }

    /// The logarithm of a positive product of powers, without the product.
    ///
    /// # Errors
    /// [`Stop::Fuel`] for anything else.
    pub(super) fn logarithm(&mut self, id: Id) -> Result<Ball, Stop> {
        let context = self.context;
        match self.exprs.kind(id) {
            Kind::Product(factors) => {
                let mut sum = Ball::ZERO;
                for factor in factors {
                    sum = sum.plus(&self.logarithm(*factor)?, context)?;
                }
                Ok(sum)
            }
            Kind::Power(base, exponent) => {
                let exponent = self.value(*exponent)?;
                let base = self.logarithm(*base)?;
                if exponent.is_real() { base.times(&exponent.re, context) } else { Err(Stop::Fuel) }
            }
            _ => {
                let value = self.value(id)?;
                if value.is_real() && value.re.sign() == Some(1) { value.re.ln(context) } else { Err(Stop::Fuel) }
            }
        }
    }

    /// A sum or product with integer bounds, up to [`MOST_TERMS`] terms.
    fn range(&mut self, range: &Range) -> Result<Complex, Stop> {
        let (from, to) = (self.value(range.from)?, self.value(range.to)?);
        let bound =
            |value: &Complex| integer(value, self.context).and_then(|n| i64::try_from(&n).ok()).ok_or(Stop::Undefined);
        let (from, to) = (bound(&from)?, bound(&to)?);
        if to.checked_sub(from).is_none_or(|count| count > MOST_TERMS) {
            return Err(Stop::Fuel);
        }
        let mut total = Complex::from(Ball::integer(i64::from(range.product)));
        for k in from..=to {
            let mut inner = Evaluator::new(self.exprs, self.point, self.context);
            self.context.fuel.spend(20)?;
            inner.fixed = self.fixed.clone();
            inner.bound = self.bound.clone();
            inner.bound.push((range.letter, k));
            let term = inner.value(range.body)?;
            self.reach = self.reach.max(inner.reach);
            self.real &= inner.real;
            total = if range.product { total.times(&term, self.context)? } else { total.plus(&term, self.context)? };
        }
        Ok(total)
    }

    fn function(&mut self, op: Op, arguments: &[Id]) -> Result<Complex, Stop> {
        let context = self.context;
        let mut values = Vec::with_capacity(arguments.len());
        for argument in arguments {
            values.push(self.value(*argument)?);
        }
        let [x, ..] = &values[..] else { return Err(Stop::Undefined) };
        let real = || if x.is_real() { Ok(&x.re) } else { Err(Stop::Undefined) };
        match op {
            Op::Sin => Ok(x.sin_cos(context)?.0),
            Op::Cos => Ok(x.sin_cos(context)?.1),
            Op::Ln => x.ln(context),
            Op::Arctan => Ok(real()?.arctan(context)?.into()),
            Op::Arcsin => Ok(arcsine(real()?, context)?.into()),
            Op::Arccos => {
                let quarter = Ball::pi(context)?.times(&Ball::dyadic(IBig::ONE, -1), context)?;
                Ok(quarter.minus(&arcsine(real()?, context)?, context)?.into())
            }
            Op::Abs => Ok(x.absolute(context)?.into()),
            Op::Floor => Ok(whole(&real()?.floor().ok_or(Stop::Imprecise)?, context)?.into()),
            Op::Ceil => {
                let floor = real()?.clone().negated().floor().ok_or(Stop::Imprecise)?;
                Ok(whole(&-floor, context)?.into())
            }
            Op::Sign => Ok(Ball::integer(i64::from(real()?.sign().ok_or(Stop::Imprecise)?)).into()),
            Op::Max | Op::Min => {
                let mut best = real()?.clone();
                for other in &values[1..] {
                    if !other.is_real() {
                        return Err(Stop::Undefined);
                    }
                    best = match (other.re.against(&best, context), op) {
                        (0, _) => meet(&best, &other.re),
                        (1, Op::Max) | (-1, Op::Min) => other.re.clone(),
                        _ => best,
                    };
                }
                Ok(best.into())
            }
            Op::Re => Ok(x.re.clone().into()),
            Op::Im => Ok(x.im.clone().into()),
            Op::Conj => Ok(x.clone().conjugate()),
            Op::Arg => Ok(x.argument(context)?.into()),
            Op::Gcd | Op::Lcm => {
                let numbers: Option<Vec<IBig>> = values.iter().map(|value| integer(value, context)).collect();
                let numbers = numbers.ok_or(Stop::Undefined)?;
                let value = common(op, &numbers).ok_or(Stop::Undefined)?;
                Ok(whole(&value, context)?.into())
            }
            Op::Factorial => Ok(factorial(x, 1, context)?.into()),
            Op::DoubleFactorial => Ok(factorial(x, 2, context)?.into()),
        }
    }
}
