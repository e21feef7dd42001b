#![doc = include_str!("../README.md")]

pub mod answer;
pub mod ast;
pub mod ball;
pub mod characters;
pub mod compare;
pub mod equality;
pub mod error;
pub mod expr;
pub mod extraction;
pub mod fuel;
#[cfg(test)]
mod hostile;
mod id;
mod kinds;
mod label;
mod lexer;
mod lifted;
mod literal;
mod mend;
pub mod modular;
mod node;
mod notation;
pub mod number;
mod outside;
mod parser;
mod read;
mod render;
pub mod sentence;
pub mod unit;
pub mod value;
mod word;
pub mod work;
mod written_out;

use compare::Options;
use equality::Equality;
pub use read::{LONGEST_ANSWER, parse};

/// Whether an answer is worth the same as the gold, under the strictest [`Options`]; [`answer::compare`] takes others.
#[must_use]
pub fn math_equal(gold: &str, answer: &str) -> Equality {
    answer::compare(gold, answer, &Options::default())
}
