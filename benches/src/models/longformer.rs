//! Long texts by attention within windows: chunks of queries over overlapping chunks of keys (Beltagy et al., 2020).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Embedding, LayerNorm, Linear, Module};
use forebay::ops::PadMode;
use forebay::tensor::Tensor;

use super::Workload;

/// Attention of each position to those at most `window` places away.
#[derive(Module)]
struct WindowAttention {
    qkv: Linear,
    out: Linear,
    heads: usize,
    window: usize,
}

impl WindowAttention {
    /// Transforms x \[batch, length, width\]. The mask, \[chunks, window, 3 · window\], is true for pairs that are too
    /// far apart, and for keys outside of the text.
    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, length, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
        let (heads, window, features) = (self.heads, self.window, width / self.heads);
        // [batch, heads, length, features] of three.
        let qkv =
            self.qkv.forward(x)?.reshape([batch, length, 3, heads, features])?.permute([2, 0, 3, 1, 4])?;
        let q = qkv.select(0, 0)?.reshape([batch, heads, length / window, window, features])?;
        // [batch, heads, chunks, features, 3 · window].
        let around = |k: isize| {
            let w = window as isize;
            qkv.select(0, k)?.pad(&[0, 0, w, w], PadMode::Constant(0.0.into()))?.unfold(2, 3 * window, window)
        };
        let scores = q.matmul(&around(1)?)?.mul((features as f64).powf(-0.5))?;
        let weights = scores.masked_fill(mask, f64::NEG_INFINITY)?.softmax(-1)?;
        let y = weights.matmul(&around(2)?.transpose(-2, -1)?)?;
        let y = y.reshape([batch, heads, length, features])?.transpose(1, 2)?.flatten(2, -1)?;
        self.out.forward(&y)
    }
}

/// Returns the mask of [`WindowAttention::forward`].
fn window_mask(length: usize, window: usize, device: &Device) -> Result<Tensor> {
    let line = |n: usize| Tensor::arange(0.0, n as f64, 1.0, DType::I32, device);
    let (chunks, w) = (length / window, window as i64);
    // Positions of keys relative to the start of a chunk, and of the text.
    let keys = line(3 * window)?.sub(w)?;
    let distance = keys.sub(&line(window)?.unsqueeze(1)?)?.abs()?;
    let at = line(chunks)?.mul(w)?.reshape([chunks, 1, 1])?.add(&keys)?;
    distance.gt(w)?.logical_or(&at.lt(0)?)?.logical_or(&at.ge(length as i64)?)
}

#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: WindowAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

#[derive(Module)]
struct Longformer {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

/// Encoder of long texts in six layers.
pub(super) fn longformer(tiny: bool, device: &Device) -> Result<Workload> {
    let (shape, [vocabulary, width, heads, window, layers]) =
        if tiny { ([2, 16], [50, 16, 2, 4, 2]) } else { ([2, 4096], [8192, 512, 8, 256, 6]) };
    let block = |_| {
        Ok(Block {
            norm1: LayerNorm::new([width], device)?,
            attention: WindowAttention {
                qkv: Linear::new(width, 3 * width, device)?,
                out: Linear::new(width, width, device)?,
                heads,
                window,
            },
            norm2: LayerNorm::new([width], device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
        })
    };
    let net = Longformer {
        tokens: Embedding::new(vocabulary, width, device)?,
        positions: Embedding::new(shape[1], width, device)?,
        blocks: (0..layers).map(block).collect::<Result<_>>()?,
        norm: LayerNorm::new([width], device)?,
        head: Linear::without_bias(width, vocabulary, device)?,
    };
    let mask = window_mask(shape[1], window, device)?;
    let text = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?;
    let target = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?.flatten(0, -1)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.tokens.forward(&text)?.add(&net.positions.weight)?;
        let x = net.blocks.iter().try_fold(x, |x, block| {
            let x = x.add(&block.attention.forward(&block.norm1.forward(&x)?, &mask)?)?;
            let y = block.up.forward(&block.norm2.forward(&x)?)?.gelu()?;
            x.add(&block.down.forward(&y)?)
        })?;
        net.head.forward(&net.norm.forward(&x)?)?.flatten(0, 1)?.cross_entropy(&target)
    }))
}
