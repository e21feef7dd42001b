//! Bindings of [`rlox_grpo_rules`], except those of [`rlox_grpo_rules::math`].

use std::borrow::Cow;

use math_answers::extraction::stated;
use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use rlox_grpo_kernels::ragged::Ragged;
use rlox_grpo_rules::answer_form::AnswerForm;
use rlox_grpo_rules::blocks::{LengthUnit, ReasoningLength, TagBlocks};
use rlox_grpo_rules::choice::MultipleChoice;
use rlox_grpo_rules::countdown::Countdown;
use rlox_grpo_rules::error::RuleError;
use rlox_grpo_rules::exact::ExactAnswer;
use rlox_grpo_rules::format::{FormatMode, TagFormat};
use rlox_grpo_rules::gsm8k::Gsm8kAnswer;
use rlox_grpo_rules::repetition::{TokenRepetition, WordRepetition};
use rlox_grpo_rules::tag_count::TagCount;
use rlox_grpo_rules::{RewardRule, Scores, score_batch};

use crate::arrays::copied;
use crate::errors::value_error;
use crate::list::List;

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
pub(super) fn same_rows(argument: &'static str, rows: usize, completions: usize) -> PyResult<()> {
    if rows == completions {
        return Ok(());
    }
    Err(value_error(RuleError::RowCount { argument, rows, expected: completions }))
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
    let numbers = Ragged::new(numbers.as_slice()?, &offsets, "offsets").map_err(value_error)?;
    let rule = Countdown::new(numbers, targets.as_slice()?).map_err(value_error)?;
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
    let rule = Gsm8kAnswer::new(&golds, percent_optional).map_err(value_error)?;
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
    let rule = MultipleChoice::new(&golds, options).map_err(value_error)?;
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
    let ids = Ragged::new(ids.as_slice()?, &offsets, "offsets").map_err(value_error)?;
    let rule = TokenRepetition { ids, ngram_size, max_penalty };
    Ok(py.detach(|| rule.penalties()).into_pyarray(py))
}

#[pyfunction]
fn extract_answer<'t>(py: Python<'_>, text: &'t str) -> Option<Cow<'t, str>> {
    py.detach(|| stated(text))
}

#[pyfunction]
fn extract_by_form(py: Python<'_>, text: PyBackedStr, form: &str) -> PyResult<Option<String>> {
    let form = AnswerForm::from_name(form).ok_or_else(|| PyValueError::new_err(format!("form is {form:?}")))?;
    Ok(py.detach(|| form.extract(&text)))
}

#[pyfunction]
fn answer_forms() -> Vec<&'static str> {
    AnswerForm::NAMES.iter().map(|(name, _)| *name).collect()
}

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
    module.add_function(wrap_pyfunction!(score_tag_format, module)?)?;
    module.add_function(wrap_pyfunction!(format_modes, module)?)?;
    module.add_function(wrap_pyfunction!(score_tag_count, module)?)?;
    module.add_function(wrap_pyfunction!(score_countdown, module)?)?;
    module.add_function(wrap_pyfunction!(score_gsm8k, module)?)?;
    module.add_function(wrap_pyfunction!(score_exact, module)?)?;
    module.add_function(wrap_pyfunction!(score_choice, module)?)?;
    module.add_function(wrap_pyfunction!(score_word_repetition, module)?)?;
    module.add_function(wrap_pyfunction!(score_token_repetition, module)?)?;
    module.add_function(wrap_pyfunction!(score_tag_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(score_reasoning_length, module)?)?;
    module.add_function(wrap_pyfunction!(extract_answer, module)?)?;
    module.add_function(wrap_pyfunction!(extract_by_form, module)?)?;
    module.add_function(wrap_pyfunction!(answer_forms, module)?)?;
    Ok(())
}
