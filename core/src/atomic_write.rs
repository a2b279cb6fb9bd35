//! Atomic replacement of files. Every file that this project writes goes through [`write_atomic`].

use std::io::{self, Write};
use std::path::Path;

#[cfg_attr(target_family = "wasm", path = "atomic_write/absent.rs")]
mod temporary;

use temporary::write_through_temporary;

use crate::printable::printable;

/// Error about a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub struct FileError {
    /// Path of the file.
    pub path: String,
    /// Fault of the file.
    pub message: String,
}

impl FileError {
    /// Creates an error; `message` continues the sentence that begins with the path, and may quote the file.
    pub fn new(path: impl AsRef<Path>, message: impl AsRef<str>) -> Self {
        let path = path.as_ref().display().to_string();
        Self { path: printable(&path).into_owned(), message: printable(message.as_ref()).into_owned() }
    }
}

/// Writes a file through `write`. After any crash, `path` holds either its previous contents or all of the
/// new contents. Creates the folder if necessary. A symbolic link stays, and its target is replaced.
///
/// The bytes go to a temporary file with a unique name in the same folder, which is then renamed. Concurrent
/// writers of one path, also in several processes, do not interfere: the last one to finish wins. Temporary
/// files of killed writers are removed by the next write into the folder. Those of running writers are locked
/// and stay.
///
/// # Errors
/// `write` fails, or the file cannot be written or renamed. Also fails if `path` exists and is not a regular
/// file.
pub fn write_atomic<E: From<FileError>>(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    write_through_temporary(path.as_ref(), write, true)
}

/// Replaces a file like [`write_atomic`], but without flushing the file and its folder to disk. Suitable for
/// files that can be regenerated. A system crash may leave the file damaged, so its reader must detect
/// damage. Leftovers are removed once for each process and folder.
pub fn write_atomic_unsynced<E: From<FileError>>(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    write_through_temporary(path.as_ref(), write, false)
}

/// Replaces a file by these bytes. See [`write_atomic`].
pub fn write_bytes(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> Result<(), FileError> {
    let path = path.as_ref();
    write_atomic(path, |out| out.write_all(bytes.as_ref()).map_err(|e| write_error(path, "written", &e)))
}

fn write_error(path: &Path, what: &str, e: &io::Error) -> FileError {
    FileError::new(path, format!("cannot be {what}: {e}"))
}
