//! Properties of the reward rules over arbitrary text: no panic, one answer, linear work.

#![allow(clippy::unwrap_used)]

#[path = "../../math_answers/tests/hostile/mod.rs"]
mod hostile;

use hostile::hostile;
use math_answers::work::counted;
use proptest::prelude::*;
use rlox_grpo_kernels::ragged::Ragged;
use rlox_grpo_rules::choice::MultipleChoice;
use rlox_grpo_rules::countdown::Countdown;
use rlox_grpo_rules::exact::ExactAnswer;
use rlox_grpo_rules::format::{FormatMode, TagFormat};
use rlox_grpo_rules::gsm8k::Gsm8kAnswer;
use rlox_grpo_rules::repetition::WordRepetition;
use rlox_grpo_rules::tag_count::TagCount;
use rlox_grpo_rules::{RewardRule, Verdict, score_batch};

/// Run `check` with every rule, bound to one row.
fn with_rules(mut check: impl FnMut(&str, &dyn RewardRule)) {
    let numbers = Ragged::new(&[1, 2], &[0, 2], "nums").unwrap();
    check("countdown", &Countdown::new(numbers, &[3]).unwrap());
    check("gsm8k", &Gsm8kAnswer::new(&["3"], false).unwrap());
    check("exact", &ExactAnswer::new(&["3"], None, false));
    check("choice", &MultipleChoice::new(&["B"], "ABCD").unwrap());
    check("words", &WordRepetition { ngram_size: 3, max_penalty: -1.0 });
    check("lm_book", &TagCount::lm_book("think", "answer"));
    check("tag_count", &TagCount::open_r1("think", "answer"));
    for (name, mode) in FormatMode::NAMES {
        check(name, &TagFormat::new("think", "answer", mode, "<think>"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_panics_and_a_verdict_repeats(text in hostile()) {
        with_rules(|name, rule| {
            let verdict = rule.score(0, &text);
            assert_eq!(verdict, rule.score(0, &text), "{name}");
            assert!(verdict.score.is_finite(), "{name}");
            assert!(verdict.score == 0.0 || verdict.status as u8 == 0, "{name}: {verdict:?}");
        });
    }

    #[test]
    fn the_batch_does_not_change_a_verdict(texts in prop::collection::vec(hostile(), 0..8)) {
        let rule = TagFormat::new("think", "answer", FormatMode::GrpoZero, "");
        let expected: Vec<Verdict> = texts.iter().map(|text| rule.score(0, text)).collect();
        prop_assert_eq!(score_batch(&rule, &texts), expected.into_iter().collect());
    }
}

/// Bytes looked at for each byte of a text. The most is 106, of GSM8K: 512 bytes behind each `answer is `, looked at twice.
const MOST_LOOKS: u64 = 150;

#[test]
#[cfg(debug_assertions)]
fn the_work_on_hostile_text_is_linear() {
    const LENGTH: usize = 1 << 17;
    let mut busy = std::collections::BTreeSet::new();
    let pieces = [
        "(",
        ")",
        "{",
        "}",
        "\\boxed{",
        "\\",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "</think>\n<answer>",
        "####",
        "#### 1\n",
        "answer is ",
        "answer",
        "1",
        "1,",
        "1.",
        "1/",
        "-",
        "- ",
        " ",
        "\n",
        "\\frac{",
        "1e9 ",
        "* ",
        "A ",
        "é",
        "</think>\n",
        "\n</answer>",
        "<think>\n",
        "million ",
        "~~",
        "~~a~~ ",
        "\\cancel",
        "\\st ",
        "\\cancelto{1}",
        "<s>",
    ];
    for piece in pieces {
        for start in ["", "<think>", "<think>\n", "<think>a</think>\n<answer>", "\\boxed{", "#### 1 "] {
            let text = format!("{start}{}", piece.repeat(LENGTH / piece.len()));
            with_rules(|name, rule| {
                let looks = counted(|| {
                    rule.score(0, &text);
                });
                // Quadratic work looks at each byte some thousand times.
                let most = MOST_LOOKS * text.len() as u64;
                assert!(looks <= most, "{name} on {start:?} + {piece:?}: {looks} bytes of {}", text.len());
                if 2 * looks >= text.len() as u64 {
                    busy.insert(name.to_owned());
                }
            });
        }
    }
    // Every rule counts what it looks at.
    with_rules(|name, _| assert!(busy.contains(name), "{name} counts nothing"));
}
