//! Cache of autocast's casts: a weight that was written in any way is cast again.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use forebay::amp::{autocast, no_autocast};
use forebay::autograd::{GradOptions, enable_grad, grad, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::{Linear, Module, init};
use forebay::ops::einsum;
use forebay::optim::{Adam, AveragedModel, Optimizer, Sgd};
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_close, ensure_same_bits};
use super::tests;

tests![
    loaded_weights_are_cast_again_in_one_scope,
    weights_written_in_any_way_are_cast_again,
    a_cast_that_is_changed_in_place_is_not_cached,
    views_of_a_shared_cast_are_changed_in_place,
    an_optimiser_copy_that_is_changed_in_place_is_not_used,
    layers_share_the_cast_of_their_input,
    gradients_of_a_shared_cast_are_summed_in_f32,
    an_input_that_changes_is_cast_again,
    a_shared_cast_serves_several_passes,
    shared_casts_between_16_bit_types_have_gradients,
];

const SIDE: usize = 4;

fn loaded_weights_are_cast_again_in_one_scope(device: &Device) -> Result<()> {
    let layer = Linear::new(SIDE, SIDE, device)?;
    let zeros: BTreeMap<String, Tensor> =
        layer.state_dict().into_iter().map(|(name, t)| Ok((name, t.zeros_like()?))).collect::<Result<_>>()?;
    let x = Tensor::ones([SIDE, SIDE], DType::F32, device)?;
    let _scope = autocast(DType::BF16)?;
    let _no_grad = no_grad();
    ensure!(layer.forward(&x)?.to_f64s()?.iter().any(|&v| v != 0.0), "the layer gives zeros at once");
    layer.load_state_dict(&zeros)?;
    ensure!(
        layer.forward(&x)?.to_f64s()?.iter().all(|&v| v == 0.0),
        "the layer uses the cast of its weight before the load"
    );
    Ok(())
}

/// Way to write a weight; the second argument has the new values.
type WeightWriter = fn(&WeightHandles, &Tensor) -> Result<()>;

struct WeightHandles {
    layer: Linear,
    /// Handles to the weight's memory, created earlier.
    detached: Tensor,
    view: Tensor,
    transposed: Tensor,
}

/// Runs a backward pass that gives a weight a gradient.
fn backward_through(weight: &Tensor, grad: &Tensor) -> Result<()> {
    let _grad = enable_grad();
    weight.set_grad(None);
    Ok(weight.mul(grad)?.sum_all()?.backward()?)
}

const WRITES: &[(&str, WeightWriter)] = &[
    ("copy_", |h, to| Ok(h.layer.weight.copy_(to)?)),
    ("copy_ of another type", |h, to| Ok(h.layer.weight.copy_(&to.to_dtype(DType::BF16)?)?)),
    ("zero_", |h, _| Ok(h.layer.weight.zero_()?)),
    ("constant_", |h, _| Ok(init::constant_(&h.layer.weight, 0.75)?)),
    ("normal_", |h, _| Ok(init::normal_(&h.layer.weight, 0.0, 1.0)?)),
    ("uniform_", |h, _| Ok(init::uniform_(&h.layer.weight, -1.0, 1.0)?)),
    ("add_", |h, to| Ok(h.layer.weight.add_(to)?)),
    ("mul_", |h, _| Ok(h.layer.weight.mul_(-0.5)?)),
    ("lerp_", |h, to| Ok(h.layer.weight.lerp_(to, 0.25)?)),
    ("a chain into a detached alias", |h, to| Ok(h.detached.copy_(&to.add(1.0)?.mul(0.5)?)?)),
    ("detached add_", |h, to| Ok(h.detached.add_(to)?)),
    ("a view", |h, _| Ok(h.view.add_(1.0)?)),
    ("a view's copy_", |h, to| Ok(h.view.copy_(&to.narrow(0, 1, 2)?)?)),
    ("a transposed view", |h, to| Ok(h.transposed.copy_(to)?)),
    ("a new view", |h, _| Ok(h.layer.weight.select(1, 2)?.mul_(3.0)?)),
    ("load_state_dict", |h, to| {
        let mut state = h.layer.state_dict();
        state.insert("weight".to_owned(), to.clone());
        Ok(h.layer.load_state_dict(&state)?)
    }),
    ("swap", |h, to| {
        let mut average = AveragedModel::swa(&h.layer)?;
        h.detached.copy_(to)?;
        Ok(average.swap_parameters(&h.layer)?)
    }),
    ("Sgd", |h, to| {
        backward_through(&h.layer.weight, to)?;
        Ok(Sgd::new(vec![h.layer.weight.clone()], 0.5).step()?)
    }),
    ("Adam, which makes copies", |h, to| {
        backward_through(&h.layer.weight, to)?;
        Ok(Adam::new(vec![h.layer.weight.clone()], 0.5).step()?)
    }),
    ("offloaded, and written", |h, _| {
        if h.layer.weight.offload_().is_ok() {
            h.detached.add_(1.0)?;
        }
        Ok(())
    }),
    ("nothing", |_, _| Ok(())),
];

fn weights_written_in_any_way_are_cast_again(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(7);
    let x = Tensor::randn([SIDE, SIDE], DType::F32, device)?;
    let layer = Linear::without_bias(SIDE, SIDE, device)?;
    let detached = layer.weight.detach();
    let (view, transposed) = (detached.narrow(0, 1, 2)?, detached.transpose(0, 1)?);
    let handles = WeightHandles { layer, detached, view, transposed };
    let _scope = autocast(DType::BF16)?;
    // Each way once, then in random order.
    for round in 0..2 * WRITES.len() {
        let (name, write) = WRITES[if round < WRITES.len() { round } else { rng.below(WRITES.len()) }];
        {
            let _no_grad = no_grad();
            let _off = no_autocast();
            write(&handles, &Tensor::randn([SIDE, SIDE], DType::F32, device)?).context(name)?;
        }
        let fresh = {
            let _no_grad = no_grad();
            let _off = no_autocast();
            let weight = handles.detached.copy()?.to_dtype(DType::BF16)?;
            x.to_dtype(DType::BF16)?.linear(&weight, None)?
        };
        for grad in [true, false] {
            let _no_grad = (!grad).then(no_grad);
            ensure_same_bits(&handles.layer.forward(&x)?.detach(), &fresh)
                .with_context(|| format!("round {round}: {name}, recorded: {grad}"))?;
        }
    }
    Ok(())
}

fn a_cast_that_is_changed_in_place_is_not_cached(device: &Device) -> Result<()> {
    let w = Tensor::ones([SIDE, SIDE], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([SIDE, SIDE], DType::F32, device)?;
    let _scope = autocast(DType::BF16)?;
    let _no_grad = no_grad();
    // This einsum of one operand computes nothing, so its result could be the cached cast itself.
    let seen = einsum("ij->ij", &[&w])?;
    seen.zero_()?;
    ensure!(
        x.matmul(&w)?.to_f64s()?.iter().all(|&v| v == SIDE as f64),
        "the change in place reached the cached cast"
    );
    Ok(())
}

fn views_of_a_shared_cast_are_changed_in_place(device: &Device) -> Result<()> {
    let w = random_leaf([SIDE, SIDE], 53, device)?;
    let gradient = |in_place: bool| -> Result<Vec<f64>> {
        let x = random_leaf([SIDE, SIDE], 59, device)?;
        let loss = {
            let _scope = autocast(DType::BF16)?;
            let h = x.mul(1.0)?;
            // The product saves the cast of `h`, which the einsum shares.
            let y = h.matmul(&w)?;
            let mut transposed = einsum("ij->ji", &[&h])?;
            match in_place {
                true => transposed.mul_(3.0)?,
                false => transposed = transposed.mul(3.0)?,
            }
            y.mul(&transposed)?.to_dtype(DType::F32)?.sum_all()?
        };
        // The backward pass of the product needs the gradient of the weight, which reads the cast.
        loss.backward()?;
        let grads = [x.grad(), w.grad()]
            .into_iter()
            .map(|grad| Ok(grad.context("a gradient is missing")?.to_f64s()?));
        let grads = grads.collect::<Result<Vec<_>>>()?.concat();
        w.set_grad(None);
        Ok(grads)
    };
    ensure!(gradient(true)? == gradient(false)?, "the change in place gives other gradients");
    Ok(())
}

fn an_optimiser_copy_that_is_changed_in_place_is_not_used(device: &Device) -> Result<()> {
    let w = Tensor::ones([SIDE, SIDE], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([SIDE, SIDE], DType::F32, device)?;
    let mut optimizer = Adam::new(vec![w.clone()], 0.0);
    for _ in 0..3 {
        let _scope = autocast(DType::BF16)?;
        x.matmul(&w)?.sum_all()?.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
    }
    let _no_grad = no_grad();
    {
        let _scope = autocast(DType::BF16)?;
        einsum("ij->ij", &[&w])?.zero_()?;
    }
    let _scope = autocast(DType::BF16)?;
    ensure!(
        x.matmul(&w)?.to_f64s()?.iter().all(|&v| v == SIDE as f64),
        "the change in place reached the optimiser's copy"
    );
    Ok(())
}

/// Returns a tensor of small multiples of 1/64, which bf16 represents, and that requires a gradient.
fn random_leaf(shape: [usize; 2], seed: u64, device: &Device) -> Result<Tensor> {
    let mut rng = SplitMix64(seed);
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| rng.below(129) as f32 / 64.0 - 1.0).collect();
    Ok(Tensor::from_slice(&values, shape, device)?.to_leaf()?)
}

fn layers_share_the_cast_of_their_input(device: &Device) -> Result<()> {
    let layers: Vec<Linear> = (0..3).map(|_| Ok(Linear::new(SIDE, SIDE, device)?)).collect::<Result<_>>()?;
    let x = random_leaf([SIDE, SIDE], 3, device)?;
    let count_casts = |shares: bool| -> Result<usize> {
        let h = x.mul(2.0)?;
        let profiler = Profiler::start(device)?;
        let _scope = autocast(DType::BF16)?;
        for layer in &layers {
            let own = h.mul(1.0)?;
            layer.forward(if shares { &h } else { &own })?;
        }
        let profile = profiler.finish()?;
        Ok(profile.spans.iter().filter(|span| span.name.contains("out=bf16")).count())
    };
    // A cast of each weight and bias, and one or three of the input.
    let (shared, separate) = (count_casts(true)?, count_casts(false)?);
    ensure!(separate == shared + 2, "{shared} casts with one input, {separate} with three");
    Ok(())
}

fn gradients_of_a_shared_cast_are_summed_in_f32(device: &Device) -> Result<()> {
    let (rows, features, outputs) = (3, 40, 24);
    let weights: Vec<Tensor> =
        (0..3).map(|k| random_leaf([outputs, features], 5 + k, device)).collect::<Result<_>>()?;
    let x = random_leaf([rows, features], 11, device)?;
    let seeds: Vec<Tensor> =
        (0..3).map(|k| Ok(random_leaf([rows, outputs], 17 + k, device)?.detach())).collect::<Result<_>>()?;
    let mut expected = vec![0.0; rows * features];
    for (w, g) in weights.iter().zip(&seeds) {
        let (w, g) = (w.to_f64s()?, g.to_f64s()?);
        for (at, sum) in expected.iter_mut().enumerate() {
            let (row, feature) = (at / features, at % features);
            *sum += (0..outputs).map(|o| g[row * outputs + o] * w[o * features + feature]).sum::<f64>();
        }
    }
    // The gradient of `matmul` has 16 bits. Mixed sums are in f32, in any order.
    for with_matmul in [None, Some(0), Some(2)] {
        let h = x.mul(1.0)?;
        let parts: Vec<Tensor> = {
            let _scope = autocast(DType::BF16)?;
            let run = |(k, w): (usize, &Tensor)| match with_matmul == Some(k) {
                true => h.matmul(&w.t()?),
                false => h.linear(w, None),
            };
            weights.iter().enumerate().map(run).collect::<Result<_, _>>()?
        };
        let losses: Vec<Tensor> = parts
            .iter()
            .zip(&seeds)
            .map(|(y, g)| y.to_dtype(DType::F32)?.mul(g)?.sum_all())
            .collect::<Result<_, _>>()?;
        let loss = losses[0].add(&losses[1])?.add(&losses[2])?;
        let [dx] = <[Tensor; 1]>::try_from(grad(&[loss], std::slice::from_ref(&x), &GradOptions::default())?)
            .map_err(|_| anyhow!("there is one input"))?;
        ensure!(dx.dtype() == DType::F32, "the gradient is {}", dx.dtype());
        // Sums of 16 bits are off by 2^-9 of their values.
        let tolerance = if with_matmul.is_some() { 2f64.powi(-7) } else { 1e-6 };
        ensure_close(&dx.to_f64s()?, &expected, tolerance, tolerance)
            .with_context(|| format!("matmul at {with_matmul:?}"))?;
    }
    Ok(())
}

fn an_input_that_changes_is_cast_again(device: &Device) -> Result<()> {
    let w = random_leaf([SIDE, SIDE], 23, device)?;
    let x = random_leaf([SIDE, SIDE], 29, device)?;
    let _scope = autocast(DType::BF16)?;
    let h = x.mul(2.0)?;
    let before = h.linear(&w, None)?;
    h.zero_()?;
    let after = h.linear(&w, None)?;
    ensure!(before.to_f64s()?.iter().any(|&v| v != 0.0), "the first result is zero");
    ensure!(
        after.to_f64s()?.iter().all(|&v| v == 0.0),
        "the product uses the cast of the input before its change"
    );
    // Without history, the cast of the tensor with history is not used.
    let h = x.mul(2.0)?;
    ensure!(h.linear(&w.detach(), None)?.requires_grad(), "the history is lost");
    ensure!(!h.detach().linear(&w.detach(), None)?.requires_grad(), "a constant has a history");
    let constant = no_grad();
    ensure!(!h.linear(&w, None)?.requires_grad(), "a history without recording");
    drop(constant);
    ensure!(h.linear(&w.detach(), None)?.requires_grad(), "the history is lost after no_grad");
    Ok(())
}

/// A cast saves nothing, so a pass that frees the graph leaves it usable, as in PyTorch.
fn a_shared_cast_serves_several_passes(device: &Device) -> Result<()> {
    let (w, x) = (random_leaf([SIDE, SIDE], 31, device)?, random_leaf([SIDE, SIDE], 37, device)?.detach());
    type Loss = fn(&Tensor, &Tensor) -> forebay::error::Result<Tensor>;
    let uses: [(&str, Loss); 2] = [
        ("a weight", |w, x| x.matmul(w)?.sum_all()),
        ("the input of a layer", |w, x| w.linear(x, None)?.sum_all()),
    ];
    for (name, loss) in uses {
        let expected = {
            let _scope = autocast(DType::BF16)?;
            w.set_grad(None);
            loss(&w, &x)?.backward()?;
            w.grad().context("a gradient is missing")?.mul(2.0)?.to_f64s()?
        };
        let passes: [&dyn Fn() -> Result<()>; 2] = [
            &|| {
                loss(&w, &x)?.backward()?;
                Ok(loss(&w, &x)?.backward()?)
            },
            &|| {
                let losses = [loss(&w, &x)?, loss(&w, &x)?];
                losses.iter().try_for_each(|loss| Ok(loss.backward()?))
            },
        ];
        for (k, run) in passes.into_iter().enumerate() {
            w.set_grad(None);
            let _scope = autocast(DType::BF16)?;
            run().with_context(|| format!("{name}, passes {k}"))?;
            let found = w.grad().context("a gradient is missing")?.to_f64s()?;
            ensure_close(&found, &expected, 1e-2, 1e-2).with_context(|| format!("{name}, passes {k}"))?;
        }
    }
    // The tensors that an operation saved are freed as without autocast.
    let _scope = autocast(DType::BF16)?;
    let h = w.exp()?;
    h.linear(&x, None)?.sum_all()?.backward()?;
    let again = h.linear(&x, None)?.sum_all()?.backward().err().map(|e| e.to_string()).unwrap_or_default();
    ensure!(again.contains("`exp` has already run backward"), "expected an error of `exp`, got `{again}`");
    Ok(())
}

fn shared_casts_between_16_bit_types_have_gradients(device: &Device) -> Result<()> {
    let weights = [41, 43].map(|seed| random_leaf([SIDE, SIDE], seed, device));
    let [a, b] = weights;
    let (a, b, bias) = (a?, b?, Tensor::zeros([SIDE], DType::F32, device)?);
    let run = |dtype: DType, low: DType| -> Result<Vec<f64>> {
        let x = random_leaf([3, SIDE], 47, device)?.detach().to_dtype(dtype)?.to_leaf()?;
        let loss = {
            let _scope = autocast(low)?;
            let h = x.mul(1.0)?;
            h.linear(&a, None)?.add(&h.linear(&b, None)?)?.add(&h.mlp(&a, &bias, &b, &bias)?)?.sum_all()?
        };
        loss.backward()?;
        let grad = x.grad().context("a gradient is missing")?;
        ensure!(grad.dtype() == dtype, "the gradient of {dtype} is {}", grad.dtype());
        Ok(grad.to_f64s()?)
    };
    for [from, low] in [[DType::F16, DType::BF16], [DType::BF16, DType::F16]] {
        let (found, expected) = (run(from, low)?, run(DType::F32, low)?);
        ensure_close(&found, &expected, 2e-2, 3e-2).with_context(|| format!("{from} cast to {low}"))?;
    }
    Ok(())
}
