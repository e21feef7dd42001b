//! Sums, products, quotients, powers and roots of balls.

use dashu_int::ops::{BitTest, UnsignedAbs};
use dashu_int::{IBig, UBig};

use super::super::fuel::Stop;
use super::{Ball, Context, Magnitude};

impl Ball {
    /// `-self`.
    #[must_use]
    pub fn negated(mut self) -> Self {
        self.mantissa = -self.mantissa;
        self
    }

    /// `self + other`.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn plus(&self, other: &Self, context: Context<'_>) -> Result<Self, Stop> {
        context.add_cost()?;
        let radius = self.radius + other.radius;
        if other.mantissa.is_zero() {
            return Self { radius, ..self.clone() }.rounded(context);
        }
        if self.mantissa.is_zero() {
            return Self { radius, ..other.clone() }.rounded(context);
        }
        // A summand below the last bit of the other counts as uncertainty, so that no shift is long.
        let far = context.bits as i64 + 16;
        let (large, small) = if self.top() >= other.top() { (self, other) } else { (other, self) };
        if large.exponent > small.exponent && large.top() - small.top() > far {
            let lost = Magnitude::above(&small.mantissa, small.exponent);
            return Self { radius: radius + lost, ..large.clone() }.rounded(context);
        }
        let (high, low) = if self.exponent >= other.exponent { (self, other) } else { (other, self) };
        let shift = (high.exponent - low.exponent) as usize;
        context.fuel.spend(shift as u64 / 128)?;
        let mantissa = (&high.mantissa << shift) + &low.mantissa;
        Self { mantissa, exponent: low.exponent, radius }.rounded(context)
    }

    /// `self - other`.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn minus(&self, other: &Self, context: Context<'_>) -> Result<Self, Stop> {
        self.plus(&other.clone().negated(), context)
    }

    /// `self · other`.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn times(&self, other: &Self, context: Context<'_>) -> Result<Self, Stop> {
        context.product_cost()?;
        if self.is_zero() || other.is_zero() {
            return Ok(Self::ZERO);
        }
        let radius = if self.radius.is_zero() && other.radius.is_zero() {
            Magnitude::ZERO
        } else {
            // |xy − ab| ≤ |a|·s + |b|·r + r·s for x within r of a and y within s of b.
            let (a, b) =
                (Magnitude::above(&self.mantissa, self.exponent), Magnitude::above(&other.mantissa, other.exponent));
            a * other.radius + b * self.radius + self.radius * other.radius
        };
        let mantissa = &self.mantissa * &other.mantissa;
        Self { mantissa, exponent: self.exponent + other.exponent, radius }.rounded(context)
    }

    /// `1 / self`.
    ///
    /// # Errors
    /// [`Stop::Undefined`] of zero, [`Stop::Imprecise`] of a ball with zero inside, [`Stop::Fuel`].
    pub fn inverse(&self, context: Context<'_>) -> Result<Self, Stop> {
        Self::integer(1).over(self, context)
    }

    /// `self / other`.
    ///
    /// # Errors
    /// [`Stop::Undefined`] by zero, [`Stop::Imprecise`] by a ball with zero inside, [`Stop::Fuel`].
    pub fn over(&self, other: &Self, context: Context<'_>) -> Result<Self, Stop> {
        context.product_cost()?;
        context.product_cost()?;
        if other.is_zero() {
            return Err(Stop::Undefined);
        }
        let least = other.lower().ok_or(Stop::Imprecise)?;
        if self.is_zero() {
            return Ok(Self::ZERO);
        }
        let shift = (context.bits + 2 + other.mantissa.bit_len()).saturating_sub(self.mantissa.bit_len());
        let mantissa = (&self.mantissa << shift) / &other.mantissa;
        let exponent = self.exponent - other.exponent - shift as i64;
        let mut radius = Magnitude::new(1, exponent);
        if !self.radius.is_zero() || !other.radius.is_zero() {
            // |x/y − a/b| ≤ (r + |a/b|·s) / |y| for x within r of a and y within s of b.
            let quotient = Magnitude::above(&mantissa, exponent) + radius;
            radius = radius + (self.radius + quotient * other.radius).over(least);
        }
        Self { mantissa, exponent, radius }.rounded(context)
    }

    /// `self^exponent` by squaring.
    ///
    /// # Errors
    /// As [`Ball::over`].
    pub fn power(&self, exponent: i64, context: Context<'_>) -> Result<Self, Stop> {
        // Each squaring doubles the relative error, so as many bits more as the exponent has.
        let guard = 64 - exponent.unsigned_abs().leading_zeros() as usize;
        let inner = Context { bits: context.bits + guard + 4, ..context };
        let mut result = Self::integer(1);
        for bit in (0..guard).rev() {
            result = result.times(&result, inner)?;
            if exponent.unsigned_abs() >> bit & 1 == 1 {
                result = result.times(self, inner)?;
            }
        }
        if exponent < 0 { result.inverse(context) } else { result.rounded(context) }
    }

    /// `√self` of a ball that is not negative; one with zero inside gives a ball around zero.
    ///
    /// # Errors
    /// [`Stop::Undefined`] of a negative ball, [`Stop::Fuel`].
    pub fn sqrt(&self, context: Context<'_>) -> Result<Self, Stop> {
        self.root(2, context)
    }

    /// The `degree`-th root of a ball that is not negative; one with zero inside gives a ball around zero.
    ///
    /// # Errors
    /// [`Stop::Undefined`] of a negative ball, [`Stop::Fuel`].
    pub fn root(&self, degree: u32, context: Context<'_>) -> Result<Self, Stop> {
        context.root_cost(degree)?;
        if self.is_zero() || degree == 0 {
            return Ok(Self::ZERO);
        }
        let Some(least) = self.lower() else {
            return Ok(Self::around_zero(self.upper().root(degree)));
        };
        if self.mantissa < IBig::ZERO {
            return Err(Stop::Undefined);
        }
        // The mantissa gets degree · bits bits and an exponent that the degree divides.
        let n = i64::from(degree);
        let wanted = context.bits * degree as usize + 2;
        let mut shift = wanted.saturating_sub(self.mantissa.bit_len()) as i64;
        shift += (self.exponent - shift).rem_euclid(n);
        let magnitude: UBig = (&self.mantissa << shift as usize).unsigned_abs();
        let root = magnitude.nth_root(degree as usize);
        let exponent = (self.exponent - shift).div_euclid(n);
        let mut radius = Magnitude::new(1, exponent);
        if !self.radius.is_zero() {
            // The derivative at the lower end bounds the slope: y^(1/n) / (n·y) ≤ root(upper) / least.
            let slope = (Magnitude::above(&IBig::from(root.clone()), exponent) + radius).over(least);
            radius = radius + slope * self.radius;
        }
        Self { mantissa: IBig::from(root), exponent, radius }.rounded(context)
    }
}
