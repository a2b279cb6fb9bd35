//! Parts of the browser page's build and test: the standard library of wasm32, and Chromium.

use super::apt::Apt;
use super::{Dependency, files_below, populate_atomically};
use crate::environment::Environment;
use crate::process;
use crate::setup::vulkan::library_folders;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) const WASM_TARGET: &str = "wasm32-unknown-unknown";
/// Suite of Debian with the sources of recent compilers.
const RUST_SUITE: &str = "trixie-backports";
/// Variable by which cargo finds the sources of the standard library outside of the toolchain.
const SOURCE_VARIABLE: &str = "__CARGO_TESTS_ONLY_SRC_ROOT";

/// Finds the standard library of wasm32 in the toolchain, as a target or as sources, or fetches the sources. Cargo
/// builds sources if the environment sets [`SOURCE_VARIABLE`].
pub(crate) fn ensure_wasm_std(apt: &Apt, private: &Path) -> Result<Dependency> {
    let sysroot = process::run_captured(Command::new("rustc").args(["--print", "sysroot"]))?;
    let libraries = Path::new(sysroot.trim()).join("lib/rustlib");
    if libraries.join(WASM_TARGET).join("lib").is_dir() {
        return Ok(Dependency::new(format!("the toolchain's target {WASM_TARGET}")));
    }
    let component = libraries.join("src/rust/library");
    let source = if component.is_dir() { component } else { fetch_rust_source(apt, private)? };
    let environment = Environment::default().set(SOURCE_VARIABLE, &source).set("RUSTC_BOOTSTRAP", "1");
    Ok(Dependency { environment, ..Dependency::new(format!("built from {}", source.display())) })
}

/// Reports whether cargo must build the standard library.
pub(crate) fn builds_std(found: &Dependency) -> bool {
    found.environment.value(SOURCE_VARIABLE).is_some()
}

/// Fetches the sources of exactly the installed compiler's standard library.
fn fetch_rust_source(apt: &Apt, private: &Path) -> Result<PathBuf> {
    let version = process::run_captured(Command::new("rustc").arg("--version"))?;
    let version = version.split_whitespace().nth(1).context("rustc names no version")?.to_owned();
    let folder = private.join(format!("rust-src-{version}"));
    populate_atomically(&folder, "the sources of Rust's standard library (45 MB)", |folder| {
        let package = format!("rust-src={version}*");
        apt.unpack_from_suite(RUST_SUITE, &package, &["./usr/src/*/library/*"], folder)
    })
    .with_context(|| format!("rustup target add {WASM_TARGET} helps; Debian has no rust-src {version}"))?;
    Ok(folder.join(format!("usr/src/rustc-{version}/library")))
}

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
    .context("Debian's package chromium cannot be had")?;
    let files = files_below(&folder);
    let libraries = library_folders(&files);
    let program = Dependency::new(folder.join("usr/lib/chromium/chromium").display().to_string());
    Ok(program.map_environment(|environment| {
        libraries.iter().fold(environment, |all, folder| all.prepend("LD_LIBRARY_PATH", folder))
    }))
}
