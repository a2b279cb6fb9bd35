//! Common questions about GPU memory, one file each, answered by measurements on the current device.
//! docs/src/memory/questions.md explains the answers.
//!
//! `cargo run --release --example memory_questions -- --device wgpu` answers all questions, or the named ones.

mod accumulation;
mod budget;
mod checkpointing;
mod empty_cache;
mod fragmentation;
mod growth;
mod holders;
mod limit;
mod offload;
mod preallocate;
mod precision;
mod training;

use std::sync::Arc;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use forebay::memory::{Bytes, Config, Pool};
use forebay::prelude::*;

const MIB: u64 = 1 << 20;

/// Answers questions about GPU memory by measuring.
#[derive(Parser)]
struct Options {
    /// Questions to answer; all of them by default.
    question: Vec<Question>,
    /// Device: cuda:0, wgpu:0, ...; the best one by default.
    #[arg(long, env = "FOREBAY_DEVICE")]
    device: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Question {
    /// Does it preallocate?
    Preallocate,
    /// Question: how do I give it less, or all there is?
    Limit,
    /// Why out of memory, with so much free?
    Fragmentation,
    /// Does emptying the cache help?
    EmptyCache,
    /// Question: what holds my memory?
    Holders,
    /// Does my memory grow?
    Growth,
    /// Question: what does accumulation save?
    Accumulation,
    /// Question: what does checkpointing save?
    Checkpointing,
    /// Question: what does mixed precision save?
    Precision,
    /// Question: what does offload to the host save?
    Offload,
    /// Can a step be given bytes?
    Budget,
}

impl Question {
    fn answer(self, device: &Device) -> Result<()> {
        match self {
            Self::Preallocate => preallocate::answer(device),
            Self::Limit => limit::answer(device),
            Self::Fragmentation => fragmentation::answer(device),
            Self::EmptyCache => empty_cache::answer(device),
            Self::Holders => holders::answer(device),
            Self::Growth => growth::answer(device),
            Self::Accumulation => accumulation::answer(device),
            Self::Checkpointing => checkpointing::answer(device),
            Self::Precision => precision::answer(device),
            Self::Offload => offload::answer(device),
            Self::Budget => budget::answer(device),
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    println!("{}", device.info());
    for question in Question::value_variants() {
        if options.question.is_empty() || options.question.contains(question) {
            let name = question.to_possible_value().and_then(|v| v.get_help().map(ToString::to_string));
            println!("\n== {}", name.unwrap_or_default());
            // Each answer uses its own pool, so that other answers' memory does not count.
            question.answer(&with_empty_pool(&device, Config::default()))?;
        }
    }
    Ok(())
}

/// Returns the same device with an empty pool.
fn with_empty_pool(device: &Device, config: Config) -> Device {
    Device::with_config(Arc::clone(device.backend()), config)
}

fn zeros_mib(mib: u64, device: &Device) -> Result<Tensor, Error> {
    Tensor::zeros([(mib * MIB / 4) as usize], DType::F32, device)
}

fn print_pool_usage(what: &str, pool: &Pool) {
    let stats = pool.stats();
    let [allocated, reserved] = [stats.allocated(), stats.reserved()].map(|bytes| Bytes(bytes).to_string());
    println!("{what:<44} {allocated:>10} allocated {reserved:>10} reserved");
}
