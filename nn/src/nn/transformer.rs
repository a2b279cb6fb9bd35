//! Transformer encoders and decoders, with PyTorch's parameters.

use super::multihead::{AttentionMasks, MultiheadAttention, MultiheadAttentionOptions};
use super::{Dropout, LayerNorm, Linear, Module, ModuleScope, init};
use crate::{Device, Result, Tensor, fail_if};

/// Activation between the two feed-forward layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransformerActivation {
    /// max(x, 0).
    #[default]
    Relu,
    /// x Φ(x), computed with erf.
    Gelu,
}

with_defaults! {
    /// Options of transformer layers. `TransformerOptions { batch_first: true, ..Default::default() }`.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct TransformerOptions {
        /// Features between the two feed-forward layers; 2048.
        pub feedforward: usize = 2048,
        /// Dropout probability of attention weights, between feed-forward layers and before residual sums;
        /// 0.1.
        pub dropout: f64 = 0.1,
        /// Activation between the feed-forward layers; ReLU.
        pub activation: TransformerActivation = TransformerActivation::Relu,
        /// Term added to the variances of the norms; 1e-5.
        pub layer_norm_eps: f64 = 1e-5,
        /// If true, the layout is \[batch, length, features\], else \[length, batch, features\]; false.
        pub batch_first: bool = false,
        /// If true, each block normalises its input (pre-norm) instead of the residual sum (post-norm); false.
        pub norm_first: bool = false,
        /// If true, layers and norms have biases; true.
        pub bias: bool = true,
    }
}

impl TransformerOptions {
    #[track_caller]
    fn create_attention(&self, features: usize, heads: usize, device: &Device) -> Result<MultiheadAttention> {
        let &Self { dropout, bias, batch_first, .. } = self;
        let options =
            MultiheadAttentionOptions { dropout, bias, batch_first, ..MultiheadAttentionOptions::default() };
        MultiheadAttention::new(features, heads, options, device)
    }

    #[track_caller]
    fn create_norm(&self, features: usize, device: &Device) -> Result<LayerNorm> {
        let norm = LayerNorm::new([features], device)?.eps(self.layer_norm_eps);
        Ok(if self.bias { norm } else { norm.without_bias() })
    }
}

/// Adds the output of a block to `x`, with the norm before the block or after the sum.
fn residual_block(
    x: &Tensor,
    norm: &LayerNorm,
    dropout: &Dropout,
    norm_first: bool,
    body: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if norm_first {
        return x.add(&dropout.forward(&body(&norm.forward(x)?)?)?);
    }
    // One kernel computes the sum and its norm.
    Ok(norm.forward_add(&dropout.forward(&body(x)?)?, x)?.1)
}

/// Applies the feed-forward network: two layers with activation and dropout between.
fn feedforward_block(
    x: &Tensor,
    [first, second]: [&Linear; 2],
    dropout: &Dropout,
    activation: TransformerActivation,
) -> Result<Tensor> {
    let x = first.forward(x)?;
    let x = if activation == TransformerActivation::Relu { x.relu()? } else { x.gelu()? };
    second.forward(&dropout.forward(&x)?)
}

/// Encoder layer: self-attention, then a feed-forward network, each with a residual sum and a norm.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{AttentionMasks, TransformerEncoderLayer, TransformerOptions};
/// # let device = Device::null(Default::default());
/// let options = TransformerOptions { batch_first: true, norm_first: true, ..Default::default() };
/// let layer = TransformerEncoderLayer::new(64, 8, options, &device)?;
/// let x = Tensor::zeros(&[2, 10, 64], DType::F32, &device)?;
/// assert_eq!(layer.forward(&x, &AttentionMasks::default())?.shape(), [2, 10, 64]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug)]
pub struct TransformerEncoderLayer {
    /// Self-attention.
    pub self_attn: MultiheadAttention,
    /// First feed-forward layer.
    pub linear1: Linear,
    /// Dropout between the feed-forward layers.
    pub dropout: Dropout,
    /// Second feed-forward layer.
    pub linear2: Linear,
    /// Norm of the self-attention block.
    pub norm1: LayerNorm,
    /// Norm of the feed-forward block.
    pub norm2: LayerNorm,
    /// Dropout after the self-attention.
    pub dropout1: Dropout,
    /// Dropout after the feed-forward layers.
    pub dropout2: Dropout,
    #[module(skip)]
    options: TransformerOptions,
    scope: ModuleScope,
}

impl TransformerEncoderLayer {
    /// Creates a layer for `features` features and `heads` heads, which divide them, initialised as in PyTorch.
    #[track_caller]
    pub fn new(features: usize, heads: usize, options: TransformerOptions, device: &Device) -> Result<Self> {
        let drop = || Dropout::new(options.dropout);
        Ok(Self {
            self_attn: options.create_attention(features, heads, device)?,
            linear1: Linear::uniform(features, options.feedforward, options.bias, device)?,
            dropout: drop(),
            linear2: Linear::uniform(options.feedforward, features, options.bias, device)?,
            norm1: options.create_norm(features, device)?,
            norm2: options.create_norm(features, device)?,
            dropout1: drop(),
            dropout2: drop(),
            options,
            scope: ModuleScope::new(),
        })
    }

    /// Applies the layer: \[length, batch, features\] (with `batch_first` \[batch, length, features\]), or
    /// without the batch, to the same shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, masks: &AttentionMasks<'_>) -> Result<Tensor> {
        self.scope.run(|| {
            let first = self.options.norm_first;
            let x = residual_block(x, &self.norm1, &self.dropout1, first, |x| {
                self.self_attn.forward(x, x, x, masks)
            })?;
            residual_block(&x, &self.norm2, &self.dropout2, first, |x| {
                feedforward_block(x, [&self.linear1, &self.linear2], &self.dropout, self.options.activation)
            })
        })
    }
}

/// Decoder layer: self-attention, cross-attention to the encoder's output, then a feed-forward network.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{AttentionMasks, TransformerDecoderLayer, TransformerOptions};
/// # let device = Device::null(Default::default());
/// let layer = TransformerDecoderLayer::new(64, 8, TransformerOptions::default(), &device)?;
/// let x = Tensor::zeros(&[7, 2, 64], DType::F32, &device)?;
/// let memory = Tensor::zeros(&[10, 2, 64], DType::F32, &device)?;
/// let (causal, none) = (AttentionMasks::causal(), AttentionMasks::default());
/// assert_eq!(layer.forward(&x, &memory, &causal, &none)?.shape(), [7, 2, 64]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug)]
pub struct TransformerDecoderLayer {
    /// Self-attention.
    pub self_attn: MultiheadAttention,
    /// Cross-attention to the encoder's output.
    pub multihead_attn: MultiheadAttention,
    /// First feed-forward layer.
    pub linear1: Linear,
    /// Dropout between the feed-forward layers.
    pub dropout: Dropout,
    /// Second feed-forward layer.
    pub linear2: Linear,
    /// Norm of the self-attention block.
    pub norm1: LayerNorm,
    /// Norm of the cross-attention block.
    pub norm2: LayerNorm,
    /// Norm of the feed-forward block.
    pub norm3: LayerNorm,
    /// Dropout after the self-attention.
    pub dropout1: Dropout,
    /// Dropout after the cross-attention.
    pub dropout2: Dropout,
    /// Dropout after the feed-forward layers.
    pub dropout3: Dropout,
    #[module(skip)]
    options: TransformerOptions,
    scope: ModuleScope,
}

impl TransformerDecoderLayer {
    /// Creates a layer for `features` features and `heads` heads, which divide them, initialised as in PyTorch.
    #[track_caller]
    pub fn new(features: usize, heads: usize, options: TransformerOptions, device: &Device) -> Result<Self> {
        let drop = || Dropout::new(options.dropout);
        Ok(Self {
            self_attn: options.create_attention(features, heads, device)?,
            multihead_attn: options.create_attention(features, heads, device)?,
            linear1: Linear::uniform(features, options.feedforward, options.bias, device)?,
            dropout: drop(),
            linear2: Linear::uniform(options.feedforward, features, options.bias, device)?,
            norm1: options.create_norm(features, device)?,
            norm2: options.create_norm(features, device)?,
            norm3: options.create_norm(features, device)?,
            dropout1: drop(),
            dropout2: drop(),
            dropout3: drop(),
            options,
            scope: ModuleScope::new(),
        })
    }

    /// Applies the layer to `x` and the encoder's output `memory`, each \[length, batch, features\] (with
    /// `batch_first` \[batch, length, features\]), or without the batch. The result has the shape of `x`.
    /// `masks` apply to the self-attention, `memory_masks` to the cross-attention.
    #[track_caller]
    pub fn forward(
        &self,
        x: &Tensor,
        memory: &Tensor,
        masks: &AttentionMasks<'_>,
        memory_masks: &AttentionMasks<'_>,
    ) -> Result<Tensor> {
        self.scope.run(|| {
            let first = self.options.norm_first;
            let x = residual_block(x, &self.norm1, &self.dropout1, first, |x| {
                self.self_attn.forward(x, x, x, masks)
            })?;
            let x = residual_block(&x, &self.norm2, &self.dropout2, first, |x| {
                self.multihead_attn.forward(x, memory, memory, memory_masks)
            })?;
            residual_block(&x, &self.norm3, &self.dropout3, first, |x| {
                feedforward_block(x, [&self.linear1, &self.linear2], &self.dropout, self.options.activation)
            })
        })
    }
}

/// Defines a stack of layers, each with the same further arguments, and an optional final norm.
macro_rules! transformer_stack {
    ($(#[$doc:meta])* $stack:ident of $layer:ident($($input:ident: $ty:ty),*)) => {
        $(#[$doc])*
        #[derive(Module)]
        #[module(debug)]
        pub struct $stack {
            /// Layers in order.
            pub layers: Vec<$layer>,
            /// Final norm; none by default.
            pub norm: Option<LayerNorm>,
            scope: ModuleScope,
        }

        impl $stack {
            /// Creates `layers` layers without a final norm. `heads` divides `features`.
            #[track_caller]
            pub fn new(
                features: usize,
                heads: usize,
                layers: usize,
                options: TransformerOptions,
                device: &Device,
            ) -> Result<Self> {
                super::check_layer_count(stringify!($stack), layers)?;
                let layer = |_| $layer::new(features, heads, options, device);
                let layers = (0..layers).map(layer).collect::<Result<_>>()?;
                Ok(Self { layers, norm: None, scope: ModuleScope::new() })
            }

            setters! {
                /// Adds a norm after the last layer.
                fn with_norm(norm: LayerNorm) { norm: Some(norm) }
            }

            #[doc = concat!("Applies all layers, with the shapes and errors of [`", stringify!($layer), "::forward`].")]
            #[track_caller]
            pub fn forward(&self, x: &Tensor, $($input: $ty),*) -> Result<Tensor> {
                self.scope.run(|| {
                    let x = self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x, $($input),*))?;
                    self.norm.as_ref().map_or_else(|| Ok(x.clone()), |norm| norm.forward(&x))
                })
            }
        }
    };
}

transformer_stack! {
    /// Stack of encoder layers with an optional final norm.
    ///
    /// Each layer has initial values of its own; PyTorch's stack begins with copies of one layer.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::{AttentionMasks, TransformerEncoder, TransformerOptions};
    /// # let device = Device::null(Default::default());
    /// let encoder = TransformerEncoder::new(64, 8, 2, TransformerOptions::default(), &device)?;
    /// let x = Tensor::zeros(&[10, 2, 64], DType::F32, &device)?;
    /// let padding = Tensor::from_bools(&[false; 20], &[2, 10], &device)?;
    /// let masks = AttentionMasks::from_key_padding_mask(&padding);
    /// assert_eq!(encoder.forward(&x, &masks)?.shape(), [10, 2, 64]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    TransformerEncoder of TransformerEncoderLayer(masks: &AttentionMasks<'_>)
}

transformer_stack! {
    /// Stack of decoder layers with an optional final norm.
    TransformerDecoder of TransformerDecoderLayer(memory: &Tensor, masks: &AttentionMasks<'_>, memory_masks: &AttentionMasks<'_>)
}

/// Encoder and decoder, each with a final norm (Vaswani et al., 2017).
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{AttentionMasks, Transformer, TransformerOptions};
/// # let device = Device::null(Default::default());
/// let options = TransformerOptions { feedforward: 64, batch_first: true, ..Default::default() };
/// let model = Transformer::new(32, 4, [2, 2], options, &device)?;
/// let from = Tensor::zeros(&[2, 10, 32], DType::F32, &device)?;
/// let to = Tensor::zeros(&[2, 7, 32], DType::F32, &device)?;
/// let none = AttentionMasks::default();
/// assert_eq!(model.forward(&from, &to, &none, &AttentionMasks::causal(), &none)?.shape(), [2, 7, 32]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug)]
pub struct Transformer {
    /// Encoder of the source.
    pub encoder: TransformerEncoder,
    /// Decoder of the target.
    pub decoder: TransformerDecoder,
    scope: ModuleScope,
}

impl Transformer {
    /// Creates a model with `layers` encoder and decoder layers. `heads` divides `features`. Matrices are uniform
    /// by Xavier's rule, as in PyTorch.
    #[track_caller]
    pub fn new(
        features: usize,
        heads: usize,
        layers: [usize; 2],
        options: TransformerOptions,
        device: &Device,
    ) -> Result<Self> {
        let norm = || options.create_norm(features, device);
        let model = Self {
            encoder: TransformerEncoder::new(features, heads, layers[0], options, device)?.with_norm(norm()?),
            decoder: TransformerDecoder::new(features, heads, layers[1], options, device)?.with_norm(norm()?),
            scope: ModuleScope::new(),
        };
        for matrix in model.parameters().iter().filter(|parameter| parameter.rank() > 1) {
            init::xavier_uniform_(matrix, 1.0)?;
        }
        Ok(model)
    }

    /// Decodes the target `to` with attention to the encoded source `from`, each \[length, batch, features\]
    /// (with `batch_first` \[batch, length, features\]). The result has the shape of `to`. The masks apply to
    /// the source, the target, and the cross-attention of the target to the encoder's output.
    #[track_caller]
    pub fn forward(
        &self,
        from: &Tensor,
        to: &Tensor,
        from_masks: &AttentionMasks<'_>,
        to_masks: &AttentionMasks<'_>,
        memory_masks: &AttentionMasks<'_>,
    ) -> Result<Tensor> {
        self.scope.run(|| {
            fail_if!(
                from.shape().last() != to.shape().last() || from.rank() != to.rank();
                shape("Transformer", [from, to]), "source and target have the same features, and both or neither a batch"
            );
            let memory = self.encoder.forward(from, from_masks)?;
            self.decoder.forward(to, &memory, to_masks, memory_masks)
        })
    }
}
