//! Language models, with the names of their published weights.

use forebay::dtype::DType;
use forebay::nn::{LayerNorm, Module, RmsNorm, RotaryEmbedding};
use forebay::ops::AttentionOptions;

use super::*;

fn rms(features: usize, device: &Device) -> Result<RmsNorm> {
    Ok(RmsNorm::new([features], device)?.eps(1e-6))
}

#[derive(Module)]
struct LlamaAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
}

#[derive(Module)]
struct LlamaMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

#[derive(Module)]
struct LlamaLayer {
    self_attn: LlamaAttention,
    mlp: LlamaMlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

#[derive(Module)]
struct LlamaModel {
    embed_tokens: Embedding,
    layers: Vec<LlamaLayer>,
    norm: RmsNorm,
    rotary: RotaryEmbedding,
}

#[derive(Module)]
struct Llama {
    model: LlamaModel,
    lm_head: Linear,
}

impl Llama {
    fn new(words: usize, d: usize, layers: usize, device: &Device) -> Result<Self> {
        let layer = |_| {
            Ok(LlamaLayer {
                self_attn: LlamaAttention {
                    q_proj: linear(d, d, device)?,
                    k_proj: linear(d, d / 2, device)?,
                    v_proj: linear(d, d / 2, device)?,
                    o_proj: linear(d, d, device)?,
                },
                mlp: LlamaMlp {
                    gate_proj: linear(d, 12, device)?,
                    up_proj: linear(d, 12, device)?,
                    down_proj: linear(12, d, device)?,
                },
                input_layernorm: rms(d, device)?,
                post_attention_layernorm: rms(d, device)?,
            })
        };
        let model = LlamaModel {
            embed_tokens: Embedding::new(words, d, device)?,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            norm: rms(d, device)?,
            rotary: RotaryEmbedding::new(8, d / 4, device)?,
        };
        Ok(Self { model, lm_head: linear(d, words, device)? })
    }

    fn forward(&self, words: &Tensor) -> Result<Tensor> {
        let rotary = &self.model.rotary;
        let options = AttentionOptions { is_causal: true, enable_gqa: true, ..AttentionOptions::default() };
        let mut x = self.model.embed_tokens.forward(words)?;
        for layer in &self.model.layers {
            let (y, a) = (layer.input_layernorm.forward(&x)?, &layer.self_attn);
            let q = rotary.forward(&split_heads(&a.q_proj.forward(&y)?, 4)?)?;
            let k = rotary.forward(&split_heads(&a.k_proj.forward(&y)?, 2)?)?;
            let v = split_heads(&a.v_proj.forward(&y)?, 2)?;
            x =
                x.add(&a.o_proj.forward(&merge_heads(&q.scaled_dot_product_attention(&k, &v, &options)?)?)?)?;
            let (y, m) = (layer.post_attention_layernorm.forward(&x)?, &layer.mlp);
            let gate = m.gate_proj.forward(&y)?.silu()?;
            x = x.add(&m.down_proj.forward(&gate.mul(&m.up_proj.forward(&y)?)?)?)?;
        }
        self.lm_head.forward(&self.model.norm.forward(&x)?)
    }
}

#[derive(Module)]
struct T5Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    relative_attention_bias: Option<Embedding>,
}

impl T5Attention {
    fn new(d: usize, biased: bool, device: &Device) -> Result<Self> {
        let square = || linear(d, d, device);
        let bias = if biased { Some(Embedding::new(8, 2, device)?) } else { None };
        Ok(Self { q: square()?, k: square()?, v: square()?, o: square()?, relative_attention_bias: bias })
    }

    fn forward(&self, x: &Tensor, memory: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let q = split_heads(&self.q.forward(x)?, 2)?;
        let (k, v) = (split_heads(&self.k.forward(memory)?, 2)?, split_heads(&self.v.forward(memory)?, 2)?);
        let options = AttentionOptions { attn_mask: bias, scale: Some(1.0), ..AttentionOptions::default() };
        self.o.forward(&merge_heads(&q.scaled_dot_product_attention(&k, &v, &options)?)?)
    }
}

#[derive(Module)]
struct T5Dense {
    wi: Linear,
    wo: Linear,
}

/// Sublayer of a block, with its norm.
#[derive(Module)]
enum T5SubLayer {
    Attention {
        #[module(name = "SelfAttention")]
        inner: T5Attention,
        layer_norm: RmsNorm,
    },
    Cross {
        #[module(name = "EncDecAttention")]
        inner: T5Attention,
        layer_norm: RmsNorm,
    },
    Dense {
        #[module(name = "DenseReluDense")]
        inner: T5Dense,
        layer_norm: RmsNorm,
    },
}

#[derive(Module)]
struct T5Block {
    layer: Vec<T5SubLayer>,
}

#[derive(Module)]
struct T5Stack {
    embed_tokens: Embedding,
    block: Vec<T5Block>,
    final_layer_norm: RmsNorm,
    decoder: bool,
}

#[derive(Module)]
struct T5 {
    shared: Embedding,
    encoder: T5Stack,
    decoder: T5Stack,
    lm_head: Linear,
}

/// Returns T5's relative position buckets: 8 buckets, for distances up to 16.
fn buckets(n: usize, both: bool) -> Vec<i64> {
    let count = if both { 4 } else { 8 };
    let bucket = |far: i64| {
        let (base, far) = match both {
            true => (if far > 0 { count } else { 0 }, far.abs()),
            false => (0, (-far).max(0)),
        };
        let exact = count / 2;
        let log = (far.max(1) as f32 / exact as f32).ln() / (16.0 / exact as f32).ln();
        let large = exact + (log * (count - exact) as f32) as i64;
        base + if far < exact { far } else { large.min(count - 1) }
    };
    (0..n * n).map(|at| bucket((at % n) as i64 - (at / n) as i64)).collect()
}

impl T5Stack {
    fn new(table: &Tensor, decoder: bool, device: &Device) -> Result<Self> {
        let d = table.shape()[1];
        let block = |k: usize| {
            let mut layer = vec![T5SubLayer::Attention {
                inner: T5Attention::new(d, k == 0, device)?,
                layer_norm: rms(d, device)?,
            }];
            if decoder {
                let inner = T5Attention::new(d, false, device)?;
                layer.push(T5SubLayer::Cross { inner, layer_norm: rms(d, device)? });
            }
            let inner = T5Dense { wi: linear(d, 12, device)?, wo: linear(12, d, device)? };
            layer.push(T5SubLayer::Dense { inner, layer_norm: rms(d, device)? });
            Ok(T5Block { layer })
        };
        Ok(Self {
            embed_tokens: Embedding::from_parameter(table.clone()),
            block: (0..2).map(block).collect::<Result<_>>()?,
            final_layer_norm: rms(d, device)?,
            decoder,
        })
    }

    /// Returns the relative position bias, which all layers share; the decoder also masks later positions.
    fn bias(&self, n: usize, device: &Device) -> Result<Option<Tensor>> {
        let first = self.block.first().and_then(|block| block.layer.first());
        let Some(T5SubLayer::Attention {
            inner: T5Attention { relative_attention_bias: Some(table), .. },
            ..
        }) = first
        else {
            return Ok(None);
        };
        let distances = Tensor::from_slice(&buckets(n, !self.decoder), [n, n], device)?;
        let bias = table.forward(&distances)?.permute([2, 0, 1])?;
        if !self.decoder {
            return Ok(Some(bias));
        }
        let later: Vec<bool> = (0..n * n).map(|at| at % n > at / n).collect();
        Ok(Some(bias.masked_fill(&Tensor::from_bools(&later, [n, n], device)?, f64::NEG_INFINITY)?))
    }

    fn forward(&self, words: &Tensor, memory: Option<&Tensor>) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(words)?;
        let bias = self.bias(words.shape()[1], x.device())?;
        for layer in self.block.iter().flat_map(|block| &block.layer) {
            let y = match layer {
                T5SubLayer::Attention { inner, layer_norm } => {
                    let y = layer_norm.forward(&x)?;
                    inner.forward(&y, &y, bias.as_ref())?
                }
                T5SubLayer::Cross { inner, layer_norm } => {
                    let y = layer_norm.forward(&x)?;
                    inner.forward(&y, memory.unwrap_or(&y), None)?
                }
                T5SubLayer::Dense { inner, layer_norm } => {
                    inner.wo.forward(&inner.wi.forward(&layer_norm.forward(&x)?)?.relu()?)?
                }
            };
            x = x.add(&y)?;
        }
        self.final_layer_norm.forward(&x)
    }
}

impl T5 {
    fn new(words: usize, d: usize, device: &Device) -> Result<Self> {
        let (shared, lm_head) = tied_embedding(words, d, device)?;
        let stack = |decoder| T5Stack::new(&shared.weight, decoder, device);
        Ok(Self { encoder: stack(false)?, decoder: stack(true)?, lm_head, shared })
    }

    fn forward(&self, source: &Tensor, target: &Tensor) -> Result<Tensor> {
        let memory = self.encoder.forward(source, None)?;
        self.lm_head.forward(&self.decoder.forward(target, Some(&memory))?.mul(8f64.powf(-0.5))?)
    }
}

#[derive(Module)]
struct DistilEmbeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    #[module(name = "LayerNorm")]
    norm: LayerNorm,
}

#[derive(Module)]
struct DistilAttention {
    q_lin: Linear,
    k_lin: Linear,
    v_lin: Linear,
    out_lin: Linear,
}

#[derive(Module)]
struct DistilLayer {
    attention: DistilAttention,
    sa_layer_norm: LayerNorm,
    ffn: DistilFfn,
    output_layer_norm: LayerNorm,
}

#[derive(Module)]
struct DistilFfn {
    lin1: Linear,
    lin2: Linear,
}

#[derive(Module)]
struct DistilEncoder {
    layer: Vec<DistilLayer>,
}

#[derive(Module)]
struct DistilBert {
    embeddings: DistilEmbeddings,
    transformer: DistilEncoder,
}

impl DistilBert {
    fn new(device: &Device) -> Result<Self> {
        let d = 8;
        let norm = || -> Result<LayerNorm> { Ok(LayerNorm::new([d], device)?.eps(1e-12)) };
        let square = || Linear::new(d, d, device);
        let layer = |_| {
            Ok(DistilLayer {
                attention: DistilAttention {
                    q_lin: square()?,
                    k_lin: square()?,
                    v_lin: square()?,
                    out_lin: square()?,
                },
                sa_layer_norm: norm()?,
                ffn: DistilFfn { lin1: Linear::new(d, 12, device)?, lin2: Linear::new(12, d, device)? },
                output_layer_norm: norm()?,
            })
        };
        Ok(Self {
            embeddings: DistilEmbeddings {
                word_embeddings: Embedding::new(9, d, device)?.with_padding_idx(0)?,
                position_embeddings: Embedding::new(6, d, device)?,
                norm: norm()?,
            },
            transformer: DistilEncoder { layer: (0..2).map(layer).collect::<Result<_>>()? },
        })
    }

    fn forward(&self, words: &Tensor) -> Result<Tensor> {
        let n = words.shape()[1];
        let positions = Tensor::arange(0.0, n as f64, 1.0, DType::I32, words.device())?;
        let e = &self.embeddings;
        let x = e.word_embeddings.forward(words)?.add(&e.position_embeddings.forward(&positions)?)?;
        let mut x = e.norm.forward(&x)?;
        let seen = words.to_dtype(DType::I32)?.ne(0)?.unsqueeze(1)?.unsqueeze(1)?;
        let options = AttentionOptions { attn_mask: Some(&seen), ..AttentionOptions::default() };
        for layer in &self.transformer.layer {
            let a = &layer.attention;
            let (q, k) = (split_heads(&a.q_lin.forward(&x)?, 2)?, split_heads(&a.k_lin.forward(&x)?, 2)?);
            let y = q.scaled_dot_product_attention(&k, &split_heads(&a.v_lin.forward(&x)?, 2)?, &options)?;
            x = layer.sa_layer_norm.forward(&a.out_lin.forward(&merge_heads(&y)?)?.add(&x)?)?;
            let y = layer.ffn.lin2.forward(&layer.ffn.lin1.forward(&x)?.gelu()?)?;
            x = layer.output_layer_norm.forward(&y.add(&x)?)?;
        }
        Ok(x)
    }
}

cases! {
    "llama": |c| Llama::new(11, 16, 2, c.device), |m, x| single(m.forward(&x[0]));
    "t5": |c| T5::new(9, 8, c.device), |m, x| single(m.forward(&x[0], &x[1]));
    "distilbert": |c| DistilBert::new(c.device), |m, x| single(m.forward(&x[0]));
}
