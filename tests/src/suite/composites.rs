//! Known values of operations that are composed of others and have no golden data.

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::ScatterReduce;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_values};

super::tests![
    numerical_gradients_of_samples,
    elements_between_edges_are_counted,
    coordinates_of_linear_indices,
    slices_are_reduced_by_index,
    polar_factors_multiply_to_the_matrix,
    random_projections_find_a_low_rank,
    spherical_bessel_near_zero_and_far,
    samples_in_place_have_their_moments,
];

fn numerical_gradients_of_samples(device: &Device) -> Result<()> {
    let x = Tensor::new([[1.0f32, 4.0, 9.0, 7.0], [2.0, 2.0, 3.0, 8.0]], device)?;
    let got = x.gradient(0.5, 1, 1)?;
    ensure_close(&got.to_f64s()?, &[6.0, 8.0, 3.0, -4.0, 0.0, 1.0, 6.0, 10.0], 1e-6, 1e-6)?;
    let points = Tensor::new([0.0f32, 1.0, 3.0, 3.5], device)?;
    let got = x.select(0, 0)?.gradient(&points, 0, 2)?;
    ensure_close(&got.to_f64s()?, &[3.0 + 1.0 / 6.0, 8.5 / 3.0, -2.7, -5.3], 1e-6, 1e-6)?;
    let got = x.gradient(2.0, 0, 1)?;
    ensure_close(&got.narrow(0, 0, 1)?.to_f64s()?, &[0.5, -1.0, -3.0, 0.5], 1e-6, 1e-6)?;
    ensure!(x.gradient(2.0, 0, 2).is_err(), "two values have no derivative of second order at the ends");
    Ok(())
}

fn elements_between_edges_are_counted(device: &Device) -> Result<()> {
    let x = Tensor::new([-1.0f32, 0.0, 0.5, 1.0, 1.0, 2.5, 3.0, 4.0, f32::NAN], device)?;
    let edges = Tensor::new([0.0f32, 1.0, 2.0, 3.0], device)?;
    let weight = Tensor::arange(1.0, 10.0, 1.0, DType::F32, device)?;
    ensure_values(&x.histogram(&edges, None, false)?, &[2.0, 2.0, 2.0])?;
    ensure_values(&x.histogram(&edges, Some(&weight), false)?, &[5.0, 9.0, 13.0])?;
    ensure_close(
        &x.histogram(&edges, Some(&weight), true)?.to_f64s()?,
        &[5.0 / 27.0, 9.0 / 27.0, 13.0 / 27.0],
        1e-6,
        0.0,
    )
}

fn coordinates_of_linear_indices(device: &Device) -> Result<()> {
    let index = Tensor::new([0i64, 5, 13, 23], device)?;
    let found = index.unravel_index([2, 3, 4])?;
    for (axis, expected) in
        [[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 2.0], [0.0, 1.0, 1.0, 3.0]].iter().enumerate()
    {
        ensure_values(&found[axis], expected)?;
    }
    Ok(())
}

fn slices_are_reduced_by_index(device: &Device) -> Result<()> {
    let x = Tensor::new([1.0f32, 2.0, 3.0], device)?;
    let index = Tensor::new([0i64, 0, 2], device)?;
    let source = Tensor::new([4.0f32, 5.0, 6.0], device)?;
    let reduce = |how, include_self| x.index_reduce(0, &index, &source, how, include_self);
    ensure_values(&reduce(ScatterReduce::Prod, true)?, &[20.0, 2.0, 18.0])?;
    ensure_values(&reduce(ScatterReduce::Amax, false)?, &[5.0, 2.0, 6.0])?;
    ensure_close(&reduce(ScatterReduce::Mean, true)?.to_f64s()?, &[10.0 / 3.0, 2.0, 4.5], 1e-6, 0.0)
}

fn polar_factors_multiply_to_the_matrix(device: &Device) -> Result<()> {
    device.manual_seed(3);
    let x = Tensor::randn([2, 5, 3], DType::F32, device)?;
    let (u, h) = x.polar()?;
    ensure_close(&u.matmul(&h)?.to_f64s()?, &x.to_f64s()?, 0.0, 1e-4)?;
    let eye = Tensor::eye(3, 3, DType::F32, device)?.broadcast_to([2, 3, 3])?;
    ensure_close(&u.transpose(-2, -1)?.matmul(&u)?.to_f64s()?, &eye.to_f64s()?, 0.0, 1e-4)?;
    ensure_close(&h.transpose(-2, -1)?.contiguous()?.to_f64s()?, &h.to_f64s()?, 0.0, 1e-4)?;
    ensure!(h.eigvalsh(false)?.to_f64s()?.iter().all(|&value| value > -1e-4), "H is positive semidefinite");
    ensure!(x.transpose(-2, -1)?.polar().is_err(), "wide matrices have no polar decomposition");
    Ok(())
}

fn random_projections_find_a_low_rank(device: &Device) -> Result<()> {
    device.manual_seed(4);
    for shape in [[7, 5], [5, 7]] {
        let (left, right) = (
            Tensor::randn([shape[0], 2], DType::F32, device)?,
            Tensor::randn([2, shape[1]], DType::F32, device)?,
        );
        let x = left.matmul(&right)?;
        let (u, s, v) = x.svd_lowrank(2, 1)?;
        let product = u.mul(&s.unsqueeze(0)?)?.matmul(&v.t()?)?;
        ensure_close(&product.to_f64s()?, &x.to_f64s()?, 0.0, 1e-4)?;
        ensure_close(&s.to_f64s()?, &x.svdvals()?.narrow(0, 0, 2)?.to_f64s()?, 1e-4, 1e-4)?;
    }
    let x = Tensor::randn([9, 4], DType::F32, device)?;
    let (_, s, _) = x.add(100.0)?.pca_lowrank(4, true, 2)?;
    let centered = x.sub(&x.mean([0], true)?)?;
    ensure_close(&s.to_f64s()?, &centered.svdvals()?.to_f64s()?, 1e-3, 1e-3)
}

fn spherical_bessel_near_zero_and_far(device: &Device) -> Result<()> {
    let x = Tensor::new([0.0f32, 0.1, 1.0, -3.0, 20.0], device)?.to_leaf()?;
    let y = x.spherical_bessel_j0()?;
    y.sum_all()?.backward()?;
    let (mut values, mut slopes) = (vec![1.0], vec![0.0]);
    for t in [f64::from(0.1f32), 1.0, -3.0, 20.0] {
        values.push(t.sin() / t);
        slopes.push((t * t.cos() - t.sin()) / (t * t));
    }
    ensure_close(&y.detach().to_f64s()?, &values, 1e-5, 1e-6)?;
    let Some(grad) = x.grad() else { anyhow::bail!("there is no gradient") };
    ensure_close(&grad.to_f64s()?, &slopes, 1e-5, 1e-6)
}

/// Compares moments within at least five standard deviations of their estimates.
fn samples_in_place_have_their_moments(device: &Device) -> Result<()> {
    device.manual_seed(5);
    let x = Tensor::zeros([200_000], DType::F32, device)?;
    let mean = |x: &Tensor| -> Result<f64> { Ok(x.mean_all()?.item()?) };
    x.uniform_(-1.0, 3.0)?;
    ensure_close(&[mean(&x)?, mean(&x.square()?)?], &[1.0, 7.0 / 3.0], 0.0, 0.03)?;
    x.normal_(2.0, 0.5)?;
    ensure_close(&[mean(&x)?, mean(&x.square()?)?], &[2.0, 4.25], 0.0, 0.03)?;
    x.exponential_(2.0)?;
    ensure_close(&[mean(&x)?, mean(&x.square()?)?], &[0.5, 0.5], 0.0, 0.02)?;
    ensure!(x.min_all()?.item()? > 0.0, "a sample is above 0");
    x.geometric_(0.25)?;
    ensure_close(&[mean(&x)?, mean(&x.eq(1.0)?.to_dtype(DType::F32)?)?], &[4.0, 0.25], 0.0, 0.05)?;
    x.geometric_(1.0)?;
    ensure_close(&[mean(&x)?], &[1.0], 0.0, 0.0)?;
    x.cauchy_(1.0, 2.0)?;
    let inside = x.sub(1.0)?.abs()?.lt(2.0)?.to_dtype(DType::F32)?;
    ensure_close(&[mean(&inside)?, mean(&x.gt(1.0)?.to_dtype(DType::F32)?)?], &[0.5, 0.5], 0.0, 0.01)?;
    ensure!(x.isfinite()?.all((), false)?.item()? == 1.0, "a sample is finite");
    x.log_normal_(0.5, 0.5)?;
    ensure_close(&[mean(&x.log()?)?, mean(&x)?], &[0.5, 0.625f64.exp()], 0.0, 0.02)?;
    x.bernoulli_(0.3)?;
    ensure_close(&[mean(&x)?], &[0.3], 0.0, 0.01)?;
    x.fill_(0.7)?;
    ensure_close(&[mean(&x.sample_bernoulli()?)?], &[0.7], 0.0, 0.01)?;
    let integers = Tensor::zeros([1000], DType::I32, device)?;
    integers.random_(-2, 3)?;
    let (min, max) = (integers.min_all()?.item()?, integers.max_all()?.item()?);
    ensure!((min, max) == (-2.0, 2.0), "{min}..={max}");
    Ok(())
}
