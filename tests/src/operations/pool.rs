//! Pooling.

use anyhow::Context as _;

use super::prelude::*;

/// Returns the pooling window of a call: kernel, stride and padding.
fn window<const N: usize>(a: &Args<'_>, kernel_at: usize) -> anyhow::Result<PoolOptions<N>> {
    let mut w = PoolOptions::from_kernel(a.counts(kernel_at, "kernel_size")?.unwrap_or([1; N]));
    w.stride = a.counts(kernel_at + 1, "stride")?.unwrap_or(w.kernel);
    w.padding = a.counts(kernel_at + 2, "padding")?.unwrap_or(w.padding);
    Ok(w)
}

fn max_window<const N: usize>(a: &Args<'_>) -> anyhow::Result<PoolOptions<N>> {
    let w = window(a, 1)?;
    let dilation = a.counts(4, "dilation")?.unwrap_or(w.dilation);
    Ok(PoolOptions { dilation, ceil_mode: a.flag(5, "ceil_mode", false), ..w })
}

fn avg_window<const N: usize>(a: &Args<'_>) -> anyhow::Result<PoolOptions<N>> {
    Ok(PoolOptions {
        ceil_mode: a.flag(4, "ceil_mode", false),
        count_include_pad: a.flag(5, "count_include_pad", true),
        divisor_override: a.opt_int(6, "divisor_override")?,
        ..window(a, 1)?
    })
}

fn lp_window<const N: usize>(a: &Args<'_>) -> anyhow::Result<(f64, PoolOptions<N>)> {
    let mut w = PoolOptions::from_kernel(a.counts(2, "kernel_size")?.unwrap_or([1; N]));
    w.stride = a.counts(3, "stride")?.unwrap_or(w.kernel);
    w.ceil_mode = a.flag(4, "ceil_mode", false);
    Ok((a.float(1, "norm_type", 2.0)?, w))
}

/// Returns the last `N` extents of the input.
fn spatial<const N: usize>(a: &Args<'_>) -> anyhow::Result<[usize; N]> {
    let shape = a.tensor(0)?.shape();
    let extents = shape.len().checked_sub(N).map(|first| &shape[first..]);
    extents.and_then(|extents| extents.try_into().ok()).with_context(|| format!("{shape:?} is too short"))
}

/// Returns the output size of adaptive pooling; missing extents are those of the input.
fn adaptive_size<const N: usize>(a: &Args<'_>) -> anyhow::Result<[usize; N]> {
    if !a.has(1, "output_size") {
        return Err(missing_op("adaptive pooling without a size"));
    }
    a.extents(1, "output_size", spatial(a)?)
}

/// Returns the extents of an unpooled result, which may be preceded by those of the batch and the channels.
fn unpooled_size<const N: usize>(a: &Args<'_>) -> anyhow::Result<[usize; N]> {
    let window = window::<N>(a, 2)?;
    let given = a.shape(5, "output_size")?;
    match given.len().checked_sub(N) {
        Some(first) => Ok(given[first..].try_into()?),
        None => Ok(window.unpool_output_size(spatial(a)?)),
    }
}

/// Returns kernel, output size and random samples of fractional pooling.
fn fractional<'a, const N: usize>(
    a: &'a Args<'_>,
) -> anyhow::Result<([usize; N], [usize; N], Option<&'a Tensor>)> {
    let kernel = a.counts(1, "kernel_size")?.unwrap_or([1; N]);
    let size = match a.floats(3, "output_ratio")? {
        Some(ratios) => {
            let extents = spatial::<N>(a)?;
            let ratio = |d: usize| ratios.get(d).or(ratios.first()).copied().unwrap_or(1.0);
            std::array::from_fn(|d| (extents[d] as f64 * ratio(d)) as usize)
        }
        None => a.counts(2, "output_size")?.unwrap_or([1; N]),
    };
    Ok((kernel, size, a.opt_tensor(5, "_random_samples")))
}

/// Returns pooled values, and their indices if they are requested.
fn with_indices(
    a: &Args<'_>,
    at: usize,
    values: impl FnOnce() -> Result<Tensor>,
    both: impl FnOnce() -> Result<(Tensor, Tensor)>,
) -> anyhow::Result<Vec<Tensor>> {
    if a.flag(at, "return_indices", false) { pair(both()?) } else { single(values()) }
}

/// Golden call of max pooling.
macro_rules! max_pool {
    ($name:ident, $with_indices:ident) => {
        |a| {
            let (x, w) = (a.tensor(0)?, max_window(a)?);
            with_indices(a, 6, || x.$name(w), || x.$with_indices(w))
        }
    };
}

/// Golden call of fractional max pooling.
macro_rules! fractional_max_pool {
    ($name:ident) => {
        |a| {
            let (kernel, size, samples) = fractional(a)?;
            let (out, indices) = a.tensor(0)?.$name(kernel, size, samples)?;
            with_indices(a, 4, || Ok(out.clone()), || Ok((out.clone(), indices)))
        }
    };
}

/// Golden call of pooling by a norm.
macro_rules! lp_pool {
    ($name:ident) => {
        |a| {
            let (p, w) = lp_window(a)?;
            single(a.tensor(0)?.$name(p, w))
        }
    };
}

/// Golden call of a method that takes the result of a function of the arguments.
macro_rules! pool {
    ($name:ident, $window:ident) => {
        |a| single(a.tensor(0)?.$name($window(a)?))
    };
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(max_pool2d(pool)))
        .case(
            smooth("max_pool2d", &[Signed(&[2, 3, 6, 6])], |x| x[0].max_pool2d(Pool2dOptions::new(2)))
                .with_bench_inputs(&[Signed(&[32, 64, 112, 112])])
                .with_batched_inputs(1),
        )
        .golden(max_pool!(max_pool2d, max_pool2d_with_indices));
    ops.add(method!(avg_pool2d(pool)))
        .case(
            smooth("avg_pool2d", &[Signed(&[2, 3, 6, 6])], |x| x[0].avg_pool2d(Pool2dOptions::new(3)))
                .with_bench_inputs(&[Signed(&[32, 64, 112, 112])])
                .with_batched_inputs(1),
        )
        .golden(pool!(avg_pool2d, avg_window));
    ops.add(method!(adaptive_avg_pool2d(count2)))
        .case(
            smooth("adaptive_avg_pool2d", &[Signed(&[2, 3, 5, 7])], |x| x[0].adaptive_avg_pool2d([2, 3]))
                .with_bench_inputs(&[Signed(&[64, 512, 14, 14])])
                .with_batched_inputs(1),
        )
        .golden(pool!(adaptive_avg_pool2d, adaptive_size));
    ops.add(method!(lp_pool3d(float, pool)))
        .case(smooth("lp_pool3d", &[Positive(&[2, 3, 4, 3, 4])], |x| {
            x[0].lp_pool3d(3.0, Pool3dOptions::from_kernel([2, 1, 2]))
        }))
        .golden(lp_pool!(lp_pool3d));
    ops.add(method!(max_unpool2d(t1, count2)))
        .case(nonsmooth("max_unpool2d", &[Signed(&[2, 3, 6, 4])], |x| {
            let (out, indices) = x[0].max_pool2d_with_indices(Pool2dOptions::new(2))?;
            out.max_unpool2d(&indices, [6, 4])
        }))
        .golden(|a| single(a.tensor(0)?.max_unpool2d(a.tensor(1)?, unpooled_size(a)?)));
    ops.add(method!(max_unpool1d(t1, count1)))
        .case(nonsmooth("max_unpool1d", &[Signed(&[2, 3, 6])], |x| {
            let (out, indices) = x[0].max_pool1d_with_indices(Pool1dOptions::new(2))?;
            out.max_unpool1d(&indices, Pool1dOptions::new(2).unpool_output_size([3]))
        }))
        .golden(|a| single(a.tensor(0)?.max_unpool1d(a.tensor(1)?, unpooled_size(a)?)));
    ops.add(method!(max_unpool3d(t1, count3)))
        .case(nonsmooth("max_unpool3d", &[Signed(&[2, 3, 4, 2, 4])], |x| {
            let (out, indices) = x[0].max_pool3d_with_indices(Pool3dOptions::new(2))?;
            out.max_unpool3d(&indices, [4, 2, 4])
        }))
        .golden(|a| single(a.tensor(0)?.max_unpool3d(a.tensor(1)?, unpooled_size(a)?)));
    ops.add(method!(fractional_max_pool3d(count3, count3, maybe1)))
        .case(nonsmooth("fractional_max_pool3d", &[Signed(&[2, 2, 5, 4, 6])], |x| {
            let samples = Tensor::full([2, 2, 3], 0.6, DType::F32, x[0].device())?;
            Ok(x[0].fractional_max_pool3d([2; 3], [3, 2, 4], Some(&samples))?.0)
        }))
        .golden(fractional_max_pool!(fractional_max_pool3d));
    ops.add(method!(max_pool3d_with_indices(pool))).case(nonsmooth(
        "max_pool3d_with_indices",
        &[Signed(&[2, 3, 4, 5, 4])],
        |x| {
            let (out, indices) = x[0].max_pool3d_with_indices(Pool3dOptions::new(2))?;
            out.add(&indices.to_dtype(out.dtype())?)
        },
    ));
    ops.add(method!(fractional_max_pool2d(count2, count2, maybe1)))
        .case(nonsmooth("fractional_max_pool2d", &[Signed(&[2, 3, 7, 6])], |x| {
            let samples = Tensor::full([2, 3, 2], 0.6, DType::F32, x[0].device())?;
            Ok(x[0].fractional_max_pool2d([2; 2], [4, 3], Some(&samples))?.0)
        }))
        .golden(fractional_max_pool!(fractional_max_pool2d));
    ops.add(method!(adaptive_max_pool2d(count2)))
        .case(nonsmooth("adaptive_max_pool2d", &[Signed(&[2, 3, 5, 7])], |x| {
            x[0].adaptive_max_pool2d([2, 3])
        }))
        .golden(|a| {
            let (x, size) = (a.tensor(0)?, adaptive_size(a)?);
            with_indices(a, 2, || x.adaptive_max_pool2d(size), || x.adaptive_max_pool2d_with_indices(size))
        });
    ops.add(method!(adaptive_max_pool1d(count)))
        .case(nonsmooth("adaptive_max_pool1d", &[Signed(&[3, 7])], |x| x[0].adaptive_max_pool1d(4)))
        .golden(|a| {
            let (x, [size]) = (a.tensor(0)?, adaptive_size(a)?);
            with_indices(a, 2, || x.adaptive_max_pool1d(size), || x.adaptive_max_pool1d_with_indices(size))
        });
    ops.add(method!(max_pool3d(pool)))
        .case(nonsmooth("max_pool3d", &[Signed(&[2, 3, 4, 4])], |x| {
            x[0].max_pool3d(PoolOptions { stride: [1; 3], ..Pool3dOptions::new(2) })
        }))
        .golden(max_pool!(max_pool3d, max_pool3d_with_indices));
    ops.add(method!(avg_pool3d(pool)))
        .case(smooth("avg_pool3d", &[Signed(&[2, 3, 4, 4])], |x| {
            x[0].avg_pool3d(PoolOptions { padding: [1; 3], ..Pool3dOptions::new(2) })
        }))
        .case(smooth("avg_pool3d of a volume", &[Signed(&[2, 4, 4, 4])], |x| {
            x[0].avg_pool3d(Pool3dOptions::new(2))
        }))
        .golden(pool!(avg_pool3d, avg_window));
    ops.add(method!(max_pool1d(pool)))
        .case(smooth("max_pool1d", &[Signed(&[2, 3, 7])], |x| {
            x[0].max_pool1d(PoolOptions { stride: [2], padding: [1], ..Pool1dOptions::new(3) })
        }))
        .golden(max_pool!(max_pool1d, max_pool1d_with_indices));
    ops.add(method!(adaptive_max_pool3d_with_indices(count3))).case(nondifferentiable(
        "adaptive_max_pool3d_with_indices",
        &[Signed(&[2, 3, 4, 5])],
        |x| Ok(x[0].adaptive_max_pool3d_with_indices([2, 3, 2])?.1),
    ));
    ops.add(method!(max_pool1d_with_indices(pool))).case(nondifferentiable(
        "max_pool1d_with_indices",
        &[Signed(&[2, 3, 7])],
        |x| Ok(x[0].max_pool1d_with_indices(Pool1dOptions::new(2))?.1),
    ));
    ops.add(method!(max_pool2d_with_indices(pool))).case(smooth(
        "max_pool2d_with_indices",
        &[Signed(&[2, 3, 6, 6])],
        |x| Ok(x[0].max_pool2d_with_indices(Pool2dOptions::new(2))?.0),
    ));
    ops.add(method!(adaptive_max_pool2d_with_indices(count2))).case(smooth(
        "adaptive_max_pool2d_with_indices",
        &[Signed(&[2, 3, 5, 7])],
        |x| Ok(x[0].adaptive_max_pool2d_with_indices([2, 3])?.0),
    ));
    ops.add(method!(adaptive_max_pool1d_with_indices(count))).case(nondifferentiable(
        "adaptive_max_pool1d_with_indices",
        &[Signed(&[3, 7])],
        |x| Ok(x[0].adaptive_max_pool1d_with_indices(4)?.1),
    ));
    ops.add(method!(avg_pool1d(pool)))
        .case(smooth("avg_pool1d", &[Signed(&[2, 3, 7])], |x| {
            x[0].avg_pool1d(PoolOptions { stride: [2], padding: [1], ..Pool1dOptions::new(3) })
        }))
        .golden(pool!(avg_pool1d, avg_window));
    ops.add(method!(adaptive_avg_pool1d(count)))
        .case(smooth("adaptive_avg_pool1d", &[Signed(&[2, 3, 7])], |x| x[0].adaptive_avg_pool1d(4)))
        .golden(|a| {
            let [size] = adaptive_size(a)?;
            single(a.tensor(0)?.adaptive_avg_pool1d(size))
        });
    ops.add(method!(adaptive_avg_pool3d(count3)))
        .case(
            smooth("adaptive_avg_pool3d", &[Signed(&[2, 3, 4, 5])], |x| x[0].adaptive_avg_pool3d([2, 3, 2]))
                .with_tolerances(case::ONE_ROUNDING),
        )
        .golden(pool!(adaptive_avg_pool3d, adaptive_size));
    ops.add(method!(adaptive_max_pool3d(count3)))
        .case(smooth("adaptive_max_pool3d", &[Signed(&[2, 3, 4, 5])], |x| {
            x[0].adaptive_max_pool3d([2, 3, 2])
        }))
        .golden(|a| {
            let (x, size) = (a.tensor(0)?, adaptive_size(a)?);
            with_indices(a, 2, || x.adaptive_max_pool3d(size), || x.adaptive_max_pool3d_with_indices(size))
        });
    ops.add(method!(lp_pool1d(float, pool)))
        .case(smooth("lp_pool1d", &[Positive(&[2, 3, 7])], |x| x[0].lp_pool1d(2.0, Pool1dOptions::new(2))))
        .golden(lp_pool!(lp_pool1d));
    ops.add(method!(lp_pool2d(float, pool)))
        .case(smooth("lp_pool2d", &[Positive(&[2, 3, 4, 6])], |x| x[0].lp_pool2d(3.0, Pool2dOptions::new(2))))
        .golden(lp_pool!(lp_pool2d));
}
