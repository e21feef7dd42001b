//! The comparator: a verdict or "undecided" for any two answers, always the same one, and never that a gold differs from
//! itself.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rlox_grpo::rewards::math::answer::{Answer, compare};
use rlox_grpo::rewards::math::compare::Options;
use rlox_grpo::rewards::math::expr::identity::Equality;

// Gold and answer, with a line break between them.
fuzz_target!(|text: &str| {
    let (gold, answer) = text.split_once('\n').unwrap_or((text, text));
    let equal = |gold: &str, answer: &str| compare(gold, answer, &Options::default());
    assert_eq!(equal(gold, answer), equal(gold, answer));
    let _ = equal(answer, gold);
    if Answer::gold(gold).is_ok() {
        assert_ne!(equal(gold, gold), Equality::Different);
    }
});
