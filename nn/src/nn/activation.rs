//! Activation functions as layers, with PyTorch's names and defaults.

use super::{Module, TrainingMode, init};
use crate::{Device, Result, Tensor};
use forebay_core::ops::RreluOptions;

/// Defines layers without parameters, each of which calls one method of the tensor. The fields are the
/// method's arguments, with PyTorch's defaults.
macro_rules! activation_layers {
    ($($(#[$doc:meta])* $layer:ident($op:ident $(, $field:ident: $ty:ty = $default:expr)*);)*) => {$(
        with_defaults! {
            $(#[$doc])*
            #[doc = concat!("[`", stringify!($op), "`](Tensor::", stringify!($op), ") as a layer.")]
            #[derive(Clone, Copy, Debug, PartialEq, Module)]
            pub struct $layer {
                $(
                    #[doc = concat!("Argument of the tensor method. The default is `", stringify!($default), "`.")]
                    pub $field: $ty = $default,
                )*
            }
        }

        impl $layer {
            /// Applies the function to each element of `x`, or to each vector along the dimension.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$op($(self.$field),*)
            }
        }

        impl_forward!($layer);
    )*};
}

activation_layers! {
    /// max(x, 0):
    Relu(relu);
    /// min(max(x, 0), 6):
    Relu6(relu6);
    /// x if x > 0, else a small slope times x:
    LeakyRelu(leaky_relu, negative_slope: f64 = 0.01);
    /// x if x > 0, else α (eˣ - 1):
    Elu(elu, alpha: f64 = 1.0);
    /// max(0, x) + min(0, α (e^(x/α) - 1)):
    Celu(celu, alpha: f64 = 1.0);
    /// Self-normalising ELU:
    Selu(selu);
    /// x Φ(x), by erf:
    Gelu(gelu);
    /// x Φ(x) by its tanh approximation, PyTorch's `GELU(approximate="tanh")`:
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
    /// x moved towards 0 by `lambda`:
    Softshrink(softshrink, lambda: f64 = 0.5);
    /// 0 if |x| is at most `lambda`, else x:
    Hardshrink(hardshrink, lambda: f64 = 0.5);
    /// x - tanh(x):
    Tanhshrink(tanhshrink);
    /// Hyperbolic tangent:
    Tanh(tanh);
    /// x clamped between two values:
    Hardtanh(hardtanh, min_val: f64 = -1.0, max_val: f64 = 1.0);
    /// min(max(x/6 + 1/2, 0), 1):
    Hardsigmoid(hardsigmoid);
    /// x hardsigmoid(x):
    Hardswish(hardswish);
    /// First half of a dimension times the sigmoid of the second half:
    Glu(glu, dim: isize = -1);
    /// x above the threshold, else `value`. PyTorch has no defaults:
    Threshold(threshold, threshold: f64 = 0.0, value: f64 = 0.0);
    /// Probabilities along a dimension. PyTorch has no default dimension:
    Softmax(softmax, dim: isize = -1);
    /// Log-probabilities along a dimension:
    LogSoftmax(log_softmax, dim: isize = -1);
    /// softmax(-x), with the highest probabilities at the smallest elements:
    Softmin(softmin, dim: isize = -1);
}

/// Softmax over the channels of \[batch, channels, height, width\] or \[channels, height, width\].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Module)]
pub struct Softmax2d;

impl Softmax2d {
    /// Applies the softmax over the channels at each position of `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.softmax(-3)
    }
}

/// x if x > 0, else a learned slope times x, with one slope in all or one for each channel (He et al., 2015).
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::Prelu;
/// # let device = Device::null(Default::default());
/// let layer = Prelu::new(8, 0.25, &device)?;
/// assert_eq!(layer.forward(&Tensor::zeros(&[2, 8, 5], DType::F32, &device)?)?.shape(), [2, 8, 5]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct Prelu {
    /// Slopes, \[1\] or \[channels\].
    pub weight: Tensor,
}

impl Prelu {
    /// Creates a layer of `slopes` slopes (one, or one for each channel) with the initial value `slope`. PyTorch's
    /// default is 0.25.
    #[track_caller]
    pub fn new(slopes: usize, slope: f64, device: &Device) -> Result<Self> {
        Ok(Self {
            weight: init::create_parameter(|| {
                Tensor::full([slopes], slope, init::parameter_dtype(), device)
            })?,
        })
    }

    fn extra_repr(&self) -> String {
        format!("num_parameters={}", self.weight.numel())
    }

    /// Applies the function to each element of `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.prelu(&self.weight)
    }
}

with_defaults! {
    /// x if x > 0, else a random slope times x (Xu et al., 2015). In training, each element draws its slope from
    /// the range. In evaluation, the slope is the middle of the range.
    #[derive(Module)]
    #[module(debug)]
    pub struct Rrelu {
        /// Lower bound of the slope; PyTorch's default is 1/8.
        pub lower: f64 = 1.0 / 8.0,
        /// Upper bound of the slope; PyTorch's default is 1/3.
        pub upper: f64 = 1.0 / 3.0,
        training: TrainingMode = TrainingMode::new(),
    }
}

impl Rrelu {
    /// Applies the function to each element of `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let &Self { lower, upper, ref training } = self;
        x.rrelu(&RreluOptions { lower, upper, training: training.is_on() })
    }
}
