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
    /// Finds the fastest way to train a model within given bytes on a card, and a table of the others.
    Plan(plan::PlanArgs),
    /// Replays a recorded workload against the pool, under one configuration or several.
    Replay(replay::ReplayArgs),
    /// Shows snapshots of a pool as text or as a page for a browser, and compares two of them.
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
