//! Letters, which are words, names or products of variables.

use super::super::ast::Constant;
use super::super::unit::Unit;
use super::super::word;
use super::command;
use super::token::{Bracket, Kind, Style};
use super::{Lexer, Mode};
use crate::characters::starts_with_scale;

/// Fewer plain letters behind an underscore are a subscript and factors.
const SHORTEST_SUBSCRIPT_NAME: usize = 3;

impl<'t> Lexer<'t> {
    pub(super) fn letters(&mut self) {
        let rest = self.rest();
        let letter =
            |c: char| c.is_alphabetic() || (!c.is_ascii() && c.is_numeric()) || ('\u{300}'..='\u{36f}').contains(&c);
        let length = rest.find(|c: char| !letter(c)).unwrap_or(rest.len());
        if length == 0 {
            let length = rest.chars().next().map_or(1, char::len_utf8);
            return self.emit(Kind::Unknown, length);
        }
        // `5万元` is fifty thousand of something.
        if let Some(first) = rest.chars().next().filter(|c| word::magnitude(c.encode_utf8(&mut [0; 4])).is_some())
            && starts_with_scale(rest)
            && matches!(self.last(), Some(Kind::Number(_) | Kind::Word(_)))
        {
            return self.emit(Kind::Word(&rest[..first.len_utf8()]), first.len_utf8());
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
                // `\operatorname{floor}(x)`
                let called = ["}(", "}\\left(", "}\\mleft("].iter().any(|call| rest[length..].starts_with(call));
                if called && matches!(run, "floor" | "ceil" | "abs") && self.named(run) {
                    return;
                }
                return match command::function(run).filter(|_| !self.upright_unit(run)) {
                    Some(kind) => self.emit(kind, length),
                    None => self.word(length),
                };
            }
            Style::Plain => {}
        }
        // `x_max` has one subscript in plain text; in LaTeX `x_abc` would be a product.
        if length >= SHORTEST_SUBSCRIPT_NAME && !self.latex && self.last() == Some(Kind::Underscore) {
            return self.emit(Kind::Name { name: run, style: self.style }, length);
        }
        if self.named(run) {
            return;
        }
        // `ArcSin(x)`
        if self.byte(length) == b'('
            && run.starts_with(|c: char| c.is_ascii_uppercase())
            && let Some(kind) = command::function(&run.to_ascii_lowercase())
        {
            return self.emit(kind, length);
        }
        if self.byte(length) == b'(' && word::is_factor_of_function(run) {
            self.letter(&run[..1]);
            self.named(&run[1..]);
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
        if self.mode == Mode::Prose {
            return self.word(length);
        }
        if self.touches(length, b"+*^/-")
            && let Some(name) = function_of_letter(run)
        {
            self.named(&run[..name]);
            return self.letter(&run[name..]);
        }
        // `bce` in `ae+bce` is a product though it has a vowel: words stand apart from signs.
        if self.touches(length, b"+*^")
            && (2..=4).contains(&length)
            && run.bytes().all(|byte| byte.is_ascii_lowercase())
            && !matches!(self.last(), Some(Kind::Number(_)))
            && Unit::known(run).is_none()
        {
            return self.product(run);
        }
        if word::classify(run, self.formula) == word::Run::Word && !(is_exponent(run) && self.in_exponent()) {
            self.word(length);
        } else {
            self.product(run);
        }
    }

    /// Whether one of these signs stands directly before or behind the next `length` bytes.
    fn touches(&self, length: usize, signs: &[u8]) -> bool {
        let before = self.at.checked_sub(1).and_then(|at| self.bytes.get(at));
        [before, self.bytes.get(self.at + length)].into_iter().flatten().any(|byte| signs.contains(byte))
    }

    /// Whether only factors and signs stand between here and a `^{`: the letters of `e^{2it}` are no words.
    fn in_exponent(&self) -> bool {
        const FARTHEST: usize = 8;
        let tokens = &self.out.tokens;
        let factor = |kind: Kind<'_>| {
            matches!(kind, Kind::Number(_) | Kind::Name { .. } | Kind::Constant(_) | Kind::Minus | Kind::Plus)
        };
        let before = tokens.iter().rev().take(FARTHEST).take_while(|token| factor(token.kind)).count();
        let [.., caret, open] = &tokens[..tokens.len() - before] else { return false };
        caret.kind == Kind::Caret && open.kind == Kind::Open(Bracket::Group)
    }

    /// Whether a function's name is a unit: `11 \mathrm{lb}`, `5 \mathrm{min}`.
    fn upright_unit(&self, run: &str) -> bool {
        let rest = self.rest();
        matches!(run, "lb" | "min")
            && self.last().is_some_and(|kind| kind.ends_value())
            && rest[run.len()..].starts_with(['}', '/'])
            && !rest[run.len() + 1..].trim_start().starts_with(['(', '{', '_'])
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
            "abs" | "Abs" => Kind::Enclose(Bracket::Abs),
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

/// Short words that are products in an exponent: `e^{it}`, `e^{-as}`.
fn is_exponent(run: &str) -> bool {
    ["as", "at", "in", "is", "it", "am", "be", "by", "my"].contains(&run)
}

/// The length of the function in a run of a function and one letter: `lnb`, `sint`.
fn function_of_letter(run: &str) -> Option<usize> {
    const FUNCTIONS: [&str; 9] = ["sin", "cos", "tan", "sec", "csc", "cot", "ln", "log", "exp"];
    const WORDS: [&str; 5] = ["cost", "cote", "logo", "sine", "tang"];
    let function = FUNCTIONS.iter().find(|name| run.len() == name.len() + 1 && run.starts_with(**name))?;
    (run.is_ascii() && !WORDS.contains(&run)).then_some(function.len())
}
