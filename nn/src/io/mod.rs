//! Reading and writing files: safetensors for tensors, idx for data sets.
//!
//! A damaged, truncated or hostile file is [`Error::File`], which names the file and what is wrong with it. Nothing
//! here panics on any bytes, and no length that a file claims is allocated before the file has been seen to have it.
//! Files are written whole or not at all ([`replace`]): into a temporary file in the same folder, which then takes the name.

use std::fs::File;
use std::path::Path;

use forebay_core::error::{Error, Result};

pub mod idx;
pub mod safetensors;

pub use forebay_core::atomic_write::{write_atomic, write_atomic_unsynced, write_bytes};

/// Opens a file for reading.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::file(path, format!("cannot be opened: {e}")))
}
