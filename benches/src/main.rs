//! What forebay measures: single operations, allocation and a training step, as JSON lines, and the table that sets
//! them beside a peer's.
//!
//! `peers/torch_bench.py` prints the same lines for PyTorch, with the same sizes and the same way of timing: the median
//! of samples of about 10 ms, each ended by a synchronise. Run both on one machine, one after the other.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};
use forebay::device::Device;
use forebay::prelude::*;

mod attention;
mod compare;
mod copies;
mod gpt;
mod mlp;
mod operations;
mod resize;
mod timing;

use timing::Bench;

#[derive(Parser)]
#[command(about = "Measures forebay on a device; compares the lines with a peer's")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Prints a JSON line for each measurement.
    Run {
        /// A device id: `cuda:0`, `wgpu:0`.
        #[arg(long)]
        device: Option<String>,
        /// Small sizes: does it run at all.
        #[arg(long)]
        tiny: bool,
        /// Writes a timeline of one step of gpt to this file (Chrome's trace format), and prints its kernels.
        #[arg(long)]
        profile: Option<PathBuf>,
        /// Only groups with one of these names: matmul, elementwise, reduce, resize, attention, alloc, copies, mlp, gpt.
        only: Vec<String>,
    },
    /// Prints a table: each of our lines beside the peer's line for the same work.
    Compare {
        /// Our lines.
        ours: Vec<PathBuf>,
        /// The peer's lines.
        #[arg(long)]
        peer: PathBuf,
    },
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Run { device, tiny, profile, only } => {
            let device = match device {
                Some(id) => Device::open(&id)?,
                None => Device::best()?,
            };
            eprintln!("{}", device.info());
            let wanted = |name: &str| only.is_empty() || only.iter().any(|o| o == name);
            let bench = Bench::new(&device, tiny);
            type Group = fn(&Bench<'_>) -> Result<()>;
            let groups: [(&str, Group); 8] = [
                ("matmul", operations::matmul),
                ("elementwise", operations::elementwise),
                ("reduce", operations::reduce),
                ("resize", resize::resize),
                ("attention", attention::attention),
                ("alloc", operations::alloc),
                ("copies", copies::copies),
                ("mlp", mlp::mlp),
            ];
            for (name, group) in groups {
                if wanted(name) {
                    group(&bench)?;
                }
            }
            if wanted("gpt") { gpt::gpt(&bench, profile.as_deref()) } else { Ok(()) }
        }
        Command::Compare { ours, peer } => compare::table(&ours, &peer),
    }
}
