//! A count of the bytes that the rules look at, in builds with debug assertions: tests see work that grows faster than the
//! text, on a machine of any speed. Release builds count nothing.

use std::cell::Cell;

thread_local! {
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

/// Count `bytes` that a scan looks at; searches count up to the place they find, or the end.
#[inline]
pub fn looked_at(bytes: usize) {
    if cfg!(debug_assertions) {
        BYTES.with(|count| count.set(count.get() + bytes as u64));
    }
}

/// The bytes that the rules look at while `run` runs, on this thread.
pub fn counted(run: impl FnOnce()) -> u64 {
    let before = BYTES.with(Cell::get);
    run();
    BYTES.with(Cell::get) - before
}
