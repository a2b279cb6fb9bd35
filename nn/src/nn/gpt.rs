//! GPT-2, the reference model of the training benchmarks.

use std::sync::Arc;

use super::segment::{is_segment_pass_active, segment};
use super::{Dropout, Embedding, LayerNorm, Linear, Module, ModuleScope};
use crate::{Device, Error, Result, Tensor, fail, fail_if};
use forebay_core::ops::{AttentionOptions, CrossEntropyOptions};

/// Sizes of a [`Gpt`].
#[derive(Clone, Debug, PartialEq)]
pub struct GptOptions {
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Maximum length of a passage, in tokens.
    pub context: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads of a block, which divide the width.
    pub heads: usize,
    /// Features of a token.
    pub width: usize,
    /// Dropout probability in training.
    pub dropout: f64,
}

/// Name, name of the weight files, and \[layers, heads, width, context\].
const PRESETS: [(&str, &str, [usize; 4]); 5] = [
    ("gpt2-124m", "gpt2", [12, 12, 768, 1024]),
    ("gpt2-350m", "gpt2-medium", [24, 16, 1024, 1024]),
    ("gpt2-774m", "gpt2-large", [36, 20, 1280, 1024]),
    ("gpt2-1.5b", "gpt2-xl", [48, 25, 1600, 1024]),
    ("gpt3-6.7b", "gpt3-6.7b", [32, 32, 4096, 2048]),
];

impl GptOptions {
    /// Names that [`preset`](Self::preset) accepts.
    pub const PRESETS: [&str; PRESETS.len()] =
        [PRESETS[0].0, PRESETS[1].0, PRESETS[2].0, PRESETS[3].0, PRESETS[4].0];

    /// Returns published sizes by name (`gpt2-124m`) or by that of the weight files (`gpt2`), without
    /// dropout.
    ///
    /// # Errors
    /// No preset has this name. The message lists the presets.
    #[track_caller]
    pub fn preset(name: &str) -> Result<Self> {
        let preset = PRESETS.iter().find(|p| p.0 == name || p.1 == name).ok_or_else(|| {
            let presets = Self::PRESETS.join(", ");
            Error::argument("Gpt", format!("there is no preset `{name}`; expected one of {presets}"))
        })?;
        let [layers, heads, width, context] = preset.2;
        Ok(Self { vocabulary: 50_257, context, layers, heads, width, dropout: 0.0 })
    }
}

/// Causal self-attention, with the parameter names of GPT-2's files.
#[derive(Module)]
#[module(debug)]
pub struct GptAttention {
    /// Projection to queries, keys and values, concatenated.
    pub c_attn: Linear,
    /// Output projection of the concatenated heads.
    pub c_proj: Linear,
    /// Dropout of the output.
    pub dropout: Dropout,
    heads: usize,
    scope: ModuleScope,
}

impl GptAttention {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            let causal = AttentionOptions { is_causal: true, ..AttentionOptions::default() };
            let attended = self.c_attn.forward(x)?.qkv_attention(self.heads, self.heads, &causal)?;
            self.dropout.forward(&self.c_proj.forward(&attended)?)
        })
    }
}

/// Feed-forward network of two layers.
#[derive(Module)]
#[module(debug)]
pub struct GptMlp {
    /// Layer to four times the width.
    pub c_fc: Linear,
    /// Layer back to the width.
    pub c_proj: Linear,
    /// Dropout of the output.
    pub dropout: Dropout,
    scope: ModuleScope,
}

impl GptMlp {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Self { c_fc, c_proj, .. } = self;
        self.scope.run(|| {
            let y = match (&c_fc.bias, &c_proj.bias) {
                (Some(up), Some(down)) => x.mlp(&c_fc.weight, up, &c_proj.weight, down)?,
                _ => c_proj.forward(&c_fc.forward(x)?.gelu_tanh()?)?,
            };
            self.dropout.forward(&y)
        })
    }
}

/// Transformer block: causal attention, then a feed-forward network, each with a norm and a residual sum.
#[derive(Module)]
#[module(debug)]
pub struct GptBlock {
    /// Norm before the attention.
    pub ln_1: LayerNorm,
    /// Causal self-attention.
    pub attn: GptAttention,
    /// Norm before the feed-forward network.
    pub ln_2: LayerNorm,
    /// Feed-forward network.
    pub mlp: GptMlp,
    scope: ModuleScope,
}

impl GptBlock {
    #[track_caller]
    fn new(options: &GptOptions, device: &Device) -> Result<Self> {
        let GptOptions { width, heads, layers, dropout, .. } = *options;
        fail_if!(heads == 0 || !width.is_multiple_of(heads);
            argument("Gpt"), "a width of {width} does not divide by {heads} heads");
        // Each block adds two terms to the residual stream. The smaller deviation keeps the variance of the
        // sum (Radford et al., 2019, section 2.3).
        let last = INIT_STD / (2.0 * layers as f64).sqrt();
        Ok(Self {
            ln_1: LayerNorm::new([width], device)?,
            attn: GptAttention {
                c_attn: Linear::normal(width, 3 * width, INIT_STD, device)?,
                c_proj: Linear::normal(width, width, last, device)?,
                dropout: Dropout::new(dropout),
                heads,
                scope: ModuleScope::new(),
            },
            ln_2: LayerNorm::new([width], device)?,
            mlp: GptMlp {
                c_fc: Linear::normal(width, 4 * width, INIT_STD, device)?,
                c_proj: Linear::normal(4 * width, width, last, device)?,
                dropout: Dropout::new(dropout),
                scope: ModuleScope::new(),
            },
            scope: ModuleScope::new(),
        })
    }

    /// Applies the block: \[batch, length, features\] to the same shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (x, added) = self.forward_before_add(x, None)?;
        self.scope.run(|| x.add(&added))
    }

    /// Returns two terms of the block's output. `added` is a pending term of `x`. The norms fuse the sums.
    #[track_caller]
    fn forward_before_add(&self, x: &Tensor, added: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| {
            let (x, normed) = match added {
                Some(added) => self.ln_1.forward_add_low_precision(added, x)?,
                None => (x.clone(), self.ln_1.forward(x)?),
            };
            let attended = self.attn.forward(&normed)?;
            let (x, normed) = self.ln_2.forward_add_low_precision(&attended, &x)?;
            Ok((x, self.mlp.forward(&normed)?))
        })
    }
}

/// GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019): maps tokens to scores
/// of the next token. The token embedding is also the weight of the last layer.
///
/// Every block is a [`segment`] of a plan. Parameters are named as in GPT-2's weight files
/// (`h.0.attn.c_attn.weight`). [`load_gpt2`](Self::load_gpt2) loads these files, and
/// [`gpt2_state_dict`](Self::gpt2_state_dict) returns their format.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{Gpt, GptOptions, Module};
/// # let device = Device::null(Default::default());
/// let net = Gpt::new(&GptOptions::preset("gpt2-124m")?, &device)?;
/// assert_eq!(net.num_parameters(), 124_439_808);
/// let text = Tensor::zeros(&[1, 64], DType::I64, &device)?;
/// assert_eq!(net.forward(&text)?.shape(), [1, 64, 50_257]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug)]
pub struct Gpt {
    /// Token embedding.
    pub wte: Embedding,
    /// Position embedding.
    pub wpe: Embedding,
    /// Blocks, shared with the backward passes that recompute them.
    pub h: Vec<Arc<GptBlock>>,
    /// Norm after the blocks.
    pub ln_f: LayerNorm,
    scope: ModuleScope,
}

/// Deviation of the initial weights.
const INIT_STD: f64 = 0.02;

impl Gpt {
    /// Creates a model with GPT-2's initial weights. They are normal with deviation 0.02, divided by √(2 · layers) for
    /// projections to the residual stream. Biases are zero.
    #[track_caller]
    pub fn new(options: &GptOptions, device: &Device) -> Result<Self> {
        let &GptOptions { vocabulary, context, layers, width, .. } = options;
        super::check_layer_count("Gpt", layers)?;
        let block = |_| GptBlock::new(options, device).map(Arc::new);
        Ok(Self {
            wte: Embedding::normal(vocabulary, width, INIT_STD, device)?,
            wpe: Embedding::normal(context, width, INIT_STD, device)?,
            h: (0..layers).map(block).collect::<Result<_>>()?,
            ln_f: LayerNorm::new([width], device)?,
            scope: ModuleScope::new(),
        })
    }

    /// Returns the maximum length of a passage, in tokens.
    #[must_use]
    pub fn context(&self) -> usize {
        self.wpe.weight.shape()[0]
    }

    /// Returns the FLOPs of a training step for each token of passages of `length`. A matrix-product weight
    /// counts six FLOPs, two forward and four backward. Attention counts its whole matrix (Chowdhery et al.,
    /// "PaLM", 2022, appendix B). Recomputation does not count, so the ratio of this rate to the device's
    /// peak is the model-FLOPs utilisation.
    #[must_use]
    pub fn flops_per_token(&self, length: usize) -> f64 {
        let weights = self.num_parameters() - self.wpe.weight.numel();
        let width = self.wpe.weight.shape()[1];
        6.0 * weights as f64 + 12.0 * (self.h.len() * width * length) as f64
    }

    /// Computes scores of the next token at every position: integers \[batch, length\] to \[batch, length,
    /// vocabulary\]. No passage is longer than the context.
    #[track_caller]
    pub fn forward(&self, text: &Tensor) -> Result<Tensor> {
        let x = self.hidden(text)?;
        self.scope.run(|| x.linear(&self.wte.weight, None))
    }

    /// Computes the mean cross-entropy of the next tokens, where `next` has the shape of `text`. Equals that of
    /// [`forward`](Self::forward)'s scores, but never holds the scores of all positions at once
    /// ([`Tensor::linear_cross_entropy`]).
    #[track_caller]
    pub fn loss(&self, text: &Tensor, next: &Tensor) -> Result<Tensor> {
        let x = self.hidden(text)?;
        self.scope.run(|| x.linear_cross_entropy(&self.wte.weight, next, &CrossEntropyOptions::default()))
    }

    /// Computes the features of every position after all blocks and the last norm.
    #[track_caller]
    fn hidden(&self, text: &Tensor) -> Result<Tensor> {
        let context = self.context();
        let (&[_, length], true) = (text.shape(), text.dim(-1)? <= context) else {
            fail!(shape("Gpt", [text]), "takes [batch, length] with a length of at most {context}");
        };
        let mut x = self.scope.run(|| self.wte.forward(text))?;
        let positions = self.wpe.weight.narrow(0, 0, length)?;
        if !is_segment_pass_active() {
            // The first norm fuses the sum with the positions, as later norms fuse the residual sums.
            let mut added = positions.broadcast_to(x.shape())?;
            for block in &self.h {
                (x, added) = block.forward_before_add(&x, Some(&added))?;
            }
            return Ok(self.ln_f.forward_add_low_precision(&added, &x)?.1);
        }
        x = x.add(&positions)?;
        // A recomputed block takes a single tensor, so that one tensor for each block stays saved.
        for block in &self.h {
            let block = Arc::clone(block);
            x = segment(&[&x], move |x| block.forward(&x[0]))?;
        }
        self.ln_f.forward(&x)
    }
}
