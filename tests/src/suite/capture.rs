//! Captured steps: bits equal to eager ones, live inputs, steps that cannot be captured, and memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::checkpoint;
use forebay::data::Dataset;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::memory::Config;
use forebay::nn::{Linear, Module};
use forebay::optim::{
    Adafactor, Adagrad, Adam, AdamW, GradScaler, Lamb, NAdam, Optimizer, RAdam, RmsProp, Rprop, Sgd,
    clip_grad_norm_,
};
use forebay::profile::Profiler;
use forebay::stream::Stream;
use forebay::tensor::Tensor;
use forebay::train::Trainer;

use super::host_reference::{SplitMix64, ensure_same_bits};
use super::train_resume::PointDataset;
use super::two_devices::{Pair, pairs};
use super::{require_dtype, skip, tests};

tests![
    captured_training_is_bitwise_equal_to_eager_steps,
    step_counts_of_every_optimiser_advance_in_replays,
    steps_that_the_device_skips_are_skipped_in_replays,
    gradients_persist_and_accumulate_across_replays,
    dropout_in_a_checkpoint_is_recomputed_in_replays,
    two_captured_steps_of_one_model_alternate,
    inputs_of_another_shape_or_dtype_are_refused,
    steps_that_cannot_be_captured_are_errors,
    work_on_another_device_is_refused,
    work_of_another_thread_on_tensors_of_the_step_is_refused,
    memory_of_a_captured_step_is_planned_owned_and_freed,
    memory_of_a_replay_stays_in_place,
    a_profile_names_the_commands_of_a_replay,
    constants_are_kept_for_replays,
    other_threads_are_not_recorded,
    sixteen_bit_copies_are_never_stale,
    a_state_that_is_changed_in_place_carries_over,
    a_gradient_that_the_step_sets_exists_after_each_replay,
];

const STEPS: usize = 6;
const ROWS: usize = 24;

/// Net with its batches and a fixed random seed.
struct TrainingSetup {
    layers: [Linear; 2],
    batches: Vec<(Tensor, Tensor)>,
}

impl TrainingSetup {
    fn new(device: &Device) -> Result<Self> {
        device.manual_seed(3);
        let layers = [Linear::new(12, 40, device)?, Linear::new(40, 5, device)?];
        let batches = (0..STEPS).map(|_| {
            let x = Tensor::randn([ROWS, 12], DType::F32, device)?;
            Ok((x, Tensor::randint(0, 5, [ROWS], DType::I32, device)?))
        });
        let batches = batches.collect::<CoreResult<Vec<_>>>()?;
        device.manual_seed(11);
        Ok(Self { layers, batches })
    }

    fn parameters(&self) -> Vec<Tensor> {
        self.layers.parameters()
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> CoreResult<Tensor> {
        let h = self.layers[0].forward(x)?.gelu()?.dropout(0.25, true)?;
        self.layers[1].forward(&h)?.cross_entropy(y)
    }

    /// Returns the batch of a step; a capture runs the first batch twice.
    fn batch(&self, step: usize) -> &(Tensor, Tensor) {
        &self.batches[step.saturating_sub(1)]
    }
}

fn rate(step: usize) -> f64 {
    0.01 / (1.0 + step as f64)
}

fn ensure_same_bits_all(a: &[Tensor], b: &[Tensor]) -> Result<()> {
    ensure!(a.len() == b.len());
    a.iter()
        .zip(b)
        .enumerate()
        .try_for_each(|(k, (a, b))| ensure_same_bits(a, b).with_context(|| format!("tensor {k}")))
}

/// Runs a training step; returns the loss and the gradient norm.
fn train(
    net: &TrainingSetup,
    optimizer: &mut dyn Optimizer,
    x: &Tensor,
    y: &Tensor,
) -> CoreResult<(Tensor, Tensor)> {
    let loss = net.loss(x, y)?;
    loss.backward()?;
    let norm = clip_grad_norm_(optimizer.parameters(), 0.5)?;
    optimizer.step()?;
    optimizer.zero_grad();
    Ok((loss, norm))
}

/// Runs eager steps; returns losses and norms followed by the parameters, and the state of the random generator.
fn eager(device: &Device, make: &dyn Fn(Vec<Tensor>) -> Box<dyn Optimizer>) -> Result<(Vec<Tensor>, u64)> {
    let net = TrainingSetup::new(device)?;
    let mut optimizer = make(net.parameters());
    let mut found = Vec::new();
    for step in 0..=STEPS {
        optimizer.set_lr(rate(step));
        let (x, y) = net.batch(step);
        let (loss, norm) = train(&net, &mut *optimizer, x, y)?;
        found.extend([loss.detach(), norm]);
    }
    found.extend(net.parameters());
    found.extend(optimizer.state_dict()?.into_values());
    Ok((found, device.random_state().offset))
}

/// Runs the same steps captured. The learning rate changes between the capture and the replays.
fn replayed(device: &Device, make: &dyn Fn(Vec<Tensor>) -> Box<dyn Optimizer>) -> Result<(Vec<Tensor>, u64)> {
    let net = TrainingSetup::new(device)?;
    let mut optimizer = make(net.parameters());
    let (x, y) = net.batch(0);
    let mut found = Vec::new();
    let mut made = 0;
    let mut step = device.capture_with(&[x, y], |inputs| {
        optimizer.set_lr(rate(made));
        made += 1;
        let (loss, norm) = train(&net, &mut *optimizer, &inputs[0], &inputs[1])?;
        if made == 1 {
            found.extend([loss.detach(), norm.copy()?]);
        }
        Ok((loss, norm))
    })?;
    let (loss, norm) = step.outputs();
    ensure!(!loss.requires_grad(), "outputs carry no history");
    found.extend([loss.copy()?, norm.copy()?]);
    for k in 2..=STEPS {
        optimizer.set_lr(rate(k));
        let (x, y) = net.batch(k);
        let (loss, norm) = step.run(&[x, y])?;
        found.extend([loss.copy()?, norm.copy()?]);
    }
    let offset = device.random_state().offset;
    found.extend(net.parameters());
    found.extend(optimizer.state_dict()?.into_values());
    Ok((found, offset))
}

fn captured_training_is_bitwise_equal_to_eager_steps(device: &Device) -> Result<()> {
    let make = |parameters| -> Box<dyn Optimizer> { Box::new(AdamW::new(parameters, 0.1)) };
    for least in [None, Some(0)] {
        let device = &Device::with_config(device.backend().clone(), Config::default());
        device.set_fusion_min_bytes(least);
        let (expected, drawn) = eager(device, &make)?;
        let (got, drawn_too) = replayed(device, &make)?;
        ensure_same_bits_all(&got, &expected).with_context(|| format!("fusion {least:?}"))?;
        ensure!(drawn == drawn_too, "the random state is {drawn_too}, eager {drawn}");
    }
    Ok(())
}

fn step_counts_of_every_optimiser_advance_in_replays(device: &Device) -> Result<()> {
    let makes: [&dyn Fn(Vec<Tensor>) -> Box<dyn Optimizer>; 9] = [
        &|p| Box::new(Adagrad::new(p, 0.1).lr_decay(0.1).initial_accumulator_value(0.1)),
        &|p| Box::new(NAdam::new(p, 0.1)),
        &|p| Box::new(RAdam::new(p, 0.1).betas((0.8, 0.7))),
        &|p| Box::new(Rprop::new(p, 0.1)),
        &|p| Box::new(Adafactor::new(p, 0.1)),
        &|p| Box::new(Lamb::new(p, 0.1)),
        &|p| Box::new(Adam::new(p, 0.1).amsgrad(true)),
        &|p| Box::new(Sgd::new(p, 0.1).momentum(0.9).dampening(0.3)),
        &|p| Box::new(RmsProp::new(p, 0.1).momentum(0.5)),
    ];
    for (k, make) in makes.into_iter().enumerate() {
        let (expected, _) = eager(device, make)?;
        ensure_same_bits_all(&replayed(device, make)?.0, &expected)
            .with_context(|| format!("optimiser {k}"))?;
    }
    Ok(())
}

/// With a scaler that meets an infinity: skipped steps, step counts and the scale are updated on the device.
fn steps_that_the_device_skips_are_skipped_in_replays(device: &Device) -> Result<()> {
    require_dtype(device, DType::F16)?;
    if !device.info().features.f16 {
        return skip("the device computes no f16");
    }
    let run = |captured: bool| -> Result<Vec<Tensor>> {
        let net = TrainingSetup::new(device)?;
        let mut optimizer = Adam::new(net.parameters(), 0.01).low_precision_copies(true);
        let mut scaler = GradScaler::new().init_scale(1024.0).growth_interval(2);
        let (x, y) = (net.batches[0].0.copy()?, &net.batches[0].1);
        let mut once = || -> CoreResult<Tensor> {
            let loss = {
                let _autocast = autocast(DType::F16)?;
                net.loss(&x, y)?
            };
            scaler.scale(&loss)?.backward()?;
            scaler.unscale_(&optimizer)?;
            clip_grad_norm_(optimizer.parameters(), 0.5)?;
            scaler.step(&mut optimizer)?;
            scaler.update()?;
            optimizer.zero_grad();
            Ok(loss)
        };
        let inputs = (0..5).map(|k| {
            let scale = if k == 2 { f64::INFINITY } else { 1.0 };
            net.batches[k].0.mul(scale)
        });
        let inputs = inputs.collect::<CoreResult<Vec<_>>>()?;
        if captured {
            let mut step = device.capture(&mut once)?;
            for input in &inputs {
                x.copy_(input)?;
                step.replay()?;
            }
        } else {
            once()?;
            once()?;
            for input in &inputs {
                x.copy_(input)?;
                once()?;
            }
        }
        let mut found = net.parameters();
        found.extend(scaler.state_dict(device)?.into_values());
        found.extend(optimizer.state_dict()?.into_values());
        found.iter().map(|t| Ok(t.detach().copy()?)).collect()
    };
    ensure_same_bits_all(&run(true)?, &run(false)?)
}

fn gradients_persist_and_accumulate_across_replays(device: &Device) -> Result<()> {
    let run = |captured: bool, clear: bool| -> Result<Vec<Tensor>> {
        let net = TrainingSetup::new(device)?;
        let (x, y) = &net.batches[0];
        let clears = Sgd::new(net.parameters(), 0.0);
        let mut once = || {
            if clear {
                clears.zero_grad();
            }
            let loss = net.loss(x, y)?;
            loss.backward()?;
            Ok(loss)
        };
        if captured {
            let mut step = device.capture(&mut once)?;
            step.replay()?;
            // The gradient was dropped, so the next replay starts a new one.
            Sgd::new(net.parameters(), 0.0).zero_grad();
            step.replay()?;
            step.replay()?;
        } else {
            for k in 0..5 {
                if k == 3 {
                    clears.zero_grad();
                }
                once()?;
            }
        }
        net.parameters().iter().map(|p| p.grad().context("no gradient")).collect()
    };
    for clear in [true, false] {
        ensure_same_bits_all(&run(true, clear)?, &run(false, clear)?)
            .with_context(|| format!("cleared: {clear}"))?;
    }
    // Replacing the gradient tensor makes the replay an error.
    let net = TrainingSetup::new(device)?;
    let (x, y) = &net.batches[0];
    let mut step = device.capture(|| net.loss(x, y)?.backward())?;
    let weight = &net.parameters()[0];
    weight.set_grad(Some(weight.zeros_like()?.detach()));
    let error = step.replay().err().context("the replaced gradient was not detected")?;
    ensure!(matches!(error, Error::Capture { .. }), "{error}");
    Ok(())
}

fn dropout_in_a_checkpoint_is_recomputed_in_replays(device: &Device) -> Result<()> {
    let run = |captured: bool| -> Result<Vec<Tensor>> {
        device.manual_seed(5);
        let w = Tensor::randn([16, 16], DType::F32, device)?.to_leaf()?;
        let x = Tensor::randn([8, 16], DType::F32, device)?;
        let mut optimizer = Sgd::new(vec![w.clone()], 0.1);
        let mut once = || {
            let v = w.clone();
            let h = checkpoint(&[&x], move |t| t[0].matmul(&v)?.tanh()?.dropout(0.5, true))?;
            let loss = h.matmul(&w)?.dropout(0.5, true)?.square()?.mean((), false)?;
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(loss)
        };
        let mut losses = Vec::new();
        if captured {
            let mut step = device.capture(&mut once)?;
            losses.push(step.outputs().copy()?);
            for _ in 0..3 {
                losses.push(step.replay()?.copy()?);
            }
        } else {
            once()?;
            for _ in 0..4 {
                losses.push(once()?.detach());
            }
        }
        losses.push(w.detach());
        Ok(losses)
    };
    ensure_same_bits_all(&run(true)?, &run(false)?)
}

fn two_captured_steps_of_one_model_alternate(device: &Device) -> Result<()> {
    let run = |captured: bool| -> Result<Vec<Tensor>> {
        let net = TrainingSetup::new(device)?;
        let mut optimizer = AdamW::new(net.parameters(), 0.01);
        let (x, y) = &net.batches[0];
        let (a, b) = (x.narrow(0, 0, 8)?.copy()?, y.narrow(0, 0, 8)?.copy()?);
        let mut found = Vec::new();
        if captured {
            let mut long = device.capture(|| train(&net, &mut optimizer, x, y))?;
            let mut short = device.capture(|| train(&net, &mut optimizer, &a, &b))?;
            for _ in 0..3 {
                found.push(long.replay()?.0.copy()?);
                found.push(short.replay()?.0.copy()?);
            }
            drop(long);
            found.push(short.replay()?.0.copy()?);
        } else {
            for (k, short) in [0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 1].into_iter().enumerate() {
                let (x, y) = if short == 1 { (&a, &b) } else { (x, y) };
                let (loss, _) = train(&net, &mut optimizer, x, y)?;
                if k >= 4 {
                    found.push(loss.detach());
                }
            }
        }
        found.extend(net.parameters());
        Ok(found)
    };
    ensure_same_bits_all(&run(true)?, &run(false)?)
}

fn inputs_of_another_shape_or_dtype_are_refused(device: &Device) -> Result<()> {
    let x = Tensor::ones([4, 3], DType::F32, device)?;
    let mut step = device.capture_with(&[&x], |t| t[0].mul(2.0)?.add(1.0))?;
    let wide = Tensor::ones([4, 5], DType::F32, device)?;
    let message = |result: CoreResult<Tensor>| result.err().map(|e| e.message()).unwrap_or_default();
    let shape = message(step.run(&[&wide]));
    ensure!(
        shape.contains("[4, 3]") && shape.contains("[4, 5]") && shape.contains("capture it again"),
        "{shape}"
    );
    let dtype = message(step.run(&[&x.to_dtype(DType::I32)?]));
    ensure!(dtype.contains("i32") && dtype.contains("f32"), "{dtype}");
    let count = message(step.run(&[]));
    ensure!(count.contains("1 inputs; got 0"), "{count}");
    // The captured step is unchanged.
    let two = Tensor::full([4, 3], 2.0, DType::F32, device)?;
    ensure!(step.run(&[&two])?.to_vec::<f32>()? == [5.0; 12]);
    ensure!(step.replay()?.to_vec::<f32>()? == [5.0; 12]);
    Ok(())
}

/// Fails unless the capture of a step is an error that contains `what`.
fn ensure_refused(device: &Device, what: &str, step: &mut dyn FnMut() -> CoreResult<Tensor>) -> Result<()> {
    match device.capture(step) {
        Err(error @ Error::Capture { .. }) if error.to_string().contains(what) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("expected {what}")),
        Ok(_) => anyhow::bail!("{what} was captured"),
    }
}

type Work<'a> = Box<dyn FnMut() -> CoreResult<()> + 'a>;

/// A replay would leave the work out, so that the tensors of the other device would miss it.
fn work_on_another_device_is_refused(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let x = Tensor::ones([16], DType::F32, device)?;
        let theirs = Tensor::ones([16], DType::F32, &second)?;
        let mut replayable = second.capture(|| theirs.mul(2.0))?;
        let mut works: Vec<(&str, Work<'_>)> = vec![
            ("in place", Box::new(|| theirs.add_(1.0))),
            ("elementwise", Box::new(|| theirs.mul(2.0).map(drop))),
            ("a reduction", Box::new(|| theirs.sum_all().map(drop))),
            ("a copy", Box::new(|| theirs.copy().map(drop))),
            ("a fill", Box::new(|| theirs.fill_(1.0))),
            ("a read", Box::new(|| theirs.to_vec::<f32>().map(drop))),
            ("an upload", Box::new(|| Tensor::from_slice(&[1f32], [1], &second).map(drop))),
            ("random values", Box::new(|| Tensor::rand([4], DType::F32, &second).map(drop))),
            (
                "a seed",
                Box::new(|| {
                    second.manual_seed(1);
                    Ok(())
                }),
            ),
            ("a replay", Box::new(|| replayable.replay().map(drop))),
            ("a capture", Box::new(|| second.capture(|| theirs.mul(3.0)).map(drop))),
            ("a record", Box::new(|| second.record_with(&[], |_| theirs.mul(3.0)).map(drop))),
        ];
        for (work, run) in &mut works {
            ensure_refused(device, "another device", &mut || {
                // The capture fails even if the step ignores the error.
                let _ignored = run();
                x.mul(2.0)
            })
            .with_context(|| format!("{name}: {work}"))?;
        }
        drop(works);
        // Values that the host has are constants of the step, and both devices go on.
        let numbers = theirs.add(1.0)?.to_vec::<f32>()?;
        let mut step = device.capture(|| x.mul(f64::from(numbers[0])))?;
        ensure!(step.replay()?.to_vec::<f32>()? == [2.0; 16], "{name}: constants of the host");
        ensure!(replayable.replay()?.to_vec::<f32>()? == [2.0; 16], "{name}: a replay outside");
    }
    let second = &pairs(device)?[0].second;
    let (net, steps) = (Linear::new(4, 3, device)?, Tensor::zeros((), DType::F32, second)?);
    let loader = PointDataset::new(24).batches(4).epochs(1);
    let mut trainer = Trainer::new(&net, Sgd::new(net.parameters(), 0.1)).quiet().capture(true);
    let fitted = trainer.fit(&loader, |x, y| {
        steps.add_(1.0)?;
        net.forward(x)?.cross_entropy(y)
    });
    let text = fitted.err().context("a loss that counts on another device was captured")?.to_string();
    ensure!(text.contains("another device"), "{text}");
    Ok(())
}

/// Another thread may use what the step only reads. Other uses of the step's tensors would be missing from replays.
fn work_of_another_thread_on_tensors_of_the_step_is_refused(device: &Device) -> Result<()> {
    let x = Tensor::ones([16], DType::F32, device)?;
    let total = Tensor::zeros([16], DType::F32, device)?;
    let elsewhere = |work: &(dyn Fn() -> CoreResult<()> + Sync)| {
        thread::scope(|scope| scope.spawn(work).join().expect("the thread runs"))
    };
    ensure_refused(device, "another thread", &mut || {
        elsewhere(&|| total.add_(1.0))?;
        x.mul(&total)
    })?;
    ensure_refused(device, "another thread", &mut || {
        let sum = x.add(&total)?;
        elsewhere(&|| total.add_(1.0))?;
        Ok(sum)
    })?;
    ensure_refused(device, "another thread", &mut || {
        total.mul_(2.0)?;
        elsewhere(&|| total.sum_all()?.item().map(drop))?;
        x.add(1.0)
    })?;
    let mut step = device.capture(|| {
        elsewhere(&|| x.sum_all()?.item().map(drop))?;
        x.mul(3.0)
    })?;
    ensure!(step.replay()?.to_vec::<f32>()? == [3.0; 16], "a tensor that both read");
    Ok(())
}

fn steps_that_cannot_be_captured_are_errors(device: &Device) -> Result<()> {
    let x = Tensor::ones([16], DType::F32, device)?;
    let refused =
        |what: &str, step: &mut dyn FnMut() -> CoreResult<Tensor>| ensure_refused(device, what, step);
    refused("read", &mut || x.mul(x.add(1.0)?.sum((), false)?.item()?))?;
    refused("upload", &mut || x.mul(&Tensor::from_slice(&[2_f32], [1], device)?))?;
    refused("set_random_state", &mut || {
        device.manual_seed(1);
        x.dropout(0.5, true)
    })?;
    refused("inside a step", &mut || Ok(device.capture(|| x.add(1.0))?.outputs()))?;
    let mut inner = device.capture(|| x.add(1.0))?;
    refused("replay", &mut || inner.replay())?;
    // The capture also fails if the step ignores the error and continues.
    refused("read", &mut || {
        let _ignored = x.to_vec::<f32>();
        x.mul(2.0)
    })?;
    refused("upload", &mut || {
        let two = Tensor::from_slice(&[2_f32], [1], device).or_else(|_| x.narrow(0, 0, 1))?;
        x.mul(&two)
    })?;
    refused("inside a step", &mut || {
        let _ignored = device.capture(|| x.add(1.0));
        x.mul(2.0)
    })?;
    // Replaces a state while the program keeps the old tensor.
    let (mut state, mut old) = (x.copy()?, Vec::new());
    refused("change a state in place", &mut || {
        old.push(state.clone());
        state = state.add(1.0)?;
        state.mul(2.0)
    })?;
    let (mut state, mut old) = (x.copy()?, Vec::new());
    refused("change a state in place", &mut || {
        old.push(state.clone());
        state = state.add(1.0)?;
        Ok(state.clone())
    })?;
    let mut kept = None;
    refused("return it from the step", &mut || {
        let h = x.add(1.0)?;
        kept = Some(h.clone());
        h.mul(2.0)
    })?;
    if let Ok(()) = x.offload_() {
        refused("offload", &mut || {
            let _ignored = x.offload_();
            x.mul(2.0)
        })?;
    }
    let mut carried = x.copy()?;
    refused("existed before the step", &mut || {
        carried = carried.add(1.0)?;
        Ok(carried.clone())
    })?;
    let net = TrainingSetup::new(device)?;
    let mut first = AdamW::new(net.parameters(), 0.1);
    let (x5, y5) = net.batch(0);
    let recorded = device.record_with(&[x5, y5], |t| train(&net, &mut first, &t[0], &t[1]));
    let message = recorded.err().context("a first step was recorded")?.to_string();
    ensure!(message.contains("make one step before"), "{message}");
    if Stream::new(device) != Stream::default_stream(device) {
        let side = Stream::new(device);
        refused("streams", &mut || {
            let y = x.add(1.0)?;
            let _on = side.enter();
            y.mul(2.0)
        })?;
    }
    // An error of the step itself is returned unchanged, and the device is unaffected.
    let mut tries = 0;
    let failed = device.capture(|| {
        tries += 1;
        if tries == 1 { x.add(1.0) } else { x.reshape([3, 3]) }
    });
    ensure!(matches!(failed, Err(Error::Reshape { .. })), "{failed:?}");
    ensure!(x.sum((), false)?.item()? == 16.0 && inner.replay()?.to_vec::<f32>()? == [2.0; 16]);
    Ok(())
}

fn memory_of_a_captured_step_is_planned_owned_and_freed(device: &Device) -> Result<()> {
    let device = &Device::with_config(device.backend().clone(), Config::default());
    let kib = Tensor::full([256 << 10], 0.5, DType::F32, device)?;
    let before = device.memory().allocated();
    // At most two results are live at a time, and one result is unused.
    let chain = || {
        let _for_nobody = kib.cumsum(0)?;
        kib.softmax(0)?.cumsum(0)?.softmax(0)?.sum((), false)
    };
    let mut step = device.capture(chain)?;
    let stats = step.stats();
    ensure!(stats.dropped >= 1, "{stats}");
    ensure!(stats.arena_bytes >= 2 << 20 && stats.arena_bytes < stats.eager_bytes, "{stats}");
    let held = device.memory().allocated() - before;
    ensure!(held >= stats.arena_bytes && held <= stats.arena_bytes + 4096, "{held} bytes are held; {stats}");
    let expected = step.outputs().item()?;
    for _ in 0..3 {
        ensure!(step.replay()?.item()? == expected);
        ensure!(device.memory().allocated() - before == held, "a replay allocates nothing");
    }
    drop(step);
    ensure!(device.memory().allocated() == before);
    // The captured step keeps its inputs alive.
    let net = TrainingSetup::new(device)?;
    let x = net.batches[0].0.clone();
    let mut step = device.capture(|| net.layers[0].forward(&x))?;
    let expected = net.layers[0].forward(&x)?;
    drop((net, x));
    device.pool().empty_cache()?;
    let _strange = Tensor::full([64 << 10], 7.0, DType::F32, device)?;
    ensure_same_bits(&step.replay()?, &expected)
}

/// Replays work after other operations, with full pools, and after offload between replays.
fn memory_of_a_replay_stays_in_place(device: &Device) -> Result<()> {
    let device = &Device::with_config(device.backend().clone(), Config::default());
    let mut rng = SplitMix64(9);
    let x = Tensor::randn([64, 64], DType::F32, device)?;
    let state = Tensor::zeros([64, 64], DType::F32, device)?;
    let mut once = || {
        state.add_(&x.matmul(&x)?.tanh()?)?;
        state.sum([1], false)
    };
    let mut step = device.capture(&mut once)?;
    let mut expected = Tensor::zeros([64, 64], DType::F32, device)?;
    let change = x.matmul(&x)?.tanh()?;
    for k in 0..2 {
        expected = expected.add(&change).with_context(|| format!("step {k}"))?;
    }
    let mut others = Vec::new();
    for _ in 0..6 {
        for _ in 0..4 {
            let t = Tensor::full([1 + rng.below(40_000)], 3.0, DType::F32, device)?;
            if rng.below(2) == 0 { others.push(t.exp()?) } else { others.clear() }
        }
        device.pool().set_limit(Some(device.memory().reserved()));
        if device.backend().supports_pinned_host() {
            state.offload_()?;
            ensure!(!state.is_offloaded(), "what a captured step uses stays on the device");
        }
        let sums = step.replay()?;
        device.pool().set_limit(None);
        expected = expected.add(&change)?;
        ensure_same_bits(&state, &expected)?;
        ensure_same_bits(&sums, &expected.sum([1], false)?)?;
        device.pool().empty_cache()?;
    }
    Ok(())
}

fn a_profile_names_the_commands_of_a_replay(device: &Device) -> Result<()> {
    let x = Tensor::ones([32, 32], DType::F32, device)?;
    let mut step = device.capture(|| x.matmul(&x)?.softmax(-1))?;
    step.replay()?;
    step.replay()?;
    let profiler = Profiler::start(device)?;
    step.replay()?;
    let spans = profiler.finish()?.spans;
    ensure!(spans.len() == step.stats().commands, "{} spans, {}", spans.len(), step.stats());
    ensure!(spans.iter().any(|span| span.op == "softmax"), "{spans:?}");
    Ok(())
}

fn constants_are_kept_for_replays(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1_i32, 2, 3, 4], [4], device)?;
    let mut step = device.capture(|| {
        let values = Tensor::arange(0.0, 4.0, 1.0, DType::I32, device)?;
        values.add_(&x)?;
        Ok((values, x.flip([0])?))
    })?;
    for _ in 0..3 {
        let (sums, flipped) = step.replay()?;
        ensure!(sums.to_vec::<i32>()? == [1, 3, 5, 7] && flipped.to_vec::<i32>()? == [4, 3, 2, 1]);
    }
    Ok(())
}

/// Another thread, such as a loader's, creates and uploads tensors; its operations do not join the captured step.
fn other_threads_are_not_recorded(device: &Device) -> Result<()> {
    let device = &Device::with_config(device.backend().clone(), Config::default());
    device.set_fusion_min_bytes(Some(0));
    let x = Tensor::full([1000], 0.5, DType::F32, device)?;
    let capture =
        || device.capture(|| (0..20).try_fold(x.clone(), |h, _| h.mul(0.5)?.add(&x)?.cumsum(0)?.sin()));
    let alone = capture()?;
    let expected = alone.outputs().copy()?;
    let (done, begun) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let other = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                let t = Tensor::from_slice(&[1.0_f32; 1000], [1000], device)?;
                let t = t.mul(2.0)?.add(1.0)?;
                begun.store(true, Ordering::Relaxed);
                ensure!(t.to_vec::<f32>()? == [3.0; 1000]);
            }
            Ok(())
        });
        while !begun.load(Ordering::Relaxed) && !other.is_finished() {
            thread::yield_now();
        }
        let beside = || -> Result<()> {
            let mut step = capture()?;
            // Another thread may flush a fusion chain, but adds nothing to the captured step.
            let (commands, fewest) = (step.stats().commands, alone.stats().commands);
            ensure!((fewest..=4 * 20).contains(&commands), "{commands} commands; {fewest} alone");
            for _ in 0..5 {
                ensure_same_bits(&step.replay()?, &expected)?;
            }
            Ok(())
        };
        let result = (0..3).try_for_each(|_| beside());
        done.store(true, Ordering::Relaxed);
        other.join().unwrap_or_else(|_| anyhow::bail!("the other thread panicked"))?;
        result
    })
}

/// Eager and captured steps maintain 16-bit copies of parameters. Changes by each other or by the program are seen.
fn sixteen_bit_copies_are_never_stale(device: &Device) -> Result<()> {
    let run = |captured: bool| -> Result<Vec<Tensor>> {
        let net = TrainingSetup::new(device)?;
        let mut optimizer = AdamW::new(net.parameters(), 0.01).low_precision_copies(true);
        let (x, y) = &net.batches[0];
        let mut once = || -> CoreResult<Tensor> {
            let loss = {
                let _autocast = autocast(DType::BF16)?;
                net.loss(x, y)?
            };
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(loss.detach())
        };
        let change = |weight: usize| net.parameters()[weight].detach().mul_(0.5).map(drop);
        let mut losses = vec![once()?, once()?];
        // Alternates the eager step, replays of two captures, and changes of a weight.
        let mut steps =
            if captured { vec![device.capture(&mut once)?, device.capture(&mut once)?] } else { vec![] };
        if !captured {
            (0..4).try_for_each(|_| once().map(drop))?;
        }
        for index in [0, 0, 1, 2, 1, 0, 2, 2, 3, 0, 3, 2, 1, 1] {
            match (index, steps.get_mut(index)) {
                (_, Some(step)) => losses.push(step.replay()?.copy()?),
                (3, None) => change(2)?,
                (_, None) => losses.push(once()?),
            }
        }
        drop(steps);
        losses.extend([once()?, once()?]);
        losses.extend(net.parameters());
        Ok(losses)
    };
    ensure_same_bits_all(&run(true)?, &run(false)?)?;
    // Replays read the copies that the step itself writes, so weights are not cast.
    let commands = |copies: bool| -> Result<usize> {
        let net = TrainingSetup::new(device)?;
        let mut optimizer = AdamW::new(net.parameters(), 0.01).low_precision_copies(copies);
        let (x, y) = &net.batches[0];
        let step = device.capture(|| {
            let loss = {
                let _autocast = autocast(DType::BF16)?;
                net.loss(x, y)?
            };
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(loss)
        })?;
        Ok(step.stats().commands)
    };
    let (with, without) = (commands(true)?, commands(false)?);
    ensure!(with < without, "{with} commands with copies, {without} without");
    Ok(())
}

fn a_state_that_is_changed_in_place_carries_over(device: &Device) -> Result<()> {
    let state = Tensor::zeros([16], DType::F32, device)?;
    let x = Tensor::ones([16], DType::F32, device)?;
    let mut step = device.capture(|| {
        let new = state.mul(0.5)?.add(&x)?;
        state.copy_(&new)?;
        Ok(new)
    })?;
    let mut expected = 0.0;
    for k in 0..5 {
        expected = expected * 0.5 + 1.0;
        if k > 1 {
            ensure!(step.replay()?.to_vec::<f32>()? == [expected; 16]);
        }
    }
    ensure!(state.to_vec::<f32>()? == [expected; 16]);
    Ok(())
}

fn a_gradient_that_the_step_sets_exists_after_each_replay(device: &Device) -> Result<()> {
    let w = Tensor::ones([16], DType::F32, device)?.to_leaf()?;
    let x = Tensor::full([16], 3.0, DType::F32, device)?;
    let mut step = device.capture(|| {
        w.set_grad(Some(x.mul(2.0)?));
        Ok(())
    })?;
    w.set_grad(None);
    x.copy_(&x.add(1.0)?)?;
    step.replay()?;
    let grad = w.grad().context("no gradient")?;
    ensure!(grad.to_vec::<f32>()? == [8.0; 16], "{:?}", grad.to_vec::<f32>()?);
    Ok(())
}
