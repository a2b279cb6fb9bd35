//! Predicts the memory of a training step of 7 billion parameters on a card that this machine lacks, without weights.
//!
//! `cargo run --release --example dry_run -- --card h200`

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use forebay::backend::null::CardProfile;
use forebay::memory::Bytes;
use forebay::nn::{Gpt, GptOptions};
use forebay::plan::{CARDS, dry_run};
use forebay::prelude::*;

/// Predicts the memory of a transformer's training step without running it.
#[derive(Parser)]
struct Options {
    /// Card (h200, rtx4090, ...).
    #[arg(long, default_value = "h200")]
    card: String,
    /// Blocks of the model.
    #[arg(long, default_value_t = 32, value_parser = count_parser())]
    layers: usize,
    /// Features of a token.
    #[arg(long, default_value_t = 4096, value_parser = count_parser())]
    width: usize,
    /// Size of the vocabulary.
    #[arg(long, default_value_t = 32_000, value_parser = count_parser())]
    vocabulary: usize,
    /// Sequences in a batch.
    #[arg(long, default_value_t = 1, value_parser = count_parser())]
    batch: usize,
    /// Tokens in a sequence.
    #[arg(long, default_value_t = 1024, value_parser = count_parser())]
    length: usize,
    /// Also writes a snapshot of the end of the step, with all recorded events, for `forebay memory`.
    #[arg(long, value_name = "FILE")]
    memory_snapshot: Option<PathBuf>,
}

/// Returns the parser of options that count something, at least 1.
fn count_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(u32::MAX))
}

fn main() -> Result<()> {
    let options = Options::parse();
    let start = Instant::now();
    // The most heads of at least 128 features, or one for narrower models.
    let heads =
        (1..=options.width / 128).rev().find(|&heads| options.width.is_multiple_of(heads)).unwrap_or(1);
    let sizes = GptOptions {
        vocabulary: options.vocabulary,
        context: options.length,
        layers: options.layers,
        heads,
        width: options.width,
        dropout: 0.0,
    };
    let mut parameters = 0;
    let run = dry_run(&CardProfile::from_card(&options.card)?, |device| {
        let net = Gpt::new(&sizes, device)?;
        parameters = net.num_parameters();
        let mut optimizer = AdamW::new(net.parameters(), 1e-4);
        for _ in 0..2 {
            let text = Tensor::zeros([options.batch, options.length], DType::I64, device)?;
            let logits = net.forward(&text)?.flatten(0, 1)?;
            logits.cross_entropy(&text.flatten(0, 1)?)?.backward()?;
            drop(logits);
            optimizer.step()?;
            optimizer.zero_grad();
        }
        // A dry run records events.
        if let Some(path) = &options.memory_snapshot {
            device.pool().snapshot().save(path)?;
        }
        Ok(())
    })?;
    let duration = start.elapsed();
    println!(
        "{:.2} billion parameters, {} of them alone",
        parameters as f64 / 1e9,
        Bytes(4 * parameters as u64)
    );
    println!("{run}");
    if let Some(refused) = &run.out_of_memory {
        println!("\nthe error of the card:\n{refused}");
    }
    println!("\n{} events, {:.2} s; cards: {}", run.timeline.len(), duration.as_secs_f64(), CARDS.join(", "));
    Ok(())
}
