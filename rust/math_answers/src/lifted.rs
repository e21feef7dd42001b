//! Arithmetic modulo p², and the logarithm that lives there.
//!
//! The rings are ℤ[i]/p² for the two primes of [`super::modular`]. Their units have a logarithm: u^p / ū is 1 + pM(u),
//! since raising to the p-th power is conjugation modulo p, and so M(uv) = M(u) + M(v) modulo p, with M(−1) = M(i) = 0.
//! It is the p-adic logarithm but for its sign and conjugation. What holds of logarithms for every choice of their
//! arguments, and multiples of π apart, holds of M; a relation between logarithms that does not hold is broken by M
//! but for a chance of 1/p at a random point, as the digit of a letter before p is random too.

use super::modular::{PRIMES, inverse, minus, mix, plus, power, times};

/// `low + high·p` modulo p².
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Digits {
    low: u64,
    high: u64,
}

impl Digits {
    const ZERO: Self = Self { low: 0, high: 0 };
    const ONE: Self = Self { low: 1, high: 0 };

    fn plus(self, other: Self, p: u64) -> Self {
        let sum = self.low + other.low;
        let carry = u64::from(sum >= p);
        Self { low: sum - carry * p, high: plus(plus(self.high, other.high, p), carry, p) }
    }

    fn negated(self, p: u64) -> Self {
        let borrow = u64::from(self.low != 0);
        Self { low: minus(0, self.low, p), high: minus(minus(0, self.high, p), borrow, p) }
    }

    fn times(self, other: Self, p: u64) -> Self {
        let (carry, low) = divide(self.low, other.low, p);
        let crossed = plus(times(self.low, other.high, p), times(self.high, other.low, p), p);
        Self { low, high: plus(carry, crossed, p) }
    }

    fn inverse(self, p: u64) -> Self {
        // Newton: x (2 − ax).
        let guess = Self { low: inverse(self.low, p), high: 0 };
        let two = Self { low: 2, high: 0 };
        guess.times(two.plus(self.times(guess, p).negated(p), p), p)
    }
}

/// Quotient (modulo p) and remainder of a·b by p = 2^61 − gap.
fn divide(a: u64, b: u64, p: u64) -> (u64, u64) {
    const MASK: u128 = (1 << 61) - 1;
    let gap = u128::from((1 << 61) - p);
    let product = u128::from(a) * u128::from(b);
    let (once, rest) = (product >> 61, product & MASK);
    let rest = rest + once * gap;
    let (twice, rest) = (rest >> 61, (rest & MASK) + (rest >> 61) * gap);
    let more = u128::from(rest >= u128::from(p));
    let quotient = (once + twice + more) as u64;
    (if quotient >= p { quotient - p } else { quotient }, (rest - more * u128::from(p)) as u64)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gauss {
    re: Digits,
    im: Digits,
}

impl Gauss {
    const ONE: Self = Self { re: Digits::ONE, im: Digits::ZERO };

    fn plus(self, other: Self, p: u64) -> Self {
        Self { re: self.re.plus(other.re, p), im: self.im.plus(other.im, p) }
    }

    fn negated(self, p: u64) -> Self {
        Self { re: self.re.negated(p), im: self.im.negated(p) }
    }

    fn conjugate(self, p: u64) -> Self {
        Self { re: self.re, im: self.im.negated(p) }
    }

    fn is_real(self) -> bool {
        self.im == Digits::ZERO
    }

    fn times(self, other: Self, p: u64) -> Self {
        if self.is_real() && other.is_real() {
            return Self { re: self.re.times(other.re, p), im: Digits::ZERO };
        }
        Self {
            re: self.re.times(other.re, p).plus(self.im.times(other.im, p).negated(p), p),
            im: self.re.times(other.im, p).plus(self.im.times(other.re, p), p),
        }
    }

    fn is_unit(self) -> bool {
        self.re.low != 0 || self.im.low != 0
    }

    fn inverse(self, p: u64) -> Self {
        let norm = self.re.times(self.re, p).plus(self.im.times(self.im, p), p).inverse(p);
        let turned = self.conjugate(p);
        Self { re: turned.re.times(norm, p), im: turned.im.times(norm, p) }
    }

    fn power(self, mut exponent: u64, p: u64) -> Self {
        let (mut base, mut result) = (self, Self::ONE);
        while exponent > 0 {
            if exponent & 1 == 1 {
                result = result.times(base, p);
            }
            base = base.times(base, p);
            exponent >>= 1;
        }
        result
    }

    fn logarithm(self, p: u64) -> Self {
        let mut raised = self;
        for _ in 0..61 {
            raised = raised.times(raised, p);
        }
        let below = self.power((1 << 61) - p, p).times(self.conjugate(p), p);
        let ratio = raised.times(below.inverse(p), p);
        let digit = |part: Digits| Digits { low: part.high, high: 0 };
        Self { re: digit(ratio.re), im: digit(ratio.im) }
    }

    /// A square root, where there is one.
    fn root(self, p: u64) -> Option<Self> {
        let real = |re: u64| Self { re: Digits { low: re, high: 0 }, im: Digits::ZERO };
        let root = |n: u64| Some(power(n, p / 4 + 1, p)).filter(|root| times(*root, *root, p) == n);
        let (a, b) = (self.re.low, self.im.low);
        let half = p / 2 + 1;
        let first = if b == 0 {
            match root(a) {
                Some(root) => real(root),
                None => Self { re: Digits::ZERO, im: Digits { low: root(minus(0, a, p))?, high: 0 } },
            }
        } else {
            let norm = root(plus(times(a, a, p), times(b, b, p), p))?;
            let re = root(times(plus(a, norm, p), half, p)).or_else(|| root(times(minus(a, norm, p), half, p)))?;
            let im = times(times(b, half, p), inverse(re, p), p);
            Self { re: Digits { low: re, high: 0 }, im: Digits { low: im, high: 0 } }
        };
        // Newton: r − (r² − u) / 2r.
        let error = first.times(first, p).plus(self.negated(p), p);
        Some(first.plus(error.times(first.plus(first, p).inverse(p), p).negated(p), p))
    }
}

/// An element of each ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifted([Gauss; 2]);

impl Lifted {
    /// Zero.
    pub const ZERO: Self = Self([Gauss { re: Digits::ZERO, im: Digits::ZERO }; 2]);
    /// One.
    pub const ONE: Self = Self([Gauss::ONE; 2]);
    /// i
    pub const I: Self = Self([Gauss { re: Digits::ZERO, im: Digits::ONE }; 2]);

    fn each(self, f: impl Fn(Gauss, u64) -> Gauss) -> Self {
        Self([f(self.0[0], PRIMES[0]), f(self.0[1], PRIMES[1])])
    }

    fn zip(self, other: Self, f: impl Fn(Gauss, Gauss, u64) -> Gauss) -> Self {
        Self([f(self.0[0], other.0[0], PRIMES[0]), f(self.0[1], other.0[1], PRIMES[1])])
    }

    /// An integer from its remainders by the squares of both primes.
    #[must_use]
    pub fn of(remainders: [u128; 2]) -> Self {
        Self([0, 1].map(|at| {
            let p = u128::from(PRIMES[at]);
            let (low, high) = ((remainders[at] % p) as u64, (remainders[at] / p % p) as u64);
            Gauss { re: Digits { low, high }, im: Digits::ZERO }
        }))
    }

    /// An element drawn from a hash: without i, and a unit.
    #[must_use]
    pub fn draw(hash: u64) -> Self {
        Self([0, 1].map(|at| {
            let digit = |salt: u64| mix(hash, salt + at as u64);
            let (low, high) = (1 + digit(0x006c_6f77) % (PRIMES[at] - 1), digit(0x6869_6768) % PRIMES[at]);
            Gauss { re: Digits { low, high }, im: Digits::ZERO }
        }))
    }

    /// Whether both parts have inverses.
    #[must_use]
    pub fn is_unit(self) -> bool {
        self.0.iter().all(|part| part.is_unit())
    }

    /// Whether both residues modulo p are zero.
    #[must_use]
    pub fn is_zero_modulo_p(self) -> bool {
        !self.0.iter().any(|part| part.is_unit())
    }

    /// The inverse of a unit.
    #[must_use]
    pub fn inverse(self) -> Option<Self> {
        self.is_unit().then(|| self.each(Gauss::inverse))
    }

    /// The `exponent`-th power; none for a negative power of what is no unit.
    #[must_use]
    pub fn power(self, exponent: i64) -> Option<Self> {
        let base = if exponent < 0 { self.inverse()? } else { self };
        Some(base.each(|part, p| part.power(exponent.unsigned_abs(), p)))
    }

    /// The logarithm of a unit; its digit before p means nothing.
    #[must_use]
    pub fn logarithm(self) -> Option<Self> {
        self.is_unit().then(|| self.each(Gauss::logarithm))
    }

    /// A square root of a unit, where both rings have one.
    #[must_use]
    pub fn root(self) -> Option<Self> {
        if !self.is_unit() {
            return None;
        }
        Some(Self([self.0[0].root(PRIMES[0])?, self.0[1].root(PRIMES[1])?]))
    }

    /// A 64-bit key of the residues modulo p.
    #[must_use]
    pub fn key(self) -> u64 {
        let [a, b] = self.0;
        mix(mix(a.re.low, b.re.low), mix(a.im.low, b.im.low))
    }

    /// What each residue modulo p is as a fraction of integers up to `most`, or i times one.
    #[must_use]
    pub fn fractions(self, most: u64) -> [Option<(i64, u64, bool)>; 2] {
        [0, 1].map(|at| {
            let (p, part) = (PRIMES[at], self.0[at]);
            match (part.re.low, part.im.low) {
                (re, 0) => fraction(re, p, most).map(|(top, bottom)| (top, bottom, false)),
                (0, im) => fraction(im, p, most).map(|(top, bottom)| (top, bottom, true)),
                _ => None,
            }
        })
    }
}

/// The fraction of integers up to `most` that a residue is: Euclid's remainders until one is small (Wang 1981).
fn fraction(value: u64, p: u64, most: u64) -> Option<(i64, u64)> {
    let (mut low, mut high) = (i128::from(value), i128::from(p));
    let (mut a, mut b) = (1i128, 0i128);
    while low > i128::from(most) {
        let quotient = high / low;
        (low, high) = (high - quotient * low, low);
        (a, b) = (b - quotient * a, a);
    }
    let bottom = u64::try_from(a.unsigned_abs()).ok().filter(|bottom| (1..=most).contains(bottom))?;
    Some((if a < 0 { -(low as i64) } else { low as i64 }, bottom))
}

impl std::ops::Add for Lifted {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.zip(other, Gauss::plus)
    }
}

impl std::ops::Sub for Lifted {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl std::ops::Mul for Lifted {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        self.zip(other, Gauss::times)
    }
}

impl std::ops::Neg for Lifted {
    type Output = Self;
    fn neg(self) -> Self {
        self.each(Gauss::negated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn low(value: Lifted) -> [[u64; 2]; 2] {
        value.0.map(|part| [part.re.low, part.im.low])
    }

    #[test]
    fn the_ring_laws() {
        let (a, b) = (Lifted::draw(1), Lifted::draw(2));
        let z = a + b * Lifted::I;
        assert_eq!((a + b) * (a - b), a * a - b * b);
        assert_eq!(z.inverse().unwrap() * z, Lifted::ONE);
        assert_eq!(z.power(-3).unwrap() * z * z * z, Lifted::ONE);
        for value in [a * a, z * z, -(a * a), (a + b) * (a + b)] {
            let root = value.root().unwrap();
            assert_eq!(root * root, value);
        }
        for (p, x) in PRIMES.into_iter().flat_map(|p| [(p, p - 1), (p, p - 2), (p, p / 3), (p, 1)]) {
            let product = u128::from(x) * u128::from(p - 1);
            let whole = (product / u128::from(p)) as u64;
            assert_eq!(divide(x, p - 1, p), (whole % p, (product % u128::from(p)) as u64));
        }
    }

    #[test]
    fn the_logarithm_of_a_product_is_the_sum() {
        let (a, b) = (Lifted::draw(3), Lifted::draw(4));
        let z = a + b * Lifted::I;
        let log = |value: Lifted| value.logarithm().unwrap();
        assert_eq!(low(log(z * a)), low(log(z) + log(a)));
        assert_eq!(low(log(z * z * z)), low(log(z) + log(z) + log(z)));
        assert_eq!(low(log(Lifted::I)), [[0; 2]; 2]);
        assert_eq!(low(log(-a)), low(log(a)));
        assert_ne!(low(log(a)), low(log(b)));
        assert_ne!(low(log(z)), [[0; 2]; 2]);
    }

    #[test]
    fn small_fractions_come_back() {
        let three_quarters = Lifted::of([3, 3]) * Lifted::of([4, 4]).inverse().unwrap();
        assert_eq!(three_quarters.fractions(100), [Some((3, 4, false)); 2]);
        assert_eq!((-three_quarters * Lifted::I).fractions(100), [Some((-3, 4, true)); 2]);
        assert_eq!(Lifted::draw(5).fractions(4096), [None; 2]);
    }
}
