//! Softmax and normalisation over rows, groups and channels.

use super::prelude::*;

fn affine<'a>(weight: &'a Tensor, bias: &'a Tensor) -> NormOptions<'a> {
    NormOptions { weight: Some(weight), bias: Some(bias), eps: 1e-5 }
}

fn in_training<'a>(weight: &'a Tensor, bias: &'a Tensor) -> BatchNormOptions<'a> {
    BatchNormOptions { weight: Some(weight), bias: Some(bias), training: true, ..Default::default() }
}

/// Returns running mean and variance, if both are present.
fn running<'a>(a: &'a Args<'_>) -> Option<(&'a Tensor, &'a Tensor)> {
    a.opt_tensor(1, "running_mean").zip(a.opt_tensor(2, "running_var"))
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(softmax(int)))
        .case(
            smooth("softmax", &[Signed(&[3, 7])], |x| x[0].softmax(-1))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .case(
            smooth("softmax of columns", &[Signed(&[4, 5])], |x| x[0].softmax(0))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(|a| match a.dtype(2, "dtype")? {
            Some(dtype) => single(a.tensor(0)?.softmax_with_dtype(a.dim(1, "dim", -1)?, dtype)),
            None => single(a.tensor(0)?.softmax(a.dim(1, "dim", -1)?)),
        });
    ops.add(method!(log_softmax(int)))
        .case(
            smooth("log_softmax", &[Signed(&[3, 7])], |x| x[0].log_softmax(-1))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| match a.dtype(2, "dtype")? {
            Some(dtype) => single(a.tensor(0)?.log_softmax_with_dtype(a.dim(1, "dim", -1)?, dtype)),
            None => single(a.tensor(0)?.log_softmax(a.dim(1, "dim", -1)?)),
        });
    ops.add(method!(local_response_norm(
        count,
        LocalResponseNormOptions { alpha: float, beta: float, k: float }
    )))
    .case(
        smooth("local_response_norm", &[Signed(&[2, 5, 3])], |x| {
            x[0].local_response_norm(3, &LocalResponseNormOptions { alpha: 0.5, ..Default::default() })
        })
        .with_batched_inputs(1),
    )
    .golden(|a| {
        let (alpha, beta, k) = (a.float(2, "alpha", 1e-4)?, a.float(3, "beta", 0.75)?, a.float(4, "k", 1.0)?);
        single(
            a.tensor(0)?.local_response_norm(
                a.int(1, "size", 1)? as usize,
                &LocalResponseNormOptions { alpha, beta, k },
            ),
        )
    });
    ops.add(method!(softmax_with_dtype(int, dtype))).case(smooth("softmax_with_dtype", &[Signed(S)], |x| {
        x[0].softmax_with_dtype(-1, x[0].dtype().promote(DType::F32))
    }));
    ops.add(method!(log_softmax_with_dtype(int, dtype))).case(smooth(
        "log_softmax_with_dtype",
        &[Signed(S)],
        |x| x[0].log_softmax_with_dtype(0, x[0].dtype().promote(DType::F32)),
    ));
    ops.add(method!(add_layer_norm(t1, counts, NormOptions { weight: maybe2, bias: maybe3, eps: float })))
        .case(
            smooth(
                "add_layer_norm",
                &[Signed(&[3, 8]), Signed(&[3, 8]), Positive(&[8]), Signed(&[8])],
                |x| {
                    let (sum, normed) = x[0].add_layer_norm(&x[1], x[2].shape(), &affine(&x[2], &x[3]))?;
                    normed.mul(&sum)
                },
            )
            .with_bench_inputs(&[
                Signed(&[16384, 1024]),
                Signed(&[16384, 1024]),
                Positive(&[1024]),
                Signed(&[1024]),
            ])
            .with_batched_inputs(3),
        );
    ops.add(method!(add_rms_norm(t1, counts, maybe2, maybe_float))).case(
        smooth("add_rms_norm", &[Signed(&[3, 7]), Signed(&[3, 7]), Positive(&[7])], |x| {
            let (sum, normed) = x[0].add_rms_norm(&x[1], x[2].shape(), Some(&x[2]), None)?;
            normed.add(&sum)
        })
        .with_bench_inputs(&[Signed(&[16384, 1024]), Signed(&[16384, 1024]), Positive(&[1024])])
        .with_batched_inputs(3),
    );
    ops.add(method!(layer_norm(counts, NormOptions { weight: maybe1, bias: maybe2, eps: float })))
        .case(
            smooth("layer_norm", &[Signed(&[3, 8]), Positive(&[8]), Signed(&[8])], |x| {
                x[0].layer_norm(x[1].shape(), &affine(&x[1], &x[2]))
            })
            .with_bench_inputs(&[Signed(&[16384, 1024]), Positive(&[1024]), Signed(&[1024])])
            .with_batched_inputs(1),
        )
        .golden(|a| {
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
    ops.add(method!(rms_norm(counts, maybe1, maybe_float)))
        .case(
            smooth("rms_norm", &[Signed(&[3, 8]), Positive(&[8])], |x| {
                x[0].rms_norm(x[1].shape(), Some(&x[1]), None)
            })
            .with_bench_inputs(&[Signed(&[16384, 1024]), Positive(&[1024])])
            .with_batched_inputs(1),
        )
        .golden(|a| {
            let eps = a.get(3, "eps").map(|_| a.float(3, "eps", 0.0)).transpose()?;
            single(a.tensor(0)?.rms_norm(&a.shape(1, "normalized_shape")?, a.opt_tensor(2, "weight"), eps))
        });
    ops.add(method!(group_norm(count, NormOptions { weight: maybe1, bias: maybe2, eps: float })))
        .case(
            smooth("group_norm", &[Signed(&[2, 4, 3]), Positive(&[4]), Signed(&[4])], |x| {
                x[0].group_norm(2, &affine(&x[1], &x[2]))
            })
            .with_bench_inputs(&[Signed(&[16, 512, 1024]), Positive(&[512]), Signed(&[512])])
            .with_batched_inputs(1),
        )
        .golden(|a| {
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
    ops.add(method!(batch_norm(batch_norm)))
        .case(
            smooth("batch_norm", &[Signed(&[6, 3, 2]), Positive(&[3]), Signed(&[3])], |x| {
                x[0].batch_norm(&in_training(&x[1], &x[2]))
            })
            .with_bench_inputs(&[Signed(&[64, 256, 1024]), Positive(&[256]), Signed(&[256])]),
        )
        .case(
            smooth("batch_norm in use", &[Signed(&[6, 3, 2]), Positive(&[3]), Signed(&[3])], |x| {
                let mean = Tensor::full([3], 0.3, DType::F32, x[0].device())?;
                let var = Tensor::full([3], 1.7, DType::F32, x[0].device())?;
                x[0].batch_norm(&BatchNormOptions {
                    running: Some((&mean, &var)),
                    weight: Some(&x[1]),
                    bias: Some(&x[2]),
                    ..Default::default()
                })
            })
            .with_batched_inputs(1),
        )
        .golden(|a| {
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
    ops.add(method!(batch_norm_relu(batch_norm))).case(
        smooth("batch_norm_relu", &[Signed(&[4, 3, 2, 2]), Positive(&[3]), Signed(&[3])], |x| {
            x[0].batch_norm_relu(&in_training(&x[1], &x[2]))
        })
        .with_bench_inputs(&[Signed(&[64, 256, 32, 32]), Positive(&[256]), Signed(&[256])]),
    );
    ops.add(method!(batch_norm_silu(batch_norm))).case(
        smooth("batch_norm_silu", &[Signed(&[4, 3, 2, 2]), Positive(&[3]), Signed(&[3])], |x| {
            x[0].batch_norm_silu(&in_training(&x[1], &x[2]))
        })
        .with_bench_inputs(&[Signed(&[64, 256, 32, 32]), Positive(&[256]), Signed(&[256])]),
    );
    ops.add(method!(group_norm_silu(count, NormOptions { weight: maybe1, bias: maybe2, eps: float }))).case(
        smooth("group_norm_silu", &[Signed(&[2, 4, 3]), Positive(&[4]), Signed(&[4])], |x| {
            x[0].group_norm_silu(2, &affine(&x[1], &x[2]))
        })
        .with_bench_inputs(&[Signed(&[16, 512, 1024]), Positive(&[512]), Signed(&[512])])
        .with_batched_inputs(1),
    );
    ops.add(method!(instance_norm(InstanceNormOptions {
        running: running,
        weight: maybe1,
        bias: maybe2,
        use_input_stats: flag,
        momentum: float,
        eps: float
    })))
    .case(
        smooth("instance_norm", &[Signed(&[2, 3, 7]), Positive(&[3]), Signed(&[3])], |x| {
            x[0].instance_norm(&InstanceNormOptions {
                weight: Some(&x[1]),
                bias: Some(&x[2]),
                ..Default::default()
            })
        })
        .with_bench_inputs(&[Signed(&[64, 256, 1024]), Positive(&[256]), Signed(&[256])])
        .with_batched_inputs(1),
    )
    .golden(|a| {
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
}
