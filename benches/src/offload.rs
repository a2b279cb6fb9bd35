//! Copies to host memory and back: alone, and concurrent with compute that the copies should not slow down.

use anyhow::Result;
use forebay::dtype::DType;
use forebay::tensor::Tensor;
use serde_json::json;

use crate::timing::Bench;

pub(crate) fn offload(b: &Bench<'_>) -> Result<()> {
    if !b.device.backend().supports_pinned_host() {
        eprintln!("copies: the device reaches no memory of the host");
        return Ok(());
    }
    let (n, width) = if b.tiny { (1 << 16, 64) } else { (64 << 20, 8192) };
    // Two tensors, copied in opposite directions, so that both directions are busy.
    let away = [b.random_tensor(&[n], DType::F32)?, b.random_tensor(&[n], DType::F32)?];
    let x = b.random_tensor(&[width, width], DType::BF16)?;
    let bytes = (2 * 4 * n) as f64;
    let copy = || -> Result<Tensor> {
        away.iter().try_for_each(Tensor::offload_)?;
        away.iter().try_for_each(Tensor::prefetch_)?;
        Ok(x.clone())
    };
    let alone = b.time(1, copy)?;
    let shape = format!("2 x {n}");
    b.emit_rate("offload_and_back", &shape, "f32", &alone, ("gbps", 2.0 * bytes / alone.median_ms / 1e6));
    // Enough matrix products to take about as long as the copies.
    let one = b.time(1, || Ok(x.matmul(&x)?))?.median_ms;
    let count = (alone.median_ms / one).ceil().max(1.0) as usize;
    let multiply = || -> Result<Tensor> {
        let mut y = x.matmul(&x)?;
        for _ in 1..count {
            y = x.matmul(&x)?;
        }
        Ok(y)
    };
    let products = b.time(1, multiply)?.median_ms;
    let both = b.time(1, || copy().and_then(|_| multiply()))?;
    let (longer, sum) = (alone.median_ms.max(products), alone.median_ms + products);
    b.emit_line(
        "offload_beside_matmul",
        &format!("{shape}, {count} x {width}^3"),
        "",
        json!({
            "median_ms": both.median_ms, "copies_ms": alone.median_ms, "products_ms": products,
            // 1: fully concurrent; 0: sequential.
            "overlap": (sum - both.median_ms) / (sum - longer),
        }),
    );
    Ok(())
}
