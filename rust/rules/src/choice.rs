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
        match (marked, read_letter(marked.unwrap_or(text), &self.options)) {
            (_, Some(letter)) => Verdict::right(letter == self.golds[row]),
            (Some(_), None) => Verdict::none(Status::Unparseable),
            (None, None) => Verdict::none(Status::NoAnswer),
        }
    }
}

/// The option that a text names: a letter alone or before the option's text (`B: Paris`). Brackets, bold marks and the
/// words "option" and "choice" may surround it. `None` when the text names no option, or two.
#[must_use]
pub fn read_letter(text: &str, options: &[char]) -> Option<char> {
    looked_at(text.len());
    let mut text = strip(text);
    for word in ["\\text", "\\textbf", "\\mathrm", "\\mathbf", "option", "choice"] {
        let head = text.get(..word.len()).filter(|head| head.eq_ignore_ascii_case(word));
        text = head.map_or(text, |_| strip(&text[word.len()..]));
    }
    let open = |c: char| "*_`([{$\"'".contains(c);
    let close = |c: char| "*_`)]}$\"'.:,;".contains(c);
    let body = text.trim_start_matches(open);
    let letter = body.chars().next()?;
    let rest = &body[letter.len_utf8()..];
    let named = *options.iter().find(|option| option.eq_ignore_ascii_case(&letter))?;
    let after = rest.trim_start_matches(close);
    let ends = after.trim_start().is_empty();
    // A lower-case letter counts only at the end. `A dog` starts with an article, `A) dog` with an option.
    if !ends
        && (letter != named
            || after.len() == rest.len()
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
        ] {
            assert_eq!(letter(text), Some('B'), "{text:?}");
        }
        for text in [
            "", "E", "Bread", "A dog", "b) Paris", "B or C", "B, C", "BC", "B and D", "neither", "B or A", "B. or A.",
            "B/C", "(B)(C)",
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
        assert_eq!(rule.score(0, "Because of this").status, Status::NoAnswer);
        assert!(MultipleChoice::new(&["E"], "ABCD").is_err());
    }
}
