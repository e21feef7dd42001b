//! Math answers: LaTeX or plain text to a syntax tree, to an exact value, to a verdict.

pub mod ast;
pub mod ball;
pub mod compare;
pub mod expr;
pub mod fuel;
pub mod modular;
pub mod unit;
pub mod value;
