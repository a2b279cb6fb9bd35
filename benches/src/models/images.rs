//! Convolutional models: a detector's small backbone, the U-Net of a diffusion model, and EfficientNet.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, GroupNorm, Linear, Module, SinusoidalEmbedding, Upsample,
};
use forebay::ops::{AttentionOptions, InterpolateOptions, Reduction, cat};
use forebay::tensor::Tensor;

use super::Workload;

fn conv(
    [inputs, outputs]: [usize; 2],
    kernel: usize,
    stride: usize,
    bias: bool,
    device: &Device,
) -> Result<Conv2d> {
    let options =
        Conv2dOptions { stride: [stride; 2], padding: [kernel / 2; 2], bias, ..Conv2dOptions::default() };
    Conv2d::new(inputs, outputs, [kernel; 2], options, device)
}

/// Convolution without bias, batch norm and SiLU.
#[derive(Module)]
struct ConvBnSilu {
    conv: Conv2d,
    norm: BatchNorm2d,
}

impl ConvBnSilu {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            conv: conv(channels, kernel, stride, false, device)?,
            norm: BatchNorm2d::new(channels[1], device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward_silu(&self.conv.forward(x)?)
    }
}

/// Stage of the backbone: halves the extents, then runs bottlenecks over half of the channels.
#[derive(Module)]
struct Stage {
    down: ConvBnSilu,
    split: ConvBnSilu,
    bottlenecks: Vec<[ConvBnSilu; 2]>,
    join: ConvBnSilu,
}

impl Stage {
    fn new(inputs: usize, outputs: usize, count: usize, device: &Device) -> Result<Self> {
        let half = outputs / 2;
        let conv = || ConvBnSilu::new([half, half], 3, 1, device);
        Ok(Self {
            down: ConvBnSilu::new([inputs, outputs], 3, 2, device)?,
            split: ConvBnSilu::new([outputs, outputs], 1, 1, device)?,
            bottlenecks: (0..count).map(|_| Ok([conv()?, conv()?])).collect::<Result<_>>()?,
            join: ConvBnSilu::new([half * (2 + count), outputs], 1, 1, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.split.forward(&self.down.forward(x)?)?;
        let mut parts = x.chunk(2, 1)?;
        for [first, second] in &self.bottlenecks {
            let x = parts[parts.len() - 1].clone();
            parts.push(x.add(&second.forward(&first.forward(&x)?)?)?);
        }
        self.join.forward(&cat(&parts, 1)?)
    }
}

#[derive(Module)]
struct Backbone {
    stem: ConvBnSilu,
    stages: Vec<Stage>,
    head: Conv2d,
}

/// Backbone of a small detector, with a prediction of 85 values for each cell of its last map.
pub(super) fn convnet(tiny: bool, device: &Device) -> Result<Workload> {
    let (side, width, counts) = if tiny { (32, 4, [1, 1, 1, 1]) } else { (320, 16, [1, 2, 2, 1]) };
    let batch = if tiny { 2 } else { 8 };
    let stages = counts.into_iter().enumerate();
    let net = Backbone {
        stem: ConvBnSilu::new([3, width], 3, 2, device)?,
        stages: stages
            .map(|(k, count)| Stage::new(width << k, width << (k + 1), count, device))
            .collect::<Result<_>>()?,
        head: conv([width << 4, 85], 1, 1, true, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::rand(shape, DType::F32, device)?;
    let target = Tensor::rand([batch, 85, side / 32, side / 32], DType::F32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.stages.iter().try_fold(net.stem.forward(&x)?, |x, stage| stage.forward(&x))?;
        let logits = net.head.forward(&x)?.to_dtype(DType::F32)?;
        logits.binary_cross_entropy_with_logits(&target, &Default::default())
    }))
}

/// Self-attention over the pixels of a map, with one head.
#[derive(Module)]
struct PixelAttention {
    norm: GroupNorm,
    qkv: Conv2d,
    proj: Conv2d,
}

impl PixelAttention {
    fn new(groups: usize, channels: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            norm: GroupNorm::new(groups, channels, device)?,
            qkv: conv([channels, 3 * channels], 1, 1, true, device)?,
            proj: conv([channels, channels], 1, 1, true, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, channels) = (x.shape()[0], x.shape()[1]);
        // Heads of at most 64 channels: [batch, heads, pixels, features].
        let heads = channels.div_ceil(64);
        let qkv = self.qkv.forward(&self.norm.forward(x)?)?;
        let qkv = qkv.reshape([batch as isize, 3, heads as isize, (channels / heads) as isize, -1])?;
        let part = |k| qkv.select(1, k)?.transpose(2, 3);
        let y = part(0)?.scaled_dot_product_attention(&part(1)?, &part(2)?, &AttentionOptions::default())?;
        x.add(&self.proj.forward(&y.transpose(2, 3)?.reshape(x.shape())?)?)
    }
}

/// Residual block of two convolutions, to which the embedding of the time is added; attention follows it at low
/// resolution.
#[derive(Module)]
struct ResBlock {
    norm1: GroupNorm,
    conv1: Conv2d,
    time: Linear,
    norm2: GroupNorm,
    conv2: Conv2d,
    shortcut: Option<Conv2d>,
    attention: Option<PixelAttention>,
}

/// Extents that all blocks share.
struct BlockOptions<'a> {
    groups: usize,
    time: usize,
    device: &'a Device,
}

impl ResBlock {
    fn new([inputs, outputs]: [usize; 2], attends: bool, options: &BlockOptions<'_>) -> Result<Self> {
        let &BlockOptions { groups, time, device } = options;
        let shortcut = (inputs != outputs).then(|| conv([inputs, outputs], 1, 1, true, device));
        Ok(Self {
            norm1: GroupNorm::new(groups, inputs, device)?,
            conv1: conv([inputs, outputs], 3, 1, true, device)?,
            time: Linear::new(time, outputs, device)?,
            norm2: GroupNorm::new(groups, outputs, device)?,
            conv2: conv([outputs, outputs], 3, 1, true, device)?,
            shortcut: shortcut.transpose()?,
            attention: attends.then(|| PixelAttention::new(groups, outputs, device)).transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, time: &Tensor) -> Result<Tensor> {
        let h = self.conv1.forward(&self.norm1.forward_silu(x)?)?;
        let h = h.add(&self.time.forward(time)?.unsqueeze(-1)?.unsqueeze(-1)?)?;
        let h = self.conv2.forward(&self.norm2.forward_silu(&h)?)?;
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x)?.add(&h)?,
            None => x.add(&h)?,
        };
        self.attention.as_ref().map_or_else(|| Ok(x.clone()), |attention| attention.forward(&x))
    }
}

/// Blocks of one resolution, and the way to the next one.
#[derive(Module)]
struct Level {
    blocks: Vec<ResBlock>,
    resize: Option<Conv2d>,
}

#[derive(Module)]
struct UNet {
    positions: SinusoidalEmbedding,
    time: [Linear; 2],
    stem: Conv2d,
    down: Vec<Level>,
    middle: [ResBlock; 2],
    up: Vec<Level>,
    upsample: Upsample,
    norm: GroupNorm,
    head: Conv2d,
}

impl UNet {
    /// Creates a network for images of `side`, with two blocks at each of the resolutions of `channels`.
    fn new(side: usize, channels: &[usize], groups: usize, lowest: usize, device: &Device) -> Result<Self> {
        let (first, last) = (channels[0], channels[channels.len() - 1]);
        let options = BlockOptions { groups, time: 4 * first, device };
        let (mut down, mut up) = (Vec::new(), Vec::new());
        let mut inputs = first;
        for (k, &outputs) in channels.iter().enumerate() {
            let attends = side >> k <= lowest;
            let block = |inputs| ResBlock::new([inputs, outputs], attends, &options);
            let stride = |stride| conv([outputs, outputs], 3, stride, true, device);
            let resize = (k + 1 < channels.len()).then(|| stride(2)).transpose()?;
            down.push(Level { blocks: vec![block(inputs)?, block(outputs)?], resize });
            // On the way up, every block also reads the result of its counterpart.
            let below = channels.get(k + 1).copied().unwrap_or(outputs);
            let resize = (k > 0).then(|| stride(1)).transpose()?;
            up.push(Level { blocks: vec![block(below + outputs)?, block(2 * outputs)?], resize });
            inputs = outputs;
        }
        up.reverse();
        Ok(Self {
            positions: SinusoidalEmbedding::new(1000, first, device)?,
            time: [Linear::new(first, 4 * first, device)?, Linear::new(4 * first, 4 * first, device)?],
            stem: conv([3, first], 3, 1, true, device)?,
            down,
            middle: [
                ResBlock::new([last, last], true, &options)?,
                ResBlock::new([last, last], false, &options)?,
            ],
            up,
            upsample: Upsample::new(InterpolateOptions::with_scale_factor(2.0)),
            norm: GroupNorm::new(groups, first, device)?,
            head: conv([first, 3], 3, 1, true, device)?,
        })
    }

    fn forward(&self, x: &Tensor, steps: &Tensor) -> Result<Tensor> {
        let time = self.time[0].forward(&self.positions.table().index_select(0, steps)?)?.silu()?;
        let time = self.time[1].forward(&time)?.silu()?;
        let (mut x, mut skips) = (self.stem.forward(x)?, Vec::new());
        for level in &self.down {
            for block in &level.blocks {
                x = block.forward(&x, &time)?;
                skips.push(x.clone());
            }
            if let Some(resize) = &level.resize {
                x = resize.forward(&x)?;
            }
        }
        for block in &self.middle {
            x = block.forward(&x, &time)?;
        }
        for level in &self.up {
            for block in &level.blocks {
                let skip = skips.pop().unwrap_or_else(|| x.clone());
                x = block.forward(&cat(&[&x, &skip], 1)?, &time)?;
            }
            if let Some(resize) = &level.resize {
                x = resize.forward(&self.upsample.forward(&x)?)?;
            }
        }
        self.head.forward(&self.norm.forward_silu(&x)?)
    }
}

/// Diffusion model that predicts the noise of images: group norms with SiLU, attention at 16 pixels and fewer.
pub(super) fn unet(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side) = if tiny { (2, 16) } else { (64, 64) };
    let net = match tiny {
        true => UNet::new(side, &[8, 16, 16], 4, 4, device)?,
        false => UNet::new(side, &[128, 256, 256, 256], 32, 16, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let noise = Tensor::randn(shape, DType::F32, device)?;
    let steps = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        net.forward(&x, &steps)?.to_dtype(DType::F32)?.mse_loss(&noise, Reduction::Mean)
    }))
}

/// Block of EfficientNet: an inverted residual whose channels are weighed by a gate of their means.
#[derive(Module)]
struct GatedResidual {
    expand: Option<ConvBnSilu>,
    filter: Conv2d,
    filter_norm: BatchNorm2d,
    squeeze: Conv2d,
    excite: Conv2d,
    project: Conv2d,
    project_norm: BatchNorm2d,
    is_residual: bool,
}

impl GatedResidual {
    fn new(
        [inputs, outputs]: [usize; 2],
        [expansion, kernel, stride]: [usize; 3],
        device: &Device,
    ) -> Result<Self> {
        let hidden = expansion * inputs;
        let options = Conv2dOptions {
            stride: [stride; 2],
            padding: [kernel / 2; 2],
            groups: hidden,
            bias: false,
            ..Conv2dOptions::default()
        };
        let squeezed = (inputs / 4).max(1);
        Ok(Self {
            expand: (expansion > 1).then(|| ConvBnSilu::new([inputs, hidden], 1, 1, device)).transpose()?,
            filter: Conv2d::new(hidden, hidden, kernel, options, device)?,
            filter_norm: BatchNorm2d::new(hidden, device)?,
            squeeze: conv([hidden, squeezed], 1, 1, true, device)?,
            excite: conv([squeezed, hidden], 1, 1, true, device)?,
            project: conv([hidden, outputs], 1, 1, false, device)?,
            project_norm: BatchNorm2d::new(outputs, device)?,
            is_residual: stride == 1 && inputs == outputs,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.expand {
            Some(expand) => expand.forward(x)?,
            None => x.clone(),
        };
        let y = self.filter_norm.forward_silu(&self.filter.forward(&y)?)?;
        let gate = self.squeeze.forward(&y.mean([2, 3], true)?)?.silu()?;
        let y = y.mul(&self.excite.forward(&gate)?.sigmoid()?)?;
        let y = self.project_norm.forward(&self.project.forward(&y)?)?;
        if self.is_residual { x.add(&y) } else { Ok(y) }
    }
}

#[derive(Module)]
struct EfficientNet {
    stem: ConvBnSilu,
    blocks: Vec<GatedResidual>,
    last: ConvBnSilu,
    head: Linear,
}

/// EfficientNet B0: depthwise filters of 3 and 5 pixels, with gates.
pub(super) fn efficientnet(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side) = if tiny { (2, 16) } else { (64, 224) };
    // Expansion, kernel, stride, outputs and blocks of each stage.
    let stages: &[[usize; 5]] = if tiny {
        &[[1, 3, 1, 4, 1], [6, 5, 2, 8, 2]]
    } else {
        &[
            [1, 3, 1, 16, 1],
            [6, 3, 2, 24, 2],
            [6, 5, 2, 40, 2],
            [6, 3, 2, 80, 3],
            [6, 5, 1, 112, 3],
            [6, 5, 2, 192, 4],
            [6, 3, 1, 320, 1],
        ]
    };
    let (first, last) = if tiny { (4, 16) } else { (32, 1280) };
    let (mut blocks, mut inputs) = (Vec::new(), first);
    for &[expansion, kernel, stride, outputs, count] in stages {
        for k in 0..count {
            let stride = if k == 0 { stride } else { 1 };
            blocks.push(GatedResidual::new([inputs, outputs], [expansion, kernel, stride], device)?);
            inputs = outputs;
        }
    }
    let net = EfficientNet {
        stem: ConvBnSilu::new([3, first], 3, 2, device)?,
        blocks,
        last: ConvBnSilu::new([inputs, last], 1, 1, device)?,
        head: Linear::new(last, 1000, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.blocks.iter().try_fold(net.stem.forward(&x)?, |x, block| block.forward(&x))?;
        net.head.forward(&net.last.forward(&x)?.mean([2, 3], false)?)?.cross_entropy(&target)
    }))
}
