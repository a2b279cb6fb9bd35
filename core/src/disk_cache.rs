//! Files under the user's cache folder: compiled kernels, and choices that were made by timing.
//!
//! A file that is damaged or unreadable counts as missing: its content is made again. So does anything else than a
//! regular file, such as a pipe, whose opening could block. Other processes find a complete file or none.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::atomic_write::{FileError, write_atomic_unsynced};
use crate::platform::CAN_BLOCK;

mod choices;

pub use choices::ChoiceCache;

/// Magic at the beginning of each file; its number is the format's version.
const MAGIC: &[u8; 16] = b"forebay cache 1\n";
/// Bytes of the magic and the checksum.
const HEADER_BYTES: usize = MAGIC.len() + 16;

/// A folder of files with checksums. Without a folder, nothing is found and nothing is stored.
#[derive(Clone, Debug)]
pub struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// Uses the folder `FOREBAY_CACHE_DIR` (empty: no cache), else the user's cache folder. A browser page has none.
    #[must_use]
    pub fn from_env() -> Self {
        if !CAN_BLOCK {
            return Self { folder: None };
        }
        let folder = std::env::var_os("FOREBAY_CACHE_DIR");
        Self { folder: cache_folder(folder, std::env::var_os("XDG_CACHE_HOME"), std::env::home_dir()) }
    }

    /// Uses this folder, or none.
    #[must_use]
    pub fn in_folder(folder: Option<&Path>) -> Self {
        Self { folder: folder.map(Path::to_owned) }
    }

    /// Returns the folder, which need not exist yet.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Loads the content of the file `name`. Returns `None` if it is missing or damaged.
    #[must_use]
    pub fn load(&self, name: &str) -> Option<Vec<u8>> {
        read_checked(&self.folder.as_ref()?.join(name))
    }

    /// Returns the names of files that begin and end with these texts, the last in alphabetical order first.
    #[must_use]
    pub fn find_names(&self, prefix: &str, suffix: &str) -> Vec<String> {
        let entries = self.folder.as_ref().and_then(|folder| fs::read_dir(folder).ok());
        let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
        let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
        names.retain(|name| name.starts_with(prefix) && name.ends_with(suffix));
        names.sort_unstable_by(|a, b| b.cmp(a));
        names
    }

    /// Stores a file. A folder that cannot be written is no error: the content is made again at the next start.
    pub fn store(&self, name: &str, content: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(error) = write_checked(folder, name, content) {
            log::debug!("{name} is not cached in {}: {error}", folder.display());
        }
    }
}

/// Hash of everything that decides the content of a file, this project's version included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheKey(u128);

impl CacheKey {
    /// Creates the key of several texts. Texts that are divided differently have different keys.
    #[must_use]
    pub fn new(texts: &[&str]) -> Self {
        let parts =
            std::iter::once(env!("CARGO_PKG_VERSION")).chain(texts.iter().copied()).map(str::as_bytes);
        let lengths: Vec<_> = parts.clone().map(|part| (part.len() as u64).to_le_bytes()).collect();
        Self(fnv1a(parts.zip(&lengths).flat_map(|(part, length)| [&length[..], part])))
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Returns the 128-bit FNV-1a hash of concatenated parts. It does not resist attacks, which the user's own
/// cache folder does not need.
fn fnv1a<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u128 {
    parts.into_iter().flatten().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, &byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
    })
}

fn cache_folder(folder: Option<OsString>, xdg: Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    match folder {
        Some(folder) if folder.is_empty() => None,
        Some(folder) => Some(PathBuf::from(folder)),
        None => {
            // By the XDG specification, a relative path is ignored.
            let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
            let caches = xdg.or_else(|| home.map(|home| home.join(".cache")))?;
            Some(caches.join("forebay"))
        }
    }
}

fn read_checked(path: &Path) -> Option<Vec<u8>> {
    // Checked before the file is opened: a pipe blocks until it has a writer, and a device may never end.
    if !fs::metadata(path).ok()?.is_file() {
        log::warn!(
            "{} is not a regular file and is not read; remove it, so that the cache is used",
            path.display()
        );
        return None;
    }
    let mut bytes = fs::read(path).ok()?;
    let content = bytes.strip_prefix(MAGIC).and_then(|body| {
        let (checksum, content) = body.split_first_chunk::<16>()?;
        (*checksum == fnv1a([content]).to_le_bytes()).then_some(())
    });
    if content.is_none() {
        log::warn!("{} is damaged or of another version; its content is made again", path.display());
        return None;
    }
    Some(bytes.split_off(HEADER_BYTES))
}

fn write_checked(folder: &Path, name: &str, content: &[u8]) -> Result<(), FileError> {
    let path = folder.join(name);
    let parts = [MAGIC, &fnv1a([content]).to_le_bytes()[..], content];
    // Not synced: the checksum detects a file that a crash has damaged.
    write_atomic_unsynced(&path, |file| {
        parts
            .into_iter()
            .try_for_each(|part| file.write_all(part))
            .map_err(|e| FileError::new(&path, format!("cannot be written: {e}")))
    })
}

#[cfg(test)]
mod tests;
