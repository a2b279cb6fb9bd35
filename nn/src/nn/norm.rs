//! Normalisation layers.

use std::sync::atomic::AtomicBool;

use super::{Module, ModuleScope, init};
use forebay_core::autograd;
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

#[track_caller]
fn create_ones_parameter(shape: &[usize], device: &Device) -> Result<Tensor> {
    init::create_parameter(|| Tensor::ones(shape, DType::F32, device))
}

#[track_caller]
fn create_zeros_parameter(shape: &[usize], device: &Device) -> Result<Tensor> {
    init::create_parameter(|| Tensor::zeros(shape, DType::F32, device))
}

/// Normalises the last dimensions to mean 0 and variance 1, then scales and shifts.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct LayerNorm {
    /// In the shape that is normalised; 1 at first.
    pub weight: Tensor,
    /// In the same shape; 0 at first.
    pub bias: Option<Tensor>,
    /// Added to the variance; 1e-5 at first.
    pub eps: f64,
    scope: ModuleScope,
}

impl LayerNorm {
    /// Over the last dimensions, which have these extents.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn new(shape: &[usize], device: &Device) -> Result<Self> {
        let (weight, bias) =
            (create_ones_parameter(shape, device)?, Some(create_zeros_parameter(shape, device)?));
        Ok(Self { weight, bias, eps: 1e-5, scope: ModuleScope::new() })
    }

    /// Added to the variance.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Without a shift: PyTorch's `bias=False`. (Without a scale either it has no weights, and is [`Tensor::layer_norm`].)
    #[must_use]
    pub fn without_bias(mut self) -> Self {
        self.bias = None;
        self
    }

    /// Normalises `x`.
    ///
    /// # Errors
    /// The last dimensions of `x` are not the layer's; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.layer_norm(self.weight.shape(), Some(&self.weight), self.bias.as_ref(), self.eps))
    }

    /// The sum of a block's output `x` and the `residual` stream, and that sum normalised, in one pass: see
    /// [`Tensor::add_layer_norm`].
    ///
    /// # Errors
    /// As [`forward`](Self::forward); `x` and `residual` have different shapes.
    #[track_caller]
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        let (shape, weight) = (self.weight.shape(), Some(&self.weight));
        self.scope.run(|| x.add_layer_norm(residual, shape, weight, self.bias.as_ref(), self.eps))
    }

    /// [`forward_add`](Self::forward_add) where only products take what is normalised, as in blocks that normalise their input
    /// (`norm_first`): under [`autocast`](forebay_core::amp::autocast) it is written in the 16-bit type that these would cast it to. The sum,
    /// which is the residual stream, keeps its type.
    ///
    /// # Errors
    /// Those of [`forward_add`](Self::forward_add).
    #[track_caller]
    pub fn forward_add_low_precision(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope
            .run(|| x.add_layer_norm_low_precision(residual, &self.weight, self.bias.as_ref(), self.eps))
    }
}

/// Divides the last dimensions by the root of their mean of squares, then scales.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct RmsNorm {
    /// In the shape that is normalised; 1 at first.
    pub weight: Tensor,
    /// Added to the mean of squares; the type's epsilon if `None`, as in PyTorch.
    pub eps: Option<f64>,
    scope: ModuleScope,
}

impl RmsNorm {
    /// Over the last dimensions, which have these extents.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn new(shape: &[usize], device: &Device) -> Result<Self> {
        Ok(Self { weight: create_ones_parameter(shape, device)?, eps: None, scope: ModuleScope::new() })
    }

    /// Added to the mean of squares.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = Some(eps);
        self
    }

    /// Normalises `x`.
    ///
    /// # Errors
    /// The last dimensions of `x` are not the layer's; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.rms_norm(self.weight.shape(), Some(&self.weight), self.eps))
    }

    /// The sum of a block's output `x` and the `residual` stream, and that sum normalised, in one pass: see
    /// [`Tensor::add_rms_norm`].
    ///
    /// # Errors
    /// As [`forward`](Self::forward); `x` and `residual` have different shapes.
    #[track_caller]
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| x.add_rms_norm(residual, self.weight.shape(), Some(&self.weight), self.eps))
    }

    /// [`forward_add`](Self::forward_add) where only products take what is normalised: see [`LayerNorm::forward_add_low_precision`].
    ///
    /// # Errors
    /// Those of [`forward_add`](Self::forward_add).
    #[track_caller]
    pub fn forward_add_low_precision(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| x.add_rms_norm_low_precision(residual, &self.weight, self.eps))
    }
}

/// Normalises groups of channels of \[batch, channels, ...\], then scales and shifts each channel.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct GroupNorm {
    /// How many groups the channels are in.
    pub groups: usize,
    /// \[channels\]; 1 at first.
    pub weight: Tensor,
    /// \[channels\]; 0 at first.
    pub bias: Tensor,
    /// Added to the variance; 1e-5 at first.
    pub eps: f64,
    scope: ModuleScope,
}

impl GroupNorm {
    /// `channels` in `groups`.
    ///
    /// # Errors
    /// The channels do not divide into the groups; memory runs out.
    #[track_caller]
    pub fn new(groups: usize, channels: usize, device: &Device) -> Result<Self> {
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Err(Error::argument(
                "GroupNorm",
                format!("{channels} channels do not divide by {groups}"),
            ));
        }
        let (weight, bias) =
            (create_ones_parameter(&[channels], device)?, create_zeros_parameter(&[channels], device)?);
        Ok(Self { groups, weight, bias, eps: 1e-5, scope: ModuleScope::new() })
    }

    /// Added to the variance.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Normalises `x`.
    ///
    /// # Errors
    /// The channels of `x` are not the layer's; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.group_norm(self.groups, Some(&self.weight), Some(&self.bias), self.eps))
    }
}

/// What the batch norms are made of. Its fields are the layer's, so names stay PyTorch's.
#[derive(Debug, Module)]
#[module(crate = crate)]
struct BatchNorm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    // An i32, which every device counts in; files with PyTorch's i64 load.
    num_batches_tracked: Option<Tensor>,
    momentum: f64,
    eps: f64,
    training: AtomicBool,
    scope: ModuleScope,
}

impl BatchNorm {
    fn new(channels: usize, device: &Device) -> Result<Self> {
        let buffer = |value| init::create_buffer(|| Tensor::full(&[channels], value, DType::F32, device));
        Ok(Self {
            weight: Some(create_ones_parameter(&[channels], device)?),
            bias: Some(create_zeros_parameter(&[channels], device)?),
            running_mean: Some(buffer(0.0)?),
            running_var: Some(buffer(1.0)?),
            num_batches_tracked: Some(init::create_buffer(|| Tensor::zeros(&[], DType::I32, device))?),
            momentum: 0.1,
            eps: 1e-5,
            training: AtomicBool::new(true),
            scope: ModuleScope::new(),
        })
    }

    fn forward(&self, x: &Tensor, relu: bool) -> Result<Tensor> {
        self.scope.run(|| {
            let running = self.running_mean.as_ref().zip(self.running_var.as_ref());
            let training = super::is_training(&self.training) || running.is_none();
            let (weight, bias) = (self.weight.as_ref(), self.bias.as_ref());
            let out = match relu {
                true => x.batch_norm_relu(running, weight, bias, training, self.momentum, self.eps)?,
                false => x.batch_norm(running, weight, bias, training, self.momentum, self.eps)?,
            };
            if training && let Some(count) = &self.num_batches_tracked {
                autograd::update_state(|| count.add_(1))?;
            }
            Ok(out)
        })
    }
}

macro_rules! batch_norm {
    ($(#[$doc:meta])* $name:ident, $ranks:pat, $takes:literal) => {
        $(#[$doc])*
        ///
        /// In training by the statistics of the batch, which running ones follow; in evaluation by the running ones.
        #[derive(Debug)]
        pub struct $name(BatchNorm);

        impl $name {
            /// Weight 1, bias 0, momentum 0.1, eps 1e-5.
            ///
            /// # Errors
            /// Memory runs out.
            #[track_caller]
            pub fn new(channels: usize, device: &Device) -> Result<Self> {
                Ok(Self(BatchNorm::new(channels, device)?))
            }

            /// How far the running statistics go towards the batch's.
            #[must_use]
            pub fn momentum(mut self, momentum: f64) -> Self {
                self.0.momentum = momentum;
                self
            }

            /// Added to the variance.
            #[must_use]
            pub fn eps(mut self, eps: f64) -> Self {
                self.0.eps = eps;
                self
            }

            /// Without a scale and a shift: PyTorch's `affine=False`.
            #[must_use]
            pub fn without_affine(mut self) -> Self {
                (self.0.weight, self.0.bias) = (None, None);
                self
            }

            /// By the statistics of the batch in evaluation too: PyTorch's `track_running_stats=False`.
            #[must_use]
            pub fn without_running_stats(mut self) -> Self {
                (self.0.running_mean, self.0.running_var, self.0.num_batches_tracked) = (None, None, None);
                self
            }

            /// Normalises `x`.
            ///
            /// # Errors
            /// The channels of `x` are not the layer's; a channel has one element, in training; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                Self::check(x)?;
                self.0.forward(x, false)
            }

            /// Normalises `x`, and puts 0 for what is below it, in one pass: see [`Tensor::batch_norm_relu`].
            ///
            /// # Errors
            /// As [`forward`](Self::forward).
            #[track_caller]
            pub fn forward_relu(&self, x: &Tensor) -> Result<Tensor> {
                Self::check(x)?;
                self.0.forward(x, true)
            }

            fn check(x: &Tensor) -> Result<()> {
                match x.rank() {
                    $ranks => Ok(()),
                    _ => Err(Error::shape(stringify!($name), concat!("takes ", $takes), &[x.shape()])),
                }
            }
        }

        impl Module for $name {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, super::ModuleEntry<'_>)) {
                self.0.visit(path, f);
            }
        }
    };
}
batch_norm!(
    /// Normalises each channel of \[batch, channels\] or \[batch, channels, length\], then scales and shifts it.
    BatchNorm1d,
    2 | 3,
    "[batch, channels] or [batch, channels, length]"
);
batch_norm!(
    /// Normalises each channel of \[batch, channels, height, width\], then scales and shifts it.
    BatchNorm2d,
    4,
    "[batch, channels, height, width]"
);
batch_norm!(
    /// Normalises each channel of \[batch, channels, depth, height, width\], then scales and shifts it.
    BatchNorm3d,
    5,
    "[batch, channels, depth, height, width]"
);

/// What the instance norms are made of. Its fields are the layer's, so names stay PyTorch's.
#[derive(Debug, Module)]
#[module(crate = crate)]
struct InstanceNorm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Option<Tensor>,
    running_var: Option<Tensor>,
    num_batches_tracked: Option<Tensor>,
    channels: usize,
    momentum: f64,
    eps: f64,
    training: AtomicBool,
    scope: ModuleScope,
}

impl InstanceNorm {
    fn forward(&self, name: &'static str, x: &Tensor, rank: usize) -> Result<Tensor> {
        self.scope.run(|| {
            let unbatched = x.rank() + 1 == rank;
            let channels = x.shape().get(usize::from(!unbatched)).copied();
            if !(unbatched || x.rank() == rank) || channels != Some(self.channels) {
                let rule =
                    format!("takes {} channels, with {} dimensions behind them", self.channels, rank - 2);
                return Err(Error::shape(name, rule, &[x.shape()]));
            }
            let x = if unbatched { x.unsqueeze(0)? } else { x.clone() };
            let training = super::is_training(&self.training);
            let running = self.running_mean.as_ref().zip(self.running_var.as_ref());
            let space: usize = x.shape()[2..].iter().product();
            let own = training || running.is_none();
            if own && space == 1 {
                return Err(Error::shape(name, "an instance of one element has no deviation", &[x.shape()]));
            }
            let (weight, bias) = (self.weight.as_ref(), self.bias.as_ref());
            let out = x.instance_norm(running, weight, bias, own, self.momentum, self.eps)?;
            if unbatched { out.squeeze(0) } else { Ok(out) }
        })
    }
}

macro_rules! instance_norm {
    ($($(#[$doc:meta])* $name:ident $rank:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// Without parameters and running statistics at first, as PyTorch.
        #[derive(Debug)]
        pub struct $name(InstanceNorm);

        impl $name {
            /// momentum 0.1, eps 1e-5.
            #[must_use]
            pub fn new(channels: usize) -> Self {
                Self(InstanceNorm {
                    weight: None,
                    bias: None,
                    running_mean: None,
                    running_var: None,
                    num_batches_tracked: None,
                    channels,
                    momentum: 0.1,
                    eps: 1e-5,
                    training: AtomicBool::new(true),
                    scope: ModuleScope::new(),
                })
            }

            /// Then scales each channel, by 1 at first, and shifts it, by 0 at first: PyTorch's `affine`.
            ///
            /// # Errors
            /// Memory runs out.
            #[track_caller]
            pub fn affine(mut self, device: &Device) -> Result<Self> {
                self.0.weight = Some(create_ones_parameter(&[self.0.channels], device)?);
                self.0.bias = Some(create_zeros_parameter(&[self.0.channels], device)?);
                Ok(self)
            }

            /// Running statistics follow the batches in training, and are used in evaluation.
            ///
            /// # Errors
            /// Memory runs out.
            #[track_caller]
            pub fn track_running_stats(mut self, device: &Device) -> Result<Self> {
                let buffer = |value| init::create_buffer(|| Tensor::full(&[self.0.channels], value, DType::F32, device));
                (self.0.running_mean, self.0.running_var) = (Some(buffer(0.0)?), Some(buffer(1.0)?));
                // PyTorch has it too, and does not count in it.
                self.0.num_batches_tracked = Some(init::create_buffer(|| Tensor::zeros(&[], DType::I32, device))?);
                Ok(self)
            }

            /// How far the running statistics go towards the batch's.
            #[must_use]
            pub fn momentum(mut self, momentum: f64) -> Self {
                self.0.momentum = momentum;
                self
            }

            /// Added to the variance.
            #[must_use]
            pub fn eps(mut self, eps: f64) -> Self {
                self.0.eps = eps;
                self
            }

            /// Normalises `x`, with or without a batch.
            ///
            /// # Errors
            /// The channels of `x` are not the layer's; an instance has one element; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.0.forward(stringify!($name), x, $rank)
            }
        }

        impl Module for $name {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, super::ModuleEntry<'_>)) {
                self.0.visit(path, f);
            }
        }
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

/// Divides each element by a power of the squares of the channels around it: [`local_response_norm`](Tensor::local_response_norm).
#[derive(Clone, Copy, Debug, PartialEq, Module)]
#[module(crate = crate)]
pub struct LocalResponseNorm {
    /// So many channels.
    pub size: usize,
    /// The factor of the mean of squares; 1e-4.
    pub alpha: f64,
    /// The power; 0.75.
    pub beta: f64,
    /// What is added to the mean; 1.
    pub k: f64,
}

impl LocalResponseNorm {
    /// Over `size` channels.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self { size, alpha: 1e-4, beta: 0.75, k: 1.0 }
    }

    /// Normalises `x`.
    ///
    /// # Errors
    /// As [`local_response_norm`](Tensor::local_response_norm).
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.local_response_norm(self.size, self.alpha, self.beta, self.k)
    }
}
