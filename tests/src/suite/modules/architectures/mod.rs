//! Models of well-known architectures, built from the modules as a user would, loaded by the names of published files and compared with
//! PyTorch's: `tests/modules/architectures.safetensors`, which `benches/peers/architectures.py` makes.

use forebay::device::Device;
use forebay::error::Result;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Embedding, Linear};
use forebay::tensor::Tensor;

use super::{cases, single};

pub(super) mod language_models;
pub(super) mod sequence_models;
pub(super) mod unet_gan_speech;
pub(super) mod vision;

/// A convolution of square windows that keep the extents at a stride of 1, without a bias.
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

/// torchvision's `Conv2dNormActivation` but for the activation: layers `0` and `1`.
type ConvNorm = (Conv2d, BatchNorm2d);

fn linear(inputs: usize, outputs: usize, device: &Device) -> Result<Linear> {
    Linear::without_bias(inputs, outputs, device)
}

/// \[batch, length, features\] to \[batch, heads, length, rest\].
fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    x.unflatten(-1, &[heads as isize, -1])?.transpose(1, 2)
}

/// And back.
fn merge_heads(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.flatten(2, -1)
}

/// A table and the layer of scores that shares it.
fn tied_embedding(words: usize, features: usize, device: &Device) -> Result<(Embedding, Linear)> {
    let table = Embedding::new(words, features, device)?;
    let scores = Linear::from_parameters(table.weight.clone(), None)?;
    Ok((table, scores))
}
