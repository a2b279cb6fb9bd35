//! Normalisations with SiLU in their kernels, and normalisations of 16-bit inputs under autocast.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::checkpoint;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, GroupNorm, Module};
use forebay::ops::{BatchNormOptions, NormOptions};
use forebay::optim::{Optimizer, Sgd};
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;

tests![
    norms_read_16_bits_as_they_are_under_autocast,
    group_norms_with_silu_equal_their_composition,
    norms_with_silu_round_once_under_autocast,
    norms_with_silu_keep_only_their_input,
    batch_norms_of_few_parts_take_two_kernels,
    layers_apply_silu,
    gradients_do_not_depend_on_which_are_wanted,
    group_norms_keep_digits_far_from_zero,
    captured_and_checkpointed_norms_have_the_bits_of_eager_ones,
    running_statistics_may_be_parts_of_one_buffer,
    batches_without_elements_are_counted,
    a_changed_input_of_a_norm_is_an_error,
];

const LOW: [DType; 2] = [DType::F16, DType::BF16];

/// Normalisation of [batch, channels, ...] with weight and bias of the channels.
type NormFn = fn(&Tensor, &Tensor, &Tensor) -> CoreResult<Tensor>;

fn affine<'a>(weight: &'a Tensor, bias: &'a Tensor) -> NormOptions<'a> {
    NormOptions { weight: Some(weight), bias: Some(bias), ..Default::default() }
}

fn in_training<'a>(weight: &'a Tensor, bias: &'a Tensor) -> BatchNormOptions<'a> {
    BatchNormOptions { weight: Some(weight), bias: Some(bias), training: true, ..Default::default() }
}

fn group_norm_silu(x: &Tensor, w: &Tensor, b: &Tensor) -> CoreResult<Tensor> {
    x.group_norm_silu(2, &affine(w, b))
}

fn batch_norm_silu(x: &Tensor, w: &Tensor, b: &Tensor) -> CoreResult<Tensor> {
    x.batch_norm_silu(&in_training(w, b))
}

/// Returns an input that is not centred, a weight and a bias of its channels, and a gradient of the result.
fn operands(shape: &[usize], channels: usize, device: &Device) -> Result<[Tensor; 4]> {
    let x = Tensor::randn(shape, DType::F32, device)?.mul(2.0)?.add(3.0)?.detach();
    let [w, b] = [(); 2].map(|()| Tensor::randn([channels], DType::F32, device));
    Ok([x, w?, b?, Tensor::randn(shape, DType::F32, device)?])
}

/// Returns the result and the gradients of x, weight and bias for the gradient `g` of the result.
fn run(norm: NormFn, low: Option<DType>, [x, w, b, g]: [&Tensor; 4]) -> Result<Vec<Tensor>> {
    let [x, w, b] = [x, w, b].map(|t| t.detach().to_leaf());
    let (x, w, b) = (x?, w?, b?);
    let y = {
        let _scope = low.map(autocast).transpose()?;
        norm(&x, &w, &b)?
    };
    y.backward_with(&g.to_dtype(y.dtype())?)?;
    let gradients = [&x, &w, &b].map(|t| t.grad().context("no gradient"));
    [Ok(y.detach())].into_iter().chain(gradients).collect()
}

/// Returns the names of the kernels that `f` launches.
fn kernel_names<T>(device: &Device, f: impl FnOnce() -> Result<T>) -> Result<(T, Vec<String>)> {
    let profiler = Profiler::start(device)?;
    let out = f()?;
    Ok((out, profiler.finish()?.spans.iter().map(|span| span.name.to_string()).collect()))
}

fn norms_read_16_bits_as_they_are_under_autocast(device: &Device) -> Result<()> {
    let cases: [(&[usize], usize, NormFn); 5] = [
        (&[3, 4, 5, 8], 4, |x, w, b| x.group_norm(2, &affine(w, b))),
        (&[2, 6, 7], 6, |x, w, b| x.group_norm(3, &affine(w, b))),
        (&[2, 4, 35_000], 4, |x, w, b| x.group_norm(2, &affine(w, b))),
        (&[5, 24], 24, |x, w, b| x.layer_norm([24], &affine(w, b))),
        // A row that no workgroup holds in its registers.
        (&[2, 20_000], 20_000, |x, w, b| x.layer_norm([20_000], &affine(w, b))),
    ];
    for (shape, channels, norm) in cases {
        let [x, w, b, g] = operands(shape, channels, device)?;
        for low in LOW {
            let small = x.to_dtype(low)?;
            let wide = small.to_dtype(DType::F32)?;
            let all = [&small, &w, &b, &g];
            let (made, names) = kernel_names(device, || run(norm, Some(low), all))?;
            let (cast, of_f32) = kernel_names(device, || run(norm, None, [&wide, &w, &b, &g]))?;
            ensure!(names.len() == of_f32.len(), "{shape:?}: {names:?}, of f32 {of_f32:?}");
            ensure!((made[0].dtype(), made[1].dtype()) == (DType::F32, low), "{shape:?}: {made:?}");
            for (k, (made, cast)) in made.iter().zip(&cast).enumerate() {
                ensure_same_bits(made, &cast.to_dtype(made.dtype())?)
                    .with_context(|| format!("{shape:?} of {low}, result {k}"))?;
            }
        }
    }
    Ok(())
}

/// Group norm with SiLU composed of single operations.
fn reference_group_norm_silu(x: &Tensor, w: &Tensor, b: &Tensor, groups: usize) -> CoreResult<Tensor> {
    let rows = x.reshape([(x.shape()[0] * groups) as isize, -1])?;
    let away = rows.sub(&rows.mean([1], true)?)?;
    let z = away.mul(&away.square()?.mean([1], true)?.add(1e-5)?.rsqrt()?)?.reshape(x.shape())?;
    let mut each = vec![1; x.rank()];
    each[1] = w.numel();
    z.mul(&w.reshape(&each[..])?)?.add(&b.reshape(&each[..])?)?.silu()
}

fn group_norms_with_silu_equal_their_composition(device: &Device) -> Result<()> {
    // Packs of eight, four and one; runs of one element; long runs of few channels; rows in several parts.
    let shapes: [&[usize]; 7] = [
        &[3, 4, 5, 8],
        &[2, 4, 3, 4],
        &[3, 6, 7],
        &[5, 12],
        &[2, 2, 66_000],
        &[9, 4, 40, 40],
        &[1, 4, 90_001],
    ];
    for shape in shapes {
        let [x, w, b, g] = operands(shape, shape[1], device)?;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let small = x.to_dtype(dtype)?;
            let made = run(group_norm_silu, None, [&small, &w, &b, &g.to_dtype(dtype)?])?;
            ensure!((made[0].dtype(), made[1].dtype()) == (dtype, dtype), "{made:?}");
            let wide = [&small.to_dtype(DType::F32)?, &w, &b, &g.to_dtype(dtype)?];
            let expected = run(|x, w, b| reference_group_norm_silu(x, w, b, 2), None, wide)?;
            for (what, (made, expected)) in ["y", "dx", "dw", "db"].iter().zip(made.iter().zip(&expected)) {
                let unit = match made.dtype() {
                    DType::BF16 => 1.0 / 256.0,
                    DType::F16 => 1.0 / 2048.0,
                    _ => 0.0,
                };
                // The error of this many f32 terms.
                let off = 2e-5 * (g.numel() as f64 / shape[1] as f64).sqrt() + 1e-5;
                ensure_close(&made.to_f64s()?, &expected.to_f64s()?, unit + 1e-5, off)
                    .with_context(|| format!("{shape:?} {dtype}: {what}"))?;
            }
        }
    }
    Ok(())
}

fn norms_with_silu_round_once_under_autocast(device: &Device) -> Result<()> {
    for norm in [group_norm_silu as NormFn, batch_norm_silu] {
        for shape in [[3, 4, 5, 8], [2, 4, 3, 5]] {
            let [x, w, b, g] = operands(&shape, 4, device)?;
            for low in LOW {
                for x in [x.clone(), x.to_dtype(low)?] {
                    let g = g.to_dtype(low)?;
                    let made = run(norm, Some(low), [&x, &w, &b, &g])?;
                    ensure!((made[0].dtype(), made[1].dtype()) == (low, x.dtype()), "{made:?}");
                    let exact = run(norm, None, [&x.to_dtype(DType::F32)?, &w, &b, &g])?;
                    for (k, (made, exact)) in made.iter().zip(&exact).enumerate() {
                        // The kernels differ in their types, and compilers may contract products and sums in one.
                        let tolerance = match made.dtype() {
                            DType::F32 => 2f64.powi(-20),
                            DType::F16 => 2f64.powi(-10),
                            _ => 2f64.powi(-7),
                        };
                        ensure_close(&made.to_f64s()?, &exact.to_f64s()?, tolerance, 1e-6)
                            .with_context(|| format!("{shape:?}, {} under {low}, {k}", x.dtype()))?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn norms_with_silu_keep_only_their_input(device: &Device) -> Result<()> {
    let shape = [4, 8, 32, 32];
    let bytes = |numel: usize, dtype: DType| (numel * dtype.size()) as u64;
    let [x, w, b, _] = operands(&shape, 8, device)?;
    let (x, w, b) = (x.to_dtype(DType::BF16)?.to_leaf()?, w.to_leaf()?, b.to_leaf()?);
    for norm in [group_norm_silu as NormFn, batch_norm_silu] {
        let before = device.memory().allocated();
        let (y, names) = kernel_names(device, || {
            let _scope = autocast(DType::BF16)?;
            Ok(norm(&x, &w, &b)?)
        })?;
        let kept = device.memory().allocated() - before;
        let result = bytes(y.numel(), DType::BF16);
        ensure!(kept < result + result / 8, "{kept} bytes are kept, of which the result is {result}");
        ensure!(names.len() <= 3, "{names:?}");
        // The two calls also keep SiLU's input, and cast.
        drop(y);
    }
    Ok(())
}

/// Channels of few parts need no kernels that combine the parts, if a kernel takes nine bindings.
fn batch_norms_of_few_parts_take_two_kernels(device: &Device) -> Result<()> {
    let takes_nine = device.info().limits.max_bindings >= 9;
    // Parts have up to 8,192 elements.
    for (shape, forward, backward) in
        [([3, 4, 5, 8], 2, 2), ([4, 2, 80, 80], 2, 2), ([9, 1, 80, 80], 2, 3), ([11, 1, 100, 100], 3, 3)]
    {
        let [x, w, b, g] = operands(&shape, shape[1], device)?;
        let (x, w, b) = (x.to_leaf()?, w.to_leaf()?, b.to_leaf()?);
        let [mean, var] = [0.0, 1.0].map(|value| Tensor::full([shape[1]], value, DType::F32, device));
        let (mean, var, count) = (mean?, var?, Tensor::zeros((), DType::I32, device)?);
        let options = BatchNormOptions {
            running: Some((&mean, &var)),
            num_batches_tracked: Some(&count),
            ..in_training(&w, &b)
        };
        let (y, names) = kernel_names(device, || Ok(x.batch_norm_silu(&options)?))?;
        let expected = if takes_nine { forward } else { 3 };
        ensure!(names.len() == expected, "{shape:?}: {names:?}");
        let ((), names) = kernel_names(device, || Ok(y.backward_with(&g)?))?;
        let expected = if takes_nine { backward } else { 3 };
        ensure!(names.len() == expected, "{shape:?}, backward: {names:?}");
        let (v, m) = x.detach().var_mean([0, 2, 3], 1.0, false)?;
        ensure_close(&mean.to_f64s()?, &m.mul(0.1)?.to_f64s()?, 1e-5, 1e-6)?;
        ensure_close(&var.to_f64s()?, &v.mul(0.1)?.add(0.9)?.to_f64s()?, 1e-5, 1e-6)?;
        ensure!(count.item()? == 1.0, "{shape:?}: {} batches", count.item()?);
    }
    Ok(())
}

fn layers_apply_silu(device: &Device) -> Result<()> {
    let x = Tensor::randn([3, 4, 6, 6], DType::F32, device)?;
    let group = GroupNorm::new(2, 4, device)?;
    let fused = group.forward_silu(&x)?.to_f64s()?;
    ensure_close(&fused, &group.forward(&x)?.silu()?.to_f64s()?, 1e-5, 1e-6)?;
    let [fused, plain] = [(); 2].map(|()| BatchNorm2d::new(4, device));
    let (fused, plain) = (fused?, plain?);
    for training in [true, false] {
        fused.train(training);
        plain.train(training);
        let made = fused.forward_silu(&x)?.to_f64s()?;
        ensure_close(&made, &plain.forward(&x)?.silu()?.to_f64s()?, 1e-5, 1e-6)?;
    }
    let state = |norm: &BatchNorm2d| -> Result<Vec<Vec<f64>>> {
        norm.state_dict().values().map(|t| Ok(t.to_f64s()?)).collect()
    };
    ensure!(state(&fused)? == state(&plain)?, "the running statistics differ");
    Ok(())
}

fn gradients_do_not_depend_on_which_are_wanted(device: &Device) -> Result<()> {
    let [x, w, b, g] = operands(&[3, 4, 5, 8], 4, device)?;
    let all = run(group_norm_silu, None, [&x, &w, &b, &g])?;
    for wanted in 0..3 {
        let mut inputs = [x.clone(), w.clone(), b.clone()];
        inputs[wanted] = inputs[wanted].to_leaf()?;
        let [x, w, b] = &inputs;
        group_norm_silu(x, w, b)?.backward_with(&g)?;
        let grad = inputs[wanted].grad().context("no gradient")?;
        ensure_same_bits(&grad, &all[1 + wanted]).with_context(|| format!("input {wanted}"))?;
    }
    Ok(())
}

fn group_norms_keep_digits_far_from_zero(device: &Device) -> Result<()> {
    // Values of deviation 1 around 4096, and one value far from the others at the beginning of each row.
    let n = 16 * 1024;
    let noise = Tensor::randn([2, 4, n], DType::F32, device)?;
    for (shift, first) in [(4096.0, 0.0), (0.0, 100.0)] {
        let x = noise.add(shift)?.detach();
        x.narrow(2, 0, 1)?.add_(first)?;
        let rows: Vec<f64> = x.to_f64s()?;
        let y = x.group_norm(2, &NormOptions::default())?.to_f64s()?;
        for (x, y) in rows.chunks(2 * n).zip(y.chunks(2 * n)) {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let var = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / x.len() as f64;
            let expected: Vec<f64> = x.iter().map(|v| (v - mean) / (var + 1e-5).sqrt()).collect();
            // Half a unit in the last place of 4096 is 2.4e-4, by which the f32 mean may be off.
            ensure_close(y, &expected, 1e-4, if shift > 0.0 { 5e-4 } else { 1e-5 })?;
        }
    }
    Ok(())
}

/// Convolutions between norms with SiLU.
#[derive(Module)]
struct Net {
    group: GroupNorm,
    conv: Conv2d,
    batch: BatchNorm2d,
}

impl Net {
    fn new(device: &Device) -> Result<Self> {
        device.manual_seed(7);
        let options = Conv2dOptions { padding: [1; 2], ..Conv2dOptions::default() };
        Ok(Self {
            group: GroupNorm::new(2, 4, device)?,
            conv: Conv2d::new(4, 4, [3; 2], options, device)?,
            batch: BatchNorm2d::new(4, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> CoreResult<Tensor> {
        self.batch.forward_silu(&self.conv.forward(&self.group.forward_silu(x)?)?)
    }

    /// Trains one step under autocast; returns the loss.
    fn train(self: &Arc<Self>, optimizer: &mut Sgd, x: &Tensor, checkpointed: bool) -> CoreResult<Tensor> {
        let loss = {
            let _scope = autocast(DType::BF16)?;
            let net = self.clone();
            let y = match checkpointed {
                true => checkpoint(&[x], move |t| net.forward(&t[0]))?,
                false => net.forward(x)?,
            };
            y.to_dtype(DType::F32)?.square()?.mean_all()?
        };
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
        Ok(loss)
    }
}

fn captured_and_checkpointed_norms_have_the_bits_of_eager_ones(device: &Device) -> Result<()> {
    const STEPS: usize = 4;
    let run = |captured: bool, checkpointed: bool| -> Result<Vec<Tensor>> {
        let net = Arc::new(Net::new(device)?);
        let mut optimizer = Sgd::new(net.parameters(), 0.1);
        let x = Tensor::randn([3, 4, 8, 8], DType::F32, device)?;
        let mut found = Vec::new();
        if captured {
            // A capture runs the step twice: eagerly, then recorded.
            let mut step = device.capture_with(&[&x], |x| net.train(&mut optimizer, &x[0], checkpointed))?;
            found.push(step.outputs().copy()?);
            for _ in 2..STEPS {
                found.push(step.run(&[&x])?.copy()?);
            }
        } else {
            for k in 0..STEPS {
                let loss = net.train(&mut optimizer, &x, checkpointed)?.detach();
                found.extend((k > 0).then_some(loss));
            }
        }
        found.extend(net.state_dict().into_values());
        Ok(found)
    };
    let expected = run(false, false)?;
    for (captured, checkpointed) in [(true, false), (false, true), (true, true)] {
        for (k, (got, expected)) in run(captured, checkpointed)?.iter().zip(&expected).enumerate() {
            ensure_same_bits(&got.detach(), &expected.detach())
                .with_context(|| format!("captured {captured}, checkpointed {checkpointed}: {k}"))?;
        }
    }
    Ok(())
}

fn running_statistics_may_be_parts_of_one_buffer(device: &Device) -> Result<()> {
    let x = Tensor::randn([4, 8, 3], DType::F32, device)?;
    let train = |running: [&Tensor; 2], count: &Tensor| -> Result<Vec<f64>> {
        let [mean, var] = running;
        mean.zero_()?;
        var.copy_(&var.ones_like()?)?;
        let count = Some(count);
        let options = BatchNormOptions {
            running: Some((mean, var)),
            num_batches_tracked: count,
            training: true,
            ..Default::default()
        };
        let y = x.batch_norm(&options)?;
        Ok([y.to_f64s()?, mean.to_f64s()?, var.to_f64s()?].concat())
    };
    let counts = Tensor::zeros([4], DType::I32, device)?;
    let own = [Tensor::zeros([8], DType::F32, device)?, Tensor::zeros([8], DType::F32, device)?];
    let expected = train(own.each_ref(), &counts.narrow(0, 0, 1)?)?;
    for dim in [0, 1] {
        let shape = if dim == 0 { [2, 8] } else { [8, 2] };
        let buffer = Tensor::zeros(shape, DType::F32, device)?;
        let parts = [buffer.select(dim, 0)?, buffer.select(dim, 1)?];
        let found = train(parts.each_ref(), &counts.narrow(0, 2, 1)?)?;
        ensure_close(&found, &expected, 1e-6, 1e-6).with_context(|| format!("parts of dimension {dim}"))?;
    }
    let counts = counts.to_f64s()?;
    ensure!(counts == [1.0, 0.0, 2.0, 0.0], "the batches are counted as {counts:?}");
    Ok(())
}

/// As in PyTorch, an empty batch counts, has zero gradients and changes no statistics.
fn batches_without_elements_are_counted(device: &Device) -> Result<()> {
    for shape in [&[0, 8][..], &[0, 8, 3], &[2, 8, 0]] {
        let x = Tensor::zeros(shape, DType::F32, device)?.to_leaf()?;
        let weight = Tensor::ones([8], DType::F32, device)?.to_leaf()?;
        let count = Tensor::zeros((), DType::I32, device)?;
        let [mean, var] = [0.0, 1.0].map(|value| Tensor::full([8], value, DType::F32, device));
        let (mean, var) = (mean?, var?);
        for training in [true, false] {
            let options = BatchNormOptions {
                running: Some((&mean, &var)),
                weight: Some(&weight),
                num_batches_tracked: Some(&count),
                training,
                ..Default::default()
            };
            for y in [x.batch_norm(&options)?, x.batch_norm_silu(&options)?] {
                ensure!(y.shape() == shape, "{:?} of {shape:?}", y.shape());
                y.sum_all()?.backward()?;
            }
        }
        let gradient = weight.grad().context("a gradient is missing")?.to_f64s()?;
        ensure!(gradient == [0.0; 8], "{shape:?}: the gradient is {gradient:?}");
        ensure!(count.item()? == 2.0, "{shape:?}: {} batches", count.item()?);
        ensure!(
            mean.to_f64s()? == [0.0; 8] && var.to_f64s()? == [1.0; 8],
            "{shape:?}: the statistics changed"
        );
    }
    Ok(())
}

fn a_changed_input_of_a_norm_is_an_error(device: &Device) -> Result<()> {
    let leaf = Tensor::randn([4, 8, 3], DType::F32, device)?.to_leaf()?;
    let training = BatchNormOptions { training: true, ..Default::default() };
    let plain = NormOptions::default();
    type Norm<'a> = &'a dyn Fn(&Tensor) -> CoreResult<Tensor>;
    let norms: [(&str, Norm<'_>); 4] = [
        ("batch_norm", &|x| x.batch_norm(&training)),
        ("batch_norm_silu", &|x| x.batch_norm_silu(&training)),
        ("group_norm", &|x| x.group_norm(2, &plain)),
        ("group_norm_silu", &|x| x.group_norm_silu(2, &plain)),
    ];
    for (name, norm) in norms {
        let x = leaf.mul(1.0)?;
        let y = norm(&x)?.sum_all()?;
        x.detach().add_(1.0)?;
        let error = y.backward().err().map(|e| e.to_string()).unwrap_or_default();
        ensure!(error.contains("changed in place"), "{name}: expected an error, got `{error}`");
    }
    Ok(())
}
