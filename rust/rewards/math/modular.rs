//! Arithmetic modulo two 61-bit primes at once, and the hash that draws points from names.
//!
//! A rational function that vanishes at a random point modulo a prime vanishes identically but for a chance of at most
//! degree / p (Schwartz 1980, Zippel 1979). A residue here is a pair, so the chance is the product over both primes:
//! below 2^-100 for degrees under 2^10.

use dashu_int::ops::UnsignedAbs;
use dashu_int::{IBig, UBig};

/// The two largest primes below 2^61: 2^61 − 1 (Mersenne) and 2^61 − 31.
pub const PRIMES: [u64; 2] = [(1 << 61) - GAPS[0], (1 << 61) - GAPS[1]];
const GAPS: [u64; 2] = [1, 31];

/// A residue modulo each of [`PRIMES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Residue(pub [u64; 2]);

impl Residue {
    /// Zero.
    pub const ZERO: Self = Self([0, 0]);
    /// One.
    pub const ONE: Self = Self([1, 1]);

    fn zip(self, other: Self, f: impl Fn(u64, u64, u64) -> u64) -> Self {
        Self([f(self.0[0], other.0[0], PRIMES[0]), f(self.0[1], other.0[1], PRIMES[1])])
    }

    /// The residue of an integer.
    #[must_use]
    pub fn of(value: &IBig) -> Self {
        if let Ok(small) = i64::try_from(value) {
            return Self(PRIMES.map(|p| i128::from(small).rem_euclid(i128::from(p)) as u64));
        }
        let magnitude = value.clone().unsigned_abs();
        // The rest is below the prime, so the conversion cannot fail.
        let residue = Self(PRIMES.map(|p| u64::try_from(&magnitude % UBig::from(p)).unwrap_or(0)));
        if *value < IBig::ZERO { -residue } else { residue }
    }

    /// A residue drawn from a hash: never zero in either part.
    #[must_use]
    pub fn draw(hash: u64) -> Self {
        Self([0, 1].map(|part| 1 + mix(hash, 0x9e37_79b9_7f4a_7c15 + part as u64) % (PRIMES[part] - 1)))
    }

    /// The inverse; none where a part is zero.
    #[must_use]
    pub fn inverse(self) -> Option<Self> {
        if self.0.contains(&0) {
            return None;
        }
        Some(Self([0, 1].map(|part| inverse(self.0[part], PRIMES[part]))))
    }

    /// The `exponent`-th power; none for a negative power of zero and for zero to the zero.
    #[must_use]
    pub fn power(self, exponent: &IBig) -> Option<Self> {
        if self.0.contains(&0) && *exponent <= IBig::ZERO {
            return None;
        }
        if let Ok(small) = u64::try_from(exponent)
            && small < PRIMES[1] - 1
        {
            return Some(Self([0, 1].map(|part| power(self.0[part], small, PRIMES[part]))));
        }
        // By Fermat the exponent counts modulo p − 1.
        let mut parts = [0; 2];
        for (part, prime) in PRIMES.into_iter().enumerate() {
            let order = IBig::from(prime - 1);
            let reduced = ((exponent % &order) + &order) % &order;
            let reduced = u64::try_from(&reduced).ok()?;
            parts[part] = if self.0[part] == 0 { 0 } else { power(self.0[part], reduced, prime) };
        }
        Some(Self(parts))
    }

    /// A 64-bit key of the pair.
    #[must_use]
    pub fn key(self) -> u64 {
        mix(self.0[0], self.0[1])
    }
}

impl std::ops::Add for Residue {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b, p| if a + b >= p { a + b - p } else { a + b })
    }
}

impl std::ops::Sub for Residue {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b, p| if a >= b { a - b } else { a + p - b })
    }
}

impl std::ops::Mul for Residue {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        self.zip(other, times)
    }
}

impl std::ops::Neg for Residue {
    type Output = Self;
    fn neg(self) -> Self {
        Self::ZERO - self
    }
}

/// a·b modulo p = 2^61 − gap, by 2^61 = gap.
fn times(a: u64, b: u64, p: u64) -> u64 {
    const MASK: u64 = (1 << 61) - 1;
    let gap = MASK - p + 1;
    let product = u128::from(a) * u128::from(b);
    // Below 2^61 + 31·2^61 < 2^66, then below 2^61 + 31·2^5.
    let once = u128::from(product as u64 & MASK) + (product >> 61) * u128::from(gap);
    let twice = (once as u64 & MASK) + (once >> 61) as u64 * gap;
    if twice >= p { twice - p } else { twice }
}

/// The inverse of a residue other than zero, by Euclid.
fn inverse(value: u64, p: u64) -> u64 {
    let (mut low, mut high) = (value, p);
    // low = a·value and high = b·value modulo p, up to signs that alternate.
    let (mut a, mut b) = (1i128, 0i128);
    while low > 1 {
        let quotient = high / low;
        (low, high) = (high - quotient * low, low);
        (a, b) = (b - i128::from(quotient) * a, a);
    }
    a.rem_euclid(i128::from(p)) as u64
}

fn power(mut base: u64, mut exponent: u64, p: u64) -> u64 {
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
    fn the_moduli_are_prime() {
        // Miller–Rabin with the first twelve primes is exact below 2^64 (Sorenson and Webster 2015).
        for p in PRIMES {
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
        assert_eq!((a + b) * (a - b), a * a - b * b);
        for value in [a, b, Residue::ONE, -Residue::ONE, Residue([2, PRIMES[1] - 2])] {
            assert_eq!(value.inverse().unwrap() * value, Residue::ONE);
        }
        for (part, p) in PRIMES.into_iter().enumerate() {
            for x in [a.0[part], b.0[part], p - 1, 1, 0] {
                assert_eq!(times(x, p - 1, p), (u128::from(x) * u128::from(p - 1) % u128::from(p)) as u64);
            }
        }
        assert_eq!(a + -a, Residue::ZERO);
        assert_eq!(Residue::ZERO.inverse(), None);
        assert_eq!(a.power(&IBig::from(-3)).unwrap() * a * a * a, Residue::ONE);
        assert_eq!(Residue::ZERO.power(&IBig::from(2)), Some(Residue::ZERO));
        assert_eq!(Residue::ZERO.power(&IBig::ZERO), None);
    }

    #[test]
    fn large_integers_reduce() {
        let big = IBig::from(7).pow(500);
        assert_eq!(Residue::of(&big), Residue::of(&IBig::from(7)).power(&IBig::from(500)).unwrap());
        assert_eq!(Residue::of(&-&big), -Residue::of(&big));
        assert_eq!(Residue::of(&IBig::from(PRIMES[0])).0[0], 0);
    }
}
