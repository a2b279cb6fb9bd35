//! Gradients: that they reach every input, add up, and are the same inside a checkpoint.

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions, checkpoint};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::tensor::Tensor;

use super::host::{expect, same_bits};
use super::tests;

tests![
    diamonds_add_up,
    repeated_use_adds_up,
    one_gradient_that_comes_twice_counts_twice,
    gradients_accumulate_in_place,
    no_grad_stops_recording,
    detach_cuts,
    a_graph_is_walked_once,
    a_retained_graph_is_walked_again,
    grad_leaves_the_leaves_alone,
    long_chains_do_not_overflow,
    a_checkpoint_gives_the_same_bits,
    checkpoints_nest,
    a_checkpoint_reaches_captured_parameters,
    grad_goes_through_checkpoints,
    saved_tensors_are_freed_on_the_way,
];

fn diamonds_add_up(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3], device)?.requires_grad_()?;
    // y = x², z = 3y + y·x, one gradient through four paths: dz/dx = 6x + 3x²
    let y = x.mul(&x)?;
    let z = y.mul(3.0)?.add(&y.mul(&x)?)?;
    z.backward_with(&z.ones_like()?)?;
    expect(&x.grad().context("no gradient")?, &[9.0, 24.0, 45.0])
}

fn repeated_use_adds_up(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[2.0f32], &[1], device)?.requires_grad_()?;
    let mut y = x.clone();
    for _ in 0..5 {
        y = y.mul(&x)?;
    }
    y.backward()?;
    expect(&x.grad().context("no gradient")?, &[6.0 * 32.0])
}

fn one_gradient_that_comes_twice_counts_twice(device: &Device) -> Result<()> {
    let x = Tensor::ones(&[3], DType::F32, device)?.requires_grad_()?;
    // The sum gives both operands the memory of its own gradient.
    for options in [GradOptions::default(), GradOptions::create_graph()] {
        let y = x.add(&x)?.sum_all()?;
        expect(&autograd::grad(&[y], std::slice::from_ref(&x), &options)?[0], &[2.0; 3])?;
    }
    x.add(&x)?.sum_all()?.backward()?;
    expect(&x.grad().context("no gradient")?, &[2.0; 3])?;
    // What is in the leaf already may come again.
    let known = x.grad().context("no gradient")?;
    x.add(1.0)?.backward_with(&known)?;
    expect(&x.grad().context("no gradient")?, &[4.0; 3])
}

fn gradients_accumulate_in_place(device: &Device) -> Result<()> {
    let x = Tensor::ones(&[4], DType::F32, device)?.requires_grad_()?;
    let step = || -> Result<()> {
        let y = x.mul(3.0)?;
        Ok(y.backward_with(&y.ones_like()?)?)
    };
    step()?;
    let first = x.grad().context("no gradient")?;
    step()?;
    let second = x.grad().context("no gradient")?;
    ensure!(first.shares_storage(&second), "the second pass adds into the first gradient");
    expect(&first, &[6.0; 4])?;
    x.set_grad(None);
    ensure!(x.grad().is_none());
    step()?;
    expect(&x.grad().context("no gradient")?, &[3.0; 4])
}

fn no_grad_stops_recording(device: &Device) -> Result<()> {
    let x = Tensor::ones(&[2], DType::F32, device)?.requires_grad_()?;
    {
        let _guard = autograd::no_grad();
        ensure!(!x.exp()?.requires_grad() && x.requires_grad());
        x.add_(1.0)?;
        let _inner = autograd::enable_grad();
        ensure!(x.exp()?.requires_grad());
    }
    ensure!(x.exp()?.requires_grad() && autograd::is_enabled());
    expect(&x, &[2.0; 2])
}

fn detach_cuts(device: &Device) -> Result<()> {
    let x = Tensor::full(&[2], 3.0, DType::F32, device)?.requires_grad_()?;
    let y = x.mul(&x.detach())?;
    y.backward_with(&y.ones_like()?)?;
    expect(&x.grad().context("no gradient")?, &[3.0; 2])
}

fn a_graph_is_walked_once(device: &Device) -> Result<()> {
    let x = Tensor::ones(&[1], DType::F32, device)?.requires_grad_()?;
    let y = x.exp()?;
    y.backward()?;
    ensure!(matches!(y.backward(), Err(Error::Backward(_))));
    // Another graph through the same leaf is another graph.
    x.exp()?.backward()?;
    Ok(())
}

fn a_retained_graph_is_walked_again(device: &Device) -> Result<()> {
    let x = Tensor::full(&[1], 2.0, DType::F32, device)?.requires_grad_()?;
    let y = x.mul(&x)?;
    y.backward_retain()?;
    y.backward()?;
    expect(&x.grad().context("no gradient")?, &[8.0])
}

fn grad_leaves_the_leaves_alone(device: &Device) -> Result<()> {
    let x = Tensor::full(&[1], 2.0, DType::F32, device)?.requires_grad_()?;
    let other = Tensor::full(&[1], 2.0, DType::F32, device)?.requires_grad_()?;
    let y = x.mul(&x)?;
    let grads = autograd::grad_allow_unused(&[y], &[x.clone(), other], &GradOptions::default())?;
    expect(grads[0].as_ref().context("no gradient")?, &[4.0])?;
    ensure!(grads[1].is_none() && x.grad().is_none());
    Ok(())
}

fn long_chains_do_not_overflow(device: &Device) -> Result<()> {
    let device = if device.info().software { Device::null(Default::default()) } else { device.clone() };
    let x = Tensor::ones(&[1], DType::F32, &device)?.requires_grad_()?;
    let mut y = x.clone();
    for _ in 0..20_000 {
        y = y.add(1.0)?;
    }
    y.backward()?;
    ensure!(x.grad().is_some());
    let mut dropped = x.exp()?;
    for _ in 0..20_000 {
        dropped = dropped.add(1.0)?;
    }
    drop(dropped);
    Ok(())
}

/// A block with dropout in it.
fn block(x: &Tensor, w: &Tensor) -> forebay::error::Result<Tensor> {
    x.matmul(w)?.gelu()?.dropout(0.25, true)?.mul(x)
}

/// Loss and gradients of two blocks, run by `wrap`.
fn two_blocks(
    device: &Device,
    wrap: fn(&Tensor, &Tensor) -> forebay::error::Result<Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    device.manual_seed(77);
    let x = Tensor::randn(&[16, 16], DType::F32, device)?.requires_grad_()?;
    let w = Tensor::randn(&[16, 16], DType::F32, device)?.requires_grad_()?;
    let y = wrap(&wrap(&x, &w)?, &w)?;
    // What is drawn between forward and backward must not matter, nor be disturbed.
    let drawn = Tensor::rand(&[5], DType::F32, device)?;
    y.backward_with(&y.ones_like()?)?;
    let after = Tensor::rand(&[5], DType::F32, device)?;
    ensure!(drawn.to_bytes()? != after.to_bytes()?);
    let state = device.random_state();
    ensure!(state.offset == 64 + 64 + 64 + 64 + 2 + 2, "the stream stands at {}", state.offset);
    Ok((y.detach(), x.grad().context("no gradient of x")?, w.grad().context("no gradient of w")?))
}

fn a_checkpoint_gives_the_same_bits(device: &Device) -> Result<()> {
    let plain = two_blocks(device, block)?;
    let kept = two_blocks(device, |x, w| checkpoint(&[x, w], |inputs| block(&inputs[0], &inputs[1])))?;
    same_bits(&kept.0, &plain.0).context("result")?;
    same_bits(&kept.1, &plain.1).context("gradient of x")?;
    same_bits(&kept.2, &plain.2).context("gradient of w")
}

fn checkpoints_nest(device: &Device) -> Result<()> {
    let plain = two_blocks(device, block)?;
    let kept = two_blocks(device, |x, w| {
        checkpoint(&[x, w], |outer| checkpoint(&[&outer[0], &outer[1]], |inner| block(&inner[0], &inner[1])))
    })?;
    same_bits(&kept.0, &plain.0).context("result")?;
    same_bits(&kept.1, &plain.1).context("gradient of x")?;
    same_bits(&kept.2, &plain.2).context("gradient of w")
}

fn a_checkpoint_reaches_captured_parameters(device: &Device) -> Result<()> {
    let plain = two_blocks(device, block)?;
    let captured = two_blocks(device, |x, w| {
        let w = w.clone();
        checkpoint(&[x], move |inputs| block(&inputs[0], &w))
    })?;
    same_bits(&captured.2, &plain.2).context("gradient of w")?;
    // Also where no listed input wants one.
    let w = Tensor::full(&[2], 3.0, DType::F32, device)?.requires_grad_()?;
    let x = Tensor::full(&[2], 5.0, DType::F32, device)?;
    let inner = w.clone();
    let y = checkpoint(&[&x], move |inputs| inputs[0].mul(&inner))?;
    y.backward_with(&y.ones_like()?)?;
    expect(&w.grad().context("no gradient")?, &[5.0; 2])
}

fn grad_goes_through_checkpoints(device: &Device) -> Result<()> {
    let w = Tensor::full(&[2], 3.0, DType::F32, device)?.requires_grad_()?;
    let x = Tensor::full(&[2], 5.0, DType::F32, device)?.requires_grad_()?;
    let inner = w.clone();
    let y = checkpoint(&[&x], move |outer| {
        let inner = inner.clone();
        checkpoint(&[&outer[0]], move |inputs| inputs[0].mul(&inner)?.mul(&inner))
    })?;
    let seeds = [y.ones_like()?];
    let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
    let found = autograd::grad(&[y], &[x.clone(), w.clone()], &options)?;
    expect(&found[0], &[9.0; 2])?;
    expect(&found[1], &[30.0; 2])?;
    ensure!(x.grad().is_none() && w.grad().is_none(), "the leaves were given gradients");
    Ok(())
}

fn saved_tensors_are_freed_on_the_way(device: &Device) -> Result<()> {
    let x = Tensor::ones(&[1 << 16], DType::F32, device)?.requires_grad_()?;
    let seed = Tensor::ones(&[1 << 16], DType::F32, device)?;
    let before = device.memory().allocated();
    let mut y = x.clone();
    for _ in 0..10 {
        y = y.tanh()?;
    }
    let forward = device.memory().allocated() - before;
    device.pool().reset_peak_stats();
    y.backward_with(&seed)?;
    let peak = device.memory().peak_allocated() - before;
    let one = 4 << 16;
    ensure!(forward == 10 * one, "each tanh keeps its result: {forward} bytes");
    ensure!(peak <= forward + 3 * one, "the walk back peaks at {peak} bytes over {forward}");
    drop(y);
    ensure!(device.memory().allocated() - before == one, "only the gradient stays");
    Ok(())
}
