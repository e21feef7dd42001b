//! The verdict of a comparison, which may be that there is none.

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Equality {
    /// The same.
    Equal,
    /// Not the same.
    Different,
    /// The budget or the precision did not suffice.
    Undecided,
}

impl Equality {
    /// [`Equality::Equal`] or [`Equality::Different`].
    #[must_use]
    pub fn of(equal: bool) -> Self {
        if equal { Self::Equal } else { Self::Different }
    }

    /// Equal if both are; different if one is.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Different, _) | (_, Self::Different) => Self::Different,
            (Self::Equal, Self::Equal) => Self::Equal,
            _ => Self::Undecided,
        }
    }

    /// Equal if one is; different if both are.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Equal, _) | (_, Self::Equal) => Self::Equal,
            (Self::Different, Self::Different) => Self::Different,
            _ => Self::Undecided,
        }
    }
}
