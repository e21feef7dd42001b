//! Letters with subscripts, primes, accents and brackets; what they name.

use super::super::ast::{Comparison, Constant, Function, Node, NodeId, NumberForm};
use super::super::lexer::token::{Bracket, Kind, Style};
use super::super::literal;
use super::{Parsed, Parser};
use crate::error::ParseError;

/// Letters that name a function when brackets follow.
const FUNCTION_LETTERS: [&str; 11] = ["f", "g", "h", "F", "G", "H", "P", "Q", "phi", "psi", "Phi"];
/// A subscript is part of a name; one longer than this is no name.
const LONGEST_SUBSCRIPT: usize = 64;

impl<'t> Parser<'_, 't> {
    /// A letter with subscript, primes and, for some, brackets.
    pub(super) fn name(&mut self, name: &'t str, style: Style) -> Parsed<NodeId> {
        if let Some(count) = self.subscripted_count(name, style)? {
            return Ok(count);
        }
        let starts_statement = !matches!(
            self.previous(),
            Some(
                Kind::Number(_)
                    | Kind::Name { .. }
                    | Kind::Caret
                    | Kind::Close(_)
                    | Kind::Slash
                    | Kind::Times
                    | Kind::Constant(_)
            )
        );
        self.at += 1;
        let mut full = std::borrow::Cow::Borrowed(name);
        loop {
            match self.peek() {
                Some(Kind::Underscore) => {
                    self.at += 1;
                    let subscript = self.subscript()?;
                    full.to_mut().push('_');
                    full.to_mut().push_str(&subscript);
                }
                Some(Kind::Prime) => {
                    self.at += 1;
                    full.to_mut().push('\'');
                }
                Some(Kind::Caret) if self.kind_at(1) == Some(Kind::Prime) => {
                    self.at += 2;
                    full.to_mut().push('\'');
                }
                Some(Kind::Caret) if self.opens_at(1, Bracket::Group) && self.kind_at(2) == Some(Kind::Prime) => {
                    self.at += 2;
                    while self.eat(Kind::Prime) {
                        full.to_mut().push('\'');
                    }
                    self.expect(Kind::Close(Bracket::Group))?;
                }
                _ => break,
            }
        }
        let letter = full.trim_end_matches('\'');
        let letter = letter.split_once('_').map_or(letter, |(letter, _)| letter);
        let function = FUNCTION_LETTERS.contains(&letter) || self.defined.iter().any(|name| **name == *full);
        if function && self.inverse() {
            full.to_mut().push_str("^-1");
        }
        if self.opens(Bracket::Round)
            && let Some(node) = self.application(&full, function, starts_statement)?
        {
            return Ok(node);
        }
        if full.len() == name.len() {
            return self.letter(name, style);
        }
        let symbol = self.ast.intern(&full)?;
        self.push(Node::Symbol(symbol))
    }

    /// `C_{10}^{3}`, `\mathrm{A}_5^2`: combinations and arrangements of literal numbers.
    fn subscripted_count(&mut self, name: &str, style: Style) -> Parsed<Option<NodeId>> {
        if !(name == "C" || (matches!(name, "A" | "P") && style == Style::Upright)) {
            return Ok(None);
        }
        let (Some(top), after) = self.script_number(1, Kind::Underscore) else { return Ok(None) };
        let (Some(bottom), after) = self.script_number(after, Kind::Caret) else { return Ok(None) };
        self.at += after;
        let top = self.push(Node::Number { value: literal::value(top)?.0, form: NumberForm::Integer })?;
        let bottom = self.push(Node::Number { value: literal::value(bottom)?.0, form: NumberForm::Integer })?;
        self.push(if name == "C" { Node::Binomial(top, bottom) } else { Node::Permutations(top, bottom) }).map(Some)
    }

    /// The digits in a script `offset` tokens ahead, and the offset behind it.
    fn script_number(&self, offset: usize, script: Kind<'_>) -> (Option<&'t str>, usize) {
        if self.kind_at(offset) != Some(script) {
            return (None, offset);
        }
        let grouped = usize::from(self.opens_at(offset + 1, Bracket::Group));
        let closed = grouped == 0 || self.kind_at(offset + 3) == Some(Kind::Close(Bracket::Group));
        match self.kind_at(offset + 1 + grouped) {
            Some(Kind::Number(digits)) if closed && digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                (Some(digits), offset + 2 + 2 * grouped)
            }
            _ => (None, offset),
        }
    }

    pub(super) fn opens_at(&self, offset: usize, bracket: Bracket) -> bool {
        self.kind_at(offset) == Some(Kind::Open(bracket))
    }

    /// `^{-1}` between a function and its brackets.
    fn inverse(&mut self) -> bool {
        let found = self.peek() == Some(Kind::Caret)
            && self.opens_at(1, Bracket::Group)
            && self.kind_at(2) == Some(Kind::Minus)
            && self.kind_at(3) == Some(Kind::Number("1"))
            && self.kind_at(4) == Some(Kind::Close(Bracket::Group))
            && self.opens_at(5, Bracket::Round);
        if found {
            self.at += 5;
        }
        found
    }

    /// A letter with brackets behind it: a function, or `None` where it is a factor.
    fn application(&mut self, name: &str, function: bool, starts: bool) -> Parsed<Option<NodeId>> {
        let (start, seen) = (self.at, self.seen);
        if !(function || self.has_comma_inside() || (starts && self.defines())) {
            return Ok(None);
        }
        let arguments = self.arguments()?;
        if name == "C" && arguments.len() == 2 {
            let node = Node::Binomial(arguments[0], arguments[1]);
            return self.push(node).map(Some);
        }
        let defines = matches!(self.peek(), Some(Kind::Relation(Comparison::Equal))) && starts;
        // `t(4, 5, 6)` is a multiple of a vector.
        let numbers = arguments.iter().all(|id| matches!(self.ast.node(*id), Node::Number { .. }));
        if !function && !defines && numbers && name.starts_with(|c: char| c.is_ascii_lowercase()) {
            (self.at, self.seen) = (start, seen);
            return Ok(None);
        }
        if !function && arguments.len() < 2 && !defines {
            (self.at, self.seen) = (start, seen);
            return Ok(None);
        }
        let product = arguments.len() == 1 && !defines && !self.defined.iter().any(|known| known == name);
        if defines && !function {
            self.defined.push(name.to_owned());
        }
        let name = self.ast.intern(name)?;
        self.push(Node::Apply { name, arguments, product }).map(Some)
    }

    /// Whether the brackets that open here hold a comma of their own, soon.
    pub(super) fn has_comma_inside(&self) -> bool {
        const FARTHEST: usize = 48;
        let mut depth = 0u32;
        for token in self.tokens.iter().skip(self.at).take(FARTHEST) {
            match token.kind {
                Kind::Open(_) => depth += 1,
                Kind::Close(_) if depth <= 1 => return false,
                Kind::Close(_) => depth -= 1,
                Kind::Comma if depth == 1 => return true,
                _ => {}
            }
        }
        false
    }

    /// Whether `(x) =` or `(0) =` follows: the left side of a definition.
    fn defines(&self) -> bool {
        matches!(self.kind_at(1), Some(Kind::Name { .. } | Kind::Number(_)))
            && self.kind_at(2) == Some(Kind::Close(Bracket::Round))
            && matches!(self.kind_at(3), Some(Kind::Relation(Comparison::Equal)))
    }

    /// A bare letter; `e` and `i` are constants that may be symbols.
    pub(super) fn letter(&mut self, name: &'t str, style: Style) -> Parsed<NodeId> {
        let symbol = self.ast.intern(name)?;
        self.seen.i |= name == "i" && style == Style::Plain;
        self.seen.j |= name == "j";
        let constant = match name {
            "e" => Some(Constant::E),
            "i" => Some(Constant::I),
            _ => None,
        };
        let node = match constant {
            Some(value)
                if style != Style::Bold
                    && self.context.bound != Some(name)
                    && !(self.choices.unit_vectors && value == Constant::I) =>
            {
                Node::Constant { value, letter: (style == Style::Plain).then_some(symbol) }
            }
            _ => Node::Symbol(symbol),
        };
        self.push(node)
    }

    /// A letter with the subscript that stands here.
    pub(super) fn indexed(&mut self, letter: NodeId) -> Parsed<NodeId> {
        let Node::Symbol(symbol) = self.ast.node(letter) else { return Err(ParseError::Unparseable) };
        let name = self.ast.name(*symbol).to_owned();
        if name.contains('_') {
            return Err(ParseError::Unparseable);
        }
        self.at += 1;
        let subscript = self.subscript()?;
        let symbol = self.ast.intern(&format!("{name}_{subscript}"))?;
        self.push(Node::Symbol(symbol))
    }

    /// The text of a subscript without spaces, braces and font commands.
    pub(super) fn subscript(&mut self) -> Parsed<String> {
        let (start, end);
        if self.opens(Bracket::Group) {
            let mut depth = 0u32;
            start = self.tokens.get(self.at).map_or(0, |token| token.end);
            loop {
                match self.peek().ok_or(ParseError::Unparseable)? {
                    Kind::Open(Bracket::Group) => depth += 1,
                    Kind::Close(Bracket::Group) => depth -= 1,
                    _ => {}
                }
                self.at += 1;
                if depth == 0 {
                    break;
                }
            }
            end = self.tokens.get(self.at - 1).map_or(start, |token| token.start);
        } else {
            let token = self.tokens.get(self.at).ok_or(ParseError::Unparseable)?;
            if !matches!(
                token.kind,
                Kind::Number(_) | Kind::Name { .. } | Kind::Word(_) | Kind::Constant(_) | Kind::EmptySet
            ) {
                return Err(ParseError::Unparseable);
            }
            (start, end) = (token.start, token.end);
            self.at += 1;
        }
        let raw = self.text.get(start..end).unwrap_or_default();
        if raw.len() > LONGEST_SUBSCRIPT {
            return Err(ParseError::Unparseable);
        }
        let mut plain = raw.to_owned();
        for command in ["\\text", "\\mathrm", "\\mathit", "\\rm", "\\mbox"] {
            plain = plain.replace(command, "");
        }
        plain.retain(|c| !c.is_whitespace() && !"{}\\".contains(c));
        Ok(plain)
    }

    /// `\overline{AB}` is a segment, `\bar z` a conjugate.
    pub(super) fn overline(&mut self) -> Parsed<NodeId> {
        self.at += 1;
        if let Some(letters) = self.capital_letters() {
            let symbol = self.ast.intern(&letters)?;
            return self.push(Node::Symbol(symbol));
        }
        let value = self.argument()?;
        if matches!(self.ast.node(value), Node::Number { .. }) {
            return Err(ParseError::Unparseable);
        }
        self.push(Node::Function { name: Function::Conj, arguments: vec![value] })
    }

    /// The capitals of a group of at least two, the group included.
    fn capital_letters(&mut self) -> Option<String> {
        if !self.opens(Bracket::Group) {
            return None;
        }
        let mut letters = String::new();
        let mut at = self.at + 1;
        while let Some(Kind::Name { name, .. }) = self.tokens.get(at).map(|token| token.kind) {
            if !name.starts_with(|c: char| c.is_ascii_uppercase()) {
                return None;
            }
            letters.push_str(name);
            at += 1;
        }
        if letters.len() < 2 || self.tokens.get(at).map(|token| token.kind) != Some(Kind::Close(Bracket::Group)) {
            return None;
        }
        self.at = at + 1;
        Some(letters)
    }

    /// `\vec{v}`, `\hat{i}`, `\overrightarrow{AB}`: a symbol of all its letters.
    pub(super) fn arrow(&mut self, dots: Option<&str>) -> Parsed<NodeId> {
        self.at += 1;
        let grouped = self.opens(Bracket::Group);
        let mut at = self.at + usize::from(grouped);
        let mut letters = String::new();
        while let Some(Kind::Name { name, .. }) = self.tokens.get(at).map(|token| token.kind) {
            letters.push_str(name);
            at += 1;
            if !grouped {
                break;
            }
        }
        let closes = !grouped || self.tokens.get(at).map(|token| token.kind) == Some(Kind::Close(Bracket::Group));
        if letters.is_empty() || !closes {
            return self.argument();
        }
        self.at = at + usize::from(grouped);
        letters.push_str(dots.unwrap_or_default());
        if self.eat(Kind::Underscore) {
            let subscript = self.subscript()?;
            letters.push('_');
            letters.push_str(&subscript);
        }
        let symbol = self.ast.intern(&letters)?;
        self.push(Node::Symbol(symbol))
    }

    /// `\angle ABC`, `\triangle A B_1 C`.
    pub(super) fn figure(&mut self, figure: &str) -> Parsed<NodeId> {
        self.at += 1;
        let mut name = format!("{figure} ");
        let length = name.len();
        loop {
            match self.peek() {
                Some(Kind::Name { name: letter, .. }) => name.push_str(letter),
                Some(Kind::Word(word)) if name.len() == length && word.len() <= 4 => name.push_str(word),
                Some(Kind::Underscore) if name.len() > length => {
                    self.at += 1;
                    let subscript = self.subscript()?;
                    name.push('_');
                    name.push_str(&subscript);
                    continue;
                }
                _ => break,
            }
            self.at += 1;
        }
        if name.len() == length {
            return Err(ParseError::Unparseable);
        }
        let symbol = self.ast.intern(&name)?;
        self.push(Node::Symbol(symbol))
    }
}
