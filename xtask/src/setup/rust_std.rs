//! Standard library of a target: installed with the toolchain, or built from its sources.

use super::apt::Apt;
use super::{Dependency, populate_atomically};
use crate::environment::Environment;
use crate::process;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Suite of Debian with the sources of recent compilers.
const RUST_SUITE: &str = "trixie-backports";
/// Variable by which cargo finds the sources of the standard library outside of the toolchain.
const SOURCE_VARIABLE: &str = "__CARGO_TESTS_ONLY_SRC_ROOT";

/// Finds a target's standard library in the toolchain, or its sources, or fetches the sources. Cargo builds sources
/// with the argument `-Zbuild-std`, see [`is_source`].
pub(super) fn ensure(apt: &Apt, private: &Path, target: &str) -> Result<Dependency> {
    let sysroot = process::run_captured(Command::new("rustc").args(["--print", "sysroot"]))?;
    let libraries = Path::new(sysroot.trim()).join("lib/rustlib");
    if libraries.join(target).join("lib").is_dir() {
        return Ok(Dependency::new(format!("the toolchain's target {target}")));
    }
    let component = libraries.join("src/rust/library");
    let source = if component.is_dir() { component } else { fetch_source(apt, private, target)? };
    let environment = Environment::default().set(SOURCE_VARIABLE, &source).set("RUSTC_BOOTSTRAP", "1");
    Ok(Dependency { environment, ..Dependency::new(format!("built from {}", source.display())) })
}

/// Reports whether cargo must build the standard library.
pub(crate) fn is_source(found: &Dependency) -> bool {
    found.environment.value(SOURCE_VARIABLE).is_some()
}

/// Fetches the sources of exactly the installed compiler's standard library.
fn fetch_source(apt: &Apt, private: &Path, target: &str) -> Result<PathBuf> {
    let version = process::run_captured(Command::new("rustc").arg("--version"))?;
    let version = version.split_whitespace().nth(1).context("rustc names no version")?.to_owned();
    let folder = private.join(format!("rust-src-{version}"));
    populate_atomically(&folder, "the sources of Rust's standard library (45 MB)", |folder| {
        let package = format!("rust-src={version}*");
        apt.unpack_from_suite(RUST_SUITE, &package, &["./usr/src/*/library/*"], folder)
    })
    .with_context(|| format!("rustup target add {target} helps; Debian has no rust-src {version}"))?;
    Ok(folder.join(format!("usr/src/rustc-{version}/library")))
}
