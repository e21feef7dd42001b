//! Batch layout: rows of different lengths as rectangles, as micro-batches, and as shared prompts.

pub mod layout;
pub mod packing;
pub mod padding;
pub mod prefix;
