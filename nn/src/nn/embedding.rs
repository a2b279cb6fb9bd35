//! Rows of a table by number.

use super::{Module, ModuleScope, init};
use forebay_core::autograd;
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::ops::{EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions};
use forebay_core::tensor::Tensor;

/// How long the rows of a table may be.
#[derive(Clone, Copy, Debug)]
struct MaxNorm {
    max_norm: f64,
    p: f64,
}

impl MaxNorm {
    /// Scales the rows that `index` names and that are too long, in place.
    #[track_caller]
    fn renorm_rows(self, table: &Tensor, index: &Tensor) -> Result<()> {
        autograd::update_state(|| table.embedding_renorm_(index, self.max_norm, self.p))
    }
}

/// A table of vectors, looked up by integers.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Embedding {
    /// \[entries, features\].
    pub weight: Tensor,
    #[module(skip)]
    lookup: EmbeddingOptions,
    #[module(skip)]
    max_norm: Option<MaxNorm>,
    scope: ModuleScope,
}

impl Embedding {
    /// A table of normal numbers, as PyTorch.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn new(entries: usize, features: usize, device: &Device) -> Result<Self> {
        let weight = init::create_parameter(|| Tensor::randn(&[entries, features], DType::F32, device))?;
        Ok(Self::from_parameter(weight))
    }

    /// A table over a tensor that exists: with other initial numbers, or shared with another layer.
    #[must_use]
    pub fn from_parameter(weight: Tensor) -> Self {
        Self { weight, lookup: EmbeddingOptions::default(), max_norm: None, scope: ModuleScope::new() }
    }

    /// With a row that is zero and gets no gradient: padding.
    ///
    /// # Errors
    /// There is no such row; memory runs out.
    #[track_caller]
    pub fn with_padding_idx(mut self, padding_idx: usize) -> Result<Self> {
        zero_padding_row("Embedding", &self.weight, padding_idx)?;
        self.lookup.padding_idx = Some(padding_idx);
        Ok(self)
    }

    /// The gradient of a row is divided by how often a lookup names it: PyTorch's `scale_grad_by_freq`.
    #[must_use]
    pub fn scale_grad_by_freq(mut self) -> Self {
        self.lookup.scale_grad_by_freq = true;
        self
    }

    /// A row that is looked up is scaled in place first, if its `p`-norm is above `max_norm`: PyTorch's `max_norm` and `norm_type` (2 there). It takes a
    /// pass over the table; while a gradient of the table itself is recorded before, that gradient is an error.
    #[must_use]
    pub fn with_max_norm(mut self, max_norm: f64, p: f64) -> Self {
        self.max_norm = Some(MaxNorm { max_norm, p });
        self
    }

    /// The rows of these numbers: a dimension of features more.
    ///
    /// # Errors
    /// `index` holds no integers; memory runs out.
    #[track_caller]
    pub fn forward(&self, index: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            self.max_norm.map_or(Ok(()), |most| most.renorm_rows(&self.weight, index))?;
            self.weight.embedding_with(index, self.lookup)
        })
    }
}

/// A table of vectors, looked up in bags that are each reduced to one vector.
///
/// ```
/// # use forebay_core::{device::Device, ops::EmbeddingBagMode, tensor::Tensor};
/// # use forebay_nn::nn::EmbeddingBag;
/// # let device = Device::null(Default::default());
/// let words = EmbeddingBag::new(100, 8, EmbeddingBagMode::Mean, None, &device)?;
/// let sentences = Tensor::from_slice(&[1i32, 2, 3, 7, 7, 0], &[2, 3], &device)?;
/// assert_eq!(words.forward(&sentences, None, None)?.shape(), [2, 8]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct EmbeddingBag {
    /// \[entries, features\].
    pub weight: Tensor,
    #[module(skip)]
    mode: EmbeddingBagMode,
    #[module(skip)]
    padding_idx: Option<usize>,
    #[module(skip)]
    scale_grad_by_freq: bool,
    #[module(skip)]
    max_norm: Option<MaxNorm>,
    scope: ModuleScope,
}

/// Zeros in the row of padding.
fn zero_padding_row(layer: &'static str, weight: &Tensor, row: usize) -> Result<()> {
    let rows = weight.shape().first().copied().unwrap_or(0);
    if row >= rows {
        return Err(Error::argument(layer, format!("padding_idx {row} is none of the {rows} rows")));
    }
    init::constant_(&weight.detach().narrow(0, row, 1)?, 0.0)
}

impl EmbeddingBag {
    /// A table of normal numbers, as PyTorch, whose row `padding_idx` is zero and counts in no bag.
    ///
    /// # Errors
    /// `padding_idx` is no row; memory runs out.
    #[track_caller]
    pub fn new(
        entries: usize,
        features: usize,
        mode: EmbeddingBagMode,
        padding_idx: Option<usize>,
        device: &Device,
    ) -> Result<Self> {
        let weight = init::create_parameter(|| Tensor::randn(&[entries, features], DType::F32, device))?;
        if let Some(row) = padding_idx {
            zero_padding_row("EmbeddingBag", &weight, row)?;
        }
        Ok(Self {
            weight,
            mode,
            padding_idx,
            scale_grad_by_freq: false,
            max_norm: None,
            scope: ModuleScope::new(),
        })
    }

    /// A row that is looked up is scaled in place first, if its `p`-norm is above `max_norm`: PyTorch's `max_norm` and `norm_type` (2 there). It takes a
    /// pass over the table; while a gradient of the table itself is recorded before, that gradient is an error.
    #[must_use]
    pub fn with_max_norm(mut self, max_norm: f64, p: f64) -> Self {
        self.max_norm = Some(MaxNorm { max_norm, p });
        self
    }

    /// The gradient of a row is divided by how often a call names it: PyTorch's `scale_grad_by_freq`. Not of maxima.
    #[must_use]
    pub fn scale_grad_by_freq(mut self) -> Self {
        self.scale_grad_by_freq = true;
        self
    }

    /// One vector for each bag; see [`embedding_bag`](Tensor::embedding_bag).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn forward(
        &self,
        index: &Tensor,
        offsets: Option<&Tensor>,
        per_sample_weights: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (mode, padding_idx, scale_grad_by_freq) = (self.mode, self.padding_idx, self.scale_grad_by_freq);
        let bags = EmbeddingBagOptions {
            offsets,
            mode,
            per_sample_weights,
            padding_idx,
            scale_grad_by_freq,
            ..EmbeddingBagOptions::default()
        };
        self.scope.run(|| {
            self.max_norm.map_or(Ok(()), |most| most.renorm_rows(&self.weight, index))?;
            self.weight.embedding_bag(index, &bags)
        })
    }
}
