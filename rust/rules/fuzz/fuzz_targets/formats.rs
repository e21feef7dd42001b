//! The rules of formats and choices: no panic, and the strict format checked by counting.
#![no_main]

use libfuzzer_sys::fuzz_target;
use math_answers::characters::strip;
use rlox_grpo_rules::RewardRule;
use rlox_grpo_rules::choice::MultipleChoice;
use rlox_grpo_rules::format::{FormatMode, TagFormat};
use rlox_grpo_rules::tag_count::TagCount;

fuzz_target!(|text: &str| {
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
