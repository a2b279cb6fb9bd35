//! Activation functions as layers: what `Sequential::apply` does with a method of a tensor, with PyTorch's names and defaults.

use super::{Module, init};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// A layer without parameters from a method of a tensor: its fields are the method's numbers, and PyTorch's defaults.
macro_rules! activation_layers {
    ($($(#[$doc:meta])* $layer:ident($op:ident $(, $field:ident: $ty:ty = $default:expr)*);)*) => {$(
        $(#[$doc])*
        #[doc = concat!("[`", stringify!($op), "`](Tensor::", stringify!($op), ") as a layer.")]
        #[derive(Clone, Copy, Debug, PartialEq, Module)]
        #[module(crate = crate)]
        pub struct $layer {
            $(
                #[doc = concat!("As there; ", stringify!($default), ".")]
                pub $field: $ty,
            )*
        }

        impl Default for $layer {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }

        impl $layer {
            /// Each element of `x`, or each vector along the dimension.
            ///
            /// # Errors
            /// The dtype is not taken; the dimension is out of range; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$op($(self.$field),*)
            }
        }
    )*};
}

activation_layers! {
    /// max(x, 0):
    Relu(relu);
    /// min(max(x, 0), 6):
    Relu6(relu6);
    /// x above 0, a small slope below:
    LeakyRelu(leaky_relu, negative_slope: f64 = 0.01);
    /// x above 0, α (eˣ - 1) below:
    Elu(elu, alpha: f64 = 1.0);
    /// max(0, x) + min(0, α (e^(x/α) - 1)):
    Celu(celu, alpha: f64 = 1.0);
    /// The self-normalising elu:
    Selu(selu);
    /// x Φ(x), by erf:
    Gelu(gelu);
    /// x Φ(x) in the form of tanh, PyTorch's `GELU(approximate="tanh")`:
    GeluTanh(gelu_tanh);
    /// x sigmoid(x):
    Silu(silu);
    /// x tanh(softplus(x)):
    Mish(mish);
    /// 1 / (1 + e⁻ˣ):
    Sigmoid(sigmoid);
    /// ln(sigmoid(x)):
    LogSigmoid(logsigmoid);
    /// ln(1 + e^(βx)) / β:
    Softplus(softplus, beta: f64 = 1.0, threshold: f64 = 20.0);
    /// x / (1 + |x|):
    Softsign(softsign);
    /// x moved towards 0:
    Softshrink(softshrink, lambda: f64 = 0.5);
    /// 0 near 0, else x:
    Hardshrink(hardshrink, lambda: f64 = 0.5);
    /// x - tanh(x):
    Tanhshrink(tanhshrink);
    /// The hyperbolic tangent:
    Tanh(tanh);
    /// x held between two numbers:
    Hardtanh(hardtanh, min_val: f64 = -1.0, max_val: f64 = 1.0);
    /// min(max(x/6 + 1/2, 0), 1):
    Hardsigmoid(hardsigmoid);
    /// x hardsigmoid(x):
    Hardswish(hardswish);
    /// Half of a dimension times the sigmoid of the other:
    Glu(glu, dim: isize = -1);
    /// x above the threshold, else a value; PyTorch has no defaults:
    Threshold(threshold, threshold: f64 = 0.0, value: f64 = 0.0);
    /// Probabilities along a dimension; PyTorch asks for it:
    Softmax(softmax, dim: isize = -1);
    /// Their logarithms:
    LogSoftmax(log_softmax, dim: isize = -1);
    /// Probabilities of the smallest elements, softmax(-x):
    Softmin(softmin, dim: isize = -1);
}

/// Probabilities over the channels of \[batch, channels, height, width\], or without the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Module)]
#[module(crate = crate)]
pub struct Softmax2d;

impl Softmax2d {
    /// Each place of `x`.
    ///
    /// # Errors
    /// There are fewer than three dimensions; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.softmax(-3)
    }
}

/// x above 0, a learned slope below, one for all or one for each channel (He et al., 2015).
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::Prelu;
/// # let device = Device::null(Default::default());
/// let layer = Prelu::new(8, 0.25, &device)?;
/// assert_eq!(layer.forward(&Tensor::zeros(&[2, 8, 5], DType::F32, &device)?)?.shape(), [2, 8, 5]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Prelu {
    /// \[1\] or \[channels\].
    pub weight: Tensor,
}

impl Prelu {
    /// So many slopes, 1 or the channels, which start at `slope`: 0.25 in PyTorch.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn new(slopes: usize, slope: f64, device: &Device) -> Result<Self> {
        Ok(Self { weight: init::create_parameter(|| Tensor::full(&[slopes], slope, DType::F32, device))? })
    }

    /// Each element of `x`.
    ///
    /// # Errors
    /// There are other channels than slopes; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.prelu(&self.weight)
    }
}

/// x where it is positive; below, x times a slope that is drawn for each element in training, and is the middle of the range in
/// evaluation (Xu et al., 2015).
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Rrelu {
    /// The smallest slope; 1/8 in PyTorch.
    pub lower: f64,
    /// The largest slope; 1/3 in PyTorch.
    pub upper: f64,
    training: std::sync::atomic::AtomicBool,
}

impl Default for Rrelu {
    fn default() -> Self {
        Self { lower: 1.0 / 8.0, upper: 1.0 / 3.0, training: true.into() }
    }
}

impl Rrelu {
    /// Each element of `x`.
    ///
    /// # Errors
    /// The dtype is no float; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.rrelu(self.lower, self.upper, super::is_training(&self.training))
    }
}
