//! Chromium, for the test of the browser page.

use super::apt::Apt;
use super::{Dependency, files_below, populate_atomically};
use crate::process;
use crate::setup::vulkan::library_folders;
use anyhow::{Context, Result};
use std::path::Path;

/// Finds Chromium, or unpacks it into a private folder. The description is the program.
pub(crate) fn ensure_chromium(apt: &Apt, private: &Path) -> Result<Dependency> {
    if let Some(name) = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| process::succeeds(name, &["--version"]))
    {
        return Ok(Dependency::new(name));
    }
    let folder = private.join("browser");
    populate_atomically(&folder, "Chromium (110 MB)", |folder| {
        apt.unpack(&apt.resolve_dependencies(&["chromium"])?, &[], folder)
    })
    .context("Debian's package chromium could not be fetched")?;
    let files = files_below(&folder);
    let libraries = library_folders(&files);
    let program = Dependency::new(folder.join("usr/lib/chromium/chromium").display().to_string());
    Ok(program.map_environment(|environment| {
        libraries.iter().fold(environment, |all, folder| all.prepend("LD_LIBRARY_PATH", folder))
    }))
}
