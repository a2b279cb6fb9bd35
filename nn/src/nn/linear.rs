//! Linear and bilinear layers.

use super::summary::{OptionsText, flag};
use super::{HasWeight, Module, ModuleScope, init};
use crate::{Device, Result, Tensor, fail_if};

/// Linear layer: x · weightᵀ + bias over the last dimension.
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct Linear {
    /// Weight, \[out, in\].
    pub weight: Tensor,
    /// Bias, \[out\].
    pub bias: Option<Tensor>,
    scope: ModuleScope,
}

impl Linear {
    /// Creates a layer with weight and bias uniform within 1/√inputs, as in PyTorch.
    #[track_caller]
    pub fn new(inputs: usize, outputs: usize, device: &Device) -> Result<Self> {
        Self::uniform(inputs, outputs, true, device)
    }

    /// Creates a layer without a bias, initialised like [`new`](Self::new).
    #[track_caller]
    pub fn without_bias(inputs: usize, outputs: usize, device: &Device) -> Result<Self> {
        Self::uniform(inputs, outputs, false, device)
    }

    /// Creates a layer initialised like [`new`](Self::new), with or without a bias.
    #[track_caller]
    pub(super) fn uniform(inputs: usize, outputs: usize, bias: bool, device: &Device) -> Result<Self> {
        let weight = init::create_uniform_parameter(&[outputs, inputs], inputs, device)?;
        // No closure, whose line would be that of the allocation.
        let bias =
            if bias { Some(init::create_uniform_parameter(&[outputs], inputs, device)?) } else { None };
        Ok(Self { weight, bias, scope: ModuleScope::new() })
    }

    /// Creates a layer from a weight \[out, in\] and a bias \[out\], for example of another dtype or shared with
    /// another layer. A tensor that is no leaf, such as one from a file, is a buffer, which is not trained:
    /// [`to_leaf`](Tensor::to_leaf) makes it a parameter.
    #[track_caller]
    pub fn from_parameters(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let fits = weight.rank() == 2 && bias.as_ref().is_none_or(|b| b.shape() == &weight.shape()[..1]);
        let shapes = [weight.shape(), bias.as_ref().map_or(&[], Tensor::shape)];
        fail_if!(!fits; shape("Linear", &shapes), "takes a weight of [out, in] and a bias of [out]");
        Ok(Self { weight, bias, scope: ModuleScope::new() })
    }

    /// Creates a layer with normal weights of deviation `std` and a bias of zeros.
    #[track_caller]
    pub(super) fn normal(inputs: usize, outputs: usize, std: f64, device: &Device) -> Result<Self> {
        let weight = init::create_normal_parameter(&[outputs, inputs], std, device)?;
        let bias = init::create_parameter(|| Tensor::zeros([outputs], init::parameter_dtype(), device))?;
        Self::from_parameters(weight, Some(bias))
    }

    fn extra_repr(&self) -> String {
        let names = ["out_features", "in_features"].into_iter().zip(self.weight.shape()).rev();
        let text = names.fold(OptionsText::default(), |text, (name, extent)| text.set(name, extent));
        text.set("bias", flag(self.bias.is_some())).finish()
    }

    /// Applies the layer: \[.., in\] to \[.., out\].
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(&self.weight, x)
    }
}

impl HasWeight for Linear {
    fn weight(&self) -> &Tensor {
        &self.weight
    }

    fn weight_mut(&mut self) -> &mut Tensor {
        &mut self.weight
    }

    #[track_caller]
    fn forward_with(&self, weight: &Tensor, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.linear(weight, self.bias.as_ref()))
    }
}

/// Bilinear layer: x1 · weight · x2 + bias for each output ([`bilinear`](Tensor::bilinear)).
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::Bilinear;
/// # let device = Device::null(Default::default());
/// let layer = Bilinear::new([4, 5], 3, true, &device)?;
/// let (a, b) = (Tensor::zeros(&[2, 4], DType::F32, &device)?, Tensor::zeros(&[2, 5], DType::F32, &device)?);
/// assert_eq!(layer.forward(&a, &b)?.shape(), [2, 3]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct Bilinear {
    /// Weight, \[out, in1, in2\].
    pub weight: Tensor,
    /// Bias, \[out\].
    pub bias: Option<Tensor>,
    scope: ModuleScope,
}

impl Bilinear {
    /// Creates a layer with weight and bias uniform within 1/√in1, as in PyTorch.
    #[track_caller]
    pub fn new(inputs: [usize; 2], outputs: usize, bias: bool, device: &Device) -> Result<Self> {
        let weight = init::create_uniform_parameter(&[outputs, inputs[0], inputs[1]], inputs[0], device)?;
        let bias =
            if bias { Some(init::create_uniform_parameter(&[outputs], inputs[0], device)?) } else { None };
        Ok(Self { weight, bias, scope: ModuleScope::new() })
    }

    fn extra_repr(&self) -> String {
        let names = ["in1_features", "in2_features", "out_features"];
        let extents = self.weight.shape().iter().cycle().skip(1);
        let text =
            names.into_iter().zip(extents).fold(OptionsText::default(), |text, (name, n)| text.set(name, n));
        text.set("bias", flag(self.bias.is_some())).finish()
    }

    /// Applies the layer: \[.., in1\] and \[.., in2\] to \[.., out\].
    #[track_caller]
    pub fn forward(&self, x1: &Tensor, x2: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x1.bilinear(x2, &self.weight, self.bias.as_ref()))
    }
}
