//! Detection of installed libraries and drivers, without loading them.

use crate::process;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Properties of this machine that decide what is fetched, and how.
pub(crate) struct Machine {
    /// True if packages can be installed system-wide.
    pub(crate) is_root: bool,
    /// Folders of shared libraries, in the order of search: `LD_LIBRARY_PATH` first.
    library_folders: Vec<PathBuf>,
    /// Contents of the dynamic linker's cache.
    cached_libraries: HashMap<String, PathBuf>,
    /// Folders of Vulkan driver manifests.
    driver_folders: Vec<PathBuf>,
    /// Manifests that the user has named; they replace all others.
    named_drivers: Option<Vec<PathBuf>>,
}

impl Machine {
    pub(crate) fn detect() -> Self {
        let paths = |name: &str| -> Option<Vec<PathBuf>> {
            let value = std::env::var_os(name).filter(|value| !value.is_empty())?;
            Some(std::env::split_paths(&value).collect())
        };
        let mut library_folders = paths("LD_LIBRARY_PATH").unwrap_or_default();
        library_folders.extend(multiarch_folders());
        library_folders.extend(["/usr/local/lib", "/usr/lib64", "/usr/lib", "/lib"].map(PathBuf::from));

        let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or("/nonexistent".into());
        let mut bases = paths("XDG_CONFIG_DIRS").unwrap_or_else(|| vec!["/etc/xdg".into()]);
        bases.push("/etc".into());
        bases.extend([paths("XDG_DATA_HOME").and_then(|all| all.into_iter().next())].into_iter().flatten());
        bases.push(home.join(".local/share"));
        bases.extend(paths("XDG_DATA_DIRS").unwrap_or_default());
        bases.extend(["/usr/local/share", "/usr/share"].map(PathBuf::from));

        Self {
            is_root: process::run_captured(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0"),
            library_folders,
            cached_libraries: linker_cache(),
            driver_folders: bases.into_iter().map(|base| base.join("vulkan/icd.d")).collect(),
            named_drivers: paths("VK_DRIVER_FILES").or_else(|| paths("VK_ICD_FILENAMES")),
        }
    }

    /// Returns the path of a shared library, if the dynamic linker would find it.
    pub(crate) fn find_library(&self, name: &str) -> Option<PathBuf> {
        let in_folders =
            self.library_folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
        in_folders.or_else(|| self.cached_libraries.get(name).filter(|path| path.exists()).cloned())
    }

    /// Returns the manifests of all Vulkan drivers whose library exists.
    pub(crate) fn vulkan_drivers(&self) -> Vec<PathBuf> {
        let manifests = match &self.named_drivers {
            Some(named) => named.clone(),
            None => self.driver_folders.iter().flat_map(|folder| super::files_below(folder)).collect(),
        };
        let usable = |path: &PathBuf| {
            let Ok(text) = std::fs::read_to_string(path) else { return false };
            super::manifest::library_path(&text).is_some_and(|library| match library.contains('/') {
                true => path.with_file_name("").join(library).exists(),
                false => self.find_library(library).is_some(),
            })
        };
        manifests
            .into_iter()
            .filter(|path| path.extension().is_some_and(|end| end == "json"))
            .filter(usable)
            .collect()
    }

    /// Reports whether NVIDIA's driver is installed.
    pub(crate) fn has_cuda_driver(&self) -> bool {
        self.find_library("libcuda.so.1").is_some() || self.find_library("libcuda.so").is_some()
    }

    /// Reports whether programs find CUDA's toolkit, in a version that fits the driver.
    pub(crate) fn has_nvrtc(&self) -> bool {
        ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
            .iter()
            .any(|name| self.find_library(name).is_some())
    }

    /// Reports whether there is a GPU, even without a driver.
    pub(crate) fn has_gpu(&self) -> bool {
        let render_node =
            |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("renderD");
        Path::new("/dev/nvidiactl").exists()
            || std::fs::read_dir("/dev/dri").into_iter().flatten().flatten().any(render_node)
    }
}

/// Returns folders such as `/usr/lib/x86_64-linux-gnu`.
fn multiarch_folders() -> Vec<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    folders
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().contains("-linux-")))
        .collect()
}

fn linker_cache() -> HashMap<String, PathBuf> {
    let printed = ["ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig"]
        .iter()
        .find_map(|program| process::run_captured(Command::new(program).arg("-p")).ok());
    printed.map(|text| parse_linker_cache(&text)).unwrap_or_default()
}

/// Parses lines such as `libvulkan.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libvulkan.so.1`.
fn parse_linker_cache(text: &str) -> HashMap<String, PathBuf> {
    let mut cache = HashMap::new();
    for line in text.lines() {
        if let Some((name, path)) = line.trim().split_once(" => ") {
            let name = name.split_whitespace().next().unwrap_or_default();
            cache.entry(name.to_string()).or_insert_with(|| PathBuf::from(path));
        }
    }
    cache
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linkers_cache_is_read() {
        let text = "2 libs found in cache `/etc/ld.so.cache'\n\
                    \tlibvulkan.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libvulkan.so.1\n\
                    \tlibvulkan.so.1 (libc6) => /usr/lib/i386-linux-gnu/libvulkan.so.1\n";
        let cache = parse_linker_cache(text);
        assert_eq!(cache.len(), 1);
        assert_eq!(cache["libvulkan.so.1"], PathBuf::from("/usr/lib/x86_64-linux-gnu/libvulkan.so.1"));
    }
}
