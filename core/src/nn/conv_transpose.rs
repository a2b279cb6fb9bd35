//! Transposed convolution layers.

use super::{Module, ModuleScope, init};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// How a transposed convolution of `N` spatial dimensions spreads its input.
/// `ConvTranspose2dOptions { stride: [2, 2], ..Default::default() }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvTransposeOptions<const N: usize> {
    /// Steps of the window over the output; 1.
    pub stride: [usize; N],
    /// What is cut from every side of the output; 0.
    pub padding: [usize; N],
    /// What is added to one side of the output; 0.
    pub output_padding: [usize; N],
    /// Distance of the window's elements; 1.
    pub dilation: [usize; N],
    /// Groups of channels that are apart; 1.
    pub groups: usize,
    /// Whether there is a bias; yes.
    pub bias: bool,
}

/// How a [`ConvTranspose1d`] spreads its input.
pub type ConvTranspose1dOptions = ConvTransposeOptions<1>;
/// How a [`ConvTranspose2d`] spreads its input.
pub type ConvTranspose2dOptions = ConvTransposeOptions<2>;
/// How a [`ConvTranspose3d`] spreads its input.
pub type ConvTranspose3dOptions = ConvTransposeOptions<3>;

impl<const N: usize> Default for ConvTransposeOptions<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: [0; N],
            output_padding: [0; N],
            dilation: [1; N],
            groups: 1,
            bias: true,
        }
    }
}

/// Weight and bias uniform within 1/√fan_in, where PyTorch counts the outputs of a group as inputs.
#[track_caller]
fn parameters<const N: usize>(
    layer: &'static str,
    inputs: usize,
    outputs: usize,
    kernel: [usize; N],
    options: &ConvTransposeOptions<N>,
    device: &Device,
) -> Result<(Tensor, Option<Tensor>)> {
    let groups = options.groups;
    if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
        return Err(Error::argument(
            layer,
            format!("{inputs} and {outputs} channels do not divide into {groups} groups"),
        ));
    }
    let mut shape = vec![inputs, outputs / groups];
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
        #[doc = concat!("A transposed convolution of \\[batch, channels, ", $shape, "\\].")]
        #[derive(Debug, Module)]
        #[module(crate = crate)]
        pub struct $layer {
            #[doc = concat!("\\[in, out / groups, ", $shape, "\\].")]
            pub weight: Tensor,
            /// \[out\].
            pub bias: Option<Tensor>,
            #[module(skip)]
            options: ConvTransposeOptions<$n>,
            scope: ModuleScope,
        }

        impl $layer {
            /// Weight and bias uniform, as PyTorch.
            ///
            /// # Errors
            /// The channels do not divide into the groups; memory runs out.
            #[track_caller]
            pub fn new(
                inputs: usize,
                outputs: usize,
                kernel: [usize; $n],
                options: ConvTransposeOptions<$n>,
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
                let ConvTransposeOptions { stride, padding, output_padding, dilation, groups, .. } = self.options;
                let bias = self.bias.as_ref();
                self.scope.run(|| x.$op(&self.weight, bias, stride, padding, output_padding, groups, dilation))
            }
        }
    )*};
}

layers! {
    ConvTranspose1d 1 conv_transpose1d "length";
    ConvTranspose2d 2 conv_transpose2d "height, width";
    ConvTranspose3d 3 conv_transpose3d "depth, height, width";
}
