//! Residual network of basic blocks, the backbone of the models that predict maps (He et al., 2015).

use forebay::device::Device;
use forebay::error::Result;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Module};
use forebay::ops::Pool2dOptions;
use forebay::tensor::Tensor;

/// Convolution without bias, and batch norm.
#[derive(Module)]
pub(super) struct ConvBn {
    conv: Conv2d,
    norm: BatchNorm2d,
}

impl ConvBn {
    /// Creates a layer whose padding preserves extents, except for the stride.
    pub(super) fn new(
        [inputs, outputs]: [usize; 2],
        kernel: usize,
        [stride, dilation]: [usize; 2],
        device: &Device,
    ) -> Result<Self> {
        let options = Conv2dOptions {
            stride: [stride; 2],
            padding: [dilation * (kernel / 2); 2],
            dilation: [dilation; 2],
            bias: false,
            ..Conv2dOptions::default()
        };
        Ok(Self {
            conv: Conv2d::new(inputs, outputs, kernel, options, device)?,
            norm: BatchNorm2d::new(outputs, device)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward(&self.conv.forward(x)?)
    }
}

/// Two convolutions of 3 x 3, and a sum with the input.
#[derive(Module)]
struct BasicBlock {
    first: ConvBn,
    second: ConvBn,
    shortcut: Option<ConvBn>,
}

impl BasicBlock {
    fn new(channels: [usize; 2], [stride, dilation]: [usize; 2], device: &Device) -> Result<Self> {
        let [inputs, outputs] = channels;
        let shortcut =
            (stride > 1 || inputs != outputs).then(|| ConvBn::new(channels, 1, [stride, 1], device));
        Ok(Self {
            first: ConvBn::new(channels, 3, [stride, dilation], device)?,
            second: ConvBn::new([outputs; 2], 3, [1, dilation], device)?,
            shortcut: shortcut.transpose()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.second.forward(&self.first.forward(x)?.relu()?)?;
        match &self.shortcut {
            Some(shortcut) => y.add(&shortcut.forward(x)?)?.relu(),
            None => y.add(x)?.relu(),
        }
    }
}

#[derive(Module)]
pub(super) struct ResNet {
    stem: ConvBn,
    stages: Vec<Vec<BasicBlock>>,
}

impl ResNet {
    /// Creates a network with two blocks in each stage. A stage has channels, and a stride and a dilation.
    pub(super) fn new(first: usize, stages: &[(usize, [usize; 2])], device: &Device) -> Result<Self> {
        let mut inputs = first;
        let stage = |&(outputs, [stride, dilation]): &(usize, [usize; 2])| {
            let blocks = [
                BasicBlock::new([inputs, outputs], [stride, dilation], device)?,
                BasicBlock::new([outputs; 2], [1, dilation], device)?,
            ];
            inputs = outputs;
            Ok(Vec::from(blocks))
        };
        let stem = ConvBn::new([3, first], 7, [2, 1], device)?;
        Ok(Self { stem, stages: stages.iter().map(stage).collect::<Result<_>>()? })
    }

    /// Returns the maps of all stages.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let pool = Pool2dOptions { stride: [2, 2], padding: [1, 1], ..Pool2dOptions::new(3) };
        let mut x = self.stem.forward(x)?.relu()?.max_pool2d(pool)?;
        let mut maps = Vec::with_capacity(self.stages.len());
        for stage in &self.stages {
            x = stage.iter().try_fold(x, |x, block| block.forward(&x))?;
            maps.push(x.clone());
        }
        Ok(maps)
    }
}
