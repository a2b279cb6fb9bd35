//! Attention of 12 heads of 64, causal: 8 x 1024 in every type, and about as many positions at other lengths in bf16.

use anyhow::Result;
use forebay::autograd;
use forebay::dtype::DType;
use forebay::ops::Attention;

use crate::timing::Bench;

pub(crate) fn attention(b: &Bench<'_>) -> Result<()> {
    let (heads, features) = if b.tiny { (2, 32) } else { (12, 64) };
    let (positions, usual) = if b.tiny { (128, 64) } else { (8192, 1024) };
    let lengths: &[usize] = if b.tiny { &[64] } else { &[128, 256, 512, 1024, 2048, 4096, 8192, 16_384] };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for &length in lengths.iter().filter(|&&length| dtype == DType::BF16 || length == usual) {
            let batch = (positions / length).max(1);
            let shape = [batch, heads, length, features];
            let [q, k, v] = [b.random(&shape, dtype)?, b.random(&shape, dtype)?, b.random(&shape, dtype)?];
            let options = Attention { is_causal: true, ..Attention::default() };
            // As they are commonly counted: half of the matrix, two products forward, seven with the gradients.
            let flops = 2.0 * (batch * heads * length * length * features) as f64;
            let name = format!("{batch}x{heads}x{length}x{features}");
            let inner = b.max_inner(4 * q.numel() * dtype.size());
            let t = b.time(inner, || Ok(q.scaled_dot_product_attention(&k, &v, &options)?))?;
            let rate = flops / t.median_ms / 1e9;
            b.emit_rate("attention_fwd_causal", &name, dtype.name(), &t, ("tflops", rate));
            let g = b.random(&shape, dtype)?;
            let leaves = [q.requires_grad_()?, k.requires_grad_()?, v.requires_grad_()?];
            let t = b.time(inner, || {
                let [q, k, v] = &leaves;
                let out = q.scaled_dot_product_attention(k, v, &options)?;
                autograd::grad(std::slice::from_ref(&out), std::slice::from_ref(&g), &leaves)?;
                Ok(out.detach())
            })?;
            let rate = 3.5 * flops / t.median_ms / 1e9;
            b.emit_rate("attention_fwd_bwd_causal", &name, dtype.name(), &t, ("tflops", rate));
        }
    }
    Ok(())
}
