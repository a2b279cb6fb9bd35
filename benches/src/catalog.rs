//! Benchmarks every operation of the conformance suite's catalog at sizes that fill a device. Reports memory
//! throughput, or floating-point throughput for matrix products.

use anyhow::Result;
use forebay::autograd::{self, GradOptions};
use forebay::dtype::DType;
use forebay::tensor::Tensor;
use forebay_conformance::catalog::{self, OpCase};

use crate::timing::{Bench, MAX_CALLS};

/// Default number of elements of an input: larger than a device's caches.
const ELEMENTS: usize = 16 << 20;

/// Benchmarks the cases whose name contains one of `only`, or all; with `gradients` also forward plus backward.
pub(crate) fn bench_catalog(b: &Bench<'_>, dtype: DType, gradients: bool, only: &[String]) -> Result<()> {
    let wanted =
        |case: &&OpCase| only.is_empty() || only.iter().any(|part| case.name.contains(part.as_str()));
    for case in catalog::cases().filter(wanted).filter(|case| case.supports_dtype(dtype)) {
        // A case that needs too much memory or is unsupported does not stop the others.
        if let Err(error) = bench_case(b, case, dtype, gradients) {
            eprintln!("{}: {error:#}", case.name);
        }
    }
    Ok(())
}

fn bench_case(b: &Bench<'_>, case: &OpCase, dtype: DType, gradients: bool) -> Result<()> {
    let inputs = match b.tiny {
        true => Some(case.inputs(dtype, b.device)?),
        false => case.create_bench_inputs(ELEMENTS, dtype, b.device)?,
    };
    let Some(inputs) = inputs else { return Ok(()) };
    let out = case.run(&inputs)?;
    let (bytes, flops) = (case.bytes(&inputs, &out), case.flops(&inputs, &out));
    // A view moves no bytes.
    if bytes == 0 {
        return Ok(());
    }
    let shapes: Vec<String> = inputs.iter().map(format_shape).collect();
    let shapes = shapes.join(" ");
    drop(out);
    let t = b.time(MAX_CALLS, || Ok(case.run(&inputs)?))?;
    let rate = match flops {
        Some(flops) => ("tflops", flops as f64 / t.median_ms / 1e9),
        None => ("gbps", bytes as f64 / t.median_ms / 1e6),
    };
    b.emit_rate(case.name, &shapes, dtype.name(), &t, rate);
    if !gradients || !case.has_gradient {
        return Ok(());
    }
    let leaf = |t: &Tensor| if t.dtype().is_float() { t.to_leaf() } else { Ok(t.clone()) };
    let inputs = inputs.iter().map(leaf).collect::<forebay::error::Result<Vec<_>>>()?;
    let leaves: Vec<Tensor> = inputs.iter().filter(|t| t.requires_grad()).cloned().collect();
    let seeds = [case.run(&inputs)?.ones_like()?];
    let both = || {
        let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
        Ok(autograd::grad(&[case.run(&inputs)?], &leaves, &options)?.swap_remove(0))
    };
    let t = b.time(MAX_CALLS, both)?;
    let rate = match flops {
        // The backward pass has two matrix products for each one of the forward pass.
        Some(flops) => ("tflops", 3.0 * flops as f64 / t.median_ms / 1e9),
        None => ("ms", t.median_ms),
    };
    b.emit_rate(&format!("{}, both passes", case.name), &shapes, dtype.name(), &t, rate);
    Ok(())
}

fn format_shape(t: &Tensor) -> String {
    t.shape().iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}
