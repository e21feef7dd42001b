//! The comparator: a verdict or "undecided" for any two answers, the same each time, and never that a text differs from
//! itself where it is a gold at all.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rlox_grpo::rewards::math::answer::{Answer, compare};
use rlox_grpo::rewards::math::compare::Options;
use rlox_grpo::rewards::math::expr::identity::Equality;

// Gold and answer, with a line break between them.
fuzz_target!(|text: &str| {
    let (gold, answer) = text.split_once('\n').unwrap_or((text, text));
    let options = Options::default();
    let verdict = compare(gold, answer, &options);
    assert_eq!(verdict, compare(gold, answer, &options));
    if Answer::gold(gold).is_ok() {
        assert_ne!(compare(gold, gold, &options), Equality::Different);
    }
});
