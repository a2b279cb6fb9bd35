//! Exponentials, sigmoids and their derivatives over the whole range of f32, compared with f64 on the host.

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as ForebayResult;
use forebay::tensor::Tensor;

use super::host_reference::SplitMix64;
use super::{compute_dtypes, tests};

tests![exponentials_are_accurate_over_all_of_f32, gelus_of_16_bits_are_those_of_f32_rounded];

/// Returns f32 values of all magnitudes, with the limits of exponentials, denormals, infinities and NaN.
fn floats_of_all_magnitudes() -> Vec<f32> {
    let special = [0.0, 1e-45, 1e-40, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN];
    let limits = [0.25f32, 0.625, 1.0, 17.0, 20.0, 30.0, 87.3, 88.0, 88.7, 88.8, 103.9, 104.0, 106.0, 200.0];
    let near = limits.into_iter().flat_map(|x| [x.next_down(), x, x.next_up()]);
    let mut all: Vec<f32> = special.into_iter().chain(near).flat_map(|x| [x, -x]).collect();
    let mut rng = SplitMix64(11);
    for _ in 0..20_000 {
        all.push((rng.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0) * [1.0, 12.0, 110.0][rng.below(3)]);
        all.push(f32::from_bits(rng.next() as u32));
    }
    all
}

/// Fails if a value differs from the exact one by more than `bound` ulp. Devices may flush denormals, also inside of
/// a function, whose result they then change by `flushed`.
fn ensure_ulps(name: &str, x: f32, got: f64, exact: f64, bound: f64, flushed: f64) -> Result<()> {
    let rounded = exact as f32;
    let ulp = f64::from(rounded.abs().next_up()) - f64::from(rounded.abs());
    let is_near = match rounded.is_finite() {
        true => (got - exact).abs() <= bound * ulp + flushed,
        false => got == f64::from(rounded) || (got.is_nan() && rounded.is_nan()),
    };
    ensure!(is_near, "{name}({x:e}) = {got:e}, expected {exact:e} within {bound} ulp");
    Ok(())
}

fn exponentials_are_accurate_over_all_of_f32(device: &Device) -> Result<()> {
    fn sigmoid(x: f64) -> f64 {
        if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
    }
    fn gelu_sigmoid(x: f64) -> f64 {
        sigmoid((8.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3)))
    }
    let values = floats_of_all_magnitudes();
    let x = Tensor::from_slice(&values, [values.len()], device)?.to_leaf()?;
    let tiny = f64::from(f32::MIN_POSITIVE);
    type Case<'a> = (&'a str, &'a dyn Fn(&Tensor) -> ForebayResult<Tensor>, fn(f64) -> f64, f64);
    let cases: [Case<'_>; 6] = [
        ("exp", &|x| x.exp(), f64::exp, 3.0),
        ("sigmoid", &|x| x.sigmoid(), sigmoid, 6.0),
        ("silu", &|x| x.silu(), |x| x * sigmoid(x), 7.0),
        ("tanh", &|x| x.tanh(), f64::tanh, 3.0),
        ("softplus", &|x| x.softplus(1.0, f64::INFINITY), |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), 4.0),
        ("logsigmoid", &|x| x.logsigmoid(), |x| x.min(0.0) - (-x.abs()).exp().ln_1p(), 4.0),
    ];
    for (name, call, exact, bound) in cases {
        for (&x, got) in values.iter().zip(call(&x.detach())?.to_f64s()?) {
            // Infinities of softplus and logsigmoid follow PyTorch's tests of the catalog.
            let exact = if x.is_nan() { f64::NAN } else { exact(f64::from(x)) };
            if !(x.is_infinite() && exact.is_nan()) {
                ensure_ulps(name, x, got, exact, bound, tiny * f64::from(x.abs().clamp(1.0, 200.0)))?;
            }
        }
    }
    // These have absolute errors: their terms cancel.
    type GradCase<'a> = (&'a str, &'a dyn Fn(&Tensor) -> ForebayResult<Tensor>, fn(f64) -> f64);
    let grads: [GradCase<'_>; 3] = [
        ("sigmoid", &|x| x.sigmoid(), |x| sigmoid(x) * sigmoid(-x)),
        ("silu", &|x| x.silu(), |x| sigmoid(x) * (1.0 + x * sigmoid(-x))),
        ("gelu_tanh", &|x| x.gelu_tanh(), |x| {
            let (s, c) = (gelu_sigmoid(x), x.clamp(-30.0, 30.0));
            s + s * (1.0 - s) * c * (8.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * c * c)
        }),
    ];
    for (name, call, exact) in grads {
        x.set_grad(None);
        let y = call(&x)?;
        y.backward_with(&y.ones_like()?)?;
        let grad = x.grad().ok_or_else(|| anyhow::anyhow!("no gradient"))?.to_f64s()?;
        for (&x, got) in values.iter().zip(grad).filter(|(x, _)| !x.is_infinite()) {
            let exact = exact(f64::from(x));
            let is_near = (got - exact).abs() <= 6e-7 || (x.is_nan() && got.is_nan());
            ensure!(is_near, "the derivative of {name} at {x:e} is {got:e}, expected {exact:e}");
        }
    }
    for (&x, got) in values.iter().zip(x.detach().gelu_tanh()?.to_f64s()?).filter(|(x, _)| !x.is_infinite()) {
        let exact = f64::from(x) * gelu_sigmoid(f64::from(x));
        let is_near = (got - exact).abs() <= 4e-7 * f64::from(x).abs() + tiny || (x.is_nan() && got.is_nan());
        ensure!(is_near, "gelu_tanh({x:e}) = {got:e}, expected {exact:e}");
    }
    Ok(())
}

/// Kernels compute these with fewer instructions in 16 bits. Every 16-bit value is compared.
fn gelus_of_16_bits_are_those_of_f32_rounded(device: &Device) -> Result<()> {
    type Case<'a> = (&'a str, &'a dyn Fn(&Tensor) -> ForebayResult<Tensor>);
    let cases: [Case<'_>; 2] = [("gelu", &|x| x.gelu()), ("gelu_tanh", &|x| x.gelu_tanh())];
    for dtype in compute_dtypes(device).filter(|dtype| matches!(dtype, DType::F16 | DType::BF16)) {
        let value = |bits: u16| match dtype {
            DType::F16 => half::f16::from_bits(bits).to_f32(),
            _ => half::bf16::from_bits(bits).to_f32(),
        };
        let values: Vec<f32> = (0..=u16::MAX).map(value).collect();
        // Distance of neighbours with f32's exponent range, or f16's.
        let (digits, least) = if dtype == DType::F16 { (10, 2f64.powi(-14)) } else { (7, 2f64.powi(-126)) };
        // Exponentials below f32's normal range count as 0, and are multiplied by x.
        let flushed = 16.0 * f64::from(f32::MIN_POSITIVE);
        let ulp = |x: f64| 2f64.powi(x.abs().max(least).log2().floor() as i32 - digits);
        for (name, call) in cases {
            let run = |dtype: DType| -> Result<[Vec<f64>; 2]> {
                let x = Tensor::from_slice(&values, [values.len()], device)?.to_dtype(dtype)?.to_leaf()?;
                let y = call(&x)?;
                y.backward_with(&y.ones_like()?)?;
                let grad = x.grad().ok_or_else(|| anyhow::anyhow!("no gradient"))?;
                Ok([y.to_f64s()?, grad.to_f64s()?])
            };
            let ([y, dy], [exact, exact_dy]) = (run(dtype)?, run(DType::F32)?);
            for (k, x) in values.iter().enumerate() {
                // The terms of a derivative cancel near its zero.
                for (what, got, exact, cancelled) in
                    [(name, y[k], exact[k], 0.0), ("derivative", dy[k], exact_dy[k], 4e-6)]
                {
                    let rounded =
                        if exact.abs() > 65_519.0 && dtype == DType::F16 { f64::INFINITY } else { exact };
                    let bound = 0.54 * ulp(exact) + cancelled + flushed;
                    let is_near = (got - exact).abs() <= bound
                        || got.abs() == rounded.abs()
                        || (got.is_nan() && exact.is_nan());
                    ensure!(is_near, "{dtype}: {what} of {name}({x:e}) is {got:e}, expected {exact:e}");
                }
            }
        }
    }
    Ok(())
}
