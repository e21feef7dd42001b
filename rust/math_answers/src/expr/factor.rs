//! Prime factors of rationals, as far as small primes and perfect powers go.

use dashu_int::UBig;
use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

use super::super::fuel::{Fuel, Stop};

/// Trial division stops here; a part without smaller factors counts as prime, unless it is a perfect power.
const MOST_TRIAL: u64 = 4096;
/// What [`factors_of`] gives below this is prime for sure.
pub(super) const FACTORED_BELOW: u64 = MOST_TRIAL * MOST_TRIAL;
/// Numbers of more bits are not factored.
const MOST_FACTORED_BITS: usize = 4096;

/// Primes (or parts taken for primes) with exponents, of a positive rational; none when it is too long, or 1.
///
/// # Errors
/// [`Stop::Fuel`]
pub(super) fn factors_of(value: &RBig, fuel: &Fuel) -> Result<Option<Vec<(UBig, i64)>>, Stop> {
    let (top, bottom) = (value.numerator(), value.denominator());
    if top.bit_len().max(bottom.bit_len()) > MOST_FACTORED_BITS || value.is_one() {
        return Ok(None);
    }
    let Some(top) = top.as_ubig() else { return Ok(None) };
    let mut factors = factor(top, fuel)?;
    factors.extend(factor(bottom, fuel)?.into_iter().map(|(prime, times)| (prime, -times)));
    Ok(Some(factors))
}

fn factor(n: &UBig, fuel: &Fuel) -> Result<Vec<(UBig, i64)>, Stop> {
    let mut factors = Vec::new();
    let mut rest = n.clone();
    if let Some(twos) = rest.trailing_zeros().filter(|twos| *twos > 0) {
        rest >>= twos;
        factors.push((UBig::from(2u8), twos as i64));
    }
    let mut p = 3u64;
    while p < MOST_TRIAL && !rest.is_one() {
        if let Ok(small) = u64::try_from(&rest) {
            fuel.spend(1)?;
            if p * p > small {
                factors.push((rest, 1));
                return Ok(factors);
            }
            if !small.is_multiple_of(p) {
                p += 2;
                continue;
            }
        } else {
            fuel.spend(2 + rest.bit_len() as u64 / 64)?;
            if &rest % p != 0 {
                p += 2;
                continue;
            }
        }
        let mut times = 0;
        while &rest % p == 0 {
            fuel.spend(2 + rest.bit_len() as u64 / 64)?;
            rest /= p;
            times += 1;
        }
        factors.push((UBig::from(p), times));
        p += 2;
    }
    if !rest.is_one() {
        factors.push(perfect_power(rest, fuel)?);
    }
    Ok(factors)
}

/// `n` as `t^k` with the largest k of small prime factors.
fn perfect_power(n: UBig, fuel: &Fuel) -> Result<(UBig, i64), Stop> {
    let (mut base, mut exponent) = (n, 1);
    // The base has no factor below 2^12, so the exponent is at most a twelfth of the bits.
    for k in [2u64, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31] {
        while base.bit_len() as u64 >= 12 * k && may_be_power(&base, k, fuel)? {
            fuel.spend(100 + 40 * k * Fuel::product(base.bit_len(), base.bit_len()))?;
            let root = base.nth_root(k as usize);
            if root.pow(k as usize) != base {
                break;
            }
            (base, exponent) = (root, exponent * k as i64);
        }
    }
    Ok((base, exponent))
}

/// Whether n is a k-th power modulo four primes of the form mk + 1: of all other numbers one in k^4 is, or fewer.
fn may_be_power(n: &UBig, k: u64, fuel: &Fuel) -> Result<bool, Stop> {
    let is_prime = |q: u64| (2..=q.isqrt()).all(|p| !q.is_multiple_of(p));
    let moduli = (2..).map(|m| m * k + 1).filter(|q| *q > 3 && is_prime(*q)).take(4);
    for q in moduli {
        fuel.spend(20 + n.bit_len() as u64 / 64)?;
        let rest = n % q;
        let (mut power, mut base, mut exponent) = (1, rest, (q - 1) / k);
        while exponent > 0 {
            if exponent & 1 == 1 {
                power = power * base % q;
            }
            base = base * base % q;
            exponent >>= 1;
        }
        if rest != 0 && power != 1 {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_come_back() {
        let fuel = Fuel::new(10_000_000);
        for n in [2u64, 3, 12, 97, 1 << 40, 9_999_991, 600_851_475_143, 4_294_967_297, 3_486_784_401] {
            let factors = factor(&UBig::from(n), &fuel).unwrap();
            let product = factors.iter().fold(UBig::ONE, |product, (p, k)| product * p.pow(*k as usize));
            assert_eq!(product, UBig::from(n));
            assert!(factors.iter().all(|(p, _)| n == 9_999_991 || *p < UBig::from(6_700_418u64)), "{n}: {factors:?}");
        }
        let large = UBig::from(10_007u32).pow(30);
        assert_eq!(factor(&large, &fuel).unwrap(), [(UBig::from(10_007u32), 30)]);
        assert_eq!(
            factors_of(&RBig::from_parts(8.into(), 9u8.into()), &fuel).unwrap().unwrap(),
            [(UBig::from(2u8), 3), (UBig::from(3u8), -2)]
        );
    }
}
