//! Sequences, windows, reversals and pads, which kernels compute from sizes alone; and integers that no f64 holds.

use std::f64::consts::PI;

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::ops::{PadMode, Scalar};
use forebay::tensor::Tensor;

use super::asynchronous::block_on;
use super::host_reference::{
    SplitMix64, all_indices, ensure_close, ensure_same_bits, ensure_values, iota, message,
};
use super::{require_dtype, tests};

tests![
    integers_that_no_f64_holds_are_exact,
    integers_that_no_f64_holds_are_operands,
    values_that_a_dtype_does_not_hold_are_errors,
    sequences_equal_those_of_the_host_bit_by_bit,
    sequences_of_integers_are_exact,
    powers_of_sequences_are_accurate,
    windows_are_accurate,
    reversed_and_padded_elements_are_at_their_places,
    gradients_of_pads_are_sums,
    reversals_and_pads_take_no_memory_but_their_result,
    billions_of_elements_need_no_time_of_the_host,
    pairs_of_rows_are_in_order,
];

/// An odd integer above 2^53, and both ends of the range.
const WIDE: [i64; 3] = [(1 << 53) + 1, i64::MIN, i64::MAX];

fn ensure_integers(t: &Tensor, expected: &[i64]) -> Result<()> {
    let got = t.to_vec::<i64>()?;
    ensure!(got == expected, "{got:?}, not {expected:?}");
    Ok(())
}

fn integers_that_no_f64_holds_are_exact(device: &Device) -> Result<()> {
    for v in WIDE {
        let full = Tensor::full([3], v, DType::I64, device)?;
        ensure_integers(&full, &[v; 3])?;
        let zeros = full.zeros_like()?;
        ensure_integers(&zeros.full_like(v)?, &[v; 3])?;
        zeros.fill_(v)?;
        ensure_integers(&zeros, &[v; 3]).context("fill_")?;
        let x = Tensor::new([1i64, 2, 3], device)?;
        ensure_integers(&x.pad(&[1, 2], PadMode::Constant(v.into()))?, &[v, 1, 2, 3, v, v])?;
        let one = x.narrow(0, 0, 1)?;
        ensure!(one.fill_(v).is_ok() && one.to_scalar()? == Scalar::Int(v), "{one}");
        ensure!(block_on(one.item_async()).is_ok() == (v == i64::MIN));
        match v {
            // A power of two is an f64.
            i64::MIN => ensure!(one.item()? == v as f64),
            _ => {
                let error = message(one.item())?;
                ensure!(error.contains(&format!("{v} is not a value of f64")), "{error}");
            }
        }
        ensure!(format!("{one}").contains(&format!("[{v}]")), "{one}");
        ensure!(Tensor::new(v, device)?.to_scalar()? == Scalar::Int(v));
        ensure!(i64::try_from(&Tensor::new(v, device)?)? == v);
    }
    ensure!(Tensor::new(2.5, device)?.to_scalar()? == Scalar::Float(2.5));
    ensure!(Tensor::new(true, device)?.to_scalar()? == Scalar::Bool(true));
    ensure!(Tensor::new(u32::MAX, device)?.to_scalar()? == Scalar::Int(u32::MAX.into()));
    // Rounded once, not by way of an f64.
    let tie = (1i64 << 62) + (1 << 38) + 1;
    ensure!(Tensor::full((), tie, DType::F32, device)?.item()? == f64::from(tie as f32));
    Ok(())
}

fn integers_that_no_f64_holds_are_operands(device: &Device) -> Result<()> {
    require_dtype(device, DType::I64)?;
    let w = WIDE[0];
    let x = Tensor::new([w - 1, w, w + 1], device)?;
    let mask = Tensor::new([true, false, true], device)?;
    let index = Tensor::new([2i64], device)?;
    ensure_values(&x.eq(w)?, &[0.0, 1.0, 0.0])?;
    ensure_values(&x.lt(w)?, &[1.0, 0.0, 0.0])?;
    ensure_integers(&x.add(w)?, &[2 * w - 1, 2 * w, 2 * w + 1])?;
    ensure_integers(&x.remainder(w)?, &[w - 1, 0, 1])?;
    ensure_integers(&x.floor_divide(w)?, &[0, 1, 1])?;
    ensure_integers(&x.clamp(w, i64::MAX)?, &[w, w, w + 1])?;
    ensure_integers(&x.maximum(w)?, &[w, w, w + 1])?;
    ensure_integers(&x.hardtanh(w, i64::MAX)?, &[w, w, w + 1])?;
    ensure_integers(&x.threshold(w - 1, i64::MIN)?, &[i64::MIN, w, w + 1])?;
    ensure_integers(&x.zeros_like()?.addcmul(&x.ones_like()?, 1, w)?, &[w; 3])?;
    for v in WIDE {
        ensure_integers(&x.masked_fill(&mask, v)?, &[v, w, v])?;
        ensure_integers(&x.where_(&mask, v)?, &[w - 1, v, w + 1])?;
        ensure_integers(&x.scatter_value(0, &index, v)?, &[w - 1, w, v])?;
        ensure_integers(&x.index_fill(0, &index, v)?, &[w - 1, w, v])?;
        let changed = x.copy()?;
        changed.scatter_value_(0, &index, v)?;
        ensure_integers(&changed, &[w - 1, w, v])?;
        changed.masked_fill_(&mask, v)?;
        ensure_integers(&changed, &[v, w, v])?;
        changed.index_fill_(0, &Tensor::new([1i64], device)?, v)?;
        ensure_integers(&changed, &[v; 3])?;
    }
    let added = x.zeros_like()?.index_add(0, &index, &x.ones_like()?.narrow(0, 0, 1)?, w)?;
    ensure_integers(&added, &[0, 0, w])
}

fn values_that_a_dtype_does_not_hold_are_errors(device: &Device) -> Result<()> {
    for (dtype, value) in [
        (DType::U8, Scalar::Int(256)),
        (DType::U8, Scalar::Int(-1)),
        (DType::I32, Scalar::Int(1 << 31)),
        (DType::U32, Scalar::Int(1 << 32)),
        (DType::I64, Scalar::Float(9.3e18)),
        (DType::I64, Scalar::from(u64::MAX)),
    ] {
        let x = Tensor::zeros([2], dtype, device)?;
        let at = Tensor::new([0i64], device)?;
        let filled = [
            Tensor::full([2], value, dtype, device),
            x.full_like(value),
            x.pad(&[1, 0], PadMode::Constant(value)),
            x.scatter_value(0, &at, value),
            Tensor::linspace(0, value, 3, dtype, device),
            Tensor::arange(value, value.to_f64() + 4096.0, 4096, dtype, device),
        ];
        for (k, result) in filled.into_iter().enumerate() {
            let error = message(result).with_context(|| format!("{value} of {dtype}, call {k}"))?;
            ensure!(error.contains(&format!("is not a value of {dtype}")), "{error}");
        }
    }
    Ok(())
}

/// Returns values by PyTorch's formula, each half counted from its own end.
fn host_linspace(start: f64, end: f64, steps: usize) -> Vec<f64> {
    let step = if steps > 1 { (end - start) / (steps - 1) as f64 } else { 0.0 };
    let value = |i: usize| match i < steps / 2 || steps == 1 {
        true => start + i as f64 * step,
        false => end - (steps - 1 - i) as f64 * step,
    };
    (0..steps).map(value).collect()
}

fn ensure_floats(got: &Tensor, expected: &[f64]) -> Result<()> {
    let same = match got.dtype() {
        DType::F64 => got.to_vec::<f64>()?.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits()),
        _ => {
            let found = got.to_vec::<f32>()?;
            found.iter().zip(expected).position(|(a, b)| a.to_bits() != (*b as f32).to_bits())
        }
    };
    ensure!(got.numel() == expected.len() && same.is_none(), "value {same:?} of {got} differs");
    Ok(())
}

fn sequences_equal_those_of_the_host_bit_by_bit(device: &Device) -> Result<()> {
    let wide = require_dtype(device, DType::F64).is_ok();
    let mut rng = SplitMix64(7);
    let mut ends = vec![
        (0.0, 1.0),
        (-1.0, 2.0),
        (1e-40, -3e-41),
        (3e38, -3e38),
        (1e300, 1e308),
        (5e-324, 2.5e-310),
        (1e-7, 1e7),
        (0.1, 0.1 + f64::EPSILON),
    ];
    for _ in 0..20 {
        let mut float = || (rng.below(1 << 30) as f64 - 5e8) * 2f64.powi(rng.below(80) as i32 - 60);
        ends.push((float(), float()));
    }
    for (start, end) in ends {
        for steps in [1, 2, 3, 50, 1001] {
            let expected = host_linspace(start, end, steps);
            let context = || format!("linspace({start}, {end}, {steps})");
            if start.abs().max(end.abs()) < 3.4e38 {
                ensure_floats(&Tensor::linspace(start, end, steps, DType::F32, device)?, &expected)
                    .with_context(context)?;
            }
            if wide {
                ensure_floats(&Tensor::linspace(start, end, steps, DType::F64, device)?, &expected)
                    .with_context(context)?;
            }
            let step = (end - start) / 37.0;
            if steps == 50 && step != 0.0 {
                let expected: Vec<f64> =
                    (0..((end - start) / step).ceil() as usize).map(|i| start + i as f64 * step).collect();
                ensure_floats(&Tensor::arange(start, end, step, DType::F32, device)?, &expected)
                    .with_context(|| format!("arange({start}, {end}, {step})"))?;
                if wide {
                    ensure_floats(&Tensor::arange(start, end, step, DType::F64, device)?, &expected)?;
                }
            }
        }
    }
    for dtype in [DType::F16, DType::BF16] {
        let narrow = Tensor::linspace(-3.0, 2.0, 1001, dtype, device)?;
        ensure_same_bits(&narrow, &Tensor::linspace(-3.0, 2.0, 1001, DType::F32, device)?.to_dtype(dtype)?)?;
    }
    // Fractions of integers are dropped, towards zero.
    ensure_values(&Tensor::arange(-1.5, 1.5, 0.5, DType::I32, device)?, &[-1.0, -1.0, 0.0, 0.0, 0.0, 1.0])?;
    ensure_values(&Tensor::linspace(-2.9, 2.9, 5, DType::I64, device)?, &[-2.0, -1.0, 0.0, 1.0, 2.0])?;
    ensure_values(&Tensor::arange(0.0, 2.5, 0.5, DType::U8, device)?, &[0.0, 0.0, 1.0, 1.0, 2.0])?;
    ensure!(
        Tensor::linspace(0.0, f64::INFINITY, 3, DType::F32, device)?.to_f64s()?.iter().all(|v| v.is_nan())
    );
    ensure_values(&Tensor::linspace(f64::INFINITY, 0.0, 1, DType::F32, device)?, &[f64::INFINITY])
}

fn sequences_of_integers_are_exact(device: &Device) -> Result<()> {
    let w = 1i64 << 53;
    let line = |start: i64, end: i64, step: i64| Tensor::arange(start, end, step, DType::I64, device);
    ensure_integers(&line(w, w + 4, 1)?, &[w, w + 1, w + 2, w + 3])?;
    let floats = Tensor::arange(w as f64, (w + 4) as f64, 1.0, DType::I64, device)?;
    ensure_integers(&floats, &[w, w + 1, w + 2, w + 3])?;
    ensure_integers(&line(i64::MIN, i64::MIN + 3, 2)?, &[i64::MIN, i64::MIN + 2])?;
    ensure_integers(&line(i64::MAX, i64::MAX - 3, -1)?, &[i64::MAX, i64::MAX - 1, i64::MAX - 2])?;
    ensure_integers(&line(i64::MIN, i64::MAX, i64::MAX)?, &[i64::MIN, -1, i64::MAX - 1])?;
    let between = |start: i64, end: i64, steps| Tensor::linspace(start, end, steps, DType::I64, device);
    ensure_integers(&between(w, w + 4, 5)?, &[w, w + 1, w + 2, w + 3, w + 4])?;
    ensure_integers(&between(i64::MIN, i64::MAX, 3)?, &[i64::MIN, 0, i64::MAX])?;
    ensure_integers(&between(i64::MAX, i64::MIN, 2)?, &[i64::MAX, i64::MIN])?;
    // The exact values, without their fractions.
    let (start, end, steps) = (-(1i64 << 60) - 7, (1i64 << 61) + 12_345, 1000usize);
    let exact = |i: usize| {
        let scaled = i128::from(start) * 999 + i as i128 * (i128::from(end) - i128::from(start));
        (scaled / 999) as i64
    };
    ensure_integers(&between(start, end, steps)?, &(0..steps).map(exact).collect::<Vec<_>>())?;
    let top = i64::from(u32::MAX);
    let last = Tensor::arange(top - 2, top + 1, 1, DType::U32, device)?.to_vec::<u32>()?;
    ensure!(last == [u32::MAX - 2, u32::MAX - 1, u32::MAX], "{last:?}");
    let line = Tensor::linspace(i32::MIN, i32::MAX, 4, DType::I32, device)?.to_vec::<i32>()?;
    ensure!(line == [i32::MIN, -715_827_883, 715_827_882, i32::MAX], "{line:?}");
    Ok(())
}

fn powers_of_sequences_are_accurate(device: &Device) -> Result<()> {
    for (start, end, steps, base) in [
        (0.0, 2.0, 3, 10.0),
        (-30.0, 38.0, 137, 10.0),
        (-149.0, 127.0, 277, 2.0),
        (-1.0, 2.0, 7, 0.3),
        (-1e6, 1e6, 9, 1.0001),
        (0.0, 3.0, 7, 0.0),
        (-2.0, 3.0, 11, -1.5),
        (0.0, 1.0, 3, 1.0),
    ] {
        let expected: Vec<f64> =
            host_linspace(start, end, steps).iter().map(|e| f64::powf(base, *e)).collect();
        let got = Tensor::logspace(start, end, steps, base, DType::F32, device)?.to_vec::<f32>()?;
        for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let near = (f64::from(*got) - expected).abs() <= expected.abs() * 6e-8 + 1e-45;
            let same = got.to_bits() == (*expected as f32).to_bits() || (got.is_nan() && expected.is_nan());
            ensure!(near || same, "{base} to the power {k} of {start}..{end} is {got}, not {expected}");
        }
        if require_dtype(device, DType::F64).is_ok() {
            let got = Tensor::logspace(start, end, steps, base, DType::F64, device)?.to_vec::<f64>()?;
            for (got, expected) in got.iter().zip(&expected) {
                // Repeated products of a base near 1 accumulate a rounding each.
                let bound = expected.abs() * if base == 1.0001 { 2e-10 } else { 1e-13 };
                let same = got == expected || (got.is_nan() && expected.is_nan());
                ensure!(same || (got - expected).abs() <= bound, "{got}, not {expected}");
            }
        }
    }
    let powers = Tensor::logspace(0, 18, 19, 10, DType::I64, device)?.to_vec::<i64>()?;
    ensure!(powers == (0..19).map(|k| 10i64.pow(k)).collect::<Vec<_>>(), "{powers:?}");
    ensure_values(&Tensor::logspace(-1, 2, 4, 10, DType::I32, device)?, &[0.0, 1.0, 10.0, 100.0])?;
    ensure!(Tensor::logspace(0, 30, 3, 10, DType::I64, device).is_err());
    ensure!(Tensor::logspace(0, 1, 3, f64::NAN, DType::F32, device).is_err());
    Ok(())
}

fn windows_are_accurate(device: &Device) -> Result<()> {
    let i0 = |x: f64| {
        let (mut sum, mut term) = (1.0, 1.0);
        for k in 1..200 {
            term *= (x / (2.0 * f64::from(k))).powi(2);
            sum += term;
        }
        sum
    };
    for (n, periodic) in [(2, false), (9, false), (9, true), (400, true), (401, false), (1 << 16, true)] {
        let intervals = if periodic { n as f64 } else { n as f64 - 1.0 };
        let check = |name: &str, window: Tensor, weight: &dyn Fn(f64) -> f64| -> Result<()> {
            let expected: Vec<f64> = (0..n).map(|k| weight(k as f64 / intervals)).collect();
            ensure_close(&window.to_f64s()?, &expected, 2e-6, 2e-7).with_context(|| format!("{name} of {n}"))
        };
        let (t, d) = (DType::F32, device);
        let cosine = |k: f64, x: f64| (2.0 * PI * k * x).cos();
        check("hann", Tensor::hann_window(n, periodic, t, d)?, &|x| (PI * x).sin().powi(2))?;
        check("hamming", Tensor::hamming_window(n, periodic, t, d)?, &|x| 0.54 - 0.46 * cosine(1.0, x))?;
        check("blackman", Tensor::blackman_window(n, periodic, t, d)?, &|x| {
            0.42 - 0.5 * cosine(1.0, x) + 0.08 * cosine(2.0, x)
        })?;
        check("bartlett", Tensor::bartlett_window(n, periodic, t, d)?, &|x| 1.0 - (2.0 * x - 1.0).abs())?;
        check("gaussian", Tensor::gaussian_window(n, 30.0, periodic, t, d)?, &|x| {
            (-0.5 * (intervals * (x - 0.5) / 30.0).powi(2)).exp()
        })?;
        for beta in [0.0, 12.0, 80.0] {
            check("kaiser", Tensor::kaiser_window(n, periodic, beta, t, d)?, &|x| {
                i0(beta * (1.0 - (2.0 * x - 1.0).powi(2)).max(0.0).sqrt()) / i0(beta)
            })?;
        }
        let terms = [0.3, 0.4, 0.2, 0.1];
        check("cosines", Tensor::general_cosine_window(n, &terms, periodic, t, d)?, &|x| {
            terms
                .iter()
                .enumerate()
                .map(|(k, a)| a * cosine(k as f64, x) * if k % 2 == 1 { -1.0 } else { 1.0 })
                .sum()
        })?;
        if !periodic {
            // The edges are zero, and both halves mirror each other.
            let window = Tensor::hann_window(n, false, t, d)?;
            ensure_values(&window.narrow(0, 0, 1)?, &[0.0])?;
            ensure_same_bits(&window.flip([0])?, &window)?;
        }
    }
    ensure_values(&Tensor::hann_window(1, true, DType::F32, device)?, &[1.0])?;
    ensure!(Tensor::hann_window(0, true, DType::F32, device)?.shape() == [0]);
    Ok(())
}

/// Returns the source of a padded position, by the definition of the mode.
fn pad_source(i: isize, n: isize, mode: PadMode) -> Option<usize> {
    let at = match mode {
        PadMode::Constant(_) => i,
        PadMode::Replicate => i.clamp(0, n - 1),
        PadMode::Circular => i.rem_euclid(n),
        PadMode::Reflect => (n - 1) - ((n - 1) - i.abs()).abs(),
    };
    usize::try_from(at).ok().filter(|&at| (at as isize) < n)
}

const MODES: [PadMode; 4] =
    [PadMode::Constant(Scalar::Int(9)), PadMode::Reflect, PadMode::Replicate, PadMode::Circular];

/// Pads, last dimension first, of tensors of three dimensions of extents 3, 4 and 32.
const PADS: [&[isize]; 8] = [
    &[2, 1],
    &[0, 0, 3, 2],
    &[1, 2, 0, 0, 2, 1],
    &[-1, 3, 2, -2],
    &[0, 0, 0, 0, 1, 0],
    &[-30, 1],
    &[0, 0, -2, 2, 0, 2],
    &[-2, -3, -1, 0, -1, -1],
];

/// A pad that leaves nothing of the tensor but what its end repeats. There is nothing to repeat in a circle.
const BEYOND: &[isize] = &[-33, 3];

/// Returns all pads of a mode.
fn pads_of(mode: PadMode) -> impl Iterator<Item = &'static [isize]> {
    PADS.into_iter().chain((mode != PadMode::Circular).then_some(BEYOND))
}

/// Returns the padded tensor's shape, and the source of each element; `None` for a constant.
fn padded_sources(shape: &[usize], pads: &[isize], mode: PadMode) -> (Vec<usize>, Vec<Option<Vec<usize>>>) {
    let pad = |d: usize, side: usize| pads.get(2 * (shape.len() - 1 - d) + side).copied().unwrap_or(0);
    let padded: Vec<usize> =
        (0..shape.len()).map(|d| (shape[d] as isize + pad(d, 0) + pad(d, 1)) as usize).collect();
    let sources = all_indices(&padded).into_iter().map(|index| {
        let source = |(d, &c): (usize, &usize)| match mode {
            // Cropped elements do not wrap around.
            PadMode::Circular => {
                let crops = [0, 1].map(|side| (-pad(d, side)).max(0));
                let n = shape[d] as isize - crops[0] - crops[1];
                pad_source(c as isize - pad(d, 0).max(0), n, mode).map(|at| at + crops[0] as usize)
            }
            _ => pad_source(c as isize - pad(d, 0), shape[d] as isize, mode),
        };
        index.iter().enumerate().map(source).collect()
    });
    let sources = sources.collect();
    (padded, sources)
}

fn reversed_and_padded_elements_are_at_their_places(device: &Device) -> Result<()> {
    const SHAPE: [usize; 3] = [3, 4, 32];
    for dtype in [DType::F32, DType::U8, DType::BF16, DType::Bool, DType::I64] {
        let whole = iota(&[5, 4, 33], DType::F32, device)?.remainder(251.0)?.to_dtype(dtype)?;
        let views = [
            ("a copy", whole.narrow(0, 0, 3)?.narrow(2, 0, 32)?.copy()?),
            ("a part", whole.narrow(0, 1, 3)?.narrow(2, 1, 32)?),
            (
                "transposed",
                whole.narrow(0, 0, 3)?.narrow(2, 0, 32)?.transpose(0, 2)?.copy()?.transpose(0, 2)?,
            ),
            ("expanded", whole.narrow(0, 2, 1)?.narrow(2, 1, 32)?.expand([3, -1, -1])?),
        ];
        for (view, x) in &views {
            let values = x.to_f64s()?;
            let at = |index: &[usize]| values[(index[0] * SHAPE[1] + index[1]) * SHAPE[2] + index[2]];
            for dims in [&[0isize][..], &[1], &[2], &[0, 2], &[1, 2], &[0, 1, 2]] {
                let reversed = |index: Vec<usize>| {
                    let flipped = |(d, &c): (usize, &usize)| match dims.contains(&(d as isize)) {
                        true => SHAPE[d] - 1 - c,
                        false => c,
                    };
                    at(&index.iter().enumerate().map(flipped).collect::<Vec<_>>())
                };
                let expected: Vec<f64> = all_indices(&SHAPE).into_iter().map(reversed).collect();
                ensure_values(&x.flip(dims)?, &expected)
                    .with_context(|| format!("flip of {dims:?} of {dtype}, {view}"))?;
            }
            for mode in MODES {
                for pads in pads_of(mode) {
                    let (shape, sources) = padded_sources(&SHAPE, pads, mode);
                    let context = || format!("pad by {pads:?} of {dtype} in mode {mode:?}, {view}");
                    let padded = x.pad(pads, mode).with_context(context)?;
                    ensure!(padded.shape() == shape, "{:?}: {}", padded.shape(), context());
                    let constant = if dtype == DType::Bool { 1.0 } else { 9.0 };
                    let expected: Vec<f64> =
                        sources.iter().map(|source| source.as_ref().map_or(constant, |s| at(s))).collect();
                    ensure_values(&padded, &expected).with_context(context)?;
                }
            }
        }
    }
    // More dimensions than a kernel indexes.
    let many = Tensor::arange(0, 2048, 1, DType::F32, device)?.reshape([2; 11])?;
    let every = (0..2048u32).map(|i| f64::from(i ^ 0x7ff)).collect::<Vec<_>>();
    ensure_values(&many.flip(())?, &every)?;
    let alternate = (0..2048u32).map(|i| f64::from(i ^ 0x555)).collect::<Vec<_>>();
    ensure_values(&many.flip([0, 2, 4, 6, 8, 10])?, &alternate)?;
    let pads = [0isize, 0, 1, -1].repeat(5);
    let mirrored = many.pad(&pads, PadMode::Reflect)?;
    // A pad before and a crop behind swap both elements.
    let swapped = (0..2048u32).map(|i| f64::from(i ^ 0x2aa)).collect::<Vec<_>>();
    ensure_values(&mirrored, &swapped)?;
    Ok(())
}

fn gradients_of_pads_are_sums(device: &Device) -> Result<()> {
    const SHAPE: [usize; 3] = [3, 4, 32];
    for mode in MODES {
        for pads in pads_of(mode) {
            let (_, sources) = padded_sources(&SHAPE, pads, mode);
            for dtype in [DType::F32, DType::BF16] {
                let x = iota(&SHAPE, dtype, device)?.to_leaf()?;
                let y = x.pad(pads, mode)?;
                ensure!(y.dtype() == dtype);
                let weight =
                    iota(y.shape(), DType::F32, device)?.remainder(7.0)?.add(1.0)?.to_dtype(dtype)?;
                y.mul(&weight)?.sum_all()?.backward()?;
                let mut expected = vec![0.0; 384];
                for (source, w) in sources.iter().zip(weight.to_f64s()?) {
                    if let Some(s) = source {
                        expected[(s[0] * SHAPE[1] + s[1]) * SHAPE[2] + s[2]] += w;
                    }
                }
                let grad = x.grad().context("no gradient")?;
                // The sums are integers, and bf16 rounds them once.
                let tolerance = if dtype == DType::BF16 { 4e-3 } else { 0.0 };
                ensure_close(&grad.to_f64s()?, &expected, tolerance, 0.0)
                    .with_context(|| format!("{pads:?} of {dtype} in mode {mode:?}"))?;
            }
        }
    }
    Ok(())
}

/// Returns the bytes beyond those held before that `f` takes at its peak, and those of its result.
fn peak_bytes(device: &Device, f: impl FnOnce() -> CoreResult<Tensor>) -> Result<(u64, u64)> {
    let before = device.memory().allocated();
    device.pool().reset_peak_stats();
    let out = f()?;
    let kept = device.memory().allocated() - before;
    drop(out);
    Ok((device.memory().peak_allocated() - before, kept))
}

fn reversals_and_pads_take_no_memory_but_their_result(device: &Device) -> Result<()> {
    let x = Tensor::ones([64, 33, 65], DType::U8, device)?;
    for dims in [&[0isize][..], &[0, 1, 2]] {
        let (peak, kept) = peak_bytes(device, || x.flip(dims))?;
        ensure!(peak == kept, "flip of {dims:?} takes {peak} bytes for a result of {kept}");
    }
    for mode in MODES {
        let (peak, kept) = peak_bytes(device, || x.pad(&[3, 5, 2, 2, 1, 1], mode))?;
        ensure!(peak == kept, "pad in mode {mode:?} takes {peak} bytes for a result of {kept}");
    }
    for dtype in [DType::F32, DType::I32, DType::I64, DType::U8] {
        let (peak, kept) = peak_bytes(device, || Tensor::arange(0, 200, 1, dtype, device))?;
        ensure!(peak == kept, "arange of {dtype} takes {peak} bytes for a result of {kept}");
    }
    Ok(())
}

fn billions_of_elements_need_no_time_of_the_host(_: &Device) -> Result<()> {
    const N: usize = 1 << 31;
    let device = &Device::null(forebay::backend::null::CardProfile::default());
    let x = Tensor::zeros([N], DType::U8, device)?;
    let rows = Tensor::zeros([1 << 15, 1 << 16], DType::U8, device)?;
    type Call<'a> = (&'a str, &'a dyn Fn() -> CoreResult<Tensor>, usize);
    let calls: [Call<'_>; 11] = [
        ("flip", &|| x.flip([0]), N),
        ("flip of rows", &|| rows.flip(()), N),
        ("replicate", &|| x.pad(&[1 << 30, 1 << 20], PadMode::Replicate), N + (1 << 30) + (1 << 20)),
        ("reflect", &|| x.pad(&[1 << 30, 5], PadMode::Reflect), N + (1 << 30) + 5),
        ("circular", &|| x.pad(&[5, 1 << 30], PadMode::Circular), N + (1 << 30) + 5),
        (
            "constant",
            &|| rows.pad(&[1, 1, 1, 1], PadMode::Constant(1.into())),
            ((1 << 15) + 2) * ((1 << 16) + 2),
        ),
        ("arange", &|| Tensor::arange(0, N, 1, DType::F32, device), 4 * N),
        ("arange of u32", &|| Tensor::arange(0, u32::MAX, 1, DType::U32, device), 4 * u32::MAX as usize),
        ("linspace", &|| Tensor::linspace(0.0, 1.0, N, DType::F16, device), 2 * N),
        ("logspace", &|| Tensor::logspace(0, 1, N, 10, DType::F32, device), 4 * N),
        ("hann_window", &|| Tensor::hann_window(N, true, DType::F32, device), 4 * N),
    ];
    for (name, call, bytes) in calls {
        let (peak, kept) = peak_bytes(device, call)?;
        // Blocks are rounded up.
        ensure!(
            kept >= bytes as u64 && kept <= bytes as u64 + (4 << 20),
            "{name} keeps {kept} of {bytes} bytes"
        );
        ensure!(peak == kept, "{name} takes {peak} bytes for a result of {kept}");
    }
    Ok(())
}

fn pairs_of_rows_are_in_order(device: &Device) -> Result<()> {
    for rows in [0, 1, 2, 5, 40] {
        let x = iota(&[rows, 1], DType::F32, device)?.square()?;
        let at = |k: usize| (k * k) as f64;
        let pairs = (0..rows).flat_map(|a| (a + 1..rows).map(move |b| at(b) - at(a)));
        ensure_values(&x.pdist(1.0)?, &pairs.collect::<Vec<_>>()).with_context(|| format!("{rows} rows"))?;
    }
    Ok(())
}
