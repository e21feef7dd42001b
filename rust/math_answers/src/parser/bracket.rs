//! Everything in brackets: groups, tuples, intervals, sets, matrices, absolute values.

use super::super::ast::{Node, NodeId, Separator};
use super::super::lexer::token::{Bracket, Environment, Kind};
use super::{Context, Parsed, Parser};
use crate::error::ParseError;

impl<'t> Parser<'_, 't> {
    /// A bracketed value, at its opening bracket.
    pub(super) fn brackets(&mut self) -> Parsed<NodeId> {
        let kind = self.peek();
        self.at += 1;
        match kind {
            Some(Kind::Open(Bracket::Round)) => self.round(),
            Some(Kind::Open(Bracket::Square)) => self.square(),
            Some(Kind::Close(Bracket::Square)) => self.french(),
            Some(Kind::Open(Bracket::Curly)) => self.set(),
            Some(Kind::Open(Bracket::Group)) => self.group(),
            Some(Kind::Open(bracket)) => {
                let inner = self.within(Context::default(), Self::list)?;
                self.expect(Kind::Close(bracket))?;
                self.enclosed(bracket, inner)
            }
            Some(Kind::Bar) => {
                let inner = self.within(Context { bar: true, ..Context::default() }, Self::sum)?;
                self.expect(Kind::Bar)?;
                self.enclosed(Bracket::Abs, inner)
            }
            Some(Kind::DoubleBar) => {
                let inner = self.within(Context { double_bar: true, ..Context::default() }, Self::sum)?;
                self.expect(Kind::DoubleBar)?;
                self.enclosed(Bracket::Norm, inner)
            }
            _ => Err(ParseError::Unparseable),
        }
    }

    fn enclosed(&mut self, bracket: Bracket, inner: NodeId) -> Parsed<NodeId> {
        if bracket == Bracket::Angle {
            let items = self.unlisted(inner);
            return self.push(Node::Vector(items));
        }
        if matches!(self.ast.node(inner), Node::List { .. }) {
            return Err(ParseError::Unparseable);
        }
        let matrix = matches!(self.ast.node(inner), Node::Matrix { .. });
        self.push(match bracket {
            Bracket::Floor => Node::Floor(inner),
            Bracket::Ceil => Node::Ceil(inner),
            Bracket::Norm => Node::Norm(inner),
            _ if matrix => Node::Determinant(inner),
            _ => Node::Abs(inner),
        })
    }

    /// The items of a list of commas or semicolons, or the one item.
    fn unlisted(&self, id: NodeId) -> Vec<NodeId> {
        match self.ast.node(id) {
            Node::List { items, separator: Separator::Comma | Separator::Semicolon } => items.clone(),
            _ => vec![id],
        }
    }

    /// `(…)`: an item as it stands, a tuple, or with another closing bracket an interval.
    fn round(&mut self) -> Parsed<NodeId> {
        let inner = self.within(Context::default(), Self::list)?;
        let items = self.unlisted(inner);
        match (self.peek(), &items[..]) {
            (Some(Kind::Close(Bracket::Round)), _) => {
                self.at += 1;
                self.tuple(inner, items)
            }
            (Some(Kind::Close(Bracket::Square)), &[low, high]) => {
                self.at += 1;
                self.push(Node::Interval { low, high, low_closed: false, high_closed: true })
            }
            _ => Err(ParseError::Unparseable),
        }
    }

    fn tuple(&mut self, inner: NodeId, items: Vec<NodeId>) -> Parsed<NodeId> {
        match items[..] {
            [_] => Ok(inner),
            [low, high] if self.is_infinite(low) || self.is_infinite(high) => {
                self.push(Node::Interval { low, high, low_closed: false, high_closed: false })
            }
            _ => self.push(Node::Tuple(items)),
        }
    }

    /// `[…]`: an item as it stands, a list, an interval, rows of a matrix.
    fn square(&mut self) -> Parsed<NodeId> {
        if self.opens(Bracket::Square) {
            return self.rows();
        }
        let inner = self.within(Context { french: true, ..Context::default() }, Self::list)?;
        let items = self.unlisted(inner);
        match (self.peek(), &items[..]) {
            (Some(Kind::Close(Bracket::Square)), [_]) => {
                self.at += 1;
                Ok(inner)
            }
            (Some(Kind::Close(Bracket::Square)), _) => {
                self.at += 1;
                let row = |id: &NodeId| matches!(self.ast.node(*id), Node::List { separator: Separator::Comma, .. });
                if matches!(self.ast.node(inner), Node::List { separator: Separator::Semicolon, .. })
                    && items.iter().all(row)
                {
                    let rows = items.iter().map(|row| self.unlisted(*row)).collect();
                    return self.matrix(rows);
                }
                if let [low, high] = items[..]
                    && (self.is_infinite(low) || self.is_infinite(high))
                {
                    return self.push(Node::Interval { low, high, low_closed: true, high_closed: true });
                }
                self.push(Node::Brackets(items))
            }
            (Some(Kind::Close(Bracket::Round) | Kind::Open(Bracket::Square)), &[low, high]) => {
                self.at += 1;
                self.push(Node::Interval { low, high, low_closed: true, high_closed: false })
            }
            _ => Err(ParseError::Unparseable),
        }
    }

    /// `[[1, 2], [3, 4]]`, at the second bracket.
    fn rows(&mut self) -> Parsed<NodeId> {
        let mut rows = Vec::new();
        while self.eat(Kind::Open(Bracket::Square)) {
            let inner = self.within(Context { french: true, ..Context::default() }, Self::list)?;
            rows.push(self.unlisted(inner));
            self.expect(Kind::Close(Bracket::Square))?;
            if !self.eat(Kind::Comma) && !self.eat(Kind::Semicolon) {
                break;
            }
        }
        self.expect(Kind::Close(Bracket::Square))?;
        let width = rows.first().map_or(0, Vec::len);
        if rows.iter().all(|row| row.len() == width) {
            return self.matrix(rows);
        }
        let mut items = Vec::new();
        for row in rows {
            items.push(self.push(Node::Brackets(row))?);
        }
        self.push(Node::Brackets(items))
    }

    fn matrix(&mut self, rows: Vec<Vec<NodeId>>) -> Parsed<NodeId> {
        let columns = rows.first().map_or(0, Vec::len);
        if columns == 0 || rows.iter().any(|row| row.len() != columns) {
            return Err(ParseError::Unparseable);
        }
        let size = |count: usize| u32::try_from(count).map_err(|_| ParseError::Undecided);
        let (height, width) = (size(rows.len())?, size(columns)?);
        self.push(Node::Matrix { rows: height, columns: width, entries: rows.concat() })
    }

    /// `]a, b[`, behind the first bracket.
    fn french(&mut self) -> Parsed<NodeId> {
        let inner = self.within(Context { french: true, ..Context::default() }, Self::list)?;
        let items = self.unlisted(inner);
        let &[low, high] = &items[..] else { return Err(ParseError::Unparseable) };
        let high_closed = match self.peek() {
            Some(Kind::Open(Bracket::Square)) => false,
            Some(Kind::Close(Bracket::Square)) => true,
            _ => return Err(ParseError::Unparseable),
        };
        self.at += 1;
        self.push(Node::Interval { low, high, low_closed: false, high_closed })
    }

    /// `\{…\}`: items, or an element and its conditions.
    fn set(&mut self) -> Parsed<NodeId> {
        // `\left\{\begin{array}{l} x = 1 \\ y = 2 \end{array}\right.`
        if let Some(Kind::Begin(environment)) = self.peek()
            && !self.lists_environments(environment)
        {
            self.at += 1;
            let inner = self.within(Context::default(), Self::list)?;
            self.expect(Kind::End(environment))?;
            self.eat(Kind::Close(Bracket::Curly));
            return Ok(inner);
        }
        self.set_until(Bracket::Curly)
    }

    /// Whether a comma follows the environment that begins here: a set of matrices.
    fn lists_environments(&self, environment: Environment) -> bool {
        let end = self.tokens.iter().skip(self.at).position(|token| token.kind == Kind::End(environment));
        end.is_some_and(|end| self.kind_at(end + 1) == Some(Kind::Comma))
    }

    fn set_until(&mut self, bracket: Bracket) -> Parsed<NodeId> {
        if self.eat(Kind::Close(bracket)) {
            return self.push(Node::Set(Vec::new()));
        }
        let start = self.at;
        let element = self.within(Context { set: true, ..Context::default() }, Self::list)?;
        if matches!(self.peek(), Some(Kind::Mid | Kind::Bar | Kind::Colon)) || self.word_at(0, "such") {
            self.at += 1;
            self.eat_word("that");
            if let Some(set) = self.set_builder(element, bracket)? {
                return Ok(set);
            }
            self.at = start;
        }
        // Bars of absolute values and colons of ratios have their meaning back where there are no conditions.
        let inner = if self.peek() == Some(Kind::Close(bracket)) {
            element
        } else {
            self.at = start;
            self.within(Context::default(), Self::list)?
        };
        self.expect(Kind::Close(bracket))?;
        let items = self.unlisted(inner);
        self.push(Node::Set(items))
    }

    /// The conditions of a set; `None` when what follows the sign states nothing, as in `\{2:3\}`.
    fn set_builder(&mut self, element: NodeId, bracket: Bracket) -> Parsed<Option<NodeId>> {
        let conditions = self.within(Context::default(), Self::list)?;
        if !self.is_statement(conditions) && !matches!(self.ast.node(conditions), Node::List { .. } | Node::Text(_)) {
            return Ok(None);
        }
        self.expect(Kind::Close(bracket))?;
        let Node::Relation { operands, .. } = self.ast.node(element) else {
            return self.push(Node::SetBuilder { element, conditions }).map(Some);
        };
        let Some(&variable) = operands.first() else { return Err(ParseError::Unparseable) };
        let mut items = vec![element];
        match self.ast.node(conditions) {
            Node::List { items: more, separator: Separator::Comma } | Node::And(more) => items.extend(more),
            _ => items.push(conditions),
        }
        let conditions = self.push(Node::And(items))?;
        self.push(Node::SetBuilder { element: variable, conditions }).map(Some)
    }

    /// `{…}`: in LaTeX a group; with commas, or around a whole plain answer, a set.
    fn group(&mut self) -> Parsed<NodeId> {
        let whole = self.at == 1 && !self.text.contains('\\');
        let opened = self.at;
        let before = self.at.checked_sub(2).and_then(|at| self.tokens.get(at)).map(|token| token.kind);
        let stands_alone = matches!(
            before,
            None | Some(
                Kind::Relation(_)
                    | Kind::Comma
                    | Kind::Open(_)
                    | Kind::Cup
                    | Kind::Cap
                    | Kind::SetMinus
                    | Kind::Word(_)
                    | Kind::Minus
            )
        );
        if self.peek() == Some(Kind::Close(Bracket::Group)) {
            self.at += 1;
            // The empty group before a script: `{}_5C_2`.
            return if matches!(self.peek(), Some(Kind::Underscore | Kind::Caret)) {
                self.primary()
            } else if whole {
                self.push(Node::Set(Vec::new()))
            } else {
                Err(ParseError::Unparseable)
            };
        }
        if whole && self.tokens.last().map(|token| token.kind) == Some(Kind::Close(Bracket::Group)) {
            let start = self.at;
            let set = self.set_until(Bracket::Group)?;
            if self.at == self.tokens.len() {
                return Ok(set);
            }
            self.at = start;
        }
        let inner = self.within(Context::default(), Self::list)?;
        let inner = match self.peek() {
            Some(kind @ (Kind::Over | Kind::Choose)) => {
                self.at += 1;
                let below = self.within(Context::default(), Self::side)?;
                if kind == Kind::Over { self.quotient(inner, below)? } else { self.push(Node::Binomial(inner, below))? }
            }
            _ => inner,
        };
        self.expect(Kind::Close(Bracket::Group))?;
        if let Node::List { items, separator } = self.ast.node(inner) {
            if !stands_alone || *separator != Separator::Comma {
                return Err(ParseError::Unparseable);
            }
            let items = items.clone();
            return self.push(Node::Set(items));
        }
        // `{-1} ∪ [0, 1)`
        let joins = |kind| matches!(kind, Some(Kind::Cup | Kind::Cap | Kind::SetMinus));
        let minus = before == Some(Kind::Minus) && self.at_set_before_minus(opened);
        if (minus || joins(before) || (stands_alone && joins(self.peek()))) && !self.is_set(inner) {
            return self.push(Node::Set(vec![inner]));
        }
        Ok(inner)
    }

    /// Whether `ℝ -` precedes the group whose inside starts at `inside`.
    fn at_set_before_minus(&self, inside: usize) -> bool {
        match inside.checked_sub(3).and_then(|at| self.tokens.get(at)).map(|token| token.kind) {
            Some(Kind::NamedSet(_)) => true,
            Some(Kind::Name { name, .. }) => matches!(name, "R" | "Z" | "N" | "Q") && !self.text.contains('\\'),
            _ => false,
        }
    }

    fn is_set(&self, id: NodeId) -> bool {
        matches!(
            self.ast.node(id),
            Node::Set(_)
                | Node::Interval { .. }
                | Node::Union(_)
                | Node::NamedSet { .. }
                | Node::EmptySet
                | Node::Tuple(_)
                | Node::Brackets(_)
                | Node::SetBuilder { .. }
        )
    }

    /// `<1, 2, 3>`, at the sign.
    pub(super) fn angle(&mut self) -> Parsed<NodeId> {
        self.at += 1;
        let inner = self.within(Context { angle: true, ..Context::default() }, Self::list)?;
        self.expect(Kind::Relation(super::super::ast::Comparison::Greater))?;
        let items = self.unlisted(inner);
        if items.len() < 2 { Err(ParseError::Unparseable) } else { self.push(Node::Vector(items)) }
    }

    /// `\begin{…}` to `\end{…}`.
    pub(super) fn environment(&mut self, environment: Environment) -> Parsed<NodeId> {
        self.at += 1;
        if environment == Environment::Rows {
            let inner = self.within(Context::default(), Self::list)?;
            self.expect(Kind::End(environment))?;
            return Ok(inner);
        }
        let mut rows = vec![Vec::new()];
        loop {
            if self.eat(Kind::End(environment)) {
                break;
            }
            let cell = self.within(Context::default(), Self::side)?;
            if let Some(row) = rows.last_mut() {
                row.push(cell);
            }
            match self.peek() {
                Some(Kind::Ampersand | Kind::Comma) => self.at += 1,
                Some(Kind::Newline) => {
                    self.at += 1;
                    if !matches!(self.peek(), Some(Kind::End(_))) {
                        rows.push(Vec::new());
                    }
                }
                Some(Kind::End(_)) => {}
                _ => return Err(ParseError::Unparseable),
            }
        }
        let matrix = self.matrix(rows)?;
        if environment == Environment::Determinant { self.push(Node::Determinant(matrix)) } else { Ok(matrix) }
    }
}
