//! Embedding tables.

use super::summary::{OptionsText, flag};
use super::{Module, ModuleScope, init};
use crate::{Device, Result, Tensor, autograd, fail_if};
use forebay_core::ops::{EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions};

/// Bound of the `p`-norm of a table's rows.
#[derive(Clone, Copy, Debug)]
struct MaxNorm {
    max_norm: f64,
    p: f64,
}

impl MaxNorm {
    /// Scales the rows that `index` selects to the maximum norm, in place.
    #[track_caller]
    fn renorm_rows(self, table: &Tensor, index: &Tensor) -> Result<()> {
        autograd::update_state(|| table.embedding_renorm_(index, self.max_norm, self.p))
    }
}

/// Returns the extents and the options of a table.
fn table_repr(
    table: &Tensor,
    padding_idx: Option<usize>,
    max_norm: Option<MaxNorm>,
    scale_grad_by_freq: bool,
) -> OptionsText {
    let mut text = table.shape().iter().fold(OptionsText::default(), OptionsText::value);
    if let Some(row) = padding_idx {
        text = text.set("padding_idx", row);
    }
    if let Some(MaxNorm { max_norm, p }) = max_norm {
        text = text.set("max_norm", max_norm).set("norm_type", p);
    }
    text.set_if(scale_grad_by_freq, "scale_grad_by_freq", flag(true))
}

/// Table of vectors, selected by integers.
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct Embedding {
    /// Table, \[entries, features\].
    pub weight: Tensor,
    #[module(skip)]
    lookup: EmbeddingOptions,
    #[module(skip)]
    max_norm: Option<MaxNorm>,
    scope: ModuleScope,
}

impl Embedding {
    /// Creates a table of standard normal values, as PyTorch.
    #[track_caller]
    pub fn new(entries: usize, features: usize, device: &Device) -> Result<Self> {
        let weight =
            init::create_parameter(|| Tensor::randn([entries, features], init::parameter_dtype(), device))?;
        Ok(Self::from_parameter(weight))
    }

    #[track_caller]
    pub(super) fn normal(entries: usize, features: usize, std: f64, device: &Device) -> Result<Self> {
        Ok(Self::from_parameter(init::create_normal_parameter(&[entries, features], std, device)?))
    }

    /// Wraps an existing tensor, for example one with other initial values or shared with another layer.
    #[must_use]
    pub fn from_parameter(weight: Tensor) -> Self {
        Self { weight, lookup: EmbeddingOptions::default(), max_norm: None, scope: ModuleScope::new() }
    }

    /// Zeroes row `padding_idx` of the table for padding and excludes the row from the gradient.
    #[track_caller]
    pub fn with_padding_idx(mut self, padding_idx: usize) -> Result<Self> {
        zero_padding_row("Embedding", &self.weight, padding_idx)?;
        self.lookup.padding_idx = Some(padding_idx);
        Ok(self)
    }

    setters! {
        /// Divides the gradient of a row by its occurrences in a lookup: PyTorch's `scale_grad_by_freq`.
        fn scale_grad_by_freq() { lookup.scale_grad_by_freq: true }
        /// Scales each selected row in place if its `p`-norm is above `max_norm`: PyTorch's `max_norm` and
        /// `norm_type` (default 2). Every lookup then makes a pass over the table. A gradient of the table that
        /// was recorded before the lookup becomes an error.
        fn with_max_norm(max_norm: f64, p: f64) { max_norm: Some(MaxNorm { max_norm, p }) }
    }

    fn extra_repr(&self) -> String {
        let EmbeddingOptions { padding_idx, scale_grad_by_freq } = self.lookup;
        table_repr(&self.weight, padding_idx, self.max_norm, scale_grad_by_freq).finish()
    }

    /// Selects rows of the table by integers. The output has the shape of `index` and a last dimension of features.
    #[track_caller]
    pub fn forward(&self, index: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            self.max_norm.map_or(Ok(()), |bound| bound.renorm_rows(&self.weight, index))?;
            self.weight.embedding_with(index, &self.lookup)
        })
    }
}

/// Optional inputs of an [`EmbeddingBag`]. The fields are those of
/// [`EmbeddingBagOptions`].
#[derive(Clone, Copy, Debug, Default)]
pub struct EmbeddingBagInputs<'a> {
    /// Start of each bag in a one-dimensional index, the first at 0; `None` for a two-dimensional index.
    pub offsets: Option<&'a Tensor>,
    /// Weight of each sample, in the shape of the index and the type of the table; `None` for 1. For sums only.
    pub per_sample_weights: Option<&'a Tensor>,
}

/// Table of vectors, selected in bags, each of which is reduced to one vector.
///
/// ```
/// # use forebay_core::{device::Device, ops::EmbeddingBagMode, tensor::Tensor};
/// # use forebay_nn::nn::EmbeddingBag;
/// # let device = Device::null(Default::default());
/// let words = EmbeddingBag::new(100, 8, EmbeddingBagMode::Mean, None, &device)?;
/// let sentences = Tensor::from_slice(&[1i32, 2, 3, 7, 7, 0], &[2, 3], &device)?;
/// assert_eq!(words.forward(&sentences, &Default::default())?.shape(), [2, 8]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct EmbeddingBag {
    /// Table, \[entries, features\].
    pub weight: Tensor,
    #[module(skip)]
    bags: EmbeddingBagOptions<'static>,
    #[module(skip)]
    max_norm: Option<MaxNorm>,
    scope: ModuleScope,
}

#[track_caller]
fn zero_padding_row(layer: &'static str, weight: &Tensor, row: usize) -> Result<()> {
    let rows = weight.shape().first().copied().unwrap_or(0);
    fail_if!(row >= rows; argument(layer), "padding_idx {row} is none of the {rows} rows");
    init::constant_(&weight.detach().narrow(0, row, 1)?, 0.0)
}

impl EmbeddingBag {
    /// Creates a table of standard normal values, as PyTorch. The row `padding_idx` is zero and excluded from
    /// every bag.
    ///
    /// # Errors
    /// `padding_idx` is not a row of the table.
    #[track_caller]
    pub fn new(
        entries: usize,
        features: usize,
        mode: EmbeddingBagMode,
        padding_idx: Option<usize>,
        device: &Device,
    ) -> Result<Self> {
        let weight =
            init::create_parameter(|| Tensor::randn([entries, features], init::parameter_dtype(), device))?;
        if let Some(row) = padding_idx {
            zero_padding_row("EmbeddingBag", &weight, row)?;
        }
        let bags = EmbeddingBagOptions { mode, padding_idx, ..EmbeddingBagOptions::default() };
        Ok(Self { weight, bags, max_norm: None, scope: ModuleScope::new() })
    }

    setters! {
        /// Scales each selected row in place if its `p`-norm is above `max_norm`: PyTorch's `max_norm` and
        /// `norm_type` (default 2). Every lookup then makes a pass over the table. A gradient of the table that
        /// was recorded before the lookup becomes an error.
        fn with_max_norm(max_norm: f64, p: f64) { max_norm: Some(MaxNorm { max_norm, p }) }
        /// Divides the gradient of a row by the number of times a call selects the row: PyTorch's
        /// `scale_grad_by_freq`. Not supported for maxima.
        fn scale_grad_by_freq() { bags.scale_grad_by_freq: true }
    }

    fn extra_repr(&self) -> String {
        let EmbeddingBagOptions { padding_idx, scale_grad_by_freq, mode, .. } = self.bags;
        let text = table_repr(&self.weight, padding_idx, self.max_norm, scale_grad_by_freq);
        text.set("mode", format_args!("{mode:?}")).finish()
    }

    /// Reduces each bag to one vector; errors as for [`embedding_bag`](Tensor::embedding_bag).
    #[track_caller]
    pub fn forward(&self, index: &Tensor, inputs: &EmbeddingBagInputs<'_>) -> Result<Tensor> {
        let &EmbeddingBagInputs { offsets, per_sample_weights } = inputs;
        let bags = EmbeddingBagOptions { offsets, per_sample_weights, ..self.bags };
        self.scope.run(|| {
            self.max_norm.map_or(Ok(()), |bound| bound.renorm_rows(&self.weight, index))?;
            self.weight.embedding_bag(index, &bags)
        })
    }
}
