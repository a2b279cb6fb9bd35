//! Embedding: table lookup by row index, and its gradient.

use crate::ops::prelude::*;

const OP: &str = "embedding";

/// Options of [`embedding_with`](Tensor::embedding_with), named after PyTorch's arguments.
///
/// ```
/// use forebay_core::ops::EmbeddingOptions;
/// let words = EmbeddingOptions { padding_idx: Some(0), scale_grad_by_freq: true, ..Default::default() };
/// assert_eq!(words.padding_idx, Some(0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingOptions {
    /// Index of the row that gets no gradient.
    pub padding_idx: Option<usize>,
    /// If true, the gradient of a row is divided by the number of times that the index contains the row.
    pub scale_grad_by_freq: bool,
}

/// Returns 1 / (number of occurrences in `index`) for each element of the one-dimensional `index`.
///
/// The shape is \[numel, 1\], and the type f32, or f64 for f64.
pub(crate) fn inverse_frequencies(index: &Tensor, entries: usize, dtype: DType) -> Result<Tensor> {
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let ones = Tensor::ones(index.shape(), wide, index.device())?;
    let counts = Tensor::zeros([entries], wide, index.device())?.scatter_add(0, index, &ones)?;
    counts.reciprocal()?.index_select(0, index)?.unsqueeze(1)
}

/// Fails if the table has no row `padding_idx`.
pub(crate) fn check_padding_idx(op: &'static str, padding_idx: Option<usize>, entries: usize) -> Result<()> {
    if let Some(row) = padding_idx.filter(|&row| row >= entries) {
        fail!(argument(op), "padding_idx {row} is none of the {entries} rows of the table")
    }
    Ok(())
}

impl Tensor {
    /// Looks up rows of the table `self` \[entries, width\]. The row `padding_idx` gets no gradient.
    ///
    /// An index out of range reads as 0: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn embedding(&self, index: &Tensor, padding_idx: Option<usize>) -> Result<Tensor> {
        self.embedding_with(index, &EmbeddingOptions { padding_idx, ..EmbeddingOptions::default() })
    }

    /// Looks up rows as [`embedding`](Self::embedding) does, with more options.
    #[track_caller]
    pub fn embedding_with(&self, index: &Tensor, options: &EmbeddingOptions) -> Result<Tensor> {
        operation!(OP);
        let &[entries, width] = self.shape() else {
            fail!(shape(OP, [self]), "the table is [entries, width]")
        };
        check_padding_idx(OP, options.padding_idx, entries)?;
        let flat = index.reshape([-1])?;
        let scaled = options.scale_grad_by_freq && autograd::compute_requires_grad(&[self]);
        let shares = scaled.then(|| inverse_frequencies(&flat, entries, self.dtype())).transpose()?;
        let rows = self.select_rows(OP, 0, &flat, &[flat.numel(), width], options.padding_idx, shares)?;
        rows.reshape(&[index.shape(), &[width]].concat()[..])
    }

    /// Scales the table's rows in `index` to a `p`-norm of at most `max_norm`, in place and unrecorded.
    ///
    /// PyTorch's `embedding` does this before the lookup if `max_norm` is set. Reads the whole table.
    ///
    /// # Errors
    /// The table does not have two dimensions or is not of floats, or `index` is not of integers.
    #[track_caller]
    pub fn embedding_renorm_(&self, index: &Tensor, max_norm: f64, p: f64) -> Result<()> {
        operation!(OP = "embedding_renorm_");
        check::non_negative_or_infinite(OP, "max_norm", max_norm)?;
        check::non_negative_or_infinite(OP, "norm_type", p)?;
        let &[entries, _] = self.shape() else { fail!(shape(OP, [self]), "the table is [entries, width]") };
        let _no_grad = autograd::no_grad();
        let table = self.detach();
        let norms = table.norm(p, [1], true)?;
        let named = Tensor::zeros([entries], table.dtype(), table.device())?;
        let named = named.index_fill(0, &index.detach().reshape([-1])?, 1.0)?.unsqueeze(1)?;
        // PyTorch's epsilon keeps scaled rows within the norm.
        let factor = norms.add(1e-7)?.reciprocal()?.mul(max_norm)?;
        let long = norms.gt(max_norm)?.logical_and(&named.ne(0)?)?;
        let one = Tensor::ones((), table.dtype(), table.device())?;
        table.mul_(&one.where_(&long.logical_not()?, &factor)?).map_err(|error| error.with_op(OP))
    }
}
