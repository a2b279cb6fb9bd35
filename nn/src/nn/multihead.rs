//! Multi-head attention, with PyTorch's parameters.

use super::{Linear, Module, ModuleScope, TrainingMode, init};
use crate::{DType, Device, Result, Tensor, fail, fail_if};
use forebay_core::ops::{AttentionOptions, cat};

const OP: &str = "MultiheadAttention";

/// Masks that hide keys from queries. The default hides no key.
///
/// A bool mask hides where it is *true*, and a float mask is added to the scores, as in PyTorch's modules. A
/// bool mask of [`scaled_dot_product_attention`](Tensor::scaled_dot_product_attention) has the opposite
/// meaning.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMasks<'a> {
    /// Mask of \[queries, keys\] or \[batch · heads, queries, keys\].
    pub attn_mask: Option<&'a Tensor>,
    /// Mask of padding, \[batch, keys\], or \[keys\] without a batch.
    pub key_padding_mask: Option<&'a Tensor>,
    /// If true, query i attends only to keys up to i. Unlike PyTorch's hint, the flag needs no mask, and combines
    /// with any mask.
    pub is_causal: bool,
}

impl<'a> AttentionMasks<'a> {
    /// Creates a causal mask: query i attends only to keys up to i.
    #[must_use]
    pub fn causal() -> Self {
        Self { is_causal: true, ..Self::default() }
    }

    /// Creates masks from an attention mask of \[queries, keys\].
    #[must_use]
    pub fn from_attn_mask(attn_mask: &'a Tensor) -> Self {
        Self { attn_mask: Some(attn_mask), ..Self::default() }
    }

    /// Creates masks from a padding mask of \[batch, keys\].
    #[must_use]
    pub fn from_key_padding_mask(key_padding_mask: &'a Tensor) -> Self {
        Self { key_padding_mask: Some(key_padding_mask), ..Self::default() }
    }
}

with_defaults! {
    /// Options of a [`MultiheadAttention`]. `MultiheadAttentionOptions { batch_first: true, ..Default::default()
    /// }`.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct MultiheadAttentionOptions {
        /// Dropout probability of the attention weights in training; 0.
        pub dropout: f64 = 0.0,
        /// If true, the projections have biases; true.
        pub bias: bool = true,
        /// If true, appends a learned key and value; false.
        pub add_bias_kv: bool = false,
        /// If true, appends a key and a value of zeros; false.
        pub add_zero_attn: bool = false,
        /// Features of the keys; those of the queries.
        pub kdim: Option<usize> = None,
        /// Features of the values; those of the queries.
        pub vdim: Option<usize> = None,
        /// If true, the layout is \[batch, length, features\]; false: \[length, batch, features\], as in PyTorch.
        pub batch_first: bool = false,
    }
}

/// Multi-head attention (Vaswani et al., 2017), with PyTorch's parameters.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{AttentionMasks, MultiheadAttention, MultiheadAttentionOptions};
/// # let device = Device::null(Default::default());
/// let options = MultiheadAttentionOptions { batch_first: true, ..Default::default() };
/// let attention = MultiheadAttention::new(64, 8, options, &device)?;
/// let x = Tensor::zeros(&[2, 10, 64], DType::F32, &device)?;
/// assert_eq!(attention.forward(&x, &x, &x, &AttentionMasks::causal())?.shape(), [2, 10, 64]);
/// let (_, weights) = attention.forward_with_weights(&x, &x, &x, &AttentionMasks::default())?;
/// assert_eq!(weights.shape(), [2, 8, 10, 10]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug)]
pub struct MultiheadAttention {
    /// Projection to queries, keys and values, \[3 · features, features\], if all have as many features.
    pub in_proj_weight: Option<Tensor>,
    /// Projection to queries, if keys or values have a different number of features.
    pub q_proj_weight: Option<Tensor>,
    /// Projection to keys, \[features, kdim\].
    pub k_proj_weight: Option<Tensor>,
    /// Projection to values, \[features, vdim\].
    pub v_proj_weight: Option<Tensor>,
    /// Bias of the projections, \[3 · features\].
    pub in_proj_bias: Option<Tensor>,
    /// Learned key that is appended to the keys, \[1, 1, features\].
    pub bias_k: Option<Tensor>,
    /// Learned value that is appended to the values, \[1, 1, features\].
    pub bias_v: Option<Tensor>,
    /// Output projection of the concatenated heads.
    pub out_proj: Linear,
    heads: usize,
    #[module(skip)]
    options: MultiheadAttentionOptions,
    training: TrainingMode,
    scope: ModuleScope,
}

/// Queries, keys and values, \[batch, length, features\] each.
type ProjectedQkv = [Tensor; 3];

impl MultiheadAttention {
    /// Creates a layer with projections uniform by Xavier's rule and biases of 0, as in PyTorch. `heads` divides
    /// `features`.
    #[track_caller]
    pub fn new(
        features: usize,
        heads: usize,
        options: MultiheadAttentionOptions,
        device: &Device,
    ) -> Result<Self> {
        fail_if!(features == 0 || heads == 0 || !features.is_multiple_of(heads);
            argument(OP), "{features} features do not divide by {heads} heads");
        let (kdim, vdim) = (options.kdim.unwrap_or(features), options.vdim.unwrap_or(features));
        let create = |shape: &[usize], fill: fn(&Tensor, f64) -> Result<()>| -> Result<Tensor> {
            let parameter = init::create_parameter(|| Tensor::empty(shape, init::parameter_dtype(), device))?;
            fill(&parameter, 1.0)?;
            Ok(parameter)
        };
        let xavier = |rows, columns| create(&[rows, columns], init::xavier_uniform_);
        let is_joint = kdim == features && vdim == features;
        let separate_projection = |columns: usize| (!is_joint).then(|| xavier(features, columns)).transpose();
        let zeros = |n: usize| init::create_parameter(|| Tensor::zeros([n], init::parameter_dtype(), device));
        let appended = || create(&[1, 1, features], init::xavier_normal_);
        let mut out_proj = Linear::without_bias(features, features, device)?;
        out_proj.bias = options.bias.then(|| zeros(features)).transpose()?;
        Ok(Self {
            in_proj_weight: is_joint.then(|| xavier(3 * features, features)).transpose()?,
            q_proj_weight: separate_projection(features)?,
            k_proj_weight: separate_projection(kdim)?,
            v_proj_weight: separate_projection(vdim)?,
            in_proj_bias: options.bias.then(|| zeros(3 * features)).transpose()?,
            bias_k: options.add_bias_kv.then(appended).transpose()?,
            bias_v: options.add_bias_kv.then(appended).transpose()?,
            out_proj,
            heads,
            options,
            training: TrainingMode::new(),
            scope: ModuleScope::new(),
        })
    }

    /// Computes attention: \[queries, batch, features\], with `batch_first` \[batch, queries, features\], or
    /// all without the batch. The attention weights are never materialised. A query whose keys are all hidden
    /// yields zeros.
    #[track_caller]
    pub fn forward(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        masks: &AttentionMasks<'_>,
    ) -> Result<Tensor> {
        self.scope.run(|| {
            let appends_no_keys = self.bias_k.is_none() && !self.options.add_zero_attn;
            if appends_no_keys
                && is_same_argument(query, key)
                && is_same_argument(query, value)
                && let Some(weight) = &self.in_proj_weight
            {
                let qkv = self.to_batch_first(&query.linear(weight, self.in_proj_bias.as_ref())?)?;
                let length = qkv.shape()[1];
                let mask = self.merge_masks(masks, [qkv.shape()[0], length, length])?;
                let out =
                    qkv.qkv_attention(self.heads, self.heads, &self.attention_options(masks, mask.as_ref()))?;
                return self.project_output(out, query);
            }
            let (parts, mask) = self.project_inputs([query, key, value], masks)?;
            let [q, k, v] = self.split_heads(&parts)?;
            let out = q
                .scaled_dot_product_attention(&k, &v, &self.attention_options(masks, mask.as_ref()))?
                .transpose(1, 2)?;
            self.project_output(out.reshape(parts[0].shape())?, query)
        })
    }

    /// Computes [`forward`](Self::forward) and returns the weights of each head, \[batch, heads, queries,
    /// keys\], without the batch if there is none. PyTorch returns `weights.mean(&[-3], false)`. The weights
    /// are materialised; dropped weights are 0.
    #[track_caller]
    pub fn forward_with_weights(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        masks: &AttentionMasks<'_>,
    ) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| {
            let (parts, mask) = self.project_inputs([query, key, value], masks)?;
            let [q, k, v] = self.split_heads(&parts)?;
            let scale = 1.0 / (q.shape()[3].max(1) as f64).sqrt();
            let mut scores = q.mul(scale)?.matmul(&k.transpose(-2, -1)?)?;
            let (queries, keys) = (q.shape()[2], k.shape()[2]);
            let mask = match mask {
                None if masks.is_causal => Some(causal(queries, keys, q.device())?.logical_not()?),
                mask => mask,
            };
            scores = match &mask {
                Some(seen) if seen.dtype() == DType::Bool => {
                    scores.masked_fill(&seen.logical_not()?, f64::NEG_INFINITY)?
                }
                Some(added) => scores.add(added)?,
                None => scores,
            };
            let weights = scores.softmax(-1)?.dropout(self.options.dropout, self.is_training())?;
            let out = weights.matmul(&v)?.transpose(1, 2)?.reshape(parts[0].shape())?;
            let weights = if query.rank() == 2 { weights.squeeze(0)? } else { weights };
            Ok((self.project_output(out, query)?, weights))
        })
    }

    fn attention_options<'a>(
        &self,
        masks: &AttentionMasks<'_>,
        mask: Option<&'a Tensor>,
    ) -> AttentionOptions<'a> {
        AttentionOptions {
            attn_mask: mask,
            dropout_p: if self.is_training() { self.options.dropout } else { 0.0 },
            is_causal: masks.is_causal && mask.is_none(),
            ..AttentionOptions::default()
        }
    }

    fn is_training(&self) -> bool {
        self.training.is_on()
    }

    /// Returns the tensor as \[batch, length, features\].
    #[track_caller]
    fn to_batch_first(&self, t: &Tensor) -> Result<Tensor> {
        match t.rank() {
            2 => t.unsqueeze(0),
            3 if self.options.batch_first => Ok(t.clone()),
            3 => t.transpose(0, 1),
            _ => fail!(
                shape(OP, [t]),
                "takes queries, keys and values of [length, batch, features] (`batch_first`: [batch, length, features]), or \
                 without the batch"
            ),
        }
    }

    /// Applies the output projection and restores the layout of the queries.
    fn project_output(&self, out: Tensor, query: &Tensor) -> Result<Tensor> {
        let out = self.out_proj.forward(&out)?;
        match query.rank() {
            2 => out.squeeze(0),
            _ if self.options.batch_first => Ok(out),
            _ => out.transpose(0, 1),
        }
    }

    /// Projects the inputs, appends the extra keys and values, and returns the matching mask.
    #[track_caller]
    fn project_inputs(
        &self,
        [query, key, value]: [&Tensor; 3],
        masks: &AttentionMasks<'_>,
    ) -> Result<(ProjectedQkv, Option<Tensor>)> {
        let features = self.out_proj.weight.shape()[0];
        let weights: [Tensor; 3] =
            match (&self.in_proj_weight, &self.q_proj_weight, &self.k_proj_weight, &self.v_proj_weight) {
                (Some(all), ..) => {
                    let part = |k: usize| all.narrow(0, k * features, features);
                    [part(0)?, part(1)?, part(2)?]
                }
                (None, Some(q), Some(k), Some(v)) => [q.clone(), k.clone(), v.clone()],
                _ => fail!(argument(OP), "has neither `in_proj_weight` nor all three of the others"),
            };
        let project = |k: usize, t: &Tensor| -> Result<Tensor> {
            let bias = self.in_proj_bias.as_ref().map(|b| b.narrow(0, k * features, features)).transpose()?;
            self.to_batch_first(&t.linear(&weights[k], bias.as_ref())?)
        };
        let [q, mut k, mut v] = [project(0, query)?, project(1, key)?, project(2, value)?];
        let (batch, queries, keys) = (q.shape()[0], q.shape()[1], k.shape()[1]);
        fail_if!(k.shape() != [batch, keys, features] || v.shape() != k.shape();
            shape(OP, [query, key, value]), "keys and values have one length, and the batch of the queries");
        let mut mask = self.merge_masks(masks, [batch, queries, keys])?;
        let extra = usize::from(self.bias_k.is_some()) + usize::from(self.options.add_zero_attn);
        if extra > 0 {
            // Every query attends to the appended keys.
            if mask.is_none() && masks.is_causal {
                mask = Some(causal(queries, keys, q.device())?.logical_not()?);
            }
            mask = mask.map(|m| pad_mask(&m, extra)).transpose()?;
        }
        if let (Some(bias_k), Some(bias_v)) = (&self.bias_k, &self.bias_v) {
            let one = [batch, 1, features];
            k = cat(&[&k, &bias_k.to_dtype(k.dtype())?.broadcast_to(one)?], 1)?;
            v = cat(&[&v, &bias_v.to_dtype(v.dtype())?.broadcast_to(one)?], 1)?;
        }
        if self.options.add_zero_attn {
            let zeros = Tensor::zeros([batch, 1, features], k.dtype(), k.device())?;
            (k, v) = (cat(&[&k, &zeros], 1)?, cat(&[&v, &zeros], 1)?);
        }
        Ok(([q, k, v], mask))
    }

    /// Splits each into heads: \[batch, heads, length, features of a head\].
    fn split_heads(&self, parts: &ProjectedQkv) -> Result<[Tensor; 3]> {
        let split = |t: &Tensor| -> Result<Tensor> {
            let &[batch, length, features] = t.shape() else { return Ok(t.clone()) };
            t.reshape([batch, length, self.heads, features / self.heads])?.transpose(1, 2)
        };
        Ok([split(&parts[0])?, split(&parts[1])?, split(&parts[2])?])
    }

    /// Merges the masks into one that broadcasts to \[batch, heads, queries, keys\]. A bool mask is true
    /// where a query attends; a float mask is added to the scores. Returns `None` if there is at most the
    /// causal flag.
    #[track_caller]
    fn merge_masks(
        &self,
        masks: &AttentionMasks<'_>,
        [batch, queries, keys]: [usize; 3],
    ) -> Result<Option<Tensor>> {
        let attn = masks.attn_mask.map(|m| match *m.shape() {
            [l, s] if [l, s] == [queries, keys] => m.reshape([1, 1, l, s]),
            [n, l, s] if [n, l, s] == [batch * self.heads, queries, keys] => {
                m.reshape([batch, self.heads, l, s])
            }
            _ => fail!(
                shape(OP, [m]),
                "`attn_mask` is [{queries}, {keys}] or [{}, {queries}, {keys}]",
                batch * self.heads
            ),
        });
        let padding = masks.key_padding_mask.map(|m| match *m.shape() {
            [s] if (batch, s) == (1, keys) => m.reshape([1, 1, 1, s]),
            [n, s] if [n, s] == [batch, keys] => m.reshape([n, 1, 1, s]),
            _ => fail!(shape(OP, [m]), "`key_padding_mask` is [{batch}, {keys}]"),
        });
        let all: Vec<Tensor> = [attn, padding].into_iter().flatten().collect::<Result<_>>()?;
        if let Some(other) = all.iter().find(|m| m.dtype() != DType::Bool && !m.dtype().is_float()) {
            fail!(dtype(OP, other.dtype()), "masks are bool (true hides) or floats (added to scores)");
        }
        let Some(first) = all.first() else { return Ok(None) };
        let causal =
            masks.is_causal.then(|| causal(queries, keys, first.device())?.reshape([1, 1, queries, keys]));
        let causal = causal.transpose()?;
        let float = all.iter().find(|m| m.dtype().is_float()).map(Tensor::dtype);
        let convert = |m: &Tensor| match float {
            Some(dtype) if m.dtype() == DType::Bool => {
                Tensor::zeros(m.shape(), dtype, m.device())?.masked_fill(m, f64::NEG_INFINITY)
            }
            Some(dtype) => m.to_dtype(dtype),
            None => m.logical_not(),
        };
        let join = |sum: Tensor, m: &Tensor| {
            let m = convert(m)?;
            if float.is_some() { sum.add(&m) } else { sum.logical_and(&m) }
        };
        let merged = all[1..].iter().chain(&causal).try_fold(convert(first)?, join)?;
        let dtype = self.out_proj.weight.dtype();
        Ok(Some(if float.is_some() { merged.to_dtype(dtype)? } else { merged }))
    }
}

/// Returns a mask that is true where causality hides a key from a query.
fn causal(queries: usize, keys: usize, device: &Device) -> Result<Tensor> {
    let row = Tensor::arange(0.0, queries as f64, 1.0, DType::I32, device)?.unsqueeze(1)?;
    Tensor::arange(0.0, keys as f64, 1.0, DType::I32, device)?.gt(&row)
}

/// Extends a mask by `extra` keys that every query attends to.
fn pad_mask(mask: &Tensor, extra: usize) -> Result<Tensor> {
    let mut shape = mask.shape().to_vec();
    shape.pop();
    shape.push(extra);
    let attended = if mask.dtype() == DType::Bool { 1.0 } else { 0.0 };
    cat(&[mask, &Tensor::full(&shape, attended, mask.dtype(), mask.device())?], -1)
}

fn is_same_argument(a: &Tensor, b: &Tensor) -> bool {
    std::ptr::eq(a, b) || (a.shares_storage(b) && a.layout() == b.layout())
}
