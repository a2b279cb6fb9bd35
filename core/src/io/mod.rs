//! Reading and writing files: safetensors for tensors, idx for data sets.
//!
//! A damaged, truncated or hostile file gives [`Error::File`], which names the file and the problem. Nothing
//! here panics on any input. A length that a file claims is allocated only after the file is known to have
//! it. Files are replaced atomically ([`write_atomic`]).

use std::fs::File;
use std::path::Path;

use crate::error::{Error, Result};

mod atomic_write;
pub mod idx;
pub mod safetensors;

pub use atomic_write::{write_atomic, write_atomic_unsynced, write_bytes};

/// Creates an error about a file.
pub(crate) fn file_error(path: impl AsRef<Path>, message: impl Into<String>) -> Error {
    Error::File { path: path.as_ref().display().to_string(), message: message.into() }
}

/// Opens a file for reading.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| file_error(path, format!("cannot be opened: {e}")))
}
