//! DenseNet: every layer reads the concatenated results of all earlier layers of its block (Huang et al., 2017).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Linear, Module};
use forebay::ops::{Pool2dOptions, cat};
use forebay::tensor::Tensor;

use super::Workload;

fn conv([inputs, outputs]: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Result<Conv2d> {
    let options = Conv2dOptions {
        stride: [stride; 2],
        padding: [kernel / 2; 2],
        bias: false,
        ..Conv2dOptions::default()
    };
    Conv2d::new(inputs, outputs, kernel, options, device)
}

/// Layer that appends `growth` channels.
#[derive(Module)]
struct DenseLayer {
    norm1: BatchNorm2d,
    conv1: Conv2d,
    norm2: BatchNorm2d,
    conv2: Conv2d,
}

impl DenseLayer {
    fn new(inputs: usize, growth: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            norm1: BatchNorm2d::new(inputs, device)?,
            conv1: conv([inputs, 4 * growth], 1, 1, device)?,
            norm2: BatchNorm2d::new(4 * growth, device)?,
            conv2: conv([4 * growth, growth], 3, 1, device)?,
        })
    }

    fn forward(&self, features: &[Tensor]) -> Result<Tensor> {
        let x = cat(features, 1)?;
        let y = self.conv1.forward(&self.norm1.forward(&x)?.relu()?)?;
        self.conv2.forward(&self.norm2.forward(&y)?.relu()?)
    }
}

/// Halves channels and extents between blocks.
#[derive(Module)]
struct Transition {
    norm: BatchNorm2d,
    conv: Conv2d,
}

#[derive(Module)]
struct DenseNet {
    stem: Conv2d,
    stem_norm: BatchNorm2d,
    blocks: Vec<Vec<DenseLayer>>,
    transitions: Vec<Transition>,
    norm: BatchNorm2d,
    head: Linear,
}

impl DenseNet {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.stem_norm.forward(&self.stem.forward(x)?)?.relu()?;
        let mut x =
            x.max_pool2d(Pool2dOptions { stride: [2, 2], padding: [1, 1], ..Pool2dOptions::new(3) })?;
        for (k, block) in self.blocks.iter().enumerate() {
            let mut features = vec![x];
            for layer in block {
                features.push(layer.forward(&features)?);
            }
            x = cat(&features, 1)?;
            if let Some(transition) = self.transitions.get(k) {
                x = transition.conv.forward(&transition.norm.forward(&x)?.relu()?)?.avg_pool2d(2)?;
            }
        }
        self.head.forward(&self.norm.forward(&x)?.relu()?.mean([2, 3], false)?)
    }
}

/// DenseNet-121, a classifier of images: 8M parameters.
pub(super) fn densenet(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, first, growth, counts): (_, _, _, _, &[usize]) =
        if tiny { (2, 32, 8, 4, &[2, 2]) } else { (64, 224, 64, 32, &[6, 12, 24, 16]) };
    let (mut blocks, mut transitions, mut width) = (Vec::new(), Vec::new(), first);
    for (k, &count) in counts.iter().enumerate() {
        let layer = |j| DenseLayer::new(width + j * growth, growth, device);
        blocks.push((0..count).map(layer).collect::<Result<Vec<_>>>()?);
        width += count * growth;
        if k + 1 < counts.len() {
            let norm = BatchNorm2d::new(width, device)?;
            transitions.push(Transition { norm, conv: conv([width, width / 2], 1, 1, device)? });
            width /= 2;
        }
    }
    let net = DenseNet {
        stem: conv([3, first], 7, 2, device)?,
        stem_norm: BatchNorm2d::new(first, device)?,
        blocks,
        transitions,
        norm: BatchNorm2d::new(width, device)?,
        head: Linear::new(width, 1000, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| net.forward(&x)?.cross_entropy(&target)))
}
