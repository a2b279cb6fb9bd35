//! Medians, quantiles, histograms and covariances, compared with sorted values.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{CovOptions, Interpolation};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits, ensure_values, iota};
use super::sorting::mixed;
use super::{skip, tests};

tests![
    medians_and_ranks,
    quantiles_of_all_kinds,
    quantiles_outside_are_nan,
    quantiles_of_more_elements_than_f32_counts,
    bins_at_the_end_are_counted,
    histograms_of_the_widest_spans,
    weights_of_observations_are_not_negative,
];

fn medians_and_ranks(device: &Device) -> Result<()> {
    for n in [1, 2, 5, 8, 2050, 7001] {
        let x = mixed(&[3, n], DType::F32, device)?;
        let sorted = x.sort(1, false)?.0;
        for k in [1, n.div_ceil(2), n] {
            let (value, index) = x.kthvalue(k, 1, true)?;
            ensure_same_bits(&value, &sorted.narrow(1, k - 1, 1)?.copy()?)
                .with_context(|| format!("{k} of {n}"))?;
            ensure_same_bits(&x.gather(1, &index)?, &value)?;
        }
        let middle = sorted.select(1, (n as isize - 1) / 2)?.copy()?;
        ensure_same_bits(&x.median(1, false)?.0, &middle).with_context(|| format!("median of {n}"))?;
        ensure_same_bits(&x.nanmedian(-1, false)?.0, &middle).with_context(|| format!("nanmedian of {n}"))?;
    }
    for n in [7, 3001] {
        let mut values: Vec<f32> = (0..n).map(|i| (i * 3 % n) as f32).collect();
        (values[2], values[5]) = (f32::NAN, f32::NAN);
        let x = Tensor::from_slice(&values, [n], device)?;
        let (value, index) = x.median(0, false)?;
        ensure!(value.item()?.is_nan() && index.item()? == 2.0, "the first NaN is the median");
        let mut rest: Vec<f64> = values.iter().filter(|v| !v.is_nan()).map(|&v| f64::from(v)).collect();
        rest.sort_by(f64::total_cmp);
        let middle = rest[(rest.len() - 1) / 2];
        ensure_values(&x.nanmedian(0, false)?.0, &[middle])?;
        ensure_values(&x.nanmedian_all()?, &[middle])?;
        ensure!(x.median_all()?.item()?.is_nan());
        ensure!(x.mul(f64::NAN)?.nanmedian(0, true)?.0.item()?.is_nan());
    }
    let whole = Tensor::from_slice(&[u32::MAX, 3, u32::MAX, 0], [4], device)?;
    ensure_values(&whole.nanmedian(0, false)?.0, &[3.0])?;
    // Equal elements share the gradient.
    let x = Tensor::from_slice(&[1.0f32, 2.0, 2.0, 5.0], [4], device)?.to_leaf()?;
    x.median_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[0.0, 0.5, 0.5, 0.0])
}

fn quantiles_of_all_kinds(device: &Device) -> Result<()> {
    // The rank changes by two times q, and the value by the slope of its interval.
    let line = Tensor::from_slice(&[4.0f32, 0.0, 1.0], [3], device)?;
    let q = Tensor::from_slice(&[0.25f32, 0.75], [2], device)?.to_leaf()?;
    line.quantile(&q, (), false, Interpolation::Linear)?.sum_all()?.backward()?;
    ensure_values(&q.grad().context("no gradient of q")?, &[2.0, 6.0])?;
    let x = Tensor::from_slice(&[4.0f32, 1.0, 3.0, 2.0, 8.0, f32::NAN, 6.0, 7.0], [2, 4], device)?;
    let q = |q: f64, how| -> Result<Vec<f64>> { Ok(x.nanquantile(q, 1, false, how)?.to_f64s()?) };
    // Ranks 0.75 and 0.5.
    ensure_close(&q(0.25, Interpolation::Linear)?, &[1.75, 6.5], 1e-6, 0.0)?;
    ensure_close(&q(0.25, Interpolation::Midpoint)?, &[1.5, 6.5], 1e-6, 0.0)?;
    ensure!(q(0.25, Interpolation::Lower)? == [1.0, 6.0] && q(0.25, Interpolation::Higher)? == [2.0, 7.0]);
    ensure!(q(0.25, Interpolation::Nearest)? == [2.0, 6.0], "half goes to the even rank");
    let plain = x.quantile(0.5, 1, true, Interpolation::Linear)?;
    ensure!(plain.shape() == [2, 1] && plain.to_f64s()?[0] == 2.5 && plain.to_f64s()?[1].is_nan());
    let several = Tensor::from_slice(&[0.0f32, 0.5, 1.0], [3], device)?;
    let y = iota(&[2, 3, 5], DType::F32, device)?;
    for (dim, shape) in [(0isize, [3, 3, 5]), (1, [3, 2, 5]), (-1, [3, 2, 3])] {
        let got = y.quantile(&several, dim, false, Interpolation::Linear)?;
        ensure!(got.shape() == shape, "{:?} along {dim}", got.shape());
        let ends = [y.amin([dim], false)?, y.mean([dim], false)?, y.amax([dim], false)?];
        for (k, end) in ends.iter().enumerate() {
            ensure_close(&got.select(0, k as isize)?.to_f64s()?, &end.to_f64s()?, 1e-6, 1e-6)?;
        }
        ensure!(y.quantile(&several, dim, true, Interpolation::Lower)?.rank() == 4);
    }
    let all = y.quantile(&several, (), true, Interpolation::Linear)?;
    ensure!(all.shape() == [3, 1, 1, 1] && all.to_f64s()? == [0.0, 14.5, 29.0]);
    Ok(())
}

fn quantiles_outside_are_nan(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], device)?.to_leaf()?;
    let q = Tensor::from_slice(&[0f32, 1.5, -1e-6, f32::NAN, f32::INFINITY, 1.0], [6], device)?;
    let nan = f64::NAN;
    for how in [
        Interpolation::Linear,
        Interpolation::Lower,
        Interpolation::Higher,
        Interpolation::Nearest,
        Interpolation::Midpoint,
    ] {
        ensure_values(&x.quantile(&q, (), false, how)?, &[1.0, nan, nan, nan, nan, 4.0])?;
        let rows = [1.0, 3.0, nan, nan, nan, nan, nan, nan, nan, nan, 2.0, 4.0];
        ensure_values(&x.nanquantile(&q, 1, false, how)?, &rows)?;
        let one = Tensor::full((), 2.0, DType::F32, device)?;
        ensure_values(&x.quantile(&one, (), false, how)?, &[nan])?;
        ensure!(x.quantile(1.5, (), false, how).is_err());
    }
    Ok(())
}

fn quantiles_of_more_elements_than_f32_counts(device: &Device) -> Result<()> {
    if device.info().name.contains("SwiftShader") {
        return skip("sorting millions of elements takes too long");
    }
    // The rank of the median is 8,388,609.5, between the last zero and the first one. In f32 it would be whole.
    let n: usize = (1 << 24) + 4;
    let zeros = Tensor::zeros([n / 2], DType::F32, device)?;
    let ones = Tensor::ones([n - zeros.numel()], DType::F32, device)?;
    let x = Tensor::cat(&[&ones, &zeros], 0)?;
    let q = Tensor::from_slice(&[0.0f32, 0.5, 1.0], [3], device)?.to_leaf()?;
    let quantiles = x.quantile(&q, (), false, Interpolation::Linear)?;
    ensure_values(&quantiles, &[0.0, 0.5, 1.0])?;
    quantiles.sum_all()?.backward()?;
    ensure_values(&q.grad().context("no gradient of q")?, &[0.0, f64::from((n - 1) as f32), 0.0])?;
    ensure_values(&x.quantile(0.5, (), false, Interpolation::Lower)?, &[0.0])?;
    // Without the NaN there are as many elements again.
    let with_nan = Tensor::cat(&[&x, &Tensor::full([1], f64::NAN, DType::F32, device)?], 0)?;
    ensure_values(&with_nan.nanquantile(1.0, (), false, Interpolation::Higher)?, &[1.0])
}

fn bins_at_the_end_are_counted(device: &Device) -> Result<()> {
    // As an f32, the number of the last bin is the number of bins.
    let bins = (1 << 24) + 4;
    let counts = Tensor::from_slice(&[0.0f32, 1.0], [2], device)?.histc(bins, 0.0, 1.0)?;
    ensure_values(&counts.sum_all()?, &[2.0])?;
    ensure_values(&counts.narrow(0, bins - 1, 1)?, &[1.0])
}

fn histograms_of_the_widest_spans(device: &Device) -> Result<()> {
    let histc = |values: &[f32], bins: usize, min: f64, max: f64| -> Result<Vec<f64>> {
        Ok(Tensor::from_slice(values, [values.len()], device)?.histc(bins, min, max)?.to_f64s()?)
    };
    ensure!(histc(&[3e38, -3e38], 2, 0.0, 0.0)? == [1.0, 1.0]);
    ensure!(histc(&[3e38, -3e38, 1.0, -1e38, 2e38], 3, 0.0, 0.0)? == [1.0, 2.0, 2.0]);
    // The product of a distance and the number of bins passes f32.
    ensure!(
        histc(&[1e37, 6e37, 9.6e37], 10, 0.0, 1e38)? == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    );
    ensure!(histc(&[1.0, -3e38, 3e38], 2, -1e300, 1e300)? == [0.0, 3.0]);
    ensure!(histc(&[1e-38, 2e-38, f32::INFINITY], 2, 0.0, 3e38)? == [2.0, 0.0]);
    Ok(())
}

fn weights_of_observations_are_not_negative(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 2.0, 4.0, 3.0, 5.0, 1.0], [2, 3], device)?;
    let counts = |values: [i64; 3]| Tensor::from_slice(&values, [3], device);
    let weights = |values: [f32; 3]| Tensor::from_slice(&values, [3], device);
    for (often, much) in [(Some(counts([1, -1, 2])?), None), (None, Some(weights([0.5, -0.25, 1.0])?))] {
        let Err(error) =
            x.cov(&CovOptions { fweights: often.as_ref(), aweights: much.as_ref(), ..Default::default() })
        else {
            anyhow::bail!("a negative weight is accepted")
        };
        ensure!(error.to_string().contains("none is negative"), "{error}");
    }
    let got = x.cov(&CovOptions {
        fweights: Some(&counts([1, 0, 2])?),
        aweights: Some(&weights([0.5, 0.0, 1.0])?),
        ..Default::default()
    })?;
    ensure!(got.to_f64s()?.iter().all(|v| v.is_finite()));
    Ok(())
}
