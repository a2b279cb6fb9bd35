//! Measures the savings of accumulation, checkpointing, mixed precision and budgets on one model: predicted bytes,
//! actual bytes, and time.
//!
//! `cargo run --release --example savings -- --model gpt2-124m --device cuda`; benches/peers/savings.py is the same
//! in PyTorch. The program fails unless predicted and actual bytes are equal.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use forebay::backend::null::CardProfile;
use forebay::memory::{Bytes, Config};
use forebay::nn::{Gpt, GptOptions};
use forebay::plan::{Budget, StepConfig, dry_run};
use forebay::prelude::*;

/// Trains a GPT with each technique that saves memory, and prints the cost of each.
#[derive(Parser)]
struct Options {
    /// Model: tiny, gpt2-124m, ...; by default gpt2-124m, or tiny on a software driver.
    #[arg(long)]
    model: Option<String>,
    /// Sequences in a step, a multiple of 4.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens in a sequence; 512 by default, 64 for tiny.
    #[arg(long)]
    context: Option<usize>,
    /// Device: cuda:0, wgpu:0, ...; the best one by default.
    #[arg(long, env = "FOREBAY_DEVICE")]
    device: Option<String>,
    /// Steps to time after two warm-up steps; 10 by default, 1 on a software driver.
    #[arg(long)]
    steps: Option<u32>,
    /// Budgets, in percent of the plain step's memory.
    #[arg(long, value_delimiter = ',', default_values_t = [75, 50, 35])]
    budgets: Vec<u64>,
}

/// Model and batch on a device.
struct Training {
    net: Gpt,
    optimizer: AdamW,
    text: Tensor,
    next: Tensor,
}

impl Training {
    fn new(sizes: &GptOptions, batch: usize, device: &Device) -> Result<Self, Error> {
        device.manual_seed(1);
        let net = Gpt::new(sizes, device)?;
        let optimizer = AdamW::new(net.parameters(), 3e-4);
        let text = || Tensor::randint(0, sizes.vocabulary as i64, [batch, sizes.context], DType::I64, device);
        Ok(Self { text: text()?, next: text()?, net, optimizer })
    }

    /// Runs one step with this configuration. The caller chooses the blocks that are recomputed.
    fn step(&mut self, choice: &StepConfig) -> Result<(), Error> {
        self.optimizer.offload_state(choice.offload_state);
        for k in 0..choice.micro_batch_count {
            let part = |t: &Tensor| t.narrow(0, k * choice.micro_batch_size, choice.micro_batch_size);
            let autocast = choice.autocast()?;
            let logits = self.net.forward(&part(&self.text)?)?;
            let loss = logits.flatten(0, 1)?.cross_entropy(&part(&self.next)?.flatten(0, 1)?)?;
            drop((logits, autocast));
            loss.div(choice.micro_batch_count as f64)?.backward()?;
        }
        self.optimizer.step()?;
        self.optimizer.zero_grad();
        Ok(())
    }
}

/// Cost of a run: peak bytes allocated, peak bytes reserved from the device, and seconds a step.
struct RunMeasurement {
    peak_allocated: u64,
    peak_reserved: u64,
    seconds: f64,
}

/// Printed table, and whether its predictions were right.
struct SavingsTable {
    sizes: GptOptions,
    batch: usize,
    steps: u32,
    device: Device,
    config: Config,
    predictions_match: bool,
}

impl SavingsTable {
    /// Runs two warm-up steps, then the timed ones.
    fn train(&self, device: &Device, choice: &StepConfig) -> Result<RunMeasurement, Error> {
        let mut training = Training::new(&self.sizes, self.batch, device)?;
        let _segments = choice.apply_segments();
        for _ in 0..2 {
            training.step(choice)?;
        }
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..self.steps {
            training.step(choice)?;
        }
        device.synchronize()?;
        let seconds = start.elapsed().as_secs_f64() / f64::from(self.steps.max(1));
        let stats = device.memory();
        Ok(RunMeasurement {
            peak_allocated: stats.peak_allocated(),
            peak_reserved: stats.peak_reserved(),
            seconds,
        })
    }

    /// Trains with this configuration and its own pool of at most `limit` bytes; returns the bytes used.
    fn measure_row(&mut self, name: &str, choice: &StepConfig, limit: Option<u64>) -> Result<u64> {
        let config = Config { max_memory: limit.or(self.config.max_memory), ..self.config };
        let profile = CardProfile::from_device(&self.device).with_config(config);
        let dry = dry_run(&profile, |dry| self.train(dry, choice))?;
        let real = Device::with_config(Arc::clone(self.device.backend()), config);
        let RunMeasurement { peak_allocated: held, peak_reserved: taken, seconds } =
            self.train(&real, choice).with_context(|| name.to_owned())?;
        let right = (dry.peak_allocated, dry.peak_reserved) == (held, taken);
        self.predictions_match &= right;
        println!(
            "| {name} | {} | {} | {} | {} | {:.0} |{}",
            describe_config(choice),
            dry.peak_reserved,
            taken,
            Bytes(held),
            (self.batch * self.sizes.context) as f64 / seconds,
            if right { "" } else { " the prediction is wrong" }
        );
        Ok(taken)
    }

    /// Trains within this budget as the planner chooses: in f32, or with bf16 allowed if nothing fits in f32.
    fn measure_budget(&mut self, percent: u64, bytes: u64) -> Result<()> {
        let batch = self.batch;
        let profile = CardProfile::from_device(&self.device).with_config(self.config);
        let exact = Budget::new(bytes, batch);
        for (name, budget) in [("", exact.clone()), (", bf16 allowed", exact.allow_precision(DType::BF16))] {
            let name = format!("budget {percent} %{name}");
            let plan = budget.plan(&profile, |dry| {
                let mut training = Training::new(&self.sizes, batch, dry)?;
                Ok(move |choice: &StepConfig| training.step(choice))
            });
            match plan {
                Ok(plan) => return self.measure_row(&name, &plan.best.config, Some(bytes)).map(drop),
                Err(Error::BudgetTooSmall { needed, .. }) => {
                    println!("| {name} | refused: the smallest that would do | {needed} | - | - | - |");
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Describes a configuration: `4 x 2 rows, bf16, 12 blocks again, state on the host`.
fn describe_config(choice: &StepConfig) -> String {
    let precision = choice.precision.map_or("f32".to_owned(), |dtype| dtype.to_string());
    let again = match choice.recomputed_count() {
        0 => String::new(),
        blocks => format!(", {blocks} blocks again"),
    };
    let away = match (choice.offloaded_count(), choice.offload_state) {
        (0, false) => String::new(),
        (0, true) => ", state on the host".to_owned(),
        (blocks, false) => format!(", {blocks} blocks on the host"),
        (blocks, true) => format!(", {blocks} blocks and state on the host"),
    };
    format!("{} x {} rows, {precision}{again}{away}", choice.micro_batch_count, choice.micro_batch_size)
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    let software = device.info().software;
    let model = options.model.as_deref().unwrap_or(if software { "tiny" } else { "gpt2-124m" });
    let sizes = match model {
        "tiny" => GptOptions { vocabulary: 256, context: 64, layers: 4, heads: 4, width: 64, dropout: 0.0 },
        name => GptOptions { context: 512, ..GptOptions::preset(name)? },
    };
    let sizes = GptOptions { context: options.context.unwrap_or(sizes.context), ..sizes };
    anyhow::ensure!(options.batch.is_multiple_of(4), "the batch is split into 4: it must be a multiple of 4");

    println!("{}", device.info());
    println!("{model}, {} passages of {} tokens a step, AdamW\n", options.batch, sizes.context);
    println!("| variant | configuration | predicted bytes | reserved bytes | allocated bytes | tokens/s |");
    println!("| --- | --- | ---: | ---: | ---: | ---: |");
    let all = vec![true; sizes.layers];
    let [whole, parts] = [StepConfig::new(options.batch, 1), StepConfig::new(options.batch / 4, 4)];
    let mut config = device.pool().config();
    if model == "tiny" {
        // With usual sizes, everything would fit into one segment.
        config.large_segment_size = 2 << 20;
    }
    let steps = options.steps.unwrap_or(if software { 1 } else { 10 });
    let device_offloads = device.backend().supports_pinned_host();
    let mut table =
        SavingsTable { sizes, batch: options.batch, steps, device, config, predictions_match: true };
    let plain = table.measure_row("plain", &whole, None)?;
    table.measure_row("accumulation 4", &parts, None)?;
    table.measure_row("checkpointing", &whole.clone().with_recompute(&all), None)?;
    if device_offloads {
        let away = whole.clone().with_offload(&all).with_offloaded_state();
        table.measure_row("offload", &away, None)?;
    }
    table.measure_row("mixed precision", &whole.with_precision(DType::BF16), None)?;
    table.measure_row("all three", &parts.with_recompute(all).with_precision(DType::BF16), None)?;
    for percent in &options.budgets {
        table.measure_budget(*percent, plain * percent / 100)?;
    }
    println!(
        "\nevery prediction was {}",
        if table.predictions_match { "right, to the byte" } else { "NOT right" }
    );
    Ok(if table.predictions_match { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
