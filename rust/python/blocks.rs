//! Bindings of [`crate::rewards::blocks`].

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use super::list::List;
use super::rewards::{PyScores, run};
use crate::rewards::blocks::{LengthUnit, ReasoningLength, TagBlocks};

#[pyfunction]
fn score_tag_blocks<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    first: &str,
    second: &str,
    each: f64,
) -> PyScores<'py> {
    run(py, &TagBlocks::new(first, second, each), &completions)
}

#[pyfunction]
fn score_reasoning_length<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    tag: Option<&str>,
    unit: &str,
    max_length: usize,
) -> PyResult<PyScores<'py>> {
    let unit = match unit {
        "characters" => LengthUnit::Characters,
        "words" => LengthUnit::Words,
        _ => return Err(PyValueError::new_err(format!("unit is {unit:?}"))),
    };
    Ok(run(py, &ReasoningLength::new(tag, unit, max_length), &completions))
}

/// Add the functions of this file to `_native`.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(score_tag_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(score_reasoning_length, module)?)?;
    Ok(())
}
