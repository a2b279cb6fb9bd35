//! Errors of the allocator.

use super::source::SourceError;
use super::{MemoryGrowth, OutOfMemory};
pub use crate::atomic_write::FileError;
pub use crate::environment::InvalidVariable;

/// Result with an [`Error`] of the allocator.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of pools, their configuration and their snapshots.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool could not serve a request.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// Allocated memory grows from step to step.
    #[error(transparent)]
    MemoryGrowth(#[from] Box<MemoryGrowth>),
    /// A memory snapshot cannot be read.
    #[error("{0}")]
    Snapshot(String),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] SourceError),
    /// A file is damaged, or could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A configuration string is invalid.
    #[error("{0}")]
    InvalidConfig(String),
    /// An argument is invalid.
    #[error("{op}: {message}")]
    Argument {
        /// Name of the function.
        op: &'static str,
        /// Fault and expected value.
        message: String,
    },
    /// The owner of the pool could not move a block.
    #[error("{0}")]
    Move(Box<dyn std::error::Error + Send + Sync>),
}

impl From<InvalidVariable> for Error {
    fn from(error: InvalidVariable) -> Self {
        Self::InvalidConfig(error.0)
    }
}

impl Error {
    pub(crate) fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Self::Argument { op, message: message.into() }
    }

    /// Reports whether this is an out-of-memory error.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory(_))
    }

    /// Returns the out-of-memory report.
    ///
    /// # Errors
    /// Returns any other error unchanged.
    pub fn into_out_of_memory(self) -> Result<Box<OutOfMemory>> {
        match self {
            Self::OutOfMemory(report) => Ok(report),
            other => Err(other),
        }
    }
}
