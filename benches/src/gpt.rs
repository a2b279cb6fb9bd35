//! A training step of GPT-2 124M, the common baseline of frameworks.

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

/// Prints one line for each variant, and a profile of one step of the first variant if requested.
pub(crate) fn gpt(b: &Bench<'_>) -> Result<()> {
    let sizes = match b.tiny {
        true => GptOptions { vocabulary: 128, context: 32, layers: 2, heads: 2, width: 32, dropout: 0.0 },
        // A multiple of 128, as in the peers: matrix products of this width are faster.
        false => GptOptions { vocabulary: 50_304, ..GptOptions::preset("gpt2-124m")? },
    };
    let (batch, steps) = if b.tiny { (2, 3) } else { (8, STEPS) };
    let low = Some(DType::BF16);
    let variants = [
        ("bf16", low, false, false),
        ("bf16_captured", low, false, true),
        ("bf16_ckpt", low, true, false),
        ("bf16_ckpt_captured", low, true, true),
        ("fp8", low, false, false),
        ("fp8_captured", low, false, true),
        ("f32", None, false, false),
    ];
    for (k, (variant, low, again, capture)) in variants.into_iter().enumerate() {
        let in_fp8 = variant.starts_with("fp8");
        if in_fp8 && !b.device.library_features().f8_matmul {
            continue;
        }
        // Its own pool, so that the peak belongs to this variant only.
        let device = &Device::with_config(b.device.backend().clone(), b.device.pool().config());
        let choice = StepConfig::new(batch, 1).with_recompute(vec![true; sizes.layers]);
        let _segments = again.then(|| choice.apply_segments());
        let start = Instant::now();
        let mut training = Training::new(&sizes, batch, (low, !again), device)?;
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
        b.emit_line(
            "gpt2_train",
            &format!("{batch}x{}", sizes.context),
            if low.is_some() { "bf16" } else { "f32" },
            json!({
                "variant": variant, "median_ms": m, "tok_s": (batch * sizes.context) as f64 * 1e3 / m,
                "capture": captured.as_ref().map(|c| format!("{}, graph: {}", c.stats(), c.is_driver_graph())),
                "first_ms": first_ms, "first_loss": first_loss, "last_loss": last,
                "peak_mem_mb": mb(memory.peak_allocated()), "peak_reserved_mb": mb(memory.peak_reserved()),
            }),
        );
        if k == 0 {
            b.write_profile(device, "gpt2_train", || training.step())?;
        }
    }
    Ok(())
}
