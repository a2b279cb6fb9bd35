//! NVRTC: the compiler that turns the kernels into code for NVIDIA's cards, needed even where there is no card.

use super::apt::Apt;
use super::machine::Machine;
use super::{Ready, fill, wheel};
use anyhow::{Context, Result, bail};
use std::path::Path;

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
    fill(&folder, "NVRTC (90 MB)", |folder| wheel::unpack(apt, WHEEL, EXTRACT, folder)).with_context(
        || format!("the wheel {WHEEL} cannot be had; unpack it yourself into {}", folder.display()),
    )?;
    let library = folder.join(LIBRARY);
    if !library.exists() {
        bail!("{} is not there: remove the folder to fetch it again", library.display());
    }
    Ok(Ready::new(library.display().to_string()).with(|all| all.prepend("LD_LIBRARY_PATH", &folder)))
}
