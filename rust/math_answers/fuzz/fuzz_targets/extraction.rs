//! Every scan for stated answers: no panic, and a part of the text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use math_answers::extraction::{after_thinking, boxed, hashed, said, stated, tagged};

fuzz_target!(|text: &str| {
    let tail = after_thinking(text);
    // Several boxes are one answer, listed, with the signs and names that stand beside them.
    let found = |part: &str| text.contains(part) || text.contains(without_signs(part));
    assert!(stated(text).is_none_or(|answer| text.contains(&*answer) || answer.split(", ").all(found)));
    for part in [boxed(tail), tagged(tail, "answer"), hashed(tail).last(), said(tail).next_back()] {
        assert!(part.is_none_or(|part| text.contains(part)));
    }
});

/// A box's content without the name, the sign and the percent or degree sign that stood around it.
fn without_signs(part: &str) -> &str {
    let value = part.split_once('=').map_or(part, |(_, value)| value);
    let value = value.strip_prefix("\\pm ").or(value.strip_prefix('-')).unwrap_or(value);
    value.strip_suffix("\\%").or(value.strip_suffix("^\\circ")).unwrap_or(value)
}
