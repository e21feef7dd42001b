//! Tag blocks: points for closed blocks, and the length of the reasoning inside a block.

use math_answers::characters::is_space;

use crate::tags::{Tag, len};
use crate::{RewardRule, Status, Verdict};

/// Points for each of two tags that the text opens and later closes, in any order.
#[derive(Debug)]
pub struct TagBlocks {
    tags: [Tag; 2],
    each: f64,
}

impl TagBlocks {
    /// `each` points for a block of `first` and `each` for a block of `second`.
    #[must_use]
    pub fn new(first: &str, second: &str, each: f64) -> Self {
        Self { tags: [Tag::new(first), Tag::new(second)], each }
    }
}

impl RewardRule for TagBlocks {
    fn score(&self, _row: usize, completion: &str) -> Verdict {
        let closed = self.tags.iter().filter(|tag| tag.is_closed(completion.as_bytes())).count();
        Verdict::ok(closed as f64 * self.each)
    }
}

/// Unit of a text's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LengthUnit {
    /// Unicode scalar values, as in Python's `len`.
    Characters,
    /// Words between [`is_space`], as in Python's `str.split`.
    Words,
}

/// `min(length / max_length, 1)` over the text inside a tag, or over the whole text.
#[derive(Debug)]
pub struct ReasoningLength {
    tag: Option<Tag>,
    unit: LengthUnit,
    max_length: usize,
}

impl ReasoningLength {
    /// A `max_length` of 0 counts as 1.
    #[must_use]
    pub fn new(tag: Option<&str>, unit: LengthUnit, max_length: usize) -> Self {
        Self { tag: tag.map(Tag::new), unit, max_length: max_length.max(1) }
    }
}

impl RewardRule for ReasoningLength {
    fn score(&self, _row: usize, completion: &str) -> Verdict {
        let inside = match &self.tag {
            Some(tag) => inside(tag, completion),
            None => Some(completion),
        };
        let Some(text) = inside else { return Verdict::none(Status::NoAnswer) };
        let length = match self.unit {
            LengthUnit::Characters => text.chars().count(),
            LengthUnit::Words => text.split(is_space).filter(|word| !word.is_empty()).count(),
        };
        Verdict::ok((length as f64 / self.max_length as f64).min(1.0))
    }
}

/// The text from the first opening tag to the last closing tag. The text's start and end stand in for a missing one:
/// the prompt may have opened the tag. None without either tag.
fn inside<'t>(tag: &Tag, text: &'t str) -> Option<&'t str> {
    let bytes = text.as_bytes();
    let body = tag.open.find(bytes).map(|at| at + len(&tag.open));
    // From the back: a closing tag that the reasoning quotes does not end it.
    match (body, memchr::memmem::rfind(bytes, tag.close.needle())) {
        (Some(body), Some(end)) if body <= end => Some(&text[body..end]),
        (_, Some(end)) => Some(&text[..end]),
        (Some(body), None) => Some(&text[body..]),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_opened_before_they_are_closed() {
        let rule = TagBlocks::new("think", "answer", 0.05);
        for (text, score) in [
            ("<think>a</think><answer>b</answer>", 0.1),
            ("<answer>b</answer> and <think></think>", 0.1),
            ("<think>a</think><answer>b", 0.05),
            ("</think>a<think>", 0.0),
            ("", 0.0),
        ] {
            assert_eq!(rule.score(0, text), Verdict::ok(score), "{text:?}");
        }
    }

    #[test]
    fn reasoning_is_what_stands_in_the_tag() {
        let tag = Tag::new("think");
        for (text, expected) in [
            ("<think>abc</think>x", Some("abc")),
            ("abc</think>x", Some("abc")), // the prompt opened it
            ("<think>abc", Some("abc")),
            ("<think>a</think>b</think>", Some("a</think>b")),
            ("a</think> <think>b", Some("a")),
            ("abc", None),
            ("", None),
        ] {
            assert_eq!(inside(&tag, text), expected, "{text:?}");
        }
    }

    #[test]
    fn lengths_by_hand() {
        let score = |unit, text| ReasoningLength::new(Some("think"), unit, 8).score(0, text);
        assert_eq!(score(LengthUnit::Characters, "<think>é\u{3000}ab</think>").score, 0.5);
        assert_eq!(score(LengthUnit::Words, "<think> é\u{3000}ab </think>").score, 0.25);
        assert_eq!(score(LengthUnit::Characters, "<think>123456789</think>").score, 1.0);
        assert_eq!(score(LengthUnit::Words, "none"), Verdict::none(Status::NoAnswer));
        assert_eq!(ReasoningLength::new(None, LengthUnit::Words, 4).score(0, "one two").score, 0.5);
    }
}
