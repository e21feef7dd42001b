//! The budget of one answer: operations and bits, not time, so that a verdict is the same on every machine.

use std::cell::Cell;

/// Why a computation gave no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The budget is spent, or something is not computed: the answer is undecided.
    Fuel,
    /// A real number of an absolute value over 2^(2^39).
    Huge {
        /// Its sign.
        negative: bool,
    },
    /// The value does not exist: a division by zero, a logarithm of zero.
    Undefined,
    /// At this precision a ball meets a pole or a branch cut; more bits may help.
    Imprecise,
}

/// Units left. One unit is about ten nanoseconds of one core: an addition of small numbers costs 4.
#[derive(Debug)]
pub struct Fuel {
    left: Cell<u64>,
}

impl Fuel {
    /// A budget of `units`.
    #[must_use]
    pub fn new(units: u64) -> Self {
        Self { left: Cell::new(units) }
    }

    /// Take `units`.
    ///
    /// # Errors
    /// [`Stop::Fuel`] when fewer are left; then none are left.
    pub fn spend(&self, units: u64) -> Result<(), Stop> {
        match self.left.get().checked_sub(units) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => {
                self.left.set(0);
                Err(Stop::Fuel)
            }
        }
    }

    /// What is left.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left.get()
    }

    /// The cost of multiplying or dividing numbers of `left` and `right` bits: schoolbook words, as dashu does at
    /// these sizes (its Karatsuba starts at 32 words and only makes it cheaper).
    #[must_use]
    pub fn product(left: usize, right: usize) -> u64 {
        let words = |bits: usize| 1 + bits as u64 / 64;
        4 + words(left).saturating_mul(words(right)) / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuel_runs_out_once_and_stays_out() {
        let fuel = Fuel::new(10);
        assert_eq!(fuel.spend(4), Ok(()));
        assert_eq!(fuel.left(), 6);
        assert_eq!(fuel.spend(7), Err(Stop::Fuel));
        assert_eq!(fuel.spend(1), Err(Stop::Fuel));
    }
}
