//! The model for the questions about training: a small GPT.

use std::time::{Duration, Instant};

use anyhow::Result;
use forebay::memory::{Bytes, Config, Tag};
use forebay::nn::{Gpt, GptOptions};
use forebay::plan::StepConfig;
use forebay::prelude::*;

use crate::with_empty_pool;

/// Sequences in a step.
pub(crate) const BATCH_SIZE: usize = 8;
pub(crate) const BLOCKS: usize = 4;
const SIZES: GptOptions =
    GptOptions { vocabulary: 256, context: 128, layers: BLOCKS, heads: 4, width: 64, dropout: 0.0 };

/// Model, optimiser and one batch.
pub(crate) struct Training {
    net: Gpt,
    optimizer: AdamW,
    text: Tensor,
}

impl Training {
    pub(crate) fn new(device: &Device) -> Result<Self, Error> {
        // A software driver takes a quarter of the length.
        let context = if device.info().software { SIZES.context / 4 } else { SIZES.context };
        let net = Gpt::new(&GptOptions { context, ..SIZES }, device)?;
        let text = Tensor::randint(0, 256, [BATCH_SIZE, context], DType::I64, device)?;
        Ok(Self { optimizer: AdamW::new(net.parameters(), 1e-3), net, text })
    }

    /// Runs one step with this configuration. The caller chooses the blocks that are recomputed.
    pub(crate) fn step(&mut self, choice: &StepConfig) -> Result<(), Error> {
        self.optimizer.offload_state(choice.offload_state);
        for part in 0..choice.micro_batch_count {
            let text = self.text.narrow(0, part * choice.micro_batch_size, choice.micro_batch_size)?;
            let autocast = choice.autocast()?;
            let loss = self.net.forward(&text)?.flatten(0, 1)?.cross_entropy(&text.flatten(0, 1)?)?;
            drop(autocast);
            loss.div(choice.micro_batch_count as f64)?.backward()?;
        }
        self.optimizer.step()?;
        self.optimizer.zero_grad();
        Ok(())
    }
}

/// Cost of a step: peak bytes in all, peak bytes of activations, and time.
#[derive(Clone, Copy)]
pub(crate) struct StepMeasurement {
    pub(crate) peak: u64,
    pub(crate) activations: u64,
    pub(crate) time: Duration,
}

/// Measures the step with its own pool, from the second step on, when the optimiser's state exists.
pub(crate) fn measure_step(device: &Device, choice: &StepConfig) -> Result<StepMeasurement> {
    let device = with_empty_pool(device, Config::default());
    let mut training = Training::new(&device)?;
    let _segments = choice.apply_segments();
    training.step(choice)?;
    device.pool().reset_peak_stats();
    let steps = if device.info().software { 1 } else { 20 };
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..steps {
        training.step(choice)?;
    }
    device.synchronize()?;
    let (time, stats) = (start.elapsed() / steps, device.memory());
    Ok(StepMeasurement { peak: stats.peak_allocated(), activations: stats.tag(Tag::Activation).peak, time })
}

/// Measures and prints several step configurations; the first one is the baseline.
pub(crate) fn compare_strategies(device: &Device, ways: &[(&str, StepConfig)]) -> Result<()> {
    let mut plain: Option<StepMeasurement> = None;
    for (name, choice) in ways {
        let taken = measure_step(device, choice)?;
        let first = *plain.get_or_insert(taken);
        let [peak, activations] = [taken.peak, taken.activations].map(|bytes| Bytes(bytes).to_string());
        println!(
            "{name:<32} peak {peak:>9}, activations {activations:>9}, {:>8.1} ms a step: {:.2} of the bytes, {:.2} of the time",
            taken.time.as_secs_f64() * 1e3,
            taken.peak as f64 / first.peak as f64,
            taken.time.as_secs_f64() / first.time.as_secs_f64(),
        );
    }
    Ok(())
}
