//! Reductions, softmax and normalisations at the sizes and layouts where kernels change. Rows are vectorised or scalar,
//! few or many, too long for registers, or views.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{self, GradOptions};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::NormOptions;
use forebay::profile::{Profiler, Span};
use forebay::tensor::Tensor;

use super::host_reference::ensure_close;

super::tests![
    sums_over_every_dimension,
    factors_that_broadcast_get_sums_of_products,
    sums_under_autocast_read_16_bit_elements,
    extremes_and_means_of_long_columns,
    variances_of_large_means_are_accurate,
    means_of_var_mean_do_not_overflow,
    var_mean_reads_its_input_three_times,
    equal_extremes_share_their_gradient,
    many_short_rows_are_reduced,
    softmax_of_every_length,
    layer_norms_of_every_length,
    a_residual_is_added_in_the_same_pass,
    a_bias_before_a_residual_gets_its_own_sums,
    the_sum_of_a_residual_gets_both_gradients,
    residuals_under_autocast,
    the_branch_and_the_previous_sum_are_saved_instead_of_a_residual_sum,
];

/// Returns the variance of values with `correction`, and the gradient of its sum with respect to each of them.
fn host_variance(values: &[f64], correction: f64) -> (f64, Vec<f64>) {
    let n = values.len() as f64;
    let mean = values[0] + values.iter().map(|v| v - values[0]).sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    (squares / (n - correction), values.iter().map(|v| 2.0 * (v - mean) / (n - correction)).collect())
}

fn variances_of_large_means_are_accurate(device: &Device) -> Result<()> {
    // Rows and columns, by one thread or many, in one stage or two, and in quads or not.
    for shape in [[3, 8], [64, 36], [5, 1000], [1000, 5], [1, 100_000], [100_003, 1], [30_000, 4]] {
        let noise = Tensor::randn(shape, DType::F32, device)?;
        for (mean, deviation) in
            [(1e4, 1e-3), (-3e5, 1.0), (1e20, 1e14), (1e20, 0.0), (0.1, 0.0), (3e38, 0.0)]
        {
            // The elements, as f32 rounds them.
            let x = noise.mul(deviation)?.add(mean)?;
            let values = x.to_f64s()?;
            for dim in [0, 1] {
                let (n, others) = (shape[dim], shape[1 - dim]);
                if n < 2 {
                    continue;
                }
                let at = |o: usize, r: usize| if dim == 0 { r * shape[1] + o } else { o * shape[1] + r };
                let (mut vars, mut expected) = (vec![0.0; others], vec![0.0; values.len()]);
                for (o, var) in vars.iter_mut().enumerate() {
                    let line: Vec<f64> = (0..n).map(|r| values[at(o, r)]).collect();
                    let (of_line, gradient) = host_variance(&line, 1.0);
                    *var = of_line;
                    gradient.iter().enumerate().for_each(|(r, &g)| expected[at(o, r)] = g);
                }
                let context = || format!("{shape:?} over {dim}: {mean} and {deviation}");
                let largest = vars.iter().copied().fold(0.0, f64::max);
                let dim = dim as isize;
                ensure_close(&x.var(dim, 1.0, false)?.to_f64s()?, &vars, 1e-5, 0.0).with_context(context)?;
                let deviations: Vec<f64> = vars.iter().map(|v| v.sqrt()).collect();
                ensure_close(&x.std(dim, 1.0, false)?.to_f64s()?, &deviations, 1e-5, 0.0)
                    .with_context(context)?;
                let leaf = x.to_leaf()?;
                leaf.var(dim, 1.0, false)?.sum_all()?.backward()?;
                let got = leaf.grad().context("there is no gradient")?.to_f64s()?;
                ensure_close(&got, &expected, 1e-5, 1e-5 * largest.sqrt() / n as f64)
                    .with_context(context)?;
            }
        }
    }
    Ok(())
}

/// The mean and the variance share the mean's distance from the first element.
fn var_mean_reads_its_input_three_times(device: &Device) -> Result<()> {
    let x = Tensor::randn([8, 4096], DType::F32, device)?;
    for spread_and_mean in [Tensor::var_mean, Tensor::std_mean] {
        let profiler = Profiler::start(device)?;
        spread_and_mean(&x, 1, 1.0, false)?;
        let spans = profiler.finish()?.spans;
        let is_read = |span: &&Span| span.name.starts_with("reduce") && span.bytes >= 4 * x.numel() as u64;
        let reads = spans.iter().filter(is_read).count();
        ensure!(reads == 3, "{reads} kernels read the input");
    }
    Ok(())
}

fn means_of_var_mean_do_not_overflow(device: &Device) -> Result<()> {
    let (large, inf, nan) = (3e38f32, f32::INFINITY, f32::NAN);
    let rows =
        [[large; 3], [-large; 3], [1.0, 2.0, 6.0], [large, -large, 0.0], [1.0, inf, 2.0], [1.0, nan, 2.0]];
    let x = Tensor::from_slice(rows.as_flattened(), [6, 3], device)?;
    for keepdim in [false, true] {
        for spread_and_mean in [Tensor::var_mean, Tensor::std_mean] {
            let leaf = x.to_leaf()?;
            let (_, mean) = spread_and_mean(&leaf, 1, 1.0, keepdim)?;
            ensure!(mean.shape() == x.mean(1, keepdim)?.shape(), "{:?}", mean.shape());
            let found = mean.to_vec::<f32>()?;
            ensure!(found[..5] == [large, -large, 3.0, 0.0, inf] && found[5].is_nan(), "{found:?}");
            mean.narrow(0, 0, 4)?.sum_all()?.backward()?;
            let grad = leaf.grad().context("there is no gradient")?.to_f64s()?;
            let expected: Vec<f64> = (0..18).map(|k| if k < 12 { 1.0 / 3.0 } else { 0.0 }).collect();
            ensure_close(&grad, &expected, 1e-6, 0.0)?;
        }
    }
    let empty = Tensor::zeros([2, 0], DType::F32, device)?;
    ensure!(empty.var_mean(1, 1.0, false)?.1.to_vec::<f32>()?.iter().all(|v| v.is_nan()), "no elements");
    Ok(())
}

fn uniform(shape: &[usize], device: &Device) -> Result<Tensor> {
    Ok(Tensor::rand(shape, DType::F32, device)?.sub(0.5)?)
}

fn close(what: &str, got: &[f32], expected: &[f32], within: f32) -> Result<()> {
    ensure!(got.len() == expected.len(), "{what}: {} elements, not {}", got.len(), expected.len());
    for (k, (&g, &e)) in got.iter().zip(expected).enumerate() {
        ensure!((g - e).abs() <= within * (1.0 + e.abs()), "{what}: element {k} is {g}, not {e}");
    }
    Ok(())
}

/// Returns the sums of [a, b, c] over b.
fn sum_middle_dim(x: &[f32], [a, b, c]: [usize; 3]) -> Vec<f32> {
    let at = |i, j, k| f64::from(x[(i * b + j) * c + k]);
    (0..a * c).map(|o| (0..b).map(|j| at(o / c, j, o % c)).sum::<f64>() as f32).collect()
}

fn sums_over_every_dimension(device: &Device) -> Result<()> {
    for shape in [
        [1, 70_000, 1],
        [1, 3000, 1],
        [3, 1500, 4],
        [2, 700, 36],
        [1, 5000, 33],
        [130, 260, 1],
        [130, 261, 1],
        [5, 4, 1030],
        [1, 40, 2000],
        [7, 12, 8],
    ] {
        let [a, b, c] = shape;
        let x = uniform(&[a, b, c], device)?;
        let host = x.to_vec::<f32>()?;
        let name = format!("the sum of {shape:?}");
        close(&name, &x.sum([1], false)?.to_vec::<f32>()?, &sum_middle_dim(&host, shape), 1e-4)?;
        // 16-bit integers have exact f32 sums.
        let whole = x.mul(4.0)?.round()?;
        let exact = sum_middle_dim(&whole.to_vec::<f32>()?, shape);
        let half = whole.to_dtype(DType::F16)?.sum([1], false)?.to_dtype(DType::F32)?;
        let rounded: Vec<f32> = exact.iter().map(|&v| half::f16::from_f32(v).to_f32()).collect();
        close(&format!("{name} as f16"), &half.to_vec::<f32>()?, &rounded, 0.0)?;
        // A view with an odd offset.
        if c > 4 {
            let part = x.narrow(2, 3, c - 3)?;
            let copied = part.copy()?.to_vec::<f32>()?;
            let expected = sum_middle_dim(&copied, [a, b, c - 3]);
            close(&format!("{name}, a part"), &part.sum([1], false)?.to_vec::<f32>()?, &expected, 1e-4)?;
        }
        let all: f64 = host.iter().map(|&v| f64::from(v)).sum();
        close(&format!("{name}, all"), &[x.sum_all()?.item()? as f32], &[all as f32], 1e-4)?;
        let outer: f64 = host.iter().map(|&v| f64::from(v)).sum();
        let twice = x.sum([0, 2], false)?.sum_all()?.item()? as f32;
        close(&format!("{name}, around"), &[twice], &[outer as f32], 1e-4)?;
        ensure!(x.sum([1], false)?.to_vec::<f32>()? == x.sum([1], false)?.to_vec::<f32>()?, "{name} changes");
    }
    Ok(())
}

/// Gradient of a factor \[a, 1, c\] of `x`, with `scale` as the gradient of the products, on the host in f64.
fn sum_products(x: &[f32], scale: &[f32], extents: [usize; 3]) -> Vec<f32> {
    let products: Vec<f32> = x.iter().zip(scale).map(|(x, g)| x * g).collect();
    sum_middle_dim(&products, extents)
}

fn factors_that_broadcast_get_sums_of_products(device: &Device) -> Result<()> {
    let dtypes = [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)];
    for shape in [[1, 3000, 1], [3, 150, 4], [2, 70, 36], [1, 500, 33], [40, 17, 1], [1, 9, 2048], [5, 1, 7]]
    {
        for (of_x, of_factor) in dtypes {
            let [a, b, c] = shape;
            let x = uniform(&shape, device)?.to_dtype(of_x)?;
            let factor = uniform(&[a, 1, c], device)?.to_dtype(of_factor)?.to_leaf()?;
            let y = x.mul(&factor)?;
            let scale = uniform(&shape, device)?.to_dtype(y.dtype())?;
            let values = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec::<f32>();
            let expected = sum_products(&values(&x)?, &values(&scale)?, shape);
            // The gradient may have other strides than the operand, or start within its memory.
            let permuted = scale.permute([2, 0, 1])?.contiguous()?.permute([1, 2, 0])?;
            let padded = forebay::ops::cat(&[&scale, &scale], 0)?.narrow(0, a, a)?;
            for g in [&scale, &permuted, &padded] {
                let options = GradOptions {
                    grad_outputs: Some(std::slice::from_ref(g)),
                    ..GradOptions::retain_graph()
                };
                let profiler = Profiler::start(device)?;
                let grads = autograd::grad(&[&y], &[&factor], &options)?;
                let launched = profiler.finish()?;
                let writes_products = launched.spans.iter().any(|span| span.name.contains("g * a"));
                // The kernel reads both tensors at the same places, and copies a permuted gradient of 16 bits.
                let must_fuse = b > 1 && (g.dtype() == DType::BF16 || g.strides() == x.strides());
                ensure!(!must_fuse || !writes_products, "{:?}", launched.spans);
                ensure!(grads[0].dtype() == of_factor && grads[0].shape() == [a, 1, c], "{:?}", grads[0]);
                // Only the sum is rounded to 16 bits.
                let within = if of_factor == DType::BF16 { 1.0 / 256.0 } else { 2e-5 };
                close(&format!("{shape:?} {of_x} {of_factor}"), &values(&grads[0])?, &expected, within)?;
            }
        }
    }
    Ok(())
}

fn sums_under_autocast_read_16_bit_elements(device: &Device) -> Result<()> {
    let x = uniform(&[6, 50, 8], device)?.to_dtype(DType::BF16)?.to_leaf()?;
    let expected = x.to_dtype(DType::F32)?.sum([1], false)?;
    let scale = uniform(&[6, 8], device)?;
    let profiler = Profiler::start(device)?;
    let sum = {
        let _autocast = autocast(DType::BF16)?;
        x.sum([1], false)?
    };
    let profile = profiler.finish()?;
    ensure!(profile.spans.iter().all(|span| span.op != "to_dtype"), "the elements were cast");
    ensure!(sum.dtype() == DType::F32 && sum.to_vec::<f32>()? == expected.to_vec::<f32>()?, "other sums");
    sum.backward_with(&scale)?;
    let grad = x.grad().context("no gradient")?;
    let expected = scale.to_dtype(DType::BF16)?.unsqueeze(1)?.expand([6, 50, 8])?.to_dtype(DType::F32)?;
    ensure!(grad.dtype() == DType::BF16, "the gradient is {}", grad.dtype());
    ensure!(grad.to_dtype(DType::F32)?.to_vec::<f32>()? == expected.to_vec::<f32>()?, "other gradients");
    Ok(())
}

fn extremes_and_means_of_long_columns(device: &Device) -> Result<()> {
    for (rows, columns) in [(3000, 8), (2500, 36), (600, 7)] {
        let x = uniform(&[rows, columns], device)?;
        let host = x.to_vec::<f32>()?;
        let column = |c: usize| (0..rows).map(move |r| r * columns + c);
        let largest: Vec<f32> =
            (0..columns).map(|c| column(c).map(|i| host[i]).fold(f32::NEG_INFINITY, f32::max)).collect();
        close("amax", &x.amax([0], false)?.to_vec::<f32>()?, &largest, 0.0)?;
        let mean: Vec<f32> = (0..columns)
            .map(|c| (column(c).map(|i| f64::from(host[i])).sum::<f64>() / rows as f64) as f32)
            .collect();
        close("mean", &x.mean([0], false)?.to_vec::<f32>()?, &mean, 1e-5)?;
        let (value, index) = x.max(0, false)?;
        let picked: Vec<f32> = x.gather(0, &index.unsqueeze(0)?)?.to_vec::<f32>()?;
        close("max", &value.to_vec::<f32>()?, &picked, 0.0)?;
        let mut spoiled = host.clone();
        spoiled[(rows - 1) * columns + 2] = f32::NAN;
        let nan = Tensor::from_slice(&spoiled, [rows, columns], device)?.amax([0], false)?.to_vec::<f32>()?;
        ensure!(nan[2].is_nan() && nan[1] == largest[1], "NaN stays in its column: {nan:?}");
    }
    Ok(())
}

/// Returns the largest or the least elements over `dims`, or of the whole tensor without any.
fn extremes(x: &Tensor, dims: &[isize], least: bool) -> Result<Tensor> {
    Ok(match (dims.is_empty(), least) {
        (true, false) => x.max_all()?.reshape(vec![1; x.rank()]),
        (true, true) => x.min_all()?.reshape(vec![1; x.rank()]),
        (false, false) => x.amax(dims, true),
        (false, true) => x.amin(dims, true),
    }?)
}

/// Compares the gradients of the rows of `x`, repeated, with those of the rows themselves. Rows are independent.
fn check_repeated_shares(x: &Tensor, repeats: usize) -> Result<()> {
    let repeat = |t: &Tensor| -> Result<Tensor> {
        let [rows, n] = [t.shape()[0], t.shape()[1]];
        Ok(t.broadcast_to([repeats, rows, n])?.reshape([repeats * rows, n])?)
    };
    let g = Tensor::randn([x.shape()[0], 1], DType::F32, x.device())?.to_dtype(x.dtype())?;
    for least in [false, true] {
        let gradient = |x: &Tensor, g: &Tensor| -> Result<Vec<u8>> {
            let leaf = x.to_leaf()?;
            extremes(&leaf, &[1], least)?.backward_with(g)?;
            Ok(leaf.grad().context("no gradient")?.to_bytes()?)
        };
        let (once, repeated) = (gradient(x, &g)?, gradient(&repeat(x)?, &repeat(&g)?)?);
        let differs = repeated.chunks(once.len()).position(|rows| rows != once);
        ensure!(differs.is_none(), "repetition {differs:?} of the rows has other gradients; least: {least}");
        ensure!(repeated.len() == repeats * once.len(), "{} bytes", repeated.len());
    }
    Ok(())
}

/// Compares the gradients of `amax`, `amin` and `max_all` with a count of the equal elements.
fn check_shares(x: &Tensor, dims: &[isize]) -> Result<()> {
    for least in [false, true] {
        let leaf = x.to_leaf()?;
        let y = extremes(&leaf, dims, least)?;
        let g = Tensor::randn(y.shape(), DType::F32, x.device())?.to_dtype(x.dtype())?;
        y.backward_with(&g)?;
        let (got, y) = (leaf.grad().context("no gradient")?.to_f64s()?, y.detach());
        let mut mask = x.eq(&y)?;
        if dims.is_empty() {
            mask = mask.logical_or(&x.isnan()?.logical_and(&y.isnan()?)?)?;
        }
        // 16 bits do not hold the number of ties, so only the share is rounded.
        let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let ties = mask.count_nonzero(dims)?.reshape(y.shape())?.to_dtype(wide)?;
        let share = g.to_dtype(wide)?.div(&ties)?.to_dtype(x.dtype())?;
        let expected = share.mul(&mask.to_dtype(x.dtype())?)?.to_f64s()?;
        for (k, (a, b)) in got.iter().zip(&expected).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            ensure!(same, "element {k} of the gradient is {a}, not {b}; least: {least}");
        }
        ensure!(got.len() == expected.len(), "{} elements", got.len());
    }
    Ok(())
}

fn equal_extremes_share_their_gradient(device: &Device) -> Result<()> {
    let cases: [(&[usize], &[isize]); 14] = [
        (&[3, 5, 20], &[-1]),
        (&[64, 20], &[1]),
        (&[3, 7], &[1]),
        (&[2, 20, 12], &[1]),
        (&[2, 20, 7], &[1]),
        (&[3, 4, 6, 5], &[1, 2]),
        (&[3, 4, 6, 8], &[0, 1]),
        (&[4, 3, 5], &[0, 2]),
        (&[5, 3000], &[1]),
        (&[20, 12_000], &[1]),
        (&[600, 1028], &[0]),
        (&[9, 5], &[]),
        (&[50_000], &[]),
        (&[1, 6, 1], &[0, 2]),
    ];
    // f16 and f64 differ from the others only in how elements are read and written.
    let types = [(DType::F32, 14), (DType::BF16, 14), (DType::F16, 5), (DType::F64, 5)];
    for (dtype, count) in types.into_iter().filter(|(dtype, _)| device.supports_dtype(*dtype)) {
        for &(shape, dims) in &cases[..count] {
            let what = || format!("{dtype} {shape:?} over {dims:?}");
            let x = Tensor::randint(-2, 3, shape, DType::I32, device)?.to_dtype(dtype)?;
            check_shares(&x, dims).with_context(what)?;
            let nan = Tensor::rand(shape, DType::F32, device)?.lt(0.02)?;
            check_shares(&x.masked_fill(&nan, f64::NAN)?, dims).with_context(what)?;
            check_shares(&x.add(1.0)?.transpose(0, -1)?, dims).with_context(what)?;
            if shape == [64, 20] {
                // So many rows have one thread each.
                check_repeated_shares(&x, 1 << 12).with_context(what)?;
            }
        }
    }
    Ok(())
}

fn many_short_rows_are_reduced(device: &Device) -> Result<()> {
    for (rows, n) in [((1 << 18) + 4, 20), ((1 << 18) + 1, 7), (1 << 18, 5), (36, 12), (37, 12), (12, 130)] {
        let x = Tensor::randint(-9, 10, [rows, n], DType::F32, device)?;
        let host = x.to_vec::<f32>()?;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let name = format!("{rows} rows of {n}, {dtype}");
            let x = x.to_dtype(dtype)?;
            let values = |t: Tensor| t.to_dtype(DType::F32)?.to_vec::<f32>();
            let expected = |f: fn(&[f32]) -> f32| host.chunks(n).map(f).collect::<Vec<_>>();
            let largest = expected(|row| row.iter().copied().fold(f32::MIN, f32::max));
            close(&name, &values(x.amax([1], false)?)?, &largest, 0.0)?;
            let within = if dtype == DType::F32 { 1e-6 } else { 0.004 };
            close(&name, &values(x.sum([1], false)?)?, &expected(|row| row.iter().sum()), within)?;
        }
    }
    Ok(())
}

fn softmax_rows(x: &[f32], extent: usize) -> Vec<f32> {
    x.chunks(extent)
        .flat_map(|row| {
            let m = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let e: Vec<f64> = row.iter().map(|&v| f64::from(v - m).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.into_iter().map(move |v| (v / sum) as f32).collect::<Vec<_>>()
        })
        .collect()
}

fn softmax_of_every_length(device: &Device) -> Result<()> {
    for (rows, extent) in [(9, 1), (70, 4), (33, 7), (3, 129), (2, 1024), (2, 9000), (2, 9001), (1, 40_000)] {
        let x = uniform(&[rows, extent], device)?.mul(20.0)?;
        let host = x.to_vec::<f32>()?;
        let expected = softmax_rows(&host, extent);
        let name = format!("softmax of {rows} rows of {extent}");
        close(&name, &x.softmax(-1)?.to_vec::<f32>()?, &expected, 2e-6)?;
        let log: Vec<f32> = x.log_softmax(-1)?.exp()?.to_vec()?;
        close(&format!("{name}, its logarithm"), &log, &expected, 1e-5)?;
        close(
            &format!("{name}, across"),
            &x.t()?.copy()?.softmax(0)?.t()?.to_vec::<f32>()?,
            &expected,
            2e-6,
        )?;
        close(
            &format!("{name}, strided"),
            &x.t()?.copy()?.t()?.softmax(-1)?.to_vec::<f32>()?,
            &expected,
            2e-6,
        )?;
        let low = x.to_dtype(DType::BF16)?;
        let expected_low = softmax_rows(&low.to_dtype(DType::F32)?.to_vec::<f32>()?, extent);
        close(
            &format!("{name}, bf16"),
            &low.softmax(-1)?.to_dtype(DType::F32)?.to_vec::<f32>()?,
            &expected_low,
            4e-3,
        )?;
        // Gradients: y (g - sum(g y)) of softmax, and g - y sum(g) of log-softmax.
        let g = uniform(&[rows, extent], device)?;
        let gradient = |f: fn(&Tensor) -> forebay::error::Result<Tensor>| -> Result<Vec<f32>> {
            let leaf = x.to_leaf()?;
            f(&leaf)?.backward_with(&g)?;
            Ok(leaf.grad().context("there is a gradient")?.to_vec()?)
        };
        let of_rows = |log: bool| -> Vec<f32> {
            let (g, y) = (g.to_vec::<f32>().unwrap_or_default(), &expected);
            let rows = g.chunks(extent).zip(y.chunks(extent)).flat_map(|(g, y)| {
                let pairs = || g.iter().zip(y).map(|(&g, &y)| (f64::from(g), f64::from(y)));
                let sum: f64 = pairs().map(|(g, y)| if log { g } else { g * y }).sum();
                pairs().map(move |(g, y)| (if log { g - y * sum } else { y * (g - sum) }) as f32)
            });
            rows.collect()
        };
        close(&format!("{name}, gradient"), &gradient(|x| x.softmax(-1))?, &of_rows(false), 1e-5)?;
        close(
            &format!("{name}, gradient of the logarithm"),
            &gradient(|x| x.log_softmax(-1))?,
            &of_rows(true),
            1e-4,
        )?;
        if extent > 4 {
            let mut odd = host.clone();
            odd[1] = f32::NEG_INFINITY;
            odd[extent - 1] = f32::NAN;
            let odd = Tensor::from_slice(&odd, [rows, extent], device)?;
            let first = odd.softmax(-1)?.to_vec::<f32>()?;
            ensure!(first[..extent].iter().all(|v| v.is_nan()), "{name}: NaN spoils its row");
            ensure!(first[extent..].iter().all(|v| !v.is_nan()), "{name}: NaN spoils no other row");
            let masked = odd.narrow(1, 0, extent - 1)?.softmax(-1)?.to_vec::<f32>()?;
            ensure!(masked[1] == 0.0 && masked[0] > 0.0, "{name}: -inf is impossible");
            let nothing = Tensor::full([2, extent], f64::NEG_INFINITY, DType::F32, device)?;
            ensure!(
                nothing.softmax(-1)?.to_vec::<f32>()?.iter().all(|v| v.is_nan()),
                "{name}: nothing is possible"
            );
        }
    }
    Ok(())
}

/// Computes layer norm by plain operations.
fn plain_norm(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, rms: bool) -> Result<Tensor> {
    let centered = if rms { x.clone() } else { x.sub(&x.mean([-1], true)?)? };
    let mut y = centered.mul(&centered.square()?.mean([-1], true)?.add(1e-5)?.rsqrt()?)?;
    if let Some(weight) = weight {
        y = y.mul(weight)?;
    }
    Ok(if let Some(bias) = bias { y.add(bias)? } else { y })
}

fn grads(tensors: &[Tensor]) -> Result<Vec<Vec<f32>>> {
    let of =
        |t: &Tensor| Ok(t.grad().context("there is a gradient")?.to_dtype(DType::F32)?.to_vec::<f32>()?);
    tensors.iter().map(of).collect()
}

fn layer_norms_of_every_length(device: &Device) -> Result<()> {
    for (rows, extent) in
        [(5, 1), (70, 4), (33, 7), (600, 96), (9, 130), (40, 768), (3, 4096), (2, 4099), (2, 9000)]
    {
        for (rms, with) in [(false, true), (true, true), (false, false)] {
            let x = uniform(&[rows, extent], device)?;
            let weight = uniform(&[extent], device)?.add(1.0)?;
            let bias = uniform(&[extent], device)?;
            let g = uniform(&[rows, extent], device)?;
            let run = |plain: bool| -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
                let leaves: Vec<Tensor> = [&x, &weight, &bias]
                    .iter()
                    .map(|t| t.to_leaf())
                    .collect::<forebay::error::Result<_>>()?;
                let used = if !with {
                    1
                } else if rms {
                    2
                } else {
                    3
                };
                let (w, b) = (with.then_some(&leaves[1]), (with && !rms).then_some(&leaves[2]));
                let y = if plain {
                    plain_norm(&leaves[0], w, b, rms)?
                } else if rms {
                    leaves[0].rms_norm([extent], w, Some(1e-5))?
                } else {
                    leaves[0]
                        .layer_norm([extent], &NormOptions { weight: w, bias: b, ..Default::default() })?
                };
                y.backward_with(&g)?;
                Ok((y.to_vec()?, grads(&leaves[..used])?))
            };
            let (name, got, expected) =
                (format!("{rows} rows of {extent}, rms {rms}, with {with}"), run(false)?, run(true)?);
            // A single element minus its mean is zero; division by the root of eps amplifies rounding errors.
            let within = if extent == 1 { 1e-2 } else { 1e-4 };
            close(&name, &got.0, &expected.0, within)?;
            for (k, (got, expected)) in got.1.iter().zip(&expected.1).enumerate() {
                close(&format!("{name}, gradient {k}"), got, expected, within)?;
            }
        }
    }
    Ok(())
}

fn a_residual_is_added_in_the_same_pass(device: &Device) -> Result<()> {
    for (x_type, r_type) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F16, DType::F16)] {
        for extent in [1, 7, 64, 768, 4100, 20_000] {
            let shape = [2, 3, extent];
            let x = uniform(&shape, device)?.to_dtype(x_type)?;
            let r = uniform(&shape, device)?.to_dtype(r_type)?;
            let w = uniform(&[extent], device)?;
            let b = uniform(&[extent], device)?;
            let expected = x.to_dtype(x_type.promote(r_type))?.add(&r)?;
            for rms in [false, true] {
                let (sum, normed) = if rms {
                    x.add_rms_norm(&r, [extent], Some(&w), Some(1e-5))?
                } else {
                    x.add_layer_norm(
                        &r,
                        [extent],
                        &NormOptions { weight: Some(&w), bias: Some(&b), ..Default::default() },
                    )?
                };
                let name = format!("{x_type} and {r_type}, {extent}, rms {rms}");
                ensure!(
                    sum.dtype() == expected.dtype() && normed.dtype() == expected.dtype(),
                    "{name}: types"
                );
                let f32s = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec::<f32>();
                close(&name, &f32s(&sum)?, &f32s(&expected)?, 0.0)?;
                let plain = plain_norm(&expected.to_dtype(DType::F32)?, Some(&w), (!rms).then_some(&b), rms)?;
                let within = if r_type == DType::F16 {
                    2e-3
                } else if extent == 1 {
                    1e-2
                } else {
                    1e-4
                };
                close(&format!("{name}, normed"), &f32s(&normed)?, &f32s(&plain)?, within)?;
            }
        }
    }
    let (a, b) = (Tensor::ones([2, 8], DType::F32, device)?, Tensor::ones([8], DType::F32, device)?);
    ensure!(a.add_layer_norm(&b, [8], &Default::default()).is_err(), "a residual does not broadcast");
    Ok(())
}

/// A norm's backward pass also sums the bias gradient of the preceding layer, but only if the columns are equal.
fn a_bias_before_a_residual_gets_its_own_sums(device: &Device) -> Result<()> {
    for (shape, normed) in [([6, 4, 8], &[8][..]), ([6, 4, 8], &[4, 8]), ([6, 4, 8], &[6, 4, 8])] {
        let (x, r, g) = (uniform(&[6, 4, 5], device)?, uniform(&shape, device)?, uniform(&shape, device)?);
        let w = uniform(&[8, 5], device)?;
        let run = |fused: bool| -> Result<Vec<Vec<f32>>> {
            let leaf = |t: Tensor| t.detach().to_leaf();
            let (bias, scale) = (
                leaf(Tensor::ones([8], DType::F32, device)?)?,
                leaf(uniform(normed, device)?.mul(0.0)?.add(1.5)?)?,
            );
            let y = x.linear(&w, Some(&bias))?;
            let (sum, out) = if fused {
                y.add_layer_norm(&r, normed, &NormOptions { weight: Some(&scale), ..Default::default() })?
            } else {
                let sum = y.add(&r)?;
                (
                    sum.clone(),
                    sum.layer_norm(normed, &NormOptions { weight: Some(&scale), ..Default::default() })?,
                )
            };
            out.mul(&g)?.sum_all()?.add(&sum.mul(&g)?.sum_all()?)?.backward()?;
            grads(&[bias, scale])
        };
        let (got, expected) = (run(true)?, run(false)?);
        for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
            close(&format!("{normed:?}, gradient {k}"), got, expected, 1e-4)?;
        }
    }
    Ok(())
}

/// The residual stream is also used later, so that the sum has a gradient in addition to the norm's.
fn the_sum_of_a_residual_gets_both_gradients(device: &Device) -> Result<()> {
    for (extent, rms) in [(96, false), (768, true), (33, false), (20_000, false)] {
        let inputs = [
            uniform(&[10, extent], device)?,
            uniform(&[10, extent], device)?,
            uniform(&[extent], device)?,
            uniform(&[extent], device)?,
        ];
        let coefficients = [uniform(&[10, extent], device)?, uniform(&[10, extent], device)?];
        let run = |plain: bool| -> Result<Vec<Vec<f32>>> {
            let leaves: Vec<Tensor> =
                inputs.iter().map(Tensor::to_leaf).collect::<forebay::error::Result<_>>()?;
            let [x, r, w, b] = &leaves[..] else { unreachable!() };
            // A non-leaf, whose gradient may be accumulated in place.
            let x2 = x.mul(2.0)?;
            let (sum, normed) = if plain {
                let sum = x2.add(r)?;
                let normed = plain_norm(&sum, Some(w), (!rms).then_some(b), rms)?;
                (sum, normed)
            } else if rms {
                x2.add_rms_norm(r, [extent], Some(w), Some(1e-5))?
            } else {
                x2.add_layer_norm(
                    r,
                    [extent],
                    &NormOptions { weight: Some(w), bias: Some(b), ..Default::default() },
                )?
            };
            let more = sum.mul(&coefficients[0])?.add(&normed.mul(&coefficients[1])?)?;
            let again = sum.tanh()?.mul(&more)?;
            again.sum_all()?.backward()?;
            grads(&leaves[..if rms { 3 } else { 4 }])
        };
        for (k, (got, expected)) in run(false)?.iter().zip(&run(true)?).enumerate() {
            close(&format!("{extent}, rms {rms}, gradient {k}"), got, expected, 2e-4)?;
        }
    }
    // Without a later use of the sum, and with a residual that requires no gradient.
    let x = uniform(&[4, 8], device)?.to_leaf()?;
    let r = uniform(&[4, 8], device)?;
    let (sum, normed) = x.add_layer_norm(&r, [8], &Default::default())?;
    drop(sum);
    normed.square()?.sum_all()?.backward()?;
    ensure!(x.grad().is_some() && r.grad().is_none(), "only x has a gradient");
    Ok(())
}

fn residuals_under_autocast(device: &Device) -> Result<()> {
    let x = uniform(&[6, 64], device)?.to_dtype(DType::BF16)?.to_leaf()?;
    let r = uniform(&[6, 64], device)?.to_leaf()?;
    let w = uniform(&[64], device)?.to_leaf()?;
    let (sum, normed, plain) = {
        let _autocast = autocast(DType::BF16)?;
        let (sum, normed) =
            x.add_layer_norm(&r, [64], &NormOptions { weight: Some(&w), ..Default::default() })?;
        let plain = sum.layer_norm([64], &NormOptions { weight: Some(&w), ..Default::default() })?;
        (sum, normed, plain)
    };
    let types = (sum.dtype(), normed.dtype(), plain.dtype());
    ensure!(types == (DType::F32, DType::F32, DType::F32), "types: {types:?}");
    let same = plain.detach().eq(&normed.detach())?.all((), false)?.item()? == 1.0;
    ensure!(same, "the norm of the sum is that of the two operations");
    normed.to_dtype(DType::F32)?.square()?.add(&sum)?.sum_all()?.backward()?;
    for t in [&x, &r, &w] {
        let g = t.grad().context("there is a gradient")?;
        ensure!(g.dtype() == t.dtype() && g.isfinite()?.all((), false)?.item()? == 1.0, "{g:?}");
    }
    Ok(())
}

/// Three blocks on an f32 residual stream. For the second, autograd saves the 16-bit branch and the previous sum
/// instead of the new sum.
fn the_branch_and_the_previous_sum_are_saved_instead_of_a_residual_sum(device: &Device) -> Result<()> {
    for (extent, rms, low) in [
        (64, false, DType::BF16),
        (768, true, DType::F16),
        (133, false, DType::BF16),
        (1024, false, DType::F16),
    ] {
        let shape = [6, extent];
        let branches = [(); 3].map(|()| uniform(&shape, device));
        let branches: Vec<Tensor> =
            branches.into_iter().map(|b| Ok(b?.to_dtype(low)?.to_leaf()?)).collect::<Result<_>>()?;
        let stream = uniform(&shape, device)?.to_leaf()?;
        let scale = uniform(&[extent], device)?.to_leaf()?;
        let shares = [(); 3].map(|()| uniform(&shape, device));
        let shares: Vec<Tensor> = shares.into_iter().collect::<Result<_>>()?;
        // Copying the sum prevents the sharing, so that the next sum is saved whole.
        let forward = |whole: bool| -> Result<(Tensor, u64)> {
            device.synchronize()?;
            let before = device.memory().allocated();
            let (mut sum, mut all) = (stream.clone(), stream.sum_all()?);
            for (k, branch) in branches.iter().enumerate() {
                let residual = if whole { sum.mul(1.0)? } else { sum.clone() };
                let branch = branch.mul(0.5)?;
                let normed;
                (sum, normed) = match rms {
                    true => branch.add_rms_norm(&residual, [extent], Some(&scale), None)?,
                    false => branch.add_layer_norm(
                        &residual,
                        [extent],
                        &NormOptions { weight: Some(&scale), ..Default::default() },
                    )?,
                };
                // The last sum has no other gradient; for the second one, the gradient is also added separately.
                if k == 1 {
                    all = all.add(&sum.mul(&shares[k])?.sum_all()?)?;
                }
                all = all.add(&normed.mul(&shares[k])?.sum_all()?)?;
            }
            drop(sum);
            device.synchronize()?;
            Ok((all, device.memory().allocated() - before))
        };
        let leaves: Vec<Tensor> = branches.iter().chain([&stream, &scale]).cloned().collect();
        let values = |tensors: Vec<Tensor>| -> Result<Vec<Vec<f32>>> {
            tensors.iter().map(|t| Ok(t.to_dtype(DType::F32)?.to_vec::<f32>()?)).collect()
        };
        let ((parts, less), (whole, more)) = (forward(false)?, forward(true)?);
        // Blocks are multiples of 512 bytes.
        let saved = 6 * extent as u64 * 2 / 512 * 512;
        ensure!(
            less + saved <= more,
            "{extent}: {less} bytes in parts, {more} whole, {saved} less in each of them"
        );
        let first = |all: &Tensor| {
            let retained = GradOptions { retain_graph: Some(true), ..GradOptions::default() };
            values(autograd::grad(std::slice::from_ref(all), &leaves, &retained)?)
        };
        ensure!(
            first(&parts)? == first(&whole)?,
            "{extent}, rms {rms}: other bits than of a sum that is kept whole"
        );
        // With `create_graph`: gradients of the squared gradients.
        let second = |all: &Tensor| -> Result<Vec<Vec<f32>>> {
            let grads = autograd::grad(std::slice::from_ref(all), &leaves, &GradOptions::create_graph())?;
            let mut squares = grads[0].to_dtype(DType::F32)?.square()?.sum_all()?;
            for grad in &grads[1..] {
                squares = squares.add(&grad.to_dtype(DType::F32)?.square()?.sum_all()?)?;
            }
            values(autograd::grad(&[squares], &leaves, &GradOptions::default())?)
        };
        for (k, (got, expected)) in second(&parts)?.iter().zip(&second(&whole)?).enumerate() {
            close(&format!("{extent}, rms {rms}, second gradient {k}"), got, expected, 1e-4)?;
        }
    }
    // Saved tensors must not change.
    let branch = uniform(&[4, 64], device)?.to_dtype(DType::BF16)?;
    let stream = uniform(&[4, 64], device)?.to_leaf()?;
    let (sum, _first) = branch.add_layer_norm(&stream, [64], &Default::default())?;
    let (_, normed) = branch.add_layer_norm(&sum, [64], &Default::default())?;
    branch.add_(&branch)?;
    let error =
        normed.sum_all()?.backward().err().context("a branch that has changed is not an error")?.to_string();
    ensure!(error.contains("changed in place"), "{error}");
    Ok(())
}
