//! GPT-2: the model by which training is compared.

use std::sync::Arc;

use super::{Dropout, LayerNorm, Linear, Module, ModuleScope, SelfAttention, init};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::CrossEntropy;
use crate::plan::segment;
use crate::tensor::Tensor;

/// The sizes of a [`Gpt`].
#[derive(Clone, Debug, PartialEq)]
pub struct GptOptions {
    /// Different tokens.
    pub vocabulary: usize,
    /// The longest passage, in tokens.
    pub context: usize,
    /// Blocks.
    pub layers: usize,
    /// Heads of a block's attention.
    pub heads: usize,
    /// Features of a token.
    pub width: usize,
    /// The part of the values that is dropped in training.
    pub dropout: f64,
}

/// Name, layers, heads, width, context.
const PRESETS: [(&str, [usize; 4]); 5] = [
    ("gpt2-124m", [12, 12, 768, 1024]),
    ("gpt2-350m", [24, 16, 1024, 1024]),
    ("gpt2-774m", [36, 20, 1280, 1024]),
    ("gpt2-1.5b", [48, 25, 1600, 1024]),
    ("gpt3-6.7b", [32, 32, 4096, 2048]),
];

impl GptOptions {
    /// The names that [`preset`](Self::preset) takes.
    pub const PRESETS: [&str; PRESETS.len()] =
        [PRESETS[0].0, PRESETS[1].0, PRESETS[2].0, PRESETS[3].0, PRESETS[4].0];

    /// Sizes that were published, by name: `gpt2-124m`. Without dropout.
    ///
    /// # Errors
    /// There is no such preset; the message lists them.
    pub fn preset(name: &str) -> Result<Self> {
        let found = PRESETS.iter().find(|p| p.0 == name).ok_or_else(|| {
            let known = Self::PRESETS.join(", ");
            Error::argument("Gpt", format!("no preset `{name}` is known; there are {known}"))
        })?;
        let [layers, heads, width, context] = found.1;
        Ok(Self { vocabulary: 50_257, context, layers, heads, width, dropout: 0.0 })
    }
}

/// A block: attention, then two layers for each token alone; each on normalised values, and added.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct GptBlock {
    /// Before the attention.
    pub norm1: LayerNorm,
    /// Each token sees those before it.
    pub attention: SelfAttention,
    /// Before the layers.
    pub norm2: LayerNorm,
    /// To four times the width.
    pub up: Linear,
    /// And back.
    pub down: Linear,
    /// Applied to what is added.
    pub dropout: Dropout,
    scope: ModuleScope,
}

impl GptBlock {
    fn new(options: &GptOptions, device: &Device) -> Result<Self> {
        let GptOptions { width, heads, layers, dropout, .. } = *options;
        // Every block adds twice to the same values: smaller by what so many sums grow (Radford et al., 2019, section 2.3).
        let last = STD / (2.0 * layers as f64).sqrt();
        let mut attention = SelfAttention::new(width, heads, device)?.causal().with_dropout(dropout);
        attention.qkv = linear(width, 3 * width, STD, device)?;
        attention.proj = linear(width, width, last, device)?;
        Ok(Self {
            norm1: LayerNorm::new(&[width], device)?,
            attention,
            norm2: LayerNorm::new(&[width], device)?,
            up: linear(width, 4 * width, STD, device)?,
            down: linear(4 * width, width, last, device)?,
            dropout: Dropout::new(dropout),
            scope: ModuleScope::new(),
        })
    }

    /// \[batch, length, features\] to the same.
    ///
    /// # Errors
    /// `x` has another shape; memory runs out.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            let seen = self.attention.forward(&self.norm1.forward(x)?)?;
            let (x, normed) = self.norm2.forward_add(&seen, x)?;
            let y = match (&self.up.bias, &self.down.bias) {
                (Some(up), Some(down)) => normed.mlp(&self.up.weight, up, &self.down.weight, down)?,
                _ => self.down.forward(&self.up.forward(&normed)?.gelu_tanh()?)?,
            };
            x.add(&self.dropout.forward(&y)?)
        })
    }
}

/// GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019): tokens in, scores of the next
/// token out. The table of tokens is also the last layer's weight.
///
/// Every block is a [`segment`] of a plan.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, nn::{Gpt, GptOptions, Module}, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let net = Gpt::new(&GptOptions::preset("gpt2-124m")?, &device)?;
/// assert_eq!(net.num_parameters(), 124_439_808);
/// let text = Tensor::zeros(&[1, 64], DType::I64, &device)?;
/// assert_eq!(net.forward(&text)?.shape(), [1, 64, 50_257]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Gpt {
    /// \[vocabulary, features\].
    pub tokens: Tensor,
    /// \[context, features\].
    pub positions: Tensor,
    /// Shared with the backward passes that run them again.
    pub blocks: Vec<Arc<GptBlock>>,
    /// After the blocks.
    pub norm: LayerNorm,
    scope: ModuleScope,
}

/// The deviation of initial weights.
const STD: f64 = 0.02;

fn normal(shape: &[usize], std: f64, device: &Device) -> Result<Tensor> {
    init::parameter(|| Tensor::normal(shape, 0.0, std, DType::F32, device))
}

fn linear(inputs: usize, outputs: usize, std: f64, device: &Device) -> Result<Linear> {
    let bias = init::parameter(|| Tensor::zeros(&[outputs], DType::F32, device))?;
    Linear::from_parameters(normal(&[outputs, inputs], std, device)?, Some(bias))
}

impl Gpt {
    /// A model with initial weights.
    ///
    /// # Errors
    /// The width does not divide by the heads; memory runs out.
    pub fn new(options: &GptOptions, device: &Device) -> Result<Self> {
        let &GptOptions { vocabulary, context, layers, width, .. } = options;
        let block = |_| GptBlock::new(options, device).map(Arc::new);
        Ok(Self {
            tokens: normal(&[vocabulary, width], STD, device)?,
            positions: normal(&[context, width], STD, device)?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: LayerNorm::new(&[width], device)?,
            scope: ModuleScope::new(),
        })
    }

    /// Scores of the next token at every position: \[batch, length\] to \[batch, length, vocabulary\].
    ///
    /// # Errors
    /// A passage is longer than the context; `text` holds no integers; memory runs out.
    pub fn forward(&self, text: &Tensor) -> Result<Tensor> {
        let x = self.hidden(text)?;
        self.scope.run(|| x.linear(&self.tokens, None))
    }

    /// The mean cross-entropy of the tokens that come next, `next` of the shape of `text`, in place of
    /// `forward(text)?.flatten(0, 1)?.cross_entropy(&next.flatten(0, 1)?)`: the scores of all positions are never held at once
    /// ([`Tensor::linear_cross_entropy`]).
    ///
    /// # Errors
    /// As [`forward`](Self::forward); `next` has another shape.
    pub fn loss(&self, text: &Tensor, next: &Tensor) -> Result<Tensor> {
        let x = self.hidden(text)?;
        self.scope.run(|| x.linear_cross_entropy(&self.tokens, next, &CrossEntropy::default()))
    }

    /// The features of every position after all blocks, normalised.
    fn hidden(&self, text: &Tensor) -> Result<Tensor> {
        let context = self.positions.dim(0)?;
        let (&[_, length], true) = (text.shape(), text.dim(-1)? <= context) else {
            let rule = format!("takes [batch, length] with a length of at most {context}");
            return Err(Error::shape("Gpt", rule, &[text.shape()]));
        };
        let x = self.scope.run(|| {
            let positions = self.positions.narrow(0, 0, length)?;
            self.tokens.embedding(text, None)?.add(&positions)
        });
        let mut x = x?;
        for block in &self.blocks {
            let block = Arc::clone(block);
            x = segment(&[&x], move |x| block.forward(&x[0]))?;
        }
        self.norm.forward(&x)
    }
}
