//! Kernels of `rlox_grpo`: group advantages and batch layout.
//!
//! They take and return slices, vectors and [`ragged::Ragged`]. Each is deterministic for any number of threads.

pub mod advantages;
pub mod batch;
pub mod error;
pub mod ragged;
pub mod threads;
