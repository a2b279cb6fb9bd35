//! `cargo xtask targets`: compiles the facade for phones and for other operating systems, without linking.

use crate::process;
use crate::setup::{Setup, rust_std};
use crate::stage::{Stage, print_summary};
use crate::workspace::Workspace;
use anyhow::Result;
use std::time::Instant;

/// Target, and the features that its systems have devices and terminals for.
struct Target {
    triple: &'static str,
    features: &'static str,
}

/// Targets that are compiled. Features with C code are left out: they need a C compiler of the target.
const TARGETS: [Target; 6] = [
    Target { triple: "aarch64-linux-android", features: "wgpu,train" },
    Target { triple: "aarch64-apple-ios", features: "wgpu,train" },
    Target { triple: "aarch64-apple-darwin", features: "wgpu,train" },
    Target { triple: "x86_64-pc-windows-msvc", features: "cuda,wgpu,train" },
    Target { triple: "x86_64-pc-windows-gnu", features: "cuda,wgpu,train" },
    Target { triple: "aarch64-unknown-linux-gnu", features: "cuda,wgpu,train" },
];

/// Compiles for the targets whose name contains one of the filters, or for all; returns false if any failed. A target
/// without a standard library is skipped with the reason.
pub(crate) fn run(workspace: &Workspace, filters: &[String]) -> Result<bool> {
    let start = Instant::now();
    let setup = Setup::new(workspace)?;
    let is_wanted = |target: &&Target| {
        filters.is_empty() || filters.iter().any(|filter| target.triple.contains(filter.as_str()))
    };
    let wanted: Vec<&Target> = TARGETS.iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        let known: Vec<&str> = TARGETS.iter().map(|target| target.triple).collect();
        anyhow::bail!("no target's name contains {}; there are {}", filters.join(" or "), known.join(", "));
    }
    let stages: Vec<Stage> =
        wanted.into_iter().map(|target| check_target(workspace, &setup, target)).collect();
    Ok(print_summary(&stages, start.elapsed()))
}

fn check_target(workspace: &Workspace, setup: &Setup, target: &Target) -> Stage {
    let found = match setup.ensure_std(target.triple) {
        Ok(found) => found,
        Err(missing) => return Stage::skipped(target.triple, format!("{missing:#}")),
    };
    let mut command = workspace.cargo_command(&["check", "--quiet", "--package", "forebay"]);
    command.args(["--no-default-features", "--features", target.features, "--target", target.triple]);
    if rust_std::is_source(&found) {
        command.arg("-Zbuild-std=std,panic_abort");
    }
    found.environment.apply(command.env("RUSTFLAGS", "-D warnings"));
    Stage::run_pass_or_fail(target.triple, || process::run_foreground(&mut command))
}
