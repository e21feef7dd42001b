//! Text for the tests of every scanner, of this crate and of the rules.

use proptest::prelude::*;

/// Text made of what the scanners look for, cut anywhere, and of anything at all.
pub fn hostile() -> impl Strategy<Value = String> {
    let pieces = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "\\boxed{",
        "\\fbox {",
        "}",
        "{",
        "\\",
        "####",
        "answer is",
        "answer:",
        "\n",
        " ",
        "1",
        "23",
        ",",
        ".",
        "-",
        "−",
        "$",
        "€",
        "%",
        "/",
        "*",
        "\\frac",
        "\\text{",
        "e",
        "10^",
        "×",
        "x",
        "=",
        "(",
        ")",
        "B",
        "é",
        "\0",
        "\u{1c}",
        "🙂",
        "million",
    ]);
    let piece = prop_oneof![9 => pieces.prop_map(str::to_owned), 1 => any::<char>().prop_map(String::from)];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}
