//! Ragged rows: flat values and offsets, validated once on construction.

use crate::error::KernelError;

/// Largest number of values in one output: eight bytes a value, and no allocation exceeds `isize::MAX` bytes.
pub const MOST_VALUES: usize = isize::MAX as usize / 8;

/// Borrowed rows: row `i` is `values[offsets[i]..offsets[i + 1]]`.
///
/// Example: values `[1, 2, 7]` with offsets `[0, 2, 2, 3]` are the rows `[1, 2]`, `[]` and `[7]`.
#[derive(Debug, Clone, Copy)]
pub struct Ragged<'a, T> {
    values: &'a [T],
    offsets: &'a [i64],
}

impl<'a, T> Ragged<'a, T> {
    /// Check `offsets` against `values` and borrow both. `argument` names the offsets in errors.
    ///
    /// # Errors
    /// [`KernelError::BadOffset`] when the offsets are empty, do not start at 0, decrease, or do not end at `values.len()`.
    pub fn new(values: &'a [T], offsets: &'a [i64], argument: &'static str) -> Result<Self, KernelError> {
        let bad = |index: usize, value: i64, reason: &'static str| {
            Err(KernelError::BadOffset { argument, index, value, reason })
        };
        match offsets.first() {
            None => return bad(0, 0, "offsets hold at least the leading 0"),
            Some(&0) => {}
            Some(&first) => return bad(0, first, "offsets start at 0"),
        }
        if let Some(index) = offsets.windows(2).position(|pair| pair[1] < pair[0]) {
            return bad(index + 1, offsets[index + 1], "offsets never decrease");
        }
        let last = offsets[offsets.len() - 1];
        if usize::try_from(last).ok() != Some(values.len()) {
            return bad(offsets.len() - 1, last, "the last offset is the number of values");
        }
        Ok(Self { values, offsets })
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row `index`; panics past the end, as slices do.
    #[must_use]
    pub fn row(&self, index: usize) -> &'a [T] {
        // Checked on construction: offsets lie within 0..=values.len(), so the casts cannot truncate.
        &self.values[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    /// The rows in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &'a [T]> + '_ {
        (0..self.len()).map(|index| self.row(index))
    }
}
