//! The memory manager (being written).
pub mod source;

/// Why a request could not be served (being written).
#[derive(Debug, thiserror::Error)]
#[error("out of memory")]
pub struct OutOfMemory;
