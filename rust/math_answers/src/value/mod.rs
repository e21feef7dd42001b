//! What an answer is worth: numbers with their marks, collections, regions of the line, matrices, statements.
//!
//! A [`Reading`] is one way to understand a syntax tree, with its expressions in an arena of its own. Values say nothing
//! about equality; [`super::compare`] does.

mod choices;
mod name;
mod number;
mod read;
mod region;
mod sets;
mod solve;
mod statement;
mod system;
mod table;
mod time;

use dashu_ratio::RBig;

use super::ast::{Comparison, NamedSet, SetPart};
use super::expr::{Exprs, Id};
use super::unit::Unit;

pub use choices::{Choices, has_approximations, has_dummies};
pub use read::{Fail, read};
pub use region::{End, Piece, Region};
pub use sets::{pair_region, points};

/// One way to understand an answer.
#[derive(Debug, Clone)]
pub struct Reading {
    /// The arena of every expression in `value`.
    pub exprs: Exprs,
    /// The value.
    pub value: Value,
}

/// What a number carries besides its value.
#[derive(Debug, Clone, PartialEq)]
pub enum Mark {
    /// Nothing.
    Bare,
    /// A percent sign; the number before it.
    Percent(Id),
    /// Degrees of arc; how many. The value is in radians.
    Degree(Id),
    /// A unit; the value is the number before it.
    Unit(Unit),
    /// A base as subscript; the digits as a decimal number where they can be one.
    Base(Option<RBig>),
}

/// A number, or an expression of letters.
#[derive(Debug, Clone, PartialEq)]
pub struct Number {
    /// Its value.
    pub id: Id,
    /// What it carries.
    pub mark: Mark,
}

/// How a collection is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `1, 2`: unordered, repetitions count.
    Bare,
    /// `\{1, 2\}`: unordered, repetitions do not count.
    Set,
    /// `(1, 2)`: ordered; two items may be an open interval.
    Tuple,
    /// `[1, 2]`: ordered; two items may be a closed interval.
    Brackets,
    /// `\langle 1, 2 \rangle`: ordered.
    Vector,
}

impl Shape {
    /// Whether the order of the items counts.
    #[must_use]
    pub fn is_ordered(self) -> bool {
        !matches!(self, Self::Bare | Self::Set)
    }
}

/// A letter or a function that a statement is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// As in [`Exprs::names`]; of a function of its arguments, or of a formula, a key of the whole.
    pub spelling: String,
    /// What it is.
    pub kind: NameKind,
}

/// What a statement is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameKind {
    /// A letter, words, or a tuple of them.
    Letter,
    /// `f(x)`
    Function,
    /// Letters without numbers: `AB`, `a + b`, `\frac{dy}{dx}`. As an equation it says no less.
    Formula,
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A number or an expression.
    Number(Number),
    /// ∞ or −∞.
    Infinite {
        /// Whether it is −∞.
        negative: bool,
    },
    /// Values in a row.
    List {
        /// The items.
        items: Vec<Value>,
        /// How it is written.
        shape: Shape,
    },
    /// A part of the real line.
    Region(Region),
    /// A matrix, row after row.
    Matrix {
        /// Number of columns.
        columns: usize,
        /// All entries.
        entries: Vec<Id>,
    },
    /// `a : b : c`.
    Ratio {
        /// The terms.
        terms: Vec<Id>,
        /// Each but the first over the first.
        quotients: Vec<Id>,
        /// a / b of two terms.
        value: Option<Id>,
    },
    /// `a = b = …`
    Equality {
        /// What stands before the last `=`, where all of it are names: what the statement is about.
        names: Vec<Name>,
        /// All sides.
        sides: Vec<Value>,
        /// Left side minus right side of two numbers.
        difference: Option<Id>,
    },
    /// Comparisons of expressions, all of which hold.
    Inequality {
        /// `(difference of the sides, operator)`: difference < 0 and so on.
        parts: Vec<(Id, Comparison)>,
        /// The letter and where it lies, if that was found.
        solved: Option<(Name, Region)>,
    },
    /// `x ∈ S`
    Member {
        /// What is in.
        element: Box<Value>,
        /// Where.
        set: Box<Value>,
        /// `∉` instead.
        negated: bool,
    },
    /// `a ≡ b (mod m)`; without a left side, a residue class.
    Congruence {
        /// Left side.
        left: Option<Id>,
        /// Right sides, of which one holds.
        right: Vec<Id>,
        /// Modulus.
        modulus: Id,
        /// `17 mod 5` as a number, where it is one.
        remainder: Option<Id>,
    },
    /// Statements that all hold (or of which one holds).
    System {
        /// The statements.
        items: Vec<Value>,
        /// Whether one is enough.
        any: bool,
    },
    /// ℕ, ℤ, ….
    Named(NamedSet, SetPart),
    /// `{f(k) | conditions}`
    Builder {
        /// f(k)
        element: Box<Value>,
        /// What holds.
        conditions: Box<Value>,
    },
    /// Another relation between two values.
    Related {
        /// Its sign.
        operator: Comparison,
        /// Both sides.
        sides: Box<(Value, Value)>,
    },
    /// A time of day.
    Time {
        /// Seconds since midnight; of an hour on the dial where `known` is false.
        seconds: u32,
        /// Whether the half of the day is known.
        known: bool,
        /// The ratio that the text may be instead.
        ratio: Option<Box<Value>>,
        /// Whether that is in lowest terms.
        lowest: bool,
    },
    /// Words; a single letter in its case.
    Text(String),
    /// `…` in a list.
    Ellipsis,
}

impl Value {
    /// Whether it says of a letter only that it is an integer: `k ∈ ℤ`.
    #[must_use]
    pub fn is_domain(&self) -> bool {
        matches!(self, Self::Member { set, negated: false, .. }
            if matches!(**set, Self::Named(NamedSet::Integers | NamedSet::Naturals, _)))
    }
}
