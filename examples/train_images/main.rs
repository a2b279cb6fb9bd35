//! Trains a small convolutional network on Fashion-MNIST, tests it, and writes its curves and weights.
//!
//! `cargo run --release --example train_images -- --help`, or `cargo xtask train`, which first fetches data and
//! drivers. On a GPU the training takes seconds and reaches 90 %. A software driver trains a smaller network.

mod net;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use forebay::optim::GradScaler;
use forebay::optim::schedule::OneCycle;
use forebay::prelude::*;
use forebay::train::{self, FitStatus};

use net::Net;

/// Trains a small convolutional network on Fashion-MNIST.
#[derive(Parser)]
struct Options {
    /// Device: cuda:0, wgpu:0, ...; the best one by default.
    #[arg(long, env = "FOREBAY_DEVICE")]
    device: Option<String>,
    /// Steps to train; ten epochs on a GPU by default.
    #[arg(long)]
    steps: Option<u64>,
    /// Samples in a batch.
    #[arg(long, value_parser = count_parser())]
    batch: Option<usize>,
    /// Peak learning rate.
    #[arg(long, default_value_t = 3e-3)]
    lr: f64,
    /// Seed of weights, dropout and the order of the data.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Channels of the first convolution.
    #[arg(long, value_parser = count_parser())]
    width: Option<usize>,
    /// Folder of the data set; by default the usual places are searched.
    #[arg(long)]
    data: Option<PathBuf>,
    /// File of the weights; curves (.svg) and checkpoint (.checkpoint) are next to it.
    #[arg(long, default_value = "out/train_images.safetensors")]
    save: PathBuf,
    /// Mixed precision: matrix products in f16 with loss scaling, or in bf16.
    #[arg(long)]
    amp: Option<Amp>,
    /// Batches in a step, whose gradients are accumulated.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    accumulate: u32,
    /// Resumes from a checkpoint.
    #[arg(long)]
    resume: Option<PathBuf>,
    /// Also writes step, loss and accuracy as CSV.
    #[arg(long)]
    curve: Option<PathBuf>,
    /// Also records memory events for `forebay memory`; in PyTorch's format if the name ends in .pickle.
    #[arg(long, value_name = "FILE")]
    memory_snapshot: Option<PathBuf>,
}

/// Returns the parser of options that count something, at least 1.
fn count_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(u32::MAX))
}

/// Type of matrix products in mixed precision.
#[derive(Clone, Copy, ValueEnum)]
enum Amp {
    F16,
    Bf16,
}

fn load_dataset(folder: Option<&Path>, part: &str) -> forebay::error::Result<FashionMnist> {
    let set = match (folder, part) {
        (Some(folder), part) => FashionMnist::open(folder, part),
        (None, "train") => FashionMnist::train(),
        (None, _) => FashionMnist::test(),
    };
    Ok(set?.with_image_shape())
}

fn main() -> Result<()> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    let software = device.info().software;
    let batch = options.batch.unwrap_or(if software { 32 } else { 128 });
    let steps = options.steps.unwrap_or(if software { 400 } else { 4680 });
    let width = options.width.unwrap_or(if software { 8 } else { 32 });

    let (train, test) =
        (load_dataset(options.data.as_deref(), "train")?, load_dataset(options.data.as_deref(), "t10k")?);
    println!("{}", device.info());
    println!("{} training and {} test images of {}", train.len(), test.len(), train.folder().display());

    if options.memory_snapshot.is_some() {
        device.pool().start_recording(100_000);
    }
    device.manual_seed(options.seed);
    let net = Net::new(width, &device)?;
    println!("{} parameters, {steps} steps of {batch} images", net.num_parameters());
    let checkpoint = options.save.with_extension("checkpoint");
    let mut trainer = Trainer::new(&net, AdamW::new(net.parameters(), options.lr))
        .schedule(OneCycle::new(options.lr, steps))
        .accumulate(options.accumulate)
        .steps(steps)
        .checkpoint(&checkpoint, 1000)
        .stop_on_signals();
    trainer = match options.amp {
        Some(Amp::F16) => trainer.autocast(DType::F16).scaler(GradScaler::new()),
        Some(Amp::Bf16) => trainer.autocast(DType::BF16),
        None => trainer,
    };
    if let Some(path) = &options.resume {
        trainer = trainer.resume(path)?;
    }
    let ended = trainer.fit(&train.shuffle(options.seed).batches(batch).drop_last(), |x, y| {
        let logits = net.forward(x)?;
        Ok((logits.cross_entropy(y)?, train::accuracy(&logits, y)?))
    });
    // A run that failed for lack of memory writes its snapshot, too.
    if let Some(path) = &options.memory_snapshot {
        device.pool().snapshot().save(path)?;
    }
    let ended = ended?;

    let history = trainer.history();
    history.write_svg(options.save.with_extension("svg"))?;
    if let Some(path) = &options.curve {
        history.write_csv(path)?;
    }
    if ended == FitStatus::Interrupted {
        println!(
            "stopped after {} steps; continue with --resume {}",
            trainer.steps_done(),
            checkpoint.display()
        );
        return Ok(());
    }
    forebay::io::safetensors::save(&options.save, &net.state_dict(), &Default::default())?;
    println!("curves and weights: {0}.svg, {0}.safetensors", options.save.with_extension("").display());
    for step in [10, trainer.steps_done()] {
        let memory = history.memory_after(step).context("fewer than 10 steps")?;
        println!(
            "memory after step {step}: {} bytes allocated, {} reserved",
            memory.allocated, memory.reserved
        );
    }
    println!("{}", device.memory());

    let accuracy = train::evaluate(&net, &test.batches(500), |x| net.forward(x))?;
    println!(
        "test accuracy {:.1} % after {} steps (device {device})",
        100.0 * accuracy,
        trainer.steps_done()
    );
    Ok(())
}
