//! Training steps of GPT-2: 124M, the common baseline of frameworks, and two larger models.

use std::time::Instant;

use anyhow::Result;
use forebay::amp::{autocast, fp8};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{Gpt, GptOptions, Module};
use forebay::optim::{AdamW, Optimizer};
use forebay::plan::StepConfig;
use forebay::tensor::Tensor;
use serde_json::json;

use crate::timing::Bench;

/// Number of warm-up steps, and of timed steps.
const WARMUP_STEPS: usize = 5;
const STEPS: usize = 20;

struct Training {
    net: Gpt,
    optimizer: AdamW,
    text: Tensor,
    target: Tensor,
    /// 16-bit type of mixed precision; `None` for f32.
    autocast_dtype: Option<DType>,
    /// If true, linear layers multiply in FP8.
    fp8: bool,
}

impl Training {
    fn new(
        sizes: &GptOptions,
        batch: usize,
        (low, copies): (Option<DType>, bool),
        device: &Device,
    ) -> Result<Self> {
        device.manual_seed(1);
        let net = Gpt::new(sizes, device)?;
        let optimizer = AdamW::new(net.parameters(), 3e-4)
            .betas((0.9, 0.95))
            .weight_decay(0.1)
            .low_precision_copies(copies);
        let shape = [batch, sizes.context];
        let text = || Tensor::randint(0, sizes.vocabulary as i64, shape, DType::I32, device);
        Ok(Self { text: text()?, target: text()?, net, optimizer, autocast_dtype: low, fp8: false })
    }

    fn step(&mut self) -> CoreResult<Tensor> {
        let loss = {
            let _autocast = self.autocast_dtype.map(autocast).transpose()?;
            let _fp8 = self.fp8.then(fp8);
            self.net.loss(&self.text, &self.target)?
        };
        loss.backward()?;
        self.optimizer.step()?;
        self.optimizer.zero_grad();
        Ok(loss.detach())
    }
}

/// Variant of the training step: its name, its 16-bit type, recomputed blocks, and a captured step.
type Variant = (&'static str, Option<DType>, bool, bool);

const BF16: Option<DType> = Some(DType::BF16);

/// Row of the group, preset, name of the lines, batch size and variants. Larger models hold their parameters,
/// optimiser state and activations in 80 GB.
const MODELS: [(&str, &str, &str, usize, &[Variant]); 3] = [
    (
        "124m",
        "gpt2-124m",
        "gpt2_train",
        8,
        &[
            ("bf16", BF16, false, false),
            ("bf16_captured", BF16, false, true),
            ("bf16_ckpt", BF16, true, false),
            ("bf16_ckpt_captured", BF16, true, true),
            ("fp8", BF16, false, false),
            ("fp8_captured", BF16, false, true),
            ("f32", None, false, false),
        ],
    ),
    ("medium", "gpt2-medium", "gpt2_medium_train", 8, &[("bf16_captured", BF16, false, true)]),
    ("xl", "gpt2-xl", "gpt2_xl_train", 16, &[("bf16_captured", BF16, false, true)]),
];

/// Prints one line for each variant of each model, and a profile of one step of a model's first variant if requested.
pub(crate) fn gpt(b: &Bench<'_>) -> Result<()> {
    for (row, preset, name, batch, variants) in MODELS {
        if b.wants("gpt", row) {
            // A multiple of 128, as in the peers: matrix products of this width are faster.
            let sizes = GptOptions { vocabulary: 50_304, ..GptOptions::preset(preset)? };
            bench_model(b, name, &sizes, b.batch_or(batch), variants)?;
        }
    }
    Ok(())
}

fn bench_model(
    b: &Bench<'_>,
    name: &str,
    sizes: &GptOptions,
    batch: usize,
    variants: &[Variant],
) -> Result<()> {
    let tiny = GptOptions { vocabulary: 128, context: 32, layers: 2, heads: 2, width: 32, dropout: 0.0 };
    let sizes = if b.tiny { &tiny } else { sizes };
    let (batch, steps) = if b.tiny { (2, 3) } else { (batch, STEPS) };
    for (k, &(variant, low, again, capture)) in variants.iter().enumerate() {
        let in_fp8 = variant.starts_with("fp8");
        if in_fp8 && !b.device.library_features().f8_matmul {
            continue;
        }
        // Its own pool, so that the peak belongs to this variant only.
        let device = &Device::with_config(b.device.backend().clone(), b.device.pool().config());
        let choice = StepConfig::new(batch, 1).with_recompute(vec![true; sizes.layers]);
        let _segments = again.then(|| choice.apply_segments());
        let start = Instant::now();
        let mut training = Training::new(sizes, batch, (low, !again), device)?;
        training.fp8 = in_fp8;
        let first_loss = training.step()?.item()?;
        let first_ms = start.elapsed().as_secs_f64() * 1e3;
        let mut captured = capture.then(|| device.capture(|| training.step())).transpose()?;
        let mut step = || match &mut captured {
            Some(captured) => captured.replay(),
            None => training.step(),
        };
        let (m, last) = Bench::time_steps(device, (WARMUP_STEPS.min(steps), steps), &mut step)?;
        let memory = device.memory();
        let mb = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let tokens_per_second = (batch * sizes.context) as f64 * 1e3 / m;
        // Six operations for each parameter and token: the count of "Scaling Laws for Neural Language Models".
        let flops = 6.0 * training.net.num_parameters() as f64 * tokens_per_second;
        b.emit_line(
            name,
            &format!("{batch}x{}", sizes.context),
            if low.is_some() { "bf16" } else { "f32" },
            json!({
                "variant": variant, "median_ms": m, "tok_s": tokens_per_second, "tflops_6n": flops / 1e12,
                "capture": captured.as_ref().map(|c| format!("{}, graph: {}", c.stats(), c.is_driver_graph())),
                "first_ms": first_ms, "first_loss": first_loss, "last_loss": last,
                "peak_mem_mb": mb(memory.peak_allocated()), "peak_reserved_mb": mb(memory.peak_reserved()),
            }),
        );
        if k == 0 {
            drop(captured);
            b.write_profile(device, name, || training.step())?;
        }
    }
    Ok(())
}
