//! Trains a character-level GPT on Shakespeare, and generates text.
//!
//! `cargo run --release --example train_text -- --help`. On a software driver the model is smaller and the run
//! shorter. `train_gpt` trains larger models, with pieces of words as tokens.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use forebay::autograd::no_grad;
use forebay::backend::null::CardProfile;
use forebay::memory::Bytes;
use forebay::nn::{Gpt, GptOptions, eval_mode};
use forebay::optim::GradScaler;
use forebay::optim::schedule::WarmupCosine;
use forebay::plan::{Budget, StepConfig, StepPlan};
use forebay::prelude::*;
use forebay::train::FitStatus;

/// Trains a character-level GPT on Shakespeare, and generates text.
#[derive(Parser)]
struct Options {
    /// Device: cuda:0, wgpu:0, ...; the best one by default.
    #[arg(long, env = "FOREBAY_DEVICE")]
    device: Option<String>,
    /// Steps to train.
    #[arg(long)]
    steps: Option<u64>,
    /// Sequences in a batch.
    #[arg(long, value_parser = count_parser())]
    batch: Option<usize>,
    /// Characters in a sequence.
    #[arg(long, value_parser = count_parser())]
    length: Option<usize>,
    /// Blocks of the model.
    #[arg(long, value_parser = count_parser())]
    layers: Option<usize>,
    /// Features of a character.
    #[arg(long, value_parser = count_parser())]
    width: Option<usize>,
    /// Peak learning rate.
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// Seed of weights, dropout, the order of the data and the generated text.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Text to train on; Shakespeare by default.
    #[arg(long)]
    data: Option<PathBuf>,
    /// File of the weights; curves (.svg) and checkpoint (.checkpoint) are next to it.
    #[arg(long, default_value = "out/train_text.safetensors")]
    save: PathBuf,
    /// Mixed precision: matrix products in f16 with loss scaling, or in bf16.
    #[arg(long)]
    amp: Option<Amp>,
    /// Batches in a step, whose gradients are accumulated.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    accumulate: u32,
    /// Bytes that training may take, such as 200MiB. Sequences at once, recomputed segments and, if `--amp` is set,
    /// the precision are chosen to fit.
    #[arg(long)]
    budget: Option<Bytes>,
    /// Resumes from a checkpoint.
    #[arg(long)]
    resume: Option<PathBuf>,
    /// Also writes step and loss as CSV.
    #[arg(long)]
    curve: Option<PathBuf>,
    /// Also records memory events for `forebay memory`; in PyTorch's format if the name ends in .pickle.
    #[arg(long, value_name = "FILE")]
    memory_snapshot: Option<PathBuf>,
    /// Characters to generate at the end.
    #[arg(long)]
    generate: Option<usize>,
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

impl Amp {
    fn dtype(self) -> DType {
        match self {
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Returns the loss of sequences `x`, whose next characters are `y`.
fn passage_loss(net: &Gpt, x: &Tensor, y: &Tensor) -> Result<Tensor, Error> {
    net.forward(x)?.flatten(0, 1)?.cross_entropy(&y.flatten(0, 1)?)
}

/// Plans the fastest step of `batch` sequences within this budget.
fn plan_step(sizes: &GptOptions, batch: usize, budget: Budget, device: &Device) -> Result<StepPlan, Error> {
    budget.plan(&CardProfile::from_device(device), |dry| {
        let net = Gpt::new(sizes, dry)?;
        let mut optimizer = AdamW::new(net.parameters(), 1e-3);
        let (dry, shape) = (dry.clone(), [batch, sizes.context]);
        Ok(move |choice: &StepConfig| {
            // The device holds the current batch, and the next one, which is being prefetched.
            let text = || Tensor::zeros(shape, DType::I64, &dry);
            let [x, y, _next_x, _next_y] = [text()?, text()?, text()?, text()?];
            for k in 0..choice.micro_batch_count {
                let part = |t: &Tensor| t.narrow(0, k * choice.micro_batch_size, choice.micro_batch_size);
                let autocast = choice.autocast()?;
                let loss = passage_loss(&net, &part(&x)?, &part(&y)?)?;
                drop(autocast);
                loss.mul(choice.micro_batch_size as f64 / batch as f64)?.backward()?;
            }
            clip_grad_norm_(&net.parameters(), 1.0)?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(())
        })
    })
}

/// Continues `start` by `n` characters, each sampled by its probability.
fn generate_text(net: &Gpt, start: &[i64], n: usize, device: &Device) -> Result<Vec<i64>, Error> {
    let _no_grad = no_grad();
    let _eval = eval_mode(net);
    let context = net.context();
    let mut text = start.to_vec();
    for _ in 0..n {
        let seen = &text[text.len().saturating_sub(context)..];
        let scores = net.forward(&Tensor::from_slice(seen, [1, seen.len()], device)?)?;
        let last = scores.select(1, -1)?.div(0.8)?.softmax(-1)?.to_vec::<f32>()?;
        // The next character is the first at which the cumulative probability exceeds a random number.
        let mut left = Tensor::rand([1], DType::F32, device)?.item()? as f32;
        let next = last.iter().position(|p| {
            left -= p;
            left < 0.0
        });
        text.push(next.unwrap_or(last.len() - 1) as i64);
    }
    Ok(text)
}

fn main() -> Result<()> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    let software = device.info().software;
    let pick =
        |given: Option<usize>, gpu: usize, small: usize| given.unwrap_or(if software { small } else { gpu });
    let steps = options.steps.unwrap_or(if software { 200 } else { 2000 });
    let (batch, length) = (pick(options.batch, 64, 16), pick(options.length, 256, 64));

    let text = match &options.data {
        Some(path) => Text::open(path)?,
        None => Text::shakespeare()?,
    };
    println!("{}", device.info());
    println!("{} characters, {} of them distinct", text.len(), text.vocabulary().len());
    ensure!(
        text.len() >= length.saturating_add(batch),
        "a text of {} characters is too short for batches of {batch} x {length}: take a smaller --batch or --length, \
         or more --data",
        text.len()
    );

    if options.memory_snapshot.is_some() {
        device.pool().start_recording(100_000);
    }
    device.manual_seed(options.seed);
    let (layers, width) = (pick(options.layers, 4, 2), pick(options.width, 128, 64));
    let vocabulary = text.vocabulary().len();
    // The most heads of at least 32 features, or one for narrower models.
    let heads = (1..=width / 32).rev().find(|&heads| width.is_multiple_of(heads)).unwrap_or(1);
    let sizes = GptOptions { vocabulary, context: length, layers, heads, width, dropout: 0.1 };
    let net = Gpt::new(&sizes, &device)?;
    println!("{} parameters, {steps} steps of {batch} x {length} characters", net.num_parameters());
    let checkpoint = options.save.with_extension("checkpoint");
    let mut trainer = Trainer::new(&net, AdamW::new(net.parameters(), options.lr))
        .schedule(WarmupCosine::new(options.lr, steps / 20, steps).min_lr(options.lr / 10.0))
        .clip_grad_norm(1.0)
        .accumulate(options.accumulate)
        .steps(steps)
        .checkpoint(&checkpoint, 500)
        .stop_on_signals();
    trainer = match options.amp {
        _ if options.budget.is_some() => trainer,
        Some(Amp::F16) => trainer.autocast(DType::F16).scaler(GradScaler::new()),
        Some(Amp::Bf16) => trainer.autocast(DType::BF16),
        None => trainer,
    };
    if let Some(Bytes(bytes)) = options.budget {
        let budget = Budget::new(bytes, batch);
        let budget = options.amp.map_or(budget.clone(), |amp| budget.allow_precision(amp.dtype()));
        let plan = plan_step(&sizes, batch, budget, &device)?;
        println!("{plan}");
        trainer = trainer.plan(&plan);
    }
    if let Some(path) = &options.resume {
        trainer = trainer.resume(path)?;
    }
    let passages = text.token_windows(length).shuffle(options.seed).batches(batch).drop_last();
    let ended =
        trainer.fit(&passages, |x, y| net.forward(x)?.flatten(0, 1)?.cross_entropy(&y.flatten(0, 1)?));
    // A run that failed for lack of memory writes its snapshot, too.
    if let Some(path) = &options.memory_snapshot {
        device.pool().snapshot().save(path)?;
    }
    let ended = ended?;

    trainer.history().write_svg(options.save.with_extension("svg"))?;
    if let Some(path) = &options.curve {
        trainer.history().write_csv(path)?;
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
    println!("{}", device.memory());
    if let Some(loss) = trainer.history().losses.last() {
        println!("loss {loss:.3} after {} steps (device {device})\n", trainer.steps_done());
    }
    // A text of one line has no line break to begin with.
    let first = text.vocabulary().iter().find(|&&c| c == '\n').or(text.vocabulary().first());
    let start: String = first.into_iter().collect();
    let written = generate_text(&net, &text.encode(&start)?, pick(options.generate, 500, 200), &device)?;
    println!("{}", text.decode(&written).trim());
    Ok(())
}
