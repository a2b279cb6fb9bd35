//! Transformer encoders and decoders, with PyTorch's parameters.

use super::multihead::{AttentionMasks, MultiheadAttention, MultiheadAttentionOptions};
use super::{Dropout, LayerNorm, Linear, Module, ModuleScope, init};
use forebay_core::device::Device;
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

/// Between the two layers that treat each position alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransformerActivation {
    /// max(x, 0).
    #[default]
    Relu,
    /// x Φ(x), by erf.
    Gelu,
}

/// What transformer layers are made of. `TransformerOptions { batch_first: true, ..Default::default() }`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransformerOptions {
    /// Features between the two layers for each position; 2048.
    pub feedforward: usize,
    /// The part of values that is dropped in training: of attention's weights, between the layers and before every sum; 0.1.
    pub dropout: f64,
    /// Between the layers; ReLU.
    pub activation: TransformerActivation,
    /// Added to the norms' variances; 1e-5.
    pub layer_norm_eps: f64,
    /// Whether the batch is the first dimension and the sequence the second; no.
    pub batch_first: bool,
    /// Whether each block normalises its input, and not the sum behind it; no.
    pub norm_first: bool,
    /// Whether layers and norms have biases; yes.
    pub bias: bool,
}

impl Default for TransformerOptions {
    fn default() -> Self {
        Self {
            feedforward: 2048,
            dropout: 0.1,
            activation: TransformerActivation::Relu,
            layer_norm_eps: 1e-5,
            batch_first: false,
            norm_first: false,
            bias: true,
        }
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
    fn create_linear(&self, inputs: usize, outputs: usize, device: &Device) -> Result<Linear> {
        if self.bias {
            Linear::new(inputs, outputs, device)
        } else {
            Linear::without_bias(inputs, outputs, device)
        }
    }

    #[track_caller]
    fn create_norm(&self, features: usize, device: &Device) -> Result<LayerNorm> {
        let norm = LayerNorm::new(&[features], device)?.eps(self.layer_norm_eps);
        Ok(if self.bias { norm } else { norm.without_bias() })
    }
}

/// `x` and what a block makes of it: normalised before the block, or behind the sum.
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
    // The sum and its norm are one kernel.
    Ok(norm.forward_add(&dropout.forward(&body(x)?)?, x)?.1)
}

/// The two layers for each position alone, with an activation and dropout between.
fn feedforward_block(
    x: &Tensor,
    (first, dropout, second): (&Linear, &Dropout, &Linear),
    options: &TransformerOptions,
) -> Result<Tensor> {
    let x = first.forward(x)?;
    let x = match options.activation {
        TransformerActivation::Relu => x.relu()?,
        TransformerActivation::Gelu => x.gelu()?,
    };
    second.forward(&dropout.forward(&x)?)
}

/// Attention of a sequence to itself, then two layers for each position alone; each added to what it was given, and normalised.
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
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct TransformerEncoderLayer {
    /// Of the sequence to itself.
    pub self_attn: MultiheadAttention,
    /// To the features between.
    pub linear1: Linear,
    /// Between the layers.
    pub dropout: Dropout,
    /// And back.
    pub linear2: Linear,
    /// Of the attention.
    pub norm1: LayerNorm,
    /// Of the layers.
    pub norm2: LayerNorm,
    /// Behind the attention.
    pub dropout1: Dropout,
    /// Behind the layers.
    pub dropout2: Dropout,
    #[module(skip)]
    options: TransformerOptions,
    scope: ModuleScope,
}

impl TransformerEncoderLayer {
    /// A layer for `features` in `heads`, initialised as PyTorch's.
    ///
    /// # Errors
    /// The features do not divide by the heads; memory runs out.
    #[track_caller]
    pub fn new(features: usize, heads: usize, options: TransformerOptions, device: &Device) -> Result<Self> {
        let drop = || Dropout::new(options.dropout);
        Ok(Self {
            self_attn: options.create_attention(features, heads, device)?,
            linear1: options.create_linear(features, options.feedforward, device)?,
            dropout: drop(),
            linear2: options.create_linear(options.feedforward, features, device)?,
            norm1: options.create_norm(features, device)?,
            norm2: options.create_norm(features, device)?,
            dropout1: drop(),
            dropout2: drop(),
            options,
            scope: ModuleScope::new(),
        })
    }

    /// \[length, batch, features\] (with `batch_first` \[batch, length, features\]) or without the batch, to the same.
    ///
    /// # Errors
    /// The shapes do not fit; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, masks: &AttentionMasks<'_>) -> Result<Tensor> {
        self.scope.run(|| {
            let first = self.options.norm_first;
            let x = residual_block(x, &self.norm1, &self.dropout1, first, |x| {
                self.self_attn.forward(x, x, x, masks)
            })?;
            residual_block(&x, &self.norm2, &self.dropout2, first, |x| {
                feedforward_block(x, (&self.linear1, &self.dropout, &self.linear2), &self.options)
            })
        })
    }
}

/// Attention of a sequence to itself, attention to the encoder's result, then two layers for each position alone.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{AttentionMasks, TransformerDecoderLayer, TransformerOptions};
/// # let device = Device::null(Default::default());
/// let layer = TransformerDecoderLayer::new(64, 8, TransformerOptions::default(), &device)?;
/// let (x, memory) = (Tensor::zeros(&[7, 2, 64], DType::F32, &device)?, Tensor::zeros(&[10, 2, 64], DType::F32, &device)?);
/// assert_eq!(layer.forward(&x, &memory, &AttentionMasks::causal(), &AttentionMasks::default())?.shape(), [7, 2, 64]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct TransformerDecoderLayer {
    /// Of the sequence to itself.
    pub self_attn: MultiheadAttention,
    /// To the encoder's result.
    pub multihead_attn: MultiheadAttention,
    /// To the features between.
    pub linear1: Linear,
    /// Between the layers.
    pub dropout: Dropout,
    /// And back.
    pub linear2: Linear,
    /// Of the first attention.
    pub norm1: LayerNorm,
    /// Of the second attention.
    pub norm2: LayerNorm,
    /// Of the layers.
    pub norm3: LayerNorm,
    /// Behind the first attention.
    pub dropout1: Dropout,
    /// Behind the second attention.
    pub dropout2: Dropout,
    /// Behind the layers.
    pub dropout3: Dropout,
    #[module(skip)]
    options: TransformerOptions,
    scope: ModuleScope,
}

impl TransformerDecoderLayer {
    /// A layer for `features` in `heads`, initialised as PyTorch's.
    ///
    /// # Errors
    /// The features do not divide by the heads; memory runs out.
    #[track_caller]
    pub fn new(features: usize, heads: usize, options: TransformerOptions, device: &Device) -> Result<Self> {
        let drop = || Dropout::new(options.dropout);
        Ok(Self {
            self_attn: options.create_attention(features, heads, device)?,
            multihead_attn: options.create_attention(features, heads, device)?,
            linear1: options.create_linear(features, options.feedforward, device)?,
            dropout: drop(),
            linear2: options.create_linear(options.feedforward, features, device)?,
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

    /// `x` and the encoder's result `memory`, each \[length, batch, features\] (with `batch_first` \[batch, length, features\]) or
    /// without the batch, to the shape of `x`. `masks` are those of `x`, `memory_masks` those of its attention to `memory`.
    ///
    /// # Errors
    /// The shapes do not fit; memory runs out.
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
                feedforward_block(x, (&self.linear1, &self.dropout, &self.linear2), &self.options)
            })
        })
    }
}

/// Layers in a row, with the masks and the memory that each of them is given, and a norm behind them, if there is one.
macro_rules! transformer_stack {
    ($(#[$doc:meta])* $stack:ident of $layer:ident($($given:ident: $ty:ty),*)) => {
        $(#[$doc])*
        #[derive(Debug, Module)]
        #[module(crate = crate)]
        pub struct $stack {
            /// In order.
            pub layers: Vec<$layer>,
            /// Behind them; none at first.
            pub norm: Option<LayerNorm>,
            scope: ModuleScope,
        }

        impl $stack {
            /// `layers` layers for `features` in `heads`, without a norm behind them.
            ///
            /// # Errors
            /// The features do not divide by the heads; memory runs out.
            #[track_caller]
            pub fn new(
                features: usize,
                heads: usize,
                layers: usize,
                options: TransformerOptions,
                device: &Device,
            ) -> Result<Self> {
                let layer = |_| $layer::new(features, heads, options, device);
                let layers = (0..layers).map(layer).collect::<Result<_>>()?;
                Ok(Self { layers, norm: None, scope: ModuleScope::new() })
            }

            /// With a norm behind the last layer.
            #[must_use]
            pub fn with_norm(mut self, norm: LayerNorm) -> Self {
                self.norm = Some(norm);
                self
            }

            #[doc = concat!("Through all layers; shapes as those of [`", stringify!($layer), "::forward`].")]
            ///
            /// # Errors
            /// As there.
            #[track_caller]
            pub fn forward(&self, x: &Tensor, $($given: $ty),*) -> Result<Tensor> {
                self.scope.run(|| {
                    let x = self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x, $($given),*))?;
                    self.norm.as_ref().map_or(Ok(x.clone()), |norm| norm.forward(&x))
                })
            }
        }
    };
}

transformer_stack! {
    /// Encoder layers in a row, and a norm behind them, if there is one.
    ///
    /// Each layer starts with numbers of its own; PyTorch's starts with copies of one layer.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::{AttentionMasks, TransformerEncoder, TransformerOptions};
    /// # let device = Device::null(Default::default());
    /// let encoder = TransformerEncoder::new(64, 8, 2, TransformerOptions::default(), &device)?;
    /// let x = Tensor::zeros(&[10, 2, 64], DType::F32, &device)?;
    /// let padding = Tensor::from_bools(&[false; 20], &[2, 10], &device)?;
    /// assert_eq!(encoder.forward(&x, &AttentionMasks::from_key_padding_mask(&padding))?.shape(), [10, 2, 64]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    TransformerEncoder of TransformerEncoderLayer(masks: &AttentionMasks<'_>)
}

transformer_stack! {
    /// Decoder layers in a row, and a norm behind them, if there is one.
    TransformerDecoder of TransformerDecoderLayer(memory: &Tensor, masks: &AttentionMasks<'_>, memory_masks: &AttentionMasks<'_>)
}

/// An encoder and a decoder, each with a norm behind its layers (Vaswani et al., 2017).
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{AttentionMasks, Transformer, TransformerOptions};
/// # let device = Device::null(Default::default());
/// let options = TransformerOptions { feedforward: 64, batch_first: true, ..Default::default() };
/// let model = Transformer::new(32, 4, [2, 2], options, &device)?;
/// let (from, to) = (Tensor::zeros(&[2, 10, 32], DType::F32, &device)?, Tensor::zeros(&[2, 7, 32], DType::F32, &device)?);
/// let none = AttentionMasks::default();
/// assert_eq!(model.forward(&from, &to, &none, &AttentionMasks::causal(), &none)?.shape(), [2, 7, 32]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Transformer {
    /// Of the source.
    pub encoder: TransformerEncoder,
    /// Of the target.
    pub decoder: TransformerDecoder,
    scope: ModuleScope,
}

impl Transformer {
    /// `layers` are those of encoder and decoder; matrices are uniform by Xavier's rule, as PyTorch.
    ///
    /// # Errors
    /// The features do not divide by the heads; memory runs out.
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
        for parameter in model.parameters() {
            if parameter.rank() > 1 {
                init::xavier_uniform_(&parameter, 1.0)?;
            }
        }
        Ok(model)
    }

    /// The target `to` in view of the source `from`, each \[length, batch, features\] (with `batch_first` \[batch, length,
    /// features\]), to the shape of `to`. The masks are those of the source, of the target, and of the target's attention to the
    /// encoder's result.
    ///
    /// # Errors
    /// The shapes do not fit; memory runs out.
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
            let features = |t: &Tensor| t.shape().last().copied();
            if features(from) != features(to) || from.rank() != to.rank() {
                let rule = "source and target have the same features, and both or neither a batch";
                return Err(Error::shape("Transformer", rule, &[from.shape(), to.shape()]));
            }
            let memory = self.encoder.forward(from, from_masks)?;
            self.decoder.forward(to, &memory, to_masks, memory_masks)
        })
    }
}
