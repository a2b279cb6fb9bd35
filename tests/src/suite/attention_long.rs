//! Gradients of attention over long sequences, which some devices compute in one pass over the keys.

use anyhow::{Context, Result, ensure};
use forebay::backend::AttentionExtents;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::ops::AttentionOptions;
use forebay::tensor::Tensor;

use super::attention::{copies, leaf, normal, outcome};
use super::host_reference::ensure_close;
use super::{skip, tests};

tests![
    one_pass_over_long_sequences_equals_two,
    one_pass_sums_columns_of_gradients,
    replays_of_one_pass_have_the_bits_of_eager_steps,
];

/// Sizes of a call: batch, heads, kv heads, queries and keys; whether it is causal; its window.
type LongCase = (DType, [usize; 5], bool, Option<[usize; 2]>);

const HEAD_DIM: usize = 64;
const NO_ONE_PASS: &str = "the device computes all gradients of attention in two passes";

/// Lengths are no multiples of tiles, heads share keys, and the window leaves queries without keys.
const CASES: &[LongCase] = &[
    (DType::BF16, [1, 12, 12, 4096, 4096], true, None),
    (DType::BF16, [1, 14, 7, 4200, 4133], true, None),
    (DType::F16, [1, 12, 12, 2100, 2050], false, None),
    (DType::BF16, [2, 6, 6, 7100, 4500], false, Some([2500, 100])),
];

fn options(is_causal: bool, window: Option<[usize; 2]>) -> AttentionOptions<'static> {
    AttentionOptions { is_causal, window, enable_gqa: true, ..AttentionOptions::default() }
}

/// Returns the keys before and after its own position that a query attends to.
fn window_sides(is_causal: bool, window: Option<[usize; 2]>) -> [usize; 2] {
    let [left, right] = window.unwrap_or([1 << 20; 2]);
    [left, if is_causal { 0 } else { right }]
}

/// Returns the bytes of scratch memory of a case in one pass.
fn scratch_bytes((_, sizes, is_causal, window): LongCase) -> Option<u64> {
    let [batch, heads, kv_heads, queries, keys] = sizes.map(|x| x as u64);
    let window = window_sides(is_causal, window).map(|side| side as u64);
    let head_dim = HEAD_DIM as u64;
    AttentionExtents { batch, heads: [heads, kv_heads], queries, keys, head_dim, window }.one_pass_scratch()
}

fn one_pass_over_long_sequences_equals_two(device: &Device) -> Result<()> {
    if !device.library_features().one_pass_attention {
        return skip(NO_ONE_PASS);
    }
    for &case in CASES {
        let (dtype, [batch, heads, shared, queries, keys], is_causal, window) = case;
        let run = || -> Result<()> {
            let scratch = scratch_bytes(case).context("the case takes two passes")?;
            let of =
                |heads: usize, rows: usize| leaf(&normal(&[batch, heads, rows, HEAD_DIM], dtype, device)?);
            let inputs = [of(heads, queries)?, of(shared, keys)?, of(shared, keys)?];
            let g = normal(&[batch, heads, queries, HEAD_DIM], dtype, device)?;
            let attend =
                |[q, k, v]: &[Tensor; 3]| q.scaled_dot_product_attention(k, v, &options(is_causal, window));
            let result = attend(&inputs)?;
            let before = device.memory().allocated();
            device.pool().reset_peak_stats();
            let got = outcome(&inputs, &result, &g)?;
            let peak = device.memory().peak_allocated() - before;
            ensure!(peak > scratch, "{peak} bytes at the peak, less than the scratch memory of {scratch}");
            let again = copies(&inputs)?;
            ensure!(outcome(&again, &attend(&again)?, &g)? == got, "a second run has other bits");
            // Calls with a mask take two passes.
            let masked = copies(&inputs)?;
            let mask = Tensor::ones([1, keys], DType::F32, device)?.to_dtype(DType::Bool)?;
            let sides = Some(window_sides(is_causal, window));
            let with_mask = AttentionOptions { attn_mask: Some(&mask), ..options(false, sides) };
            let [q, k, v] = &masked;
            let result = q.scaled_dot_product_attention(k, v, &with_mask)?;
            let expected = outcome(&masked, &result, &g)?;
            let tolerance = if dtype == DType::F16 { 2.5e-3 } else { 2e-2 };
            for ((name, got), expected) in ["the result", "dq", "dk", "dv"].iter().zip(got).zip(expected) {
                let largest = expected.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
                ensure_close(&got, &expected, tolerance, tolerance * largest).context(*name)?;
            }
            Ok(())
        };
        run().with_context(|| format!("{case:?}"))?;
    }
    Ok(())
}

/// A projection with a bias, then attention over a long sequence. Returns the projected values.
fn project(x: &Tensor, weight: &Tensor, bias: &Tensor) -> CoreResult<(Tensor, Tensor)> {
    let qkv = x.linear(weight, Some(bias))?;
    let out = qkv.qkv_attention(12, 6, &options(true, None))?;
    Ok((qkv, out))
}

/// Returns an input of 8 features, and the weight and bias of its projection to q, k and v.
fn projection(length: usize, device: &Device) -> Result<[Tensor; 3]> {
    let (width, inputs) = (24 * HEAD_DIM, 8);
    let x = normal(&[1, length, inputs], DType::BF16, device)?;
    let weight = leaf(&normal(&[width, inputs], DType::BF16, device)?.mul(0.3)?)?;
    Ok([x, weight, leaf(&normal(&[width], DType::BF16, device)?)?])
}

const LENGTH: usize = 4330;

fn one_pass_sums_columns_of_gradients(device: &Device) -> Result<()> {
    if !device.library_features().one_pass_attention {
        return skip(NO_ONE_PASS);
    }
    let case = (DType::BF16, [1, 12, 6, LENGTH, LENGTH], true, None);
    ensure!(scratch_bytes(case).is_some(), "the case takes two passes");
    let [x, weight, bias] = projection(LENGTH, device)?;
    let (qkv, out) = project(&x, &weight, &bias)?;
    let g = normal(&[1, LENGTH, 12 * HEAD_DIM], DType::BF16, device)?;
    out.backward_with(&g)?;
    let got = bias.grad().context("a gradient is missing")?.to_f64s()?;
    // Reference: the same values in f32, summed.
    let wide = leaf(&qkv.detach().to_dtype(DType::F32)?)?;
    wide.qkv_attention(12, 6, &options(true, None))?.backward_with(&g.to_dtype(DType::F32)?)?;
    let expected = wide.grad().context("a gradient is missing")?.sum([0, 1], false)?.to_f64s()?;
    let largest = expected.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    ensure_close(&got, &expected, 2e-2, 2e-2 * largest)
}

fn replays_of_one_pass_have_the_bits_of_eager_steps(device: &Device) -> Result<()> {
    if !device.library_features().one_pass_attention {
        return skip(NO_ONE_PASS);
    }
    let [x, weight, bias] = projection(LENGTH, device)?;
    let step = || -> CoreResult<Tensor> {
        weight.set_grad(None);
        bias.set_grad(None);
        project(&x, &weight, &bias)?.1.sum_all()?.backward()?;
        let grad = |t: &Tensor| t.grad().ok_or(Error::backward("no gradient"));
        grad(&bias)?.to_dtype(DType::F32)?.add(&grad(&weight)?.to_dtype(DType::F32)?.sum([1], false)?)
    };
    let mut captured = device.capture(step)?;
    for factor in [1.0, -0.5] {
        x.mul_(factor)?;
        let expected = step()?.to_f64s()?;
        for _ in 0..2 {
            ensure!(captured.replay()?.to_f64s()? == expected, "after a change by {factor}");
        }
    }
    Ok(())
}
