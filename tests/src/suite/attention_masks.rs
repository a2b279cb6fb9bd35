//! Attention with masks: their types, shapes and gradients.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::ops::AttentionOptions;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::attention::{copies, leaf, leaves, normal, outcome, reference_attention, same_outcome};
use super::host_reference::{ensure_close, message};
use super::tests;

tests![
    a_mask_may_have_a_gradient,
    learned_masks_of_every_shape_use_the_kernels,
    masks_are_bool_or_float,
    a_mask_may_add_batch_dimensions,
];

fn a_mask_may_have_a_gradient(device: &Device) -> Result<()> {
    let [q, k, v] = leaves([&[2, 5, 4], &[2, 7, 4], &[2, 7, 4]], device)?;
    let mask = leaf(&normal(&[5, 7], DType::F32, device)?)?;
    let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
    let out = q.scaled_dot_product_attention(&k, &v, &options)?;
    out.mul(&out)?.sum_all()?.backward()?;
    let got = mask.grad().context("the mask has no gradient")?.to_f64s()?;
    let wide = leaf(&mask)?;
    let all = Tensor::ones([1], DType::F32, device)?;
    let expected = reference_attention(&copies(&[q, k, v])?, 0.5, &all, Some(&wide), None)?;
    expected.mul(&expected)?.sum_all()?.backward()?;
    ensure_close(&got, &wide.grad().context("a gradient")?.to_f64s()?, 1e-5, 1e-5)
}

/// Masks that batch entries, heads, queries or keys share get the sums of gradients, and weights are not in memory.
fn learned_masks_of_every_shape_use_the_kernels(device: &Device) -> Result<()> {
    let (lead, queries, keys) = ([3, 2, 4], 33, 40);
    let rows = |count: usize, width: usize| [&lead[..], &[count, width]].concat();
    let inputs = leaves([&rows(queries, 8), &rows(keys, 8), &rows(keys, 8)], device)?;
    let shapes: [&[usize]; 8] = [
        &[2, 4, queries, keys],
        &[4, queries, keys],
        &[queries, keys],
        &[2, 1, queries, keys],
        &[3, 1, 4, queries, keys],
        &[3, 2, 1, 1, keys],
        &[1, 1, 1, queries, 1],
        &[3, 2, 4, queries, keys],
    ];
    let all = Tensor::ones([1], DType::F32, device)?;
    for shape in shapes {
        for (dtype, relative, absolute) in [(DType::F32, 1e-4, 1e-4), (DType::BF16, 3e-2, 3e-2)] {
            let rounded = |t: &Tensor| -> Result<Tensor> { leaf(&t.detach().to_dtype(dtype)?) };
            let [q, k, v] = inputs.each_ref();
            let (q, k, v) = (&rounded(q)?, &rounded(k)?, &rounded(v)?);
            let mask = normal(shape, DType::F32, device)?;
            // Hidden keys have no weight, and their mask no gradient. No query is without keys.
            let hidden = mask.gt(if shape[shape.len() - 1] == keys { 1.8 } else { f64::INFINITY })?;
            let mask = rounded(&mask.masked_fill(&hidden, f64::NEG_INFINITY)?)?;
            let g = normal(&rows(queries, 8), dtype, device)?;
            let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
            let profiler = Profiler::start(device)?;
            q.scaled_dot_product_attention(k, v, &options)?.backward_with(&g)?;
            let profile = profiler.finish()?;
            let launched = |name: &str| profile.spans.iter().any(|span| span.name.contains(name));
            ensure!(launched("attention_mask_grad") && !launched("softmax"), "{shape:?} {dtype}: {profile}");
            let wide = |t: &Tensor| -> Result<Tensor> { leaf(&t.detach().to_dtype(DType::F32)?) };
            let copies = [wide(q)?, wide(k)?, wide(v)?];
            let bias = wide(&mask)?;
            let scale = 8f64.sqrt().recip();
            reference_attention(&copies, scale, &all, Some(&bias), None)?
                .backward_with(&g.to_dtype(DType::F32)?)?;
            for (of, to) in [q, k, v, &mask].into_iter().zip(copies.iter().chain([&bias])) {
                let (got, expected) = (of.grad().context("a gradient")?, to.grad().context("a gradient")?);
                let expected = expected.to_f64s()?;
                let largest = expected.iter().fold(1.0f64, |most, v| most.max(v.abs()));
                ensure!(got.dtype() == dtype, "{shape:?}: {}", got.dtype());
                ensure_close(&got.to_f64s()?, &expected, relative, absolute * largest)
                    .with_context(|| format!("{shape:?} {dtype} {:?}", of.shape()))?;
            }
        }
    }
    Ok(())
}

fn masks_are_bool_or_float(device: &Device) -> Result<()> {
    // Padding masks of tokenizers are integers, 1 for tokens, which would be added to the scores.
    for features in [8, 136] {
        let x = Tensor::zeros([1, 2, 4, features], DType::F32, device)?;
        for dtype in [DType::I32, DType::U8] {
            let mask = Tensor::ones([4, 4], dtype, device)?;
            let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
            let error = x.scaled_dot_product_attention(&x, &x, &options);
            ensure!(matches!(&error, Err(Error::DType { .. })), "{dtype}, {features}: accepted");
            ensure!(message(error)?.contains("`ne(0)`"), "{dtype}, {features}");
            let packed = x.reshape([1, 4, 2 * features])?;
            let packed = Tensor::cat(&[&packed, &packed, &packed], 2)?;
            ensure!(matches!(packed.qkv_attention(2, 2, &options), Err(Error::DType { .. })));
        }
    }
    Ok(())
}

fn a_mask_may_add_batch_dimensions(device: &Device) -> Result<()> {
    let shapes: [[&[usize]; 3]; 2] =
        [[&[1, 1, 5, 8], &[3, 2, 5, 6], &[3, 2]], [&[2, 5, 8], &[1, 3, 1, 5, 6], &[1, 3, 2]]];
    for [shape, mask_shape, batch] in shapes {
        let keys = [&shape[..shape.len() - 2], &[6, 8]].concat();
        let inputs = leaves([shape, &keys, &keys], device)?;
        let mask = normal(mask_shape, DType::F32, device)?;
        let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
        let result = inputs[0].scaled_dot_product_attention(&inputs[1], &inputs[2], &options)?;
        ensure!(*result.shape() == [batch, &[5, 8]].concat(), "{mask_shape:?}: {:?}", result.shape());
        let g = normal(result.shape(), DType::F32, device)?;
        let got = outcome(&inputs, &result, &g)?;
        // Expanded inputs, whose gradients are summed over the batch.
        let wides = copies(&inputs)?;
        let expand = |x: &Tensor, rows: usize| x.broadcast_to([batch, &[rows, 8]].concat());
        let result = expand(&wides[0], 5)?.scaled_dot_product_attention(
            &expand(&wides[1], 6)?,
            &expand(&wides[2], 6)?,
            &options,
        )?;
        same_outcome(&got, &outcome(&wides, &result, &g)?, 2e-5)
            .with_context(|| format!("{mask_shape:?}"))?;
    }
    let x = Tensor::zeros([2, 5, 8], DType::F32, device)?;
    for mask_shape in [&[5, 4][..], &[4, 5], &[3, 5, 5]] {
        let mask = Tensor::zeros(mask_shape, DType::F32, device)?;
        let options = AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() };
        let error = message(x.scaled_dot_product_attention(&x, &x, &options))?;
        ensure!(error.starts_with("scaled_dot_product_attention"), "{mask_shape:?}: {error}");
    }
    Ok(())
}
