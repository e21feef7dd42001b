//! When a kernel may use the thread pool.

use std::error::Error;
use std::sync::OnceLock;

/// Id of the process that started the thread pool; None if the system could not create its threads.
static POOL_OWNER: OnceLock<Option<u32>> = OnceLock::new();

/// Whether to split `work` items over threads, given tasks of about `grain` items.
///
/// False in a forked child of a process that has used the pool: the pool's threads do not survive the fork, and waiting
/// for them would hang. False also if the pool cannot start. One thread computes the same result.
#[must_use]
pub fn worth_splitting(work: usize, grain: usize) -> bool {
    work > grain && *POOL_OWNER.get_or_init(start_pool) == Some(std::process::id()) && rayon::current_num_threads() > 1
}

/// Start rayon's global pool. If rayon started it at first use, it would panic if a thread cannot be created.
fn start_pool() -> Option<u32> {
    let refused = rayon::ThreadPoolBuilder::new().build_global().is_err_and(|error| error.source().is_some());
    // An error without a source means that the pool was already started.
    (!refused).then(std::process::id)
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
