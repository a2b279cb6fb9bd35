//! Known values of operations that are composed of others and have no golden data.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error;
use forebay::ops::{
    LocalResponseNormOptions, NanToNumOptions, Pool1dOptions, Pool2dOptions, Pool3dOptions, Reduction,
    ScatterReduce,
};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits, ensure_values};

super::tests![
    contracted_integers_keep_their_type,
    numerical_gradients_of_samples,
    numerical_gradients_of_integers_are_exact,
    elements_between_edges_are_counted,
    coordinates_of_linear_indices,
    slices_are_reduced_by_index,
    reductions_by_no_index_and_without_dimensions,
    polar_factors_multiply_to_the_matrix,
    random_projections_find_a_low_rank,
    iterations_sharpen_random_projections,
    decompositions_do_not_compute_in_16_bits,
    spherical_bessel_near_zero_and_far,
    spherical_bessel_of_infinities,
    samples_in_place_have_their_moments,
    exponential_samples_of_every_float_are_positive,
    samples_of_elements_have_their_probabilities,
    infinities_are_replaced_in_place,
    composed_operations_round_16_bits_once,
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

/// f32 rounds these integers to even ones.
fn numerical_gradients_of_integers_are_exact(device: &Device) -> Result<()> {
    let derivative = |x: &Tensor| -> Result<Vec<f64>> { Ok(x.gradient(1, 0, 1)?.to_f64s()?) };
    for dtype in [DType::I32, DType::U32, DType::I64] {
        let x = Tensor::new([16_777_216i32, 16_777_217, 16_777_218], device)?.to_dtype(dtype)?;
        ensure_close(&derivative(&x)?, &[1.0, 1.0, 1.0], 0.0, 0.0).with_context(|| dtype.to_string())?;
        let falling = Tensor::new([5i32, 3, 4], device)?.to_dtype(dtype)?;
        ensure_close(&derivative(&falling)?, &[-2.0, -0.5, 1.0], 0.0, 0.0)
            .with_context(|| dtype.to_string())?;
        let points = Tensor::new([16_777_216i32, 16_777_217, 16_777_219], device)?.to_dtype(dtype)?;
        let got = Tensor::new([1.0f32, 2.0, 8.0], device)?.gradient(&points, 0, 1)?;
        ensure_close(&got.to_f64s()?, &[1.0, 5.0 / 3.0, 3.0], 1e-6, 0.0)
            .with_context(|| dtype.to_string())?;
    }
    let x = Tensor::new([3_000_000_000u32, 3_000_000_001, 3_000_000_000], device)?;
    ensure_close(&derivative(&x)?, &[1.0, 0.0, -1.0], 0.0, 0.0)?;
    ensure_close(&derivative(&Tensor::new([200u8, 100, 50], device)?)?, &[-100.0, -75.0, -50.0], 0.0, 0.0)
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
    ensure_values(&index.unravel_index([1 << 20, 1 << 20])?[1], &[0.0, 5.0, 13.0, 23.0])
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

fn reductions_by_no_index_and_without_dimensions(device: &Device) -> Result<()> {
    let (x, none) = (Tensor::new([1.0f32, 2.0, 3.0], device)?, Tensor::zeros([0], DType::I32, device)?);
    let nothing = Tensor::zeros([0], DType::F32, device)?;
    let (number, first) = (Tensor::new(3.0f32, device)?, Tensor::new([0i32], device)?);
    let two = Tensor::new(2.0f32, device)?;
    for (how, with_self, without) in [
        (ScatterReduce::Sum, 5.0, 2.0),
        (ScatterReduce::Prod, 6.0, 2.0),
        (ScatterReduce::Mean, 2.5, 2.0),
        (ScatterReduce::Amax, 3.0, 2.0),
        (ScatterReduce::Amin, 2.0, 2.0),
    ] {
        for (include_self, expected) in [(true, with_self), (false, without)] {
            ensure_values(&x.index_reduce(0, &none, &nothing, how, include_self)?, &[1.0, 2.0, 3.0])?;
            let got = number.index_reduce(0, &first, &two, how, include_self)?;
            ensure!(got.rank() == 0, "{how:?} has {} dimensions", got.rank());
            ensure_values(&got, &[expected]).with_context(|| format!("{how:?}, {include_self}"))?;
            let changed = number.copy()?;
            changed.index_reduce_(0, &first, &two, how, include_self)?;
            ensure_values(&changed, &[expected])
                .with_context(|| format!("{how:?} in place, {include_self}"))?;
        }
    }
    Ok(())
}

fn polar_factors_multiply_to_the_matrix(device: &Device) -> Result<()> {
    device.manual_seed(3);
    let x = Tensor::randn([2, 5, 3], DType::F32, device)?;
    let (u, h) = x.polar()?;
    ensure_close(&u.matmul(&h)?.to_f64s()?, &x.to_f64s()?, 0.0, 1e-4)?;
    let eye = Tensor::eye(3, 3, DType::F32, device)?.broadcast_to([2, 3, 3])?;
    ensure_close(&u.transpose(-2, -1)?.matmul(&u)?.to_f64s()?, &eye.to_f64s()?, 0.0, 1e-4)?;
    ensure_close(&h.transpose(-2, -1)?.contiguous()?.to_f64s()?, &h.to_f64s()?, 0.0, 1e-4)?;
    ensure!(h.eigvalsh(false)?.to_f64s()?.iter().all(|&value| value > -1e-4), "H has a negative eigenvalue");
    ensure!(x.transpose(-2, -1)?.polar().is_err(), "a wide matrix was decomposed");
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
    ensure_close(&s.to_f64s()?, &centered.svdvals()?.to_f64s()?, 1e-3, 1e-3)?;
    let (u, s, v) = x.pca_lowrank(4, false, 2)?;
    ensure_close(&s.to_f64s()?, &x.svdvals()?.to_f64s()?, 1e-3, 1e-3)?;
    ensure_close(&low_rank_product(&u, &s, &v)?.to_f64s()?, &x.to_f64s()?, 0.0, 1e-3)
}

fn low_rank_product(u: &Tensor, s: &Tensor, v: &Tensor) -> Result<Tensor> {
    Ok(u.mul(&s.unsqueeze(-2)?)?.matmul(&v.transpose(-2, -1)?)?)
}

/// The singular values fall slowly, so that one projection mixes the first ones with the rest.
fn iterations_sharpen_random_projections(device: &Device) -> Result<()> {
    const RANK: usize = 4;
    device.manual_seed(6);
    let left = Tensor::randn([40, 24], DType::F32, device)?.qr(false)?.0;
    let right = Tensor::randn([24, 24], DType::F32, device)?.qr(false)?.0;
    let values: Vec<f32> = (0..24).map(|k| 0.9f32.powi(k)).collect();
    let x = left.mul(&Tensor::from_slice(&values, [24], device)?)?.matmul(&right)?;
    let best: f64 = values[RANK..].iter().map(|&v| f64::from(v * v)).sum::<f64>().sqrt();
    let error = |x: &Tensor, niter: usize| -> Result<f64> {
        let (u, s, v) = x.svd_lowrank(RANK, niter)?;
        Ok(x.sub(&low_rank_product(&u, &s, &v)?)?.square()?.sum_all()?.sqrt()?.item()?)
    };
    for x in [x.clone(), x.t()?] {
        let (rough, sharp) = (error(&x, 0)?, error(&x, 4)?);
        ensure!(sharp < 0.97 * rough, "an error of {sharp} after 4 iterations, of {rough} before");
        ensure!(sharp < 1.03 * best, "an error of {sharp}; the best is {best}");
    }
    Ok(())
}

/// In f16, products differ in the fourth digit, and decompositions fail.
fn decompositions_do_not_compute_in_16_bits(device: &Device) -> Result<()> {
    device.manual_seed(7);
    let x = Tensor::randn([5, 3], DType::F32, device)?.to_leaf()?;
    let wide = x.detach().t()?.to_leaf()?;
    let square = x.detach().narrow(0, 0, 3)?;
    let results = || -> Result<Vec<(&str, Tensor)>> {
        let (u, h) = x.polar()?;
        let lowrank = x.svd_lowrank(3, 1)?;
        let components = x.pca_lowrank(3, true, 1)?;
        let (_, r) = wide.qr(false)?;
        Ok(vec![
            ("polar's u", u),
            ("polar's h", h),
            ("svd_lowrank", lowrank.1),
            ("pca_lowrank", components.1),
            ("qr", r),
            ("pinv", x.pinv(None)?),
            ("lstsq", x.lstsq(&x.detach(), None)?.solution),
            ("matrix_exp", square.matrix_exp()?),
        ])
    };
    let expected = results()?;
    let _autocast = autocast(DType::F16)?;
    for ((name, got), (_, expected)) in results()?.into_iter().zip(expected) {
        ensure!(got.dtype() == DType::F32, "{name} has the type {}", got.dtype());
        ensure_close(&got.detach().to_f64s()?, &expected.detach().to_f64s()?, 1e-5, 1e-5)
            .with_context(|| name.to_owned())?;
    }
    Ok(())
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

fn spherical_bessel_of_infinities(device: &Device) -> Result<()> {
    for dtype in super::compute_dtypes(device).filter(|dtype| dtype.is_float() && !dtype.is_storage_only()) {
        let x = Tensor::new([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0], device)?;
        let x = x.to_dtype(dtype)?.to_leaf()?;
        let y = x.spherical_bessel_j0()?;
        y.sum_all()?.backward()?;
        ensure_close(&y.detach().to_f64s()?, &[0.0, 0.0, f64::NAN, 1.0], 0.0, 0.0)?;
        let grad = x.grad().context("no gradient")?.to_f64s()?;
        ensure_close(&grad, &[0.0, 0.0, f64::NAN, 0.0], 0.0, 0.0)
            .with_context(|| format!("the gradient of {dtype}"))?;
    }
    Ok(())
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
    let integers = Tensor::zeros([200_000], DType::I32, device)?;
    integers.geometric_(0.25)?;
    let (values, ones) = (integers.to_dtype(DType::F32)?, integers.eq(1)?.to_dtype(DType::F32)?);
    ensure_close(&[mean(&values)?, mean(&values.square()?)?], &[4.0, 28.0], 0.02, 0.0)?;
    ensure_close(&[mean(&ones)?], &[0.25], 0.0, 0.01)
}

/// A high rate takes samples to the smallest values of f16.
fn exponential_samples_of_every_float_are_positive(device: &Device) -> Result<()> {
    device.manual_seed(6);
    for dtype in super::compute_dtypes(device).filter(|dtype| dtype.is_float() && !dtype.is_storage_only()) {
        let x = Tensor::zeros([1 << 16], dtype, device)?;
        for rate in [0.5, 1e4] {
            x.exponential_(rate)?;
            let samples = x.to_f64s()?;
            ensure!(samples.iter().all(|&v| v > 0.0), "{dtype}: a sample of rate {rate} is not above 0");
            let mean = samples.iter().sum::<f64>() / samples.len() as f64 * rate;
            ensure!((mean - 1.0).abs() < 0.03, "{dtype}: {mean} times the mean of rate {rate}");
        }
    }
    Ok(())
}

fn samples_of_elements_have_their_probabilities(device: &Device) -> Result<()> {
    let p = Tensor::new([0.0f32, 1.0, 0.5], device)?;
    for dtype in [DType::F32, DType::I32, DType::Bool] {
        let x = Tensor::zeros([2000, 3], dtype, device)?;
        x.bernoulli_(&p)?;
        let means = x.to_dtype(DType::F32)?.mean([0], false)?.to_f64s()?;
        ensure_close(&means, &[0.0, 1.0, 0.5], 0.0, 0.06).with_context(|| dtype.to_string())?;
        ensure!((means[0], means[1]) == (0.0, 1.0), "{dtype}: {means:?}");
        x.bernoulli_(1)?;
        ensure!(x.all((), false)?.item()? == 1.0, "{dtype}: a probability of 1");
    }
    let integers = Tensor::zeros([3], DType::I32, device)?;
    ensure!(p.bernoulli_(&integers).is_err(), "integers are not probabilities");
    Ok(())
}

fn infinities_are_replaced_in_place(device: &Device) -> Result<()> {
    let x = Tensor::new([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.5], device)?;
    x.nan_to_num_with_(&NanToNumOptions { nan: 2.0, posinf: Some(3.0), neginf: None })?;
    ensure_values(&x, &[2.0, 3.0, f64::from(f32::MIN), 1.5])
}

/// Results and gradients of 16 bits are those of f32, rounded.
fn composed_operations_round_16_bits_once(device: &Device) -> Result<()> {
    type Composed = fn(&Tensor) -> error::Result<Tensor>;
    let composed: [(&str, Composed); 7] = [
        ("avg_pool3d", |x| x.avg_pool3d(Pool3dOptions::new(3))),
        ("adaptive_avg_pool3d", |x| x.adaptive_avg_pool3d([2, 3, 5])),
        ("lp_pool1d", |x| x.flatten(2, -1)?.lp_pool1d(3.0, Pool1dOptions::new(3))),
        ("lp_pool2d", |x| x.flatten(3, -1)?.lp_pool2d(3.0, Pool2dOptions::new(3))),
        ("lp_pool3d", |x| x.lp_pool3d(3.0, Pool3dOptions::new(2))),
        ("local_response_norm", |x| {
            x.local_response_norm(3, &LocalResponseNormOptions { alpha: 0.5, ..Default::default() })
        }),
        ("multilabel_soft_margin_loss", |x| {
            let target = x.detach().gt(0.5)?.to_dtype(x.dtype())?;
            x.multilabel_soft_margin_loss(&target, None, Reduction::None)
        }),
    ];
    device.manual_seed(5);
    let values = Tensor::rand([2, 3, 4, 5, 7], DType::F32, device)?.add(0.1)?;
    for dtype in super::compute_dtypes(device).filter(|dtype| dtype.is_float() && dtype.size() == 2) {
        let rounded = values.to_dtype(dtype)?;
        for (name, run) in composed {
            let run_in = |of: DType| -> Result<[Tensor; 2]> {
                let x = rounded.to_dtype(of)?.to_leaf()?;
                let y = run(&x)?.to_dtype(dtype)?;
                y.sum_all()?.backward()?;
                Ok([y.detach(), x.grad().context("no gradient")?.to_dtype(dtype)?])
            };
            let ([got, grad], [expected, expected_grad]) = (run_in(dtype)?, run_in(DType::F32)?);
            ensure_same_bits(&got, &expected).with_context(|| format!("{name} in {dtype}"))?;
            ensure_same_bits(&grad, &expected_grad)
                .with_context(|| format!("gradient of {name} in {dtype}"))?;
            // As in PyTorch, powers and losses are f32 under autocast, and averages have the type of the input.
            let _autocast = autocast(dtype)?;
            let made = run(&rounded)?.dtype();
            let expected = if name.contains("avg_pool") { dtype } else { DType::F32 };
            ensure!(made == expected, "{name} of {dtype} under autocast has the type {made}");
        }
    }
    Ok(())
}

/// PyTorch's `tensordot` sums an extent that the other operand broadcasts, in the operand's type.
fn contracted_integers_keep_their_type(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1i32, 2, 3, 4, 5, 6], [2, 3], device)?;
    let y = Tensor::from_slice(&[1i32, 2, 3, 4], [1, 4], device)?;
    let (sums, out) = ([6, 15], x.tensordot(&y, [1], [0])?);
    let expected: Vec<i32> = sums.iter().flat_map(|sum| [1, 2, 3, 4].map(|k| sum * k)).collect();
    ensure!(out.shape() == [2, 4] && out.to_vec::<i32>()? == expected, "{out}");
    Ok(())
}
