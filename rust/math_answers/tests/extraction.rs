//! Properties of extraction over arbitrary text: no panic, and a part of the text.

#![allow(clippy::unwrap_used)]

mod hostile;

use std::borrow::Cow;

use hostile::hostile;
use math_answers::extraction::stated;
use math_answers::number;
use proptest::prelude::*;

/// The content of a box without what stands around it: a name and a minus sign before it, a percent or degree sign behind.
fn without_signs(part: &str) -> &str {
    let value = part.split_once('=').map_or(part, |(_, value)| value);
    let value = value.strip_prefix("\\pm ").or(value.strip_prefix('-')).unwrap_or(value);
    value.strip_suffix("\\%").or(value.strip_suffix("^\\circ")).unwrap_or(value)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_panics(text in hostile()) {
        let _ = (stated(&text), number::read(&text), number::first(&text));
    }

    #[test]
    fn what_is_stated_is_part_of_the_text(text in hostile()) {
        match stated(&text) {
            Some(Cow::Borrowed(answer)) => prop_assert!(text.contains(answer)),
            // Several boxes, listed.
            Some(Cow::Owned(answer)) => prop_assert!(answer.split(", ").all(|part| text.contains(part) || text.contains(without_signs(part)))),
            None => {}
        }
        if let Some(token) = number::last(&text) {
            prop_assert!(text.get(token.start..token.end).is_some_and(|span| !span.is_empty()));
        }
    }

    #[test]
    fn integers_are_read_back(value in any::<i64>(), decimals in 0usize..4) {
        let text = if decimals == 0 { value.to_string() } else { format!("{value}.{}", "0".repeat(decimals)) };
        prop_assert_eq!(number::read(&text).unwrap().value(), value.into());
    }
}
