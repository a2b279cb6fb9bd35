//! Sorting, ranks, sets and comparisons of whole tensors.

use super::prelude::*;

/// Makes a tensor from a bool that the host has read.
fn bool_tensor(x: &[Tensor], found: bool) -> Result<Tensor> {
    Tensor::from_bools(&[found], (), x[0].device())
}

/// Returns `dim` and `descending`, which PyTorch takes by position or by keyword. Every sort is stable here.
fn sort_order(a: &Args<'_>) -> anyhow::Result<(isize, bool)> {
    a.flag(NAMED, "stable", false);
    Ok((a.dim(1, "dim", -1)?, a.flag(2, "descending", false)))
}

fn closeness(a: &Args<'_>) -> anyhow::Result<IsCloseOptions> {
    Ok(IsCloseOptions {
        rtol: a.float(2, "rtol", 1e-5)?,
        atol: a.float(3, "atol", 1e-8)?,
        equal_nan: a.flag(4, "equal_nan", false),
    })
}

/// Returns the edges of a histogram: as they are, or of equal bins between two bounds, as PyTorch computes them.
fn histogram_edges(a: &Args<'_>) -> anyhow::Result<Tensor> {
    let x = a.tensor(0)?;
    if let Some(edges) = a.opt_tensor(1, "bins") {
        return Ok(edges.clone());
    }
    let bins = a.count(1, "bins", 100)?;
    let (low, high) = match a.floats(NAMED, "range")?.as_deref() {
        Some(&[low, high]) => (low, high),
        Some(range) => anyhow::bail!("a range of {} numbers", range.len()),
        None if x.numel() == 0 => (0.0, 1.0),
        None => (x.min_all()?.item()?, x.max_all()?.item()?),
    };
    // Equal bounds are moved apart.
    let (low, high) = if low == high { (low - 0.5, high + 0.5) } else { (low, high) };
    Ok(Tensor::linspace(low, high, bins + 1, x.dtype(), x.device())?)
}

fn interpolation(a: &Args<'_>) -> anyhow::Result<Interpolation> {
    Ok(match a.string(4, "interpolation", "linear") {
        "linear" => Interpolation::Linear,
        "lower" => Interpolation::Lower,
        "higher" => Interpolation::Higher,
        "nearest" => Interpolation::Nearest,
        "midpoint" => Interpolation::Midpoint,
        other => return Err(missing_op(other)),
    })
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(sort(int, flag)))
        .case(
            smooth("sort", &[Signed(&[3, 9])], |x| Ok(x[0].sort(1, false)?.0))
                .with_bench_inputs(&[Signed(&[4096, 4096])])
                .with_batched_inputs(1),
        )
        .case(
            smooth("sort of columns", &[Signed(&[7, 3])], |x| Ok(x[0].sort(0, true)?.0))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .case(nonsmooth("sort of a long line", &[Signed(&[2100])], |x| Ok(x[0].sort(-1, false)?.0)))
        .golden_as("msort", |a| Ok(vec![a.tensor(0)?.sort(0, false)?.0]))
        .golden(|a| {
            let (dim, descending) = sort_order(a)?;
            pair(a.tensor(0)?.sort(dim, descending)?)
        });
    ops.add(method!(argsort(int, flag)))
        .case(
            nondifferentiable("argsort", &[Signed(&[5, 6])], |x| x[0].argsort(1, true))
                .with_bench_inputs(&[Signed(&[4096, 4096])])
                .with_batched_inputs(1),
        )
        .golden(|a| {
            let (dim, descending) = sort_order(a)?;
            single(a.tensor(0)?.argsort(dim, descending))
        });
    ops.add(method!(topk(count, int, flag)))
        .case(
            smooth("topk", &[Signed(&[3, 9])], |x| Ok(x[0].topk(4, 1, true)?.0))
                .with_bench_inputs(&[Signed(&[4096, 4096])])
                .with_batched_inputs(1),
        )
        .golden(|a| {
            let dim = a.opt_dim(2)?.unwrap_or(-1);
            // The values are always sorted here.
            a.flag(4, "sorted", true);
            pair(a.tensor(0)?.topk(a.int(1, "k", 1)? as usize, dim, a.flag(3, "largest", true))?)
        });
    ops.add(method!(kthvalue(count, int, flag)))
        .case(
            smooth("kthvalue", &[Signed(&[3, 9])], |x| Ok(x[0].kthvalue(3, 1, true)?.0))
                .with_bench_inputs(&[Signed(&[4096, 4096])])
                .with_batched_inputs(1),
        )
        .golden(|a| {
            let dim = a.opt_dim(2)?.unwrap_or(-1);
            pair(a.tensor(0)?.kthvalue(a.int(1, "k", 1)? as usize, dim, a.flag(3, "keepdim", false))?)
        });
    ops.add(method!(median(int, flag)))
        .case(
            smooth("median", &[Signed(&[4, 6])], |x| Ok(x[0].median(0, false)?.0))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(|a| match a.opt_dim(1)? {
            Some(d) => pair(a.tensor(0)?.median(d, a.flag(2, "keepdim", false))?),
            None => single(a.tensor(0)?.median_all()),
        });
    ops.add(method!(nanmedian(int, flag)))
        .case(
            smooth("nanmedian", &[Signed(&[4, 6])], |x| Ok(x[0].nanmedian(1, false)?.0))
                .with_batched_inputs(1),
        )
        .golden(|a| match a.opt_dim(1)? {
            Some(d) => pair(a.tensor(0)?.nanmedian(d, a.flag(2, "keepdim", false))?),
            None => single(a.tensor(0)?.nanmedian_all()),
        });
    ops.add(method!(median_all())).case(smooth("median_all", &[Signed(S)], |x| x[0].median_all()));
    ops.add(method!(quantile(operand1, ints, flag, interpolation)))
        .case(smooth("quantile", &[Signed(&[4, 6])], |x| x[0].quantile(0.3, 1, false, Interpolation::Linear)))
        .golden(|a| {
            let (dim, keepdim, how) = (a.opt_dim(2)?, a.flag(3, "keepdim", false), interpolation(a)?);
            let q = a.operand(1, "q", Scalar::Float(0.5))?;
            single(a.tensor(0)?.quantile(q, dim.as_slice(), keepdim, how))
        });
    ops.add(method!(nanquantile(operand1, ints, flag, interpolation)))
        .case(smooth("nanquantile", &[Signed(&[4, 6])], |x| {
            let q = Tensor::from_slice(&[0.1f32, 0.5, 0.9], [3], x[0].device())?;
            x[0].nanquantile(&q, (), true, Interpolation::Midpoint)
        }))
        .golden(|a| {
            let (dim, keepdim, how) = (a.opt_dim(2)?, a.flag(3, "keepdim", false), interpolation(a)?);
            let q = a.operand(1, "q", Scalar::Float(0.5))?;
            single(a.tensor(0)?.nanquantile(q, dim.as_slice(), keepdim, how))
        });
    ops.add(method!(nonzero())).case(nondifferentiable("nonzero", &[Signed(S)], |x| x[0].nonzero())).golden(
        |a| match a.flag(NAMED, "as_tuple", false) {
            true => Ok(a.tensor(0)?.nonzero_tuple()?),
            false => single(a.tensor(0)?.nonzero()),
        },
    );
    ops.add(method!(nanmedian_all())).case(smooth("nanmedian_all", &[Signed(S)], |x| x[0].nanmedian_all()));
    ops.add(method!(isclose(operand1, IsCloseOptions { rtol: float, atol: float, equal_nan: flag })))
        .case(nondifferentiable("isclose", &[Signed(S), Bounded(&[5])], |x| {
            x[0].isclose(&x[1], &IsCloseOptions { rtol: 0.5, atol: 0.1, equal_nan: true })
        }))
        .golden(|a| single(a.tensor(0)?.isclose(a.tensor(1)?, &closeness(a)?)));
    ops.add(method!(allclose(t1, IsCloseOptions { rtol: float, atol: float, equal_nan: flag })))
        .case(nondifferentiable("allclose", &[Signed(S), Bounded(&[5])], |x| {
            bool_tensor(
                x,
                x[0].allclose(&x[1], &IsCloseOptions { rtol: 9.0, atol: 9.0, ..Default::default() })?,
            )
        }))
        .golden(|a| {
            let is_close = a.tensor(0)?.allclose(a.tensor(1)?, &closeness(a)?)?;
            single(Tensor::from_bools(&[is_close], (), a.device()))
        });
    ops.add(method!(equal(t1)))
        .case(nondifferentiable("equal", &[Signed(S), Bounded(S)], |x| bool_tensor(x, x[0].equal(&x[1])?)))
        .golden(|a| {
            let is_equal = a.tensor(0)?.equal(a.tensor(1)?)?;
            single(Tensor::from_bools(&[is_equal], (), a.device()))
        });
    ops.add(method!(isin(t1, flag)))
        .case(nondifferentiable("isin", &[Index(S, 7), Index(&[3], 7)], |x| x[0].isin(&x[1], false)))
        .golden(|a| {
            let elements = a.tensor_or_scalar(1, 0)?;
            single(a.tensor_or_scalar(0, 1)?.isin(&elements, a.flag(3, "invert", false)))
        });
    ops.add(method!(unique()))
        .case(smooth("unique", &[Signed(S)], |x| {
            let found = cat(&[&x[0], &x[0]], 0)?.unique()?;
            found.values.mul(&found.counts.to_dtype(x[0].dtype())?)
        }))
        .golden(|a| {
            // The values are always sorted here.
            a.flag(NAMED, "sorted", true);
            let found = match a.opt_int(NAMED, "dim")? {
                Some(dim) => a.tensor(0)?.unique_dim(dim as isize)?,
                None => a.tensor(0)?.unique()?,
            };
            let mut out = vec![found.values.detach()];
            out.extend(a.flag(NAMED, "return_inverse", false).then_some(found.inverse_indices));
            out.extend(a.flag(NAMED, "return_counts", false).then_some(found.counts));
            Ok(out)
        });
    ops.add(method!(unique_consecutive()))
        .case(smooth("unique_consecutive", &[Signed(S)], |x| {
            Ok(x[0].unsqueeze(-1)?.repeat([1, 1, 2])?.unique_consecutive()?.values)
        }))
        .golden(|a| {
            let found = match a.opt_int(NAMED, "dim")? {
                Some(dim) => a.tensor(0)?.unique_consecutive_dim(dim as isize)?,
                None => a.tensor(0)?.unique_consecutive()?,
            };
            let mut out = vec![found.values.detach()];
            out.extend(a.flag(NAMED, "return_inverse", false).then_some(found.inverse_indices));
            out.extend(a.flag(NAMED, "return_counts", false).then_some(found.counts));
            Ok(out)
        });
    ops.add(method!(unique_dim(int)))
        .case(smooth("unique_dim", &[Signed(S)], |x| Ok(cat(&[&x[0], &x[0]], 1)?.unique_dim(1)?.values)));
    ops.add(method!(unique_consecutive_dim(int))).case(smooth("unique_consecutive_dim", &[Signed(S)], |x| {
        Ok(x[0].repeat_interleave(2, 0)?.unique_consecutive_dim(0)?.values)
    }));
    ops.add(method!(mode(int, flag)))
        .case(smooth("mode", &[Signed(S)], |x| {
            let (values, _) = cat(&[&x[0], &x[0].narrow(1, 1, 2)?], 1)?.mode(1, true)?;
            Ok(values)
        }))
        .golden(|a| {
            let (values, indices) = a.tensor(0)?.mode(a.dim(1, "dim", -1)?, a.flag(2, "keepdim", false))?;
            Ok(vec![values, indices])
        });
    ops.add(method!(bincount(maybe1, count)))
        .case(nondifferentiable("bincount", &[Index(&[9], 5)], |x| x[0].bincount(None, 7)))
        .case(smooth("bincount of weights", &[Index(&[9], 5), Positive(&[9])], |x| {
            x[0].bincount(Some(&x[1]), 0)
        }))
        .golden(|a| {
            single(a.tensor(0)?.bincount(a.opt_tensor(1, "weights"), a.int(2, "minlength", 0)? as usize))
        });
    ops.add(method!(histogram(t1, maybe2, flag)))
        .case(nondifferentiable("histogram", &[Bounded(S)], |x| {
            let edges = Tensor::new([-0.5, -0.1, 0.2, 0.6], x[0].device())?.to_dtype(x[0].dtype())?;
            x[0].histogram(&edges, None, true)
        }))
        .case(nondifferentiable("histogram of weights", &[Bounded(S), Positive(S)], |x| {
            let edges = Tensor::new([-0.5, -0.1, 0.2, 0.6], x[0].device())?.to_dtype(x[0].dtype())?;
            x[0].histogram(&edges, Some(&x[1]), false)
        }))
        .golden(|a| {
            let edges = histogram_edges(a)?;
            let (weight, density) = (a.opt_tensor(NAMED, "weight"), a.flag(NAMED, "density", false));
            Ok(vec![a.tensor(0)?.histogram(&edges, weight, density)?, edges])
        });
    ops.add(method!(histc(count, float, float)))
        .case(nondifferentiable("histc", &[Signed(S)], |x| x[0].histc(4, -1.0, 1.0)))
        .golden(|a| {
            single(a.tensor(0)?.histc(
                a.int(1, "bins", 100)? as usize,
                a.float(2, "min", 0.0)?,
                a.float(3, "max", 0.0)?,
            ))
        });
}
