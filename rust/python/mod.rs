//! The `_native` module: each binding borrows, detaches, calls the core and wraps the result.

mod advantages;
mod batch;
mod blocks;
mod math;
mod rewards;

use crate::error::KernelError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

impl From<KernelError> for PyErr {
    fn from(error: KernelError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

/// Kernels of `rlox_grpo`; see `_native.pyi` for the typed signatures.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;

    module.add_function(wrap_pyfunction!(advantages::group_advantages, module)?)?;
    module.add_function(wrap_pyfunction!(advantages::broadcast_advantages, module)?)?;

    module.add_function(wrap_pyfunction!(batch::flatten_rows, module)?)?;
    module.add_function(wrap_pyfunction!(batch::pad, module)?)?;
    module.add_function(wrap_pyfunction!(batch::pad_arrays, module)?)?;
    module.add_function(wrap_pyfunction!(batch::pad_values, module)?)?;
    module.add_function(wrap_pyfunction!(batch::layout_rows, module)?)?;
    module.add_function(wrap_pyfunction!(batch::pack, module)?)?;
    module.add_function(wrap_pyfunction!(batch::share_prefixes, module)?)?;
    rewards::register(module)?;
    blocks::register(module)?;
    math::register(module)?;
    Ok(())
}
