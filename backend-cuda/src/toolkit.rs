//! Loads the CUDA toolkit's libraries from folders that the loader does not search.
//!
//! The loader often does not search a toolkit in `/usr/local/cuda` or in `CUDA_HOME`. A library that has been
//! loaded from its folder once is found by its name from then on.

use std::path::{Path, PathBuf};
use std::sync::Once;

use cudarc::{cublaslt, nvrtc};

/// Loads NVRTC from a toolkit folder if the loader does not find it.
pub(crate) fn load_nvrtc() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        load_from_toolkit(nvrtc::sys::is_culib_present, &["libnvrtc-builtins.so", "libnvrtc.so"])
    });
}

/// Loads cuBLASLt from a toolkit folder if the loader does not find it.
pub(crate) fn load_cublaslt() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| load_from_toolkit(cublaslt::sys::is_culib_present, &["libcublasLt.so"]));
}

/// Loads `libraries` in order from toolkit folders until the last one is present.
fn load_from_toolkit(is_present: unsafe fn() -> bool, libraries: &[&str]) {
    // SAFETY: loading the library runs its initialisers, which do not touch the device.
    let is_found = || unsafe { is_present() };
    if !cfg!(target_os = "linux") || is_found() {
        return;
    }
    for folder in toolkit_folders() {
        for file in libraries.iter().flat_map(|library| newest_library_file(&folder, library)) {
            // SAFETY: a library of the toolkit; its initialisers do not touch the device.
            match unsafe { libloading::Library::new(&file) } {
                // The library stays loaded for the life of the process, so that the loader finds it by its name.
                Ok(library) => std::mem::forget(library),
                Err(error) => log::debug!("{}: {error}", file.display()),
            }
        }
        if is_found() {
            return;
        }
    }
}

/// Returns the toolkit folders, those that the environment names first.
fn toolkit_folders() -> impl Iterator<Item = PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    homes.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("lib64"))
}

/// Returns the newest file of a library for the supported CUDA versions, such as `libnvrtc.so.13` or
/// `libnvrtc-builtins.so.13.0`.
fn newest_library_file(folder: &Path, library: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let newest = names.filter_map(|name| Some((parse_library_version(&name, library)?, name))).max()?;
    Some(folder.join(newest.1))
}

/// Parses the version in a file name; accepts CUDA 12 and 13, whose libraries have the interface used here.
fn parse_library_version(name: &str, library: &str) -> Option<Vec<u32>> {
    let numbers = name.strip_prefix(library)?.strip_prefix('.')?.split('.').map(str::parse);
    let numbers: Vec<u32> = numbers.collect::<Result<_, _>>().ok()?;
    (12..=13).contains(numbers.first()?).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::parse_library_version;

    #[test]
    fn library_names_contain_versions() {
        assert_eq!(parse_library_version("libnvrtc.so.13", "libnvrtc.so"), Some(vec![13]));
        assert_eq!(parse_library_version("libnvrtc.so.12.9.86", "libnvrtc.so"), Some(vec![12, 9, 86]));
        assert_eq!(parse_library_version("libnvrtc.so.11", "libnvrtc.so"), None);
        assert_eq!(parse_library_version("libnvrtc.so", "libnvrtc.so"), None);
        assert_eq!(parse_library_version("libnvrtc-builtins.so.13.0", "libnvrtc.so"), None);
        assert_eq!(parse_library_version("libnvrtc.so.13.alt", "libnvrtc.so"), None);
    }
}
