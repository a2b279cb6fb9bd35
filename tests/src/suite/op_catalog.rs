//! Checks of all catalog records: gradients, layouts, batch sizes, types, and rejected inputs.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::autograd::no_grad;
use forebay::backend::null::{CardProfile, NullBackend};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;
use crate::catalog::{self, OpCase};

tests![
    every_input_gets_a_gradient_and_the_same_bits_again,
    gradients_are_finite_differences,
    layouts_do_not_change_results_and_gradients,
    f16_and_bf16_match_f32_and_gradients_keep_their_dtype,
    calls_have_the_cost_that_their_records_state,
    results_of_a_row_do_not_depend_on_the_number_of_rows,
    wrong_inputs_are_refused_by_name,
];

/// Returns a record's result, its inputs as leaves, and their gradients for the cotangent `1, 2, 3, ...` (in tenths).
fn gradients(case: &OpCase, inputs: &[Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
    let leaves = leaves(inputs)?;
    let out = case.run(&leaves)?;
    ensure!(out.requires_grad(), "the result has no history");
    out.backward_with(&cotangent(&out)?)?;
    let mut grads = Vec::new();
    for (i, leaf) in leaves.iter().enumerate().filter(|(_, t)| t.dtype().is_float()) {
        let grad = leaf.grad().with_context(|| format!("no gradient reaches input {i}"))?;
        ensure!(grad.shape() == leaf.shape(), "the gradient of input {i} has shape {:?}", grad.shape());
        ensure!(grad.dtype() == leaf.dtype(), "the gradient of input {i} has type {}", grad.dtype());
        grads.push(grad);
    }
    Ok((out.detach(), grads))
}

fn leaves(inputs: &[Tensor]) -> CoreResult<Vec<Tensor>> {
    let leaf = |t: &Tensor| if t.dtype().is_float() { t.to_leaf() } else { Ok(t.clone()) };
    inputs.iter().map(leaf).collect()
}

fn cotangent(out: &Tensor) -> Result<Tensor> {
    let values: Vec<f32> = (0..out.numel()).map(|i| (i % 17) as f32 * 0.1 + 0.1).collect();
    Ok(Tensor::from_slice(&values, out.shape(), out.device())?.to_dtype(out.dtype())?)
}

/// Returns a record's result, and its gradients if it has any.
fn all(case: &OpCase, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    if !case.has_gradient {
        return Ok(vec![case.run(inputs)?]);
    }
    let (out, mut all) = gradients(case, inputs)?;
    all.insert(0, out);
    Ok(all)
}

fn every_input_gets_a_gradient_and_the_same_bits_again(device: &Device) -> Result<()> {
    for case in catalog::cases() {
        let inputs = case.inputs(DType::F32, device)?;
        let results = all(case, &inputs).with_context(|| case.name)?;
        for (k, (a, b)) in results.iter().zip(all(case, &inputs)?).enumerate() {
            ensure_same_bits(&b, a).with_context(|| format!("{} again: tensor {k}", case.name))?;
        }
        if case.has_gradient {
            continue;
        }
        // A gradient that would be lost is an error; bool and integer results, and factories, have none.
        let result = case.run(&leaves(&inputs)?);
        let fine = match &result {
            Err(Error::NoGradient { .. }) => true,
            Ok(out) => (case.is_factory || !out.dtype().is_float()) && !out.requires_grad(),
            Err(_) => false,
        };
        ensure!(fine, "{}: {result:?} for an input that requires a gradient", case.name);
    }
    Ok(())
}

/// Operations whose gradient is not the derivative: straight-through rounding, weighted gradients, constant parts.
const NO_DERIVATIVES: &[&str] = &["to_dtype", "embedding by frequency", "embedding_renorm_"];

/// Uses f64 if the device and the operation support it, and compares the f32 gradient with the f64 one; otherwise
/// f32. In f64, the step is too small to cross a kink or a jump.
fn gradients_are_finite_differences(device: &Device) -> Result<()> {
    for case in catalog::cases().filter(|c| c.has_gradient && !NO_DERIVATIVES.contains(&c.name)) {
        let single = case.inputs(DType::F32, device)?;
        let (_, rounded) = gradients(case, &single).with_context(|| case.name)?;
        let double = case.inputs_f64(device)?;
        let exact = double.is_some();
        if !exact && !case.is_smooth {
            continue;
        }
        let (inputs, h, relative, absolute) = match double {
            Some(inputs) if !case.is_smooth => (inputs, 1e-6, 1e-5, 1e-6),
            Some(inputs) => (inputs, 1e-4, 1e-6, 1e-6),
            None => (single, 0.01, 0.01, 1e-3),
        };
        let (out, grads) = gradients(case, &inputs).with_context(|| case.name)?;
        let weights = cotangent(&out)?.to_f64s()?;
        let mut grads = grads.iter().zip(&rounded);
        for (k, input) in inputs.iter().enumerate().filter(|(_, t)| t.dtype().is_float()) {
            let describe = || format!("{} of {} by input {k}", case.name, input.dtype());
            let (grad, rounded) = grads.next().context("fewer gradients than inputs")?;
            let grad = grad.to_f64s()?;
            // Compares along one direction: the weighted sum over all elements.
            let direction: Vec<f64> = (0..input.numel()).map(|i| [1.0, -0.5, 0.25][i % 3]).collect();
            let values = input.to_f64s()?;
            let along = |h: f64| -> Result<f64> {
                let moved = values.iter().zip(&direction).map(|(v, d)| v + h * d);
                let mut inputs = inputs.clone();
                inputs[k] = match input.dtype() {
                    DType::F64 => Tensor::from_slice(&moved.collect::<Vec<f64>>(), input.shape(), device)?,
                    _ => Tensor::from_slice(
                        &moved.map(|v| v as f32).collect::<Vec<_>>(),
                        input.shape(),
                        device,
                    )?,
                };
                let out = case.run(&inputs)?.to_f64s()?;
                Ok(out.iter().zip(&weights).map(|(y, w)| y * w).sum())
            };
            let slope = (along(h)? - along(-h)?) / (2.0 * h);
            let expected: f64 = grad.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let scale: f64 = grad.iter().map(|g| g.abs()).sum();
            ensure_close(&[slope], &[expected], 0.0, relative * scale + absolute).with_context(describe)?;
            if exact {
                let largest = grad.iter().fold(0.0, |a: f64, g| a.max(g.abs()));
                ensure_close(&rounded.to_f64s()?, &grad, 1e-4, 1e-5 * largest + 1e-6).with_context(|| {
                    format!("the gradient of {} by input {k} in f32, compared with f64", case.name)
                })?;
            }
        }
    }
    Ok(())
}

/// Returns a tensor of equal values with other strides, at an offset of a larger buffer.
fn strided(t: &Tensor) -> CoreResult<Tensor> {
    if t.rank() == 0 {
        return Ok(t.clone());
    }
    let order: Vec<isize> = (0..t.rank() as isize).rev().collect();
    let padded = t.permute(&order)?.contiguous()?;
    let wider = forebay::ops::cat(&[&padded, &padded], -1)?;
    let extent = t.shape()[0];
    wider.narrow(-1, extent, extent)?.permute(&order)
}

/// Broadcasts the first element of the last dimension larger than 1 with stride 0.
fn repeated(t: &Tensor) -> CoreResult<Tensor> {
    match t.shape().iter().rposition(|&extent| extent > 1) {
        Some(dim) => t.narrow(dim as isize, 0, 1)?.broadcast_to(t.shape()),
        None => Ok(t.clone()),
    }
}

fn layouts_do_not_change_results_and_gradients(device: &Device) -> Result<()> {
    for case in catalog::cases() {
        let dense = case.inputs(DType::F32, device)?;
        let each = |f: fn(&Tensor) -> CoreResult<Tensor>, of: &[Tensor]| {
            of.iter().map(f).collect::<CoreResult<Vec<_>>>()
        };
        let copied = each(|t| repeated(t)?.copy(), &dense)?;
        for (what, dense, other) in [
            ("transposed with an offset", &dense, each(strided, &dense)?),
            ("of stride 0", &copied, each(repeated, &dense)?),
        ] {
            let describe = || format!("{} of inputs {what}", case.name);
            let (a, b) =
                (all(case, dense).with_context(describe)?, all(case, &other).with_context(describe)?);
            for (k, (x, y)) in b.iter().zip(&a).enumerate() {
                ensure_close(&x.to_f64s()?, &y.to_f64s()?, 1.3e-6, 1e-5).with_context(|| {
                    format!("{}: {}", describe(), if k == 0 { "the result" } else { "a gradient" })
                })?;
            }
        }
    }
    Ok(())
}

/// Compares with f32 from the same rounded inputs, within the record's tolerance for the type.
fn f16_and_bf16_match_f32_and_gradients_keep_their_dtype(device: &Device) -> Result<()> {
    let mut wide = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for case in catalog::cases().filter(|c| c.supports_half) {
            let inputs = case.inputs(dtype, device)?;
            let results = all(case, &inputs).with_context(|| format!("{} of {dtype}", case.name))?;
            // Random values depend on the type.
            if case.is_factory || !results[0].dtype().is_float() || results[0].dtype() != dtype {
                continue;
            }
            let float =
                |t: &Tensor| if t.dtype().is_float() { t.to_dtype(DType::F32) } else { Ok(t.clone()) };
            let inputs = inputs.iter().map(float).collect::<CoreResult<Vec<_>>>()?;
            let expected = case.run(&inputs)?.to_f64s()?;
            let (absolute, relative) = case.tolerance(dtype);
            if let Err(error) = ensure_close(&results[0].to_f64s()?, &expected, relative, absolute) {
                wide.push(format!("{} of {dtype}: {error}", case.name));
            }
        }
    }
    ensure!(wide.is_empty(), "not within their tolerance: {}", wide.join("; "));
    Ok(())
}

/// No call moves less than its record states, and its products have the stated operations. The null device counts.
fn calls_have_the_cost_that_their_records_state(_: &Device) -> Result<()> {
    let _no_grad = no_grad();
    let mut wrong = Vec::new();
    for case in catalog::cases() {
        let backend = Arc::new(NullBackend::new(CardProfile::default()));
        let device = Device::new(backend.clone())?;
        // Rows of column matrices are padded.
        device.set_im2col_max_bytes(Some(0));
        let inputs = case.inputs(DType::F32, &device)?;
        device.synchronize()?;
        let before = backend.estimated_work();
        let out = case.run(&inputs)?;
        device.synchronize()?;
        let work = backend.estimated_work() - before;
        let (bytes, flops) = (case.bytes(&inputs, &out), case.flops(&inputs, &out).unwrap_or(0));
        // Products that bypass the library are not counted; of several declined ones, only the first is.
        let fits = work.flops == 0.0 || (flops as f64 / work.flops).fract() == 0.0 && flops > 0;
        if work.bytes < bytes || !fits {
            let seen = (work.bytes, work.flops);
            wrong.push(format!("{}: {bytes} bytes and {flops} operations, not {seen:?}", case.name));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

/// Few rows, around the widths of vectors and of workgroups.
const LINES: [usize; 6] = [1, 2, 3, 7, 51, 257];
/// More than the 65,535 workgroups of a dimension. Elementwise kernels have their own test with a thousand times as
/// many elements, in the topic `pointwise`.
const MANY: usize = 65_601;

fn results_of_a_row_do_not_depend_on_the_number_of_rows(device: &Device) -> Result<()> {
    let _no_grad = no_grad();
    for case in catalog::cases().filter(|c| c.batched_inputs != 0) {
        let inputs = case.inputs(DType::F32, device)?;
        let expected = case.run(&inputs)?;
        let lines = expected.shape()[0];
        for n in LINES.into_iter().chain((!case.is_elementwise).then_some(MANY)) {
            // Repeats the record's rows up to the required number.
            let pick: Vec<i64> = (0..n).map(|i| (i % lines) as i64).collect();
            let pick = Tensor::from_slice(&pick, [n], device)?;
            let mut many = inputs.clone();
            for (k, t) in many.iter_mut().enumerate().filter(|(k, _)| case.batched_inputs >> k & 1 == 1) {
                *t = t.index_select(0, &pick).with_context(|| format!("{}: input {k}", case.name))?;
            }
            let describe = || format!("{} of {n} lines", case.name);
            let got = case.run(&many).with_context(describe)?;
            let wanted = expected.index_select(0, &pick)?;
            ensure!(
                got.shape() == wanted.shape() && got.dtype() == wanted.dtype(),
                "{}: {got:?}",
                describe()
            );
            // Compared on the device, which counts the differences beyond the tolerance.
            let (a, b) = (got.to_dtype(DType::F32)?, wanted.to_dtype(DType::F32)?);
            let bound = b.abs()?.mul(1e-5)?.add(1e-5)?;
            let same = a.isnan()?.logical_and(&b.isnan()?)?;
            let same = same.logical_or(&a.sub(&b)?.abs()?.le(&bound)?)?.logical_or(&a.eq(&b)?)?;
            let wrong = same.logical_not()?.count_nonzero(())?.to_f64s()?[0];
            ensure!(wrong == 0.0, "{}: {wrong} elements differ", describe());
        }
    }
    Ok(())
}

/// Replaces one input by an invalid one: a result or an error that names the operation is accepted, a panic is not.
/// The null device makes all checks without kernels.
fn wrong_inputs_are_refused_by_name(_: &Device) -> Result<()> {
    let device = Device::null(CardProfile::default());
    let elsewhere = Device::null(CardProfile { name: "another".into(), ..CardProfile::default() });
    let mut refused = 0;
    for case in catalog::cases() {
        let inputs = case.inputs(DType::F32, &device)?;
        for k in 0..inputs.len() {
            let t = &inputs[k];
            let last = t.rank() as isize - 1;
            let mut others = vec![
                ("one dimension more", t.unsqueeze(0)?),
                ("two dimensions more", t.unsqueeze(0)?.unsqueeze(0)?),
                ("flat", t.reshape([t.numel()])?),
                ("no dimensions", Tensor::full((), 1.0, t.dtype(), &device)?),
                ("no elements", Tensor::zeros([0], t.dtype(), &device)?),
                ("no lines", t.narrow(0, 0, 0)?),
                ("a longer last dimension", forebay::ops::cat(&[t, t], last)?),
                ("no last dimension", t.narrow(last, 0, 0)?),
                ("bool", t.ne(0.0)?),
                ("i32", t.to_dtype(DType::I32)?),
                ("u8", t.to_dtype(DType::U8)?),
                ("i64", t.to_dtype(DType::I64)?),
                ("f64", t.to_dtype(DType::F64)?),
                ("f16", t.to_dtype(DType::F16)?),
                ("8 bits", t.to_dtype(DType::F32)?.to_dtype(DType::F8E4M3)?),
            ];
            if inputs.len() > 1 {
                others.push(("elsewhere", t.to_device(&elsewhere)?));
            }
            for (what, other) in others {
                let mut wrong = inputs.clone();
                wrong[k] = other;
                let describe = || format!("{}: input {k} is {what}", case.name);
                match case.run(&wrong) {
                    Ok(_) => ensure!(what != "elsewhere" || case.is_factory, "{}, and it runs", describe()),
                    Err(error) => {
                        refused += 1;
                        let text = error.message();
                        let named = text
                            .split_once(": ")
                            .is_some_and(|(op, rest)| !op.is_empty() && !op.contains(' ') && rest.len() > 10);
                        ensure!(named && !text.contains('\n'), "{}: the message is `{text}`", describe());
                    }
                }
            }
        }
    }
    ensure!(refused > 500, "only {refused} inputs were refused");
    Ok(())
}
