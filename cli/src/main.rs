//! `forebay`: command-line tools for memory. Only `devices` needs a GPU.

use anyhow::Result;
use clap::{Parser, Subcommand};

mod devices;
mod memory;
mod plan;
mod replay;

#[derive(Parser)]
#[command(name = "forebay", version, about = "Answers about GPU memory, without a GPU")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the devices of this machine, their memory use by process, and unavailable backends with the reason.
    Devices,
    /// The fastest way to train a model within given bytes on a card, and a table of the others.
    Plan(plan::PlanArgs),
    /// What the pool would make of a recorded workload, under one configuration or several.
    Replay(replay::ReplayArgs),
    /// What snapshots of a pool say: as text, as a page for a browser, and what two of them differ in.
    Memory(memory::MemoryArgs),
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Devices => devices::run(),
        Command::Plan(plan) => plan.run(),
        Command::Replay(replay) => replay.run(),
        Command::Memory(memory) => memory.run(),
    }
}
