//! Fused linear layers compared with their composition: values, gradients and second derivatives, in every type, with
//! sizes that the vendor's library supports and others.

use std::slice::from_ref;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{GradOptions, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::tests;

tests![
    linear_equals_a_product_and_a_sum,
    mlp_equals_its_composition,
    an_mlp_of_many_tiles_equals_its_composition,
    an_mlp_of_split_sums_equals_its_composition,
    an_mlp_without_gradients_has_the_same_bits,
    the_hidden_layer_of_an_mlp_is_one_product,
    products_accumulate_into_gradients,
    gradients_of_an_mlp_have_the_same_bits_each_time,
    gradients_accumulate_into_existing_ones,
    only_tensors_that_require_a_gradient_get_one,
    under_autocast_weights_and_their_gradients_stay_f32,
    wrong_shapes_are_named,
];

/// Rows, features, hidden features: multiples of 8, for the epilogues of the vendor's library, and others.
const SIZES: [[usize; 3]; 4] = [[64, 32, 128], [40, 24, 56], [5, 7, 9], [1, 3, 2]];

/// Returns the largest difference, relative to the largest value.
fn max_relative_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    ensure!(a.shape() == b.shape(), "{:?} and {:?}", a.shape(), b.shape());
    let to = |t: &Tensor| -> Result<Vec<f32>> { Ok(t.to_dtype(DType::F32)?.to_vec()?) };
    let (a, b) = (to(a)?, to(b)?);
    ensure!(a.iter().chain(&b).all(|x| x.is_finite()), "not finite");
    let max_abs = b.iter().fold(1e-3_f64, |max_abs, x| max_abs.max(f64::from(x.abs())));
    Ok(a.iter().zip(&b).fold(0.0_f64, |d, (x, y)| d.max(f64::from((x - y).abs()))) / max_abs)
}

/// Tolerance for rounding of results and intermediates, and for different orders of sums.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        _ => 2e-5,
    }
}

fn random(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::uniform(shape, -1.0, 1.0, DType::F32, device)?.to_dtype(dtype)?)
}

/// Returns x, a weight and a bias, another weight and bias; all require gradients.
fn operands([rows, features, hidden]: [usize; 3], dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
    let shapes: [&[usize]; 5] =
        [&[2, rows, features], &[hidden, features], &[hidden], &[features, hidden], &[features]];
    shapes.iter().map(|shape| Ok(random(shape, dtype, device)?.to_leaf()?)).collect()
}

/// Returns the gradients of `of` with respect to `leaves` for the incoming gradient `seed`, and clears them.
fn gradients(of: &Tensor, seed: &Tensor, leaves: &[Tensor]) -> Result<Vec<Tensor>> {
    of.backward_with(seed)?;
    leaves
        .iter()
        .map(|leaf| {
            let grad = leaf.grad().context("no gradient")?;
            ensure!(
                grad.dtype() == leaf.dtype() && grad.shape() == leaf.shape(),
                "a gradient has another type or shape than its leaf"
            );
            leaf.set_grad(None);
            Ok(grad)
        })
        .collect()
}

fn compare(one: (&Tensor, &[Tensor]), other: (&Tensor, &[Tensor]), bound: f64) -> Result<()> {
    let d = max_relative_difference(one.0, other.0)?;
    ensure!(d <= bound, "values are {d:.1e} apart, {bound:.1e} is allowed");
    for (k, (a, b)) in one.1.iter().zip(other.1).enumerate() {
        let d = max_relative_difference(a, b)?;
        ensure!(d <= bound, "gradient {k} is {d:.1e} apart, {bound:.1e} is allowed");
    }
    Ok(())
}

fn linear_equals_a_product_and_a_sum(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for sizes in SIZES {
            let all = operands(sizes, dtype, device)?;
            let [x, weight, bias, ..] = &all[..] else { unreachable!() };
            let y = x.linear(weight, Some(bias))?;
            let seed = random(y.shape(), dtype, device)?;
            let grads = gradients(&y, &seed, &all[..3])?;
            let made = x.matmul(&weight.t()?)?.add(bias)?;
            let expected = gradients(&made, &seed, &all[..3])?;
            compare((&y, &grads), (&made, &expected), bound(dtype))
                .with_context(|| format!("{dtype} {sizes:?}"))?;
        }
    }
    Ok(())
}

fn mlp_equals_its_composition(device: &Device) -> Result<()> {
    mlp_beside_its_parts(&[DType::F32, DType::F16, DType::BF16], &SIZES, device)
}

/// Sizes around the tiles of kernels with GELU's gradient in the epilogue: 128 x 256, sums in steps of 64.
fn an_mlp_of_many_tiles_equals_its_composition(device: &Device) -> Result<()> {
    let sizes = [[64, 64, 256], [68, 136, 520], [324, 200, 776]];
    mlp_beside_its_parts(&[DType::F16, DType::BF16], &sizes, device)
}

/// Long sums of few elements, which workgroups of portable kernels share: the last stage applies the epilogue.
fn an_mlp_of_split_sums_equals_its_composition(device: &Device) -> Result<()> {
    mlp_beside_its_parts(&[DType::F32, DType::F16, DType::BF16], &[[4, 2052, 12], [3, 2050, 7]], device)
}

/// Without gradients, portable kernels do not write the argument of GELU.
fn an_mlp_without_gradients_has_the_same_bits(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for sizes in SIZES.into_iter().chain([[68, 136, 520], [4, 2052, 12]]) {
            let all = operands(sizes, dtype, device)?;
            let mlp = || all[0].mlp(&all[1], &all[2], &all[3], &all[4]);
            let with_gradients = mlp()?;
            let without = {
                let _no_grad = no_grad();
                mlp()?
            };
            ensure!(with_gradients.requires_grad() && !without.requires_grad(), "{dtype} {sizes:?}");
            let off = with_gradients.detach().sub(&without)?.abs()?.max_all()?.item()?;
            ensure!(off == 0.0, "{dtype} {sizes:?}: {off} apart");
        }
    }
    Ok(())
}

/// Returns the kernels that `work` launches, without their variants.
fn launched_kernels(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let profiler = Profiler::start(device)?;
    work()?;
    let first_word = |name: &str| name.split(' ').next().unwrap_or_default().to_owned();
    Ok(profiler.finish()?.spans.iter().map(|span| first_word(&span.name)).collect())
}

fn the_hidden_layer_of_an_mlp_is_one_product(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if device.library_features().matmul && dtype == DType::F32 {
            // The library has no GELU of f32.
            continue;
        }
        let all = operands([64, 64, 128], dtype, device)?;
        let names = launched_kernels(device, || {
            all[0].mlp(&all[1], &all[2], &all[3], &all[4])?;
            Ok(())
        })?;
        ensure!(names.len() == 2 && names.iter().all(|name| name == "matmul"), "{dtype}: {names:?}");
    }
    Ok(())
}

fn products_accumulate_into_gradients(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // Tiles, single elements, and sums that workgroups share.
        for [rows, outputs, features] in [[64, 64, 32], [5, 7, 9], [2052, 4, 12]] {
            let x = random(&[rows, features], dtype, device)?;
            let weight = random(&[outputs, features], dtype, device)?.to_leaf()?;
            let seed = random(&[rows, outputs], dtype, device)?;
            let step = || -> Result<()> { Ok(x.linear(&weight, None)?.backward_with(&seed)?) };
            let what = || format!("{dtype} {rows} x {outputs} x {features}");
            let names = launched_kernels(device, step)?;
            let once = weight.grad().context("no gradient")?.copy()?;
            let names_again = launched_kernels(device, step)?;
            ensure!(names == names_again, "{}: {names:?}, then {names_again:?}", what());
            let d = max_relative_difference(&weight.grad().context("no gradient")?, &once.mul(2.0)?)?;
            ensure!(d <= bound(dtype), "{}: twice is {d:.1e} apart", what());
        }
    }
    Ok(())
}

/// Compares results and gradients with those of two linear layers and a GELU.
fn mlp_beside_its_parts(dtypes: &[DType], sizes: &[[usize; 3]], device: &Device) -> Result<()> {
    for &dtype in dtypes {
        for &sizes in sizes {
            let all = operands(sizes, dtype, device)?;
            let [x, up, up_bias, down, down_bias] = &all[..] else { unreachable!() };
            let y = x.mlp(up, up_bias, down, down_bias)?;
            let seed = random(y.shape(), dtype, device)?;
            let grads = gradients(&y, &seed, &all)?;
            let made = x.linear(up, Some(up_bias))?.gelu_tanh()?.linear(down, Some(down_bias))?;
            let expected = gradients(&made, &seed, &all)?;
            compare((&y, &grads), (&made, &expected), bound(dtype))
                .with_context(|| format!("{dtype} {sizes:?}"))?;
        }
    }
    Ok(())
}

fn gradients_of_an_mlp_have_the_same_bits_each_time(device: &Device) -> Result<()> {
    let (sizes, times) = if device.info().software { ([8, 16, 64], 3) } else { ([1024, 768, 3072], 200) };
    let all = operands(sizes, DType::BF16, device)?;
    let [x, up, up_bias, down, down_bias] = &all[..] else { unreachable!() };
    let seed = random(&[2, sizes[0], sizes[1]], DType::BF16, device)?;
    let step = || gradients(&x.mlp(up, up_bias, down, down_bias)?, &seed, &all);
    let first = step()?;
    for k in 0..times {
        for (now, first) in step()?.iter().zip(&first) {
            let off = now.sub(first)?.abs()?.max_all()?.item()?;
            ensure!(off == 0.0, "step {k}: gradients of {:?} are {off} apart", now.shape());
        }
    }
    Ok(())
}

fn gradients_accumulate_into_existing_ones(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for sizes in SIZES {
            let all = operands(sizes, dtype, device)?;
            let [x, up, up_bias, down, down_bias] = &all[..] else { unreachable!() };
            let step = || -> Result<Tensor> { Ok(x.mlp(up, up_bias, down, down_bias)?) };
            let seed = random(step()?.shape(), dtype, device)?;
            let once = gradients(&step()?, &seed, &all)?;
            for _ in 0..2 {
                step()?.backward_with(&seed)?;
            }
            for (leaf, once) in all.iter().zip(&once) {
                let d = max_relative_difference(&leaf.grad().context("no gradient")?, &once.mul(2.0)?)?;
                ensure!(d <= bound(dtype), "{dtype} {sizes:?}: twice is {d:.1e} apart");
            }
            // A leaf with two uses in one pass, and gradients that are returned instead of accumulated in leaves.
            let tied = |x: &Tensor| -> Result<Tensor> {
                Ok(x.linear(up, Some(up_bias))?.linear(down, None)?.linear(up, None)?)
            };
            let y = tied(x)?;
            let seed = random(y.shape(), dtype, device)?;
            up.set_grad(None);
            let seeds = GradOptions { grad_outputs: Some(from_ref(&seed)), ..GradOptions::default() };
            let apart_from_leaves = forebay::autograd::grad(&[y], from_ref(up), &seeds)?;
            ensure!(up.grad().is_none(), "`grad` has accumulated into the leaf");
            tied(x)?.backward_with(&seed)?;
            let (a, b) = (&apart_from_leaves[0], up.grad().context("the leaf has no gradient")?);
            let d = max_relative_difference(a, &b)?;
            ensure!(d <= bound(dtype), "{dtype} {sizes:?}: {d:.1e} apart");
        }
    }
    Ok(())
}

fn only_tensors_that_require_a_gradient_get_one(device: &Device) -> Result<()> {
    for wanted in 0..32_u32 {
        let all = operands([16, 8, 24], DType::F32, device)?;
        let wants = |k: usize| wanted >> k & 1 == 1;
        let mixed: Vec<Tensor> =
            all.iter().enumerate().map(|(k, t)| if wants(k) { t.clone() } else { t.detach() }).collect();
        let y = mixed[0].mlp(&mixed[1], &mixed[2], &mixed[3], &mixed[4])?;
        ensure!(y.requires_grad() == (wanted != 0), "{wanted:b}");
        if wanted == 0 {
            continue;
        }
        let seed = random(y.shape(), DType::F32, device)?;
        y.backward_with(&seed)?;
        let whole = all[0].mlp(&all[1], &all[2], &all[3], &all[4])?;
        for (k, t) in all.iter().enumerate() {
            let grad = t.grad();
            ensure!(grad.is_some() == wants(k), "{wanted:b}: input {k}");
            t.set_grad(None);
            let Some(grad) = grad else { continue };
            let expected = forebay::autograd::grad(
                &[all[0].mlp(&all[1], &all[2], &all[3], &all[4])?],
                from_ref(t),
                &GradOptions { grad_outputs: Some(from_ref(&seed)), ..GradOptions::default() },
            )?;
            ensure!(
                max_relative_difference(&grad, &expected[0])? <= bound(DType::F32),
                "{wanted:b}: input {k}"
            );
        }
        drop(whole);
    }
    Ok(())
}

fn under_autocast_weights_and_their_gradients_stay_f32(device: &Device) -> Result<()> {
    for low in [DType::BF16, DType::F16] {
        for sizes in SIZES {
            let all = operands(sizes, DType::F32, device)?;
            let [x, up, up_bias, down, down_bias] = &all[..] else { unreachable!() };
            let y = {
                let _autocast = autocast(low)?;
                x.mlp(up, up_bias, down, down_bias)?.linear(up, Some(up_bias))?
            };
            ensure!(y.dtype() == low, "{}", y.dtype());
            let seed = random(y.shape(), low, device)?;
            let grads = gradients(&y, &seed, &all)?;
            let full = x.mlp(up, up_bias, down, down_bias)?.linear(up, Some(up_bias))?;
            let expected = gradients(&full, &seed.to_dtype(DType::F32)?, &all)?;
            compare((&y, &grads), (&full, &expected), 2.0 * bound(low))
                .with_context(|| format!("{low} {sizes:?}"))?;
        }
    }
    Ok(())
}

fn wrong_shapes_are_named(device: &Device) -> Result<()> {
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, device);
    let (x, weight) = (ones(&[2, 3])?, ones(&[4, 3])?);
    let text = |result: forebay::error::Result<Tensor>| {
        result.err().map(|error| error.message()).unwrap_or_default()
    };
    let messages = [
        (text(x.linear(&ones(&[4, 5])?, None)), "takes 5 features"),
        (text(x.linear(&weight, Some(&ones(&[3])?))), "takes a bias of [4]"),
        (text(x.linear(&ones(&[4, 3, 1])?, None)), "a weight of [out, in] or [in]"),
        (text(x.linear(&weight.to_dtype(DType::BF16)?, None)), "cast the input"),
        (text(x.mlp(&weight, &ones(&[4])?, &ones(&[3, 5])?, &ones(&[3])?)), "takes 5 features"),
    ];
    for (error, part) in messages {
        ensure!(error.contains(part), "`{error}` lacks `{part}`");
    }
    Ok(())
}
