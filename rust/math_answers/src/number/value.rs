//! The value of a number, with its percent sign.

use dashu_ratio::RBig;

/// A number as written: `50%` has the face 50 and the value 1/2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Number {
    /// The value before the percent sign applies.
    pub face: RBig,
    /// Whether a percent sign or the word "percent" follows.
    pub percent: bool,
}

impl Number {
    /// The value after the percent sign applies.
    #[must_use]
    pub fn value(&self) -> RBig {
        if self.percent { &self.face / RBig::from(100) } else { self.face.clone() }
    }
}
