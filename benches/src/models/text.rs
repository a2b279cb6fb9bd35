//! Transformers: a decoder, BERT with padding, and a mixture of experts.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{
    Bert, BertOptions, Embedding, LayerNorm, Linear, Module, RmsNorm, RotaryEmbedding, SelfAttention,
};
use forebay::ops::AttentionOptions;
use forebay::tensor::Tensor;

use super::Workload;

/// Creates a table of `entries` rows with deviation 0.02.
fn small_embedding(entries: usize, width: usize, device: &Device) -> Result<Embedding> {
    let weight = Tensor::randn([entries, width], DType::F32, device)?.mul(0.02)?.detach().to_leaf()?;
    Ok(Embedding::from_parameter(weight))
}

/// Attention whose keys and values serve several heads of queries.
#[derive(Module)]
struct GroupedAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    rotary: RotaryEmbedding,
    features: usize,
}

impl GroupedAttention {
    fn new(width: usize, [heads, shared]: [usize; 2], positions: usize, device: &Device) -> Result<Self> {
        let features = width / heads;
        let linear = |outputs| Linear::without_bias(width, outputs, device);
        Ok(Self {
            query: linear(width)?,
            key: linear(shared * features)?,
            value: linear(shared * features)?,
            out: linear(width)?,
            rotary: RotaryEmbedding::new(positions, features, device)?,
            features,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length) = (x.shape()[0], x.shape()[1]);
        let heads = |layer: &Linear| {
            let y = layer.forward(x)?;
            let count = y.shape()[2] / self.features;
            y.reshape([batch, length, count, self.features])?.transpose(1, 2)
        };
        let q = self.rotary.forward(&heads(&self.query)?)?;
        let k = self.rotary.forward(&heads(&self.key)?)?;
        let options = AttentionOptions { is_causal: true, enable_gqa: true, ..AttentionOptions::default() };
        let y = q.scaled_dot_product_attention(&k, &heads(&self.value)?, &options)?;
        self.out.forward(&y.transpose(1, 2)?.flatten(2, -1)?)
    }
}

#[derive(Module)]
struct DecoderBlock {
    norm1: RmsNorm,
    attention: GroupedAttention,
    norm2: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl DecoderBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.add(&self.attention.forward(&self.norm1.forward(x)?)?)?;
        let y = self.norm2.forward(&x)?;
        // SiLU and its product are one kernel, because nothing is launched between them.
        let up = self.up.forward(&y)?;
        let y = self.gate.forward(&y)?.silu()?.mul(&up)?;
        x.add(&self.down.forward(&y)?)
    }
}

#[derive(Module)]
struct Decoder {
    tokens: Embedding,
    blocks: Vec<DecoderBlock>,
    norm: RmsNorm,
}

/// Decoder with RMS norms, rotary positions, grouped heads and SwiGLU: 213M parameters.
pub(super) fn decoder(tiny: bool, device: &Device) -> Result<Workload> {
    let (vocabulary, width, layers, heads, hidden) =
        if tiny { (128, 32, 2, [4, 2], 64) } else { (32_000, 1024, 16, [16, 4], 2816) };
    let shape = if tiny { [2, 16] } else { [8, 1024] };
    let block = |_| {
        Ok(DecoderBlock {
            norm1: RmsNorm::new([width], device)?,
            attention: GroupedAttention::new(width, heads, shape[1], device)?,
            norm2: RmsNorm::new([width], device)?,
            gate: Linear::without_bias(width, hidden, device)?,
            up: Linear::without_bias(width, hidden, device)?,
            down: Linear::without_bias(hidden, width, device)?,
        })
    };
    let net = Decoder {
        tokens: small_embedding(vocabulary, width, device)?,
        blocks: (0..layers).map(block).collect::<Result<_>>()?,
        norm: RmsNorm::new([width], device)?,
    };
    let text = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?;
    let target = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?.flatten(0, -1)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.tokens.forward(&text)?;
        let x = net.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        // The head has the weight of the embedding.
        let logits = net.norm.forward(&x)?.linear(&net.tokens.weight, None)?;
        logits.flatten(0, 1)?.cross_entropy(&target)
    }))
}

#[derive(Module)]
struct Classifier {
    bert: Bert,
    head: Linear,
}

/// BERT-base that classifies texts of unequal lengths, padded to the longest.
pub(super) fn bert(tiny: bool, device: &Device) -> Result<Workload> {
    let options = match tiny {
        true => BertOptions {
            vocab_size: 100,
            max_position_embeddings: 16,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            hidden_size: 32,
            intermediate_size: 64,
            ..BertOptions::default()
        },
        false => BertOptions::default(),
    };
    let shape = if tiny { [4, 16] } else { [32, 256] };
    let [batch, length] = shape;
    let net =
        Classifier { bert: Bert::new(&options, device)?, head: Linear::new(options.hidden_size, 2, device)? };
    let text = Tensor::randint(1, options.vocab_size as i64, shape, DType::I32, device)?;
    // Lengths from a half to the whole.
    let mask: Vec<i32> = (0..batch)
        .flat_map(|row| (0..length).map(move |k| i32::from(k < length - row * 7 % (length / 2))))
        .collect();
    let mask = Tensor::from_slice(&mask, shape, device)?;
    let classes: Vec<i32> = (0..batch as i32).map(|row| row % 2).collect();
    let classes = Tensor::from_slice(&classes, [batch], device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let hidden = net.bert.forward(&text, Some(&mask))?;
        net.head.forward(&net.bert.pooler_output(&hidden)?)?.cross_entropy(&classes)
    }))
}

#[derive(Module)]
struct Expert {
    up: Linear,
    down: Linear,
}

/// Layer in which each expert chooses the tokens with its highest scores, twice an equal share.
#[derive(Module)]
struct Experts {
    router: Linear,
    experts: Vec<Expert>,
}

impl Experts {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let tokens = x.flatten(0, 1)?;
        let scores = self.router.forward(&tokens)?.softmax(-1)?.transpose(0, 1)?;
        let capacity = 2 * tokens.shape()[0] / self.experts.len();
        let (gates, chosen) = scores.topk(capacity, -1, true)?;
        let mut out = tokens.zeros_like()?;
        for (k, expert) in self.experts.iter().enumerate() {
            let rows = chosen.select(0, k as isize)?;
            let y = expert.up.forward(&tokens.index_select(0, &rows)?)?.gelu()?;
            let y = expert.down.forward(&y)?.mul(&gates.select(0, k as isize)?.unsqueeze(-1)?)?;
            out = out.index_add(0, &rows, &y.to_dtype(out.dtype())?, 1.0)?;
        }
        out.reshape(x.shape())
    }
}

#[derive(Module)]
struct MixtureBlock {
    norm1: LayerNorm,
    attention: SelfAttention,
    norm2: LayerNorm,
    experts: Experts,
}

impl MixtureBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.add(&self.attention.forward(&self.norm1.forward(x)?)?)?;
        x.add(&self.experts.forward(&self.norm2.forward(&x)?)?)
    }
}

#[derive(Module)]
struct Mixture {
    tokens: Embedding,
    blocks: Vec<MixtureBlock>,
    norm: LayerNorm,
    head: Linear,
}

/// Encoder whose feed-forward layers are mixtures of 8 experts, by `index_select` and `index_add`.
pub(super) fn mixture(tiny: bool, device: &Device) -> Result<Workload> {
    let (vocabulary, width, layers, heads) = if tiny { (128, 32, 2, 2) } else { (8192, 768, 4, 12) };
    let shape = if tiny { [2, 16] } else { [8, 512] };
    let expert = |_| {
        Ok(Expert {
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
        })
    };
    let block = |_| {
        Ok(MixtureBlock {
            norm1: LayerNorm::new([width], device)?,
            attention: SelfAttention::new(width, heads, device)?,
            norm2: LayerNorm::new([width], device)?,
            experts: Experts {
                router: Linear::without_bias(width, 8, device)?,
                experts: (0..8).map(expert).collect::<Result<_>>()?,
            },
        })
    };
    let net = Mixture {
        tokens: small_embedding(vocabulary, width, device)?,
        blocks: (0..layers).map(block).collect::<Result<_>>()?,
        norm: LayerNorm::new([width], device)?,
        head: Linear::without_bias(width, vocabulary, device)?,
    };
    let text = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?;
    let target = Tensor::randint(0, vocabulary as i64, shape, DType::I32, device)?.flatten(0, -1)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.tokens.forward(&text)?;
        let x = net.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        net.head.forward(&net.norm.forward(&x)?)?.flatten(0, 1)?.cross_entropy(&target)
    }))
}
