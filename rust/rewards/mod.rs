//! Rule-based rewards: a rule reads a completion and returns a score and a status.
//!
//! A [`RewardRule`] belongs to one batch: it holds the golds of all rows, parsed on construction, so that scoring
//! cannot fail. [`score_batch`] is the parallel map over completions. Every rule takes time linear in the length of the
//! text and is deterministic for any number of threads.

pub mod answer;
pub mod blocks;
pub mod choice;
pub mod countdown;
pub mod exact;
pub mod format;
pub mod gsm8k;
pub mod math;
pub mod number;
pub mod repetition;
pub mod tag_count;
mod tags;
pub mod work;

use rayon::prelude::*;

use crate::threads::worth_splitting;

/// Bytes of text up to which a batch is scored on the calling thread. Measured with the cheapest rule on two cores
/// (benches/rewards.rs, texts of 1 KiB): 32 rows take 9 µs here and 17 µs on the pool, 64 rows 18 and 20, 1024 288 and 217.
const SERIAL_BYTES: usize = 64 * 1024;

/// Outcome of one sample. The numbers are the `uint8` that Python sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The rule read the completion and decided.
    Ok = 0,
    /// The completion states no answer.
    NoAnswer = 1,
    /// The completion states an answer that the rule cannot read.
    Unparseable = 2,
    /// The answer exceeds the rule's budget of tokens, depth or digits.
    Undecided = 3,
}

/// A score and its status; the score is 0 unless the status is [`Status::Ok`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// The reward, before any weight.
    pub score: f64,
    /// The outcome.
    pub status: Status,
}

impl Verdict {
    /// A decided sample.
    #[must_use]
    pub fn ok(score: f64) -> Self {
        Self { score, status: Status::Ok }
    }

    /// A decided sample of a right-or-wrong rule: 1 or 0.
    #[must_use]
    pub fn right(right: bool) -> Self {
        Self::ok(f64::from(u8::from(right)))
    }

    /// A sample without a score, for the reason `status`.
    #[must_use]
    pub fn none(status: Status) -> Self {
        Self { score: 0.0, status }
    }
}

/// A reward rule with the golds of its batch.
pub trait RewardRule: Sync {
    /// Score the completion of row `row`: a pure function of the row and the text.
    fn score(&self, row: usize, completion: &str) -> Verdict;

    /// Fixed cost of a row, in bytes of text that cost as much to score.
    fn extra_bytes(&self) -> usize {
        0
    }
}

/// Scores and statuses of a batch, row for row.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Each row's score.
    pub scores: Vec<f64>,
    /// Each row's [`Status`] as its number.
    pub statuses: Vec<u8>,
}

impl FromIterator<Verdict> for Scores {
    fn from_iter<I: IntoIterator<Item = Verdict>>(verdicts: I) -> Self {
        let (scores, statuses) = verdicts.into_iter().map(|v| (v.score, v.status as u8)).unzip();
        Self { scores, statuses }
    }
}

/// Score every completion, in parallel over rows.
#[must_use]
pub fn score_batch<R, T>(rule: &R, completions: &[T]) -> Scores
where
    R: RewardRule + ?Sized,
    T: AsRef<str> + Sync,
{
    let bytes: usize = completions.iter().map(|text| text.as_ref().len() + rule.extra_bytes()).sum();
    if completions.len() < 2 || !worth_threads(bytes) {
        return completions.iter().enumerate().map(|(row, text)| rule.score(row, text.as_ref())).collect();
    }
    let verdicts: Vec<Verdict> =
        completions.par_iter().enumerate().map(|(row, text)| rule.score(row, text.as_ref())).collect();
    verdicts.into_iter().collect()
}

/// Whether to score this much text on the thread pool.
fn worth_threads(bytes: usize) -> bool {
    worth_splitting(bytes, SERIAL_BYTES)
}

/// Whitespace as in Python's `str.isspace` and `re`'s `\s`: Unicode's, and the four ASCII separators.
#[must_use]
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// A character that shows nothing: of the property Default_Ignorable_Code_Point (Unicode 16), a control character, or a
/// blank that is no whitespace.
#[must_use]
pub fn is_invisible(c: char) -> bool {
    !is_space(c)
        && (c.is_control()
            || matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
                | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
                | '\u{2800}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'))
}

/// Whether a text shows nothing.
#[must_use]
pub fn is_blank(text: &str) -> bool {
    text.chars().all(|c| is_space(c) || is_invisible(c))
}

/// A minus sign, or a hyphen or dash that stands for one before a number.
#[must_use]
pub fn is_minus(c: char) -> bool {
    matches!(c, '-' | '−' | '‐' | '‑' | '‒' | '–' | '—' | '―' | '﹣' | '－')
}

/// Whether a character belongs to a script that writes words without spaces between them (Chinese, Japanese, Korean
/// syllables, Thai): a digit beside it is a number of its own.
#[must_use]
pub fn is_ideograph(c: char) -> bool {
    matches!(c, '\u{0e00}'..='\u{0e7f}' | '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}'
        | '\u{ac00}'..='\u{d7af}' | '\u{f900}'..='\u{faff}')
}

/// A letter of a script that joins it to the digits beside it: `x2`, `5th`.
#[must_use]
pub fn is_letter(c: char) -> bool {
    c.is_alphabetic() && !is_ideograph(c)
}

/// Whether a Chinese word for a power of ten or a part starts `text`, so that the number before it is none by itself: 5千 is
/// 5,000. A unit is none: 千克 is a kilogram and 分钟 a minute.
#[must_use]
pub fn starts_with_scale(text: &str) -> bool {
    let mut letters = text.chars();
    let (first, next) = (letters.next(), letters.next().unwrap_or(' '));
    match first {
        Some('千') => !"克米瓦卡焦帕赫伏安升".contains(next),
        Some('分') => next == '之',
        Some('十' | '百' | '万' | '亿') => true,
        _ => false,
    }
}

/// `text` without leading and trailing [`is_space`].
#[must_use]
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Length;

    impl RewardRule for Length {
        fn score(&self, row: usize, completion: &str) -> Verdict {
            Verdict::ok((row * 1_000_000 + completion.len()) as f64)
        }
    }

    #[test]
    fn parallel_and_serial_scores_agree_and_keep_the_order() {
        let texts: Vec<String> = (0..300).map(|n| "x".repeat(n * 3)).collect();
        let expected: Scores = texts.iter().enumerate().map(|(row, text)| Length.score(row, text)).collect();
        assert!(texts.iter().map(String::len).sum::<usize>() > SERIAL_BYTES);
        assert_eq!(score_batch(&Length, &texts), expected);
        assert_eq!(score_batch(&Length, &texts[..2]).scores, expected.scores[..2]);
        assert!(score_batch(&Length, &[] as &[&str]).scores.is_empty());
    }

    #[test]
    fn units_are_no_scales() {
        for (text, expected) in [
            ("千", true),
            ("千元", true),
            ("千克", false),
            ("分之一", true),
            ("分钟", false),
            ("分", false),
            ("颗", false),
        ] {
            assert_eq!(starts_with_scale(text), expected, "{text}");
        }
    }

    #[test]
    fn strip_takes_what_python_strips() {
        assert_eq!(strip("\x1c \u{a0}\u{3000}a b\x1f\n"), "a b");
        assert_eq!(strip("\u{200b}a"), "\u{200b}a");
    }
}
