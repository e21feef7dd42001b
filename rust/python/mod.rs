//! The `_native` module: each binding borrows, detaches, calls the core and wraps the result.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::KernelError;

mod rewards;

impl From<KernelError> for PyErr {
    fn from(error: KernelError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

/// Kernels of `rlox_grpo`; see `_native.pyi` for the typed signatures.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    rewards::register(module)?;
    Ok(())
}
