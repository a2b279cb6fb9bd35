//! Softmax and normalisations.

use anyhow::Result;
use forebay::ops::{BatchNormOptions, InstanceNormOptions, LocalResponseNormOptions, NormOptions};

use super::super::args::Args;
use super::{OpTable, single};

/// Returns running mean and variance, if both are present.
fn running<'a>(a: &'a Args<'_>) -> Option<(&'a forebay::tensor::Tensor, &'a forebay::tensor::Tensor)> {
    a.opt_tensor(1, "running_mean").zip(a.opt_tensor(2, "running_var"))
}

fn dim(a: &Args<'_>) -> Result<isize> {
    Ok(a.int(1, "dim", -1)? as isize)
}

pub(super) fn register(table: &mut OpTable) {
    table.register("softmax", |a| match a.dtype(2, "dtype")? {
        Some(dtype) => single(a.tensor(0)?.softmax_with_dtype(dim(a)?, dtype)),
        None => single(a.tensor(0)?.softmax(dim(a)?)),
    });
    table.register("log_softmax", |a| match a.dtype(2, "dtype")? {
        Some(dtype) => single(a.tensor(0)?.log_softmax_with_dtype(dim(a)?, dtype)),
        None => single(a.tensor(0)?.log_softmax(dim(a)?)),
    });
    table.register("nn.functional.layer_norm", |a| {
        let shape = a.shape(1, "normalized_shape")?;
        single(a.tensor(0)?.layer_norm(
            &shape,
            &NormOptions {
                weight: a.opt_tensor(2, "weight"),
                bias: a.opt_tensor(3, "bias"),
                eps: a.float(4, "eps", 1e-5)?,
            },
        ))
    });
    table.register("nn.functional.rms_norm", |a| {
        let eps = a.get(3, "eps").map(|_| a.float(3, "eps", 0.0)).transpose()?;
        single(a.tensor(0)?.rms_norm(&a.shape(1, "normalized_shape")?, a.opt_tensor(2, "weight"), eps))
    });
    table.register("nn.functional.group_norm", |a| {
        let groups = a.int(1, "num_groups", 1)? as usize;
        single(a.tensor(0)?.group_norm(
            groups,
            &NormOptions {
                weight: a.opt_tensor(2, "weight"),
                bias: a.opt_tensor(3, "bias"),
                eps: a.float(4, "eps", 1e-5)?,
            },
        ))
    });
    table.register("nn.functional.instance_norm", |a| {
        let (weight, bias) = (a.opt_tensor(3, "weight"), a.opt_tensor(4, "bias"));
        let (momentum, eps) = (a.float(6, "momentum", 0.1)?, a.float(7, "eps", 1e-5)?);
        single(a.tensor(0)?.instance_norm(&InstanceNormOptions {
            running: running(a),
            weight,
            bias,
            use_input_stats: a.flag(5, "use_input_stats", true),
            momentum,
            eps,
        }))
    });
    table.register("nn.functional.batch_norm", |a| {
        let (weight, bias) = (a.opt_tensor(3, "weight"), a.opt_tensor(4, "bias"));
        let (momentum, eps) = (a.float(6, "momentum", 0.1)?, a.float(7, "eps", 1e-5)?);
        single(a.tensor(0)?.batch_norm(&BatchNormOptions {
            running: running(a),
            weight,
            bias,
            training: a.flag(5, "training", false),
            momentum,
            eps,
            ..Default::default()
        }))
    });
    table.register("nn.functional.local_response_norm", |a| {
        let (alpha, beta, k) = (a.float(2, "alpha", 1e-4)?, a.float(3, "beta", 0.75)?, a.float(4, "k", 1.0)?);
        single(
            a.tensor(0)?.local_response_norm(
                a.int(1, "size", 1)? as usize,
                &LocalResponseNormOptions { alpha, beta, k },
            ),
        )
    });
}
