//! `cargo xtask package`: checks the crates that go to a registry.
//!
//! The quick checks compile nothing: manifests, archives, minimum Rust version of dependencies, and no C code. The
//! others compile the facade with each feature, and programs that depend on the packaged crates.

pub(crate) mod compare;
mod includes;
mod metadata;

use crate::process;
use crate::setup::Setup;
use crate::stage::{Stage, print_summary};
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use metadata::Metadata;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Published crates, each after its dependencies.
const CRATES: [&str; 9] = [
    "forebay-shaders",
    "forebay-derive",
    "forebay-core",
    "forebay-nn",
    "forebay-cuda",
    "forebay-wgpu",
    "forebay",
    "forebay-conformance",
    "forebay-cli",
];
/// Features of the facade that compile no C code.
const RUST_FEATURES: &str = "cuda,wgpu,train,ndarray";
/// Sets of the facade's features that are compiled; `cargo build` of the workspace covers the default ones.
const FEATURE_SETS: [&str; 8] =
    ["", "cuda", "wgpu", "train", "traces", "ndarray", "cuda,wgpu", RUST_FEATURES];
/// Crates that compile or link C code in build scripts.
const C_COMPILERS: [&str; 5] = ["cc", "cmake", "bindgen", "pkg-config", "vcpkg"];
/// Files of every archive, in addition to sources.
const COMMON_FILES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];
/// Version of the packaged crates: all have that of the workspace, which is this program's, too.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Largest archive that a registry accepts, in bytes.
const MAX_ARCHIVE_BYTES: u64 = 10 * 1024 * 1024;

/// Runs the checks; returns false if any failed.
pub(crate) fn run(workspace: &Workspace, quick: bool) -> Result<bool> {
    let start = Instant::now();
    let mut stages = run_quick(workspace);
    if !quick {
        stages.push(Stage::run_pass_or_fail("features", || check_features(workspace)));
        let built = Stage::run_pass_or_fail("packaged crates build", || build_archives(workspace));
        if built.passed() {
            stages.extend(dependent_stages(workspace)?);
        }
        stages.push(built);
        stages.push(check_minimum_rust(workspace)?);
        stages.push(check_semver(workspace)?);
    }
    Ok(print_summary(&stages, start.elapsed()))
}

/// Runs the checks that compile nothing.
pub(crate) fn run_quick(workspace: &Workspace) -> Vec<Stage> {
    vec![
        Stage::run_pass_or_fail("manifests", || Metadata::load(workspace)?.check(&CRATES)),
        Stage::run_pass_or_fail("package archives", || check_archives(workspace)),
        Stage::run_pass_or_fail("no C code", || check_no_c_code(workspace)),
    ]
}

/// Returns a `cargo package` command for all crates. Changes that are not committed are packaged, too.
fn package_command(workspace: &Workspace) -> Command {
    let mut command = workspace.cargo_command(&["package", "--quiet", "--allow-dirty"]);
    command.args(CRATES.iter().flat_map(|name| ["--package", name]));
    command
}

/// Creates all archives and checks their sizes, common files and included files.
fn check_archives(workspace: &Workspace) -> Result<bool> {
    if !process::run_foreground(package_command(workspace).arg("--no-verify"))? {
        return Ok(false);
    }
    let metadata = Metadata::load(workspace)?;
    let mut is_right = true;
    for name in CRATES {
        let archive = archive_path(workspace, name);
        let bytes = std::fs::metadata(&archive).with_context(|| archive.display().to_string())?.len();
        println!("{name}: {:.2} MB", bytes as f64 / 1e6);
        if bytes > MAX_ARCHIVE_BYTES {
            println!(
                "{name}: more than the {MAX_ARCHIVE_BYTES} bytes of a registry; see `include` in its manifest"
            );
            is_right = false;
        }
        let files = process::run_captured(Command::new("tar").arg("-tzf").arg(&archive))?;
        let has = |wanted: &str| files.lines().any(|file| file == format!("{name}-{VERSION}/{wanted}"));
        let common = COMMON_FILES.iter().filter(|file| !has(file)).map(ToString::to_string);
        for missing in common.chain(includes::find_missing(&metadata.folder(name)?, has)?) {
            println!("{name}: the archive has no {missing}");
            is_right = false;
        }
    }
    Ok(is_right)
}

fn archive_path(workspace: &Workspace, name: &str) -> PathBuf {
    workspace.target_dir().join(format!("package/{name}-{VERSION}.crate"))
}

/// Checks that the facade compiles no C code without a feature that needs it.
fn check_no_c_code(workspace: &Workspace) -> Result<bool> {
    let mut command = workspace.cargo_command(&["tree", "--package", "forebay", "--no-default-features"]);
    command.args([
        "--features",
        RUST_FEATURES,
        "--target",
        "all",
        "--edges",
        "normal,build",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]);
    let tree = process::run_captured(&mut command)?;
    let names = tree.lines().filter_map(|line| line.split_whitespace().next());
    let mut found: Vec<&str> = names.filter(|name| C_COMPILERS.contains(name)).collect();
    found.sort_unstable();
    found.dedup();
    for name in &found {
        println!("the features {RUST_FEATURES} need `{name}`; `cargo tree -i {name}` shows the way to it");
    }
    Ok(found.is_empty())
}

/// Compiles the facade with each set of features.
fn check_features(workspace: &Workspace) -> Result<bool> {
    let mut all = true;
    for features in FEATURE_SETS {
        println!("features: {}", if features.is_empty() { "none" } else { features });
        let args =
            ["check", "--quiet", "--package", "forebay", "--no-default-features", "--features", features];
        all &= process::run_foreground(workspace.cargo_command(&args).env("RUSTFLAGS", "-D warnings"))?;
    }
    Ok(all)
}

/// Builds every crate from its archive, in the order of the dependencies.
fn build_archives(workspace: &Workspace) -> Result<bool> {
    process::run_foreground(&mut package_command(workspace))
}

/// Runs the template, and a backend on the conformance suite, with the packaged crates.
fn dependent_stages(workspace: &Workspace) -> Result<Vec<Stage>> {
    let environment = Setup::new(workspace)?.program_env()?;
    let folder = workspace.target_dir().join("dependent");
    let crates = unpack_archives(workspace, &folder)?;
    let run = |program: &str, args: &[&str]| {
        let copy = copy_dependent(&workspace.root.join(program), &folder)?;
        let mut command = workspace.cargo_command(&["run", "--quiet"]);
        for (name, path) in &crates {
            let path = path.display().to_string();
            command.arg("--config").arg(format!("patch.crates-io.{name}.path={path:?}"));
        }
        // Both programs share the dependencies that are built alike.
        command.args([
            "--config",
            "profile.dev.debug=false",
            "--config",
            "profile.dev.package.'*'.opt-level=1",
        ]);
        command.arg("--manifest-path").arg(copy.join("Cargo.toml"));
        command.arg("--target-dir").arg(folder.join("target")).arg("--").args(args);
        environment.apply(&mut command);
        process::run_foreground(&mut command)
    };
    Ok(vec![
        Stage::run_pass_or_fail("the template", || run("examples/template", &[])),
        Stage::run_pass_or_fail("a backend with the packaged suite", || {
            run("tests/outside", &["tensors/", "hooks/"])
        }),
    ])
}

/// Copies a program of one source file. Its dependencies by path become dependencies by version, so that the packaged
/// crates replace them.
fn copy_dependent(program: &Path, folder: &Path) -> Result<PathBuf> {
    let copy = folder.join(program.file_name().context("a program has no name")?);
    std::fs::create_dir_all(copy.join("src"))?;
    let manifest = std::fs::read_to_string(program.join("Cargo.toml"))?;
    let mut manifest = by_version(&manifest);
    if !manifest.contains("[workspace]") {
        // The copy is below the workspace's folder, but not part of it.
        manifest.push_str("\n[workspace]\n");
    }
    std::fs::write(copy.join("Cargo.toml"), manifest)?;
    std::fs::copy(program.join("src/main.rs"), copy.join("src/main.rs"))?;
    Ok(copy)
}

/// Returns a manifest whose dependencies by path are dependencies by version.
fn by_version(manifest: &str) -> String {
    let lines = manifest.lines().map(|line| match line.split_once(" = { path = ") {
        Some((name, _)) => format!("{name} = \"{VERSION}\"\n"),
        None => format!("{line}\n"),
    });
    lines.collect()
}

/// Unpacks the archives into a folder of their own and returns the folder of each crate.
fn unpack_archives(workspace: &Workspace, folder: &Path) -> Result<Vec<(&'static str, PathBuf)>> {
    let folder = folder.join("crates");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    let unpack = |name: &'static str| {
        let archive = archive_path(workspace, name);
        process::run_captured(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&folder))?;
        Ok((name, folder.join(format!("{name}-{VERSION}"))))
    };
    CRATES.into_iter().map(unpack).collect()
}

/// Compiles all crates with the oldest supported compiler, if it is installed.
fn check_minimum_rust(workspace: &Workspace) -> Result<Stage> {
    const NAME: &str = "oldest supported compiler";
    let version = Metadata::load(workspace)?.rust_version("forebay")?;
    // Without rustup, nothing is listed.
    let installed =
        process::run_captured(Command::new("rustup").args(["toolchain", "list"])).unwrap_or_default();
    let mut toolchains = metadata::toolchains_of(&installed, &version).into_iter();
    let runs = |name: &&str| process::succeeds("rustup", &["run", name, "cargo", "--version"]);
    let Some(toolchain) = toolchains.find(runs) else {
        let advice = format!("Rust {version} is not installed (rustup toolchain install {version})");
        return Ok(Stage::skipped(NAME, advice));
    };
    let mut command = Command::new("rustup");
    command.args(["run", toolchain, "cargo", "check", "--quiet"]).current_dir(&workspace.root);
    command.args(CRATES.iter().flat_map(|name| ["--package", name]));
    command.env_remove("RUSTC").arg("--target-dir").arg(workspace.target_dir().join("oldest"));
    Ok(Stage::run_pass_or_fail(NAME, || process::run_foreground(&mut command)))
}

/// Compares the public interface with that of the last release, if there is one.
fn check_semver(workspace: &Workspace) -> Result<Stage> {
    const NAME: &str = "semantic versioning";
    let mut describe = Command::new("git");
    describe.current_dir(&workspace.root).args(["describe", "--tags", "--abbrev=0", "--match", "v*"]);
    let Ok(release) = process::run_captured(&mut describe) else {
        return Ok(Stage::skipped(NAME, "there is no release (a tag v*) to compare with"));
    };
    if process::run_captured(&mut workspace.cargo_command(&["semver-checks", "--version"])).is_err() {
        let advice = "cargo-semver-checks is not installed (cargo install cargo-semver-checks)";
        return Ok(Stage::skipped(NAME, advice));
    }
    let mut command = workspace.cargo_command(&["semver-checks", "--baseline-rev", release.trim()]);
    command.args(CRATES.iter().flat_map(|name| ["--package", name]));
    Ok(Stage::run_pass_or_fail(NAME, || process::run_foreground(&mut command)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_versions() {
        let manifest = "[dependencies]\nanyhow = \"1\"\nforebay = { path = \"../..\" }\n";
        assert_eq!(
            by_version(manifest),
            format!("[dependencies]\nanyhow = \"1\"\nforebay = \"{VERSION}\"\n")
        );
    }

    #[test]
    fn every_member_is_published_or_marked_private() -> Result<()> {
        let metadata = Metadata::load(&Workspace::find()?)?;
        let mut listed: Vec<&str> = CRATES.to_vec();
        listed.sort_unstable();
        assert_eq!(metadata.published(), listed);
        Ok(())
    }
}
