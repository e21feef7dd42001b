//! The `_native` module. A binding checks its arguments, releases the interpreter, calls the core and wraps the result.
//!
//! No argument may cause a panic, because `except Exception` does not catch a panic. Arrays whose size depends on an
//! argument are allocated by [`arrays`]. Offsets, lengths and indices are copied, because another thread can write to
//! them during the call.

mod advantages;
mod arrays;
mod batch;
mod errors;
mod list;
mod math;
mod rules;

use pyo3::prelude::*;

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
    rules::register(module)?;
    math::register(module)?;
    Ok(())
}
