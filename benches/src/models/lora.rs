//! Fine-tuning of a frozen 16-bit GPT-2 by adapters of low rank (Hu et al., 2021).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Dropout, Embedding, LayerNorm, Linear, Module, init};
use forebay::ops::AttentionOptions;
use forebay::tensor::Tensor;

use super::Workload;

/// Rank of the adapters, and the factor of what they add.
const RANK: usize = 16;
const SCALE: f64 = 2.0;

/// Returns a frozen parameter in bf16.
fn freeze(parameter: &Tensor) -> Result<Tensor> {
    let frozen = parameter.detach().to_dtype(DType::BF16)?.to_leaf()?;
    frozen.requires_grad_(false)?;
    Ok(frozen)
}

fn frozen_norm(width: usize, device: &Device) -> Result<LayerNorm> {
    let mut norm = LayerNorm::new([width], device)?;
    norm.weight = freeze(&norm.weight)?;
    norm.bias = norm.bias.as_ref().map(freeze).transpose()?;
    Ok(norm)
}

fn frozen_embedding(entries: usize, width: usize, device: &Device) -> Result<Embedding> {
    let weight = Tensor::randn([entries, width], DType::F32, device)?.mul(0.02)?;
    Ok(Embedding::from_parameter(freeze(&weight)?))
}

/// Frozen layer, with an adapter of two thin layers.
#[derive(Module)]
struct LoraLinear {
    base: Linear,
    dropout: Dropout,
    down: Linear,
    up: Linear,
}

impl LoraLinear {
    fn new(inputs: usize, outputs: usize, device: &Device) -> Result<Self> {
        let base = Linear::new(inputs, outputs, device)?;
        let bias = base.bias.as_ref().map(freeze).transpose()?;
        let up = Linear::without_bias(RANK, outputs, device)?;
        init::zeros_(&up.weight)?;
        Ok(Self {
            base: Linear::from_parameters(freeze(&base.weight)?, bias)?,
            dropout: Dropout::new(0.05),
            down: Linear::without_bias(inputs, RANK, device)?,
            up,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let added = self.up.forward(&self.down.forward(&self.dropout.forward(x)?)?)?;
        self.base.forward(x)?.add(&added.mul(SCALE)?)
    }
}

#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    qkv: LoraLinear,
    proj: LoraLinear,
    norm2: LayerNorm,
    up: LoraLinear,
    down: LoraLinear,
    heads: usize,
}

impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
        let qkv = self.qkv.forward(&self.norm1.forward(x)?)?;
        let qkv = qkv.reshape([batch, length, 3, self.heads, width / self.heads])?;
        let part = |k| qkv.select(2, k)?.transpose(1, 2);
        let options = AttentionOptions { is_causal: true, ..AttentionOptions::default() };
        let y = part(0)?.scaled_dot_product_attention(&part(1)?, &part(2)?, &options)?;
        let x = x.add(&self.proj.forward(&y.transpose(1, 2)?.flatten(2, -1)?)?)?;
        let y = self.up.forward(&self.norm2.forward(&x)?)?.gelu_tanh()?;
        x.add(&self.down.forward(&y)?)
    }
}

#[derive(Module)]
struct Decoder {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

/// GPT-2 124M in bf16 that only adapters of rank 16 change.
pub(super) fn lora(tiny: bool, device: &Device) -> Result<Workload> {
    let (shape, [vocabulary, width, heads, layers]) =
        if tiny { ([2, 8], [50, 32, 2, 2]) } else { ([8, 512], [50_257, 768, 12, 12]) };
    let block = |_| {
        Ok(Block {
            norm1: frozen_norm(width, device)?,
            qkv: LoraLinear::new(width, 3 * width, device)?,
            proj: LoraLinear::new(width, width, device)?,
            norm2: frozen_norm(width, device)?,
            up: LoraLinear::new(width, 4 * width, device)?,
            down: LoraLinear::new(4 * width, width, device)?,
            heads,
        })
    };
    let net = Decoder {
        tokens: frozen_embedding(vocabulary, width, device)?,
        positions: frozen_embedding(shape[1], width, device)?,
        blocks: (0..layers).map(block).collect::<Result<_>>()?,
        norm: frozen_norm(width, device)?,
    };
    let text = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?;
    let target = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?.flatten(0, -1)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.tokens.forward(&text)?.add(&net.positions.weight)?;
        let x = net.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        let logits = net.norm.forward(&x)?.linear(&net.tokens.weight, None)?;
        logits.flatten(0, 1)?.cross_entropy(&target)
    }))
}
