//! `forebay`: answers about memory on the command line. None of them needs a GPU.

use anyhow::Result;
use clap::{Parser, Subcommand};

mod replay;

#[derive(Parser)]
#[command(name = "forebay", version, about = "Answers about GPU memory, without a GPU")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What the pool would make of a recorded workload, under one configuration or several.
    Replay(replay::Replay),
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Replay(replay) => replay.run(),
    }
}
