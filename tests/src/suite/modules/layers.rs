//! Norms, convolutions, embeddings, activations, pooling, and layers that only move elements.

pub(super) mod weights {
    use forebay::nn::{
        BatchNorm1d, BatchNorm2d, BatchNorm3d, Bilinear, Conv1d, Conv2d, Conv3d, ConvOptions,
        ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, ConvTransposeOptions, Embedding, EmbeddingBag,
        GroupNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, LayerNorm, Linear, LocalResponseNorm,
        RmsNorm, SpectralNorm, WeightNorm,
    };
    use forebay::ops::{EmbeddingBagMode, PadMode};

    use super::super::{cases, single};

    cases! {
        "layer_norm": |c| LayerNorm::new([3, 4], c.device), |m, x| single(m.forward(&x[0]));
        "rms_norm": |c| RmsNorm::new([6], c.device), |m, x| single(m.forward(&x[0]));
        "group_norm": |c| GroupNorm::new(2, 4, c.device), |m, x| single(m.forward(&x[0]));
        "batch_norm1d": |c| BatchNorm1d::new(3, c.device), |m, x| single(m.forward(&x[0]));
        "batch_norm2d": |c| Ok(BatchNorm2d::new(3, c.device)?.momentum(0.3).eps(1e-3)), |m, x| single(m.forward(&x[0]));
        "batch_norm3d": |c| BatchNorm3d::new(2, c.device), |m, x| single(m.forward(&x[0]));
        "instance_norm1d": |_| Ok(InstanceNorm1d::new(3)), |m, x| single(m.forward(&x[0]));
        "instance_norm2d": |c| InstanceNorm2d::new(3).affine(c.device)?.track_running_stats(c.device), |m, x| single(m.forward(&x[0]));
        "instance_norm3d": |c| InstanceNorm3d::new(2).affine(c.device), |m, x| single(m.forward(&x[0]));
        "local_response_norm": |_| Ok(LocalResponseNorm { alpha: 0.1, ..LocalResponseNorm::new(3) }), |m, x| single(m.forward(&x[0]));
        "batch_norm1d_plain": |c| Ok(BatchNorm1d::new(3, c.device)?.without_affine()), |m, x| single(m.forward(&x[0]));
        "batch_norm2d_batch": |c| Ok(BatchNorm2d::new(3, c.device)?.without_running_stats()), |m, x| single(m.forward(&x[0]));
        "layer_norm_no_bias": |c| Ok(LayerNorm::new([4], c.device)?.eps(1e-3).without_bias()), |m, x| single(m.forward(&x[0]));
        "weight_norm": |c| WeightNorm::new(Linear::new(4, 3, c.device)?, Some(0)), |m, x| single(m.forward(&x[0]));
        "weight_norm_all": |c| {
            let options = ConvOptions { bias: false, ..ConvOptions::default() };
            WeightNorm::new(Conv1d::new(2, 3, [2], options, c.device)?, None)
        }, |m, x| single(m.forward(&x[0]));
        "weight_norm_transpose": |c| {
            WeightNorm::new(ConvTranspose2d::new(2, 3, [2; 2], ConvTransposeOptions::default(), c.device)?, Some(1))
        }, |m, x| single(m.forward(&x[0]));
        "spectral_norm": |c| SpectralNorm::new(Linear::new(4, 3, c.device)?), |m, x| single(m.forward(&x[0]));
        "spectral_norm_transpose": |c| {
            let layer = ConvTranspose1d::new(3, 4, [2], ConvTransposeOptions::default(), c.device)?;
            Ok(SpectralNorm::new(layer)?.n_power_iterations(3).eps(1e-6))
        }, |m, x| single(m.forward(&x[0]));
        "conv1d_same": |c| Conv1d::new(2, 3, [4], ConvOptions { same_padding: true, ..ConvOptions::default() }, c.device),
            |m, x| single(m.forward(&x[0]));
        "conv2d_same_reflect": |c| {
            let padding_mode = PadMode::Reflect;
            let options = ConvOptions { same_padding: true, dilation: [2, 1], padding_mode, ..ConvOptions::default() };
            Conv2d::new(2, 3, [3, 2], options, c.device)
        }, |m, x| single(m.forward(&x[0]));
        "embedding_max_norm": |c| Ok(Embedding::new(7, 3, c.device)?.with_max_norm(0.9, 2.0)), |m, x| single(m.forward(&x[0]));
        "embedding_max_norm_one": |c| Ok(Embedding::new(7, 3, c.device)?.with_max_norm(0.9, 1.0)),
            |m, x| single(m.forward(&x[0]));
        "embedding_bag_max_norm": |c| Ok(EmbeddingBag::new(7, 3, EmbeddingBagMode::Sum, None, c.device)?.with_max_norm(0.9, 2.0)),
            |m, x| single(m.forward(&x[0], &Default::default()));
        "conv1d": |c| {
            let options = ConvOptions { stride: [2], padding: [2], groups: 2, ..ConvOptions::default() };
            Conv1d::new(4, 6, [3], options, c.device)
        }, |m, x| single(m.forward(&x[0]));
        "conv1d_circular": |c| {
            let options = ConvOptions { padding: [2], padding_mode: PadMode::Circular, ..ConvOptions::default() };
            Conv1d::new(2, 3, [3], options, c.device)
        }, |m, x| single(m.forward(&x[0]));
        "conv2d_reflect": |c| {
            let padding_mode = PadMode::Reflect;
            let options = ConvOptions { padding: [1, 2], padding_mode, bias: false, ..ConvOptions::default() };
            Conv2d::new(2, 3, [3, 2], options, c.device)
        }, |m, x| single(m.forward(&x[0]));
        "conv3d": |c| Conv3d::new(2, 3, [2; 3], ConvOptions { dilation: [1, 2, 1], ..ConvOptions::default() }, c.device),
            |m, x| single(m.forward(&x[0]));
        "conv_transpose1d": |c| {
            let options = ConvTransposeOptions { stride: [2], output_padding: [1], groups: 2, ..Default::default() };
            ConvTranspose1d::new(4, 6, [3], options, c.device)
        }, |m, x| single(m.forward(&x[0]));
        "conv_transpose3d": |c| {
            let options = ConvTransposeOptions { stride: [1, 2, 1], padding: [1, 0, 0], ..Default::default() };
            ConvTranspose3d::new(2, 3, [2; 3], options, c.device)
        }, |m, x| single(m.forward(&x[0]));
        "embedding": |c| Embedding::new(7, 3, c.device)?.with_padding_idx(2), |m, x| single(m.forward(&x[0]));
        "bilinear": |c| Bilinear::new([3, 4], 2, true, c.device), |m, x| single(m.forward(&x[0], &x[1]));
    }
}

pub(super) mod activations {
    use forebay::nn::{
        Celu, Elu, Gelu, GeluTanh, Glu, Hardshrink, Hardsigmoid, Hardswish, Hardtanh, LeakyRelu, LogSigmoid,
        LogSoftmax, Mish, Prelu, Relu, Relu6, Rrelu, Selu, Sigmoid, Silu, Softmax, Softmax2d, Softmin,
        Softplus, Softshrink, Softsign, Tanh, Tanhshrink, Threshold,
    };

    use super::super::{cases, single};

    cases! {
        "relu": |_| Ok(Relu {}), |m, x| single(m.forward(&x[0]));
        "relu6": |_| Ok(Relu6 {}), |m, x| single(m.forward(&x[0]));
        "leaky_relu": |_| Ok(LeakyRelu::default()), |m, x| single(m.forward(&x[0]));
        "elu": |_| Ok(Elu::default()), |m, x| single(m.forward(&x[0]));
        "celu": |_| Ok(Celu { alpha: 1.5 }), |m, x| single(m.forward(&x[0]));
        "selu": |_| Ok(Selu {}), |m, x| single(m.forward(&x[0]));
        "gelu": |_| Ok(Gelu {}), |m, x| single(m.forward(&x[0]));
        "gelu_tanh": |_| Ok(GeluTanh {}), |m, x| single(m.forward(&x[0]));
        "silu": |_| Ok(Silu {}), |m, x| single(m.forward(&x[0]));
        "mish": |_| Ok(Mish {}), |m, x| single(m.forward(&x[0]));
        "sigmoid": |_| Ok(Sigmoid {}), |m, x| single(m.forward(&x[0]));
        "log_sigmoid": |_| Ok(LogSigmoid {}), |m, x| single(m.forward(&x[0]));
        "softplus": |_| Ok(Softplus { beta: 2.0, ..Softplus::default() }), |m, x| single(m.forward(&x[0]));
        "softsign": |_| Ok(Softsign {}), |m, x| single(m.forward(&x[0]));
        "softshrink": |_| Ok(Softshrink::default()), |m, x| single(m.forward(&x[0]));
        "hardshrink": |_| Ok(Hardshrink::default()), |m, x| single(m.forward(&x[0]));
        "tanhshrink": |_| Ok(Tanhshrink {}), |m, x| single(m.forward(&x[0]));
        "tanh": |_| Ok(Tanh {}), |m, x| single(m.forward(&x[0]));
        "hardtanh": |_| Ok(Hardtanh { min_val: -0.7, max_val: 1.2 }), |m, x| single(m.forward(&x[0]));
        "hardsigmoid": |_| Ok(Hardsigmoid {}), |m, x| single(m.forward(&x[0]));
        "hardswish": |_| Ok(Hardswish {}), |m, x| single(m.forward(&x[0]));
        "glu": |_| Ok(Glu::default()), |m, x| single(m.forward(&x[0]));
        "threshold": |_| Ok(Threshold { threshold: 0.3, value: 7.0 }), |m, x| single(m.forward(&x[0]));
        "softmax": |_| Ok(Softmax { dim: 0 }), |m, x| single(m.forward(&x[0]));
        "log_softmax": |_| Ok(LogSoftmax::default()), |m, x| single(m.forward(&x[0]));
        "softmin": |_| Ok(Softmin { dim: 1 }), |m, x| single(m.forward(&x[0]));
        "softmax2d": |_| Ok(Softmax2d), |m, x| single(m.forward(&x[0]));
        "prelu": |c| Prelu::new(3, 0.25, c.device), |m, x| single(m.forward(&x[0]));
        "rrelu": |_| Ok(Rrelu::default()), |m, x| single(m.forward(&x[0]));
    }
}

pub(super) mod pooling {
    use forebay::dtype::DType;
    use forebay::nn::{
        AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AdaptiveMaxPool1d, AdaptiveMaxPool2d,
        AdaptiveMaxPool3d, AvgPool1d, AvgPool2d, AvgPool3d, FractionalMaxPool2d, FractionalMaxPool3d,
        FractionalSize, LpPool, MaxPool1d, MaxPool2d, MaxPool3d, MaxUnpool1d, MaxUnpool2d, MaxUnpool3d,
    };
    use forebay::ops::{Pool1dOptions, Pool2dOptions, Pool3dOptions, PoolOptions};
    use forebay::tensor::Tensor;

    use super::super::{cases, single};

    cases! {
        "max_pool1d": |_| Ok(MaxPool1d(PoolOptions { stride: [2], padding: [1], ..Pool1dOptions::new(3) })), |m, x| single(m.forward(&x[0]));
        "max_pool2d": |_| Ok(MaxPool2d(PoolOptions { stride: [1; 2], dilation: [2, 1], ..Pool2dOptions::from_kernel([2, 3]) })), |m, x| single(m.forward(&x[0]));
        "max_pool3d": |_| {
            let window = PoolOptions { stride: [1, 2, 2], padding: [1, 1, 0], ceil_mode: true, ..Pool3dOptions::from_kernel([2, 3, 2]) };
            Ok(MaxPool3d(window))
        }, |m, x| single(m.forward(&x[0]));
        "avg_pool1d": |_| Ok(AvgPool1d(PoolOptions { stride: [2], padding: [1], count_include_pad: false, ..Pool1dOptions::new(3) })),
            |m, x| single(m.forward(&x[0]));
        "avg_pool2d": |_| Ok(AvgPool2d(PoolOptions { stride: [1; 2], ..Pool2dOptions::new(2) })), |m, x| single(m.forward(&x[0]));
        "avg_pool3d": |_| {
            let window = PoolOptions { stride: [2; 3], padding: [1, 1, 0], ..Pool3dOptions::from_kernel([2, 3, 2]) };
            Ok(AvgPool3d(PoolOptions { count_include_pad: false, ceil_mode: true, ..window }))
        }, |m, x| single(m.forward(&x[0]));
        "avg_pool3d_divisor": |_| Ok(AvgPool3d(PoolOptions { divisor_override: Some(5), ..Pool3dOptions::new(2) })), |m, x| single(m.forward(&x[0]));
        "lp_pool1d": |_| Ok(LpPool { p: 2.0, options: PoolOptions { stride: [2], ..Pool1dOptions::new(3) } }), |m, x| single(m.forward(&x[0]));
        "lp_pool2d": |_| Ok(LpPool { p: 3.0, options: Pool2dOptions::new(2) }), |m, x| single(m.forward(&x[0]));
        "lp_pool3d": |_| Ok(LpPool { p: 3.0, options: PoolOptions { stride: [1; 3], ..Pool3dOptions::from_kernel([2, 1, 2]) } }), |m, x| single(m.forward(&x[0]));
        "max_pool3d_indices": |_| Ok(()), |(), x| {
            let window = PoolOptions { stride: [1, 2, 2], padding: [1, 1, 0], ceil_mode: true, ..Pool3dOptions::from_kernel([2, 3, 2]) };
            let (out, indices) = x[0].max_pool3d_with_indices(window)?;
            Ok(vec![out, indices])
        };
        "max_pool3d_indices_ties": |_| Ok(()), |(), x| {
            let (out, indices) = x[0].max_pool3d_with_indices(PoolOptions { stride: [1; 3], ..Pool3dOptions::from_kernel([2, 3, 2]) })?;
            Ok(vec![out, indices])
        };
        "max_unpool1d": |_| Ok(MaxUnpool1d { options: PoolOptions { stride: [2], padding: [1], ..Pool1dOptions::new(3) } }), |m, x| {
            let indices = Tensor::arange(0.0, 8.0, 2.0, DType::I64, x[0].device())?.broadcast_to(x[0].shape())?;
            single(m.forward(&x[0], &indices, None))
        };
        "max_unpool2d": |_| Ok(MaxUnpool2d { options: Pool2dOptions::from_kernel([3, 2]) }), |m, x| {
            let (out, indices) = x[0].max_pool2d_with_indices(m.options)?;
            single(m.forward(&out, &indices, Some([5, 7])))
        };
        "max_unpool3d": |_| Ok(MaxUnpool3d { options: Pool3dOptions::from_kernel([2, 3, 2]) }), |m, x| {
            let (out, indices) = x[0].max_pool3d_with_indices(m.options)?;
            single(m.forward(&out, &indices, Some([5, 7, 4])))
        };
        "fractional_max_pool2d": |_| Ok(FractionalMaxPool2d { kernel_size: [2; 2], output_size: FractionalSize::OutputSize([4, 3]) }),
            |m, x| { let (out, indices) = m.forward_with_indices(&x[0], Some(&x[1]))?; Ok(vec![out, indices]) };
        "fractional_max_pool3d": |_| Ok(FractionalMaxPool3d { kernel_size: [2; 3], output_size: FractionalSize::OutputRatio([0.5, 0.6, 0.7]) }),
            |m, x| { let (out, indices) = m.forward_with_indices(&x[0], Some(&x[1]))?; Ok(vec![out, indices]) };
        "adaptive_avg_pool1d": |_| Ok(AdaptiveAvgPool1d(3)), |m, x| single(m.forward(&x[0]));
        "adaptive_avg_pool2d": |_| Ok(AdaptiveAvgPool2d([2, 3])), |m, x| single(m.forward(&x[0]));
        "adaptive_avg_pool3d": |_| Ok(AdaptiveAvgPool3d([2, 3, 2])), |m, x| single(m.forward(&x[0]));
        "adaptive_max_pool1d": |_| Ok(AdaptiveMaxPool1d(3)), |m, x| single(m.forward(&x[0]));
        "adaptive_max_pool2d": |_| Ok(AdaptiveMaxPool2d([2, 3])), |m, x| single(m.forward(&x[0]));
        "adaptive_max_pool3d": |_| Ok(AdaptiveMaxPool3d([2, 3, 2])), |m, x| single(m.forward(&x[0]));
    }
}

/// Grid sampling, distances, singular vectors.
pub(super) mod sampling {
    use forebay::error::Result;
    use forebay::ops::{GridMode, GridPadding, GridSampleOptions};
    use forebay::tensor::Tensor;

    use super::super::{cases, single};

    fn sample(
        x: &[Tensor],
        mode: GridMode,
        padding: GridPadding,
        align_corners: bool,
    ) -> Result<Vec<Tensor>> {
        single(x[0].grid_sample(&x[1], &GridSampleOptions { mode, padding_mode: padding, align_corners }))
    }

    /// Returns the absolute values of the vectors, whose signs are arbitrary, and the product.
    fn svd(x: &Tensor) -> Result<Vec<Tensor>> {
        let (u, s, vh) = x.svd()?;
        Ok(vec![u.abs()?, s.clone(), vh.abs()?, u.mul(&s.unsqueeze(-2)?)?.matmul(&vh)?])
    }

    cases! {
        "grid_sample_zeros_bilinear_0": |_| Ok(()), |(), x| sample(x, GridMode::Bilinear, GridPadding::Zeros, false);
        "grid_sample_zeros_bilinear_1": |_| Ok(()), |(), x| sample(x, GridMode::Bilinear, GridPadding::Zeros, true);
        "grid_sample_zeros_nearest_0": |_| Ok(()), |(), x| sample(x, GridMode::Nearest, GridPadding::Zeros, false);
        "grid_sample_zeros_nearest_1": |_| Ok(()), |(), x| sample(x, GridMode::Nearest, GridPadding::Zeros, true);
        "grid_sample_border_bilinear_0": |_| Ok(()), |(), x| sample(x, GridMode::Bilinear, GridPadding::Border, false);
        "grid_sample_border_bilinear_1": |_| Ok(()), |(), x| sample(x, GridMode::Bilinear, GridPadding::Border, true);
        "grid_sample_border_nearest_0": |_| Ok(()), |(), x| sample(x, GridMode::Nearest, GridPadding::Border, false);
        "grid_sample_border_nearest_1": |_| Ok(()), |(), x| sample(x, GridMode::Nearest, GridPadding::Border, true);
        "grid_sample_reflection_bilinear_0": |_| Ok(()),
            |(), x| sample(x, GridMode::Bilinear, GridPadding::Reflection, false);
        "grid_sample_reflection_bilinear_1": |_| Ok(()),
            |(), x| sample(x, GridMode::Bilinear, GridPadding::Reflection, true);
        "grid_sample_reflection_nearest_0": |_| Ok(()), |(), x| sample(x, GridMode::Nearest, GridPadding::Reflection, false);
        "grid_sample_reflection_nearest_1": |_| Ok(()), |(), x| sample(x, GridMode::Nearest, GridPadding::Reflection, true);
        "grid_sample_volume": |_| Ok(()), |(), x| sample(x, GridMode::Bilinear, GridPadding::Reflection, false);
        "affine_grid": |_| Ok(()), |(), x| single(x[0].affine_grid([2, 1, 3, 4], false));
        "affine_grid_volume": |_| Ok(()), |(), x| single(x[0].affine_grid([2, 1, 3, 1, 2], true));
        "svd_tall": |_| Ok(()), |(), x| svd(&x[0]);
        "svd_wide": |_| Ok(()), |(), x| svd(&x[0]);
        "svd_square": |_| Ok(()), |(), x| svd(&x[0]);
        "pdist": |_| Ok(()), |(), x| single(x[0].pdist(2.0));
        "pdist_ones": |_| Ok(()), |(), x| single(x[0].pdist(1.0));
    }
}

pub(super) mod rearranging {
    use forebay::nn::{
        ChannelShuffle, CircularPad1d, CircularPad2d, CircularPad3d, ConstantPad1d, ConstantPad2d,
        ConstantPad3d, Flatten, Fold, PixelShuffle, PixelUnshuffle, ReflectionPad1d, ReflectionPad2d,
        ReflectionPad3d, ReplicationPad1d, ReplicationPad2d, ReplicationPad3d, Unflatten, Unfold, ZeroPad1d,
        ZeroPad2d, ZeroPad3d,
    };

    use super::super::{cases, single};

    const OPTIONS: forebay::ops::Im2colOptions =
        forebay::ops::Im2colOptions { dilation: [1; 2], padding: [1; 2], stride: [2; 2] };
    const BLOCKS: Unfold = Unfold { kernel_size: [2, 3], options: OPTIONS };

    cases! {
        "zero_pad1d": |_| Ok(ZeroPad1d([1, 2])), |m, x| single(m.forward(&x[0]));
        "zero_pad2d": |_| Ok(ZeroPad2d([1, -1, 0, 2])), |m, x| single(m.forward(&x[0]));
        "zero_pad3d": |_| Ok(ZeroPad3d::new(1)), |m, x| single(m.forward(&x[0]));
        "constant_pad1d": |_| ConstantPad1d::new(&[2], 1.5), |m, x| single(m.forward(&x[0]));
        "constant_pad2d": |_| ConstantPad2d::new(&[1, 0, 2, 1], -2.0), |m, x| single(m.forward(&x[0]));
        "constant_pad3d": |_| ConstantPad3d::new(&[1], 3.0), |m, x| single(m.forward(&x[0]));
        "reflection_pad1d": |_| Ok(ReflectionPad1d([1, 2])), |m, x| single(m.forward(&x[0]));
        "reflection_pad2d": |_| Ok(ReflectionPad2d([1, 2, 0, 1])), |m, x| single(m.forward(&x[0]));
        "reflection_pad3d": |_| Ok(ReflectionPad3d([1, 2, 0, 1, 2, 1])), |m, x| single(m.forward(&x[0]));
        "replication_pad1d": |_| Ok(ReplicationPad1d([1, 2])), |m, x| single(m.forward(&x[0]));
        "replication_pad2d": |_| Ok(ReplicationPad2d([1, 2, 0, 1])), |m, x| single(m.forward(&x[0]));
        "replication_pad3d": |_| Ok(ReplicationPad3d([1, 2, 0, 1, 2, 1])), |m, x| single(m.forward(&x[0]));
        "circular_pad1d": |_| Ok(CircularPad1d([1, 2])), |m, x| single(m.forward(&x[0]));
        "circular_pad2d": |_| Ok(CircularPad2d([1, 2, 0, 1])), |m, x| single(m.forward(&x[0]));
        "circular_pad3d": |_| Ok(CircularPad3d([1, 2, 0, 1, 2, 1])), |m, x| single(m.forward(&x[0]));
        "flatten": |_| Ok(Flatten::default()), |m, x| single(m.forward(&x[0]));
        "unflatten": |_| Ok(Unflatten::new(1, [2, -1])), |m, x| single(m.forward(&x[0]));
        "pixel_shuffle": |_| Ok(PixelShuffle(2)), |m, x| single(m.forward(&x[0]));
        "pixel_unshuffle": |_| Ok(PixelUnshuffle(2)), |m, x| single(m.forward(&x[0]));
        "channel_shuffle": |_| Ok(ChannelShuffle(2)), |m, x| single(m.forward(&x[0]));
        "unfold": |_| Ok(BLOCKS), |m, x| single(m.forward(&x[0]));
        "fold": |_| Ok(Fold { output_size: [4, 5], blocks: BLOCKS }), |m, x| single(m.forward(&x[0]));
    }
}
