//! The command line, and what follows from it and the device.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use forebay::memory::Bytes;
use forebay::nn::GptOptions;
use forebay::prelude::*;

/// The preset for devices that are no GPU.
const TINY: &str = "tiny";

/// Trains GPT-2 on a text, from scratch or from published weights, and lets it write.
#[derive(Parser)]
pub(crate) struct Options {
    /// The device: cuda:0, wgpu:0, ...; the best one if not given.
    #[arg(long, env = "FOREBAY_DEVICE")]
    pub(crate) device: Option<String>,
    /// The model's size: 124, 350, 774 or 1558 million parameters from gpt2 on; gpt2 if not given, tiny on a program that plays a GPU.
    #[arg(long, value_parser = [TINY, "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])]
    preset: Option<String>,
    /// Starts from a file of GPT-2's weights (model.safetensors), whose sizes it takes; wants --tokenizer.
    #[arg(long, value_name = "FILE", requires = "tokenizer", conflicts_with = "preset")]
    pub(crate) load: Option<PathBuf>,
    /// A text in UTF-8; else Shakespeare's plays.
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// A tokenizer.json, such as GPT-2's own; else one is trained on the text, and saved beside the weights.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Tokens of a tokenizer that is trained.
    #[arg(long)]
    vocabulary: Option<usize>,
    /// Steps to train.
    #[arg(long)]
    steps: Option<u64>,
    /// Passages in a batch.
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens in a passage, which are the model's context.
    #[arg(long)]
    length: Option<usize>,
    /// Batches in a step, whose gradients are added up.
    #[arg(long, default_value_t = 1)]
    pub(crate) accumulate: u32,
    /// The highest learning rate; 6e-4 if not given, 3e-3 for the tiny model, 5e-5 from weights of a file.
    #[arg(long)]
    lr: Option<f64>,
    /// Steps until that is reached; a twentieth of all if not given. Then it falls to a tenth of it.
    #[arg(long)]
    pub(crate) warmup: Option<u64>,
    /// How fast matrices decay; biases and the weights of norms do not.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) weight_decay: f64,
    /// The norm that gradients are scaled down to.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) clip: f64,
    /// The part of the values that is dropped in training.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) dropout: f64,
    /// The type of products; bf16 on CUDA if not given, else f32.
    #[arg(long)]
    amp: Option<Amp>,
    /// Computes every block again in the backward pass, which saves the memory of what it keeps.
    #[arg(long)]
    pub(crate) recompute: bool,
    /// Records the second step and replays it: less work for the host, the same bits. Its memory stays its own while the text is validated.
    #[arg(long, conflicts_with_all = ["budget", "profile"])]
    pub(crate) capture: bool,
    /// Bytes that training may take, as 4GiB: passages at once and blocks that are computed again are chosen to fit.
    #[arg(long, conflicts_with = "recompute")]
    pub(crate) budget: Option<Bytes>,
    /// Determines weights, dropout, the order of the data and what is written.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Steps between two looks at the text that is not trained on; a tenth of all, but at least 50, if not given.
    #[arg(long)]
    pub(crate) validate: Option<u64>,
    /// Where weights go, in GPT-2's format; the curves (.svg), the tokenizer (.tokenizer.json) and the checkpoint (.checkpoint) go
    /// beside them.
    #[arg(long, default_value = "out/train_gpt.safetensors")]
    pub(crate) save: PathBuf,
    /// Steps between two checkpoints; there is one at the end and on Ctrl-C too.
    #[arg(long, default_value_t = 500)]
    pub(crate) checkpoint_every: u64,
    /// Goes on from a checkpoint, with the same bits as if the run had not stopped; other options as they were.
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Also writes step, loss and validation loss as CSV.
    #[arg(long, value_name = "FILE")]
    pub(crate) curve: Option<PathBuf>,
    /// Prints what kernels of a few steps took, and writes them as a timeline for chrome://tracing and Perfetto.
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Also records what happens to memory, for `forebay memory`; PyTorch's form if the name ends in .pickle.
    #[arg(long, value_name = "FILE")]
    pub(crate) memory_snapshot: Option<PathBuf>,
    /// What the text that is written at the end begins with.
    #[arg(long, default_value = "\n")]
    pub(crate) prompt: String,
    /// Tokens to write at the end.
    #[arg(long)]
    generate: Option<usize>,
    /// How bold the writing is: below 1 likely tokens become likelier, 0 takes the likeliest.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Draws among the likeliest so many; 0 is all.
    #[arg(long, default_value_t = 50)]
    pub(crate) top_k: usize,
}

/// The type of products.
#[derive(Clone, Copy, ValueEnum)]
enum Amp {
    F32,
    F16,
    Bf16,
}

/// What a run's numbers come to.
pub(crate) struct RunConfig {
    /// The model's; vocabulary, context and dropout are settled elsewhere.
    pub(crate) model: GptOptions,
    pub(crate) vocabulary: usize,
    pub(crate) steps: u64,
    pub(crate) batch: usize,
    pub(crate) length: usize,
    /// In a step.
    pub(crate) tokens: u64,
    pub(crate) lr: f64,
    /// The 16-bit type of products.
    pub(crate) precision: Option<DType>,
    pub(crate) tokens_to_generate: usize,
}

impl RunConfig {
    /// What was asked for, and for the rest what suits the model and the device.
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
        Ok(Self {
            model,
            vocabulary: pick(options.vocabulary, 16_384, 512),
            steps: options.steps.unwrap_or(if tiny { 300 } else { 2000 }),
            batch,
            length,
            tokens: (batch * length) as u64 * u64::from(options.accumulate),
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
