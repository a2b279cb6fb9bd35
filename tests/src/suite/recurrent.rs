//! Recurrent layers of 16-bit floats, compared with f32. On CUDA, these cases reach the kernels that run all steps in
//! one launch.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::ops::{RecurrentKind, RecurrentOp};
use forebay::plan::dry_run;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;

tests![
    layers_of_16_bits_equal_those_of_f32,
    layers_take_the_predicted_bytes,
    layers_are_captured,
    long_sequences_take_one_launch_each_way,
];

/// One direction of one layer.
#[derive(Clone, Copy, Debug)]
struct LayerCase {
    kind: RecurrentKind,
    hidden: usize,
    batch: usize,
    steps: usize,
    reverse: bool,
    with_bias: bool,
    with_lengths: bool,
}

const fn layer(kind: RecurrentKind, hidden: usize, batch: usize, steps: usize) -> LayerCase {
    LayerCase { kind, hidden, batch, steps, reverse: false, with_bias: true, with_lengths: false }
}

/// Layers that a software driver runs too: odd sizes, and fewer features than a tile.
const SMALL_CASES: [LayerCase; 7] = [
    layer(RecurrentKind::Gru, 7, 3, 5),
    layer(RecurrentKind::Lstm, 33, 9, 6),
    LayerCase { with_bias: false, ..layer(RecurrentKind::Gru, 40, 17, 4) },
    LayerCase { reverse: true, with_lengths: true, ..layer(RecurrentKind::Gru, 24, 5, 7) },
    LayerCase { reverse: true, with_lengths: true, ..layer(RecurrentKind::Lstm, 18, 4, 6) },
    LayerCase { with_lengths: true, ..layer(RecurrentKind::Relu, 30, 4, 9) },
    LayerCase { reverse: true, ..layer(RecurrentKind::Tanh, 1, 1, 4) },
];

/// Layers of one to sixteen blocks in a cluster, with 8, 16 or 32 sequences, and with part of the weight in shared
/// memory.
const LARGE_CASES: [LayerCase; 15] = [
    layer(RecurrentKind::Gru, 512, 5, 6),
    layer(RecurrentKind::Gru, 512, 32, 9),
    layer(RecurrentKind::Gru, 650, 5, 6),
    layer(RecurrentKind::Gru, 650, 32, 5),
    layer(RecurrentKind::Lstm, 512, 5, 6),
    layer(RecurrentKind::Lstm, 512, 32, 9),
    layer(RecurrentKind::Lstm, 650, 5, 6),
    layer(RecurrentKind::Lstm, 650, 32, 5),
    LayerCase { reverse: true, with_lengths: true, ..layer(RecurrentKind::Gru, 512, 70, 8) },
    LayerCase { reverse: true, with_lengths: true, ..layer(RecurrentKind::Lstm, 512, 150, 7) },
    LayerCase { with_lengths: true, with_bias: false, ..layer(RecurrentKind::Lstm, 651, 20, 6) },
    layer(RecurrentKind::Gru, 129, 33, 6),
    layer(RecurrentKind::Lstm, 200, 33, 6),
    layer(RecurrentKind::Tanh, 1000, 32, 6),
    layer(RecurrentKind::Relu, 300, 12, 6),
];

impl LayerCase {
    /// Returns the results, and the gradients of all operands.
    fn results_and_gradients(
        &self,
        dtype: DType,
        device: &Device,
    ) -> CoreResult<Vec<(&'static str, Tensor)>> {
        let Self { kind, hidden, batch, steps, .. } = *self;
        let wide = kind.gate_count() * hidden;
        // No sum of a relu is near zero, where rounding would change its gradient.
        let (distance, weight) = if kind == RecurrentKind::Relu { (4.0f32, 0.2) } else { (0.0, 1.5) };
        let weight = weight / (hidden as f64).sqrt();
        let of = |shape: &[usize], seed: u64, scale: f64| -> CoreResult<Tensor> {
            // Both types get values of bf16, which f16 represents too at this magnitude.
            let mut values = pseudo_random(shape.iter().product(), seed, scale);
            if seed == 1 {
                values.iter_mut().for_each(|v| *v += distance * v.signum());
            }
            Tensor::from_slice(&values, shape.to_vec(), device)?
                .to_dtype(DType::BF16)?
                .to_dtype(dtype)?
                .to_leaf()
        };
        let (x, h_0) = (of(&[steps, batch, wide], 1, 1.5)?, of(&[batch, hidden], 2, 1.0)?);
        let (w, b) = (of(&[wide, hidden], 3, weight)?, of(&[wide], 4, 0.5)?);
        let c_0 = of(&[batch, hidden], 5, 1.0)?;
        let c_0 = (kind == RecurrentKind::Lstm).then_some(&c_0);
        let lengths: Vec<i32> = (0..batch).map(|k| (1 + k * 5 % steps) as i32).collect();
        let lengths = Tensor::from_slice(&lengths, [batch], device)?;
        let op = RecurrentOp {
            c_0,
            bias_hh: self.with_bias.then_some(&b),
            lengths: self.with_lengths.then_some(&lengths),
            reverse: self.reverse,
            ..RecurrentOp::new(kind, &x, &h_0, &w)
        };
        let made = op.run()?;
        let mut all = vec![("output", made.output.detach()), ("h_n", made.h_n.detach())];
        all.extend(made.c_n.as_ref().map(|c| ("c_n", c.detach())));
        let seed = of(&[steps, batch, hidden], 6, 1.0)?.detach();
        let mut loss = made.output.mul(&seed)?.sum_all()?;
        if let Some(c_n) = &made.c_n {
            loss = loss.add(&c_n.sum_all()?)?;
        }
        let mut inputs = vec![("dx", &x), ("dh_0", &h_0), ("dw", &w)];
        inputs.extend(self.with_bias.then_some(("db", &b)));
        inputs.extend(c_0.map(|c| ("dc_0", c)));
        let leaves: Vec<&Tensor> = inputs.iter().map(|(_, t)| *t).collect();
        let grads = autograd::grad(&[loss], &leaves, &GradOptions::default())?;
        all.extend(inputs.iter().map(|(name, _)| *name).zip(grads));
        Ok(all)
    }
}

/// Returns values between -scale and scale, from a linear congruential generator.
fn pseudo_random(count: usize, seed: u64, scale: f64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale
    };
    (0..count).map(|_| next() as f32).collect()
}

fn with_own_pool(device: &Device) -> Device {
    Device::with_config(Arc::clone(device.backend()), device.pool().config())
}

/// Returns the cases of a device.
fn cases(device: &Device) -> impl Iterator<Item = LayerCase> + use<> {
    let large = if device.info().software { &LARGE_CASES[..0] } else { &LARGE_CASES[..] };
    SMALL_CASES.into_iter().chain(large.iter().copied())
}

fn layers_of_16_bits_equal_those_of_f32(device: &Device) -> Result<()> {
    for case in cases(device) {
        let exact = case.results_and_gradients(DType::F32, device)?;
        for (dtype, error) in [(DType::BF16, 0.03), (DType::F16, 0.005)] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            let made = case.results_and_gradients(dtype, device)?;
            ensure!(made.len() == exact.len(), "{case:?} {dtype}: a result is missing");
            for ((what, made), (_, exact)) in made.iter().zip(&exact) {
                let expected = exact.to_f64s()?;
                let largest = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
                ensure!(largest > 0.0, "{case:?}: {what} is nothing but zeros");
                ensure_close(&made.to_f64s()?, &expected, 0.0, error * largest)
                    .with_context(|| format!("{case:?} {dtype}: {what}"))?;
            }
        }
    }
    Ok(())
}

/// Dry runs allocate what the device does. Kernels for all steps need no memory for the products of a step.
fn layers_take_the_predicted_bytes(device: &Device) -> Result<()> {
    let profile = CardProfile::from_device(device);
    for case in cases(device) {
        let predicted = dry_run(&profile, |dry| case.results_and_gradients(DType::BF16, dry))?;
        let real = with_own_pool(device);
        case.results_and_gradients(DType::BF16, &real)?;
        let (predicted, measured) = (predicted.peak_allocated, real.memory().peak_allocated());
        ensure!(predicted == measured, "{case:?}: predicted {predicted}, measured {measured}");
    }
    Ok(())
}

fn layers_are_captured(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    for case in [SMALL_CASES[0], SMALL_CASES[1]].into_iter().chain(cases(device).nth(SMALL_CASES.len() + 5)) {
        let wide = case.kind.gate_count() * case.hidden;
        let of = |shape: &[usize], seed| -> CoreResult<Tensor> {
            let values = pseudo_random(shape.iter().product(), seed, 1.0);
            Tensor::from_slice(&values, shape.to_vec(), device)?.to_dtype(DType::BF16)?.to_leaf()
        };
        let (x, w) = (of(&[case.steps, case.batch, wide], 1)?, of(&[wide, case.hidden], 2)?);
        let (h, c) = (of(&[case.batch, case.hidden], 3)?, of(&[case.batch, case.hidden], 4)?);
        let c_0 = (case.kind == RecurrentKind::Lstm).then_some(&c);
        let step = || -> CoreResult<Vec<Tensor>> {
            let made = RecurrentOp { c_0, ..RecurrentOp::new(case.kind, &x, &h, &w) }.run()?;
            let loss = made.output.square()?.sum_all()?;
            let mut all = autograd::grad(&[loss], &[&x, &h, &w], &GradOptions::default())?;
            all.push(made.output.detach());
            Ok(all)
        };
        let expected = step()?;
        let mut captured = device.capture(step)?;
        for (replayed, expected) in captured.replay()?.iter().zip(&expected) {
            ensure_same_bits(replayed, expected).with_context(|| format!("{case:?}"))?;
        }
    }
    Ok(())
}

/// A backend's own kernels run 16-bit layers of at least four steps. Other layers launch each step.
fn long_sequences_take_one_launch_each_way(device: &Device) -> Result<()> {
    let has_kernels = device.library_features().recurrent;
    let cases = [
        (layer(RecurrentKind::Gru, 64, 3, 6), DType::BF16, has_kernels),
        (layer(RecurrentKind::Lstm, 64, 3, 6), DType::F16, has_kernels),
        (layer(RecurrentKind::Gru, 64, 3, 3), DType::BF16, false),
        (layer(RecurrentKind::Gru, 64, 3, 6), DType::F32, false),
    ];
    for (case, dtype, expected) in cases {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let profiler = Profiler::start(device)?;
        case.results_and_gradients(dtype, device)?;
        let spans = profiler.finish()?.spans;
        for pass in ["forward", "backward"] {
            let fused = format!("{pass} {dtype} {}x{}x{}", case.steps, case.batch, case.hidden);
            let fused = spans.iter().filter(|span| span.name.ends_with(&fused)).count();
            let steps =
                spans.iter().filter(|span| span.name.contains("recurrent") && span.name.contains(pass));
            let (fused, steps) = (fused, steps.count());
            let wanted = if expected { (1, 0) } else { (0, case.steps) };
            ensure!((fused, steps) == wanted, "{case:?} {dtype} {pass}: {fused} and {steps} launches");
        }
    }
    Ok(())
}
