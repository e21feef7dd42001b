//! Training rows: a prompt followed by its completion, padded on the right.
//!
//! Example: prompts `[1 2]` and `[3]`; completions `[7 0]`, `[0]`, `[]` and `[9]`. The first two completions answer
//! prompt 0 and the others prompt 1, so `prompt_of_row` is `[0, 0, 1, 1]`; `train` is `[true, false, true, true]`. A
//! batch of `rows` `[0, 1, 3]` has N = 3 rows, L = 4 columns and T = 2 completion columns. With `_` for the padding id
//! and `.` for false:
//!
//! ```text
//!         input_ids  attention_mask  completion_ids  completion_mask  loss_mask  prompt_lengths
//! row 0   1 2 7 0    1 1 1 1         7 0             1 1              1 1        2
//! row 1   1 2 0 _    1 1 1 .         0 _             1 .              . .        2
//! row 3   3 9 _ _    1 1 . .         9 _             1 .              1 .        1
//! ```
//!
//! Masks come from lengths, never from ids: the token 0 of rows 0 and 1 is real, whatever the padding id. Row 1 has no
//! loss token because its `train` is false.

use super::padding::{check_indices, check_size, mark, three_by_row, two_by_row, width_for, write};
use crate::error::KernelError;
use crate::ragged::Ragged;

/// Prompts and completions of an optimizer step, and the rows of one of its batches.
#[derive(Debug)]
pub struct RowLayout<'a> {
    prompts: Ragged<'a, i64>,
    completions: Ragged<'a, i64>,
    prompt_of_row: &'a [i64],
    train: &'a [bool],
    rows: &'a [i64],
}

/// Outputs, row-major: N rows of L tokens, or of T completion tokens.
#[derive(Debug)]
pub struct LayoutOut<'a> {
    /// `[N, L]` token ids.
    pub input_ids: &'a mut [i64],
    /// `[N, L]`: true on real tokens.
    pub attention_mask: &'a mut [bool],
    /// `[N, T]` token ids.
    pub completion_ids: &'a mut [i64],
    /// `[N, T]`: true on completion tokens.
    pub completion_mask: &'a mut [bool],
    /// `[N, T]`: true on completion tokens of rows with `train`.
    pub loss_mask: &'a mut [bool],
    /// `[N]`: tokens of each row's prompt.
    pub prompt_lengths: &'a mut [i64],
}

impl<'a> RowLayout<'a> {
    /// Check and borrow the arguments. `completions`, `prompt_of_row` and `train` have one entry per row of the step;
    /// `rows` selects rows of the step.
    ///
    /// # Errors
    /// [`KernelError`] for lengths that differ, an index out of range, or an empty prompt: no logits would predict the
    /// first completion token.
    pub fn new(
        prompts: Ragged<'a, i64>,
        completions: Ragged<'a, i64>,
        prompt_of_row: &'a [i64],
        train: &'a [bool],
        rows: &'a [i64],
    ) -> Result<Self, KernelError> {
        let expected = completions.len();
        for (argument, length) in [("prompt_of_row", prompt_of_row.len()), ("train", train.len())] {
            if length != expected {
                return Err(KernelError::LengthMismatch { argument, length, other: "completions", expected });
            }
        }
        check_indices(prompt_of_row, prompts.len(), "prompt_of_row")?;
        check_indices(rows, completions.len(), "rows")?;
        if let Some(index) = prompts.rows().position(<[i64]>::is_empty) {
            let reason = "a prompt holds at least one token";
            return Err(KernelError::BadElement { argument: "prompt_lengths", index, value: 0, reason });
        }
        Ok(Self { prompts, completions, prompt_of_row, train, rows })
    }

    /// L and T: the longest row, rounded up to a multiple of `multiple_of`, and the longest completion.
    ///
    /// # Errors
    /// As [`width_for`].
    pub fn widths(&self, multiple_of: usize) -> Result<(usize, usize), KernelError> {
        let lengths = self.rows.iter().map(|&row| {
            let (prompt, completion) = self.row(row);
            prompt.len().saturating_add(completion.len())
        });
        Ok((width_for(lengths, multiple_of)?, width_for(self.rows.iter().map(|&row| self.row(row).1.len()), 1)?))
    }

    /// Write all outputs of the selected rows; the widths are those of [`widths`](Self::widths).
    ///
    /// # Errors
    /// [`KernelError::LengthMismatch`] for an output of another size.
    pub fn fill(
        &self,
        (width, completion_width): (usize, usize),
        pad_token_id: i64,
        out: LayoutOut<'_>,
    ) -> Result<(), KernelError> {
        let (size, completion_size) = (self.rows.len() * width, self.rows.len() * completion_width);
        for (length, expected) in [
            (out.input_ids.len(), size),
            (out.attention_mask.len(), size),
            (out.completion_ids.len(), completion_size),
            (out.completion_mask.len(), completion_size),
            (out.loss_mask.len(), completion_size),
            (out.prompt_lengths.len(), self.rows.len()),
        ] {
            check_size(length, expected)?;
        }
        for (length, &row) in out.prompt_lengths.iter_mut().zip(self.rows) {
            *length = self.row(row).0.len() as i64;
        }
        two_by_row(width, out.input_ids, out.attention_mask, |index, ids, mask| {
            let (prompt, completion) = self.row(self.rows[index]);
            let (head, tail) = ids.split_at_mut(prompt.len());
            head.copy_from_slice(prompt);
            write(tail, 0, completion, pad_token_id);
            mark(mask, 0, prompt.len() + completion.len());
        });
        let (ids, mask, loss_mask) = (out.completion_ids, out.completion_mask, out.loss_mask);
        three_by_row(completion_width, ids, mask, loss_mask, |index, ids, mask, loss_mask| {
            let row = self.rows[index];
            let completion = self.row(row).1;
            write(ids, 0, completion, pad_token_id);
            mark(mask, 0, completion.len());
            mark(loss_mask, 0, if self.train[row as usize] { completion.len() } else { 0 });
        });
        Ok(())
    }

    /// Prompt and completion of a row of the step; `row` was checked on construction.
    fn row(&self, row: i64) -> (&'a [i64], &'a [i64]) {
        let row = row as usize;
        (self.prompts.row(self.prompt_of_row[row] as usize), self.completions.row(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_prompt_completion_padding() {
        let prompts = Ragged::new(&[1, 2, 3], &[0, 2, 3], "offsets").unwrap();
        let completions = Ragged::new(&[7, 0, 0, 9], &[0, 2, 3, 3, 4], "offsets").unwrap();
        let (prompt_of_row, train) = ([0, 0, 1, 1], [true, false, true, true]);
        let layout = RowLayout::new(prompts, completions, &prompt_of_row, &train, &[0, 1, 3]).unwrap();
        assert_eq!(layout.widths(1).unwrap(), (4, 2));
        let (mut ids, mut mask) = ([8; 12], [true; 12]);
        let (mut completion_ids, mut completion_mask, mut loss_mask) = ([8; 6], [true; 6], [true; 6]);
        let mut prompt_lengths = [0; 3];
        let out = LayoutOut {
            input_ids: &mut ids,
            attention_mask: &mut mask,
            completion_ids: &mut completion_ids,
            completion_mask: &mut completion_mask,
            loss_mask: &mut loss_mask,
            prompt_lengths: &mut prompt_lengths,
        };
        layout.fill((4, 2), -1, out).unwrap();
        assert_eq!(ids, [1, 2, 7, 0, 1, 2, 0, -1, 3, 9, -1, -1]);
        assert_eq!(mask.map(u8::from), [1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]);
        assert_eq!(completion_ids, [7, 0, 0, -1, 9, -1]);
        assert_eq!(completion_mask.map(u8::from), [1, 1, 1, 0, 1, 0]);
        assert_eq!(loss_mask.map(u8::from), [1, 1, 0, 0, 1, 0]);
        assert_eq!(prompt_lengths, [2, 2, 1]);
    }

    #[test]
    fn errors_name_the_argument() {
        let prompts = Ragged::new(&[1], &[0, 1], "offsets").unwrap();
        let empty = Ragged::new(&[1], &[0, 1, 1], "offsets").unwrap();
        let message = |result: Result<RowLayout<'_>, KernelError>| result.unwrap_err().to_string();
        assert!(message(RowLayout::new(prompts, prompts, &[0, 0], &[true], &[])).starts_with("prompt_of_row has 2"));
        assert!(message(RowLayout::new(prompts, prompts, &[0], &[], &[])).starts_with("train has 0"));
        assert!(message(RowLayout::new(prompts, prompts, &[1], &[true], &[])).starts_with("prompt_of_row[0] is 1"));
        assert!(message(RowLayout::new(prompts, prompts, &[0], &[true], &[-1])).starts_with("rows[0] is -1"));
        assert!(message(RowLayout::new(empty, prompts, &[0], &[true], &[0])).starts_with("prompt_lengths[1] is 0"));
    }
}
