//! Setup of dependencies that a fresh machine lacks: a software Vulkan driver, NVRTC, a data set, a model's weights.
//!
//! Every step is idempotent: it looks first, fetches only missing files, and prints one line. Files are fetched into
//! `.forebay/` in the checkout. Only a missing Vulkan driver and Xvfb are installed system-wide, and only as root. A
//! step that cannot be done is not an error: it prints the reason and advice.

mod apt;
mod browser;
mod data;
mod dlltool;
mod machine;
mod manifest;
mod minilm;
mod numpy;
mod nvrtc;
pub(crate) mod rust_std;
mod vulkan;
mod wheel;
mod xvfb;

use crate::environment::Environment;
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use apt::Apt;
use machine::Machine;
use std::path::{Path, PathBuf};

/// Dependency that is available, with the environment that lets programs find it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dependency {
    /// Short description.
    pub(crate) description: String,
    pub(crate) environment: Environment,
}

impl Dependency {
    fn new(what: impl Into<String>) -> Self {
        Self { description: what.into(), environment: Environment::default() }
    }

    fn map_environment(mut self, change: impl FnOnce(Environment) -> Environment) -> Self {
        self.environment = change(self.environment);
        self
    }
}

/// Setup steps for one checkout on one machine.
pub(crate) struct Setup {
    machine: Machine,
    apt: Apt,
    /// Folder of everything that is fetched.
    cache_dir: PathBuf,
    /// Folder of the data that the repository ships.
    bundled_data: PathBuf,
}

impl Setup {
    pub(crate) fn new(workspace: &Workspace) -> Result<Self> {
        let private = workspace.cache_dir();
        std::fs::create_dir_all(&private).with_context(|| format!("{} cannot be made", private.display()))?;
        let machine = Machine::detect();
        let apt = Apt::new(private.join("apt"), machine.is_root);
        Ok(Self { machine, apt, cache_dir: private, bundled_data: workspace.root.join("nn/data") })
    }

    /// Returns the environment that lets the workspace's programs find a device and data, as far as available.
    pub(crate) fn program_env(&self) -> Result<Environment> {
        Ok(self.device_env().merge(self.ensure_data()?.environment))
    }

    /// Returns the environment that lets programs find a device.
    pub(crate) fn device_env(&self) -> Environment {
        let mut environment =
            print_step("Vulkan", self.ensure_vulkan()).map(|found| found.environment).unwrap_or_default();
        if self.machine.has_cuda_driver() && !self.machine.has_nvrtc() {
            environment =
                environment.merge(self.ensure_nvrtc().map(|found| found.environment).unwrap_or_default());
        }
        environment
    }

    /// Ensures any Vulkan driver: the machine's own, or a software driver.
    pub(crate) fn ensure_vulkan(&self) -> Result<Dependency> {
        vulkan::ensure_any(&self.machine, &self.apt, &self.cache_dir)
    }

    /// Ensures lavapipe as the only driver, with the validation layer if available.
    pub(crate) fn ensure_lavapipe(&self) -> Result<Dependency> {
        print_step("lavapipe", vulkan::ensure_lavapipe(&self.machine, &self.apt, &self.cache_dir))
    }

    /// Ensures RADV, Mesa's driver of AMD cards, as the only driver.
    pub(crate) fn ensure_radv(&self) -> Result<Dependency> {
        print_step("RADV", vulkan::ensure_radv(&self.machine, &self.apt, &self.cache_dir))
    }

    /// Ensures SwiftShader as the only driver.
    pub(crate) fn ensure_swiftshader(&self) -> Result<Dependency> {
        print_step("SwiftShader", vulkan::ensure_swiftshader(&self.machine, &self.apt, &self.cache_dir))
    }

    /// Ensures Vulkan's validation layer.
    pub(crate) fn ensure_validation_layer(&self) -> Result<Dependency> {
        print_step("validation layer", vulkan::ensure_validation_layer(&self.apt, &self.cache_dir))
    }

    /// Ensures the standard library of a target, and the tools that rustc starts when it checks the target.
    pub(crate) fn ensure_std(&self, target: &str) -> Result<Dependency> {
        let found = print_step(target, rust_std::ensure(&self.apt, &self.cache_dir, target))?;
        if !dlltool::is_needed(target) {
            return Ok(found);
        }
        let tool = print_step("dlltool", dlltool::find_or_fetch(&self.apt, &self.cache_dir))?;
        Ok(found.map_environment(|environment| environment.merge(tool.environment)))
    }

    /// Ensures NVRTC, NVIDIA's run-time compiler.
    pub(crate) fn ensure_nvrtc(&self) -> Result<Dependency> {
        print_step("NVRTC", nvrtc::find_or_fetch(&self.machine, &self.apt, &self.cache_dir))
    }

    /// Ensures MiniLM's weights and tokenizer.
    pub(crate) fn ensure_minilm(&self) -> Result<Dependency> {
        print_step("MiniLM", minilm::find_or_fetch(&self.apt, &self.cache_dir))
    }

    /// Ensures NumPy for Python 3.
    pub(crate) fn ensure_numpy(&self) -> Result<Dependency> {
        print_step("NumPy", numpy::find_or_fetch(&self.apt, &self.cache_dir))
    }

    /// Ensures Chromium.
    pub(crate) fn ensure_chromium(&self) -> Result<Dependency> {
        print_step("Chromium", browser::ensure_chromium(&self.apt, &self.cache_dir))
    }

    /// Ensures a virtual X server, and a program that moves its pointer.
    pub(crate) fn ensure_xvfb(&self) -> Result<Dependency> {
        print_step("Xvfb", xvfb::find_or_fetch(&self.apt, &self.cache_dir))
    }

    /// Ensures Fashion-MNIST, whole or the embedded subset.
    pub(crate) fn ensure_data(&self) -> Result<Dependency> {
        print_step("data", data::find_or_fetch(&self.apt, &self.cache_dir, &self.bundled_data))
    }

    /// Returns the folder of the data set that programs will find.
    pub(crate) fn data_folder(&self) -> Result<PathBuf> {
        let named = self
            .ensure_data()?
            .environment
            .value(data::VARIABLE)
            .or_else(|| std::env::var_os(data::VARIABLE));
        named.map(PathBuf::from).context("there is no data set")
    }

    /// Returns the path of this machine's Vulkan loader.
    pub(crate) fn vulkan_loader(&self) -> Option<PathBuf> {
        self.machine.find_library(vulkan::LOADER)
    }

    /// Reports whether this machine has a GPU in addition to software drivers.
    pub(crate) fn has_gpu(&self) -> bool {
        self.machine.has_gpu()
    }

    /// Runs every step and prints the results; returns true if programs can run.
    pub(crate) fn ensure_all(&self) -> Result<bool> {
        let vulkan = print_step("Vulkan", self.ensure_vulkan());
        let optional = [
            self.ensure_lavapipe(),
            self.ensure_radv(),
            self.ensure_swiftshader(),
            self.ensure_validation_layer(),
            self.ensure_nvrtc(),
            self.ensure_minilm(),
        ];
        let missing = optional.iter().filter(|step| step.is_err()).count();
        self.ensure_data()?;
        println!("setup: {missing} of {} optional parts are missing", optional.len());
        Ok(vulkan.is_ok())
    }
}

/// Prints the line of a step.
fn print_step(step: &str, found: Result<Dependency>) -> Result<Dependency> {
    match &found {
        Ok(ready) => println!("setup: {step:<17} {}", ready.description),
        Err(why) => println!("setup: {step:<17} missing: {why:#}"),
    }
    found
}

/// Fills a folder atomically: an interrupted step leaves no folder that looks complete.
fn populate_atomically(folder: &Path, what: &str, with: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    println!("setup: fetching {what}");
    let partial = folder.with_extension("partial");
    if partial.exists() {
        std::fs::remove_dir_all(&partial)?;
    }
    std::fs::create_dir_all(&partial).with_context(|| format!("{} cannot be made", partial.display()))?;
    let done = with(&partial).and_then(|()| {
        std::fs::rename(&partial, folder).with_context(|| format!("{} cannot be made", folder.display()))
    });
    if done.is_err() {
        std::fs::remove_dir_all(&partial)?;
    }
    done
}

/// Reports whether a folder of `PATH` has a program.
fn is_in_path(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// Returns all files below a folder, sorted.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => open.push(entry.path()),
                _ => found.push(entry.path()),
            }
        }
    }
    found.sort();
    found
}
