//! Gated linear attention: states that decay by gates of the input, in chunks (Yang et al., 2024).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Embedding, LayerNorm, Linear, Module, RmsNorm};
use forebay::ops::{PadMode, einsum, stack};
use forebay::tensor::Tensor;

use super::Workload;

/// Softens the gates.
const TEMPERATURE: f64 = 16.0;

/// Returns the tokens one place later, after a zero.
fn shift(x: &Tensor) -> Result<Tensor> {
    x.pad(&[0, 0, 1, -1], PadMode::Constant(0.0.into()))
}

/// Mixes the tokens of positions \[batch, length, width\] by linear attention.
#[derive(Module)]
struct GatedAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    decay: [Linear; 2],
    gate: Linear,
    norm: RmsNorm,
    out: Linear,
    heads: usize,
    chunk: usize,
}

impl GatedAttention {
    fn new(width: usize, heads: usize, chunk: usize, device: &Device) -> Result<Self> {
        let linear = |outputs| Linear::without_bias(width, outputs, device);
        Ok(Self {
            query: linear(width / 2)?,
            key: linear(width / 2)?,
            value: linear(width)?,
            decay: [Linear::without_bias(width, 16, device)?, Linear::new(16, width / 2, device)?],
            gate: linear(width)?,
            norm: RmsNorm::new([width / heads], device)?,
            out: linear(width)?,
            heads,
            chunk,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length) = (x.shape()[0], x.shape()[1]);
        let (heads, chunk, chunks) = (self.heads, self.chunk, length / self.chunk);
        // [batch, heads, chunks, steps, features].
        let split = |t: Tensor| {
            let features = t.shape()[2] / heads;
            t.reshape([batch, chunks, chunk, heads, features])?.permute([0, 3, 1, 2, 4])
        };
        let q = split(self.query.forward(x)?)?;
        let (k, v) = (split(self.key.forward(x)?)?, split(self.value.forward(x)?)?);
        let decay = self.decay[1].forward(&self.decay[0].forward(x)?)?;
        let sums = split(decay.to_dtype(DType::F32)?.logsigmoid()?.div(TEMPERATURE)?)?.cumsum(-2)?;
        let total = sums.narrow(-2, chunk - 1, 1)?;
        let scale = ((q.shape()[4]) as f64).powf(-0.5);
        let reads = q.mul(&sums.exp()?)?.mul(scale)?;
        // Within chunks.
        let scores = einsum("bhnid,bhnjd->bhnij", &[&reads, &k.mul(&sums.neg()?.exp()?)?])?;
        let inside = einsum("bhnij,bhnjd->bhnid", &[&scores.tril(0)?, &v])?;
        // What each chunk adds to the state, and the state before each chunk.
        let writes = k.mul(&total.sub(&sums)?.exp()?)?;
        let added = einsum("bhnid,bhnie->bhnde", &[&writes, &v])?;
        let kept = total.exp()?.transpose(-2, -1)?;
        let (features, elements) = (added.shape()[3], added.shape()[4]);
        let mut state = Tensor::zeros([batch, heads, features, elements], DType::F32, x.device())?;
        let mut states = Vec::with_capacity(chunks);
        for n in 0..chunks as isize {
            states.push(state.clone());
            state = state.mul(&kept.select(2, n)?)?.add(&added.select(2, n)?)?;
        }
        let before = einsum("bhnid,bhnde->bhnie", &[&reads, &stack(&states, 2)?])?;
        let y = inside.add(&before)?.permute([0, 2, 3, 1, 4])?.reshape([batch, length, heads, elements])?;
        let y = self.norm.forward(&y)?.flatten(2, 3)?;
        self.out.forward(&y.mul(&self.gate.forward(x)?.silu()?)?)
    }
}

/// Network over channels that also reads the token before (RWKV).
#[derive(Module)]
struct ChannelMix {
    mix: [Tensor; 2],
    key: Linear,
    value: Linear,
    gate: Linear,
}

impl ChannelMix {
    fn new(width: usize, device: &Device) -> Result<Self> {
        let mix = || Tensor::full([width], 0.5, DType::F32, device)?.to_leaf();
        Ok(Self {
            mix: [mix()?, mix()?],
            key: Linear::without_bias(width, 4 * width, device)?,
            value: Linear::without_bias(4 * width, width, device)?,
            gate: Linear::without_bias(width, width, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let change = shift(x)?.sub(x)?;
        let mixed = |mix: &Tensor| x.add(&change.mul(mix)?);
        let k = self.key.forward(&mixed(&self.mix[0])?)?.relu()?.square()?;
        self.gate.forward(&mixed(&self.mix[1])?)?.sigmoid()?.mul(&self.value.forward(&k)?)
    }
}

#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: GatedAttention,
    norm2: LayerNorm,
    network: ChannelMix,
}

#[derive(Module)]
struct Gla {
    tokens: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

/// Language model of gated linear attention and RWKV's networks in six layers.
pub(super) fn gla(tiny: bool, device: &Device) -> Result<Workload> {
    let (shape, [vocabulary, width, heads, chunk, layers]) =
        if tiny { ([2, 16], [50, 16, 2, 4, 2]) } else { ([8, 1024], [8192, 512, 4, 64, 6]) };
    let block = |_| {
        Ok(Block {
            norm1: LayerNorm::new([width], device)?,
            attention: GatedAttention::new(width, heads, chunk, device)?,
            norm2: LayerNorm::new([width], device)?,
            network: ChannelMix::new(width, device)?,
        })
    };
    let net = Gla {
        tokens: Embedding::new(vocabulary, width, device)?,
        blocks: (0..layers).map(block).collect::<Result<_>>()?,
        norm: LayerNorm::new([width], device)?,
        head: Linear::without_bias(width, vocabulary, device)?,
    };
    let text = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?;
    let target = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?.flatten(0, -1)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.blocks.iter().try_fold(net.tokens.forward(&text)?, |x, block| {
            let x = x.add(&block.attention.forward(&block.norm1.forward(&x)?)?)?;
            x.add(&block.network.forward(&block.norm2.forward(&x)?)?)
        })?;
        net.head.forward(&net.norm.forward(&x)?)?.flatten(0, 1)?.cross_entropy(&target)
    }))
}
