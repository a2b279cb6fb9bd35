//! Normalisation over rows, groups and channels.

use forebay::dtype::DType;
use forebay::ops::{BatchNormOptions, InstanceNormOptions, NormOptions};
use forebay::tensor::Tensor;

use super::InputSpec::{Positive, Signed};
use super::case::{OpCase, smooth};

fn affine<'a>(weight: &'a Tensor, bias: &'a Tensor) -> NormOptions<'a> {
    NormOptions { weight: Some(weight), bias: Some(bias), eps: 1e-5 }
}

fn in_training<'a>(weight: &'a Tensor, bias: &'a Tensor) -> BatchNormOptions<'a> {
    BatchNormOptions { weight: Some(weight), bias: Some(bias), training: true, ..Default::default() }
}

pub(super) const NORM: &[OpCase] = &[
    smooth("add_layer_norm", &[Signed(&[3, 8]), Signed(&[3, 8]), Positive(&[8]), Signed(&[8])], |x| {
        let (sum, normed) = x[0].add_layer_norm(&x[1], x[2].shape(), &affine(&x[2], &x[3]))?;
        normed.mul(&sum)
    })
    .with_bench_inputs(&[Signed(&[16384, 1024]), Signed(&[16384, 1024]), Positive(&[1024]), Signed(&[1024])])
    .with_batched_inputs(3),
    smooth("add_rms_norm", &[Signed(&[3, 7]), Signed(&[3, 7]), Positive(&[7])], |x| {
        let (sum, normed) = x[0].add_rms_norm(&x[1], x[2].shape(), Some(&x[2]), None)?;
        normed.add(&sum)
    })
    .with_bench_inputs(&[Signed(&[16384, 1024]), Signed(&[16384, 1024]), Positive(&[1024])])
    .with_batched_inputs(3),
    smooth("layer_norm", &[Signed(&[3, 8]), Positive(&[8]), Signed(&[8])], |x| {
        x[0].layer_norm(x[1].shape(), &affine(&x[1], &x[2]))
    })
    .with_bench_inputs(&[Signed(&[16384, 1024]), Positive(&[1024]), Signed(&[1024])])
    .with_batched_inputs(1),
    smooth("rms_norm", &[Signed(&[3, 8]), Positive(&[8])], |x| {
        x[0].rms_norm(x[1].shape(), Some(&x[1]), None)
    })
    .with_bench_inputs(&[Signed(&[16384, 1024]), Positive(&[1024])])
    .with_batched_inputs(1),
    smooth("group_norm", &[Signed(&[2, 4, 3]), Positive(&[4]), Signed(&[4])], |x| {
        x[0].group_norm(2, &affine(&x[1], &x[2]))
    })
    .with_bench_inputs(&[Signed(&[16, 512, 1024]), Positive(&[512]), Signed(&[512])])
    .with_batched_inputs(1),
    smooth("batch_norm", &[Signed(&[6, 3, 2]), Positive(&[3]), Signed(&[3])], |x| {
        x[0].batch_norm(&in_training(&x[1], &x[2]))
    })
    .with_bench_inputs(&[Signed(&[64, 256, 1024]), Positive(&[256]), Signed(&[256])]),
    smooth("batch_norm_relu", &[Signed(&[4, 3, 2, 2]), Positive(&[3]), Signed(&[3])], |x| {
        x[0].batch_norm_relu(&in_training(&x[1], &x[2]))
    })
    .with_bench_inputs(&[Signed(&[64, 256, 32, 32]), Positive(&[256]), Signed(&[256])]),
    smooth("batch_norm_silu", &[Signed(&[4, 3, 2, 2]), Positive(&[3]), Signed(&[3])], |x| {
        x[0].batch_norm_silu(&in_training(&x[1], &x[2]))
    })
    .with_bench_inputs(&[Signed(&[64, 256, 32, 32]), Positive(&[256]), Signed(&[256])]),
    smooth("group_norm_silu", &[Signed(&[2, 4, 3]), Positive(&[4]), Signed(&[4])], |x| {
        x[0].group_norm_silu(2, &affine(&x[1], &x[2]))
    })
    .with_bench_inputs(&[Signed(&[16, 512, 1024]), Positive(&[512]), Signed(&[512])])
    .with_batched_inputs(1),
    smooth("instance_norm", &[Signed(&[2, 3, 7]), Positive(&[3]), Signed(&[3])], |x| {
        x[0].instance_norm(&InstanceNormOptions {
            weight: Some(&x[1]),
            bias: Some(&x[2]),
            ..Default::default()
        })
    })
    .with_bench_inputs(&[Signed(&[64, 256, 1024]), Positive(&[256]), Signed(&[256])])
    .with_batched_inputs(1),
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
];
