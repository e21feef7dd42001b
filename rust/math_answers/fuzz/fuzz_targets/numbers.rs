//! Numbers in text: no panic, and the last one is a part of the text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use math_answers::number::{first, last, read};

fuzz_target!(|text: &str| {
    let _ = (read(text), first(text));
    if let Some(token) = last(text) {
        assert!(text.get(token.start..token.end).is_some_and(|part| !part.is_empty()));
    }
});
