//! Second derivatives: those of every operation against finite differences of first gradients, and applications
//! against PyTorch's values (tests/second_order).

use std::collections::BTreeMap;
use std::slice::from_ref;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{self, GradOptions, checkpoint};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::func;
use forebay::ops::{ConvolutionOptions, NormOptions, Pool2dOptions, Reduction, ScatterReduce};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits, ensure_values};
use super::tests;
use crate::catalog::{self, OpCase};

tests![
    every_operation_has_a_second_gradient,
    second_gradients_equal_differences_of_first_ones,
    create_graph_does_not_change_first_gradients,
    a_gradient_penalty_trains_as_in_pytorch,
    hessian_vector_products_match_pytorch,
    an_inner_optimisation_step_matches_pytorch,
    second_gradients_keep_their_dtypes_under_autocast,
    third_gradients_are_computed,
    leaves_accumulate_recorded_gradients,
    intermediate_results_have_gradients,
    only_nodes_that_lead_to_an_input_run,
    checkpoints_have_second_gradients,
    checkpoints_before_composed_gradients_run_once,
    functions_have_jacobians_and_hessians,
    distances_of_rows_to_themselves_have_second_gradients,
    gradients_of_empty_selections_have_gradients,
    invalid_requests_for_gradients_are_refused,
];

/// Operations whose first gradients have a kink near the inputs: one rectified element is near 0.
const KINKED: &[&str] = &["batch_norm_relu"];

fn leaves(case: &OpCase, device: &Device) -> Result<Vec<Tensor>> {
    let inputs = case.inputs(DType::F32, device)?;
    Ok(inputs
        .iter()
        .map(|t| if t.dtype().is_float() { t.to_leaf() } else { Ok(t.clone()) })
        .collect::<CoreResult<_>>()?)
}

fn floats(inputs: &[Tensor]) -> Vec<Tensor> {
    inputs.iter().filter(|t| t.dtype().is_float()).cloned().collect()
}

/// Returns distinct weights.
fn weights(shape: &[usize], start: f32, device: &Device) -> Result<Tensor> {
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i: usize| ((i * 5) % 13) as f32 * 0.1 + start).collect();
    Ok(Tensor::from_slice(&values, shape, device)?)
}

/// Returns the first gradients of a record for the seed `v`, and their weighted sum, to differentiate again.
fn first_gradients(
    case: &OpCase,
    inputs: &[Tensor],
    v: &Tensor,
    options: &GradOptions<'_>,
) -> Result<(Vec<Tensor>, Tensor)> {
    let y = case.run(inputs)?;
    let seeds = from_ref(v);
    let found =
        autograd::grad(&[y], &floats(inputs), &GradOptions { grad_outputs: Some(seeds), ..*options })?;
    let mut sum: Option<Tensor> = None;
    for (k, grad) in found.iter().enumerate() {
        let part = grad.mul(&weights(grad.shape(), 0.2 + 0.3 * k as f32, grad.device())?)?.sum_all()?;
        sum = Some(match sum {
            Some(sum) => sum.add(&part)?,
            None => part,
        });
    }
    Ok((found, sum.context("no float input")?))
}

fn seed(case: &OpCase, inputs: &[Tensor], device: &Device) -> Result<Tensor> {
    let _no_grad = autograd::no_grad();
    weights(case.run(inputs)?.shape(), -0.3, device)
}

fn every_operation_has_a_second_gradient(device: &Device) -> Result<()> {
    for case in catalog::cases().filter(|c| c.has_gradient) {
        let inputs = leaves(case, device)?;
        let v = seed(case, &inputs, device)?.to_leaf()?;
        let (_, sum) =
            first_gradients(case, &inputs, &v, &GradOptions::create_graph()).with_context(|| case.name)?;
        let zero = matches!(
            case.name.trim_end_matches('_'),
            "sign"
                | "floor"
                | "ceil"
                | "round"
                | "round_decimals"
                | "trunc"
                | "floor_divide"
                | "trunc_divide"
                | "cdist of 0"
        );
        if zero && !sum.requires_grad() {
            continue;
        }
        let mut to = floats(&inputs);
        to.push(v);
        let found = autograd::grad_allow_unused(from_ref(&sum), &to, &GradOptions::default());
        let found = found.with_context(|| case.name)?;
        // Gradients depend on the incoming gradient for every operation, unless they are zero.
        let reached = found.last().is_some_and(Option::is_some);
        ensure!(reached || zero, "{}: the second gradient does not reach the first's seed", case.name);
        for (grad, t) in found.iter().zip(&to) {
            let Some(grad) = grad else { continue };
            ensure!(
                grad.shape() == t.shape() && grad.dtype() == t.dtype() && !grad.requires_grad(),
                "{}: a second gradient is {} {:?}",
                case.name,
                grad.dtype(),
                grad.shape()
            );
        }
    }
    Ok(())
}

fn second_gradients_equal_differences_of_first_ones(device: &Device) -> Result<()> {
    for case in catalog::cases().filter(|c| c.has_gradient && c.is_smooth) {
        if KINKED.contains(&case.name) {
            continue;
        }
        let inputs = leaves(case, device)?;
        let v = seed(case, &inputs, device)?.to_leaf()?;
        let (_, sum) =
            first_gradients(case, &inputs, &v, &GradOptions::create_graph()).with_context(|| case.name)?;
        let mut all = inputs.clone();
        all.push(v);
        let to = floats(&all);
        let found =
            autograd::grad_allow_unused(&[sum], &to, &GradOptions::default()).with_context(|| case.name)?;
        let mut found = found.into_iter();
        for (k, t) in all.iter().enumerate().filter(|(_, t)| t.dtype().is_float()) {
            let grad = match found.next().flatten() {
                Some(grad) => grad.to_f64s()?,
                None => vec![0.0; t.numel()],
            };
            let values = t.to_vec::<f32>()?;
            let direction: Vec<f32> = (0..values.len()).map(|i| [1.0, -0.5, 0.25][i % 3]).collect();
            let h = 0.01;
            // Reference: finite differences of first-order gradients.
            let along = |h: f32| -> Result<f64> {
                let moved: Vec<f32> = values.iter().zip(&direction).map(|(v, d)| v + h * d).collect();
                let mut all = all.clone();
                all[k] = Tensor::from_slice(&moved, t.shape(), device)?.to_leaf()?;
                let v = all.pop().context("no seed")?.detach();
                let y = case.run(&all)?;
                let options = GradOptions { grad_outputs: Some(from_ref(&v)), ..GradOptions::default() };
                let mut sum = 0.0;
                for (k, grad) in autograd::grad(&[y], &floats(&all), &options)?.iter().enumerate() {
                    let weights = weights(grad.shape(), 0.2 + 0.3 * k as f32, device)?.to_f64s()?;
                    sum += grad.to_f64s()?.iter().zip(&weights).map(|(g, w)| g * w).sum::<f64>();
                }
                Ok(sum)
            };
            let slope = (along(h)? - along(-h)?) / (2.0 * f64::from(h));
            let expected: f64 = grad.iter().zip(&direction).map(|(g, d)| g * f64::from(*d)).sum();
            let scale: f64 = grad.iter().map(|g| g.abs()).sum();
            ensure_close(&[slope], &[expected], 0.0, 0.01 * scale + 3e-3)
                .with_context(|| format!("{} by input {k}", case.name))?;
        }
    }
    Ok(())
}

fn create_graph_does_not_change_first_gradients(device: &Device) -> Result<()> {
    for case in catalog::cases().filter(|c| c.has_gradient) {
        let inputs = leaves(case, device)?;
        let v = seed(case, &inputs, device)?;
        let (plain, _) = first_gradients(case, &inputs, &v, &GradOptions::default())?;
        let (recorded, _) = first_gradients(case, &inputs, &v, &GradOptions::create_graph())?;
        for (k, (a, b)) in recorded.iter().zip(&plain).enumerate() {
            ensure_close(&a.to_f64s()?, &b.to_f64s()?, 1e-4, 1e-4)
                .with_context(|| format!("{} by input {k}", case.name))?;
        }
    }
    Ok(())
}

/// Equals `numbers` in tests/second_order/values.py.
fn values(k: usize, shape: &[usize], device: &Device) -> Result<Tensor> {
    let n = shape.iter().product();
    let at =
        |i: usize| ((i as f64 * 0.618_033_988_749_895 + 0.11 + 0.37 * k as f64).fract() * 2.0 - 1.0) as f32;
    Ok(Tensor::from_slice(&(0..n).map(at).collect::<Vec<f32>>(), shape, device)?.to_leaf()?)
}

/// Compares the concatenated tensors with PyTorch's values.
fn ensure_pytorch_values(name: &str, found: &[&Tensor]) -> Result<()> {
    let values: BTreeMap<String, Vec<f64>> =
        serde_json::from_str(include_str!("../../second_order/values.json"))?;
    let expected = values.get(name).context("no values")?;
    let mut got = Vec::new();
    for t in found {
        got.extend(t.to_f64s()?);
    }
    ensure_close(&got, expected, 1e-4, 1e-5)
}

fn a_gradient_penalty_trains_as_in_pytorch(device: &Device) -> Result<()> {
    let (x, w1) = (values(0, &[4, 3], device)?, values(1, &[8, 3], device)?);
    let (b1, w2) = (values(2, &[8], device)?, values(3, &[1, 8], device)?);
    let score = x.linear(&w1, Some(&b1))?.silu()?.linear(&w2, None)?.sum_all()?;
    let slope = autograd::grad(&[score], from_ref(&x), &GradOptions::create_graph())?;
    let penalty = slope[0].norm(2.0, [1], false)?.sub(1.0)?.square()?.mean_all()?;
    penalty.backward()?;
    ensure!(x.grad().is_some(), "the penalty depends on x as well");
    let grads = [&w1, &b1, &w2].map(Tensor::grad);
    let [Some(w1), Some(b1), Some(w2)] = grads else { anyhow::bail!("a weight has no gradient") };
    ensure_pytorch_values("gradient_penalty", &[&penalty, &w1, &b1, &w2])
}

fn hessian_vector_products_match_pytorch(device: &Device) -> Result<()> {
    let x = values(0, &[2, 1, 6, 6], device)?.detach();
    let classes = Tensor::from_slice(&[1i64, 2], [2], device)?;
    let loss = |t: &[Tensor]| {
        let y = x
            .conv2d(&t[0], Some(&t[1]), &ConvolutionOptions { padding: 1.into(), ..Default::default() })?
            .tanh()?;
        let y = y.avg_pool2d(Pool2dOptions::new(2))?.flatten(1, -1)?.layer_norm([18], &Default::default())?;
        y.linear(&t[2], None)?.cross_entropy(&classes)
    };
    let shapes: [&[usize]; 3] = [&[2, 1, 3, 3], &[2], &[3, 18]];
    let of = |first: usize| {
        shapes
            .iter()
            .enumerate()
            .map(|(k, shape)| values(first + k, shape, device))
            .collect::<Result<Vec<_>>>()
    };
    let (value, product) = func::hvp(loss, &of(1)?, &of(4)?)?;
    let mut found = vec![&value];
    found.extend(&product);
    ensure_pytorch_values("hessian_vector", &found)
}

fn an_inner_optimisation_step_matches_pytorch(device: &Device) -> Result<()> {
    let (x, y) = (values(0, &[6, 4], device)?.detach(), values(1, &[6, 2], device)?.detach());
    let w = values(2, &[2, 4], device)?;
    let loss = |w: &Tensor, start: usize| {
        x.narrow(0, start, 3)?.linear(w, None)?.sigmoid()?.mse_loss(&y.narrow(0, start, 3)?, Reduction::Mean)
    };
    let slope = autograd::grad(&[loss(&w, 0)?], from_ref(&w), &GradOptions::create_graph())?;
    let after = loss(&w.sub(&slope[0].mul(0.5)?)?, 3)?;
    after.backward()?;
    ensure_pytorch_values("inner_step", &[&after, &w.grad().context("no gradient")?])
}

fn second_gradients_keep_their_dtypes_under_autocast(device: &Device) -> Result<()> {
    let run = |low: bool| -> Result<Vec<Tensor>> {
        let (x, w) = (values(0, &[6, 4], device)?, values(1, &[8, 4], device)?);
        let (b, scale) = (values(2, &[8], device)?, values(3, &[8], device)?);
        let y = {
            let _low = if low { Some(autocast(DType::BF16)?) } else { None };
            x.linear(&w, Some(&b))?
                .tanh()?
                .layer_norm([8], &NormOptions { weight: Some(&scale), ..Default::default() })?
                .matmul(&w)?
        };
        let y = y.to_dtype(DType::F32)?.square()?.mean_all()?;
        let slope = autograd::grad(&[y], from_ref(&x), &GradOptions::create_graph())?;
        ensure!(slope[0].dtype() == DType::F32);
        slope[0].square()?.sum_all()?.backward()?;
        let leaves = [x, w, b, scale];
        let grads: Vec<Tensor> = leaves.iter().filter_map(Tensor::grad).collect();
        ensure!(grads.len() == 4 && grads.iter().all(|g| g.dtype() == DType::F32), "{grads:?}");
        Ok(grads)
    };
    for (k, (low, plain)) in run(true)?.iter().zip(run(false)?).enumerate() {
        let expected = plain.to_f64s()?;
        let scale = expected.iter().fold(0.0f64, |max_abs, v| max_abs.max(v.abs()));
        ensure_close(&low.to_f64s()?, &expected, 0.0, 0.05 * scale).with_context(|| format!("input {k}"))?;
    }
    Ok(())
}

fn third_gradients_are_computed(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, -3.0], [3], device)?.to_leaf()?;
    let mut y = x.mul(&x)?.mul(&x)?.mul(&x)?.sum_all()?;
    // x⁴: 4x³, 12x², 24x
    for expected in [[4.0, 32.0, -108.0], [12.0, 48.0, 108.0], [24.0, 48.0, -72.0]] {
        let grad = autograd::grad(&[y], from_ref(&x), &GradOptions::create_graph())?.remove(0);
        ensure_values(&grad, &expected)?;
        y = grad.sum_all()?;
    }
    ensure!(x.grad().is_none());
    Ok(())
}

fn leaves_accumulate_recorded_gradients(device: &Device) -> Result<()> {
    let x = Tensor::full([2], 3.0, DType::F32, device)?.to_leaf()?;
    for _ in 0..2 {
        let y = x.mul(&x)?.sum_all()?;
        autograd::backward(&[y], &GradOptions::create_graph())?;
    }
    let grad = x.grad().context("no gradient")?;
    ensure_values(&grad, &[12.0; 2])?;
    x.set_grad(None);
    // The history contains both passes: 2x + 2x.
    grad.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no second gradient")?, &[4.0; 2])
}

fn intermediate_results_have_gradients(device: &Device) -> Result<()> {
    let x = Tensor::full([2], 3.0, DType::F32, device)?.to_leaf()?;
    let y = x.mul(2.0)?;
    let z = y.mul(&y)?.sum_all()?;
    let found = autograd::grad(&[z], &[y.clone(), x.clone()], &GradOptions::create_graph())?;
    ensure_values(&found[0], &[12.0; 2])?;
    ensure_values(&found[1], &[24.0; 2])?;
    // The gradient of y has a history that leads to x.
    ensure_values(&autograd::grad(&[found[0].sum_all()?], &[x], &GradOptions::default())?[0], &[4.0; 2])
}

fn only_nodes_that_lead_to_an_input_run(device: &Device) -> Result<()> {
    let x = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    let w = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    let side = w.exp()?;
    let y = x.mul(&side)?.sum_all()?;
    autograd::grad(from_ref(&y), &[x], &GradOptions::default())?;
    // The backward pass did not reach `exp`, so its saved tensors still exist.
    let found = autograd::grad(&[side.sum_all()?], from_ref(&w), &GradOptions::default())?;
    ensure_close(&found[0].to_f64s()?, &[std::f64::consts::E; 4], 1e-6, 0.0)?;
    ensure!(w.grad().is_none());
    Ok(())
}

fn checkpoints_have_second_gradients(device: &Device) -> Result<()> {
    let twice = |wrap: fn(&Tensor, &Tensor) -> CoreResult<Tensor>| -> Result<Vec<Tensor>> {
        device.manual_seed(3);
        let x = Tensor::randn([4, 4], DType::F32, device)?.to_leaf()?;
        let w = Tensor::randn([4, 4], DType::F32, device)?.to_leaf()?;
        let y = wrap(&wrap(&x, &w)?, &w)?.sum_all()?;
        let slope = autograd::grad(&[y], from_ref(&x), &GradOptions::create_graph())?;
        slope[0].square()?.sum_all()?.backward()?;
        Ok([x, w].iter().filter_map(Tensor::grad).collect())
    };
    let block = |x: &Tensor, w: &Tensor| x.matmul(w)?.tanh()?.dropout(0.25, true)?.mul(x);
    let plain = twice(block)?;
    let listed =
        twice(|x, w| checkpoint(&[x, w], |t| t[0].matmul(&t[1])?.tanh()?.dropout(0.25, true)?.mul(&t[0])))?;
    let captured = twice(|x, w| {
        let w = w.clone();
        checkpoint(&[x], move |t| t[0].matmul(&w)?.tanh()?.dropout(0.25, true)?.mul(&t[0]))
    })?;
    ensure!(plain.len() == 2 && listed.len() == 2 && captured.len() == 2, "a gradient is missing");
    for (k, expected) in plain.iter().enumerate() {
        let expected = expected.to_f64s()?;
        ensure_close(&listed[k].to_f64s()?, &expected, 1e-5, 1e-5).with_context(|| format!("listed, {k}"))?;
        ensure_close(&captured[k].to_f64s()?, &expected, 1e-5, 1e-5)
            .with_context(|| format!("captured, {k}"))?;
    }
    Ok(())
}

/// A recorded gradient composed of other operations ends at its own inputs; the outer pass continues there.
fn checkpoints_before_composed_gradients_run_once(device: &Device) -> Result<()> {
    let w = Tensor::from_slice(&[0.5f32, 2.0, -1.0, 0.25], [2, 2], device)?.to_leaf()?;
    let x = Tensor::from_slice(&[1.0f32, -2.0, 0.5, 3.0], [2, 2], device)?.to_leaf()?;
    let slope = |checkpointed: bool| -> Result<Tensor> {
        let captured = w.clone();
        let y = match checkpointed {
            true => checkpoint(&[&x], move |t| t[0].mul(&captured))?,
            false => x.mul(&w)?,
        };
        let z =
            y.layer_norm([2], &NormOptions { eps: 0.5, ..Default::default() })?.cdist(&x, 2.0)?.sum_all()?;
        Ok(autograd::grad(&[z], from_ref(&w), &GradOptions::create_graph())?.remove(0))
    };
    ensure_close(&slope(true)?.to_f64s()?, &slope(false)?.to_f64s()?, 1e-5, 1e-6)
}

fn functions_have_jacobians_and_hessians(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], device)?;
    let square = |t: &[Tensor]| t[0].mul(&t[0]);
    let v = Tensor::from_slice(&[1.0f32, 10.0, 100.0], [3], device)?;
    let (y, back) = func::vjp(square, from_ref(&x), &v)?;
    ensure_values(&y, &[1.0, 4.0, 9.0])?;
    ensure_values(&back[0], &[2.0, 40.0, 600.0])?;
    let (_, forth) = func::jvp(square, from_ref(&x), from_ref(&v))?;
    ensure_same_bits(&forth, &back[0])?;
    let jacobian = func::jacobian(|x| x.cumsum(0), &x)?;
    ensure_values(&jacobian, &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])?;
    let hessian = func::hessian(|x| x.prod(0, false), &x)?;
    ensure_values(&hessian, &[0.0, 3.0, 2.0, 3.0, 0.0, 1.0, 2.0, 1.0, 0.0])?;
    let (_, product) = func::hvp(|t| t[0].prod(0, false), from_ref(&x), from_ref(&v))?;
    ensure_values(&product[0], &[230.0, 103.0, 12.0])?;
    // Scatter products: two factors of zero, one index with a nonzero base, one without, two factors at one index.
    let factors = Tensor::from_slice(&[2.0f32, 0.0, 0.0, 3.0], [4], device)?;
    let (indices, to) =
        (Tensor::full([3], 5.0, DType::F32, device)?, Tensor::from_slice(&[0i32, 0, 0, 1], [4], device)?);
    for (include_self, mixed) in [(true, 10.0), (false, 2.0)] {
        let product =
            |x: &Tensor| indices.scatter_reduce(0, &to, x, ScatterReduce::Prod, include_self)?.sum_all();
        let mut expected = [0.0; 16];
        (expected[6], expected[9]) = (mixed, mixed);
        ensure_values(&func::hessian(product, &factors)?, &expected)?;
    }
    // The empty product is 1, and has no gradients.
    let nothing = Tensor::zeros([2, 0], DType::F32, device)?;
    ensure!(func::hessian(|x| x.prod(1, false)?.sum_all(), &nothing)?.shape() == [2, 0, 2, 0]);
    // The Hessian of a linear function is zero.
    ensure_values(&func::hessian(|x| x.sum_all(), &x)?, &[0.0; 9])
}

/// Gradient and second derivative of a zero distance are 0.
fn distances_of_rows_to_themselves_have_second_gradients(device: &Device) -> Result<()> {
    for p in [1.0, 2.0, 3.0, f64::INFINITY] {
        let x = values(0, &[3, 4], device)?;
        let y = x.cdist(&x, p)?.square()?.sum_all()?;
        let slope = autograd::grad(&[y], from_ref(&x), &GradOptions::create_graph())?;
        slope[0].square()?.sum_all()?.backward()?;
        let grad = x.grad().context("no second gradient")?.to_f64s()?;
        ensure!(grad.iter().all(|g| g.is_finite()) && grad.iter().any(|g| *g != 0.0), "p {p}: {grad:?}");
    }
    Ok(())
}

fn invalid_requests_for_gradients_are_refused(device: &Device) -> Result<()> {
    let x = Tensor::ones([2], DType::F32, device)?.to_leaf()?;
    let other = Tensor::ones([2], DType::F32, device)?.to_leaf()?;
    let text = |result: CoreResult<Vec<Tensor>>| match result {
        Ok(_) => Err(anyhow::anyhow!("the gradient was computed")),
        Err(error) => Ok(error.message()),
    };
    let y = x.exp()?;
    let unused = text(autograd::grad(&[y.sum_all()?], &[x.clone(), other], &GradOptions::default()))?;
    ensure!(unused.contains("no path leads from the outputs to input 1"), "{unused}");
    let plain = text(autograd::grad(&[x.exp()?.sum_all()?], &[x.detach()], &GradOptions::default()))?;
    ensure!(plain.contains("input 0 does not require a gradient"), "{plain}");
    let shape = text(autograd::grad(from_ref(&y), from_ref(&x), &GradOptions::default()))?;
    ensure!(shape.contains("is not a scalar"), "{shape}");
    let seeds = [Tensor::ones([3], DType::F32, device)?];
    let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
    let seed = text(autograd::grad(from_ref(&y), from_ref(&x), &options))?;
    ensure!(seed.contains("the gradient is f32 [3], the tensor f32 [2]"), "{seed}");
    Ok(())
}

/// The gradient of a selection of nothing is zero, and depends on the result's gradient as any other.
fn gradients_of_empty_selections_have_gradients(device: &Device) -> Result<()> {
    let x = Tensor::ones([3, 4], DType::F32, device)?.to_leaf()?;
    let along = Tensor::zeros([0, 4], DType::I32, device)?;
    let line = Tensor::zeros([0], DType::I32, device)?;
    let selections = [
        ("gather", x.gather(0, &along)?),
        ("index_select", x.index_select(0, &line)?),
        ("index", x.index(&[Some(&line)])?),
        ("embedding", x.embedding(&line, None)?),
        ("narrow", x.narrow(0, 1, 0)?),
        ("take_along_dim", x.take_along_dim(&along, 0)?),
    ];
    for (name, y) in selections {
        let g = y.zeros_like()?.to_leaf()?;
        let options = GradOptions { grad_outputs: Some(from_ref(&g)), ..GradOptions::create_graph() };
        let first = autograd::grad(&[&y], from_ref(&x), &options)?.swap_remove(0);
        ensure_values(&first, &[0.0; 12]).context(name)?;
        let second = autograd::grad(&[first.sum_all()?], from_ref(&g), &GradOptions::default())
            .with_context(|| format!("{name}: the gradient of its gradient"))?;
        ensure!(second[0].shape() == y.shape(), "{name}: {:?}", second[0].shape());
    }
    Ok(())
}
