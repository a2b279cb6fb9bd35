//! Joining tensors, replacing parts, sets.

use anyhow::Result;
use forebay::ops::{
    CovOptions, IsCloseOptions, Scalar, block_diag, broadcast_tensors, cartesian_prod, column_stack, dstack,
    hstack, meshgrid, vstack,
};
use forebay::tensor::Tensor;

use super::{OpTable, missing_op, single};
use crate::golden::args::Args;

fn dim(a: &Args<'_>, at: usize, name: &str, default: i64) -> Result<isize> {
    Ok(a.int(at, name, default)? as isize)
}

/// Applies a function to a tensor or to each of a list.
fn each(a: &Args<'_>, made: fn(&Tensor) -> forebay::error::Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(a.tensors(0)?.into_iter().map(made).collect::<forebay::error::Result<_>>()?)
}

/// Returns the spacing of samples, or their coordinates.
fn spacing<'a>(a: &'a Args<'_>) -> Result<forebay::ops::Operand<'a>> {
    match a.opt_tensor(1, "x") {
        Some(x) => Ok(x.into()),
        None => a.operand(usize::MAX, "dx", Scalar::Float(1.0)),
    }
}

/// Splits into equal parts, or at indices.
fn split(
    a: &Args<'_>,
    evenly: fn(&Tensor, usize) -> forebay::error::Result<Vec<Tensor>>,
    dim: isize,
) -> Result<Vec<Tensor>> {
    match a.get(1, "indices").and_then(|v| v.get("l")) {
        Some(_) => Ok(a.tensor(0)?.tensor_split_at(&a.dims(1, "indices")?, dim)?),
        None => Ok(evenly(a.tensor(0)?, usize::try_from(a.int(1, "sections", 0)?)?)?),
    }
}

pub(super) fn register(t: &mut OpTable) {
    t.register("hstack", |a| single(hstack(&a.tensors(0)?)));
    t.register("vstack", |a| single(vstack(&a.tensors(0)?)));
    t.register("dstack", |a| single(dstack(&a.tensors(0)?)));
    t.register("column_stack", |a| single(column_stack(&a.tensors(0)?)));
    t.register("block_diag", |a| single(block_diag(&a.tensors(0)?)));
    t.register("cartesian_prod", |a| single(cartesian_prod(&a.tensors(0)?)));
    t.register("meshgrid", |a| Ok(meshgrid(&a.tensors(0)?, a.string(9, "indexing", "ij") == "xy")?));
    t.register("broadcast_tensors", |a| Ok(broadcast_tensors(&a.tensors(0)?)?));
    t.register("atleast_1d", |a| each(a, Tensor::atleast_1d));
    t.register("atleast_2d", |a| each(a, Tensor::atleast_2d));
    t.register("atleast_3d", |a| each(a, Tensor::atleast_3d));
    t.register("tile", |a| single(a.tensor(0)?.tile(&a.shape(1, "dims")?)));
    t.register("diag", |a| single(a.tensor(0)?.diag(dim(a, 1, "diagonal", 0)?)));
    t.register("diagflat", |a| single(a.tensor(0)?.reshape([-1])?.diag(dim(a, 1, "offset", 0)?)));
    t.register("diag_embed", |a| {
        single(a.tensor(0)?.diag_embed(
            dim(a, 1, "offset", 0)?,
            dim(a, 2, "dim1", -2)?,
            dim(a, 3, "dim2", -1)?,
        ))
    });
    t.register("rot90", |a| {
        let dims = a.dims(2, "dims")?;
        let &[first, second] = (if dims.is_empty() { &[0, 1][..] } else { &dims }) else {
            anyhow::bail!("{} dimensions", dims.len())
        };
        single(a.tensor(0)?.rot90(dim(a, 1, "k", 1)?, [first, second]))
    });
    t.register("fliplr", |a| single(a.tensor(0)?.flip([1])));
    t.register("flipud", |a| single(a.tensor(0)?.flip([0])));
    t.register("msort", |a| Ok(vec![a.tensor(0)?.sort(0, false)?.0]));
    t.register("combinations", |a| {
        single(a.tensor(0)?.combinations(a.int(1, "r", 2)? as usize, a.flag(2, "with_replacement", false)))
    });
    t.register("kron", |a| single(a.tensor(0)?.kron(a.tensor(1)?)));
    t.register("tensordot", |a| {
        let (x, y) = (a.tensor(0)?, a.tensor(1)?);
        match a.get(2, "dims") {
            Some(v) if v.get("l").is_some() => Err(missing_op("tensordot of two lists")),
            _ => {
                let n = a.int(2, "dims", 2)? as isize;
                single(x.tensordot(y, (-n..0).collect::<Vec<_>>(), (0..n).collect::<Vec<_>>()))
            }
        }
    });
    t.register("tril_indices", |a| {
        let (rows, columns) = (a.int(0, "row", 0)? as usize, a.int(1, "col", 0)? as usize);
        single(Tensor::tril_indices(rows, columns, dim(a, 2, "offset", 0)?, a.device()))
    });
    t.register("triu_indices", |a| {
        let (rows, columns) = (a.int(0, "row", 0)? as usize, a.int(1, "col", 0)? as usize);
        single(Tensor::triu_indices(rows, columns, dim(a, 2, "offset", 0)?, a.device()))
    });
    t.register("slice_scatter", |a| {
        let (x, d) = (a.tensor(0)?, dim(a, 2, "dim", 0)?);
        let n = x.dim(d)? as i64;
        let index = |v: i64| (if v < 0 { v + n } else { v }).clamp(0, n) as usize;
        let start = index(a.opt_int(3, "start")?.unwrap_or(0));
        let stop = index(a.opt_int(4, "end")?.unwrap_or(n)).max(start);
        single(x.slice_scatter(a.tensor(1)?, d, start, stop, a.int(5, "step", 1)? as usize))
    });
    t.register("select_scatter", |a| {
        single(a.tensor(0)?.select_scatter(a.tensor(1)?, dim(a, 2, "dim", 0)?, dim(a, 3, "index", 0)?))
    });
    t.register("diagonal_scatter", |a| {
        let (dim1, dim2) = (dim(a, 3, "dim1", 0)?, dim(a, 4, "dim2", 1)?);
        single(a.tensor(0)?.diagonal_scatter(a.tensor(1)?, dim(a, 2, "offset", 0)?, dim1, dim2))
    });
    t.register("take", |a| single(a.tensor(0)?.take(a.tensor(1)?)));
    t.register("put", |a| {
        single(a.tensor(0)?.put(a.tensor(1)?, a.tensor(2)?, a.flag(3, "accumulate", false)))
    });
    t.register("index_copy", |a| {
        single(a.tensor(0)?.index_copy(dim(a, 1, "dim", 0)?, a.tensor(2)?, a.tensor(3)?))
    });
    t.register("masked_scatter", |a| single(a.tensor(0)?.masked_scatter(a.tensor(1)?, a.tensor(2)?)));
    t.register("isclose", |a| {
        let (rtol, atol) = (a.float(2, "rtol", 1e-5)?, a.float(3, "atol", 1e-8)?);
        single(
            a.tensor(0)?.isclose(
                a.tensor(1)?,
                &IsCloseOptions { rtol, atol, equal_nan: a.flag(4, "equal_nan", false) },
            ),
        )
    });
    t.register("isin", |a| {
        let elements = a.tensor_or_scalar(1, 0)?;
        single(a.tensor_or_scalar(0, 1)?.isin(&elements, a.flag(3, "invert", false)))
    });
    t.register("unique", |a| {
        let found = match a.opt_int(usize::MAX, "dim")? {
            Some(dim) => a.tensor(0)?.unique_dim(dim as isize)?,
            None => a.tensor(0)?.unique()?,
        };
        let mut out = vec![found.values.detach()];
        out.extend(a.flag(usize::MAX, "return_inverse", false).then_some(found.inverse_indices));
        out.extend(a.flag(usize::MAX, "return_counts", false).then_some(found.counts));
        Ok(out)
    });
    t.register("unique_consecutive", |a| {
        let found = match a.opt_int(usize::MAX, "dim")? {
            Some(dim) => a.tensor(0)?.unique_consecutive_dim(dim as isize)?,
            None => a.tensor(0)?.unique_consecutive()?,
        };
        let mut out = vec![found.values.detach()];
        out.extend(a.flag(usize::MAX, "return_inverse", false).then_some(found.inverse_indices));
        out.extend(a.flag(usize::MAX, "return_counts", false).then_some(found.counts));
        Ok(out)
    });
    t.register("mode", |a| {
        let (values, indices) = a.tensor(0)?.mode(dim(a, 1, "dim", -1)?, a.flag(2, "keepdim", false))?;
        Ok(vec![values, indices])
    });
    t.register("hsplit", |a| split(a, Tensor::hsplit, if a.tensor(0)?.rank() > 1 { 1 } else { 0 }));
    t.register("vsplit", |a| split(a, Tensor::vsplit, 0));
    t.register("dsplit", |a| split(a, Tensor::dsplit, 2));
    t.register("bincount", |a| {
        single(a.tensor(0)?.bincount(a.opt_tensor(1, "weights"), a.int(2, "minlength", 0)? as usize))
    });
    t.register("histc", |a| {
        single(a.tensor(0)?.histc(
            a.int(1, "bins", 100)? as usize,
            a.float(2, "min", 0.0)?,
            a.float(3, "max", 0.0)?,
        ))
    });
    t.register("renorm", |a| {
        single(a.tensor(0)?.renorm(a.float(1, "p", 2.0)?, dim(a, 2, "dim", 0)?, a.float(3, "maxnorm", 1.0)?))
    });
    t.register("nansum", |a| {
        Ok(vec![a.cast_to_dtype_arg(
            a.tensor_as_dtype_arg(0)?.nansum(&a.dims(1, "dim")?, a.flag(2, "keepdim", false))?,
        )?])
    });
    t.register("nanmean", |a| {
        single(a.tensor_as_dtype_arg(0)?.nanmean(&a.dims(1, "dim")?, a.flag(2, "keepdim", false)))
    });
    t.register("logcumsumexp", |a| single(a.tensor(0)?.logcumsumexp(dim(a, 1, "dim", 0)?)));
    t.register("trapezoid", |a| single(a.tensor(0)?.trapezoid(spacing(a)?, dim(a, usize::MAX, "dim", -1)?)));
    t.register("cumulative_trapezoid", |a| {
        single(a.tensor(0)?.cumulative_trapezoid(spacing(a)?, dim(a, usize::MAX, "dim", -1)?))
    });
    t.register("cov", |a| {
        let correction = a.float(usize::MAX, "correction", 1.0)?;
        let weights = |name| a.opt_tensor(usize::MAX, name);
        single(a.tensor(0)?.cov(&CovOptions {
            correction,
            fweights: weights("fweights"),
            aweights: weights("aweights"),
        }))
    });
    t.register("corrcoef", |a| single(a.tensor(0)?.corrcoef()));
}
