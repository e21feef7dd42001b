//! Shared prompts: the unique prompts of a batch and the rows of each.

use crate::ragged::Ragged;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Unique prompts, in order of first occurrence.
///
/// Example: the rows `[1 2]`, `[3]`, `[1 2]` have two unique prompts, so `prompt_of_row` is `[0, 1, 0]`, `first_row` is
/// `[0, 1]`, `rows` is `[0, 2, 1]` and `offsets` is `[0, 2, 3]`: prompt 0 has rows 0 and 2, prompt 1 has row 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPrefixes {
    /// `[N]`: index of each row's unique prompt.
    pub prompt_of_row: Vec<i64>,
    /// `[P]`: first row of each unique prompt.
    pub first_row: Vec<i64>,
    /// `[N]`: rows grouped by prompt, ascending within each; prompt `p` has `rows[offsets[p]..offsets[p + 1]]`.
    pub rows: Vec<i64>,
    /// `[P + 1]`: bounds of the prompts in `rows`.
    pub offsets: Vec<i64>,
}

/// Group `prompts` by exact equality of their tokens, in time linear in the number of tokens.
///
/// Only the offsets decide which memory is read, so tokens that another thread writes during the call can change the
/// groups but cannot cause an error.
#[must_use]
pub fn share_prefixes(prompts: &Ragged<'_, i64>) -> SharedPrefixes {
    let mut seen: HashMap<&[i64], usize> = HashMap::new();
    let (mut prompt_of_row, mut first_row, mut counts) = (Vec::with_capacity(prompts.len()), vec![], Vec::<i64>::new());
    let mut previous: Option<(&[i64], usize)> = None;
    for (index, row) in prompts.rows().enumerate() {
        // Rows of a group are usually neighbours: comparing with the previous row saves hashing all but the first.
        let prompt = match previous {
            Some((tokens, prompt)) if tokens == row => prompt,
            _ => match seen.entry(row) {
                Entry::Occupied(entry) => *entry.get(),
                Entry::Vacant(entry) => {
                    first_row.push(index as i64);
                    counts.push(0);
                    *entry.insert(counts.len() - 1)
                }
            },
        };
        counts[prompt] += 1;
        prompt_of_row.push(prompt as i64);
        previous = Some((row, prompt));
    }
    let mut offsets = Vec::with_capacity(counts.len() + 1);
    let mut total = 0;
    offsets.push(total);
    for count in &counts {
        total += count;
        offsets.push(total);
    }
    let mut next = offsets.clone();
    let mut rows = vec![0; prompt_of_row.len()];
    for (row, &prompt) in prompt_of_row.iter().enumerate() {
        rows[next[prompt as usize] as usize] = row as i64;
        next[prompt as usize] += 1;
    }
    SharedPrefixes { prompt_of_row, first_row, rows, offsets }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_rows_share_and_prefixes_of_each_other_do_not() {
        // [1 2], [1], [], [1 2], [1]
        let prompts = Ragged::new(&[1, 2, 1, 1, 2, 1], &[0, 2, 3, 3, 5, 6], "offsets").unwrap();
        let shared = share_prefixes(&prompts);
        assert_eq!(shared.prompt_of_row, [0, 1, 2, 0, 1]);
        assert_eq!(shared.first_row, [0, 1, 2]);
        assert_eq!(shared.rows, [0, 3, 1, 4, 2]);
        assert_eq!(shared.offsets, [0, 2, 4, 5]);
    }

    #[test]
    fn nothing_gives_nothing() {
        let shared = share_prefixes(&Ragged::new(&[], &[0], "offsets").unwrap());
        assert_eq!(shared, SharedPrefixes { prompt_of_row: vec![], first_row: vec![], rows: vec![], offsets: vec![0] });
    }
}
