//! The kinds that nodes of the syntax tree name: forms of numbers, constants, functions, separators, sets, signs.

/// How a number literal is written. Values are exact in every form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberForm {
    /// Digits, with or without thousands marks.
    Integer,
    /// A finite decimal with this many places, for callers that round.
    Decimal {
        /// Digits after the point.
        places: u16,
    },
    /// A repeating decimal: `0.\overline{3}`, `0.(3)`, `0.\dot{3}`.
    Repeating,
    /// `1.5e-3`, `1.5 \times 10^{-3}`.
    Scientific,
    /// A quotient of two integer literals.
    Fraction {
        /// Whether it is in lowest terms: 13/30, but not 52/120.
        lowest: bool,
    },
    /// `3\frac12`, `3 1/2`: the sum of the integer part and the fraction. The product is a possible reading of the
    /// first spelling.
    Mixed,
    /// In words: `twelve`, `one half`, `2 million`.
    Words,
}

/// A constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Constant {
    /// π.
    Pi,
    /// Euler's number.
    E,
    /// The imaginary unit.
    I,
    /// ∞.
    Infinity,
}

/// A known function.
#[expect(missing_docs, reason = "the names say it")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Function {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Arcsin,
    Arccos,
    Arctan,
    Arccot,
    Arcsec,
    Arccsc,
    Sinh,
    Cosh,
    Tanh,
    Coth,
    Sech,
    Csch,
    Arsinh,
    Arcosh,
    Artanh,
    Arcoth,
    Arsech,
    Arcsch,
    /// Natural logarithm.
    Ln,
    Exp,
    /// `cis θ` is cos θ + i sin θ.
    Cis,
    Gcd,
    Lcm,
    Max,
    Min,
    Re,
    Im,
    /// Complex conjugate, also `\overline{z}` of letters.
    Conj,
    /// Argument of a complex number.
    Arg,
    Sgn,
    Trace,
    Rank,
}

/// Parts of a degree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DegreePart {
    /// π/180.
    Degree,
    /// 1/60 of a degree.
    Minute,
    /// 1/3600 of a degree.
    Second,
}

/// What separates the items of a bare list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Separator {
    /// `,`
    Comma,
    /// `;`, `\\`, or a line.
    Semicolon,
    /// `and`
    And,
    /// `or`
    Or,
}

/// A set with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NamedSet {
    /// ℕ; whether 0 is in it is the caller's choice.
    Naturals,
    /// ℤ
    Integers,
    /// ℚ
    Rationals,
    /// ℝ
    Reals,
    /// ℂ
    Complexes,
    /// Prime numbers, in words.
    Primes,
}

/// A part of a named set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SetPart {
    /// All of it.
    All,
    /// `^+`, `_{>0}`
    Positive,
    /// `^-`, `_{<0}`
    Negative,
    /// `_{\ge 0}`, `_0^+`
    NonNegative,
    /// `_{\le 0}`
    NonPositive,
    /// `^*`, `\setminus \{0\}` written as a star
    NonZero,
}

/// A relation sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// `=`, `:=`
    Equal,
    /// `≠`
    NotEqual,
    /// `<`
    Less,
    /// `≤`
    LessEqual,
    /// `>`
    Greater,
    /// `≥`
    GreaterEqual,
    /// `∈`
    In,
    /// `∉`
    NotIn,
    /// `⊂`, `⊆`
    Subset,
    /// `≈`, `≃`, `≐`
    Approx,
    /// `≡` without a modulus: identically equal.
    Identical,
    /// `∣`: divides.
    Divides,
    /// `∼`, `∝`
    Similar,
    /// `→`, `\mapsto`
    To,
    /// `∥`
    Parallel,
    /// `⊥`
    Perpendicular,
}

impl Comparison {
    /// Whether both sides may change places.
    #[must_use]
    pub fn is_symmetric(self) -> bool {
        matches!(self, Self::Parallel | Self::Perpendicular | Self::Similar)
    }
}
