//! `cargo xtask examples`: runs the plain examples of the facade, each small, on a software driver.

use crate::environment::Environment;
use crate::process;
use crate::setup::Setup;
use crate::tally::Tally;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result};
use std::time::Instant;

/// Examples that this command runs, with the arguments that make them small.
const EXAMPLES: [(&str, &[&str]); 6] = [
    ("by_hand", &["60"]),
    ("custom_op", &[]),
    ("dry_run", &["--card", "h200", "--layers", "2"]),
    ("matrix_units", &[]),
    ("shared_device", &[]),
    ("two_devices", &[]),
];

/// Runs the built examples; returns false if any failed.
pub(crate) fn run(workspace: &Workspace, environment: &Environment) -> Result<bool> {
    // Checkpoints of earlier runs would be resumed.
    let folder = workspace.target_dir().join("examples-run");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("{} stays", folder.display()))?;
    }
    std::fs::create_dir_all(&folder)?;
    let mut tally = Tally::default();
    for (name, args) in EXAMPLES {
        let start = Instant::now();
        let mut command = workspace.program_command(&format!("examples/{name}"), Profile::Dev, environment);
        let passed = process::run_foreground(command.args(args).current_dir(&folder))?;
        let verdict = if passed { "ok" } else { "FAILED" };
        println!("{verdict:8}{name} ({:.1} s)", start.elapsed().as_secs_f64());
        tally += Tally::from_bool(passed);
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(tally.failed == 0)
}

/// Builds the programs, and runs the examples on a software driver.
pub(crate) fn build_and_run(workspace: &Workspace, setup: &Setup) -> Result<bool> {
    let adapter = setup.ensure_lavapipe().or_else(|_| setup.ensure_swiftshader())?;
    let environment = setup.ensure_data()?.environment.merge(adapter.environment);
    workspace.build(Profile::Dev)?;
    run(workspace, &environment.set("FOREBAY_DEVICE", "wgpu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Examples that other stages of `cargo xtask test` run: the memory's programs, and the page in a browser.
    const RUN_BY_OTHER_STAGES: [&str; 5] =
        ["fragmentation", "memory_questions", "savings", "train_images", "train_text"];

    #[test]
    fn a_stage_runs_each_example() -> Result<()> {
        let is_run = |name: &str| {
            EXAMPLES.iter().any(|(example, _)| *example == name) || RUN_BY_OTHER_STAGES.contains(&name)
        };
        for entry in std::fs::read_dir(Workspace::find()?.root.join("examples"))? {
            let path = entry?.path();
            let is_example = path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").exists();
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            assert!(!is_example || is_run(&name), "no stage runs the example {name}: add it to EXAMPLES");
        }
        Ok(())
    }
}
