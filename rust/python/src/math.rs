//! Bindings of [`rlox_grpo_rules::math`]: the rules over a batch, and the comparison of two answers.

use math_answers::answer::compare;
use math_answers::compare::{Options, Units};
use math_answers::equality::Equality;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use rlox_grpo_rules::math::{MathAnswer, majority, unreadable};

use crate::errors::value_error;
use crate::list::List;
use crate::rules::{PyScores, run, same_rows, wrap};

/// `tolerance`, `percent_optional`, `units`, `base_optional`, `brackets_optional`, `unsolved_ok`,
/// `unevaluated_ok`.
type PyOptions<'py> = (Option<f64>, bool, PyBackedStr, bool, bool, bool, bool);

fn options(given: PyOptions<'_>) -> PyResult<Options> {
    let (tolerance, percent_optional, units, base_optional, brackets_optional, unsolved_ok, unevaluated_ok) = given;
    let units = Units::from_name(&units).ok_or_else(|| PyValueError::new_err(format!("units is {:?}", &*units)))?;
    let tolerance = tolerance
        .map(|bound| bound.try_into().map_err(|_| PyValueError::new_err(format!("tolerance is {bound}"))))
        .transpose()?;
    Ok(Options { tolerance, percent_optional, units, base_optional, brackets_optional, unsolved_ok, unevaluated_ok })
}

#[pyfunction]
fn score_math<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    golds: List<PyBackedStr>,
    settings: PyOptions<'py>,
) -> PyResult<PyScores<'py>> {
    same_rows("answer", golds.len(), completions.len())?;
    let options = options(settings)?;
    let rule = py.detach(|| MathAnswer::new(&golds, options)).map_err(value_error)?;
    Ok(run(py, &rule, &completions))
}

#[pyfunction]
fn score_majority<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    groups: List<i64>,
    settings: PyOptions<'py>,
) -> PyResult<PyScores<'py>> {
    same_rows("groups", groups.len(), completions.len())?;
    let options = options(settings)?;
    let scores = py.detach(|| majority(&completions, &groups, &options));
    Ok(wrap(py, scores))
}

/// Row and reason of each gold answer that cannot be read.
#[pyfunction]
fn unreadable_golds(py: Python<'_>, golds: List<PyBackedStr>) -> Vec<(usize, &'static str)> {
    py.detach(|| unreadable(&golds))
}

/// True, False, or None for undecided.
#[pyfunction]
fn math_equal(py: Python<'_>, gold: &str, answer: &str, settings: PyOptions<'_>) -> PyResult<Option<bool>> {
    let options = options(settings)?;
    Ok(match py.detach(|| compare(gold, answer, &options)) {
        Equality::Equal => Some(true),
        Equality::Different => Some(false),
        Equality::Undecided => None,
    })
}

/// Add the functions of this file to `_native`.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(score_math, module)?)?;
    module.add_function(wrap_pyfunction!(score_majority, module)?)?;
    module.add_function(wrap_pyfunction!(math_equal, module)?)?;
    module.add_function(wrap_pyfunction!(unreadable_golds, module)?)?;
    Ok(())
}
