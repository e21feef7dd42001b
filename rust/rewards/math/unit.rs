//! Units of measure: names, dimensions and exact factors; currencies; and counted things, which have only a name.

use dashu_ratio::RBig;

/// The base dimensions, in the order of the exponents in [`Unit::dimension`].
pub const DIMENSIONS: usize = 10;

/// A product of powers of units: `m/s^2`, `cm^2`, `mph`, `dollars`, `apples`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Exponents of length, mass, time, current, temperature, amount, luminosity, information, solid angle, spare.
    pub dimension: [i8; DIMENSIONS],
    /// The value of one such unit in the coherent units of its dimension, exact.
    pub factor: RBig,
    /// Parts that nothing converts: currencies, counted things, temperature scales; by name, sorted, with exponents.
    pub named: Vec<(Box<str>, i8)>,
    /// Whether it says only that there is a unit: `units`, `square units`. Its dimension is not known.
    pub placeholder: bool,
}

impl Unit {
    /// Whether both measure the same thing, so that their factors may be compared.
    #[must_use]
    pub fn commensurable(&self, other: &Self) -> bool {
        self.dimension == other.dimension && self.named == other.named
    }
}
