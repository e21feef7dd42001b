//! Tokens: what the lexer hands to the parser.

use super::super::ast::{Comparison, Constant, Function, NamedSet};

/// A token with its place in the text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token<'t> {
    /// What it is.
    pub kind: Kind<'t>,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// Whether space precedes it.
    pub space: bool,
}

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind<'t> {
    /// A number literal as written, with its marks, repeating part and exponent.
    Number(&'t str),
    /// Digits beyond 9 with their base: `2BF_{16}`.
    Numeral {
        /// Upper-case digits.
        digits: &'t str,
        /// From 11 to 36.
        base: u8,
    },
    /// A letter, or a Greek letter by name.
    Name {
        /// Its name.
        name: &'t str,
        /// Its font.
        style: Style,
    },
    /// A word of prose, from `\text{…}` or plain text.
    Word(&'t str),
    /// A known function.
    Function(Function),
    /// `\log`, with a base that its name implies (`\lg`, `log2`).
    Log(Option<u8>),
    /// `\ker`, `\dim`: an operator that is read and not evaluated.
    Operator(&'static str),
    /// `\det`
    Det,
    /// π, ∞
    Constant(Constant),
    /// `\frac` and kin
    Frac,
    /// `\binom` and kin
    Binom,
    /// `\sqrt`
    Sqrt,
    /// `cbrt`
    CubeRoot,
    /// `\overline`, `\bar`, over a value.
    Overline,
    /// `\vec`, `\hat`, `\overrightarrow`: the letters below are a symbol; dots tell it from the plain letter.
    Arrow(Option<&'static str>),
    /// `\angle`, `\triangle`: names what follows.
    Figure(&'static str),
    /// `\sum`
    Sum,
    /// `\prod`
    Product,
    /// An opening bracket.
    Open(Bracket),
    /// A closing bracket.
    Close(Bracket),
    /// `|`
    Bar,
    /// `\|`
    DoubleBar,
    /// `abs`, `floor`, `ceil` in plain text.
    Enclose(Bracket),
    /// `\mid`, `\middle|`
    Mid,
    /// `^`
    Caret,
    /// `_`
    Underscore,
    /// `+`
    Plus,
    /// `-`
    Minus,
    /// `\times`, `\cdot`, `*`
    Times,
    /// `/`
    Slash,
    /// `\div`
    Divide,
    /// `\over`
    Over,
    /// `\choose`
    Choose,
    /// `\pm`
    PlusMinus,
    /// `\mp`
    MinusPlus,
    /// `!`
    Bang,
    /// `%`
    Percent,
    /// `'`
    Prime,
    /// `\circ`, after `^` a degree sign.
    Circ,
    /// `\degree`, `°`
    Degree,
    /// `,`
    Comma,
    /// `;`
    Semicolon,
    /// `:`
    Colon,
    /// `.` that belongs to no number
    Period,
    /// `?`
    Question,
    /// `\ldots`, `...`
    Ellipsis,
    /// A relation sign.
    Relation(Comparison),
    /// `\land`, `&` in prose
    And,
    /// `\lor`
    Or,
    /// `\cup`
    Cup,
    /// `\cap`
    Cap,
    /// `\setminus`
    SetMinus,
    /// `\emptyset`
    EmptySet,
    /// `\mathbb{R}`
    NamedSet(NamedSet),
    /// `\bmod`, `\mod`
    Mod,
    /// `\pmod`
    PMod,
    /// A currency sign, by its code.
    Currency(&'static str),
    /// `\top`
    Top,
    /// `\begin{…}`
    Begin(Environment),
    /// `\end{…}`
    End(Environment),
    /// `&`
    Ampersand,
    /// `\\`
    Newline,
    /// What no answer is made of.
    Unknown,
}

/// The font of a letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// As in formulas and plain text.
    Plain,
    /// `\mathrm`: a unit or a constant rather than a variable.
    Upright,
    /// `\mathbf`: a vector or a label rather than a constant.
    Bold,
}

/// Kinds of brackets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bracket {
    /// `( )`
    Round,
    /// `[ ]`
    Square,
    /// `\{ \}`
    Curly,
    /// `{ }`
    Group,
    /// `⌊ ⌋`
    Floor,
    /// `⌈ ⌉`
    Ceil,
    /// `⟨ ⟩`
    Angle,
    /// `\left| \right|`
    Abs,
    /// `‖ ‖`
    Norm,
}

/// Kinds of `\begin{…}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Environment {
    /// `matrix` in any brackets but bars
    Matrix,
    /// `vmatrix`
    Determinant,
    /// `cases`, `aligned` and the like: a statement on each row
    Rows,
}

impl Kind<'_> {
    /// Whether a value may end with this token.
    pub fn ends_value(&self) -> bool {
        matches!(
            self,
            Kind::Number(_)
                | Kind::Numeral { .. }
                | Kind::Name { .. }
                | Kind::Constant(_)
                | Kind::Close(_)
                | Kind::Bar
                | Kind::DoubleBar
                | Kind::Bang
                | Kind::Prime
                | Kind::Percent
                | Kind::Degree
        )
    }

    /// Whether the token takes what follows as its argument, so that a font command there needs its braces.
    pub fn wants_argument(&self) -> bool {
        matches!(
            self,
            Kind::Caret | Kind::Underscore | Kind::Frac | Kind::Binom | Kind::Sqrt | Kind::Overline | Kind::Arrow(_)
        )
    }
}
