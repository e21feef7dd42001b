//! Rows of different lengths as flat values and offsets, checked once.

use crate::error::KernelError;

/// Borrowed rows: row `i` is `values[offsets[i]..offsets[i + 1]]`.
#[derive(Debug, Clone, Copy)]
pub struct Ragged<'a, T> {
    values: &'a [T],
    offsets: &'a [i64],
}

impl<'a, T> Ragged<'a, T> {
    /// Check `offsets` against `values` and take both; `argument` names the offsets in errors.
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
        // Checked on construction: offsets are within 0..=values.len(), so neither cast can truncate.
        &self.values[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    /// The rows in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &'a [T]> + '_ {
        (0..self.len()).map(|index| self.row(index))
    }
}
