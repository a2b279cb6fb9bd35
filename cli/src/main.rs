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
    /// Finds the fastest way to train a model within a memory budget on a card, and prints the alternatives.
    Plan(plan::Plan),
    /// Replays recorded allocations against the pool, under one configuration or several.
    Replay(replay::Replay),
    /// Reads snapshots of a pool: prints a report, writes a page for a browser, or compares two snapshots.
    Memory(memory::Memory),
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Devices => devices::run(),
        Command::Plan(plan) => plan.run(),
        Command::Replay(replay) => replay.run(),
        Command::Memory(memory) => memory.run(),
    }
}
