//! Normalisation layers.

use super::summary::{OptionsText, flag, tuple};
use super::{Module, ModuleScope, TrainingMode, init};
use crate::{DType, Device, Result, Tensor, fail_if};
use forebay_core::ops::{BatchNormOptions, InstanceNormOptions, LocalResponseNormOptions, NormOptions};
use forebay_core::tensor::IntoShape;

#[track_caller]
fn create_ones_parameter(shape: impl IntoShape, device: &Device) -> Result<Tensor> {
    init::create_parameter(|| Tensor::ones(shape, init::parameter_dtype(), device))
}

#[track_caller]
fn create_zeros_parameter(shape: impl IntoShape, device: &Device) -> Result<Tensor> {
    init::create_parameter(|| Tensor::zeros(shape, init::parameter_dtype(), device))
}

/// Layer normalisation: normalises the last dimensions to mean 0 and variance 1, then scales and shifts.
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct LayerNorm {
    /// Scale in the normalised shape; initially 1.
    pub weight: Tensor,
    /// Shift in the normalised shape; initially 0.
    pub bias: Option<Tensor>,
    /// Term added to the variance; 1e-5.
    pub eps: f64,
    scope: ModuleScope,
}

impl LayerNorm {
    /// Creates a layer over the last dimensions, which have these extents.
    #[track_caller]
    pub fn new(shape: impl IntoShape, device: &Device) -> Result<Self> {
        let shape = shape.to_extents();
        let weight = create_ones_parameter(&shape, device)?;
        let bias = Some(create_zeros_parameter(&shape, device)?);
        Ok(Self { weight, bias, eps: 1e-5, scope: ModuleScope::new() })
    }

    setters! {
        /// Sets the term added to the variance.
        fn eps(eps: f64) { eps }
        /// Removes the shift: PyTorch's `bias=False`. A layer without a scale too has no weights: use
        /// [`Tensor::layer_norm`].
        fn without_bias() { bias: None }
    }

    fn options(&self) -> NormOptions<'_> {
        NormOptions { weight: Some(&self.weight), bias: self.bias.as_ref(), eps: self.eps }
    }

    fn extra_repr(&self) -> String {
        let text = OptionsText::default().value(tuple(self.weight.shape()));
        text.set("eps", format_args!("{:?}", self.eps)).set("bias", flag(self.bias.is_some())).finish()
    }

    /// Normalises `x`, whose last dimensions are the layer's.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.layer_norm(self.weight.shape(), &self.options()))
    }

    /// Adds a block's output `x` to the `residual` stream and normalises the sum in one pass. Returns the sum
    /// and the normalised sum; see [`Tensor::add_layer_norm`].
    #[track_caller]
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| x.add_layer_norm(residual, self.weight.shape(), &self.options()))
    }

    /// Computes [`forward_add`](Self::forward_add) for a normalised sum that only matrix products consume, as
    /// in pre-norm blocks (`norm_first`). Under [`autocast`](forebay_core::amp::autocast), the normalised sum is
    /// written in the 16-bit dtype to which the products would cast it. The sum keeps its dtype.
    #[track_caller]
    pub fn forward_add_low_precision(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope
            .run(|| x.add_layer_norm_low_precision(residual, &self.weight, self.bias.as_ref(), self.eps))
    }
}

/// RMS normalisation: divides the last dimensions by the root of their mean square, then scales.
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct RmsNorm {
    /// Scale in the normalised shape; initially 1.
    pub weight: Tensor,
    /// Term added to the mean square; the dtype's epsilon if `None`, as in PyTorch.
    pub eps: Option<f64>,
    scope: ModuleScope,
}

impl RmsNorm {
    /// Creates a layer over the last dimensions, which have these extents.
    #[track_caller]
    pub fn new(shape: impl IntoShape, device: &Device) -> Result<Self> {
        Ok(Self { weight: create_ones_parameter(shape, device)?, eps: None, scope: ModuleScope::new() })
    }

    setters! {
        /// Sets the term added to the mean square.
        fn eps(eps: f64) { eps: Some(eps) }
    }

    fn extra_repr(&self) -> String {
        let eps = self.eps.map_or_else(|| "None".to_owned(), |eps| format!("{eps:?}"));
        OptionsText::default().value(tuple(self.weight.shape())).set("eps", eps).finish()
    }

    /// Normalises `x`, whose last dimensions are the layer's.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.rms_norm(self.weight.shape(), Some(&self.weight), self.eps))
    }

    /// Adds a block's output `x` to the `residual` stream and normalises the sum in one pass. Returns the sum
    /// and the normalised sum; see [`Tensor::add_rms_norm`].
    #[track_caller]
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| x.add_rms_norm(residual, self.weight.shape(), Some(&self.weight), self.eps))
    }

    /// Computes [`forward_add`](Self::forward_add) for a normalised sum that only matrix products consume:
    /// see [`LayerNorm::forward_add_low_precision`].
    #[track_caller]
    pub fn forward_add_low_precision(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| x.add_rms_norm_low_precision(residual, &self.weight, self.eps))
    }
}

/// Normalises groups of channels of \[batch, channels, ...\], then scales and shifts each channel.
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct GroupNorm {
    /// Number of groups of channels.
    pub groups: usize,
    /// Scale, \[channels\]; initially 1.
    pub weight: Tensor,
    /// Shift, \[channels\]; initially 0.
    pub bias: Tensor,
    /// Term added to the variance; 1e-5.
    pub eps: f64,
    scope: ModuleScope,
}

impl GroupNorm {
    /// Creates a layer of `channels` channels in `groups` groups, which divide them.
    #[track_caller]
    pub fn new(groups: usize, channels: usize, device: &Device) -> Result<Self> {
        fail_if!(groups == 0 || !channels.is_multiple_of(groups);
            argument("GroupNorm"), "{channels} channels do not divide by {groups}");
        let (weight, bias) =
            (create_ones_parameter([channels], device)?, create_zeros_parameter([channels], device)?);
        Ok(Self { groups, weight, bias, eps: 1e-5, scope: ModuleScope::new() })
    }

    setters! {
        /// Sets the term added to the variance.
        fn eps(eps: f64) { eps }
    }

    fn options(&self) -> NormOptions<'_> {
        NormOptions { weight: Some(&self.weight), bias: Some(&self.bias), eps: self.eps }
    }

    fn extra_repr(&self) -> String {
        let text = OptionsText::default().value(self.groups).value(self.weight.numel());
        text.set("eps", format_args!("{:?}", self.eps)).finish()
    }

    /// Normalises `x`, which has the layer's number of channels.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.group_norm(self.groups, &self.options()))
    }

    /// Normalises `x` and applies SiLU in one pass: see [`Tensor::group_norm_silu`].
    #[track_caller]
    pub fn forward_silu(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.group_norm_silu(self.groups, &self.options()))
    }
}

/// Shared implementation of the batch and instance norms. The layers expose its fields as their own, so names
/// match PyTorch's.
#[derive(Module)]
#[module(extra_repr)]
struct ChannelNorm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    // An i32, because every device supports i32 arithmetic; PyTorch's i64 counters load too.
    num_batches_tracked: Option<Tensor>,
    channels: usize,
    momentum: f64,
    eps: f64,
    training: TrainingMode,
    scope: ModuleScope,
}

impl ChannelNorm {
    /// Creates a norm without parameters and running statistics.
    fn new(channels: usize) -> Self {
        Self {
            weight: None,
            bias: None,
            running_mean: None,
            running_var: None,
            num_batches_tracked: None,
            channels,
            momentum: 0.1,
            eps: 1e-5,
            training: TrainingMode::new(),
            scope: ModuleScope::new(),
        }
    }

    #[track_caller]
    fn add_affine(&mut self, device: &Device) -> Result<()> {
        self.weight = Some(create_ones_parameter([self.channels], device)?);
        self.bias = Some(create_zeros_parameter([self.channels], device)?);
        Ok(())
    }

    #[track_caller]
    fn add_running_stats(&mut self, device: &Device) -> Result<()> {
        let shape = [self.channels];
        self.running_mean = Some(init::create_buffer(|| Tensor::full(shape, 0.0, DType::F32, device))?);
        self.running_var = Some(init::create_buffer(|| Tensor::full(shape, 1.0, DType::F32, device))?);
        self.num_batches_tracked = Some(init::create_buffer(|| Tensor::zeros((), DType::I32, device))?);
        Ok(())
    }

    fn extra_repr(&self) -> String {
        let text = OptionsText::default().value(self.channels).set("eps", format_args!("{:?}", self.eps));
        text.set("momentum", self.momentum)
            .set("affine", flag(self.weight.is_some()))
            .set("track_running_stats", flag(self.running_mean.is_some()))
            .finish()
    }

    /// Normalises `x` by one of the batch norms of [`Tensor`], and counts the batch.
    #[track_caller]
    fn batch_norm(
        &self,
        x: &Tensor,
        normalize: fn(&Tensor, &BatchNormOptions<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.scope.run(|| {
            let running = self.running_mean.as_ref().zip(self.running_var.as_ref());
            let training = self.training.is_on() || running.is_none();
            let options = BatchNormOptions {
                running,
                weight: self.weight.as_ref(),
                bias: self.bias.as_ref(),
                training,
                num_batches_tracked: self.num_batches_tracked.as_ref(),
                momentum: self.momentum,
                eps: self.eps,
            };
            normalize(x, &options)
        })
    }

    #[track_caller]
    fn instance_norm(&self, name: &'static str, x: &Tensor, rank: usize) -> Result<Tensor> {
        self.scope.run(|| {
            let unbatched = x.rank() + 1 == rank;
            let channels = x.shape().get(usize::from(!unbatched)).copied();
            fail_if!(
                !(unbatched || x.rank() == rank) || channels != Some(self.channels);
                shape(name, [x]), "takes {} channels, with {} dimensions after them", self.channels, rank - 2
            );
            let x = if unbatched { x.unsqueeze(0)? } else { x.clone() };
            let training = self.training.is_on();
            let running = self.running_mean.as_ref().zip(self.running_var.as_ref());
            let space: usize = x.shape()[2..].iter().product();
            let own = training || running.is_none();
            fail_if!(own && space == 1; shape(name, [x]), "an instance of one element has no deviation");
            let out = x.instance_norm(&InstanceNormOptions {
                running,
                weight: self.weight.as_ref(),
                bias: self.bias.as_ref(),
                use_input_stats: own,
                momentum: self.momentum,
                eps: self.eps,
            })?;
            if unbatched { out.squeeze(0) } else { Ok(out) }
        })
    }
}

/// Implements the setters and the traits of a layer that wraps a [`ChannelNorm`].
macro_rules! impl_channel_norm {
    ($name:ident) => {
        impl $name {
            setters! {
                /// Sets the weight of the batch's statistics in the update of the running statistics.
                fn momentum(momentum: f64) { 0.momentum: momentum }
                /// Sets the term added to the variance.
                fn eps(eps: f64) { 0.eps: eps }
            }
        }
        delegate_module!($name);
        impl_forward!($name);
    };
}

macro_rules! batch_norm {
    ($($(#[$doc:meta])* $name:ident $ranks:pat, $takes:literal;)*) => {$(
        $(#[$doc])*
        /// In training, uses the statistics of the batch and updates the running ones, which evaluation uses.
        pub struct $name(ChannelNorm);

        impl $name {
            /// Creates a layer with weight 1, bias 0, momentum 0.1 and eps 1e-5.
            #[track_caller]
            pub fn new(channels: usize, device: &Device) -> Result<Self> {
                let mut norm = ChannelNorm::new(channels);
                norm.add_affine(device)?;
                norm.add_running_stats(device)?;
                Ok(Self(norm))
            }

            setters! {
                /// Removes scale and shift: PyTorch's `affine=False`.
                fn without_affine() { 0.weight: None, 0.bias: None }
                /// Uses the statistics of the batch in evaluation too: PyTorch's `track_running_stats=False`.
                fn without_running_stats() { 0.running_mean: None, 0.running_var: None, 0.num_batches_tracked: None }
            }

            /// Normalises `x`, which has the layer's number of channels. In training, each channel has several
            /// elements.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                Self::check(x)?;
                self.0.batch_norm(x, |x, options| x.batch_norm(options))
            }

            /// Normalises `x` and applies a ReLU in one pass: see [`Tensor::batch_norm_relu`].
            #[track_caller]
            pub fn forward_relu(&self, x: &Tensor) -> Result<Tensor> {
                Self::check(x)?;
                self.0.batch_norm(x, |x, options| x.batch_norm_relu(options))
            }

            /// Normalises `x` and applies SiLU in one pass: see [`Tensor::batch_norm_silu`].
            #[track_caller]
            pub fn forward_silu(&self, x: &Tensor) -> Result<Tensor> {
                Self::check(x)?;
                self.0.batch_norm(x, |x, options| x.batch_norm_silu(options))
            }

            #[track_caller]
            fn check(x: &Tensor) -> Result<()> {
                fail_if!(!matches!(x.rank(), $ranks); shape(stringify!($name), [x]), concat!("takes ", $takes));
                Ok(())
            }
        }

        impl_channel_norm!($name);
    )*};
}
batch_norm! {
    /// Normalises each channel of \[batch, channels\] or \[batch, channels, length\], then scales and shifts
    /// the channel.
    BatchNorm1d 2 | 3, "[batch, channels] or [batch, channels, length]";
    /// Normalises each channel of \[batch, channels, height, width\], then scales and shifts the channel.
    BatchNorm2d 4, "[batch, channels, height, width]";
    /// Normalises each channel of \[batch, channels, depth, height, width\], then scales and shifts the channel.
    BatchNorm3d 5, "[batch, channels, depth, height, width]";
}

macro_rules! instance_norm {
    ($($(#[$doc:meta])* $name:ident $rank:literal;)*) => {$(
        $(#[$doc])*
        /// By default, has neither parameters nor running statistics, as in PyTorch.
        pub struct $name(ChannelNorm);

        impl $name {
            /// Creates a layer with momentum 0.1 and eps 1e-5.
            #[must_use]
            pub fn new(channels: usize) -> Self {
                Self(ChannelNorm::new(channels))
            }

            /// Adds a scale (initially 1) and a shift (initially 0) for each channel: PyTorch's `affine`.
            #[track_caller]
            pub fn affine(mut self, device: &Device) -> Result<Self> {
                self.0.add_affine(device)?;
                Ok(self)
            }

            /// Updates running statistics in training and uses them in evaluation.
            #[track_caller]
            pub fn track_running_stats(mut self, device: &Device) -> Result<Self> {
                // PyTorch has the counter of batches too, but never increments it.
                self.0.add_running_stats(device)?;
                Ok(self)
            }

            /// Normalises `x`, with or without a batch. Each instance has several elements.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.0.instance_norm(stringify!($name), x, $rank)
            }
        }

        impl_channel_norm!($name);
    )*};
}
instance_norm! {
    /// Normalises each channel of each entry of \[batch, channels, length\].
    InstanceNorm1d 3;
    /// Normalises each channel of each entry of \[batch, channels, height, width\].
    InstanceNorm2d 4;
    /// Normalises each channel of each entry of \[batch, channels, depth, height, width\].
    InstanceNorm3d 5;
}

/// Local response normalisation over neighbouring channels:
/// [`local_response_norm`](Tensor::local_response_norm).
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct LocalResponseNorm {
    /// Number of channels.
    pub size: usize,
    /// Factor of the mean square; 1e-4.
    pub alpha: f64,
    /// Exponent; 0.75.
    pub beta: f64,
    /// Term added to the mean square; 1.
    pub k: f64,
}

impl LocalResponseNorm {
    /// Creates a layer whose sums are over `size` neighbouring channels.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self { size, alpha: 1e-4, beta: 0.75, k: 1.0 }
    }

    /// Normalises `x`, \[batch, channels, ..\]: see [`Tensor::local_response_norm`].
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let &Self { size, alpha, beta, k } = self;
        x.local_response_norm(size, &LocalResponseNormOptions { alpha, beta, k })
    }
}
