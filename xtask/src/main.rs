//! `cargo xtask`: the chores of this workspace.
//!
//! Every command first sees to what it needs (a Vulkan driver, NVRTC, a data set), into `.forebay/` at the root of the
//! workspace, then starts cargo or a program of the workspace with the environment that finds it.

mod bundle;
mod checks;
mod environment;
mod process;
mod setup;
mod stage;
mod suite;
mod tally;
mod workspace;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use setup::Setup;
use std::process::ExitCode;
use workspace::{Profile, Workspace};

/// The chores of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Options {
    #[command(subcommand)]
    command: Command,
}

/// Arguments that are passed on as they are.
#[derive(clap::Args)]
struct Rest {
    /// Arguments for the program that is started (`-- --help` shows them)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Train a convolutional network on Fashion-MNIST, on the best device of this machine
    Train(Rest),
    /// Compare sentences by what they mean, with MiniLM's published weights [SENTENCE...]
    Embed(Rest),
    /// Run everything that CI runs: checks, unit tests, the conformance suite, golden data, curves, traces
    Test,
    /// List the devices that were found, and what was not and why
    Devices(Rest),
    /// Compare single operations with PyTorch's results [--dir D] [--device cuda|wgpu] [FILTER]
    Golden(Rest),
    /// Compare whole training runs with PyTorch's losses [--dir D] [--device cuda|wgpu] [FILTER]
    Curves(Rest),
    /// Replay allocator traces beside PyTorch's figures [--dir D] [FILTER]
    Traces(Rest),
    /// Check what is promised about memory, line by line, on every device [ITEM...]
    Memory(Rest),
    /// Write docs/operators.md: what there is of PyTorch's operator database
    Operators,
    /// Compile every kernel with NVRTC for every architecture
    Kernels(Rest),
    /// Make out/bundle: binaries, data and a script for a GPU machine that has no Rust
    Bundle {
        /// Leave out the reference data, for a bundle that stays in its checkout
        #[arg(long)]
        lean: bool,
    },
    /// Measure
    Bench(Rest),
    /// Build the documentation of the crates
    Docs,
    /// List the fuzz targets and say how to run one
    Fuzz,
    /// The cheap checks: line budget, rustfmt, clippy
    Check,
    /// Run any command with what was set up, such as `cargo test -p forebay-wgpu`
    Run(Rest),
    /// Only set up: what is there, what was fetched, what was not and why
    Setup,
}

fn main() -> ExitCode {
    match run(Options::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command; false means that what it ran has failed, and has said so.
fn run(command: Command) -> Result<bool> {
    let workspace = Workspace::find()?;
    match command {
        Command::Train(rest) => {
            let environment = Setup::new(&workspace)?.for_programs()?;
            workspace.example("train_images", &rest.args, &environment)
        }
        Command::Embed(rest) => {
            let setup = Setup::new(&workspace)?;
            let environment = setup.for_devices().and(setup.minilm()?.environment);
            workspace.package("sentence_embeddings", &rest.args, &environment)
        }
        Command::Test => suite::run(&workspace),
        Command::Devices(rest) => conformance(&workspace, "devices", rest),
        Command::Golden(rest) => conformance(&workspace, "golden", rest),
        Command::Curves(rest) => conformance(&workspace, "curves", rest),
        Command::Traces(rest) => conformance(&workspace, "traces", rest),
        Command::Memory(rest) => {
            let setup = Setup::new(&workspace)?;
            let environment = setup.for_programs()?.and(setup.data()?.environment);
            workspace.build(Profile::Dev)?;
            process::hand_over(&mut bundle::check_memory(&workspace, &environment, &rest.args))
        }
        Command::Operators => {
            let file = workspace.root.join("docs/operators.md").display().to_string();
            conformance(&workspace, "operators", Rest { args: vec![file] })
        }
        Command::Kernels(rest) => conformance(&workspace, "kernels", rest),
        Command::Bundle { lean } => bundle::make(&workspace, &Setup::new(&workspace)?, lean),
        Command::Bench(rest) => {
            let environment = Setup::new(&workspace)?.for_programs()?;
            workspace.build(Profile::Release)?;
            workspace.start("forebay-bench", Profile::Release, &rest.args, &environment)
        }
        Command::Docs => workspace.cargo(&["doc", "--workspace", "--exclude", "xtask", "--no-deps"]),
        Command::Fuzz => checks::fuzz(&workspace),
        Command::Check => Ok(checks::all(&workspace).iter().all(stage::Stage::passed)),
        Command::Run(rest) => {
            let (program, args) = rest.args.split_first().context("what shall be run?")?;
            let environment = Setup::new(&workspace)?.for_programs()?;
            let mut command = std::process::Command::new(program);
            environment.apply(&mut command);
            process::hand_over(command.args(args))
        }
        Command::Setup => Setup::new(&workspace)?.everything(),
    }
}

/// One of the commands of the conformance binary.
fn conformance(workspace: &Workspace, command: &str, rest: Rest) -> Result<bool> {
    let setup = Setup::new(workspace)?;
    let mut environment = setup.for_programs()?;
    if command == "kernels" {
        environment = environment.and(setup.nvrtc()?.environment);
    }
    workspace.build(Profile::Dev)?;
    let args: Vec<String> = std::iter::once(command.to_string()).chain(rest.args).collect();
    workspace.start("forebay-conformance", Profile::Dev, &args, &environment)
}
