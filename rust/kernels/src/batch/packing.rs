//! Packing: rows into micro-batches within a token budget, with balanced cost and equal counts per rank.
//!
//! The cost of a row of L tokens is `linear_cost * L + L^2`: matrix products, then attention. The tokens of a
//! micro-batch are the sum of its lengths when rows are packed end to end, and rows times the longest row when padded.
//!
//! Example: lengths `[6, 4, 7, 3]` with a budget of 10. Packed end to end, two micro-batches suffice: rows 2 and 3 with
//! 7 + 3 tokens, rows 0 and 1 with 6 + 4. Padded, rows 0 and 1 would take 2 * 6 = 12 tokens, over the budget, so three
//! micro-batches are needed: row 2, row 0, and rows 1 and 3 with 2 * 4 = 8 tokens.

use crate::error::KernelError;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Largest number of ranks. Each takes at least one micro-batch, so a mistyped number could exhaust memory.
const MAX_RANKS: usize = 1 << 20;

/// Largest row length: beyond any text, and small enough that no sum of costs overflows.
const MAX_LENGTH: i64 = 1 << 32;

/// Handling of rows longer than the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Oversize {
    /// Return an error that names the row.
    Refuse,
    /// Give the row its own micro-batch.
    Alone,
}

/// Options of [`pack`].
#[derive(Debug, Clone, Copy)]
pub struct Packing {
    /// Largest number of tokens in a micro-batch.
    pub token_budget: i64,
    /// Count padding: rows times the longest row instead of the sum of lengths.
    pub padded: bool,
    /// Number of ranks; each takes the same number of micro-batches.
    pub num_ranks: usize,
    /// Cost per token, in addition to the square of the row's length.
    pub linear_cost: u64,
    /// Handling of rows longer than the budget.
    pub oversize: Oversize,
}

/// Pack rows into micro-batches: lists of row indices, ascending. Micro-batch `m` belongs to rank `m % num_ranks`.
///
/// The number of micro-batches is a multiple of `num_ranks`. They are sorted by descending cost, so at each step the
/// ranks' micro-batches cost about the same. Every row is in exactly one. A micro-batch is empty only when there are
/// fewer rows than micro-batches, for example fewer rows than ranks. The result is deterministic.
///
/// # Errors
/// [`KernelError`] for a budget or a number of ranks below 1, a negative length, or a row over the budget.
pub fn pack(lengths: &[i64], how: &Packing) -> Result<Vec<Vec<usize>>, KernelError> {
    check(lengths, how)?;
    if lengths.is_empty() {
        return Ok(Vec::new());
    }
    let mut rows: Vec<usize> = (0..lengths.len()).collect();
    rows.sort_by_key(|&row| (Reverse(lengths[row]), row));
    let packer = Packer { lengths, how, rows };
    let mut bins = if how.padded { packer.cut() } else { packer.spread() };
    bins.sort_by_key(|bin| (Reverse(packer.cost(bin)), bin.iter().min().copied()));
    for bin in &mut bins {
        bin.sort_unstable();
    }
    Ok(bins)
}

fn check(lengths: &[i64], how: &Packing) -> Result<(), KernelError> {
    let limits = [("token_budget", how.token_budget as f64), ("num_ranks", how.num_ranks as f64)];
    if let Some(&(argument, value)) = limits.iter().find(|(_, value)| *value < 1.0) {
        return Err(KernelError::BadValue { argument, value, reason: "at least 1" });
    }
    if how.num_ranks > MAX_RANKS {
        return Err(KernelError::BadValue {
            argument: "num_ranks",
            value: how.num_ranks as f64,
            reason: "at most 2^20",
        });
    }
    for (index, &length) in lengths.iter().enumerate() {
        if !(0..=MAX_LENGTH).contains(&length) {
            let reason = "a length is from 0 to 2^32";
            return Err(KernelError::BadElement { argument: "lengths", index, value: length, reason });
        }
        if length > how.token_budget && how.oversize == Oversize::Refuse {
            return Err(KernelError::OverBudget { index, length, token_budget: how.token_budget });
        }
    }
    Ok(())
}

struct Packer<'a> {
    lengths: &'a [i64],
    how: &'a Packing,
    /// All rows, longest first.
    rows: Vec<usize>,
}

impl Packer<'_> {
    fn row_cost(&self, row: usize) -> u128 {
        let length = u128::from(self.lengths[row].unsigned_abs());
        // One more, so that empty rows are spread over the bins too.
        length * u128::from(self.how.linear_cost) + length * length + 1
    }

    fn cost(&self, bin: &[usize]) -> u128 {
        let costs = bin.iter().map(|&row| self.row_cost(row));
        if self.how.padded { costs.max().unwrap_or(0) * bin.len() as u128 } else { costs.sum() }
    }

    fn round_up(&self, count: usize) -> usize {
        count.div_ceil(self.how.num_ranks).saturating_mul(self.how.num_ranks)
    }

    /// Packed end to end: each row, longest first, goes into the cheapest bin with room. Uses as few bins as that allows.
    fn spread(&self) -> Vec<Vec<usize>> {
        let mut count = self.round_up(self.best_fit_count());
        loop {
            if let Some(bins) = self.spread_over(count) {
                return bins;
            }
            // About 2% more bins per attempt keeps the attempts few. With one bin per row it succeeds.
            count = self.round_up(count + 1 + count / 64);
        }
    }

    /// Every row in the cheapest of `count` bins that has room for it; None where some row has none.
    ///
    /// Rows come longest first, so the room that a row needs only shrinks: a bin that is too full for one row waits, sorted
    /// by its tokens, until a row is short enough. Each bin is moved once for each of its rows, O(n log n) in all.
    fn spread_over(&self, count: usize) -> Option<Vec<Vec<usize>>> {
        let mut bins = vec![Vec::new(); count];
        let mut cheapest: BinaryHeap<_> = (0..count).map(|bin| Reverse((0u128, 0i64, bin))).collect();
        let mut waiting: BinaryHeap<Reverse<(i64, u128, usize)>> = BinaryHeap::new();
        for &row in &self.rows {
            let length = self.lengths[row];
            let fits = |tokens: i64| tokens.saturating_add(length) <= self.how.token_budget;
            while let Some(&Reverse((tokens, cost, bin))) = waiting.peek().filter(|first| fits(first.0.0)) {
                waiting.pop();
                cheapest.push(Reverse((cost, tokens, bin)));
            }
            let (cost, tokens, bin) = loop {
                let Reverse((cost, tokens, bin)) = cheapest.pop()?;
                // An oversized row takes an empty bin: it fits nowhere else, and nothing fits beside it.
                if fits(tokens) || bins[bin].is_empty() {
                    break (cost, tokens, bin);
                }
                waiting.push(Reverse((tokens, cost, bin)));
            };
            bins[bin].push(row);
            cheapest.push(Reverse((cost + self.row_cost(row), tokens.saturating_add(length), bin)));
        }
        Some(bins)
    }

    /// Number of bins that best-fit decreasing opens: each row goes where it leaves the least room.
    fn best_fit_count(&self) -> usize {
        let mut rooms = std::collections::BTreeMap::<i64, usize>::new();
        let mut count = 0;
        for &row in &self.rows {
            let length = self.lengths[row];
            let fitting = rooms.range(length..).next().map(|(&room, _)| room);
            if let Some(room) = fitting {
                match rooms.get_mut(&room) {
                    Some(bins) if *bins > 1 => *bins -= 1,
                    _ => drop(rooms.remove(&room)),
                }
            } else {
                count += 1;
            }
            // An oversized row leaves negative room: nothing fits into it.
            let left = fitting.unwrap_or(self.how.token_budget).saturating_sub(length);
            *rooms.entry(left).or_default() += 1;
        }
        count
    }

    /// Padded: cut the rows, sorted by length, into runs; the rows of a run are padded to its first. Minimises the
    /// cost of the costliest run for the number of runs, by bisection.
    fn cut(&self) -> Vec<Vec<usize>> {
        let count = self.round_up(self.runs_within(u128::MAX).len());
        let (mut low, mut high) = (0, self.row_cost(self.rows[0]) * self.rows.len() as u128);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.runs_within(middle).len() <= count { high = middle } else { low = middle + 1 }
        }
        let mut runs = self.runs_within(high);
        // The bound may allow fewer runs than the ranks need: halve the costliest run that has two rows or more.
        let costed = runs.drain(..).map(|run| (self.splittable_cost(&run), Reverse(run)));
        let mut heap: BinaryHeap<(u128, Reverse<Vec<usize>>)> = costed.collect();
        while heap.len() < count {
            let Some((_, Reverse(mut run))) = heap.pop() else { break };
            let tail = run.split_off(run.len().div_ceil(2));
            heap.extend([run, tail].map(|run| (self.splittable_cost(&run), Reverse(run))));
        }
        heap.into_iter().map(|(_, Reverse(run))| run).collect()
    }

    fn splittable_cost(&self, run: &[usize]) -> u128 {
        if run.len() > 1 { self.cost(run) } else { 0 }
    }

    /// The fewest runs within the budget whose cost is at most `limit`; a row that costs more is a run of its own.
    fn runs_within(&self, limit: u128) -> Vec<Vec<usize>> {
        let mut runs: Vec<Vec<usize>> = Vec::new();
        for &row in &self.rows {
            if let Some(run) = runs.last_mut() {
                let (longest, rows) = (run[0], run.len() as u128 + 1);
                let tokens = rows * u128::from(self.lengths[longest].unsigned_abs());
                let within = tokens <= u128::from(self.how.token_budget.unsigned_abs());
                if within && self.row_cost(longest).saturating_mul(rows) <= limit {
                    run.push(row);
                    continue;
                }
            }
            runs.push(vec![row]);
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Packing =
        Packing { token_budget: 10, padded: false, num_ranks: 1, linear_cost: 0, oversize: Oversize::Refuse };

    #[test]
    fn rows_fill_the_budget_and_no_more() {
        assert_eq!(pack(&[6, 4, 7, 3], &PLAIN).unwrap(), [vec![2, 3], vec![0, 1]]);
        assert_eq!(pack(&[6, 4, 7, 3], &Packing { padded: true, ..PLAIN }).unwrap(), [vec![2], vec![0], vec![1, 3]]);
        // Padded, 6 and 4 take 12 tokens: only equal rows go together.
        let padded = Packing { padded: true, ..PLAIN };
        assert_eq!(pack(&[6, 4, 5, 4, 5], &padded).unwrap(), [vec![2, 4], vec![0], vec![1, 3]]);
    }

    /// Looking at every full micro-batch for every row took a minute for these.
    #[test]
    fn many_rows_that_nearly_fill_a_micro_batch_take_no_quadratic_time() {
        let lengths: Vec<i64> = (0..300_000).map(|row| 1 + row * 7919 % 1000).collect();
        let bins = pack(&lengths, &Packing { token_budget: 1000, ..PLAIN }).unwrap();
        assert_eq!(bins.iter().map(Vec::len).sum::<usize>(), lengths.len());
        assert!(bins.iter().all(|bin| bin.iter().map(|&row| lengths[row]).sum::<i64>() <= 1000));
    }

    #[test]
    fn ranks_get_equal_counts_even_when_rows_are_few() {
        for padded in [false, true] {
            let how = Packing { num_ranks: 4, padded, ..PLAIN };
            let mut bins = pack(&[1, 2, 3], &how).unwrap();
            assert_eq!(bins.len(), 4);
            bins.sort();
            assert_eq!(bins, [vec![], vec![0], vec![1], vec![2]]);
            assert!(pack(&[1; 9], &how).unwrap().iter().all(|bin| !bin.is_empty()));
            assert!(pack(&[0; 9], &how).unwrap().iter().all(|bin| !bin.is_empty()));
        }
    }

    #[test]
    fn a_row_over_the_budget_is_refused_or_alone() {
        let message = pack(&[3, 11], &PLAIN).unwrap_err().to_string();
        assert_eq!(message, "lengths[1] is 11, over the token_budget of 10");
        for padded in [false, true] {
            let how = Packing { oversize: Oversize::Alone, padded, ..PLAIN };
            assert_eq!(pack(&[3, 11, 12, 0], &how).unwrap()[..2], [vec![2], vec![1]]);
        }
    }

    #[test]
    fn refusals_and_nothing() {
        assert!(pack(&[], &PLAIN).unwrap().is_empty());
        assert!(pack(&[1], &Packing { token_budget: 0, ..PLAIN }).is_err());
        assert!(pack(&[1], &Packing { num_ranks: 0, ..PLAIN }).is_err());
        assert!(pack(&[1], &Packing { num_ranks: usize::MAX, ..PLAIN }).is_err());
        assert_eq!(pack(&[0, -1], &PLAIN).unwrap_err().to_string(), "lengths[1] is -1: a length is from 0 to 2^32");
        assert!(pack(&[i64::MAX], &PLAIN).is_err());
        let huge = Packing { token_budget: i64::MAX, linear_cost: u64::MAX, ..PLAIN };
        for padded in [false, true] {
            assert_eq!(pack(&[MAX_LENGTH; 3], &Packing { padded, ..huge }).unwrap(), [[0, 1, 2]]);
        }
    }
}
