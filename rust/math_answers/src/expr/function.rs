//! Functions: exact where the argument allows, else by others, else an atom of the argument.

use dashu_int::IBig;
use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

use super::super::fuel::{Fuel, Stop};
use super::super::modular::{Residue, mix};
use super::exact::{exact, product_down};
use super::factor::factors_of;
use super::op::Op;
use super::{Class, Exprs, Id, Kind, MOST_BITS};

impl Exprs {
    /// `op(arguments)`.
    ///
    /// # Errors
    /// [`Stop::Undefined`], [`Stop::Fuel`]
    pub fn function(&mut self, op: Op, arguments: &[Id], fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(20)?;
        let numbers: Option<Vec<RBig>> = arguments.iter().map(|id| self.as_rational(*id).cloned()).collect();
        if let Some(numbers) = numbers
            && let Some(value) = exact(op, &numbers, fuel)?
        {
            return self.rational(value, fuel);
        }
        let &[argument, ..] = arguments else { return Err(Stop::Undefined) };
        match op {
            Op::Sin | Op::Cos => {
                if let Some(turn) = self.as_multiple_of_pi(argument) {
                    let turn = if op == Op::Cos { turn + half() } else { turn };
                    return self.sine_of_turn(turn, fuel);
                }
            }
            Op::Ln => return self.logarithm(argument, fuel),
            Op::Re | Op::Conj if self.is_real(argument) => return Ok(argument),
            Op::Im if self.is_real(argument) => return self.integer(0, fuel),
            _ => {}
        }
        self.atom(op, arguments, fuel)
    }

    fn atom(&mut self, op: Op, arguments: &[Id], fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(20)?;
        let keys = arguments.iter().map(|id| self.residue(*id));
        let key = match op {
            // What the order of the arguments does not change; |x| depends on x² only.
            Op::Max | Op::Min | Op::Gcd | Op::Lcm => keys.fold(0u64, |key, residue| key.wrapping_add(residue.key())),
            Op::Abs => keys.fold(0, |key, residue| mix(key, (residue * residue).key())),
            _ => keys.fold(0, |key, residue| mix(key, residue.key())),
        };
        let mut class = arguments.iter().fold(Class::ATOM, |class, id| class | self.class(*id));
        let algebraic = matches!(op, Op::Abs | Op::Re | Op::Im | Op::Conj);
        if !algebraic {
            class = class | Class::TRANSCENDENTAL;
        }
        if matches!(op, Op::Factorial | Op::DoubleFactorial | Op::Gcd | Op::Lcm) && class.has(Class::SYMBOL) {
            class = class | Class::INTEGER;
        }
        // arcsin sin x and arctan(1/x) have branches, arcsin 2x has none.
        let smooth = match op {
            Op::Sin | Op::Cos | Op::Factorial => true,
            Op::Arcsin | Op::Arccos | Op::Arctan => arguments.iter().all(|id| self.is_multiple_of_letter(*id)),
            _ => false,
        };
        if !smooth && class.has(Class::SYMBOL) {
            class = class | Class::PIECEWISE;
        }
        let rational = arguments.iter().all(|id| self.as_rational(*id).is_some());
        if !(rational || matches!(op, Op::Sin | Op::Cos | Op::Abs | Op::Conj)) || matches!(op, Op::Arcsin | Op::Arccos)
        {
            class = class | Class::PARTIAL;
        }
        let size = arguments.iter().fold(4u32, |size, id| size.saturating_add(self.size(*id)));
        self.push(Kind::Function(op, arguments.to_vec()), Residue::draw(mix(key, op as u64 + 77)), class, size)
    }

    fn is_multiple_of_letter(&self, id: Id) -> bool {
        match self.kind(id) {
            Kind::Rational(_) | Kind::Symbol(_) => true,
            Kind::Product(items) => {
                items.iter().filter(|item| self.as_rational(**item).is_none()).count() == 1
                    && items.iter().all(|item| self.is_multiple_of_letter(*item))
            }
            _ => false,
        }
    }

    /// Whether the value is real for real letters, by its form alone; a radical of a letter is not.
    #[must_use]
    pub fn is_real(&self, id: Id) -> bool {
        self.nodes[id.0 as usize].real
    }

    /// What [`Exprs::is_real`] says of a node whose operands are known.
    pub(super) fn real_by_form(&self, kind: &Kind) -> bool {
        match kind {
            Kind::Rational(_) | Kind::Pi | Kind::E | Kind::Symbol(_) => true,
            Kind::I => false,
            Kind::Range(range) => self.is_real(range.body),
            Kind::Sum(items) | Kind::Product(items) => items.iter().all(|id| self.is_real(*id)),
            Kind::Power(base, exponent) => {
                self.is_real(*base)
                    && self.is_real(*exponent)
                    && (self.is_positive_constant(*base) || self.as_integer(*exponent).is_some())
            }
            Kind::Function(op, items) => {
                matches!(op, Op::Abs | Op::Re | Op::Im | Op::Arg | Op::Floor | Op::Ceil)
                    || matches!(op, Op::Sin | Op::Cos | Op::Arctan | Op::Factorial | Op::Max | Op::Min)
                        && items.iter().all(|id| self.is_real(*id))
            }
        }
    }

    /// Whether it is not zero, or has no value, by its form: powers and products of what is not zero.
    pub(super) fn is_never_zero(&self, id: Id) -> bool {
        match self.kind(id) {
            Kind::Rational(value) => !value.is_zero(),
            Kind::Pi | Kind::E | Kind::I | Kind::Function(Op::Factorial | Op::DoubleFactorial, _) => true,
            Kind::Product(items) => items.iter().all(|item| self.is_never_zero(*item)),
            Kind::Power(base, _) => self.is_never_zero(*base),
            _ => false,
        }
    }

    /// The rational c of cπ.
    pub fn as_multiple_of_pi(&self, id: Id) -> Option<RBig> {
        match self.kind(id) {
            Kind::Rational(value) if value.is_zero() => Some(RBig::ZERO),
            Kind::Pi => Some(RBig::ONE),
            Kind::Product(factors) => {
                let mut coefficient = RBig::ONE;
                let mut pis = 0;
                for factor in factors {
                    match self.kind(*factor) {
                        Kind::Rational(value) => coefficient *= value,
                        Kind::Pi => pis += 1,
                        _ => return None,
                    }
                }
                (pis == 1).then_some(coefficient)
            }
            _ => None,
        }
    }

    /// sin cπ, by the symmetries an angle in the first quadrant, and by the table a radical where there is one.
    fn sine_of_turn(&mut self, turn: RBig, fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(60 + turn.numerator().bit_len() as u64 / 16)?;
        let two = RBig::from(2);
        let mut turn = &turn - &two * RBig::from((&turn / &two).floor());
        let mut negative = false;
        if turn >= RBig::ONE {
            (turn, negative) = (turn - RBig::ONE, true);
        }
        if turn > half() {
            turn = RBig::ONE - turn;
        }
        let small = u32::try_from(turn.denominator()).ok();
        let value = match small {
            Some(1) => self.integer(0, fuel)?,
            Some(2) => self.integer(1, fuel)?,
            Some(6) => self.rational(half(), fuel)?,
            Some(4) => self.half_root(2, fuel)?,
            Some(3) => self.half_root(3, fuel)?,
            _ => {
                let pi = self.pi()?;
                let turn = self.rational(turn, fuel)?;
                let angle = self.product(&[turn, pi], fuel)?;
                let size = self.size(angle);
                // A sine of a rational multiple of π is algebraic.
                let key = mix(self.residue(angle).key(), Op::Sin as u64 + 77);
                self.push(Kind::Function(Op::Sin, vec![angle]), Residue::draw(key), Class::ATOM, size + 4)?
            }
        };
        if negative { self.negated(value, fuel) } else { Ok(value) }
    }

    fn half_root(&mut self, radicand: i64, fuel: &Fuel) -> Result<Id, Stop> {
        let radicand = self.integer(radicand, fuel)?;
        let exponent = self.rational(half(), fuel)?;
        let root = self.power(radicand, exponent, fuel)?;
        let half = self.rational(half(), fuel)?;
        self.product(&[half, root], fuel)
    }

    fn logarithm(&mut self, argument: Id, fuel: &Fuel) -> Result<Id, Stop> {
        if self.residue(argument) == Residue::ZERO {
            return Err(Stop::Undefined);
        }
        match self.kind(argument).clone() {
            Kind::E => self.integer(1, fuel),
            Kind::Rational(value) if value < RBig::ZERO => {
                let opposite = self.rational(-value, fuel)?;
                let real = self.logarithm(opposite, fuel)?;
                let (i, pi) = (self.i()?, self.pi()?);
                let turn = self.product(&[i, pi], fuel)?;
                self.sum(&[real, turn], fuel)
            }
            Kind::Rational(value) if value.is_one() => self.integer(0, fuel),
            Kind::Rational(value) => {
                let Some(factors) = factors_of(&value, fuel)? else { return self.atom(Op::Ln, &[argument], fuel) };
                let mut terms = Vec::with_capacity(factors.len());
                for (prime, times) in factors {
                    let prime = self.rational(RBig::from(prime), fuel)?;
                    let log = self.atom(Op::Ln, &[prime], fuel)?;
                    let times = self.integer(times, fuel)?;
                    terms.push(self.product(&[times, log], fuel)?);
                }
                self.sum(&terms, fuel)
            }
            // ln b^r = r·ln b for b > 0 and real r.
            Kind::Power(base, exponent) if self.is_positive_constant(base) && self.is_real(exponent) => {
                let log = self.logarithm(base, fuel)?;
                self.product(&[exponent, log], fuel)
            }
            // ln cx = ln c + ln x for c > 0.
            Kind::Product(factors) => {
                let positive = |id: &Id| self.is_positive_power(*id);
                let (constants, rest): (Vec<Id>, Vec<Id>) = factors.iter().partition(|id| positive(id));
                if constants.is_empty() || rest.len() > 1 && constants.len() == factors.len() {
                    return self.atom(Op::Ln, &[argument], fuel);
                }
                let mut terms = Vec::with_capacity(constants.len() + 1);
                for constant in constants {
                    terms.push(self.logarithm(constant, fuel)?);
                }
                if !rest.is_empty() {
                    let rest = self.product(&rest, fuel)?;
                    terms.push(self.logarithm(rest, fuel)?);
                }
                self.sum(&terms, fuel)
            }
            _ => self.atom(Op::Ln, &[argument], fuel),
        }
    }

    fn is_positive_power(&self, id: Id) -> bool {
        match self.kind(id) {
            Kind::Power(base, exponent) => self.is_positive_constant(*base) && self.as_rational(*exponent).is_some(),
            _ => self.is_positive_constant(id),
        }
    }

    /// `n! / (k! (n − k)!)`.
    ///
    /// # Errors
    /// [`Stop::Undefined`], [`Stop::Fuel`]
    pub fn binomial(&mut self, n: Id, k: Id, fuel: &Fuel) -> Result<Id, Stop> {
        if let Some(value) = self.exact_binomial(n, k, fuel)? {
            return self.rational(value, fuel);
        }
        let falling = self.falling(n, k, fuel)?;
        if let Some(falling) = falling {
            let factorial = self.function(Op::Factorial, &[k], fuel)?;
            return self.quotient(falling, factorial, fuel);
        }
        if let (Some(whole), Some(part)) = (self.as_integer(n).cloned(), self.as_integer(k).cloned()) {
            if whole < IBig::ZERO {
                return Err(Stop::Fuel);
            }
            if part < IBig::ZERO || part > whole {
                return self.integer(0, fuel);
            }
            // C(n, k) = C(n, n − k), so that both spellings are one expression.
            let other = &whole - &part;
            if other < part {
                let other = self.rational(RBig::from(other), fuel)?;
                return self.binomial(n, other, fuel);
            }
        }
        let arrangements = self.permutations(n, k, fuel)?;
        let factorial = self.function(Op::Factorial, &[k], fuel)?;
        self.quotient(arrangements, factorial, fuel)
    }

    /// The value of C(n, k) of whole numbers, where it is not too long.
    fn exact_binomial(&self, n: Id, k: Id, fuel: &Fuel) -> Result<Option<RBig>, Stop> {
        let small = |id: Id| self.as_integer(id).and_then(|value| u32::try_from(value).ok());
        let (Some(n), Some(k)) = (small(n), small(k)) else { return Ok(None) };
        if k > n {
            return Ok(None);
        }
        let k = k.min(n - k);
        let bits = (n.max(1).ilog2() as usize + 1) * k as usize;
        if bits > MOST_BITS {
            return Ok(None);
        }
        let top = product_down(n, k, 1, fuel)?;
        let bottom = product_down(k, k, 1, fuel)?;
        fuel.spend(4 + Fuel::product(bits, bits))?;
        Ok(Some(RBig::from(top / bottom)))
    }

    /// `n! / (n − k)!`.
    ///
    /// # Errors
    /// [`Stop::Undefined`], [`Stop::Fuel`]
    pub fn permutations(&mut self, n: Id, k: Id, fuel: &Fuel) -> Result<Id, Stop> {
        if let Some(falling) = self.falling(n, k, fuel)? {
            return Ok(falling);
        }
        let rest = self.difference(n, k, fuel)?;
        let top = self.function(Op::Factorial, &[n], fuel)?;
        let bottom = self.function(Op::Factorial, &[rest], fuel)?;
        self.quotient(top, bottom, fuel)
    }

    /// `n (n − 1) … (n − k + 1)` for a small k.
    fn falling(&mut self, n: Id, k: Id, fuel: &Fuel) -> Result<Option<Id>, Stop> {
        let Some(k) = self.as_integer(k).and_then(|k| u32::try_from(k).ok()) else { return Ok(None) };
        if let Some(n) = self.as_rational(n) {
            let bits = n.numerator().bit_len() + n.denominator().bit_len();
            if bits * k as usize > MOST_BITS {
                return Ok(None);
            }
            let (n, mut product) = (n.clone(), RBig::ONE);
            for step in 0..k {
                fuel.spend(20 + 3 * (product.numerator().bit_len() / 64) as u64)?;
                product *= &n - RBig::from(step);
            }
            return self.rational(product, fuel).map(Some);
        }
        if k > 64 {
            return Ok(None);
        }
        let mut factors = Vec::with_capacity(k as usize);
        for step in 0..k {
            let step = self.integer(-i64::from(step), fuel)?;
            factors.push(self.sum(&[n, step], fuel)?);
        }
        self.product(&factors, fuel).map(Some)
    }
}

fn half() -> RBig {
    RBig::from_parts_signed(IBig::ONE, IBig::from(2))
}
