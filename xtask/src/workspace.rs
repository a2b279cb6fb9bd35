//! Building and starting the workspace's programs.

use crate::environment::Environment;
use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Build profile of programs.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Profile {
    /// Profile of the tests: one build for all of them.
    Dev,
    /// Optimised profile, for use and for measurements.
    Release,
}

/// Folders of the sources and the programs.
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    /// Folder of this program, which also contains the other programs of its profile.
    program_dir: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self> {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask is outside of a workspace")?;
        let exe = std::env::current_exe().context("this program does not know where it is")?;
        let programs = exe.parent().context("this program is in no folder")?;
        Ok(Self { root: root.into(), program_dir: programs.into() })
    }

    /// Returns the private folder of this checkout for everything that is fetched.
    pub(crate) fn cache_dir(&self) -> PathBuf {
        self.root.join(".forebay")
    }

    /// Returns cargo's target folder.
    pub(crate) fn target_dir(&self) -> &Path {
        self.program_dir.parent().unwrap_or(&self.program_dir)
    }

    /// Returns a cargo command at the root of the workspace.
    pub(crate) fn cargo_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        command.current_dir(&self.root).args(args);
        command
    }

    /// Returns cargo's command that builds a package outside of the workspace, with the workspace's versions of all
    /// crates that the workspace has too.
    pub(crate) fn outside_build_command(&self, folder: &str, target_dir: &Path) -> Result<Command> {
        let package = self.root.join(folder);
        std::fs::copy(self.root.join("Cargo.lock"), package.join("Cargo.lock"))?;
        let mut command = self.cargo_command(&["build", "--quiet", "--manifest-path"]);
        command.arg(package.join("Cargo.toml")).arg("--target-dir").arg(target_dir);
        Ok(command)
    }

    /// Runs cargo in the foreground.
    pub(crate) fn run_cargo(&self, args: &[&str]) -> Result<bool> {
        process::run_foreground(&mut self.cargo_command(args))
    }

    /// Runs an example of the facade in the foreground, built in release mode.
    pub(crate) fn run_example(&self, name: &str, args: &[String], environment: &Environment) -> Result<bool> {
        if !self.run_cargo(&["build", "--release", "--example", name])? {
            bail!("the example {name} does not build: see above");
        }
        self.run_program(&format!("examples/{name}"), Profile::Release, args, environment)
    }

    /// Runs an example that is its own package in the foreground, built in release mode.
    pub(crate) fn run_package(&self, name: &str, args: &[String], environment: &Environment) -> Result<bool> {
        if !self.run_cargo(&["build", "--release", "-p", name])? {
            bail!("the example {name} does not build: see above");
        }
        self.run_program(name, Profile::Release, args, environment)
    }

    /// Returns the arguments that build all programs at once, so that all commands share one build.
    pub(crate) fn build_args(profile: Profile) -> Vec<&'static str> {
        let mut args = vec!["build", "--workspace", "--exclude", "xtask", "--bins", "--examples"];
        if profile == Profile::Release {
            args.push("--release");
        }
        args
    }

    /// Builds all programs of the workspace.
    pub(crate) fn build(&self, profile: Profile) -> Result<()> {
        if !self.run_cargo(&Self::build_args(profile))? {
            bail!("the workspace does not build: see above");
        }
        Ok(())
    }

    /// Returns the path of a built program.
    pub(crate) fn program_path(&self, name: &str, profile: Profile) -> PathBuf {
        match profile {
            Profile::Dev => self.program_dir.join(name),
            Profile::Release => self.program_dir.with_file_name("release").join(name),
        }
    }

    /// Returns the command of a built program, at the root of the workspace.
    pub(crate) fn program_command(&self, name: &str, profile: Profile, environment: &Environment) -> Command {
        let mut command = Command::new(self.program_path(name, profile));
        command.current_dir(&self.root);
        environment.apply(&mut command);
        command
    }

    /// Runs a built program in the foreground.
    pub(crate) fn run_program(
        &self,
        name: &str,
        profile: Profile,
        args: &[String],
        environment: &Environment,
    ) -> Result<bool> {
        process::run_foreground(self.program_command(name, profile, environment).args(args))
    }
}
