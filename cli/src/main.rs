//! `forebay`: command-line tools for memory. Only `devices` needs a GPU.

use anyhow::Result;
use clap::{Parser, Subcommand};

mod devices;
mod memory;
mod plan;
mod replay;

#[derive(Parser)]
#[command(name = "forebay", version, about = "Plans, replays and inspects GPU memory use")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the devices of this machine, their memory use by process, and unavailable backends with the reason.
    Devices,
    /// Finds the fastest training configuration that fits a memory budget, and lists the alternatives.
    Plan(plan::PlanArgs),
    /// Replays recorded allocations against the memory pool, under one or more configurations.
    Replay(replay::ReplayArgs),
    /// Reports, draws and compares snapshots of a memory pool.
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
