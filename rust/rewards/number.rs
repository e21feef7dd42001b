//! Read a number as an exact rational, or refuse it: never a float, never a guess.
//!
//! Read: thousands marks where they group well (`1,234`, `1{,}234`; not `12,34`), decimals, `e` and `× 10^n` exponents,
//! `3/4`, `3 1/2`, `\frac{3}{4}`, a sign (also `−`), currency signs, bold and math marks, a percent sign, the words
//! hundred to trillion, and units after the number. Refused: anything whose value a reader could doubt, such as
//! `1.2.3`, `5k`, `5x`, `3 + 4`, `5 or 6`.

use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::{Status, strip};

/// Digits in one number, and the largest exponent, that are still read.
const MOST_DIGITS: usize = 4096;
/// Single letters that are a unit directly after a number; any other is taken for algebra or a magnitude.
const UNIT_LETTERS: &str = "mghslLWVANJCFa";
const CURRENCY: [&str; 6] = ["\\$", "$", "€", "£", "¥", "₹"];

/// A number as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Number {
    /// The value before any percent sign is applied: 50 for `50%`.
    pub face: RBig,
    /// Whether a percent sign or the word followed.
    pub percent: bool,
}

impl Number {
    /// The value with the percent sign applied.
    #[must_use]
    pub fn value(&self) -> RBig {
        if self.percent { &self.face / RBig::from(100) } else { self.face.clone() }
    }
}

/// A number found in a text: `text[start..end]`, sign included, units not; or why it was not read.
#[derive(Debug, Clone)]
pub struct Token {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// Its value; [`Status::Unparseable`] or [`Status::Undecided`] (too many digits).
    pub number: Result<Number, Status>,
}

/// Read a text that is one number and nothing else but marks and units; after `=` where there is one.
///
/// # Errors
/// [`Status::NoAnswer`] without any digit, [`Status::Undecided`] past the digit cap, else [`Status::Unparseable`].
pub fn read(text: &str) -> Result<Number, Status> {
    let text = strip(text);
    let (left, body) = text.rsplit_once('=').unwrap_or(("", text));
    if left.contains(char::is_alphabetic) && left.contains(|c: char| c.is_ascii_digit()) {
        return Err(Status::Unparseable);
    }
    let token = next(body, 0, true).ok_or(Status::NoAnswer)?;
    let number = token.number?;
    if opens(&body[..token.start]) && closes(&body[token.end..], false) { Ok(number) } else { Err(Status::Unparseable) }
}

/// Read the first number of a sentence, or the one after its last `=` when the first is part of a calculation.
///
/// # Errors
/// As [`read`].
pub fn first(text: &str) -> Result<Number, Status> {
    let token = next(text, 0, true).ok_or(Status::NoAnswer)?;
    if continues(&text[token.end..]) {
        return match text[token.end..].rsplit_once('=') {
            Some((_, result)) => read(result),
            None => Err(Status::Unparseable),
        };
    }
    token.number
}

/// The last number of a text.
#[must_use]
pub fn last(text: &str) -> Option<Token> {
    let digit = text.bytes().rposition(|byte| byte.is_ascii_digit())?;
    let line = text[..digit].rfind('\n').map_or(0, |at| at + 1);
    let mut found = None;
    let mut from = line;
    while let Some(token) = next(&text[line..], from - line, false) {
        from = line + token.end;
        found = Some(Token { start: line + token.start, end: from, ..token });
    }
    found
}

/// The next number at or after `from`. `leads` says that the text is a statement of its own, so that a leading
/// `- 5` is a negative number and not a list item.
fn next(text: &str, from: usize, leads: bool) -> Option<Token> {
    let bytes = text.as_bytes();
    let mut at = from;
    loop {
        at += bytes.get(at..)?.iter().position(|&byte| byte.is_ascii_digit() || byte == b'\\' || byte == b'.')?;
        let identifier = text[from..at].chars().next_back().is_some_and(|c| c.is_alphabetic() || c == '_');
        let digit_follows = bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
        match bytes[at] {
            b'\\' if fraction_command(&text[at..]).is_some() => break,
            b'\\' => at += 1,
            b'.' if !digit_follows || identifier => at += 1,
            _ if identifier => at += run(&bytes[at..], |byte| byte.is_ascii_alphanumeric() || *byte == b'_'),
            _ => break,
        }
    }
    let mut reader = Reader { text, at, digits: 0 };
    let number = reader.number();
    let (start, negative) = sign(text, from, at, leads);
    let number = number.map(|number| if negative { Number { face: -number.face, ..number } } else { number });
    Some(Token { start, end: reader.at.max(at + 1), number })
}

/// Where the number at `at` starts with its sign and currency, and whether it is negative.
fn sign(text: &str, from: usize, at: usize, leads: bool) -> (usize, bool) {
    let bare = trim_currency(&text[from..at]);
    let spaced = bare.trim_end_matches(super::is_space);
    let is_minus = |c: char| c == '-' || c == '−';
    let Some(before) = spaced.strip_suffix(is_minus) else {
        return (from + bare.len(), false);
    };
    let previous = before.trim_end_matches(super::is_space).chars().next_back();
    let unary = match previous {
        Some(c) => !(c.is_alphanumeric() || is_minus(c) || ")]}%.".contains(c)),
        // At the start of a line a minus apart from its number marks a list item; after another number, a difference.
        None => from == 0 && (leads || spaced.len() == bare.len()),
    };
    if unary { (from + trim_currency(before).len(), true) } else { (from + bare.len(), false) }
}

fn trim_currency(text: &str) -> &str {
    let spaced = text.trim_end_matches(' ');
    CURRENCY.iter().find_map(|sign| spaced.strip_suffix(sign)).unwrap_or(text)
}

fn run(bytes: &[u8], inside: impl Fn(&u8) -> bool) -> usize {
    bytes.iter().position(|byte| !inside(byte)).unwrap_or(bytes.len())
}

/// Length of a leading `\frac`, `\dfrac`, `\tfrac` or `\cfrac`.
fn fraction_command(text: &str) -> Option<usize> {
    ["\\frac", "\\dfrac", "\\tfrac", "\\cfrac"].iter().find(|name| text.starts_with(**name)).map(|name| name.len())
}

struct Reader<'t> {
    text: &'t str,
    at: usize,
    digits: usize,
}

impl<'t> Reader<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn take(&mut self, prefix: &str) -> bool {
        let found = self.rest().starts_with(prefix);
        if found {
            self.at += prefix.len();
        }
        found
    }

    fn skip_spaces(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start_matches([' ', '\u{a0}', '\u{202f}']).len();
    }

    fn digit_at(&self, offset: usize) -> bool {
        self.text.as_bytes().get(self.at + offset).is_some_and(u8::is_ascii_digit)
    }

    fn number(&mut self) -> Result<Number, Status> {
        let mut face = if fraction_command(self.rest()).is_some() { self.fraction_command()? } else { self.plain()? };
        let after = self.at;
        self.skip_spaces();
        let percent = self.take("%") || self.take("\\%") || self.word("percent");
        if !percent {
            let words = [
                ("hundred", 100u64),
                ("thousand", 1000),
                ("million", 1_000_000),
                ("billion", 1_000_000_000),
                ("trillion", 1_000_000_000_000),
            ];
            match words.iter().find(|(word, _)| self.word(word)) {
                Some((_, factor)) => face *= RBig::from(*factor),
                None => self.at = after,
            }
        }
        Ok(Number { face, percent })
    }

    /// Take a whole word.
    fn word(&mut self, word: &str) -> bool {
        let found = self.rest().get(..word.len()).is_some_and(|head| head.eq_ignore_ascii_case(word))
            && !self.rest()[word.len()..].starts_with(char::is_alphabetic);
        if found {
            self.at += word.len();
        }
        found
    }

    /// Digits with or without marks, a fraction of them, a mixed number, or scientific notation.
    fn plain(&mut self) -> Result<RBig, Status> {
        let mut digits = String::new();
        let whole = self.grouped(&mut digits);
        let mut decimals = 0;
        if self.rest().starts_with('.') && self.digit_at(1) {
            let count = run(&self.rest().as_bytes()[1..], u8::is_ascii_digit);
            digits.push_str(&self.rest()[1..=count]);
            (self.at, decimals) = (self.at + 1 + count, count);
        }
        // `1.2.3`, `1.234,5`: consumed, so that no piece of it is read as a number of its own.
        let mut clean = whole;
        while self.rest().starts_with(['.', ',']) && self.digit_at(1) {
            clean = false;
            self.at += 1 + run(&self.rest().as_bytes()[1..], u8::is_ascii_digit);
        }
        let exponent = self.exponent()?;
        let value = if clean { self.integer(&digits) } else { Err(Status::Unparseable) };
        if decimals == 0 && exponent == 0 {
            let before = self.at;
            self.skip_spaces();
            let spaced = self.at > before;
            if fraction_command(self.rest()).is_some() {
                let part = self.fraction_command()?;
                return if part.is_one() || part > RBig::ONE {
                    Err(Status::Unparseable)
                } else {
                    Ok(RBig::from(value?) + part)
                };
            }
            if spaced
                && self.digit_at(0)
                && let Some(part) = self.proper_fraction()
            {
                return Ok(RBig::from(value?) + part?);
            }
            self.at = before;
            if let Some(denominator) = self.denominator() {
                return ratio(value?, denominator?);
            }
        }
        let shift = exponent - decimals as i64;
        let power = IBig::from(10u8).pow(shift.unsigned_abs() as usize);
        if shift < 0 { ratio(value?, power) } else { Ok(RBig::from(value? * power)) }
    }

    /// Digits with thousands marks into `digits`; whether the marks group by threes.
    fn grouped(&mut self, digits: &mut String) -> bool {
        let mut groups = 0;
        let mut good = true;
        let mut lead = 0;
        loop {
            let count = run(self.rest().as_bytes(), u8::is_ascii_digit);
            digits.push_str(&self.rest()[..count]);
            self.at += count;
            groups += 1;
            if groups == 1 {
                lead = count;
            } else {
                good &= count == 3 && (1..=3).contains(&lead) && !digits.starts_with('0');
            }
            let mark =
                ["{,}", "\\,", ","].iter().find(|mark| self.rest().starts_with(**mark) && self.digit_at(mark.len()));
            match mark {
                Some(mark) => self.at += mark.len(),
                None => return good,
            }
        }
    }

    fn integer(&mut self, digits: &str) -> Result<IBig, Status> {
        self.digits += digits.len();
        if self.digits > MOST_DIGITS {
            return Err(Status::Undecided);
        }
        if digits.len() < 19 {
            return Ok(IBig::from(digits.bytes().fold(0u64, |value, digit| value * 10 + u64::from(digit - b'0'))));
        }
        UBig::from_str_radix(digits, 10).map(IBig::from).map_err(|_| Status::Unparseable)
    }

    /// `e±n`, or a multiplication sign and `10^n`; 0 when there is none.
    fn exponent(&mut self) -> Result<i64, Status> {
        let before = self.at;
        if self.rest().starts_with(['e', 'E']) {
            self.at += 1;
            if let Some(value) = self.signed_digits() {
                return value;
            }
            self.at = before;
            return Ok(0);
        }
        self.skip_spaces();
        if ["\\times", "\\cdot", "×", "·", "*", "x"].iter().any(|sign| self.take(sign)) {
            self.skip_spaces();
            if self.take("10^") {
                let braced = self.take("{");
                if let Some(value) = self.signed_digits()
                    && (!braced || self.take("}"))
                {
                    return value;
                }
            }
        }
        self.at = before;
        Ok(0)
    }

    fn signed_digits(&mut self) -> Option<Result<i64, Status>> {
        let negative = self.take("-") || self.take("−");
        if !negative {
            self.take("+");
        }
        let count = run(self.rest().as_bytes(), u8::is_ascii_digit);
        let digits = &self.rest()[..count];
        self.at += count;
        if count == 0 || self.rest().starts_with(char::is_alphabetic) {
            return None;
        }
        let value = digits.parse::<i64>().ok().filter(|value| *value <= MOST_DIGITS as i64);
        Some(value.map(|value| if negative { -value } else { value }).ok_or(Status::Undecided))
    }

    /// `/ n` with `n` a whole number that no further `/ n` or decimal follows.
    fn denominator(&mut self) -> Option<Result<IBig, Status>> {
        let before = self.at;
        self.skip_spaces();
        if !self.take("/") {
            self.at = before;
            return None;
        }
        self.skip_spaces();
        if !self.digit_at(0) {
            self.at = before;
            return None;
        }
        let mut digits = String::new();
        let good = self.grouped(&mut digits);
        let more = self.rest().starts_with(['.', '/']) && self.digit_at(1);
        Some(if good && !more { self.integer(&digits) } else { Err(Status::Unparseable) })
    }

    /// The `1/2` of `3 1/2`, if that is what comes.
    fn proper_fraction(&mut self) -> Option<Result<RBig, Status>> {
        let before = self.at;
        let count = run(self.rest().as_bytes(), u8::is_ascii_digit);
        let digits = &self.rest()[..count];
        self.at += count;
        let Some(denominator) = self.denominator() else {
            self.at = before;
            return None;
        };
        let part = self.integer(digits).and_then(|top| ratio(top, denominator?));
        Some(part.and_then(|part| if part < RBig::ONE { Ok(part) } else { Err(Status::Unparseable) }))
    }

    /// `\frac{a}{b}` or `\frac12` of whole numbers.
    fn fraction_command(&mut self) -> Result<RBig, Status> {
        self.at += fraction_command(self.rest()).unwrap_or(0);
        let top = self.argument()?;
        let bottom = self.argument()?;
        ratio(top, bottom)
    }

    fn argument(&mut self) -> Result<IBig, Status> {
        self.skip_spaces();
        if !self.take("{") {
            let digit = self.rest().get(..1).filter(|_| self.digit_at(0)).ok_or(Status::Unparseable)?;
            self.at += 1;
            return self.integer(digit);
        }
        self.skip_spaces();
        let negative = self.take("-") || self.take("−");
        let mut digits = String::new();
        let good = self.digit_at(0) && self.grouped(&mut digits);
        self.skip_spaces();
        if !good || !self.take("}") {
            return Err(Status::Unparseable);
        }
        self.integer(&digits).map(|value| if negative { -value } else { value })
    }
}

fn ratio(top: IBig, bottom: IBig) -> Result<RBig, Status> {
    if bottom == IBig::ZERO { Err(Status::Unparseable) } else { Ok(RBig::from_parts_signed(top, bottom)) }
}

/// LaTeX commands that wrap a number or its unit without changing its value.
fn is_wrapper(command: &str) -> bool {
    matches!(
        command,
        "text"
            | "textbf"
            | "textrm"
            | "textit"
            | "mathrm"
            | "mathbf"
            | "mbox"
            | "quad"
            | "left"
            | "right"
            | "displaystyle"
            | "circ"
            | "degree"
            | "bf"
            | "rm"
    )
}

/// Whether every LaTeX command is a wrapper and every other character is allowed.
fn only_marks(mut text: &str, allowed: impl Fn(char) -> bool) -> bool {
    while let Some(c) = text.chars().next() {
        let rest = &text[c.len_utf8()..];
        if c == '\\' {
            let length = run(rest.as_bytes(), u8::is_ascii_alphabetic);
            let symbol = length == 0 && rest.starts_with([',', ';', '!', ' ', '(', ')', '[', ']', '$', '%']);
            if !symbol && !is_wrapper(&rest[..length]) {
                return false;
            }
            text = &rest[length.max(usize::from(symbol))..];
        } else if c == '^' {
            let rest = rest.trim_start_matches('{');
            if !rest.starts_with("\\circ") {
                return false;
            }
            text = rest;
        } else if allowed(c) {
            text = rest;
        } else {
            return false;
        }
    }
    true
}

/// Whether what precedes a bare number is only marks and currency.
fn opens(text: &str) -> bool {
    let text = ["US", "USD", "Rs.", "Rs"].iter().find_map(|code| strip(text).strip_prefix(code)).unwrap_or(text);
    only_marks(text, |c| super::is_space(c) || "*_`'\"([{$€£¥₹+".contains(c))
}

/// Whether what follows a number leaves its value alone: units, words and closing marks; no digit in a bare answer.
fn closes(text: &str, sentence: bool) -> bool {
    if continues(text) {
        return false;
    }
    let mark = |c: char| super::is_space(c) || ".,;:?'\"’°²³/-*_`()[]{}$€£¥₹".contains(c) || c.is_alphabetic();
    sentence || only_marks(text, mark)
}

/// Whether the number goes on in a way that changes its value: an operator, a list, a range, algebra.
fn continues(text: &str) -> bool {
    let emphasis = text.trim_start_matches('*');
    if emphasis.len() < text.len() && emphasis.starts_with(char::is_alphanumeric) {
        return true;
    }
    let rest = emphasis.trim_start_matches(|c| super::is_space(c) || "$)}`".contains(c));
    let word = &rest[..rest.find(|c: char| !c.is_alphabetic()).unwrap_or(rest.len())];
    let mut letters = word.chars();
    if let (Some(letter), None) = (letters.next(), letters.next()) {
        return !UNIT_LETTERS.contains(letter);
    }
    let tail = &rest[word.len()..];
    let operand = |text: &str| {
        let text = text.trim_start_matches(|c| super::is_space(c) || "($£€{*-−+".contains(c));
        text.starts_with(|c: char| c.is_ascii_digit() || c == '\\')
    };
    if matches!(word, "and" | "or" | "to" | "times" | "plus" | "minus" | "over") {
        let part = ["a ", "one "].iter().any(|article| tail.trim_start().starts_with(article));
        return operand(tail) || (word == "and" && part);
    }
    if !word.is_empty() {
        return false;
    }
    match rest.chars().next() {
        Some(c @ ('+' | '-' | '−' | '–' | '*' | '/' | '×' | '÷' | '·' | '=' | '<' | '>' | ':' | ',' | '(')) => {
            operand(&rest[c.len_utf8()..])
        }
        Some('\\') => {
            let command = &rest[1..1 + run(&rest.as_bytes()[1..], u8::is_ascii_alphabetic)];
            !command.is_empty() && !is_wrapper(command)
        }
        Some('^') => !rest[1..].trim_start_matches('{').starts_with("\\circ"),
        Some(c) => c.is_numeric() || "√π∞!_≈".contains(c) && c != '!' && c != '_',
        None => false,
    }
}
