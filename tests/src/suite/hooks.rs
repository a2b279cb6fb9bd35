//! Hooks on gradients, anomaly detection, and version checks of saved tensors.

use std::slice::from_ref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions, checkpoint};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::ops::{
    AttentionOptions, CrossEntropyOptions, EmbeddingBagOptions, RecurrentKind, RecurrentOp, ScatterReduce,
};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_values};
use super::tests;

tests![
    hooks_see_and_replace_accumulated_gradients,
    hooks_are_removed,
    hooks_on_results_change_earlier_gradients,
    hooks_are_recorded_with_create_graph,
    an_optimiser_in_the_backward_pass_frees_gradients,
    hooks_run_inside_checkpoints,
    recorded_hooks_run_inside_and_before_a_checkpoint,
    a_hook_that_returns_another_shape_is_an_error,
    a_saved_tensor_that_was_changed_is_an_error,
    other_tensors_that_an_operation_reads_are_saved_too,
    tensors_that_are_not_saved_may_change,
    the_first_nan_is_named,
    anomaly_mode_checks_the_forward_pass,
];

fn leaf(values: &[f32], device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, [values.len()], device)?.to_leaf()?)
}

fn hooks_see_and_replace_accumulated_gradients(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = seen.clone();
    let handle = x.register_hook(move |grad| {
        note.lock().unwrap_or_else(|e| e.into_inner()).push(grad.to_f64s()?);
        grad.mul(10.0).map(Some)
    })?;
    // Three paths: 3 + 2x.
    x.mul(3.0)?.add(&x.mul(&x)?)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[50.0, 70.0])?;
    // The hook sees the second pass on its own; the results accumulate.
    x.mul(1.0)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[60.0, 80.0])?;
    // `grad` returns the hook's result.
    let found = autograd::grad(&[x.sum_all()?], std::slice::from_ref(&x), &GradOptions::default())?;
    ensure_values(&found[0], &[10.0, 10.0])?;
    let seen = seen.lock().unwrap_or_else(|e| e.into_inner()).clone();
    ensure!(seen == [[5.0, 7.0], [1.0, 1.0], [1.0, 1.0]], "{seen:?}");
    handle.remove();
    Ok(())
}

fn hooks_are_removed(device: &Device) -> Result<()> {
    let x = leaf(&[1.0], device)?;
    let handles = [2.0, 3.0].map(|by| x.register_hook(move |grad| grad.mul(by).map(Some)));
    let [two, three] = handles;
    let step = || -> Result<f64> {
        x.set_grad(None);
        x.sum_all()?.backward()?;
        Ok(x.grad().context("no gradient")?.item()?)
    };
    let (two, three) = (two?, three?);
    ensure!(step()? == 6.0);
    two.remove();
    two.remove();
    ensure!(step()? == 3.0);
    three.remove();
    ensure!(step()? == 1.0);
    Ok(())
}

fn hooks_on_results_change_earlier_gradients(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    let y = x.mul(2.0)?;
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    y.register_hook(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    })?;
    y.register_hook(|grad| grad.clamp(-1.0, 1.0).map(Some))?;
    y.mul(5.0)?.sub(&y.mul(2.0)?)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[2.0, 2.0])?;
    ensure!(calls.load(Ordering::Relaxed) == 1, "the hook gets the sum, once");
    let plain = Tensor::ones([2], DType::F32, device)?;
    ensure!(plain.register_hook(|_| Ok(None)).is_err(), "there is no gradient to see");
    Ok(())
}

fn hooks_are_recorded_with_create_graph(device: &Device) -> Result<()> {
    let x = leaf(&[3.0], device)?;
    let handle = x.register_hook(|grad| grad.mul(grad).map(Some))?;
    // (2x)², whose gradient is 8x; the hook's square is differentiated as well.
    let first =
        autograd::grad(&[x.mul(&x)?.sum_all()?], std::slice::from_ref(&x), &GradOptions::create_graph())?;
    ensure_values(&first[0], &[36.0])?;
    handle.remove();
    ensure_values(&autograd::grad(&[first[0].sum_all()?], &[x], &GradOptions::default())?[0], &[24.0])
}

fn an_optimiser_in_the_backward_pass_frees_gradients(device: &Device) -> Result<()> {
    const N: usize = 1 << 14;
    let peak = |stepping: bool| -> Result<(u64, Vec<f64>)> {
        let weights = (0..6)
            .map(|_| Tensor::ones([N], DType::F32, device)?.to_leaf())
            .collect::<Result<Vec<_>, _>>()?;
        let update = |w: &Tensor| {
            if let Some(grad) = w.grad() {
                let _no_grad = autograd::no_grad();
                w.sub_(&grad.mul(0.5)?)?;
            }
            w.set_grad(None);
            Ok(())
        };
        let mut handles = Vec::new();
        if stepping {
            for w in &weights {
                handles.push(w.register_post_accumulate_grad_hook(update)?);
            }
        }
        let mut y = Tensor::ones([N], DType::F32, device)?;
        for w in &weights {
            y = y.add(w)?;
        }
        let loss = y.sum_all()?;
        drop(y);
        device.pool().reset_peak_stats();
        let before = device.memory().allocated();
        loss.backward()?;
        let peak = device.memory().peak_allocated() - before;
        if !stepping {
            weights.iter().try_for_each(update)?;
        }
        ensure!(weights.iter().all(|w| w.grad().is_none()));
        handles.iter().for_each(autograd::HookHandle::remove);
        let mut values = Vec::new();
        for w in &weights {
            values.push(w.narrow(0, 0, 1)?.to_f64s()?[0]);
        }
        Ok((peak, values))
    };
    let (plain, expected) = peak(false)?;
    let (stepping, values) = peak(true)?;
    ensure!(values == expected && values == [0.5; 6], "{values:?}, expected {expected:?}");
    let one = 4 * N as u64;
    ensure!(plain >= stepping + 3 * one, "peaks of {plain} and {stepping} bytes, a gradient is {one}");
    Ok(())
}

fn hooks_run_inside_checkpoints(device: &Device) -> Result<()> {
    let (w, x) = (leaf(&[3.0, 4.0], device)?, leaf(&[5.0, 6.0], device)?);
    let (outer, inner) = (Arc::new(AtomicUsize::new(0)), w.clone());
    let count = outer.clone();
    w.register_post_accumulate_grad_hook(move |w| {
        count.fetch_add(1, Ordering::Relaxed);
        let grad = w.grad().map(|g| g.mul(2.0)).transpose()?;
        w.set_grad(grad);
        Ok(())
    })?;
    checkpoint(&[&x], move |t| t[0].mul(&inner)?.mul(&inner))?.sum_all()?.backward()?;
    ensure!(outer.load(Ordering::Relaxed) == 1);
    ensure_values(&w.grad().context("no gradient")?, &[60.0, 96.0])
}

fn recorded_hooks_run_inside_and_before_a_checkpoint(device: &Device) -> Result<()> {
    let w = leaf(&[3.0, 4.0], device)?;
    let (handle, inner) = (w.register_hook(|_| Ok(None))?, w.clone());
    // exp(w) w², whose factor w² is recomputed.
    let y = checkpoint(&[&w.exp()?], move |t| t[0].mul(&inner)?.mul(&inner))?.sum_all()?;
    let first = autograd::grad(&[y], from_ref(&w), &GradOptions::create_graph())?;
    let at = |f: fn(f64) -> f64| [3.0, 4.0].map(f);
    ensure_close(&first[0].to_f64s()?, &at(|w| w.exp() * (w * w + 2.0 * w)), 1e-5, 0.0)?;
    autograd::backward(&[first[0].sum_all()?], &GradOptions::create_graph())?;
    let second = w.grad().context("no second gradient")?;
    ensure_close(&second.to_f64s()?, &at(|w| w.exp() * (w * w + 4.0 * w + 2.0)), 1e-5, 0.0)?;
    w.set_grad(None);
    handle.remove();
    Ok(())
}

fn a_hook_that_returns_another_shape_is_an_error(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    x.register_hook(|grad| grad.sum_all().map(Some))?;
    let error = x.exp()?.sum_all()?.backward().err().context("it was taken")?.message();
    ensure!(
        error == "backward: a hook on a leaf returned f32 [] in place of a gradient of f32 [2]",
        "{error}"
    );
    Ok(())
}

fn a_saved_tensor_that_was_changed_is_an_error(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0, 3.0], device)?;
    let refused = |y: &Tensor| -> Result<String> {
        Ok(y.sum_all()?.backward().err().context("a changed tensor was used")?.message())
    };
    let y = x.exp()?;
    y.detach().mul_(2.0)?;
    let error = refused(&y)?;
    for part in ["`exp`", "its result, f32 [3]", "changed in place", "hooks.rs", "it is at version"] {
        ensure!(error.contains(part), "{error}");
    }
    // Through another view of the same memory.
    let w = leaf(&[1.0, 2.0, 3.0], device)?;
    let y = x.mul(&w)?;
    w.detach().narrow(0, 1, 2)?.add_(7.0)?;
    let error = refused(&y)?;
    ensure!(error.contains("`mul`") && error.contains("a tensor that it saved, f32 [3]"), "{error}");
    // Operations with their own kernels.
    let m = Tensor::ones([2, 3], DType::F32, device)?;
    let weight = Tensor::ones([4, 3], DType::F32, device)?.to_leaf()?;
    let changes: [(&str, Tensor); 4] = [
        ("`linear`", m.linear(&weight, None)?),
        ("`matmul`", m.matmul(&weight.t()?)?),
        ("`softmax`", weight.softmax(-1)?),
        ("`layer_norm`", weight.layer_norm([3], &Default::default())?),
    ];
    m.add_(1.0)?;
    changes[2].1.detach().add_(1.0)?;
    {
        let _no_grad = autograd::no_grad();
        weight.add_(1.0)?;
    }
    for (name, y) in &changes {
        let error = refused(y)?;
        ensure!(error.contains(name), "{name}: {error}");
    }
    Ok(())
}

/// Version checks cover all tensors that a gradient reads: indices, masks, class weights, result indices.
fn other_tensors_that_an_operation_reads_are_saved_too(device: &Device) -> Result<()> {
    type Run = fn(&Tensor, &Tensor) -> CoreResult<(Tensor, Tensor)>;
    // For a tensor [4, 3] and an index [2, 3] or its first row: returns the result, and the tensor to change.
    let runs: &[(&str, Run)] = &[
        ("gather", |x, i| Ok((x.gather(0, i)?, i.clone()))),
        ("index_select", |x, i| Ok((x.index_select(0, &i.select(0, 0)?)?, i.clone()))),
        ("index_select", |x, i| Ok((x.index_select(1, &i.select(0, 0)?)?, i.clone()))),
        ("embedding", |x, i| Ok((x.embedding(i, None)?, i.clone()))),
        ("scatter", |x, i| Ok((x.scatter(0, i, &x.mul(2.0)?)?, i.clone()))),
        ("scatter", |x, i| Ok((x.scatter_value(0, i, 2.0)?, i.clone()))),
        ("scatter_add", |x, i| Ok((x.scatter_add(0, i, x)?, i.clone()))),
        ("index_add", |x, i| Ok((x.index_add(0, &i.select(0, 0)?, &x.narrow(0, 0, 3)?, 2.0)?, i.clone()))),
        ("scatter_reduce", |x, i| Ok((x.scatter_reduce(0, i, x, ScatterReduce::Mean, true)?, i.clone()))),
        ("scatter_reduce", |x, i| Ok((x.scatter_reduce(0, i, x, ScatterReduce::Amax, true)?, i.clone()))),
        ("embedding_bag", |x, i| Ok((x.embedding_bag(i, &EmbeddingBagOptions::default())?, i.clone()))),
        ("max", |x, _| x.max(0, false)),
        ("cummax", |x, _| x.cummax(0)),
        ("sort", |x, _| x.sort(0, true)),
        ("topk", |x, _| x.topk(2, 0, true)),
        ("cross_entropy", |x, i| {
            let weight = Tensor::ones([3], DType::F32, x.device())?;
            let options = CrossEntropyOptions { weight: Some(&weight), ..CrossEntropyOptions::default() };
            let classes = i.reshape([6])?.narrow(0, 0, 4)?;
            Ok((x.cross_entropy_with(&classes, &options)?, weight.clone()))
        }),
        ("rotary_embedding", |x, _| {
            let table = Tensor::ones([4, 1], DType::F32, x.device())?;
            Ok((x.narrow(1, 0, 2)?.rotary_embedding(&table, &table, false)?, table))
        }),
        ("cdist", |x, _| {
            let y = x.cdist(&x.mul(2.0)?, 2.0)?;
            Ok((y.clone(), y.detach()))
        }),
        ("gru", |x, _| {
            let (device, wide) = (x.device(), Tensor::ones([2, 2, 6], DType::F32, x.device())?);
            let lengths = Tensor::from_slice(&[2i32, 1], [2], device)?;
            let (state, weight) =
                (x.narrow(0, 0, 2)?.narrow(1, 0, 2)?, Tensor::ones([6, 2], DType::F32, device)?);
            let bias = Tensor::ones([6], DType::F32, device)?;
            let of = RecurrentOp {
                lengths: Some(&lengths),
                bias_hh: Some(&bias),
                ..RecurrentOp::new(RecurrentKind::Gru, &wide, &state, &weight)
            };
            Ok((of.run()?.output, lengths))
        }),
        ("scaled_dot_product_attention", |x, _| {
            let mask = Tensor::ones([4, 4], DType::F32, x.device())?;
            let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
            Ok((x.scaled_dot_product_attention(x, x, &options)?, mask.clone()))
        }),
        ("scaled_dot_product_attention", |x, _| {
            let y = x.scaled_dot_product_attention(x, x, &AttentionOptions::default())?;
            Ok((y.clone(), y.detach()))
        }),
        ("scaled_dot_product_attention", |x, _| {
            let options = AttentionOptions { dropout_p: 0.5, ..AttentionOptions::default() };
            let y = x.scaled_dot_product_attention(x, x, &options)?;
            Ok((y.clone(), y.detach()))
        }),
        ("scaled_dot_product_attention", |x, _| {
            let options = AttentionOptions { dropout_p: 0.5, ..AttentionOptions::default() };
            Ok((x.scaled_dot_product_attention(x, x, &options)?, x.detach()))
        }),
        ("scaled_dot_product_attention", |x, _| {
            let y = x.unsqueeze(0)?.qkv_attention(1, 1, &AttentionOptions::default())?;
            Ok((y.clone(), y.detach()))
        }),
    ];
    for (name, run) in runs {
        let x: Vec<f32> = (0..12).map(|i| (i * 5 % 12) as f32).collect();
        let x = Tensor::from_slice(&x, [4, 3], device)?.to_leaf()?;
        let index = Tensor::from_slice(&[0i32, 2, 1, 2, 1, 0], [2, 3], device)?;
        let (y, changed) = run(&x, &index).with_context(|| *name)?;
        let twice = match changed.dtype().is_float() {
            true => autograd::grad(&[y.sum_all()?], from_ref(&x), &GradOptions::create_graph())
                .with_context(|| *name)?,
            false => Vec::new(),
        };
        drop(twice);
        {
            let _no_grad = autograd::no_grad();
            // A copy also works on devices without i64 arithmetic.
            changed.copy_(&Tensor::zeros(changed.shape(), changed.dtype(), device)?)?;
        }
        let Err(error) = y.sum_all()?.backward() else { anyhow::bail!("{name}: a changed tensor was used") };
        let error = error.to_string();
        ensure!(error.contains(name) && error.contains("changed in place since"), "{name}: {error}");
    }
    // Second derivatives check versions, too.
    let x = Tensor::ones([4, 3], DType::F32, device)?.to_leaf()?;
    let index = Tensor::from_slice(&[0i32, 2, 1], [3], device)?;
    let y = x.index_select(0, &index)?.square()?.sum_all()?;
    let first = autograd::grad(&[y], from_ref(&x), &GradOptions::create_graph())?;
    index.zero_()?;
    let error = first[0].sum_all()?.backward().err().context("a changed index was used")?.to_string();
    ensure!(error.contains("changed in place since"), "{error}");
    Ok(())
}

fn tensors_that_are_not_saved_may_change(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    // A sum saves nothing, a product only the other factor.
    let (y, other) = (x.add(1.0)?, Tensor::full([2], 3.0, DType::F32, device)?);
    let z = y.mul(&other)?;
    y.detach().add_(9.0)?;
    z.detach().add_(9.0)?;
    z.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[3.0, 3.0])?;
    // Parameters may change in place after the backward pass; the next pass saves the new values.
    for _ in 0..2 {
        x.exp()?.sum_all()?.backward()?;
        let _no_grad = autograd::no_grad();
        x.sub_(0.1)?;
    }
    Ok(())
}

fn the_first_nan_is_named(device: &Device) -> Result<()> {
    let x = leaf(&[0.0, 1.0], device)?;
    // 0 · ∞: the gradient of the square root is infinite where the product's is zero.
    let run = || -> Result<Tensor> { Ok(x.mul(0.0)?.sqrt()?.mul(0.0)?.sum_all()?) };
    run()?.backward()?;
    ensure!(x.grad().context("no gradient")?.to_f64s()?[0].is_nan());
    let guard = autograd::detect_anomaly();
    let loss = run()?;
    let error = loss.backward().err().context("no operation was reported")?.to_string();
    for part in
        ["anomaly: the gradient of input 0 of `sqrt`", "hooks.rs", "the gradient of its result has none"]
    {
        ensure!(error.contains(part), "{error}");
    }
    drop(guard);
    run()?.backward()?;
    autograd::set_detect_anomaly(true);
    let found = run().and_then(|loss| Ok(loss.backward()?));
    autograd::set_detect_anomaly(false);
    ensure!(found.is_err(), "nothing was found");
    Ok(())
}

fn anomaly_mode_checks_the_forward_pass(device: &Device) -> Result<()> {
    let x = leaf(&[0.0, 1.0], device)?;
    let guard = autograd::detect_anomaly().with_forward();
    let y = x.add(1.0)?;
    ensure!(guard.first_nonfinite_op().is_none());
    let y = y.sub(1.0)?.log()?.exp()?.sum_all()?;
    let first = guard.first_nonfinite_op().context("no operation was reported")?;
    ensure!(first.contains("`log`") && first.contains("hooks.rs"), "{first}");
    let error = y.backward().err().context("the backward pass reported no anomaly")?.to_string();
    ensure!(error.contains("in the forward pass, `log`"), "{error}");
    drop(guard);
    x.log()?.exp()?.sum_all()?.backward()?;
    Ok(())
}
