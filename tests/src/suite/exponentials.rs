//! Exponentials, sigmoids and their derivatives over the whole range of f32, compared with f64 on the host.

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::error::Result as ForebayResult;
use forebay::tensor::Tensor;

use super::host_reference::SplitMix64;
use super::tests;

tests![exponentials_are_accurate_over_all_of_f32];

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
