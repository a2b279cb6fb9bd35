//! Modulated norms, norms whose result a product reads in 16 bits, and norms of sums with a 16-bit addend.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{GradOptions, checkpoint, grad};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{Linear, Module, RmsNorm};
use forebay::ops::NormOptions;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;

tests![
    gradients_of_a_modulation_equal_those_of_its_operations,
    a_modulation_has_one_kernel_in_the_backward_pass,
    operations_of_a_modulation_with_other_uses_run_one_by_one,
    modulations_have_second_gradients,
    a_modulation_runs_backward_again_only_if_its_graph_is_retained,
    changed_operands_of_a_modulation_are_errors,
    checkpointed_modulations_have_the_bits_of_plain_ones,
    captured_modulations_have_the_bits_of_eager_ones,
    captured_norms_write_16_bits_at_once,
    captured_norms_add_the_residual,
    modulations_save_only_the_input_of_the_norm,
    captured_norms_copy_the_gradient_of_a_16_bit_addend,
    more_groups_than_a_dimension_of_a_grid_has,
    captured_norms_read_sums_that_are_written_in_place,
    captured_checkpoints_may_begin_with_the_norm_of_a_sum,
    eager_steps_of_modulated_blocks_call_no_driver,
];

fn modulate(x: &Tensor, scale: &Tensor, shift: &Tensor) -> CoreResult<Tensor> {
    let extent = x.shape()[x.rank() - 1];
    x.layer_norm([extent], &NormOptions::default())?.mul(scale)?.add(shift)
}

/// Returns x \[batch, length, width\], a condition with the scale and the shift of each entry, and a gradient.
fn operands([batch, length, width]: [usize; 3], device: &Device) -> Result<[Tensor; 3]> {
    Ok([
        Tensor::randn([batch, length, width], DType::F32, device)?.mul(2.0)?.add(1.0)?.detach(),
        Tensor::randn([batch, 1, 3 * width], DType::F32, device)?,
        Tensor::randn([batch, length, width], DType::F32, device)?,
    ])
}

/// Returns the result, and the gradients of x and the condition. The shift comes first if `swaps` is true.
fn run(x: &Tensor, condition: &Tensor, g: &Tensor, by_targets: bool) -> Result<Vec<Tensor>> {
    let (x, condition) = (x.detach().to_leaf()?, condition.detach().to_leaf()?);
    let width = x.shape()[2];
    let part = |k: usize| condition.narrow(2, k * width, width);
    // Another use of x, whose gradient the kernel adds.
    let y = modulate(&x.mul(1.5)?, &part(2)?.add(1.0)?, &part(0)?)?.add(&x)?;
    let g = g.to_dtype(y.dtype())?;
    let mut found = vec![y.detach()];
    if by_targets {
        // A pass for chosen tensors runs the operations one by one.
        let options = GradOptions::from(&g);
        found.extend(grad(&[&y], &[&x, &condition], &options)?);
    } else {
        y.backward_with(&g)?;
        found.push(x.grad().context("x has no gradient")?);
        found.push(condition.grad().context("the condition has no gradient")?);
    }
    Ok(found)
}

fn gradients_of_a_modulation_equal_those_of_its_operations(device: &Device) -> Result<()> {
    // Vectors of four and single elements, several workgroups for a group, and groups that are too short.
    let cases = [
        ([3, 32, 24], DType::F32),
        ([3, 32, 24], DType::F16),
        ([2, 17, 7], DType::BF16),
        ([1, 700, 40], DType::F32),
        ([4, 3, 8], DType::BF16),
        ([2, 33, 512], DType::BF16),
    ];
    for (shape, dtype) in cases {
        let [x, condition, g] = operands(shape, device)?;
        let condition = condition.to_dtype(dtype)?;
        let fused = run(&x, &condition, &g, false)?;
        let plain = run(&x, &condition, &g, true)?;
        ensure_same_bits(&fused[0], &plain[0])?;
        let unit = match dtype {
            DType::BF16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
            _ => 1e-5,
        };
        for (k, (fused, plain)) in fused.iter().zip(&plain).enumerate().skip(1) {
            ensure!(fused.dtype() == plain.dtype() && fused.shape() == plain.shape());
            ensure_close(&fused.to_f64s()?, &plain.to_f64s()?, unit, 2e-4)
                .with_context(|| format!("{shape:?} {dtype}: {k}"))?;
        }
    }
    Ok(())
}

/// Returns the names of the kernels that `f` launches.
fn kernel_names<T>(device: &Device, f: impl FnOnce() -> Result<T>) -> Result<(T, Vec<String>)> {
    let profiler = Profiler::start(device)?;
    let out = f()?;
    Ok((out, profiler.finish()?.spans.iter().map(|span| span.name.to_string()).collect()))
}

/// Returns a loss of modulated rows that a linear layer reads, as in a diffusion transformer.
fn condition_loss(layer: &Linear, x: &Tensor, condition: &Tensor) -> CoreResult<Tensor> {
    let _scope = autocast(DType::BF16)?;
    let width = x.shape()[2] as isize;
    let parts = condition.linear(&layer.weight, None)?.chunk(2, -1)?;
    let y = modulate(x, &parts[0].unsqueeze(1)?.add(1.0)?, &parts[1].unsqueeze(1)?)?;
    let y = y.linear(&layer.weight, None)?.reshape([-1, 2, width])?.sum([1], false)?;
    y.reshape(x.shape())?.add(x)?.square()?.mean((), false)
}

/// Returns a layer from `width` to `2 width` features, rows and a condition, which require gradients.
fn condition_operands(device: &Device) -> Result<(Linear, Tensor, Tensor)> {
    let layer = Linear::without_bias(16, 32, device)?;
    let x = Tensor::randn([3, 24, 16], DType::F32, device)?.to_leaf()?;
    let condition = Tensor::randn([3, 16], DType::F32, device)?.to_leaf()?;
    Ok((layer, x, condition))
}

fn a_modulation_has_one_kernel_in_the_backward_pass(device: &Device) -> Result<()> {
    let (layer, x, condition) = condition_operands(device)?;
    let h = x.mul(2.0)?;
    let loss = condition_loss(&layer, &h, &condition)?;
    let (_, names) = kernel_names(device, || Ok(loss.backward()?))?;
    let norms: Vec<&String> = names.iter().filter(|name| name.starts_with("layer_norm")).collect();
    ensure!(norms.len() == 1, "{names:?}");
    // The kernel reads the gradient in the type of the product.
    for word in ["pass=backward", "g=bf16", "scale=bf16", "partial=2", "extra_grad=f32", "inplace"] {
        ensure!(norms[0].contains(word), "{word}: {}", norms[0]);
    }
    Ok(())
}

fn operations_of_a_modulation_with_other_uses_run_one_by_one(device: &Device) -> Result<()> {
    let [x, condition, g] = operands([2, 20, 8], device)?;
    let width = 8;
    let run = |has_hooks: bool, reuses: bool| -> Result<(Vec<Tensor>, usize)> {
        let (x, condition) = (x.detach().to_leaf()?, condition.detach().to_leaf()?);
        let scale = condition.narrow(2, 0, width)?;
        let normed = x.layer_norm([width], &NormOptions::default())?;
        let product = normed.mul(&scale)?;
        let calls = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let mut handles = Vec::new();
        for t in [&normed, &product] {
            let calls = calls.clone();
            if has_hooks {
                handles.push(t.register_hook(move |g| {
                    calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    g.mul(2.0).map(Some)
                })?);
            }
        }
        let y = product.add(&condition.narrow(2, width, width)?)?;
        let y = if reuses { y.add(&normed)? } else { y };
        y.backward_with(&g)?;
        let grads = [&x, &condition].map(|t| t.grad().context("no gradient"));
        Ok((grads.into_iter().collect::<Result<_>>()?, calls.load(std::sync::atomic::Ordering::Relaxed)))
    };
    let (plain, _) = run(false, false)?;
    let (hooked, calls) = run(true, false)?;
    ensure!(calls == 2, "{calls} hooks have run");
    // Both hooks double the gradient of x.
    ensure_close(&hooked[0].to_f64s()?, &plain[0].mul(4.0)?.to_f64s()?, 1e-5, 1e-5)?;
    let (reused, _) = run(false, true)?;
    let x = x.detach().to_leaf()?;
    x.layer_norm([width], &NormOptions::default())?.backward_with(&g)?;
    let alone = x.grad().context("no gradient")?;
    ensure_close(&reused[0].to_f64s()?, &plain[0].add(&alone)?.to_f64s()?, 1e-4, 1e-5)
}

fn modulations_have_second_gradients(device: &Device) -> Result<()> {
    let [x, condition, g] = operands([2, 16, 4], device)?;
    let (x, condition) = (x.to_leaf()?, condition.to_leaf()?);
    let y = modulate(&x, &condition.narrow(2, 0, 4)?, &condition.narrow(2, 4, 4)?)?;
    let options = GradOptions {
        grad_outputs: Some(std::slice::from_ref(&g)),
        create_graph: true,
        ..Default::default()
    };
    let first = grad(&[&y], &[&x], &options)?;
    first[0].square()?.sum_all()?.backward()?;
    ensure!(condition.grad().context("no second gradient")?.to_f64s()?.iter().any(|v| *v != 0.0));
    Ok(())
}

fn a_modulation_runs_backward_again_only_if_its_graph_is_retained(device: &Device) -> Result<()> {
    let [x, condition, g] = operands([2, 16, 4], device)?;
    let (x, condition) = (x.to_leaf()?, condition.to_leaf()?);
    let normed = x.layer_norm([4], &NormOptions::default())?;
    let y = normed.mul(&condition.narrow(2, 0, 4)?)?.add(&condition.narrow(2, 4, 4)?)?;
    let options = GradOptions { retain_graph: Some(true), ..GradOptions::from(&g) };
    y.backward_with(options)?;
    let once = x.grad().context("no gradient")?.copy()?;
    y.backward_with(&g)?;
    ensure_close(&x.grad().context("no gradient")?.to_f64s()?, &once.mul(2.0)?.to_f64s()?, 1e-5, 1e-6)?;
    // The pass has freed what the norm saved, although it did not run the norm's own function.
    let error = normed.backward_with(&g).err().context("a freed graph ran backward")?;
    ensure!(error.to_string().contains("retain_graph"), "{error}");
    Ok(())
}

fn changed_operands_of_a_modulation_are_errors(device: &Device) -> Result<()> {
    for changes_x in [false, true] {
        let [x, condition, g] = operands([2, 16, 4], device)?;
        let (x, condition) = (x.to_leaf()?, condition.to_leaf()?);
        let (h, scale) = (x.mul(2.0)?, condition.narrow(2, 0, 4)?.mul(3.0)?);
        let y = modulate(&h, &scale, &condition.narrow(2, 4, 4)?)?;
        if changes_x { &h } else { &scale }.add_(1.0)?;
        let error = y.backward_with(&g).err().context("the change in place was not detected")?;
        ensure!(error.to_string().contains("changed in place"), "{error}");
    }
    // The gradient of the scale alone needs the norm's input, unless the norm is not recorded.
    for needs_x in [false, true] {
        let [x, condition, g] = operands([2, 16, 4], device)?;
        let x = if needs_x { x.to_leaf()? } else { x };
        let (h, scale) = (x.mul(2.0)?, condition.narrow(2, 0, 4)?.copy()?.to_leaf()?);
        let y = modulate(&h, &scale, &condition.narrow(2, 4, 4)?)?;
        let expected = h.layer_norm([4], &NormOptions::default())?.detach().mul(&g)?.sum([1], true)?;
        h.add_(1.0)?;
        match grad(&[&y], &[&scale], &GradOptions::from(&g)) {
            Ok(found) if !needs_x => ensure_close(&found[0].to_f64s()?, &expected.to_f64s()?, 1e-5, 1e-5)?,
            Err(error) if needs_x => {
                let text = error.to_string();
                let part = "in the gradient of a scale, which computes `layer_norm` again from its input: backward: `mul`";
                ensure!(text.starts_with(part) && text.contains("changed in place"), "{text}");
            }
            found => anyhow::bail!("{needs_x}: {}", found.is_ok()),
        }
    }
    Ok(())
}

fn checkpointed_modulations_have_the_bits_of_plain_ones(device: &Device) -> Result<()> {
    let [x, condition, g] = operands([2, 40, 8], device)?;
    let run = |checkpointed: bool| -> Result<Vec<Tensor>> {
        let (x, condition) = (x.detach().to_leaf()?, condition.detach().to_leaf()?);
        let block =
            |t: &[Tensor]| modulate(&t[0], &t[1].narrow(2, 0, 8)?, &t[1].narrow(2, 8, 8)?)?.add(&t[0]);
        let h = x.mul(0.5)?;
        let y = match checkpointed {
            true => checkpoint(&[&h, &condition], block)?,
            false => block(&[h, condition.clone()])?,
        };
        y.backward_with(&g)?;
        Ok(vec![x.grad().context("no gradient")?, condition.grad().context("no gradient")?])
    };
    for (got, expected) in run(true)?.iter().zip(&run(false)?) {
        ensure_same_bits(got, expected)?;
    }
    Ok(())
}

fn captured_modulations_have_the_bits_of_eager_ones(device: &Device) -> Result<()> {
    let (layer, x, condition) = condition_operands(device)?;
    let once = || {
        let loss = condition_loss(&layer, &x.mul(2.0)?, &condition)?;
        loss.backward()?;
        Ok(loss.detach())
    };
    let grads = || -> Result<Vec<Tensor>> {
        [&layer.weight, &x, &condition]
            .iter()
            .map(|t| t.grad().context("no gradient")?.copy().map_err(Into::into))
            .collect()
    };
    let clear = || [&layer.weight, &x, &condition].iter().for_each(|t| t.set_grad(None));
    let loss: Tensor = once()?;
    let expected = grads()?;
    clear();
    let mut step = device.capture(|| {
        clear();
        once()
    })?;
    let (replayed, names) = kernel_names(device, || Ok(step.replay()?.copy()?))?;
    ensure_same_bits(&replayed, &loss)?;
    for (k, (got, expected)) in grads()?.iter().zip(&expected).enumerate() {
        ensure_same_bits(got, expected).with_context(|| format!("gradient {k}"))?;
    }
    let forward: Vec<&String> =
        names.iter().filter(|name| name.starts_with("layer_norm") && name.contains("pass=forward")).collect();
    ensure!(forward.len() == 1, "{names:?}");
    for word in ["result=bf16", "scale=bf16", "shift=bf16"] {
        ensure!(forward[0].contains(word), "{word}: {}", forward[0]);
    }
    Ok(())
}

/// A grid of workgroups in two dimensions has more of them than there are parts of groups.
fn more_groups_than_a_dimension_of_a_grid_has(device: &Device) -> Result<()> {
    let [x, condition, g] = operands([65_537, 16, 4], device)?;
    let (fused, plain) = (run(&x, &condition, &g, false)?, run(&x, &condition, &g, true)?);
    for (k, (fused, plain)) in fused.iter().zip(&plain).enumerate() {
        let difference = fused.sub(plain)?.abs()?.amax((), false)?.item()?;
        ensure!(difference < 1e-3, "{k}: {difference}");
    }
    Ok(())
}

fn captured_norms_read_sums_that_are_written_in_place(device: &Device) -> Result<()> {
    let w = Tensor::randn([16, 16], DType::F32, device)?.to_leaf()?;
    let x = Tensor::randn([5, 16], DType::F32, device)?.to_leaf()?;
    let position = Tensor::randn([5, 16], DType::F32, device)?.to_leaf()?;
    let run = || {
        let h = x.linear(&w, None)?;
        h.add_(&position)?;
        let _scope = autocast(DType::BF16)?;
        let y = h.rms_norm([16], None, None)?.linear(&w, None)?;
        y.to_dtype(DType::F32)?.add(&h)
    };
    let expected: Tensor = run()?.copy()?;
    let mut step = device.capture(run)?;
    for _ in 0..2 {
        ensure_same_bits(&step.replay()?, &expected)?;
    }
    Ok(())
}

fn captured_checkpoints_may_begin_with_the_norm_of_a_sum(device: &Device) -> Result<()> {
    let w = Tensor::randn([16, 16], DType::F32, device)?.to_leaf()?;
    let x = Tensor::randn([5, 16], DType::F32, device)?.to_leaf()?;
    let position = Tensor::randn([5, 16], DType::F32, device)?.to_leaf()?;
    let leaves = [&w, &x, &position];
    let run = || {
        leaves.iter().for_each(|t| t.set_grad(None));
        let _scope = autocast(DType::BF16)?;
        let (h, w) = (x.add(&position)?, w.clone());
        let y = checkpoint(&[&h], move |t| t[0].rms_norm([16], None, None)?.linear(&w, None))?;
        y.to_dtype(DType::F32)?.square()?.sum_all()?.backward()
    };
    let grads = || -> Result<Vec<Tensor>> {
        leaves.iter().map(|t| t.grad().context("no gradient")?.copy().map_err(Into::into)).collect()
    };
    run()?;
    let expected = grads()?;
    let mut step = device.capture(run)?;
    step.replay()?;
    for (got, expected) in grads()?.iter().zip(&expected) {
        ensure_same_bits(got, expected)?;
    }
    Ok(())
}

fn captured_norms_write_16_bits_at_once(device: &Device) -> Result<()> {
    let norm = RmsNorm::new([16], device)?;
    let layers = [Linear::without_bias(16, 16, device)?, Linear::without_bias(16, 16, device)?];
    let x = Tensor::randn([5, 16], DType::F32, device)?.to_leaf()?;
    let run = |returns_norm: bool| -> CoreResult<(Tensor, Tensor)> {
        let _scope = autocast(DType::BF16)?;
        let normed = norm.forward(&x.mul(1.5)?)?;
        let y = layers[0].forward(&normed)?.mul(&layers[1].forward(&normed)?)?;
        y.square()?.to_dtype(DType::F32)?.mean((), false)?.backward()?;
        Ok((y.detach(), if returns_norm { normed.detach() } else { y.detach() }))
    };
    let parameters = || [&norm.weight, &x, &layers[0].weight, &layers[1].weight];
    let clear = || parameters().iter().for_each(|t| t.set_grad(None));
    for returns_norm in [false, true] {
        clear();
        let (y, normed) = run(returns_norm)?;
        let expected: Vec<Tensor> =
            parameters().iter().map(|t| t.grad().context("no gradient")).collect::<Result<_>>()?;
        let mut step = device.capture(|| {
            clear();
            run(returns_norm)
        })?;
        let (outputs, names) = kernel_names(device, || Ok(step.replay()?))?;
        ensure_same_bits(&outputs.0, &y)?;
        // A program that keeps the f32 result has it written by a kernel of its own.
        ensure_same_bits(&outputs.1, &normed)?;
        for (k, (t, expected)) in parameters().iter().zip(&expected).enumerate() {
            ensure_same_bits(&t.grad().context("no gradient")?, expected)
                .with_context(|| format!("gradient {k}"))?;
        }
        let forward = |dtype: &str| {
            let is_norm = |name: &&String| name.starts_with("layer_norm") && name.contains("pass=forward");
            names.iter().filter(is_norm).filter(|name| name.contains(&format!("result={dtype} "))).count()
        };
        ensure!(forward("bf16") == 1, "{names:?}");
        ensure!(forward("f32") == usize::from(returns_norm), "{names:?}");
    }
    Ok(())
}

fn captured_norms_copy_the_gradient_of_a_16_bit_addend(device: &Device) -> Result<()> {
    let norm = RmsNorm::new([16], device)?;
    let x = Tensor::randn([5, 16], DType::F32, device)?;
    let g = Tensor::randn([5, 16], DType::F32, device)?;
    let run = |dtype: DType| -> Result<(Vec<Tensor>, Vec<String>)> {
        let (x, branch) = (x.detach().to_leaf()?, x.mul(0.5)?.to_dtype(dtype)?.to_leaf()?);
        let mut step = device.capture(|| {
            [&x, &branch, &norm.weight].iter().for_each(|t| t.set_grad(None));
            let sum = x.mul(1.0)?.add(&branch)?;
            norm.forward(&sum)?.add(&sum)?.backward_with(&g)
        })?;
        let (_, names) = kernel_names(device, || Ok(step.replay()?))?;
        Ok((vec![x.grad().context("no gradient")?, branch.grad().context("no gradient")?], names))
    };
    let (grads, names) = run(DType::BF16)?;
    // Both addends have the gradient of the sum.
    ensure_same_bits(&grads[1], &grads[0].to_dtype(DType::BF16)?)?;
    let copies = |name: &String| name.starts_with("layer_norm") && name.contains("copy=bf16");
    ensure!(names.iter().any(copies), "{names:?}");
    ensure!(!names.iter().any(|name| name.contains("expr=a ") && name.contains("out=bf16")), "{names:?}");
    let (_, names) = run(DType::F32)?;
    ensure!(!names.iter().any(copies), "{names:?}");
    Ok(())
}

fn captured_norms_add_the_residual(device: &Device) -> Result<()> {
    let norm = RmsNorm::new([16], device)?;
    let layers = [Linear::without_bias(16, 16, device)?, Linear::without_bias(16, 16, device)?];
    let x = Tensor::randn([5, 16], DType::F32, device)?.to_leaf()?;
    let run = |reads_first: bool| -> CoreResult<Tensor> {
        let _scope = autocast(DType::BF16)?;
        let h = x.mul(1.5)?;
        let normed = norm.forward(&h)?;
        let sum = h.add(&layers[0].forward(&normed)?)?;
        // A softmax that reads the sum before the norm.
        let first = if reads_first { Some(sum.softmax(-1)?) } else { None };
        let y = sum.add(&layers[1].forward(&norm.forward(&sum)?)?)?;
        let y = first.iter().try_fold(y, |y, first| y.add(first))?;
        let loss = y.square()?.mean((), false)?;
        loss.backward()?;
        Ok(loss.detach())
    };
    let parameters = || [&norm.weight, &x, &layers[0].weight, &layers[1].weight];
    let clear = || parameters().iter().for_each(|t| t.set_grad(None));
    for reads_first in [false, true] {
        clear();
        let loss = run(reads_first)?;
        let expected: Vec<Tensor> =
            parameters().iter().map(|t| t.grad().context("no gradient")).collect::<Result<_>>()?;
        let mut step = device.capture(|| {
            clear();
            run(reads_first)
        })?;
        for _ in 0..2 {
            let (replayed, names) = kernel_names(device, || Ok(step.replay()?))?;
            ensure_same_bits(&replayed, &loss)?;
            for (k, (t, expected)) in parameters().iter().zip(&expected).enumerate() {
                ensure_same_bits(&t.grad().context("no gradient")?, expected)
                    .with_context(|| format!("gradient {k}"))?;
            }
            let adds = |name: &String| name.contains("pass=forward") && name.contains("residual=f32 sum=f32");
            let at = names.iter().position(adds).with_context(|| format!("{names:?}"))?;
            // The addition itself runs only for the softmax.
            let plain = names[..at].iter().filter(|name| name.contains("expr=a + b")).count();
            ensure!(plain == usize::from(reads_first), "{reads_first}: {names:?}");
        }
    }
    Ok(())
}

fn modulations_save_only_the_input_of_the_norm(device: &Device) -> Result<()> {
    let device = &Device::with_config(device.backend().clone(), Default::default());
    let [x, condition, _] = operands([2, 64, 64], device)?;
    let (x, condition) = (x.to_leaf()?, condition.narrow(2, 0, 128)?.copy()?.to_leaf()?);
    let before = device.memory().allocated();
    let y = modulate(&x, &condition.narrow(2, 0, 64)?, &condition.narrow(2, 64, 64)?)?;
    let held = device.memory().allocated() - before;
    let bytes = (y.numel() * 4) as u64;
    // The result, and the statistics of the rows. The input is the leaf.
    ensure!(held < bytes + bytes / 4, "{held} bytes are held for a result of {bytes}");
    Ok(())
}

/// The gradient's copy for a 16-bit addend, which eager steps of modulations write, does not unsettle the pool.
fn eager_steps_of_modulated_blocks_call_no_driver(_: &Device) -> Result<()> {
    let device = &Device::null(CardProfile::from_card("h100")?);
    let width = 256;
    let blocks: Vec<[Linear; 2]> = (0..3)
        .map(|_| Ok([Linear::new(width, 3 * width, device)?, Linear::new(width, width, device)?]))
        .collect::<CoreResult<_>>()?;
    let loss = || -> CoreResult<Tensor> {
        let _scope = autocast(DType::BF16)?;
        let mut h = Tensor::randn([8, 256, width], DType::F32, device)?;
        let condition = Tensor::randn([8, width], DType::F32, device)?;
        for [of_condition, layer] in &blocks {
            let parts = of_condition.forward(&condition)?.unsqueeze(1)?.chunk(3, -1)?;
            let y = layer.forward(&modulate(&h, &parts[0].add(1.0)?, &parts[1])?)?;
            h = h.add(&y.gelu()?.mul(&parts[2])?)?;
        }
        h.square()?.mean((), false)
    };
    let mut calls = Vec::new();
    for _ in 0..24 {
        for _ in 0..2 {
            loss()?.backward()?;
        }
        blocks.iter().flatten().for_each(Module::zero_grad);
        let statistics = device.memory().to_map();
        calls.push(statistics["num_device_alloc"] + statistics["num_device_free"]);
    }
    ensure!(calls[8] == calls[23], "calls of the driver by step: {calls:?}");
    Ok(())
}
