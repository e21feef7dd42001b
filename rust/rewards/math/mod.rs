//! Math answers: LaTeX or plain text to a syntax tree, to an exact value, to a verdict.
//!
//! Text goes through [`notation`] (Unicode to LaTeX), [`lexer`] (tokens), [`parser`] (the tree of [`ast`]); [`read`]
//! puts them together and keeps several readings where a text has several.

pub mod ast;
mod command;
mod digits;
#[cfg(test)]
mod hostile;
mod lexer;
mod literal;
mod notation;
mod parser;
mod read;
mod render;
mod token;
pub mod unit;
mod word;

pub use read::{LONGEST_ANSWER, parse};
