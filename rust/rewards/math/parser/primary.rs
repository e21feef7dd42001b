//! The smallest values: numbers, names, roots, fractions, decorated letters, named sets.

use dashu_ratio::RBig;

use super::super::super::Status;
use super::super::ast::{Comparison, Constant, Function, NamedSet, Node, NodeId, NumberForm, SetPart};
use super::super::literal;
use super::super::token::{Bracket, Kind, Style};
use super::{Context, Parsed, Parser};

/// Letters that name a function when brackets follow.
const FUNCTION_LETTERS: [&str; 11] = ["f", "g", "h", "F", "G", "H", "P", "Q", "phi", "psi", "Phi"];
/// A subscript is part of a name; one longer than this is no name.
const LONGEST_SUBSCRIPT: usize = 64;

impl<'t> Parser<'_, 't> {
    /// A value without anything behind it.
    pub(super) fn primary(&mut self) -> Parsed<NodeId> {
        self.nested(Self::value)
    }

    fn value(&mut self) -> Parsed<NodeId> {
        let kind = self.peek().ok_or(Status::Unparseable)?;
        match kind {
            Kind::Number(raw) => {
                self.at += 1;
                let (value, form) = literal::value(raw)?;
                self.push(Node::Number { value, form })
            }
            Kind::Numeral { digits, base } => {
                self.at += 1;
                self.numeral(digits, base)
            }
            Kind::Name { name, style } => self.name(name, style),
            Kind::Constant(value) => {
                self.at += 1;
                self.push(Node::Constant { value, letter: None })
            }
            Kind::Word(_) => self.words(),
            Kind::Function(name) => self.function(name),
            Kind::Log(base) => self.logarithm(base),
            Kind::Det => {
                self.at += 1;
                let argument = self.argument_or_brackets()?;
                self.push(Node::Determinant(argument))
            }
            Kind::Frac => {
                self.at += 1;
                if let Some(derivative) = self.derivative()? {
                    return Ok(derivative);
                }
                let top = self.argument()?;
                let bottom = self.argument()?;
                self.quotient(top, bottom)
            }
            Kind::Binom => {
                self.at += 1;
                let top = self.argument()?;
                let bottom = self.argument()?;
                self.push(Node::Binomial(top, bottom))
            }
            Kind::Sqrt => self.radical(),
            Kind::CubeRoot => {
                self.at += 1;
                let index = self.push(Node::Number { value: RBig::from(3), form: NumberForm::Integer })?;
                let radicand = self.argument_or_brackets()?;
                self.push(Node::Root { index: Some(index), radicand })
            }
            Kind::Enclose(bracket) => {
                self.at += 1;
                let inner = self.argument_or_brackets()?;
                self.push(match bracket {
                    Bracket::Floor => Node::Floor(inner),
                    Bracket::Ceil => Node::Ceil(inner),
                    _ => Node::Abs(inner),
                })
            }
            Kind::Overline => self.overline(),
            Kind::Arrow(dots) => self.arrow(dots),
            Kind::Figure(name) => self.figure(name),
            Kind::Sum | Kind::Product => self.series(),
            Kind::Open(_) | Kind::Close(Bracket::Square) | Kind::Bar | Kind::DoubleBar => self.brackets(),
            Kind::Relation(Comparison::Less) => self.angle(),
            Kind::Begin(environment) => self.environment(environment),
            Kind::EmptySet => {
                self.at += 1;
                self.push(Node::EmptySet)
            }
            Kind::NamedSet(set) => self.named_set(set),
            Kind::Ellipsis => {
                self.at += 1;
                self.push(Node::Ellipsis)
            }
            Kind::Currency(code) => self.currency(code),
            Kind::Caret | Kind::Underscore => self.prescript(),
            _ => Err(Status::Unparseable),
        }
    }

    /// The argument of a command: a group, or one token with its own arguments.
    pub(super) fn argument(&mut self) -> Parsed<NodeId> {
        if let Some(Kind::Name { name, style }) = self.peek() {
            self.at += 1;
            return self.nested(|parser| parser.letter(name, style));
        }
        self.primary()
    }

    /// The argument of a plain-text function: `sqrt(2)`, `abs(x)`; or of a command.
    pub(super) fn argument_or_brackets(&mut self) -> Parsed<NodeId> {
        if self.opens(Bracket::Round) || self.opens(Bracket::Square) { self.primary() } else { self.argument() }
    }

    /// `\frac{dy}{dx}` is a name, behind the command.
    fn derivative(&mut self) -> Parsed<Option<NodeId>> {
        let Some(found) = self.tokens.get(self.at..self.at + 8) else { return Ok(None) };
        let mut kinds = [Kind::Unknown; 8];
        for (kind, token) in kinds.iter_mut().zip(found) {
            *kind = token.kind;
        }
        let [
            Kind::Open(Bracket::Group),
            Kind::Name { name: "d", .. },
            Kind::Name { name: top, .. },
            Kind::Close(Bracket::Group),
            Kind::Open(Bracket::Group),
            Kind::Name { name: "d", .. },
            Kind::Name { name: bottom, .. },
            Kind::Close(Bracket::Group),
        ] = kinds
        else {
            return Ok(None);
        };
        self.at += 8;
        let symbol = self.ast.intern(&format!("d{top}/d{bottom}"))?;
        self.push(Node::Symbol(symbol)).map(Some)
    }

    fn radical(&mut self) -> Parsed<NodeId> {
        self.at += 1;
        let index = if self.opens(Bracket::Square) {
            self.at += 1;
            let index = self.within(Context::default(), Self::sum)?;
            self.expect(Kind::Close(Bracket::Square))?;
            Some(index)
        } else {
            None
        };
        let radicand = self.argument_or_brackets()?;
        self.push(Node::Root { index, radicand })
    }

    fn numeral(&mut self, digits: &str, base: u8) -> Parsed<NodeId> {
        let value = literal::in_base(digits, base).ok_or(Status::Unparseable)?;
        self.push(Node::BaseNumeral { digits: digits.to_owned(), base, value })
    }

    /// `52_8`, `52_{\text{eight}}`, `52_{(8)}`, at the underscore behind a value.
    pub(super) fn base_numeral(&mut self, value: NodeId) -> Parsed<NodeId> {
        let digits = self.digits_of(value).ok_or(Status::Unparseable)?;
        self.at += 1;
        let start = self.at;
        let mut close = 0;
        while self.opens(Bracket::Group) || self.opens(Bracket::Round) {
            self.at += 1;
            close += 1;
        }
        self.eat_word("base");
        let base = self.base().ok_or(Status::Unparseable)?;
        for _ in 0..close {
            if !matches!(self.peek(), Some(Kind::Close(Bracket::Group | Bracket::Round))) {
                return Err(Status::Unparseable);
            }
            self.at += 1;
        }
        debug_assert!(self.at > start);
        self.numeral(&digits, base)
    }

    /// The digits of a number literal that has just been read.
    pub(super) fn digits_of(&self, value: NodeId) -> Option<String> {
        if !matches!(self.ast.node(value), Node::Number { form: NumberForm::Integer | NumberForm::Decimal { .. }, .. })
        {
            return None;
        }
        let bracketed = usize::from(matches!(self.previous(), Some(Kind::Close(Bracket::Round | Bracket::Group))));
        match self.tokens.get(self.at.checked_sub(1 + bracketed)?)?.kind {
            Kind::Number(raw) if raw.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => Some(raw.to_owned()),
            _ => None,
        }
    }

    /// A base in digits or words.
    pub(super) fn base(&mut self) -> Option<u8> {
        let base = match self.peek()? {
            Kind::Number(raw) => raw.parse().ok()?,
            Kind::Word(word) => u8::try_from(super::super::word::small_number(word)?).ok()?,
            _ => return None,
        };
        self.at += 1;
        Some(base)
    }

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

    fn opens_at(&self, offset: usize, bracket: Bracket) -> bool {
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
    fn has_comma_inside(&self) -> bool {
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
    fn letter(&mut self, name: &'t str, style: Style) -> Parsed<NodeId> {
        let symbol = self.ast.intern(name)?;
        let constant = match name {
            "e" => Some(Constant::E),
            "i" => Some(Constant::I),
            _ => None,
        };
        let node = match constant {
            Some(value) if style != Style::Bold && self.context.bound != Some(name) => {
                Node::Constant { value, letter: (style == Style::Plain).then_some(symbol) }
            }
            _ => Node::Symbol(symbol),
        };
        self.push(node)
    }

    /// The text of a subscript without spaces, braces and font commands.
    fn subscript(&mut self) -> Parsed<String> {
        let (start, end);
        if self.opens(Bracket::Group) {
            let mut depth = 0u32;
            start = self.tokens.get(self.at).map_or(0, |token| token.end);
            loop {
                match self.peek().ok_or(Status::Unparseable)? {
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
            let token = self.tokens.get(self.at).ok_or(Status::Unparseable)?;
            if !matches!(
                token.kind,
                Kind::Number(_) | Kind::Name { .. } | Kind::Word(_) | Kind::Constant(_) | Kind::EmptySet
            ) {
                return Err(Status::Unparseable);
            }
            (start, end) = (token.start, token.end);
            self.at += 1;
        }
        let raw = self.text.get(start..end).unwrap_or_default();
        if raw.len() > LONGEST_SUBSCRIPT {
            return Err(Status::Unparseable);
        }
        let mut plain = raw.to_owned();
        for command in ["\\text", "\\mathrm", "\\mathit", "\\rm", "\\mbox"] {
            plain = plain.replace(command, "");
        }
        plain.retain(|c| !c.is_whitespace() && !"{}\\".contains(c));
        Ok(plain)
    }

    /// `\overline{AB}` is a segment, `\bar z` a conjugate.
    fn overline(&mut self) -> Parsed<NodeId> {
        self.at += 1;
        if let Some(letters) = self.capital_letters() {
            let symbol = self.ast.intern(&letters)?;
            return self.push(Node::Symbol(symbol));
        }
        let value = self.argument()?;
        if matches!(self.ast.node(value), Node::Number { .. }) {
            return Err(Status::Unparseable);
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
    fn arrow(&mut self, dots: Option<&str>) -> Parsed<NodeId> {
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

    /// `\angle ABC`, `\triangle ABC`.
    fn figure(&mut self, figure: &str) -> Parsed<NodeId> {
        self.at += 1;
        let mut name = format!("{figure} ");
        let length = name.len();
        loop {
            match self.peek() {
                Some(Kind::Name { name: letter, .. }) => name.push_str(letter),
                Some(Kind::Word(word)) if name.len() == length && word.len() <= 4 => name.push_str(word),
                _ => break,
            }
            self.at += 1;
        }
        if name.len() == length {
            return Err(Status::Unparseable);
        }
        let symbol = self.ast.intern(&name)?;
        self.push(Node::Symbol(symbol))
    }

    /// `\mathbb{R}`, `\mathbb{R}^+`, `\mathbb{Z}_{\ge 0}`.
    fn named_set(&mut self, set: NamedSet) -> Parsed<NodeId> {
        self.at += 1;
        let mut node = self.push(Node::NamedSet { set, part: SetPart::All })?;
        if self.peek() == Some(Kind::Underscore) {
            let grouped = usize::from(self.opens_at(1, Bracket::Group));
            let part = match (self.kind_at(1 + grouped), self.kind_at(2 + grouped)) {
                (Some(Kind::Relation(sign)), Some(Kind::Number("0"))) => match sign {
                    Comparison::Greater => SetPart::Positive,
                    Comparison::GreaterEqual => SetPart::NonNegative,
                    Comparison::Less => SetPart::Negative,
                    Comparison::LessEqual => SetPart::NonPositive,
                    Comparison::NotEqual => SetPart::NonZero,
                    _ => return Err(Status::Unparseable),
                },
                (Some(Kind::Plus), _) => SetPart::Positive,
                (Some(Kind::Number("0")), _) => SetPart::NonNegative,
                _ => return Err(Status::Unparseable),
            };
            let sign = matches!(self.kind_at(1 + grouped), Some(Kind::Relation(_)));
            self.at += 2 + 2 * grouped + usize::from(sign);
            if part == SetPart::NonNegative && self.peek() == Some(Kind::Caret) && self.kind_at(1) == Some(Kind::Plus) {
                self.at += 2;
            }
            node = self.part_of_set(node, part)?;
        }
        Ok(node)
    }

    pub(super) fn part_of_set(&mut self, set: NodeId, part: SetPart) -> Parsed<NodeId> {
        match self.ast.node(set) {
            Node::NamedSet { set, .. } => {
                let set = *set;
                self.push(Node::NamedSet { set, part })
            }
            _ => Err(Status::Unparseable),
        }
    }

    /// `{}_5C_2`, `^5C_2`, at the script.
    fn prescript(&mut self) -> Parsed<NodeId> {
        self.at += 1;
        let top = self.argument()?;
        let Some(Kind::Name { name: name @ ("C" | "P"), .. }) = self.peek() else { return Err(Status::Unparseable) };
        self.at += 1;
        self.expect(Kind::Underscore)?;
        let bottom = self.argument()?;
        self.push(if name == "C" { Node::Binomial(top, bottom) } else { Node::Permutations(top, bottom) })
    }
}
