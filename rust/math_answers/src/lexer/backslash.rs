//! What a backslash starts: commands, escaped signs, delimiters of math, environments.

use super::super::ast::Comparison;
use super::command::{self, Action};
use super::token::{Bracket, Environment, Kind, Style};
use super::{Lexer, Mode};

impl<'t> Lexer<'t> {
    pub(super) fn backslash(&mut self) {
        let name = self.bytes[self.at + 1..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
        if name > 0 {
            return self.command(name);
        }
        let kind = match self.byte(1) {
            b'\\' => {
                // `x &= 10 + 2 \\ &= 12`: the next row goes on with the statement.
                let after = self.text[self.at + 2..].trim_start().trim_start_matches('&').trim_start();
                if after.starts_with('=') && !after.starts_with("=>") {
                    self.space = true;
                    return self.skip(2);
                }
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
        if matches!(name, "text" | "mathrm") && self.mode != Mode::Text && self.numeral() {
            return;
        }
        let mut action = command::action(name);
        let mut length = name_length + 1;
        // `\leqx`: a command whose argument is glued to it.
        if action == Action::Emit(Kind::Unknown)
            && let Some((glued, known)) = command::glued(name)
        {
            (action, length) = (known, glued + 1);
        }
        match action {
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

    /// `\not=`, `\not\in`: the relation sign that follows, denied.
    fn not(&mut self, length: usize) {
        let rest = self.text[self.at + length..].trim_start();
        let before = self.text.len() - self.at - rest.len();
        let (sign, more) = match rest.as_bytes() {
            [b'=', ..] => (Some(Comparison::Equal), 1),
            [b'<', ..] => (Some(Comparison::Less), 1),
            [b'>', ..] => (Some(Comparison::Greater), 1),
            [b'\\', name @ ..] => {
                let count = name.iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
                match command::action(&rest[1..=count]) {
                    Action::Emit(Kind::Relation(sign)) => (Some(sign), count + 1),
                    _ => (None, 0),
                }
            }
            _ => (None, 0),
        };
        match sign.and_then(command::denied) {
            Some(sign) => self.emit(Kind::Relation(sign), before + more),
            None => self.emit(Kind::Unknown, length),
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
