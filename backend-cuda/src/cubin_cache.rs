//! Compiled kernels on disk, so that a program's second start compiles nothing.
//!
//! There is one file for each kernel, named by the compiler's version and a hash of everything else that
//! decides the kernel's bytes. A kernel whose file is damaged or unreadable is compiled again.

use forebay_core::disk_cache::{CacheKey, DiskCache};

/// A version of NVRTC, major and minor.
pub(crate) type CompilerVersion = (u32, u32);

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub(crate) struct CubinCache {
    disk: DiskCache,
}

impl CubinCache {
    pub(crate) fn new(disk: DiskCache) -> Self {
        Self { disk }
    }

    /// Loads a kernel compiled by `version`; if `None`, by any version.
    pub(crate) fn load(&self, key: CubinKey, version: Option<CompilerVersion>) -> Option<Vec<u8>> {
        match version {
            Some(version) => self.disk.load(&key.file_name(version)),
            // The newest version first.
            None => {
                let names = self.disk.find_names(&key.file_prefix(), SUFFIX);
                names.iter().find_map(|name| self.disk.load(name))
            }
        }
    }

    pub(crate) fn store(&self, key: CubinKey, version: CompilerVersion, cubin: &[u8]) {
        self.disk.store(&key.file_name(version), cubin);
    }
}

/// Hash of everything that decides a kernel's bytes, except the compiler's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CubinKey(CacheKey);

const SUFFIX: &str = ".cubin";

impl CubinKey {
    /// Creates the key of CUDA C++ `source` for an architecture, such as 90.
    pub(crate) fn new(source: &str, arch: u32) -> Self {
        Self(CacheKey::new(&[&arch.to_string(), source]))
    }

    fn file_prefix(self) -> String {
        format!("{}-nvrtc", self.0)
    }

    fn file_name(self, (major, minor): CompilerVersion) -> String {
        format!("{}{major}.{minor}{SUFFIX}", self.file_prefix())
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::disk_cache::DiskCache;

    use super::{CubinCache, CubinKey};

    #[test]
    fn cached_code_is_found_with_and_without_a_compiler() {
        let folder = std::env::temp_dir().join(format!("forebay-cubins-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let (cache, key) =
            (CubinCache::new(DiskCache::in_folder(Some(&folder))), CubinKey::new("kernel", 90));
        assert_eq!(cache.load(key, None), None);
        cache.store(key, (13, 0), b"code");
        assert_eq!(cache.load(key, Some((13, 0))).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.load(key, None).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.load(key, Some((13, 1))), None);
        assert_eq!(cache.load(CubinKey::new("kernel", 80), None), None);
        assert_eq!(cache.load(CubinKey::new("kernels", 90), None), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
