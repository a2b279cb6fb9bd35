//! Tensors that gradients keep.

use super::{Meta, Wants};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// A tensor that the gradient of an operation keeps: PyTorch's `SavedVariable`.
///
/// What it gives has the way back to where the tensor came from, if the walk is recorded. Of the operation's own result that
/// is the operation itself, which the tape has and this has not: nothing keeps itself alive. A tensor that was changed in
/// place since is an error.
#[derive(Debug)]
pub struct SavedTensor {
    tensor: Tensor,
    version: u64,
    is_result: bool,
    /// Whether only a walk that is recorded reads it.
    apart: bool,
}

impl SavedTensor {
    /// Keeps an input, or what differentiable operations have made of it.
    #[must_use]
    pub fn of(input: &Tensor) -> Self {
        Self { tensor: input.clone(), version: input.version(), is_result: false, apart: false }
    }

    /// Keeps an input of whose numbers the gradient has a copy of its own, such as a cast: that the input changes is an error only
    /// where the walk is recorded, which reads it again.
    #[must_use]
    pub fn apart(input: &Tensor) -> Self {
        Self { apart: true, ..Self::of(input) }
    }

    /// Keeps a copy of an input, or another view of the same elements, instead of the input itself.
    #[must_use]
    pub fn copy(copy: &Tensor, input: &Tensor) -> Self {
        let tensor = copy.with_meta(input.meta());
        Self { version: copy.version(), tensor, is_result: false, apart: false }
    }

    /// Keeps the result, before it is attached.
    #[must_use]
    pub fn result(out: &Tensor) -> Self {
        Self { tensor: out.detach(), version: out.version(), is_result: true, apart: false }
    }

    /// The tensor, in the gradient that keeps it.
    ///
    /// # Errors
    /// It was changed in place since it was kept.
    pub fn get(&self, wants: &Wants<'_>) -> Result<Tensor> {
        let (now, t) = (self.tensor.version(), &self.tensor);
        if now != self.version && (wants.again || !self.apart) {
            let what = if self.is_result { "its result" } else { "a tensor that it keeps" };
            return Err(Error::Backward(format!(
                "{} needs {what}, {} {:?}, which was changed in place since: it is at version {now}, and was kept at version \
                 {}; change a copy (`copy`), or change it after the backward pass",
                wants.node.describe(),
                t.dtype(),
                t.shape(),
                self.version
            )));
        }
        Ok(match (wants.again, self.is_result) {
            (true, true) => t.with_meta(Some(Meta::Node(wants.node.clone()))),
            _ => t.clone(),
        })
    }

    /// The tensor as a constant: for what does not change with it, as which elements are the largest.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn constant(&self, wants: &Wants<'_>) -> Result<Tensor> {
        let t = self.get(wants)?;
        Ok(if t.requires_grad() { t.detach() } else { t })
    }
}
