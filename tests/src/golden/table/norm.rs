//! Softmax and normalisations.

use anyhow::Result;

use super::super::args::Args;
use super::{Table, one};

/// Running mean and variance, if both are given.
fn running<'a>(a: &'a Args<'_>) -> Option<(&'a forebay::tensor::Tensor, &'a forebay::tensor::Tensor)> {
    a.opt_t(1, "running_mean").zip(a.opt_t(2, "running_var"))
}

fn dim(a: &Args<'_>) -> Result<isize> {
    Ok(a.i(1, "dim", -1)? as isize)
}

pub(super) fn register(table: &mut Table) {
    table.op("softmax", |a| match a.dtype(2, "dtype")? {
        Some(dtype) => one(a.t(0)?.softmax_with_dtype(dim(a)?, dtype)),
        None => one(a.t(0)?.softmax(dim(a)?)),
    });
    table.op("log_softmax", |a| match a.dtype(2, "dtype")? {
        Some(dtype) => one(a.t(0)?.log_softmax_with_dtype(dim(a)?, dtype)),
        None => one(a.t(0)?.log_softmax(dim(a)?)),
    });
    table.op("nn.functional.layer_norm", |a| {
        let shape = a.shape(1, "normalized_shape")?;
        one(a.t(0)?.layer_norm(&shape, a.opt_t(2, "weight"), a.opt_t(3, "bias"), a.f(4, "eps", 1e-5)?))
    });
    table.op("nn.functional.rms_norm", |a| {
        let eps = a.get(3, "eps").map(|_| a.f(3, "eps", 0.0)).transpose()?;
        one(a.t(0)?.rms_norm(&a.shape(1, "normalized_shape")?, a.opt_t(2, "weight"), eps))
    });
    table.op("nn.functional.group_norm", |a| {
        let groups = a.i(1, "num_groups", 1)? as usize;
        one(a.t(0)?.group_norm(groups, a.opt_t(2, "weight"), a.opt_t(3, "bias"), a.f(4, "eps", 1e-5)?))
    });
    table.op("nn.functional.instance_norm", |a| {
        let (weight, bias) = (a.opt_t(3, "weight"), a.opt_t(4, "bias"));
        let (momentum, eps) = (a.f(6, "momentum", 0.1)?, a.f(7, "eps", 1e-5)?);
        one(a.t(0)?.instance_norm(running(a), weight, bias, a.b(5, "use_input_stats", true), momentum, eps))
    });
    table.op("nn.functional.batch_norm", |a| {
        let (weight, bias) = (a.opt_t(3, "weight"), a.opt_t(4, "bias"));
        let (momentum, eps) = (a.f(6, "momentum", 0.1)?, a.f(7, "eps", 1e-5)?);
        one(a.t(0)?.batch_norm(running(a), weight, bias, a.b(5, "training", false), momentum, eps))
    });
    table.op("nn.functional.local_response_norm", |a| {
        let (alpha, beta, k) = (a.f(2, "alpha", 1e-4)?, a.f(3, "beta", 0.75)?, a.f(4, "k", 1.0)?);
        one(a.t(0)?.local_response_norm(a.i(1, "size", 1)? as usize, alpha, beta, k))
    });
}
