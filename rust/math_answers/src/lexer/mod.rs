//! Text to tokens, in one pass: math and prose, LaTeX and plain notation.
//!
//! The lexer keeps what a parser needs to know about meaning (degrees, units, bases, percent signs, fonts) and drops
//! what has none: spacing, sizes, colours, `\left` and `\right`, delimiters of math.

mod backslash;
pub mod command;
mod digits;
mod letters;
pub mod token;

use memchr::{memchr, memchr2};

use super::ast::Comparison;
use crate::error::ParseError;
use token::{Bracket, Kind, Style, Token};

/// Tokens of one answer; past this it is not read.
pub const MAX_TOKENS: usize = 2048;

/// How to take what can be taken in two ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// `1,234` is a thousand and something, rather than two numbers.
    pub grouped: bool,
    /// `2e-3` is 0.002, rather than 2e - 3.
    pub exponents: bool,
    /// A new line separates statements, rather than words.
    pub lines: bool,
}

/// Tokens, and whether the options made a difference.
#[derive(Debug)]
pub struct Lexed<'t> {
    /// The tokens.
    pub tokens: Vec<Token<'t>>,
    /// Whether there is a `1,234`.
    pub has_groups: bool,
    /// Whether there is a `2e-3`.
    pub has_exponents: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// A formula: letters are variables where they can be.
    Math,
    /// Outside the delimiters of a text that has them: letters are words where they can be.
    Prose,
    /// In `\text{…}`: letters are words.
    Text,
}

/// What an opening brace saved.
#[derive(Debug, Clone, Copy)]
struct Frame {
    mode: Mode,
    style: Style,
    single: u8,
    emits: bool,
}

pub(super) struct Lexer<'t> {
    pub(super) text: &'t str,
    pub(super) bytes: &'t [u8],
    pub(super) at: usize,
    pub(super) out: Lexed<'t>,
    pub(super) options: Options,
    /// Arguments of `\frac` still to come, of one digit unless in braces.
    pub(super) single: u8,
    /// Digits before this are in a list that only looks like thousands marks.
    pub(super) ungrouped_until: usize,
    mode: Mode,
    /// The mode outside delimiters.
    base: Mode,
    style: Style,
    /// The next opening brace belongs to a command that set this.
    opening: Option<(Mode, Style, bool)>,
    frames: Vec<Frame>,
    space: bool,
    /// Whether the text has commands, so that short runs of letters are products.
    formula: bool,
    /// Whether the text has a backslash.
    latex: bool,
}

/// Tokens of `text`, which is ASCII but for words of other scripts.
///
/// # Errors
/// [`ParseError::Undecided`] for more than [`MAX_TOKENS`].
pub fn tokens(text: &str, options: Options) -> Result<Lexed<'_>, ParseError> {
    let base = if has_delimiters(text) { Mode::Prose } else { Mode::Math };
    let mut lexer = Lexer {
        text,
        bytes: text.as_bytes(),
        at: 0,
        out: Lexed { tokens: Vec::with_capacity(text.len().min(64)), has_groups: false, has_exponents: false },
        options,
        single: 0,
        ungrouped_until: 0,
        mode: base,
        base,
        style: Style::Plain,
        opening: None,
        frames: Vec::new(),
        space: false,
        formula: memchr2(b'\\', b'^', text.as_bytes()).is_some(),
        latex: memchr(b'\\', text.as_bytes()).is_some(),
    };
    while lexer.at < text.len() {
        lexer.next();
        if lexer.out.tokens.len() > MAX_TOKENS || lexer.frames.len() > MAX_TOKENS {
            return Err(ParseError::Undecided);
        }
    }
    Ok(lexer.out)
}

/// Whether part of the text is marked as math, so that the rest is not.
fn has_delimiters(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(found) = memchr::memchr2(b'\\', b'$', &bytes[at..]) {
        at += found;
        if bytes[at] == b'$' {
            if closing_dollar(bytes, at).is_some() {
                return true;
            }
            at += 1;
        } else if matches!(bytes.get(at + 1), Some(b'(' | b'[')) {
            return true;
        } else {
            at = (at + 2).min(bytes.len());
        }
    }
    false
}

/// Where the math that the dollar at `at` opens is closed; `None` when it is a currency sign: `$5 and $10`.
fn closing_dollar(bytes: &[u8], at: usize) -> Option<usize> {
    if bytes.get(at + 1) == Some(&b'$') {
        return Some(at + 1);
    }
    let mut close = at + 1;
    loop {
        close += memchr(b'$', bytes.get(close..)?)?;
        // Escaped by an odd number of backslashes, as in the lexer; so each search ends at the next that is not.
        if bytes[..close].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 0 {
            break;
        }
        close += 1;
    }
    let opens_amount = bytes.get(close + 1).is_some_and(u8::is_ascii_digit);
    let before = bytes[close - 1];
    if opens_amount && (before.is_ascii_whitespace() || b"-+/,(=<>".contains(&before)) { None } else { Some(close) }
}

impl<'t> Lexer<'t> {
    pub(super) fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    pub(super) fn byte(&self, offset: usize) -> u8 {
        self.bytes.get(self.at + offset).copied().unwrap_or(0)
    }

    pub(super) fn last(&self) -> Option<Kind<'t>> {
        self.out.tokens.last().map(|token| token.kind)
    }

    /// Emit a token of `length` bytes.
    pub(super) fn emit(&mut self, kind: Kind<'t>, length: usize) {
        let start = self.at;
        self.at += length;
        if self.single > 0 && !matches!(kind, Kind::Frac | Kind::Binom) {
            self.single -= 1;
        }
        self.out.tokens.push(Token { kind, start, end: self.at, space: self.space });
        self.space = false;
    }

    fn skip(&mut self, length: usize) {
        self.at += length;
    }

    fn skip_spaces(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn next(&mut self) {
        let byte = self.byte(0);
        if self.opening.is_some() && byte != b'{' && !byte.is_ascii_whitespace() {
            self.opening = None;
        }
        match byte {
            b'0'..=b'9' => self.number(),
            b'.' => self.period(),
            b'\\' => self.backslash(),
            b'{' => self.open_group(),
            b'}' => self.close_group(),
            b'$' => self.dollar(),
            b'\n' if self.options.lines && self.frames.is_empty() && !self.out.tokens.is_empty() => {
                self.emit(Kind::Newline, 1);
            }
            byte if byte.is_ascii_whitespace() || byte == b'~' => {
                self.space = true;
                self.skip(1);
            }
            byte if byte.is_ascii_alphabetic() || byte >= 0x80 => self.letters(),
            _ => self.sign(byte),
        }
    }

    fn sign(&mut self, byte: u8) {
        use Comparison::{Equal, Greater, GreaterEqual, Less, LessEqual, NotEqual, To};
        let next = self.byte(1);
        let (kind, length) = match (byte, next) {
            (b'-', b'>') => (Kind::Relation(To), 2),
            (b'=', b'>') => (Kind::Relation(To), 2),
            (b'=', b'<') => (Kind::Relation(LessEqual), 2),
            (b'=', b'=') => (Kind::Relation(Equal), 2),
            (b':', b'=') => (Kind::Relation(Equal), 2),
            (b'<', b'=') => (Kind::Relation(LessEqual), 2),
            (b'>', b'=') => (Kind::Relation(GreaterEqual), 2),
            (b'!', b'=') if !self.ends_operand() => (Kind::Relation(NotEqual), 2),
            (b'=', _) => (Kind::Relation(Equal), 1),
            (b'<', _) => (Kind::Relation(Less), 1),
            (b'>', _) => (Kind::Relation(Greater), 1),
            (b'*', b'*') => return self.stars(),
            (b'*', _) => (Kind::Times, 1),
            (b'+', _) => (Kind::Plus, 1),
            (b'-', _) => (Kind::Minus, 1),
            (b'/', _) => (Kind::Slash, 1),
            (b'^', _) => (Kind::Caret, 1),
            (b'_', _) => (Kind::Underscore, 1),
            (b'!', _) => (Kind::Bang, 1),
            (b'%', _) => (Kind::Percent, 1),
            (b'\'', _) => (Kind::Prime, 1),
            (b'(', _) => (Kind::Open(Bracket::Round), 1),
            (b')', _) => (Kind::Close(Bracket::Round), 1),
            (b'[', _) => (Kind::Open(Bracket::Square), 1),
            (b']', _) => (Kind::Close(Bracket::Square), 1),
            (b'|', _) => (Kind::Bar, 1),
            (b',', _) => (Kind::Comma, 1),
            (b';', _) => (Kind::Semicolon, 1),
            (b':', _) => (Kind::Colon, 1),
            (b'?', _) => (Kind::Question, 1),
            // `x &= 1` is aligned at its sign, and no cell ends there.
            (b'&', _) if self.text[self.at + 1..].trim_start().starts_with(['=', '<', '>']) => return self.skip(1),
            (b'&', _) => (Kind::Ampersand, 1),
            (b'"' | b'`', _) => {
                self.space = true;
                return self.skip(1);
            }
            _ => (Kind::Unknown, 1),
        };
        self.emit(kind, length);
    }

    /// Whether a number or a bracket ends here without a space, so that `!` is a factorial even before `=`.
    fn ends_operand(&self) -> bool {
        !self.space && matches!(self.last(), Some(Kind::Number(_) | Kind::Close(_)))
    }

    /// `**` is a power between operands, else it marks bold text.
    fn stars(&mut self) {
        let after = self.text[self.at + 2..].trim_start();
        let operand = after.starts_with(|c: char| c.is_ascii_alphanumeric() || "(\\{-".contains(c));
        let even = self.space == (after.len() < self.text.len() - self.at - 2);
        // `sin**2(x)` is a power of the name.
        let function = matches!(self.last(), Some(Kind::Function(_) | Kind::Log(_)));
        if operand && even && (function || self.last().is_some_and(|kind| kind.ends_value())) {
            self.emit(Kind::Caret, 2);
        } else {
            self.skip(2);
        }
    }

    fn period(&mut self) {
        if self.decimals_at(self.at).is_some() {
            return self.number();
        }
        let dots = self.bytes[self.at..].iter().take_while(|byte| **byte == b'.').count();
        if dots > 1 { self.emit(Kind::Ellipsis, dots) } else { self.emit(Kind::Period, 1) }
    }

    fn dollar(&mut self) {
        let double = self.byte(1) == b'$';
        if self.mode == Mode::Math && self.base == Mode::Prose {
            self.mode = Mode::Prose;
        } else if closing_dollar(self.bytes, self.at).is_some() {
            self.mode = Mode::Math;
        } else {
            return self.emit(Kind::Currency("USD"), 1);
        }
        self.space = true;
        self.skip(if double { 2 } else { 1 });
    }

    fn open_group(&mut self) {
        // `10{:}15`: braces that only take away the space around a colon.
        if self.rest().starts_with("{:}") {
            self.skip(1);
            self.emit(Kind::Colon, 1);
            return self.skip(1);
        }
        let saved = Frame { mode: self.mode, style: self.style, single: self.single, emits: true };
        let (mode, style, emits) = self.opening.take().unwrap_or((self.mode, self.style, true));
        if emits {
            self.emit(Kind::Open(Bracket::Group), 1);
        } else {
            self.skip(1);
        }
        self.frames.push(Frame { single: self.single, emits, ..saved });
        (self.mode, self.style, self.single) = (mode, style, 0);
    }

    fn close_group(&mut self) {
        let Some(frame) = self.frames.pop() else { return self.emit(Kind::Close(Bracket::Group), 1) };
        (self.mode, self.style, self.single) = (frame.mode, frame.style, 0);
        if frame.emits {
            self.emit(Kind::Close(Bracket::Group), 1);
        } else {
            self.skip(1);
        }
        self.single = frame.single;
    }
}
