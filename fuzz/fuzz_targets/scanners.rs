//! Every scan for tags and stated answers: no panic, a part of the text, and the strict format checked by counting.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rlox_grpo::rewards::answer::{after_thinking, boxed, hashed, said, stated, tagged};
use rlox_grpo::rewards::choice::MultipleChoice;
use rlox_grpo::rewards::format::{FormatMode, TagFormat};
use rlox_grpo::rewards::tag_count::TagCount;
use rlox_grpo::rewards::{RewardRule, strip};

fuzz_target!(|text: &str| {
    let tail = after_thinking(text);
    // Several boxes are one answer, listed, with the signs and names that stand beside them.
    let found = |part: &str| text.contains(part) || text.contains(without_signs(part));
    assert!(stated(text).is_none_or(|answer| text.contains(&*answer) || answer.split(", ").all(found)));
    for part in [boxed(tail), tagged(tail, "answer"), hashed(tail).last(), said(tail).next_back()] {
        assert!(part.is_none_or(|part| text.contains(part)));
    }
    for (_, mode) in FormatMode::NAMES {
        let score = TagFormat::new("think", "answer", mode, "").score(0, text).score;
        assert!(score.is_finite());
        if mode == FormatMode::Strict && score == 1.0 {
            let text = strip(text);
            assert!(text.starts_with("<think>") && text.ends_with("</answer>"));
            for tag in ["<think>", "</think>", "<answer>", "</answer>"] {
                assert_eq!(text.matches(tag).count(), 1);
            }
        }
    }
    TagCount::lm_book("think", "answer").score(0, text);
    TagCount::open_r1("think", "answer").score(0, text);
    if let Ok(rule) = MultipleChoice::new(&["B"], "ABCDE") {
        let verdict = rule.score(0, text);
        assert!(verdict.score == 0.0 || text.to_ascii_uppercase().contains('B'));
    }
});

/// A box's content without the name, the sign and the percent or degree sign that stood around it.
fn without_signs(part: &str) -> &str {
    let value = part.split_once('=').map_or(part, |(_, value)| value);
    let value = value.strip_prefix("\\pm ").or(value.strip_prefix('-')).unwrap_or(value);
    value.strip_suffix("\\%").or(value.strip_suffix("^\\circ")).unwrap_or(value)
}
