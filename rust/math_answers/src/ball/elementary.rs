//! Elementary functions of balls: fixed-point series at the midpoint, plus what the radius can change.
//!
//! Every series works on integers scaled by `2^w` with `w` some guard bits above the precision; each truncation costs
//! at most one unit, counted in the comments, and the guard covers the count with room to spare.

use dashu_int::ops::{BitTest, UnsignedAbs};
use dashu_int::{IBig, UBig};

use super::super::fuel::Stop;
use super::constants::{self, MOST_BITS};
use super::{Ball, Context, Magnitude};

/// Arguments of exp, sin and cos beyond 2^64 are not reduced.
const MOST_REDUCED: i64 = 64;

impl Context<'_> {
    /// What pays for a series, fitted to exp at 96 to 1600 bits, where a unit is 10 ns; sin with cos, and arctan, take
    /// half as long again.
    fn series_cost(&self, halves: u64) -> Result<(), Stop> {
        let bits = self.bits as u64;
        self.fuel.spend(halves * (75 + bits / 2 + bits * bits / 2000))?;
        if self.bits + 160 > MOST_BITS { Err(Stop::Fuel) } else { Ok(()) }
    }
}

impl Ball {
    /// π.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn pi(context: Context<'_>) -> Result<Self, Stop> {
        context.fuel.spend(8)?;
        if context.bits + 160 > MOST_BITS {
            return Err(Stop::Fuel);
        }
        Ok(Self::fixed(constants::pi(context.bits + 8), context.bits + 8, 2))
    }

    /// The midpoint times `2^bits`, off by less than one.
    fn scaled(&self, bits: usize) -> IBig {
        let shift = self.exponent + bits as i64;
        if shift >= 0 {
            &self.mantissa << shift as usize
        } else if shift < -(1 << 32) {
            IBig::ZERO
        } else {
            &self.mantissa >> shift.unsigned_abs() as usize
        }
    }

    /// e^self.
    ///
    /// # Errors
    /// [`Stop::Huge`] for an argument over 2^41, [`Stop::Imprecise`] for a ball wider than 1.
    pub fn exp(&self, context: Context<'_>) -> Result<Self, Stop> {
        context.series_cost(2)?;
        if self.is_zero() {
            return Ok(Self::integer(1));
        }
        if self.top() > 41 {
            return match self.sign() {
                Some(1) => Err(Stop::Huge { negative: false }),
                // e^-(2^40) at most.
                Some(_) => Ok(Self::around_zero(Magnitude::new(1, -(1 << 40)))),
                None => Err(Stop::Imprecise),
            };
        }
        if self.radius.top() > 0 {
            return Err(Stop::Imprecise);
        }
        let halvings = 6 + context.bits.isqrt() / 3;
        // k·ln 2 below is off by |k| ≤ 2^42 units at most, and s halvings lose s bits: all of it in the guard.
        let w = context.bits + 64 + 2 * halvings;
        let x = self.scaled(w);
        let ln_2 = constants::ln_2(w);
        // The nearest integer; any other near one would do.
        let k = ((&x << 1) / &ln_2 + IBig::ONE) >> 1;
        let multiple = i64::try_from(&k).map_err(|_| Stop::Fuel)?;
        let rest = (x - k * ln_2) >> halvings;
        // Σ r^n / n!, |r| < 2^-6: the tail after a zero term is below one unit.
        let mut term = IBig::ONE << w;
        let mut sum = term.clone();
        let mut n = 1u32;
        loop {
            term = ((term * &rest) >> w) / IBig::from(n);
            if term.is_zero() || n > 4000 || term == IBig::NEG_ONE {
                break;
            }
            sum += &term;
            n += 1;
        }
        for _ in 0..halvings {
            sum = (&sum * &sum) >> w;
        }
        // The reduced argument is off by 2^43 units before the halvings; the series by 2n units, the squarings double
        // that each time (times at most 2 in all, for e^|r|) and add one: < 2^(halvings + 4)·(2n + 2) + 2^45 < 2^(halvings + 50).
        let error = Magnitude::new(1, halvings as i64 + 50 - w as i64);
        let value = Self { mantissa: sum, exponent: multiple - w as i64, radius: error.times_power(multiple) };
        // e^(x+d) − e^x is at most e^x·2|d| for |d| ≤ 1.
        let spread = value.upper() * self.radius * Magnitude::new(2, 0);
        value.widened(spread).rounded(context)
    }

    /// ln self.
    ///
    /// # Errors
    /// [`Stop::Undefined`] of zero or less, [`Stop::Imprecise`] of a ball with zero inside.
    pub fn ln(&self, context: Context<'_>) -> Result<Self, Stop> {
        context.series_cost(2)?;
        if self.is_zero() {
            return Err(Stop::Undefined);
        }
        let least = self.lower().ok_or(Stop::Imprecise)?;
        if self.mantissa < IBig::ZERO {
            return Err(Stop::Undefined);
        }
        let roots = 6 + context.bits.isqrt() / 3;
        let w = context.bits + 24 + 2 * roots;
        // self = m · 2^e with m in [2/3, 4/3), so that nothing cancels near 1.
        let mut e = self.top();
        let mut m = Self { exponent: self.exponent - e, ..self.clone() }.scaled(w);
        if &m * IBig::from(3) < IBig::ONE << (w + 1) {
            (m, e) = (m << 1, e - 1);
        }
        // Each root halves the error and adds one unit: off by less than two units after them.
        for _ in 0..roots {
            m = IBig::from(UBig::nth_root(&(m << w).unsigned_abs(), 2));
        }
        // ln m = 2 artanh z, z = (m − 1)/(m + 1), |z| < 2^-roots.
        let one = IBig::ONE << w;
        let z = ((&m - &one) << w) / (&m + &one);
        let square = (&z * &z) >> w;
        let mut power = z;
        let mut sum = IBig::ZERO;
        let mut odd = 1u32;
        while !power.is_zero() && power != IBig::NEG_ONE && odd < 8000 {
            sum += &power / IBig::from(odd);
            power = (power * &square) >> w;
            odd += 2;
        }
        // z is off by 4 units, each of the terms by 2: times 2^(roots + 1) below.
        let ulps = (u64::from(odd) + 8) << (roots + 1);
        let mantissa = (sum << (roots + 1)) + constants::ln_2(w) * IBig::from(e);
        // e·ln 2 is off by |e| units.
        let value = Self::fixed(mantissa, w, ulps + e.unsigned_abs());
        // ln(x+d) − ln x is at most |d| / min(x, x+d).
        value.widened(self.radius.over(least)).rounded(context)
    }

    /// sin and cos of self.
    ///
    /// # Errors
    /// [`Stop::Fuel`] for an argument over 2^64.
    pub fn sin_cos(&self, context: Context<'_>) -> Result<(Self, Self), Stop> {
        context.series_cost(3)?;
        if self.is_zero() {
            return Ok((Self::ZERO, Self::integer(1)));
        }
        if self.top() > MOST_REDUCED {
            return Err(Stop::Fuel);
        }
        if self.radius.top() > 2 {
            let unit = Self::around_zero(Magnitude::new(1, 0));
            return Ok((unit.clone(), unit));
        }
        // A tiny argument needs as many more bits as it has leading zeros, for a small relative error of the sine.
        let zeros = (-self.top()).clamp(0, 256) as usize;
        let halvings = if zeros > 8 { 0 } else { 4 + context.bits.isqrt() / 4 };
        let w = (context.bits + zeros + 24 + 3 * halvings + self.top().max(0) as usize).min(MOST_BITS);
        let x = self.scaled(w);
        let half_pi = constants::pi(w) >> 1;
        let k = ((&x << 1) / &half_pi + IBig::ONE) >> 1;
        let quadrant = i64::try_from(&(&k & IBig::from(3))).unwrap_or(0);
        let mut rest = (x - &k * half_pi) >> halvings;
        // Both series alternate, with |rest| < 1.6: under two units for each term.
        let square = (&rest * &rest) >> w;
        let (mut sine, mut cosine) = (IBig::ZERO, IBig::ZERO);
        let mut even = IBig::ONE << w;
        let mut n = 1u32;
        while (!even.is_zero() && even != IBig::NEG_ONE || !rest.is_zero() && rest != IBig::NEG_ONE) && n < 4000 {
            cosine += &even;
            sine += &rest;
            even = -((even * &square) >> w) / IBig::from(n * (n + 1));
            rest = -((rest * &square) >> w) / IBig::from((n + 1) * (n + 2));
            n += 2;
        }
        for _ in 0..halvings {
            let twice = (&sine * &cosine) >> (w - 1);
            cosine = (&cosine * &cosine - &sine * &sine) >> w;
            sine = twice;
        }
        // A doubling multiplies the error by at most 2(|s| + |c|) < 3, below 4, and adds two units; k·π/2 is off by |k|
        // units, which the bits for the top of the argument hold.
        let bits_of_k = k.bit_len() as i64;
        let ulps = Magnitude::new(u64::from(n) * 2 + 8, 2 * halvings as i64 - w as i64)
            + Magnitude::new(1, bits_of_k + 1 - w as i64);
        let exponent = -(w as i64);
        let sine = Self { mantissa: sine, exponent, radius: ulps };
        let cosine = Self { mantissa: cosine, exponent, radius: ulps };
        let (sine, cosine) = match quadrant {
            0 => (sine, cosine),
            1 => (cosine, sine.negated()),
            2 => (sine.negated(), cosine.negated()),
            _ => (cosine.negated(), sine),
        };
        // Neither slope is over 1.
        Ok((sine.widened(self.radius).rounded(context)?, cosine.widened(self.radius).rounded(context)?))
    }

    /// arctan self.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn arctan(&self, context: Context<'_>) -> Result<Self, Stop> {
        context.series_cost(3)?;
        if self.is_zero() {
            return Ok(Self::ZERO);
        }
        let zeros = (-self.top()).clamp(0, 256) as usize;
        let halvings = if zeros > 8 { 0 } else { 6 + context.bits.isqrt() / 3 };
        let w = (context.bits + zeros + 24 + 2 * halvings).min(MOST_BITS);
        let one = IBig::ONE << w;
        let large = self.top() > 0;
        // For |x| > 1/2: arctan x = ±π/2 − arctan 1/x.
        let mut x = if large {
            let shift = w as i64 - self.exponent;
            if shift < 0 { IBig::ZERO } else { (IBig::ONE << (shift as usize)) / &self.mantissa }
        } else {
            self.scaled(w)
        };
        // tan(θ/2) = t / (1 + √(1 + t²)): each halves the error and adds under three units.
        for _ in 0..halvings {
            let square = (&x * &x) >> w;
            let root = IBig::from(UBig::nth_root(&((&one + square) << w).unsigned_abs(), 2));
            x = (x << w) / (&one + root);
        }
        let square = (&x * &x) >> w;
        let mut power = x;
        let mut sum = IBig::ZERO;
        let mut odd = 1i32;
        while !power.is_zero() && power != IBig::NEG_ONE && odd < 8000 {
            sum += &power / IBig::from(odd);
            power = -((power * &square) >> w);
            odd += 2;
        }
        sum <<= halvings;
        let ulps = (u64::from(odd.unsigned_abs()) * 2 + 16) << halvings;
        if large {
            let half_pi = constants::pi(w) >> 1;
            sum = if self.mantissa < IBig::ZERO { -half_pi - sum } else { half_pi - sum };
        }
        // The slope is at most 1.
        Self::fixed(sum, w, ulps + 2).widened(self.radius).rounded(context)
    }
}

impl Magnitude {
    /// `self · 2^shift`.
    fn times_power(self, shift: i64) -> Self {
        self * Self::new(1, shift)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with;
    use super::*;

    const ARGUMENTS: [f64; 14] = [0.0, 0.25, -0.25, 0.499, 0.75, 1.0, -1.0, 1.5, 2.0, 3.0, -7.25, 100.0, 1e-9, -1e-30];

    fn ball(value: f64) -> Ball {
        // A float is dyadic: 80 bits below the point hold each of the arguments but the last two, which are cut.
        let (mut mantissa, mut exponent) = (value, 0);
        while mantissa.fract() != 0.0 {
            mantissa *= 2.0;
            exponent -= 1;
        }
        Ball::dyadic(IBig::from(mantissa as i128), exponent)
    }

    /// What a function gives at one precision lies within what it gives at another.
    fn agree(name: &str, f: impl Fn(&Ball, Context<'_>) -> Result<Ball, Stop>) {
        for value in ARGUMENTS {
            let x = ball(value);
            let results: Vec<Option<Ball>> =
                [64, 128, 256, 512, 1024].into_iter().map(|bits| with(bits, |context| f(&x, context).ok())).collect();
            for (low, high) in results.iter().zip(&results[1..]) {
                let (Some(low), Some(high)) = (low, high) else { continue };
                with(2000, |context| {
                    let gap = low.minus(high, context).unwrap();
                    assert!(gap.contains_zero(), "{name}({value})");
                });
            }
            if let Some(best) = &results[2] {
                assert!(best.radius().top() < best.top().max(-40) - 240, "{name}({value}) is wide");
            }
        }
    }

    #[test]
    fn precisions_agree() {
        agree("exp", Ball::exp);
        agree("ln", Ball::ln);
        agree("sin", |x, context| Ok(x.sin_cos(context)?.0));
        agree("cos", |x, context| Ok(x.sin_cos(context)?.1));
        agree("arctan", Ball::arctan);
    }

    #[test]
    fn floats_agree() {
        with(128, |context| {
            for value in ARGUMENTS {
                let x = ball(value);
                let (sine, cosine) = x.sin_cos(context).unwrap();
                for (ours, theirs) in [
                    (x.exp(context), value.exp()),
                    (Ok(sine), value.sin()),
                    (Ok(cosine), value.cos()),
                    (x.arctan(context), value.atan()),
                    (x.ln(context), value.ln()),
                ] {
                    let Ok(ours) = ours else { continue };
                    assert!(
                        (ours.approximate() - theirs).abs() <= 1e-14 * theirs.abs().max(1e-20),
                        "{value}: {theirs}"
                    );
                }
            }
        });
    }

    #[test]
    fn identities_hold_in_balls() {
        for bits in [128, 512] {
            with(bits, |context| {
                for value in ARGUMENTS {
                    let x = ball(value);
                    let (s, c) = x.sin_cos(context).unwrap();
                    let one = s.times(&s, context).unwrap().plus(&c.times(&c, context).unwrap(), context).unwrap();
                    assert!(one.minus(&Ball::integer(1), context).unwrap().contains_zero());
                    let back = x.exp(context).unwrap().ln(context).unwrap().minus(&x, context).unwrap();
                    assert!(back.contains_zero() && back.upper().top() < 16 - bits as i64, "{value}");
                }
                let pi = Ball::integer(1).arctan(context).unwrap().times(&Ball::integer(4), context).unwrap();
                let gap = pi.minus(&Ball::pi(context).unwrap(), context).unwrap();
                assert!(gap.contains_zero() && gap.upper().top() < 8 - bits as i64);
            });
        }
    }

    #[test]
    fn uncertain_arguments_widen() {
        with(128, |context| {
            for value in [0.3, 1.7, 40.0] {
                let radius = Magnitude::new(1, -8);
                let x = ball(value).widened(radius);
                for end in [value - 1.0 / 256.0, value + 1.0 / 256.0] {
                    let (s, c) = x.sin_cos(context).unwrap();
                    for (result, exact) in [
                        (x.exp(context).unwrap(), end.exp()),
                        (x.ln(context).unwrap(), end.ln()),
                        (x.arctan(context).unwrap(), end.atan()),
                        (s, end.sin()),
                        (c, end.cos()),
                    ] {
                        let gap = (result.approximate() - exact).abs();
                        assert!(gap <= result.radius().approximate() * 1.000_001, "{value}: {exact}");
                    }
                }
            }
        });
    }
}
