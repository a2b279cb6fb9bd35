//! BERT: a bidirectional transformer encoder, also for sentence embeddings.

use serde::Deserialize;
use std::collections::BTreeMap;

use super::{Dropout, Embedding, LayerNorm, Linear, Module, ModuleScope, TrainingMode, rename_keys};
use crate::{DType, Device, Error, Result, Tensor, fail, fail_if};
use forebay_core::ops::AttentionOptions;
use forebay_core::printable::printable;

with_defaults! {
    /// Sizes of a [`Bert`], named as in the `config.json` that accompanies its weights. The defaults are those of
    /// the published `bert-base-uncased`, which also replace settings missing in a `config.json`.
    #[derive(Clone, Debug, Deserialize, PartialEq)]
    #[serde(default)]
    pub struct BertOptions {
        /// Number of tokens in the vocabulary.
        pub vocab_size: usize = 30_522,
        /// Maximum length of a text, in tokens.
        pub max_position_embeddings: usize = 512,
        /// Number of segment types; a single text has the first type.
        pub type_vocab_size: usize = 2,
        /// Number of layers.
        pub num_hidden_layers: usize = 12,
        /// Attention heads of a layer.
        pub num_attention_heads: usize = 12,
        /// Features of a token.
        pub hidden_size: usize = 768,
        /// Features between the two feed-forward layers.
        pub intermediate_size: usize = 3072,
        /// Term added to the variances of the norms.
        pub layer_norm_eps: f64 = 1e-12,
        /// Dropout probability of features in training.
        pub hidden_dropout_prob: f64 = 0.1,
        /// Dropout probability of attention weights in training.
        pub attention_probs_dropout_prob: f64 = 0.1,
        /// Deviation of the initial weights.
        pub initializer_range: f64 = 0.02,
        /// Padding token, if there is one. Its row of the table starts at zero and gets no gradient.
        pub pad_token_id: Option<usize> = Some(0),
        /// Activation of the feed-forward network: `gelu`, `gelu_new`, `gelu_pytorch_tanh`, `relu`, `silu` or
        /// `swish`.
        pub hidden_act: String = "gelu".to_owned(),
    }
}

/// Settings of a `config.json` that would select a different model, with the only value that is supported.
const REQUIRED_CONFIG: &[(&str, &str)] = &[
    ("model_type", "\"bert\""),
    ("position_embedding_type", "\"absolute\""),
    ("is_decoder", "false"),
    ("add_cross_attention", "false"),
    ("pruned_heads", "{}"),
];

/// Activation function between the two feed-forward layers.
type BertActivation = fn(&Tensor) -> Result<Tensor>;

/// Activations by their names in a `config.json`.
const ACTIVATIONS: [(&str, BertActivation); 6] = [
    ("gelu", Tensor::gelu),
    ("gelu_new", Tensor::gelu_tanh),
    ("gelu_pytorch_tanh", Tensor::gelu_tanh),
    ("relu", Tensor::relu),
    ("silu", Tensor::silu),
    ("swish", Tensor::silu),
];

impl BertOptions {
    /// Reads the options from the text of a `config.json`.
    ///
    /// ```
    /// # use forebay_nn::nn::BertOptions;
    /// let text = r#"{"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
    ///     "num_hidden_layers": 6, "num_attention_heads": 12, "hidden_size": 384, "intermediate_size": 1536,
    ///     "layer_norm_eps": 1e-12, "hidden_act": "gelu"}"#;
    /// assert_eq!(BertOptions::from_config(text)?.hidden_size, 384);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The text is not such a file, or a size is missing. Also fails for a setting that is not supported,
    /// such as relative positions, a decoder or an unknown activation.
    #[track_caller]
    pub fn from_config(text: &str) -> Result<Self> {
        let config_error = |e: String| {
            Error::argument("Bert", format!("this is not a configuration of a BERT: {}", printable(&e)))
        };
        let config: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).map_err(|e| config_error(e.to_string()))?;
        let sizes =
            ["vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"];
        if let Some(missing) = sizes.iter().find(|name| !config.contains_key(**name)) {
            return Err(config_error(format!("missing field `{missing}`")));
        }
        for &(name, supported) in REQUIRED_CONFIG {
            let value = config.get(name).filter(|value| !value.is_null()).map(ToString::to_string);
            if let Some(value) = value.filter(|value| value != supported) {
                fail!(
                    argument("Bert"),
                    "`{name}` is {}, which makes another model; only {supported} is supported",
                    printable(&value)
                );
            }
        }
        let options: Self = serde_json::from_value(config.into()).map_err(|e| config_error(e.to_string()))?;
        options.validate()?;
        Ok(options)
    }

    /// Checks that the values are valid for a model, and returns the activation.
    #[track_caller]
    fn validate(&self) -> Result<BertActivation> {
        let probabilities = [
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
        ];
        if let Some((name, p)) = probabilities.iter().find(|(_, p)| !(0.0..=1.0).contains(p)) {
            fail!(argument("Bert"), "`{name}` is a probability between 0 and 1, not {p}");
        }
        let (range, name) = (self.initializer_range, &self.hidden_act);
        fail_if!(!(range.is_finite() && range >= 0.0);
            argument("Bert"), "`initializer_range` is a deviation of 0 or more, not {range}");
        let Some((_, activation)) = ACTIVATIONS.iter().find(|(known, _)| known == name) else {
            fail!(
                argument("Bert"),
                "the activation is `{name}`; supported are gelu, gelu_new, gelu_pytorch_tanh, relu, silu and swish"
            );
        };
        Ok(*activation)
    }

    #[track_caller]
    fn create_linear(&self, inputs: usize, outputs: usize, device: &Device) -> Result<Linear> {
        Linear::normal(inputs, outputs, self.initializer_range, device)
    }

    #[track_caller]
    fn create_embedding(&self, entries: usize, device: &Device) -> Result<Embedding> {
        Embedding::normal(entries, self.hidden_size, self.initializer_range, device)
    }

    #[track_caller]
    fn create_norm(&self, device: &Device) -> Result<LayerNorm> {
        Ok(LayerNorm::new([self.hidden_size], device)?.eps(self.layer_norm_eps))
    }
}

/// Sum of the embeddings of tokens, positions and segments, normalised.
#[derive(Module)]
#[module(debug)]
pub struct BertEmbeddings {
    /// Embedding of tokens.
    pub word_embeddings: Embedding,
    /// Embedding of positions.
    pub position_embeddings: Embedding,
    /// Embedding of segments.
    pub token_type_embeddings: Embedding,
    /// Norm of the sum.
    #[module(name = "LayerNorm")]
    pub norm: LayerNorm,
    /// Dropout after the norm.
    pub dropout: Dropout,
    scope: ModuleScope,
}

/// Projections to queries, keys and values.
#[derive(Module)]
#[module(debug)]
pub struct BertProjections {
    /// Projection to queries.
    pub query: Linear,
    /// Projection to keys.
    pub key: Linear,
    /// Projection to values.
    pub value: Linear,
}

/// A linear layer, a residual sum and a norm of the sum.
#[derive(Module)]
#[module(debug)]
pub struct BertOutput {
    /// Linear layer.
    pub dense: Linear,
    /// Norm of the sum.
    #[module(name = "LayerNorm")]
    pub norm: LayerNorm,
    /// Dropout after the linear layer.
    pub dropout: Dropout,
}

impl BertOutput {
    fn new(inputs: usize, options: &BertOptions, device: &Device) -> Result<Self> {
        let norm = options.create_norm(device)?;
        let dense = options.create_linear(inputs, options.hidden_size, device)?;
        Ok(Self { dense, norm, dropout: Dropout::new(options.hidden_dropout_prob) })
    }

    fn forward(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let x = self.dropout.forward(&self.dense.forward(x)?)?;
        Ok(self.norm.forward_add(&x, residual)?.1)
    }
}

/// Bidirectional self-attention.
#[derive(Module)]
#[module(debug)]
pub struct BertAttention {
    /// Projections to queries, keys and values.
    #[module(name = "self")]
    pub projections: BertProjections,
    /// Output projection, residual sum and norm.
    pub output: BertOutput,
    heads: usize,
    /// Dropout probability of the attention weights in training.
    dropout: f64,
    training: TrainingMode,
    scope: ModuleScope,
}

impl BertAttention {
    #[track_caller]
    fn forward(&self, x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        self.scope.run(|| {
            let &[batch, length, width] = x.shape() else {
                fail!(shape("Bert", [x]), "takes [batch, length, features]");
            };
            let heads = |layer: &Linear| {
                layer.forward(x)?.reshape([batch, length, self.heads, width / self.heads])?.transpose(1, 2)
            };
            let BertProjections { query, key, value } = &self.projections;
            let dropout_p = if self.training.is_on() { self.dropout } else { 0.0 };
            let options = AttentionOptions { attn_mask: mask, dropout_p, ..AttentionOptions::default() };
            let out = heads(query)?.scaled_dot_product_attention(&heads(key)?, &heads(value)?, &options)?;
            self.output.forward(&out.transpose(1, 2)?.reshape([batch, length, width])?, x)
        })
    }
}

/// First of the two feed-forward layers.
#[derive(Module)]
#[module(debug)]
pub struct BertIntermediate {
    /// Linear layer to the intermediate features.
    pub dense: Linear,
}

/// Encoder layer: self-attention, then a feed-forward network, each with a residual sum and a norm.
#[derive(Module)]
#[module(debug)]
pub struct BertLayer {
    /// Self-attention.
    pub attention: BertAttention,
    /// First feed-forward layer.
    pub intermediate: BertIntermediate,
    /// Second feed-forward layer, residual sum and norm.
    pub output: BertOutput,
    #[module(skip)]
    activation: BertActivation,
    scope: ModuleScope,
}

impl BertLayer {
    fn new(options: &BertOptions, device: &Device) -> Result<Self> {
        let width = options.hidden_size;
        let linear = || options.create_linear(width, width, device);
        Ok(Self {
            attention: BertAttention {
                projections: BertProjections { query: linear()?, key: linear()?, value: linear()? },
                output: BertOutput::new(width, options, device)?,
                heads: options.num_attention_heads,
                dropout: options.attention_probs_dropout_prob,
                training: TrainingMode::new(),
                scope: ModuleScope::new(),
            },
            intermediate: BertIntermediate {
                dense: options.create_linear(width, options.intermediate_size, device)?,
            },
            output: BertOutput::new(options.intermediate_size, options, device)?,
            activation: options.validate()?,
            scope: ModuleScope::new(),
        })
    }

    #[track_caller]
    fn forward(&self, x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        self.scope.run(|| {
            let x = self.attention.forward(x, mask)?;
            self.output.forward(&(self.activation)(&self.intermediate.dense.forward(&x)?)?, &x)
        })
    }
}

/// Stack of encoder layers.
#[derive(Module)]
#[module(debug)]
pub struct BertEncoder {
    /// Layers in order.
    pub layer: Vec<BertLayer>,
}

/// A linear layer over the features of the first token, followed by tanh.
#[derive(Module)]
#[module(debug)]
pub struct BertPooler {
    /// Linear layer.
    pub dense: Linear,
}

/// BERT (Devlin et al., 2019), with the parameter names of its files: the architecture of MiniLM and most
/// sentence encoders.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{Bert, BertOptions};
/// # let device = Device::null(Default::default());
/// let sizes = BertOptions {
///     vocab_size: 100, max_position_embeddings: 16, type_vocab_size: 2, num_hidden_layers: 2,
///     num_attention_heads: 4, hidden_size: 32, intermediate_size: 64, ..Default::default()
/// };
/// let model = Bert::new(&sizes, &device)?;
/// let tokens = Tensor::from_slice(&[5i64, 7, 2, 9, 1, 0], &[2, 3], &device)?;
/// let mask = Tensor::from_slice(&[1i64, 1, 1, 1, 1, 0], &[2, 3], &device)?;
/// assert_eq!(model.forward(&tokens, Some(&mask))?.shape(), [2, 3, 32]);
/// assert_eq!(model.sentence_embeddings(&tokens, &mask)?.shape(), [2, 32]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug)]
pub struct Bert {
    /// Input embeddings.
    pub embeddings: BertEmbeddings,
    /// Encoder layers.
    pub encoder: BertEncoder,
    /// Layer of [`pooler_output`](Self::pooler_output).
    pub pooler: BertPooler,
    scope: ModuleScope,
}

impl Bert {
    /// Creates a model of these sizes, initialised like the published one. Weights and tables are normal with
    /// deviation `initializer_range`; biases and the padding row are zero.
    ///
    /// # Errors
    /// The number of heads does not divide `hidden_size`, or an option is out of range.
    #[track_caller]
    pub fn new(options: &BertOptions, device: &Device) -> Result<Self> {
        let (width, heads) = (options.hidden_size, options.num_attention_heads);
        fail_if!(heads == 0 || !width.is_multiple_of(heads);
            argument("Bert"), "{width} features do not divide by {heads} heads");
        options.validate()?;
        super::check_layer_count("Bert", options.num_hidden_layers)?;
        let words = options.create_embedding(options.vocab_size, device)?;
        let embeddings = BertEmbeddings {
            word_embeddings: match options.pad_token_id {
                Some(row) => words.with_padding_idx(row)?,
                None => words,
            },
            position_embeddings: options.create_embedding(options.max_position_embeddings, device)?,
            token_type_embeddings: options.create_embedding(options.type_vocab_size, device)?,
            norm: options.create_norm(device)?,
            dropout: Dropout::new(options.hidden_dropout_prob),
            scope: ModuleScope::new(),
        };
        let layers = (0..options.num_hidden_layers).map(|_| BertLayer::new(options, device));
        Ok(Self {
            embeddings,
            encoder: BertEncoder { layer: layers.collect::<Result<_>>()? },
            pooler: BertPooler { dense: options.create_linear(width, width, device)? },
            scope: ModuleScope::new(),
        })
    }

    /// Copies the weights of a published file ([`safetensors::load`](crate::io::safetensors::load)) into the
    /// model by [`load_state_dict`](Module::load_state_dict). Names may begin with `bert.`. The method ignores
    /// `embeddings.position_ids` of older files and the heads of a language model (`cls.`).
    #[track_caller]
    pub fn load_bert(&self, file: &BTreeMap<String, Tensor>) -> Result<()> {
        let state = rename_keys(file, |name| {
            let name = name.strip_prefix("bert.").unwrap_or(name);
            let is_weight = name != "embeddings.position_ids" && !name.starts_with("cls.");
            is_weight.then(|| name.to_owned())
        })?;
        self.load_state_dict(&state)
    }

    /// Computes the features of tokens: indices \[batch, length\] to \[batch, length, features\]. `mask`
    /// has the shape of `tokens`, and is 1 or true for tokens and 0 for padding. No token attends to padding.
    ///
    /// # Errors
    /// The text has more tokens than the model has positions.
    #[track_caller]
    pub fn forward(&self, tokens: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        self.scope.run(|| {
            let &[batch, length] = tokens.shape() else {
                fail!(shape("Bert", [tokens]), "takes tokens of [batch, length]");
            };
            let mask = mask.map(|mask| {
                fail_if!(mask.shape() != tokens.shape(); shape("Bert", [tokens, mask]), "the mask has the shape of the tokens");
                mask.to_dtype(DType::Bool)?.reshape([batch, 1, 1, length])
            });
            let mask = mask.transpose()?;
            let x = self.embed_tokens(tokens, length)?;
            self.encoder.layer.iter().try_fold(x, |x, layer| layer.forward(&x, mask.as_ref()))
        })
    }

    #[track_caller]
    fn embed_tokens(&self, tokens: &Tensor, length: usize) -> Result<Tensor> {
        let embeddings = &self.embeddings;
        let (positions, segments) = (&embeddings.position_embeddings, &embeddings.token_type_embeddings);
        embeddings.scope.run(|| {
            let max_positions = positions.weight.shape()[0];
            fail_if!(
                length > max_positions;
                argument("Bert"), "{length} tokens are more than the {max_positions} positions; cut the text"
            );
            let positions = positions.weight.narrow(0, 0, length)?;
            // A single text has segment 0 throughout.
            let segment = segments.weight.narrow(0, 0, 1)?;
            let x = embeddings.word_embeddings.forward(tokens)?.add(&segment)?.add(&positions)?;
            embeddings.dropout.forward(&embeddings.norm.forward(&x)?)
        })
    }

    /// Applies the pooler to the features of the first token; returns \[batch, features\].
    #[track_caller]
    pub fn pooler_output(&self, hidden: &Tensor) -> Result<Tensor> {
        self.scope.run(|| self.pooler.dense.forward(&hidden.select(1, 0)?)?.tanh())
    }

    /// Returns one vector of length 1 for each text, \[batch, features\]. A vector is the normalised mean of its
    /// tokens' features from [`forward`](Self::forward), without padding. The product of two vectors is their
    /// cosine similarity.
    #[track_caller]
    pub fn sentence_embeddings(&self, tokens: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let hidden = self.forward(tokens, Some(mask))?;
        let mask = mask.to_dtype(DType::Bool)?.to_dtype(hidden.dtype())?.unsqueeze(-1)?;
        let count = mask.sum([1], false)?.maximum(1e-9)?;
        hidden.mul(&mask)?.sum([1], false)?.div(&count)?.normalize(1, &Default::default())
    }
}
