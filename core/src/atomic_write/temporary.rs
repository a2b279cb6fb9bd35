//! Replacement of a file through a locked temporary file.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use fs4::{FileExt, TryLockError};
use tempfile::NamedTempFile;

use super::{FileError, write_error};
use crate::sync::LockUnpoisoned;

/// Name prefix of temporary files, by which leftovers are recognised.
const TEMPORARY_PREFIX: &str = ".forebay-";
/// Name suffix of temporary files.
const TEMPORARY_SUFFIX: &str = ".tmp";
/// Age from which a leftover is removed on file systems without locks.
const STALE_AGE: Duration = Duration::from_secs(24 * 3600);
/// Maximum number of symbolic links to follow before they count as a cycle.
const MAX_LINKS: usize = 40;

/// Replaces a file; `durable` flushes the file and its folder to disk.
pub(super) fn write_through_temporary<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
    durable: bool,
) -> Result<(), E> {
    let path = &resolve_links(path)?;
    let there = fs::metadata(path).ok();
    if let Some(there) = there.as_ref().filter(|there| !there.is_file()) {
        let what = if there.is_dir() { "a folder" } else { "not a regular file" };
        return Err(FileError::new(path, format!("is {what}, and is not replaced; name a file")).into());
    }
    if path.file_name().is_none() {
        return Err(FileError::new(path, "names no file").into());
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| write_error(path, "written", &e))?;
    if durable || is_first_write_to(folder) {
        remove_stale_temporaries(folder);
    }
    let temporary = create_temporary(folder).map_err(|e| write_error(path, "written", &e))?;
    let mut out = BufWriter::with_capacity(1 << 20, temporary.as_file());
    write(&mut out)?;
    out.flush().map_err(|e| write_error(path, "written", &e))?;
    drop(out);
    if let Some(there) = there {
        // May fail on a file system without permissions or for another owner's file. The new file then has
        // default permissions.
        let _ = temporary.as_file().set_permissions(there.permissions());
    }
    if durable {
        temporary.as_file().sync_all().map_err(|e| write_error(path, "written", &e))?;
    }
    temporary.persist(path).map_err(|e| write_error(path, "replaced", &e.error))?;
    if durable {
        sync_folder(folder);
    }
    Ok(())
}

/// Follows symbolic links, also to a file that does not exist yet.
fn resolve_links(path: &Path) -> Result<PathBuf, FileError> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(to) = fs::read_link(&path) else { return Ok(path) };
        // `join` resolves a relative link against its own folder, and lets an absolute link replace the path.
        path = path.parent().unwrap_or(Path::new("")).join(to);
    }
    Err(FileError::new(path, "is a circle of symbolic links; name a file"))
}

/// Creates a locked temporary file; the lock marks the file as in use.
fn create_temporary(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY_PREFIX).suffix(TEMPORARY_SUFFIX).rand_bytes(12);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Default permissions of a new file, subject to the process's umask.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    loop {
        let file = builder.tempfile_in(folder)?;
        match FileExt::try_lock(file.as_file()) {
            // Another process removed the file as a leftover before the lock was taken, or is about to.
            Err(TryLockError::WouldBlock) => continue,
            Ok(()) if fs::symlink_metadata(file.path()).is_err() => continue,
            // A file system without locks recognises leftovers by age.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(file),
        }
    }
}

/// Removes temporary files of writers that have ended. Failures are ignored, because the next write tries
/// again.
fn remove_stale_temporaries(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let ours = name
            .to_str()
            .is_some_and(|name| name.starts_with(TEMPORARY_PREFIX) && name.ends_with(TEMPORARY_SUFFIX));
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
        let abandoned = match FileExt::try_lock(&file) {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(_)) => is_stale(&file),
        };
        // The lock is held until the file is removed, so a writer that has just created it notices and
        // creates another.
        if abandoned && fs::remove_file(&path).is_ok() {
            log::debug!("{} was left by a writer that ended midway: removed", path.display());
        }
    }
}

fn is_stale(file: &File) -> bool {
    let age = file.metadata().and_then(|m| m.modified()).map(|at| at.elapsed());
    age.is_ok_and(|age| age.is_ok_and(|age| age > STALE_AGE))
}

/// Reports whether this is the process's first write into a folder.
fn is_first_write_to(folder: &Path) -> bool {
    static WRITTEN_FOLDERS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    WRITTEN_FOLDERS.lock_unpoisoned().insert(folder)
}

/// Flushes the folder, which makes the rename durable. The contents are safe already, so a failure is not an
/// error.
fn sync_folder(folder: &Path) {
    if cfg!(unix) {
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        if let Err(e) = synced {
            log::debug!("{} cannot be flushed: {e}", folder.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_temporary_files_of_dead_writers_are_removed() -> Result<(), FileError> {
        let folder = tempfile::tempdir().map_err(|e| FileError::new("tempdir", e.to_string()))?;
        let folder = folder.path();
        let live = create_temporary(folder).expect("a file can be made");
        let (left, others) = (folder.join(".forebay-abc.tmp"), folder.join(".other-abc.tmp"));
        for path in [&left, &others] {
            fs::write(path, b"half").expect("it can be written");
        }
        for quick in [false, true] {
            let path = folder.join("file");
            if quick { write_atomic_unsynced(&path, |_| Ok(()))? } else { write_bytes(&path, b"whole")? }
        }
        assert!(!left.exists() && others.exists() && live.path().exists(), "{:?}", names(folder));
        drop(live);
        assert_eq!(names(folder), [".other-abc.tmp", "file"]);
        Ok(())
    }

    #[test]
    fn concurrent_writers_of_one_path_leave_one_complete_file() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let path = folder.path().join("file");
        std::thread::scope(|scope| {
            for writer in 0..8u8 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..6 {
                        // Pieces larger than the buffer make the writers interleave.
                        let piece = vec![writer; 1 << 20];
                        let pieces = |out: &mut dyn Write| {
                            for _ in 0..2 {
                                out.write_all(&piece).map_err(|e| write_error(path, "written", &e))?;
                            }
                            Ok::<_, FileError>(())
                        };
                        write_atomic_unsynced(path, pieces).expect("a writer fails");
                        let read = fs::read(path).expect("it is there");
                        assert!(read.len() == 2 << 20 && read.iter().all(|b| *b == read[0]), "torn");
                    }
                });
            }
        });
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn a_failed_write_leaves_no_file() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let path = folder.path().join("file");
        let error = write_atomic(&path, |_| Err(FileError::new("input", "stopped")));
        assert!(error.is_err());
        let panicked = std::panic::catch_unwind(|| write_atomic::<FileError>(&path, |_| panic!("midway")));
        assert!(panicked.is_err());
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[cfg(unix)]
    #[test]
    fn permissions_and_symbolic_links_are_kept() -> Result<(), FileError> {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().expect("a folder can be made");
        let (file, link) = (folder.path().join("below/file"), folder.path().join("link"));
        symlink("below/file", &link).expect("a link can be made");
        write_bytes(&link, b"new")?;
        let mode = |path: &Path| fs::metadata(path).map(|m| m.permissions().mode() & 0o777).unwrap_or(0);
        let fresh = folder.path().join("fresh");
        fs::write(&fresh, b"").expect("it can be written");
        assert_eq!(mode(&file), mode(&fresh), "a new file has the permissions of new files");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("it is ours");
        write_bytes(&link, b"newer")?;
        assert_eq!((mode(&file), fs::read(&file).ok()), (0o640, Some(b"newer".to_vec())));
        assert!(fs::symlink_metadata(&link).is_ok_and(|m| m.is_symlink()));
        symlink("circle", folder.path().join("circle")).expect("a link can be made");
        assert!(
            write_bytes(folder.path().join("circle"), b"")
                .is_err_and(|e| e.to_string().contains("circle of"))
        );
        Ok(())
    }
}
