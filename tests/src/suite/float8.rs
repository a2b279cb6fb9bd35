//! 8-bit floats: casts against the format's definition, copies, unsupported operations, scaled products.

use anyhow::{Context, Result, ensure};
use forebay::amp::{autocast, fp8, is_fp8_enabled};
use forebay::autograd::{self, GradOptions, checkpoint};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::ops::CustomOp;
use forebay::optim::{AdamW, Optimizer};
use forebay::tensor::Tensor;
use forebay_shaders::{KernelSpec, render};

use super::tests;

tests![
    every_byte_decodes_to_its_value,
    values_are_rounded_as_in_pytorch,
    copies_and_casts_take_any_layout,
    scaled_products_are_within_their_error_bound,
    products_are_captured,
    other_operations_refuse_float8,
    wrong_operands_are_named,
    scaled_casts_equal_casts_of_quotients,
    fp8_layers_equal_products_of_their_casts,
    fp8_layers_keep_dtypes_and_are_deterministic,
    a_model_trains_in_8_bits,
];

/// Returns the value of a byte, by the definition of the format.
fn value(dtype: DType, byte: u8) -> f64 {
    let (mantissa, bias) = if dtype == DType::F8E4M3 { (3, 7) } else { (2, 15) };
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(byte & 0x7f) >> mantissa, i32::from(byte) & ((1 << mantissa) - 1));
    let special = if dtype == DType::F8E4M3 { byte & 0x7f == 0x7f } else { exponent == 31 };
    let part = f64::from(fraction) / f64::from(1 << mantissa);
    match exponent {
        _ if special && (dtype == DType::F8E4M3 || fraction > 0) => f64::NAN,
        _ if special => sign * f64::INFINITY,
        0 => sign * part * 2f64.powi(1 - bias),
        _ => sign * (1.0 + part) * 2f64.powi(exponent - bias),
    }
}

/// Returns the byte that PyTorch rounds a number to: the nearest, ties to even. Beyond the largest value, e4m3
/// saturates and e5m2 gives infinity.
fn nearest(dtype: DType, number: f64) -> u8 {
    let sign = if number.is_sign_negative() { 0x80 } else { 0 };
    let number = number.abs();
    let last: u8 = if dtype == DType::F8E4M3 { 0x7e } else { 0x7b };
    if number.is_nan() {
        return sign | 0x7f;
    }
    let found = (0..=last).rev().find(|&byte| value(dtype, byte) <= number).unwrap_or(0);
    let low = value(dtype, found);
    // The hypothetical next value decides from where on numbers overflow.
    let step = if found < last { value(dtype, found + 1) - low } else { low - value(dtype, found - 1) };
    let middle = low + step / 2.0;
    let up = number > middle || (number == middle && found % 2 == 1);
    sign | if up && (found < last || dtype == DType::F8E5M2) { found + 1 } else { found }
}

fn bytes_of(t: &Tensor) -> Result<Vec<u8>> {
    Ok(t.to_bytes()?)
}

fn all_bytes(dtype: DType, device: &Device) -> Result<Tensor> {
    let bytes: Vec<u8> = (0..=255).collect();
    Ok(Tensor::from_bytes(&bytes, [256], dtype, device)?)
}

fn every_byte_decodes_to_its_value(device: &Device) -> Result<()> {
    for dtype in DType::STORAGE_ONLY {
        let x = all_bytes(dtype, device)?;
        for to in [DType::F32, DType::F16, DType::BF16] {
            let got = x.to_dtype(to)?.to_f64s()?;
            for (byte, got) in got.into_iter().enumerate() {
                let expected = value(dtype, byte as u8);
                let same = got == expected && got.is_sign_negative() == expected.is_sign_negative();
                ensure!(
                    same || (got.is_nan() && expected.is_nan()),
                    "{dtype} {byte:#x} as {to}: {got}, not {expected}"
                );
            }
            let back = bytes_of(&x.to_dtype(to)?.to_dtype(dtype)?)?;
            for (byte, got) in back.into_iter().enumerate() {
                let nan = value(dtype, byte as u8).is_nan() && value(dtype, got).is_nan();
                // Infinity saturates in e4m3 and is preserved in e5m2.
                ensure!(usize::from(got) == byte || nan, "{dtype} {byte:#x} through {to}: {got:#x}");
            }
        }
        let read = x.to_f64s()?;
        ensure!(read[0x35] == value(dtype, 0x35), "what the host reads");
        let full = Tensor::full([5], 0.3, dtype, device)?;
        ensure!(bytes_of(&full)? == [nearest(dtype, f64::from(0.3f32)); 5], "what the host fills with");
    }
    Ok(())
}

fn values_are_rounded_as_in_pytorch(device: &Device) -> Result<()> {
    for dtype in DType::STORAGE_ONLY {
        let mut values =
            vec![f32::NAN, f32::INFINITY, 1e9, 463.9, 464.0, 464.1, 480.0, 65_535.0, 65_536.0, 61_440.0];
        for byte in 0..0x7fu8 {
            let (a, b) = (value(dtype, byte), value(dtype, byte + 1));
            for middle in [a as f32, ((a + b) / 2.0) as f32] {
                values.extend([middle.next_down(), middle, middle.next_up()]);
            }
        }
        values.extend((0..4000).map(|k: u32| f32::from_bits(k.wrapping_mul(1_064_731))));
        values.retain(|x| !x.is_subnormal());
        values.extend(values.clone().into_iter().map(|x| -x));
        let x = Tensor::from_slice(&values, [values.len()], device)?;
        let got = bytes_of(&x.to_dtype(dtype)?)?;
        for (number, got) in values.iter().zip(got) {
            let expected = nearest(dtype, f64::from(*number));
            let nan = number.is_nan() && value(dtype, got).is_nan();
            ensure!(got == expected || nan, "{number:e} as {dtype}: {got:#x}, not {expected:#x}");
        }
        for from in [DType::F16, DType::BF16] {
            let rounded = x.to_dtype(from)?;
            let through = bytes_of(&rounded.to_dtype(DType::F32)?.to_dtype(dtype)?)?;
            ensure!(bytes_of(&rounded.to_dtype(dtype)?)? == through, "{from} to {dtype}");
        }
    }
    Ok(())
}

fn copies_and_casts_take_any_layout(device: &Device) -> Result<()> {
    for dtype in DType::STORAGE_ONLY {
        let x = all_bytes(dtype, device)?.narrow(0, 0, 0x78)?.reshape([8, 15])?;
        let all = x.to_f64s()?;
        let turned: Vec<f64> = (0..120).map(|k| all[k % 8 * 15 + k / 8]).collect();
        ensure!(x.t()?.to_f64s()? == turned && x.t()?.contiguous()?.to_f64s()? == turned);
        ensure!(x.t()?.to_dtype(DType::F32)?.to_f64s()? == turned, "a cast of a transpose");
        for start in 0..6 {
            let part = x.reshape([120])?.narrow(0, start, 9)?;
            let expected = &all[start..start + 9];
            ensure!(
                part.to_dtype(DType::BF16)?.to_f64s()? == expected && part.copy()?.to_f64s()? == expected
            );
        }
        let out = Tensor::zeros([8, 15], dtype, device)?;
        out.narrow(1, 3, 5)?.copy_(&x.to_dtype(DType::F32)?.narrow(1, 0, 5)?)?;
        ensure!(out.narrow(1, 3, 5)?.to_f64s()? == x.narrow(1, 0, 5)?.to_f64s()?, "a part written in place");
        ensure!(out.narrow(1, 8, 7)?.to_f64s()?.iter().all(|v| *v == 0.0), "the neighbouring elements");
        let none = Tensor::empty([0, 3], dtype, device)?.to_dtype(DType::F32)?;
        ensure!(none.shape() == [0, 3]);
    }
    Ok(())
}

/// Returns a matrix of values between -2 and 2, rounded to a type.
fn matrix(shape: [usize; 2], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::uniform(shape, -2.0, 2.0, DType::F32, device)?.to_dtype(dtype)?)
}

/// Computes scale_a · scale_b · (a · b) + bias in f64, and the same with absolute values.
fn reference(a: &Tensor, b: &Tensor, scales: [&Tensor; 2], bias: Option<&Tensor>) -> Result<Vec<(f64, f64)>> {
    let (&[m, k], &[_, n]) = (a.shape(), b.shape()) else { anyhow::bail!("two matrices") };
    let (a, b) = (a.to_f64s()?, b.to_f64s()?);
    let [left, right] = [scales[0].to_f64s()?, scales[1].to_f64s()?];
    let bias = bias.map(Tensor::to_f64s).transpose()?;
    let at = |row: usize, col: usize| {
        let scale = left[row % left.len()] * right[col % right.len()];
        let terms = || (0..k).map(|i| a[row * k + i] * b[i * n + col]);
        let bias = bias.as_ref().map_or(0.0, |bias| bias[col]);
        (scale * terms().sum::<f64>() + bias, scale.abs() * terms().map(f64::abs).sum::<f64>() + bias.abs())
    };
    Ok((0..m * n).map(|i| at(i / n, i % n)).collect())
}

fn close(got: &Tensor, expected: &[(f64, f64)]) -> Result<()> {
    let rounding = match got.dtype() {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    };
    for (k, (got, (expected, all))) in got.to_f64s()?.into_iter().zip(expected).enumerate() {
        let bound = 2f64.powi(-11) * all + rounding * expected.abs();
        ensure!((got - expected).abs() <= bound, "element {k}: {got}, not {expected} within {bound:e}");
    }
    Ok(())
}

fn scaled_products_are_within_their_error_bound(device: &Device) -> Result<()> {
    use DType::{BF16, F8E4M3, F8E5M2, F16, F32};
    let number = |v: f64| Tensor::full((), v, F32, device);
    let (one, two) = (number(0.25)?, Tensor::full([1, 1], 3.0, F32, device)?);
    // Multiples of 16, which the vendor's library supports, and other sizes; each pair of types.
    let sizes = [[32, 64, 48], [5, 32, 16], [7, 9, 3], [1, 1, 1]];
    for [m, k, n] in sizes {
        for (left, right) in [(F8E4M3, F8E4M3), (F8E4M3, F8E5M2), (F8E5M2, F8E4M3), (F8E5M2, F8E5M2)] {
            let (a, weight) = (matrix([m, k], left, device)?, matrix([n, k], right, device)?);
            let bias = Tensor::uniform([n], -1.0, 1.0, F32, device)?;
            for (out, bias) in [(F32, None), (F32, Some(&bias)), (BF16, Some(&bias)), (F16, None)] {
                let describe =
                    || format!("{m} x {k} x {n}, {left} with {right} to {out}, bias {}", bias.is_some());
                let b = weight.t()?;
                // The bias is rounded to the type in which it is added.
                let rounded = bias.map(|bias| bias.to_dtype(out)?.to_dtype(F32)).transpose()?;
                let expected = reference(&a, &b, [&one, &two], rounded.as_ref())?;
                let got = a.scaled_mm(&b, &one, &two, bias, out).with_context(describe)?;
                ensure!(got.dtype() == out && got.shape() == [m, n]);
                close(&got, &expected).with_context(describe)?;
                // Column-major and row-major, and with an unaligned offset.
                let (a, b) = (a.t()?.contiguous()?.t()?, b.contiguous()?);
                close(&a.scaled_mm(&b, &one, &two, bias, out)?, &expected).with_context(describe)?;
                let long = Tensor::zeros([m * k + 3], left, device)?.narrow(0, 3, m * k)?.reshape([m, k])?;
                long.copy_(&a)?;
                close(&long.scaled_mm(&b, &one, &two, bias, out)?, &expected).with_context(describe)?;
            }
            let rows = Tensor::uniform([m, 1], 0.5, 2.0, F32, device)?;
            let columns = Tensor::uniform([1, n], 0.5, 2.0, F32, device)?;
            for scales in [[&rows, &columns], [&rows, &one], [&two, &columns]] {
                let expected = reference(&a, &weight.t()?, scales, Some(&bias.to_dtype(BF16)?))?;
                let got = a.scaled_mm(&weight.t()?, scales[0], scales[1], Some(&bias), BF16)?;
                // The bias is added in f32, or in bf16 by the vendor's library.
                let loose: Vec<_> = expected.iter().map(|(e, all)| (*e, all * 9.0)).collect();
                close(&got, &loose).with_context(|| format!("{m} x {k} x {n}, scales of lines"))?;
            }
        }
    }
    let none = matrix([0, 16], F8E4M3, device)?.scaled_mm(
        &matrix([16, 16], F8E4M3, device)?,
        &one,
        &one,
        None,
        F32,
    )?;
    ensure!(none.shape() == [0, 16]);
    let zeros = matrix([4, 0], F8E4M3, device)?.scaled_mm(
        &matrix([0, 16], F8E4M3, device)?,
        &one,
        &one,
        None,
        F32,
    )?;
    ensure!(zeros.to_f64s()? == [0.0; 64], "a sum of nothing");
    Ok(())
}

fn products_are_captured(device: &Device) -> Result<()> {
    let x = Tensor::uniform([32, 64], -1.0, 1.0, DType::F32, device)?;
    let weight = matrix([16, 64], DType::F8E4M3, device)?;
    let scale = Tensor::full((), 0.5, DType::F32, device)?;
    let bias = Tensor::uniform([16], -1.0, 1.0, DType::BF16, device)?;
    let step = || -> forebay::error::Result<Tensor> {
        let low = x.div(&scale)?.to_dtype(DType::F8E4M3)?;
        low.scaled_mm(&weight.t()?, &scale, &scale, Some(&bias), DType::BF16)
    };
    let mut captured = device.capture(step)?;
    for factor in [1.0, 0.5, -0.25] {
        x.mul_(factor)?;
        scale.mul_(1.5)?;
        let expected = step()?.to_f64s()?;
        for _ in 0..3 {
            ensure!(captured.replay()?.to_f64s()? == expected, "after a change by {factor}");
        }
    }
    Ok(())
}

fn other_operations_refuse_float8(device: &Device) -> Result<()> {
    let index = Tensor::from_slice(&[0i32, 1], [2], device)?;
    for dtype in DType::STORAGE_ONLY {
        let x = matrix([4, 4], dtype, device)?;
        let wide = x.to_dtype(DType::F32)?;
        let refused = [
            ("add", x.add(&x)),
            ("mul", wide.mul(&x)),
            ("gt", x.gt(0.5)),
            ("exp", x.exp()),
            ("matmul", x.matmul(&x)),
            ("matmul", wide.matmul(&x)),
            ("sum", x.sum((), false)),
            ("max", x.amax([0], false)),
            ("softmax", x.softmax(-1)),
            ("sort", x.sort(0, false).map(|(sorted, _)| sorted)),
            ("cumsum", x.cumsum(0)),
            ("index_select", x.index_select(0, &index)),
            ("relu", x.relu()),
            ("linear", x.linear(&x, None)),
        ];
        for (name, result) in refused {
            match result {
                Err(Error::DType { got, .. }) => ensure!(got == dtype || got == DType::F32, "{name}: {got}"),
                Err(other) => anyhow::bail!("{name} of {dtype}: {other}"),
                Ok(_) => anyhow::bail!("{name} takes {dtype}"),
            }
        }
        ensure!(x.add_(&x).is_err() && wide.add_(&x).is_err() && x.mul_(2.0).is_err(), "in place");
        ensure!(x.to_leaf().is_err() && x.zeros_like()?.to_f64s()? == [0.0; 16]);
        // A cast that would lose the gradient is an error.
        let leaf = wide.to_leaf()?;
        ensure!(matches!(leaf.to_dtype(dtype), Err(Error::NoGradient { op: "to_dtype", .. })));
        leaf.detach().to_dtype(dtype)?;
    }
    Ok(())
}

fn wrong_operands_are_named(device: &Device) -> Result<()> {
    let x = matrix([4, 16], DType::F8E4M3, device)?;
    let b = matrix([16, 8], DType::F8E5M2, device)?;
    let one = Tensor::ones((), DType::F32, device)?;
    let row = |n: usize| Tensor::ones([n, 1], DType::F32, device);
    let wide = x.to_dtype(DType::F32)?;
    let cases = [
        (wide.scaled_mm(&b, &one, &one, None, DType::F32), "takes f8_e4m3 and f8_e5m2"),
        (x.scaled_mm(&x, &one, &one, None, DType::F32), "the first has 16 columns, the second 4 rows"),
        (x.scaled_mm(&b, &row(3)?, &one, None, DType::F32), "one for each line: [4, 1]"),
        (x.scaled_mm(&b, &one, &row(8)?, None, DType::F32), "one for each line: [1, 8]"),
        (x.scaled_mm(&b, &one.to_dtype(DType::BF16)?, &one, None, DType::F32), "scales are f32"),
        (x.scaled_mm(&b, &one, &one, Some(&row(8)?), DType::F32), "takes a bias of [8]"),
        (x.scaled_mm(&b, &one, &one, None, DType::F8E4M3), "gives f32, f16 and bf16"),
        (x.scaled_mm(&b, &one.to_leaf()?, &one, None, DType::F32), "has no gradient"),
    ];
    for (result, text) in cases {
        let Err(error) = result else { anyhow::bail!("`{text}` is not in the error") };
        ensure!(error.to_string().contains(text), "{error}\ndoes not say {text}");
    }
    Ok(())
}

/// Rounds a tensor to 8-bit floats, scaled by the smallest power of two that fits their range; returns f32.
fn quantize_dequantize(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let largest = if dtype == DType::F8E4M3 { 448.0 } else { 57_344.0 };
    let max_abs = x.to_f64s()?.into_iter().fold(0.0, |max_abs: f64, x| max_abs.max(x.abs()));
    let scale = (max_abs / largest).log2().ceil().exp2();
    let low = x.to_dtype(DType::F32)?.div(scale)?.to_dtype(dtype)?;
    Ok(low.to_dtype(DType::F32)?.mul(scale)?)
}

/// Compares up to rounding of the type and the error of matrix units for sums of `terms` large values.
fn ensure_near(name: &str, got: &Tensor, expected: &Tensor, terms: f64) -> Result<()> {
    let (got_all, expected) = (got.to_f64s()?, expected.to_f64s()?);
    let rounding = match got.dtype() {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 1e-6,
    };
    let max_abs = expected.iter().fold(0.0, |max_abs: f64, x| max_abs.max(x.abs()));
    let bound = 2f64.powi(-11) * max_abs * terms.sqrt();
    ensure!(got_all.len() == expected.len(), "{name}: {} values, not {}", got_all.len(), expected.len());
    for (k, (got, expected)) in got_all.into_iter().zip(expected).enumerate() {
        let bound = bound + rounding * expected.abs();
        ensure!(
            (got - expected).abs() <= bound,
            "{name}, element {k}: {got}, not {expected} within {bound:e}"
        );
    }
    Ok(())
}

/// Runs the fp8 quantisation kernel of linear layers, which every device supports. Returns scale, bytes and
/// transposed bytes.
fn scaled_cast(x: &Tensor, to: DType, transposes: bool) -> Result<(f32, Vec<u8>, Option<Vec<u8>>)> {
    let (&[rows, columns], n) = (x.shape(), x.numel()) else { anyhow::bail!("a matrix") };
    let spec = KernelSpec::new("fp8_quantize")
        .def("dtype", x.dtype().name())
        .def("to", to.name())
        .def("width", if n.is_multiple_of(4) { 4usize } else { 1 })
        .def("transposed", transposes)
        .def("steps_per_thread", 4usize);
    let text: &'static str = Box::leak(render(&spec)?.into_boxed_str());
    let op: &'static CustomOp = Box::leak(Box::new(CustomOp::new("fp8_quantize", text)));
    // As words, because this kernel interprets the bytes itself.
    let words = |t: &Tensor| -> Result<Tensor> {
        let mut bytes = t.to_bytes()?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let dtype = if t.dtype() == DType::F32 { DType::F32 } else { DType::U32 };
        Ok(Tensor::from_bytes(&bytes, [bytes.len() / 4], dtype, t.device())?)
    };
    let largest = words(&x.norm(f64::INFINITY, (), false)?)?;
    let groups = if transposes { rows.div_ceil(64) * columns.div_ceil(64) } else { n.div_ceil(4096) };
    let x = words(x)?;
    let mut call =
        op.inputs(&[&x, &largest]).params(&[rows as u32, columns as u32]).workgroups([groups, 1, 1]);
    for count in [1, n.div_ceil(4)].into_iter().chain(transposes.then_some(n / 4)) {
        call = call.output([count], DType::U32);
    }
    let mut out = call.run_all()?.into_iter().map(|t| t.to_bytes()).collect::<Result<Vec<_>, _>>()?;
    let turned = transposes.then(|| out.pop()).flatten();
    let (bytes, scale) = (out.pop().context("bytes")?, out.pop().context("a scale")?);
    let scale = scale.try_into().map(f32::from_le_bytes).ok().context("four bytes")?;
    Ok((scale, bytes[..n].to_vec(), turned))
}

fn scaled_casts_equal_casts_of_quotients(device: &Device) -> Result<()> {
    let shapes =
        [([64, 128], true), ([80, 112], true), ([16, 16], true), ([7, 12], false), ([70, 61], false)];
    for (dtype, to) in
        [DType::F32, DType::F16, DType::BF16].into_iter().flat_map(|d| DType::STORAGE_ONLY.map(|to| (d, to)))
    {
        let last = value(to, if to == DType::F8E4M3 { 0x7e } else { 0x7b });
        for (k, (shape, transposes)) in shapes.into_iter().enumerate() {
            let (size, odd) =
                [(3e-4, 1.0), (300.0, f64::NAN), (1.0, f64::INFINITY), (0.0, 0.0), (0.2, last)][k];
            let x = Tensor::randn(shape, DType::F32, device)?.mul(size)?;
            // The last value: the type's largest, for which the scale must be exact, or infinity or NaN.
            x.narrow(0, shape[0] - 1, 1)?.narrow(1, shape[1] - 1, 1)?.fill_(odd)?;
            let x = x.to_dtype(dtype)?;
            let (scale, bytes, turned) = scaled_cast(&x, to, transposes)?;
            let values = x.to_f64s()?;
            let max_abs =
                values.iter().fold(0.0, |max_abs: f64, x| if x.is_nan() { *x } else { max_abs.max(x.abs()) });
            let what = format!("{dtype} to {to}, {shape:?}");
            if odd.is_nan() {
                ensure!(
                    scale.is_nan() && bytes.iter().all(|b| value(to, *b).is_nan()),
                    "{what}: NaN is everywhere"
                );
            } else if odd.is_infinite() {
                let (end, others) = bytes.split_last().context("bytes")?;
                ensure!(
                    scale.is_infinite() && value(to, *end).is_nan() && others.iter().all(|b| b & 0x7f == 0),
                    "{what}"
                );
            } else {
                let expected = (max_abs.max(1e-30) / last).log2().ceil().exp2();
                ensure!(f64::from(scale) == expected, "{what}: a scale of {scale:e}, not {expected:e}");
                for (at, (number, byte)) in values.iter().zip(&bytes).enumerate() {
                    let expected = nearest(to, number / expected);
                    ensure!(*byte == expected, "{what}, {at}: {number:e} is {byte:#x}, not {expected:#x}");
                }
            }
            let Some(turned) = turned else { continue };
            let expected = (0..bytes.len()).map(|at| bytes[at % shape[0] * shape[1] + at / shape[0]]);
            ensure!(turned.into_iter().eq(expected), "{what}: its transpose");
        }
    }
    Ok(())
}

fn fp8_layers_equal_products_of_their_casts(device: &Device) -> Result<()> {
    // Multiples of 16, and other sizes; values far from 1, as in gradients.
    for (dtype, [m, n, k], size) in [
        (DType::F32, [32, 48, 64], 1.0),
        (DType::F32, [5, 7, 9], 3e-7),
        (DType::BF16, [16, 32, 16], 300.0),
        (DType::F16, [3, 16, 32], 0.05),
    ] {
        let of = |shape: &[usize], size: f64| -> Result<Tensor> {
            Ok(Tensor::randn(shape, DType::F32, device)?.mul(size)?.to_dtype(dtype)?)
        };
        let (x, weight) = (of(&[1, m, k], size)?.to_leaf()?, of(&[n, k], 0.1)?.to_leaf()?);
        let (bias, g) = (of(&[n], 0.1)?.to_leaf()?, of(&[1, m, n], size)?);
        let y = {
            let _fp8 = fp8();
            x.linear(&weight, Some(&bias))?
        };
        ensure!(!is_fp8_enabled() && y.dtype() == dtype && y.shape() == [1, m, n]);
        y.backward_with(&g)?;
        let describe = |what: &str| format!("{dtype} {m} x {n} x {k}, {what}");
        let [low_x, low_weight] = [
            quantize_dequantize(&x.detach(), DType::F8E4M3)?,
            quantize_dequantize(&weight.detach(), DType::F8E4M3)?,
        ];
        let low_g = quantize_dequantize(&g, DType::F8E5M2)?.reshape([m, n])?;
        let low_x = low_x.reshape([m, k])?;
        let expected = low_x.mm(&low_weight.t()?)?.add(&bias.detach().to_dtype(DType::F32)?)?;
        ensure_near(&describe("the result"), &y, &expected, k as f64)?;
        let grad = |t: &Tensor| t.grad().context("a gradient");
        ensure_near(&describe("of x"), &grad(&x)?, &low_g.mm(&low_weight)?, n as f64)?;
        ensure_near(&describe("of the weight"), &grad(&weight)?, &low_g.t()?.mm(&low_x)?, m as f64)?;
        ensure_near(
            &describe("of the bias"),
            &grad(&bias)?,
            &g.to_dtype(DType::F32)?.sum([0, 1], false)?,
            m as f64,
        )?;
    }
    Ok(())
}

fn fp8_layers_keep_dtypes_and_are_deterministic(device: &Device) -> Result<()> {
    let x = Tensor::randn([32, 16], DType::F32, device)?.to_leaf()?;
    let of = |shape: &[usize]| Tensor::randn(shape, DType::F32, device)?.mul(0.3)?.to_leaf();
    let (up, up_bias, down, down_bias) = (of(&[48, 16])?, of(&[48])?, of(&[16, 48])?, of(&[16])?);
    let all = [&x, &up, &up_bias, &down, &down_bias];
    let run = |again: bool| -> Result<Vec<Vec<f64>>> {
        all.iter().for_each(|t| t.set_grad(None));
        let (_autocast, _fp8) = (autocast(DType::BF16)?, fp8());
        let y = if again {
            let layers = (up.clone(), up_bias.clone(), down.clone(), down_bias.clone());
            checkpoint(&[&x], move |t| t[0].mlp(&layers.0, &layers.1, &layers.2, &layers.3))?
        } else {
            x.mlp(&up, &up_bias, &down, &down_bias)?
        };
        drop((_autocast, _fp8));
        ensure!(y.dtype() == DType::BF16, "{}", y.dtype());
        y.to_dtype(DType::F32)?.square()?.sum_all()?.backward()?;
        let mut found = vec![y.to_f64s()?];
        for t in all {
            let grad = t.grad().context("a gradient")?;
            ensure!(grad.dtype() == DType::F32, "a gradient of {}", grad.dtype());
            found.push(grad.to_f64s()?);
        }
        Ok(found)
    };
    let plain = run(false)?;
    ensure!(plain == run(true)?, "a checkpoint gives other values");
    all.iter().for_each(|t| t.set_grad(None));
    let wide = x.mlp(&up, &up_bias, &down, &down_bias)?.to_f64s()?;
    ensure!(plain[0] != wide, "products are those of other types");
    let _fp8 = fp8();
    {
        let _inner = fp8();
    }
    ensure!(is_fp8_enabled(), "an inner scope ends the outer one");
    // Empty inputs have no maximum; NaN is preserved.
    let none = Tensor::zeros([0, 16], DType::F32, device)?.linear(&up, Some(&up_bias))?;
    ensure!(none.shape() == [0, 48]);
    let zeros = Tensor::zeros([2, 16], DType::F32, device)?.linear(&up, None)?;
    ensure!(zeros.to_f64s()?.iter().all(|&y| y == 0.0), "zeros times a weight");
    let nan = Tensor::full([2, 16], f64::NAN, DType::F32, device)?.linear(&up, None)?;
    ensure!(nan.to_f64s()?.iter().all(|y| y.is_nan()), "NaN times a weight");
    // An FP8 layer has no second derivative, and reports an error.
    let options = GradOptions::create_graph();
    let y = x.linear(&up, None)?.square()?.sum_all()?;
    let slope = autograd::grad(&[y], std::slice::from_ref(&x), &options)?[0].square()?.sum_all()?;
    let Err(error) = slope.backward() else { anyhow::bail!("a second gradient") };
    ensure!(error.to_string().contains("linear: its gradient has no gradient"), "{error}");
    Ok(())
}

fn a_model_trains_in_8_bits(device: &Device) -> Result<()> {
    let x = Tensor::randn([64, 16], DType::F32, device)?;
    let goal = x.narrow(1, 0, 1)?.mul(&x.narrow(1, 1, 1)?)?;
    let of = |shape: &[usize]| Tensor::randn(shape, DType::F32, device)?.mul(0.25)?.to_leaf();
    let (up, up_bias, down, down_bias) = (of(&[64, 16])?, of(&[64])?, of(&[16, 64])?, of(&[16])?);
    let all = vec![up.clone(), up_bias.clone(), down.clone(), down_bias.clone()];
    let mut optimizer = AdamW::new(all, 1e-2);
    let mut losses = Vec::new();
    for _ in 0..60 {
        let y = {
            let (_autocast, _fp8) = (autocast(DType::BF16)?, fp8());
            x.mlp(&up, &up_bias, &down, &down_bias)?.narrow(1, 0, 1)?
        };
        let loss = y.to_dtype(DType::F32)?.sub(&goal)?.square()?.mean_all()?;
        losses.push(loss.item()?);
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    ensure!(last < first / 4.0, "the loss goes from {first} to {last}");
    Ok(())
}
