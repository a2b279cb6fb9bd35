//! Pooling: empty windows, NaN and infinities, and windows beyond the loop limit of kernels.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{Pool1dOptions, Pool2dOptions, Pool3dOptions};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_values, sum_gradient};
use super::{compute_dtypes, require_dtype, tests};

tests![
    a_maximum_over_padding_alone_is_the_smallest_of_its_type,
    maxima_agree_with_plain_loops_for_windows_with_gaps,
    a_volume_of_padding_alone_has_no_maximum_and_no_gradient,
    nan_and_infinities_go_through_pooling_as_in_pytorch,
    averages_have_the_divisor_of_pytorch,
    averages_of_64_bit_types_are_accurate,
    a_window_of_a_whole_plane_is_averaged_in_every_element,
    a_window_of_a_long_signal_finds_its_maximum,
    gradients_of_long_windows_reach_every_element,
    a_long_window_takes_the_last_nan_and_the_first_of_equals,
    adaptive_windows_of_long_signals_need_64_bit_bounds,
];

fn a_maximum_over_padding_alone_is_the_smallest_of_its_type(device: &Device) -> Result<()> {
    // The window covers indices -1 and 2 of a signal of length two.
    let window = Pool1dOptions { padding: [1], dilation: [3], stride: [1], ..Pool1dOptions::new(2) };
    for dtype in compute_dtypes(device).filter(|&dtype| dtype != DType::Bool && !dtype.is_storage_only()) {
        let x = Tensor::from_slice(&[5.0f32, 7.0], [1, 1, 2], device)?.to_dtype(dtype)?;
        let (y, indices) = x.max_pool1d_with_indices(window)?;
        ensure!(indices.to_vec::<i64>()? == [2], "{dtype:?}: {indices}");
        let smallest = match dtype {
            DType::I32 => f64::from(i32::MIN),
            DType::I64 => i64::MIN as f64,
            DType::U8 | DType::U32 => 0.0,
            _ => f64::NEG_INFINITY,
        };
        let y = y.to_f64s()?[0];
        ensure!(y == smallest, "{dtype:?}: {y}, not {smallest}");
    }
    let x = Tensor::from_slice(&[5.0f32, 7.0], [1, 1, 2], device)?;
    ensure_values(&sum_gradient(&x, |x| x.max_pool1d(window))?, &[0.0, 0.0])
}

/// PyTorch's loop over windows: returns values, indices, and how often each element is the maximum.
fn reference_max_pool(
    x: &[f32],
    [h, w]: [usize; 2],
    window: Pool2dOptions,
    [oh, ow]: [usize; 2],
) -> (Vec<f32>, Vec<i64>, Vec<f64>) {
    let (mut values, mut indices, mut grads) = (Vec::new(), Vec::new(), vec![0.0; x.len()]);
    for o in 0..oh * ow {
        let start = |o: usize, axis: usize| {
            let mut at = (o * window.stride[axis]) as i64 - window.padding[axis] as i64;
            let end = at + ((window.kernel[axis] - 1) * window.dilation[axis] + 1) as i64;
            while at < 0 {
                at += window.dilation[axis] as i64;
            }
            (at, end.min([h, w][axis] as i64))
        };
        let ((y0, y1), (x0, x1)) = (start(o / ow, 0), start(o % ow, 1));
        let (mut value, mut index, mut some) = (f32::NEG_INFINITY, y0 * w as i64 + x0, false);
        for row in (y0..y1).step_by(window.dilation[0]) {
            for col in (x0..x1).step_by(window.dilation[1]) {
                some = true;
                let at = row * w as i64 + col;
                if x[at as usize] > value || x[at as usize].is_nan() {
                    (value, index) = (x[at as usize], at);
                }
            }
        }
        if some {
            grads[index as usize] += 1.0;
        }
        values.push(value);
        indices.push(index);
    }
    (values, indices, grads)
}

fn maxima_agree_with_plain_loops_for_windows_with_gaps(device: &Device) -> Result<()> {
    let mut seed = 1u32;
    let mut draw = |n: usize| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) as usize % n
    };
    let mut empty = 0;
    for _ in 0..150 {
        let [h, w] = [1 + draw(4), 1 + draw(4)];
        let kernel = [1 + draw(4), 1 + draw(4)];
        let window = Pool2dOptions {
            kernel,
            stride: [1 + draw(3), 1 + draw(3)],
            padding: [draw(kernel[0] / 2 + 1), draw(kernel[1] / 2 + 1)],
            dilation: [1 + draw(4), 1 + draw(4)],
            ceil_mode: draw(2) == 1,
            ..Pool2dOptions::new(1)
        };
        let special = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, 0.0, -1.5, 3.0, 3.0];
        let host: Vec<f32> = (0..h * w).map(|_| special[draw(special.len())]).collect();
        let x = Tensor::from_slice(&host, [1, h, w], device)?;
        let Ok((y, indices)) = x.max_pool2d_with_indices(window) else { continue };
        let (oh, ow) = (y.shape()[1], y.shape()[2]);
        let (values, at, grads) = reference_max_pool(&host, [h, w], window, [oh, ow]);
        let name = format!("{window:?} over {host:?} of {h}x{w}");
        let got = y.to_vec::<f32>()?;
        ensure!(
            got.iter().zip(&values).all(|(a, b)| a == b || a.is_nan() && b.is_nan()),
            "{name}: {got:?}, not {values:?}"
        );
        ensure!(indices.to_vec::<i64>()? == at, "{name}: {indices}, not {at:?}");
        ensure_values(&sum_gradient(&x, |x| x.max_pool2d(window))?, &grads).context(name)?;
        empty += usize::from(grads.iter().sum::<f64>() < (oh * ow) as f64);
    }
    ensure!(empty > 3, "{empty} planes with windows of padding alone");
    Ok(())
}

fn a_volume_of_padding_alone_has_no_maximum_and_no_gradient(device: &Device) -> Result<()> {
    let host: Vec<f32> = (0..12).map(|k| k as f32).collect();
    let x = Tensor::from_slice(&host, [1, 2, 2, 3], device)?;
    for axis in 0..3 {
        let mut window = Pool3dOptions { stride: [1; 3], ..Pool3dOptions::new(1) };
        (window.kernel[axis], window.padding[axis], window.dilation[axis]) = (2, 1, 3);
        let (y, indices) = x.max_pool3d_with_indices(window)?;
        // For extent 2 the window covers -1 and 2; for extent 3, windows cover -1 and 2, then 0 and 3.
        let all = y.to_vec::<f32>()?;
        if axis < 2 {
            ensure!(all.iter().all(|&v| v == f32::NEG_INFINITY), "axis {axis}: {all:?}");
            let step = [6, 3][axis];
            let first = indices.to_vec::<i64>()?[0];
            ensure!(first == 2 * step, "axis {axis}: {indices}");
            ensure_values(&sum_gradient(&x, |x| x.max_pool3d(window))?, &[0.0; 12])?;
        } else {
            ensure_values(&y, &[2.0, 0.0, 5.0, 3.0, 8.0, 6.0, 11.0, 9.0])?;
            ensure!(indices.to_vec::<i64>()? == [2, 0, 5, 3, 8, 6, 11, 9], "{indices}");
        }
    }
    Ok(())
}

fn nan_and_infinities_go_through_pooling_as_in_pytorch(device: &Device) -> Result<()> {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let x = Tensor::from_slice(&[-inf, -inf, nan, 1.0, nan, inf], [1, 1, 6], device)?;
    let (y, indices) = x.max_pool1d_with_indices(Pool1dOptions::new(2))?;
    let y = y.to_vec::<f32>()?;
    ensure!(y[0] == -inf && y[1].is_nan() && y[2].is_nan(), "{y:?}");
    ensure!(indices.to_vec::<i64>()? == [0, 2, 4], "{indices}");
    let (y, indices) = x.adaptive_max_pool1d_with_indices(2)?;
    ensure!(y.to_vec::<f32>()?.iter().all(|v| v.is_nan()), "{y}");
    ensure!(indices.to_vec::<i64>()? == [2, 4], "{indices}");
    let y = x.avg_pool1d(Pool1dOptions::new(2))?.to_vec::<f32>()?;
    ensure!(y[0] == -inf && y[1].is_nan() && y[2].is_nan(), "{y:?}");
    Ok(())
}

fn averages_have_the_divisor_of_pytorch(device: &Device) -> Result<()> {
    let x = Tensor::ones([1, 1, 5], DType::F32, device)?;
    let window = Pool1dOptions { stride: [2], padding: [1], ceil_mode: true, ..Pool1dOptions::new(4) };
    // Windows -1 to 2 and 1 to 4; in ceil mode also 3 to 6, which is cut off after the padding.
    ensure_close(&x.avg_pool1d(window)?.to_f64s()?, &[0.75, 1.0, 2.0 / 3.0], 1e-6, 0.0)?;
    ensure_values(&x.avg_pool1d(Pool1dOptions { count_include_pad: false, ..window })?, &[1.0, 1.0, 1.0])?;
    ensure_values(&x.avg_pool1d(Pool1dOptions { divisor_override: Some(2), ..window })?, &[1.5, 2.0, 1.0])?;
    // A window that would start in the right padding is omitted.
    let last = Pool1dOptions { stride: [3], padding: [1], ceil_mode: true, ..Pool1dOptions::new(2) };
    ensure!(x.avg_pool1d(last)?.shape() == [1, 1, 2], "{:?}", x.avg_pool1d(last)?.shape());
    let powers = x
        .mul(2.0)?
        .lp_pool1d(2.0, Pool1dOptions { stride: [2], ceil_mode: true, ..Pool1dOptions::new(2) })?;
    let root = 8.0f64.sqrt();
    ensure_close(&powers.to_f64s()?, &[root, root, root], 1e-6, 0.0)
}

fn averages_of_64_bit_types_are_accurate(device: &Device) -> Result<()> {
    // Windows of 16,801,801 elements, most of them padding; an f32 holds no such number.
    let count = 4099i64 * 4099;
    let wide = Pool2dOptions { stride: [1; 2], padding: [2049; 2], ..Pool2dOptions::new(4099) };
    // Of one element, over a divisor that has more digits than an f32.
    let override_of = |divisor| Pool2dOptions { divisor_override: Some(divisor), ..Pool2dOptions::new(1) };
    let whole = Tensor::from_slice(&[2 * count as i32 - 1, 0, 0, 0], [1, 1, 2, 2], device)?;
    ensure_values(&whole.avg_pool2d(wide)?, &[1.0; 4])?;
    ensure_values(&whole.avg_pool2d(override_of(2 * count))?, &[0.0; 4])?;
    ensure!(whole.avg_pool2d(override_of(1 << 32)).is_err(), "2^32 is not a value of i32");
    ensure!(whole.to_dtype(DType::U8)?.avg_pool2d(override_of(-1)).is_err(), "-1 is not a value of u8");
    if device.info().features.i64 {
        let odd = (1i64 << 40) + 1;
        let x = Tensor::from_slice(&[2 * count - 1, 0, 0, 0], [1, 1, 2, 2], device)?;
        ensure!(x.avg_pool2d(wide)?.to_vec::<i64>()? == [1; 4]);
        let x = Tensor::from_slice(&[odd * 5 - 1, -odd * 5, 1 << 62, -1], [1, 1, 2, 2], device)?;
        for divisor in [odd, -odd] {
            let sign = divisor.signum();
            let expected = [4 * sign, -5 * sign, (1i64 << 62) / divisor, 0];
            ensure!(x.avg_pool2d(override_of(divisor))?.to_vec::<i64>()? == expected, "{divisor}");
        }
    }
    require_dtype(device, DType::F64)?;
    let f64s = |values: &[f64], shape: &[usize]| Tensor::from_slice(values, shape, device);
    let same = |got: &Tensor, expected: &[f64]| -> Result<()> {
        let got = got.to_vec::<f64>()?;
        ensure!(got == expected, "{got:?}, expected {expected:?}");
        Ok(())
    };
    let x = f64s(&[3.0 * count as f64, 0.0, 0.0, 0.0], &[1, 1, 2, 2])?;
    same(&x.avg_pool2d(wide)?, &[3.0; 4])?;
    same(&sum_gradient(&x, |x| x.avg_pool2d(wide)?.mul(count as f64))?, &[4.0; 4])?;
    for divisor in [(1i64 << 40) + 1, -(1 << 24) - 1, (1 << 53) - 1] {
        let x = f64s(&[divisor as f64; 4], &[1, 1, 2, 2])?;
        same(&x.avg_pool2d(override_of(divisor))?, &[1.0; 4])?;
        same(&sum_gradient(&x, |x| x.avg_pool2d(override_of(divisor))?.mul(divisor as f64))?, &[1.0; 4])?;
    }
    // Elements that differ only where an f32 has no digits, in short windows and in long ones.
    let small = 2f64.powi(-40);
    for n in [4, 1 << 12, 1 << 18] {
        let values: Vec<f64> = (0..n).map(|i| 1.0 + small * f64::from(i % 2)).collect();
        let x = f64s(&values, &[1, 1, n as usize])?;
        let mean = [1.0 + small / 2.0];
        same(&x.avg_pool1d(Pool1dOptions::new(n as usize))?, &mean)?;
        same(&x.adaptive_avg_pool1d(1)?, &mean)?;
        let half =
            Pool1dOptions { divisor_override: Some(i64::from(n) / 2), ..Pool1dOptions::new(n as usize) };
        same(&x.avg_pool1d(half)?, &[2.0 + small])?;
        same(&x.reshape([1, 1, 2, 1, n as usize / 2])?.adaptive_avg_pool3d([1, 1, 1])?, &mean)?;
    }
    Ok(())
}

fn a_window_of_a_whole_plane_is_averaged_in_every_element(device: &Device) -> Result<()> {
    // 262,144 integers in one window, whose sum is exact.
    let x = Tensor::ones([1, 2, 512, 512], DType::F32, device)?;
    x.narrow(2, 500, 1)?.fill_(513.0)?;
    ensure_values(&x.adaptive_avg_pool2d([1, 1])?, &[2.0, 2.0])?;
    ensure_values(&x.avg_pool2d(Pool2dOptions::new(512))?, &[2.0, 2.0])?;
    ensure_values(&x.adaptive_avg_pool3d([1, 1, 1])?, &[2.0])?;
    let line = x.reshape([1, 1, 2 << 18])?;
    ensure_values(&line.adaptive_avg_pool1d(1)?, &[2.0])?;
    ensure_values(
        &line.avg_pool1d(Pool1dOptions { divisor_override: Some(1 << 18), ..Pool1dOptions::new(2 << 18) })?,
        &[4.0],
    )?;
    ensure_close(
        &line.lp_pool1d(1.0, Pool1dOptions::new(2 << 18))?.to_f64s()?,
        &[f64::from(1 << 20)],
        1e-6,
        0.0,
    )?;
    // Two maxima, found by other kernels than the means.
    let (y, indices) = x.adaptive_max_pool2d_with_indices([1, 1])?;
    ensure_values(&y, &[513.0, 513.0])?;
    ensure!(indices.to_vec::<i64>()? == [500 * 512; 2], "{indices}");
    Ok(())
}

fn a_window_of_a_long_signal_finds_its_maximum(device: &Device) -> Result<()> {
    let n = 200_003;
    for dtype in [DType::F32, DType::U8] {
        let x = Tensor::zeros([1, 3, n], dtype, device)?;
        for (channel, at) in [100, 150_000, n - 1].into_iter().enumerate() {
            x.select(1, channel as isize)?.narrow(1, at, 1)?.fill_(7.0)?;
        }
        // Windows over the first half, everything, and the second half.
        let window = Pool1dOptions { stride: [n / 2], padding: [n / 2], ..Pool1dOptions::new(n) };
        let (y, indices) = x.max_pool1d_with_indices(window)?;
        ensure_values(&y, &[7.0, 7.0, 0.0, 0.0, 7.0, 7.0, 0.0, 7.0, 7.0])?;
        let (half, last) = (n as i64 / 2 - 1, n as i64 - 1);
        let indices = indices.to_vec::<i64>()?;
        ensure!(indices == [100, 100, half + 1, 0, 150_000, 150_000, 0, last, last], "{indices:?}");
    }
    Ok(())
}

fn gradients_of_long_windows_reach_every_element(device: &Device) -> Result<()> {
    // Every element is in up to 2,000 windows: those that start at most 1,999 before it.
    let (n, k) = (4001, 2000);
    let x = Tensor::zeros([1, 1, n], DType::F32, device)?;
    let window = Pool1dOptions { stride: [1], ..Pool1dOptions::new(k) };
    let grad = sum_gradient(&x, |x| x.avg_pool1d(Pool1dOptions { divisor_override: Some(1), ..window }))?;
    let windows = |at: usize| (at + 1).min(n - k + 1).min(n - at).min(k) as f64;
    ensure_values(&grad, &(0..n).map(windows).collect::<Vec<_>>())?;
    // The first element is the maximum of the first window only, the one at 2,000 of all its other windows.
    x.narrow(2, 0, 1)?.fill_(3.0)?;
    x.narrow(2, k, 1)?.fill_(2.0)?;
    let mut expected = vec![0.0; n];
    (expected[0], expected[k], expected[k + 1]) = (1.0, 2000.0, 1.0);
    ensure_values(&sum_gradient(&x, |x| x.max_pool1d(window))?, &expected)?;
    // More windows over one element than the loop limit.
    let one = Tensor::full([1, 1, 1], 2.0, DType::F32, device)?;
    ensure_values(&sum_gradient(&one, |x| x.adaptive_avg_pool1d(100_000))?, &[100_000.0])?;
    ensure_values(&sum_gradient(&one, |x| x.adaptive_max_pool1d(100_000))?, &[100_000.0])
}

fn a_long_window_takes_the_last_nan_and_the_first_of_equals(device: &Device) -> Result<()> {
    let n = 70_001;
    let x = Tensor::full([1, 3, n], f64::NEG_INFINITY, DType::F32, device)?;
    for at in [60, 50_000] {
        x.select(1, 0)?.narrow(1, at, 1)?.fill_(f64::NAN)?;
        x.select(1, 1)?.narrow(1, at, 1)?.fill_(-4.0)?;
    }
    let (y, indices) = x.max_pool1d_with_indices(Pool1dOptions::new(n))?;
    let y = y.to_vec::<f32>()?;
    ensure!(y[0].is_nan() && y[1] == -4.0 && y[2] == f32::NEG_INFINITY, "{y:?}");
    ensure!(indices.to_vec::<i64>()? == [50_000, 60, 0], "{indices}");
    Ok(())
}

fn adaptive_windows_of_long_signals_need_64_bit_bounds(device: &Device) -> Result<()> {
    // Products of extents exceed 2^32.
    let (n, outs) = (100_003, 70_001);
    let x = Tensor::arange(0.0, n as f64, 1.0, DType::F32, device)?.reshape([1, 1, n])?;
    let first = |o: usize| o * n / outs;
    let end = |o: usize| ((o + 1) * n).div_ceil(outs);
    let mean = x.adaptive_avg_pool1d(outs)?.to_vec::<f32>()?;
    let (largest, indices) = x.adaptive_max_pool1d_with_indices(outs)?;
    let (largest, indices) = (largest.to_vec::<f32>()?, indices.to_vec::<i64>()?);
    let mut grads = vec![0.0; n];
    for o in 0..outs {
        let expected = (first(o)..end(o)).sum::<usize>() as f64 / (end(o) - first(o)) as f64;
        ensure!((f64::from(mean[o]) - expected).abs() <= 0.01, "mean {o}: {}, not {expected}", mean[o]);
        ensure!(
            largest[o] == (end(o) - 1) as f32 && indices[o] == end(o) as i64 - 1,
            "maximum {o}: {}",
            largest[o]
        );
        (first(o)..end(o)).for_each(|at| grads[at] += 1.0 / (end(o) - first(o)) as f64);
    }
    ensure_close(&sum_gradient(&x, |x| x.adaptive_avg_pool1d(outs))?.to_f64s()?, &grads, 1e-5, 0.0)
}
