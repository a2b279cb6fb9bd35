//! Sets up what a fresh machine lacks: a software Vulkan driver, NVRTC, a data set, a model's weights.
//!
//! Every step looks first, fetches only what is missing, does nothing the second time, and prints one line. What is
//! fetched goes to `.forebay/` in the checkout; only a missing Vulkan driver is installed for the whole system, and
//! only as root. A step that cannot be done is no error: it says why, and what to do.

mod apt;
mod data;
mod machine;
mod manifest;
mod minilm;
mod nvrtc;
mod vulkan;
mod wheel;

use crate::environment::Environment;
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use apt::Apt;
use machine::Machine;
use std::path::{Path, PathBuf};

/// Something that is there, and how programs find it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ready {
    /// What it is, in a few words.
    pub(crate) what: String,
    pub(crate) environment: Environment,
}

impl Ready {
    fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), environment: Environment::default() }
    }

    fn with(mut self, change: impl FnOnce(Environment) -> Environment) -> Self {
        self.environment = change(self.environment);
        self
    }
}

/// The steps, for one checkout on one machine.
pub(crate) struct Setup {
    machine: Machine,
    apt: Apt,
    /// Where everything that is fetched goes.
    private: PathBuf,
    /// The data that the repository ships.
    shipped: PathBuf,
}

impl Setup {
    pub(crate) fn new(workspace: &Workspace) -> Result<Self> {
        let private = workspace.private();
        std::fs::create_dir_all(&private).with_context(|| format!("{} cannot be made", private.display()))?;
        let machine = Machine::look();
        let apt = Apt::new(private.join("apt"), machine.root);
        Ok(Self { machine, apt, private, shipped: workspace.root.join("core/data") })
    }

    /// What the programs of the workspace need in order to run here; nothing of it is needed by all of them.
    pub(crate) fn for_programs(&self) -> Result<Environment> {
        Ok(self.for_devices().and(self.data()?.environment))
    }

    /// Of that, what lets them find a device.
    pub(crate) fn for_devices(&self) -> Environment {
        let mut environment =
            said("Vulkan", self.vulkan()).map(|found| found.environment).unwrap_or_default();
        if self.machine.has_cuda_driver() && !self.machine.has_nvrtc() {
            environment = environment.and(self.nvrtc().map(|found| found.environment).unwrap_or_default());
        }
        environment
    }

    /// Any Vulkan: the machine's own, or a software driver where it has none.
    pub(crate) fn vulkan(&self) -> Result<Ready> {
        vulkan::any(&self.machine, &self.apt, &self.private)
    }

    /// Mesa's software driver and no other one, with the validation layer where that is to be had.
    pub(crate) fn lavapipe(&self) -> Result<Ready> {
        said("lavapipe", vulkan::lavapipe(&self.machine, &self.apt, &self.private))
    }

    /// SwiftShader and no other driver.
    pub(crate) fn swiftshader(&self) -> Result<Ready> {
        said("SwiftShader", vulkan::swiftshader(&self.machine, &self.apt, &self.private))
    }

    /// The validation layer of Vulkan.
    pub(crate) fn validation(&self) -> Result<Ready> {
        said("validation layer", vulkan::validation(&self.apt, &self.private))
    }

    /// NVIDIA's run-time compiler.
    pub(crate) fn nvrtc(&self) -> Result<Ready> {
        said("NVRTC", nvrtc::find(&self.machine, &self.apt, &self.private))
    }

    /// MiniLM's weights and tokenizer.
    pub(crate) fn minilm(&self) -> Result<Ready> {
        said("MiniLM", minilm::find(&self.apt, &self.private))
    }

    /// Fashion-MNIST, whole or the small part that is shipped.
    pub(crate) fn data(&self) -> Result<Ready> {
        said("data", data::find(&self.apt, &self.private, &self.shipped))
    }

    /// The folder of the data set that the programs will find.
    pub(crate) fn data_folder(&self) -> Result<PathBuf> {
        let named =
            self.data()?.environment.value(data::VARIABLE).or_else(|| std::env::var_os(data::VARIABLE));
        named.map(PathBuf::from).context("there is no data set")
    }

    /// The Vulkan loader of this machine.
    pub(crate) fn vulkan_loader(&self) -> Option<PathBuf> {
        self.machine.library(vulkan::LOADER)
    }

    /// Whether this machine has a GPU's own driver beside the software ones.
    pub(crate) fn has_gpu(&self) -> bool {
        self.machine.has_gpu()
    }

    /// Every step, for people who want to see them; true if programs can run with what is there.
    pub(crate) fn everything(&self) -> Result<bool> {
        let vulkan = said("Vulkan", self.vulkan());
        let optional = [self.lavapipe(), self.swiftshader(), self.validation(), self.nvrtc(), self.minilm()];
        let missing = optional.iter().filter(|step| step.is_err()).count();
        self.data()?;
        println!("setup: {missing} of {} optional parts are missing", optional.len());
        Ok(vulkan.is_ok())
    }
}

/// Prints the one line of a step.
fn said(step: &str, found: Result<Ready>) -> Result<Ready> {
    match &found {
        Ok(ready) => println!("setup: {step:<17} {}", ready.what),
        Err(why) => println!("setup: {step:<17} missing: {why:#}"),
    }
    found
}

/// Makes a folder all at once: a step that is interrupted leaves nothing that looks done.
fn fill(folder: &Path, what: &str, with: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
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

/// All files below a folder, in order.
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
