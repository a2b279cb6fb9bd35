//! Integers of 64 bits on every device: results that are i64 by rule, mixed operands, and values beyond 32 bits.

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as ForebayResult;
use forebay::tensor::Tensor;

use super::tests;

tests![
    sums_and_products_of_integers_are_i64,
    predicted_classes_equal_targets_of_any_integer_type,
    arithmetic_is_that_of_the_host,
    comparisons_see_all_bits,
    casts_keep_all_bits,
    reductions_see_all_bits,
];

const VALUES: [i64; 10] =
    [0, 1, -1, 7, -7, (1 << 32) + 1, -(1 << 33) - 5, i64::MAX, i64::MIN + 1, 123_456_789_012];
const OTHERS: [i64; 10] = [3, 1, 1 << 32, -2, 2, 1, 1 << 32, -3, 1 << 31, -987_654];

fn ensure_i64(name: &str, got: &Tensor, expected: &[i64]) -> Result<()> {
    ensure!(got.dtype() == DType::I64, "{name} gives {}", got.dtype());
    let got = got.to_vec::<i64>()?;
    ensure!(got == expected, "{name}: {got:?}, expected {expected:?}");
    Ok(())
}

fn sums_and_products_of_integers_are_i64(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[i32::MAX, i32::MAX, 5, -9], [2, 2], device)?;
    let max = i64::from(i32::MAX);
    ensure_i64("sum_all", &x.sum_all()?, &[2 * max - 4])?;
    ensure_i64("sum", &x.sum([0], false)?, &[max + 5, max - 9])?;
    ensure_i64("cumsum", &x.reshape([4])?.cumsum(0)?, &[max, 2 * max, 2 * max + 5, 2 * max - 4])?;
    ensure_i64("prod", &x.prod(1, false)?, &[max * max, -45])?;
    ensure_i64(
        "cumprod",
        &x.reshape([4])?.cumprod(0)?,
        &[max, max * max, (max * max).wrapping_mul(5), ((max * max).wrapping_mul(5)).wrapping_mul(-9)],
    )?;
    let bytes = Tensor::full([70_000, 300], 255.0, DType::U8, device)?;
    ensure_i64("a sum of bytes", &bytes.sum_all()?, &[255 * 21_000_000])?;
    ensure_i64("a column of bytes", &bytes.sum([0], false)?.narrow(0, 0, 1)?.copy()?, &[255 * 70_000])?;
    let long = Tensor::ones([20_000], DType::I32, device)?.cumsum(0)?;
    ensure_i64("a long cumsum", &long.narrow(0, 19_999, 1)?.copy()?, &[20_000])?;
    let flags = Tensor::from_bools(&[true, false, true], [3], device)?;
    ensure_i64("a sum of bools", &flags.sum_all()?, &[2])?;
    ensure_i64("a square of bools", &flags.square()?, &[1, 0, 1])?;
    ensure_i64("bools and an integer", &flags.add(1i64 << 40)?, &[(1 << 40) + 1, 1 << 40, (1 << 40) + 1])?;
    let (unsigned, signed) = (
        Tensor::from_slice(&[u32::MAX, 1], [2], device)?,
        Tensor::from_slice(&[-1i32, i32::MIN], [2], device)?,
    );
    ensure_i64("u32 and i32", &unsigned.add(&signed)?, &[i64::from(u32::MAX) - 1, 1 + i64::from(i32::MIN)])
}

fn predicted_classes_equal_targets_of_any_integer_type(device: &Device) -> Result<()> {
    let logits = Tensor::from_slice(&[0.1f32, 0.9, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 5.0], [3, 3], device)?;
    let targets = Tensor::from_slice(&[1i64, 0, 1], [3], device)?;
    for dtype in [DType::I64, DType::I32, DType::U32, DType::U8] {
        let hits = logits.argmax(1, false)?.eq(&targets.to_dtype(dtype)?)?;
        ensure!(hits.to_bools()? == [true, true, false], "targets of {dtype}");
        ensure_i64("hits", &hits.sum_all()?, &[2])?;
    }
    ensure_i64("one_hot", &targets.one_hot(2)?.sum([0], false)?, &[1, 2])
}

fn arithmetic_is_that_of_the_host(device: &Device) -> Result<()> {
    let a = Tensor::from_slice(&VALUES, [10], device)?;
    let b = Tensor::from_slice(&OTHERS, [10], device)?;
    type Case = (&'static str, fn(&Tensor, &Tensor) -> ForebayResult<Tensor>, fn(i64, i64) -> i64);
    let cases: [Case; 18] = [
        ("add", |a, b| a.add(b), i64::wrapping_add),
        ("sub", |a, b| a.sub(b), i64::wrapping_sub),
        ("rsub", |a, b| a.rsub(b), |a, b| b.wrapping_sub(a)),
        ("mul", |a, b| a.mul(b), i64::wrapping_mul),
        (
            "floor_divide",
            |a, b| a.floor_divide(b),
            |a, b| a.div_euclid(b) - i64::from(b < 0 && a.rem_euclid(b) != 0),
        ),
        ("remainder", |a, b| a.remainder(b), |a, b| ((a % b) + b) % b),
        ("trunc_divide", |a, b| a.trunc_divide(b), |a, b| a / b),
        ("fmod", |a, b| a.fmod(b), |a, b| a % b),
        ("maximum", |a, b| a.maximum(b), i64::max),
        ("minimum", |a, b| a.minimum(b), i64::min),
        ("bitwise_and", |a, b| a.bitwise_and(b), |a, b| a & b),
        ("bitwise_or", |a, b| a.bitwise_or(b), |a, b| a | b),
        ("bitwise_xor", |a, b| a.bitwise_xor(b), |a, b| a ^ b),
        ("bitwise_not", |a, _| a.bitwise_not(), |a, _| !a),
        ("neg", |a, _| a.neg(), |a, _| a.wrapping_neg()),
        ("abs", |a, _| a.abs(), |a, _| a.wrapping_abs()),
        ("sign", |a, _| a.sign(), |a, _| a.signum()),
        ("clamp", |a, _| a.clamp(-(1i64 << 32), 1i64 << 35), |a, _| a.clamp(-(1 << 32), 1 << 35)),
    ];
    for (name, run, host) in cases {
        let expected: Vec<i64> = VALUES.iter().zip(OTHERS).map(|(&a, b)| host(a, b)).collect();
        ensure_i64(name, &run(&a, &b)?, &expected)?;
    }
    let flags = a.lt(0)?;
    let chosen: Vec<i64> = VALUES.iter().zip(OTHERS).map(|(&a, b)| if a < 0 { a } else { b }).collect();
    ensure_i64("where", &a.where_(&flags, &b)?, &chosen)?;
    let filled: Vec<i64> = VALUES.iter().map(|&a| if a < 0 { 1 << 40 } else { a }).collect();
    ensure_i64("masked_fill", &a.masked_fill(&flags, 1i64 << 40)?, &filled)?;
    let c = a.copy()?;
    c.add_(&b)?;
    ensure_i64("add_", &c, &a.add(&b)?.to_vec::<i64>()?)?;
    c.fill_(-5i64)?;
    ensure_i64("fill_", &c, &[-5; 10])
}

fn comparisons_see_all_bits(device: &Device) -> Result<()> {
    let a = Tensor::from_slice(&VALUES, [10, 1], device)?;
    let b = Tensor::from_slice(&VALUES, [1, 10], device)?;
    type Case = (&'static str, fn(&Tensor, &Tensor) -> ForebayResult<Tensor>, fn(&i64, &i64) -> bool);
    let cases: [Case; 6] = [
        ("eq", |a, b| a.eq(b), i64::eq),
        ("ne", |a, b| a.ne(b), i64::ne),
        ("lt", |a, b| a.lt(b), i64::lt),
        ("le", |a, b| a.le(b), i64::le),
        ("gt", |a, b| a.gt(b), i64::gt),
        ("ge", |a, b| a.ge(b), i64::ge),
    ];
    for (name, run, host) in cases {
        let expected: Vec<bool> =
            VALUES.iter().flat_map(|a| VALUES.iter().map(move |b| host(a, b))).collect();
        ensure!(run(&a, &b)?.to_bools()? == expected, "{name}");
    }
    Ok(())
}

fn casts_keep_all_bits(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&VALUES, [10], device)?;
    let floats: Vec<f32> = VALUES.iter().map(|&v| v as f32).collect();
    ensure!(x.to_dtype(DType::F32)?.to_vec::<f32>()? == floats, "i64 to f32");
    ensure!(x.to_dtype(DType::Bool)?.to_bools()? == VALUES.map(|v| v != 0), "i64 to bool");
    let wide = Tensor::full([1], (1i64 << 32) as f64, DType::I64, device)?;
    ensure!(wide.to_dtype(DType::Bool)?.to_bools()? == [true] && wide.any((), false)?.to_bools()? == [true]);
    let x = Tensor::from_slice(&[5e12f32, -5e12, 0.9, -1.9, f32::NAN, 16_777_216.0], [6], device)?;
    ensure_i64(
        "f32 to i64",
        &x.to_dtype(DType::I64)?,
        &[5e12f32 as i64, -5e12f32 as i64, 0, -1, 0, 1 << 24],
    )?;
    let x = Tensor::from_slice(&[u32::MAX, 7], [2], device)?;
    ensure_i64("u32 to i64", &x.to_dtype(DType::I64)?, &[i64::from(u32::MAX), 7])?;
    let x = Tensor::from_slice(&[-3i32, i32::MIN], [2], device)?;
    ensure_i64("i32 to i64", &x.to_dtype(DType::I64)?, &[-3, i64::from(i32::MIN)])
}

fn reductions_see_all_bits(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&VALUES, [10], device)?;
    ensure_i64("amax", &x.amax((), false)?, &[i64::MAX])?;
    ensure_i64("amin", &x.amin((), false)?, &[i64::MIN + 1])?;
    ensure_i64("argmax", &x.argmax((), false)?, &[7])?;
    ensure_i64("argmin", &x.argmin((), false)?, &[8])?;
    ensure_i64("sum", &x.sum_all()?, &[VALUES.iter().fold(0, |sum: i64, &v| sum.wrapping_add(v))])?;
    ensure_i64("count_nonzero", &x.mul(1i64 << 32)?.count_nonzero(())?, &[9])?;
    let (value, index) = x.cummax(0)?;
    ensure_i64("cummax", &value, &[0, 1, 1, 7, 7, VALUES[5], VALUES[5], i64::MAX, i64::MAX, i64::MAX])?;
    ensure_i64("its index", &index, &[0, 1, 1, 3, 3, 5, 5, 7, 7, 7])
}
