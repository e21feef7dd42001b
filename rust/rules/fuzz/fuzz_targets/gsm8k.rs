//! The GSM8K rule: no panic, and only a text that holds the gold's digits, or a calculation, is paid for it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rlox_grpo_rules::RewardRule;
use rlox_grpo_rules::gsm8k::Gsm8kAnswer;

fuzz_target!(|text: &str| {
    // A prime of nine digits: no short text reaches it by a fraction or a factor.
    if let Ok(rule) = Gsm8kAnswer::new(&["735134417"], false)
        && rule.score(0, text).score == 1.0
    {
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        assert!(digits.contains("735134417") || text.len() > 12, "{text:?}");
    }
    let _ = Gsm8kAnswer::new(&[text], true);
});
