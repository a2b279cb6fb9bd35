//! Rows of a table by number.

use crate::autograd;
use crate::check;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::{Dims, Tensor};

const OP: &str = "embedding";

/// What [`embedding_with`](Tensor::embedding_with) is told besides. Fields are PyTorch's arguments.
///
/// ```
/// use forebay_core::ops::EmbeddingOptions;
/// let words = EmbeddingOptions { padding_idx: Some(0), scale_grad_by_freq: true, ..EmbeddingOptions::default() };
/// assert_eq!(words.padding_idx, Some(0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingOptions {
    /// A row that gets no gradient.
    pub padding_idx: Option<usize>,
    /// Whether the gradient of a row is divided by how often the index names it.
    pub scale_grad_by_freq: bool,
}

/// One over how often `index`, of one dimension, names the row that each of its numbers does: \[numbers, 1\], in f32 (f64 for f64).
pub(crate) fn inverse_frequencies(index: &Tensor, entries: usize, dtype: DType) -> Result<Tensor> {
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let ones = Tensor::ones(index.shape(), wide, index.device())?;
    let counts = Tensor::zeros(&[entries], wide, index.device())?.scatter_add(0, index, &ones)?;
    counts.reciprocal()?.index_select(0, index)?.unsqueeze(1)
}

/// Fails for a padding row that the table does not have.
pub(crate) fn check_padding_idx(op: &'static str, padding_idx: Option<usize>, entries: usize) -> Result<()> {
    match padding_idx {
        Some(row) if row >= entries => {
            Err(Error::argument(op, format!("padding_idx {row} is none of the {entries} rows of the table")))
        }
        _ => Ok(()),
    }
}

impl Tensor {
    /// Rows of `self` (a table of \[entries, width\]) for indices of any shape; the row `padding_idx` gets no gradient.
    ///
    /// An index outside its range names nothing: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// The table has not two dimensions.
    #[track_caller]
    pub fn embedding(&self, index: &Tensor, padding_idx: Option<usize>) -> Result<Tensor> {
        self.embedding_with(index, EmbeddingOptions { padding_idx, ..EmbeddingOptions::default() })
    }

    /// As [`embedding`](Self::embedding), with gradients by frequency where they are asked for.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn embedding_with(&self, index: &Tensor, how: EmbeddingOptions) -> Result<Tensor> {
        let _op = memory::scope::enter_op(OP);
        let &[entries, width] = self.shape() else {
            return Err(Error::shape(OP, "the table is [entries, width]", &[self.shape()]));
        };
        check_padding_idx(OP, how.padding_idx, entries)?;
        let flat = index.reshape([-1])?;
        let shares = match how.scale_grad_by_freq && autograd::compute_requires_grad(&[self]) {
            true => Some(inverse_frequencies(&flat, entries, self.dtype())?),
            false => None,
        };
        let rows = self.select_rows(OP, 0, &flat, &[flat.numel(), width], how.padding_idx, shares)?;
        let mut shape: Dims = index.shape().into();
        shape.push(width);
        rows.reshape(&shape[..])
    }

    /// Scales the rows of a table that `index` names and whose `p`-norm is above `max_norm`, in place and unrecorded: what PyTorch does under
    /// `max_norm` and `norm_type` before it looks rows up. It takes a pass over the table.
    ///
    /// # Errors
    /// The table has not two dimensions, or is of no floats; `index` holds no integers; memory runs out.
    #[track_caller]
    pub fn embedding_renorm_(&self, index: &Tensor, max_norm: f64, p: f64) -> Result<()> {
        const OP: &str = "embedding_renorm_";
        let _op = memory::scope::enter_op(OP);
        check::non_negative_or_infinite(OP, "max_norm", max_norm)?;
        check::non_negative_or_infinite(OP, "norm_type", p)?;
        let &[entries, _] = self.shape() else {
            return Err(Error::shape(OP, "the table is [entries, width]", &[self.shape()]));
        };
        let _no_grad = autograd::no_grad();
        let table = self.detach();
        let norms = table.norm(p, &[1], true)?;
        let named = Tensor::zeros(&[entries], table.dtype(), table.device())?;
        let named = named.index_fill(0, &index.detach().reshape([-1])?, 1.0)?.unsqueeze(1)?;
        // What is added is PyTorch's: rows come out within the norm.
        let factor = norms.add(1e-7)?.reciprocal()?.mul(max_norm)?;
        let long = norms.gt(max_norm)?.logical_and(&named.ne(0)?)?;
        let one = Tensor::ones((), table.dtype(), table.device())?;
        table.mul_(&one.where_(&long.logical_not()?, &factor)?)
    }
}
