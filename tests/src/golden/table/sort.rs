//! Sorting, ranks and selection by a condition.

use anyhow::Result;
use forebay::ops::{Interpolation, ScatterReduce, SearchSortedOptions};
use forebay::tensor::Tensor;

use super::super::args::Args;
use super::{OpTable, missing_op, single};

fn pair((value, index): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    Ok(vec![value, index])
}

/// Returns `dim` and `descending`, which PyTorch takes by position or by keyword.
fn order(a: &Args<'_>) -> Result<(isize, bool)> {
    Ok((a.int(1, "dim", -1)? as isize, a.flag(2, "descending", false)))
}

fn dim(a: &Args<'_>, at: usize) -> Result<Option<isize>> {
    Ok(a.opt_int(at, "dim")?.map(|d| d as isize))
}

fn interpolation(a: &Args<'_>) -> Result<Interpolation> {
    Ok(match a.string(4, "interpolation", "linear") {
        "linear" => Interpolation::Linear,
        "lower" => Interpolation::Lower,
        "higher" => Interpolation::Higher,
        "nearest" => Interpolation::Nearest,
        "midpoint" => Interpolation::Midpoint,
        other => return Err(missing_op(other)),
    })
}

pub(super) fn register(t: &mut OpTable) {
    t.register("sort", |a| {
        let (dim, descending) = order(a)?;
        pair(a.tensor(0)?.sort(dim, descending)?)
    });
    t.register("argsort", |a| {
        let (dim, descending) = order(a)?;
        single(a.tensor(0)?.argsort(dim, descending))
    });
    t.register("topk", |a| {
        let dim = dim(a, 2)?.unwrap_or(-1);
        pair(a.tensor(0)?.topk(a.int(1, "k", 1)? as usize, dim, a.flag(3, "largest", true))?)
    });
    t.register("kthvalue", |a| {
        let dim = dim(a, 2)?.unwrap_or(-1);
        pair(a.tensor(0)?.kthvalue(a.int(1, "k", 1)? as usize, dim, a.flag(3, "keepdim", false))?)
    });
    t.register("median", |a| match dim(a, 1)? {
        Some(d) => pair(a.tensor(0)?.median(d, a.flag(2, "keepdim", false))?),
        None => single(a.tensor(0)?.median_all()),
    });
    t.register("quantile", |a| {
        let (dim, keepdim, how) = (dim(a, 2)?, a.flag(3, "keepdim", false), interpolation(a)?);
        match a.opt_tensor(1, "q") {
            Some(q) => single(a.tensor(0)?.quantile(q, dim.as_slice(), keepdim, how)),
            None => single(a.tensor(0)?.quantile(a.float(1, "q", 0.5)?, dim.as_slice(), keepdim, how)),
        }
    });
    t.register("masked_select", |a| single(a.tensor(0)?.masked_select(a.tensor(1)?)));
    t.register("nonzero", |a| match a.flag(9, "as_tuple", false) {
        true => Ok(a.tensor(0)?.nonzero_tuple()?),
        false => single(a.tensor(0)?.nonzero()),
    });
    t.register("searchsorted", |a| {
        let right = a.flag(9, "right", false) || a.string(9, "side", "left") == "right";
        single(a.tensor(0)?.searchsorted(
            &a.tensor_or_scalar(1, 0)?,
            &SearchSortedOptions {
                out_int32: a.flag(9, "out_int32", false),
                right,
                sorter: a.opt_tensor(9, "sorter"),
            },
        ))
    });
    t.register("bucketize", |a| {
        single(a.tensor_or_scalar(0, 1)?.bucketize(
            a.tensor(1)?,
            &SearchSortedOptions {
                out_int32: a.flag(9, "out_int32", false),
                right: a.flag(9, "right", false),
                ..Default::default()
            },
        ))
    });
    t.register("scatter_reduce", |a| {
        let how = match a.string(4, "reduce", "sum") {
            "sum" => ScatterReduce::Sum,
            "prod" => ScatterReduce::Prod,
            "mean" => ScatterReduce::Mean,
            "amax" => ScatterReduce::Amax,
            "amin" => ScatterReduce::Amin,
            other => return Err(missing_op(other)),
        };
        let dim = dim(a, 1)?.unwrap_or(0);
        single(a.tensor(0)?.scatter_reduce(
            dim,
            a.tensor(2)?,
            a.tensor(3)?,
            how,
            a.flag(5, "include_self", true),
        ))
    });
    t.register("index_put", |a| {
        let indices: Vec<Option<&Tensor>> = a.tensors(1)?.into_iter().map(Some).collect();
        single(a.tensor(0)?.index_put(&indices, a.tensor(2)?, a.flag(3, "accumulate", false)))
    });
}
