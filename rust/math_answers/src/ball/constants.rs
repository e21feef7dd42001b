//! π and ln 2 to many bits, computed once.

use std::sync::OnceLock;

use dashu_int::IBig;

/// Bits of the constants: the top precision, the range of the exponents in an argument, and guard bits.
pub(super) const MOST_BITS: usize = 2304;

static PI: OnceLock<IBig> = OnceLock::new();
static LN_2: OnceLock<IBig> = OnceLock::new();

/// ⌊π · 2^bits⌋ or one unit beside it. `bits` is at most [`MOST_BITS`].
pub(super) fn pi(bits: usize) -> IBig {
    // Machin 1706: π = 16 arctan 1/5 − 4 arctan 1/239.
    cut(PI.get_or_init(|| series(5, -1) * 16 - series(239, -1) * 4), bits)
}

/// ⌊ln 2 · 2^bits⌋ or one unit beside it. `bits` is at most [`MOST_BITS`].
pub(super) fn ln_2(bits: usize) -> IBig {
    // As 2 artanh 1/n = ln (n + 1)/(n − 1), this says 2 = (27/25)^9 (4802/4800)^−1 (8750/8748)^4.
    cut(LN_2.get_or_init(|| series(26, 1) * 18 - series(4801, 1) * 2 + series(8749, 1) * 8), bits)
}

const GUARD: usize = 32;

fn cut(value: &IBig, bits: usize) -> IBig {
    value >> (MOST_BITS + GUARD).saturating_sub(bits)
}

/// Σ sign^k / ((2k + 1) n^(2k+1)), scaled. Each of under 1200 terms is off by less than two units: below 2^12 units,
/// times at most 18, well inside the guard.
fn series(n: u32, sign: i8) -> IBig {
    let square = IBig::from(u64::from(n) * u64::from(n));
    let mut power = (IBig::ONE << (MOST_BITS + GUARD)) / IBig::from(n);
    let mut sum = IBig::ZERO;
    let mut odd = 1u32;
    while !power.is_zero() {
        let term = &power / IBig::from(odd);
        if sign < 0 && odd % 4 == 3 {
            sum -= term
        } else {
            sum += term
        }
        power /= &square;
        odd += 2;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_digits() {
        // 3.14159265358979323846264338327950288419716939937510 and 0.69314718055994530941723212145817656807550013436025
        let digits = |value: IBig| ((value * IBig::from(10).pow(50)) >> 400).to_string();
        assert_eq!(digits(pi(400)), "314159265358979323846264338327950288419716939937510");
        assert_eq!(digits(ln_2(400)), "69314718055994530941723212145817656807550013436025");
    }

    #[test]
    fn two_formulas_agree_to_the_last_bits() {
        // Gauss: π = 48 arctan 1/18 + 32 arctan 1/57 − 20 arctan 1/239; ln 2 = 14 artanh 1/31 + 10 artanh 1/49 + 6 artanh 1/161.
        let other_pi = cut(&(series(18, -1) * 48 + series(57, -1) * 32 - series(239, -1) * 20), MOST_BITS);
        let other_ln = cut(&(series(31, 1) * 14 + series(49, 1) * 10 + series(161, 1) * 6), MOST_BITS);
        for gap in [other_pi - pi(MOST_BITS), other_ln - ln_2(MOST_BITS)] {
            assert!((-1..=1).contains(&i64::try_from(&gap).unwrap()), "{gap}");
        }
    }
}
