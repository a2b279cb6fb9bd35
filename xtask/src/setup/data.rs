//! Data set of the first example: Fashion-MNIST.

use super::apt::Apt;
use super::{Dependency, populate_atomically};
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

const PACKAGE: &str = "dataset-fashion-mnist";
pub(crate) const VARIABLE: &str = "FOREBAY_DATA";
const FILES: [&str; 4] = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
];

/// Finds the data set: the user's folder, the system's, a downloaded one, or the embedded subset.
pub(crate) fn find_or_fetch(apt: &Apt, private: &Path, shipped: &Path) -> Result<Dependency> {
    if let Some(folder) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return Ok(Dependency::new(format!("{VARIABLE}={}", folder.display())));
    }
    const SYSTEM_PATH: &str = "usr/share/datasets/fashion-mnist";
    let system = Path::new("/").join(SYSTEM_PATH);
    if is_complete(&system) {
        return Ok(dependency_at("Fashion-MNIST", system));
    }
    let folder = private.join("data");
    let why = match populate_atomically(&folder, "Fashion-MNIST (31 MB)", |folder| {
        apt.unpack(&[PACKAGE], &[&format!("./{SYSTEM_PATH}/*")], folder)
    }) {
        Ok(()) if is_complete(&folder.join(SYSTEM_PATH)) => {
            return Ok(dependency_at("Fashion-MNIST", folder.join(SYSTEM_PATH)));
        }
        Ok(()) => format!("{} is incomplete: remove it to fetch it again", folder.display()),
        Err(error) => format!("Debian's package {PACKAGE} could not be fetched: {error:#}"),
    };
    let small = shipped.join("fashion-small");
    if !is_complete(&small) {
        bail!("{why}; and {} is incomplete", small.display());
    }
    Ok(dependency_at(&format!("the embedded subset of Fashion-MNIST ({why})"), small))
}

/// Reports whether a folder contains all files of the data set.
pub(crate) fn is_complete(folder: &Path) -> bool {
    FILES.iter().all(|file| folder.join(file).is_file())
}

fn dependency_at(what: &str, folder: PathBuf) -> Dependency {
    Dependency::new(format!("{what}, {}", folder.display())).map_environment(|all| all.set(VARIABLE, &folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_subset_is_complete() {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../nn/data/fashion-small");
        assert!(is_complete(&shipped));
        assert!(!is_complete(Path::new("/nonexistent")));
    }
}
