//! Rule-based rewards: a rule reads a completion and returns a score and a status.
//!
//! A [`RewardRule`] belongs to one batch: it holds the golds of all rows, parsed on construction, so that scoring
//! cannot fail. [`score_batch`] is the parallel map over completions. Every rule takes time linear in the length of the
//! text and is deterministic for any number of threads.

pub mod answer_form;
pub mod blocks;
pub mod choice;
pub mod countdown;
pub mod error;
pub mod exact;
pub mod format;
pub mod gsm8k;
pub mod math;
pub mod repetition;
pub mod tag_count;
mod tags;

use math_answers::error::ParseError;
use rayon::prelude::*;
use rlox_grpo_kernels::threads::worth_splitting;

/// Bytes of text up to which a batch is scored on the calling thread. Measured with the cheapest rule on two cores
/// (benches/rules.rs, texts of 1 KiB): 32 rows take 9 µs here and 17 µs on the pool, 64 rows 18 and 20, 1024 288 and 217.
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

impl From<ParseError> for Status {
    fn from(error: ParseError) -> Self {
        match error {
            ParseError::NoAnswer => Self::NoAnswer,
            ParseError::Unparseable => Self::Unparseable,
            ParseError::Undecided => Self::Undecided,
        }
    }
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
    pub fn none(status: impl Into<Status>) -> Self {
        Self { score: 0.0, status: status.into() }
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
}
