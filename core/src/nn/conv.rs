//! The convolution layer.

use super::{Module, ModuleScope, init};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// How a [`Conv2d`] moves its window. `Conv2dOptions { padding: [1, 1], ..Default::default() }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dOptions {
    /// Steps of the window; 1.
    pub stride: [usize; 2],
    /// Zeros on every side; 0.
    pub padding: [usize; 2],
    /// Distance of the window's elements; 1.
    pub dilation: [usize; 2],
    /// Groups of channels that are apart; 1.
    pub groups: usize,
    /// Whether there is a bias; yes.
    pub bias: bool,
}

impl Default for Conv2dOptions {
    fn default() -> Self {
        Self { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1, bias: true }
    }
}

/// A convolution of \[batch, channels, height, width\].
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Conv2d {
    /// \[out, in / groups, height, width\].
    pub weight: Tensor,
    /// \[out\].
    pub bias: Option<Tensor>,
    #[module(skip)]
    options: Conv2dOptions,
    scope: ModuleScope,
}

impl Conv2d {
    /// Weight and bias uniform within 1/√fan_in, as PyTorch.
    ///
    /// # Errors
    /// The channels do not divide into the groups; memory runs out.
    #[track_caller]
    pub fn new(
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        options: Conv2dOptions,
        device: &Device,
    ) -> Result<Self> {
        let groups = options.groups;
        if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
            return Err(Error::argument(
                "Conv2d",
                format!("{inputs} and {outputs} channels do not divide into {groups} groups"),
            ));
        }
        let shape = [outputs, inputs / groups, kernel[0], kernel[1]];
        let fan_in = shape[1..].iter().product();
        let bias = match options.bias {
            true => Some(init::layer_uniform(&[outputs], fan_in, device)?),
            false => None,
        };
        let weight = init::layer_uniform(&shape, fan_in, device)?;
        Ok(Self { weight, bias, options, scope: ModuleScope::new() })
    }

    /// \[batch, in, height, width\] to \[batch, out, ..\].
    ///
    /// # Errors
    /// The channels of `x` are not the layer's; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dOptions { stride, padding, dilation, groups, .. } = self.options;
        self.scope.run(|| x.conv2d(&self.weight, self.bias.as_ref(), stride, padding, dilation, groups))
    }
}
