//! Tensors that gradients keep.

use super::{BackwardCtx, GradEdge, no_grad};
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
    is_output: bool,
    /// Whether only a walk that is recorded reads it.
    only_create_graph: bool,
    /// What is still to be added to it.
    addend: Option<Box<SavedTensor>>,
}

impl SavedTensor {
    /// Keeps an input, or what differentiable operations have made of it.
    #[must_use]
    pub fn input(input: &Tensor) -> Self {
        Self::new(input.clone(), false)
    }

    /// Keeps an input of whose numbers the gradient has a copy of its own, such as a cast: that the input changes is an error only
    /// where the walk is recorded, which reads it again.
    #[must_use]
    pub fn input_for_create_graph(input: &Tensor) -> Self {
        let mut saved = Self::input(input);
        saved.only_create_graph = true;
        saved
    }

    /// Keeps a copy of an input, or another view of the same elements, instead of the input itself.
    #[must_use]
    pub fn substitute(copy: &Tensor, input: &Tensor) -> Self {
        Self::new(copy.with_grad_edge(input.grad_edge()), false)
    }

    /// Keeps the two that an input is the sum of, in the type of `x`, instead of the input itself.
    #[must_use]
    pub fn substitute_sum(x: &Tensor, added: &Tensor, input: &Tensor) -> Self {
        let mut saved = Self::substitute(x, input);
        saved.addend = Some(Box::new(Self::input(&added.detach())));
        saved
    }

    /// Keeps the result, before it is attached.
    #[must_use]
    pub fn output(out: &Tensor) -> Self {
        Self::new(out.detach(), true)
    }

    fn new(tensor: Tensor, is_result: bool) -> Self {
        tensor.retain_for_backward();
        Self {
            version: tensor.version(),
            tensor,
            is_output: is_result,
            only_create_graph: false,
            addend: None,
        }
    }

    /// Looks whether it still is what was kept, for a gradient that has its memory by another way.
    pub(super) fn check_version(&self, wants: &BackwardCtx<'_>) -> Result<()> {
        let (now, t) = (self.tensor.version(), &self.tensor);
        if now != self.version && (wants.create_graph || !self.only_create_graph) {
            let what = if self.is_output { "its result" } else { "a tensor that it keeps" };
            return Err(Error::Backward(format!(
                "{} needs {what}, {} {:?}, which was changed in place since: it is at version {now}, and was kept at version \
                 {}; change a copy (`copy`), or change it after the backward pass",
                wants.node.describe(),
                t.dtype(),
                t.shape(),
                self.version
            )));
        }
        self.addend.iter().try_for_each(|added| added.check_version(wants))
    }

    /// The tensor, in the gradient that keeps it.
    ///
    /// # Errors
    /// It was changed in place since it was kept; it is a sum of two, and memory runs out.
    pub fn unpack(&self, wants: &BackwardCtx<'_>) -> Result<Tensor> {
        self.check_version(wants)?;
        let t = &self.tensor;
        Ok(match (wants.create_graph, self.is_output, &self.addend) {
            (true, true, _) => t.with_grad_edge(Some(GradEdge::Node(wants.node.clone()))),
            (_, _, None) => t.clone(),
            (_, _, Some(added)) => {
                let _no_grad = no_grad();
                let sum = t.detach().add(&added.tensor.to_dtype(t.dtype())?)?;
                sum.with_grad_edge(t.grad_edge())
            }
        })
    }

    /// The tensor as a constant: for what does not change with it, as which elements are the largest.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn unpack_detached(&self, wants: &BackwardCtx<'_>) -> Result<Tensor> {
        let t = self.unpack(wants)?;
        Ok(if t.requires_grad() { t.detach() } else { t })
    }
}

impl Drop for SavedTensor {
    fn drop(&mut self) {
        self.tensor.release_from_backward();
    }
}
