//! Differences between a program, which has threads and files, and a browser page, which has neither.

#[cfg_attr(target_family = "wasm", path = "web.rs")]
mod native;

pub use native::{CAN_BLOCK, process_id, run_at_exit, variables};
pub use web_time::{Instant, SystemTime, UNIX_EPOCH};

/// Advice in errors of calls that block, on a platform where [`CAN_BLOCK`] is false.
pub const CANNOT_BLOCK: &str = "a browser page cannot wait for the device; await the asynchronous call instead, such \
                                as `to_vec_async` for `to_vec`";
