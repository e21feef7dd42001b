//! Errors of the kernels: they name the argument, the index and the value.

use thiserror::Error;

/// An invalid argument. Every variant names the argument; Python sees a `ValueError`.
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
        /// What is expected.
        reason: &'static str,
    },
    /// An infinity, or a NaN where NaN has no meaning.
    #[error("{argument}[{index}] is not finite: {value}")]
    NotFinite {
        /// Name of the argument.
        argument: &'static str,
        /// Position of the value.
        index: usize,
        /// The value found there.
        value: f64,
    },
    /// Finite values whose statistics leave the range of their type.
    #[error("{argument} overflows its type: its values are finite but their {statistic} is not")]
    Overflow {
        /// Name of the argument.
        argument: &'static str,
        /// Statistic that is not finite.
        statistic: &'static str,
    },
    /// A group size that does not divide the number of rewards.
    #[error("rewards has {rewards} values, which group_size {group_size} does not divide")]
    GroupSize {
        /// Number of rewards.
        rewards: usize,
        /// The group size asked for.
        group_size: usize,
    },
    /// Two arguments whose lengths must be equal.
    #[error("{argument} has {length} values, but {other} has {expected}")]
    LengthMismatch {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Its length.
        length: usize,
        /// Argument that it must match.
        other: &'static str,
        /// Length of the other argument.
        expected: usize,
    },
    /// An element outside its range.
    #[error("{argument}[{index}] is {value}: {reason}")]
    BadElement {
        /// Name of the argument.
        argument: &'static str,
        /// Position of the element.
        index: usize,
        /// The element found there.
        value: i64,
        /// What is expected.
        reason: &'static str,
    },
    /// A scalar argument out of range.
    #[error("{argument} is {value}: {reason}")]
    BadValue {
        /// Name of the argument.
        argument: &'static str,
        /// The value given.
        value: f64,
        /// What is expected.
        reason: &'static str,
    },
    /// A row longer than a micro-batch may be.
    #[error("lengths[{index}] is {length}, over the token_budget of {token_budget}")]
    OverBudget {
        /// Position of the row.
        index: usize,
        /// Its length in tokens.
        length: i64,
        /// The budget of a micro-batch.
        token_budget: i64,
    },
    /// An output too large to address.
    #[error("{argument} would need {rows} x {width} values, more than can be addressed")]
    TooLarge {
        /// Name of the argument.
        argument: &'static str,
        /// Rows of the output.
        rows: usize,
        /// Columns of the output.
        width: usize,
    },
}
