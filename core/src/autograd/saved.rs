//! Tensors that backward functions keep.

use super::{BackwardCtx, GradEdge, no_grad};
use crate::error::{Result, fail};
use crate::tensor::Tensor;

/// Tensor that a backward function keeps: PyTorch's `SavedVariable`.
///
/// In a recorded pass, the unpacked tensor has its original history. A saved result gets its history from the
/// node that is running instead of holding that node, which would be a reference cycle. Unpacking fails if
/// the tensor was changed in place since it was saved.
#[derive(Debug)]
pub struct SavedTensor {
    tensor: Tensor,
    version: u64,
    is_output: bool,
    /// If true, only recorded passes read the tensor.
    only_create_graph: bool,
    /// Second term of the saved input, added when the tensor is unpacked.
    addend: Option<Box<SavedTensor>>,
}

impl SavedTensor {
    /// Saves an input, or a tensor computed from it by differentiable operations.
    #[must_use]
    pub fn input(input: &Tensor) -> Self {
        Self::new(input.clone(), false)
    }

    /// Saves an input whose values the backward function has in another form, such as a cast. A change of the
    /// input is an error only in a recorded pass, which reads the input itself.
    #[must_use]
    pub fn input_for_create_graph(input: &Tensor) -> Self {
        let mut saved = Self::input(input);
        saved.only_create_graph = true;
        saved
    }

    /// Saves a copy of an input, or another view of the same elements, in place of the input.
    #[must_use]
    pub fn substitute(copy: &Tensor, input: &Tensor) -> Self {
        Self::new(copy.with_grad_edge(input.grad_edge()), false)
    }

    /// Saves two terms in place of the input that is their sum, which has the dtype of `x`.
    #[must_use]
    pub fn substitute_sum(x: &Tensor, added: &Tensor, input: &Tensor) -> Self {
        let mut saved = Self::substitute(x, input);
        saved.addend = Some(Box::new(Self::input(&added.detach())));
        saved
    }

    /// Saves the result of the operation, before the operation is recorded.
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

    /// Reports whether the tensor has not been written since it was saved.
    pub(crate) fn is_unchanged(&self) -> bool {
        self.tensor.version() == self.version && self.addend.iter().all(|added| added.is_unchanged())
    }

    /// Checks that the tensor is unchanged, for backward functions that reach its memory by another path.
    #[track_caller]
    pub(super) fn check_version(&self, ctx: &BackwardCtx<'_>) -> Result<()> {
        let (now, t) = (self.tensor.version(), &self.tensor);
        if now != self.version && (ctx.create_graph || !self.only_create_graph) {
            let what = if self.is_output { "its result" } else { "a tensor that it saved" };
            fail!(
                backward,
                "{} needs {what}, {} {:?}, which was changed in place since: it is at version {now}, and was saved at version \
                 {}; change a copy (`copy`), or change it after the backward pass",
                ctx.node.describe(),
                t.dtype(),
                t.shape(),
                self.version
            );
        }
        self.addend.iter().try_for_each(|added| added.check_version(ctx))
    }

    /// Returns the tensor, inside the backward function that saved it.
    ///
    /// # Errors
    /// The tensor was changed in place since it was saved.
    #[track_caller]
    pub fn unpack(&self, ctx: &BackwardCtx<'_>) -> Result<Tensor> {
        self.check_version(ctx)?;
        let t = &self.tensor;
        Ok(match (ctx.create_graph, self.is_output, &self.addend) {
            (true, true, _) => t.with_grad_edge(Some(GradEdge::Node(ctx.node.clone()))),
            (_, _, None) => t.clone(),
            (_, _, Some(added)) => {
                let _no_grad = no_grad();
                let sum = t.detach().add(&added.tensor.to_dtype(t.dtype())?)?;
                sum.with_grad_edge(t.grad_edge())
            }
        })
    }

    /// Returns the tensor as a constant, for values whose derivative is zero, such as indices of maxima.
    #[track_caller]
    pub fn unpack_detached(&self, ctx: &BackwardCtx<'_>) -> Result<Tensor> {
        let t = self.unpack(ctx)?;
        Ok(if t.requires_grad() { t.detach() } else { t })
    }
}

impl Drop for SavedTensor {
    fn drop(&mut self) {
        self.tensor.release_from_backward();
    }
}
