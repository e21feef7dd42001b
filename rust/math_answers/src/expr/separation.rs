//! How small a nonzero algebraic number can be.
//!
//! Burnikel, Funke, Mehlhorn, Schirra and Schmitt, "A Separation Bound for Real Algebraic Expressions" (ESA 2001;
//! Algorithmica 55, 2009): an expression E over the integers with + − · / and roots has bounds u, l by
//! integers u = |n|, l = 1; products u₁u₂, l₁l₂; quotients u₁l₂, l₁u₂; sums u₁l₂ + l₁u₂, l₁l₂; k-th roots
//! (u l^(k−1))^(1/k), l for u ≥ l, else u, (u^(k−1) l)^(1/k). If E is not zero, |E| ≥ 1 / (u^(D−1) l), where D is the
//! product of the indices of all different roots. The bounds are on the conjugates of numerator and denominator, so
//! that i, a root of −1, is a square root, and 2 sin(πp/q), an algebraic integer whose conjugates are at most 2, is a leaf
//! with u = 2, l = 1. All such sines lie in the real subfield of the N-th cyclotomic field, of degree φ(N)/2, where N is the
//! least common multiple of the orders of the roots of unity whose real parts they are. The square root of a prime p lies
//! there too if N is a multiple of p (for p = 1 modulo 4), 4p (for p = 3 modulo 4) or 8 (for p = 2).

use std::collections::HashMap;

use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

use super::{Class, Exprs, Id, Kind, Op};

/// Bits of u and l, and the different roots.
#[derive(Debug)]
struct Bounds {
    roots: Vec<(u64, f64)>,
    /// Primes under square roots.
    primes: Vec<u64>,
    /// N of the sines.
    order: u64,
    /// Of the nodes of the arena at hand: what is shared is not visited again.
    known: HashMap<Id, Option<(f64, f64)>>,
}

/// Bits that a ball around zero must reach to prove that two algebraic numbers are the same; none where a part is
/// not algebraic, or past what is affordable.
pub(super) fn bits_to_separate(left: (&Exprs, Id), right: (&Exprs, Id)) -> Option<f64> {
    let mut bounds = Bounds { roots: Vec::new(), primes: Vec::new(), order: 1, known: HashMap::new() };
    let (left_u, left_l) = bounds.of(left.0, left.1, 0)?;
    bounds.known.clear();
    let (right_u, right_l) = bounds.of(right.0, right.1, 0)?;
    let (u, l) = ((left_u + right_l).max(left_l + right_u) + 1.0, left_l + right_l);
    let sines = if bounds.order > 2 { totient(bounds.order) as f64 / 2.0 } else { 1.0 };
    let is_new = |prime: &&u64| {
        let order = match **prime {
            2 => 8,
            p if p % 4 == 1 => p,
            p => 4 * p,
        };
        !bounds.order.is_multiple_of(order)
    };
    let primes = 2f64.powi(bounds.primes.iter().filter(is_new).count() as i32);
    let degree = sines * primes * bounds.roots.iter().map(|(_, degree)| degree).product::<f64>();
    Some((degree - 1.0) * u.max(0.0) + l + 2.0).filter(|bits| bits.is_finite())
}

/// Beyond this N no bound is given.
const MOST_ORDER: u64 = 1 << 14;

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn is_prime(n: u64) -> bool {
    (2..1 << 12).contains(&n) && (2..=n.isqrt()).all(|p| !n.is_multiple_of(p))
}

/// Euler's φ.
fn totient(n: u64) -> u64 {
    let (mut rest, mut result) = (n, n);
    for p in 2..=n.isqrt() {
        if rest.is_multiple_of(p) {
            result -= result / p;
            while rest.is_multiple_of(p) {
                rest /= p;
            }
        }
    }
    if rest > 1 { result - result / rest } else { result }
}

impl Bounds {
    /// Upper bounds of log₂ u and log₂ l. Floats round by 2^-50 of the value, which the spare bits of each step cover.
    fn of(&mut self, exprs: &Exprs, id: Id, depth: u32) -> Option<(f64, f64)> {
        if let Some(known) = self.known.get(&id) {
            return *known;
        }
        let bounds = self.compute(exprs, id, depth);
        self.known.insert(id, bounds);
        bounds
    }

    fn compute(&mut self, exprs: &Exprs, id: Id, depth: u32) -> Option<(f64, f64)> {
        if exprs.class(id).has(Class::TRANSCENDENTAL) || exprs.class(id).has(Class::SYMBOL) || depth > 200 {
            return None;
        }
        let slack = |(u, l): (f64, f64)| (u + 1e-9 * (1.0 + u.abs()), l + 1e-9 * (1.0 + l.abs()));
        Some(slack(match exprs.kind(id) {
            Kind::Rational(value) => (
                value.numerator().bit_len() as f64,
                value.denominator().bit_len() as f64 - 1.0 + f64::from(u8::from(!value.denominator().is_one())),
            ),
            Kind::I => {
                self.root(exprs.residue(id).key(), 2.0);
                (0.0, 0.0)
            }
            Kind::Sum(items) => {
                let mut sum = (0.0, 0.0);
                for (at, item) in items.iter().enumerate() {
                    let (u, l) = self.of(exprs, *item, depth + 1)?;
                    sum = if at == 0 { (u, l) } else { (f64::max(sum.0 + l, u + sum.1) + 1.0, sum.1 + l) };
                }
                sum
            }
            Kind::Product(items) => {
                let mut product = (0.0, 0.0);
                for item in items {
                    let (u, l) = self.of(exprs, *item, depth + 1)?;
                    product = (product.0 + u, product.1 + l);
                }
                product
            }
            Kind::Power(base, exponent) => {
                let exponent: &RBig = exprs.as_rational(*exponent)?;
                let (u, l) = self.of(exprs, *base, depth + 1)?;
                let degree = u32::try_from(exponent.denominator()).ok()?;
                let times = i64::try_from(exponent.numerator()).ok()? as f64;
                let (u, l) = if degree == 1 {
                    (u, l)
                } else {
                    match exprs.as_integer(*base).and_then(|n| u64::try_from(n).ok()).filter(|_| degree == 2) {
                        Some(prime) if is_prime(prime) => {
                            if !self.primes.contains(&prime) {
                                self.primes.push(prime);
                            }
                        }
                        _ => self.root(exprs.residue(*base).key() ^ u64::from(degree), f64::from(degree)),
                    }
                    let k = f64::from(degree);
                    if u >= l { ((u + (k - 1.0) * l) / k, l) } else { (u, ((k - 1.0) * u + l) / k) }
                };
                if times < 0.0 { (-times * l, -times * u) } else { (times * u, times * l) }
            }
            Kind::Function(Op::Sin, arguments) => {
                let turn = exprs.as_multiple_of_pi(*arguments.first()?)?;
                // sin πt = cos π(1/2 − t), the real part of a root of unity.
                let turn = RBig::from_parts(1.into(), 2u8.into()) - turn;
                let q = u64::try_from(turn.denominator()).ok().filter(|q| *q <= MOST_ORDER)?;
                let order = if turn.numerator().bit(0) { 2 * q } else { q };
                self.order = self.order / gcd(self.order, order) * order;
                (self.order <= MOST_ORDER).then_some((1.0, 1.0))?
            }
            Kind::Pi | Kind::E | Kind::Symbol(_) | Kind::Function(..) | Kind::Range(_) => return None,
        }))
    }

    fn root(&mut self, key: u64, degree: f64) {
        if !self.roots.iter().any(|(known, _)| *known == key) {
            self.roots.push((key, degree));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totients() {
        assert_eq!([1, 2, 12, 28, 97, 360].map(totient), [1, 1, 4, 12, 96, 96]);
    }
}
