//! Broadcast of one value per row to one value per token.

use crate::error::KernelError;
use crate::ragged::MOST_VALUES;

/// Repeat each value over the tokens of its row: values `[N]` and lengths `[N]` to `out` `[sum of lengths]`.
///
/// Example: values `[1, 9, 2]` and lengths `[1, 0, 2]` give `[1, 2, 2]`.
///
/// # Errors
/// [`KernelError::LengthMismatch`] for lengths or an `out` of another size; [`KernelError::BadElement`] for a negative
/// length, and for the length at which the sum exceeds [`MOST_VALUES`].
pub fn broadcast<T: Copy>(values: &[T], lengths: &[i64], out: &mut [T]) -> Result<(), KernelError> {
    let total = broadcast_len(values.len(), lengths)?;
    if out.len() != total {
        return Err(KernelError::LengthMismatch {
            argument: "out",
            length: out.len(),
            other: "the sum of lengths",
            expected: total,
        });
    }
    let mut rest = out;
    for (&value, &length) in values.iter().zip(lengths) {
        let (row, tail) = rest.split_at_mut(length as usize);
        row.fill(value);
        rest = tail;
    }
    Ok(())
}

/// Number of values that [`broadcast`] writes.
///
/// # Errors
/// As [`broadcast`].
pub fn broadcast_len(num_values: usize, lengths: &[i64]) -> Result<usize, KernelError> {
    if lengths.len() != num_values {
        let (length, expected) = (lengths.len(), num_values);
        return Err(KernelError::LengthMismatch { argument: "lengths", length, other: "advantages", expected });
    }
    let mut total = 0usize;
    for (index, &value) in lengths.iter().enumerate() {
        let bad = |reason| KernelError::BadElement { argument: "lengths", index, value, reason };
        let length = usize::try_from(value).map_err(|_| bad("a length is not negative"))?;
        total = total
            .checked_add(length)
            .filter(|&total| total <= MOST_VALUES)
            .ok_or_else(|| bad("the lengths add up to more than can be addressed"))?;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_repeats_and_refuses() {
        let mut out = [0.0; 3];
        broadcast(&[1.0, 9.0, 2.0], &[1, 0, 2], &mut out).unwrap();
        assert_eq!(out, [1.0, 2.0, 2.0]);
        assert_eq!(broadcast_len(2, &[1, -1]).unwrap_err().to_string(), "lengths[1] is -1: a length is not negative");
        assert_eq!(broadcast_len(1, &[MOST_VALUES as i64]).unwrap(), MOST_VALUES);
        let message = broadcast_len(2, &[MOST_VALUES as i64, 1]).unwrap_err().to_string();
        assert_eq!(message, "lengths[1] is 1: the lengths add up to more than can be addressed");
        assert!(broadcast_len(3, &[i64::MAX; 3]).is_err());
        assert!(broadcast_len(1, &[1, 2]).unwrap_err().to_string().starts_with("lengths has 2 values"));
    }
}
