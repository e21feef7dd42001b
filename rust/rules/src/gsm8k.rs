//! GSM8K: 1 if the final number of the completion equals the gold, compared as exact rationals.

use math_answers::error::ParseError;
use math_answers::extraction::denied::{MOST_DENIED, before_denial, denial, is_denied_behind};
use math_answers::extraction::{after_thinking, boxed_with_signs, hashed, is_denied, legible, said, tagged};
use math_answers::number::{self, Number};
use math_answers::work::looked_at;

use crate::error::RuleError;
use crate::{RewardRule, Verdict};

/// GSM8K rule: the gold number of each row of a batch.
#[derive(Debug)]
pub struct Gsm8kAnswer {
    golds: Vec<Number>,
    gold_of_row: Vec<usize>,
    percent_optional: bool,
}

impl Gsm8kAnswer {
    /// A gold is a number, or a worked solution with the number after its last `####`.
    ///
    /// A gold with a percent sign accepts answers with and without one. With `percent_optional`, a gold without a percent
    /// sign also accepts answers with one: 25% answers a gold of 25.
    ///
    /// # Errors
    /// [`RuleError::BadGold`] for a gold that is not a number.
    pub fn new<T: AsRef<str>>(golds: &[T], percent_optional: bool) -> Result<Self, RuleError> {
        let mut rule = Self { golds: Vec::new(), gold_of_row: Vec::with_capacity(golds.len()), percent_optional };
        for (index, gold) in golds.iter().enumerate() {
            let gold = gold.as_ref();
            // The completions of a group are neighbours and share their gold.
            if index == 0 || gold != golds[index - 1].as_ref() {
                let text = gold.rsplit_once("####").map_or(gold, |(_, number)| number);
                let number = number::read(text).map_err(|_| RuleError::BadGold {
                    argument: "answer",
                    index,
                    value: gold.to_owned(),
                    reason: "a gold is a number, or a solution that ends in #### and a number",
                })?;
                rule.golds.push(number);
            }
            rule.gold_of_row.push(rule.golds.len() - 1);
        }
        Ok(rule)
    }
}

impl RewardRule for Gsm8kAnswer {
    fn score(&self, row: usize, completion: &str) -> Verdict {
        let gold = &self.golds[self.gold_of_row[row]];
        match stated_number(completion) {
            Ok(number) => {
                let by_sign = gold.percent || (self.percent_optional && number.percent);
                Verdict::right(number.value() == gold.value() || (by_sign && number.face == gold.face))
            }
            Err(error) => Verdict::none(error),
        }
    }
}

/// The final number after the last `</think>`. The first of these that the text contains: the number on the last `####`
/// line with one, in the last box, in the last closed `<answer>`, after the last "answer is" with one, the last number.
///
/// # Errors
/// [`ParseError::NoAnswer`] without any number, otherwise as [`number::read`].
pub fn stated_number(completion: &str) -> Result<Number, ParseError> {
    let legible = legible(completion);
    let text = after_thinking(&legible);
    let has_digit = |span: &&str| {
        looked_at(span.len());
        span.bytes().any(|byte| byte.is_ascii_digit())
    };
    if let Some(span) = hashed(text).find(has_digit) {
        // A box on the line takes precedence.
        return boxed_with_signs(span).map_or_else(|| number::first(span), |inside| number::read(&inside));
    }
    if let Some(span) = boxed_with_signs(text) {
        return number::read(&span);
    }
    if let Some(span) = tagged(text, "answer") {
        return number::read(span).or_else(|error| single(span).unwrap_or(Err(error)));
    }
    if let Some(span) = said(text).rfind(|span| has_digit(span) && !is_denied(text, span)) {
        return number::first(span);
    }
    last_number(text)
}

/// The last number that no words beside it deny.
fn last_number(mut text: &str) -> Result<Number, ParseError> {
    for _ in 0..MOST_DENIED {
        let last = number::last(text).ok_or(ParseError::NoAnswer)?;
        let Some(denied) = denial(&text[..last.start]) else {
            if is_denied_behind(&text[last.end..]) {
                return Err(ParseError::NoAnswer);
            }
            return if number::is_part(text, &last) { Err(ParseError::Unparseable) } else { last.number };
        };
        text = before_denial(text, denied).ok_or(ParseError::NoAnswer)?;
    }
    Err(ParseError::NoAnswer)
}

/// The number of a sentence with a single number: an `<answer>` with two is a hedge.
fn single(span: &str) -> Option<Result<Number, ParseError>> {
    let last = number::last(span)?;
    let before = span[..last.start].bytes().any(|byte| byte.is_ascii_digit());
    (!before).then(|| number::first(span))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    fn score(gold: &str, completion: &str) -> Verdict {
        Gsm8kAnswer::new(&[gold], false).unwrap().score(0, completion)
    }

    #[test]
    fn spellings_of_the_same_number() {
        for text in [
            "#### 1234",
            "#### 1,234",
            "####1234",
            "#### $1,234.00",
            "#### 1234.",
            "#### **1,234**",
            "#### The answer is 1234",
            "#### 1 234/1 x\n#### €1,234 dollars",
            "\\boxed{1,234}",
            "\\boxed{1{,}234\\text{ cm}}",
            "\\boxed{\\$1234.0}",
            "<answer>$1,234</answer>",
            "<answer>x = 1234</answer>",
            "<answer>The total is 1,234 apples.</answer>",
            "The answer is 1,234 because of 3 steps.",
            "**Answer:** 1234 miles",
            "2468 / 2 = 1234",
            "#### 1234, after 3 steps",
            "so 7 and then 1234.",
            "#### 2 * 617 = 1234",
            "#### 1.234e3",
            "#### 1.234 \\times 10^3",
            "#### 1234 units (3 left)",
            "#### 2468/2",
            "#### 1\n#### 1234\nlong tail with 99",
            "<think>#### 1</think>\n#### 1234",
            "#### \\boxed{1234}",
        ] {
            assert_eq!(score("#### 1,234", text), Verdict::ok(1.0), "{text:?}");
        }
    }

    #[test]
    fn other_numbers() {
        for text in [
            "#### 12,34",
            "#### 123",
            "#### 1234.5",
            "#### -1234",
            "#### 1.234",
            "#### 5 or 1234",
            "#### 1234 or 5",
            "#### 1234x",
            "#### 1234k",
            "#### 1234%",
            "<answer>5, 1234</answer>",
            "#### 1_234",
            "#### 1.234.0",
            "#### 1234-5",
            "#### 1234\\pi",
            "#### １２３４",
            "<think>1234</think>",
            "",
            "no",
        ] {
            assert_eq!(score("1234", text).score, 0.0, "{text:?}");
        }
    }

    #[test]
    fn a_second_quantity_makes_it_another_answer() {
        for text in [
            "7 dollars or 8 dollars",
            "7 m or 8 m",
            "7 square feet or 8 square feet",
            "7 (or 8)",
            "7, or 8",
            "7 or maybe 8",
            "7 dollars and 20 cents",
            "7 days and 3 hours",
            "7; 8",
            "7 | 8",
            "7 & 8",
            "7~8",
        ] {
            assert_eq!(score("7", &format!("#### {text}")).status, Status::Unparseable, "{text:?}");
        }
        for text in
            ["7 dollars and it took 3 steps", "7 apples and pears", "7, after 3 steps", "7 cm because 3 + 4 = 7"]
        {
            assert_eq!(score("7", &format!("#### {text}")).score, 1.0, "{text:?}");
        }
    }

    #[test]
    fn a_last_number_that_is_part_of_another_value() {
        for text in ["It is 5²", "about 5½", "She earns $5k.", "5万", "so 10^5", "√5"] {
            assert_eq!(score("5", text).status, Status::Unparseable, "{text:?}");
        }
        for text in ["12 500", "a total of 12\u{a0}500.", "12'500"] {
            assert_eq!(score("500", text).status, Status::Unparseable, "{text:?}");
        }
        for text in ["It is 5!", "the 5th", "5cm", "5m", "5颗"] {
            assert_eq!(score("5", text).score, 1.0, "{text:?}");
        }
    }

    #[test]
    fn statuses() {
        assert_eq!(score("5", "none").status, Status::NoAnswer);
        assert_eq!(score("5", "#### 12,34").status, Status::Unparseable);
        assert_eq!(score("5", &format!("#### {}", "9".repeat(5000))).status, Status::Undecided);
        assert_eq!(score("5", "#### 1e999999999999").status, Status::Undecided);
    }

    #[test]
    fn signs_and_percents() {
        for text in ["#### -5", "#### - 5", "#### −5", "-5", "x = -5", "#### -$5", "#### $-5", "\\boxed{-5}"] {
            assert_eq!(score("-5", text).score, 1.0, "{text:?}");
        }
        assert_eq!(score("5", "10 - 5").score, 1.0);
        assert_eq!(score("5", "steps:\n- 5 apples").score, 1.0);
        for text in ["#### 50%", "#### 50", "#### 0.5", "#### 1/2", "\\boxed{50\\%}", "50 percent"] {
            assert_eq!(score("50%", text).score, 1.0, "{text:?}");
        }
        for text in
            ["\\boxed{50}\\%", "\\boxed{50} percent", "#### **50**%", "#### $50$ %", "#### 50 per cent", "#### 50％"]
        {
            assert_eq!(score("0.5", text).score, 1.0, "{text:?}");
        }
        for text in ["#### 50%%", "#### 50‰", "#### 50%", "#### 5000"] {
            assert_eq!(score("50", text).score, 0.0, "{text:?}");
        }
        assert_eq!(Gsm8kAnswer::new(&["50"], true).unwrap().score(0, "#### 50%").score, 1.0);
    }

    #[test]
    fn golds_are_checked_and_shared() {
        let rule = Gsm8kAnswer::new(&["1", "1", "so #### 2", "1"], false).unwrap();
        assert_eq!((rule.golds.len(), rule.gold_of_row.as_slice()), (3, &[0, 0, 1, 2][..]));
        let bad = Gsm8kAnswer::new(&["1", "many"], false);
        assert!(matches!(bad, Err(RuleError::BadGold { index: 1, .. })));
    }
}
