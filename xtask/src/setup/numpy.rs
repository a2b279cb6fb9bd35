//! NumPy, with which the Python module exchanges tensors in its test.

use super::apt::Apt;
use super::{Dependency, populate_atomically, wheel};
use crate::process;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// The first version that exchanges tensors by DLPack 1.0.
const REQUIREMENT: &str = "numpy>=2.1";
const CHECK: &str = "import numpy; assert numpy.lib.NumpyVersion(numpy.__version__) >= '2.1.0'";

/// Finds Python's own NumPy, or installs it into a private folder.
pub(crate) fn find_or_fetch(apt: &Apt, private: &Path) -> Result<Dependency> {
    if process::succeeds("python3", &["-c", CHECK]) {
        return Ok(Dependency::new("Python's own NumPy"));
    }
    let folder = private.join("numpy");
    populate_atomically(&folder, "NumPy (17 MB)", |folder| {
        let mut pip = Command::new(wheel::python_with_pip(apt)?);
        pip.args(["-m", "pip", "install", "--quiet", "--only-binary=:all:", "--target"]).arg(folder);
        process::run_captured(pip.arg(REQUIREMENT)).map(drop)
    })
    .with_context(|| format!("{REQUIREMENT} could not be fetched; install it with pip"))?;
    Ok(Dependency::new(folder.display().to_string())
        .map_environment(|all| all.prepend("PYTHONPATH", &folder)))
}
