//! Layers in a row.

use std::fmt;

use super::*;
use crate::error::Result;
use crate::tensor::Tensor;

/// A module of one tensor in and one out.
pub trait Forward {
    /// What the module makes of `x`.
    ///
    /// # Errors
    /// The shape or dtype is not the module's; memory runs out.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

macro_rules! forward {
    ($($layer:ty),* $(,)?) => {$(
        impl Forward for $layer {
            fn forward(&self, x: &Tensor) -> Result<Tensor> { <$layer>::forward(self, x) }
        }
    )*};
}
forward!(
    // With weights.
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    Linear,
    Prelu,
    RmsNorm,
    SelfAttention,
    Sequential,
    // Activations.
    Celu,
    Elu,
    Gelu,
    GeluTanh,
    Glu,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyRelu,
    LogSigmoid,
    LogSoftmax,
    Mish,
    Relu,
    Relu6,
    Rrelu,
    Selu,
    Sigmoid,
    Silu,
    Softmax,
    Softmax2d,
    Softmin,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
    // Dropout and norms without weights.
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
    LocalResponseNorm,
    // Pooling.
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    LpPool1d,
    LpPool2d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    // Places.
    ChannelShuffle,
    CircularPad1d,
    CircularPad2d,
    CircularPad3d,
    ConstantPad1d,
    ConstantPad2d,
    ConstantPad3d,
    Flatten,
    Fold,
    Identity,
    PixelShuffle,
    PixelUnshuffle,
    ReflectionPad1d,
    ReflectionPad2d,
    ReflectionPad3d,
    ReplicationPad1d,
    ReplicationPad2d,
    ReplicationPad3d,
    RotaryEmbedding,
    SinusoidalEmbedding,
    Unflatten,
    Unfold,
    Upsample,
    ZeroPad1d,
    ZeroPad2d,
    ZeroPad3d,
);

/// What a [`Sequential`] holds.
pub trait Layer: Module + Forward + Send + Sync {}

impl<T: Module + Forward + Send + Sync> Layer for T {}

/// A function as a layer without parameters.
pub struct Apply<F>(pub F);

impl<F> fmt::Debug for Apply<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Apply(..)")
    }
}

impl<F> Module for Apply<F> {
    fn visit(&self, _path: &str, _f: &mut dyn FnMut(&str, Slot<'_>)) {}
}

impl<F: Fn(&Tensor) -> Result<Tensor>> Forward for Apply<F> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.0)(x)
    }
}

/// Layers that feed one another, named by their numbers.
///
/// ```
/// # use forebay_core::{device::Device, nn::{Linear, Module, Sequential}, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let net = Sequential::new()
///     .add(Linear::new(784, 64, &device)?)
///     .apply(Tensor::relu)
///     .add(Linear::new(64, 10, &device)?);
/// assert!(net.state_dict().contains_key("2.weight"));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Layer>>,
}

impl Sequential {
    /// No layers yet: the identity.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One more layer.
    #[must_use]
    #[expect(clippy::should_implement_trait, reason = "a builder; nobody sums layers")]
    pub fn add(mut self, layer: impl Layer + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// One more step without parameters.
    #[must_use]
    #[track_caller]
    pub fn apply(self, step: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.add(Apply(step))
    }

    /// How many layers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Through all layers.
    ///
    /// # Errors
    /// What a layer returns.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }
}

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequential({} layers)", self.layers.len())
    }
}

impl Module for Sequential {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, Slot<'_>)) {
        for (k, layer) in self.layers.iter().enumerate() {
            layer.visit(&join(path, &k.to_string()), f);
        }
    }
}
