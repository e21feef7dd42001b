//! What stands between a tag's two literals: how many blocks a text has, and how long its reasoning is.

use memchr::memmem::Finder;

use super::{RewardRule, Status, Verdict, is_space};

/// A tag's opening and closing literal, each with its searcher.
#[derive(Debug)]
struct Tag {
    open: Finder<'static>,
    close: Finder<'static>,
}

impl Tag {
    fn new(name: &str) -> Self {
        let finder = |literal: String| Finder::new(literal.as_bytes()).into_owned();
        Self { open: finder(format!("<{name}>")), close: finder(format!("</{name}>")) }
    }

    /// Whether the text opens the tag and closes it later.
    fn is_closed(&self, text: &[u8]) -> bool {
        self.open.find(text).is_some_and(|at| self.close.find(&text[at..]).is_some())
    }

    /// From the first opening, or from the start where the prompt wrote that, to the last closing or the end.
    /// None where the text has neither.
    fn inside<'t>(&self, text: &'t str) -> Option<&'t str> {
        let bytes = text.as_bytes();
        let body = self.open.find(bytes).map(|at| at + self.open.needle().len());
        // From the back, so that a closing tag that the reasoning quotes does not end it.
        match (body, memchr::memmem::rfind(bytes, self.close.needle())) {
            (Some(body), Some(end)) if body <= end => Some(&text[body..end]),
            (_, Some(end)) => Some(&text[..end]),
            (Some(body), None) => Some(&text[body..]),
            (None, None) => None,
        }
    }
}

/// Points for each of two tags that is opened and later closed, whatever their order.
#[derive(Debug)]
pub struct TagBlocks {
    tags: [Tag; 2],
    each: f64,
}

impl TagBlocks {
    /// `each` points for a block of `first`, and as many for one of `second`.
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

/// What a text's length is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LengthUnit {
    /// Unicode scalar values, as Python's `len`.
    Characters,
    /// Runs between [`is_space`], as Python's `str.split`.
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
    /// `max_length` is at least 1.
    #[must_use]
    pub fn new(tag: Option<&str>, unit: LengthUnit, max_length: usize) -> Self {
        Self { tag: tag.map(Tag::new), unit, max_length: max_length.max(1) }
    }
}

impl RewardRule for ReasoningLength {
    fn score(&self, _row: usize, completion: &str) -> Verdict {
        let inside = match &self.tag {
            Some(tag) => tag.inside(completion),
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
        for (text, inside) in [
            ("<think>abc</think>x", Some("abc")),
            ("abc</think>x", Some("abc")), // the prompt opened it
            ("<think>abc", Some("abc")),
            ("<think>a</think>b</think>", Some("a</think>b")),
            ("a</think> <think>b", Some("a")),
            ("abc", None),
            ("", None),
        ] {
            assert_eq!(tag.inside(text), inside, "{text:?}");
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
