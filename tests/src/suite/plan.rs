//! Dry runs: the null device takes the bytes of the real one, for the models of the examples.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::autograd::checkpoint;
use forebay::backend::null::Profile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::{Stats, Tag};
use forebay::nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Dropout, Embedding, LayerNorm, Linear, Module, SelfAttention,
};
use forebay::ops::Pool2d;
use forebay::optim::{AdamW, Optimizer, Sgd, clip_grad_norm_};
use forebay::plan::{DryRun, dry_run};
use forebay::tensor::Tensor;

use super::tests;

tests![
    a_perceptron_takes_the_predicted_bytes,
    a_convolutional_network_takes_the_predicted_bytes,
    a_transformer_takes_the_predicted_bytes,
    a_step_that_does_not_fit_says_what_it_needs,
];

/// What is done to save memory.
#[derive(Clone, Copy, Debug)]
enum Way {
    Plain,
    /// Two halves of the batch, one after the other.
    Accumulated,
    /// Blocks are computed again in the backward pass.
    Checkpointed,
}

impl Way {
    fn micro_batches(self) -> usize {
        if matches!(self, Self::Accumulated) { 2 } else { 1 }
    }
}

/// Two steps: the second one has the optimiser's state beside everything.
fn steps(
    parameters: Vec<Tensor>,
    optimizer: &mut dyn Optimizer,
    way: Way,
    loss: impl Fn(usize) -> CoreResult<Tensor>,
) -> CoreResult<()> {
    let count = way.micro_batches();
    for _ in 0..2 {
        for _ in 0..count {
            loss(count)?.div(count as f64)?.backward()?;
        }
        clip_grad_norm_(&parameters, 1.0)?;
        optimizer.step()?;
        optimizer.zero_grad();
    }
    Ok(())
}

/// Runs the same on a dry device and on the real one, over a pool of its own, in every way.
fn compare(device: &Device, run: impl Fn(&Device, Way) -> CoreResult<()>) -> Result<()> {
    let profile = Profile::of(device);
    for way in [Way::Plain, Way::Accumulated, Way::Checkpointed] {
        let predicted = dry_run(&profile, |dry| run(dry, way))?;
        ensure!(predicted.out_of_memory.is_none(), "{way:?}: {predicted}");
        let real = Device::with_config(Arc::clone(device.backend()), profile.config);
        run(&real, way).with_context(|| format!("{way:?}"))?;
        same(&predicted, &real.memory()).with_context(|| format!("{way:?}: {predicted}"))?;
    }
    Ok(())
}

fn same(predicted: &DryRun, measured: &Stats) -> Result<()> {
    let tags = Tag::ALL.map(|tag| measured.tag(tag).peak);
    ensure!(predicted.peak_by_tag == tags, "by tag: {:?}, measured {tags:?}", predicted.peak_by_tag);
    for (what, predicted, measured) in [
        ("allocated", predicted.peak_allocated, measured.peak_allocated()),
        ("requested", predicted.peak_requested, measured.requested_bytes.all.peak),
        ("reserved", predicted.peak_reserved, measured.peak_reserved()),
    ] {
        ensure!(predicted == measured, "{what}: predicted {predicted} bytes, measured {measured}");
    }
    Ok(())
}

fn a_perceptron_takes_the_predicted_bytes(device: &Device) -> Result<()> {
    compare(device, |device, way| {
        let (fc1, fc2) = (Linear::new(784, 128, device)?, Arc::new(Linear::new(128, 10, device)?));
        let parameters = [fc1.parameters(), fc2.parameters()].concat();
        let mut optimizer = AdamW::new(parameters.clone(), 1e-3);
        steps(parameters, &mut optimizer, way, |count| {
            let x = Tensor::rand(&[64 / count, 784], DType::F32, device)?;
            let y = Tensor::randint(0, 10, &[64 / count], DType::I64, device)?;
            let hidden = fc1.forward(&x)?.relu()?;
            let last = Arc::clone(&fc2);
            let logits = match way {
                Way::Checkpointed => checkpoint(&[&hidden], move |h| last.forward(&h[0].gelu()?))?,
                _ => last.forward(&hidden.gelu()?)?,
            };
            logits.cross_entropy(&y)
        })
    })
}

fn a_convolutional_network_takes_the_predicted_bytes(device: &Device) -> Result<()> {
    compare(device, |device, way| {
        let first = Conv2d::new(1, 8, [3, 3], Conv2dOptions::default(), device)?;
        let norm = Arc::new(BatchNorm2d::new(8, device)?);
        let second = Arc::new(Conv2d::new(8, 16, [3, 3], Conv2dOptions::default(), device)?);
        let head = Linear::new(16 * 5 * 5, 10, device)?;
        let parameters =
            [first.parameters(), norm.parameters(), second.parameters(), head.parameters()].concat();
        let mut optimizer = Sgd::new(parameters.clone(), 0.1).momentum(0.9);
        steps(parameters, &mut optimizer, way, |count| {
            let x = Tensor::rand(&[32 / count, 1, 28, 28], DType::F32, device)?;
            let y = Tensor::randint(0, 10, &[32 / count], DType::I64, device)?;
            let x = first.forward(&x)?.relu()?.max_pool2d(Pool2d::new(2))?;
            let (norm, second) = (Arc::clone(&norm), Arc::clone(&second));
            let body = move |x: &Tensor| second.forward(&norm.forward(x)?.relu()?)?.relu();
            let x = match way {
                Way::Checkpointed => checkpoint(&[&x], move |x| body(&x[0]))?,
                _ => body(&x)?,
            };
            head.forward(&x.max_pool2d(Pool2d::new(2))?.flatten(1, -1)?)?.cross_entropy(&y)
        })
    })
}

/// A block of `examples/train_text.rs`.
#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: SelfAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(width: usize, device: &Device) -> CoreResult<Self> {
        Ok(Self {
            norm1: LayerNorm::new(&[width], device)?,
            attention: SelfAttention::new(width, width / 32, device)?.causal().with_dropout(0.1),
            norm2: LayerNorm::new(&[width], device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
            dropout: Dropout::new(0.1),
        })
    }

    fn forward(&self, x: &Tensor) -> CoreResult<Tensor> {
        let x = x.add(&self.attention.forward(&self.norm1.forward(x)?)?)?;
        let wide = self.up.forward(&self.norm2.forward(&x)?)?.gelu()?;
        x.add(&self.dropout.forward(&self.down.forward(&wide)?)?)
    }
}

fn a_transformer_takes_the_predicted_bytes(device: &Device) -> Result<()> {
    const LENGTH: usize = 32;
    compare(device, |device, way| {
        let embedding = Embedding::new(65, 64, device)?;
        let blocks = (0..2).map(|_| Ok(Arc::new(Block::new(64, device)?))).collect::<CoreResult<Vec<_>>>()?;
        let head = Linear::new(64, 65, device)?;
        let parameters = [embedding.parameters(), blocks.parameters(), head.parameters()].concat();
        let mut optimizer = AdamW::new(parameters.clone(), 1e-3);
        steps(parameters, &mut optimizer, way, |count| {
            let shape = [8 / count, LENGTH];
            let text = Tensor::randint(0, 65, &shape, DType::I64, device)?;
            let next = Tensor::randint(0, 65, &shape, DType::I64, device)?;
            let mut x = embedding.forward(&text)?;
            for block in &blocks {
                let block = Arc::clone(block);
                x = match way {
                    Way::Checkpointed => checkpoint(&[&x], move |x| block.forward(&x[0]))?,
                    _ => block.forward(&x)?,
                };
            }
            head.forward(&x)?.flatten(0, 1)?.cross_entropy(&next.flatten(0, 1)?)
        })
    })
}

fn a_step_that_does_not_fit_says_what_it_needs(device: &Device) -> Result<()> {
    let profile = Profile::of(device).with_total(4 << 20);
    let run = dry_run(&profile, |device| {
        let net = Linear::new(1024, 1024, device)?;
        net.forward(&Tensor::zeros(&[512, 1024], DType::F32, device)?)?.mean_all()?.backward()
    })?;
    let refused = run.out_of_memory.as_ref().context("10 MiB fit 4")?;
    ensure!(refused.total == Some(4 << 20), "{refused}");
    ensure!(run.peak_allocated > 10 << 20 && !run.fits(4 << 20) && run.fits(64 << 20), "{run}");
    ensure!(run.peak.by_tag.iter().map(|held| held.1).sum::<u64>() == run.peak_allocated, "{run}");
    Ok(())
}
