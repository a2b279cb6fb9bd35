//! Benchmarks of single operations, allocation and training steps. Prints JSON lines, and a table of ours and a peer's.
//!
//! `peers/torch_bench.py` prints the same lines for PyTorch, with equal sizes and timing: the median of samples of
//! about 10 ms, each ended by a synchronisation. Run both on one machine, one after the other.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use forebay::device::Device;
use forebay::prelude::*;

mod attention;
mod batches;
mod catalog;
mod compare;
mod eager;
mod gpt;
mod host_cost;
mod long_reductions;
mod loss_curve;
mod mlp;
mod models;
mod offload;
mod ops;
mod peer_copies;
mod recurrent;
mod resize;
mod scatter;
mod shared;
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
        /// Device id: `cuda:0`, `wgpu:0`.
        #[arg(long)]
        device: Option<String>,
        /// Small sizes, as a smoke test.
        #[arg(long)]
        tiny: bool,
        /// Prints the kernel times of gpt's step and writes its timeline to this file (Chrome's trace format); mlp
        /// and vision write next to it.
        #[arg(long)]
        profile: Option<PathBuf>,
        /// Runs each group on a wgpu device, and then on a device of the same adapter that a program shares
        /// (`Device::from_wgpu`). The backend of the second line is `wgpu-shared`.
        #[arg(long)]
        shared_device: bool,
        /// Runs each group this often. With --shared-device, the devices take turns; `compare` prints medians.
        #[arg(long, default_value_t = 1)]
        rounds: usize,
        /// Sequences a step of the group gpt, instead of those of each model.
        #[arg(long)]
        batch: Option<usize>,
        /// Timed steps of each model of the group models.
        #[arg(long, default_value_t = 20)]
        steps: usize,
        /// Only groups with one of these names: matmul, elementwise, reduce, order, scatter, resize, rows, attention,
        /// alloc, eager, copies, mlp, recurrent, vision, gpt, models; `models/unet` and `gpt/medium` are single models.
        only: Vec<String>,
    },
    /// Trains GPT-2 124M on a text, eagerly and captured, and writes the losses for `peers/gpt2_curve.py`.
    Curve {
        /// Folder of the initial weights and the losses.
        folder: PathBuf,
        /// Device id: `cuda:0`, `wgpu:0`.
        #[arg(long)]
        device: Option<String>,
        /// Number of steps; a batch has 8 sequences.
        #[arg(long, default_value_t = 300)]
        steps: usize,
        /// Small model, as a smoke test.
        #[arg(long)]
        tiny: bool,
    },
    /// Benchmarks every operation of the conformance suite's catalog, and prints a JSON line for each: bytes moved,
    /// or floating-point operations of matrix products, per second.
    Catalog {
        /// Device id: `cuda:0`, `wgpu:0`.
        #[arg(long)]
        device: Option<String>,
        /// Float type: f32, f16, bf16 or f64.
        #[arg(long, default_value = "f32")]
        dtype: String,
        /// Also measures forward plus backward.
        #[arg(long)]
        gradients: bool,
        /// Small sizes, as a smoke test.
        #[arg(long)]
        tiny: bool,
        /// Only cases whose name contains one of these.
        only: Vec<String>,
    },
    /// Measures the host's time of eager training steps on the null device, which computes nothing: the steps of
    /// `run models`. Needs no GPU.
    Host {
        /// Card that the null device imitates.
        #[arg(long, default_value = "h100")]
        card: String,
        /// Also prints the launches of a step, by operation and kernel, with the bytes of their operands.
        #[arg(long)]
        launches: bool,
        /// Counts and prints the launches of a captured step. The times are those of eager steps.
        #[arg(long)]
        captured: bool,
        /// Number of steps, in five samples.
        #[arg(long, default_value_t = 100)]
        steps: usize,
        /// Models; all without names.
        models: Vec<String>,
    },
    /// Prints a table that compares our lines with the peer's lines for the same work, and with each other.
    Compare {
        /// Files of our lines.
        ours: Vec<PathBuf>,
        /// File of the peer's lines.
        #[arg(long)]
        peer: Option<PathBuf>,
    },
}

/// Fails if one of the names is `models/` with an unknown model.
fn check_models(only: &[String]) -> Result<()> {
    for model in only.iter().filter_map(|name| name.strip_prefix("models/")) {
        if !models::names().any(|known| known == model) {
            let known: Vec<&str> = models::names().collect();
            bail!("there is no model `{model}`; choose one of {}", known.join(", "));
        }
    }
    Ok(())
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
        Command::Run { device, tiny, profile, shared_device, rounds, batch, steps, only } => {
            let device = open(device)?;
            check_models(&only)?;
            if batch == Some(0) {
                bail!("--batch takes at least 1 sequence, not 0");
            }
            if steps == 0 {
                bail!("--steps takes at least 1 step, not 0");
            }
            let shared = shared_device.then(|| shared::open_shared(&device)).transpose()?;
            let bench = Bench::new(&device, tiny, profile).only(only.clone()).batch(batch).steps(steps);
            let shared = shared
                .as_ref()
                .map(|device| Bench::new(device, tiny, None).only(only).batch(batch).steps(steps).shared());
            type Group = fn(&Bench<'_>) -> Result<()>;
            let groups: [(&str, Group); 18] = [
                ("matmul", ops::matmul),
                ("batches", batches::batches),
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
                ("copies", peer_copies::peer_copies),
                ("mlp", mlp::mlp),
                ("recurrent", recurrent::recurrent),
                ("vision", vision::vision),
                ("gpt", gpt::gpt),
                ("models", models::models),
            ];
            for (name, group) in groups {
                let turns = (0..rounds).flat_map(|_| [Some(&bench), shared.as_ref()]);
                for bench in turns.flatten() {
                    if bench.wants_group(name) {
                        group(bench)?;
                        // Both devices are one card.
                        bench.device.pool().empty_cache()?;
                    }
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
        Command::Host { card, launches, captured, steps, models } => {
            host_cost::bench_host(&card, steps, launches, captured, &models)
        }
        Command::Compare { ours, peer } => compare::print_table(&ours, peer.as_deref()),
    }
}
