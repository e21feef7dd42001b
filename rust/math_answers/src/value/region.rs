//! Parts of the real line: unions of intervals, with ends that are compared as numbers.

use std::cmp::Ordering;

use super::super::expr::order::order;
use super::super::expr::{Exprs, Id};
use super::super::fuel::{Fuel, Stop};

/// Where an interval ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// −∞
    Below,
    /// A number, inside or not.
    At {
        /// Which.
        id: Id,
        /// Whether it is inside.
        closed: bool,
    },
    /// ∞
    Above,
}

/// An interval, or a point where both ends are one closed number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Lower end.
    pub low: End,
    /// Upper end.
    pub high: End,
}

impl Piece {
    /// All of the line.
    pub const ALL: Self = Self { low: End::Below, high: End::Above };

    /// A single number.
    #[must_use]
    pub fn point(id: Id) -> Self {
        Self { low: End::At { id, closed: true }, high: End::At { id, closed: true } }
    }
}

/// A union of pieces: disjoint and in order, where `sorted`; else as written, since an end has letters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// The pieces.
    pub pieces: Vec<Piece>,
    /// Whether they are in normal form.
    pub sorted: bool,
    /// Whether it is written as a solution: an interval, or a letter (times a number, or its absolute value) beside
    /// numbers. `x² < 4` restates a problem.
    pub solved: bool,
}

impl Region {
    /// The empty set.
    #[must_use]
    pub fn empty() -> Self {
        Self { pieces: Vec::new(), sorted: true, solved: true }
    }

    /// The real line.
    #[must_use]
    pub fn all() -> Self {
        Self { pieces: vec![Piece::ALL], sorted: true, solved: true }
    }

    /// The union of pieces, in normal form where every end is a number.
    ///
    /// # Errors
    /// [`Stop::Undefined`] for an interval from a number down to a smaller one, [`Stop::Fuel`].
    pub fn of(pieces: Vec<Piece>, exprs: &Exprs, fuel: &Fuel) -> Result<Self, Stop> {
        let line = Line { exprs, fuel };
        let mut sorted = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            match line.is_empty(*piece) {
                Some(true) => {}
                Some(false) => sorted.push(*piece),
                None => return Ok(Self { pieces, sorted: false, solved: true }),
            }
        }
        // Insertion, since comparisons may fail and sort_by takes none that do.
        let mut ordered: Vec<Piece> = Vec::with_capacity(sorted.len());
        for piece in sorted {
            let mut at = ordered.len();
            while at > 0 {
                fuel.spend(4)?;
                match line.lows(ordered[at - 1].low, piece.low) {
                    Some(Ordering::Greater) => at -= 1,
                    Some(_) => break,
                    None => return Ok(Self { pieces, sorted: false, solved: true }),
                }
            }
            ordered.insert(at, piece);
        }
        let mut merged: Vec<Piece> = Vec::with_capacity(ordered.len());
        for piece in ordered {
            let Some(last) = merged.last_mut() else {
                merged.push(piece);
                continue;
            };
            match line.touches(last.high, piece.low) {
                Some(true) => match line.highs(last.high, piece.high) {
                    Some(Ordering::Less) => last.high = piece.high,
                    Some(_) => {}
                    None => return Ok(Self { pieces, sorted: false, solved: true }),
                },
                Some(false) => merged.push(piece),
                None => return Ok(Self { pieces, sorted: false, solved: true }),
            }
        }
        Ok(Self { pieces: merged, sorted: true, solved: true })
    }

    /// What is in both; none where an end has letters.
    ///
    /// # Errors
    /// [`Stop::Fuel`]
    pub fn intersection(&self, other: &Self, exprs: &Exprs, fuel: &Fuel) -> Result<Option<Self>, Stop> {
        let line = Line { exprs, fuel };
        let mut pieces = Vec::new();
        for left in &self.pieces {
            for right in &other.pieces {
                fuel.spend(10)?;
                let (Some(lows), Some(highs)) = (line.lows(left.low, right.low), line.highs(left.high, right.high))
                else {
                    return Ok(None);
                };
                let low = if lows == Ordering::Less { right.low } else { left.low };
                let high = if highs == Ordering::Greater { right.high } else { left.high };
                pieces.push(Piece { low, high });
            }
        }
        let mut region = Self::of(pieces, exprs, fuel)?;
        region.solved = self.solved && other.solved;
        Ok(region.sorted.then_some(region))
    }

    /// What is not in; none where an end has letters.
    #[must_use]
    pub fn complement(&self) -> Option<Self> {
        if !self.sorted {
            return None;
        }
        let mut pieces = Vec::with_capacity(self.pieces.len() + 1);
        let mut low = End::Below;
        let mut open = true;
        for piece in &self.pieces {
            match piece.low {
                End::Below => {}
                End::At { id, closed } => pieces.push(Piece { low, high: End::At { id, closed: !closed } }),
                End::Above => return None,
            }
            match piece.high {
                End::Above => open = false,
                End::At { id, closed } => low = End::At { id, closed: !closed },
                End::Below => return None,
            }
        }
        if open {
            pieces.push(Piece { low, high: End::Above });
        }
        Some(Self { pieces, sorted: true, solved: self.solved })
    }
}

/// Ends in the order of the line.
struct Line<'e> {
    exprs: &'e Exprs,
    fuel: &'e Fuel,
}

impl Line<'_> {
    fn order(&self, left: Id, right: Id) -> Option<Ordering> {
        if left == right { Some(Ordering::Equal) } else { order((self.exprs, left), (self.exprs, right), self.fuel) }
    }

    /// Which lower end comes first; a closed one comes before an open one.
    fn lows(&self, left: End, right: End) -> Option<Ordering> {
        match (left, right) {
            (End::At { id: a, closed: p }, End::At { id: b, closed: q }) => Some(self.order(a, b)?.then(q.cmp(&p))),
            _ => Some(rank(left).cmp(&rank(right))),
        }
    }

    /// Which upper end comes first; an open one comes before a closed one.
    fn highs(&self, left: End, right: End) -> Option<Ordering> {
        match (left, right) {
            (End::At { id: a, closed: p }, End::At { id: b, closed: q }) => Some(self.order(a, b)?.then(p.cmp(&q))),
            _ => Some(rank(left).cmp(&rank(right))),
        }
    }

    /// Whether a piece that ends at `high` and one that starts at `low`, not before it, leave no gap.
    fn touches(&self, high: End, low: End) -> Option<bool> {
        match (high, low) {
            (End::At { id: a, closed: p }, End::At { id: b, closed: q }) => Some(match self.order(b, a)? {
                Ordering::Less => true,
                Ordering::Equal => p || q,
                Ordering::Greater => false,
            }),
            (End::Above, _) | (_, End::Below) => Some(true),
            _ => Some(false),
        }
    }

    fn is_empty(&self, piece: Piece) -> Option<bool> {
        match (piece.low, piece.high) {
            (End::At { id: a, closed: p }, End::At { id: b, closed: q }) => Some(match self.order(a, b)? {
                Ordering::Less => false,
                Ordering::Equal => !(p && q),
                Ordering::Greater => true,
            }),
            (End::Above, _) | (_, End::Below) => Some(true),
            _ => Some(false),
        }
    }
}

fn rank(end: End) -> u8 {
    match end {
        End::Below => 0,
        End::At { .. } => 1,
        End::Above => 2,
    }
}
