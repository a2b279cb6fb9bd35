//! Compiled kernels on disk, so that a program's second start compiles nothing.
//!
//! There is one file for each kernel, named by the compiler's version and a hash of everything else that
//! decides the kernel's bytes. A file that is damaged or unreadable counts as missing: the kernel is compiled
//! again.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::atomic_write::write_atomic_unsynced;
use forebay_core::error::{Error, Result};

/// Magic at the beginning of each file; its number is the format's version.
const MAGIC: &[u8; 16] = b"forebay cubin 1\n";
/// Bytes of the magic and the checksum.
const HEADER_BYTES: usize = MAGIC.len() + 16;

/// A version of NVRTC, major and minor.
pub(crate) type CompilerVersion = (u32, u32);

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub(crate) struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// Uses the folder `FOREBAY_CACHE_DIR` (empty: no cache), else the user's cache folder.
    pub(crate) fn from_env() -> Self {
        let folder = std::env::var_os("FOREBAY_CACHE_DIR");
        Self { folder: cache_folder(folder, std::env::var_os("XDG_CACHE_HOME"), std::env::home_dir()) }
    }

    #[cfg(test)]
    pub(crate) fn in_folder(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()) }
    }

    /// Loads a kernel compiled by `version`; if `None`, by any version.
    pub(crate) fn load(&self, key: CacheKey, version: Option<CompilerVersion>) -> Option<Vec<u8>> {
        let folder = self.folder.as_ref()?;
        if let Some(version) = version {
            return read_checked(&folder.join(key.file_name(version)));
        }
        let prefix = key.file_prefix();
        let entries = fs::read_dir(folder).ok()?.flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        // Newest version first, in the order of the names.
        names.sort_unstable_by(|a, b| b.cmp(a));
        names.retain(|name| name.to_str().is_some_and(|n| n.starts_with(&prefix) && n.ends_with(SUFFIX)));
        names.iter().find_map(|name| read_checked(&folder.join(name)))
    }

    /// Stores a kernel. Other processes find the complete file or none.
    pub(crate) fn store(&self, key: CacheKey, version: CompilerVersion, cubin: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(error) = write_checked(folder, &key.file_name(version), cubin) {
            log::debug!("compiled kernels are not cached in {}: {error}", folder.display());
        }
    }
}

/// Hash of everything that decides a kernel's bytes, except the compiler's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey(u128);

const SUFFIX: &str = ".cubin";

impl CacheKey {
    /// Creates the key of CUDA C++ `source` for an architecture, such as 90.
    pub(crate) fn new(source: &str, arch: u32) -> Self {
        let arch = arch.to_string();
        let parts = [env!("CARGO_PKG_VERSION"), &arch, source].map(str::as_bytes);
        let lengths = parts.map(|part| (part.len() as u64).to_le_bytes());
        Self(fnv1a(parts.iter().zip(&lengths).flat_map(|(part, length)| [&length[..], part])))
    }

    fn file_prefix(self) -> String {
        format!("{:032x}-nvrtc", self.0)
    }

    fn file_name(self, (major, minor): CompilerVersion) -> String {
        format!("{}{major}.{minor}{SUFFIX}", self.file_prefix())
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
    let mut bytes = fs::read(path).ok()?;
    let body = bytes.strip_prefix(MAGIC)?;
    let (checksum, cubin) = body.split_first_chunk::<16>()?;
    if *checksum != fnv1a([cubin]).to_le_bytes() {
        log::debug!("{} is damaged; its kernel is compiled again", path.display());
        return None;
    }
    Some(bytes.split_off(HEADER_BYTES))
}

fn write_checked(folder: &Path, name: &str, cubin: &[u8]) -> Result<()> {
    let path = folder.join(name);
    let parts = [MAGIC, &fnv1a([cubin]).to_le_bytes()[..], cubin];
    // The file is not synced: the checksum detects a file that a crash has damaged.
    write_atomic_unsynced(&path, |file| {
        parts.into_iter().try_for_each(|part| file.write_all(part)).map_err(|e| Error::File {
            path: path.display().to_string(),
            message: format!("cannot be written: {e}"),
        })
    })
}

/// A folder of a unit test, which begins empty and is removed when it is dropped.
#[cfg(test)]
pub(crate) struct TempFolder(pub(crate) PathBuf);

#[cfg(test)]
impl TempFolder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forebay-cuda-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }
}

#[cfg(test)]
impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::{CacheKey, DiskCache, TempFolder, cache_folder, fnv1a};

    impl TempFolder {
        fn cache(&self) -> DiskCache {
            DiskCache { folder: Some(self.0.clone()) }
        }

        fn only_file(&self) -> PathBuf {
            let mut files: Vec<_> = fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().path()).collect();
            assert_eq!(files.len(), 1, "{files:?}");
            files.remove(0)
        }
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        // The published test vectors for the empty string and "a".
        assert_eq!(fnv1a([&b""[..]]), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(fnv1a([&b"a"[..]]), 0xd228cb696f1a8caf78912b704e4a8964);
    }

    #[test]
    fn cached_code_is_found_with_and_without_a_compiler() {
        let folder = TempFolder::new("cache-found");
        let (cache, key) = (folder.cache(), CacheKey::new("kernel", 90));
        assert_eq!(cache.load(key, None), None);
        cache.store(key, (13, 0), b"code");
        assert_eq!(cache.load(key, Some((13, 0))).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.load(key, None).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.load(key, Some((13, 1))), None);
        assert_eq!(cache.load(CacheKey::new("kernel", 80), None), None);
        assert_eq!(cache.load(CacheKey::new("kernels", 90), None), None);
    }

    #[test]
    fn a_damaged_file_is_ignored_and_written_again() {
        let folder = TempFolder::new("cache-damaged");
        let (cache, key) = (folder.cache(), CacheKey::new("kernel", 90));
        cache.store(key, (13, 0), b"some code");
        let file = folder.only_file();
        let whole = fs::read(&file).unwrap();
        for length in 0..whole.len() {
            fs::write(&file, &whole[..length]).unwrap();
            assert_eq!(cache.load(key, None), None, "cut to {length} bytes");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            fs::write(&file, &bytes).unwrap();
            assert_eq!(cache.load(key, Some((13, 0))), None, "changed at {at}");
        }
        cache.store(key, (13, 0), b"some code");
        assert_eq!(cache.load(key, None).as_deref(), Some(&b"some code"[..]));
        folder.only_file();
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_error() {
        let folder = TempFolder::new("cache-file");
        fs::write(&folder.0, b"a file where the folder should be").unwrap();
        folder.cache().store(CacheKey(1), (13, 0), b"code");
        assert_eq!(folder.cache().load(CacheKey(1), None), None);
        fs::remove_file(&folder.0).unwrap();
        let none = DiskCache { folder: None };
        none.store(CacheKey(1), (13, 0), b"code");
        assert_eq!(none.load(CacheKey(1), None), None);
    }

    #[test]
    fn the_environment_names_the_folder() {
        let home = || Some(PathBuf::from("/home/a"));
        assert_eq!(cache_folder(Some("/x".into()), Some("/y".into()), home()), Some("/x".into()));
        assert_eq!(cache_folder(Some("".into()), Some("/y".into()), home()), None);
        assert_eq!(cache_folder(None, Some("/y".into()), home()), Some("/y/forebay".into()));
        assert_eq!(cache_folder(None, Some("y".into()), home()), Some("/home/a/.cache/forebay".into()));
        assert_eq!(cache_folder(None, None, None), None);
    }
}
