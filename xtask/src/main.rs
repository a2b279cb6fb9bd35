//! `cargo xtask`: tasks of this workspace.
//!
//! Every command first ensures its dependencies (a Vulkan driver, NVRTC, a data set) in `.forebay/` at the root of
//! the workspace. Then it starts cargo or a program of the workspace with the environment that finds them.
//!
//! A new command is a variant of `Command`. A new dependency goes to `setup`, a cheap check to `checks`, and a stage of
//! `cargo xtask test` to `ci`.

mod app;
mod book;
mod browser;
mod bundle;
mod checks;
mod ci;
mod diffs;
mod environment;
mod examples;
mod layers;
mod package;
mod process;
mod prose;
mod python;
mod setup;
mod stage;
mod tally;
mod targets;
mod workspace;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use environment::Environment;
use setup::Setup;
use std::process::ExitCode;
use workspace::{Profile, Workspace};

/// Tasks of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Arguments that are passed on unchanged.
#[derive(clap::Args)]
struct PassthroughArgs {
    /// Arguments for the program that is started (`-- --help` shows them)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Train a convolutional network on Fashion-MNIST, on the best device of this machine
    Train(PassthroughArgs),
    /// Train in a browser page, through WebGPU: build the page and serve it
    Browser {
        /// Train some steps in headless Chromium instead, and compare the losses with a native run
        #[arg(long)]
        test: bool,
        /// Test with the native programs that are built
        #[arg(long, requires = "test")]
        built: bool,
        /// Port of the server on this machine
        #[arg(long, default_value_t = 8080)]
        port: u16,
    },
    /// Open a window in which a network learns while you draw
    App {
        /// Test it with a software driver instead: without a window, and by clicks on a virtual screen
        #[arg(long)]
        test: bool,
        #[command(flatten)]
        rest: PassthroughArgs,
    },
    /// Build the Python module of examples/python, and test it: tensors shared with NumPy and PyTorch
    Python,
    /// Compare the meaning of sentences, with MiniLM's published weights [SENTENCE...]
    Embed(PassthroughArgs),
    /// Run the plain examples, each small, on a software driver
    Examples {
        /// Run what is built, in the present environment
        #[arg(long)]
        built: bool,
    },
    /// Run everything that CI runs: checks, unit tests, the conformance suite, golden data, curves, traces
    Test,
    /// List the available devices, and the reasons why others are not
    Devices(PassthroughArgs),
    /// Compare single operations with PyTorch's results [--dir D] [--device cuda|wgpu] [FILTER]
    Golden(PassthroughArgs),
    /// Compare whole training runs with PyTorch's losses [--dir D] [--device cuda|wgpu] [FILTER]
    Curves(PassthroughArgs),
    /// Replay allocator traces and compare with PyTorch's figures [--dir D] [FILTER]
    Traces(PassthroughArgs),
    /// Check the guarantees about memory, item by item, on every device [ITEM...]
    Memory(PassthroughArgs),
    /// Write operators.md and pytorch-names.md in docs/src/reference: PyTorch's operators and names with their support
    Operators,
    /// Compile every kernel with NVRTC, with Mesa's compiler for AMD cards [--radv], or with the driver of this
    /// machine, timed [--times], or write MSL and HLSL [--writers]
    Kernels(PassthroughArgs),
    /// Make out/bundle: binaries, data and a script for a GPU machine that has no Rust
    Bundle {
        /// Leave out the reference data, for a bundle that stays in its checkout
        #[arg(long)]
        lean: bool,
    },
    /// Run benchmarks
    Bench(PassthroughArgs),
    /// Build the documentation of the crates
    Docs,
    /// Build the book in docs/ with mdBook, into target/book
    Book,
    /// Draw the pictures of the book again: a training run on this machine, and the memory of a dry run
    Pictures {
        /// Steps of the training run, at least 10
        #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(10..))]
        steps: u32,
    },
    /// Check the crates that go to a registry: manifests, archives, features, and programs that depend on them
    Package {
        /// Only the checks that compile nothing
        #[arg(long)]
        quick: bool,
        /// Measure the cost of a dependency instead: build time, size and crates, compared with burn and candle
        #[arg(long, conflicts_with = "quick")]
        compare: bool,
    },
    /// Compile for phones and other operating systems, without linking [TARGET...]
    Targets(PassthroughArgs),
    /// Compare random programs with f64 on the host --programs N [--seed S] [--first K] [--device D]; without
    /// arguments, list the fuzz targets and print how to run one
    Fuzz(PassthroughArgs),
    /// Run the cheap checks: line budget, layers, prose, links of the documentation, rustfmt, clippy, rustdoc
    Check,
    /// Run any command in the environment that was set up, such as `cargo test -p forebay-wgpu`
    Run(PassthroughArgs),
    /// Only set up, and list what was found, fetched or unavailable
    Setup,
}

fn main() -> ExitCode {
    match run_command(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command; returns false if its program failed and has reported why.
fn run_command(command: Command) -> Result<bool> {
    let workspace = Workspace::find()?;
    match command {
        Command::Train(rest) => {
            let environment = Setup::new(&workspace)?.program_env()?;
            workspace.run_example("train_images", &rest.args, &environment)
        }
        Command::Browser { test: true, built, .. } => {
            if !built {
                workspace.build(Profile::Dev)?;
            }
            browser::test(&workspace, &Setup::new(&workspace)?)
        }
        Command::Browser { port, .. } => browser::serve(&workspace, &Setup::new(&workspace)?, port),
        Command::App { test: true, .. } => app::test(&workspace, &Setup::new(&workspace)?),
        Command::App { rest, .. } => app::run(&workspace, &Setup::new(&workspace)?, &rest.args),
        Command::Python => python::test(&workspace, &Setup::new(&workspace)?),
        Command::Embed(rest) => {
            let setup = Setup::new(&workspace)?;
            let environment = setup.device_env().merge(setup.ensure_minilm()?.environment);
            workspace.run_package("sentence_embeddings", &rest.args, &environment)
        }
        Command::Examples { built: true } => examples::run(&workspace, &Environment::default()),
        Command::Examples { .. } => examples::build_and_run(&workspace, &Setup::new(&workspace)?),
        Command::Test => ci::run(&workspace),
        Command::Devices(rest) => run_conformance(&workspace, "devices", rest),
        Command::Golden(rest) => run_conformance(&workspace, "golden", rest),
        Command::Curves(rest) => run_conformance(&workspace, "curves", rest),
        Command::Traces(rest) => run_conformance(&workspace, "traces", rest),
        Command::Memory(rest) => {
            let setup = Setup::new(&workspace)?;
            let environment = setup.program_env()?.merge(setup.ensure_data()?.environment);
            workspace.build(Profile::Dev)?;
            process::run_foreground(&mut bundle::memory_check_command(&workspace, &environment, &rest.args))
        }
        Command::Operators => {
            let folder = workspace.root.join("docs/src/reference").display().to_string();
            run_conformance(&workspace, "operators", PassthroughArgs { args: vec![folder] })
        }
        Command::Kernels(rest) if rest.args.iter().any(|arg| arg == "--writers") => {
            // The writers need no driver.
            run_built_conformance(&workspace, "kernels", rest, &Environment::default())
        }
        Command::Kernels(mut rest) if rest.args.iter().any(|arg| arg == "--radv") => {
            rest.args.retain(|arg| arg != "--radv");
            let environment = Setup::new(&workspace)?.ensure_radv()?.environment;
            run_built_conformance(&workspace, "radv", rest, &environment)
        }
        Command::Kernels(rest) => run_conformance(&workspace, "kernels", rest),
        Command::Bundle { lean } => bundle::create_bundle(&workspace, &Setup::new(&workspace)?, lean),
        Command::Bench(rest) => {
            let environment = Setup::new(&workspace)?.program_env()?;
            workspace.build(Profile::Release)?;
            workspace.run_program("forebay-bench", Profile::Release, &rest.args, &environment)
        }
        Command::Docs => workspace.run_cargo(&checks::RUSTDOC_ARGS),
        Command::Book => book::build(&workspace),
        Command::Pictures { steps } => {
            book::draw_pictures(&workspace, &Setup::new(&workspace)?.program_env()?, steps)
        }
        Command::Package { compare: true, .. } => package::compare::run(&workspace),
        Command::Package { quick, .. } => package::run(&workspace, quick),
        Command::Targets(rest) => targets::run(&workspace, &rest.args),
        Command::Fuzz(rest) if rest.args.is_empty() => checks::list_fuzz_targets(&workspace),
        Command::Fuzz(mut rest) => {
            rest.args.insert(0, "programs".to_owned());
            run_conformance(&workspace, "fuzz", rest)
        }
        Command::Check => Ok(checks::run_all(&workspace).iter().all(stage::Stage::passed)),
        Command::Run(rest) => {
            let (program, args) = rest.args.split_first().context("no command to run")?;
            let environment = Setup::new(&workspace)?.program_env()?;
            let mut command = std::process::Command::new(program);
            environment.apply(&mut command);
            process::run_foreground(command.args(args))
        }
        Command::Setup => Setup::new(&workspace)?.ensure_all(),
    }
}

/// Runs a command of the conformance binary.
fn run_conformance(workspace: &Workspace, command: &str, rest: PassthroughArgs) -> Result<bool> {
    let setup = Setup::new(workspace)?;
    let mut environment = setup.program_env()?;
    if command == "kernels" {
        environment = environment.merge(setup.ensure_nvrtc()?.environment);
    }
    run_built_conformance(workspace, command, rest, &environment)
}

/// Builds the programs, and runs a command of the conformance binary in an environment.
fn run_built_conformance(
    workspace: &Workspace,
    command: &str,
    rest: PassthroughArgs,
    environment: &Environment,
) -> Result<bool> {
    workspace.build(Profile::Dev)?;
    let args: Vec<String> = std::iter::once(command.to_string()).chain(rest.args).collect();
    workspace.run_program("forebay-conformance", Profile::Dev, &args, environment)
}
