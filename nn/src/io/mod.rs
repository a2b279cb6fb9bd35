//! Reading and writing files: safetensors for tensors, idx for data sets.
//!
//! A damaged, truncated or hostile file gives [`Error::File`], which names the file and the problem. Nothing
//! here panics on any input. A length that a file claims is allocated only after the file is known to have
//! it. Files are replaced atomically ([`write_atomic`]).

use std::fs::File;
use std::path::Path;

use forebay_core::error::{Error, Result};

pub mod idx;
pub mod safetensors;

pub use forebay_core::atomic_write::{write_atomic, write_atomic_unsynced, write_bytes};

/// Creates an error about a file.

/// Opens a file for reading.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::file(path, format!("cannot be opened: {e}")))
}
