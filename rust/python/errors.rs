//! Errors of the core as Python exceptions.

use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

use crate::error::KernelError;

impl From<KernelError> for PyErr {
    fn from(error: KernelError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}
