//! Fused attention compared with attention by an explicit matrix: for every option, size and layout.

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions, checkpoint};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::ops::AttentionOptions;
use forebay::tensor::Tensor;

use super::host_reference::ensure_close;
use super::tests;

tests![
    attention_equals_softmax_weights_times_values,
    attention_of_many_tiles_equals_softmax_weights_times_values,
    gradients_have_the_same_bits_in_every_run,
    attention_in_16_bits_is_accurate,
    masks_and_dropout_apply_in_16_bits,
    masks_of_every_kind_and_shape,
    fully_masked_queries_give_zeros,
    the_lowest_float_masks_less_than_infinity,
    a_packed_projection_equals_three_views,
    the_bias_gradient_of_a_packed_projection_is_a_sum_of_rows,
    replays_accumulate_like_eager_steps,
    memory_around_the_operands_is_not_read,
    no_attention_matrix_is_saved,
    dropout_masks_repeat_from_the_same_random_state,
    gradients_of_dropout_match_the_mask,
    dropout_keeps_the_mean_at_every_probability,
    replays_use_the_dropout_masks_of_eager_steps,
    empty_batches_broadcast,
    invalid_arguments_of_attention_are_refused,
];

/// Returns standard normal values of a shape and type.
pub(super) fn normal(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::randn(shape, DType::F32, device)?.to_dtype(dtype)?)
}

/// Returns a copy that is a leaf.
pub(super) fn leaf(x: &Tensor) -> Result<Tensor> {
    Ok(x.detach().copy()?.to_leaf()?)
}

/// Computes attention by a matrix in f32. `seen` is 1 where a query sees a key. q, k and v have equal head counts.
pub(super) fn reference_attention(
    [q, k, v]: &[Tensor; 3],
    scale: f64,
    seen: &Tensor,
    bias: Option<&Tensor>,
    keep: Option<&Tensor>,
) -> Result<Tensor> {
    let mut scores = q.matmul(&k.transpose(-2, -1)?)?.mul(scale)?;
    if let Some(bias) = bias {
        scores = scores.add(bias)?;
    }
    // For fully masked rows, multiplying by `seen` makes the weights 0.
    let weights = scores.add(&seen.sub(1.0)?.mul(1e30)?)?.softmax(-1)?.mul(seen)?;
    let weights = match keep {
        Some(keep) => weights.mul(keep)?,
        None => weights,
    };
    Ok(weights.matmul(v)?)
}

/// Returns 1 where query i sees key j.
fn window_mask(queries: usize, keys: usize, [left, right]: [usize; 2], device: &Device) -> Result<Tensor> {
    let sees = |i: usize, j: usize| j + left >= i && j <= i + right;
    let values: Vec<f32> =
        (0..queries * keys).map(|at| f32::from(u8::from(sees(at / keys, at % keys)))).collect();
    Ok(Tensor::from_slice(&values, [queries, keys], device)?)
}

/// Repeats each head `times` times in a row.
fn repeat(t: &Tensor, times: usize) -> Result<Tensor> {
    let &[batch, heads, rows, elements] = t.shape() else { anyhow::bail!("four dimensions") };
    Ok(t.unsqueeze(2)?.broadcast_to([batch, heads, times, rows, elements])?.reshape([
        batch,
        heads * times,
        rows,
        elements,
    ])?)
}

/// [batch, heads, kv heads, queries, keys, features, out features], causal or not, window.
type AttentionCase = ([usize; 7], bool, Option<[usize; 2]>);

const FAR: usize = 1 << 20;

/// Type and shape of a mask, and the dropout probability.
type MaskAndDropout<'a> = (Option<(DType, &'a [usize])>, f64);

/// Returns an additive mask, or a boolean one that is mostly true.
fn mask_of((dtype, shape): (DType, &[usize]), device: &Device) -> Result<Tensor> {
    let values = normal(shape, DType::F32, device)?;
    Ok(if dtype == DType::Bool { values.gt(-0.5)? } else { values.to_dtype(dtype)? })
}

/// Returns the scaled dropout mask of the next attention call in f32, by uniform attention over unit vectors.
fn next_dropout_mask([batch, heads, queries, keys]: [usize; 4], p: f64, device: &Device) -> Result<Tensor> {
    let state = device.random_state();
    let one_hot: Vec<f32> = (0..keys * keys).map(|i| f32::from(u8::from(i / keys == i % keys))).collect();
    let shape = [batch, heads, keys, keys];
    let units = Tensor::from_slice(&one_hot, [1, 1, keys, keys], device)?.broadcast_to(shape)?;
    let zeros = |rows: usize| Tensor::zeros([batch, heads, rows, 8], DType::F32, device);
    let options = AttentionOptions { dropout_p: p, ..AttentionOptions::default() };
    let weights = zeros(queries)?.scaled_dot_product_attention(&zeros(keys)?, &units, &options)?;
    device.set_random_state(state);
    // Probabilities are multiples of 2^-16.
    let p = (p * 65536.0).round() / 65536.0;
    Ok(weights.gt(0.0)?.to_dtype(DType::F32)?.mul(1.0 / (1.0 - p))?)
}

/// Compares values and gradients of one call with those of the explicit matrix.
fn compare(shape: AttentionCase, dtype: DType, device: &Device, tolerance: f64) -> Result<()> {
    compare_with((None, 0.0), shape, dtype, device, tolerance)
}

fn compare_with(
    (mask, dropout_p): MaskAndDropout<'_>,
    shape: AttentionCase,
    dtype: DType,
    device: &Device,
    tolerance: f64,
) -> Result<()> {
    let ([batch, heads, shared, queries, keys, features, out], is_causal, window) = shape;
    let inputs = [
        normal(&[batch, heads, queries, features], dtype, device)?,
        normal(&[batch, shared, keys, features], dtype, device)?,
        normal(&[batch, shared, keys, out], dtype, device)?,
    ];
    let g = normal(&[batch, heads, queries, out], dtype, device)?;
    let [q, k, v] = [leaf(&inputs[0])?, leaf(&inputs[1])?, leaf(&inputs[2])?];
    let mask = mask.map(|mask| mask_of(mask, device)).transpose()?;
    let values = mask.as_ref().map(|mask| mask.to_dtype(DType::F32)).transpose()?;
    let (lets, bias) = values
        .into_iter()
        .partition::<Vec<_>, _>(|_| mask.as_ref().is_some_and(|mask| mask.dtype() == DType::Bool));
    let keep = match dropout_p > 0.0 {
        true => Some(next_dropout_mask([batch, heads, queries, keys], dropout_p, device)?),
        false => None,
    };
    let attn_mask = mask.as_ref();
    let enable_gqa = heads != shared;
    let options = AttentionOptions {
        attn_mask,
        dropout_p,
        is_causal,
        window,
        enable_gqa,
        ..AttentionOptions::default()
    };
    let result = q.scaled_dot_product_attention(&k, &v, &options)?;
    result.backward_with(&g)?;

    let wide = |x: &Tensor| -> Result<Tensor> { leaf(&x.to_dtype(DType::F32)?) };
    let wides = [wide(&inputs[0])?, wide(&inputs[1])?, wide(&inputs[2])?];
    let [left, right] = window.unwrap_or([FAR, FAR]);
    let mut seen = window_mask(queries, keys, [left, if is_causal { 0 } else { right }], device)?;
    for lets in &lets {
        seen = seen.mul(lets)?;
    }
    let times = heads / shared;
    let all = [wides[0].clone(), repeat(&wides[1], times)?, repeat(&wides[2], times)?];
    let scale = 1.0 / (features as f64).sqrt();
    let expected = reference_attention(&all, scale, &seen, bias.first(), keep.as_ref())?;
    expected.backward_with(&g.to_dtype(DType::F32)?)?;

    let check = |name: &str, got: &Tensor, expected: &Tensor| -> Result<()> {
        ensure!(got.dtype() == dtype, "{name} is {}", got.dtype());
        // The error of a sum scales with its largest terms. With a single key, gradients are sums that cancel.
        let expected = expected.to_f64s()?;
        let largest = expected.iter().fold(0.1f64, |a, b| a.max(b.abs()));
        ensure_close(&got.to_f64s()?, &expected, tolerance, tolerance * largest).context(name.to_owned())
    };
    check("the result", &result, &expected)?;
    for (name, leaf, wide) in [("q", &q, &wides[0]), ("k", &k, &wides[1]), ("v", &v, &wides[2])] {
        let (got, expected) =
            (leaf.grad().context("a gradient is missing")?, wide.grad().context("a gradient is missing")?);
        check(&format!("the gradient of {name}"), &got, &expected)?;
    }
    Ok(())
}

const SHAPES: &[AttentionCase] = &[
    ([2, 3, 3, 64, 64, 64, 64], false, None),
    ([2, 2, 2, 100, 100, 64, 64], true, None),
    ([1, 4, 2, 67, 131, 32, 32], false, None),
    ([1, 6, 2, 131, 67, 24, 24], true, None),
    ([1, 2, 1, 150, 150, 64, 64], true, Some([40, 0])),
    ([1, 2, 2, 90, 90, 16, 16], false, Some([10, 20])),
    ([2, 1, 1, 1, 65, 128, 128], false, None),
    ([1, 1, 1, 65, 1, 8, 8], false, None),
    ([1, 2, 2, 33, 70, 128, 128], true, None),
    ([1, 2, 1, 40, 40, 80, 80], true, None),
    // Rows of different lengths, and several blocks of rows whose tiles are partly hidden.
    ([1, 3, 1, 70, 90, 4, 40], true, None),
    ([1, 2, 2, 270, 200, 12, 8], true, None),
    ([1, 2, 1, 40, 300, 8, 16], false, Some([30, 50])),
    // Shapes that only the portable kernels support.
    ([1, 2, 2, 35, 45, 7, 7], true, None),
    ([1, 3, 1, 20, 30, 5, 33], false, None),
    ([1, 1, 1, 10, 10, 1, 1], false, None),
    // Head sizes that no fused kernel supports.
    ([1, 1, 1, 9, 12, 130, 4], true, Some([3, 3])),
];

fn attention_equals_softmax_weights_times_values(device: &Device) -> Result<()> {
    for &shape in SHAPES {
        compare(shape, DType::F32, device, 2e-5).with_context(|| format!("{shape:?}"))?;
    }
    Ok(())
}

/// Several blocks of keys add to each tile of the queries' gradients, in a fixed order.
const TILED_SHAPES: &[AttentionCase] = &[
    ([1, 2, 2, 300, 300, 64, 64], true, None),
    ([2, 4, 1, 200, 330, 64, 64], false, None),
    ([1, 2, 1, 330, 200, 64, 64], true, None),
    ([1, 2, 2, 260, 260, 64, 64], true, Some([70, 0])),
    ([1, 2, 2, 280, 280, 32, 32], false, Some([40, 90])),
    // The last tiles of queries attend to no key.
    ([1, 2, 1, 400, 100, 64, 64], false, Some([20, 5])),
    ([1, 4, 2, 150, 150, 128, 128], true, None),
    ([1, 1, 1, 2, 130, 128, 128], false, None),
];

fn attention_of_many_tiles_equals_softmax_weights_times_values(device: &Device) -> Result<()> {
    for &shape in TILED_SHAPES {
        compare(shape, DType::F32, device, 2e-5).with_context(|| format!("{shape:?}"))?;
    }
    Ok(())
}

fn gradients_have_the_same_bits_in_every_run(device: &Device) -> Result<()> {
    for (heads, shared, length, features, is_causal) in [(3, 3, 330, 64, true), (4, 2, 200, 32, false)] {
        let q = normal(&[1, heads, length, features], DType::F32, device)?;
        let k = normal(&[1, shared, length, features], DType::F32, device)?;
        let v = normal(&[1, shared, length, features], DType::F32, device)?;
        let g = normal(&[1, heads, length, features], DType::F32, device)?;
        let options = AttentionOptions { is_causal, enable_gqa: true, ..AttentionOptions::default() };
        let run = || -> Result<Vec<Vec<f64>>> {
            let leaves = [leaf(&q)?, leaf(&k)?, leaf(&v)?];
            outcome(&leaves, &leaves[0].scaled_dot_product_attention(&leaves[1], &leaves[2], &options)?, &g)
        };
        let first = run()?;
        for repetition in 1..3 {
            ensure!(run()? == first, "{heads} heads of {features}: run {repetition} gives other bits");
        }
    }
    Ok(())
}

fn attention_in_16_bits_is_accurate(device: &Device) -> Result<()> {
    // Results are rounded once; tensor cores also round the weights.
    for (dtype, tolerance) in [(DType::F16, 2.5e-3), (DType::BF16, 2e-2)] {
        // Each shape and type needs its own kernel, so each type runs half of the shapes. A software driver compiles
        // for seconds, and its kernels differ from those in f32 by loads and stores only.
        let step = if device.info().software { 4 } else { 2 };
        for &shape in SHAPES.iter().skip(usize::from(dtype == DType::F16)).step_by(step) {
            compare(shape, dtype, device, tolerance).with_context(|| format!("{dtype} {shape:?}"))?;
        }
    }
    Ok(())
}

fn masks_and_dropout_apply_in_16_bits(device: &Device) -> Result<()> {
    use DType::{BF16, Bool, F16, F32};
    let window = Some([20, 30]);
    let cases: &[(DType, MaskAndDropout<'_>, AttentionCase)] = &[
        (BF16, (Some((Bool, &[100, 70])), 0.0), ([2, 4, 2, 100, 70, 64, 64], false, None)),
        (F16, (Some((F16, &[2, 1, 131])), 0.0), ([1, 2, 2, 67, 131, 40, 40], false, None)),
        (BF16, (Some((F32, &[2, 1, 150, 1])), 0.2), ([2, 2, 1, 150, 128, 128, 128], false, window)),
        (F16, (None, 0.3), ([2, 4, 2, 90, 100, 64, 64], true, None)),
        (BF16, (Some((BF16, &[1, 1, 75, 65])), 0.5), ([1, 2, 2, 75, 65, 32, 32], false, None)),
        // A mask of another float type than the inputs.
        (F16, (Some((BF16, &[33, 33])), 0.0), ([1, 1, 1, 33, 33, 64, 64], false, None)),
    ];
    // Masks whose tiles the copy engine of Hopper GPUs loads: shared, per head or per batch. The portable kernels load
    // all masks in one way.
    let copied: &[(DType, MaskAndDropout<'_>, AttentionCase)] = &[
        (BF16, (Some((F32, &[130, 136])), 0.0), ([1, 2, 1, 130, 136, 64, 64], false, None)),
        (F16, (Some((F16, &[2, 2, 70, 136])), 0.0), ([2, 2, 2, 70, 136, 64, 64], false, window)),
        (BF16, (Some((BF16, &[2, 1, 75, 136])), 0.2), ([2, 2, 1, 75, 136, 64, 64], false, None)),
        (BF16, (Some((F32, &[2, 70, 68])), 0.0), ([1, 2, 2, 70, 68, 128, 128], false, None)),
        (F16, (Some((F16, &[70, 72])), 0.0), ([1, 1, 1, 70, 72, 128, 128], false, None)),
    ];
    let copied = if device.info().software { &[] } else { copied };
    for &(dtype, extra, shape) in cases.iter().chain(copied) {
        let tolerance = if dtype == F16 { 2.5e-3 } else { 2e-2 };
        compare_with(extra, shape, dtype, device, tolerance)
            .with_context(|| format!("{dtype} {extra:?} {shape:?}"))?;
    }
    Ok(())
}

/// Returns the values of the result and of the gradients of three leaves.
pub(super) fn outcome(leaves: &[Tensor; 3], result: &Tensor, g: &Tensor) -> Result<Vec<Vec<f64>>> {
    result.backward_with(g)?;
    let mut all = vec![result.to_f64s()?];
    for leaf in leaves {
        all.push(leaf.grad().context("a gradient is missing")?.to_f64s()?);
    }
    Ok(all)
}

pub(super) fn same_outcome(got: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) -> Result<()> {
    for ((name, got), expected) in ["the result", "dq", "dk", "dv"].iter().zip(got).zip(expected) {
        ensure_close(got, expected, tolerance, tolerance).context(*name)?;
    }
    Ok(())
}

pub(super) fn leaves(shapes: [&[usize]; 3], device: &Device) -> Result<[Tensor; 3]> {
    let [q, k, v] = shapes.map(|shape| normal(shape, DType::F32, device).and_then(|x| leaf(&x)));
    Ok([q?, k?, v?])
}

pub(super) fn copies([q, k, v]: &[Tensor; 3]) -> Result<[Tensor; 3]> {
    Ok([leaf(q)?, leaf(k)?, leaf(v)?])
}

fn masks_of_every_kind_and_shape(device: &Device) -> Result<()> {
    let (queries, keys) = (37, 70);
    let shape = |rows: usize| [2, 3, rows, 20];
    let g = normal(&shape(queries), DType::F32, device)?;
    for mask_shape in [&[queries, keys][..], &[2, 1, queries, keys], &[3, 1, keys], &[2, 1, 1, keys], &[1, 1]]
    {
        let inputs = leaves([&shape(queries), &shape(keys), &shape(keys)], device)?;
        let mask = normal(mask_shape, DType::F32, device)?;
        let describe = || format!("{mask_shape:?}");

        let float = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
        let result = inputs[0].scaled_dot_product_attention(&inputs[1], &inputs[2], &float)?;
        let wides = copies(&inputs)?;
        let all = Tensor::ones([1], DType::F32, device)?;
        let expected = reference_attention(&wides, 1.0 / 20f64.sqrt(), &all, Some(&mask), None)?;
        let expected = outcome(&wides, &expected, &g)?;
        same_outcome(&outcome(&inputs, &result, &g)?, &expected, 2e-5).with_context(describe)?;

        let inputs = copies(&inputs)?;
        let lets = mask.gt(-0.5)?;
        let bool_mask = AttentionOptions {
            attn_mask: Some(&lets),
            scale: Some(0.3),
            window: Some([30, 50]),
            ..AttentionOptions::default()
        };
        let result = inputs[0].scaled_dot_product_attention(&inputs[1], &inputs[2], &bool_mask)?;
        let wides = copies(&inputs)?;
        let window = window_mask(queries, keys, [30, 50], device)?;
        let seen = lets.to_dtype(DType::F32)?.mul(&window)?;
        let expected = reference_attention(&wides, 0.3, &seen, None, None)?;
        let expected = outcome(&wides, &expected, &g)?;
        same_outcome(&outcome(&inputs, &result, &g)?, &expected, 2e-5).with_context(describe)?;
    }
    Ok(())
}

fn fully_masked_queries_give_zeros(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        // The second size has no fused kernel.
        for features in [16, 136] {
            let x = normal(&[1, 2, 6, features], dtype, device)?;
            let [q, k, v] = [leaf(&x)?, leaf(&x)?, leaf(&x)?];
            let mask = Tensor::from_slice(
                &[0.0f32, 0.0, f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY],
                [6, 1],
                device,
            )?;
            let mask = mask.to_dtype(dtype)?;
            let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
            let out = q.scaled_dot_product_attention(&k, &v, &options)?;
            out.sum_all()?.backward()?;
            for t in [&out, &q.grad().context("a gradient is missing")?] {
                for row in [2, 5] {
                    let row = t.select(2, row)?.to_f64s()?;
                    ensure!(row.iter().all(|&x| x == 0.0), "{dtype}, {features}: {row:?}");
                }
                ensure!(t.to_f64s()?.iter().all(|x| x.is_finite()), "{dtype}, {features}: not finite");
            }
            // More queries than keys: each sees only its own position and the previous one.
            let few = normal(&[1, 2, 3, features], dtype, device)?;
            let options = AttentionOptions { window: Some([1, 0]), ..AttentionOptions::default() };
            let out = q.detach().scaled_dot_product_attention(&few, &few, &options)?;
            let [seen, blind] = [out.narrow(2, 0, 4)?, out.narrow(2, 4, 2)?];
            ensure!(blind.to_f64s()?.iter().all(|&x| x == 0.0) && seen.to_f64s()?.iter().all(|&x| x != 0.0));
        }
    }
    Ok(())
}

fn the_lowest_float_masks_less_than_infinity(device: &Device) -> Result<()> {
    const HIDDEN: f64 = f64::NEG_INFINITY;
    let keys = 72;
    let cases = [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)];
    for (dtype, mask_dtype) in cases {
        // The lowest float of the mask's type.
        let lowest = if mask_dtype == DType::F32 { f64::from(f32::MIN) } else { -3.389_531_389_251_535_5e38 };
        // Queries that attend to all keys equally, to the first half equally, to key 3 alone, and to no key.
        let row = |query: usize, key: usize| match query {
            0 => lowest,
            1 => {
                if key < keys / 2 {
                    lowest
                } else {
                    HIDDEN
                }
            }
            2 => {
                if key == 3 {
                    0.0
                } else {
                    lowest
                }
            }
            _ => HIDDEN,
        };
        let values: Vec<f32> = (0..4 * keys).map(|i| row(i / keys, i % keys) as f32).collect();
        let mask = Tensor::from_slice(&values, [4, keys], device)?.to_dtype(mask_dtype)?;
        let [q, k, v] = [4, keys, keys].map(|rows| normal(&[1, 2, rows, 64], dtype, device));
        let [q, k, v] = [leaf(&q?)?, leaf(&k?)?, leaf(&v?)?];
        let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
        let out = q.scaled_dot_product_attention(&k, &v, &options)?;
        let wide = v.detach().to_dtype(DType::F32)?;
        let mean = |count: usize| -> Result<Tensor> { Ok(wide.narrow(2, 0, count)?.mean([2], true)?) };
        let third = wide.narrow(2, 3, 1)?;
        let expected = Tensor::cat(&[&mean(keys)?, &mean(keys / 2)?, &third, &third.mul(0.0)?], 2)?;
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
        ensure_close(&out.to_f64s()?, &expected.to_f64s()?, tolerance, tolerance)
            .with_context(|| format!("{dtype}, mask {mask_dtype}"))?;
        out.sum_all()?.backward()?;
        for t in [&q, &k, &v] {
            let grad = t.grad().context("a gradient is missing")?.to_f64s()?;
            ensure!(grad.iter().all(|x| x.is_finite()), "{dtype}, mask {mask_dtype}: not finite");
        }
    }
    Ok(())
}

fn a_packed_projection_equals_three_views(device: &Device) -> Result<()> {
    for (dtype, heads, shared, features) in
        [(DType::F32, 3, 3, 16), (DType::F32, 4, 2, 5), (DType::BF16, 4, 2, 64), (DType::F16, 2, 2, 7)]
    {
        let (batch, length, all) = (2, 41, heads + 2 * shared);
        let x = normal(&[batch, length, all * features], dtype, device)?;
        let g = normal(&[batch, length, heads * features], dtype, device)?;
        let options = AttentionOptions { is_causal: true, ..AttentionOptions::default() };
        let whole = leaf(&x)?;
        let out = whole.qkv_attention(heads, shared, &options)?;
        out.backward_with(&g)?;

        let parts = leaf(&x)?;
        let view = |start: usize, count: usize| {
            let part = parts.narrow(-1, start * features, count * features)?;
            part.reshape([batch, length, count, features])?.transpose(1, 2)
        };
        let (q, k, v) = (view(0, heads)?, view(heads, shared)?, view(heads + shared, shared)?);
        let options = AttentionOptions { enable_gqa: true, ..options };
        let expected = q.scaled_dot_product_attention(&k, &v, &options)?;
        let expected = expected.transpose(1, 2)?.reshape([batch, length, heads * features])?;
        expected.backward_with(&g)?;
        let describe = || format!("{dtype}, {heads} and {shared} heads of {features}");
        // Equal kernels in equal order.
        ensure!(out.to_f64s()? == expected.to_f64s()?, "{}", describe());
        let grad =
            |t: &Tensor| -> Result<Vec<f64>> { Ok(t.grad().context("a gradient is missing")?.to_f64s()?) };
        ensure_close(&grad(&whole)?, &grad(&parts)?, 1e-6, 1e-6).with_context(describe)?;
    }
    Ok(())
}

fn the_bias_gradient_of_a_packed_projection_is_a_sum_of_rows(device: &Device) -> Result<()> {
    // The backend's own kernels also compute the bias's gradient, over one block, several, or part of one.
    for (dtype, tolerance, batch, length, heads, shared, features) in [
        (DType::BF16, 2e-2, 2, 41, 4, 2, 64),
        (DType::BF16, 2e-2, 1, 130, 2, 1, 64),
        (DType::F16, 2.5e-3, 3, 192, 2, 2, 128),
        (DType::F16, 2.5e-3, 2, 70, 2, 1, 40),
    ] {
        // Each head size needs its own kernel, which software drivers compile slowly.
        if features != 64 && device.info().software {
            continue;
        }
        let (width, inputs) = ((heads + 2 * shared) * features, 8);
        let [x, weight, bias] = [[batch * length, inputs], [width, inputs], [1, width]]
            .map(|shape| normal(&shape, dtype, device));
        let (x, weight, bias) =
            (x?.reshape([batch, length, inputs])?, weight?, leaf(&bias?.reshape([width])?)?);
        let g = normal(&[batch, length, heads * features], dtype, device)?;
        let options = AttentionOptions { is_causal: true, ..AttentionOptions::default() };
        let qkv = x.linear(&weight, Some(&bias))?;
        qkv.qkv_attention(heads, shared, &options)?.backward_with(&g)?;
        let got = bias.grad().context("a gradient is missing")?.to_f64s()?;
        // Reference: the same values in f32, summed.
        let wide = leaf(&qkv.detach().to_dtype(DType::F32)?)?;
        wide.qkv_attention(heads, shared, &options)?.backward_with(&g.to_dtype(DType::F32)?)?;
        let expected = wide.grad().context("a gradient is missing")?.sum([0, 1], false)?.to_f64s()?;
        let max_abs = expected.iter().fold(0.0, |max_abs: f64, x| max_abs.max(x.abs()));
        ensure_close(&got, &expected, tolerance, tolerance * max_abs).with_context(|| {
            format!("{dtype}, {batch} x {length}, {heads} and {shared} heads of {features}")
        })?;
    }
    Ok(())
}

fn replays_accumulate_like_eager_steps(device: &Device) -> Result<()> {
    for dtype in [DType::BF16, DType::F32] {
        check_replays(dtype, device).with_context(|| dtype.to_string())?;
    }
    Ok(())
}

fn check_replays(dtype: DType, device: &Device) -> Result<()> {
    let (batch, length, heads, features) = (2, 70, 2, 64);
    let width = 3 * heads * features;
    let x = normal(&[batch, length, 16], dtype, device)?;
    let (weight, bias) =
        (leaf(&normal(&[width, 16], dtype, device)?)?, leaf(&normal(&[width], dtype, device)?)?);
    let step = || -> CoreResult<Tensor> {
        weight.set_grad(None);
        bias.set_grad(None);
        let options = AttentionOptions { is_causal: true, ..AttentionOptions::default() };
        x.linear(&weight, Some(&bias))?.qkv_attention(heads, heads, &options)?.sum_all()?.backward()?;
        let grad = |t: &Tensor| t.grad().ok_or(Error::backward("no gradient"));
        grad(&bias)?.to_dtype(DType::F32)?.add(&grad(&weight)?.to_dtype(DType::F32)?.sum([1], false)?)
    };
    let mut captured = device.capture(step)?;
    for factor in [1.0, -0.5] {
        x.mul_(factor)?;
        let expected = step()?.to_f64s()?;
        for _ in 0..2 {
            // The eager step's temporaries have been freed, and may belong to other tensors.
            let other = Tensor::full([1 << 16], f64::NAN, DType::F32, device)?;
            ensure!(captured.replay()?.to_f64s()? == expected, "after a change by {factor}");
            ensure!(other.to_f64s()?.iter().all(|x| x.is_nan()), "a replay wrote into another tensor");
        }
    }
    Ok(())
}

fn memory_around_the_operands_is_not_read(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let (rows, features) = (70, 64);
        let x = normal(&[1, 2, rows, features], dtype, device)?;
        // The same values, surrounded by NaN.
        let amid = |x: &Tensor| -> Result<Tensor> {
            let around = Tensor::full([1, 2, rows + 64, features], f64::NAN, dtype, device)?;
            around.narrow(2, 32, rows)?.copy_(x)?;
            Ok(around.narrow(2, 32, rows)?.detach().to_leaf()?)
        };
        let options = AttentionOptions { is_causal: true, ..AttentionOptions::default() };
        let run = |inputs: &[Tensor; 3]| -> Result<Vec<Vec<f64>>> {
            let out = inputs[0].scaled_dot_product_attention(&inputs[1], &inputs[2], &options)?;
            outcome(inputs, &out, &x)
        };
        let plain = run(&[leaf(&x)?, leaf(&x)?, leaf(&x)?])?;
        let inside = run(&[amid(&x)?, amid(&x)?, amid(&x)?])?;
        ensure!(plain == inside, "{dtype}: the same values elsewhere give others");
    }
    Ok(())
}

fn no_attention_matrix_is_saved(device: &Device) -> Result<()> {
    let (length, features) = (512, 64);
    let qkv = normal(&[1, length, 3 * features], DType::F32, device)?.to_leaf()?;
    let before = device.memory().allocated();
    device.pool().reset_peak_stats();
    let out =
        qkv.qkv_attention(1, 1, &AttentionOptions { is_causal: true, ..AttentionOptions::default() })?;
    let (result, line) = ((length * features * 4) as u64, (length * 4) as u64);
    let kept = device.memory().allocated() - before;
    ensure!(kept == result + line, "{kept} bytes are kept, expected {result} and {line}");
    let peak = device.memory().peak_allocated() - before;
    ensure!(peak == kept, "{peak} bytes at the peak of the forward pass, {kept} are kept");
    let g = out.ones_like()?;
    device.pool().reset_peak_stats();
    let before = device.memory().allocated();
    out.backward_with(&g)?;
    let peak = device.memory().peak_allocated() - before;
    let needed = 3 * result + 2 * line;
    ensure!(peak == needed, "{peak} bytes at the peak of the backward pass, expected {needed}");
    Ok(())
}

fn dropout_masks_repeat_from_the_same_random_state(device: &Device) -> Result<()> {
    let x = normal(&[2, 40, 3 * 48], DType::F32, device)?;
    let options = AttentionOptions { dropout_p: 0.3, is_causal: true, ..AttentionOptions::default() };
    let state = device.random_state();
    let plain = leaf(&x)?;
    let out = plain.qkv_attention(3, 3, &options)?;
    out.sum_all()?.backward()?;
    ensure!(device.random_state() != state, "dropout drew no random values");
    device.set_random_state(state);
    let again = leaf(&x)?;
    let mask_free = move |t: &[Tensor]| {
        let options = AttentionOptions { dropout_p: 0.3, is_causal: true, ..AttentionOptions::default() };
        t[0].qkv_attention(3, 3, &options)
    };
    let twice = checkpoint(&[&again], mask_free)?;
    twice.sum_all()?.backward()?;
    ensure!(out.to_f64s()? == twice.to_f64s()?, "other weights were dropped");
    let grad = |t: &Tensor| -> Result<Vec<f64>> { Ok(t.grad().context("a gradient is missing")?.to_f64s()?) };
    ensure!(grad(&plain)? == grad(&again)?, "the recomputation dropped other weights");
    let third = x.qkv_attention(3, 3, &options)?;
    ensure!(out.to_f64s()? != third.to_f64s()?, "the same weights were dropped twice");
    Ok(())
}

fn gradients_of_dropout_match_the_mask(device: &Device) -> Result<()> {
    let (heads, queries, keys, p) = (2, 50, 64, 0.25);
    let shape = |rows: usize| [1, heads, rows, 16];
    let inputs = leaves([&shape(queries), &shape(keys), &shape(keys)], device)?;
    let options = AttentionOptions { dropout_p: p, ..AttentionOptions::default() };
    let keep = next_dropout_mask([1, heads, queries, keys], p, device)?;
    let kept = keep.gt(0.0)?.to_dtype(DType::F32)?.mean_all()?.item()?;
    ensure!((kept - (1.0 - p)).abs() < 0.02, "{kept} of the weights are kept");
    let result = inputs[0].scaled_dot_product_attention(&inputs[1], &inputs[2], &options)?;
    let wides = copies(&inputs)?;
    let all = Tensor::ones([1], DType::F32, device)?;
    let expected = reference_attention(&wides, 0.25, &all, None, Some(&keep))?;
    let g = normal(&shape(queries), DType::F32, device)?;
    let expected = outcome(&wides, &expected, &g)?;
    same_outcome(&outcome(&inputs, &result, &g)?, &expected, 2e-5)
}

fn dropout_keeps_the_mean_at_every_probability(device: &Device) -> Result<()> {
    // Uniform attention over ones, so that a result is a mean of the dropout factors.
    let (queries, keys) = (256, 4096);
    let mean = |p: f64, dtype: DType| -> Result<(f64, f64)> {
        let options = AttentionOptions { dropout_p: p, ..AttentionOptions::default() };
        let zeros = |rows: usize| Tensor::zeros([1, 1, rows, 8], dtype, device);
        let ones = Tensor::ones([1, 1, keys, 8], dtype, device)?;
        let out = zeros(queries)?.scaled_dot_product_attention(&zeros(keys)?, &ones, &options)?;
        let out = out.to_dtype(DType::F32)?.select(3, 0)?;
        Ok((out.mean_all()?.item()?, out.amax((), false)?.item()?))
    };
    let draws = (queries * keys) as f64;
    for dtype in [DType::F32, DType::F64] {
        if !device.supports_dtype(dtype) {
            continue;
        }
        device.manual_seed(9);
        // 16 bits round the last of these probabilities below 1.
        for p in [1e-6, 0.1, 0.999, 0.9999, 0.99999] {
            let kept = 1.0 - ((p * 65536.0_f64).round() / 65536.0).min(1.0 - 1.0 / 65536.0);
            let deviation = ((1.0 - kept) / kept / draws).sqrt();
            let (got, _) = mean(p, dtype)?;
            ensure!((got - 1.0).abs() < 5.0 * deviation + 1e-5, "{p}: {got}, deviation {deviation}");
        }
        let (got, largest) = mean(1.0 - 1e-9, dtype)?;
        ensure!(got < 3.0 && largest < 100.0, "{got}, {largest}");
        ensure!(mean(1.0, dtype)? == (0.0, 0.0));
    }
    // As in `dropout`, a dropped value is not multiplied by 0, which would make an infinity NaN.
    let infinite = Tensor::full([1, 1, 2, 8], f64::INFINITY, DType::F32, device)?;
    let options = AttentionOptions { dropout_p: 1.0, ..AttentionOptions::default() };
    let one = Tensor::ones([1, 1, 2, 8], DType::F32, device)?;
    let out = infinite.scaled_dot_product_attention(&infinite, &one, &options)?;
    ensure!(out.to_f64s()?.iter().all(|&v| v == 0.0));
    Ok(())
}

fn replays_use_the_dropout_masks_of_eager_steps(device: &Device) -> Result<()> {
    let run = |captured: bool| -> Result<Vec<Vec<f64>>> {
        device.manual_seed(5);
        let x = leaf(&normal(&[2, 40, 3 * 64], DType::BF16, device)?)?;
        let g = normal(&[2, 40, 64], DType::BF16, device)?;
        let options = AttentionOptions { dropout_p: 0.3, is_causal: true, ..AttentionOptions::default() };
        let once = || -> CoreResult<(Tensor, Vec<Tensor>)> {
            let out = x.qkv_attention(1, 1, &options)?;
            let seeds =
                GradOptions { grad_outputs: Some(std::slice::from_ref(&g)), ..GradOptions::default() };
            let grads = autograd::grad(std::slice::from_ref(&out), std::slice::from_ref(&x), &seeds)?;
            Ok((out.detach(), grads))
        };
        let mut all = Vec::new();
        let mut note = |(out, grads): &(Tensor, Vec<Tensor>)| -> Result<()> {
            all.push(out.to_f64s()?);
            for grad in grads {
                all.push(grad.to_f64s()?);
            }
            Ok(())
        };
        if captured {
            let mut step = device.capture(once)?;
            note(&step.outputs())?;
            for _ in 0..2 {
                note(&step.replay()?)?;
            }
        } else {
            // A capture runs one eager step first.
            once()?;
            for _ in 0..3 {
                note(&once()?)?;
            }
        }
        Ok(all)
    };
    let (captured, eager) = (run(true)?, run(false)?);
    ensure!(captured.len() == 6 && captured == eager, "a replay drops other weights than an eager step");
    ensure!(eager[0] != eager[2], "the same weights were dropped twice");
    Ok(())
}

fn invalid_arguments_of_attention_are_refused(device: &Device) -> Result<()> {
    let x = Tensor::zeros([1, 3, 4, 8], DType::F32, device)?;
    let mask = Tensor::zeros([4, 4], DType::F32, device)?;
    let plain = AttentionOptions::default();
    let both = AttentionOptions { attn_mask: Some(&mask), is_causal: true, ..plain };
    ensure!(matches!(x.scaled_dot_product_attention(&x, &x, &both), Err(Error::Argument { .. })));
    let odd = AttentionOptions { dropout_p: 1.5, ..plain };
    ensure!(matches!(x.scaled_dot_product_attention(&x, &x, &odd), Err(Error::Argument { .. })));
    let narrow = x.narrow(3, 0, 5)?;
    ensure!(matches!(x.scaled_dot_product_attention(&narrow, &x, &plain), Err(Error::Shape { .. })));
    let short = x.narrow(2, 0, 3)?;
    ensure!(matches!(x.scaled_dot_product_attention(&x, &short, &plain), Err(Error::Shape { .. })));
    let two = Tensor::zeros([1, 2, 4, 8], DType::F32, device)?;
    let grouped = AttentionOptions { enable_gqa: true, ..plain };
    ensure!(matches!(x.scaled_dot_product_attention(&two, &two, &grouped), Err(Error::Shape { .. })));
    let half = x.to_dtype(DType::BF16)?;
    ensure!(matches!(x.scaled_dot_product_attention(&x, &half, &plain), Err(Error::DType { .. })));
    ensure!(matches!(
        two.narrow(1, 0, 1)?.select(1, 0)?.qkv_attention(3, 3, &plain),
        Err(Error::Argument { .. })
    ));
    let whole = x.to_dtype(DType::I32)?;
    ensure!(matches!(whole.scaled_dot_product_attention(&whole, &whole, &plain), Err(Error::DType { .. })));
    Ok(())
}

fn empty_batches_broadcast(device: &Device) -> Result<()> {
    let plain = AttentionOptions::default();
    for (batch, shared) in [(0, 1), (1, 0), (0, 0)] {
        let [q, k, v] = leaves([&[batch, 5, 8], &[shared, 6, 8], &[shared, 6, 8]], device)?;
        let out = q.scaled_dot_product_attention(&k, &v, &plain)?;
        ensure!(out.shape() == [0, 5, 8], "{batch} and {shared}: {:?}", out.shape());
        out.sum_all()?.backward()?;
        for t in [&q, &k, &v] {
            ensure!(t.grad().context("a gradient is missing")?.to_f64s()?.iter().all(|&x| x == 0.0));
        }
    }
    Ok(())
}
