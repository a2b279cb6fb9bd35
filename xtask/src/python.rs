//! `cargo xtask python`: builds the Python module of examples/python, and tests it with NumPy and PyTorch.

use crate::process;
use crate::setup::Setup;
use crate::workspace::Workspace;
use anyhow::{Result, bail};
use std::process::Command;

const FOLDER: &str = "examples/python";

/// Builds the module and runs its test on the best device of this machine. Without NumPy, the test is skipped.
pub(crate) fn test(workspace: &Workspace, setup: &Setup) -> Result<bool> {
    let Ok(numpy) = setup.ensure_numpy() else {
        println!("SKIPPED  the Python module: NumPy is missing, see above");
        println!("0 passed, 0 failed, 1 skipped");
        return Ok(true);
    };
    let environment = setup.device_env().merge(numpy.environment);
    let target = workspace.target_dir().join("python");
    if !process::run_foreground(&mut workspace.outside_build_command(FOLDER, &target)?)? {
        bail!("the Python module does not build: see above");
    }
    let mut command = Command::new("python3");
    environment.apply(&mut command);
    command.arg(workspace.root.join(FOLDER).join("test_dlpack.py")).arg(target.join("debug"));
    process::run_foreground(&mut command)
}
