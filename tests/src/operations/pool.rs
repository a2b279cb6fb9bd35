//! Pooling.

use anyhow::bail;

use super::prelude::*;

/// Returns the pooling window of a call; `ends` is the number of spatial dimensions.
fn window(a: &Args<'_>, ends: usize) -> anyhow::Result<Pool2dOptions> {
    let pair = |at: usize, name: &str, rest: usize| -> anyhow::Result<Option<[usize; 2]>> {
        let v = a.shape(at, name).or_else(|_| a.int(at, name, 0).map(|n| vec![n as usize]))?;
        let v =
            if a.get(at, name).is_some_and(|x| x.is_i64()) { vec![a.int(at, name, 0)? as usize] } else { v };
        Ok(match (v.as_slice(), ends) {
            ([], _) => None,
            ([n], 1) => Some([rest, *n]),
            ([n], _) => Some([*n, *n]),
            (&[h, w], _) => Some([h, w]),
            (v, _) => bail!("{name} of {} numbers", v.len()),
        })
    };
    let kernel = pair(1, "kernel_size", 1)?.unwrap_or([1, 1]);
    let mut w = Pool2dOptions::from_kernel(kernel);
    if let Some(stride) = pair(2, "stride", 1)? {
        w.stride = stride;
    }
    if let Some(padding) = pair(3, "padding", 0)? {
        w.padding = padding;
    }
    Ok(w)
}

fn max(a: &Args<'_>, ends: usize) -> anyhow::Result<Vec<Tensor>> {
    let mut w = window(a, ends)?;
    if let Some(d) = a.ints(4, "dilation")? {
        let d: Vec<usize> = d.into_iter().map(|n| n as usize).collect();
        w.dilation = match (d.as_slice(), ends) {
            ([n], 1) => [1, *n],
            ([n], _) => [*n, *n],
            (&[h, w], _) => [h, w],
            (d, _) => bail!("dilation of {} numbers", d.len()),
        };
    }
    w.ceil_mode = a.flag(5, "ceil_mode", false);
    let x = if ends == 1 { a.tensor(0)?.unsqueeze(-2)? } else { a.tensor(0)?.clone() };
    let flat = |t: Tensor| if ends == 1 { t.squeeze(-2) } else { Ok(t) };
    if a.flag(6, "return_indices", false) {
        let (out, indices) = x.max_pool2d_with_indices(w)?;
        return Ok(vec![flat(out)?, flat(indices)?]);
    }
    single(flat(x.max_pool2d(w)?))
}

fn avg(a: &Args<'_>, ends: usize) -> anyhow::Result<Vec<Tensor>> {
    let mut w = window(a, ends)?;
    w.ceil_mode = a.flag(4, "ceil_mode", false);
    w.count_include_pad = a.flag(5, "count_include_pad", true);
    w.divisor_override = a.opt_int(6, "divisor_override")?;
    if ends == 1 {
        return single(a.tensor(0)?.unsqueeze(-2)?.avg_pool2d(w)?.squeeze(-2));
    }
    single(a.tensor(0)?.avg_pool2d(w))
}

/// Returns the output size of adaptive pooling; missing extents are those of the input.
fn adaptive_size(a: &Args<'_>) -> anyhow::Result<[usize; 2]> {
    let (h, w) = (a.tensor(0)?.dim(-2)?, a.tensor(0)?.dim(-1)?);
    let Some(value) = a.get(1, "output_size") else {
        return Err(missing_op("adaptive pooling without a size"));
    };
    let items = match value.get("l").and_then(|l| l.as_array()) {
        Some(items) => items.clone(),
        None => vec![value.clone(), value.clone()],
    };
    let size = |v: &serde_json::Value, own: usize| v.as_i64().map_or(Ok(own), usize::try_from);
    let [rows, cols] = items.as_slice() else { bail!("a size of {} numbers", items.len()) };
    Ok([size(rows, h)?, size(cols, w)?])
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(max_pool2d(pool)))
        .case(
            smooth("max_pool2d", &[Signed(&[2, 3, 6, 6])], |x| x[0].max_pool2d(Pool2dOptions::new(2)))
                .with_bench_inputs(&[Signed(&[32, 64, 112, 112])])
                .with_batched_inputs(1),
        )
        .golden(|a| max(a, 2));
    ops.add(method!(avg_pool2d(pool)))
        .case(
            smooth("avg_pool2d", &[Signed(&[2, 3, 6, 6])], |x| x[0].avg_pool2d(Pool2dOptions::new(3)))
                .with_bench_inputs(&[Signed(&[32, 64, 112, 112])])
                .with_batched_inputs(1),
        )
        .golden(|a| avg(a, 2));
    ops.add(method!(adaptive_avg_pool2d(count2)))
        .case(
            smooth("adaptive_avg_pool2d", &[Signed(&[2, 3, 5, 7])], |x| x[0].adaptive_avg_pool2d([2, 3]))
                .with_bench_inputs(&[Signed(&[64, 512, 14, 14])])
                .with_batched_inputs(1),
        )
        .golden(|a| single(a.tensor(0)?.adaptive_avg_pool2d(adaptive_size(a)?)));
    ops.add(method!(lp_pool3d(float, pool))).case(smooth("lp_pool3d", &[Positive(&[2, 3, 4, 3, 4])], |x| {
        x[0].lp_pool3d(3.0, Pool3dOptions::from_kernel([2, 1, 2]))
    }));
    ops.add(method!(max_unpool2d(t1, count2))).case(nonsmooth(
        "max_unpool2d",
        &[Signed(&[2, 3, 6, 4])],
        |x| {
            let (out, indices) = x[0].max_pool2d_with_indices(Pool2dOptions::new(2))?;
            out.max_unpool2d(&indices, [6, 4])
        },
    ));
    ops.add(method!(max_unpool1d(t1, count1))).case(nonsmooth("max_unpool1d", &[Signed(&[2, 3, 6])], |x| {
        let (out, indices) = x[0].max_pool1d_with_indices(Pool1dOptions::new(2))?;
        out.max_unpool1d(&indices, Pool1dOptions::new(2).unpool_output_size([3]))
    }));
    ops.add(method!(max_unpool3d(t1, count3))).case(nonsmooth(
        "max_unpool3d",
        &[Signed(&[2, 3, 4, 2, 4])],
        |x| {
            let (out, indices) = x[0].max_pool3d_with_indices(Pool3dOptions::new(2))?;
            out.max_unpool3d(&indices, [4, 2, 4])
        },
    ));
    ops.add(method!(fractional_max_pool3d(count3, count3, maybe1))).case(nonsmooth(
        "fractional_max_pool3d",
        &[Signed(&[2, 2, 5, 4, 6])],
        |x| {
            let samples = Tensor::full([2, 2, 3], 0.6, DType::F32, x[0].device())?;
            Ok(x[0].fractional_max_pool3d([2; 3], [3, 2, 4], Some(&samples))?.0)
        },
    ));
    ops.add(method!(max_pool3d_with_indices(pool))).case(nonsmooth(
        "max_pool3d_with_indices",
        &[Signed(&[2, 3, 4, 5, 4])],
        |x| {
            let (out, indices) = x[0].max_pool3d_with_indices(Pool3dOptions::new(2))?;
            out.add(&indices.to_dtype(out.dtype())?)
        },
    ));
    ops.add(method!(fractional_max_pool2d(count2, count2, maybe1))).case(nonsmooth(
        "fractional_max_pool2d",
        &[Signed(&[2, 3, 7, 6])],
        |x| {
            let samples = Tensor::full([2, 3, 2], 0.6, DType::F32, x[0].device())?;
            Ok(x[0].fractional_max_pool2d([2; 2], [4, 3], Some(&samples))?.0)
        },
    ));
    ops.add(method!(adaptive_max_pool2d(count2)))
        .case(nonsmooth("adaptive_max_pool2d", &[Signed(&[2, 3, 5, 7])], |x| {
            x[0].adaptive_max_pool2d([2, 3])
        }))
        .golden(|a| {
            let (x, size) = (a.tensor(0)?, adaptive_size(a)?);
            if a.flag(2, "return_indices", false) {
                let (out, indices) = x.adaptive_max_pool2d_with_indices(size)?;
                return Ok(vec![out, indices]);
            }
            single(x.adaptive_max_pool2d(size))
        });
    ops.add(method!(adaptive_max_pool1d(count)))
        .case(nonsmooth("adaptive_max_pool1d", &[Signed(&[3, 7])], |x| x[0].adaptive_max_pool1d(4)))
        .golden(|a| {
            let n = a.shape(1, "output_size").ok().and_then(|n| n.first().copied());
            let n = n.map_or_else(|| Ok::<_, anyhow::Error>(a.int(1, "output_size", 1)? as usize), Ok)?;
            if a.flag(2, "return_indices", false) {
                let (out, indices) = a.tensor(0)?.adaptive_max_pool1d_with_indices(n)?;
                return Ok(vec![out, indices]);
            }
            single(a.tensor(0)?.adaptive_max_pool1d(n))
        });
    ops.add(method!(max_pool3d(pool))).case(nonsmooth("max_pool3d", &[Signed(&[2, 3, 4, 4])], |x| {
        x[0].max_pool3d(PoolOptions { stride: [1; 3], ..Pool3dOptions::new(2) })
    }));
    ops.add(method!(avg_pool3d(pool)))
        .case(smooth("avg_pool3d", &[Signed(&[2, 3, 4, 4])], |x| {
            x[0].avg_pool3d(PoolOptions { padding: [1; 3], ..Pool3dOptions::new(2) })
        }))
        .case(smooth("avg_pool3d of a volume", &[Signed(&[2, 4, 4, 4])], |x| {
            x[0].avg_pool3d(Pool3dOptions::new(2))
        }));
    ops.add(method!(max_pool1d(pool)))
        .case(smooth("max_pool1d", &[Signed(&[2, 3, 7])], |x| {
            x[0].max_pool1d(PoolOptions { stride: [2], padding: [1], ..Pool1dOptions::new(3) })
        }))
        .golden(|a| max(a, 1));
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
        .golden(|a| avg(a, 1));
    ops.add(method!(adaptive_avg_pool1d(count)))
        .case(smooth("adaptive_avg_pool1d", &[Signed(&[2, 3, 7])], |x| x[0].adaptive_avg_pool1d(4)))
        .golden(|a| {
            let Some(n) = a.ints(1, "output_size")? else {
                return Err(missing_op("adaptive_avg_pool1d without a size"));
            };
            let &[n] = n.as_slice() else { bail!("a size of {} numbers", n.len()) };
            single(a.tensor(0)?.unsqueeze(-2)?.adaptive_avg_pool2d([1, usize::try_from(n)?])?.squeeze(-2))
        });
    ops.add(method!(adaptive_avg_pool3d(count3))).case(
        smooth("adaptive_avg_pool3d", &[Signed(&[2, 3, 4, 5])], |x| x[0].adaptive_avg_pool3d([2, 3, 2]))
            .with_tolerances(case::ONE_ROUNDING),
    );
    ops.add(method!(adaptive_max_pool3d(count3))).case(smooth(
        "adaptive_max_pool3d",
        &[Signed(&[2, 3, 4, 5])],
        |x| x[0].adaptive_max_pool3d([2, 3, 2]),
    ));
    ops.add(method!(lp_pool1d(float, pool)))
        .case(smooth("lp_pool1d", &[Positive(&[2, 3, 7])], |x| x[0].lp_pool1d(2.0, Pool1dOptions::new(2))));
    ops.add(method!(lp_pool2d(float, pool))).case(smooth("lp_pool2d", &[Positive(&[2, 3, 4, 6])], |x| {
        x[0].lp_pool2d(3.0, Pool2dOptions::new(2))
    }));
}
