//! NVRTC: the compiler that turns the kernels into code for NVIDIA's cards, needed even where there is no card.

use super::apt::Apt;
use super::machine::Machine;
use super::{Dependency, populate_atomically, wheel};
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
pub(crate) fn find_or_fetch(machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    if let Some(library) = machine.find_library(LIBRARY) {
        return Ok(Dependency::new(format!("the machine's own, {}", library.display())));
    }
    let folder = private.join("nvrtc");
    populate_atomically(&folder, "NVRTC (90 MB)", |folder| {
        wheel::fetch_and_extract(apt, WHEEL, EXTRACT, folder)
    })
    .with_context(|| {
        format!("the wheel {WHEEL} cannot be had; unpack it yourself into {}", folder.display())
    })?;
    let library = folder.join(LIBRARY);
    if !library.exists() {
        bail!("{} is not there: remove the folder to fetch it again", library.display());
    }
    Ok(Dependency::new(library.display().to_string())
        .map_environment(|all| all.prepend("LD_LIBRARY_PATH", &folder)))
}
