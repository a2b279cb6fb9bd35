//! What forebay measures: single operations, allocation and a training step, as JSON lines, and the table that sets
//! them beside a peer's.
//!
//! `peers/torch_bench.py` prints the same lines for PyTorch, with the same sizes and the same way of timing: the median
//! of samples of about 10 ms, each ended by a synchronise. Run both on one machine, one after the other.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use forebay::device::Device;
use forebay::prelude::*;

mod attention;
mod catalog;
mod compare;
mod eager;
mod gpt;
mod long_reductions;
mod loss_curve;
mod mlp;
mod offload;
mod ops;
mod recurrent;
mod resize;
mod scatter;
mod timing;
mod vision;

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
        /// Writes a timeline of one step of gpt to this file (Chrome's trace format), those of mlp and vision beside it, and prints their kernels.
        #[arg(long)]
        profile: Option<PathBuf>,
        /// Only groups with one of these names: matmul, elementwise, reduce, order, scatter, resize, rows, attention, alloc, eager, copies,
        /// mlp, recurrent, vision, gpt.
        only: Vec<String>,
    },
    /// Trains GPT-2 124M on a text, eagerly and captured, and writes the losses; `peers/gpt2_curve.py` sets PyTorch's beside them.
    Curve {
        /// Where the weights that it begins with and the losses go.
        folder: PathBuf,
        /// A device id: `cuda:0`, `wgpu:0`.
        #[arg(long)]
        device: Option<String>,
        /// Steps of 8 passages.
        #[arg(long, default_value_t = 300)]
        steps: usize,
        /// A small model: does it run at all.
        #[arg(long)]
        tiny: bool,
    },
    /// Measures every operation that the conformance suite has a record of, and prints a JSON line for each: bytes that it has to move a
    /// second, or operations of its products.
    Catalog {
        /// A device id: `cuda:0`, `wgpu:0`.
        #[arg(long)]
        device: Option<String>,
        /// The type of floats: f32, f16, bf16 or f64.
        #[arg(long, default_value = "f32")]
        dtype: String,
        /// Both passes as well.
        #[arg(long)]
        gradients: bool,
        /// Small sizes: does it run at all.
        #[arg(long)]
        tiny: bool,
        /// Only records whose name contains one of these.
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
    let open = |device: Option<String>| -> Result<Device> {
        let device = match device {
            Some(id) => Device::open(&id)?,
            None => Device::best()?,
        };
        eprintln!("{}", device.info());
        Ok(device)
    };
    match Cli::parse().command {
        Command::Run { device, tiny, profile, only } => {
            let device = open(device)?;
            let wanted = |name: &str| only.is_empty() || only.iter().any(|o| o == name);
            let bench = Bench::new(&device, tiny, profile);
            type Group = fn(&Bench<'_>) -> Result<()>;
            let groups: [(&str, Group); 15] = [
                ("matmul", ops::matmul),
                ("elementwise", ops::elementwise),
                ("reduce", ops::reduce),
                ("order", ops::sort),
                ("scatter", scatter::scatter),
                ("resize", resize::resize),
                ("rows", long_reductions::long_reductions),
                ("attention", attention::attention),
                ("alloc", ops::allocation),
                ("eager", eager::eager),
                ("copies", offload::offload),
                ("mlp", mlp::mlp),
                ("recurrent", recurrent::recurrent),
                ("vision", vision::vision),
                ("gpt", gpt::gpt),
            ];
            for (name, group) in groups {
                if wanted(name) {
                    group(&bench)?;
                }
            }
            Ok(())
        }
        Command::Catalog { device, dtype, gradients, tiny, only } => {
            let known = [DType::F32, DType::F16, DType::BF16, DType::F64];
            let Some(dtype) = known.into_iter().find(|known| known.name() == dtype) else {
                bail!("--dtype takes f32, f16, bf16 or f64, not {dtype}");
            };
            let device = open(device)?;
            catalog::bench_catalog(&Bench::new(&device, tiny, None), dtype, gradients, &only)
        }
        Command::Curve { folder, device, steps, tiny } => {
            loss_curve::write_loss_curves(&open(device)?, &folder, steps, tiny)
        }
        Command::Compare { ours, peer } => compare::print_table(&ours, &peer),
    }
}
