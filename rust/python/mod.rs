//! The `_native` module: each binding borrows, detaches, calls the core and wraps the result.

use pyo3::prelude::*;

/// Kernels of `rlox_grpo`; see `_native.pyi` for the typed signatures.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
