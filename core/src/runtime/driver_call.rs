//! Calls of a driver that may run callbacks of the program on the calling thread.

use std::cell::Cell;

use crate::error::{Result, fail_if};

thread_local! {
    static DRIVER_CALLS: Cell<u32> = const { Cell::new(0) };
}

/// Calls a driver that may run callbacks of the program on this thread. The caller may hold locks of the device. A
/// tensor that a callback drops is therefore freed by the device's thread, and not here.
pub fn call_driver<T>(call: impl FnOnce() -> T) -> T {
    let _guard = CallGuard::new();
    call()
}

/// Fails if this thread is inside a driver call, so that `op` is called by a callback of the program. The call around
/// it may hold locks that `op` takes.
///
/// # Errors
/// [`Error::Argument`](crate::error::Error::Argument), which names `op`.
#[inline]
pub fn check_not_in_callback(op: &'static str) -> Result<()> {
    fail_if!(is_in_driver_call();
        argument(op), "a callback of the driver, or the waker of a task, calls this inside of another call of the \
        device, which holds locks; only drop tensors there, and let another thread or a later call do the rest");
    Ok(())
}

/// Reports whether this thread is inside a driver call.
#[inline]
pub(crate) fn is_in_driver_call() -> bool {
    DRIVER_CALLS.get() > 0
}

/// Counts a call until it returns or a callback panics.
struct CallGuard;

impl CallGuard {
    fn new() -> Self {
        DRIVER_CALLS.set(DRIVER_CALLS.get() + 1);
        Self
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        DRIVER_CALLS.set(DRIVER_CALLS.get() - 1);
    }
}
