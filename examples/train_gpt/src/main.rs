//! Trains GPT-2 on a text, from scratch or from published weights, and generates text.
//!
//! `cargo run --release -p train_gpt -- --help`. Without arguments it trains GPT-2 124M on Shakespeare's plays in
//! bf16. On a software driver it trains a tiny model, which writes lines of a play after a minute or two. Tokens are
//! pieces of words. `train_text` is the smaller program, with characters as tokens.

mod generate;
mod options;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use forebay::backend::null::CardProfile;
use forebay::data::TokenWindows;
use forebay::io::safetensors;
use forebay::memory::Bytes;
use forebay::nn::{Gpt, GptOptions};
use forebay::optim::GradScaler;
use forebay::optim::schedule::WarmupCosine;
use forebay::plan::{Budget, StepConfig, StepPlan};
use forebay::prelude::*;
use forebay::profile::Profiler;
use forebay::train::{FitStatus, mean_loss};

use options::{Options, RunConfig};
use tokenizer::Tokenizer;

/// Maximum number of batches in a validation.
const MAX_VALIDATION_BATCHES: usize = 10;
/// Calls of the loss between which the profiler runs, when all kernels are compiled.
const PROFILED_CALLS: std::ops::Range<usize> = 12..15;

fn main() -> Result<()> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    println!("{}", device.info());
    if options.memory_snapshot.is_some() {
        device.pool().start_recording(100_000);
    }
    let run = RunConfig::new(&options, &device)?;
    let (tokenizer, text) = tokenizer::load_tokens(&options, run.vocabulary)?;
    let [train, valid] = split_train_valid(&text, run.length, run.batch)?;
    println!(
        "{} training tokens, {} validation tokens, a vocabulary of {}",
        train.len(),
        valid.len(),
        tokenizer.len()
    );

    device.manual_seed(options.seed);
    let (net, sizes) = build_model(&options, &run, &tokenizer, &device)?;
    println!(
        "{} parameters, {} steps of {} tokens, {}",
        net.num_parameters(),
        run.steps,
        run.tokens,
        run.precision.map_or("f32".into(), |low| format!("products in {low}"))
    );

    let ended = run_training(&options, &run, &net, &sizes, [train, valid])?;
    // The trainer and its optimiser no longer exist, so their memory is free for the generation of text.
    if ended == FitStatus::Finished {
        let start = tokenizer.encode(&options.prompt)?;
        let written =
            generate::generate_tokens(&net, &start, tokenizer.len(), &options, run.tokens_to_generate)?;
        println!("\n{}{}", options.prompt, tokenizer.decode(&written)?);
    }
    Ok(())
}

/// Splits the text: the first nine tenths for training, then as much of the rest as a validation needs.
fn split_train_valid(text: &[u32], length: usize, batch: usize) -> Result<[Vec<u32>; 2]> {
    let (train, valid) = text.split_at(text.len() / 10 * 9);
    let needed = batch.saturating_mul(length).saturating_add(1);
    ensure!(
        train.len() >= needed && valid.len() >= needed,
        "a text of {} tokens is too short for batches of {batch} x {length}: take a smaller --batch or --length, or more --data",
        text.len()
    );
    let valid = &valid[..valid.len().min(MAX_VALIDATION_BATCHES * batch * length + 1)];
    Ok([train.to_vec(), valid.to_vec()])
}

/// Builds a model, new or with the weights of a file, and returns it with its sizes.
fn build_model(
    options: &Options,
    run: &RunConfig,
    tokenizer: &Tokenizer,
    device: &Device,
) -> Result<(Gpt, GptOptions)> {
    let (context, dropout) = (run.length, options.dropout);
    let Some(path) = &options.load else {
        // The vocabulary is a multiple of 128, because matrix products of other widths are slower.
        let vocabulary = tokenizer.len().next_multiple_of(128);
        let sizes = GptOptions { vocabulary, context, dropout, ..run.model.clone() };
        return Ok((Gpt::new(&sizes, device)?, sizes));
    };
    let file = safetensors::load(path, device)?;
    let sizes = GptOptions::from_gpt2_state_dict(&file)?;
    ensure!(
        context <= sizes.context,
        "{} has positions for {} tokens: take --length {1} or less",
        path.display(),
        sizes.context
    );
    ensure!(
        tokenizer.len() <= sizes.vocabulary,
        "the tokenizer knows {} tokens, {} has {}: give the tokenizer.json of these weights with --tokenizer",
        tokenizer.len(),
        path.display(),
        sizes.vocabulary
    );
    let sizes = GptOptions { context, dropout, ..sizes };
    let net = Gpt::new(&sizes, device)?;
    net.load_gpt2(&file).with_context(|| path.display().to_string())?;
    Ok((net, sizes))
}

fn run_training(
    options: &Options,
    run: &RunConfig,
    net: &Gpt,
    sizes: &GptOptions,
    text: [Vec<u32>; 2],
) -> Result<FitStatus> {
    let &RunConfig { batch, length, steps, lr, .. } = run;
    let device = net.wte.weight.device();
    let [train, valid] = text;
    // Short texts yield a sample at every offset; for long texts samples without overlap are enough.
    let every = if train.len() < 1 << 24 { 1 } else { length };
    let train =
        TokenWindows::new(train, length).with_stride(every).shuffle(options.seed).batches(batch).drop_last();
    let plan = match options.budget {
        Some(Bytes(bytes)) => Some(plan_step(options, run, sizes, bytes, device)?),
        None => None,
    };
    // A validation batch of the size of a training step's parts fits into the budget.
    let (rows, precision) = match plan.as_ref().map(|plan| &plan.best.config) {
        Some(choice) => (choice.micro_batch_size, choice.precision),
        None => (batch, run.precision),
    };
    let valid = TokenWindows::new(valid, length).with_stride(length).batches(rows).drop_last();

    let checkpoint = options.save.with_extension("checkpoint");
    let validation = || {
        let _autocast = precision.map(autocast).transpose()?;
        mean_loss(net, &valid, |x, y| net.loss(x, y))
    };
    // Low-precision copies save time and take two bytes for each parameter. They are off where memory is scarce.
    let copies = options.budget.is_none() && !options.recompute;
    let mut trainer =
        Trainer::new(net, build_optimizer(net, lr, options.weight_decay).low_precision_copies(copies))
            .schedule(WarmupCosine::new(lr, options.warmup.unwrap_or(steps / 20), steps).min_lr(lr / 10.0))
            .clip_grad_norm(options.clip)
            .accumulate(options.accumulate)
            .capture(options.capture)
            .steps(steps)
            .tokens(run.tokens, net.flops_per_token(length))
            .validate(options.validate.unwrap_or((steps / 10).max(50)), validation)
            .checkpoint(&checkpoint, options.checkpoint_every)
            .stop_on_signals();
    if let Some(plan) = &plan {
        println!("{plan}");
        trainer = trainer.plan(plan);
    } else if let Some(low) = precision {
        trainer = trainer.autocast(low);
        if low == DType::F16 {
            trainer = trainer.scaler(GradScaler::new());
        }
    }
    if let Some(path) = &options.resume {
        trainer = trainer.resume(path)?;
        println!("continues after step {}", trainer.steps_done());
    }

    // Blocks are computed again in the backward pass while this lives.
    let again = StepConfig::new(batch, 1).with_recompute(vec![true; net.h.len()]);
    let _segments = options.recompute.then(|| again.apply_segments());
    let mut profile = StepProfiler { path: options.profile.as_deref(), calls: 0, profiler: None };
    let ended = trainer.fit(&train, |x, y| {
        profile.on_loss_call(device)?;
        net.loss(x, y)
    });
    // A run that failed for lack of memory writes its snapshot, too.
    if let Some(path) = &options.memory_snapshot {
        device.pool().snapshot().save(path)?;
    }
    let ended = ended?;
    save_outputs(options, net, &trainer)?;
    if ended == FitStatus::Interrupted {
        println!(
            "stopped after {} steps; continue with --resume {}",
            trainer.steps_done(),
            checkpoint.display()
        );
    }
    Ok(ended)
}

/// Writes the files of a run, and prints a summary.
fn save_outputs(options: &Options, net: &Gpt, trainer: &Trainer<'_, Gpt, AdamW>) -> Result<()> {
    let (history, device) = (trainer.history(), net.wte.weight.device());
    history.write_svg(options.save.with_extension("svg"))?;
    if let Some(path) = &options.curve {
        history.write_csv(path)?;
    }
    // The Python library that reads such files requires this entry.
    let format = BTreeMap::from([("format".into(), "pt".into())]);
    safetensors::save(&options.save, &net.gpt2_state_dict()?, &format)?;
    println!("curves, weights and tokenizer: {}.*", options.save.with_extension("").display());
    for step in [10, trainer.steps_done()] {
        if let Some(memory) = history.memory_after(step) {
            let (allocated, reserved) = (memory.allocated, memory.reserved);
            println!("memory after step {step}: {allocated} bytes allocated, {reserved} reserved");
        }
    }
    println!("{}", device.memory());
    let rate = trainer.tokens_per_second().map(|rate| format!(", {rate:.0} tokens/s")).unwrap_or_default();
    let valid = history.validations.last().map(|v| format!(", validation {:.3}", v.loss)).unwrap_or_default();
    if let Some(loss) = history.losses.last() {
        println!("loss {loss:.3}{valid} after {} steps{rate} (device {device})", trainer.steps_done());
    }
    Ok(())
}

/// Returns AdamW with the usual settings for GPT-2; only matrices decay.
fn build_optimizer(net: &Gpt, lr: f64, weight_decay: f64) -> AdamW {
    AdamW::new(net.parameters(), lr)
        .betas((0.9, 0.95))
        .weight_decay(weight_decay)
        .weight_decay_filter(|p| p.rank() > 1)
}

/// Plans the fastest step of a batch within this budget.
fn plan_step(
    options: &Options,
    run: &RunConfig,
    sizes: &GptOptions,
    bytes: u64,
    device: &Device,
) -> Result<StepPlan> {
    let mut budget = Budget::new(bytes, run.batch);
    if let Some(low) = run.precision {
        budget = budget.allow_precision(low);
    }
    let shape = [run.batch, run.length];
    let made = budget.plan(&CardProfile::from_device(device), |dry| {
        let net = Gpt::new(sizes, dry)?;
        let mut optimizer = build_optimizer(&net, run.lr, options.weight_decay);
        let dry = dry.clone();
        Ok(move |choice: &StepConfig| {
            // The device holds the current batch, and the next one, which is being prefetched.
            let text = || Tensor::zeros(shape, DType::I64, &dry);
            let [x, y, _next_x, _next_y] = [text()?, text()?, text()?, text()?];
            for k in 0..choice.micro_batch_count {
                let part = |t: &Tensor| t.narrow(0, k * choice.micro_batch_size, choice.micro_batch_size);
                let autocast = choice.autocast()?;
                let loss = net.loss(&part(&x)?, &part(&y)?)?;
                drop(autocast);
                loss.mul(choice.micro_batch_size as f64 / shape[0] as f64)?.backward()?;
            }
            clip_grad_norm_(&net.parameters(), 1.0)?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(())
        })
    });
    Ok(made?)
}

/// Profiler of a few calls of the loss and the backward passes between them.
struct StepProfiler<'a> {
    path: Option<&'a Path>,
    calls: usize,
    profiler: Option<Profiler>,
}

impl StepProfiler<'_> {
    fn on_loss_call(&mut self, device: &Device) -> Result<(), Error> {
        let Some(path) = self.path else { return Ok(()) };
        if self.calls == PROFILED_CALLS.start {
            self.profiler = Some(Profiler::start(device)?);
        }
        if self.calls == PROFILED_CALLS.end
            && let Some(profiler) = self.profiler.take()
        {
            let profile = profiler.finish()?;
            println!("{profile}");
            forebay::io::write_bytes(path, profile.chrome_trace())?;
        }
        self.calls += 1;
        Ok(())
    }
}
