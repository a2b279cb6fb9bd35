//! A program of an operating system.

use std::ffi::OsString;

/// If true, a thread may wait for the device or for another thread.
pub const CAN_BLOCK: bool = true;

/// Returns the id of this process.
#[must_use]
pub fn process_id() -> u32 {
    std::process::id()
}

/// Returns the environment variables.
pub fn variables() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os()
}

/// Runs a function when the process ends, after `main` has returned or `exit` was called. Functions run in reverse
/// order, so one that is registered after a library was loaded runs before the library destroys its globals.
pub fn run_at_exit(call: extern "C" fn()) {
    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> std::ffi::c_int;
    }
    // SAFETY: C's function, with which Rust's standard library is linked; `call` takes nothing, and a panic in it
    // ends the process. If `atexit` fails, `call` does not run.
    _ = unsafe { atexit(call) };
}
