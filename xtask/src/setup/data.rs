//! The data set of the first example: Fashion-MNIST.

use super::apt::Apt;
use super::{Ready, fill};
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

/// The folder the user has named, the system's, one of our own, or the small part that the repository ships.
pub(crate) fn find(apt: &Apt, private: &Path, shipped: &Path) -> Result<Ready> {
    if let Some(folder) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return Ok(Ready::new(format!("{VARIABLE}={}", folder.display())));
    }
    const PLACE: &str = "usr/share/datasets/fashion-mnist";
    let system = Path::new("/").join(PLACE);
    if complete(&system) {
        return Ok(at("Fashion-MNIST", system));
    }
    let folder = private.join("data");
    let why = match fill(&folder, "Fashion-MNIST (31 MB)", |folder| {
        apt.unpack(&[PACKAGE], &[&format!("./{PLACE}/*")], folder)
    }) {
        Ok(()) if complete(&folder.join(PLACE)) => return Ok(at("Fashion-MNIST", folder.join(PLACE))),
        Ok(()) => format!("{} is incomplete: remove it to fetch it again", folder.display()),
        Err(error) => format!("Debian's package {PACKAGE} cannot be had: {error:#}"),
    };
    let small = shipped.join("fashion-small");
    if !complete(&small) {
        bail!("{why}; and {} is incomplete", small.display());
    }
    Ok(at(&format!("the small part of Fashion-MNIST that is shipped ({why})"), small))
}

/// Whether all files of the data set are in a folder.
pub(crate) fn complete(folder: &Path) -> bool {
    FILES.iter().all(|file| folder.join(file).is_file())
}

fn at(what: &str, folder: PathBuf) -> Ready {
    Ready::new(format!("{what}, {}", folder.display())).with(|all| all.set(VARIABLE, &folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_part_is_complete() {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/data/fashion-small");
        assert!(complete(&shipped));
        assert!(!complete(Path::new("/nonexistent")));
    }
}
