//! Recorded in-place operations: PyTorch's rules for leaves, views and tensors that share memory.
//!
//! The handle that was written through gets the operation's history, and so do all its clones. If the handle
//! is a view, its base gets the history too, because a part of the base is now the operation's result. Other
//! views of that base are updated at their next use ([`regenerate_grad_fn`]). Handles that share the memory
//! in another way, as after `detach`, are not updated. If such a handle has a history, recording an operation
//! on it or running backward from it is an error.

use std::sync::Arc;

use smallvec::smallvec;

use super::{differentiable, enable_grad, is_grad_enabled, linear_differentiable};
use crate::error::{Error, Result, fail_if};
use crate::memory;
use crate::tensor::grad_meta::GradMeta;
use crate::tensor::{Layout, Tensor};

/// Builds the error for a history whose memory was overwritten.
#[track_caller]
pub(super) fn stale_history_error(what: &str) -> Error {
    Error::backward(format!(
        "{what} needs the history of a tensor whose memory was overwritten by a recorded operation, through another view of it \
         or through its base; create the view again after the operation, or change a copy (`copy`)"
    ))
}

/// Builds the error for a checkpoint's capture that changed since the forward run.
#[track_caller]
pub(super) fn changed_capture_error(what: &str) -> Error {
    Error::backward(format!(
        "{what} captures a tensor that was changed in place, or created, since it ran: recomputation would give another result; change a \
         copy (`copy`), or change it after the backward pass"
    ))
}

/// Reports whether an in-place operation must be recorded. Fails if it cannot be.
#[track_caller]
pub(crate) fn check_inplace(op: &'static str, target: &Tensor, others: &[&Tensor]) -> Result<bool> {
    if !is_grad_enabled() {
        return Ok(false);
    }
    let base = target.base();
    fail_if!(target.leaf().is_some();
        argument(op), "a leaf that requires a gradient cannot be changed in place; do it under `no_grad`");
    fail_if!(base.as_ref().is_some_and(|base| base.leaf().is_some());
        argument(op), "a view of a leaf that requires a gradient cannot be changed in place; do it under `no_grad`");
    let seen = [Some(target), base.as_ref()].into_iter().flatten();
    if !seen.clone().chain(others.iter().copied()).any(Tensor::requires_grad) {
        return Ok(false);
    }
    if seen.into_iter().any(|t| !t.is_current()) {
        return Err(stale_history_error(op));
    }
    fail_if!(base.is_some_and(|base| !base.is_contiguous());
        argument(op), "the tensor is a view of one that is not contiguous: the written elements cannot be separated from the rest; \
                    change a copy (`copy`), or do it under `no_grad`");
    Ok(true)
}

/// Gives `target`, and its base, the history of `made`, which has the same memory.
pub(crate) fn rebase_history(op: &'static str, target: &Tensor, result: &Tensor) -> Result<()> {
    let _op = memory::scope::enter_op(op);
    let base = target.base();
    target.bump_writes();
    let Some(base) = base else {
        target.set_grad_fn(result.grad_edge());
        return Ok(());
    };
    // Keeps the history that the base has before this operation, on which the new node depends.
    let before = base.detach().with_grad_edge(base.grad_edge());
    let at = Layout::new(
        target.shape(),
        target.strides(),
        target.layout().offset().saturating_sub(base.layout().offset()),
    );
    let part = at.clone();
    let whole = differentiable(
        op,
        base.detach(),
        &[&before, &result.detach().with_grad_edge(result.grad_edge())],
        move |g, ctx| {
            let g = g.contiguous()?;
            let part = part.clone();
            let own = match ctx.needs_input_grad[0] {
                true => Some(zero_region(op, &g, part.clone())?),
                false => None,
            };
            let start = g.layout().offset() + part.offset();
            let view = ctx.needs_input_grad[1]
                .then(|| g.as_strided(part.shape(), part.strides(), Some(start)))
                .transpose()?;
            Ok(smallvec![own, view])
        },
    );
    base.set_grad_fn(whole.grad_edge());
    let offset = base.layout().offset() + at.offset();
    target.set_grad_fn(base.as_strided(at.shape(), at.strides(), Some(offset))?.grad_edge());
    Ok(())
}

/// Returns the new history of a view whose base was overwritten: that of the same view created now.
pub(super) fn regenerate_grad_fn(view: &Tensor, base: &Tensor) -> Option<Arc<dyn GradMeta>> {
    let _grad = enable_grad();
    let at = view.layout();
    if base.is_contiguous()
        && let Ok(again) = base.as_strided(view.shape(), view.strides(), Some(at.offset()))
    {
        return again.grad_meta();
    }
    // The elements of the base cannot be described by strides, so a gradient through the view is an error.
    let refused = differentiable("view", view.detach(), &[base], |_, ctx| {
        Err(stale_history_error(&ctx.node.describe()))
    });
    refused.grad_meta()
}

/// Returns a copy with zeros in a region. This linear map is its own transpose.
fn zero_region(op: &'static str, g: &Tensor, part: Layout) -> Result<Tensor> {
    let clear = move |g: &Tensor| {
        let kept = g.detach().copy()?;
        let there = kept.with_layout(part.clone());
        Tensor::zeros(part.shape(), g.dtype(), g.device())?.copy_into(&there)?;
        Ok(kept)
    };
    Ok(linear_differentiable(op, clear(g)?, g, clear.clone(), clear))
}
