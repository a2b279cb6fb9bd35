//! Reading and writing files: safetensors for tensors, idx for data sets.
//!
//! A damaged, truncated or hostile file gives [`Error::File`], which names the file and the problem. Nothing
//! here panics on any input. A length that a file claims is allocated only after the file is known to have
//! it. Files are replaced atomically ([`write_atomic`]); a file that cannot be written is an error. `#
//! Errors` sections omit those of linked methods.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::{Error, Result};
use forebay_core::atomic_write;
#[doc(inline)]
pub use forebay_core::printable::printable;

pub mod idx;
pub mod safetensors;

/// Replaces a file atomically through `write`, whose error it returns: see [`atomic_write`].
pub fn write_atomic(path: impl AsRef<Path>, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    atomic_write::write_atomic(path, write)
}

/// Replaces a file atomically by these bytes.
pub fn write_bytes(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> Result<()> {
    Ok(atomic_write::write_bytes(path, bytes)?)
}

pub(crate) fn open_file(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::file(path, format!("cannot be opened: {e}")))
}
