//! Activation checkpointing: the recomputation repeats the forward pass exactly, and leaves the model unchanged.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{self, GradOptions, checkpoint, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::nn::{BatchNorm1d, Dropout, Embedding, InstanceNorm1d, Linear, Module, SpectralNorm};
use forebay::optim::{AdamW, Optimizer, Sgd};
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_same_bits, ensure_values};
use super::tests;

tests![
    a_captured_tensor_that_changed_is_an_error,
    a_captured_tensor_that_was_replaced_is_an_error,
    captured_values_recreated_by_each_run_are_allowed,
    a_captured_weight_that_changed_under_autocast_is_an_error,
    captured_tensors_may_change_after_the_backward_pass,
    a_checkpoint_updates_statistics_like_a_plain_pass,
    each_forward_pass_saves_its_own_singular_vectors,
    state_of_a_custom_module_is_updated_once,
    recomputation_uses_the_mode_of_the_first_run,
    the_generator_continues_after_a_failed_recomputation,
    draws_of_other_threads_do_not_change_recomputation,
    a_seed_inside_a_checkpoint_is_set_once,
    nested_checkpoints_of_random_depth_match_plain_passes,
];

fn leaf(values: &[f32], device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, [values.len()], device)?.to_leaf()?)
}

type CheckpointMisuse = (&'static str, fn(&Tensor) -> CoreResult<()>);

fn a_captured_tensor_that_changed_is_an_error(device: &Device) -> Result<()> {
    let ways: [CheckpointMisuse; 6] = [
        ("copy_", |w| w.copy_(&w.detach().add(1.0)?)),
        ("fill_", |w| w.fill_(3.0)),
        ("add_", |w| w.add_(1.0)),
        ("a write through detach", |w| w.detach().mul_(2.0)),
        ("a write through a view", |w| w.detach().narrow(0, 0, 1)?.fill_(7.0)),
        ("a step", |w| {
            w.set_grad(Some(w.detach().ones_like()?));
            Sgd::new(vec![w.clone()], 0.1).step()?;
            w.set_grad(None);
            Ok(())
        }),
    ];
    for trains in [true, false] {
        for (name, change) in ways {
            let x = leaf(&[1.0, 2.0], device)?;
            let w = Tensor::from_slice(&[2.0f32, 3.0], [2], device)?;
            let w = if trains { w.to_leaf()? } else { w };
            if !trains && name == "a step" {
                continue;
            }
            let captured = w.clone();
            // The captured tensor is read through a view and by a chain; the function saves an intermediate result.
            let y = checkpoint(&[&x], move |x| x[0].mul(&captured.reshape([2])?)?.exp())?;
            {
                let _no_grad = no_grad();
                change(&w)?;
            }
            let error =
                y.sum_all()?.backward().err().with_context(|| format!("{name}, {trains}: no error"))?;
            ensure!(error.to_string().contains("captures a tensor"), "{name}: {error}");
            ensure!(x.grad().is_none() && w.grad().is_none(), "{name}: a gradient came all the same");
        }
    }
    // Values that the host reads are tracked as well.
    let (x, scale) = (leaf(&[1.0], device)?, Tensor::from_slice(&[2.0f32], [1], device)?);
    let captured = scale.clone();
    let y = checkpoint(&[&x], move |x| x[0].mul(captured.item()?)?.exp())?;
    scale.fill_(5.0)?;
    ensure!(y.sum_all()?.backward().is_err(), "the host read something else");
    // Tensors captured by a nested checkpoint are tracked, too.
    let (x, w) = (leaf(&[1.0], device)?, leaf(&[2.0], device)?);
    let captured = w.clone();
    let y = checkpoint(&[&x], move |x| {
        let captured = captured.clone();
        checkpoint(&[&x[0]], move |x| x[0].mul(&captured)?.exp())?.mul(2.0)
    })?;
    {
        let _no_grad = no_grad();
        w.fill_(5.0)?;
    }
    ensure!(y.sum_all()?.backward().is_err(), "the inner one read something else");
    Ok(())
}

fn a_captured_tensor_that_was_replaced_is_an_error(device: &Device) -> Result<()> {
    type Slot = Arc<Mutex<Option<Tensor>>>;
    let made = |v: f64| Tensor::full([1], v, DType::F32, device);
    let older = made(3.0)?;
    type Replacement<'a> = (&'a str, &'a dyn Fn() -> CoreResult<Option<Tensor>>);
    let ways: [Replacement<'_>; 4] = [
        ("a new tensor", &|| made(3.0).map(Some)),
        ("an older tensor", &|| Ok(Some(older.clone()))),
        ("a leaf", &|| made(3.0)?.to_leaf().map(Some)),
        ("nothing", &|| Ok(None)),
    ];
    for (name, replacement) in ways {
        for held in [false, true] {
            for nested in [false, true] {
                let (x, first) = (leaf(&[1.0], device)?, made(2.0)?);
                let slot: Slot = Arc::new(Mutex::new(Some(first.clone())));
                // The first tensor's memory is freed with its handle, or a second handle still holds it.
                let kept = held.then_some(first);
                let captured = slot.clone();
                let body = move |x: &[Tensor]| {
                    let factor = captured.lock().map_err(|e| Error::argument("test", e.to_string()))?.clone();
                    factor.map_or_else(|| Ok(x[0].clone()), |factor| x[0].mul(&factor))?.exp()
                };
                let body = Arc::new(body);
                let y = match nested {
                    false => checkpoint(&[&x], move |x| body(x)),
                    true => checkpoint(&[&x], move |x| {
                        let body = body.clone();
                        checkpoint(&[&x[0]], move |x| body(x))?.mul(2.0)
                    }),
                }?;
                *slot.lock().map_err(|e| anyhow::anyhow!("{e}"))? = replacement()?;
                let error = y.sum_all()?.backward().err();
                let error = error.with_context(|| format!("{name}, {held}, {nested}: no error"))?;
                ensure!(error.to_string().contains("captures a tensor"), "{name}: {error}");
                ensure!(x.grad().is_none(), "{name}: a gradient came all the same");
                drop(kept);
            }
        }
    }
    Ok(())
}

fn captured_values_recreated_by_each_run_are_allowed(device: &Device) -> Result<()> {
    // The body keeps a tensor of its first run, and an input is freed by the program.
    let cache: Arc<Mutex<Option<Tensor>>> = Arc::default();
    let captured = cache.clone();
    let w = leaf(&[2.0, 3.0], device)?;
    let x = leaf(&[1.0, 2.0], device)?.mul(1.0)?;
    let own = w.clone();
    let y = checkpoint(&[&x], move |x| {
        let mut slot = captured.lock().map_err(|e| Error::argument("test", e.to_string()))?;
        let mask = match &*slot {
            Some(mask) => mask.clone(),
            None => slot.insert(Tensor::full([2], 0.5, DType::F32, x[0].device())?).clone(),
        };
        x[0].mul(&own)?.mul(&mask)
    })?;
    drop(x);
    y.sum_all()?.backward()?;
    ensure_values(&w.grad().context("no gradient")?, &[0.5, 1.0])?;
    // 16-bit copies that an optimiser wrote are read in place of their parameters, and may be freed.
    let layer = Arc::new(Linear::new(4, 4, device)?);
    let mut opt = AdamW::new(layer.parameters(), 0.1);
    let x = Tensor::ones([2, 4], DType::F32, device)?.to_leaf()?;
    let pass = |dtype: DType| -> Result<Tensor> {
        let (_autocast, layer) = (autocast(dtype)?, layer.clone());
        Ok(checkpoint(&[&x], move |x| layer.forward(&x[0]))?)
    };
    for _ in 0..3 {
        pass(DType::BF16)?.sum_all()?.backward()?;
        opt.step()?;
        let y = pass(DType::BF16)?;
        // The cache now has the weight in another type in place of the copy.
        pass(DType::F16)?;
        y.sum_all()?.backward()?;
        opt.step()?;
    }
    Ok(())
}

fn a_captured_weight_that_changed_under_autocast_is_an_error(device: &Device) -> Result<()> {
    let layer = Arc::new(Linear::new(4, 4, device)?);
    let x = Tensor::ones([2, 4], DType::F32, device)?.to_leaf()?;
    let mut opt = AdamW::new(layer.parameters(), 0.1);
    for _ in 0..2 {
        let _autocast = autocast(DType::BF16)?;
        let pass = |x: &Tensor| {
            let layer = layer.clone();
            checkpoint(&[x], move |x| layer.forward(&x[0]))
        };
        // Populates the cast cache, or the optimiser's 16-bit copy, before the checkpoint runs.
        layer.forward(&x)?.sum_all()?.backward()?;
        let y = pass(&x)?;
        opt.step()?;
        ensure!(y.sum_all()?.backward().is_err(), "the changed parameter was not detected");
        pass(&x)?.sum_all()?.backward()?;
        opt.step()?;
    }
    Ok(())
}

fn captured_tensors_may_change_after_the_backward_pass(device: &Device) -> Result<()> {
    let (x, w) = (leaf(&[1.0, 2.0], device)?, leaf(&[2.0, 3.0], device)?);
    let mut opt = Sgd::new(vec![w.clone()], 1.0);
    for expected in [[1.0, 1.0], [0.0, -1.0], [-1.0, -3.0]] {
        let captured = w.clone();
        checkpoint(&[&x], move |x| x[0].mul(&captured))?.sum_all()?.backward()?;
        opt.step()?;
        opt.zero_grad();
        ensure_values(&w, &expected)?;
    }
    // Writes of the checkpointed function itself to captured memory are allowed.
    let room = Tensor::zeros([2], DType::F32, device)?;
    let captured = room.clone();
    let y = checkpoint(&[&x], move |x| {
        let _no_grad = no_grad();
        captured.copy_(&x[0].detach())?;
        let _grad = autograd::enable_grad();
        x[0].mul(&captured.copy()?)
    })?;
    x.set_grad(None);
    y.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[1.0, 2.0])?;
    Ok(())
}

struct Net {
    table: Embedding,
    first: SpectralNorm<Linear>,
    norm: BatchNorm1d,
    space: InstanceNorm1d,
    drop: Dropout,
}

impl Net {
    fn new(device: &Device) -> Result<Self> {
        device.manual_seed(7);
        Ok(Self {
            table: Embedding::new(8, 4, device)?.with_max_norm(0.5, 2.0),
            first: SpectralNorm::new(Linear::new(4, 4, device)?)?,
            norm: BatchNorm1d::new(3, device)?,
            space: InstanceNorm1d::new(3).track_running_stats(device)?,
            drop: Dropout::new(0.5),
        })
    }

    fn parts(&self) -> [(&'static str, &dyn Module); 4] {
        [("table", &self.table), ("first", &self.first), ("norm", &self.norm), ("space", &self.space)]
    }

    /// Forward pass of [batch, 3] row indices.
    fn forward(&self, index: &Tensor) -> CoreResult<Tensor> {
        let x = self.first.forward(&self.table.forward(index)?)?;
        let x = self.space.forward(&self.norm.forward(&x)?)?;
        self.drop.forward(&x)
    }

    fn state(&self) -> BTreeMap<String, Tensor> {
        let of = |(name, part): (&str, &dyn Module)| {
            part.state_dict()
                .into_iter()
                .map(move |(key, t)| (format!("{name}.{key}"), t))
                .collect::<Vec<_>>()
        };
        self.parts().into_iter().flat_map(of).collect()
    }

    fn grads(&self) -> Vec<Option<Tensor>> {
        self.parts().into_iter().flat_map(|(_, part)| part.parameters()).map(|p| p.grad()).collect()
    }
}

fn nested_checkpoints(net: &Arc<Net>, index: &Tensor, depth: usize) -> CoreResult<Tensor> {
    if depth == 0 {
        return net.forward(index);
    }
    let net = net.clone();
    checkpoint(&[index], move |x| nested_checkpoints(&net, &x[0], depth - 1))
}

fn a_checkpoint_updates_statistics_like_a_plain_pass(device: &Device) -> Result<()> {
    let index = Tensor::from_slice(&[0i32, 1, 2, 3, 4, 5], [2, 3], device)?;
    let run = |depth: usize| -> Result<Net> {
        let net = Arc::new(Net::new(device)?);
        for _ in 0..2 {
            let loss = nested_checkpoints(&net, &index, depth)?.square()?.sum_all()?;
            loss.backward_with(GradOptions::retain_graph())?;
            loss.backward()?;
        }
        Arc::into_inner(net).context("the graph still has the network")
    };
    let plain = run(0)?;
    let (state, grads) = (plain.state(), plain.grads());
    ensure!(state["norm.num_batches_tracked"].item()? == 2.0);
    for depth in [1, 2, 3] {
        let net = run(depth)?;
        for (name, t) in net.state() {
            ensure_same_bits(&t, &state[&name]).with_context(|| format!("{name} at depth {depth}"))?;
        }
        for (k, (got, expected)) in net.grads().iter().zip(&grads).enumerate() {
            match (got, expected) {
                (Some(got), Some(expected)) => {
                    ensure_same_bits(got, expected)
                        .with_context(|| format!("gradient {k} at depth {depth}"))?;
                }
                (got, expected) => {
                    ensure!(got.is_none() && expected.is_none(), "gradient {k} at depth {depth}")
                }
            }
        }
    }
    Ok(())
}

fn each_forward_pass_saves_its_own_singular_vectors(device: &Device) -> Result<()> {
    let run = |checkpointed: bool| -> Result<Vec<Vec<f64>>> {
        device.manual_seed(3);
        let layer = Arc::new(SpectralNorm::new(Linear::new(3, 3, device)?)?);
        let x = Tensor::randn([2, 3], DType::F32, device)?;
        let pass = |scale: f64| {
            let (layer, x) = (layer.clone(), x.mul(scale)?);
            match checkpointed {
                true => checkpoint(&[&x], move |x| layer.forward(&x[0])),
                false => layer.forward(&x),
            }
        };
        // As in a GAN's critic: real and generated examples, then one backward pass.
        let loss = pass(1.0)?.square()?.sum_all()?.sub(&pass(2.0)?.square()?.sum_all()?)?;
        loss.backward()?;
        layer.parameters().iter().map(|p| Ok(p.grad().context("no gradient")?.to_f64s()?)).collect()
    };
    let (plain, again) = (run(false)?, run(true)?);
    ensure!(plain == again, "{plain:?}, {again:?}");
    Ok(())
}

fn state_of_a_custom_module_is_updated_once(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    let (seen, sum) = (Tensor::zeros((), DType::F32, device)?, Tensor::zeros([2], DType::F32, device)?);
    let (counts, sums) = (seen.clone(), sum.clone());
    let ran = Arc::new(AtomicUsize::new(0));
    let runs = ran.clone();
    let pass = move |x: &[Tensor]| {
        runs.fetch_add(1, Ordering::Relaxed);
        autograd::update_state(|| counts.add_(1.0))?;
        if !autograd::is_recomputing() {
            let _no_grad = no_grad();
            sums.add_(&x[0].detach())?;
        }
        x[0].exp()
    };
    let pass = Arc::new(pass);
    let checkpointed = |x: &Tensor| {
        let pass = pass.clone();
        checkpoint(&[x], move |x| pass(x))
    };
    checkpointed(&x)?.add(&checkpointed(&x)?)?.sum_all()?.backward()?;
    ensure!(ran.load(Ordering::Relaxed) == 4);
    ensure_values(&seen, &[2.0])?;
    ensure_values(&sum, &[2.0, 4.0])?;
    ensure!(!autograd::is_recomputing());
    Ok(())
}

fn recomputation_uses_the_mode_of_the_first_run(device: &Device) -> Result<()> {
    let x = Tensor::ones([32], DType::F32, device)?.to_leaf()?;
    for depth in [1, 2] {
        let drop = Arc::new(Dropout::new(0.5));
        fn run(drop: &Arc<Dropout>, x: &Tensor, depth: usize) -> CoreResult<Tensor> {
            let drop = drop.clone();
            match depth {
                0 => drop.forward(x),
                _ => checkpoint(&[x], move |x| run(&drop, &x[0], depth - 1)),
            }
        }
        let y = run(&drop, &x, depth)?;
        // A validation between the forward and the backward pass would leave the module in this mode.
        drop.eval();
        y.sum_all()?.backward()?;
        ensure!(y.to_f64s()? == x.grad().context("no gradient")?.to_f64s()?, "the mask differs");
        x.set_grad(None);
    }
    Ok(())
}

fn the_generator_continues_after_a_failed_recomputation(device: &Device) -> Result<()> {
    for panics in [true, false] {
        device.manual_seed(1);
        let x = leaf(&[1.0, 2.0, 3.0, 4.0], device)?;
        let ran = AtomicUsize::new(0);
        let y = checkpoint(&[&x], move |x| {
            let y = x[0].dropout(0.5, true)?;
            match (ran.fetch_add(1, Ordering::Relaxed), panics) {
                (0, _) => Ok(y),
                (_, false) => Err(Error::argument("body", "fails")),
                (_, true) => panic!("the second run"),
            }
        })?;
        let loss = y.sum_all()?;
        let before = device.random_state();
        let failed = catch_unwind(AssertUnwindSafe(|| loss.backward()));
        ensure!(failed.is_err() == panics && !failed.is_ok_and(|done| done.is_ok()));
        ensure!(device.random_state() == before, "{:?}, {before:?}", device.random_state());
        ensure!(!autograd::is_recomputing());
    }
    Ok(())
}

fn draws_of_other_threads_do_not_change_recomputation(device: &Device) -> Result<()> {
    let x = Tensor::ones([64], DType::F32, device)?.to_leaf()?;
    let others = device.clone();
    let y = checkpoint(&[&x], move |x| {
        let first = x[0].dropout(0.5, true)?;
        // Another thread draws random numbers on the device in between.
        std::thread::scope(|scope| {
            let drawn = scope.spawn(|| Tensor::rand([100], DType::F32, &others).map(drop)).join();
            drawn.unwrap_or_else(|_| Err(Error::argument("body", "the thread panicked")))
        })?;
        first.dropout(0.5, true)
    })?;
    y.sum_all()?.backward()?;
    // For an input of ones, the product of masks equals its gradient.
    ensure!(y.to_f64s()? == x.grad().context("no gradient")?.to_f64s()?, "the masks differ");
    Ok(())
}

fn a_seed_inside_a_checkpoint_is_set_once(device: &Device) -> Result<()> {
    let x = Tensor::ones([32], DType::F32, device)?.to_leaf()?;
    let seeded = device.clone();
    let y = checkpoint(&[&x], move |x| {
        seeded.manual_seed(5);
        x[0].dropout(0.5, true)
    })?;
    Tensor::rand([8], DType::F32, device)?;
    let before = device.random_state();
    y.sum_all()?.backward()?;
    ensure!(device.random_state() == before);
    ensure!(y.to_f64s()? == x.grad().context("no gradient")?.to_f64s()?, "the masks differ");
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum ChainOp {
    Drop,
    Norm,
    Weight,
}

/// Applies a sequence of operations, some of them in checkpoints.
fn chain(
    parts: &[(ChainOp, usize)],
    norm: &Arc<BatchNorm1d>,
    w: &Tensor,
    x: &Tensor,
    checkpoints: bool,
) -> CoreResult<Tensor> {
    let Some(((part, rest), others)) = parts.split_first().map(|(&first, others)| (first, others)) else {
        return Ok(x.clone());
    };
    let run = {
        let (norm, w) = (norm.clone(), w.clone());
        let (inner, part) = (others[..rest.min(others.len())].to_vec(), part);
        move |x: &[Tensor]| {
            let x = match part {
                ChainOp::Drop => x[0].dropout(0.25, true)?,
                ChainOp::Norm => norm.forward(&x[0])?,
                ChainOp::Weight => x[0].mul(&w)?.tanh()?,
            };
            chain(&inner, &norm, &w, &x, checkpoints)
        }
    };
    let x = match checkpoints {
        true => checkpoint(&[x], run)?,
        false => run(std::slice::from_ref(x))?,
    };
    chain(&others[rest.min(others.len())..], norm, w, &x, checkpoints)
}

fn nested_checkpoints_of_random_depth_match_plain_passes(device: &Device) -> Result<()> {
    for seed in 0..8 {
        let mut random = SplitMix64(seed + 1);
        let mut number = |below: usize| random.below(below);
        let parts: Vec<(ChainOp, usize)> = (0..2 + number(4))
            .map(|_| ([ChainOp::Drop, ChainOp::Norm, ChainOp::Weight][number(3)], number(4)))
            .collect();
        let run = |checkpoints: bool| -> Result<Vec<Tensor>> {
            device.manual_seed(seed);
            let norm = Arc::new(BatchNorm1d::new(4, device)?);
            let w = leaf(&[0.5, -1.0, 2.0, 0.25], device)?;
            let x = Tensor::randn([3, 4], DType::F32, device)?.to_leaf()?;
            let passes = [1.0, 2.0].map(|scale| {
                let y = chain(&parts, &norm, &w, &x, checkpoints)?;
                y.mul(scale)?.square()?.sum_all()
            });
            let [first, second] = passes;
            let loss = first?.add(&second?)?;
            let found = autograd::grad_allow_unused(&[loss], &[x, w], &GradOptions::default())?;
            Ok(found.into_iter().flatten().chain(norm.state_dict().into_values()).collect())
        };
        let (plain, again) = (run(false)?, run(true)?);
        ensure!(plain.len() == again.len(), "{parts:?}");
        for (a, b) in plain.iter().zip(&again) {
            ensure_same_bits(b, a).with_context(|| format!("{parts:?}"))?;
        }
    }
    Ok(())
}
