//! What a kernel refuses, with the argument, the index and the value.

use thiserror::Error;

/// A broken precondition. Every variant names the argument at fault; Python sees a `ValueError`.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// An offset table that does not start at 0, decreases, or does not end at the number of values.
    #[error("{argument}[{index}] is {value}: {reason}")]
    BadOffset {
        /// Name of the offsets argument.
        argument: &'static str,
        /// Position in the offsets.
        index: usize,
        /// The offset found there.
        value: i64,
        /// What it should have been.
        reason: &'static str,
    },
    /// A reference that a reward rule cannot use.
    #[error("{argument}[{index}] is {value:?}: {reason}")]
    BadGold {
        /// Name of the column.
        argument: &'static str,
        /// The row.
        index: usize,
        /// What stands there.
        value: String,
        /// What it should have been.
        reason: &'static str,
    },
    /// A column of another length than the batch.
    #[error("{argument} has {rows} rows, expected {expected}")]
    RowCount {
        /// Name of the column.
        argument: &'static str,
        /// Rows that it has.
        rows: usize,
        /// Rows of the batch.
        expected: usize,
    },
}
