//! Detector: heads that all levels of a feature pyramid share, one prediction for each cell (Tian et al., 2019).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, GroupNorm, Module, init};
use forebay::ops::{BceWithLogitsOptions, InterpolateOptions, Reduction, cat};
use forebay::tensor::Tensor;

use super::Workload;
use super::resnet::ResNet;

/// Weight of positive classes in the focal loss.
const ALPHA: f64 = 0.25;
/// Exponent of the missing probability in the focal loss.
const GAMMA: f64 = 2.0;

fn conv([inputs, outputs]: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Result<Conv2d> {
    let options = Conv2dOptions { stride: [stride; 2], padding: [kernel / 2; 2], ..Conv2dOptions::default() };
    Conv2d::new(inputs, outputs, kernel, options, device)
}

/// Feature pyramid: adds enlarged coarse maps to fine ones.
#[derive(Module)]
struct Pyramid {
    lateral: Vec<Conv2d>,
    smooth: Vec<Conv2d>,
    coarser: [Conv2d; 2],
}

impl Pyramid {
    fn new(inputs: &[usize], width: usize, device: &Device) -> Result<Self> {
        let smooth = |_: &usize| conv([width; 2], 3, 1, device);
        Ok(Self {
            lateral: inputs.iter().map(|&n| conv([n, width], 1, 1, device)).collect::<Result<_>>()?,
            smooth: inputs.iter().map(smooth).collect::<Result<_>>()?,
            coarser: [conv([width; 2], 3, 2, device)?, conv([width; 2], 3, 2, device)?],
        })
    }

    /// Returns a map for each of the maps, and two coarser ones.
    fn forward(&self, maps: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut sums: Vec<Tensor> = Vec::new();
        for (map, lateral) in maps.iter().zip(&self.lateral).rev() {
            let y = lateral.forward(map)?;
            let y = match sums.last() {
                Some(above) => {
                    let size = InterpolateOptions::with_size([y.shape()[2], y.shape()[3]]);
                    y.add(&above.interpolate(&size)?)?
                }
                None => y,
            };
            sums.push(y);
        }
        sums.reverse();
        let mut levels =
            sums.iter().zip(&self.smooth).map(|(x, smooth)| smooth.forward(x)).collect::<Result<Vec<_>>>()?;
        for coarser in &self.coarser {
            levels.push(coarser.forward(&levels[levels.len() - 1].relu()?)?);
        }
        Ok(levels)
    }
}

/// Convolutions with group norms, before the predictions.
#[derive(Module)]
struct Tower(Vec<(Conv2d, GroupNorm)>);

impl Tower {
    fn new(width: usize, groups: usize, count: usize, device: &Device) -> Result<Self> {
        let layer = |_| Ok((conv([width; 2], 3, 1, device)?, GroupNorm::new(groups, width, device)?));
        Ok(Self((0..count).map(layer).collect::<Result<_>>()?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, (conv, norm)| norm.forward(&conv.forward(&x)?)?.relu())
    }
}

#[derive(Module)]
struct Detector {
    backbone: ResNet,
    pyramid: Pyramid,
    class_tower: Tower,
    box_tower: Tower,
    classes: Conv2d,
    boxes: Conv2d,
    /// Factor of each level's distances.
    scales: Vec<Tensor>,
}

impl Detector {
    /// Returns the logits of the classes \[batch, cells, classes\], and the distances to the sides of the
    /// boxes \[batch, cells, 4\].
    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let levels = self.pyramid.forward(&self.backbone.forward(x)?[1..])?;
        let cells = |x: Tensor| x.permute([0, 2, 3, 1])?.flatten(1, 2);
        let (mut classes, mut boxes) = (Vec::new(), Vec::new());
        for (level, scale) in levels.iter().zip(&self.scales) {
            classes.push(cells(self.classes.forward(&self.class_tower.forward(level)?)?)?);
            let distances = self.boxes.forward(&self.box_tower.forward(level)?)?;
            boxes.push(cells(distances.mul(scale)?.exp()?)?);
        }
        Ok((cat(&classes, 1)?, cat(&boxes, 1)?))
    }
}

/// Returns the sum of the focal losses: well classified cells count little (Lin et al., 2017).
fn focal_loss(logits: &Tensor, target: &Tensor) -> Result<Tensor> {
    let p = logits.sigmoid()?;
    let options = BceWithLogitsOptions { reduction: Reduction::None, ..BceWithLogitsOptions::default() };
    let entropy = logits.binary_cross_entropy_with_logits(target, &options)?;
    let absent = target.rsub(1.0)?;
    let hit = p.mul(target)?.add(&p.rsub(1.0)?.mul(&absent)?)?;
    let weight = target.mul(ALPHA)?.add(&absent.mul(1.0 - ALPHA)?)?;
    weight.mul(&hit.rsub(1.0)?.pow(GAMMA)?)?.mul(&entropy)?.sum_all()
}

/// Detector without anchors (FCOS) with a residual network of 18 layers and five levels.
pub(super) fn detector(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, first, width, groups, count, classes, per_image) =
        if tiny { (2, 64, 4, 8, 2, 2, 5, 3) } else { (8, 512, 64, 256, 32, 4, 80, 100) };
    let stages = [(first, [1, 1]), (2 * first, [2, 1]), (4 * first, [2, 1]), (8 * first, [2, 1])];
    let net = Detector {
        backbone: ResNet::new(first, &stages, device)?,
        pyramid: Pyramid::new(&[2 * first, 4 * first, 8 * first], width, device)?,
        class_tower: Tower::new(width, groups, count, device)?,
        box_tower: Tower::new(width, groups, count, device)?,
        classes: conv([width, classes], 3, 1, device)?,
        boxes: conv([width, 4], 3, 1, device)?,
        scales: (0..5).map(|_| Tensor::ones([1], DType::F32, device)?.to_leaf()).collect::<Result<_>>()?,
    };
    if let Some(bias) = &net.classes.bias {
        // Most cells have no object, so their probability starts at 0.01.
        init::constant_(bias, -(0.99f64 / 0.01).ln())?;
    }
    let cells: usize = (3..8).map(|k| usize::div_ceil(side, 1 << k).pow(2)).sum();
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    // Cells with an object, their classes, and the distances to the sides of their boxes.
    let objects = batch * per_image;
    let positives: Vec<i32> =
        (0..objects).map(|k| (k / per_image * cells + k % per_image * 37 % cells) as i32).collect();
    let positives = Tensor::from_slice(&positives, [objects], device)?;
    let found = Tensor::randint(0, classes as i64, [objects], DType::I32, device)?;
    let labels = Tensor::full([batch * cells], -1.0, DType::I32, device)?
        .index_copy(0, &positives, &found)?
        .reshape([batch, cells])?;
    let sides = Tensor::rand([objects, 4], DType::F32, device)?.mul(4.0)?;
    let names = Tensor::arange(0.0, classes as f64, 1.0, DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let (logits, boxes) = net.forward(&x)?;
        let target = labels.unsqueeze(-1)?.eq(&names)?.to_dtype(DType::F32)?;
        let boxes = boxes.flatten(0, 1)?.index_select(0, &positives)?;
        let loss = boxes.smooth_l1_loss(&sides, 1.0, Reduction::Sum)?;
        focal_loss(&logits.to_dtype(DType::F32)?, &target)?.add(&loss)?.div(objects as f64)
    }))
}
