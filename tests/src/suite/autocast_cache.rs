//! Cache of autocast's casts: a weight that was written in any way is cast again.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::amp::{autocast, no_autocast};
use forebay::autograd::{enable_grad, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::{Linear, Module, init};
use forebay::ops::einsum;
use forebay::optim::{Adam, AveragedModel, Optimizer, Sgd};
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_same_bits};
use super::tests;

tests![
    loaded_weights_are_cast_again_in_one_scope,
    weights_written_in_any_way_are_cast_again,
    a_cast_that_is_changed_in_place_is_not_cached,
    an_optimiser_copy_that_is_changed_in_place_is_not_used,
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
    ensure!(layer.forward(&x)?.to_f64s()?.iter().all(|&v| v == 0.0), "old weights");
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
    ("a turned view", |h, to| Ok(h.transposed.copy_(to)?)),
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
    let (view, turned) = (detached.narrow(0, 1, 2)?, detached.transpose(0, 1)?);
    let held = WeightHandles { layer, detached, view, transposed: turned };
    let _scope = autocast(DType::BF16)?;
    // Each way once, then in random order.
    for round in 0..2 * WRITES.len() {
        let (name, write) = WRITES[if round < WRITES.len() { round } else { rng.below(WRITES.len()) }];
        {
            let _no_grad = no_grad();
            let _off = no_autocast();
            write(&held, &Tensor::randn([SIDE, SIDE], DType::F32, device)?).context(name)?;
        }
        let fresh = {
            let _no_grad = no_grad();
            let _off = no_autocast();
            let weight = held.detached.copy()?.to_dtype(DType::BF16)?;
            x.to_dtype(DType::BF16)?.linear(&weight, None)?
        };
        for grad in [true, false] {
            let _no_grad = (!grad).then(no_grad);
            ensure_same_bits(&held.layer.forward(&x)?.detach(), &fresh)
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
    // This einsum of one operand returns the operand itself, which is a cached cast.
    let seen = einsum("ij->ij", &[&w])?;
    seen.zero_()?;
    ensure!(x.matmul(&w)?.to_f64s()?.iter().all(|&v| v == SIDE as f64), "the cast is the program's");
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
    ensure!(x.matmul(&w)?.to_f64s()?.iter().all(|&v| v == SIDE as f64), "the copy is the program's");
    Ok(())
}
