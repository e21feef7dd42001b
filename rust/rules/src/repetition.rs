//! n-gram repetition: `(1 − distinct / total) · penalty` (arXiv 2502.03373, appendix C.2).

use std::collections::{HashMap, HashSet};

use math_answers::characters::is_space;
use math_answers::work::looked_at;
use rlox_grpo_kernels::ragged::Ragged;

use crate::{RewardRule, Verdict};

/// Repetition penalty over lower-cased words, as in open-r1.
#[derive(Debug, Clone, Copy)]
pub struct WordRepetition {
    /// Words in an n-gram, at least 1.
    pub ngram_size: usize,
    /// Limit of the penalty for pure repetition; at most 0.
    pub max_penalty: f64,
}

impl RewardRule for WordRepetition {
    fn score(&self, _row: usize, completion: &str) -> Verdict {
        looked_at(completion.len());
        let text = completion.to_lowercase();
        let mut known = HashMap::new();
        let words: Vec<usize> = text
            .split(is_space)
            .filter(|word| !word.is_empty())
            .map(|word| {
                let next = known.len();
                *known.entry(word).or_insert(next)
            })
            .collect();
        Verdict::ok(penalty(&words, self.ngram_size, self.max_penalty))
    }
}

/// Repetition penalty over each row's token ids, as in TRL; the texts are ignored.
#[derive(Debug, Clone, Copy)]
pub struct TokenRepetition<'a> {
    /// Token ids of each row's completion.
    pub ids: Ragged<'a, i64>,
    /// Tokens in an n-gram, at least 1.
    pub ngram_size: usize,
    /// Limit of the penalty for pure repetition; at most 0.
    pub max_penalty: f64,
}

impl TokenRepetition<'_> {
    /// The penalty of each row.
    #[must_use]
    pub fn penalties(&self) -> Vec<f64> {
        self.ids.rows().map(|row| penalty(row, self.ngram_size, self.max_penalty)).collect()
    }
}

/// The penalty of one row; 0 for fewer than `size` items, and without repetition.
fn penalty<T: Eq + std::hash::Hash>(items: &[T], size: usize, max_penalty: f64) -> f64 {
    if size == 0 || items.len() < size {
        return 0.0;
    }
    let total = items.len() - size + 1;
    let distinct = items.windows(size).collect::<HashSet<_>>().len();
    if distinct == total { 0.0 } else { (1.0 - distinct as f64 / total as f64) * max_penalty }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_by_hand() {
        // 4 bigrams, 1 distinct: 1 − 1/4.
        assert_eq!(penalty(&[5, 5, 5, 5, 5], 2, -1.0), -0.75);
        assert_eq!(penalty(&[1, 2, 3, 4], 2, -1.0), 0.0);
        assert_eq!(penalty(&[1], 2, -1.0), 0.0);
        let words = WordRepetition { ngram_size: 1, max_penalty: -2.0 };
        // a, A, b: 3 words, 2 distinct.
        assert_eq!(words.score(0, " a A\tb ").score, (1.0 - 2.0 / 3.0) * -2.0);
        assert_eq!(words.score(0, "").score, 0.0);
        let offsets = [0, 5, 5];
        let ids = Ragged::new(&[5, 5, 5, 5, 5], &offsets, "offsets").unwrap();
        assert_eq!(TokenRepetition { ids, ngram_size: 2, max_penalty: -1.0 }.penalties(), [-0.75, 0.0]);
    }
}
