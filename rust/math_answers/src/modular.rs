//! Arithmetic in two finite fields at once, and the hash that draws points from names.
//!
//! The fields are GF(p²) = GF(p)[i] with i² = −1 for two 61-bit primes p that are 3 modulo 4, so that −1 is no square of
//! GF(p), and of every rational either it or its negative is one: i and the square roots of all rationals are there. Any
//! choice of their signs makes a homomorphism from ℚ(i, √2, √3, √5, …), without denominators that p divides, since these
//! roots are independent over ℚ. What maps to something else than zero is not zero.
//!
//! A rational function that vanishes at a random point modulo p vanishes identically but for a chance of at most
//! degree / p (Schwartz 1980, Zippel 1979). A [`Residue`] is a pair, so the chance is the product over both primes: below
//! 2^-100 for degrees under 2^10.

use dashu_int::ops::UnsignedAbs;
use dashu_int::{IBig, UBig};

/// 2^61 − 1 (Mersenne) and 2^61 − 45, the largest primes below 2^61 that are 3 modulo 4.
pub const PRIMES: [u64; 2] = [(1 << 61) - 1, (1 << 61) - 45];

/// `re + im·i` modulo a prime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Gauss {
    re: u64,
    im: u64,
}

impl Gauss {
    const ZERO: Self = Self { re: 0, im: 0 };
    const ONE: Self = Self { re: 1, im: 0 };

    fn plus(self, other: Self, p: u64) -> Self {
        Self { re: plus(self.re, other.re, p), im: plus(self.im, other.im, p) }
    }

    fn negated(self, p: u64) -> Self {
        Self { re: minus(0, self.re, p), im: minus(0, self.im, p) }
    }

    fn times(self, other: Self, p: u64) -> Self {
        if self.im == 0 && other.im == 0 {
            return Self { re: times(self.re, other.re, p), im: 0 };
        }
        Self {
            re: minus(times(self.re, other.re, p), times(self.im, other.im, p), p),
            im: plus(times(self.re, other.im, p), times(self.im, other.re, p), p),
        }
    }

    fn inverse(self, p: u64) -> Self {
        if self.im == 0 {
            return Self { re: inverse(self.re, p), im: 0 };
        }
        // −1 is no square, so the norm of what is not zero is not zero.
        let norm = inverse(plus(times(self.re, self.re, p), times(self.im, self.im, p), p), p);
        Self { re: times(self.re, norm, p), im: minus(0, times(self.im, norm, p), p) }
    }

    fn power(self, mut exponent: UBig, p: u64) -> Self {
        if self.im == 0
            && let Ok(small) = u64::try_from(&exponent)
        {
            return Self { re: power(self.re, small, p), im: 0 };
        }
        // The order of the group is p² − 1.
        exponent %= UBig::from(p) * UBig::from(p) - UBig::ONE;
        let mut left = u128::try_from(&exponent).unwrap_or(0);
        let (mut base, mut result) = (self, Self::ONE);
        while left > 0 {
            if left & 1 == 1 {
                result = result.times(base, p);
            }
            base = base.times(base, p);
            left >>= 1;
        }
        result
    }
}

/// A residue modulo each of [`PRIMES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Residue([Gauss; 2]);

impl Residue {
    /// Zero.
    pub const ZERO: Self = Self([Gauss::ZERO; 2]);
    /// One.
    pub const ONE: Self = Self([Gauss::ONE; 2]);
    /// i
    pub const I: Self = Self([Gauss { re: 0, im: 1 }; 2]);

    fn each(self, f: impl Fn(Gauss, u64) -> Gauss) -> Self {
        Self([f(self.0[0], PRIMES[0]), f(self.0[1], PRIMES[1])])
    }

    fn zip(self, other: Self, f: impl Fn(Gauss, Gauss, u64) -> Gauss) -> Self {
        Self([f(self.0[0], other.0[0], PRIMES[0]), f(self.0[1], other.0[1], PRIMES[1])])
    }

    fn real(parts: [u64; 2]) -> Self {
        Self(parts.map(|re| Gauss { re, im: 0 }))
    }

    /// The residue of an integer.
    #[must_use]
    pub fn of(value: &IBig) -> Self {
        if let Ok(small) = i64::try_from(value) {
            if (0..PRIMES[1] as i64).contains(&small) {
                return Self::real([small as u64; 2]);
            }
            return Self::real(PRIMES.map(|p| i128::from(small).rem_euclid(i128::from(p)) as u64));
        }
        let magnitude = value.clone().unsigned_abs();
        // The rest is below the prime, so the conversion cannot fail.
        let residue = Self::real(PRIMES.map(|p| u64::try_from(&magnitude % UBig::from(p)).unwrap_or(0)));
        if *value < IBig::ZERO { -residue } else { residue }
    }

    /// A residue drawn from a hash: without i, and never zero in either part.
    #[must_use]
    pub fn draw(hash: u64) -> Self {
        Self::real([0, 1].map(|part| 1 + mix(hash, 0x9e37_79b9_7f4a_7c15 + part as u64) % (PRIMES[part] - 1)))
    }

    /// A square root of a residue without i.
    #[must_use]
    pub fn sqrt(self) -> Self {
        self.each(|Gauss { re, .. }, p| {
            let root = power(re, p / 4 + 1, p);
            if times(root, root, p) == re {
                return Gauss { re: root, im: 0 };
            }
            Gauss { re: 0, im: power(minus(0, re, p), p / 4 + 1, p) }
        })
    }

    fn has_zero(self) -> bool {
        self.0.contains(&Gauss::ZERO)
    }

    /// The inverse; none where a part is zero.
    #[must_use]
    pub fn inverse(self) -> Option<Self> {
        (!self.has_zero()).then(|| self.each(Gauss::inverse))
    }

    /// The `exponent`-th power; none for a negative power of zero and for zero to the zero.
    #[must_use]
    pub fn power(self, exponent: &IBig) -> Option<Self> {
        if self.has_zero() && *exponent <= IBig::ZERO {
            return None;
        }
        let base = if *exponent < IBig::ZERO { self.inverse()? } else { self };
        let magnitude = exponent.clone().unsigned_abs();
        Some(base.each(|part, p| if part == Gauss::ZERO { part } else { part.power(magnitude.clone(), p) }))
    }

    /// A 64-bit key of the pair.
    #[must_use]
    pub fn key(self) -> u64 {
        let [a, b] = self.0;
        mix(mix(a.re, b.re), mix(a.im, b.im))
    }
}

impl std::ops::Add for Residue {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.zip(other, Gauss::plus)
    }
}

impl std::ops::Sub for Residue {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl std::ops::Mul for Residue {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        self.zip(other, Gauss::times)
    }
}

impl std::ops::Neg for Residue {
    type Output = Self;
    fn neg(self) -> Self {
        self.each(Gauss::negated)
    }
}

pub(super) fn plus(a: u64, b: u64, p: u64) -> u64 {
    if a + b >= p { a + b - p } else { a + b }
}

pub(super) fn minus(a: u64, b: u64, p: u64) -> u64 {
    if a >= b { a - b } else { a + p - b }
}

/// a·b modulo p = 2^61 − gap, by 2^61 = gap.
pub(super) fn times(a: u64, b: u64, p: u64) -> u64 {
    const MASK: u64 = (1 << 61) - 1;
    let gap = MASK - p + 1;
    let product = u128::from(a) * u128::from(b);
    // Below 2^61 + 45·2^61 < 2^67, then below 2^61 + 45·2^6.
    let once = u128::from(product as u64 & MASK) + (product >> 61) * u128::from(gap);
    let twice = (once as u64 & MASK) + (once >> 61) as u64 * gap;
    if twice >= p { twice - p } else { twice }
}

/// The inverse of a residue other than zero, by Euclid.
pub(super) fn inverse(value: u64, p: u64) -> u64 {
    let (mut low, mut high) = (value, p);
    // low = a·value and high = b·value modulo p.
    let (mut a, mut b) = (1i128, 0i128);
    while low > 1 {
        let quotient = high / low;
        (low, high) = (high - quotient * low, low);
        (a, b) = (b - i128::from(quotient) * a, a);
    }
    a.rem_euclid(i128::from(p)) as u64
}

pub(super) fn power(mut base: u64, mut exponent: u64, p: u64) -> u64 {
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = times(result, base, p);
        }
        base = times(base, base, p);
        exponent >>= 1;
    }
    result
}

/// Mix two words into one (the finaliser of MurmurHash3, by Austin Appleby, public domain, on their combination).
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut h = a.rotate_left(25).wrapping_mul(0xff51_afd7_ed55_8ccd) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

/// Hash a text.
#[must_use]
pub fn hash_text(text: &str) -> u64 {
    text.as_bytes().chunks(8).fold(mix(text.len() as u64, 0x5bd1_e995), |hash, chunk| {
        mix(hash, chunk.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte)))
    })
}

/// Hash an integer.
#[must_use]
pub fn hash_integer(value: &UBig) -> u64 {
    value.to_le_bytes().chunks(8).fold(0x1b87_3593, |hash, chunk| {
        mix(hash, chunk.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_moduli_are_prime_and_three_modulo_four() {
        // Miller–Rabin with the first twelve primes is exact below 2^64 (Sorenson and Webster 2015).
        for p in PRIMES {
            assert_eq!(p % 4, 3);
            let (odd, twos) = ((p - 1) >> (p - 1).trailing_zeros(), (p - 1).trailing_zeros());
            for a in [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37] {
                let mut x = power(a, odd, p);
                let mut passes = x == 1 || x == p - 1;
                for _ in 1..twos {
                    x = times(x, x, p);
                    passes |= x == p - 1;
                }
                assert!(passes, "{p} fails base {a}");
            }
        }
    }

    #[test]
    fn the_field_laws() {
        let (a, b) = (Residue::draw(1), Residue::draw(2));
        let z = a + b * Residue::I;
        assert_eq!((a + b) * (a - b), a * a - b * b);
        assert_eq!(Residue::I * Residue::I, -Residue::ONE);
        for value in [a, b, z, Residue::I, Residue::ONE, -Residue::ONE, Residue::real([2, PRIMES[1] - 2])] {
            assert_eq!(value.inverse().unwrap() * value, Residue::ONE);
            assert_eq!(value.power(&IBig::from(-3)).unwrap() * value * value * value, Residue::ONE);
        }
        assert_eq!(z.power(&(IBig::ONE << 70)), (0..70).try_fold(z, |z, _| Some(z * z)));
        assert_eq!(a + -a, Residue::ZERO);
        assert_eq!(Residue::ZERO.inverse(), None);
        assert_eq!(Residue::ZERO.power(&IBig::from(2)), Some(Residue::ZERO));
        assert_eq!(Residue::ZERO.power(&IBig::ZERO), None);
        for p in PRIMES {
            for x in [p - 1, p - 2, p / 3, 1, 0] {
                assert_eq!(times(x, p - 1, p), (u128::from(x) * u128::from(p - 1) % u128::from(p)) as u64);
            }
        }
    }

    #[test]
    fn every_rational_has_a_root() {
        for n in 1i64..50 {
            for n in [n, -n] {
                let n = Residue::of(&IBig::from(n));
                assert_eq!(n.sqrt() * n.sqrt(), n);
            }
        }
    }

    #[test]
    fn large_integers_reduce() {
        let big = IBig::from(7).pow(500);
        assert_eq!(Residue::of(&big), Residue::of(&IBig::from(7)).power(&IBig::from(500)).unwrap());
        assert_eq!(Residue::of(&-&big), -Residue::of(&big));
        assert_eq!(Residue::of(&IBig::from(PRIMES[0])).0[0], Gauss::ZERO);
    }
}
