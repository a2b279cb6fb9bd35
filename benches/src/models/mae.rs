//! Masked autoencoder: a transformer over a random quarter of an image's patches, and one that restores the others
//! (He et al., 2022).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, LayerNorm, Linear, Module, SelfAttention};
use forebay::ops::cat;
use forebay::tensor::Tensor;

use super::Workload;

#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: SelfAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new([width, heads]: [usize; 2], device: &Device) -> Result<Self> {
        Ok(Self {
            norm1: LayerNorm::new([width], device)?,
            attention: SelfAttention::new(width, heads, device)?,
            norm2: LayerNorm::new([width], device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.add(&self.attention.forward(&self.norm1.forward(x)?)?)?;
        let y = self.up.forward(&self.norm2.forward(&x)?)?.gelu()?;
        x.add(&self.down.forward(&y)?)
    }
}

#[derive(Module)]
struct Mae {
    patches: Conv2d,
    class: Tensor,
    encoder: Vec<Block>,
    norm: LayerNorm,
    start: Linear,
    mask: Tensor,
    decoder: Vec<Block>,
    last_norm: LayerNorm,
    head: Linear,
}

/// Returns \[count, width\] of random values with deviation 0.02: positions that are not trained.
fn positions(count: usize, width: usize, device: &Device) -> Result<Tensor> {
    Tensor::randn([1, count, width], DType::F32, device)?.mul(0.02)
}

/// Selects tokens of x \[batch, tokens, width\] by indices \[batch, count\].
fn gather_tokens(x: &Tensor, index: &Tensor) -> Result<Tensor> {
    let shape = [index.shape()[0], index.shape()[1], x.shape()[2]];
    x.gather(1, &index.unsqueeze(-1)?.expand(shape)?)
}

/// Masked autoencoder of ViT-B with a decoder of four blocks.
pub(super) fn mae(tiny: bool, device: &Device) -> Result<Workload> {
    // Width and heads of both transformers, and their numbers of blocks.
    let ([batch, side, patch], wide, narrow, [layers, last_layers]) = if tiny {
        ([2, 16, 4], [16, 2], [8, 2], [2, 1])
    } else {
        ([64, 224, 16], [768, 12], [512, 16], [12, 4])
    };
    let cells = side / patch;
    let count = cells * cells;
    let kept = count / 4;
    let options = Conv2dOptions { stride: [patch; 2], ..Conv2dOptions::default() };
    let token = |width| Tensor::randn([1, 1, width], DType::F32, device)?.mul(0.02)?.detach().to_leaf();
    let blocks =
        |count: usize, extents| (0..count).map(|_| Block::new(extents, device)).collect::<Result<Vec<_>>>();
    let net = Mae {
        patches: Conv2d::new(3, wide[0], patch, options, device)?,
        class: token(wide[0])?,
        encoder: blocks(layers, wide)?,
        norm: LayerNorm::new([wide[0]], device)?,
        start: Linear::new(wide[0], narrow[0], device)?,
        mask: token(narrow[0])?,
        decoder: blocks(last_layers, narrow)?,
        last_norm: LayerNorm::new([narrow[0]], device)?,
        head: Linear::new(narrow[0], patch * patch * 3, device)?,
    };
    let (first, second) = (positions(count + 1, wide[0], device)?, positions(count + 1, narrow[0], device)?);
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let y = net.patches.forward(&x)?.flatten(2, -1)?.transpose(1, 2)?;
        let y = y.add(&first.narrow(1, 1, count)?)?;
        // A random order, whose first quarter stays.
        let order = Tensor::rand([batch, count], DType::F32, x.device())?.argsort(1, false)?;
        let restore = order.argsort(1, false)?;
        let y = gather_tokens(&y, &order.narrow(1, 0, kept)?)?;
        let class = net.class.add(&first.narrow(1, 0, 1)?)?.to_dtype(y.dtype())?;
        let y = cat(&[class.expand([batch, 1, wide[0]])?, y], 1)?;
        let y = net.encoder.iter().try_fold(y, |y, block| block.forward(&y))?;
        let y = net.start.forward(&net.norm.forward(&y)?)?;
        // Masks stand for the others, and all return to their places.
        let masks = net.mask.to_dtype(y.dtype())?.expand([batch, count - kept, narrow[0]])?;
        let all = cat(&[&y.narrow(1, 1, kept)?, &masks], 1)?;
        let y = cat(&[&y.narrow(1, 0, 1)?, &gather_tokens(&all, &restore)?], 1)?.add(&second)?;
        let y = net.decoder.iter().try_fold(y, |y, block| block.forward(&y))?;
        let y = net.head.forward(&net.last_norm.forward(&y)?)?.narrow(1, 1, count)?.to_dtype(DType::F32)?;
        // Pixels of each patch, normalised by the patch.
        let pixels = x.reshape([batch, 3, cells, patch, cells, patch])?.permute([0, 2, 4, 3, 5, 1])?;
        let pixels = pixels.reshape([batch, count, patch * patch * 3])?;
        let (var, mean) = pixels.var_mean([-1], 1.0, true)?;
        let pixels = pixels.sub(&mean)?.div(&var.add(1e-6)?.sqrt()?)?;
        let loss = y.sub(&pixels)?.square()?.mean([-1], false)?;
        let masked = restore.ge(kept as i64)?.to_dtype(DType::F32)?;
        loss.mul(&masked)?.sum_all()?.div(&masked.sum_all()?)
    }))
}
