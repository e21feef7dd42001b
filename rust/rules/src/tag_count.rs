//! Points for the tags that a completion contains.

use memchr::memmem::Finder;

use crate::tags::{find, finder, only};
use crate::{RewardRule, Verdict};

/// Points for each of the four tags that the text contains, in any order.
#[derive(Debug)]
pub struct TagCount {
    literals: [Finder<'static>; 4],
    each: f64,
    once: bool,
}

impl TagCount {
    /// The LM book's rule: 0.2 for each of `<T1>`, `</T1>`, `<T2>`, `</T2>` found anywhere, however often.
    #[must_use]
    pub fn lm_book(first: &str, second: &str) -> Self {
        let literals = [format!("<{first}>"), format!("</{first}>"), format!("<{second}>"), format!("</{second}>")];
        Self { literals: literals.map(|tag| finder(&tag)), each: 0.2, once: false }
    }

    /// open-r1's rule: 0.25 for each of `<T1>\n`, `\n</T1>\n`, `\n<T2>\n`, `\n</T2>` found exactly once.
    #[must_use]
    pub fn open_r1(first: &str, second: &str) -> Self {
        let literals =
            [format!("<{first}>\n"), format!("\n</{first}>\n"), format!("\n<{second}>\n"), format!("\n</{second}>")];
        Self { literals: literals.map(|tag| finder(&tag)), each: 0.25, once: true }
    }
}

impl RewardRule for TagCount {
    fn score(&self, _row: usize, completion: &str) -> Verdict {
        let text = completion.as_bytes();
        let counts = |tag: &&Finder<'static>| {
            if self.once { only(tag, text).is_some() } else { find(tag, text, 0).is_some() }
        };
        // Added one by one, as in the published rules, so that the sums agree to the last bit.
        Verdict::ok(self.literals.iter().filter(counts).fold(0.0, |sum, _| sum + self.each))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_counts_add_up() {
        let text = "<think>\na\n</think>\n<answer>\nb\n</answer>";
        assert_eq!(TagCount::open_r1("think", "answer").score(0, text).score, 0.75 + 0.25);
        assert_eq!(TagCount::open_r1("think", "answer").score(0, "<think>\n<think>\n").score, 0.0);
        assert_eq!(TagCount::lm_book("think", "answer").score(0, "</answer></answer><think>").score, 0.4);
    }
}
