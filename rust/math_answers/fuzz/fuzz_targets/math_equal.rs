//! The comparator: a verdict or "undecided" for any two answers, always the same one, and never that a gold differs from
//! itself.
#![no_main]

use libfuzzer_sys::fuzz_target;
use math_answers::answer::Answer;
use math_answers::equality::Equality;
use math_answers::math_equal;

// Gold and answer, with a line break between them.
fuzz_target!(|text: &str| {
    let (gold, answer) = text.split_once('\n').unwrap_or((text, text));
    assert_eq!(math_equal(gold, answer), math_equal(gold, answer));
    let _ = math_equal(answer, gold);
    if Answer::gold(gold).is_ok() {
        assert_ne!(math_equal(gold, gold), Equality::Different);
    }
});
