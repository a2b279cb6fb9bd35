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
