//! Errors of the rules: they name the column, the row and the value.

use thiserror::Error;

/// An invalid column of the data; Python sees a `ValueError`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RuleError {
    /// A gold answer that a rule cannot read.
    #[error("{argument}[{index}] is {value:?}: {reason}")]
    BadGold {
        /// Name of the column.
        argument: &'static str,
        /// The row.
        index: usize,
        /// The gold.
        value: String,
        /// What is expected.
        reason: &'static str,
    },
    /// A column whose length differs from the batch's.
    #[error("{argument} has {rows} rows, expected {expected}")]
    RowCount {
        /// Name of the column.
        argument: &'static str,
        /// Rows of the column.
        rows: usize,
        /// Rows of the batch.
        expected: usize,
    },
}
