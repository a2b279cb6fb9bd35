//! Dry runs: the null device allocates exactly the bytes of the real device, for the models of the examples.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::checkpoint;
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::memory::{Config, Stats, Tag};
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Gpt, GptOptions, Linear, Module};
use forebay::ops::Pool2dOptions;
use forebay::optim::{AdamW, Optimizer, Sgd, clip_grad_norm_};
use forebay::plan::{Budget, DryRun, StepConfig, dry_run};
use forebay::tensor::Tensor;

use super::{skip, tests};

tests![
    a_perceptron_takes_the_predicted_bytes,
    a_convolutional_network_takes_the_predicted_bytes,
    a_transformer_takes_the_predicted_bytes,
    a_budget_is_kept_and_changes_no_result,
    recomputed_blocks_give_the_same_bits,
    offload_is_bitwise_exact_and_takes_the_predicted_bytes,
    a_step_that_does_not_fit_reports_the_memory_it_needs,
    repeated_steps_stop_moving_memory,
    steps_continue_within_the_predicted_memory,
];

/// Technique that saves memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryStrategy {
    Plain,
    /// Gradient accumulation over two halves of the batch.
    Accumulated,
    /// Blocks are recomputed in the backward pass.
    Checkpointed,
    /// 16-bit autocast.
    Mixed,
    /// Activations of blocks and the optimiser's state are offloaded to the host.
    Offloaded,
}

impl MemoryStrategy {
    fn micro_batches(self) -> usize {
        if matches!(self, Self::Accumulated) { 2 } else { 1 }
    }
}

/// Runs two steps; the second one has the optimiser's state in addition.
fn steps(
    parameters: Vec<Tensor>,
    optimizer: &mut dyn Optimizer,
    way: MemoryStrategy,
    loss: impl Fn(usize) -> CoreResult<Tensor>,
) -> CoreResult<()> {
    let count = way.micro_batches();
    optimizer.offload_state(way == MemoryStrategy::Offloaded);
    for _ in 0..2 {
        for _ in 0..count {
            let autocast = matches!(way, MemoryStrategy::Mixed).then(|| autocast(DType::F16)).transpose()?;
            let loss = loss(count)?;
            drop(autocast);
            loss.div(count as f64)?.backward()?;
        }
        clip_grad_norm_(&parameters, 1.0)?;
        optimizer.step()?;
        optimizer.zero_grad();
    }
    Ok(())
}

/// Compares a dry run with the real device for every technique, each with its own pool.
fn compare(device: &Device, run: impl Fn(&Device, MemoryStrategy) -> CoreResult<()>) -> Result<()> {
    let profile = CardProfile::from_device(device);
    let host = device.backend().supports_pinned_host().then_some(MemoryStrategy::Offloaded);
    for way in [
        MemoryStrategy::Plain,
        MemoryStrategy::Accumulated,
        MemoryStrategy::Checkpointed,
        MemoryStrategy::Mixed,
    ]
    .into_iter()
    .chain(host)
    {
        let predicted = dry_run(&profile, |dry| run(dry, way))?;
        ensure!(predicted.out_of_memory.is_none(), "{way:?}: {predicted}");
        let real = Device::with_config(Arc::clone(device.backend()), profile.config);
        run(&real, way).with_context(|| format!("{way:?}"))?;
        ensure_prediction(&predicted, &real.memory()).with_context(|| format!("{way:?}: {predicted}"))?;
    }
    Ok(())
}

pub(super) fn ensure_prediction(predicted: &DryRun, measured: &Stats) -> Result<()> {
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
            let x = Tensor::rand([64 / count, 784], DType::F32, device)?;
            let y = Tensor::randint(0, 10, [64 / count], DType::I64, device)?;
            let hidden = fc1.forward(&x)?.relu()?;
            let last = Arc::clone(&fc2);
            let logits = match way {
                MemoryStrategy::Checkpointed => checkpoint(&[&hidden], move |h| last.forward(&h[0].gelu()?))?,
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
            let x = Tensor::rand([32 / count, 1, 28, 28], DType::F32, device)?;
            let y = Tensor::randint(0, 10, [32 / count], DType::I64, device)?;
            let x = first.forward(&x)?.relu()?.max_pool2d(Pool2dOptions::new(2))?;
            let (norm, second) = (Arc::clone(&norm), Arc::clone(&second));
            let body = move |x: &Tensor| second.forward(&norm.forward(x)?.relu()?)?.relu();
            let x = match way {
                MemoryStrategy::Checkpointed => checkpoint(&[&x], move |x| body(&x[0]))?,
                _ => body(&x)?,
            };
            head.forward(&x.max_pool2d(Pool2dOptions::new(2))?.flatten(1, -1)?)?.cross_entropy(&y)
        })
    })
}

/// Returns tokens and their successors.
fn passages(rows: usize, length: usize, vocabulary: usize, device: &Device) -> CoreResult<[Tensor; 2]> {
    let text = || Tensor::randint(0, vocabulary as i64, [rows, length], DType::I64, device);
    Ok([text()?, text()?])
}

fn a_transformer_takes_the_predicted_bytes(device: &Device) -> Result<()> {
    let options = GptOptions { vocabulary: 65, context: 32, layers: 2, heads: 2, width: 64, dropout: 0.1 };
    compare(device, |device, way| {
        let net = Gpt::new(&options, device)?;
        let mut optimizer = AdamW::new(net.parameters(), 1e-3);
        let of = |this: MemoryStrategy| [way == this; 2];
        let choice = StepConfig::new(8, 1)
            .with_recompute(of(MemoryStrategy::Checkpointed))
            .with_offload(of(MemoryStrategy::Offloaded));
        let _segments = choice.apply_segments();
        steps(net.parameters(), &mut optimizer, way, |count| {
            let [text, next] = passages(8 / count, 32, 65, device)?;
            net.forward(&text)?.flatten(0, 1)?.cross_entropy(&next.flatten(0, 1)?)
        })
    })
}

/// Returns a training step of a small GPT for a configuration; it returns the loss. The caller enters the segments.
fn training(
    batch: usize,
    options: &GptOptions,
    device: &Device,
) -> CoreResult<impl FnMut(&StepConfig) -> CoreResult<Tensor> + use<>> {
    device.manual_seed(3);
    let net = Gpt::new(options, device)?;
    let [text, next] = passages(batch, options.context, options.vocabulary, device)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-3);
    Ok(move |choice: &StepConfig| {
        optimizer.offload_state(choice.offload_state);
        let mut sum = None;
        for k in 0..choice.micro_batch_count {
            let part =
                |t: &Tensor| t.narrow(0, k * choice.micro_batch_size, choice.micro_batch_size)?.flatten(0, 1);
            let autocast = choice.autocast()?;
            let logits =
                net.forward(&text.narrow(0, k * choice.micro_batch_size, choice.micro_batch_size)?)?;
            let loss =
                logits.flatten(0, 1)?.cross_entropy(&part(&next)?)?.div(choice.micro_batch_count as f64)?;
            drop((logits, autocast));
            loss.backward()?;
            let loss = loss.detach();
            sum = Some(match sum {
                None => loss,
                Some(sum) => loss.add(&sum)?,
            });
        }
        optimizer.step()?;
        optimizer.zero_grad();
        sum.ok_or_else(|| Error::argument("train", "no rows"))
    })
}

/// Returns the losses of three steps with a configuration and their own pool, and its statistics.
fn losses(
    device: &Device,
    batch: usize,
    options: &GptOptions,
    choice: &StepConfig,
    config: Config,
) -> Result<(Vec<f64>, Stats)> {
    let real = Device::with_config(Arc::clone(device.backend()), config);
    let mut step = training(batch, options, &real)?;
    let _segments = choice.apply_segments();
    let losses = [step(choice)?, step(choice)?, step(choice)?];
    Ok((losses.iter().map(|l| Ok(l.item()?)).collect::<Result<_>>()?, real.memory()))
}

fn a_budget_is_kept_and_changes_no_result(device: &Device) -> Result<()> {
    const BATCH: usize = 8;
    let options = GptOptions { vocabulary: 128, context: 64, layers: 4, heads: 4, width: 64, dropout: 0.0 };
    // Segments are small, because the memory of a small model differs little between two choices.
    let config = Config { large_segment_size: 2 << 20, ..CardProfile::from_device(device).config };
    let profile = CardProfile::from_device(device).with_config(config);
    let plan = |bytes| {
        Budget::new(bytes, BATCH).measure_all().plan(&profile, |dry| {
            let mut step = training(BATCH, &options, dry)?;
            Ok(move |choice: &StepConfig| step(choice).map(drop))
        })
    };
    let all = plan(u64::MAX)?;
    let offloads = all.estimates.iter().any(|e| e.config.offloaded_count() > 0 && e.config.offload_state);
    ensure!(offloads == device.backend().supports_pinned_host(), "what goes to the host: {all}");
    ensure!(all.estimates.iter().any(|e| e.config.recomputed_count() > 0), "no segment was found: {all}");
    let mut peaks: Vec<u64> = all.estimates.iter().filter_map(|e| e.peak).collect();
    peaks.sort_unstable();
    peaks.dedup();
    ensure!(peaks.len() >= 3, "the choices take the same bytes: {all}");
    let (expected, _) = losses(device, BATCH, &options, &StepConfig::new(BATCH, 1), profile.config)?;
    let least = |bytes| match plan(bytes) {
        Err(Error::BudgetTooSmall { needed, .. }) => Ok(needed),
        other => anyhow::bail!("{bytes} bytes are enough: {other:?}"),
    };
    // A bounded pool takes at most as much as the smallest unbounded configuration.
    let needed = least(1 << 10)?;
    ensure!(needed <= peaks[0], "{needed} bytes are needed, and {} without a bound", peaks[0]);
    for budget in [needed, peaks[0], peaks[peaks.len() - 1] - 1] {
        let best = plan(budget)?.best;
        let config = Config { max_memory: Some(budget), ..profile.config };
        let (got, stats) =
            losses(device, BATCH, &options, &best.config, config).with_context(|| best.config.to_string())?;
        ensure!(best.peak == Some(stats.peak_reserved()), "{best:?}, measured {}", stats.peak_reserved());
        for (got, expected) in got.iter().zip(&expected) {
            // Sums of the parts of a batch are taken in another order.
            ensure!((got - expected).abs() <= 1e-5 * expected, "{}: {got}, expected {expected}", best.config);
        }
    }
    let again = least(needed - 1)?;
    ensure!(again == needed, "with one byte less {again} bytes are needed, not {needed}");
    Ok(())
}

fn offload_is_bitwise_exact_and_takes_the_predicted_bytes(device: &Device) -> Result<()> {
    if !device.backend().supports_pinned_host() {
        return skip("the device reaches no memory of the host");
    }
    let options = GptOptions { vocabulary: 128, context: 32, layers: 4, heads: 2, width: 64, dropout: 0.1 };
    // In small segments, of which a small model leaves some.
    let config = Config { large_segment_size: 2 << 20, ..CardProfile::from_device(device).config };
    let profile = CardProfile::from_device(device).with_config(config);
    let plain = StepConfig::new(8, 1);
    let (expected, on_device) = losses(device, 8, &options, &plain, config)?;
    let away =
        [plain.clone().with_offload([true; 4]), plain.clone().with_offload([true, false, true, false])];
    let ways = away.iter().cloned().chain(away.clone().map(StepConfig::with_offloaded_state));
    let state = ways.chain([plain.clone().with_recompute([true; 4]).with_offloaded_state()]);
    for choice in state {
        let predicted = dry_run(&profile, |dry| {
            let mut step = training(8, &options, dry)?;
            let _segments = choice.apply_segments();
            [step(&choice)?, step(&choice)?, step(&choice)?].iter().try_for_each(|loss| loss.item().map(drop))
        })?;
        let (got, stats) = losses(device, 8, &options, &choice, config)?;
        ensure!(got == expected, "{choice}: {got:?}, on the device {expected:?}");
        ensure_prediction(&predicted, &stats).with_context(|| choice.to_string())?;
        let (less, all) = (stats.peak_allocated(), on_device.peak_allocated());
        ensure!(less < all, "{choice}: {less} bytes at most, on the device {all}");
    }
    Ok(())
}

fn a_step_that_does_not_fit_reports_the_memory_it_needs(device: &Device) -> Result<()> {
    let profile = CardProfile::from_device(device).with_total_bytes(4 << 20);
    let run = dry_run(&profile, |device| {
        let net = Linear::new(1024, 1024, device)?;
        net.forward(&Tensor::zeros([512, 1024], DType::F32, device)?)?.mean_all()?.backward()
    })?;
    ensure!(run.to_string().contains("whose pool can have 4.0 MiB"), "{run}");
    let refused = run.out_of_memory.as_ref().context("10 MiB fit 4")?;
    ensure!(refused.total == Some(4 << 20), "{refused}");
    ensure!(run.peak_allocated > 10 << 20 && !run.fits(4 << 20) && run.fits(64 << 20), "{run}");
    ensure!(run.peak.by_tag.iter().map(|held| held.1).sum::<u64>() == run.peak_allocated, "{run}");
    Ok(())
}

fn recomputed_blocks_give_the_same_bits(device: &Device) -> Result<()> {
    let sizes = GptOptions { vocabulary: 64, context: 16, layers: 3, heads: 2, width: 32, dropout: 0.1 };
    let text = Tensor::randint(0, 64, [4, 16], DType::I32, device)?;
    for low in [None, Some(DType::BF16)] {
        let gradients = |choice: StepConfig| -> Result<Vec<(String, Vec<u8>)>> {
            device.manual_seed(7);
            let net = Gpt::new(&sizes, device)?;
            let _segments = choice.apply_segments();
            // The second pass adds to the gradients of the first.
            for _ in 0..2 {
                let loss = {
                    let _autocast = low.map(autocast).transpose()?;
                    net.loss(&text, &text)?
                };
                loss.backward()?;
            }
            net.named_parameters()
                .into_iter()
                .map(|(name, p)| Ok((name, p.grad().context("no gradient")?.to_bytes()?)))
                .collect()
        };
        let plain = gradients(StepConfig::new(4, 1))?;
        for again in [[true; 3], [false, true, false]] {
            for ((name, a), (_, b)) in
                gradients(StepConfig::new(4, 1).with_recompute(again))?.iter().zip(&plain)
            {
                ensure!(a == b, "{low:?}, {again:?}: the gradient of {name} has other bits");
            }
        }
    }
    Ok(())
}

/// A large model on a simulated card, where page migration depends only on the allocations. For identical steps,
/// calls of the driver for memory end after some steps.
fn repeated_steps_stop_moving_memory(_device: &Device) -> Result<()> {
    const STEPS: usize = 32;
    const BATCH: usize = 8;
    let sizes = GptOptions::preset("gpt2-124m")?;
    let again = vec![true; sizes.layers];
    let [whole, parts] = [StepConfig::new(BATCH, 1), StepConfig::new(BATCH / 4, 4)];
    let ways = [
        ("plain", whole.clone()),
        ("bf16", whole.clone().with_precision(DType::BF16)),
        ("every block again", whole.clone().with_recompute(&again)),
        ("bf16, every block again", whole.with_precision(DType::BF16).with_recompute(&again)),
        ("accumulated", parts.clone()),
        ("accumulated, bf16", parts.clone().with_precision(DType::BF16)),
        ("accumulated, bf16, every block again", parts.with_precision(DType::BF16).with_recompute(&again)),
    ];
    for (name, choice) in ways {
        for fused in [true, false] {
            let device = Device::null(CardProfile::from_card("h200")?);
            // The numbers of leaves and operations differ between processes, and no result may depend on them.
            for _ in 0..name.len() * 37 {
                drop(Tensor::zeros([1], DType::F32, &device)?.to_leaf()?);
            }
            let net = Gpt::new(&sizes, &device)?;
            let mut optimizer = AdamW::new(net.parameters(), 3e-4);
            let text = Tensor::randint(0, 50_257, [BATCH, sizes.context], DType::I64, &device)?;
            let _segments = choice.apply_segments();
            let mut calls = Vec::new();
            for _ in 0..STEPS {
                for k in 0..choice.micro_batch_count {
                    let autocast = choice.autocast()?;
                    let part = text.narrow(0, k * choice.micro_batch_size, choice.micro_batch_size)?;
                    let loss = match fused {
                        true => net.loss(&part, &part)?,
                        false => net.forward(&part)?.flatten(0, 1)?.cross_entropy(&part.flatten(0, 1)?)?,
                    };
                    drop(autocast);
                    loss.div(choice.micro_batch_count as f64)?.backward()?;
                }
                optimizer.step()?;
                optimizer.zero_grad();
                calls.push(device.memory().num_device_alloc);
            }
            let stats = device.memory();
            let ratio = stats.peak_reserved() as f64 / stats.peak_allocated() as f64;
            let last = &calls[STEPS - 4..];
            ensure!(last.iter().all(|c| *c == last[0]), "{name}, fused {fused}: calls by step {calls:?}");
            // Upper bound of reserved over allocated bytes.
            ensure!(
                ratio <= 1.0 + 1.0 / 12.0,
                "{name}, fused {fused}: {ratio:.4} of what is allocated is reserved"
            );
        }
    }
    Ok(())
}

/// Later steps fit into the memory of the first ones: blocks at other addresses are compacted.
fn steps_continue_within_the_predicted_memory(_device: &Device) -> Result<()> {
    const STEPS: usize = 12;
    const BATCH: usize = 8;
    const PREDICTED: usize = 3;
    let sizes = GptOptions { context: 512, ..GptOptions::preset("gpt2-124m")? };
    let all = vec![true; sizes.layers];
    let [parts, single] = [(2, 4), (1, 8)].map(|(rows, count)| StepConfig::new(rows, count));
    let ways = [
        ("accumulated, on the host", parts.with_offload(&all).with_offloaded_state()),
        ("one by one", single),
    ];
    for (name, choice) in ways {
        let train = |steps: usize, config: Config| -> Result<u64> {
            let device = Device::null(CardProfile::from_card("h100")?.with_config(config));
            let net = Gpt::new(&sizes, &device)?;
            let mut optimizer = AdamW::new(net.parameters(), 3e-4);
            optimizer.offload_state(choice.offload_state);
            let text = Tensor::randint(0, 50_257, [BATCH, sizes.context], DType::I64, &device)?;
            let _segments = choice.apply_segments();
            for step in 0..steps {
                for k in 0..choice.micro_batch_count {
                    let autocast = choice.autocast()?;
                    let part = text.narrow(0, k * choice.micro_batch_size, choice.micro_batch_size)?;
                    let logits = net.forward(&part)?;
                    let loss = logits.flatten(0, 1)?.cross_entropy(&part.flatten(0, 1)?)?;
                    drop((logits, autocast));
                    loss.div(choice.micro_batch_count as f64)?.backward()?;
                }
                optimizer.step().with_context(|| format!("{name}: step {step}"))?;
                optimizer.zero_grad();
            }
            Ok(device.memory().peak_reserved())
        };
        for expandable_segments in [true, false] {
            let config = Config { expandable_segments, ..Config::default() };
            let predicted = train(PREDICTED, config)?;
            let limited = Config { max_memory: Some(predicted), ..config };
            let taken =
                train(STEPS, limited).with_context(|| format!("expandable: {expandable_segments}"))?;
            ensure!(taken <= predicted, "{name}: {taken} bytes of {predicted}");
        }
    }
    Ok(())
}
