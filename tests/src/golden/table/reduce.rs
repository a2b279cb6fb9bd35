//! Reductions and scans.

use anyhow::Result;
use forebay::tensor::Tensor;

use super::super::args::Args;
use super::{Table, one};

/// The dimension, if one is given.
fn dim(a: &Args<'_>) -> Result<Option<isize>> {
    Ok(a.opt_i(1, "dim")?.map(|d| d as isize))
}

fn keepdim(a: &Args<'_>) -> bool {
    a.b(2, "keepdim", false)
}

fn pair((value, place): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    Ok(vec![value, place])
}

/// The degrees of freedom taken off: `correction`, or `unbiased`.
fn correction(a: &Args<'_>) -> Result<f64> {
    let at = if a.variant() == "unbiased" { 1 } else { 2 };
    a.f(usize::MAX, "correction", f64::from(u8::from(a.b(at, "unbiased", true))))
}

/// The dimensions of a variance, which may be left out before `unbiased`.
fn spread(a: &Args<'_>) -> Result<(Vec<isize>, f64, bool)> {
    let dims = if a.variant() == "unbiased" { Vec::new() } else { a.dims(1, "dim")? };
    Ok((dims, correction(a)?, a.b(3, "keepdim", false)))
}

pub(super) fn register(table: &mut Table) {
    table.op("sum", |a| Ok(vec![a.named(a.t_as(0)?.sum(&a.dims(1, "dim")?, keepdim(a))?)?]));
    table.op("trace", |a| one(a.t(0)?.trace()));
    table.op("mean", |a| one(a.t_as(0)?.mean(&a.dims(1, "dim")?, keepdim(a))));
    table.op("prod", |a| match dim(a)? {
        Some(d) => Ok(vec![a.named(a.t_as(0)?.prod(d, keepdim(a))?)?]),
        None => Ok(vec![a.named(a.t_as(0)?.prod_all()?)?]),
    });
    table.op("amax", |a| one(a.t(0)?.amax(&a.dims(1, "dim")?, keepdim(a))));
    table.op("amin", |a| one(a.t(0)?.amin(&a.dims(1, "dim")?, keepdim(a))));
    table.op("aminmax", |a| pair(a.t(0)?.aminmax(&a.dims(1, "dim")?, keepdim(a))?));
    table.op("max", |a| match a.variant() {
        "binary" => one(a.t(0)?.maximum(a.t(1)?)),
        "reduction_no_dim" => one(a.t(0)?.max_all()),
        _ => pair(a.t(0)?.max(dim(a)?.unwrap_or(0), keepdim(a))?),
    });
    table.op("min", |a| match a.variant() {
        "binary" => one(a.t(0)?.minimum(a.t(1)?)),
        "reduction_no_dim" => one(a.t(0)?.min_all()),
        _ => pair(a.t(0)?.min(dim(a)?.unwrap_or(0), keepdim(a))?),
    });
    table.op("argmax", |a| one(a.t(0)?.argmax(dim(a)?, keepdim(a))));
    table.op("argmin", |a| one(a.t(0)?.argmin(dim(a)?, keepdim(a))));
    table.op("any", |a| one(a.t(0)?.any(&a.dims(1, "dim")?, keepdim(a))));
    table.op("all", |a| one(a.t(0)?.all(&a.dims(1, "dim")?, keepdim(a))));
    table.op("count_nonzero", |a| one(a.t(0)?.count_nonzero(&a.dims(1, "dim")?)));
    table.op("var", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        one(a.t(0)?.var(&dims, correction, keepdim))
    });
    table.op("std", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        one(a.t(0)?.std(&dims, correction, keepdim))
    });
    table.op("var_mean", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        pair(a.t(0)?.var_mean(&dims, correction, keepdim)?)
    });
    table.op("std_mean", |a| {
        let (dims, correction, keepdim) = spread(a)?;
        pair(a.t(0)?.std_mean(&dims, correction, keepdim)?)
    });
    table.op("norm", |a| {
        if a.variant() == "nuc" {
            return one(a.t(0)?.nuclear_norm(&a.dims(2, "dim")?, a.b(3, "keepdim", false)));
        }
        // Of a matrix or a vector the Frobenius norm is the one of order 2.
        let p = if a.s(1, "p", "") == "fro" { 2.0 } else { a.f(1, "p", 2.0)? };
        one(a.t(0)?.norm(p, &a.dims(2, "dim")?, a.b(3, "keepdim", false)))
    });
    table.op("dist", |a| one(a.t(0)?.dist(a.t(1)?, a.f(2, "p", 2.0)?)));
    table.op("logsumexp", |a| one(a.t(0)?.logsumexp(&a.dims(1, "dim")?, keepdim(a))));
    table.op("cumsum", |a| Ok(vec![a.named(a.t_as(0)?.cumsum(a.i(1, "dim", 0)? as isize)?)?]));
    table.op("cumprod", |a| Ok(vec![a.named(a.t_as(0)?.cumprod(a.i(1, "dim", 0)? as isize)?)?]));
    table.op("cummax", |a| pair(a.t(0)?.cummax(a.i(1, "dim", 0)? as isize)?));
    table.op("cummin", |a| pair(a.t(0)?.cummin(a.i(1, "dim", 0)? as isize)?));
}
