//! Virtual X server, and a program that moves its pointer, for the test of the application.

use super::apt::Apt;
use super::vulkan::library_folders;
use super::{Dependency, files_below, is_in_path, populate_atomically};
use crate::environment::Environment;
use anyhow::{Context, Result, bail};
use std::path::Path;

/// Both exit with an error when they print their versions.
const PROGRAMS: [&str; 2] = ["Xvfb", "xdotool"];
/// Packages of the two programs, and the libraries that a window loads when it opens.
const PACKAGES: [&str; 6] = ["xvfb", "xdotool", "libx11-xcb1", "libxcursor1", "libxi6", "libxkbcommon-x11-0"];
/// Compiler of keymaps. The server starts it from this place only.
const KEYMAP_COMPILER: &str = "/usr/bin/xkbcomp";

/// Finds Xvfb and xdotool, or installs them as root, or unpacks them into a private folder.
pub(crate) fn find_or_fetch(apt: &Apt, private: &Path) -> Result<Dependency> {
    if PROGRAMS.iter().all(|program| is_in_path(program)) {
        return Ok(Dependency::new("the machine's own Xvfb and xdotool"));
    }
    let folder = private.join("xvfb");
    if !folder.is_dir() && apt.can_install() {
        println!("setup: installing xvfb and xdotool");
        apt.install(&PACKAGES)?;
        return Ok(Dependency::new("installed Xvfb and xdotool"));
    }
    if !Path::new(KEYMAP_COMPILER).exists() {
        bail!(
            "Xvfb needs {KEYMAP_COMPILER}; install xvfb and xdotool (Debian, Ubuntu: apt-get install xvfb xdotool)"
        );
    }
    populate_atomically(&folder, "Xvfb and xdotool (2 MB)", |folder| {
        apt.unpack(&apt.resolve_dependencies(&PACKAGES)?, &[], folder)
    })
    .context("Debian's packages xvfb and xdotool could not be fetched")?;
    let files = files_below(&folder);
    let programs = Environment::default().prepend("PATH", folder.join("usr/bin"));
    let environment = library_folders(&files)
        .into_iter()
        .fold(programs, |all, folder| all.prepend("LD_LIBRARY_PATH", folder));
    Ok(Dependency { environment, ..Dependency::new(format!("unpacked: {}", folder.display())) })
}
