//! Countdown: no panic, and a paid expression uses the given numbers and nothing that an interpreter would read otherwise.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rlox_grpo_rules::countdown::reaches;

// First line: the numbers and the target; the rest: the expression.
fuzz_target!(|text: &str| {
    let Some((line, expression)) = text.split_once('\n') else { return };
    let mut given: Vec<i64> = line.split(' ').flat_map(str::parse).collect();
    let Some(target) = given.pop() else { return };
    given.retain(|number| *number >= 0);
    if reaches(expression, &given, target) == Ok(true) {
        let body = expression.split('=').next().unwrap_or_default();
        let mut used: Vec<i64> =
            body.split(|c: char| !c.is_ascii_digit()).filter(|run| !run.is_empty()).flat_map(str::parse).collect();
        used.sort_unstable();
        given.sort_unstable();
        assert_eq!(used, given, "{expression:?}");
        assert!(!expression.contains("**") && !expression.contains("//") && !expression.contains('.'));
    }
});
