//! The function of `temporary.rs` on platforms without files.

use std::io::Write;
use std::path::Path;

use super::FileError;

/// Fails: a browser page has no files.
pub(super) fn write_through_temporary<E: From<FileError>>(
    path: &Path,
    _write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
    _durable: bool,
) -> Result<(), E> {
    Err(FileError::new(path, "cannot be written: a browser page has no files; serialize to bytes").into())
}
