//! The nodes of the syntax tree: one variant for each construct.

use dashu_ratio::RBig;

use super::id::{NodeId, SymbolId};
use super::kinds::{Comparison, Constant, DegreePart, Function, NamedSet, NumberForm, Separator, SetPart};
use super::unit::Unit;

/// One construct. Fields of type [`NodeId`] are operands.
#[derive(Debug, Clone, PartialEq)]
pub enum Node {
    /// A number literal, exact. A minus sign and a fraction of two literals are part of the literal: `-5`,
    /// `\frac34`, `1/2`; so are mixed, repeating and scientific numbers.
    Number {
        /// Its exact value.
        value: RBig,
        /// How it is written.
        form: NumberForm,
    },
    /// A numeral with its base as subscript or in words: `52_8`, `101_{\text{two}}`, `52 base 8`.
    BaseNumeral {
        /// The digits as written, upper-case, with a point where there is one.
        digits: String,
        /// The base, from 2 to 36; every digit is smaller.
        base: u8,
        /// Its exact value.
        value: RBig,
    },
    /// π, e, i or ∞. `-∞` is [`Node::Neg`] of it.
    Constant {
        /// Which.
        value: Constant,
        /// Where it is written as the plain letter `e` or `i`, the symbol that it might be instead.
        letter: Option<SymbolId>,
    },
    /// A letter, with subscript and primes: `x`, `x_1`, `\alpha`, `f'`. Its spelling is in [`name`](super::ast::Ast::name): a Greek
    /// letter by its LaTeX name without backslash, a subscript after `_`.
    Symbol(SymbolId),
    /// Words, in lower case, single-spaced, without articles and outer punctuation. Never algebra.
    Text(String),
    /// A time of day: `8:34 p.m.`, `15:30`, `3 PM`, `noon`.
    Time {
        /// Seconds since midnight, by the hour as it is written where `known` is false.
        seconds: u32,
        /// Whether the half of the day is known: by `a.m.` or `p.m.`, or by an hour that only one half has.
        known: bool,
        /// The same text as a ratio, where it can be one: `4:20`, but not `4:05` or `4:20 p.m.`.
        ratio: Option<NodeId>,
    },
    /// `…`, `\ldots`: a list that goes on.
    Ellipsis,

    /// `-a`. Never of a plain number literal, which has its own sign.
    Neg(NodeId),
    /// `a + b - c` as `[a, b, Neg(c)]`; at least two.
    Add(Vec<NodeId>),
    /// `a·b` or `ab`; at least two.
    Mul {
        /// The factors in their order.
        factors: Vec<NodeId>,
        /// Whether every sign is left out, as in `2x`.
        implicit: bool,
    },
    /// `a/b`, `\frac{a}{b}`, `a ÷ b`.
    Div(NodeId, NodeId),
    /// `base^exponent`.
    Pow(NodeId, NodeId),
    /// `\sqrt[index]{radicand}`; a square root without index.
    Root {
        /// The index where there is one.
        index: Option<NodeId>,
        /// What stands under the root.
        radicand: NodeId,
    },
    /// `|a|`.
    Abs(NodeId),
    /// `\|a\|`.
    Norm(NodeId),
    /// `\lfloor a \rfloor`.
    Floor(NodeId),
    /// `\lceil a \rceil`.
    Ceil(NodeId),
    /// `a!`.
    Factorial(NodeId),
    /// `a!!`.
    DoubleFactorial(NodeId),
    /// `\binom{n}{k}`, `nCk`.
    Binomial(NodeId, NodeId),
    /// `nPk`: n!/(n-k)!.
    Permutations(NodeId, NodeId),
    /// A known function of its arguments. A power of the name is a power of the whole, `sin^2 x` as
    /// `Pow(Function(Sin, x), 2)`; `sin^{-1} x` is `Arcsin`.
    Function {
        /// Which.
        name: Function,
        /// One argument; at least one for gcd, lcm, max, min.
        arguments: Vec<NodeId>,
    },
    /// A logarithm; `\log x` without base is the caller's choice of 10 or e, `\lg x` has base 10.
    Log {
        /// The base where it is written.
        base: Option<NodeId>,
        /// Its argument.
        argument: NodeId,
    },
    /// An unknown function of its arguments: `f(x)`, `P(2, 3)`.
    Apply {
        /// The letter with its primes, an index included.
        name: SymbolId,
        /// At least one.
        arguments: Vec<NodeId>,
        /// Whether it may be a product instead, as `f(x+1)` in an answer that never says what f is.
        product: bool,
    },
    /// `\sum_{k=1}^{n} body`.
    Sum(Range),
    /// `\prod_{k=1}^{n} body`.
    Product(Range),
    /// `a mod b`, the remainder; also `a \pmod b` as an answer of its own, the residue class.
    Mod(NodeId, NodeId),
    /// `a ± b`, and `± b` without `a`. All signs of one expression go together: `±` takes the upper where `∓` takes
    /// the lower.
    PlusMinus {
        /// The left operand where there is one.
        left: Option<NodeId>,
        /// The right operand.
        right: NodeId,
        /// Whether it is `∓`.
        flipped: bool,
    },
    /// `a%`.
    Percent(NodeId),
    /// `a°`, and minutes and seconds of arc: `12° 30'` is an [`Node::Add`] of two.
    Degree {
        /// How many.
        value: NodeId,
        /// Of which.
        part: DegreePart,
    },
    /// A value with its unit: `5 cm`, `\$5`, `9.8 m/s^2`, `12 apples`.
    Quantity {
        /// How many.
        value: NodeId,
        /// Of which.
        unit: Unit,
    },

    /// Values without brackets: `1, 2`, `1 and 2`, `1 or 2`, `1; 2`. Unordered. Statements with commas or semicolons
    /// may all hold (`x = 1, y = 2`) or exclude each other (`x = 1, x = 2`); rows of cases are lists of a value and its
    /// condition. `x = 1, 2` is a relation between `x` and a list.
    List {
        /// At least two.
        items: Vec<NodeId>,
        /// What separates them; the last kind where there are several.
        separator: Separator,
    },
    /// `\{a, b\}`, also `{a, b}` in plain text. May be empty.
    Set(Vec<NodeId>),
    /// `(a, b)`. Two items may be an open interval instead.
    Tuple(Vec<NodeId>),
    /// `[a, b]`, at least one item. Two items may be a closed interval, any number a row vector or a list.
    Brackets(Vec<NodeId>),
    /// `\langle a, b \rangle`.
    Vector(Vec<NodeId>),
    /// An interval beyond doubt: by its brackets `[a, b)` or `]a, b[`, an infinite end, or its place beside `∪`, `∩`,
    /// `∖` or after `∈`.
    Interval {
        /// Lower end.
        low: NodeId,
        /// Upper end.
        high: NodeId,
        /// Whether the lower end is inside.
        low_closed: bool,
        /// Whether the upper end is inside.
        high_closed: bool,
    },
    /// A matrix, row after row. `[[1,2],[3,4]]` is one too.
    Matrix {
        /// Number of rows, at least 1.
        rows: u32,
        /// Number of columns, at least 1.
        columns: u32,
        /// `rows · columns` entries.
        entries: Vec<NodeId>,
    },
    /// `vmatrix`, or `\det` of a matrix.
    Determinant(NodeId),
    /// `a^T`, `a^\top` of a matrix or vector.
    Transpose(NodeId),
    /// `a : b : c`; at least two.
    Ratio(Vec<NodeId>),
    /// `a ∪ b`; at least two.
    Union(Vec<NodeId>),
    /// `a ∩ b`; at least two.
    Intersection(Vec<NodeId>),
    /// `a ∖ b`.
    Difference(NodeId, NodeId),
    /// `∅`, `\{\}` in LaTeX is [`Node::Set`] without items.
    EmptySet,
    /// `\mathbb{R}` and its kin.
    NamedSet {
        /// Which.
        set: NamedSet,
        /// `^+`, `_{\ge 0}` and the like.
        part: SetPart,
    },
    /// `\{x \mid conditions\}`.
    SetBuilder {
        /// What is collected: a symbol, or an expression of symbols such as `2k`.
        element: NodeId,
        /// What holds of it: a relation, a [`Node::List`] or [`Node::And`] of them. A domain before the bar
        /// (`x \in \mathbb{R} \mid`) is the first of them.
        conditions: NodeId,
    },
    /// `a < b \le c`: `operators[k]` stands between `operands[k]` and `operands[k + 1]`.
    Relation {
        /// One more than the operators, at least two.
        operands: Vec<NodeId>,
        /// At least one.
        operators: Vec<Comparison>,
    },
    /// `a ≡ b (mod m)`.
    Congruence {
        /// Left side.
        left: NodeId,
        /// Right side; a [`Node::List`] for `x ≡ 1, 2 (mod 5)`.
        right: NodeId,
        /// The modulus.
        modulus: NodeId,
    },
    /// Statements that all hold: `x > 2 and x < 5`; at least two.
    And(Vec<NodeId>),
    /// Statements of which one holds: `x < -1 or x > 3`; at least two.
    Or(Vec<NodeId>),

    /// Several readings of one text, the likeliest first; at least two, none of them an `Either`. At the root, and for
    /// labels and words with a meaning (`B`, `no solution`) where a value stands.
    Either(Vec<NodeId>),
}

/// A bound variable with its range and body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The bound variable.
    pub variable: SymbolId,
    /// Its first value.
    pub from: NodeId,
    /// Its last value.
    pub to: NodeId,
    /// The summand or factor.
    pub body: NodeId,
}

impl Node {
    /// Call `visit` with each operand, in order.
    pub fn for_each_child(&self, mut visit: impl FnMut(NodeId)) {
        match self {
            Self::Number { .. }
            | Self::BaseNumeral { .. }
            | Self::Constant { .. }
            | Self::Symbol(_)
            | Self::Text(_)
            | Self::Ellipsis
            | Self::EmptySet
            | Self::NamedSet { .. } => {}
            Self::Neg(a)
            | Self::Abs(a)
            | Self::Norm(a)
            | Self::Floor(a)
            | Self::Ceil(a)
            | Self::Factorial(a)
            | Self::DoubleFactorial(a)
            | Self::Percent(a)
            | Self::Determinant(a)
            | Self::Transpose(a)
            | Self::Degree { value: a, .. }
            | Self::Quantity { value: a, .. } => visit(*a),
            Self::Div(a, b)
            | Self::Pow(a, b)
            | Self::Binomial(a, b)
            | Self::Permutations(a, b)
            | Self::Mod(a, b)
            | Self::Difference(a, b)
            | Self::Interval { low: a, high: b, .. }
            | Self::SetBuilder { element: a, conditions: b } => {
                visit(*a);
                visit(*b);
            }
            Self::Time { ratio, .. } => ratio.iter().copied().for_each(visit),
            Self::Root { index: a, radicand: b }
            | Self::Log { base: a, argument: b }
            | Self::PlusMinus { left: a, right: b, .. } => {
                if let Some(a) = a {
                    visit(*a);
                }
                visit(*b);
            }
            Self::Sum(range) | Self::Product(range) => {
                visit(range.from);
                visit(range.to);
                visit(range.body);
            }
            Self::Congruence { left, right, modulus } => {
                visit(*left);
                visit(*right);
                visit(*modulus);
            }
            Self::Add(items)
            | Self::Mul { factors: items, .. }
            | Self::Function { arguments: items, .. }
            | Self::Apply { arguments: items, .. }
            | Self::List { items, .. }
            | Self::Set(items)
            | Self::Tuple(items)
            | Self::Brackets(items)
            | Self::Vector(items)
            | Self::Matrix { entries: items, .. }
            | Self::Ratio(items)
            | Self::Union(items)
            | Self::Intersection(items)
            | Self::Relation { operands: items, .. }
            | Self::And(items)
            | Self::Or(items)
            | Self::Either(items) => items.iter().copied().for_each(visit),
        }
    }
}
