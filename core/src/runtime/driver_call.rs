//! Calls of a driver that may run callbacks of the program on the calling thread.

use std::cell::Cell;

thread_local! {
    static DRIVER_CALLS: Cell<u32> = const { Cell::new(0) };
}

/// Calls a driver that may run callbacks of the program on this thread. The caller may hold locks of the device. A
/// tensor that a callback drops is therefore freed by the device's thread, and not here.
pub fn call_driver<T>(call: impl FnOnce() -> T) -> T {
    let _guard = CallGuard::new();
    call()
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
