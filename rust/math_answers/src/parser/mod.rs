//! Tokens to a tree: recursive descent with a bound on nesting, one module for each layer of the grammar.
//!
//! From the outside in: [`statement`] (lists, relations), [`expression`] (sets, ratios, sums), [`product`], [`power`],
//! [`primary`] (numbers, roots, named sets), [`name`] (letters), [`function`], [`bracket`] (everything in brackets),
//! [`suffix`] and [`measure`] (what stands behind a value: degrees, bases, money, units), [`time`] (times of day), [`prose`]
//! (words).

mod bracket;
mod expression;
mod function;
mod measure;
mod name;
mod power;
mod primary;
mod product;
mod prose;
mod statement;
mod suffix;
mod time;

use super::ast::{Ast, Node, NodeId};
use super::lexer::token::{Bracket, Kind, Token};
use crate::error::ParseError;

pub(super) use prose::{is_text, value_start};

/// Steps into brackets, arguments and exponents that are still read; a bracket takes two.
pub const MAX_NESTING: u16 = 200;

/// Bits of all long literals together: `1e999` is written in five characters and takes as long as 3,319 bits.
const MOST_LITERAL_BITS: usize = 1 << 17;
/// A literal of fewer bits costs no more than its tokens.
const LONG_LITERAL: usize = 1024;
const LEAST_STEPS: usize = 256;
const STEPS_PER_TOKEN: usize = 8;

pub(super) type Parsed<T> = Result<T, ParseError>;

/// What may be read in two ways, beside what the lexer decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Choices {
    /// `1/2x` is 1/(2x), rather than (1/2)x.
    pub(super) tight_division: bool,
    /// `5 m` is five metres, rather than 5·m.
    pub(super) letter_units: bool,
    /// `i` beside `j` is a unit vector, rather than the imaginary unit.
    pub(super) unit_vectors: bool,
}

/// Which choices there were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Seen {
    pub(super) division: bool,
    pub(super) letter_unit: bool,
    pub(super) i: bool,
    pub(super) j: bool,
}

pub(super) struct Parser<'a, 't> {
    pub(super) text: &'t str,
    pub(super) tokens: &'a mut [Token<'t>],
    pub(super) at: usize,
    pub(super) ast: &'a mut Ast,
    pub(super) choices: Choices,
    pub(super) seen: Seen,
    depth: u16,
    /// Nested things read so far, those of abandoned attempts included.
    steps: usize,
    /// Bits of the long literals read so far.
    literal_bits: usize,
    /// Letters that `f(x) = …` has made functions.
    defined: Vec<String>,
    context: Context<'t>,
}

/// What the enclosing brackets make of some signs.
#[derive(Debug, Clone, Copy, Default)]
struct Context<'t> {
    /// A `|` closes.
    bar: bool,
    /// A `\|` closes.
    double_bar: bool,
    /// `|` and `:` separate the element of a set from its conditions.
    set: bool,
    /// A `[` closes: `]a, b[`.
    french: bool,
    /// A `>` closes: `<1, 2>`.
    angle: bool,
    /// The variable that a sum or product binds.
    bound: Option<&'t str>,
}

impl<'t> Parser<'_, 't> {
    /// Read all tokens from `at` on as one answer.
    pub(super) fn answer<'a>(
        text: &'t str,
        tokens: &'a mut [Token<'t>],
        at: usize,
        ast: &'a mut Ast,
        choices: Choices,
    ) -> (Parsed<NodeId>, Seen) {
        let context = Context::default();
        let mut parser = Parser {
            text,
            tokens,
            at,
            ast,
            choices,
            seen: Seen::default(),
            depth: 0,
            steps: 0,
            literal_bits: 0,
            defined: Vec::new(),
            context,
        };
        let root = parser.root();
        (root, parser.seen)
    }

    fn peek(&self) -> Option<Kind<'t>> {
        self.kind_at(0)
    }

    fn kind_at(&self, offset: usize) -> Option<Kind<'t>> {
        self.tokens.get(self.at + offset).map(|token| token.kind)
    }

    fn previous(&self) -> Option<Kind<'t>> {
        self.at.checked_sub(1).and_then(|at| self.tokens.get(at)).map(|token| token.kind)
    }

    /// Whether space precedes the token `offset` ahead.
    fn space_at(&self, offset: usize) -> bool {
        self.tokens.get(self.at + offset).is_none_or(|token| token.space)
    }

    fn eat(&mut self, kind: Kind<'_>) -> bool {
        let found = self.peek() == Some(kind);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, kind: Kind<'_>) -> Parsed<()> {
        if self.eat(kind) { Ok(()) } else { Err(ParseError::Unparseable) }
    }

    /// Whether the token `offset` ahead is this word.
    fn word_at(&self, offset: usize, word: &str) -> bool {
        matches!(self.kind_at(offset), Some(Kind::Word(found)) if found.eq_ignore_ascii_case(word))
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let found = self.word_at(0, word);
        self.at += usize::from(found);
        found
    }

    fn push(&mut self, node: Node) -> Parsed<NodeId> {
        self.ast.push(node)
    }

    /// Read something nested.
    fn nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.depth += 1;
        self.steps += 1;
        // Some brackets are read twice, when the first attempt does not end well; within each other they would be read
        // over and over.
        if self.depth > MAX_NESTING || self.steps > LEAST_STEPS + STEPS_PER_TOKEN * self.tokens.len() {
            return Err(ParseError::Undecided);
        }
        let result = read(self);
        self.depth -= 1;
        result
    }

    /// Read something in brackets, where the signs of the outside have no meaning.
    fn within<T>(&mut self, inside: Context<'t>, read: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        let outside = self.context;
        self.context = Context { bound: outside.bound, ..inside };
        let result = self.nested(read);
        self.context = outside;
        result
    }

    /// Whether a bracket of this kind opens here.
    fn opens(&self, bracket: Bracket) -> bool {
        self.peek() == Some(Kind::Open(bracket))
    }
}
