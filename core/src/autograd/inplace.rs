//! Recorded operations that overwrite a tensor: PyTorch's rules for leaves, views and what else sees the memory.
//!
//! The handle that was written through gets the operation's history, and with it all its clones. Where it is a view, so does
//! the tensor that it is a view of: a part of that one is now the operation's result. Other views of that tensor get theirs when
//! they are next asked for it ([`regenerate_grad_fn`]). Handles that are no such views, as after `detach`, know nothing of it; what is
//! recorded of those that have a history, or walked back from them, is an error.

use smallvec::smallvec;

use super::{GradEdge, differentiable, enable_grad, is_grad_enabled, linear_differentiable};
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::{Layout, Tensor};

/// The memory of a tensor with a history is not what it was.
pub(super) fn stale_history_error(what: &str) -> Error {
    Error::Backward(format!(
        "{what} needs the history of a tensor whose memory was overwritten by a recorded operation, through another view of it \
         or through its base; make the view again behind the operation, or change a copy (`copy`)"
    ))
}

/// What a checkpoint captures is not what it was when it first ran.
pub(super) fn changed_capture_error(what: &str) -> Error {
    Error::Backward(format!(
        "{what} captures a tensor that was changed in place, or made, since it ran: run again, it would give something else; change a \
         copy (`copy`), or change it after the backward pass"
    ))
}

/// Fails where an operation in place, on these operands as well, cannot be recorded; whether it is to be.
pub(crate) fn check_inplace(op: &'static str, target: &Tensor, others: &[&Tensor]) -> Result<bool> {
    if !is_grad_enabled() {
        return Ok(false);
    }
    let base = target.base();
    if target.leaf().is_some() {
        let rule = "a leaf that requires a gradient cannot be changed in place; do it under `no_grad`";
        return Err(Error::argument(op, rule));
    }
    if base.as_ref().is_some_and(|base| base.leaf().is_some()) {
        let rule =
            "a view of a leaf that requires a gradient cannot be changed in place; do it under `no_grad`";
        return Err(Error::argument(op, rule));
    }
    let seen = [Some(target), base.as_ref()].into_iter().flatten();
    if !seen.clone().chain(others.iter().copied()).any(Tensor::requires_grad) {
        return Ok(false);
    }
    if seen.into_iter().any(|t| !t.is_current()) {
        return Err(stale_history_error(op));
    }
    if base.is_some_and(|base| !base.is_contiguous()) {
        let rule = "the tensor is a view of one that is not contiguous: what was written cannot be told from the rest; \
                    change a copy (`copy`), or do it under `no_grad`";
        return Err(Error::argument(op, rule));
    }
    Ok(true)
}

/// Gives `target` the history of `made`, which lies in the same memory, and its base as well.
pub(crate) fn rebase_history(op: &'static str, target: &Tensor, made: &Tensor) -> Result<()> {
    let _op = memory::scope::enter_op(op);
    let base = target.base();
    target.bump_writes();
    let Some(base) = base else {
        target.set_grad_fn(made.grad_edge());
        return Ok(());
    };
    // As of now: what was recorded before this is what this is recorded on.
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
        &[&before, &made.detach().with_grad_edge(made.grad_edge())],
        move |g, wants| {
            let g = g.contiguous()?;
            let part = part.clone();
            let own = match wants[0] {
                true => Some(zero_region(op, &g, part.clone())?),
                false => None,
            };
            let start = g.layout().offset() + part.offset();
            let view =
                wants[1].then(|| g.as_strided(part.shape(), part.strides(), Some(start))).transpose()?;
            Ok(smallvec![own, view])
        },
    );
    base.set_grad_fn(whole.grad_edge());
    let offset = base.layout().offset() + at.offset();
    target.set_grad_fn(base.as_strided(at.shape(), at.strides(), Some(offset))?.grad_edge());
    Ok(())
}

/// The history of a view that was made before its base was overwritten: that of the same view made now.
pub(crate) fn regenerate_grad_fn(view: &Tensor, base: &Tensor) -> Option<GradEdge> {
    let _grad = enable_grad();
    let at = view.layout();
    if base.is_contiguous()
        && let Ok(again) = base.as_strided(view.shape(), view.strides(), Some(at.offset()))
    {
        return again.grad_edge();
    }
    // Which elements of the base it sees cannot be told by strides: an error, if a gradient comes to it.
    let refused = differentiable("view", view.detach(), &[base], |_, wants| {
        Err(stale_history_error(&wants.node.describe()))
    });
    refused.grad_edge()
}

/// A copy with zeros in a part: its own transpose.
fn zero_region(op: &'static str, g: &Tensor, part: Layout) -> Result<Tensor> {
    let clear = move |g: &Tensor| {
        let kept = g.detach().copy()?;
        let there = kept.with_layout(part.clone());
        Tensor::zeros(part.shape(), g.dtype(), g.device())?.copy_into(&there)?;
        Ok(kept)
    };
    Ok(linear_differentiable(op, clear(g)?, g, clear.clone(), clear))
}
