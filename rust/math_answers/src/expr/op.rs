//! The functions that expressions are made of.

/// A function that is evaluated as itself.
#[expect(missing_docs, reason = "the names say it")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    Sin,
    Cos,
    Arcsin,
    Arccos,
    Arctan,
    Ln,
    Abs,
    Floor,
    Ceil,
    Sign,
    Max,
    Min,
    Gcd,
    Lcm,
    Re,
    Im,
    Conj,
    Arg,
    Factorial,
    DoubleFactorial,
}
