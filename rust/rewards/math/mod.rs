//! Math answers: LaTeX or plain text to a syntax tree, to an exact value, to a verdict.

pub mod ast;
pub mod unit;
