//! Why a text could not be read.

use std::error::Error;
use std::fmt;

/// Why a text is not read as an answer or as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParseError {
    /// The text states no answer.
    NoAnswer,
    /// The answer cannot be read.
    Unparseable,
    /// The answer exceeds the budget of tokens, depth or digits.
    Undecided,
}

impl fmt::Display for ParseError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::NoAnswer => "the text states no answer",
            Self::Unparseable => "the answer cannot be read",
            Self::Undecided => "the answer exceeds the budget of tokens, depth or digits",
        })
    }
}

impl Error for ParseError {}
