//! The smallest values: numbers, names, roots, fractions, decorated letters, named sets.

use dashu_int::ops::BitTest;
use dashu_ratio::RBig;

use super::super::ast::{Comparison, NamedSet, Node, NodeId, NumberForm, SetPart};
use super::super::lexer::token::{Bracket, Kind};
use super::super::literal;
use super::{Context, LONG_LITERAL, MOST_LITERAL_BITS, Parsed, Parser};
use crate::error::ParseError;

impl<'t> Parser<'_, 't> {
    /// A value without anything behind it.
    pub(super) fn primary(&mut self) -> Parsed<NodeId> {
        self.nested(Self::value)
    }

    fn value(&mut self) -> Parsed<NodeId> {
        let kind = self.peek().ok_or(ParseError::Unparseable)?;
        match kind {
            Kind::Number(raw) => {
                self.at += 1;
                let (value, form) = literal::value(raw)?;
                let bits = value.numerator().bit_len() + value.denominator().bit_len();
                if bits > LONG_LITERAL {
                    self.literal_bits += bits;
                    if self.literal_bits > MOST_LITERAL_BITS {
                        return Err(ParseError::Undecided);
                    }
                }
                self.push(Node::Number { value, form })
            }
            Kind::Numeral { digits, base } => {
                self.at += 1;
                self.numeral(digits, base)
            }
            Kind::Name { name, style } => match self.plain_derivative()? {
                Some(derivative) => Ok(derivative),
                None => self.name(name, style),
            },
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
            Kind::Operator(name) => self.operator(name),
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
            _ => Err(ParseError::Unparseable),
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

    /// `dy/dx` in plain text is a name too.
    fn plain_derivative(&mut self) -> Parsed<Option<NodeId>> {
        let found = self.tokens.get(self.at..self.at + 5).unwrap_or_default();
        let [d, top, slash, below, bottom] = found else { return Ok(None) };
        let (Kind::Name { name: "d", .. }, Kind::Name { name: "d", .. }, Kind::Slash) =
            (d.kind, below.kind, slash.kind)
        else {
            return Ok(None);
        };
        let (Kind::Name { name: top, .. }, Kind::Name { name: bottom, .. }, false, false) =
            (top.kind, bottom.kind, top.space, bottom.space)
        else {
            return Ok(None);
        };
        // `ady/dx` is a product of letters.
        let apart = d.space || !matches!(self.previous(), Some(Kind::Name { .. }));
        if !apart || matches!(self.kind_at(5), Some(Kind::Name { .. })) && !self.space_at(5) {
            return Ok(None);
        }
        self.at += 5;
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
        // `\sqrt{}{3}`: the braces of the missing index.
        let group = Kind::Open(Bracket::Group);
        if index.is_none()
            && [self.peek(), self.kind_at(1), self.kind_at(2)]
                == [Some(group), Some(Kind::Close(Bracket::Group)), Some(group)]
        {
            self.at += 2;
        }
        let radicand = self.argument_or_brackets()?;
        self.push(Node::Root { index, radicand })
    }

    fn numeral(&mut self, digits: &str, base: u8) -> Parsed<NodeId> {
        // `\text{A5}_{11}`: the font says nothing.
        let digits = digits.replace("\\text", "").replace("\\mathrm", "").replace(['{', '}'], "");
        let value = literal::in_base(&digits, base).ok_or(ParseError::Unparseable)?;
        self.push(Node::BaseNumeral { digits, base, value })
    }

    /// `52_8`, `52_{\text{eight}}`, `52_{(8)}`, at the underscore behind a value.
    pub(super) fn base_numeral(&mut self, value: NodeId) -> Parsed<NodeId> {
        let digits = self.digits_of(value).ok_or(ParseError::Unparseable)?;
        self.at += 1;
        let start = self.at;
        let mut close = 0;
        while self.opens(Bracket::Group) || self.opens(Bracket::Round) {
            self.at += 1;
            close += 1;
        }
        self.eat_word("base");
        let base = self.base().ok_or(ParseError::Unparseable)?;
        for _ in 0..close {
            if !matches!(self.peek(), Some(Kind::Close(Bracket::Group | Bracket::Round))) {
                return Err(ParseError::Unparseable);
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

    /// `\mathbb{R}`, `\mathbb{R}^+`, `\mathbb{Z}_{\ge 0}`.
    fn named_set(&mut self, set: NamedSet) -> Parsed<NodeId> {
        self.at += 1;
        // `\mathbb{Z}/n\mathbb{Z}` is a name as well.
        if let (NamedSet::Integers, Some(Kind::Slash), Some(Kind::NamedSet(NamedSet::Integers))) =
            (set, self.peek(), self.kind_at(2))
            && let Some(Kind::Number(modulus) | Kind::Name { name: modulus, .. }) = self.kind_at(1)
        {
            self.at += 3;
            let symbol = self.ast.intern(&format!("{set:?}/{modulus}"))?;
            return self.push(Node::Symbol(symbol));
        }
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
                    _ => return Err(ParseError::Unparseable),
                },
                (Some(Kind::Plus), _) => SetPart::Positive,
                (Some(Kind::Number("0")), _) => SetPart::NonNegative,
                // `\mathbb{Z}_n`, integers modulo n: a name.
                _ => {
                    self.at += 1;
                    let index = self.subscript()?;
                    let symbol = self.ast.intern(&format!("{set:?}_{index}"))?;
                    return self.push(Node::Symbol(symbol));
                }
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
            _ => Err(ParseError::Unparseable),
        }
    }

    /// `{}_5C_2`, `^5C_2`, at the script.
    fn prescript(&mut self) -> Parsed<NodeId> {
        self.at += 1;
        let top = self.argument()?;
        let Some(Kind::Name { name: name @ ("C" | "P"), .. }) = self.peek() else {
            return Err(ParseError::Unparseable);
        };
        self.at += 1;
        self.expect(Kind::Underscore)?;
        let bottom = self.argument()?;
        self.push(if name == "C" { Node::Binomial(top, bottom) } else { Node::Permutations(top, bottom) })
    }
}
