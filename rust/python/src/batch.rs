//! Bindings of [`rlox_grpo_kernels::batch`].

use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList};
use rlox_grpo_kernels::batch::layout::{LayoutOut, RowLayout};
use rlox_grpo_kernels::batch::packing::{self, Oversize, Packing};
use rlox_grpo_kernels::batch::padding::{self, Rectangle, Side, width_for};
use rlox_grpo_kernels::batch::prefix;
use rlox_grpo_kernels::ragged::Ragged;

use crate::arrays::{copied, copied_flags, rectangle, zeros};
use crate::errors::{unknown_choice, value_error};

type Ids<'py> = Bound<'py, PyArray1<i64>>;
type Ids2<'py> = Bound<'py, PyArray2<i64>>;
type Mask2<'py> = Bound<'py, PyArray2<bool>>;

/// Lists of ints as flat values and offsets, in one pass over the lists.
#[pyfunction]
pub(super) fn flatten_rows<'py>(rows: &Bound<'py, PyList>, argument: &str) -> PyResult<(Ids<'py>, Ids<'py>)> {
    let (mut values, mut offsets) = (Vec::<i64>::new(), Vec::with_capacity(rows.len() + 1));
    offsets.push(0);
    for (index, row) in rows.iter().enumerate() {
        let row = row
            .cast_into::<PyList>()
            .map_err(|error| PyTypeError::new_err(format!("{argument}[{index}]: {}", PyErr::from(error))))?;
        values.reserve(row.len());
        for (place, value) in row.iter().enumerate() {
            // A mask in place of ids: Python's bools are ints.
            if value.is_instance_of::<PyBool>() {
                return Err(bad_id(&PyTypeError::new_err(()), argument, index, place, &value));
            }
            values.push(value.extract().map_err(|error| bad_id(&error, argument, index, place, &value))?);
        }
        offsets.push(values.len() as i64);
    }
    Ok((values.into_pyarray(rows.py()), offsets.into_pyarray(rows.py())))
}

fn bad_id(error: &PyErr, argument: &str, index: usize, place: usize, value: &Bound<'_, PyAny>) -> PyErr {
    let shown = value.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
    let message = format!("{argument}[{index}][{place}] is {shown}: a token id is an int of 64 bits");
    if error.is_instance_of::<PyTypeError>(value.py()) {
        PyTypeError::new_err(message)
    } else {
        PyValueError::new_err(message)
    }
}

/// `token_ids`, `attention_mask`, `position_ids`.
type Padded<'py> = (Ids2<'py>, Mask2<'py>, Ids2<'py>);

#[pyfunction]
pub(super) fn pad<'py>(
    values: &Ids<'py>,
    offsets: &Ids<'py>,
    side: &str,
    pad_token_id: i64,
    multiple_of: usize,
) -> PyResult<Padded<'py>> {
    let py = values.py();
    let (values, offsets) = (values.try_readonly()?, copied(offsets)?);
    let rows = Ragged::new(values.as_slice()?, &offsets, "offsets").map_err(value_error)?;
    pad_slices(py, &rows.rows().collect::<Vec<_>>(), side, pad_token_id, multiple_of)
}

/// `pad` for a list of arrays, without a flat copy. None if an array is not contiguous int64; the caller converts it.
#[pyfunction]
pub(super) fn pad_arrays<'py>(
    rows: &Bound<'py, PyList>,
    side: &str,
    pad_token_id: i64,
    multiple_of: usize,
) -> PyResult<Option<Padded<'py>>> {
    let mut borrowed = Vec::with_capacity(rows.len());
    for row in rows.iter() {
        let Ok(row) = row.cast_into::<PyArray1<i64>>() else { return Ok(None) };
        borrowed.push(row.try_readonly()?);
    }
    let Ok(slices) = borrowed.iter().map(|row| row.as_slice()).collect::<Result<Vec<_>, _>>() else { return Ok(None) };
    pad_slices(rows.py(), &slices, side, pad_token_id, multiple_of).map(Some)
}

fn pad_slices<'py>(
    py: Python<'py>,
    rows: &[&[i64]],
    side: &str,
    pad_token_id: i64,
    multiple_of: usize,
) -> PyResult<Padded<'py>> {
    let (side, width) =
        (side_of(side)?, width_for(rows.iter().map(|row| row.len()), multiple_of).map_err(value_error)?);
    let cause = size_cause(width, multiple_of);
    let (ids, mask, positions) = (
        rectangle(py, rows.len(), width, cause)?,
        rectangle(py, rows.len(), width, cause)?,
        rectangle(py, rows.len(), width, cause)?,
    );
    {
        let (mut ids, mut mask, mut positions) =
            (ids.try_readwrite()?, mask.try_readwrite()?, positions.try_readwrite()?);
        let out =
            Rectangle { ids: ids.as_slice_mut()?, mask: mask.as_slice_mut()?, positions: positions.as_slice_mut()? };
        py.detach(|| padding::pad(rows, width, side, pad_token_id, out)).map_err(value_error)?;
    }
    Ok((ids, mask, positions))
}

#[pyfunction]
pub(super) fn pad_values<'py>(
    values: &Bound<'py, PyArray1<f32>>,
    offsets: &Ids<'py>,
    rows: &Ids<'py>,
    width: usize,
    fill: f32,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let py = values.py();
    let (values, offsets, rows) = (values.try_readonly()?, copied(offsets)?, copied(rows)?);
    let ragged = Ragged::new(values.as_slice()?, &offsets, "offsets").map_err(value_error)?;
    let out = rectangle(py, rows.len(), width, "width")?;
    {
        let mut out = out.try_readwrite()?;
        let target = out.as_slice_mut()?;
        py.detach(|| padding::pad_values(&ragged, &rows, width, fill, target)).map_err(value_error)?;
    }
    Ok(out)
}

/// `input_ids`, `attention_mask`, `completion_ids`, `completion_mask`, `loss_mask`, `prompt_lengths`.
type Layout<'py> = (Ids2<'py>, Mask2<'py>, Ids2<'py>, Mask2<'py>, Mask2<'py>, Ids<'py>);

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn layout_rows<'py>(
    prompts: &Ids<'py>,
    prompt_offsets: &Ids<'py>,
    completions: &Ids<'py>,
    completion_offsets: &Ids<'py>,
    prompt_of_row: &Ids<'py>,
    train: &Bound<'py, PyArray1<bool>>,
    rows: &Ids<'py>,
    pad_token_id: i64,
    multiple_of: usize,
) -> PyResult<Layout<'py>> {
    let py = prompts.py();
    let (prompts, prompt_offsets) = (prompts.try_readonly()?, copied(prompt_offsets)?);
    let (completions, completion_offsets) = (completions.try_readonly()?, copied(completion_offsets)?);
    let (prompt_of_row, train, rows) = (copied(prompt_of_row)?, copied_flags(train)?, copied(rows)?);
    let prompts = Ragged::new(prompts.as_slice()?, &prompt_offsets, "prompt_offsets").map_err(value_error)?;
    let completions =
        Ragged::new(completions.as_slice()?, &completion_offsets, "completion_offsets").map_err(value_error)?;
    let layout = RowLayout::new(prompts, completions, &prompt_of_row, &train, &rows).map_err(value_error)?;
    let widths @ (width, completion_width) = layout.widths(multiple_of).map_err(value_error)?;
    let cause = size_cause(width, multiple_of);
    let out: Layout<'py> = (
        rectangle(py, rows.len(), width, cause)?,
        rectangle(py, rows.len(), width, cause)?,
        rectangle(py, rows.len(), completion_width, "rows")?,
        rectangle(py, rows.len(), completion_width, "rows")?,
        rectangle(py, rows.len(), completion_width, "rows")?,
        zeros(py, rows.len(), "rows")?,
    );
    {
        let (mut input_ids, mut attention_mask) = (out.0.try_readwrite()?, out.1.try_readwrite()?);
        let (mut completion_ids, mut completion_mask, mut loss_mask, mut prompt_lengths) =
            (out.2.try_readwrite()?, out.3.try_readwrite()?, out.4.try_readwrite()?, out.5.try_readwrite()?);
        let target = LayoutOut {
            input_ids: input_ids.as_slice_mut()?,
            attention_mask: attention_mask.as_slice_mut()?,
            completion_ids: completion_ids.as_slice_mut()?,
            completion_mask: completion_mask.as_slice_mut()?,
            loss_mask: loss_mask.as_slice_mut()?,
            prompt_lengths: prompt_lengths.as_slice_mut()?,
        };
        py.detach(|| layout.fill(widths, pad_token_id, target)).map_err(value_error)?;
    }
    Ok(out)
}

#[pyfunction]
pub(super) fn pack<'py>(
    lengths: &Ids<'py>,
    token_budget: i64,
    padded: bool,
    num_ranks: usize,
    linear_cost: u64,
    oversize: &str,
) -> PyResult<(Ids<'py>, Ids<'py>)> {
    let py = lengths.py();
    let how = Packing { token_budget, padded, num_ranks, linear_cost, oversize: oversize_of(oversize)? };
    let lengths = copied(lengths)?;
    let micro_batches = py.detach(|| packing::pack(&lengths, &how)).map_err(value_error)?;
    let mut offsets = vec![0i64];
    let mut rows = Vec::with_capacity(lengths.len());
    for micro_batch in micro_batches {
        rows.extend(micro_batch.into_iter().map(|row| row as i64));
        offsets.push(rows.len() as i64);
    }
    Ok((rows.into_pyarray(py), offsets.into_pyarray(py)))
}

/// `prompt_of_row`, `first_row`, `rows`, `offsets`.
type Shared<'py> = (Ids<'py>, Ids<'py>, Ids<'py>, Ids<'py>);

#[pyfunction]
pub(super) fn share_prefixes<'py>(values: &Ids<'py>, offsets: &Ids<'py>) -> PyResult<Shared<'py>> {
    let py = values.py();
    let (values, offsets) = (values.try_readonly()?, copied(offsets)?);
    let prompts = Ragged::new(values.as_slice()?, &offsets, "offsets").map_err(value_error)?;
    let shared = py.detach(|| prefix::share_prefixes(&prompts));
    Ok((
        shared.prompt_of_row.into_pyarray(py),
        shared.first_row.into_pyarray(py),
        shared.rows.into_pyarray(py),
        shared.offsets.into_pyarray(py),
    ))
}

/// The argument to name if a rectangle is too large: `multiple_of` if no row is longer, else `rows`.
fn size_cause(width: usize, multiple_of: usize) -> &'static str {
    if width == multiple_of { "multiple_of" } else { "rows" }
}

fn side_of(name: &str) -> PyResult<Side> {
    match name {
        "left" => Ok(Side::Left),
        "right" => Ok(Side::Right),
        _ => Err(unknown_choice("side", name, "'left', 'right'")),
    }
}

fn oversize_of(name: &str) -> PyResult<Oversize> {
    match name {
        "error" => Ok(Oversize::Refuse),
        "alone" => Ok(Oversize::Alone),
        _ => Err(unknown_choice("oversize", name, "'error', 'alone'")),
    }
}
