//! Single operations and allocation.

use std::time::Instant;

use anyhow::Result;
use forebay::cuda::set_allow_tf32;
use forebay::dtype::DType;
use forebay::memory::{Pool, Request};
use forebay::ops::NormOptions;
use forebay::tensor::Tensor;
use serde_json::json;

use crate::timing::{Bench, LONG_WARM_UP, MAX_CALLS, median};

pub(crate) fn matmul(b: &Bench<'_>) -> Result<()> {
    let sizes: &[usize] = if b.tiny { &[64, 256] } else { &[1024, 4096, 8192] };
    let (batch, n) = if b.tiny { (4, 64) } else { (64, 512) };
    let types = [("f32", DType::F32), ("tf32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];
    for (name, dtype) in types {
        if name == "tf32" && b.device.info().backend != "cuda" {
            continue;
        }
        set_allow_tf32(name == "tf32");
        for &n in sizes {
            let (x, y) = (b.random_tensor(&[n, n], dtype)?, b.random_tensor(&[n, n], dtype)?);
            let t = b.time_after(LONG_WARM_UP, MAX_CALLS, || Ok(x.matmul(&y)?))?;
            let rate = 2.0 * (n as f64).powi(3) / t.median_ms / 1e9;
            b.emit_rate("matmul", &format!("{n}x{n}x{n}"), name, &t, ("tflops", rate));
        }
        let (x, y) = (b.random_tensor(&[batch, n, n], dtype)?, b.random_tensor(&[batch, n, n], dtype)?);
        let t = b.time(MAX_CALLS, || Ok(x.matmul(&y)?))?;
        let rate = 2.0 * batch as f64 * (n as f64).powi(3) / t.median_ms / 1e9;
        b.emit_rate("bmm", &format!("{batch}x{n}x{n}x{n}"), name, &t, ("tflops", rate));
    }
    set_allow_tf32(false);
    for &n in sizes {
        let dtype = DType::F8E4M3;
        let (wide, scale) = (b.random_tensor(&[n, n], DType::F32)?, b.random_tensor(&[], DType::F32)?);
        let (x, y) = (wide.to_dtype(dtype)?, wide.to_dtype(dtype)?.t()?);
        let t = b.time_after(LONG_WARM_UP, MAX_CALLS, || {
            Ok(x.scaled_mm(&y, &scale, &scale, None, DType::BF16)?)
        })?;
        let rate = 2.0 * (n as f64).powi(3) / t.median_ms / 1e9;
        b.emit_rate("matmul", &format!("{n}x{n}x{n}"), dtype.name(), &t, ("tflops", rate));
        let t = b.time(MAX_CALLS, || Ok(wide.to_dtype(dtype)?))?;
        let rate = 5.0 * (n * n) as f64 / t.median_ms / 1e6;
        b.emit_rate("to_dtype", &format!("{n}x{n}"), dtype.name(), &t, ("gbps", rate));
    }
    Ok(())
}

pub(crate) fn elementwise(b: &Bench<'_>) -> Result<()> {
    let n: usize = if b.tiny { 1 << 16 } else { 64 << 20 };
    // An adapter may bind less at once; the line says what was measured.
    let n = n.min(b.device.info().limits.max_binding_bytes as usize / 4);
    let (x, y, z) = (
        b.random_tensor(&[n], DType::F32)?,
        b.random_tensor(&[n], DType::F32)?,
        b.random_tensor(&[n], DType::F32)?,
    );
    let fusion = b.device.fusion_min_bytes();
    for (name, fusion) in [("gelu(a*b+c)", fusion), ("gelu(a*b+c), three kernels", None)] {
        b.device.set_fusion_min_bytes(fusion);
        let t = b.time(MAX_CALLS, || Ok(x.mul(&y)?.add(&z)?.gelu()?))?;
        b.emit_rate(name, &n.to_string(), "f32", &t, ("gbps", 16.0 * n as f64 / t.median_ms / 1e6));
    }
    b.device.set_fusion_min_bytes(fusion);
    let t = b.time(MAX_CALLS, || Ok(x.add(&y)?))?;
    b.emit_rate("add", &n.to_string(), "f32", &t, ("gbps", 12.0 * n as f64 / t.median_ms / 1e6));
    Ok(())
}

pub(crate) fn reduce(b: &Bench<'_>) -> Result<()> {
    let n = if b.tiny { 128 } else { 8192 };
    let (rows, cols) = if b.tiny { (64, 128) } else { (8192, 4096) };
    // An adapter may bind less at once; the line says what was measured.
    let fit = |r: usize, c: usize| r.min(b.device.info().limits.max_binding_bytes as usize / (4 * c));
    let (r1, r2) = (fit(n, n), fit(rows, cols));
    let x = b.random_tensor(&[r1, n], DType::F32)?;
    let y = b.random_tensor(&[r2, cols], DType::F32)?;
    let weight = Tensor::ones([cols], DType::F32, b.device)?;
    let bias = Tensor::zeros([cols], DType::F32, b.device)?;
    type Op<'a> = Box<dyn Fn() -> Result<Tensor> + 'a>;
    let items: [(&str, &Tensor, f64, Op<'_>); 5] = [
        ("sum_last", &x, 4.0, Box::new(|| Ok(x.sum([-1], false)?))),
        ("sum_first", &x, 4.0, Box::new(|| Ok(x.sum([0], false)?))),
        ("sum_all", &x, 4.0, Box::new(|| Ok(x.sum_all()?))),
        ("softmax_last", &x, 8.0, Box::new(|| Ok(x.softmax(-1)?))),
        (
            "layernorm",
            &y,
            8.0,
            Box::new(|| {
                Ok(y.layer_norm(
                    [cols],
                    &NormOptions { weight: Some(&weight), bias: Some(&bias), ..Default::default() },
                )?)
            }),
        ),
    ];
    for (name, input, per, op) in &items {
        let t = b.time(MAX_CALLS, op)?;
        let shape = format!("{}x{}", input.shape()[0], input.shape()[1]);
        b.emit_rate(name, &shape, "f32", &t, ("gbps", per * input.numel() as f64 / t.median_ms / 1e6));
    }
    Ok(())
}

pub(crate) fn sort(b: &Bench<'_>) -> Result<()> {
    let long = if b.tiny { 1 << 16 } else { 16 << 20 };
    let (rows, cols) = if b.tiny { (64, 1000) } else { (16_384, 1000) };
    let (batch, words, few) = (if b.tiny { 4 } else { 64 }, if b.tiny { 1000 } else { 128_000 }, 50);
    let x = b.random_tensor(&[long], DType::F32)?;
    let y = b.random_tensor(&[rows, cols], DType::F32)?;
    let z = b.random_tensor(&[batch, words], DType::F32)?;
    let mask = x.gt(0.0)?;
    let index = x.abs()?.mul(50_000.0)?.to_dtype(DType::I32)?;
    let sums = Tensor::zeros([50_000], DType::F32, b.device)?;
    type Op<'a> = Box<dyn Fn() -> Result<Tensor> + 'a>;
    let items: [(&str, &Tensor, Op<'_>); 6] = [
        ("sort", &x, Box::new(|| Ok(x.sort(-1, false)?.0))),
        ("sort", &y, Box::new(|| Ok(y.sort(-1, false)?.0))),
        ("topk", &z, Box::new(|| Ok(z.topk(few, -1, true)?.0))),
        ("median", &y, Box::new(|| Ok(y.median(-1, false)?.0))),
        ("masked_select", &x, Box::new(|| Ok(x.masked_select(&mask)?))),
        ("scatter_add", &x, Box::new(|| Ok(sums.scatter_add(0, &index, &x)?))),
    ];
    for (name, input, op) in &items {
        let t = b.time(MAX_CALLS, op)?;
        let shape = input.shape().iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
        b.emit_rate(name, &shape, "f32", &t, ("gbps", 4.0 * input.numel() as f64 / t.median_ms / 1e6));
    }
    Ok(())
}

/// Linear congruential generator, equal to the peers', so that sizes and their order agree.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn next_size(&mut self, max_log2: f64) -> u64 {
        let unit = self.next() as f64 / (1u64 << 31) as f64;
        ((1024.0 * (unit * (max_log2 - 10.0)).exp2()) as u64) & !3
    }
}

pub(crate) fn allocation(b: &Bench<'_>) -> Result<()> {
    let n = if b.tiny { 200 } else { 20_000 };
    let pool: &Pool = b.device.pool();
    let per_op = |op: &dyn Fn() -> Result<()>| -> Result<f64> {
        let mut rounds = Vec::new();
        for k in 0..8 {
            let start = Instant::now();
            for _ in 0..n {
                op()?;
            }
            b.device.synchronize()?;
            if k > 0 {
                rounds.push(start.elapsed().as_secs_f64() * 1e9 / n as f64);
            }
        }
        Ok(median(rounds))
    };
    let ns = per_op(&|| {
        let block = pool.alloc(Request::new(1 << 20))?;
        pool.free(block);
        Ok(())
    })?;
    b.emit_line("alloc_pool_1MiB", "1MiB", "", json!({ "ns_per_op": ns }));
    let ns = per_op(&|| {
        drop(Tensor::empty([1 << 20], DType::U8, b.device)?);
        Ok(())
    })?;
    b.emit_line("alloc_empty_1MiB", "1MiB", "", json!({ "ns_per_op": ns }));
    let ns = per_op(&|| {
        drop(Tensor::zeros([1 << 20], DType::U8, b.device)?);
        Ok(())
    })?;
    b.emit_line("alloc_zeros_1MiB", "1MiB", "", json!({ "ns_per_op": ns }));

    let (live, steps, top) = if b.tiny { (50, 200, 20.0) } else { (1000, 5000, 26.0) };
    let mut rng = Lcg(12_345);
    let make = |bytes: u64| Tensor::empty([bytes as usize], DType::U8, b.device);
    let mut slots =
        (0..live).map(|_| make(rng.next_size(top)).map(Some)).collect::<forebay::error::Result<Vec<_>>>();
    let Ok(slots) = &mut slots else {
        eprintln!("alloc_tensor_mixed: the device is too small for it");
        return Ok(());
    };
    let mut last = 0.0;
    for _ in 0..3 {
        let plan: Vec<(usize, u64)> =
            (0..steps).map(|_| ((rng.next() % live as u64) as usize, rng.next_size(top))).collect();
        let start = Instant::now();
        for &(k, bytes) in &plan {
            slots[k] = None;
            slots[k] = Some(make(bytes)?);
        }
        b.device.synchronize()?;
        last = start.elapsed().as_secs_f64() * 1e9 / steps as f64;
    }
    let stats = b.device.memory();
    let fields = json!({ "ns_per_op": last, "in_use_mb": stats.allocated() >> 20, "reserved_mb": stats.reserved() >> 20 });
    b.emit_line("alloc_tensor_mixed", &format!("1KiB..2^{top}B, {live} live"), "", fields);
    Ok(())
}
