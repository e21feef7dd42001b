//! Padding: ragged rows as rectangles of token ids, masks and positions, written in one pass.
//!
//! Masks come from lengths, never from ids: a real token may have the id of the padding. Example: the rows `[5]`, `[]`
//! and `[8, 9]`, padded with 0:
//!
//! ```text
//!              right                          left
//! ids          [5 0]  [0 0]  [8 9]            [0 5]  [0 0]  [8 9]
//! mask         [1 0]  [0 0]  [1 1]            [0 1]  [0 0]  [1 1]
//! positions    [0 0]  [0 0]  [0 1]            [0 0]  [0 0]  [0 1]
//! ```

use crate::error::KernelError;
use crate::ragged::{MOST_VALUES, Ragged};
use crate::threads::worth_splitting;
use rayon::prelude::*;

/// Values per task: for fewer, a second thread costs more than it saves.
const GRAIN: usize = 1 << 15;

/// Side of the padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Before the row, for generation.
    Left,
    /// After the row, for training.
    Right,
}

/// Width of the rectangle: the longest of `lengths`, rounded up to a multiple of `multiple_of`.
///
/// # Errors
/// [`KernelError::BadValue`] for a multiple of 0; [`KernelError::TooLarge`] for more than [`MOST_VALUES`] values, naming
/// `multiple_of` where it alone decides the width.
pub fn width_for(lengths: impl ExactSizeIterator<Item = usize>, multiple_of: usize) -> Result<usize, KernelError> {
    if multiple_of == 0 {
        return Err(KernelError::BadValue { argument: "multiple_of", value: 0.0, reason: "at least 1" });
    }
    let rows = lengths.len();
    let longest = lengths.max().unwrap_or(0);
    let width = longest.checked_next_multiple_of(multiple_of).unwrap_or(usize::MAX);
    if rows.checked_mul(width).is_some_and(|values| values <= MOST_VALUES) {
        return Ok(width);
    }
    let argument = if longest < multiple_of { "multiple_of" } else { "rows" };
    Err(KernelError::TooLarge { argument, rows, width })
}

/// Output of [`pad`], row-major; every slice has `rows * width` values.
#[derive(Debug)]
pub struct Rectangle<'a> {
    /// Token ids.
    pub ids: &'a mut [i64],
    /// Attention mask: true on real tokens.
    pub mask: &'a mut [bool],
    /// Position ids: 0, 1, 2, ... from the row's first real token; 0 on padding.
    pub positions: &'a mut [i64],
}

/// Pad `rows` to `width` columns: write ids, mask and positions.
///
/// # Errors
/// [`KernelError::BadElement`] for a row longer than `width`; [`KernelError::LengthMismatch`] for an output of another
/// size.
pub fn pad(
    rows: &[&[i64]],
    width: usize,
    side: Side,
    pad_token_id: i64,
    out: Rectangle<'_>,
) -> Result<(), KernelError> {
    check_width(rows.iter().map(|row| row.len()).enumerate(), width)?;
    let size = rows.len() * width;
    check_size(out.ids.len(), size)?;
    check_size(out.mask.len(), size)?;
    check_size(out.positions.len(), size)?;
    three_by_row(width, out.ids, out.mask, out.positions, |index, ids, mask, positions| {
        let row = rows[index];
        let start = if side == Side::Left { width - row.len() } else { 0 };
        write(ids, start, row, pad_token_id);
        mark(mask, start, row.len());
        count(positions, start, row.len());
    });
    Ok(())
}

/// Pad the selected `rows` of `values` on the right with `fill`.
///
/// # Errors
/// As [`pad`], and [`KernelError::BadElement`] for a row index out of range.
pub fn pad_values<T: Copy + Send + Sync>(
    values: &Ragged<'_, T>,
    rows: &[i64],
    width: usize,
    fill: T,
    out: &mut [T],
) -> Result<(), KernelError> {
    check_indices(rows, values.len(), "rows")?;
    check_width(rows.iter().map(|&row| (row as usize, values.row(row as usize).len())), width)?;
    check_size(out.len(), rows.len() * width)?;
    if width == 0 {
        return Ok(());
    }
    let place = |(out, &row): (&mut [T], &i64)| write(out, 0, values.row(row as usize), fill);
    if worth_splitting(out.len(), GRAIN) {
        out.par_chunks_mut(width).zip(rows).for_each(place);
    } else {
        out.chunks_mut(width).zip(rows).for_each(place);
    }
    Ok(())
}

/// Call `each(row, a, b)` with each row's part of two rectangles; in parallel when they are large.
pub(super) fn two_by_row<A: Send, B: Send>(
    width: usize,
    a: &mut [A],
    b: &mut [B],
    each: impl Fn(usize, &mut [A], &mut [B]) + Sync + Send,
) {
    if width == 0 {
        return;
    }
    if worth_splitting(a.len(), GRAIN) {
        let rows = a.par_chunks_mut(width).zip(b.par_chunks_mut(width));
        rows.enumerate().for_each(|(index, (a, b))| each(index, a, b));
    } else {
        let rows = a.chunks_mut(width).zip(b.chunks_mut(width));
        rows.enumerate().for_each(|(index, (a, b))| each(index, a, b));
    }
}

/// Call `each(row, a, b, c)` with each row's part of three rectangles; in parallel when they are large.
pub(super) fn three_by_row<A: Send, B: Send, C: Send>(
    width: usize,
    a: &mut [A],
    b: &mut [B],
    c: &mut [C],
    each: impl Fn(usize, &mut [A], &mut [B], &mut [C]) + Sync + Send,
) {
    if width == 0 {
        return;
    }
    if worth_splitting(a.len(), GRAIN) {
        let rows = a.par_chunks_mut(width).zip(b.par_chunks_mut(width)).zip(c.par_chunks_mut(width));
        rows.enumerate().for_each(|(index, ((a, b), c))| each(index, a, b, c));
    } else {
        let rows = a.chunks_mut(width).zip(b.chunks_mut(width)).zip(c.chunks_mut(width));
        rows.enumerate().for_each(|(index, ((a, b), c))| each(index, a, b, c));
    }
}

/// Write `before` fill values, then the row, then fill values to the end.
pub(super) fn write<T: Copy>(out: &mut [T], before: usize, row: &[T], fill: T) {
    let (left, rest) = out.split_at_mut(before);
    let (middle, right) = rest.split_at_mut(row.len());
    left.fill(fill);
    middle.copy_from_slice(row);
    right.fill(fill);
}

/// Write true on `length` values from `start`, false elsewhere.
pub(super) fn mark(out: &mut [bool], start: usize, length: usize) {
    out.fill(false);
    out[start..start + length].fill(true);
}

/// Write 0, 1, 2, ... on `length` values from `start`, 0 elsewhere.
pub(super) fn count(out: &mut [i64], start: usize, length: usize) {
    let (left, rest) = out.split_at_mut(start);
    let (middle, right) = rest.split_at_mut(length);
    left.fill(0);
    // Counting in the type of the values lets the loop vectorise.
    for (value, position) in middle.iter_mut().zip(0i64..) {
        *value = position;
    }
    right.fill(0);
}

/// Check that every index is below `limit`.
pub(super) fn check_indices(indices: &[i64], limit: usize, argument: &'static str) -> Result<(), KernelError> {
    let within = |value: &i64| usize::try_from(*value).is_ok_and(|index| index < limit);
    match indices.iter().position(|value| !within(value)) {
        None => Ok(()),
        Some(index) => Err(KernelError::BadElement {
            argument,
            index,
            value: indices[index],
            reason: "it must be the index of a row that was given",
        }),
    }
}

/// Check that no row, given as index and length, is longer than `width`.
fn check_width(mut lengths: impl Iterator<Item = (usize, usize)>, width: usize) -> Result<(), KernelError> {
    match lengths.find(|&(_, length)| length > width) {
        None => Ok(()),
        Some((index, length)) => {
            let (value, reason) = (length as i64, "more tokens than the rectangle is wide");
            Err(KernelError::BadElement { argument: "row_lengths", index, value, reason })
        }
    }
}

/// Check the length of an output.
pub(super) fn check_size(length: usize, expected: usize) -> Result<(), KernelError> {
    if length == expected {
        return Ok(());
    }
    Err(KernelError::LengthMismatch { argument: "out", length, other: "the rectangle", expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(side: Side) -> (Vec<i64>, Vec<bool>, Vec<i64>) {
        let (mut ids, mut mask, mut positions) = (vec![5; 6], vec![true; 6], vec![5; 6]);
        let out = Rectangle { ids: &mut ids, mask: &mut mask, positions: &mut positions };
        pad(&[&[0], &[], &[8, 9]], 2, side, 0, out).unwrap();
        (ids, mask, positions)
    }

    #[test]
    fn masks_come_from_lengths_even_where_a_token_is_the_padding() {
        let right = padded(Side::Right);
        assert_eq!(right.0, [0, 0, 0, 0, 8, 9]);
        assert_eq!(right.1, [true, false, false, false, true, true]);
        assert_eq!(right.2, [0, 0, 0, 0, 0, 1]);
        let left = padded(Side::Left);
        assert_eq!(left.1, [false, true, false, false, true, true]);
        assert_eq!(left.2, [0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn widths_round_up_and_refuse_what_cannot_be_addressed() {
        assert_eq!(width_for([3, 5].into_iter(), 4).unwrap(), 8);
        assert_eq!(width_for([].into_iter(), 4).unwrap(), 0);
        assert!(width_for([1].into_iter(), 0).is_err());
        for (lengths, multiple_of, argument) in
            [([usize::MAX / 4, 1], 1, "rows"), ([1, 1], usize::MAX, "multiple_of"), ([0, 1], 1 << 61, "multiple_of")]
        {
            let message = width_for(lengths.into_iter(), multiple_of).unwrap_err().to_string();
            assert!(message.starts_with(argument), "{message}");
        }
    }

    #[test]
    fn values_of_chosen_rows() {
        let values = Ragged::new(&[1.0, 2.0, 3.0], &[0, 2, 3], "offsets").unwrap();
        let mut out = [9.0; 6];
        pad_values(&values, &[1, 0, 1], 2, -1.0, &mut out).unwrap();
        assert_eq!(out, [3.0, -1.0, 1.0, 2.0, 3.0, -1.0]);
        let message = pad_values(&values, &[2], 2, 0.0, &mut [0.0; 2]).unwrap_err().to_string();
        assert!(message.starts_with("rows[0] is 2"), "{message}");
        let message = pad_values(&values, &[0], 1, 0.0, &mut [0.0; 1]).unwrap_err().to_string();
        assert!(message.starts_with("row_lengths[0] is 2"), "{message}");
        assert!(pad_values(&values, &[0], 2, 0.0, &mut [0.0; 1]).is_err());
    }
}
