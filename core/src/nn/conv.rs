//! Convolution layers.

use super::{Module, ModuleScope, init};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ops::PadMode;
use crate::tensor::Tensor;

/// How a convolution of `N` spatial dimensions moves its window. `Conv2dOptions { padding: [1, 1], ..Default::default() }`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvOptions<const N: usize> {
    /// Steps of the window; 1.
    pub stride: [usize; N],
    /// What is added on every side; 0.
    pub padding: [usize; N],
    /// What stands there; zeros.
    pub padding_mode: PadMode,
    /// Distance of the window's elements; 1.
    pub dilation: [usize; N],
    /// Groups of channels that are apart; 1.
    pub groups: usize,
    /// Whether there is a bias; yes.
    pub bias: bool,
}

/// How a [`Conv1d`] moves its window.
pub type Conv1dOptions = ConvOptions<1>;
/// How a [`Conv2d`] moves its window.
pub type Conv2dOptions = ConvOptions<2>;
/// How a [`Conv3d`] moves its window.
pub type Conv3dOptions = ConvOptions<3>;

impl<const N: usize> Default for ConvOptions<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: [0; N],
            padding_mode: PadMode::Constant(0.0),
            dilation: [1; N],
            groups: 1,
            bias: true,
        }
    }
}

/// Weight and bias uniform within 1/√fan_in.
#[track_caller]
fn parameters<const N: usize>(
    layer: &'static str,
    inputs: usize,
    outputs: usize,
    kernel: [usize; N],
    options: &ConvOptions<N>,
    device: &Device,
) -> Result<(Tensor, Option<Tensor>)> {
    let groups = options.groups;
    if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
        return Err(Error::argument(
            layer,
            format!("{inputs} and {outputs} channels do not divide into {groups} groups"),
        ));
    }
    let mut shape = vec![outputs, inputs / groups];
    shape.extend(kernel);
    let fan_in = shape[1..].iter().product();
    let bias = match options.bias {
        true => Some(init::layer_uniform(&[outputs], fan_in, device)?),
        false => None,
    };
    Ok((init::layer_uniform(&shape, fan_in, device)?, bias))
}

macro_rules! layers {
    ($($layer:ident $n:literal $op:ident $shape:literal;)*) => {$(
        #[doc = concat!("A convolution of \\[batch, channels, ", $shape, "\\].")]
        #[derive(Debug, Module)]
        #[module(crate = crate)]
        pub struct $layer {
            #[doc = concat!("\\[out, in / groups, ", $shape, "\\].")]
            pub weight: Tensor,
            /// \[out\].
            pub bias: Option<Tensor>,
            #[module(skip)]
            options: ConvOptions<$n>,
            scope: ModuleScope,
        }

        impl $layer {
            /// Weight and bias uniform within 1/√fan_in, as PyTorch.
            ///
            /// # Errors
            /// The channels do not divide into the groups; memory runs out.
            #[track_caller]
            pub fn new(
                inputs: usize,
                outputs: usize,
                kernel: [usize; $n],
                options: ConvOptions<$n>,
                device: &Device,
            ) -> Result<Self> {
                let (weight, bias) = parameters(stringify!($layer), inputs, outputs, kernel, &options, device)?;
                Ok(Self { weight, bias, options, scope: ModuleScope::new() })
            }

            #[doc = concat!("\\[batch, in, ", $shape, "\\] to \\[batch, out, ..\\].")]
            ///
            /// # Errors
            /// The channels of `x` are not the layer's; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                let ConvOptions { stride, padding, padding_mode, dilation, groups, .. } = self.options;
                let (weight, bias) = (&self.weight, self.bias.as_ref());
                self.scope.run(|| match padding_mode {
                    PadMode::Constant(0.0) => x.$op(weight, bias, stride, padding, dilation, groups),
                    mode => {
                        // From the last dimension on.
                        let pads: Vec<isize> = padding.iter().rev().flat_map(|&n| [n as isize; 2]).collect();
                        x.pad(&pads, mode)?.$op(weight, bias, stride, [0; $n], dilation, groups)
                    }
                })
            }
        }
    )*};
}

layers! {
    Conv1d 1 conv1d "length";
    Conv2d 2 conv2d "height, width";
    Conv3d 3 conv3d "depth, height, width";
}
