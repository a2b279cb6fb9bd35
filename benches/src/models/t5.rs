//! T5: an encoder and a decoder whose layers share one table of relative position biases.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Embedding, Linear, Module, RmsNorm};
use forebay::ops::AttentionOptions;
use forebay::tensor::Tensor;

use super::Workload;

/// Number of position biases of a head.
const BUCKETS: i64 = 32;
/// Distance from which all positions share a bias.
const MAX_DISTANCE: f64 = 128.0;

/// Returns the index of each pair's position bias, \[length · length\]. Half of the biases of an encoder
/// belong to later positions.
fn position_buckets(length: usize, is_decoder: bool) -> Vec<i32> {
    let count = if is_decoder { BUCKETS } else { BUCKETS / 2 };
    let exact = count / 2;
    let bucket = |distance: i64| {
        let (base, distance) = match is_decoder {
            true => (0, (-distance).max(0)),
            false => (if distance > 0 { count } else { 0 }, distance.abs()),
        };
        let ratio = (distance.max(1) as f64 / exact as f64).ln() / (MAX_DISTANCE / exact as f64).ln();
        let far = (exact + (ratio * (count - exact) as f64) as i64).min(count - 1);
        (base + if distance < exact { distance } else { far }) as i32
    };
    (0..length * length).map(|at| bucket((at % length) as i64 - (at / length) as i64)).collect()
}

#[derive(Module)]
struct Attention {
    norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    heads: usize,
}

impl Attention {
    fn new(width: usize, heads: usize, device: &Device) -> Result<Self> {
        let linear = || Linear::without_bias(width, width, device);
        Ok(Self {
            norm: RmsNorm::new([width], device)?.eps(1e-6),
            query: linear()?,
            key: linear()?,
            value: linear()?,
            out: linear()?,
            heads,
        })
    }

    /// Attends to `memory`, or to the normalised input without one. The scores are not scaled.
    fn forward(&self, x: &Tensor, memory: Option<&Tensor>, bias: Option<&Tensor>) -> Result<Tensor> {
        let y = self.norm.forward(x)?;
        let memory = memory.unwrap_or(&y);
        let heads = |layer: &Linear, x: &Tensor| {
            let (batch, length, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
            layer.forward(x)?.reshape([batch, length, self.heads, width / self.heads])?.transpose(1, 2)
        };
        let (q, k, v) = (heads(&self.query, &y)?, heads(&self.key, memory)?, heads(&self.value, memory)?);
        let options = AttentionOptions { attn_mask: bias, scale: Some(1.0), ..AttentionOptions::default() };
        let y = q.scaled_dot_product_attention(&k, &v, &options)?;
        x.add(&self.out.forward(&y.transpose(1, 2)?.flatten(2, -1)?)?)
    }
}

#[derive(Module)]
struct GatedNetwork {
    norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl GatedNetwork {
    fn new(width: usize, hidden: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            norm: RmsNorm::new([width], device)?.eps(1e-6),
            gate: Linear::without_bias(width, hidden, device)?,
            up: Linear::without_bias(width, hidden, device)?,
            down: Linear::without_bias(hidden, width, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.norm.forward(x)?;
        let up = self.up.forward(&y)?;
        let y = self.gate.forward(&y)?.gelu_tanh()?.mul(&up)?;
        x.add(&self.down.forward(&y)?)
    }
}

#[derive(Module)]
struct Block {
    attention: Attention,
    cross: Option<Attention>,
    network: GatedNetwork,
}

#[derive(Module)]
struct Stack {
    position_bias: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    #[module(skip)]
    buckets: Tensor,
    /// Mask of later positions, \[length, length\].
    #[module(skip)]
    mask: Option<Tensor>,
}

impl Stack {
    fn new(
        [width, heads, hidden, layers]: [usize; 4],
        length: usize,
        is_decoder: bool,
        device: &Device,
    ) -> Result<Self> {
        let block = |_| {
            let attention = || Attention::new(width, heads, device);
            Ok(Block {
                attention: attention()?,
                cross: is_decoder.then(attention).transpose()?,
                network: GatedNetwork::new(width, hidden, device)?,
            })
        };
        let later = |at: usize| if at % length > at / length { f32::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f32> = (0..length * length).map(later).collect();
        Ok(Self {
            position_bias: Embedding::new(BUCKETS as usize, heads, device)?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: RmsNorm::new([width], device)?.eps(1e-6),
            buckets: Tensor::from_slice(&position_buckets(length, is_decoder), [length, length], device)?,
            mask: is_decoder.then(|| Tensor::from_slice(&mask, [length, length], device)).transpose()?,
        })
    }

    fn forward(&self, x: Tensor, memory: Option<&Tensor>) -> Result<Tensor> {
        let bias = self.position_bias.forward(&self.buckets)?.permute([2, 0, 1])?.unsqueeze(0)?;
        let bias = match &self.mask {
            Some(mask) => bias.add(mask)?,
            None => bias,
        };
        let x = self.blocks.iter().try_fold(x, |x, block| {
            let x = block.attention.forward(&x, None, Some(&bias))?;
            let x = match &block.cross {
                Some(cross) => cross.forward(&x, memory, None)?,
                None => x,
            };
            block.network.forward(&x)
        })?;
        self.norm.forward(&x)
    }
}

#[derive(Module)]
struct T5 {
    tokens: Embedding,
    encoder: Stack,
    decoder: Stack,
}

/// T5 with gated GELU and one embedding for inputs and logits, of the small size: 61M parameters.
pub(super) fn t5(tiny: bool, device: &Device) -> Result<Workload> {
    let (vocabulary, extents, [batch, sources, targets]) =
        if tiny { (64, [16, 2, 24, 2], [2, 12, 8]) } else { (32_128, [512, 8, 1024, 6], [32, 256, 128]) };
    let width = extents[0];
    let net = T5 {
        tokens: Embedding::new(vocabulary, width, device)?,
        encoder: Stack::new(extents, sources, false, device)?,
        decoder: Stack::new(extents, targets, true, device)?,
    };
    let words = |length| Tensor::randint(0, vocabulary as i64, [batch, length], DType::I32, device);
    let (source, text, next) = (words(sources)?, words(targets)?, words(targets)?.flatten(0, -1)?);
    Ok(Workload::new(&[batch, sources, targets], net, move |net| {
        let memory = net.encoder.forward(net.tokens.forward(&source)?, None)?;
        let x = net.decoder.forward(net.tokens.forward(&text)?, Some(&memory))?;
        let logits = x.mul((width as f64).powf(-0.5))?.linear(&net.tokens.weight, None)?;
        logits.flatten(0, 1)?.cross_entropy(&next)
    }))
}
