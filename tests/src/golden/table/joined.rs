//! Tensors put together, parts replaced, sets of numbers.

use anyhow::Result;
use forebay::ops::{
    Scalar, block_diag, broadcast_tensors, cartesian_prod, column_stack, dstack, hstack, meshgrid, vstack,
};
use forebay::tensor::Tensor;

use super::{Table, missing, one};
use crate::golden::args::Args;

fn dim(a: &Args<'_>, at: usize, name: &str, default: i64) -> Result<isize> {
    Ok(a.i(at, name, default)? as isize)
}

/// What makes one tensor of one, of a tensor or of each of a list.
fn each(a: &Args<'_>, made: fn(&Tensor) -> forebay::error::Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(a.tensors(0)?.into_iter().map(made).collect::<forebay::error::Result<_>>()?)
}

/// The distance of values, or their points.
fn spacing<'a>(a: &'a Args<'_>) -> Result<forebay::ops::Operand<'a>> {
    match a.opt_t(1, "x") {
        Some(x) => Ok(x.into()),
        None => a.operand(usize::MAX, "dx", Scalar::Float(1.0)),
    }
}

/// Even parts, or parts at places.
fn split(
    a: &Args<'_>,
    evenly: fn(&Tensor, usize) -> forebay::error::Result<Vec<Tensor>>,
    dim: isize,
) -> Result<Vec<Tensor>> {
    match a.get(1, "indices").and_then(|v| v.get("l")) {
        Some(_) => Ok(a.t(0)?.tensor_split_at(&a.dims(1, "indices")?, dim)?),
        None => Ok(evenly(a.t(0)?, usize::try_from(a.i(1, "sections", 0)?)?)?),
    }
}

pub(super) fn register(t: &mut Table) {
    t.op("hstack", |a| one(hstack(&a.tensors(0)?)));
    t.op("vstack", |a| one(vstack(&a.tensors(0)?)));
    t.op("dstack", |a| one(dstack(&a.tensors(0)?)));
    t.op("column_stack", |a| one(column_stack(&a.tensors(0)?)));
    t.op("block_diag", |a| one(block_diag(&a.tensors(0)?)));
    t.op("cartesian_prod", |a| one(cartesian_prod(&a.tensors(0)?)));
    t.op("meshgrid", |a| Ok(meshgrid(&a.tensors(0)?, a.s(9, "indexing", "ij") == "xy")?));
    t.op("broadcast_tensors", |a| Ok(broadcast_tensors(&a.tensors(0)?)?));
    t.op("atleast_1d", |a| each(a, Tensor::atleast_1d));
    t.op("atleast_2d", |a| each(a, Tensor::atleast_2d));
    t.op("atleast_3d", |a| each(a, Tensor::atleast_3d));
    t.op("tile", |a| one(a.t(0)?.tile(&a.shape(1, "dims")?)));
    t.op("diag", |a| one(a.t(0)?.diag(dim(a, 1, "diagonal", 0)?)));
    t.op("diagflat", |a| one(a.t(0)?.reshape([-1])?.diag(dim(a, 1, "offset", 0)?)));
    t.op("diag_embed", |a| {
        one(a.t(0)?.diag_embed(dim(a, 1, "offset", 0)?, dim(a, 2, "dim1", -2)?, dim(a, 3, "dim2", -1)?))
    });
    t.op("rot90", |a| {
        let dims = a.dims(2, "dims")?;
        let &[first, second] = (if dims.is_empty() { &[0, 1][..] } else { &dims }) else {
            anyhow::bail!("{} dimensions", dims.len())
        };
        one(a.t(0)?.rot90(dim(a, 1, "k", 1)?, [first, second]))
    });
    t.op("fliplr", |a| one(a.t(0)?.flip(&[1])));
    t.op("flipud", |a| one(a.t(0)?.flip(&[0])));
    t.op("msort", |a| Ok(vec![a.t(0)?.sort(0, false)?.0]));
    t.op("combinations", |a| {
        one(a.t(0)?.combinations(a.i(1, "r", 2)? as usize, a.b(2, "with_replacement", false)))
    });
    t.op("kron", |a| one(a.t(0)?.kron(a.t(1)?)));
    t.op("tensordot", |a| {
        let (x, y) = (a.t(0)?, a.t(1)?);
        match a.get(2, "dims") {
            Some(v) if v.get("l").is_some() => Err(missing("tensordot of two lists")),
            _ => {
                let n = a.i(2, "dims", 2)? as isize;
                one(x.tensordot(y, &(-n..0).collect::<Vec<_>>(), &(0..n).collect::<Vec<_>>()))
            }
        }
    });
    t.op("tril_indices", |a| {
        let (rows, columns) = (a.i(0, "row", 0)? as usize, a.i(1, "col", 0)? as usize);
        one(Tensor::tril_indices(rows, columns, dim(a, 2, "offset", 0)?, a.device()))
    });
    t.op("triu_indices", |a| {
        let (rows, columns) = (a.i(0, "row", 0)? as usize, a.i(1, "col", 0)? as usize);
        one(Tensor::triu_indices(rows, columns, dim(a, 2, "offset", 0)?, a.device()))
    });
    t.op("slice_scatter", |a| {
        let (x, d) = (a.t(0)?, dim(a, 2, "dim", 0)?);
        let n = x.dim(d)? as i64;
        let place = |v: i64| (if v < 0 { v + n } else { v }).clamp(0, n) as usize;
        let start = place(a.opt_i(3, "start")?.unwrap_or(0));
        let stop = place(a.opt_i(4, "end")?.unwrap_or(n)).max(start);
        one(x.slice_scatter(a.t(1)?, d, start, stop, a.i(5, "step", 1)? as usize))
    });
    t.op("select_scatter", |a| {
        one(a.t(0)?.select_scatter(a.t(1)?, dim(a, 2, "dim", 0)?, dim(a, 3, "index", 0)?))
    });
    t.op("diagonal_scatter", |a| {
        let (dim1, dim2) = (dim(a, 3, "dim1", 0)?, dim(a, 4, "dim2", 1)?);
        one(a.t(0)?.diagonal_scatter(a.t(1)?, dim(a, 2, "offset", 0)?, dim1, dim2))
    });
    t.op("take", |a| one(a.t(0)?.take(a.t(1)?)));
    t.op("put", |a| one(a.t(0)?.put(a.t(1)?, a.t(2)?, a.b(3, "accumulate", false))));
    t.op("index_copy", |a| one(a.t(0)?.index_copy(dim(a, 1, "dim", 0)?, a.t(2)?, a.t(3)?)));
    t.op("masked_scatter", |a| one(a.t(0)?.masked_scatter(a.t(1)?, a.t(2)?)));
    t.op("isclose", |a| {
        let (rtol, atol) = (a.f(2, "rtol", 1e-5)?, a.f(3, "atol", 1e-8)?);
        one(a.t(0)?.isclose(a.t(1)?, rtol, atol, a.b(4, "equal_nan", false)))
    });
    t.op("isin", |a| {
        let elements = a.tensor_or_number(1, 0)?;
        one(a.tensor_or_number(0, 1)?.isin(&elements, a.b(3, "invert", false)))
    });
    t.op("unique", |a| {
        let found = match a.opt_i(usize::MAX, "dim")? {
            Some(dim) => a.t(0)?.unique_dim(dim as isize)?,
            None => a.t(0)?.unique()?,
        };
        let mut out = vec![found.values.detach()];
        out.extend(a.b(usize::MAX, "return_inverse", false).then_some(found.inverse));
        out.extend(a.b(usize::MAX, "return_counts", false).then_some(found.counts));
        Ok(out)
    });
    t.op("unique_consecutive", |a| {
        let found = match a.opt_i(usize::MAX, "dim")? {
            Some(dim) => a.t(0)?.unique_consecutive_dim(dim as isize)?,
            None => a.t(0)?.unique_consecutive()?,
        };
        let mut out = vec![found.values.detach()];
        out.extend(a.b(usize::MAX, "return_inverse", false).then_some(found.inverse));
        out.extend(a.b(usize::MAX, "return_counts", false).then_some(found.counts));
        Ok(out)
    });
    t.op("mode", |a| {
        let (values, places) = a.t(0)?.mode(dim(a, 1, "dim", -1)?, a.b(2, "keepdim", false))?;
        Ok(vec![values, places])
    });
    t.op("hsplit", |a| split(a, Tensor::hsplit, if a.t(0)?.rank() > 1 { 1 } else { 0 }));
    t.op("vsplit", |a| split(a, Tensor::vsplit, 0));
    t.op("dsplit", |a| split(a, Tensor::dsplit, 2));
    t.op("bincount", |a| one(a.t(0)?.bincount(a.opt_t(1, "weights"), a.i(2, "minlength", 0)? as usize)));
    t.op("histc", |a| {
        one(a.t(0)?.histc(a.i(1, "bins", 100)? as usize, a.f(2, "min", 0.0)?, a.f(3, "max", 0.0)?))
    });
    t.op("renorm", |a| one(a.t(0)?.renorm(a.f(1, "p", 2.0)?, dim(a, 2, "dim", 0)?, a.f(3, "maxnorm", 1.0)?)));
    t.op("nansum", |a| Ok(vec![a.named(a.t_as(0)?.nansum(&a.dims(1, "dim")?, a.b(2, "keepdim", false))?)?]));
    t.op("nanmean", |a| one(a.t_as(0)?.nanmean(&a.dims(1, "dim")?, a.b(2, "keepdim", false))));
    t.op("logcumsumexp", |a| one(a.t(0)?.logcumsumexp(dim(a, 1, "dim", 0)?)));
    t.op("trapezoid", |a| one(a.t(0)?.trapezoid(spacing(a)?, dim(a, usize::MAX, "dim", -1)?)));
    t.op("cumulative_trapezoid", |a| {
        one(a.t(0)?.cumulative_trapezoid(spacing(a)?, dim(a, usize::MAX, "dim", -1)?))
    });
    t.op("cov", |a| {
        let correction = a.f(usize::MAX, "correction", 1.0)?;
        let weights = |name| a.opt_t(usize::MAX, name);
        one(a.t(0)?.cov(correction, weights("fweights"), weights("aweights")))
    });
    t.op("corrcoef", |a| one(a.t(0)?.corrcoef()));
}
