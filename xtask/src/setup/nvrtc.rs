//! NVRTC: the compiler that translates kernels for NVIDIA's cards, which kernel checks need even without a card.

use super::apt::Apt;
use super::machine::Machine;
use super::{Dependency, populate_atomically, wheel};
use anyhow::{Context, Result, bail};
use std::path::Path;

/// Pinned: drivers of its own major version may reject the output of a newer NVRTC.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.0.88";
const LIBRARY: &str = "libnvrtc.so.13";
/// Extracts two libraries from a wheel; the rest is another 110 MB.
const EXTRACT: &str = "
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        file = name.rsplit('/', 1)[-1]
        if file.startswith('libnvrtc') and '.so.' in file and '.alt.' not in file:
            with open(sys.argv[2] + '/' + file, 'wb') as out:
                out.write(wheel.read(name))
";

/// Finds the machine's NVRTC, or fetches the wheel's.
pub(crate) fn find_or_fetch(machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    if let Some(library) = machine.find_library(LIBRARY) {
        return Ok(Dependency::new(format!("the machine's own, {}", library.display())));
    }
    let folder = private.join("nvrtc");
    populate_atomically(&folder, "NVRTC (90 MB)", |folder| {
        wheel::fetch_and_extract(apt, WHEEL, EXTRACT, folder)
    })
    .with_context(|| {
        format!("the wheel {WHEEL} could not be fetched; unpack it yourself into {}", folder.display())
    })?;
    let library = folder.join(LIBRARY);
    if !library.exists() {
        bail!("{} is not there: remove the folder to fetch it again", library.display());
    }
    Ok(Dependency::new(library.display().to_string())
        .map_environment(|all| all.prepend("LD_LIBRARY_PATH", &folder)))
}
