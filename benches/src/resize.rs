//! Resizing, im2col, distances and embedding bags, with their gradients.

use anyhow::Result;
use forebay::dtype::DType;
use forebay::ops::{
    EmbeddingBagMode, EmbeddingBagOptions, Im2colOptions, InterpolateMode, InterpolateOptions,
};
use forebay::tensor::Tensor;

use crate::timing::{Bench, MAX_CALLS};

/// Times an operation alone, and with its backward pass; `bytes` is the memory traffic of the operation alone.
fn bench_forward_backward(
    b: &Bench<'_>,
    name: &str,
    x: &Tensor,
    bytes: usize,
    op: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let shape = x.shape().iter().map(usize::to_string).collect::<Vec<_>>().join("x");
    let gbps = |ms: f64, passes: f64| passes * bytes as f64 / ms / 1e6;
    let t = b.time(MAX_CALLS, || op(x))?;
    b.emit_rate(name, &shape, x.dtype().name(), &t, ("gbps", gbps(t.median_ms, 1.0)));
    let leaf = x.to_leaf()?;
    let seed = op(x)?.ones_like()?;
    let t = b.time(MAX_CALLS, || {
        leaf.set_grad(None);
        op(&leaf)?.backward_with(&seed)?;
        Ok(leaf.detach())
    })?;
    let name = format!("{name}, gradient");
    b.emit_rate(&name, &shape, x.dtype().name(), &t, ("gbps", gbps(t.median_ms, 2.0)));
    Ok(())
}

pub(crate) fn resize(b: &Bench<'_>) -> Result<()> {
    let (images, side) = if b.tiny { (1, 16) } else { (16, 128) };
    for dtype in [DType::F32, DType::BF16] {
        let x = b.random_tensor(&[images, 64, side, side], dtype)?;
        let bytes = 5 * x.numel() * dtype.size();
        for (name, mode) in [
            ("nearest", InterpolateMode::Nearest),
            ("bilinear", InterpolateMode::Bilinear),
            ("bicubic", InterpolateMode::Bicubic),
        ] {
            let twice = InterpolateOptions { mode, ..InterpolateOptions::with_scale_factor(2.0) };
            bench_forward_backward(b, name, &x, bytes, |x| Ok(x.interpolate(&twice)?))?;
        }
        let x = x.narrow(0, 0, images.div_ceil(4))?.copy()?;
        bench_forward_backward(b, "im2col 3x3", &x, 10 * x.numel() * dtype.size(), |x| {
            Ok(x.im2col(3, &Im2colOptions { padding: [1; 2], ..Default::default() })?)
        })?;
    }
    let (rows, width) = if b.tiny { (64, 16) } else { (4096, 64) };
    let (x, y) = (b.random_tensor(&[rows, width], DType::F32)?, b.random_tensor(&[rows, width], DType::F32)?);
    for p in [2.0, f64::INFINITY, 3.5] {
        bench_forward_backward(b, &format!("cdist {p}"), &x, 4 * rows * rows, |x| Ok(x.cdist(&y, p)?))?;
    }
    let (entries, bags, length, width) = if b.tiny { (100, 8, 4, 8) } else { (100_000, 3000, 20, 256) };
    let table = b.random_tensor(&[entries, width], DType::F32)?;
    let index = Tensor::randint(0, entries as i64, [bags, length], DType::I32, b.device)?;
    let sums = EmbeddingBagOptions { mode: EmbeddingBagMode::Sum, ..EmbeddingBagOptions::default() };
    bench_forward_backward(b, "embedding_bag", &table, 4 * bags * (length + 1) * width, |t| {
        Ok(t.embedding_bag(&index, &sums)?)
    })
}
