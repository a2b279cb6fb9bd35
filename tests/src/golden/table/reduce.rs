//! Reductions and scans.

use anyhow::Result;
use forebay::tensor::Tensor;

use super::super::args::Args;
use super::{OpTable, single};

fn dim(a: &Args<'_>) -> Result<Option<isize>> {
    Ok(a.opt_int(1, "dim")?.map(|d| d as isize))
}

fn keepdim(a: &Args<'_>) -> bool {
    a.flag(2, "keepdim", false)
}

fn pair((value, index): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    Ok(vec![value, index])
}

/// Returns the correction of degrees of freedom: `correction`, or `unbiased`.
fn correction(a: &Args<'_>) -> Result<f64> {
    let at = if a.variant() == "unbiased" { 1 } else { 2 };
    a.float(usize::MAX, "correction", f64::from(u8::from(a.flag(at, "unbiased", true))))
}

/// Returns the dimensions of a variance, which may be missing before `unbiased`, the correction and `keepdim`.
fn spread(a: &Args<'_>) -> Result<(Vec<isize>, f64, bool)> {
    let dims = if a.variant() == "unbiased" { Vec::new() } else { a.dims(1, "dim")? };
    Ok((dims, correction(a)?, a.flag(3, "keepdim", false)))
}

pub(super) fn register(table: &mut OpTable) {
    table.register("sum", |a| {
        Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.sum(&a.dims(1, "dim")?, keepdim(a))?)?])
    });
    table.register("trace", |a| single(a.tensor(0)?.trace()));
    table.register("mean", |a| single(a.tensor_as_dtype_arg(0)?.mean(&a.dims(1, "dim")?, keepdim(a))));
    table.register("prod", |a| match dim(a)? {
        Some(d) => Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.prod(d, keepdim(a))?)?]),
        None => Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.prod_all()?)?]),
    });
    table.register("amax", |a| single(a.tensor(0)?.amax(&a.dims(1, "dim")?, keepdim(a))));
    table.register("amin", |a| single(a.tensor(0)?.amin(&a.dims(1, "dim")?, keepdim(a))));
    table.register("aminmax", |a| pair(a.tensor(0)?.aminmax(&a.dims(1, "dim")?, keepdim(a))?));
    table.register("max", |a| match a.variant() {
        "binary" => single(a.tensor(0)?.maximum(a.tensor(1)?)),
        "reduction_no_dim" => single(a.tensor(0)?.max_all()),
        _ => pair(a.tensor(0)?.max(dim(a)?.unwrap_or(0), keepdim(a))?),
    });
    table.register("min", |a| match a.variant() {
        "binary" => single(a.tensor(0)?.minimum(a.tensor(1)?)),
        "reduction_no_dim" => single(a.tensor(0)?.min_all()),
        _ => pair(a.tensor(0)?.min(dim(a)?.unwrap_or(0), keepdim(a))?),
    });
    table.register("argmax", |a| single(a.tensor(0)?.argmax(dim(a)?.as_slice(), keepdim(a))));
    table.register("argmin", |a| single(a.tensor(0)?.argmin(dim(a)?.as_slice(), keepdim(a))));
    table.register("any", |a| single(a.tensor(0)?.any(&a.dims(1, "dim")?, keepdim(a))));
    table.register("all", |a| single(a.tensor(0)?.all(&a.dims(1, "dim")?, keepdim(a))));
    table.register("count_nonzero", |a| single(a.tensor(0)?.count_nonzero(&a.dims(1, "dim")?)));
    table.register("var", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        single(a.tensor(0)?.var(&dims, correction, keepdim))
    });
    table.register("std", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        single(a.tensor(0)?.std(&dims, correction, keepdim))
    });
    table.register("var_mean", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        pair(a.tensor(0)?.var_mean(&dims, correction, keepdim)?)
    });
    table.register("std_mean", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        pair(a.tensor(0)?.std_mean(&dims, correction, keepdim)?)
    });
    table.register("norm", |a| {
        if a.variant() == "nuc" {
            return single(a.tensor(0)?.nuclear_norm(&a.dims(2, "dim")?, a.flag(3, "keepdim", false)));
        }
        // For a matrix or a vector, the Frobenius norm equals the norm of order 2.
        let p = if a.string(1, "p", "") == "fro" { 2.0 } else { a.float(1, "p", 2.0)? };
        single(a.tensor(0)?.norm(p, &a.dims(2, "dim")?, a.flag(3, "keepdim", false)))
    });
    table.register("dist", |a| single(a.tensor(0)?.dist(a.tensor(1)?, a.float(2, "p", 2.0)?)));
    table.register("logsumexp", |a| single(a.tensor(0)?.logsumexp(&a.dims(1, "dim")?, keepdim(a))));
    table.register("cumsum", |a| {
        Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.cumsum(a.int(1, "dim", 0)? as isize)?)?])
    });
    table.register("cumprod", |a| {
        Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.cumprod(a.int(1, "dim", 0)? as isize)?)?])
    });
    table.register("cummax", |a| pair(a.tensor(0)?.cummax(a.int(1, "dim", 0)? as isize)?));
    table.register("cummin", |a| pair(a.tensor(0)?.cummin(a.int(1, "dim", 0)? as isize)?));
}
