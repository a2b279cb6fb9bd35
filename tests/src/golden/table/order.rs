//! Sorting, ranks, and what a condition selects.

use anyhow::Result;
use forebay::ops::{Interpolation, ScatterReduce};
use forebay::tensor::Tensor;

use super::super::args::Args;
use super::{Table, missing, one};

fn pair((value, place): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    Ok(vec![value, place])
}

/// `dim` and `descending`, which PyTorch takes by position here and by keyword there.
fn order(a: &Args<'_>) -> Result<(isize, bool)> {
    Ok((a.i(1, "dim", -1)? as isize, a.b(2, "descending", false)))
}

/// The dimension, if one is given.
fn dim(a: &Args<'_>, at: usize) -> Result<Option<isize>> {
    Ok(a.opt_i(at, "dim")?.map(|d| d as isize))
}

fn interpolation(a: &Args<'_>) -> Result<Interpolation> {
    Ok(match a.s(4, "interpolation", "linear") {
        "linear" => Interpolation::Linear,
        "lower" => Interpolation::Lower,
        "higher" => Interpolation::Higher,
        "nearest" => Interpolation::Nearest,
        "midpoint" => Interpolation::Midpoint,
        other => return Err(missing(other)),
    })
}

pub(super) fn register(t: &mut Table) {
    t.op("sort", |a| {
        let (dim, descending) = order(a)?;
        pair(a.t(0)?.sort(dim, descending)?)
    });
    t.op("argsort", |a| {
        let (dim, descending) = order(a)?;
        one(a.t(0)?.argsort(dim, descending))
    });
    t.op("topk", |a| {
        let dim = dim(a, 2)?.unwrap_or(-1);
        pair(a.t(0)?.topk(a.i(1, "k", 1)? as usize, dim, a.b(3, "largest", true))?)
    });
    t.op("kthvalue", |a| {
        let dim = dim(a, 2)?.unwrap_or(-1);
        pair(a.t(0)?.kthvalue(a.i(1, "k", 1)? as usize, dim, a.b(3, "keepdim", false))?)
    });
    t.op("median", |a| match dim(a, 1)? {
        Some(d) => pair(a.t(0)?.median(d, a.b(2, "keepdim", false))?),
        None => one(a.t(0)?.median_all()),
    });
    t.op("quantile", |a| {
        let (dim, keepdim, how) = (dim(a, 2)?, a.b(3, "keepdim", false), interpolation(a)?);
        match a.opt_t(1, "q") {
            Some(q) => one(a.t(0)?.quantile(q, dim, keepdim, how)),
            None => one(a.t(0)?.quantile(a.f(1, "q", 0.5)?, dim, keepdim, how)),
        }
    });
    t.op("masked_select", |a| one(a.t(0)?.masked_select(a.t(1)?)));
    t.op("nonzero", |a| match a.b(9, "as_tuple", false) {
        true => Ok(a.t(0)?.nonzero_tuple()?),
        false => one(a.t(0)?.nonzero()),
    });
    t.op("searchsorted", |a| {
        let right = a.b(9, "right", false) || a.s(9, "side", "left") == "right";
        one(a.t(0)?.searchsorted(
            &a.tensor_or_number(1, 0)?,
            a.b(9, "out_int32", false),
            right,
            a.opt_t(9, "sorter"),
        ))
    });
    t.op("bucketize", |a| {
        one(a.tensor_or_number(0, 1)?.bucketize(a.t(1)?, a.b(9, "out_int32", false), a.b(9, "right", false)))
    });
    t.op("scatter_reduce", |a| {
        let how = match a.s(4, "reduce", "sum") {
            "sum" => ScatterReduce::Sum,
            "prod" => ScatterReduce::Prod,
            "mean" => ScatterReduce::Mean,
            "amax" => ScatterReduce::Amax,
            "amin" => ScatterReduce::Amin,
            other => return Err(missing(other)),
        };
        let dim = dim(a, 1)?.unwrap_or(0);
        one(a.t(0)?.scatter_reduce(dim, a.t(2)?, a.t(3)?, how, a.b(5, "include_self", true)))
    });
    t.op("index_put", |a| {
        let indices: Vec<Option<&Tensor>> = a.tensors(1)?.into_iter().map(Some).collect();
        one(a.t(0)?.index_put(&indices, a.t(2)?, a.b(3, "accumulate", false)))
    });
}
