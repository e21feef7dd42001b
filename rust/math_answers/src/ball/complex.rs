//! Complex balls: a rectangle of two real balls. A value without imaginary part has exactly zero there.

use dashu_int::IBig;

use super::super::fuel::Stop;
use super::{Ball, Context, Magnitude};

/// A complex number within a rectangle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complex {
    /// The real part.
    pub re: Ball,
    /// The imaginary part.
    pub im: Ball,
}

impl From<Ball> for Complex {
    fn from(re: Ball) -> Self {
        Self { re, im: Ball::ZERO }
    }
}

impl Complex {
    /// i.
    #[must_use]
    pub fn i() -> Self {
        Self { re: Ball::ZERO, im: Ball::integer(1) }
    }

    /// Whether the imaginary part is exactly zero.
    #[must_use]
    pub fn is_real(&self) -> bool {
        self.im.is_zero()
    }

    /// Exactly zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.re.is_zero() && self.im.is_zero()
    }

    /// Whether zero is inside.
    #[must_use]
    pub fn contains_zero(&self) -> bool {
        self.re.contains_zero() && self.im.contains_zero()
    }

    /// An upper bound of the absolute value.
    #[must_use]
    pub fn upper(&self) -> Magnitude {
        self.re.upper() + self.im.upper()
    }

    /// `-self`.
    #[must_use]
    pub fn negated(self) -> Self {
        Self { re: self.re.negated(), im: self.im.negated() }
    }

    /// The conjugate.
    #[must_use]
    pub fn conjugate(self) -> Self {
        Self { re: self.re, im: self.im.negated() }
    }

    /// `self + other`.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn plus(&self, other: &Self, context: Context<'_>) -> Result<Self, Stop> {
        Ok(Self { re: self.re.plus(&other.re, context)?, im: self.im.plus(&other.im, context)? })
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
        if self.is_real() && other.is_real() {
            return Ok(self.re.times(&other.re, context)?.into());
        }
        let re = self.re.times(&other.re, context)?.minus(&self.im.times(&other.im, context)?, context)?;
        let im = self.re.times(&other.im, context)?.plus(&self.im.times(&other.re, context)?, context)?;
        Ok(Self { re, im })
    }

    /// `1 / self`.
    ///
    /// # Errors
    /// [`Stop::Undefined`] of zero, [`Stop::Imprecise`] of a ball with zero inside, [`Stop::Fuel`].
    pub fn inverse(&self, context: Context<'_>) -> Result<Self, Stop> {
        if self.is_real() {
            return Ok(self.re.inverse(context)?.into());
        }
        let square = self.norm(context)?;
        Ok(Self { re: self.re.over(&square, context)?, im: self.im.clone().negated().over(&square, context)? })
    }

    /// `self / other`.
    ///
    /// # Errors
    /// As [`Complex::inverse`].
    pub fn over(&self, other: &Self, context: Context<'_>) -> Result<Self, Stop> {
        if self.is_real() && other.is_real() {
            return Ok(self.re.over(&other.re, context)?.into());
        }
        self.times(&other.inverse(context)?, context)
    }

    /// |self|².
    fn norm(&self, context: Context<'_>) -> Result<Ball, Stop> {
        self.re.times(&self.re, context)?.plus(&self.im.times(&self.im, context)?, context)
    }

    /// |self|.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn absolute(&self, context: Context<'_>) -> Result<Ball, Stop> {
        if self.is_real() {
            return Ok(match self.re.sign() {
                Some(-1) => self.re.clone().negated(),
                Some(_) => self.re.clone(),
                None => Ball::around_zero(self.re.upper()),
            });
        }
        if self.re.is_zero() {
            return Self::from(self.im.clone()).absolute(context);
        }
        // A sum of squares is not negative, whatever its ball says.
        let norm = self.norm(context)?;
        if norm.lower().is_none() { Ok(Ball::around_zero(norm.upper().root(2))) } else { norm.sqrt(context) }
    }

    /// `self^exponent` by squaring.
    ///
    /// # Errors
    /// As [`Complex::inverse`].
    pub fn power(&self, exponent: i64, context: Context<'_>) -> Result<Self, Stop> {
        if self.is_real() {
            return Ok(self.re.power(exponent, context)?.into());
        }
        let length = 64 - exponent.unsigned_abs().leading_zeros() as usize;
        let inner = Context { bits: context.bits + 2 * length + 4, ..context };
        let mut result = Self::from(Ball::integer(1));
        for bit in (0..length).rev() {
            result = result.times(&result, inner)?;
            if exponent.unsigned_abs() >> bit & 1 == 1 {
                result = result.times(self, inner)?;
            }
        }
        if exponent < 0 { result.inverse(context) } else { Ok(result) }
    }

    /// The principal square root.
    ///
    /// # Errors
    /// [`Stop::Imprecise`] where the ball meets the branch cut, the negative axis.
    pub fn sqrt(&self, context: Context<'_>) -> Result<Self, Stop> {
        if self.is_real() {
            return Ok(match self.re.sign() {
                Some(-1) => Self { re: Ball::ZERO, im: self.re.clone().negated().sqrt(context)? },
                Some(_) => self.re.sqrt(context)?.into(),
                None => {
                    let around = Ball::around_zero(self.re.upper().root(2));
                    Self { re: around.clone(), im: around }
                }
            });
        }
        let size = self.absolute(context)?;
        let two = Ball::integer(2);
        if self.re.sign() == Some(-1) {
            // √z = b / 2t + i·t with t = ±√((|z| − a) / 2), the sign of b.
            let sign = self.im.sign().ok_or(Stop::Imprecise)?;
            let t = size.minus(&self.re, context)?.over(&two, context)?.sqrt(context)?;
            let t = if sign < 0 { t.negated() } else { t };
            let re = self.im.over(&t.times(&two, context)?, context)?;
            return Ok(Self { re, im: t });
        }
        let t = size.plus(&self.re, context)?.over(&two, context)?;
        if t.lower().is_none() {
            let around = Ball::around_zero(self.upper().root(2));
            return Ok(Self { re: around.clone(), im: around });
        }
        let t = t.sqrt(context)?;
        let im = self.im.over(&t.times(&two, context)?, context)?;
        Ok(Self { re: t, im })
    }

    /// The argument in (−π, π].
    ///
    /// # Errors
    /// [`Stop::Undefined`] of zero, [`Stop::Imprecise`] where the ball meets the branch cut.
    pub fn argument(&self, context: Context<'_>) -> Result<Ball, Stop> {
        if self.is_zero() {
            return Err(Stop::Undefined);
        }
        let quarter = || Ball::pi(context)?.over(&Ball::integer(2), context);
        // Which half-plane is certain decides the formula; each is continuous there.
        if self.re.sign() == Some(1) {
            return self.im.over(&self.re, context)?.arctan(context);
        }
        match self.im.sign() {
            Some(0) if self.re.sign() == Some(-1) => Ball::pi(context),
            Some(1) => quarter()?.minus(&self.re.over(&self.im, context)?.arctan(context)?, context),
            Some(-1) => quarter()?.negated().minus(&self.re.over(&self.im, context)?.arctan(context)?, context),
            _ => Err(Stop::Imprecise),
        }
    }

    /// The principal logarithm.
    ///
    /// # Errors
    /// As [`Complex::argument`].
    pub fn ln(&self, context: Context<'_>) -> Result<Self, Stop> {
        if self.is_real() && self.re.sign() == Some(1) {
            return Ok(self.re.ln(context)?.into());
        }
        let im = self.argument(context)?;
        Ok(Self { re: self.absolute(context)?.ln(context)?, im })
    }

    /// e^self.
    ///
    /// # Errors
    /// As [`Ball::exp`].
    pub fn exp(&self, context: Context<'_>) -> Result<Self, Stop> {
        let size = self.re.exp(context)?;
        if self.is_real() {
            return Ok(size.into());
        }
        let (sine, cosine) = self.im.sin_cos(context)?;
        Ok(Self { re: size.times(&cosine, context)?, im: size.times(&sine, context)? })
    }

    /// sin and cos of self.
    ///
    /// # Errors
    /// As [`Ball::exp`] and [`Ball::sin_cos`].
    pub fn sin_cos(&self, context: Context<'_>) -> Result<(Self, Self), Stop> {
        let (sine, cosine) = self.re.sin_cos(context)?;
        if self.is_real() {
            return Ok((sine.into(), cosine.into()));
        }
        // sin(a + bi) = sin a cosh b + i cos a sinh b; cos(a + bi) = cos a cosh b − i sin a sinh b.
        let (sinh, cosh) = hyperbolic(&self.im, context)?;
        let sin = Self { re: sine.times(&cosh, context)?, im: cosine.times(&sinh, context)? };
        let cos = Self { re: cosine.times(&cosh, context)?, im: sine.times(&sinh, context)?.negated() };
        Ok((sin, cos))
    }
}

fn hyperbolic(x: &Ball, context: Context<'_>) -> Result<(Ball, Ball), Stop> {
    let up = x.exp(context)?;
    let down = up.inverse(context)?;
    let half = Ball::dyadic(IBig::ONE, -1);
    Ok((up.minus(&down, context)?.times(&half, context)?, up.plus(&down, context)?.times(&half, context)?))
}

#[cfg(test)]
mod tests {
    use super::super::tests::with;
    use super::*;

    fn near(value: &Complex, re: f64, im: f64) -> bool {
        (value.re.approximate() - re).abs() < 1e-14 && (value.im.approximate() - im).abs() < 1e-14
    }

    #[test]
    fn roots_and_logarithms_are_principal() {
        with(128, |context| {
            let z = |re, im| Complex { re: Ball::integer(re), im: Ball::integer(im) };
            assert!(near(&z(-4, 0).sqrt(context).unwrap(), 0.0, 2.0));
            assert!(near(&z(3, 4).sqrt(context).unwrap(), 2.0, 1.0));
            assert!(near(&z(-3, 4).sqrt(context).unwrap(), 1.0, 2.0));
            assert!(near(&z(-3, -4).sqrt(context).unwrap(), 1.0, -2.0));
            assert!(near(&z(0, -2).sqrt(context).unwrap(), 1.0, -1.0));
            assert!(near(&z(-1, 0).ln(context).unwrap(), 0.0, std::f64::consts::PI));
            assert!(near(&z(0, -1).ln(context).unwrap(), 0.0, -std::f64::consts::FRAC_PI_2));
            assert!(near(&z(-1, -1).ln(context).unwrap(), 0.5 * 2f64.ln(), -0.75 * std::f64::consts::PI));
            assert!(near(&z(1, 1).power(-3, context).unwrap(), -0.25, -0.25));
        });
    }

    #[test]
    fn euler_and_pythagoras() {
        with(256, |context| {
            let turn = Complex { re: Ball::ZERO, im: Ball::pi(context).unwrap() };
            let zero = turn.exp(context).unwrap().plus(&Ball::integer(1).into(), context).unwrap();
            assert!(zero.contains_zero() && zero.upper().top() < -240);
            let z = Complex { re: Ball::integer(1), im: Ball::integer(2) };
            let (s, c) = z.sin_cos(context).unwrap();
            let one = s.times(&s, context).unwrap().plus(&c.times(&c, context).unwrap(), context).unwrap();
            let zero = one.minus(&Ball::integer(1).into(), context).unwrap();
            assert!(zero.contains_zero() && zero.upper().top() < -230);
        });
    }

    #[test]
    fn a_branch_cut_is_not_guessed() {
        with(128, |context| {
            let z = Complex { re: Ball::integer(-1), im: Ball::around_zero(Magnitude::new(1, -100)) };
            assert_eq!(z.sqrt(context), Err(Stop::Imprecise));
            assert_eq!(z.ln(context), Err(Stop::Imprecise));
            assert_eq!(Complex::from(Ball::ZERO).ln(context), Err(Stop::Undefined));
        });
    }
}
