//! Command-line options, and settings derived from them and the device.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use forebay::memory::Bytes;
use forebay::nn::GptOptions;
use forebay::prelude::*;

/// Preset for software drivers.
const TINY: &str = "tiny";

/// Trains GPT-2 on a text, from scratch or from published weights, and generates text.
#[derive(Parser)]
pub(crate) struct Options {
    /// Device: cuda:0, wgpu:0, ...; the best one by default.
    #[arg(long, env = "FOREBAY_DEVICE")]
    pub(crate) device: Option<String>,
    /// Model size: from gpt2 on, 124, 350, 774 or 1558 million parameters; default: gpt2, tiny on a software driver.
    #[arg(long, value_parser = [TINY, "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])]
    preset: Option<String>,
    /// Starts from a file of GPT-2's weights (model.safetensors) and takes its sizes; requires --tokenizer.
    #[arg(long, value_name = "FILE", requires = "tokenizer", conflicts_with = "preset")]
    pub(crate) load: Option<PathBuf>,
    /// Text in UTF-8; Shakespeare's plays by default.
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// A tokenizer.json, such as GPT-2's own. By default one is trained on the text and saved next to the weights.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Vocabulary of a trained tokenizer.
    #[arg(long, value_parser = count_parser())]
    vocabulary: Option<usize>,
    /// Steps to train.
    #[arg(long)]
    steps: Option<u64>,
    /// Sequences in a batch.
    #[arg(long, value_parser = count_parser())]
    batch: Option<usize>,
    /// Tokens in a sequence, which is the model's context.
    #[arg(long, value_parser = count_parser())]
    length: Option<usize>,
    /// Batches in a step, whose gradients are accumulated.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) accumulate: u32,
    /// Peak learning rate; by default 6e-4, 3e-3 for the tiny model, 5e-5 from weights of a file.
    #[arg(long)]
    lr: Option<f64>,
    /// Warm-up steps; by default a twentieth of all steps. Afterwards the rate decays to a tenth of its peak.
    #[arg(long)]
    pub(crate) warmup: Option<u64>,
    /// Weight decay of matrices; biases and norm weights do not decay.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) weight_decay: f64,
    /// Maximum norm of the gradients; larger ones are scaled down.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) clip: f64,
    /// Dropout probability in training.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) dropout: f64,
    /// Type of matrix products; bf16 on CUDA by default, else f32.
    #[arg(long)]
    amp: Option<Amp>,
    /// Recomputes every block in the backward pass, which saves the memory of its activations.
    #[arg(long)]
    pub(crate) recompute: bool,
    /// Captures the second step and replays it: less host work, identical results. Validation cannot share its memory.
    #[arg(long, conflicts_with_all = ["budget", "profile"])]
    pub(crate) capture: bool,
    /// Bytes that training may take, such as 4GiB. Sequences at once and recomputed blocks are chosen to fit.
    #[arg(long, conflicts_with = "recompute")]
    pub(crate) budget: Option<Bytes>,
    /// Seed of weights, dropout, the order of the data and the generated text.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Steps between two validations; by default a tenth of all steps, but at least 50.
    #[arg(long)]
    pub(crate) validate: Option<u64>,
    /// File of the weights, in GPT-2's format. Curves (.svg), tokenizer (.tokenizer.json) and checkpoint
    /// (.checkpoint) are next to it.
    #[arg(long, default_value = "out/train_gpt.safetensors")]
    pub(crate) save: PathBuf,
    /// Steps between two checkpoints; one is also written at the end and on Ctrl-C.
    #[arg(long, default_value_t = 500)]
    pub(crate) checkpoint_every: u64,
    /// Resumes from a checkpoint with identical results; all other options must be the same.
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Also writes step, loss and validation loss as CSV.
    #[arg(long, value_name = "FILE")]
    pub(crate) curve: Option<PathBuf>,
    /// Prints the kernel times of a few steps, and writes a timeline for chrome://tracing and Perfetto.
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Also records memory events for `forebay memory`; in PyTorch's format if the name ends in .pickle.
    #[arg(long, value_name = "FILE")]
    pub(crate) memory_snapshot: Option<PathBuf>,
    /// Prompt of the text that is generated at the end.
    #[arg(long, default_value = "\n")]
    pub(crate) prompt: String,
    /// Tokens to generate at the end.
    #[arg(long)]
    generate: Option<usize>,
    /// Sampling temperature: below 1 sharpens the distribution, 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Samples among this many likeliest tokens; 0 means all.
    #[arg(long, default_value_t = 50)]
    pub(crate) top_k: usize,
}

/// Returns the parser of options that count something, at least 1.
fn count_parser() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(u32::MAX))
}

/// Type of matrix products.
#[derive(Clone, Copy, ValueEnum)]
enum Amp {
    F32,
    F16,
    Bf16,
}

/// Settings of a run after defaults are applied.
pub(crate) struct RunConfig {
    /// Sizes of the model; vocabulary, context and dropout are set elsewhere.
    pub(crate) model: GptOptions,
    pub(crate) vocabulary: usize,
    pub(crate) steps: u64,
    pub(crate) batch: usize,
    pub(crate) length: usize,
    /// Tokens in a step.
    pub(crate) tokens: u64,
    pub(crate) lr: f64,
    /// 16-bit type of matrix products.
    pub(crate) precision: Option<DType>,
    pub(crate) tokens_to_generate: usize,
}

impl RunConfig {
    /// Applies the user's options, and defaults that depend on the model and the device.
    pub(crate) fn new(options: &Options, device: &Device) -> Result<Self> {
        let info = device.info();
        let preset = options.preset.as_deref().unwrap_or(if info.software { TINY } else { "gpt2" });
        let tiny = preset == TINY && options.load.is_none();
        let pick = |given: Option<usize>, whole, small| given.unwrap_or(if tiny { small } else { whole });
        let rate = match (&options.load, tiny) {
            (Some(_), _) => 5e-5,
            (None, true) => 3e-3,
            (None, false) => 6e-4,
        };
        let model = match preset {
            TINY => GptOptions { vocabulary: 0, context: 0, layers: 2, heads: 1, width: 64, dropout: 0.0 },
            published => GptOptions::preset(published)?,
        };
        let (batch, length) = (pick(options.batch, 8, 8), pick(options.length, 1024, 32));
        let batches = batch as u64 * u64::from(options.accumulate);
        let tokens = batches.checked_mul(length as u64).with_context(|| {
            format!(
                "a step has no {} x {batch} x {length} tokens: take a smaller --accumulate, --batch or --length",
                options.accumulate
            )
        })?;
        Ok(Self {
            model,
            vocabulary: pick(options.vocabulary, 16_384, 512),
            steps: options.steps.unwrap_or(if tiny { 300 } else { 2000 }),
            batch,
            length,
            tokens,
            lr: options.lr.unwrap_or(rate),
            precision: match options.amp {
                Some(Amp::F32) => None,
                Some(Amp::F16) => Some(DType::F16),
                Some(Amp::Bf16) => Some(DType::BF16),
                None => (info.backend == "cuda").then_some(DType::BF16),
            },
            tokens_to_generate: pick(options.generate, 200, 100),
        })
    }
}
