//! Text to tokens, in one pass: math and prose, LaTeX and plain notation.
//!
//! The lexer keeps what a parser needs to know about meaning (degrees, units, bases, percent signs, fonts) and drops
//! what has none: spacing, sizes, colours, `\left` and `\right`, delimiters of math.

use memchr::memchr;

use super::super::Status;
use super::ast::{Comparison, Constant};
use super::command::{self, Action};
use super::token::{Bracket, Environment, Kind, Style, Token};
use super::word;

/// Tokens of one answer; past this it is not read.
pub const MAX_TOKENS: usize = 4096;

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
}

/// Tokens of `text`, which is ASCII but for words of other scripts.
///
/// # Errors
/// [`Status::Undecided`] for more than [`MAX_TOKENS`].
pub fn tokens(text: &str, options: Options) -> Result<Lexed<'_>, Status> {
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
        formula: memchr(b'\\', text.as_bytes()).is_some() || memchr(b'^', text.as_bytes()).is_some(),
    };
    while lexer.at < text.len() {
        lexer.next();
        if lexer.out.tokens.len() > MAX_TOKENS || lexer.frames.len() > MAX_TOKENS {
            return Err(Status::Undecided);
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
        if bytes[close - 1] != b'\\' {
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
        if operand && even && self.last().is_some_and(|kind| kind.ends_value()) {
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

    fn backslash(&mut self) {
        let name = self.bytes[self.at + 1..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
        if name > 0 {
            return self.command(name);
        }
        let kind = match self.byte(1) {
            b'\\' => {
                self.emit(Kind::Newline, 2);
                if self.byte(0) == b'[' {
                    let length = self.bytes[self.at..].iter().take(16).position(|byte| *byte == b']');
                    let points = self.byte(1).is_ascii_digit() || self.byte(1) == b'-';
                    self.at += length.filter(|_| points).map_or(0, |length| length + 1);
                }
                return;
            }
            b'{' if self.minus_braces() => return self.emit(Kind::SetMinus, 1),
            b' ' if self.text[self.at + 1..].trim_start().starts_with('{')
                && self.last().is_some_and(|kind| kind.ends_value() || matches!(kind, Kind::NamedSet(_))) =>
            {
                return self.emit(Kind::SetMinus, 1);
            }
            b'{' => Kind::Open(Bracket::Curly),
            b'}' => Kind::Close(Bracket::Curly),
            b'|' => Kind::DoubleBar,
            b'%' => Kind::Percent,
            b'$' => Kind::Currency("USD"),
            b'&' => Kind::And,
            b'!' => return self.skip(2),
            open @ (b'(' | b'[') => {
                self.mode = Mode::Math;
                let _ = open;
                self.space = true;
                return self.skip(2);
            }
            b')' | b']' => {
                self.mode = self.base;
                self.space = true;
                return self.skip(2);
            }
            b' ' | b',' | b';' | b':' | b'>' | b'/' | b'\n' | b'\t' | b'-' | b'"' | b'\'' => {
                self.space = true;
                return self.skip(2);
            }
            _ => return self.emit(Kind::Unknown, 1),
        };
        self.emit(kind, 2);
    }

    /// `ℝ\{0}` without LaTeX's braces: the backslash takes a set away.
    fn minus_braces(&self) -> bool {
        matches!(self.last(), Some(Kind::NamedSet(_))) && memchr::memmem::find(&self.bytes[self.at..], b"\\}").is_none()
    }

    fn command(&mut self, name_length: usize) {
        let name = &self.text[self.at + 1..self.at + 1 + name_length];
        let length = name_length + 1;
        match command::action(name) {
            Action::Emit(kind) => {
                let start = self.out.tokens.len();
                self.emit(kind, length);
                if let (Kind::Frac | Kind::Binom, Some(_)) = (kind, self.out.tokens.get(start)) {
                    // A fraction as the argument of a fraction leaves the outer one its other argument.
                    self.single = 2 + self.single.saturating_sub(1);
                }
            }
            Action::Space => {
                self.space = true;
                self.skip(length);
            }
            Action::Skip => self.skip(length),
            Action::SkipArgument => {
                self.skip(length);
                self.skip_argument();
            }
            Action::Text => self.open_next(length, Mode::Text, Style::Upright),
            Action::Font(style) => self.open_next(length, Mode::Math, style),
            Action::Group => {
                self.skip(length);
                self.opening = Some((self.mode, self.style, true));
            }
            Action::Blackboard => self.blackboard(length),
            Action::Left => self.delimiter(length, Kind::Open),
            Action::Right => self.delimiter(length, Kind::Close),
            Action::Middle => {
                self.skip(length);
                self.skip_spaces();
                if self.byte(0) == b'|' {
                    self.emit(Kind::Mid, 1);
                }
            }
            Action::Not => self.not(length),
            Action::Begin => self.environment(length, Kind::Begin),
            Action::End => self.environment(length, Kind::End),
        }
    }

    /// The braces that follow set a mode; they are a group only as somebody's argument.
    fn open_next(&mut self, length: usize, mode: Mode, style: Style) {
        self.skip(length);
        if self.byte(0) == b'*' {
            self.skip(1);
        }
        let emits = self.last().is_some_and(|kind| kind.wants_argument()) || self.single > 0;
        self.skip_spaces();
        if self.byte(0) == b'{' {
            self.opening = Some((mode, style, emits));
        } else if self.byte(0).is_ascii_alphabetic() {
            // `\mathrm e`: one letter.
            let name = &self.text[self.at..=self.at];
            self.emit(Kind::Name { name, style }, 1);
        }
    }

    fn skip_argument(&mut self) {
        const LONGEST: usize = 64;
        if self.byte(0) == b'*' {
            self.skip(1);
        }
        self.skip_spaces();
        if self.byte(0) == b'{' {
            let close = self.bytes[self.at..].iter().take(LONGEST).position(|byte| *byte == b'}');
            self.skip(close.map_or(0, |close| close + 1));
        }
    }

    fn blackboard(&mut self, length: usize) {
        let start = self.at;
        self.skip(length);
        self.skip_spaces();
        let braced = self.byte(0) == b'{';
        self.skip(usize::from(braced));
        self.skip_spaces();
        let letter = self.byte(0);
        if !letter.is_ascii_alphabetic() {
            self.at = start;
            return self.emit(Kind::Unknown, length);
        }
        let name = &self.text[self.at..=self.at];
        let kind =
            command::blackboard(char::from(letter)).map_or(Kind::Name { name, style: Style::Bold }, Kind::NamedSet);
        self.emit(kind, 1);
        if braced && self.byte(0) == b'}' {
            self.skip(1);
        }
    }

    /// What follows `\left` and `\right`.
    fn delimiter(&mut self, length: usize, side: fn(Bracket) -> Kind<'static>) {
        self.skip(length);
        self.skip_spaces();
        match (self.byte(0), self.byte(1)) {
            (b'.', _) => self.skip(1),
            (b'|', _) => self.emit(side(Bracket::Abs), 1),
            (b'\\', b'|') => self.emit(side(Bracket::Norm), 2),
            (b'<' | b'>', _) => self.emit(side(Bracket::Angle), 1),
            _ if self.rest().starts_with("\\vert") => self.emit(side(Bracket::Abs), 5),
            _ if self.rest().starts_with("\\Vert") => self.emit(side(Bracket::Norm), 5),
            _ => {}
        }
    }

    fn not(&mut self, length: usize) {
        let start = self.at;
        self.skip(length);
        self.skip_spaces();
        let before = self.out.tokens.len();
        self.next();
        if let [Token { kind, .. }] = &mut self.out.tokens[before..]
            && let Kind::Relation(sign) = *kind
            && let Some(denied) = command::denied(sign)
        {
            *kind = Kind::Relation(denied);
        } else {
            self.out.tokens.truncate(before);
            self.at = start;
            self.emit(Kind::Unknown, length);
        }
    }

    fn environment(&mut self, length: usize, side: fn(Environment) -> Kind<'static>) {
        const LONGEST: usize = 32;
        let start = self.at;
        self.skip(length);
        self.skip_spaces();
        let close = self.bytes[self.at..].iter().take(LONGEST).position(|byte| *byte == b'}');
        let (b'{', Some(close)) = (self.byte(0), close) else {
            self.at = start;
            return self.emit(Kind::Unknown, length);
        };
        let name = self.text.get(self.at + 1..self.at + close).unwrap_or_default().trim_end_matches('*');
        let environment = match name {
            "matrix" | "pmatrix" | "bmatrix" | "Bmatrix" | "smallmatrix" | "psmallmatrix" | "bsmallmatrix"
            | "array" => Environment::Matrix,
            "vmatrix" | "Vmatrix" => Environment::Determinant,
            _ => Environment::Rows,
        };
        self.emit(side(environment), close + 1);
        if name == "array" && self.rest().trim_start().starts_with('{') {
            self.skip_argument();
        }
    }
}

/// Letters, which are words, names or products.
impl<'t> Lexer<'t> {
    fn letters(&mut self) {
        let rest = self.rest();
        let letter =
            |c: char| c.is_alphabetic() || (!c.is_ascii() && c.is_numeric()) || ('\u{300}'..='\u{36f}').contains(&c);
        let length = rest.find(|c: char| !letter(c)).unwrap_or(rest.len());
        if length == 0 {
            let length = rest.chars().next().map_or(1, char::len_utf8);
            return self.emit(Kind::Unknown, length);
        }
        let run = &rest[..length];
        if matches!(run, "a" | "p" | "A" | "P") && matches!(rest.get(1..3), Some(".m" | ".M")) {
            let length = if rest.as_bytes().get(3) == Some(&b'.') { 4 } else { 3 };
            return self.emit(Kind::Word(if matches!(run, "a" | "A") { "a.m" } else { "p.m" }), length);
        }
        if self.mode == Mode::Text {
            if matches!(run, "cis" | "sin" | "cos" | "tan" | "ln" | "log" | "lcm" | "gcd" | "Re" | "Im")
                && let Some(kind) = command::function(run)
            {
                return self.emit(kind, length);
            }
            return self.word(length);
        }
        if self.numeral() {
            return;
        }
        if length == 1 && !(self.mode == Mode::Prose && self.compound_word()) {
            return self.letter(run);
        }
        match self.style {
            Style::Bold => return self.product(run),
            Style::Upright => {
                return match command::function(run) {
                    Some(kind) => self.emit(kind, length),
                    None => self.word(length),
                };
            }
            Style::Plain => {}
        }
        if self.named(run) {
            return;
        }
        if let Some(pieces) = word::segments(run) {
            for piece in pieces {
                let piece = &self.text[self.at..self.at + piece];
                if piece.len() == 1 || !self.named(piece) {
                    self.letter(piece);
                }
            }
            return;
        }
        if self.mode == Mode::Prose || word::classify(run, self.formula) == word::Run::Word {
            self.word(length);
        } else {
            self.product(run);
        }
    }

    /// `y-intercept` in prose.
    fn compound_word(&self) -> bool {
        const SHORTEST: usize = 4;
        let joined = self.bytes.get(self.at + 2..).unwrap_or_default();
        self.byte(1) == b'-'
            && joined.iter().take(SHORTEST).filter(|byte| byte.is_ascii_lowercase()).count() == SHORTEST
    }

    /// A known name in plain letters.
    fn named(&mut self, run: &'t str) -> bool {
        if matches!(run, "oo" | "inf" | "Inf") {
            self.emit(Kind::Constant(Constant::Infinity), run.len());
            return true;
        }
        if !word::is_name(run) {
            return false;
        }
        let kind = match run {
            "pi" | "Pi" | "PI" => Kind::Constant(Constant::Pi),
            "sqrt" => Kind::Sqrt,
            "cbrt" => Kind::CubeRoot,
            "abs" => Kind::Enclose(Bracket::Abs),
            "floor" => Kind::Enclose(Bracket::Floor),
            "ceil" => Kind::Enclose(Bracket::Ceil),
            "infinity" | "infty" => Kind::Constant(Constant::Infinity),
            _ => match (command::greek(run), command::function(run)) {
                (Some(name), _) => Kind::Name { name, style: Style::Plain },
                (None, Some(kind)) => kind,
                (None, None) => return false,
            },
        };
        self.emit(kind, run.len());
        // `log2(8)`, `log10(100)`
        if kind == Kind::Log(None) {
            for (digits, base) in [("10(", 10), ("2(", 2)] {
                if self.rest().starts_with(digits)
                    && let Some(token) = self.out.tokens.last_mut()
                {
                    token.kind = Kind::Log(Some(base));
                    self.at += digits.len() - 1;
                    break;
                }
            }
        }
        true
    }

    fn letter(&mut self, run: &'t str) {
        let after = self.text[self.at + 1..].trim_start_matches(' ');
        let times = matches!(run, "x" | "X")
            && matches!(self.last(), Some(Kind::Number(digits)) if digits != "0")
            && after.starts_with(|c: char| c.is_ascii_digit());
        let kind = if times { Kind::Times } else { Kind::Name { name: run, style: self.style } };
        self.emit(kind, 1);
    }

    fn product(&mut self, run: &'t str) {
        for (start, c) in run.char_indices() {
            self.emit(Kind::Name { name: &run[start..start + c.len_utf8()], style: self.style }, c.len_utf8());
        }
    }

    /// A word of at least `length` bytes, with what hyphens and apostrophes join to it.
    fn word(&mut self, mut length: usize) {
        let rest = self.rest();
        while let Some(joined) = rest[length..].strip_prefix(['-', '\'']) {
            let more = joined.find(|c: char| !c.is_alphabetic()).unwrap_or(joined.len());
            let apostrophe = rest.as_bytes()[length] == b'\'';
            if more == 0 || (more == 1 && !apostrophe) {
                break;
            }
            length += 1 + more;
        }
        self.emit(Kind::Word(&rest[..length]), length);
    }
}
