//! Segmentation: a class for each pixel, by dilated convolutions at several rates (Chen et al., 2017).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Dropout, Module};
use forebay::ops::{CrossEntropyOptions, InterpolateMode, InterpolateOptions, cat};
use forebay::tensor::Tensor;

use super::Workload;
use super::resnet::{ConvBn, ResNet};

/// Class of pixels that do not count.
const IGNORED: i64 = 255;

/// Enlarges maps to the extents of the shape.
fn upsample(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let size = InterpolateOptions::with_size([shape[2], shape[3]]);
    x.interpolate(&InterpolateOptions { mode: InterpolateMode::Bilinear, ..size })
}

/// Atrous spatial pyramid pooling: dilated convolutions side by side, and the mean of the map.
#[derive(Module)]
struct Pyramid {
    branches: Vec<ConvBn>,
    pooled: ConvBn,
    project: ConvBn,
    dropout: Dropout,
}

impl Pyramid {
    fn new(channels: [usize; 2], rates: &[usize], device: &Device) -> Result<Self> {
        let outputs = channels[1];
        let mut branches = vec![ConvBn::new(channels, 1, [1, 1], device)?];
        for &rate in rates {
            branches.push(ConvBn::new(channels, 3, [1, rate], device)?);
        }
        Ok(Self {
            pooled: ConvBn::new(channels, 1, [1, 1], device)?,
            project: ConvBn::new([(branches.len() + 1) * outputs, outputs], 1, [1, 1], device)?,
            branches,
            dropout: Dropout::new(0.5),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let branch = |branch: &ConvBn| branch.forward(x)?.relu();
        let mut maps = self.branches.iter().map(branch).collect::<Result<Vec<_>>>()?;
        let pooled = self.pooled.forward(&x.adaptive_avg_pool2d([1, 1])?)?.relu()?;
        maps.push(upsample(&pooled, x.shape())?);
        self.dropout.forward(&self.project.forward(&cat(&maps, 1)?)?.relu()?)
    }
}

#[derive(Module)]
struct Segmentation {
    backbone: ResNet,
    pyramid: Pyramid,
    smooth: ConvBn,
    head: Conv2d,
}

impl Segmentation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let maps = self.backbone.forward(x)?;
        let y = self.smooth.forward(&self.pyramid.forward(&maps[maps.len() - 1])?)?.relu()?;
        upsample(&self.head.forward(&y)?, x.shape())
    }
}

/// DeepLab V3 with a residual network of 18 layers, whose maps are an eighth of the images.
pub(super) fn segmentation(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, width, classes, rates) =
        if tiny { (2, 32, 4, 5, [1, 2]) } else { (8, 512, 64, 21, [12, 24]) };
    let stages = [(width, [1, 1]), (2 * width, [2, 1]), (4 * width, [1, 2]), (8 * width, [1, 4])];
    let net = Segmentation {
        backbone: ResNet::new(width, &stages, device)?,
        pyramid: Pyramid::new([8 * width, 4 * width], &rates, device)?,
        smooth: ConvBn::new([4 * width; 2], 3, [1, 1], device)?,
        head: Conv2d::new(4 * width, classes, 1, Conv2dOptions::default(), device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, classes as i64, [batch, side, side], DType::I32, device)?;
    // About a tenth of the pixels is not labelled.
    let ignored = Tensor::rand([batch, side, side], DType::F32, device)?.lt(0.1)?;
    let target = target.masked_fill(&ignored, IGNORED)?;
    Ok(Workload::new(&shape, net, move |net| {
        let options = CrossEntropyOptions { ignore_index: IGNORED, ..CrossEntropyOptions::default() };
        net.forward(&x)?.cross_entropy_with(&target, &options)
    }))
}
