//! Causal attention of 12 heads of 64 features: 8 x 1024 in every type, and other lengths with about as many
//! positions in bf16. The 8 x 1024 case in bf16 also runs with dropout and with all-true masks.

use anyhow::Result;
use forebay::autograd::{self, GradOptions};
use forebay::dtype::DType;
use forebay::ops::AttentionOptions;
use forebay::tensor::Tensor;

use crate::timing::{Bench, MAX_CALLS};

pub(crate) fn attention(b: &Bench<'_>) -> Result<()> {
    let (positions, usual) = if b.tiny { (128, 64) } else { (8192, 1024) };
    let lengths: &[usize] = if b.tiny { &[64] } else { &[128, 256, 512, 1024, 2048, 4096, 8192, 16_384] };
    let causal = AttentionOptions { is_causal: true, ..AttentionOptions::default() };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for &length in lengths.iter().filter(|&&length| dtype == DType::BF16 || length == usual) {
            bench_attention(b, "causal", ((positions / length).max(1), length), dtype, &causal)?;
        }
    }
    let shape = ((positions / usual).max(1), usual);
    let dropped = AttentionOptions { dropout_p: 0.1, ..causal };
    bench_attention(b, "causal_dropout", shape, DType::BF16, &dropped)?;
    let values = b.random_tensor(&[usual, usual], DType::F32)?;
    for (name, mask) in [
        ("mask_bool", values.gt(-2.0)?),
        ("mask_f32", values.clone()),
        ("mask_bf16", values.to_dtype(DType::BF16)?),
    ] {
        bench_attention(
            b,
            name,
            shape,
            DType::BF16,
            &AttentionOptions { attn_mask: Some(&mask), ..AttentionOptions::default() },
        )?;
    }
    Ok(())
}

/// Prints two lines: forward, and forward plus backward.
fn bench_attention(
    b: &Bench<'_>,
    kind: &str,
    (batch, length): (usize, usize),
    dtype: DType,
    options: &AttentionOptions<'_>,
) -> Result<()> {
    let (heads, features) = if b.tiny { (2, 32) } else { (12, 64) };
    let shape = [batch, heads, length, features];
    let [q, k, v] =
        [b.random_tensor(&shape, dtype)?, b.random_tensor(&shape, dtype)?, b.random_tensor(&shape, dtype)?];
    // The usual count: half of the matrix if causal, two matrix products forward, seven including backward.
    let seen = if options.is_causal { 2.0 } else { 4.0 };
    let flops = seen * (batch * heads * length * length * features) as f64;
    let name = format!("{batch}x{heads}x{length}x{features}");
    let t = b.time(MAX_CALLS, || Ok(q.scaled_dot_product_attention(&k, &v, options)?))?;
    let rate = flops / t.median_ms / 1e9;
    b.emit_rate(&format!("attention_fwd_{kind}"), &name, dtype.name(), &t, ("tflops", rate));
    let g = b.random_tensor(&shape, dtype)?;
    let leaves = [q.to_leaf()?, k.to_leaf()?, v.to_leaf()?];
    let t = b.time(MAX_CALLS, || -> Result<Tensor> {
        let [q, k, v] = &leaves;
        let out = q.scaled_dot_product_attention(k, v, options)?;
        let seeds = GradOptions { grad_outputs: Some(std::slice::from_ref(&g)), ..GradOptions::default() };
        autograd::grad(std::slice::from_ref(&out), &leaves, &seeds)?;
        Ok(out.detach())
    })?;
    let rate = 3.5 * flops / t.median_ms / 1e9;
    b.emit_rate(&format!("attention_fwd_bwd_{kind}"), &name, dtype.name(), &t, ("tflops", rate));
    Ok(())
}
