//! Kernels of `rlox_grpo`: group advantages, batch layout and rule-based rewards.
//!
//! The core takes and returns slices, vectors and [`ragged::Ragged`]; it never names Python.
//! The `python` feature adds the bindings in [`python`].

pub mod advantages;
pub mod batch;
pub mod error;
#[cfg(feature = "python")]
pub mod python;
pub mod ragged;
pub mod rewards;
pub mod threads;
