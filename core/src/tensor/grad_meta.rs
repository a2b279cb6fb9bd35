//! Gradient data of a tensor, as tensors see it. Autograd implements the interface.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::Tensor;

/// Position of a tensor in the autograd graph: a leaf or the result of an operation (PyTorch's
/// `AutogradMetaInterface`).
pub(crate) trait GradMeta: Any + fmt::Debug + Send + Sync {
    /// Reports whether operations on the tensor are recorded.
    fn requires_grad(&self) -> bool {
        true
    }

    /// Returns the operation that made the tensor; `None` for a leaf.
    fn op(&self) -> Option<&'static str> {
        None
    }

    /// Returns the gradient data of `view` after a recorded operation has overwritten its `base`, whose data this is.
    fn regenerate_view(&self, view: &Tensor, base: &Tensor) -> Option<Arc<dyn GradMeta>>;
}
