//! Costs of training steps, counted instead of timed: launches, bytes that they bind, and allocations of the pool.
//!
//! `tests/costs.json` has the costs on common adapters, which differ in the number of tensors a launch can bind. Higher
//! costs are regressions on every machine. After an improvement, update the file with the values of the test's message.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Gpt, GptOptions, Linear, Module};
use forebay::ops::Pool2dOptions;
use forebay::optim::{AdamW, Optimizer, Sgd, clip_grad_norm_};
use forebay::plan::StepConfig;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::{skip, tests};

tests![costs_of_steps_do_not_grow];

/// Known costs: by the backend and the prefix of the adapter's name, then by step.
const KNOWN: &str = include_str!("../../costs.json");

/// Cost of one step.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
struct StepCost {
    /// Number of kernels, matrix products and copies.
    launches: usize,
    /// Bytes that they bind.
    bytes: u64,
    /// Allocations of the pool.
    requests: u64,
}

/// Repeatable training step.
type TrainStep = Box<dyn FnMut() -> CoreResult<()>>;
type StepBuilder = fn(&Device) -> CoreResult<TrainStep>;

const STEPS: [(&str, StepBuilder); 4] = [
    ("perceptron", perceptron),
    ("convolutions", convolutions),
    ("gpt", gpt),
    ("gpt, checkpoints", checkpointed_gpt_step),
];

fn train(
    mut optimizer: impl Optimizer + 'static,
    of: Vec<Tensor>,
    loss: impl Fn() -> CoreResult<Tensor> + 'static,
) -> TrainStep {
    Box::new(move || {
        loss()?.backward()?;
        clip_grad_norm_(&of, 1.0)?;
        optimizer.step()?;
        optimizer.zero_grad();
        Ok(())
    })
}

fn perceptron(device: &Device) -> CoreResult<TrainStep> {
    let (fc1, fc2) = (Linear::new(784, 128, device)?, Linear::new(128, 10, device)?);
    let of = [fc1.parameters(), fc2.parameters()].concat();
    let x = Tensor::rand([64, 784], DType::F32, device)?;
    let y = Tensor::randint(0, 10, [64], DType::I32, device)?;
    Ok(train(AdamW::new(of.clone(), 1e-3), of, move || {
        fc2.forward(&fc1.forward(&x)?.relu()?)?.cross_entropy(&y)
    }))
}

fn convolutions(device: &Device) -> CoreResult<TrainStep> {
    let conv = Conv2d::new(1, 8, [3, 3], Conv2dOptions::default(), device)?;
    let norm = BatchNorm2d::new(8, device)?;
    let head = Linear::new(8 * 13 * 13, 10, device)?;
    let of = [conv.parameters(), norm.parameters(), head.parameters()].concat();
    let x = Tensor::rand([32, 1, 28, 28], DType::F32, device)?;
    let y = Tensor::randint(0, 10, [32], DType::I32, device)?;
    Ok(train(Sgd::new(of.clone(), 0.1).momentum(0.9), of, move || {
        let x = norm.forward(&conv.forward(&x)?)?.relu()?.max_pool2d(Pool2dOptions::new(2))?;
        head.forward(&x.flatten(1, -1)?)?.cross_entropy(&y)
    }))
}

const GPT: GptOptions =
    GptOptions { vocabulary: 128, context: 32, layers: 2, heads: 2, width: 64, dropout: 0.1 };

fn passages(device: &Device) -> CoreResult<[Tensor; 2]> {
    let text = || Tensor::randint(0, GPT.vocabulary as i64, [4, GPT.context], DType::I32, device);
    Ok([text()?, text()?])
}

fn gpt(device: &Device) -> CoreResult<TrainStep> {
    let net = Gpt::new(&GPT, device)?;
    let [text, next] = passages(device)?;
    let of = net.parameters();
    Ok(train(AdamW::new(of.clone(), 1e-3), of, move || net.loss(&text, &next)))
}

fn checkpointed_gpt_step(device: &Device) -> CoreResult<TrainStep> {
    let choice = StepConfig::new(4, 1).with_recompute(vec![true; GPT.layers]);
    let mut step = gpt(device)?;
    Ok(Box::new(move || {
        let _segments = choice.apply_segments();
        step()
    }))
}

/// Returns the cost of a step, after the steps that create the optimiser's state.
fn cost(step: &mut TrainStep, device: &Device) -> Result<StepCost> {
    for _ in 0..2 {
        step()?;
    }
    let before = device.memory().allocation.all.allocated;
    let profiler = Profiler::start(device)?;
    step()?;
    let profile = profiler.finish()?;
    let requests = device.memory().allocation.all.allocated - before;
    Ok(StepCost {
        launches: profile.spans.len(),
        bytes: profile.spans.iter().map(|span| span.bytes).sum(),
        requests,
    })
}

fn costs_of_steps_do_not_grow(device: &Device) -> Result<()> {
    let known: BTreeMap<String, BTreeMap<String, StepCost>> = serde_json::from_str(KNOWN)?;
    let mut seen = BTreeMap::new();
    for (name, make) in STEPS {
        seen.insert(name.to_owned(), cost(&mut make(device)?, device)?);
    }
    let seen = format_costs(&seen)?;
    let info = device.info();
    // Without the vendor's library of matrix products, a card's costs differ.
    let products =
        if info.backend == "cuda" && !device.library_features().matmul { ", portable" } else { "" };
    let name = format!("{}{products} {}", info.backend, info.name);
    let Some((_, known)) = known.iter().find(|(adapter, _)| name.starts_with(adapter.as_str())) else {
        return skip(format!("tests/costs.json has none for {name}: {seen}"));
    };
    let known = format_costs(known)?;
    ensure!(known == seen, "tests/costs.json says for {name}:\n{known}\nseen:\n{seen}");
    Ok(())
}

/// Formats costs as in the file.
fn format_costs(costs: &BTreeMap<String, StepCost>) -> Result<String> {
    Ok(serde_json::to_string(costs)?)
}
