//! Exact match: 1 if the stated answer equals the gold as text.

use std::borrow::Cow;

use math_answers::characters::strip;
use math_answers::extraction::{after_thinking, legible, stated, tagged};

use crate::{RewardRule, Status, Verdict};

/// Exact-match rule: the stripped gold of each row of a batch.
#[derive(Debug)]
pub struct ExactAnswer {
    golds: Vec<String>,
    tag: Option<String>,
    case_sensitive: bool,
}

impl ExactAnswer {
    /// With `tag`, the answer is the content of the last closed tag of that name after the last `</think>`; without, it
    /// is the [`stated`] answer.
    #[must_use]
    pub fn new<T: AsRef<str>>(golds: &[T], tag: Option<&str>, case_sensitive: bool) -> Self {
        let fold = |gold: &T| {
            if case_sensitive { strip(gold.as_ref()).to_owned() } else { strip(gold.as_ref()).to_lowercase() }
        };
        Self { golds: golds.iter().map(fold).collect(), tag: tag.map(str::to_owned), case_sensitive }
    }
}

impl RewardRule for ExactAnswer {
    fn score(&self, row: usize, completion: &str) -> Verdict {
        let answer = match &self.tag {
            Some(tag) => {
                let legible = legible(completion);
                tagged(after_thinking(&legible), tag).map(|answer| Cow::Owned(strip(answer).to_owned()))
            }
            None => stated(completion),
        };
        let Some(answer) = answer else { return Verdict::none(Status::NoAnswer) };
        let gold = &self.golds[row];
        Verdict::right(if self.case_sensitive { answer == *gold } else { answer.to_lowercase() == *gold })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_compared_stripped_and_as_it_stands() {
        let rule = ExactAnswer::new(&[" Paris "], None, true);
        assert_eq!(rule.score(0, "<answer>\nParis\n</answer>"), Verdict::ok(1.0));
        assert_eq!(rule.score(0, "<answer>paris</answer>"), Verdict::ok(0.0));
        assert_eq!(rule.score(0, "Paris").status, Status::NoAnswer);
        assert_eq!(ExactAnswer::new(&["Paris"], None, false).score(0, "the answer is PARIS.").score, 1.0);
        assert_eq!(
            ExactAnswer::new(&["1"], Some("result"), true).score(0, "<result>1</result><answer>2</answer>").score,
            1.0
        );
    }
}
