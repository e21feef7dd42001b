//! Set operations, ratios, sums, products and powers.

use dashu_int::IBig;
use dashu_ratio::RBig;

use super::super::super::Status;
use super::super::ast::{Constant, Function, Node, NodeId, NumberForm, SetPart};
use super::super::command;
use super::super::literal;
use super::super::token::{Bracket, Kind};
use super::{Parsed, Parser};

/// The largest exponent of ten that makes a number literal: `1.5 \times 10^{-3}`.
const LARGEST_SCIENTIFIC: i64 = 4096;

impl<'t> Parser<'_, 't> {
    /// `a ∪ b ∖ c`.
    pub(super) fn union(&mut self) -> Parsed<NodeId> {
        let first = self.intersection()?;
        let mut parts = vec![first];
        loop {
            if self.eat(Kind::Cup) || self.eat_cup_letter() {
                let next = self.intersection()?;
                parts.push(next);
            } else if self.eat(Kind::SetMinus) {
                let next = self.intersection()?;
                let left = self.joined(parts, Node::Union)?;
                let (left, next) = (self.as_interval(left)?, self.as_interval(next)?);
                parts = vec![self.push(Node::Difference(left, next))?];
            } else {
                return self.joined(parts, Node::Union);
            }
        }
    }

    /// `(0, 1) U (2, 3)`.
    fn eat_cup_letter(&mut self) -> bool {
        let union = matches!(self.peek(), Some(Kind::Name { name: "U", .. }))
            && matches!(self.previous(), Some(Kind::Close(_)))
            && matches!(self.kind_at(1), Some(Kind::Open(_)));
        let union = union || (self.word_at(0, "union") && matches!(self.previous(), Some(Kind::Close(_))));
        self.at += usize::from(union);
        union
    }

    fn intersection(&mut self) -> Parsed<NodeId> {
        let first = self.ratio()?;
        let mut parts = vec![first];
        while self.eat(Kind::Cap) {
            let next = self.ratio()?;
            parts.push(next);
        }
        self.joined(parts, Node::Intersection)
    }

    /// One part as it is; several are sets.
    fn joined(&mut self, mut parts: Vec<NodeId>, node: fn(Vec<NodeId>) -> Node) -> Parsed<NodeId> {
        if let [only] = parts[..] {
            return Ok(only);
        }
        for part in &mut parts {
            *part = self.as_interval(*part)?;
        }
        self.push(node(parts))
    }

    /// A pair as the interval that its place makes it.
    pub(super) fn as_interval(&mut self, id: NodeId) -> Parsed<NodeId> {
        let (items, closed) = match self.ast.node(id) {
            Node::Tuple(items) => (items, false),
            Node::Brackets(items) => (items, true),
            Node::Symbol(symbol) => {
                let mut letters = self.ast.name(*symbol).chars();
                let set = match (letters.next(), letters.next()) {
                    (Some(letter @ ('R' | 'Z' | 'N' | 'Q')), None) => command::blackboard(letter),
                    _ => None,
                };
                return match set {
                    Some(set) => self.push(Node::NamedSet { set, part: SetPart::All }),
                    None => Ok(id),
                };
            }
            _ => return Ok(id),
        };
        let &[low, high] = &items[..] else { return Ok(id) };
        self.push(Node::Interval { low, high, low_closed: closed, high_closed: closed })
    }

    /// `a : b : c`, `3 to 4`.
    fn ratio(&mut self) -> Parsed<NodeId> {
        let first = self.sum()?;
        let mut parts = vec![first];
        while !self.context.set && !matches!(self.previous(), Some(Kind::Word(_))) && self.ratio_sign() {
            let next = self.sum()?;
            parts.push(next);
        }
        if parts.len() == 1 { Ok(first) } else { self.push(Node::Ratio(parts)) }
    }

    fn ratio_sign(&mut self) -> bool {
        let to = self.word_at(0, "to")
            && matches!((self.previous(), self.kind_at(1)), (Some(Kind::Number(_)), Some(Kind::Number(_))));
        if to || self.peek() == Some(Kind::Colon) {
            self.at += 1;
            return true;
        }
        false
    }

    /// Signed terms.
    pub(super) fn sum(&mut self) -> Parsed<NodeId> {
        let mut terms = Vec::new();
        let first = self.signed(Self::product)?;
        terms.push(first);
        loop {
            let sign = self.peek();
            if !matches!(sign, Some(Kind::Plus | Kind::Minus | Kind::PlusMinus | Kind::MinusPlus)) {
                break;
            }
            self.at += 1;
            let term = self.signed(Self::product)?;
            match sign {
                Some(Kind::Plus) => terms.push(term),
                Some(Kind::Minus) => {
                    let term = self.negated(term)?;
                    terms.push(term);
                }
                sign => {
                    let flipped = sign == Some(Kind::MinusPlus);
                    let left = Some(self.added(terms)?);
                    terms = vec![self.push(Node::PlusMinus { left, right: term, flipped })?];
                }
            }
        }
        self.added(terms)
    }

    /// Any number of signs before something.
    fn signed(&mut self, read: fn(&mut Self) -> Parsed<NodeId>) -> Parsed<NodeId> {
        let mut negative = false;
        loop {
            match self.peek() {
                Some(Kind::Minus) => negative = !negative,
                Some(Kind::Plus) => {}
                Some(sign @ (Kind::PlusMinus | Kind::MinusPlus)) => {
                    self.at += 1;
                    let right = self.nested(|parser| parser.signed(read))?;
                    let value = self.push(Node::PlusMinus { left: None, right, flipped: sign == Kind::MinusPlus })?;
                    return if negative { self.negated(value) } else { Ok(value) };
                }
                _ => break,
            }
            self.at += 1;
        }
        let value = read(self)?;
        if negative { self.negated(value) } else { Ok(value) }
    }

    fn negated(&mut self, id: NodeId) -> Parsed<NodeId> {
        match self.ast.node(id) {
            Node::Number { value, form } => {
                let (value, form) = (-value.clone(), *form);
                self.push(Node::Number { value, form })
            }
            Node::Quantity { value, unit } => {
                let (value, unit) = (*value, unit.clone());
                let value = self.negated(value)?;
                self.push(Node::Quantity { value, unit })
            }
            _ => self.push(Node::Neg(id)),
        }
    }

    /// The sum of terms; a unit behind the last is the unit of all when no other has one. `ℝ - {0}` is a difference.
    fn added(&mut self, mut terms: Vec<NodeId>) -> Parsed<NodeId> {
        let &[first, .., last] = &terms[..] else { return terms.first().copied().ok_or(Status::Unparseable) };
        if let (2, &Node::Neg(set)) = (terms.len(), self.ast.node(last))
            && matches!(self.ast.node(set), Node::Set(_))
        {
            let first = self.as_interval(first)?;
            return self.push(Node::Difference(first, set));
        }
        let quantity = |id: &NodeId| matches!(self.ast.node(*id), Node::Quantity { .. });
        let others = &terms[..terms.len() - 1];
        if let Node::Quantity { value, unit } = self.ast.node(last)
            && !others.iter().any(quantity)
        {
            let (value, unit) = (*value, unit.clone());
            terms.pop();
            terms.push(value);
            let value = self.push(Node::Add(terms))?;
            return self.push(Node::Quantity { value, unit });
        }
        self.push(Node::Add(terms))
    }

    /// Factors with or without signs between them, quotients, and what stands behind a value.
    pub(super) fn product(&mut self) -> Parsed<NodeId> {
        let first = self.factor()?;
        if matches!(self.ast.node(first), Node::Text(_) | Node::Either(_)) {
            return Ok(first);
        }
        let mut factors = vec![first];
        let mut implicit = true;
        loop {
            self.note_letter_unit();
            if self.eat(Kind::Times) || self.eat_word("times") {
                let factor = self.signed(Self::factor)?;
                implicit = false;
                self.times(&mut factors, factor)?;
            } else if self.eat(Kind::Slash) || self.eat(Kind::Divide) {
                let divisor = self.divisor()?;
                let left = self.multiplied(factors, implicit)?;
                factors = vec![self.quotient(left, divisor)?];
                implicit = true;
            } else if let Some(mixed) = self.mixed(&factors)? {
                let mixed = self.postfix(mixed)?;
                factors.pop();
                factors.push(mixed);
            } else if self.choose_letter(&mut factors)? {
            } else if self.juxtaposed() {
                let factor = self.factor()?;
                factors.push(factor);
            } else {
                let left = self.multiplied(factors, implicit)?;
                let Some(value) = self.suffix(left)? else { return Ok(left) };
                factors = vec![value];
                implicit = true;
            }
        }
    }

    fn multiplied(&mut self, factors: Vec<NodeId>, implicit: bool) -> Parsed<NodeId> {
        match factors[..] {
            [only] => Ok(only),
            _ => self.push(Node::Mul { factors, implicit }),
        }
    }

    /// Append a factor; `1.5 × 10^{-3}` is one literal.
    fn times(&mut self, factors: &mut Vec<NodeId>, factor: NodeId) -> Parsed<()> {
        if let ([only], &Node::Pow(base, exponent)) = (&factors[..], self.ast.node(factor))
            && let Node::Number { value, form: NumberForm::Integer | NumberForm::Decimal { .. } } = self.ast.node(*only)
            && matches!(self.ast.node(base), Node::Number { value, .. } if *value == RBig::from(10))
            && let Node::Number { value: exponent, form: NumberForm::Integer } = self.ast.node(exponent)
            && let Some(exponent) = small_integer(exponent).filter(|exponent| exponent.abs() <= LARGEST_SCIENTIFIC)
        {
            let value = value * literal::scaled(IBig::ONE, exponent)?;
            factors.clear();
            let literal = self.push(Node::Number { value, form: NumberForm::Scientific })?;
            factors.push(literal);
            return Ok(());
        }
        factors.push(factor);
        Ok(())
    }

    /// What follows `/`: one factor, or, where that is chosen, all that is joined to it.
    fn divisor(&mut self) -> Parsed<NodeId> {
        let first = self.signed(Self::factor)?;
        let mut factors = vec![first];
        while self.juxtaposed() && !self.space_at(0) {
            self.seen.division = true;
            if !self.choices.tight_division {
                break;
            }
            let factor = self.factor()?;
            factors.push(factor);
        }
        self.multiplied(factors, true)
    }

    /// A quotient; of integer literals it is a literal.
    pub(super) fn quotient(&mut self, top: NodeId, bottom: NodeId) -> Parsed<NodeId> {
        let integer = |node: &Node| match node {
            Node::Number { value, form: NumberForm::Integer } => Some(value.clone()),
            _ => None,
        };
        if let (Some(a), Some(b)) = (integer(self.ast.node(top)), integer(self.ast.node(bottom)))
            && !b.is_zero()
        {
            return self.push(Node::Number { value: a / b, form: NumberForm::Fraction });
        }
        self.push(Node::Div(top, bottom))
    }

    /// `3\frac12` and `3 1/2`, at the fraction.
    fn mixed(&mut self, factors: &[NodeId]) -> Parsed<Option<NodeId>> {
        let Some(&last) = factors.last() else { return Ok(None) };
        let Node::Number { value: whole, form: NumberForm::Integer } = self.ast.node(last) else { return Ok(None) };
        let Some(Kind::Number(_)) = self.previous() else { return Ok(None) };
        let whole = whole.clone();
        let start = self.at;
        let part = match (self.peek(), self.kind_at(1), self.kind_at(2)) {
            (Some(Kind::Frac), ..) => self.primary()?,
            (Some(Kind::Number(top)), Some(Kind::Slash), Some(Kind::Number(bottom))) if self.space_at(0) => {
                let more = matches!(self.kind_at(3), Some(Kind::Slash | Kind::Caret | Kind::Number(_)));
                if more || ![top, bottom].iter().all(|digits| digits.bytes().all(|byte| byte.is_ascii_digit())) {
                    return Ok(None);
                }
                self.at += 3;
                let (top, bottom) = (literal::value(top)?.0, literal::value(bottom)?.0);
                if bottom.is_zero() {
                    return Err(Status::Unparseable);
                }
                self.push(Node::Number { value: top / bottom, form: NumberForm::Fraction })?
            }
            _ => return Ok(None),
        };
        if let Node::Number { value, form: NumberForm::Fraction } = self.ast.node(part)
            && *value > RBig::ZERO
            && *value < RBig::ONE
        {
            let value = whole + value;
            return self.push(Node::Number { value, form: NumberForm::Mixed }).map(Some);
        }
        self.at = start;
        Ok(None)
    }

    /// `5C2` and `5P2`, at the letter.
    fn choose_letter(&mut self, factors: &mut Vec<NodeId>) -> Parsed<bool> {
        let (Some(Kind::Number(_)), Some(Kind::Name { name: name @ ("C" | "P"), .. }), Some(Kind::Number(_))) =
            (self.previous(), self.peek(), self.kind_at(1))
        else {
            return Ok(false);
        };
        if self.space_at(0) != self.space_at(1) {
            return Ok(false);
        }
        let Some(top) = factors.pop() else { return Ok(false) };
        self.at += 1;
        let bottom = self.primary()?;
        let node = if name == "C" { Node::Binomial(top, bottom) } else { Node::Permutations(top, bottom) };
        let node = self.push(node)?;
        factors.push(node);
        Ok(true)
    }

    /// Whether a factor follows without a sign.
    pub(super) fn juxtaposed(&self) -> bool {
        match self.peek() {
            // `n2^{n}` and `n 2` are products, `x2` is not known to be one.
            Some(Kind::Number(_) | Kind::Numeral { .. }) => match self.previous() {
                Some(Kind::Name { .. } | Kind::Constant(_)) => self.space_at(0) || self.kind_at(1) == Some(Kind::Caret),
                Some(Kind::Close(_) | Kind::Bar | Kind::DoubleBar | Kind::Bang | Kind::Prime | Kind::Degree) => true,
                _ => false,
            },
            Some(Kind::Name { name: "U", .. }) => {
                !(matches!(self.previous(), Some(Kind::Close(_))) && matches!(self.kind_at(1), Some(Kind::Open(_))))
            }
            Some(Kind::Name { .. }) => !self.letter_unit(),
            Some(Kind::Frac) => !self.unit_fraction(),
            Some(Kind::Function(Function::Min | Function::Sec)) => !self.function_as_unit(),
            Some(Kind::Open(Bracket::Round)) => {
                !(self.kind_at(1) == Some(Kind::Mod)
                    || self.word_at(1, "mod")
                    || self.word_at(1, "modulo")
                    || self.word_at(1, "base"))
            }
            Some(Kind::Open(Bracket::Square)) => !self.context.french,
            Some(Kind::Open(Bracket::Curly | Bracket::Angle)) => false,
            Some(Kind::Bar) => !self.context.bar && !self.context.set && self.bar_closes_later(),
            Some(Kind::DoubleBar) => !self.context.double_bar,
            Some(
                Kind::Function(_)
                | Kind::Log(_)
                | Kind::Det
                | Kind::Constant(_)
                | Kind::Binom
                | Kind::Sqrt
                | Kind::CubeRoot
                | Kind::Overline
                | Kind::Arrow(_)
                | Kind::Sum
                | Kind::Product
                | Kind::Open(_)
                | Kind::Enclose(_)
                | Kind::Begin(_),
            ) => true,
            _ => false,
        }
    }

    /// `a | b` is no absolute value when no other bar follows.
    fn bar_closes_later(&self) -> bool {
        const FARTHEST: usize = 64;
        self.tokens.iter().skip(self.at + 1).take(FARTHEST).any(|token| token.kind == Kind::Bar)
    }

    /// A primary with its powers, factorials, degrees, percent signs and subscripts.
    pub(super) fn factor(&mut self) -> Parsed<NodeId> {
        let value = self.primary()?;
        self.postfix(value)
    }

    fn postfix(&mut self, mut value: NodeId) -> Parsed<NodeId> {
        loop {
            value = match self.peek() {
                Some(Kind::Caret) => self.power(value)?,
                Some(Kind::Bang) => {
                    self.at += 1;
                    if self.peek() == Some(Kind::Bang) && !self.space_at(0) {
                        self.at += 1;
                        self.push(Node::DoubleFactorial(value))?
                    } else {
                        self.push(Node::Factorial(value))?
                    }
                }
                Some(Kind::Percent) => {
                    self.at += 1;
                    self.push(Node::Percent(value))?
                }
                Some(Kind::Degree) => {
                    self.at += 1;
                    self.degrees(value)?
                }
                Some(Kind::Prime) => self.minutes(value)?,
                Some(Kind::Underscore) => self.base_numeral(value)?,
                _ => return Ok(value),
            };
        }
    }

    /// What `^` makes of a value, at the caret.
    fn power(&mut self, base: NodeId) -> Parsed<NodeId> {
        self.at += 1;
        let grouped = usize::from(self.opens(Bracket::Group));
        let single = grouped == 0 || self.kind_at(2) == Some(Kind::Close(Bracket::Group));
        let length = 1 + 2 * grouped;
        if let (Some(kind), true) = (self.kind_at(grouped), single) {
            let is_set = matches!(self.ast.node(base), Node::NamedSet { .. });
            let is_array = matches!(
                self.ast.node(base),
                Node::Matrix { .. } | Node::Tuple(_) | Node::Brackets(_) | Node::Vector(_)
            );
            match kind {
                Kind::Circ | Kind::Degree => {
                    self.at += length;
                    return self.degrees(base);
                }
                Kind::Prime => {
                    self.at += length;
                    return self.arc_minutes(base, 1);
                }
                Kind::Top => {
                    self.at += length;
                    return self.push(Node::Transpose(base));
                }
                Kind::Name { name: "T", .. } if is_array => {
                    self.at += length;
                    return self.push(Node::Transpose(base));
                }
                Kind::Plus | Kind::Minus | Kind::Times if is_set => {
                    self.at += length;
                    let part = match kind {
                        Kind::Plus => SetPart::Positive,
                        Kind::Minus => SetPart::Negative,
                        _ => SetPart::NonZero,
                    };
                    return self.part_of_set(base, part);
                }
                Kind::Times if matches!(self.ast.node(base), Node::Symbol(_)) => {
                    self.at += length;
                    return self.push(Node::Function { name: Function::Conj, arguments: vec![base] });
                }
                Kind::Word("th" | "st" | "nd" | "rd") => {
                    let (Some(first), Some(last)) = (self.at.checked_sub(2), self.tokens.get(self.at + grouped)) else {
                        return Err(Status::Unparseable);
                    };
                    let start = self.tokens.get(first).map_or(0, |token| token.start);
                    let text =
                        [self.text.get(start..self.tokens[self.at - 1].start), self.text.get(last.start..last.end)];
                    self.at += length;
                    let text = text.iter().flatten().copied().collect::<String>();
                    return self.push(Node::Text(text));
                }
                _ => {}
            }
        }
        let exponent = self.exponent()?;
        self.push(Node::Pow(base, exponent))
    }

    /// An exponent: a group, or a signed value with its own power.
    pub(super) fn exponent(&mut self) -> Parsed<NodeId> {
        self.nested(|parser| {
            if parser.opens(Bracket::Group) {
                return parser.primary();
            }
            parser.signed(|parser| {
                let value = parser.argument()?;
                if parser.eat(Kind::Caret) {
                    let exponent = parser.exponent()?;
                    return parser.push(Node::Pow(value, exponent));
                }
                Ok(value)
            })
        })
    }

    /// Whether a node is ∞ or -∞.
    pub(super) fn is_infinite(&self, id: NodeId) -> bool {
        let infinite = |id: NodeId| matches!(self.ast.node(id), Node::Constant { value: Constant::Infinity, .. });
        match self.ast.node(id) {
            Node::Neg(inner) => infinite(*inner),
            _ => infinite(id),
        }
    }
}

/// The value of a small integer.
pub(super) fn small_integer(value: &RBig) -> Option<i64> {
    value.denominator().is_one().then(|| i64::try_from(value.numerator()).ok()).flatten()
}
