//! Well-known architectures built from modules, with the names of their published weights, compared with PyTorch's
//! results in `tests/modules/architectures.safetensors`. `benches/peers/architectures.py` creates this file.

use forebay::device::Device;
use forebay::error::Result;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Embedding, Linear};
use forebay::tensor::Tensor;

use super::{cases, single};

pub(super) mod language_models;
pub(super) mod sequence_models;
pub(super) mod unet_gan_speech;
pub(super) mod vision;

/// Square convolution without bias; at a stride of 1 it preserves the extents.
fn conv(
    inputs: usize,
    outputs: usize,
    kernel: usize,
    stride: usize,
    groups: usize,
    device: &Device,
) -> Result<Conv2d> {
    let (stride, padding) = ([stride; 2], [kernel / 2; 2]);
    let options = Conv2dOptions { stride, padding, groups, bias: false, ..Conv2dOptions::default() };
    Conv2d::new(inputs, outputs, [kernel; 2], options, device)
}

/// Layers `0` and `1` of torchvision's `Conv2dNormActivation`, without the activation.
type ConvNorm = (Conv2d, BatchNorm2d);

fn linear(inputs: usize, outputs: usize, device: &Device) -> Result<Linear> {
    Linear::without_bias(inputs, outputs, device)
}

/// Reshapes \[batch, length, features\] to \[batch, heads, length, rest\].
fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    x.unflatten(-1, [heads as isize, -1])?.transpose(1, 2)
}

/// Reverses [`split_heads`].
fn merge_heads(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.flatten(2, -1)
}

/// Returns an embedding, and an output layer that shares its weight.
fn tied_embedding(words: usize, features: usize, device: &Device) -> Result<(Embedding, Linear)> {
    let table = Embedding::new(words, features, device)?;
    let scores = Linear::from_parameters(table.weight.clone(), None)?;
    Ok((table, scores))
}
