//! Multiple choice: 1 if the completion states the gold's option letter.

use math_answers::characters::{is_space, strip};
use math_answers::extraction::{after_thinking, boxed, hashed, is_denied, legible, said, tagged};
use math_answers::work::looked_at;

use crate::error::RuleError;
use crate::{RewardRule, Status, Verdict};

/// Multiple-choice rule: the option letter of each row of a batch.
#[derive(Debug)]
pub struct MultipleChoice {
    golds: Vec<char>,
    options: Vec<char>,
}

impl MultipleChoice {
    /// `options` are the valid letters. A gold is one of them, written as `B`, `(B)`, `B.` or `B) text`.
    ///
    /// # Errors
    /// [`RuleError::BadGold`] for a gold that names no option.
    pub fn new<T: AsRef<str>>(golds: &[T], options: &str) -> Result<Self, RuleError> {
        let options: Vec<char> = options.chars().collect();
        let letter = |(index, gold): (usize, &T)| {
            read_letter(gold.as_ref(), &options).ok_or_else(|| RuleError::BadGold {
                argument: "answer",
                index,
                value: gold.as_ref().to_owned(),
                reason: "a gold is one of the option letters",
            })
        };
        Ok(Self { golds: golds.iter().enumerate().map(letter).collect::<Result<_, _>>()?, options })
    }
}

impl RewardRule for MultipleChoice {
    fn score(&self, row: usize, completion: &str) -> Verdict {
        let legible = legible(completion);
        let text = after_thinking(&legible);
        let marked = boxed(text)
            .or_else(|| tagged(text, "answer"))
            .or_else(|| hashed(text).next())
            .or_else(|| said(text).rfind(|answer| !is_denied(text, answer)));
        let named = marked.unwrap_or(text);
        // A marked sentence may say it again: `<answer>The answer is B.</answer>`.
        let letter = read_letter(named, &self.options).or_else(|| {
            let again = said(named).rfind(|answer| !is_denied(named, answer))?;
            read_letter(again, &self.options)
        });
        match (marked, letter) {
            (_, Some(letter)) => Verdict::right(letter == self.golds[row]),
            (Some(_), None) => Verdict::none(Status::Unparseable),
            (None, None) => Verdict::none(Status::NoAnswer),
        }
    }
}

/// The option that a text names: a letter alone, before the option's text (`B: Paris`, `B - Paris`, `B (Paris)`), or
/// before its reason (`B because …`). Brackets, LaTeX's text commands, bold marks and the words "option" and "choice" may
/// surround it. `None` when the text names no option, or two.
#[must_use]
pub fn read_letter(text: &str, options: &[char]) -> Option<char> {
    looked_at(text.len());
    let open = |c: char| "*_`([{$\"'".contains(c);
    let close = |c: char| "*_`)]}$\"'.:,;".contains(c);
    let body = without_opening(text, open);
    let letter = body.chars().next()?;
    let rest = &body[letter.len_utf8()..];
    let named = *options.iter().find(|option| option.eq_ignore_ascii_case(&letter))?;
    let (explained, rest) = until_reason(rest);
    let after = rest.trim_start_matches(close);
    let ends = !explained && after.trim_start().is_empty();
    let is_apart = explained || after.len() < rest.len() || opens_text(rest);
    // A lower-case letter counts only at the end. `A dog` starts with an article, `A) dog` with an option.
    if !ends
        && (letter != named
            || !is_apart
            || after.starts_with(char::is_alphanumeric) && !rest.starts_with([')', ':', '.', ']']))
    {
        return None;
    }
    let mut previous = "";
    for word in after.split(is_space) {
        let bare = word.trim_matches(|c| open(c) || close(c));
        let mut letters = bare.chars();
        if let (Some(c), None) = (letters.next(), letters.next())
            // `A` and `I` are also words; after a conjunction they are options.
            && (!matches!(c, 'A' | 'I') || ["or", "and", "&", "/"].iter().any(|join| join.eq_ignore_ascii_case(previous)))
            && c != named
            && options.contains(&c)
        {
            return None;
        }
        previous = word;
    }
    Some(named)
}

/// The text without the marks, LaTeX commands and words before an option's letter, in any order.
fn without_opening(text: &str, open: impl Fn(char) -> bool) -> &str {
    // A command before those that begin it.
    const WORDS: [&str; 8] = ["\\textbf", "\\textit", "\\textrm", "\\text", "\\mathrm", "\\mathbf", "option", "choice"];
    let mut text = strip(text);
    loop {
        let before = text.len();
        for word in WORDS {
            let head = text.get(..word.len()).filter(|head| head.eq_ignore_ascii_case(word));
            text = head.map_or(text, |_| strip(&text[word.len()..]));
        }
        text = strip(text.trim_start_matches(&open));
        if text.len() == before {
            return text;
        }
    }
}

/// Whether words begin that say why the option in front is right, and the text in front of them.
fn until_reason(rest: &str) -> (bool, &str) {
    const REASONS: [&str; 6] = ["because ", "since ", "is correct", "is right", "is the correct ", "is the right "];
    let words = rest.trim_start_matches([' ', ',', ')', '*', '.', '}', '$']);
    let begins =
        REASONS.iter().any(|reason| words.get(..reason.len()).is_some_and(|head| head.eq_ignore_ascii_case(reason)));
    if begins { (true, &rest[..rest.len() - words.len()]) } else { (false, rest) }
}

/// Whether the option's text begins after its letter and a blank: after a dash, or in brackets.
fn opens_text(rest: &str) -> bool {
    let text = rest.trim_start();
    let dashed = text.strip_prefix(['-', '–', '—']).is_some_and(|text| text.starts_with(is_space));
    text.len() < rest.len() && (dashed || text.starts_with('('))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_and_not_articles() {
        let options: Vec<char> = "ABCD".chars().collect();
        let letter = |text| read_letter(text, &options);
        for text in [
            "B",
            " b ",
            "(B)",
            "B.",
            "**B**",
            "\\text{B}",
            "$B$",
            "B) Paris",
            "B: Paris",
            "Option B",
            "(B) a city",
            "[B]",
            "B. A dog and I",
            r"\textbf{(B)}",
            r"\textbf{(B) }5",
            r"\text{Option B}",
            "**Option (B)**",
            "B - Paris",
            "B – Paris",
            "B (12 cm)",
            "B because A and C are wrong",
            "(B), since C is too large",
            "B is correct",
        ] {
            assert_eq!(letter(text), Some('B'), "{text:?}");
        }
        for text in [
            "",
            "E",
            "Bread",
            "A dog",
            "b) Paris",
            "B or C",
            "B, C",
            "BC",
            "B and D",
            "neither",
            "B or A",
            "B. or A.",
            "B/C",
            "(B)(C)",
            "B - C",
            "B (or C)",
            "B is wrong",
            "A is a dog",
            "B-flat",
            r"\textbook B",
        ] {
            assert_eq!(letter(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_stated_letter_counts() {
        let rule = MultipleChoice::new(&["B"], "ABCD").unwrap();
        assert_eq!(rule.score(0, "A is wrong. The answer is (B).").score, 1.0);
        assert_eq!(rule.score(0, "\\boxed{C} or B").score, 0.0);
        assert_eq!(rule.score(0, "B").score, 1.0);
        assert_eq!(rule.score(0, "<answer>B or C</answer>").status, Status::Unparseable);
        for text in
            ["<answer>The answer is B.</answer>", r"\boxed{\textbf{(B)}}", "The answer is B because A is too small."]
        {
            assert_eq!(rule.score(0, text).score, 1.0, "{text:?}");
        }
        assert_eq!(rule.score(0, "<answer>The answer is not B.</answer>").score, 0.0);
        assert_eq!(rule.score(0, "Because of this").status, Status::NoAnswer);
        assert!(MultipleChoice::new(&["E"], "ABCD").is_err());
    }
}
