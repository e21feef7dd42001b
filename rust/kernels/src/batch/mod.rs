//! Batch layout: padding, packing into micro-batches, and shared prompts.

pub mod layout;
pub mod packing;
pub mod padding;
pub mod prefix;
