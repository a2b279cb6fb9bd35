//! Long reductions with few results: global pooling, norms, softmax, reductions to a scalar, vector products.

use anyhow::Result;
use forebay::dtype::DType;
use forebay::ops::{BatchNormOptions, NormOptions, Pool1dOptions};
use forebay::tensor::Tensor;

use crate::timing::{Bench, MAX_CALLS};

/// Formats a shape as in the other groups.
fn format_shape(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// Times the forward pass on `x`, which moves `bytes` bytes.
fn bench_forward(
    b: &Bench<'_>,
    name: &str,
    x: &Tensor,
    bytes: usize,
    op: impl Fn() -> Result<Tensor>,
) -> Result<()> {
    let t = b.time(MAX_CALLS, op)?;
    let rate = bytes as f64 / t.median_ms / 1e6;
    b.emit_rate(name, &format_shape(x.shape()), x.dtype().name(), &t, ("gbps", rate));
    Ok(())
}

/// Times forward plus backward on `x`.
fn bench_forward_backward(
    b: &Bench<'_>,
    name: &str,
    x: &Tensor,
    bytes: usize,
    op: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    bench_forward(b, name, x, bytes, || op(x))?;
    let leaf = x.to_leaf()?;
    let seed = op(x)?.ones_like()?;
    let t = b.time(MAX_CALLS, || {
        leaf.set_grad(None);
        op(&leaf)?.backward_with(&seed)?;
        Ok(leaf.detach())
    })?;
    let rate = 2.0 * bytes as f64 / t.median_ms / 1e6;
    b.emit_rate(&format!("{name}, gradient"), &format_shape(x.shape()), x.dtype().name(), &t, ("gbps", rate));
    Ok(())
}

pub(crate) fn long_reductions(b: &Bench<'_>) -> Result<()> {
    let max_elements = b.device.info().limits.max_binding_bytes as usize / 4;
    let sized = |full: usize, tiny: usize| if b.tiny { tiny } else { full.min(max_elements) };
    let dtype = DType::F32;

    let side = sized(512, 32);
    let images = b.random_tensor(&[1, 8, side, side], dtype)?;
    bench_forward_backward(b, "adaptive_avg_pool2d to 1", &images, 4 * images.numel(), |x| {
        Ok(x.adaptive_avg_pool2d([1, 1])?)
    })?;
    let signal = b.random_tensor(&[1, 8, sized(100_000, 1000)], dtype)?;
    let window = Pool1dOptions::new(signal.shape()[2]);
    bench_forward_backward(b, "max_pool1d of all", &signal, 4 * signal.numel(), |x| {
        Ok(x.max_pool1d(window)?)
    })?;

    let n = sized(20_000_000, 20_000);
    let row = b.random_tensor(&[1, n], dtype)?;
    let weight = Tensor::ones([n], dtype, b.device)?;
    let bias = Tensor::zeros([n], dtype, b.device)?;
    bench_forward_backward(b, "layer_norm, one row", &row, 8 * n, |x| {
        Ok(x.layer_norm(
            [n],
            &NormOptions { weight: Some(&weight), bias: Some(&bias), ..Default::default() },
        )?)
    })?;
    bench_forward_backward(b, "softmax, one row", &row, 8 * n, |x| Ok(x.softmax(-1)?))?;
    drop((row, weight, bias));

    let n = sized(64 << 20, 64 << 10);
    let x = b.random_tensor(&[n], dtype)?;
    bench_forward(b, "sum to a scalar", &x, 4 * n, || Ok(x.sum_all()?))?;
    bench_forward(b, "var to a scalar", &x, 4 * n, || Ok(x.var([0], 1.0, false)?))?;
    bench_forward(b, "argmax to a scalar", &x, 4 * n, || Ok(x.argmax((), false)?))?;
    bench_forward(b, "norm to a scalar", &x, 4 * n, || Ok(x.norm(2.0, [0], false)?))?;
    let y = b.random_tensor(&[n], dtype)?;
    bench_forward(b, "dot", &x, 8 * n, || Ok(x.dot(&y)?))?;
    drop((x, y));

    let classes = sized(2_000_000, 2000);
    let logits = b.random_tensor(&[8, classes], dtype)?;
    let target = Tensor::randint(0, classes as i64, [8], DType::I64, b.device)?;
    bench_forward_backward(b, "cross_entropy", &logits, 4 * logits.numel(), |x| {
        Ok(x.cross_entropy(&target)?)
    })?;
    drop(logits);

    let x = b.random_tensor(&[sized(1_000_000, 1000), 16], dtype)?;
    let (weight, bias) = (Tensor::ones([16], dtype, b.device)?, Tensor::zeros([16], dtype, b.device)?);
    bench_forward_backward(b, "batch_norm", &x, 12 * x.numel(), |x| {
        Ok(x.batch_norm(&BatchNormOptions {
            weight: Some(&weight),
            bias: Some(&bias),
            training: true,
            ..Default::default()
        })?)
    })
}
