//! Bindings of [`rlox_grpo_kernels::advantages`].

use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use rlox_grpo_kernels::advantages::{self, Baseline, Normalisation, Real, Scaling};

use crate::arrays::{copied, zeros};
use crate::errors::{unknown_choice, value_error};

#[pyfunction]
#[pyo3(signature = (rewards, group_size, group_offsets, scaling, baseline, ddof, std_epsilon))]
pub(super) fn group_advantages<'py>(
    rewards: &Bound<'py, PyAny>,
    group_size: usize,
    group_offsets: Option<&Bound<'py, PyArray1<i64>>>,
    scaling: &str,
    baseline: &str,
    ddof: usize,
    std_epsilon: f64,
) -> PyResult<Bound<'py, PyAny>> {
    let how = Normalisation { scaling: scaling_of(scaling)?, baseline: baseline_of(baseline)?, ddof, std_epsilon };
    if let Ok(rewards) = rewards.cast::<PyArray1<f32>>() {
        return Ok(advantages_of(rewards, group_size, group_offsets, &how)?.into_any());
    }
    if let Ok(rewards) = rewards.cast::<PyArray1<f64>>() {
        return Ok(advantages_of(rewards, group_size, group_offsets, &how)?.into_any());
    }
    Err(PyTypeError::new_err("rewards: expected a float32 or float64 array of one dimension"))
}

fn advantages_of<'py, T: Real + Element>(
    rewards: &Bound<'py, PyArray1<T>>,
    group_size: usize,
    group_offsets: Option<&Bound<'py, PyArray1<i64>>>,
    how: &Normalisation,
) -> PyResult<Bound<'py, PyArray1<T>>> {
    let py = rewards.py();
    let out = zeros::<T>(py, rewards.len(), "rewards")?;
    let (rewards, mut writer) = (rewards.try_readonly()?, out.try_readwrite()?);
    let (values, target) = (rewards.as_slice()?, writer.as_slice_mut()?);
    if let Some(offsets) = group_offsets {
        let offsets = copied(offsets)?;
        py.detach(|| advantages::ragged_group_advantages(values, &offsets, how, target)).map_err(value_error)?;
    } else {
        py.detach(|| advantages::group_advantages(values, group_size, how, target)).map_err(value_error)?;
    }
    drop(writer);
    Ok(out)
}

#[pyfunction]
pub(super) fn broadcast_advantages<'py>(
    advantages: &Bound<'py, PyAny>,
    lengths: &Bound<'py, PyArray1<i64>>,
) -> PyResult<Bound<'py, PyAny>> {
    if let Ok(advantages) = advantages.cast::<PyArray1<f32>>() {
        return Ok(broadcast_of(advantages, lengths)?.into_any());
    }
    if let Ok(advantages) = advantages.cast::<PyArray1<f64>>() {
        return Ok(broadcast_of(advantages, lengths)?.into_any());
    }
    Err(PyTypeError::new_err("advantages: expected a float32 or float64 array of one dimension"))
}

fn broadcast_of<'py, T: Real + Element>(
    advantages: &Bound<'py, PyArray1<T>>,
    lengths: &Bound<'py, PyArray1<i64>>,
) -> PyResult<Bound<'py, PyArray1<T>>> {
    let py = advantages.py();
    let (advantages, lengths) = (advantages.try_readonly()?, copied(lengths)?);
    let values = advantages.as_slice()?;
    let out =
        zeros::<T>(py, advantages::broadcast_len(values.len(), &lengths).map_err(value_error)?, "the sum of lengths")?;
    let mut writer = out.try_readwrite()?;
    let target = writer.as_slice_mut()?;
    py.detach(|| advantages::broadcast(values, &lengths, target)).map_err(value_error)?;
    drop(writer);
    Ok(out)
}

fn scaling_of(name: &str) -> PyResult<Scaling> {
    match name {
        "group" => Ok(Scaling::Group),
        "batch" => Ok(Scaling::Batch),
        "none" => Ok(Scaling::None),
        _ => Err(unknown_choice("scaling", name, "'group', 'batch', 'none'")),
    }
}

fn baseline_of(name: &str) -> PyResult<Baseline> {
    match name {
        "mean" => Ok(Baseline::Mean),
        "leave_one_out" => Ok(Baseline::LeaveOneOut),
        _ => Err(unknown_choice("baseline", name, "'mean', 'leave_one_out'")),
    }
}
