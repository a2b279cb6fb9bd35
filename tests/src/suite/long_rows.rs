//! Rows, columns and sums with more elements than one thread may process: drivers stop long loops silently, so
//! workgroups share them.

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::ops::{AttentionOptions, CrossEntropyOptions, InterpolateMode, InterpolateOptions, NormOptions};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_values, sum_gradient};
use super::tests;

tests![
    a_layer_norm_of_a_row_of_millions,
    group_norms_of_long_rows_and_their_gradients,
    softmax_of_long_rows_and_columns,
    special_values_in_long_rows_behave_as_in_short_ones,
    cross_entropy_of_many_classes,
    areas_and_gradients_of_scaling_by_thousands,
    distances_of_long_rows_and_gradients_of_many,
    products_of_long_vectors,
    gradients_of_overlapping_views_of_many_windows,
    reductions_of_long_rows_and_columns,
    factorizations_with_many_loop_iterations,
    singular_values_of_tall_matrices,
    attention_over_many_positions_is_correct_or_refused,
    convolutions_with_long_filters_are_correct_or_refused,
];

/// Returns a row in which every fourth element is 3 and the others are -1: mean 0, variance 3.
fn zero_mean_row(shape: &[usize], device: &Device) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let four = Tensor::from_slice(&[3.0f32, -1.0, -1.0, -1.0], [1, 4], device)?;
    Ok(four.broadcast_to([n.div_ceil(4), 4])?.reshape([-1isize])?.narrow(0, 0, n)?.reshape(shape)?)
}

fn a_layer_norm_of_a_row_of_millions(device: &Device) -> Result<()> {
    // Three loops over a row by 256 threads: above 5.6 million elements they exceed 65,535 iterations.
    let n = 6_000_000;
    let x = zero_mean_row(&[1, n], device)?.add(10.0)?;
    let y = x.layer_norm([n], &NormOptions { eps: 0.0, ..Default::default() })?;
    let root = 3.0f64.sqrt();
    for at in [0, 1, 2_999_999, n - 4, n - 1] {
        let expected = if at % 4 == 0 { root } else { -1.0 / root };
        ensure_close(&y.narrow(1, at, 1)?.to_f64s()?, &[expected], 1e-4, 0.0)?;
    }
    ensure_close(&y.square()?.mean_all()?.to_f64s()?, &[1.0], 1e-4, 0.0)?;
    let rms = x.sub(10.0)?.rms_norm([n], None, Some(0.0))?;
    ensure_close(
        &rms.narrow(1, n - 4, 4)?.to_f64s()?,
        &[root, -1.0 / root, -1.0 / root, -1.0 / root],
        1e-4,
        0.0,
    )
}

fn group_norms_of_long_rows_and_their_gradients(device: &Device) -> Result<()> {
    // Rows above the length that workgroups share, compared with composed operations.
    for (batch, channels, space, groups) in [(2, 4, 40_000, 2), (1, 6, 70_001, 3), (1, 200_000, 1, 2)] {
        let shape = [batch, channels, space];
        let x = Tensor::rand(shape, DType::F32, device)?.add(3.0)?;
        let weight = Tensor::rand([channels], DType::F32, device)?;
        let bias = Tensor::rand([channels], DType::F32, device)?;
        let seed = Tensor::rand(shape, DType::F32, device)?.sub(0.5)?;
        let leaves = [x, weight, bias].map(|t| t.to_leaf());
        let [x, w, b] = &leaves;
        let (x, w, b) =
            (x.as_ref().ok().context("x")?, w.as_ref().ok().context("w")?, b.as_ref().ok().context("b")?);
        let made =
            x.group_norm(groups, &NormOptions { weight: Some(w), bias: Some(b), ..Default::default() })?;
        let flat = x.reshape([batch * groups, channels / groups * space])?;
        let away = flat.sub(&flat.mean([1], true)?)?;
        let normed = away.mul(&away.square()?.mean([1], true)?.add(1e-5)?.rsqrt()?)?.reshape(&shape[..])?;
        let expected = normed.mul(&w.reshape([channels, 1])?)?.add(&b.reshape([channels, 1])?)?;
        ensure_close(&made.to_f64s()?, &expected.to_f64s()?, 1e-3, 1e-4)?;
        let (options, inputs) = (
            GradOptions { retain_graph: Some(true), ..GradOptions::default() },
            [x, w, b].map(Tensor::clone),
        );
        let grads = |y: &Tensor| autograd::grad(&[y.mul(&seed)?.sum_all()?], &inputs, &options);
        for (k, (got, expected)) in grads(&made)?.iter().zip(grads(&expected)?).enumerate() {
            let bound = if k == 0 { 1e-3 } else { 2e-1 };
            ensure_close(&got.to_f64s()?, &expected.to_f64s()?, 1e-3, bound)
                .with_context(|| format!("{shape:?}: {k}"))?;
        }
    }
    Ok(())
}

fn softmax_of_long_rows_and_columns(device: &Device) -> Result<()> {
    for shape in [[2, 3_000_001, 1], [1, 1_500_000, 2]] {
        let n = shape[1];
        let x = Tensor::zeros(shape, DType::F32, device)?;
        // One element whose weight equals that of all others together.
        x.narrow(1, 2_000_000.min(n - 7), 1)?.fill_(((n - 1) as f64).ln())?;
        let y = x.softmax(1)?;
        ensure_close(&y.sum([1], false)?.to_f64s()?, &[1.0; 2], 1e-4, 0.0)?;
        let half = y.narrow(1, 2_000_000.min(n - 7), 1)?.to_f64s()?;
        ensure_close(&half, &[0.5; 2], 1e-4, 0.0)?;
        let log = x.log_softmax(1)?;
        let rest = -(2.0 * (n - 1) as f64).ln();
        ensure_close(&log.narrow(1, n - 1, 1)?.to_f64s()?, &[rest; 2], 1e-5, 0.0)?;
        ensure_close(&log.amax([1], false)?.to_f64s()?, &[0.5f64.ln(); 2], 1e-4, 0.0)?;
        // Gradient of the element with weight one half: y (g - Σ g y) with g = 1 there.
        let seed = Tensor::zeros(shape, DType::F32, device)?;
        seed.narrow(1, 2_000_000.min(n - 7), 1)?.fill_(1.0)?;
        let leaf = x.to_leaf()?;
        leaf.softmax(1)?.backward_with(&seed)?;
        let grad = leaf.grad().context("no gradient")?;
        ensure_close(&grad.narrow(1, 2_000_000.min(n - 7), 1)?.to_f64s()?, &[0.25; 2], 1e-4, 0.0)?;
        ensure_close(&grad.sum([1], false)?.to_f64s()?, &[0.0; 2], 0.0, 1e-4)?;
        let leaf = leaf.detach().to_leaf()?;
        leaf.log_softmax(1)?.backward_with(&seed)?;
        let grad = leaf.grad().context("no gradient")?;
        ensure_close(&grad.narrow(1, 2_000_000.min(n - 7), 1)?.to_f64s()?, &[0.5; 2], 1e-4, 0.0)?;
    }
    Ok(())
}

fn special_values_in_long_rows_behave_as_in_short_ones(device: &Device) -> Result<()> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    for n in [100, 200_000] {
        let x = Tensor::full([5, n], -inf, DType::F32, device)?;
        x.narrow(0, 1, 1)?.narrow(1, n / 2, 1)?.fill_(nan)?;
        x.narrow(0, 2, 1)?.narrow(1, n - 1, 1)?.fill_(inf)?;
        x.narrow(0, 3, 1)?.narrow(1, n / 3, 1)?.fill_(2.0)?;
        x.narrow(0, 4, 1)?.narrow(1, 3, 2)?.fill_(2.0)?;
        for (y, zero) in [(x.softmax(1)?, 0.0), (x.log_softmax(1)?, -inf)] {
            let one = if zero == 0.0 { [1.0, 0.5] } else { [0.0, 0.5f64.ln()] };
            ensure_values(&y.narrow(1, 0, 1)?, &[nan, nan, nan, zero, zero])?;
            ensure_close(&y.narrow(0, 3, 1)?.narrow(1, n / 3, 1)?.to_f64s()?, &[one[0]], 1e-6, 0.0)?;
            ensure_close(&y.narrow(0, 4, 1)?.narrow(1, 3, 1)?.to_f64s()?, &[one[1]], 1e-6, 0.0)?;
        }
        ensure_values(&x.amax([1], false)?, &[-inf, nan, inf, 2.0, 2.0])?;
        let (value, index) = x.max(1, false)?;
        ensure_values(&value, &[-inf, nan, inf, 2.0, 2.0])?;
        let indices = [0, n / 2, n - 1, n / 3, 3].map(|at| at as f64);
        ensure_values(&index, &indices)?;
        ensure_values(&x.argmax(1, false)?, &indices)?;
        ensure_values(&x.argmin(1, false)?, &[0.0, (n / 2) as f64, 0.0, 0.0, 0.0])?;
        let sums = x.logsumexp([1], false)?.to_f64s()?;
        ensure!(sums[0] == -inf && sums[1].is_nan() && sums[2] == inf, "{sums:?}");
    }
    Ok(())
}

fn cross_entropy_of_many_classes(device: &Device) -> Result<()> {
    // Rows, and columns with another dimension after the classes.
    for shape in [[2, 2_500_000, 1], [1, 2_500_000, 2]] {
        let n = shape[1];
        let x = Tensor::zeros(shape, DType::F32, device)?;
        x.narrow(1, n - 1, 1)?.fill_(((n - 1) as f64).ln())?;
        let x = x.to_leaf()?;
        let target = Tensor::from_slice(&[0i64, n as i64 - 1], [shape[0], shape[2]], device)?;
        for smoothing in [0.0, 0.5] {
            let options =
                CrossEntropyOptions { label_smoothing: smoothing, ..CrossEntropyOptions::default() };
            x.set_grad(None);
            let loss = x.cross_entropy_with(&target, &options)?;
            let (large, rest) = (0.5f64.ln(), -(2.0 * (n - 1) as f64).ln());
            let spread = -(large + rest * (n - 1) as f64) / n as f64;
            let plain = -(large + rest) / 2.0;
            ensure_close(&loss.to_f64s()?, &[(1.0 - smoothing) * plain + smoothing * spread], 1e-4, 0.0)?;
            loss.backward()?;
            let grad = x.grad().context("no gradient")?;
            let share = smoothing / n as f64;
            let last = grad.narrow(1, n - 1, 1)?.to_f64s()?;
            let expected = [0.5 - share, 0.5 - share - (1.0 - smoothing)].map(|g| g / 2.0);
            ensure_close(&last, &expected, 1e-4, 1e-7)?;
            ensure_close(&grad.sum_all()?.to_f64s()?, &[0.0], 0.0, 1e-4)?;
        }
    }
    Ok(())
}

fn areas_and_gradients_of_scaling_by_thousands(device: &Device) -> Result<()> {
    let area = InterpolateOptions { mode: InterpolateMode::Area, ..InterpolateOptions::with_size([1, 1]) };
    let x = Tensor::ones([1, 1, 300, 300], DType::F32, device)?;
    x.narrow(2, 299, 1)?.fill_(301.0)?;
    ensure_close(&x.interpolate(&area)?.to_f64s()?, &[2.0], 1e-5, 0.0)?;
    let line = x.reshape([1, 1, 90_000])?;
    let area = InterpolateOptions { mode: InterpolateMode::Area, ..InterpolateOptions::with_size([1]) };
    ensure_close(&line.interpolate(&area)?.to_f64s()?, &[2.0], 1e-5, 0.0)?;
    let small = Tensor::ones([1, 1, 2], DType::F32, device)?;
    for mode in [InterpolateMode::Nearest, InterpolateMode::Linear] {
        let grad = sum_gradient(&small, |x| {
            x.interpolate(&InterpolateOptions { mode, ..InterpolateOptions::with_size([200_000]) })
        })?;
        ensure_close(&grad.to_f64s()?, &[100_000.0; 2], 1e-4, 0.0)?;
    }
    let half = sum_gradient(&small.to_dtype(DType::F16)?, |x| {
        x.interpolate(&InterpolateOptions {
            mode: InterpolateMode::Nearest,
            ..InterpolateOptions::with_size([20_000])
        })
    })?;
    ensure_values(&half, &[10_000.0; 2])
}

fn distances_of_long_rows_and_gradients_of_many(device: &Device) -> Result<()> {
    let n = 70_000;
    let x = Tensor::ones([2, n], DType::F32, device)?;
    x.narrow(0, 1, 1)?.fill_(3.0)?;
    x.narrow(0, 1, 1)?.narrow(1, n - 1, 1)?.fill_(6.0)?;
    let y = Tensor::ones([1, n], DType::F32, device)?;
    let few = (n - 1) as f64;
    for (p, expected) in [
        (0.0, n as f64),
        (1.0, 2.0 * few + 5.0),
        (2.0, (4.0 * few + 25.0).sqrt()),
        (f64::INFINITY, 5.0),
        (3.0, (8.0 * few + 125.0).powf(1.0 / 3.0)),
    ] {
        ensure_close(&x.cdist(&y, p)?.to_f64s()?, &[0.0, expected], 1e-4, 0.0)
            .with_context(|| format!("p = {p}"))?;
    }
    // One point, and many points at distance 2.
    let many = Tensor::zeros([70_000, 1], DType::F32, device)?;
    let point = Tensor::full([1, 1], 2.0, DType::F32, device)?;
    for p in [1.0, 2.0, 3.0] {
        ensure_values(&sum_gradient(&point, |x| x.cdist(&many, p))?, &[70_000.0])
            .with_context(|| format!("p = {p}"))?;
    }
    Ok(())
}

fn products_of_long_vectors(device: &Device) -> Result<()> {
    for n in [1_000_000, 4_000_001] {
        let (x, y) = (zero_mean_row(&[n], device)?, zero_mean_row(&[n], device)?);
        let whole = (n / 4 * 12 + if n % 4 == 0 { 0 } else { 9 }) as f64;
        ensure_close(&x.dot(&y)?.to_f64s()?, &[whole], 1e-5, 0.0)?;
    }
    let n = 300_000;
    let a = zero_mean_row(&[1, n], device)?.broadcast_to([33, n])?.copy()?;
    let b = zero_mean_row(&[n, 1], device)?;
    ensure_close(&a.matmul(&b)?.to_f64s()?, &[900_000.0; 33], 1e-5, 0.0)?;
    let b = b.broadcast_to([n, 20])?.copy()?;
    ensure_close(&a.matmul(&b)?.to_f64s()?, &[900_000.0; 660], 1e-5, 0.0)
}

fn gradients_of_overlapping_views_of_many_windows(device: &Device) -> Result<()> {
    // Each element is in up to 1,000 windows.
    let x = Tensor::zeros([5000], DType::F32, device)?;
    let grad = sum_gradient(&x, |x| x.unfold(0, 1000, 1))?.to_f64s()?;
    let windows = |at: usize| (at + 1).min(5000 - at).min(1000).min(4001) as f64;
    ensure!((0..5000).all(|at| grad[at] == windows(at)), "{:?}", &grad[..10]);
    Ok(())
}

fn reductions_of_long_rows_and_columns(device: &Device) -> Result<()> {
    let n = 2_000_000;
    for shape in [[1, n], [n, 1], [2, n / 2], [n / 4, 4]] {
        let x = zero_mean_row(&shape, device)?;
        let dim = if shape[0] > shape[1] { 0 } else { 1 };
        let transposed = shape == [n / 4, 4];
        let kept = shape[1 - dim as usize];
        let sums = x.sum([dim], false)?.to_f64s()?;
        let expected: Vec<f64> = match transposed {
            true => [3.0, -1.0, -1.0, -1.0].map(|v| v * (n / 4) as f64).to_vec(),
            false => vec![0.0; kept],
        };
        ensure_close(&sums, &expected, 1e-5, 0.0)?;
        let var = x.var([dim], 0.0, false)?.to_f64s()?;
        ensure_close(&var, &vec![if transposed { 0.0 } else { 3.0 }; kept], 1e-4, 1e-6)?;
        ensure_values(
            &x.gt(0.0)?.any([dim], false)?.to_dtype(DType::F32)?.sum_all()?,
            &[if transposed { 1.0 } else { kept as f64 }],
        )?;
        ensure_values(&x.gt(0.0)?.count_nonzero(())?, &[(n / 4) as f64])?;
    }
    // Column sums of a row-major matrix.
    let x = Tensor::ones([3, 100_000, 40], DType::F32, device)?;
    ensure_values(&x.sum([1], false)?, &[100_000.0; 120])?;
    ensure_values(&x.narrow(2, 0, 3)?.sum([0, 1], false)?, &[300_000.0; 3])?;
    ensure_close(&x.norm(2.0, (), false)?.to_f64s()?, &[12_000_000.0f64.sqrt()], 1e-5, 0.0)?;
    x.narrow(1, 99_999, 1)?.fill_(2.0)?;
    ensure_values(&x.argmax(1, false)?, &[99_999.0; 120])?;
    ensure_values(&x.amax([0, 1], false)?, &[2.0; 40])
}

fn factorizations_with_many_loop_iterations(device: &Device) -> Result<()> {
    super::require_dtype(device, DType::F64)?;
    // One workgroup processes a matrix; its loops exceed 65,535 iterations, so several launches share them.
    let largest = |t: &Tensor| t.abs()?.max_all()?.item();
    let n = 420;
    let eye = Tensor::eye(n, n, DType::F32, device)?;
    let x = Tensor::randn([n, n], DType::F32, device)?;
    let a = x.add(&eye.mul(80.0)?)?.flip([1])?;
    let b = Tensor::randn([n, 3], DType::F32, device)?;
    let off = largest(&a.matmul(&a.solve(&b)?)?.sub(&b)?)?;
    ensure!(off < 1e-4, "a solution is off by {off}");
    let definite = x.matmul(&x.transpose(0, 1)?)?.mul(1.0 / n as f64)?.add(&eye)?;
    let l = definite.cholesky()?;
    let off = largest(&l.matmul(&l.transpose(0, 1)?)?.sub(&definite)?)?;
    ensure!(off < 1e-4, "a product of triangles is off by {off}");
    // An odd number of row exchanges: the sign is passed from launch to launch.
    let sign = a.slogdet()?.0.to_f64s()?;
    let flips = if (n * (n - 1) / 2).is_multiple_of(2) { 1.0 } else { -1.0 };
    ensure_values(&Tensor::from_slice(&sign, [1], device)?.to_dtype(DType::F32)?, &[flips])?;
    let (q, r) = x.qr(false)?;
    let off = largest(&q.matmul(&r)?.sub(&x)?)?;
    ensure!(off < 1e-3, "a product of factors is off by {off}");
    let off = largest(&q.transpose(0, 1)?.matmul(&q)?.sub(&eye)?)?;
    ensure!(off < 1e-4, "columns are off a right angle by {off}");
    // Substitution of 32 columns: one iteration processes 8 rows.
    let n = 1200;
    let triangle = Tensor::ones([n, n], DType::F32, device)?.tril(0)?;
    let b = Tensor::ones([n, 32], DType::F32, device)?;
    let y = triangle.solve_triangular(&b, false, &Default::default())?;
    ensure_values(&y.narrow(0, 0, 1)?, &[1.0; 32])?;
    ensure_values(&y.narrow(0, 1, n - 1)?.abs()?.max_all()?, &[0.0])
}

fn singular_values_of_tall_matrices(device: &Device) -> Result<()> {
    // One workgroup rotates all pairs of columns of a matrix, with many iterations each.
    let x = Tensor::randn([90_000, 16], DType::F32, device)?;
    let values = x.svdvals()?.to_f64s()?;
    let squares = x.transpose(0, 1)?.matmul(&x)?.svdvals()?.to_f64s()?;
    let expected: Vec<f64> = squares.iter().map(|v| v.sqrt()).collect();
    ensure_close(&values, &expected, 1e-4, 0.0)
}

/// Checks the values, or accepts an error about loop limits.
fn ensure_correct_or_refused(
    made: forebay::error::Result<Tensor>,
    check: impl FnOnce(&[f64]) -> Result<()>,
) -> Result<()> {
    match made {
        Err(Error::Unsupported { reason, .. }) if reason.contains("ends loops") => Ok(()),
        made => check(&made?.to_f64s()?),
    }
}

fn attention_over_many_positions_is_correct_or_refused(device: &Device) -> Result<()> {
    let options = AttentionOptions::default();
    for n in [1000, 60_000] {
        let few = Tensor::zeros([1, 1, 4, 64], DType::F32, device)?;
        let many = Tensor::zeros([1, 1, n, 64], DType::F32, device)?;
        // All weights are equal; the second half of the values is 3.
        let v = Tensor::ones([1, 1, n, 64], DType::F32, device)?;
        v.narrow(2, n / 2, n / 2)?.fill_(3.0)?;
        ensure_correct_or_refused(few.scaled_dot_product_attention(&many, &v, &options), |y| {
            ensure_close(y, &[2.0; 256], 1e-4, 0.0)
        })?;
        let leaf = few.detach().to_leaf()?;
        let back = || {
            let y = many.scaled_dot_product_attention(&few, &leaf, &options)?;
            y.backward_with(&y.ones_like()?)?;
            leaf.grad().map_or_else(|| leaf.zeros_like(), Ok)
        };
        ensure_correct_or_refused(back(), |g| ensure_close(g, &[n as f64 / 4.0; 256], 1e-4, 0.0))?;
    }
    Ok(())
}

fn convolutions_with_long_filters_are_correct_or_refused(device: &Device) -> Result<()> {
    for n in [500, 17_000] {
        let x = Tensor::ones([1, 1, n + 3], DType::F32, device)?.to_leaf()?;
        let w = Tensor::ones([1, 1, n], DType::F32, device)?;
        let y = || x.conv1d(&w, None, &Default::default());
        ensure_correct_or_refused(y(), |y| ensure_close(y, &[n as f64; 4], 1e-5, 0.0))?;
        let back = || {
            let y = y()?;
            y.backward_with(&y.ones_like()?)?;
            x.grad().map_or_else(|| x.zeros_like(), Ok)
        };
        ensure_correct_or_refused(back(), |g| {
            let expected: Vec<f64> = (0..n + 3).map(|at| (at + 1).min(n + 3 - at).min(4) as f64).collect();
            ensure_close(g, &expected, 1e-5, 0.0)
        })?;
    }
    Ok(())
}
