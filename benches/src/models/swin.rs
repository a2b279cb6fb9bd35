//! Swin Transformer: attention within windows of pixels, which every second block shifts.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, LayerNorm, Linear, Module};
use forebay::ops::{AttentionOptions, cat};
use forebay::tensor::Tensor;

use super::Workload;

/// Extents of the windows of one block.
struct Windows {
    side: usize,
    /// Pixels by which the map is rolled before it is cut into windows; 0 for none.
    shift: usize,
    /// Row of the bias table of each pair of pixels, \[pixels · pixels\].
    index: Tensor,
    /// Mask of a shifted map, \[windows, 1, pixels, pixels\]: pairs from opposite edges get -100.
    mask: Option<Tensor>,
}

impl Windows {
    fn new(map: usize, side: usize, is_shifted: bool, device: &Device) -> Result<Self> {
        let pixels = side * side;
        let shift = if is_shifted && map > side { side / 2 } else { 0 };
        let pairs = (0..pixels).flat_map(|i| (0..pixels).map(move |j| (i, j)));
        let row = |(i, j): (usize, usize)| {
            let (y, x) = (i / side + side - 1 - j / side, i % side + side - 1 - j % side);
            (y * (2 * side - 1) + x) as i32
        };
        let index = Tensor::from_slice(&pairs.map(row).collect::<Vec<_>>(), [pixels * pixels], device)?;
        let part = |k: usize| usize::from(k >= map - side) + usize::from(k >= map - shift);
        let region = |window: usize, pixel: usize| {
            let across = map / side;
            let (y, x) = (window / across * side + pixel / side, window % across * side + pixel % side);
            (part(y), part(x))
        };
        let count = (map / side) * (map / side);
        let mask = (shift > 0).then(|| {
            let value = |k: usize| {
                let (window, i, j) = (k / (pixels * pixels), k / pixels % pixels, k % pixels);
                if region(window, i) == region(window, j) { 0.0f32 } else { -100.0 }
            };
            let values: Vec<f32> = (0..count * pixels * pixels).map(value).collect();
            Tensor::from_slice(&values, [count, 1, pixels, pixels], device)
        });
        Ok(Self { side, shift, index, mask: mask.transpose()? })
    }
}

/// Transformer block whose attention stays within windows.
#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    qkv: Linear,
    bias: Tensor,
    proj: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    #[module(skip)]
    windows: Windows,
    heads: usize,
}

impl Block {
    fn new(width: usize, heads: usize, windows: Windows, device: &Device) -> Result<Self> {
        let rows = (2 * windows.side - 1) * (2 * windows.side - 1);
        Ok(Self {
            norm1: LayerNorm::new([width], device)?,
            qkv: Linear::new(width, 3 * width, device)?,
            bias: Tensor::randn([rows, heads], DType::F32, device)?.mul(0.02)?.detach().to_leaf()?,
            proj: Linear::new(width, width, device)?,
            norm2: LayerNorm::new([width], device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
            windows,
            heads,
        })
    }

    /// Attends within windows \[batch, windows, pixels, width\].
    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let &[batch, count, pixels, width] = x.shape() else { unreachable!("windows have four dimensions") };
        let qkv = self.qkv.forward(x)?;
        let qkv = qkv.reshape([batch, count, pixels, 3, self.heads, width / self.heads])?;
        let part = |k| qkv.select(3, k)?.transpose(2, 3);
        let bias = self.bias.index_select(0, &self.windows.index)?;
        let bias = bias.reshape([pixels, pixels, self.heads])?.permute([2, 0, 1])?;
        let bias = match &self.windows.mask {
            Some(mask) => bias.add(mask)?,
            None => bias,
        };
        let options = AttentionOptions { attn_mask: Some(&bias), ..AttentionOptions::default() };
        let y = part(0)?.scaled_dot_product_attention(&part(1)?, &part(2)?, &options)?;
        self.proj.forward(&y.transpose(2, 3)?.reshape([batch, count, pixels, width])?)
    }

    /// Transforms a map \[batch, height, width, channels\].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let &[batch, height, width, channels] = x.shape() else { unreachable!("maps have four dimensions") };
        let Windows { side, shift, .. } = self.windows;
        let roll = |x: Tensor, by: isize| if shift > 0 { x.roll([by, by], [1, 2]) } else { Ok(x) };
        let (down, across) = (height / side, width / side);
        let y = roll(self.norm1.forward(x)?, -(shift as isize))?;
        let y = y.reshape([batch, down, side, across, side, channels])?.permute([0, 1, 3, 2, 4, 5])?;
        let y = self.attend(&y.reshape([batch, down * across, side * side, channels])?)?;
        let y = y.reshape([batch, down, across, side, side, channels])?.permute([0, 1, 3, 2, 4, 5])?;
        let x = x.add(&roll(y.reshape(x.shape())?, shift as isize)?)?;
        let y = self.up.forward(&self.norm2.forward(&x)?)?.gelu()?;
        x.add(&self.down.forward(&y)?)
    }
}

/// Joins squares of four pixels into one with twice the channels.
#[derive(Module)]
struct PatchMerging {
    norm: LayerNorm,
    reduction: Linear,
}

impl PatchMerging {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (height, width) = (x.shape()[1], x.shape()[2]);
        let pixel = |y, x_| x.slice_dim(1, y, height, 2)?.slice_dim(2, x_, width, 2);
        let x = cat(&[pixel(0, 0)?, pixel(1, 0)?, pixel(0, 1)?, pixel(1, 1)?], -1)?;
        self.reduction.forward(&self.norm.forward(&x)?)
    }
}

#[derive(Module)]
struct Swin {
    stem: Conv2d,
    stem_norm: LayerNorm,
    stages: Vec<Vec<Block>>,
    merges: Vec<PatchMerging>,
    norm: LayerNorm,
    head: Linear,
}

/// Image classifier with attention in shifted windows and learned relative positions: 28M parameters.
pub(super) fn swin(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, window, first, counts): (_, _, _, usize, &[usize]) =
        if tiny { (2, 32, 4, 8, &[2, 2]) } else { (64, 224, 7, 96, &[2, 2, 6, 2]) };
    let stage = |(k, &count): (usize, &usize)| {
        let (width, heads, map) = (first << k, (first / 32).max(1) << k, (side / 4) >> k);
        let block =
            |j: usize| Block::new(width, heads, Windows::new(map, window, j % 2 == 1, device)?, device);
        (0..count).map(block).collect::<Result<Vec<_>>>()
    };
    let merge = |k: usize| {
        let width = first << k;
        Ok(PatchMerging {
            norm: LayerNorm::new([4 * width], device)?,
            reduction: Linear::without_bias(4 * width, 2 * width, device)?,
        })
    };
    let last = first << (counts.len() - 1);
    let net = Swin {
        stem: Conv2d::new(3, first, 4, Conv2dOptions { stride: [4; 2], ..Conv2dOptions::default() }, device)?,
        stem_norm: LayerNorm::new([first], device)?,
        stages: counts.iter().enumerate().map(stage).collect::<Result<_>>()?,
        merges: (0..counts.len() - 1).map(merge).collect::<Result<_>>()?,
        norm: LayerNorm::new([last], device)?,
        head: Linear::new(last, 1000, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let mut x = net.stem_norm.forward(&net.stem.forward(&x)?.permute([0, 2, 3, 1])?)?;
        for (k, stage) in net.stages.iter().enumerate() {
            if k > 0 {
                x = net.merges[k - 1].forward(&x)?;
            }
            x = stage.iter().try_fold(x, |x, block| block.forward(&x))?;
        }
        net.head.forward(&net.norm.forward(&x)?.mean([1, 2], false)?)?.cross_entropy(&target)
    }))
}
