//! Expressions: an arena of sums, products, powers and functions over exact rationals, built bottom-up.
//!
//! Construction folds rational arithmetic, splits radicals and logarithms of rationals into those of primes, and gives
//! each node a [`Residue`], its value in two finite fields with a random element for every letter and every function of
//! its argument's residue. Equal residues mean the same rational function of letters and atoms, whichever way it is
//! written; what identities between atoms do (sin² + cos² = 1) is decided by balls in [`identity`].

mod apply;
mod build;
mod evaluate;
mod exact;
mod factor;
mod function;
mod germ;
pub mod identity;
mod op;
pub mod order;
mod points;
mod power;
mod radical;
mod residues;
mod search;
mod separation;

use std::collections::HashSet;

use dashu_int::IBig;
use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

use super::fuel::{Fuel, Stop};
use super::modular::{Residue, hash_text, mix};

pub use evaluate::{Evaluator, Point};
pub use germ::proportional_but_for_branches;
pub use op::Op;

/// Bits of a numerator or denominator that is still written out; beyond them powers and factorials stay symbolic.
pub const MOST_BITS: usize = 1 << 16;
const BOUND_LETTERS: u64 = 0x00b0_07ed;
/// Nodes in one arena.
const MOST_NODES: usize = 1 << 20;

/// A node of [`Exprs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(u32);

/// What a node is.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// An exact number.
    Rational(RBig),
    /// π
    Pi,
    /// Euler's number.
    E,
    /// The imaginary unit.
    I,
    /// A letter, or an unknown function of its arguments; its value at a point is drawn from this hash.
    Symbol(u64),
    /// At least two summands.
    Sum(Vec<Id>),
    /// At least two factors.
    Product(Vec<Id>),
    /// base^exponent
    Power(Id, Id),
    /// A function that balls can evaluate.
    Function(Op, Vec<Id>),
    /// `Σ` or `Π` of the body over the bound letter, where a bound has letters.
    Range(Range),
}

/// An expression with its arena.
pub type Part<'e> = (&'e Exprs, Id);

/// A sum or product that is written out where its bounds have values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// What stands for the bound letter in the body.
    pub letter: u64,
    /// The first value.
    pub from: Id,
    /// The last value.
    pub to: Id,
    /// The summand or factor.
    pub body: Id,
    /// Whether it is a product.
    pub product: bool,
}

/// What occurs in an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Class(u8);

impl Class {
    /// A letter.
    pub const SYMBOL: Self = Self(1);
    /// Something that is no rational function of letters over ℚ with i and the square roots of primes.
    pub const ATOM: Self = Self(2);
    /// The imaginary unit.
    pub const IMAGINARY: Self = Self(4);
    /// A letter where only integers make sense: (−1)^n, n!.
    pub const INTEGER: Self = Self(8);
    /// Something transcendental: π, e, a logarithm.
    pub const TRANSCENDENTAL: Self = Self(16);
    /// A function of letters that is made of pieces, or has branches: |x|, ⌊x⌋, √x, ln x.
    pub const PIECEWISE: Self = Self(32);
    /// Something that only evaluation can find to have no value: 1/sin x, √ of a sum, arcsin 2.
    pub const PARTIAL: Self = Self(64);

    /// Whether all of `other` is in.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl std::ops::BitOr for Class {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

#[derive(Debug, Clone)]
struct Node {
    kind: Kind,
    residue: Residue,
    class: Class,
    /// Literal bits and nodes, as if the graph were written out; saturating.
    size: u32,
    /// See [`Exprs::is_real`].
    real: bool,
}

/// An arena of expressions.
#[derive(Debug, Clone, Default)]
pub struct Exprs {
    nodes: Vec<Node>,
    /// Letters with their hashes.
    names: Vec<(u64, Box<str>)>,
}

impl Exprs {
    /// How many nodes there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no one asks")]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// What a node is.
    #[must_use]
    pub fn kind(&self, id: Id) -> &Kind {
        &self.nodes[id.0 as usize].kind
    }

    /// Its value modulo the primes.
    #[must_use]
    pub fn residue(&self, id: Id) -> Residue {
        self.nodes[id.0 as usize].residue
    }

    /// What occurs in it.
    #[must_use]
    pub fn class(&self, id: Id) -> Class {
        self.nodes[id.0 as usize].class
    }

    /// Bits of all literals and four for each node, as if it were written out.
    #[must_use]
    pub fn size(&self, id: Id) -> u32 {
        self.nodes[id.0 as usize].size
    }

    /// The exact number, where it is one.
    #[must_use]
    pub fn as_rational(&self, id: Id) -> Option<&RBig> {
        match self.kind(id) {
            Kind::Rational(value) => Some(value),
            _ => None,
        }
    }

    /// The integer, where it is one.
    #[must_use]
    pub fn as_integer(&self, id: Id) -> Option<&IBig> {
        self.as_rational(id).filter(|value| value.denominator().is_one()).map(RBig::numerator)
    }

    /// Letters, each with the hash that stands for it in [`Kind::Symbol`].
    #[must_use]
    pub fn names(&self) -> &[(u64, Box<str>)] {
        &self.names
    }

    fn push(&mut self, kind: Kind, residue: Residue, class: Class, size: u32) -> Result<Id, Stop> {
        let id = u32::try_from(self.nodes.len()).ok().filter(|id| (*id as usize) < MOST_NODES).ok_or(Stop::Fuel)?;
        let real = self.real_by_form(&kind);
        self.nodes.push(Node { kind, residue, class, size, real });
        Ok(Id(id))
    }

    /// A number.
    ///
    /// # Errors
    /// [`Stop::Fuel`]; [`Stop::Undefined`] for a denominator that is a multiple of one of the primes of [`Residue`].
    pub fn rational(&mut self, value: RBig, fuel: &Fuel) -> Result<Id, Stop> {
        let bits = value.numerator().bit_len() + value.denominator().bit_len();
        fuel.spend(6 + bits as u64 / 64)?;
        let mut residue = Residue::of(value.numerator());
        if !value.denominator().is_one() {
            fuel.spend(20)?;
            residue = residue * Residue::of(value.denominator().as_ibig()).inverse().ok_or(Stop::Undefined)?;
        }
        self.push(Kind::Rational(value), residue, Class::default(), bits as u32)
    }

    /// An integer.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn integer(&mut self, value: i64, fuel: &Fuel) -> Result<Id, Stop> {
        self.rational(RBig::from(value), fuel)
    }

    /// A letter.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn symbol(&mut self, name: &str, fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(10)?;
        let hash = hash_text(name);
        if !self.names.iter().any(|(known, _)| *known == hash) {
            self.names.push((hash, name.into()));
        }
        self.push(Kind::Symbol(hash), Residue::draw(hash), Class::SYMBOL, 4)
    }

    /// An unknown function of its arguments: a letter of its own for every argument.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn unknown(&mut self, name: &str, arguments: &[Id], fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(10)?;
        let hash = arguments.iter().fold(mix(hash_text(name), 0xf00d), |hash, id| mix(hash, self.residue(*id).key()));
        let class = arguments.iter().fold(Class::SYMBOL, |class, id| class | self.class(*id));
        self.push(Kind::Symbol(hash), Residue::draw(hash), class, 8)
    }

    /// π.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn pi(&mut self) -> Result<Id, Stop> {
        self.push(Kind::Pi, Residue::draw(0x7069), Class::ATOM | Class::TRANSCENDENTAL, 4)
    }

    /// Euler's number.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn e(&mut self) -> Result<Id, Stop> {
        self.push(Kind::E, Residue::draw(0x65), Class::ATOM | Class::TRANSCENDENTAL, 4)
    }

    /// The imaginary unit.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn i(&mut self) -> Result<Id, Stop> {
        self.push(Kind::I, Residue::I, Class::IMAGINARY, 4)
    }

    /// Whether two nodes are built from the same parts, as far as their residues and sizes tell.
    #[must_use]
    pub fn is_alike(&self, left: Id, right: Id) -> bool {
        self.residue(left) == self.residue(right) && self.size(left) == self.size(right)
    }

    /// Call `visit` with each operand of a node.
    fn operands(&self, id: Id, mut visit: impl FnMut(Id)) {
        match self.kind(id) {
            Kind::Sum(items) | Kind::Product(items) | Kind::Function(_, items) => items.iter().copied().for_each(visit),
            Kind::Power(base, exponent) => {
                visit(*base);
                visit(*exponent);
            }
            Kind::Range(range) => [range.from, range.to, range.body].into_iter().for_each(visit),
            Kind::Rational(_) | Kind::Pi | Kind::E | Kind::I | Kind::Symbol(_) => {}
        }
    }

    /// A letter for a bound variable, the same for every name that it may have.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn bound_letter(&mut self, depth: usize, fuel: &Fuel) -> Result<(u64, Id), Stop> {
        fuel.spend(10)?;
        let hash = mix(BOUND_LETTERS, depth as u64);
        let id = self.push(Kind::Symbol(hash), Residue::draw(hash), Class::SYMBOL, 4)?;
        Ok((hash, id))
    }

    /// A sum or product whose bounds have letters.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn range(&mut self, range: Range, fuel: &Fuel) -> Result<Id, Stop> {
        fuel.spend(10)?;
        let parts = [range.from, range.to, range.body];
        let key = parts.iter().fold(u64::from(range.product) + 0x5261, |key, id| mix(key, self.residue(*id).key()));
        let size = parts.iter().fold(4u32, |size, id| size.saturating_add(self.size(*id)));
        let class = parts.iter().fold(Class::ATOM | Class::INTEGER, |class, id| class | self.class(*id));
        self.push(Kind::Range(range), Residue::draw(key), class | Class::TRANSCENDENTAL | Class::PARTIAL, size)
    }

    /// Add the hashes of the letters in an expression to `found`, each once.
    pub fn letters(&self, id: Id, found: &mut Vec<u64>) {
        let mut seen = HashSet::new();
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            if !self.class(id).has(Class::SYMBOL) || !seen.insert(id) {
                continue;
            }
            if let Kind::Symbol(hash) = self.kind(id)
                && !self.is_bound(*hash)
                && !found.contains(hash)
            {
                found.push(*hash);
            }
            self.operands(id, |operand| stack.push(operand));
        }
    }

    /// Whether a letter is that of a sum or product.
    fn is_bound(&self, letter: u64) -> bool {
        (0..4).any(|depth| mix(BOUND_LETTERS, depth) == letter)
    }

    /// Whether a letter occurs.
    #[must_use]
    pub fn contains(&self, id: Id, letter: u64) -> bool {
        match self.kind(id) {
            _ if !self.class(id).has(Class::SYMBOL) => return false,
            Kind::Symbol(hash) => return *hash == letter,
            _ => {}
        }
        let mut found = Vec::new();
        self.letters(id, &mut found);
        found.contains(&letter)
    }
}
