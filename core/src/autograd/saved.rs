//! Tensors that gradients keep.

use super::{BackwardCtx, Meta, no_grad};
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
    /// What is still to be added to it.
    added: Option<Box<SavedTensor>>,
}

impl SavedTensor {
    /// Keeps an input, or what differentiable operations have made of it.
    #[must_use]
    pub fn of(input: &Tensor) -> Self {
        Self::new(input.clone(), false)
    }

    /// Keeps an input of whose numbers the gradient has a copy of its own, such as a cast: that the input changes is an error only
    /// where the walk is recorded, which reads it again.
    #[must_use]
    pub fn apart(input: &Tensor) -> Self {
        let mut saved = Self::of(input);
        saved.apart = true;
        saved
    }

    /// Keeps a copy of an input, or another view of the same elements, instead of the input itself.
    #[must_use]
    pub fn copy(copy: &Tensor, input: &Tensor) -> Self {
        Self::new(copy.with_meta(input.meta()), false)
    }

    /// Keeps the two that an input is the sum of, in the type of `x`, instead of the input itself.
    #[must_use]
    pub fn sum(x: &Tensor, added: &Tensor, input: &Tensor) -> Self {
        let mut saved = Self::copy(x, input);
        saved.added = Some(Box::new(Self::of(&added.detach())));
        saved
    }

    /// Keeps the result, before it is attached.
    #[must_use]
    pub fn result(out: &Tensor) -> Self {
        Self::new(out.detach(), true)
    }

    fn new(tensor: Tensor, is_result: bool) -> Self {
        tensor.retain_for_backward();
        Self { version: tensor.version(), tensor, is_result, apart: false, added: None }
    }

    /// Looks whether it still is what was kept, for a gradient that has its memory by another way.
    pub(super) fn check(&self, wants: &BackwardCtx<'_>) -> Result<()> {
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
        self.added.iter().try_for_each(|added| added.check(wants))
    }

    /// The tensor, in the gradient that keeps it.
    ///
    /// # Errors
    /// It was changed in place since it was kept; it is a sum of two, and memory runs out.
    pub fn get(&self, wants: &BackwardCtx<'_>) -> Result<Tensor> {
        self.check(wants)?;
        let t = &self.tensor;
        Ok(match (wants.again, self.is_result, &self.added) {
            (true, true, _) => t.with_meta(Some(Meta::Node(wants.node.clone()))),
            (_, _, None) => t.clone(),
            (_, _, Some(added)) => {
                let _no_grad = no_grad();
                let sum = t.detach().add(&added.tensor.to_dtype(t.dtype())?)?;
                sum.with_meta(t.meta())
            }
        })
    }

    /// The tensor as a constant: for what does not change with it, as which elements are the largest.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn constant(&self, wants: &BackwardCtx<'_>) -> Result<Tensor> {
        let t = self.get(wants)?;
        Ok(if t.requires_grad() { t.detach() } else { t })
    }
}

impl Drop for SavedTensor {
    fn drop(&mut self) {
        self.tensor.release_from_backward();
    }
}
