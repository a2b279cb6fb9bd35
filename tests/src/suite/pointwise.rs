//! Elementwise operations: types, bit-exact conversions, sizes, special values.

use std::f64::consts::{FRAC_PI_2, PI};

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{NanToNumOptions, stack};
use forebay::tensor::Tensor;
use half::{bf16, f16};

use super::host_reference::{SplitMix64, ensure_same_bits, ensure_values, iota};
use super::{compute_dtypes, require_dtype, skip, tests};

tests![
    every_pair_of_types_promotes,
    every_pair_of_types_casts,
    every_f16_and_bf16_value_is_read,
    f16_is_rounded_to_nearest_even,
    bf16_is_rounded_to_nearest_even,
    f64_is_accurate,
    scalars_with_f64_tensors_are_f64,
    remainders_in_f64_are_exact,
    scalars_with_u8_tensors_wrap_and_bounds_do_not,
    functions_in_f64_match_the_host,
    casts_of_floats_to_integers_saturate,
    i64_values_keep_all_bits,
    sizes_around_vector_widths,
    more_workgroups_than_a_dimension_has,
    nan_propagates,
    every_encoding_of_nan_is_detected,
    zeros_keep_their_signs,
    integers_wrap_and_divide,
    scalars_take_the_dtype_of_the_tensor,
    layouts_do_not_change_results,
    permuted_operands_are_read_by_tiles,
];

/// Type of a sum, by the types of its operands in the order of `DType::ALL`.
const PROMOTED: [[&str; 9]; 9] = [
    ["f32", "f32", "f32", "f64", "f32", "f32", "f32", "f32", "f32"],
    ["f32", "f16", "f32", "f64", "f16", "f16", "f16", "f16", "f16"],
    ["f32", "f32", "bf16", "f64", "bf16", "bf16", "bf16", "bf16", "bf16"],
    ["f64", "f64", "f64", "f64", "f64", "f64", "f64", "f64", "f64"],
    ["f32", "f16", "bf16", "f64", "i32", "i64", "i64", "i32", "i32"],
    ["f32", "f16", "bf16", "f64", "i64", "u32", "i64", "u32", "u32"],
    ["f32", "f16", "bf16", "f64", "i64", "i64", "i64", "i64", "i64"],
    ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8", "u8"],
    ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8", "bool"],
];

fn every_pair_of_types_promotes(device: &Device) -> Result<()> {
    let types: Vec<DType> = compute_dtypes(device).collect();
    for (a, row) in DType::ALL.into_iter().zip(PROMOTED) {
        for (b, name) in DType::ALL.into_iter().zip(row) {
            if ![a, b].iter().all(|d| types.contains(d)) || !types.iter().any(|d| d.name() == name) {
                continue;
            }
            let x = Tensor::from_slice(&[1.0f32, 0.0, 1.0, 1.0, 0.0], [5], device)?.to_dtype(a)?;
            let y = Tensor::from_slice(&[1.0f32, 1.0, 0.0, 1.0, 0.0], [5], device)?.to_dtype(b)?;
            let sum = x.add(&y)?;
            ensure!(sum.dtype().name() == name, "{a} + {b} is {}, expected {name}", sum.dtype());
            let two = if name == "bool" { 1.0 } else { 2.0 };
            ensure_values(&sum, &[two, 1.0, 1.0, two, 0.0]).with_context(|| format!("{a} + {b}"))?;
            ensure_values(&x.mul(&y)?, &[1.0, 0.0, 0.0, 1.0, 0.0]).with_context(|| format!("{a} * {b}"))?;
            ensure_values(&x.maximum(&y)?, &[1.0, 1.0, 1.0, 1.0, 0.0])
                .with_context(|| format!("max {a} {b}"))?;
            ensure_values(&x.lt(&y)?, &[0.0, 1.0, 0.0, 0.0, 0.0]).with_context(|| format!("{a} < {b}"))?;
            ensure_values(&x.eq(&y)?, &[1.0, 0.0, 0.0, 1.0, 1.0]).with_context(|| format!("{a} == {b}"))?;
        }
    }
    Ok(())
}

fn every_pair_of_types_casts(device: &Device) -> Result<()> {
    let types = DType::ALL.into_iter().filter(|&d| device.supports_dtype(d));
    for a in types.clone() {
        for b in types.clone() {
            for n in [1, 2, 3, 5, 8, 259] {
                let x = iota(&[n], a, device)?;
                let expected: Vec<f64> = match b {
                    DType::Bool => x.to_f64s()?.iter().map(|&v| f64::from(u8::from(v != 0.0))).collect(),
                    _ => x.to_f64s()?,
                };
                let describe = || format!("{n} elements from {a} to {b}");
                ensure_values(&x.to_dtype(b)?, &expected).with_context(describe)?;
                if n % 2 == 1 {
                    ensure_values(&x.narrow(0, 1, n - 1)?.to_dtype(b)?, &expected[1..])
                        .with_context(describe)?;
                }
            }
        }
    }
    Ok(())
}

/// Compares bits, with all NaNs equal.
fn check_bits(
    what: &str,
    got: &[u32],
    expected: &[u32],
    inputs: &[u32],
    is_nan: impl Fn(u32) -> bool,
) -> Result<()> {
    for ((got, expected), input) in got.iter().zip(expected).zip(inputs) {
        let good = got == expected || (is_nan(*got) && is_nan(*expected));
        ensure!(good, "{what}: {input:#x} gives {got:#x}, expected {expected:#x}");
    }
    Ok(())
}

fn words(f16_values: impl IntoIterator<Item = u16>) -> Vec<u32> {
    f16_values.into_iter().map(u32::from).collect()
}

fn f16_is_nan(bits: u32) -> bool {
    bits & 0x7fff > 0x7c00
}

fn bf16_is_nan(bits: u32) -> bool {
    bits & 0x7fff > 0x7f80
}

fn f32_is_nan(bits: u32) -> bool {
    bits & 0x7fff_ffff > 0x7f80_0000
}

fn every_f16_and_bf16_value_is_read(device: &Device) -> Result<()> {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let inputs = words(all.iter().copied());
    let bytes: Vec<u8> = all.iter().flat_map(|h| h.to_le_bytes()).collect();
    let bits =
        |t: Tensor| -> Result<Vec<u32>> { Ok(t.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect()) };
    let f16_values = Tensor::from_bytes(&bytes, [1 << 16], DType::F16, device)?;
    let expected: Vec<u32> = all.iter().map(|&h| f16::from_bits(h).to_f32().to_bits()).collect();
    check_bits("f16 to f32", &bits(f16_values.to_dtype(DType::F32)?)?, &expected, &inputs, f32_is_nan)?;
    // The round trip is exact.
    let back = f16_values.to_dtype(DType::F32)?.to_dtype(DType::F16)?.to_vec::<f16>()?;
    check_bits("f16 to f32 to f16", &words(back.iter().map(|h| h.to_bits())), &inputs, &inputs, f16_is_nan)?;

    // bf16 subnormals are f32 subnormals, which devices may flush.
    let normal: Vec<u16> = all.iter().copied().filter(|h| h & 0x7f80 != 0 || h & 0x7f == 0).collect();
    let inputs = words(normal.iter().copied());
    let bytes: Vec<u8> = normal.iter().flat_map(|h| h.to_le_bytes()).collect();
    let brains = Tensor::from_bytes(&bytes, [normal.len()], DType::BF16, device)?;
    let expected: Vec<u32> = normal.iter().map(|&h| u32::from(h) << 16).collect();
    check_bits("bf16 to f32", &bits(brains.to_dtype(DType::F32)?)?, &expected, &inputs, f32_is_nan)?;
    let back = brains.to_dtype(DType::F32)?.to_dtype(DType::BF16)?.to_vec::<bf16>()?;
    check_bits("bf16 to f32 to bf16", &words(back.iter().map(|h| h.to_bits())), &inputs, &inputs, bf16_is_nan)
}

/// Returns floats at, near and between all values of a 16-bit format, and many others; no f32 subnormals.
fn rounding_probes(half: impl Fn(u16) -> f32) -> Vec<f32> {
    let mut probes = Vec::new();
    for h in 0..=u16::MAX {
        let (a, b) = (half(h), half(h.wrapping_add(1)));
        let middle = ((f64::from(a) + f64::from(b)) / 2.0) as f32;
        for bits in [a.to_bits(), middle.to_bits()] {
            probes.extend([bits.wrapping_sub(1), bits, bits.wrapping_add(1)].map(f32::from_bits));
        }
    }
    let mut rng = SplitMix64(16);
    probes.extend((0..500_000).map(|_| f32::from_bits(rng.next() as u32)));
    probes.retain(|p| !p.is_subnormal());
    probes
}

fn f16_is_rounded_to_nearest_even(device: &Device) -> Result<()> {
    let probes = rounding_probes(|h| f16::from_bits(h).to_f32());
    let x = Tensor::from_slice(&probes, [probes.len()], device)?;
    let got = words(x.to_dtype(DType::F16)?.to_vec::<f16>()?.iter().map(|h| h.to_bits()));
    let expected = words(probes.iter().map(|&p| f16::from_f32(p).to_bits()));
    let inputs: Vec<u32> = probes.iter().map(|p| p.to_bits()).collect();
    check_bits("f32 to f16", &got, &expected, &inputs, f16_is_nan)
}

fn bf16_is_rounded_to_nearest_even(device: &Device) -> Result<()> {
    let probes = rounding_probes(|h| bf16::from_bits(h).to_f32());
    let x = Tensor::from_slice(&probes, [probes.len()], device)?;
    let got = words(x.to_dtype(DType::BF16)?.to_vec::<bf16>()?.iter().map(|h| h.to_bits()));
    let expected = words(probes.iter().map(|&p| bf16::from_f32(p).to_bits()));
    let inputs: Vec<u32> = probes.iter().map(|p| p.to_bits()).collect();
    check_bits("f32 to bf16", &got, &expected, &inputs, bf16_is_nan)
}

fn f64_is_accurate(device: &Device) -> Result<()> {
    require_dtype(device, DType::F64)?;
    let mut rng = SplitMix64(64);
    let values: Vec<f64> = (0..1000).map(|_| rng.next() as f64 / 1e9 - 9e9).collect();
    let x = Tensor::from_slice(&values, [1000], device)?;
    ensure_values(&x.add(0.1)?, &values.iter().map(|v| v + 0.1).collect::<Vec<_>>())?;
    ensure_values(&x.mul(&x)?, &values.iter().map(|v| v * v).collect::<Vec<_>>())?;
    let narrow: Vec<f64> = values.iter().map(|&v| f64::from(v as f32)).collect();
    ensure_values(&x.to_dtype(DType::F32)?, &narrow)?;
    ensure_values(&x.to_dtype(DType::F32)?.to_dtype(DType::F64)?, &narrow)
}

/// Scalars that f32 cannot represent reach f64 kernels exactly.
fn scalars_with_f64_tensors_are_f64(device: &Device) -> Result<()> {
    require_dtype(device, DType::F64)?;
    let values = [1.0, -2.5, 3e7];
    let x = Tensor::from_slice(&values, [3], device)?;
    for number in
        [1e300, -1e300, 1e-50, 5e-300, 0.1, -0.0, 1.0 / 3.0, f64::MAX, f64::MIN_POSITIVE, f64::INFINITY]
    {
        let same = |got: Tensor, expected: [f64; 3]| -> Result<()> {
            let got = got.to_vec::<f64>()?;
            ensure!(got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{number:e}: {got:?}");
            Ok(())
        };
        same(x.mul(number)?, values.map(|v| v * number))?;
        same(x.add(number)?, values.map(|v| v + number))?;
        same(x.maximum(number)?, values.map(|v| v.max(number)))?;
        let filled = x.copy()?;
        filled.fill_(number)?;
        same(filled, [number; 3])?;
    }
    ensure!(x.add(f64::NAN)?.to_vec::<f64>()?.iter().all(|v| v.is_nan()));
    let special = Tensor::from_slice(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY], [3], device)?;
    ensure!(special.nan_to_num()?.to_vec::<f64>()? == [0.0, f64::MAX, f64::MIN]);
    ensure!(
        Tensor::from_slice(&[3i32, -1], [2], device)?
            .nan_to_num_with(&NanToNumOptions { posinf: Some(1.0), neginf: Some(2.0), ..Default::default() })?
            .dtype()
            == DType::I32
    );
    Ok(())
}

/// Compares with the host's `%`, which is C's fmod and exact.
fn remainders_in_f64_are_exact(device: &Device) -> Result<()> {
    require_dtype(device, DType::F64)?;
    let mut rng = SplitMix64(66);
    let mut any = || {
        let (size, unit) = (rng.next() % 60, rng.next() as f64 / u64::MAX as f64 - 0.5);
        unit * 10f64.powi(size as i32 - 30)
    };
    let mut pairs: Vec<(f64, f64)> = (0..500).map(|_| (any(), any())).collect();
    pairs.extend([
        (1e300, 3.0),
        (-1e-30, 3.7),
        (5.3, f64::INFINITY),
        (-5.3, f64::INFINITY),
        (7.0, 3.5),
        (-7.0, 3.5),
    ]);
    let x = Tensor::from_slice(&pairs.iter().map(|p| p.0).collect::<Vec<_>>(), [pairs.len()], device)?;
    let y = Tensor::from_slice(&pairs.iter().map(|p| p.1).collect::<Vec<_>>(), [pairs.len()], device)?;
    let (left, below) = (x.fmod(&y)?.to_vec::<f64>()?, x.remainder(&y)?.to_vec::<f64>()?);
    for (k, (a, b)) in pairs.into_iter().enumerate() {
        let rest = a % b;
        ensure!(left[k] == rest, "fmod({a:e}, {b:e}) is {:e}, expected {rest:e}", left[k]);
        let rest = if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest };
        ensure!(below[k] == rest, "remainder({a:e}, {b:e}) is {:e}, expected {rest:e}", below[k]);
    }
    ensure!(x.fmod(0.0)?.to_vec::<f64>()?.iter().all(|v| v.is_nan()));
    Ok(())
}

/// Scalars wrap as in PyTorch, while bounds do not.
fn scalars_with_u8_tensors_wrap_and_bounds_do_not(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[0u8, 5, 254, 255], [4], device)?;
    // Comparisons are mathematical.
    ensure!(x.gt(-2)?.to_bools()? == [true; 4] && x.eq(-2)?.to_bools()? == [false; 4]);
    ensure!(x.lt(300)?.to_bools()? == [true; 4]);
    ensure!(x.add(-2)?.to_vec::<u8>()? == [254, 3, 252, 253]);
    ensure!(
        x.maximum(-2)?.to_vec::<u8>()? == [0, 5, 254, 255]
            && x.minimum(300)?.to_vec::<u8>()? == [0, 5, 254, 255]
    );
    ensure!(x.clamp(-2, 300)?.to_vec::<u8>()? == [0, 5, 254, 255]);
    Ok(())
}

/// Host functions are within about two units in the last place. A bound of 32 units distinguishes f64 from f32 and
/// finds wrong coefficients.
fn functions_in_f64_match_the_host(device: &Device) -> Result<()> {
    type Pair = (&'static str, fn(&Tensor) -> forebay::error::Result<Tensor>, fn(f64) -> f64);
    require_dtype(device, DType::F64)?;
    let mut rng = SplitMix64(65);
    let mut unit = || rng.next() as f64 / u64::MAX as f64;
    let wide: Vec<f64> = (0..600).map(|_| (unit() - 0.5) * 2f64.powf(10.0 * unit() - 4.0)).collect();
    let near: Vec<f64> = (0..600).map(|_| 2.0 * unit() - 1.0).collect();
    let everywhere: [Pair; 15] = [
        ("exp", Tensor::exp, f64::exp),
        ("exp2", Tensor::exp2, f64::exp2),
        ("expm1", Tensor::expm1, f64::exp_m1),
        ("tanh", Tensor::tanh, f64::tanh),
        ("sin", Tensor::sin, f64::sin),
        ("cos", Tensor::cos, f64::cos),
        ("tan", Tensor::tan, f64::tan),
        ("sinh", Tensor::sinh, f64::sinh),
        ("cosh", Tensor::cosh, f64::cosh),
        ("atan", Tensor::atan, f64::atan),
        ("asinh", Tensor::asinh, f64::asinh),
        ("sigmoid", Tensor::sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        ("log(|x|)", |x| x.abs()?.log(), |x| x.abs().ln()),
        ("log2(|x|)", |x| x.abs()?.log2(), |x| x.abs().log2()),
        ("log10(|x|)", |x| x.abs()?.log10(), |x| x.abs().log10()),
    ];
    let within_one: [Pair; 5] = [
        ("asin", Tensor::asin, f64::asin),
        ("acos", Tensor::acos, f64::acos),
        ("atanh", Tensor::atanh, f64::atanh),
        ("log1p", Tensor::log1p, f64::ln_1p),
        ("erf(erfinv)", |x| x.erfinv()?.erf(), |x| x),
    ];
    let all = everywhere.iter().map(|pair| (&wide, pair)).chain(within_one.iter().map(|pair| (&near, pair)));
    for (arguments, (name, ours, host)) in all {
        let x = Tensor::from_slice(arguments, [arguments.len()], device)?;
        for (&x, got) in arguments.iter().zip(ours(&x)?.to_vec::<f64>()?) {
            let exact = host(x);
            let bound = 32.0 * f64::EPSILON * exact.abs();
            ensure!((got - exact).abs() <= bound || got == exact, "{name}({x:e}) is {got:e}, not {exact:e}");
        }
    }
    // Near multiples of pi/2, for each range reduction, and up to f64's limits. The last but one is f64's worst case.
    let angles = [
        1e-300,
        -0.0,
        FRAC_PI_2,
        -PI,
        355.0,
        1e5,
        1_048_575.5,
        1_048_576.0,
        -1e20,
        1e22,
        6_381_956_970_095_103.0 * 2f64.powi(797),
        f64::MAX,
    ];
    let x = Tensor::from_slice(&angles, [angles.len()], device)?;
    let circle: [Pair; 3] =
        [("sin", Tensor::sin, f64::sin), ("cos", Tensor::cos, f64::cos), ("tan", Tensor::tan, f64::tan)];
    for (name, ours, host) in circle {
        for (&x, got) in angles.iter().zip(ours(&x)?.to_vec::<f64>()?) {
            let exact = host(x);
            ensure!(
                (got - exact).abs() <= 8.0 * f64::EPSILON * exact.abs(),
                "{name}({x:e}) is {got:e}, not {exact:e}"
            );
        }
        let none = Tensor::from_slice(&[f64::INFINITY, f64::NEG_INFINITY, f64::NAN], [3], device)?;
        ensure!(
            ours(&none)?.to_vec::<f64>()?.iter().all(|v| v.is_nan()),
            "{name} of no finite number is a number"
        );
    }
    // High-precision references: erfc(2), lgamma(1/2), digamma(1), and π²/6 and π²/2 of trigamma.
    for (name, got, exact) in [
        ("erfc", Tensor::full((), 2.0, DType::F64, device)?.erfc()?.item()?, 0.004677734981047266),
        ("lgamma", Tensor::full((), 0.5, DType::F64, device)?.lgamma()?.item()?, 0.5723649429247001),
        ("digamma", Tensor::full((), 1.0, DType::F64, device)?.digamma()?.item()?, -0.5772156649015329),
        ("trigamma", Tensor::full((), 1.0, DType::F64, device)?.polygamma(1)?.item()?, 1.6449340668482264),
        ("trigamma", Tensor::full((), 0.5, DType::F64, device)?.polygamma(1)?.item()?, 4.934802200544679),
        (
            "polygamma(2)",
            Tensor::full((), -1.7, DType::F64, device)?.polygamma(2)?.item()?,
            -69.03454955011419,
        ),
    ] {
        ensure!((got - exact).abs() <= 1e-14 * exact.abs(), "{name} is {got:e}, not {exact:e}");
    }
    Ok(())
}

fn casts_of_floats_to_integers_saturate(device: &Device) -> Result<()> {
    let values = [
        0.0f32,
        -0.0,
        0.9,
        -0.9,
        1.5,
        -1.5,
        2.5,
        255.0,
        2e9,
        -2e9,
        1e20,
        -1e20,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    let x = Tensor::from_slice(&values, [values.len()], device)?;
    // Integers above the largest f32 within i32 or u32 are unreachable in f32, which saturates below them.
    let largest = |exact: u32, float: u32| move |got: u32| got == exact || got == float;
    let i32s = x.to_dtype(DType::I32)?.to_vec::<i32>()?;
    ensure!(i32s[..10] == [0, 0, 0, 0, 1, -1, 2, 255, 2_000_000_000, -2_000_000_000], "{i32s:?}");
    for i in [10, 12] {
        ensure!(largest(i32::MAX as u32, 0x7fff_ff80)(i32s[i] as u32), "{} gives {}", values[i], i32s[i]);
    }
    ensure!(i32s[11] == i32::MIN && i32s[13] == i32::MIN && i32s[14] == 0, "{i32s:?}");
    let u32s = x.to_dtype(DType::U32)?.to_vec::<u32>()?;
    ensure!(u32s[..10] == [0, 0, 0, 0, 1, 0, 2, 255, 2_000_000_000, 0], "{u32s:?}");
    for i in [10, 12] {
        ensure!(largest(u32::MAX, 0xffff_ff00)(u32s[i]), "{} gives {}", values[i], u32s[i]);
    }
    ensure!(u32s[11] == 0 && u32s[13] == 0 && u32s[14] == 0, "{u32s:?}");
    let bools = x.to_dtype(DType::Bool)?.to_bools()?;
    ensure!(bools == values.map(|v| v != 0.0), "every number but 0 is true, and so is NaN: {bools:?}");
    Ok(())
}

fn i64_values_keep_all_bits(device: &Device) -> Result<()> {
    let values = [0i64, 1, -1, i64::MAX, i64::MIN, 1 << 40, -(1 << 40), 123_456_789_012];
    let x = Tensor::from_slice(&values, [8], device)?;
    ensure!(x.flip([0])?.flip([0])?.to_vec::<i64>()? == values, "moving loses bits");
    ensure!(Tensor::full([3], -5e12, DType::I64, device)?.to_vec::<i64>()? == [-5_000_000_000_000; 3]);
    let small = Tensor::from_slice(&[-3i64, 7, 0], [3], device)?;
    ensure!(small.to_dtype(DType::I32)?.to_dtype(DType::I64)?.to_vec::<i64>()? == [-3, 7, 0]);
    let sum = x.add(1i64 << 33)?.to_vec::<i64>()?;
    ensure!(sum == values.map(|v| v.wrapping_add(1 << 33)), "{sum:?}");
    let product = x.mul(&x)?.to_vec::<i64>()?;
    ensure!(product == values.map(|v| v.wrapping_mul(v)), "{product:?}");
    Ok(())
}

fn sizes_around_vector_widths(device: &Device) -> Result<()> {
    for dtype in compute_dtypes(device).filter(|&d| d != DType::Bool) {
        for n in (1..=9).chain([31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4099]) {
            let x = iota(&[n], dtype, device)?;
            let expected: Vec<f64> = x.to_f64s()?.iter().map(|v| v + 2.0).collect();
            let describe = || format!("{n} elements of {dtype}");
            ensure_values(&x.add(2)?, &expected).with_context(describe)?;
            x.add_(2)?;
            ensure_values(&x, &expected).with_context(describe)?;
        }
    }
    Ok(())
}

fn more_workgroups_than_a_dimension_has(device: &Device) -> Result<()> {
    // 1,024 elements a workgroup, 65,535 workgroups a dimension: this grid is folded, and its last row is partial.
    let n: usize = (65_536 << 10) + 5;
    if device.info().limits.max_binding_bytes < n as u64 + 3 {
        return skip(format!("the device binds at most {} bytes", device.info().limits.max_binding_bytes));
    }
    let mut rng = SplitMix64(0);
    let bytes: Vec<u8> = (0..n.div_ceil(8)).flat_map(|_| rng.next().to_le_bytes()).take(n).collect();
    let x = Tensor::from_bytes(&bytes, [n], DType::U8, device)?;
    let sum = x.add(1)?.to_bytes()?;
    let wrong = sum.iter().zip(&bytes).position(|(a, b)| *a != b.wrapping_add(1));
    ensure!(wrong.is_none(), "element {wrong:?} of {n} is wrong");
    // A copy of a strided view uses another kernel.
    let column = x.narrow(0, 0, n - 5)?.view([1 << 13, 1 << 13])?.t()?.copy()?.to_bytes()?;
    for at in [0, 1, 8191, 8192, 33_554_432, (65_535 << 10) - 1, 65_535 << 10, (65_536 << 10) - 1] {
        ensure!(column[at] == bytes[at % 8192 * 8192 + at / 8192], "element {at} of the transpose");
    }
    Ok(())
}

/// Special values.
const SPECIAL: [f32; 10] =
    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1.0, -1.0, 2.5, f32::MAX, f32::MIN_POSITIVE];

fn nan_propagates(device: &Device) -> Result<()> {
    let pairs: Vec<(f32, f32)> = SPECIAL.iter().flat_map(|&a| SPECIAL.map(|b| (a, b))).collect();
    let column = |f: fn(&(f32, f32)) -> f32| {
        Tensor::from_slice(&pairs.iter().map(f).collect::<Vec<_>>(), [100], device)
    };
    let (x, y) = (column(|p| p.0)?, column(|p| p.1)?);
    type Rule = fn(f32, f32) -> f32;
    let checks: &[(&str, Tensor, Rule)] = &[
        ("maximum", x.maximum(&y)?, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }),
        ("minimum", x.minimum(&y)?, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.min(b) }),
        ("add", x.add(&y)?, |a, b| a + b),
        ("mul", x.mul(&y)?, |a, b| a * b),
        ("relu", x.relu()?, |a, _| if a <= 0.0 { 0.0 } else { a }),
        ("relu6", x.relu6()?, |a, _| a.clamp(0.0, 6.0)),
        ("hardtanh", x.hardtanh(-2.0, 2.0)?, |a, _| a.clamp(-2.0, 2.0)),
        ("threshold", x.threshold(0.5, 0.5)?, |a, _| if a <= 0.5 { 0.5 } else { a }),
        ("abs", x.abs()?, |a, _| a.abs()),
        ("eq", x.eq(&y)?, |a, b| f32::from(u8::from(a == b))),
        ("ne", x.ne(&y)?, |a, b| f32::from(u8::from(a != b))),
        ("lt", x.lt(&y)?, |a, b| f32::from(u8::from(a < b))),
        ("ge", x.ge(&y)?, |a, b| f32::from(u8::from(a >= b))),
        ("exp", x.exp()?, |a, _| if a == 1.0 { std::f32::consts::E } else { a.exp() }),
        ("sign", x.sign()?, |a, _| {
            if a > 0.0 {
                1.0
            } else if a < 0.0 {
                -1.0
            } else {
                0.0
            }
        }),
    ];
    for (name, got, rule) in checks {
        for ((a, b), got) in pairs.iter().zip(got.to_f64s()?) {
            let expected = f64::from(rule(*a, *b));
            let good = (got.is_nan() && expected.is_nan())
                || got == expected
                || (got - expected).abs() <= 1.3e-6 * expected.abs();
            ensure!(good, "{name} of {a} and {b} is {got}, expected {expected}");
        }
    }
    for dtype in compute_dtypes(device).filter(|d| d.is_float()) {
        let (x, y) = (x.to_dtype(dtype)?, y.to_dtype(dtype)?);
        let nan = |a: f32, b: f32| a.is_nan() || b.is_nan();
        for (name, got, any) in [
            ("maximum", x.maximum(&y)?, true),
            ("minimum", x.minimum(&y)?, true),
            ("clamp", x.clamp(-1.0, 1.0)?, false),
            ("clamp below a tensor", x.clamp(-1.0, &y)?, true),
            ("hardtanh", x.hardtanh(-2.0, 2.0)?, false),
            ("relu", x.relu()?, false),
            ("amax", stack(&[&x, &y], 0)?.amax([0], false)?, true),
            ("amin", stack(&[&x, &y], 0)?.amin([0], false)?, true),
        ] {
            for ((a, b), got) in pairs.iter().zip(got.to_f64s()?) {
                let expected = if any { nan(*a, *b) } else { a.is_nan() };
                ensure!(got.is_nan() == expected, "{name} of {a} and {b} in {dtype} is {got}");
            }
        }
        let clamped = x.clamp(-1.0, 1.0)?.to_f64s()?;
        ensure!(clamped[10] == 1.0 && clamped[20] == -1.0, "clamp in {dtype}: {clamped:?}");
        let found = x.isnan()?.to_bools()?;
        ensure!(found.iter().zip(&pairs).all(|(f, p)| *f == p.0.is_nan()), "isnan in {dtype}: {found:?}");
    }
    Ok(())
}

fn every_encoding_of_nan_is_detected(device: &Device) -> Result<()> {
    let forms = [
        0x7fc0_0000u32,
        0xffc0_0000,
        0x7f80_0001,
        0xff80_0001,
        0x7fff_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7f7f_ffff,
    ];
    let x = Tensor::from_slice(&forms.map(f32::from_bits), [8], device)?;
    ensure!(x.isnan()?.to_bools()? == [true, true, true, true, true, false, false, false]);
    ensure!(x.isinf()?.to_bools()? == [false, false, false, false, false, true, true, false]);
    ensure!(x.isfinite()?.to_bools()? == [false, false, false, false, false, false, false, true]);
    ensure!(x.nan_to_num()?.to_vec::<f32>()?[..5] == [0.0; 5]);
    Ok(())
}

fn zeros_keep_their_signs(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[0.0f32, -0.0], [2], device)?;
    let bits =
        |t: Tensor| -> Result<Vec<u32>> { Ok(t.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect()) };
    ensure!(bits(x.neg()?)? == [0x8000_0000, 0], "negation flips the sign of zero");
    ensure!(bits(x.mul(1.0)?)? == [0, 0x8000_0000], "a product keeps the sign of zero");
    for dtype in [DType::F16, DType::BF16] {
        ensure!(bits(x.to_dtype(dtype)?.to_dtype(DType::F32)?)? == [0, 0x8000_0000], "{dtype} keeps -0");
    }
    ensure!(
        bits(Tensor::from_slice(&[1.0f32, 1.0], [2], device)?.copysign(&x)?)? == [0x3f80_0000, 0xbf80_0000]
    );
    Ok(())
}

fn integers_wrap_and_divide(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[7i32, -7, 7, -7, i32::MAX, i32::MIN], [6], device)?;
    let y = Tensor::from_slice(&[2i32, 2, -2, -2, 1, 1], [6], device)?;
    ensure!(x.add(&y)?.to_vec::<i32>()? == [9, -5, 5, -9, i32::MIN, i32::MIN + 1]);
    ensure!(x.floor_divide(&y)?.to_vec::<i32>()?[..4] == [3, -4, -4, 3]);
    ensure!(x.trunc_divide(&y)?.to_vec::<i32>()?[..4] == [3, -3, -3, 3]);
    ensure!(x.remainder(&y)?.to_vec::<i32>()?[..4] == [1, 1, -1, -1]);
    ensure!(x.fmod(&y)?.to_vec::<i32>()?[..4] == [1, -1, 1, -1]);
    ensure!(x.div(&y)?.dtype() == DType::F32 && x.div(&y)?.to_vec::<f32>()?[..4] == [3.5, -3.5, -3.5, 3.5]);
    let bytes = Tensor::from_slice(&[250u8, 255, 0], [3], device)?;
    ensure!(bytes.add(10)?.to_vec::<u8>()? == [4, 9, 10] && bytes.sub(1)?.to_vec::<u8>()? == [249, 254, 255]);
    ensure!(bytes.bitwise_not()?.to_vec::<u8>()? == [5, 0, 255]);
    ensure!(x.bitwise_xor(&y)?.to_vec::<i32>()?[..2] == [7 ^ 2, -7 ^ 2]);
    Ok(())
}

fn scalars_take_the_dtype_of_the_tensor(device: &Device) -> Result<()> {
    let int = Tensor::from_slice(&[1i32, 2], [2], device)?;
    ensure!(int.add(1)?.dtype() == DType::I32 && int.add(1.5)?.dtype() == DType::F32);
    let half = int.to_dtype(DType::F16)?;
    ensure!(half.add(1.5)?.dtype() == DType::F16 && half.mul(2)?.dtype() == DType::F16);
    // A tensor without dimensions promotes only across categories.
    let scalar = Tensor::full((), 2.0, DType::F32, device)?;
    ensure!(half.add(&scalar)?.dtype() == DType::F16 && int.add(&scalar)?.dtype() == DType::F32);
    ensure_values(&int.rsub(10)?, &[9.0, 8.0])?;
    ensure_values(&int.pow(2)?, &[1.0, 4.0])
}

fn layouts_do_not_change_results(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(7);
    let values: Vec<f32> = (0..24 * 20).map(|_| (rng.below(4000) as f32 - 2000.0) / 500.0).collect();
    let x = Tensor::from_slice(&values, [24, 20], device)?;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let strided = x.to_dtype(dtype)?.t()?.slice_dim(1, 1, 24, 2)?;
        let dense = strided.copy()?;
        for (a, b) in [
            (strided.exp()?, dense.exp()?),
            (strided.tanh()?, dense.tanh()?),
            (strided.gelu()?, dense.gelu()?),
            (strided.mul(&strided)?.add(0.5)?, dense.mul(&dense)?.add(0.5)?),
            (strided.sin()?, dense.sin()?),
        ] {
            ensure_same_bits(&a, &b).with_context(|| dtype.to_string())?;
        }
    }
    Ok(())
}

/// Shapes have extents at and around those of a tile, and dimensions outside of it, with one operand, two and three.
fn permuted_operands_are_read_by_tiles(device: &Device) -> Result<()> {
    let shapes: [(&[usize], &[isize]); 6] = [
        (&[33, 64], &[1, 0]),
        (&[16, 100], &[1, 0]),
        (&[3, 20, 36], &[0, 2, 1]),
        (&[2, 31, 3, 40], &[0, 3, 1, 2]),
        (&[2, 3, 32, 32], &[1, 3, 0, 2]),
        (&[17, 5, 16], &[2, 1, 0]),
    ];
    for dtype in compute_dtypes(device).filter(|dtype| !dtype.is_storage_only()) {
        for (shape, dims) in shapes {
            // The last dimension of the results is one of whole quads.
            let inner = iota(shape, dtype, device)?;
            let permuted = inner.permute(dims)?.permute(dims)?;
            for view in [inner.permute(dims)?, permuted] {
                let dense = view.copy()?;
                let other = dense.flip([0])?;
                let mask = dense.gt(&other)?;
                let pairs = [
                    (view.eq(&other)?, dense.eq(&other)?),
                    (other.maximum(&view)?, other.maximum(&dense)?),
                    (view.where_(&mask, &other)?, dense.where_(&mask, &other)?),
                    (view.minimum(&view)?, dense.clone()),
                    (
                        other.narrow(0, 1, other.shape()[0] - 1)?.maximum(&view.narrow(
                            0,
                            1,
                            view.shape()[0] - 1,
                        )?)?,
                        other.maximum(&dense)?.narrow(0, 1, view.shape()[0] - 1)?.copy()?,
                    ),
                ];
                for (k, (a, b)) in pairs.iter().enumerate() {
                    ensure_same_bits(a, b)
                        .with_context(|| format!("{dtype}, {shape:?} as {dims:?}, case {k}"))?;
                }
            }
        }
    }
    Ok(())
}
