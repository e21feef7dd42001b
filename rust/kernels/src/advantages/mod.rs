//! Advantages of rewards within their group, and their broadcast over tokens.

mod broadcast;
mod normalise;
mod real;
mod sums;

pub use broadcast::{broadcast, broadcast_len};
pub use normalise::{Baseline, Normalisation, Scaling, group_advantages, ragged_group_advantages};
pub use real::Real;
