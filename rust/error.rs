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
}
