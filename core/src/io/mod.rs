//! Reading and writing files: safetensors for tensors, idx for data sets.
//!
//! A damaged, truncated or hostile file is [`Error::File`], which names the file and what is wrong with it. Nothing
//! here panics on any bytes, and no length that a file claims is allocated before the file has been seen to have it.
//! Files are written whole or not at all: into a temporary file beside the old one, which it then replaces.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

pub mod idx;
pub mod safetensors;

/// An error about a file.
pub(crate) fn file_error(path: impl AsRef<Path>, message: impl Into<String>) -> Error {
    Error::File { path: path.as_ref().display().to_string(), message: message.into() }
}

/// Opens a file for reading.
pub(crate) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| file_error(path, format!("cannot be opened: {e}")))
}

/// Writes a file through `write`, so that `path` holds either what it held before or all of the new contents, also if
/// the machine stops midway. Makes the folder if there is none. A symbolic link stays, and its target is replaced.
///
/// # Errors
/// Those of `write`; the file cannot be written or put in place; `path` is there and no file, such as a folder or a device.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let target = fs::canonicalize(path);
    let path = target.as_deref().unwrap_or(path);
    if let Ok(there) = fs::metadata(path)
        && !there.is_file()
    {
        let what = if there.is_dir() { "a folder" } else { "no regular file" };
        return Err(file_error(path, format!("is {what}, and is not replaced; name a file")));
    }
    let failed = |what: &str, e: std::io::Error| file_error(path, format!("cannot be {what}: {e}"));
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    if let Some(folder) = folder {
        fs::create_dir_all(folder).map_err(|e| failed("written", e))?;
    }
    let Some(name) = path.file_name() else {
        return Err(file_error(path, "names no file"));
    };
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.tmp", std::process::id()));
    let temporary = Temporary(path.with_file_name(hidden));
    let file = File::create(&temporary.0).map_err(|e| failed("written", e))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    write(&mut out)?;
    let file = out.into_inner().map_err(|e| failed("written", e.into_error()))?;
    file.sync_all().map_err(|e| failed("written", e))?;
    drop(file);
    fs::rename(&temporary.0, path).map_err(|e| failed("replaced", e))
}

/// A file that is removed when this is dropped, unless it was renamed by then.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove; after an error nothing more can be done.
        let _ = fs::remove_file(&self.0);
    }
}
