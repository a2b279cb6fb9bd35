//! A browser page: one thread, which runs until it returns to the event loop. The standard library panics where it
//! has no implementation.

use std::ffi::OsString;

/// If true, a thread may wait for the device or for another thread.
pub const CAN_BLOCK: bool = false;

/// Returns a fixed id, since a page has no process of its own.
#[must_use]
pub fn process_id() -> u32 {
    0
}

/// Returns no variables.
pub fn variables() -> impl Iterator<Item = (OsString, OsString)> {
    std::iter::empty()
}

/// Does nothing: a page has no end of its process.
pub fn run_at_exit(_: extern "C" fn()) {}
