//! When a kernel may use the thread pool.

use std::sync::OnceLock;

static POOL_OWNER: OnceLock<u32> = OnceLock::new();

/// Whether `work` items are worth splitting over threads when one task should hold about `grain` of them.
///
/// Never in a forked child of a process that has used the pool: its worker threads did not survive the fork, and
/// waiting for them would hang for ever. The child computes the same result on one thread.
#[must_use]
pub fn worth_splitting(work: usize, grain: usize) -> bool {
    work > grain && *POOL_OWNER.get_or_init(std::process::id) == std::process::id() && rayon::current_num_threads() > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_work_stays_on_one_thread() {
        assert!(!worth_splitting(10, 10));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        assert!(pool.install(|| worth_splitting(11, 10)));
    }
}
