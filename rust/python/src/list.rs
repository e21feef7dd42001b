//! List arguments of the bindings.

use std::ops::Deref;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// The elements of a Python list, extracted one by one.
///
/// PyO3's `Vec` takes any sequence and allocates what its `__len__` claims: `range(2**60)` would cause a panic.
pub(super) struct List<T>(Vec<T>);

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<'a, 'py, T: FromPyObjectOwned<'py>> FromPyObject<'a, 'py> for List<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let list = object.cast::<PyList>()?;
        let mut items = Vec::with_capacity(list.len());
        for (index, value) in list.iter().enumerate() {
            items.push(value.extract::<T>().map_err(|error| named(error.into(), index, object.py()))?);
        }
        Ok(Self(items))
    }
}

/// A type error with the index of the element.
fn named(error: PyErr, index: usize, py: Python<'_>) -> PyErr {
    if error.is_instance_of::<PyTypeError>(py) {
        PyTypeError::new_err(format!("element {index}: {}", error.value(py)))
    } else {
        error
    }
}
