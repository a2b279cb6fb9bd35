//! GNU's dlltool for Windows: rustc writes import libraries with it, also when it only checks.

use super::apt::Apt;
use super::{Dependency, is_in_path, populate_atomically};
use crate::environment::Environment;
use anyhow::{Context, Result};
use std::path::Path;

const PACKAGE: &str = "binutils-mingw-w64-x86-64";
/// Program that rustc starts, and the assembler that this program starts.
const PROGRAMS: [&str; 2] = ["x86_64-w64-mingw32-dlltool", "x86_64-w64-mingw32-as"];

/// Reports whether a target's import libraries need dlltool.
pub(super) fn is_needed(target: &str) -> bool {
    target == "x86_64-pc-windows-gnu" && !cfg!(windows)
}

/// Finds dlltool and its assembler, or unpacks Debian's into a private folder.
pub(super) fn find_or_fetch(apt: &Apt, private: &Path) -> Result<Dependency> {
    if PROGRAMS.iter().all(|program| is_in_path(program)) {
        return Ok(Dependency::new("the machine's own dlltool"));
    }
    let folder = private.join("dlltool");
    populate_atomically(&folder, "GNU's dlltool for Windows (3 MB)", |folder| {
        let files = PROGRAMS.map(|program| format!("./usr/bin/{program}"));
        apt.unpack(&[PACKAGE], &files.each_ref().map(String::as_str), folder)
    })
    .with_context(|| format!("{} could not be fetched; install {PACKAGE} (Debian, Ubuntu)", PROGRAMS[0]))?;
    let environment = Environment::default().prepend("PATH", folder.join("usr/bin"));
    Ok(Dependency { environment, ..Dependency::new(format!("unpacked: {}", folder.display())) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_targets_of_mingw_need_the_tool() {
        assert!(is_needed("x86_64-pc-windows-gnu"));
        assert!(!is_needed("x86_64-pc-windows-msvc"));
        assert!(!is_needed("aarch64-unknown-linux-gnu"));
    }

    #[test]
    fn a_tool_that_cannot_be_fetched_names_its_package() {
        let folder = std::env::temp_dir().join(format!("forebay-dlltool-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("file");
        std::fs::write(&file, "").unwrap();
        // Nothing can be unpacked below a file.
        let found = find_or_fetch(&Apt::new(folder.join("apt"), false), &file);
        let is_installed = PROGRAMS.iter().all(|program| is_in_path(program));
        let error = found.err().map(|error| format!("{error:#}"));
        assert_eq!(error.is_none(), is_installed);
        assert!(is_installed || error.unwrap().contains(PACKAGE));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
