//! Operations whose gradients are kernels and still support a second gradient.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::engine::{BackwardOptions, GradTargets, run_backward_to};
use super::{
    BackwardCtx, DimRange, GradEdge, InputGrads, SavedTensor, compute_requires_grad, differentiable, no_grad,
};
use crate::error::Result;
use crate::tensor::{Dims, Tensor};

type LinearMap = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// Records a linear operation `forward` of `x`. Its gradient is `transpose`, whose gradient is `forward`
/// again. Both run without recording, because they consist of kernels.
#[must_use]
#[track_caller]
pub(crate) fn linear_differentiable(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    forward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    transpose: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    linear_differentiable_with(op, out, x, &[], forward, transpose)
}

/// Records an operation like [`linear_differentiable`] that also reads the tensors `by`, such as an index.
/// Both closures may capture these tensors. The backward pass fails if one of them was changed in place.
#[must_use]
#[track_caller]
pub(crate) fn linear_differentiable_with(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    by: &[&Tensor],
    forward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    transpose: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !compute_requires_grad(&[x]) {
        return out;
    }
    let by = by.iter().map(|t| SavedTensor::input(t)).collect();
    record_linear(op, out, x, by, Arc::new(forward), Arc::new(transpose), None)
}

/// Records the view of a part of `x`, which `part` selects. Its gradient is zero elsewhere.
///
/// The gradients of several parts share one tensor. The gradient of a `range` of one dimension is written to it, and
/// only elements outside all parts are filled with zeros. Other gradients, and second ones of a range, are added in
/// place.
#[must_use]
#[track_caller]
pub(crate) fn part_differentiable(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    range: Option<DimRange>,
    part: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !compute_requires_grad(&[x]) {
        return out;
    }
    let shape = Dims::from_slice(x.shape());
    let part: LinearMap = Arc::new(part);
    let select = Arc::clone(&part);
    let pad = move |g: &Tensor| {
        let whole = Tensor::zeros(&shape, g.dtype(), g.device())?;
        g.copy_into(&select(&whole)?)?;
        Ok(whole)
    };
    let part = Part { shape: Dims::from_slice(x.shape()), range, view: Arc::clone(&part) };
    record_linear(op, out, x, Arc::new([]), Arc::clone(&part.view), Arc::new(pad), Some(part))
}

/// Part of a tensor that a view selects.
struct Part {
    /// Shape of the whole tensor.
    shape: Dims,
    /// Indices of the part, if they are those of one dimension.
    range: Option<DimRange>,
    view: LinearMap,
}

impl Part {
    /// Adds the gradient of the part to the gradient of the whole, which is returned. Returns `None` without a
    /// gradient to add to.
    fn accumulate(&self, g: &Tensor, ctx: &BackwardCtx<'_>) -> Result<Option<Tensor>> {
        if let Some(range) = self.range
            && let Some(whole) = ctx.write_grad_range(0, range, g, &self.shape, &*self.view)?
        {
            return Ok(Some(whole));
        }
        let Some(sum) = ctx.take_pending_grad(0)? else { return Ok(None) };
        let sum = if sum.is_unique() && sum.is_contiguous() { sum } else { sum.copy()? };
        (self.view)(&sum)?.add_(g)?;
        Ok(Some(sum))
    }
}

#[track_caller]
fn record_linear(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    by: Arc<[SavedTensor]>,
    forward: LinearMap,
    transpose: LinearMap,
    part: Option<Part>,
) -> Tensor {
    differentiable(op, out, &[x], move |g, ctx| {
        by.iter().try_for_each(|t| t.unpack(ctx).map(drop))?;
        if !compute_requires_grad(&[g]) {
            if let Some(part) = &part
                && let Some(sum) = part.accumulate(g, ctx)?
            {
                return Ok(smallvec![Some(sum)]);
            }
            return Ok(smallvec![Some(transpose(g)?)]);
        }
        let back = {
            let _no_grad = no_grad();
            transpose(&g.detach())?
        };
        Ok(smallvec![Some(record_linear(op, back, g, by.clone(), transpose.clone(), forward.clone(), None))])
    })
}

/// Records an operation whose `backward` launches kernels, like
/// [`once_differentiable`](super::once_differentiable). With `create_graph`, `backward` does not run. The
/// gradients are then those of `composed`, which computes the same result from `saved` by differentiable
/// operations. `saved` should name memory that `backward` keeps anyway: the inputs, then other tensors that
/// `composed` reads, such as a mask.
#[must_use]
#[track_caller]
pub(crate) fn composite_differentiable(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    saved: SmallVec<[SavedTensor; 4]>,
    composed: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<InputGrads> + Send + Sync + 'static,
) -> Tensor {
    differentiable(op, out, inputs, move |g, ctx| {
        if !ctx.create_graph() {
            saved.iter().try_for_each(|t| t.check_version(ctx))?;
            return backward(g, ctx);
        }
        let inputs = saved.iter().map(|t| t.unpack(ctx)).collect::<Result<SmallVec<[Tensor; 4]>>>()?;
        compute_composite_grads(&inputs, g, &ctx.needs_input_grad, &composed)
    })
}

/// Computes the recorded gradients of `body` with respect to `inputs`.
pub(super) fn compute_composite_grads(
    inputs: &[Tensor],
    g: &Tensor,
    needs_input_grad: &[bool],
    body: &(impl Fn(&[Tensor]) -> Result<Tensor> + ?Sized),
) -> Result<InputGrads> {
    let aliases = create_aliases(inputs, needs_input_grad);
    let out = body(&aliases)?.to_dtype(g.dtype())?;
    let targets = GradTargets::restrict_to_and_stop_at(
        &aliases.iter().zip(needs_input_grad).filter(|(_, w)| **w).map(|(t, _)| t).collect::<Vec<_>>(),
    );
    let mut found = run_backward_to(
        &[(out, g.clone())],
        BackwardOptions { retain_graph: true, create_graph: true },
        Some(&targets),
        None,
    )?;
    collect_alias_grads(&aliases, needs_input_grad, |t| found.remove(&t))
}

/// Returns aliases of the wanted `inputs`, at which a backward pass can stop. Further tensors are returned
/// unchanged.
pub(super) fn create_aliases(inputs: &[Tensor], needs_input_grad: &[bool]) -> SmallVec<[Tensor; 4]> {
    let alias = |t: &Tensor| differentiable("alias", t.detach(), &[t], |g, _| Ok(smallvec![Some(g.clone())]));
    let needs_input_grad = needs_input_grad.iter().copied().chain(std::iter::repeat(false));
    inputs
        .iter()
        .zip(needs_input_grad)
        .map(|(t, needs_grad)| if needs_grad { alias(t) } else { t.clone() })
        .collect()
}

/// Collects the gradients of the wanted tensors; missing gradients are zeros.
pub(super) fn collect_alias_grads(
    tensors: &[Tensor],
    needs_input_grad: &[bool],
    mut found: impl FnMut(u64) -> Option<Tensor>,
) -> Result<InputGrads> {
    let grad = |(t, &needs_grad): (&Tensor, &bool)| match t.grad_edge() {
        Some(GradEdge::Node(node)) if needs_grad => {
            found(node.id).map_or_else(|| t.zeros_like(), Ok).map(Some)
        }
        _ => Ok(None),
    };
    tensors.iter().zip(needs_input_grad).map(grad).collect()
}
