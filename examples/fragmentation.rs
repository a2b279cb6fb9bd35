//! Trains under a limit just above the bytes that the program requests. Batches grow and shrink, which fragments free
//! memory. With PyTorch's rules the pool runs out of memory although enough is free; Forebay's rules avoid this.
//!
//! `cargo run --release --example fragmentation -- --device wgpu`; see also benches/peers/fragmentation.py.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, ensure};
use clap::Parser;
use forebay::backend::null::{CardProfile, NullBackend};
use forebay::memory::{Bytes, Config};
use forebay::nn::FnLayer;
use forebay::plan::dry_run;
use forebay::prelude::*;

/// Trains with growing and shrinking batches under a limit just above their peak of requested bytes.
#[derive(Parser)]
struct Options {
    /// Device: cuda:0, wgpu:0, ...; the best one by default.
    #[arg(long, env = "FOREBAY_DEVICE")]
    device: Option<String>,
    /// Percentage by which the pool's limit exceeds the peak of requested bytes.
    #[arg(long, default_value_t = 10)]
    slack: u64,
    /// Also writes every allocation and free as a snapshot, for `forebay memory` and benches/peers/fragmentation.py.
    #[arg(long, value_name = "FILE")]
    memory_snapshot: Option<PathBuf>,
}

/// Multilayer perceptron and its batches.
#[derive(Clone, Copy)]
struct Workload {
    /// Batch sizes are multiples of this number of rows.
    batch_unit: usize,
    inputs: usize,
    width: usize,
    /// Number of linear layers, each followed by layer norm and GELU.
    layers: usize,
    steps: usize,
}

const LARGE: Workload = Workload { batch_unit: 256, inputs: 784, width: 512, layers: 6, steps: 22 };
/// Sizes for a software driver.
const SMALL: Workload = Workload { batch_unit: 128, inputs: 64, width: 96, layers: 8, steps: 11 };
/// Batch sizes in units.
const BATCH_UNITS: [usize; 11] = [1, 8, 2, 9, 3, 10, 4, 12, 6, 16, 8];
const CLASSES: usize = 10;

impl Workload {
    /// Returns the number of rows of every step's batch.
    fn batch_sizes(self) -> impl Iterator<Item = usize> {
        BATCH_UNITS.iter().cycle().take(self.steps).map(move |units| units * self.batch_unit)
    }

    /// Trains, and appends the loss of every step to `losses`.
    fn train(self, device: &Device, losses: &mut Vec<f64>) -> Result<(), Error> {
        device.manual_seed(1);
        let mut net = Sequential::new();
        for layer in 0..self.layers {
            let inputs = if layer == 0 { self.inputs } else { self.width };
            net = net
                .add(Linear::new(inputs, self.width, device)?)
                .add(LayerNorm::new([self.width], device)?)
                .add(FnLayer(Tensor::gelu));
        }
        let net = net.add(Linear::new(self.width, CLASSES, device)?);
        let mut optimizer = Sgd::new(net.parameters(), 0.05).momentum(0.9);
        // The classes are points around one centre each.
        let centres = Tensor::randn([CLASSES, self.inputs], DType::F32, device)?;
        for rows in self.batch_sizes() {
            let y = Tensor::randint(0, CLASSES as i64, [rows], DType::I64, device)?;
            let x =
                Tensor::randn([rows, self.inputs], DType::F32, device)?.add(&centres.index_select(0, &y)?)?;
            let loss = net.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            losses.push(loss.item()?);
        }
        Ok(())
    }

    /// Finds the smallest limit under which a device of this profile trains with these rules, by dry runs, to a
    /// part in 500.
    fn find_min_limit(self, profile: &CardProfile, rules: Config, requested: u64) -> u64 {
        let fits = |limit| {
            let config = Config { max_memory: Some(limit), ..rules };
            let device = Device::with_config(Arc::new(NullBackend::new(profile.clone())), config);
            self.train(&device, &mut Vec::new()).is_ok()
        };
        let (mut low, mut high) = (requested, 4 * requested);
        while high - low > requested / 500 {
            let middle = low.midpoint(high);
            if fits(middle) { high = middle } else { low = middle }
        }
        high
    }

    /// Trains within the limit with these rules; returns false if memory ran out.
    fn train_within_limit(self, device: &Device, rules: Config, limit: u64) -> Result<bool> {
        let config = Config { max_memory: Some(limit), ..rules };
        let device = Device::with_config(Arc::clone(device.backend()), config);
        let mut losses = Vec::new();
        let ended = self.train(&device, &mut losses);
        let done = losses.len();
        if let Err(error) = ended {
            let full = error.into_out_of_memory()?;
            let [requested, held, left, piece] =
                [full.requested, full.allocated, limit - full.allocated, full.largest_free].map(Bytes);
            let rows = self.batch_sizes().nth(done).unwrap_or(0);
            println!("out of memory after {done} of {} steps, with {rows} rows:", self.steps);
            println!(
                "  {} requested {requested}: {held} are allocated, {left} of the limit are left:",
                full.op
            );
            println!("  {} of that are free, in pieces of up to {piece}", Bytes(full.cached));
            return Ok(false);
        }
        let (first, last) = (losses[0], losses[done - 1]);
        println!("{done} of {} steps, loss {first:.3} to {last:.3}", self.steps);
        println!("  {} were reserved at the peak", Bytes(device.memory().peak_reserved()));
        ensure!(device.is_null() || last < first / 2.0, "the loss does not fall");
        Ok(true)
    }
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    println!("{}", device.info());
    let sizes = if device.info().software { SMALL } else { LARGE };
    let profile = CardProfile::from_device(&device);
    let dry = dry_run(&profile, |dry| {
        sizes.train(dry, &mut Vec::new())?;
        if let Some(path) = &options.memory_snapshot {
            dry.pool().snapshot().save(path)?;
        }
        Ok(())
    })?;
    let requested = dry.peak_requested;
    let limit = requested * (100 + options.slack) / 100;
    println!(
        "{} steps of {} to {} rows request {} at the peak",
        sizes.steps,
        sizes.batch_unit,
        16 * sizes.batch_unit,
        Bytes(requested)
    );
    println!("the pool may take {}: {} % more", Bytes(limit), options.slack);
    let rules = [("this pool", Config::default()), ("PyTorch's rules", Config::pytorch())];
    let mut ended = Vec::new();
    for (name, rules) in rules {
        print!("\n{name}: ");
        ended.push(sizes.train_within_limit(&device, rules, limit)?);
        let least = sizes.find_min_limit(&profile, rules, requested);
        let more = 100.0 * (least as f64 / requested as f64 - 1.0);
        println!("  the smallest limit that would do, by dry runs: {}, {more:.1} % more", Bytes(least));
    }
    Ok(if ended == [true, false] { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
