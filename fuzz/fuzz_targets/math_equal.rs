//! The comparator: a verdict or "undecided" for any two answers, the same both ways, and never that a text differs from
//! itself.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rlox_grpo::rewards::math::equal;

// Gold and answer, with a line break between them.
fuzz_target!(|text: &str| {
    let (gold, answer) = text.split_once('\n').unwrap_or((text, text));
    let verdict = equal(gold, answer);
    assert_eq!(verdict, equal(gold, answer));
    assert_eq!(verdict, equal(answer, gold));
    assert_ne!(equal(gold, gold), Some(false));
});
