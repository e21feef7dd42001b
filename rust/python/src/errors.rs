//! Errors of the crates as Python exceptions.

use std::error::Error;

use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

/// A `ValueError` with the text of `error`.
pub(super) fn value_error(error: impl Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A `ValueError` for a name that is none of `expected`.
pub(super) fn unknown_choice(argument: &str, value: &str, expected: &str) -> PyErr {
    PyValueError::new_err(format!("{argument} is {value:?}: expected one of {expected}"))
}
