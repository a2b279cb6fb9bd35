//! Reference implementations as plain loops on the host, and comparisons with their results.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::tensor::Tensor;

/// Pseudo-random number generator (SplitMix64).
pub(super) struct SplitMix64(pub(super) u64);

impl SplitMix64 {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Returns the message of an operation that must fail, without the line of the call.
pub(super) fn message<T>(result: CoreResult<T>) -> Result<String> {
    match result {
        Ok(_) => anyhow::bail!("it must fail"),
        Err(error) => Ok(error.message()),
    }
}

/// Compares a message with the expected one; the failure shows both.
pub(super) fn ensure_message<T>(result: CoreResult<T>, expected: &str) -> Result<()> {
    let got = message(result)?;
    ensure!(got == expected, "the message is\n{got}\nexpected\n{expected}");
    Ok(())
}

/// Returns every index of a shape, in row-major order.
pub(super) fn all_indices(shape: &[usize]) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for &extent in shape {
        all = all
            .into_iter()
            .flat_map(|index| {
                (0..extent).map(move |i| {
                    let mut index = index.clone();
                    index.push(i);
                    index
                })
            })
            .collect();
    }
    all
}

/// Returns the row-major offset of an index under broadcasting, for an operand of this shape.
pub(super) fn broadcast_offset(index: &[usize], shape: &[usize]) -> usize {
    let skip = index.len() - shape.len();
    shape
        .iter()
        .zip(&index[skip..])
        .fold(0, |at, (&extent, &i)| at * extent + if extent == 1 { 0 } else { i })
}

/// Returns `0, 1, 2, ...` in a type, modulo [`iota_period`].
pub(super) fn iota(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| (i % iota_period(dtype)) as f32).collect();
    Ok(Tensor::from_slice(&values, shape, device)?.to_dtype(dtype)?)
}

/// Returns the period of [`iota`].
pub(super) fn iota_period(dtype: DType) -> usize {
    if dtype == DType::Bool { 2 } else { 251 }
}

/// Returns the gradient of the sum of a call's result with respect to its input.
pub(super) fn sum_gradient(
    x: &Tensor,
    call: impl Fn(&Tensor) -> forebay::error::Result<Tensor>,
) -> Result<Tensor> {
    let x = x.detach().to_leaf()?;
    let y = call(&x)?;
    y.backward_with(&y.ones_like()?)?;
    x.grad().context("no gradient")
}

/// Compares the elements exactly; NaN equals NaN.
#[track_caller]
pub(super) fn ensure_values(t: &Tensor, expected: &[f64]) -> Result<()> {
    ensure_equal(&t.to_f64s()?, expected)
}

/// Compares two lists exactly; NaN equals NaN, 0 differs from -0.
pub(super) fn ensure_equal(got: &[f64], expected: &[f64]) -> Result<()> {
    ensure!(got.len() == expected.len(), "{} elements, expected {}", got.len(), expected.len());
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let good = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        ensure!(good, "element {i} is {a:?}, expected {b:?}");
    }
    Ok(())
}

/// Compares shapes, types and bits of two tensors.
pub(super) fn ensure_same_bits(got: &Tensor, expected: &Tensor) -> Result<()> {
    ensure!(got.shape() == expected.shape(), "shape {:?}, expected {:?}", got.shape(), expected.shape());
    ensure!(got.dtype() == expected.dtype(), "type {}, expected {}", got.dtype(), expected.dtype());
    let (a, b) = (got.to_bytes()?, expected.to_bytes()?);
    if let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) {
        let (got, expected) = (got.to_f64s()?, expected.to_f64s()?);
        let i = at * got.len() / a.len();
        anyhow::bail!("element {i} is {:?}, expected {:?} (first differing byte {at})", got[i], expected[i]);
    }
    Ok(())
}

/// Compares values within a relative and an absolute tolerance.
pub(super) fn ensure_close(got: &[f64], expected: &[f64], relative: f64, absolute: f64) -> Result<()> {
    ensure!(got.len() == expected.len(), "{} elements, expected {}", got.len(), expected.len());
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let good = (a - b).abs() <= absolute + relative * b.abs() || (a.is_nan() && b.is_nan());
        ensure!(good, "element {i} is {a:e}, expected {b:e}");
    }
    Ok(())
}
