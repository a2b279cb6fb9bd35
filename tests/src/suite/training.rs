//! Optimisers, clipping and layers compared with host implementations; training leaks no memory.

use anyhow::{Context, Result, ensure};
use forebay::autograd;
use forebay::data::{Dataset, TensorDataset};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{BatchNorm1d, Dropout, Embedding, Linear, Module, SelfAttention, Sequential};
use forebay::optim::{
    Adam, AdamW, ClipGradNormOptions, Optimizer, RmsProp, Sgd, clip_grad_norm_, clip_grad_norm_with,
    clip_grad_value_,
};
use forebay::tensor::Tensor;
use forebay::train::{self, Trainer};

use super::host_reference::{SplitMix64, ensure_close, ensure_same_bits};
use super::tests;
use super::train_resume::PointDataset;

tests![
    optimisers_match_their_definitions,
    optimisers_keep_the_dtype_of_16_bit_parameters,
    weights_decay_where_they_should,
    a_view_is_stepped_alone,
    parameters_without_gradients_stay,
    a_saved_optimiser_continues_with_the_same_bits,
    clipping_bounds_the_norm_of_all,
    clipping_takes_norms_of_other_orders,
    clipping_bounds_every_value,
    layers_switch_between_modes,
    causal_attention_ignores_later_positions,
    memory_after_many_steps_equals_that_after_a_few,
    micro_batches_of_exact_sums_give_the_same_bits,
    micro_batches_stay_within_the_error_of_a_sum,
    accuracy_is_the_fraction_of_correct_predictions,
    a_tensor_dataset_has_the_rows_of_its_tensors,
];

/// Extents that fill vec4s, and others; more parameters than one launch can bind.
const SIZES: [usize; 8] = [1, 64, 7, 1030, 4096, 33, 2, 12];

/// Reference update of one value in f64.
type ReferenceUpdate = Box<dyn Fn(&mut [f64; 4], usize, f64, f64) -> f64>;

fn values(rng: &mut SplitMix64, count: usize) -> Vec<f32> {
    (0..count).map(|_| (rng.below(2_000_001) as f32 - 1e6) / 1e6).collect()
}

fn parameter(data: &[f32], device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(data, [data.len()], device)?.to_leaf()?)
}

fn sgd(momentum: f64, dampening: f64, decay: f64, nesterov: bool, lr: f64) -> ReferenceUpdate {
    Box::new(move |s, step, w, g| {
        let g = g + decay * w;
        s[0] = if step == 1 { g } else { momentum * s[0] + (1.0 - dampening) * g };
        w - lr
            * if momentum == 0.0 {
                g
            } else if nesterov {
                g + momentum * s[0]
            } else {
                s[0]
            }
    })
}

fn adam(lr: f64, (b1, b2): (f64, f64), decay: f64, decoupled: bool, amsgrad: bool) -> ReferenceUpdate {
    Box::new(move |s, step, w, g| {
        let (w, g) = if decoupled { (w * (1.0 - lr * decay), g) } else { (w, g + decay * w) };
        s[0] = b1 * s[0] + (1.0 - b1) * g;
        s[1] = b2 * s[1] + (1.0 - b2) * g * g;
        s[2] = s[2].max(s[1]);
        let square = if amsgrad { s[2] } else { s[1] };
        let correction = |b: f64| 1.0 - b.powi(step as i32);
        w - lr / correction(b1) * s[0] / (square.sqrt() / correction(b2).sqrt() + 1e-8)
    })
}

fn rmsprop(lr: f64, alpha: f64, momentum: f64, centered: bool, decay: f64) -> ReferenceUpdate {
    Box::new(move |s, _, w, g| {
        let g = g + decay * w;
        s[0] = alpha * s[0] + (1.0 - alpha) * g * g;
        s[1] = alpha * s[1] + (1.0 - alpha) * g;
        let square = if centered { s[0] - s[1] * s[1] } else { s[0] };
        let step = g / (square.sqrt() + 1e-8);
        s[2] = momentum * s[2] + step;
        w - lr * s[2]
    })
}

type OptimizerCtor = fn(Vec<Tensor>) -> Box<dyn Optimizer>;

fn optimizers() -> Vec<(&'static str, OptimizerCtor, ReferenceUpdate)> {
    vec![
        ("sgd", |p| Box::new(Sgd::new(p, 0.1)), sgd(0.0, 0.0, 0.0, false, 0.1)),
        (
            "sgd momentum",
            |p| Box::new(Sgd::new(p, 0.1).momentum(0.9).dampening(0.2).weight_decay(0.01)),
            sgd(0.9, 0.2, 0.01, false, 0.1),
        ),
        (
            "sgd nesterov",
            |p| Box::new(Sgd::new(p, 0.1).momentum(0.9).nesterov(true)),
            sgd(0.9, 0.0, 0.0, true, 0.1),
        ),
        (
            "adam",
            |p| Box::new(Adam::new(p, 0.01).weight_decay(0.1)),
            adam(0.01, (0.9, 0.999), 0.1, false, false),
        ),
        (
            "adam amsgrad",
            |p| Box::new(Adam::new(p, 0.01).amsgrad(true).betas((0.5, 0.6))),
            adam(0.01, (0.5, 0.6), 0.0, false, true),
        ),
        (
            "adamw",
            |p| Box::new(AdamW::new(p, 0.01).weight_decay(0.1).betas((0.9, 0.95))),
            adam(0.01, (0.9, 0.95), 0.1, true, false),
        ),
        ("rmsprop", |p| Box::new(RmsProp::new(p, 0.01)), rmsprop(0.01, 0.99, 0.0, false, 0.0)),
        (
            "rmsprop centered",
            |p| Box::new(RmsProp::new(p, 0.01).alpha(0.9).centered(true).momentum(0.5).weight_decay(0.1)),
            rmsprop(0.01, 0.9, 0.5, true, 0.1),
        ),
    ]
}

fn optimisers_match_their_definitions(device: &Device) -> Result<()> {
    for (name, make, reference) in optimizers() {
        let mut rng = SplitMix64(7);
        let mut exact: Vec<Vec<f64>> = Vec::new();
        let mut parameters = Vec::new();
        for size in SIZES {
            let data = values(&mut rng, size);
            exact.push(data.iter().map(|&x| x.into()).collect());
            parameters.push(parameter(&data, device)?);
        }
        let mut states: Vec<Vec<[f64; 4]>> = SIZES.iter().map(|&n| vec![[0.0; 4]; n]).collect();
        let mut optimizer = make(parameters.clone());
        for step in 1..=5 {
            for (k, p) in parameters.iter().enumerate() {
                let grad = values(&mut rng, p.numel());
                for (i, &g) in grad.iter().enumerate() {
                    exact[k][i] = reference(&mut states[k][i], step, exact[k][i], g.into());
                }
                p.set_grad(Some(Tensor::from_slice(&grad, p.shape(), device)?));
            }
            optimizer.step()?;
        }
        for (p, exact) in parameters.iter().zip(&exact) {
            for (i, (&ours, &exact)) in p.to_vec::<f32>()?.iter().zip(exact).enumerate() {
                let off = (f64::from(ours) - exact).abs();
                ensure!(off <= 1e-5 + 1.3e-6 * exact.abs(), "{name}, element {i}: {ours} is not {exact}");
            }
        }
    }
    Ok(())
}

fn optimisers_keep_the_dtype_of_16_bit_parameters(device: &Device) -> Result<()> {
    for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 1.6e-2)] {
        let mut rng = SplitMix64(3);
        let mut parameters = Vec::new();
        let mut exact = Vec::new();
        for size in [8, 33, 2] {
            let p = Tensor::from_slice(&values(&mut rng, size), [size], device)?.to_dtype(dtype)?;
            let g = Tensor::from_slice(&values(&mut rng, size), [size], device)?.to_dtype(dtype)?;
            exact.push(p.to_f64s()?.iter().zip(g.to_f64s()?).map(|(w, g)| w - 0.5 * g).collect::<Vec<_>>());
            let p = p.to_leaf()?;
            p.set_grad(Some(g));
            parameters.push(p);
        }
        Sgd::new(parameters.clone(), 0.5).step()?;
        for (p, exact) in parameters.iter().zip(&exact) {
            ensure!(p.dtype() == dtype, "{dtype} became {}", p.dtype());
            for (ours, exact) in p.to_f64s()?.iter().zip(exact) {
                ensure!((ours - exact).abs() <= tolerance, "{dtype}: {ours} is not {exact}");
            }
        }
    }
    Ok(())
}

fn a_view_is_stepped_alone(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let whole = Tensor::zeros([9], dtype, device)?;
        let part = whole.narrow(0, 3, 3)?.to_leaf()?;
        part.set_grad(Some(part.ones_like()?));
        Sgd::new(vec![part], 1.0).step()?;
        let found = whole.to_f64s()?;
        ensure!(found == [0.0, 0.0, 0.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0], "{dtype}: {found:?}");
    }
    Ok(())
}

fn parameters_without_gradients_stay(device: &Device) -> Result<()> {
    let (a, b) = (parameter(&[1.0; 5], device)?, parameter(&[1.0; 5], device)?);
    let mut optimizer = AdamW::new(vec![a.clone(), b.clone()], 0.1);
    b.set_grad(Some(b.ones_like()?));
    optimizer.step()?;
    ensure!(a.to_vec::<f32>()? == [1.0; 5], "a parameter without a gradient moved");
    ensure!(b.to_vec::<f32>()? != [1.0; 5], "a parameter with a gradient did not move");
    // A parameter's first step is a first step, however many steps the others have made.
    a.set_grad(Some(a.ones_like()?));
    b.set_grad(None);
    optimizer.step()?;
    ensure!(a.to_vec::<f32>()? == b.to_vec::<f32>()?, "the corrections of bias are not the parameter's own");
    Ok(())
}

fn a_saved_optimiser_continues_with_the_same_bits(device: &Device) -> Result<()> {
    for (name, make, _) in optimizers() {
        let mut rng = SplitMix64(11);
        let data: Vec<Vec<f32>> = SIZES.iter().map(|&n| values(&mut rng, n)).collect();
        let grads: Vec<Vec<f32>> = SIZES.iter().map(|&n| values(&mut rng, n)).collect();
        let fresh = || data.iter().map(|d| parameter(d, device)).collect::<Result<Vec<_>>>();
        let give = |parameters: &[Tensor]| -> Result<()> {
            for (p, g) in parameters.iter().zip(&grads) {
                p.set_grad(Some(Tensor::from_slice(g, p.shape(), device)?));
            }
            Ok(())
        };
        let first = fresh()?;
        let mut optimizer = make(first.clone());
        give(&first)?;
        optimizer.step()?;
        optimizer.step()?;
        let second = fresh()?;
        for (to, from) in second.iter().zip(&first) {
            to.detach().copy_(&from.detach())?;
        }
        let mut resumed = make(second.clone());
        resumed.load_state_dict(&optimizer.state_dict()?)?;
        give(&second)?;
        optimizer.step()?;
        resumed.step()?;
        for (a, b) in first.iter().zip(&second) {
            ensure!(a.to_vec::<f32>()? == b.to_vec::<f32>()?, "{name}: the runs differ");
        }
        let mut strange = optimizer.state_dict()?;
        strange.insert("99.exp_avg".into(), Tensor::zeros([1], DType::F32, device)?);
        ensure!(resumed.load_state_dict(&strange).is_err(), "{name}: an unknown name was accepted");
    }
    Ok(())
}

fn clipping_bounds_the_norm_of_all(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(5);
    for max_norm in [0.5, 1e6] {
        let mut parameters = Vec::new();
        let mut exact = Vec::new();
        for size in SIZES.into_iter().chain([20_000]) {
            let p = Tensor::zeros([size], DType::F32, device)?.to_leaf()?;
            let grad = values(&mut rng, size);
            p.set_grad(Some(Tensor::from_slice(&grad, [size], device)?));
            exact.push(grad);
            parameters.push(p);
        }
        let norm = exact.iter().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        let found = clip_grad_norm_(&parameters, max_norm)?.item()?;
        ensure!((found - norm).abs() <= 1e-6 * norm, "the norm is {norm}, not {found}");
        let factor = (max_norm / (norm + 1e-6)).min(1.0);
        for (p, grad) in parameters.iter().zip(&exact) {
            let found = p.grad().map(|g| g.to_vec::<f32>()).transpose()?.unwrap_or_default();
            for (&ours, &g) in found.iter().zip(grad) {
                let exact = f64::from(g) * factor;
                ensure!((f64::from(ours) - exact).abs() <= 2e-6 * exact.abs(), "{ours} is not {exact}");
            }
        }
    }
    Ok(())
}

/// Compared with PyTorch's `clip_grad_norm_` of the same values in f64.
fn clipping_takes_norms_of_other_orders(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(7);
    for dtype in [DType::F32, DType::BF16] {
        for (norm_type, max_norm) in [(1.0, 3.0), (f64::INFINITY, 0.1), (3.0, 0.5), (0.5, 100.0), (2.0, 0.5)]
        {
            let mut parameters = Vec::new();
            let mut exact = Vec::new();
            for size in [3, 20_000, 1] {
                let p = Tensor::zeros([size], dtype, device)?.to_leaf()?;
                let grad = Tensor::from_slice(&values(&mut rng, size), [size], device)?.to_dtype(dtype)?;
                exact.push(grad.to_f64s()?);
                p.set_grad(Some(grad));
                parameters.push(p);
            }
            let all = || exact.iter().flatten().map(|g| g.abs());
            let norm = match norm_type == f64::INFINITY {
                true => all().fold(0.0, f64::max),
                false => all().map(|g| g.powf(norm_type)).sum::<f64>().powf(1.0 / norm_type),
            };
            let options = ClipGradNormOptions { norm_type, error_if_nonfinite: true };
            let found = clip_grad_norm_with(&parameters, max_norm, &options)?.item()?;
            ensure!(
                (found - norm).abs() <= 1e-5 * norm,
                "order {norm_type}: the norm is {norm}, not {found}"
            );
            let factor = (max_norm / (norm + 1e-6)).min(1.0);
            let rounding = if dtype == DType::F32 { 2e-5 } else { 5e-3 };
            for (p, grad) in parameters.iter().zip(&exact) {
                let expected: Vec<f64> = grad.iter().map(|g| g * factor).collect();
                let found = p.grad().map(|g| g.to_f64s()).transpose()?.unwrap_or_default();
                ensure_close(&found, &expected, rounding, 1e-9)
                    .with_context(|| format!("order {norm_type}"))?;
            }
        }
    }
    // A norm that is not finite is returned, or is an error that changes nothing.
    for bad in [f32::NAN, f32::INFINITY] {
        let p = Tensor::zeros([2], DType::F32, device)?.to_leaf()?;
        p.set_grad(Some(Tensor::from_slice(&[bad, 8.0], [2], device)?));
        for norm_type in [1.0, 2.0, 2.5, f64::INFINITY] {
            let options = ClipGradNormOptions { norm_type, error_if_nonfinite: true };
            let error = clip_grad_norm_with(std::slice::from_ref(&p), 1.0, &options);
            let error = error.err().context("it must fail")?.to_string();
            ensure!(error.starts_with("clip_grad_norm_: the norm of order"), "{error}");
        }
        ensure!(p.grad().context("no gradient")?.to_f64s()?[1] == 8.0, "the gradient was changed");
        let norm =
            clip_grad_norm_with(std::slice::from_ref(&p), 1.0, &ClipGradNormOptions::default())?.item()?;
        ensure!(!norm.is_finite(), "the norm is {norm}");
    }
    for norm_type in [0.0, -1.0, f64::NAN] {
        let options = ClipGradNormOptions { norm_type, ..ClipGradNormOptions::default() };
        ensure!(clip_grad_norm_with(&[], 1.0, &options).is_err(), "a norm of order {norm_type} was accepted");
    }
    Ok(())
}

fn clipping_bounds_every_value(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let p = Tensor::zeros([5], dtype, device)?.to_leaf()?;
        p.set_grad(Some(Tensor::from_slice(&[-2f32, -0.25, 0.0, 0.5, 3.0], [5], device)?.to_dtype(dtype)?));
        clip_grad_value_(std::slice::from_ref(&p), 0.5)?;
        let found = p.grad().map(|g| g.to_f64s()).transpose()?;
        ensure!(found.as_deref() == Some(&[-0.5, -0.25, 0.0, 0.5, 0.5][..]), "{dtype}: {found:?}");
    }
    Ok(())
}

fn layers_switch_between_modes(device: &Device) -> Result<()> {
    let net = Sequential::new().add(BatchNorm1d::new(3, device)?).add(Dropout::new(0.5));
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 3.0, 6.0, 9.0], [2, 3], device)?;
    let _no_grad = autograd::no_grad();
    net.forward(&x)?;
    let state = net.state_dict();
    ensure!(state["0.num_batches_tracked"].to_vec::<i32>()? == [1], "a batch was not counted");
    let mean = state["0.running_mean"].to_vec::<f32>()?;
    ensure!(mean.iter().zip([0.2f32, 0.4, 0.6]).all(|(a, b)| (a - b).abs() < 1e-6), "running mean {mean:?}");
    net.eval();
    let (a, b) = (net.forward(&x)?.to_vec::<f32>()?, net.forward(&x)?.to_vec::<f32>()?);
    ensure!(a == b && a.iter().all(|&v| v != 0.0), "evaluation drops, or learns: {a:?} and {b:?}");
    ensure!(state["0.num_batches_tracked"].to_vec::<i32>()? == [1], "evaluation was counted");
    Ok(())
}

/// Matrices and vectors alternate, more than one launch can bind. Without gradients, only decayed ones shrink.
fn weights_decay_where_they_should(device: &Device) -> Result<()> {
    let shape = |k: usize| if k.is_multiple_of(2) { vec![3, 2] } else { vec![6] };
    let make = |k| Ok(Tensor::ones(shape(k), DType::F32, device)?.to_leaf()?);
    let all: Vec<Tensor> = (0..40).map(make).collect::<Result<_>>()?;
    let mut optimizer = AdamW::new(all.clone(), 0.5).weight_decay(0.5).weight_decay_filter(|p| p.rank() > 1);
    for _ in 0..2 {
        for p in &all {
            p.set_grad(Some(Tensor::zeros(p.shape(), DType::F32, device)?));
        }
        optimizer.step()?;
    }
    for (k, p) in all.iter().enumerate() {
        let expected = if p.rank() > 1 { 0.5625 } else { 1.0 };
        ensure!(p.to_vec::<f32>()?.iter().all(|&v| v == expected), "parameter {k}: {:?}", p.to_vec::<f32>()?);
    }
    ensure!(optimizer.state_dict()?.len() == 3 * all.len(), "a state is missing");
    Ok(())
}

fn causal_attention_ignores_later_positions(device: &Device) -> Result<()> {
    let attention = SelfAttention::new(8, 2, device)?.causal();
    let _no_grad = autograd::no_grad();
    let x = Tensor::randn([1, 5, 8], DType::F32, device)?;
    let y = x.copy()?;
    y.narrow(1, 3, 2)?.copy_(&Tensor::zeros([1], DType::F32, device)?)?;
    let first = |t: &Tensor| -> Result<Vec<f32>> { Ok(attention.forward(t)?.narrow(1, 0, 3)?.to_vec()?) };
    ensure!(first(&x)? == first(&y)?, "later positions reach earlier ones");
    Ok(())
}

fn memory_after_many_steps_equals_that_after_a_few(device: &Device) -> Result<()> {
    let table = Embedding::new(10, 16, device)?;
    let (hidden, norm) = (Linear::new(16, 32, device)?, BatchNorm1d::new(32, device)?);
    let head = Linear::new(32, 10, device)?;
    let net = (table, hidden, norm, head);
    let mut optimizer = AdamW::new(net.parameters(), 1e-3);
    let x = Tensor::randint(0, 10, [8], DType::I32, device)?;
    let mut after = Vec::new();
    for _ in 0..40 {
        let h = net.2.forward(&net.1.forward(&net.0.forward(&x)?)?)?.relu()?;
        let loss = net.3.forward(&h)?.cross_entropy(&x)?;
        loss.backward()?;
        drop((h, loss));
        clip_grad_norm_(optimizer.parameters(), 1.0)?;
        optimizer.step()?;
        optimizer.zero_grad();
        after.push(device.memory().allocated());
    }
    ensure!(after.iter().all(|&bytes| bytes == after[2]), "{after:?}");
    Ok(())
}

/// Returns integers from -2 to 2.
fn random_ints(rng: &mut SplitMix64, shape: &[usize], device: &Device) -> Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.below(5) as f32 - 2.0).collect();
    Ok(Tensor::from_slice(&values, shape, device)?.to_leaf()?)
}

/// Products and sums of this step are multiples of 1/32 below 2^24/32, so they are exact in f32 in any order.
/// Micro-batches of the loader or the trainer must change no bit.
fn micro_batches_of_exact_sums_give_the_same_bits(device: &Device) -> Result<()> {
    const ROWS: usize = 16;
    let train = |batch: usize, accumulate: u32, at_once: usize| -> Result<Vec<Tensor>> {
        let mut rng = SplitMix64(23);
        let mut layer = |outputs, inputs| -> Result<Linear> {
            let weight = random_ints(&mut rng, &[outputs, inputs], device)?;
            Ok(Linear::from_parameters(weight, Some(random_ints(&mut rng, &[outputs], device)?))?)
        };
        let net = (layer(8, 4)?, layer(4, 8)?);
        let mut run = Trainer::new(&net, Sgd::new(net.parameters(), 1.0))
            .accumulate(accumulate)
            .micro_batch(at_once)
            .steps(1)
            .quiet();
        run.fit(&PointDataset::new(ROWS).batches(batch), |x, _| -> CoreResult<Tensor> {
            let x = x.mul(26.0)?.round()?;
            let y = net.1.forward(&net.0.forward(&x)?.relu()?)?;
            y.mul(&y)?.mean_all()
        })?;
        Ok(net.parameters())
    };
    let expected = train(ROWS, 1, ROWS)?;
    let before = random_ints(&mut SplitMix64(23), &[8, 4], device)?;
    ensure!(before.to_bytes()? != expected[0].to_bytes()?, "the step changes nothing");
    for parts in [2, 4, 8, 16] {
        let rows = ROWS / parts;
        for (how, got) in [("accumulated", train(rows, parts as u32, rows)?), ("cut", train(ROWS, 1, rows)?)]
        {
            for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
                ensure_same_bits(&got.detach(), &expected.detach())
                    .with_context(|| format!("{parts} parts, {how}: parameter {k}"))?;
            }
        }
    }
    Ok(())
}

/// A sum of n rounded products is, in any order, within γ = nu/(1 - nu) times the sum of magnitudes of the exact one.
/// Here u = 2^-24; see Higham, "Accuracy and Stability of Numerical Algorithms", 3.1. The gradients of the whole batch
/// and of its parts are such sums, and therefore within 2γ of each other.
fn micro_batches_stay_within_the_error_of_a_sum(device: &Device) -> Result<()> {
    const ROWS: usize = 48;
    const INPUTS: usize = 33;
    const OUTPUTS: usize = 7;
    let mut rng = SplitMix64(29);
    let (x, c) = (values(&mut rng, ROWS * INPUTS), values(&mut rng, ROWS * OUTPUTS));
    let inputs = Tensor::from_slice(&x, [ROWS, INPUTS], device)?;
    let weights = Tensor::from_slice(&c, [ROWS, OUTPUTS], device)?;
    let (nu, double) = (ROWS as f64 * f64::from(f32::EPSILON) / 2.0, ROWS as f64 * f64::EPSILON / 2.0);
    // Adds the error of the f64 reference sums to that of the f32 sums.
    let gamma = nu / (1.0 - nu) + double / (1.0 - double);
    for parts in [1, 2, 3, 6, ROWS] {
        let layer = Linear::new(INPUTS, OUTPUTS, device)?;
        let rows = ROWS / parts;
        for part in 0..parts {
            let part = |t: &Tensor| t.narrow(0, part * rows, rows);
            layer.forward(&part(&inputs)?)?.mul(&part(&weights)?)?.sum_all()?.backward()?;
        }
        let gradients: Vec<Vec<f32>> = layer
            .parameters()
            .iter()
            .map(|p| Ok(p.grad().context("no gradient")?.to_vec()?))
            .collect::<Result<_>>()?;
        for output in 0..OUTPUTS {
            // The last column is the bias.
            for input in 0..=INPUTS {
                let at = |row: usize| if input < INPUTS { x[row * INPUTS + input] } else { 1.0 };
                let products = || (0..ROWS).map(|r| f64::from(c[r * OUTPUTS + output]) * f64::from(at(r)));
                let (exact, sizes) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                let got = match input {
                    INPUTS => gradients[1][output],
                    _ => gradients[0][output * INPUTS + input],
                };
                let off = (f64::from(got) - exact).abs();
                ensure!(off <= gamma * sizes, "{parts} parts, ({output}, {input}): {got}, exactly {exact}");
            }
        }
    }
    Ok(())
}

fn accuracy_is_the_fraction_of_correct_predictions(device: &Device) -> Result<()> {
    let logits = [0.1f32, 2.0, -1.0, 3.0, 0.0, 1.0, 0.5, 0.25, 9.0];
    let logits = Tensor::from_slice(&logits, [3, 3], device)?;
    let classes = Tensor::from_slice(&[1i64, 0, 1], [3], device)?;
    let share = train::accuracy(&logits, &classes)?.item()?;
    ensure!((share - 2.0 / 3.0).abs() < 1e-6, "got {share}");
    Ok(())
}

fn a_tensor_dataset_has_the_rows_of_its_tensors(device: &Device) -> Result<()> {
    let values: Vec<f32> = (0..30).map(|v| v as f32).collect();
    let x = Tensor::from_slice(&values, [5, 3, 2], device)?;
    let y = Tensor::from_slice(&[10i64, 11, 12, 13, 14], [5], device)?;
    // A view, whose rows are not contiguous in memory.
    let turned = x.transpose(1, 2)?;
    let batches: Vec<_> = TensorDataset::<f32, i64>::new(&turned, &y)?
        .batches(3)
        .prefetch(device)
        .collect::<CoreResult<_>>()?;
    ensure!(batches.len() == 2, "{} batches", batches.len());
    let inputs: Vec<&Tensor> = batches.iter().map(|b| &b.0).collect();
    let targets: Vec<&Tensor> = batches.iter().map(|b| &b.1).collect();
    ensure!(inputs[1].shape() == [2, 2, 3] && targets[1].shape() == [2], "{inputs:?}");
    ensure!(Tensor::cat(&inputs, 0)?.to_vec::<f32>()? == turned.to_vec::<f32>()?, "inputs");
    ensure!(Tensor::cat(&targets, 0)?.to_vec::<i64>()? == y.to_vec::<i64>()?, "targets");

    let error = |result: CoreResult<TensorDataset<f32, i64>>| {
        result.err().map(|e| e.message()).context("the tensors were accepted")
    };
    let message = error(TensorDataset::new(&x, &y.narrow(0, 0, 4)?))?;
    ensure!(message.contains("[5, 3, 2]") && message.contains("[4]"), "{message}");
    error(TensorDataset::new(&x.sum_all()?, &y))?;
    error(TensorDataset::new(&x, &x))?;
    Ok(())
}
