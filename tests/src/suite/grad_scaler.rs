//! Gradient scaling: the scale, steps skipped on the device, and 16-bit training that converges as in f32.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::data::Dataset;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::Config;
use forebay::nn::{Linear, Module};
use forebay::optim::{Adam, AdamW, GradScaler, Optimizer, RmsProp, Sgd, clip_grad_norm_};
use forebay::tensor::Tensor;
use forebay::train::Trainer;

use super::faulty_backend::FaultyBackend;
use super::host_reference::{SplitMix64, ensure_close, ensure_same_bits};
use super::tests;
use super::train_resume::{PointDataset, TempFile};

tests![
    the_scale_changes_as_in_pytorch,
    the_scale_stays_invertible,
    gradients_are_unscaled_and_clipped,
    a_step_with_an_infinity_changes_nothing,
    skipping_stays_within_the_binding_limit,
    step_counts_on_device_and_host_agree,
    an_optimiser_is_skipped_only_for_its_own_gradients,
    calls_out_of_order_are_refused,
    scaling_keeps_gradients_that_underflow_in_f16,
    training_in_f16_matches_f32,
    a_resumed_run_restores_its_scale,
];

/// Bits of infinities and NaNs, which must not reach a parameter.
const STRANGE: [u32; 4] = [0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xff80_0001];

/// Extents that fill vec4s, and others; more parameters than one launch can bind on a small device.
const SIZES: [usize; 5] = [64, 7, 1030, 1, 12];

fn values(rng: &mut SplitMix64, count: usize) -> Vec<f32> {
    (0..count).map(|_| (rng.below(2_000_001) as f32 - 1e6) / 1e6).collect()
}

fn parameters(rng: &mut SplitMix64, device: &Device) -> Result<Vec<Tensor>> {
    SIZES.iter().map(|&n| Ok(Tensor::from_slice(&values(rng, n), [n], device)?.to_leaf()?)).collect()
}

/// Sets every parameter's gradient to seeded random values times `scale`; `strange` bits replace one element.
fn set_grads(parameters: &[Tensor], seed: u64, scale: f32, strange: Option<u32>) -> Result<()> {
    let mut rng = SplitMix64(seed);
    let index = (seed as usize % parameters.len(), rng.next() as usize);
    for (k, p) in parameters.iter().enumerate() {
        let mut grad: Vec<f32> = values(&mut rng, p.numel()).iter().map(|g| g * scale).collect();
        if let Some(bits) = strange.filter(|_| index.0 == k) {
            let at = index.1 % grad.len();
            grad[at] = f32::from_bits(bits);
        }
        p.set_grad(Some(Tensor::from_slice(&grad, p.shape(), p.device())?));
    }
    Ok(())
}

fn the_scale_changes_as_in_pytorch(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(4);
    let parameters = parameters(&mut rng, device)?;
    let mut optimizer = Sgd::new(parameters.clone(), 0.1);
    let mut scaler = GradScaler::new();
    ensure!(scaler.get_scale()? == 65536.0, "it begins at {}", scaler.get_scale()?);
    let loss = Tensor::ones((), DType::F32, device)?;
    ensure!(scaler.scale(&loss)?.item()? == 65536.0);
    scaler = GradScaler::new().growth_interval(3).growth_factor(4.0).backoff_factor(0.25);
    let (mut scale, mut tracker) = (65536.0, 0);
    for step in 0..40u64 {
        // Mostly finite, so that the scale also grows; compared with the rule of `_amp_update_scale_`.
        let strange = (rng.below(5) == 0).then(|| STRANGE[rng.below(4)]);
        scaler.scale(&loss)?;
        set_grads(&parameters, step, 1.0, strange)?;
        scaler.step(&mut optimizer)?;
        scaler.update()?;
        if strange.is_some() {
            (scale, tracker) = (scale * 0.25, 0);
        } else {
            tracker += 1;
            if tracker == 3 {
                (scale, tracker) = (scale * 4.0, 0);
            }
        }
        let state = scaler.state_dict(device)?;
        let now = (scaler.get_scale()?, state["growth_tracker"].item()?);
        ensure!(now == (scale, f64::from(tracker)), "step {step}: {now:?}, expected {scale} and {tracker}");
        ensure!(scaler.scale(&loss)?.item()? == scale);
    }
    Ok(())
}

fn the_scale_stays_invertible(device: &Device) -> Result<()> {
    let p = Tensor::ones([3], DType::F32, device)?.to_leaf()?;
    let mut optimizer = Sgd::new(vec![p.clone()], 0.0);
    let mut scaler = GradScaler::new().init_scale(2f64.powi(124)).growth_interval(1);
    for expected in [125, 126, 126, 126] {
        p.set_grad(Some(p.ones_like()?));
        scaler.step(&mut optimizer)?;
        scaler.update()?;
        let scale = scaler.get_scale()?;
        ensure!(scale == 2f64.powi(expected), "{scale:e} is not 2^{expected}");
    }
    Ok(())
}

fn gradients_are_unscaled_and_clipped(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(6);
    let mut parameters = parameters(&mut rng, device)?;
    for size in [8, 5] {
        parameters.push(Tensor::zeros([size], DType::BF16, device)?.to_leaf()?);
    }
    let mut optimizer = Sgd::new(parameters.clone(), 0.0);
    let mut scaler = GradScaler::new().init_scale(1024.0);
    let mut exact = Vec::new();
    for p in &parameters {
        let grad =
            Tensor::from_slice(&values(&mut rng, p.numel()), p.shape(), device)?.to_dtype(p.dtype())?;
        exact.push(grad.to_f64s()?);
        // Powers of two are exact.
        p.set_grad(Some(grad.mul(1024.0)?));
    }
    scaler.unscale_(&optimizer)?;
    for (p, exact) in parameters.iter().zip(&exact) {
        let grad = p.grad().context("no gradient")?;
        ensure!(
            grad.dtype() == p.dtype() && &grad.to_f64s()? == exact,
            "an unscaled gradient differs from the exact one"
        );
    }
    let norm = clip_grad_norm_(optimizer.parameters(), 0.5)?.item()?;
    let expected = exact.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
    ensure_close(&[norm], &[expected], 1e-5, 0.0)?;
    scaler.step(&mut optimizer)?;
    let clipped = parameters[0].grad().context("no gradient")?.to_f64s()?;
    let expected: Vec<f64> = exact[0].iter().map(|g| g * 0.5 / norm).collect();
    ensure_close(&clipped, &expected, 1e-5, 1e-7).context("unscaled again by the step")?;
    Ok(scaler.update()?)
}

type OptimizerCtor = fn(Vec<Tensor>) -> Box<dyn Optimizer>;

const OPTIMIZERS: [(&str, OptimizerCtor); 6] = [
    ("sgd", |p| Box::new(Sgd::new(p, 0.1))),
    ("sgd momentum", |p| Box::new(Sgd::new(p, 0.1).momentum(0.9).dampening(0.2).nesterov(true))),
    ("adam", |p| Box::new(Adam::new(p, 0.01).weight_decay(0.1))),
    ("adam without a mean", |p| Box::new(Adam::new(p, 0.01).betas((0.0, 0.99)))),
    ("adamw amsgrad", |p| Box::new(AdamW::new(p, 0.01).amsgrad(true))),
    ("rmsprop", |p| Box::new(RmsProp::new(p, 0.01).momentum(0.5).centered(true))),
];

/// Returns copies of parameters and state, which may share memory.
fn parameters_and_state(optimizer: &dyn Optimizer) -> Result<Vec<Tensor>> {
    let mut all = Vec::new();
    for p in optimizer.parameters() {
        all.push(p.detach().copy()?);
    }
    for t in optimizer.state_dict()?.values() {
        all.push(t.copy()?);
    }
    Ok(all)
}

fn ensure_same_bits_all(a: &[Tensor], b: &[Tensor]) -> Result<()> {
    ensure!(a.len() == b.len(), "{} tensors, expected {}", a.len(), b.len());
    a.iter()
        .zip(b)
        .enumerate()
        .try_for_each(|(k, (a, b))| ensure_same_bits(a, b).with_context(|| format!("tensor {k}")))
}

fn a_step_with_an_infinity_changes_nothing(device: &Device) -> Result<()> {
    for (name, make) in OPTIMIZERS {
        // Equal finite gradients; one of the two runs also has skipped steps in between.
        let run = |strange: bool| -> Result<Vec<Tensor>> {
            let parameters = parameters(&mut SplitMix64(1), device)?;
            let mut optimizer = make(parameters.clone());
            let mut scaler = GradScaler::new().init_scale(16.0).backoff_factor(1.0);
            for seed in 0..5u64 {
                for bits in STRANGE.into_iter().filter(|_| strange) {
                    let before = parameters_and_state(&*optimizer)?;
                    set_grads(&parameters, seed + u64::from(bits & 7), 16.0, Some(bits))?;
                    // The first parameter has a gradient in every second step only.
                    if seed % 2 == 1 {
                        parameters[0].set_grad(None);
                        parameters[1].set_grad(Some(Tensor::from_slice(
                            &[f32::from_bits(bits); 7],
                            [7],
                            device,
                        )?));
                    }
                    scaler.step(&mut *optimizer)?;
                    scaler.update()?;
                    if seed > 0 {
                        ensure_same_bits_all(&parameters_and_state(&*optimizer)?, &before)
                            .with_context(|| format!("after {bits:x}"))?;
                    }
                }
                set_grads(&parameters, seed, 16.0, None)?;
                if seed % 2 == 1 {
                    parameters[0].set_grad(None);
                }
                scaler.step(&mut *optimizer)?;
                scaler.update()?;
            }
            // The saved state counts only the steps that were not skipped.
            let saved = optimizer.state_dict()?;
            ensure!(
                saved["0.step"].item()? == 3.0 && saved["1.step"].item()? == 5.0,
                "skipped steps were counted"
            );
            let mut other = make(parameters.clone());
            other.load_state_dict(&saved)?;
            set_grads(&parameters, 9, 1.0, None)?;
            other.step()?;
            parameters_and_state(&*other)
        };
        ensure_same_bits_all(&run(true)?, &run(false)?).with_context(|| name)?;
    }
    Ok(())
}

fn skipping_stays_within_the_binding_limit(device: &Device) -> Result<()> {
    // Seven bindings: state, count and flag leave room for two parameters in a launch, where three share their state.
    let few = Arc::new(FaultyBackend::with_bindings(device.backend().clone(), 7));
    let few = Device::with_config(few, Config::default());
    a_step_with_an_infinity_changes_nothing(&few)?;
    step_counts_on_device_and_host_agree(&few)
}

fn step_counts_on_device_and_host_agree(device: &Device) -> Result<()> {
    let zero = Tensor::zeros([1], DType::F32, device)?;
    for (name, make) in OPTIMIZERS {
        // Steps counted by the host, by the device, and switched after two steps.
        let run = |from: u64, until: u64| -> Result<Vec<f64>> {
            let parameters = parameters(&mut SplitMix64(2), device)?;
            let mut optimizer = make(parameters.clone());
            for step in 0..30 {
                set_grads(&parameters, step, 1.0, None)?;
                if (from..until).contains(&step) {
                    optimizer.step_unless(&zero)?
                } else {
                    optimizer.step()?
                }
            }
            ensure!(optimizer.state_dict()?["2.step"].item()? == 30.0);
            Ok(parameters.iter().map(Tensor::to_f64s).collect::<Result<Vec<_>, _>>()?.concat())
        };
        let host = run(0, 0)?;
        // Bias corrections on the device have a few more rounding errors, over 30 steps of 0.01 and values up to 1.
        for (from, until) in [(0, 30), (2, 9)] {
            ensure_close(&run(from, until)?, &host, 1e-6, 1e-6).with_context(|| name)?;
        }
    }
    Ok(())
}

fn an_optimiser_is_skipped_only_for_its_own_gradients(device: &Device) -> Result<()> {
    let (a, b) = (parameters(&mut SplitMix64(1), device)?, parameters(&mut SplitMix64(2), device)?);
    let (mut first, mut second) = (Adam::new(a.clone(), 0.1), Adam::new(b.clone(), 0.1));
    let mut scaler = GradScaler::new();
    let before = (parameters_and_state(&first)?, b[0].to_vec::<f32>()?);
    set_grads(&a, 1, 1.0, Some(STRANGE[0]))?;
    set_grads(&b, 2, 1.0, None)?;
    scaler.step(&mut first)?;
    scaler.step(&mut second)?;
    scaler.update()?;
    ensure_same_bits_all(&parameters_and_state(&first)?[..a.len()], &before.0[..a.len()])?;
    ensure!(b[0].to_vec::<f32>()? != before.1, "an optimiser was skipped for another's gradients");
    ensure!(scaler.get_scale()? == 32768.0, "{}", scaler.get_scale()?);
    Ok(())
}

fn calls_out_of_order_are_refused(device: &Device) -> Result<()> {
    let p = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    p.set_grad(Some(p.ones_like()?));
    let mut optimizer = Sgd::new(vec![p], 0.1);
    let mut scaler = GradScaler::new();
    let says = |result: CoreResult<()>, what: &str| -> Result<()> {
        let message = result.err().with_context(|| format!("it must be refused: {what}"))?.to_string();
        ensure!(message.contains(what), "{message}");
        Ok(())
    };
    says(scaler.update(), "there was none")?;
    scaler.unscale_(&optimizer)?;
    says(scaler.unscale_(&optimizer), "unscaled already")?;
    scaler.step(&mut optimizer)?;
    says(scaler.step(&mut optimizer), "call `update`")?;
    says(scaler.unscale_(&optimizer), "comes before `step`")?;
    scaler.update()?;
    let half = Tensor::ones([4], DType::F16, device)?.to_leaf()?;
    half.set_grad(Some(half.ones_like()?));
    says(scaler.unscale_(&Sgd::new(vec![half], 0.1)), "keep parameters in f32")?;
    says(optimizer.step_unless(&Tensor::ones([2], DType::F32, device)?), "one number")
}

fn scaling_keeps_gradients_that_underflow_in_f16(device: &Device) -> Result<()> {
    let w = Tensor::ones([8, 8], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([2, 8], DType::F32, device)?;
    // The gradient of the product is 1e-8, which f16 rounds to zero.
    let loss = || -> Result<Tensor> {
        let _autocast = autocast(DType::F16)?;
        Ok(x.matmul(&w)?.to_dtype(DType::F32)?.mul(1e-8)?.sum_all()?)
    };
    loss()?.backward()?;
    ensure!(w.grad().context("no gradient")?.to_f64s()?.iter().all(|&g| g == 0.0), "f16 holds 1e-8?");
    w.set_grad(None);
    let mut scaler = GradScaler::new();
    let mut optimizer = Sgd::new(vec![w.clone()], 1.0);
    scaler.scale(&loss()?)?.backward()?;
    scaler.unscale_(&optimizer)?;
    // Two rows; rounded once to the 11 bits of f16.
    ensure_close(&w.grad().context("no gradient")?.to_f64s()?, &[2e-8; 64], 2f64.powi(-11), 0.0)?;
    scaler.step(&mut optimizer)?;
    Ok(scaler.update()?)
}

fn net(device: &Device) -> Result<(Linear, Linear)> {
    device.manual_seed(11);
    Ok((Linear::new(4, 32, device)?, Linear::new(32, 3, device)?))
}

fn training_in_f16_matches_f32(device: &Device) -> Result<()> {
    let train = |low: Option<DType>, scaler: Option<GradScaler>| -> Result<(Vec<f64>, Option<f64>)> {
        let net = net(device)?;
        let mut run = Trainer::new(&net, Adam::new(net.parameters(), 2e-2))
            .accumulate(2)
            .clip_grad_norm(1.0)
            .steps(60)
            .quiet();
        if let Some(low) = low {
            run = run.autocast(low);
        }
        if let Some(scaler) = scaler {
            run = run.scaler(scaler);
        }
        run.fit(&PointDataset::learnable(48).batches(12), |x, y| {
            net.1.forward(&net.0.forward(x)?.tanh()?)?.cross_entropy(y)
        })?;
        let scale = run.grad_scaler().map(GradScaler::get_scale).transpose()?;
        Ok((run.history().losses.iter().map(|&l| f64::from(l)).collect(), scale))
    };
    let last = |losses: &[f64]| losses[50..].iter().sum::<f64>() / 10.0;
    let exact = train(None, None)?.0;
    ensure!(last(&exact) < 0.8 * exact[0], "it does not learn: {exact:?}");
    // Scaling by powers of two is exact in f32, and clipping comes after unscaling.
    let scaled = train(None, Some(GradScaler::new()))?.0;
    ensure_close(&scaled, &exact, 1e-4, 1e-4).context("f32, scaled")?;
    for (low, unit) in [(DType::F16, 2f64.powi(-11)), (DType::BF16, 2f64.powi(-8))] {
        // An initial scale that overflows f16 only costs some skipped steps.
        let scaler = GradScaler::new().init_scale(2f64.powi(24));
        let (losses, scale) = train(Some(low), Some(scaler))?;
        let scale = scale.context("no scaler")?;
        ensure!(low == DType::BF16 || scale < 2f64.powi(24), "{low}: nothing overflowed at {scale}");
        // Logits up to 8, rounded to the type, are off by up to 8 units, and a cross-entropy by up to twice as much.
        let bound = 2.0 * 8.0 * unit;
        let off = (last(&losses) - last(&exact)).abs();
        ensure!(off <= bound, "{low}: a loss of {}, in f32 {}: off by {off}", last(&losses), last(&exact));
    }
    Ok(())
}

fn a_resumed_run_restores_its_scale(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "scaled");
    let run = |steps: u64, save: bool, resume: bool| -> Result<(Vec<Tensor>, f64)> {
        let net = net(device)?;
        let mut run = Trainer::new(&net, Adam::new(net.parameters(), 2e-2))
            .autocast(DType::F16)
            .scaler(GradScaler::new().init_scale(2f64.powi(18)).growth_interval(4))
            .steps(steps)
            .quiet();
        if save {
            run = run.checkpoint(&file.0, 100);
        }
        if resume {
            run = run.resume(&file.0)?;
        }
        run.fit(&PointDataset::learnable(48).batches(12), |x, y| {
            net.1.forward(&net.0.forward(x)?.tanh()?)?.cross_entropy(y)
        })?;
        let scale = run.grad_scaler().context("no scaler")?.get_scale()?;
        let all = net.parameters().iter().map(|p| p.detach().copy()).collect::<Result<_, _>>()?;
        Ok((all, scale))
    };
    let whole = run(23, false, false)?;
    run(10, true, false)?;
    let resumed = run(23, false, true)?;
    ensure!(resumed.1 == whole.1, "a scale of {} became {}", whole.1, resumed.1);
    ensure_same_bits_all(&resumed.0, &whole.0)
}
