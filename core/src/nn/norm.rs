//! Normalisation layers.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Module, ModuleScope, init};
use crate::autograd;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

#[track_caller]
fn ones(shape: &[usize], device: &Device) -> Result<Tensor> {
    init::parameter(|| Tensor::ones(shape, DType::F32, device))
}

#[track_caller]
fn zeros(shape: &[usize], device: &Device) -> Result<Tensor> {
    init::parameter(|| Tensor::zeros(shape, DType::F32, device))
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
        let (weight, bias) = (ones(shape, device)?, Some(zeros(shape, device)?));
        Ok(Self { weight, bias, eps: 1e-5, scope: ModuleScope::new() })
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
        Ok(Self { weight: ones(shape, device)?, eps: None, scope: ModuleScope::new() })
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
        let (weight, bias) = (ones(&[channels], device)?, zeros(&[channels], device)?);
        Ok(Self { groups, weight, bias, eps: 1e-5, scope: ModuleScope::new() })
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

/// What the batch norms of one and two dimensions are made of. Its fields are the layer's, so names stay PyTorch's.
#[derive(Debug, Module)]
#[module(crate = crate)]
struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    // An i32, which every device counts in; files with PyTorch's i64 load.
    num_batches_tracked: Tensor,
    momentum: f64,
    eps: f64,
    training: AtomicBool,
    scope: ModuleScope,
}

impl BatchNorm {
    fn new(channels: usize, device: &Device) -> Result<Self> {
        let buffer = |value| init::buffer(|| Tensor::full(&[channels], value, DType::F32, device));
        Ok(Self {
            weight: ones(&[channels], device)?,
            bias: zeros(&[channels], device)?,
            running_mean: buffer(0.0)?,
            running_var: buffer(1.0)?,
            num_batches_tracked: init::buffer(|| Tensor::zeros(&[], DType::I32, device))?,
            momentum: 0.1,
            eps: 1e-5,
            training: AtomicBool::new(true),
            scope: ModuleScope::new(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            let training = self.training.load(Ordering::Relaxed);
            let running = Some((&self.running_mean, &self.running_var));
            let (weight, bias) = (Some(&self.weight), Some(&self.bias));
            let out = x.batch_norm(running, weight, bias, training, self.momentum, self.eps)?;
            if training {
                let _no_grad = autograd::no_grad();
                self.num_batches_tracked.add_(1)?;
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

            /// Normalises `x`.
            ///
            /// # Errors
            /// The channels of `x` are not the layer's; a channel has one element, in training; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                if !matches!(x.rank(), $ranks) {
                    return Err(Error::shape(stringify!($name), concat!("takes ", $takes), &[x.shape()]));
                }
                self.0.forward(x)
            }
        }

        impl Module for $name {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, super::Slot<'_>)) {
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
