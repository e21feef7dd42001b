//! Bindings of [`crate::rewards`], except the rules of `blocks` and `math`.

use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use super::arrays::copied;
use super::list::List;
use crate::ragged::Ragged;
use crate::rewards::choice::MultipleChoice;
use crate::rewards::countdown::Countdown;
use crate::rewards::exact::ExactAnswer;
use crate::rewards::format::{FormatMode, TagFormat};
use crate::rewards::gsm8k::Gsm8kAnswer;
use crate::rewards::repetition::{TokenRepetition, WordRepetition};
use crate::rewards::tag_count::TagCount;
use crate::rewards::{RewardRule, Scores, answer, score_batch};

/// Scores and statuses.
pub type PyScores<'py> = (Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<u8>>);

pub(super) fn wrap(py: Python<'_>, scores: Scores) -> PyScores<'_> {
    (scores.scores.into_pyarray(py), scores.statuses.into_pyarray(py))
}

/// Score a batch with the interpreter released.
pub fn run<'py>(py: Python<'py>, rule: &impl RewardRule, completions: &[PyBackedStr]) -> PyScores<'py> {
    let scores = py.detach(|| score_batch(rule, completions));
    wrap(py, scores)
}

/// Check that a column has one value per completion.
pub(super) fn same_rows(argument: &str, rows: usize, completions: usize) -> PyResult<()> {
    if rows == completions {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{argument} has {rows} rows, expected {completions}")))
}

#[pyfunction]
fn score_tag_format<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    first: &str,
    second: &str,
    mode: &str,
    prefix: &str,
) -> PyResult<PyScores<'py>> {
    let mode = FormatMode::from_name(mode).ok_or_else(|| PyValueError::new_err(format!("mode is {mode:?}")))?;
    Ok(run(py, &TagFormat::new(first, second, mode, prefix), &completions))
}

#[pyfunction]
fn format_modes() -> Vec<&'static str> {
    FormatMode::NAMES.iter().map(|(name, _)| *name).collect()
}

#[pyfunction]
fn score_tag_count<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    first: &str,
    second: &str,
    mode: &str,
) -> PyResult<PyScores<'py>> {
    let rule = match mode {
        "lm_book" => TagCount::lm_book(first, second),
        "open_r1" => TagCount::open_r1(first, second),
        _ => return Err(PyValueError::new_err(format!("mode is {mode:?}"))),
    };
    Ok(run(py, &rule, &completions))
}

#[pyfunction]
fn score_countdown<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    numbers: &Bound<'py, PyArray1<i64>>,
    offsets: &Bound<'py, PyArray1<i64>>,
    targets: &Bound<'py, PyArray1<i64>>,
) -> PyResult<PyScores<'py>> {
    let (numbers, offsets, targets) = (numbers.try_readonly()?, copied(offsets)?, targets.try_readonly()?);
    let rule = Countdown::new(Ragged::new(numbers.as_slice()?, &offsets, "offsets")?, targets.as_slice()?)?;
    same_rows("target", targets.as_slice()?.len(), completions.len())?;
    Ok(run(py, &rule, &completions))
}

#[pyfunction]
fn score_gsm8k<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    golds: List<PyBackedStr>,
    percent_optional: bool,
) -> PyResult<PyScores<'py>> {
    same_rows("answer", golds.len(), completions.len())?;
    let rule = Gsm8kAnswer::new(&golds, percent_optional)?;
    Ok(run(py, &rule, &completions))
}

#[pyfunction]
fn score_exact<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    golds: List<PyBackedStr>,
    tag: Option<&str>,
    case_sensitive: bool,
) -> PyResult<PyScores<'py>> {
    same_rows("answer", golds.len(), completions.len())?;
    Ok(run(py, &ExactAnswer::new(&golds, tag, case_sensitive), &completions))
}

#[pyfunction]
fn score_choice<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    golds: List<PyBackedStr>,
    options: &str,
) -> PyResult<PyScores<'py>> {
    same_rows("answer", golds.len(), completions.len())?;
    let rule = MultipleChoice::new(&golds, options)?;
    Ok(run(py, &rule, &completions))
}

#[pyfunction]
fn score_word_repetition<'py>(
    py: Python<'py>,
    completions: List<PyBackedStr>,
    ngram_size: usize,
    max_penalty: f64,
) -> PyScores<'py> {
    run(py, &WordRepetition { ngram_size, max_penalty }, &completions)
}

#[pyfunction]
fn score_token_repetition<'py>(
    py: Python<'py>,
    ids: &Bound<'py, PyArray1<i64>>,
    offsets: &Bound<'py, PyArray1<i64>>,
    ngram_size: usize,
    max_penalty: f64,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let (ids, offsets) = (ids.try_readonly()?, copied(offsets)?);
    let ids = Ragged::new(ids.as_slice()?, &offsets, "offsets")?;
    let rule = TokenRepetition { ids, ngram_size, max_penalty };
    Ok(py.detach(|| rule.penalties()).into_pyarray(py))
}

#[pyfunction]
fn extract_answer(text: &str) -> Option<std::borrow::Cow<'_, str>> {
    answer::stated(text)
}

/// Add the functions of this file to `_native`.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(score_tag_format, module)?)?;
    module.add_function(wrap_pyfunction!(format_modes, module)?)?;
    module.add_function(wrap_pyfunction!(score_tag_count, module)?)?;
    module.add_function(wrap_pyfunction!(score_countdown, module)?)?;
    module.add_function(wrap_pyfunction!(score_gsm8k, module)?)?;
    module.add_function(wrap_pyfunction!(score_exact, module)?)?;
    module.add_function(wrap_pyfunction!(score_choice, module)?)?;
    module.add_function(wrap_pyfunction!(score_word_repetition, module)?)?;
    module.add_function(wrap_pyfunction!(score_token_repetition, module)?)?;
    module.add_function(wrap_pyfunction!(extract_answer, module)?)?;
    Ok(())
}
