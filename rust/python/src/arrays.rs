//! NumPy arguments and results of the bindings.
//!
//! A kernel runs without the interpreter lock, so another thread can write to an argument during the call. Values (token
//! ids, rewards, log-probs) are read in place: such a write can change the result, but cannot cause an error. Offsets,
//! lengths and indices decide which memory is read, so [`copied`] copies them and the kernel checks the copy.

use numpy::{Element, PyArray1, PyArray2, PyArrayMethods, dtype};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use rlox_grpo_kernels::error::KernelError;
use rlox_grpo_kernels::ragged::MOST_VALUES;

use crate::errors::value_error;

/// Copy an array of offsets, lengths or indices.
pub(super) fn copied<T: Element + Copy>(array: &Bound<'_, PyArray1<T>>) -> PyResult<Vec<T>> {
    Ok(array.try_readonly()?.as_slice()?.to_vec())
}

/// Copy an array of flags. A `bool` array can hold other bytes than 0 and 1: a view of integers, for example.
pub(super) fn copied_flags(array: &Bound<'_, PyArray1<bool>>) -> PyResult<Vec<bool>> {
    let bytes = array.cast_array::<u8>(false)?;
    Ok(bytes.try_readonly()?.as_slice()?.iter().map(|&byte| byte != 0).collect())
}

/// Allocate `[length]` zeros; `argument` names the cause of the size in errors.
///
/// # Errors
/// `MemoryError` when the system refuses the memory; `ValueError` for more than [`MOST_VALUES`] values.
pub(super) fn zeros<'py, T: Element>(
    py: Python<'py>,
    length: usize,
    argument: &'static str,
) -> PyResult<Bound<'py, PyArray1<T>>> {
    Ok(allocate::<T>(py, (length,), (1, length), argument)?.cast_into()?)
}

/// Allocate `[rows, width]` zeros. The pages of a large array are mapped only when a thread first writes them.
///
/// # Errors
/// As [`zeros`].
pub(super) fn rectangle<'py, T: Element>(
    py: Python<'py>,
    rows: usize,
    width: usize,
    argument: &'static str,
) -> PyResult<Bound<'py, PyArray2<T>>> {
    Ok(allocate::<T>(py, (rows, width), (rows, width), argument)?.cast_into()?)
}

/// Call `numpy.zeros`, which raises if there is not enough memory; the constructors of the numpy crate panic.
fn allocate<'py, T: Element>(
    py: Python<'py>,
    shape: impl IntoPyObject<'py>,
    (rows, width): (usize, usize),
    argument: &'static str,
) -> PyResult<Bound<'py, PyAny>> {
    static ZEROS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if rows.checked_mul(width).is_none_or(|values| values > MOST_VALUES) {
        return Err(value_error(KernelError::TooLarge { argument, rows, width }));
    }
    ZEROS.import(py, "numpy", "zeros")?.call1((shape, dtype::<T>(py))).map_err(|error| {
        if !error.is_instance_of::<PyMemoryError>(py) {
            return error;
        }
        let bytes = size_of::<T>();
        PyMemoryError::new_err(format!("{argument} needs {rows} x {width} values of {bytes} bytes: out of memory"))
    })
}
