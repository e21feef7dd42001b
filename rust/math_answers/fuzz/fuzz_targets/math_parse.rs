//! Lexer and parser of math answers: a tree or a status for any text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use math_answers::parse;

fuzz_target!(|text: &str| {
    if let Ok(tree) = parse(text) {
        assert!(!tree.nodes().is_empty());
    }
});
