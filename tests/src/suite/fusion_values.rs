//! Fused chains of infinite, NaN, huge and tiny values, also with one value as several operands.
//!
//! A compiler that assumes finite values simplifies `a - a`, `a / a` or `a * b / b`, if it sees both operands in one
//! kernel. Operations that run one by one read them from memory.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::Config;
use forebay::ops::Reduction;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_equal};
use super::tests;
use crate::fuzz::chains::{self, ChainOptions};

tests![
    chains_of_equal_operands_keep_nan,
    chains_of_special_values_equal_single_operations,
    masks_are_factors_of_any_value,
    random_chains_equal_single_operations,
];

const INF: f64 = f64::INFINITY;

const VALUES: [f32; 16] = [
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    3e38,
    65504.0,
    f32::MIN_POSITIVE,
    -6e-8,
    1e-30,
    0.0,
    -0.0,
    1.0,
    -0.75,
    88.0,
    -3.5,
];

/// Returns handles to the card that run operations one by one, and that fuse all chains.
fn handles(device: &Device) -> [Device; 2] {
    [None, Some(0)].map(|least| {
        let handle = Device::with_config(device.backend().clone(), Config::default());
        handle.set_fusion_min_bytes(least);
        handle
    })
}

fn input(device: &Device, dtype: DType, count: usize) -> CoreResult<Tensor> {
    let t = Tensor::from_slice(&VALUES[..count], [count], device)?.to_dtype(dtype)?;
    // The cast of the input is no part of a chain.
    device.synchronize()?;
    Ok(t)
}

/// Chain of one tensor.
type Form = (&'static str, fn(&Tensor) -> CoreResult<Tensor>);

/// Differences and quotients of equal values, which are NaN unless they are finite.
const DIFFERENCES: [Form; 5] = [
    ("a result minus itself", |x| {
        let y = x.mul(2.0)?;
        y.sub(&y)
    }),
    ("an input minus itself", |x| x.sub(x)?.mul(2.0)),
    ("a result minus its detached self", |x| {
        let y = x.add(0.0)?;
        y.sub(&y.detach())?.exp()?.sub(1.0)
    }),
    ("a value minus its product with one", |x| {
        let y = x.mul(1.0)?;
        y.sub(&y.mul(1.0)?)
    }),
    ("a value plus its negative", |x| {
        let y = x.add(0.0)?;
        y.neg()?.add(&y)
    }),
];

fn chains_of_equal_operands_keep_nan(device: &Device) -> Result<()> {
    for device in handles(device) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Lines of whole vectors, and others.
            for count in [16, 13] {
                let x = input(&device, dtype, count)?;
                let doubled = x.mul(2.0)?.to_f64s()?;
                let expect = |finite: f64, from: &[f64]| -> Vec<f64> {
                    from.iter().map(|v| if v.is_finite() { finite } else { f64::NAN }).collect()
                };
                let values = x.to_f64s()?;
                for (k, (name, form)) in DIFFERENCES.into_iter().enumerate() {
                    let from = if k == 0 { &doubled } else { &values };
                    ensure_equal(&form(&x)?.to_f64s()?, &expect(0.0, from))
                        .with_context(|| format!("{name}, {count} {dtype}"))?;
                }
                let large = x.abs()?.add(1.0)?;
                let quotient = large.mul(2.0)?;
                let found = quotient.div(&quotient)?.to_f64s()?;
                // Division may be off by a few ulp.
                ensure_close(&found, &expect(1.0, &doubled), 1e-6, 0.0)
                    .with_context(|| format!("a quotient, {dtype}"))?;
            }
        }
    }
    Ok(())
}

const FORMS: &[Form] = &[
    ("quotient", |x| {
        let y = x.mul(2.0)?;
        y.div(&y)
    }),
    ("product with the reciprocal", |x| {
        let y = x.mul(2.0)?;
        y.mul(&y.reciprocal()?)
    }),
    ("quotient of a product", |x| {
        let y = x.mul(3.0)?;
        y.mul(x)?.div(x)
    }),
    ("difference of a sum", |x| {
        let y = x.mul(3.0)?;
        y.add(x)?.sub(x)
    }),
    ("sum of a difference", |x| x.sub(x)?.add(x)),
    ("lerp", |x| {
        let y = x.mul(2.0)?;
        y.lerp(&y, 0.7)?.lerp(&y, &y)
    }),
    ("addcdiv", |x| {
        let y = x.mul(2.0)?;
        y.addcdiv(&y, &y, -1.0)?.addcdiv(x, x, 2.0)
    }),
    ("addcmul", |x| {
        let y = x.mul(2.0)?;
        y.addcmul(&y, &y, -1.0)
    }),
    ("squared error", |x| {
        let y = x.mul(2.0)?;
        y.mse_loss(&y, Reduction::None)
    }),
    ("absolute error", |x| {
        let y = x.mul(2.0)?;
        y.l1_loss(&y, Reduction::Mean)
    }),
    ("smooth error", |x| {
        let y = x.mul(2.0)?;
        y.smooth_l1_loss(&y, 0.5, Reduction::None)
    }),
    ("Huber's error", |x| x.huber_loss(x, 0.5, Reduction::None)),
    ("logaddexp", |x| {
        let y = x.mul(2.0)?;
        y.logaddexp(&y)
    }),
    ("hypot and atan2", |x| {
        let y = x.mul(2.0)?;
        y.hypot(&y)?.atan2(&y)
    }),
    ("remainders", |x| {
        let y = x.mul(2.0)?;
        y.fmod(&y)?.add(&y.remainder(&y)?)
    }),
    ("extremes", |x| {
        let y = x.mul(2.0)?;
        y.maximum(&y)?.minimum(&y)?.clamp(&y, &y)
    }),
    ("logarithm of an exponential", |x| x.exp()?.log()?.exp()),
    ("root of a square", |x| x.square()?.sqrt()?.sub(&x.abs()?)),
    ("bounds of what is positive", |x| x.square()?.clamp_min(0.0)?.abs()?.add(&x.exp()?.relu()?)),
    ("products with zero", |x| x.mul(0.0)?.add(&x.mul(0.0)?.exp()?)),
    ("log of softmax by hand", |x| {
        let y = x.log()?;
        y.sub(&y.detach())?.exp()?.mul(&y)
    }),
];

/// Returns the result of a form, and its gradient.
fn evaluate((_, form): Form, device: &Device, dtype: DType, count: usize) -> Result<[Vec<f64>; 2]> {
    let x = input(device, dtype, count)?.to_leaf()?;
    let y = form(&x)?;
    y.backward_with(&y.ones_like()?)?;
    Ok([y.to_f64s()?, x.grad().context("no gradient")?.to_f64s()?])
}

fn chains_of_special_values_equal_single_operations(device: &Device) -> Result<()> {
    let [alone, fused] = handles(device);
    for (k, form) in FORMS.iter().enumerate() {
        // Kernels compile slowly on software drivers: each form has one of the two types of 16 bits.
        for (dtype, count) in [(DType::F32, 16), ([DType::F16, DType::BF16][k % 2], 13)] {
            let expected = evaluate(*form, &alone, dtype, count)?;
            let found = evaluate(*form, &fused, dtype, count)?;
            for (what, (found, expected)) in ["result", "gradient"].iter().zip(found.iter().zip(&expected)) {
                ensure_equal(found, expected).with_context(|| format!("{}, {what}, {dtype}", form.0))?;
            }
        }
    }
    Ok(())
}

/// The product of an infinity and false is NaN, with one operation as in a chain.
fn masks_are_factors_of_any_value(device: &Device) -> Result<()> {
    let mask: Vec<bool> = (0..VALUES.len()).map(|k| k % 2 == 1).collect();
    for device in handles(device) {
        for dtype in [DType::F32, DType::BF16] {
            let x = input(&device, dtype, VALUES.len())?;
            let factors = Tensor::from_bools(&mask, [mask.len()], &device)?;
            let expected: Vec<f64> =
                x.to_f64s()?.iter().zip(&mask).map(|(v, m)| v * f64::from(u8::from(*m))).collect();
            for found in [x.mul(&factors)?, factors.mul(&x)?, x.mul(1.0)?.mul(&factors)?] {
                ensure_equal(&found.to_f64s()?, &expected).with_context(|| dtype.to_string())?;
            }
            let same = x.where_(&factors, &x)?;
            ensure_equal(&same.sub(&x.where_(&factors, &x)?)?.to_f64s()?, &x.sub(&x)?.to_f64s()?)?;
            let filled = x.masked_fill(&factors, INF)?;
            let difference = |v: &f64| if v.is_finite() { 0.0 } else { f64::NAN };
            let expected: Vec<f64> = filled.to_f64s()?.iter().map(difference).collect();
            ensure_equal(&filled.sub(&filled)?.to_f64s()?, &expected).with_context(|| dtype.to_string())?;
        }
    }
    Ok(())
}

fn random_chains_equal_single_operations(device: &Device) -> Result<()> {
    let summary = chains::run(device, &ChainOptions { programs: 24, gradients: 12, seed: 1 })?;
    ensure!(summary.differences.is_empty(), "{summary}");
    ensure!(summary.compared >= 30, "{summary}");
    Ok(())
}
