//! Quick checks that need no device: line budget, layers, prose, documents, rustfmt, clippy and rustdoc.
//!
//! A new check is a function that prints its violations, and one more stage of `run_all`.

use crate::process;
use crate::stage::{PendingStage, Stage};
use crate::workspace::Workspace;
use crate::{book, layers, prose};
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Maximum number of lines of a source file.
const MAX_LINES: usize = 800;
/// Folders without sources of this project.
pub(crate) const EXCLUDED_DIRS: [&str; 5] = [".git", ".forebay", "target", "out", "corpus"];

/// Runs all checks, cheapest first.
pub(crate) fn run_all(workspace: &Workspace) -> Vec<Stage> {
    let mut stages = run_quick(workspace);
    stages.extend(
        plan_clippy(workspace).map_or_else(|skipped| vec![skipped], |p| Stage::run_parallel(vec![p], 1)),
    );
    stages.extend(Stage::run_parallel(vec![plan_rustdoc(workspace)], 1));
    stages
}

/// Runs the checks that compile nothing.
pub(crate) fn run_quick(workspace: &Workspace) -> Vec<Stage> {
    let budget = Stage::run_pass_or_fail("line budget", || Ok(check_line_budget(&workspace.root)));
    let fmt = match cargo_tool(workspace, "fmt", &["--all", "--", "--check"]) {
        Ok(mut command) => Stage::run_pass_or_fail("fmt", || process::run_foreground(&mut command)),
        Err(skipped) => skipped,
    };
    let layers = Stage::run_pass_or_fail("layers", || layers::check(&workspace.root));
    let prose = Stage::run_pass_or_fail("prose", || check_prose(&workspace.root));
    let docs = Stage::run_pass_or_fail("links", || book::check_docs(&workspace.root));
    vec![budget, layers, prose, docs, fmt]
}

/// Returns the Clippy stage, or a skipped stage with the reason.
pub(crate) fn plan_clippy(workspace: &Workspace) -> Result<PendingStage, Stage> {
    let args = ["--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"];
    Ok(PendingStage::pass_or_fail("clippy", cargo_tool(workspace, "clippy", &args)?))
}

/// Arguments of cargo that build the documentation of all crates for users.
pub(crate) const RUSTDOC_ARGS: [&str; 5] = ["doc", "--workspace", "--exclude", "xtask", "--no-deps"];

/// Returns the stage that fails on a warning of rustdoc, such as a broken link.
pub(crate) fn plan_rustdoc(workspace: &Workspace) -> PendingStage {
    let mut command = workspace.cargo_command(&RUSTDOC_ARGS);
    command.arg("--quiet").env("RUSTDOCFLAGS", "-D warnings");
    PendingStage::pass_or_fail("rustdoc", command)
}

/// Returns the command of a toolchain component, or a skipped stage if the component is not installed.
fn cargo_tool(workspace: &Workspace, name: &str, args: &[&str]) -> Result<Command, Stage> {
    let mut command = workspace.cargo_command(&[name]);
    command.args(args);
    match process::run_captured(workspace.cargo_command(&[name, "--version"]).env_remove("RUSTUP_TOOLCHAIN"))
    {
        Ok(_) => Ok(command),
        Err(_) => Err(Stage::skipped(name, format!("cargo {name} is not installed (rustup component add)"))),
    }
}

/// Checks that every source file is within the line budget; prints those that are not.
fn check_line_budget(root: &Path) -> bool {
    let mut long: Vec<(usize, PathBuf)> = source_files(root)
        .into_iter()
        .filter_map(|path| Some((std::fs::read_to_string(&path).ok()?.lines().count(), path)))
        .filter(|(lines, _)| *lines > MAX_LINES)
        .collect();
    long.sort();
    for (lines, path) in &long {
        println!("{}: {lines} lines, more than {MAX_LINES}: split it", path.display());
    }
    long.is_empty()
}

/// Checks the comments of all Rust files, the lines of shaders, and all documents.
fn check_prose(root: &Path) -> Result<bool> {
    let mut is_plain = true;
    for path in book::find_pages(root)? {
        is_plain &= prose::check_file(&path, &std::fs::read_to_string(&path)?);
    }
    for folder in prose::CHECKED_FOLDERS {
        for path in source_files(&root.join(folder)) {
            if !path.ends_with("xtask/src/prose.rs") {
                is_plain &= prose::check_file(&path, &std::fs::read_to_string(&path)?);
            }
        }
    }
    Ok(is_plain)
}

/// Returns the source files of a folder and its subfolders.
pub(crate) fn source_files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if !EXCLUDED_DIRS.iter().any(|foreign| *foreign == name) {
                    open.push(path);
                }
            } else if path
                .extension()
                .is_some_and(|end| ["rs", "wgsl", "cu", "cuh"].iter().any(|known| *known == end))
            {
                found.push(path);
            }
        }
    }
    found
}

/// Lists the fuzz targets and how to run one. cargo-fuzz needs a nightly compiler, so xtask runs none.
pub(crate) fn list_fuzz_targets(workspace: &Workspace) -> Result<bool> {
    let folder = workspace.root.join("fuzz/fuzz_targets");
    let mut targets: Vec<String> = source_files(&folder)
        .iter()
        .filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned()))
        .collect();
    targets.sort();
    println!("The fuzz targets are in fuzz/. With a nightly compiler:");
    println!("    cargo install cargo-fuzz");
    for target in &targets {
        println!("    cargo +nightly fuzz run {target}");
    }
    Ok(!targets.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sources_are_found_and_foreign_ones_are_not() -> Result<()> {
        let root = std::env::temp_dir().join(format!("forebay-xtask-lines-{}", std::process::id()));
        for folder in ["src", "target"] {
            std::fs::create_dir_all(root.join(folder))?;
        }
        std::fs::write(root.join("target/long.rs"), "\n".repeat(MAX_LINES + 1))?;
        std::fs::write(root.join("src/right.rs"), "\n".repeat(MAX_LINES))?;
        let right = check_line_budget(&root);
        std::fs::write(root.join("src/long.wgsl"), "\n".repeat(MAX_LINES + 1))?;
        let wrong = check_line_budget(&root);
        std::fs::remove_dir_all(&root)?;
        assert!(right && !wrong);
        Ok(())
    }
}
