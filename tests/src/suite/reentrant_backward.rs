//! Backward passes that nest, run on several threads, or panic, and the release of graphs afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_ref;
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions, checkpoint, once_differentiable};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_same_bits, ensure_values};
use super::tests;

tests![
    gradients_accumulate_after_a_hook_panicked,
    gradients_accumulate_after_a_failed_backward_pass,
    a_backward_pass_inside_of_grad_fills_the_leaves,
    a_grad_inside_of_grad_is_isolated,
    a_checkpoint_inside_of_grad_gives_all_gradients,
    threads_run_one_graph_concurrently,
    a_graph_that_is_being_freed_is_an_error,
    a_mismatched_gradient_does_not_change_the_old_one,
    a_gradient_that_was_set_is_checked_before_it_is_added_to,
    hooks_that_hold_their_result_are_dropped_with_the_graph,
    hooks_of_a_leaf_may_hold_it_weakly,
    deep_histories_are_dropped_on_a_small_stack,
];

fn leaf(values: &[f32], device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, [values.len()], device)?.to_leaf()?)
}

fn gradients_accumulate_after_a_hook_panicked(device: &Device) -> Result<()> {
    for on_leaf in [true, false] {
        let x = leaf(&[1.0, 2.0], device)?;
        let y = x.mul(2.0)?;
        let hooked = if on_leaf { &x } else { &y };
        let handle = hooked.register_hook(|_| panic!("a hook"))?;
        let loss = y.sum_all()?;
        let failed = catch_unwind(AssertUnwindSafe(|| {
            autograd::grad(from_ref(&loss), from_ref(&x), &GradOptions::default())
        }));
        ensure!(failed.is_err(), "the hook did not run");
        handle.remove();
        x.mul(3.0)?.sum_all()?.backward()?;
        ensure_values(&x.grad().context("no gradient")?, &[3.0, 3.0])?;
        let found = autograd::grad(&[x.mul(5.0)?.sum_all()?], from_ref(&x), &GradOptions::default())?;
        ensure_values(&found[0], &[5.0, 5.0])?;
        // A panic in a custom gradient, and in a checkpointed function.
        let z = once_differentiable("panics", x.detach().mul(1.0)?, &[&x], |_, _| panic!("a gradient"));
        let loss = checkpoint(&[&z], |z| z[0].exp())?.sum_all()?;
        let failed = catch_unwind(AssertUnwindSafe(|| {
            autograd::grad(from_ref(&loss), from_ref(&x), &GradOptions::default())
        }));
        ensure!(failed.is_err(), "the gradient did not run");
        x.set_grad(None);
        x.mul(3.0)?.sum_all()?.backward()?;
        ensure_values(&x.grad().context("no gradient")?, &[3.0, 3.0])?;
        ensure!(autograd::is_grad_enabled());
    }
    Ok(())
}

fn gradients_accumulate_after_a_failed_backward_pass(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    let fails = once_differentiable("fails", x.detach().mul(1.0)?, &[&x], |g, _| {
        Ok([Some(g.reshape([7])?)].into_iter().collect())
    });
    ensure!(autograd::grad(&[fails.sum_all()?], from_ref(&x), &GradOptions::default()).is_err());
    x.mul(3.0)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[3.0, 3.0])
}

fn a_backward_pass_inside_of_grad_fills_the_leaves(device: &Device) -> Result<()> {
    let (x, w) = (leaf(&[1.0, 2.0], device)?, leaf(&[3.0, 4.0], device)?);
    // A nested backward pass in a hook, in a custom gradient, and in a checkpointed function.
    let inner = |w: Tensor, scale: f64| {
        move || -> CoreResult<()> {
            let _grad = autograd::enable_grad();
            w.mul(scale)?.sum_all()?.backward()
        }
    };
    let y = x.mul(2.0)?;
    let in_hook = inner(w.clone(), 1.0);
    y.register_hook(move |_| in_hook().map(|()| None))?;
    let in_gradient = inner(w.clone(), 10.0);
    let z = once_differentiable("own", y.detach().mul(1.0)?, &[&y], move |g, _| {
        in_gradient()?;
        Ok([Some(g.clone())].into_iter().collect())
    });
    let in_body = inner(w.clone(), 100.0);
    let z = checkpoint(&[&z], move |z| {
        if autograd::is_recomputing() {
            in_body()?;
        }
        z[0].mul(1.0)
    })?;
    let loss = z.add(&w)?.sum_all()?;
    let found = autograd::grad(from_ref(&loss), &[x.clone(), w.clone()], &GradOptions::default())?;
    ensure_values(&found[0], &[2.0, 2.0])?;
    ensure_values(&found[1], &[1.0, 1.0])?;
    ensure_values(&w.grad().context("no gradient")?, &[111.0, 111.0])?;
    ensure!(x.grad().is_none());
    Ok(())
}

fn a_grad_inside_of_grad_is_isolated(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (note, own) = (seen.clone(), x.clone());
    let handle = x.register_hook(move |_| {
        let _grad = autograd::enable_grad();
        let other = own.detach().to_leaf()?;
        let found = autograd::grad(&[other.square()?.sum_all()?], from_ref(&other), &GradOptions::default())?;
        note.lock().unwrap_or_else(|e| e.into_inner()).push(found[0].to_f64s()?);
        Ok(None)
    })?;
    let found = autograd::grad(&[x.mul(3.0)?.sum_all()?], from_ref(&x), &GradOptions::default())?;
    ensure_values(&found[0], &[3.0, 3.0])?;
    x.mul(3.0)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[3.0, 3.0])?;
    let seen = seen.lock().unwrap_or_else(|e| e.into_inner()).clone();
    ensure!(seen == [[2.0, 4.0], [2.0, 4.0]], "{seen:?}");
    handle.remove();
    Ok(())
}

fn a_checkpoint_inside_of_grad_gives_all_gradients(device: &Device) -> Result<()> {
    let (x, w, v) = (leaf(&[1.0, 2.0], device)?, leaf(&[3.0, 4.0], device)?, leaf(&[5.0, 6.0], device)?);
    for depth in 0..3 {
        fn run(x: &Tensor, w: &Tensor, v: &Tensor, depth: usize) -> CoreResult<Tensor> {
            if depth == 0 {
                return x.mul(w)?.mul(v);
            }
            let (w, v) = (w.clone(), v.clone());
            checkpoint(&[x], move |x| run(&x[0], &w, &v, depth - 1))
        }
        // One captured weight is a leaf, the other an intermediate result.
        let loss = run(&x, &w, &v.mul(2.0)?, depth)?.sum_all()?;
        for create_graph in [false, true] {
            let options = GradOptions { create_graph, retain_graph: Some(true), ..GradOptions::default() };
            let found = autograd::grad(from_ref(&loss), &[x.clone(), w.clone(), v.clone()], &options)?;
            ensure_values(&found[0], &[30.0, 48.0])?;
            ensure_values(&found[1], &[10.0, 24.0])?;
            ensure_values(&found[2], &[6.0, 16.0])?;
        }
        ensure!([&x, &w, &v].iter().all(|t| t.grad().is_none()), "a leaf has a gradient");
    }
    Ok(())
}

fn threads_run_one_graph_concurrently(device: &Device) -> Result<()> {
    const THREADS: usize = 4;
    let x = Tensor::ones([16], DType::F32, device)?.to_leaf()?;
    let w = Tensor::full([16], 2.0, DType::F32, device)?.to_leaf()?;
    let captured = w.clone();
    let y = checkpoint(&[&x], move |x| x[0].dropout(0.5, true)?.mul(&captured))?;
    // Small integers, whose sums are exact in any order.
    let loss = y.mul(&x)?.square()?.sum_all()?;
    loss.backward_with(GradOptions::retain_graph())?;
    let take = |t: &Tensor| -> Result<Tensor> {
        let grad = t.grad().context("no gradient")?.copy()?;
        t.set_grad(None);
        Ok(grad)
    };
    let once = [take(&x)?, take(&w)?];
    for round in 0..4 {
        let found = thread::scope(|scope| -> Result<Vec<Vec<Tensor>>> {
            let run_backward = || -> CoreResult<Vec<Tensor>> {
                // Half of the threads accumulate into leaves, the other half request gradients.
                loss.backward_with(GradOptions::retain_graph())?;
                let options = GradOptions { retain_graph: Some(true), ..GradOptions::default() };
                autograd::grad(from_ref(&loss), &[x.clone(), w.clone()], &options)
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run_backward)).collect();
            let joined =
                threads.into_iter().map(|t| t.join().map_err(|_| anyhow::anyhow!("a thread panicked")));
            joined.map(|found| Ok(found??)).collect()
        })?;
        for grads in &found {
            for (grad, once) in grads.iter().zip(&once) {
                ensure_same_bits(grad, once).with_context(|| format!("round {round}"))?;
            }
        }
        // A sum of a power of two of equal values is exact.
        for (t, once) in [&x, &w].into_iter().zip(&once) {
            ensure_same_bits(&take(t)?, &once.mul(THREADS as f64)?)?;
        }
    }
    loss.backward()?;
    ensure_same_bits(&take(&x)?, &once[0])?;
    w.set_grad(None);
    Ok(())
}

fn a_graph_that_is_being_freed_is_an_error(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    let y = x.exp()?;
    y.sum_all()?.backward()?;
    let error = y.sum_all()?.backward().err().context("the graph is freed")?.to_string();
    ensure!(error.contains("has already run backward") && error.contains("retain_graph"), "{error}");
    // A backward pass begins within a running one of the same graph, on this thread and on another one.
    for other_thread in [false, true] {
        let hold: Arc<Mutex<Option<Tensor>>> = Arc::default();
        let seen = Arc::new(Mutex::new(String::new()));
        let (note, held) = (seen.clone(), hold.clone());
        let own = once_differentiable("own", x.detach().exp()?, &[&x], move |g, _| {
            let root = held.lock().unwrap_or_else(|e| e.into_inner()).take();
            let again =
                || root.and_then(|t| t.backward_with(g).err()).map_or_else(String::new, |e| e.to_string());
            let text = match other_thread {
                true => thread::scope(|scope| scope.spawn(again).join().unwrap_or_default()),
                false => again(),
            };
            *note.lock().unwrap_or_else(|e| e.into_inner()) = text;
            Ok([Some(g.clone())].into_iter().collect())
        });
        *hold.lock().unwrap_or_else(|e| e.into_inner()) = Some(own.clone());
        own.sum_all()?.backward()?;
        let text = seen.lock().unwrap_or_else(|e| e.into_inner()).clone();
        ensure!(text.contains("`own` is in use by another pass"), "{text}");
    }
    Ok(())
}

fn a_mismatched_gradient_does_not_change_the_old_one(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    x.mul(3.0)?.sum_all()?.backward()?;
    // A custom gradient with another shape, or another type.
    for bad in [0, 1] {
        let y = once_differentiable("own", x.detach().mul(1.0)?, &[&x], move |g, _| {
            let g =
                if bad == 0 { Tensor::zeros([3], g.dtype(), g.device())? } else { g.to_dtype(DType::F16)? };
            Ok([Some(g)].into_iter().collect())
        });
        let options = [GradOptions::default(), GradOptions::create_graph()];
        for options in options {
            let options = GradOptions { retain_graph: Some(true), ..options };
            ensure!(autograd::backward(&[y.sum_all()?], &options).is_err(), "{bad}: it was accepted");
            ensure_values(&x.grad().context("the gradient is lost")?, &[3.0, 3.0])?;
        }
        x.mul(3.0)?.sum_all()?.backward()?;
        ensure_values(&x.grad().context("no gradient")?, &[6.0, 6.0])?;
        x.set_grad(None);
        ensure!(
            y.sum_all()?.backward_with(GradOptions::retain_graph()).is_err(),
            "{bad}: a first gradient that does not fit"
        );
        ensure!(x.grad().is_none());
        x.mul(3.0)?.sum_all()?.backward()?;
    }
    Ok(())
}

fn a_gradient_that_was_set_is_checked_before_it_is_added_to(device: &Device) -> Result<()> {
    // Operations that accumulate into a leaf's gradient within their own backward pass: products, embeddings.
    let w = Tensor::ones([4, 4], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([2, 4], DType::F32, device)?;
    let index = Tensor::from_slice(&[0i32, 1], [2], device)?;
    let passes: [&dyn Fn() -> CoreResult<Tensor>; 4] =
        [&|| x.linear(&w, None), &|| x.matmul(&w), &|| w.embedding(&index, None), &|| w.exp()];
    for (k, pass) in passes.into_iter().enumerate() {
        for bad in [Tensor::ones([2, 2], DType::F32, device)?, Tensor::ones([4, 4], DType::BF16, device)?] {
            w.set_grad(Some(bad.clone()));
            let error =
                pass()?.sum_all()?.backward().err().with_context(|| format!("{k}: {bad:?} was accepted"))?;
            ensure!(error.to_string().contains("gradient"), "{error}");
            let kept = w.grad().context("the gradient is lost")?;
            ensure!(
                kept.shape() == bad.shape() && kept.to_f64s()?.iter().all(|v| *v == 1.0),
                "{k}: it changed"
            );
        }
    }
    w.set_grad(None);
    Ok(())
}

fn hooks_that_hold_their_result_are_dropped_with_the_graph(device: &Device) -> Result<()> {
    // The suite checks the memory after the test.
    let x = leaf(&[1.0, 2.0], device)?;
    let y = x.exp()?;
    let own = y.clone();
    let handle = y.register_hook(move |g| own.detach().mul(g).map(Some))?;
    y.sum_all()?.backward_with(GradOptions::retain_graph())?;
    y.sum_all()?.backward()?;
    handle.remove();
    Ok(())
}

fn hooks_of_a_leaf_may_hold_it_weakly(device: &Device) -> Result<()> {
    let x = leaf(&[1.0, 2.0], device)?;
    let weak = x.downgrade();
    x.register_hook(move |g| weak.upgrade().map(|x| x.detach().add(g)).transpose())?;
    x.mul(2.0)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[3.0, 4.0])
}

fn deep_histories_are_dropped_on_a_small_stack(device: &Device) -> Result<()> {
    const DEPTH: usize = 4_000;
    let device = device.clone();
    let work = move || -> Result<()> {
        let x = Tensor::ones([1], DType::F32, &device)?.to_leaf()?;
        let one = Tensor::ones([1], DType::F32, &device)?;
        let mut y = x.clone();
        for _ in 0..DEPTH {
            let before = y.clone();
            y = checkpoint(&[&one], move |_| before.reshape([1]))?;
        }
        drop(y);
        Ok(())
    };
    let done = thread::Builder::new().stack_size(2 << 20).spawn(work)?.join();
    done.map_err(|_| anyhow::anyhow!("the thread panicked"))?
}
