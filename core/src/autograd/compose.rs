//! Operations whose gradients are kernels, and have gradients all the same.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::engine::{Options, Targets, run_to};
use super::{BackwardCtx, Grads, Meta, SavedTensor, differentiable, no_grad, wanted};
use crate::error::Result;
use crate::tensor::Tensor;

type Map = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// Puts a linear operation of `x` on the tape, that is `forward`: its gradient is `transpose`, whose gradient is `forward`
/// again. Both run without recording, as kernels do.
#[must_use]
#[track_caller]
pub fn attach_linear(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    forward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    transpose: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    attach_linear_by(op, out, x, &[], forward, transpose)
}

/// As [`attach_linear`], of an operation that is linear in `x` and reads `by` as well, as an index does: both closures have these, and
/// that one of them was changed in place since is an error.
#[must_use]
#[track_caller]
pub fn attach_linear_by(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    by: &[&Tensor],
    forward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    transpose: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !wanted(&[x]) {
        return out;
    }
    let by = by.iter().map(|t| SavedTensor::of(t)).collect();
    linear(op, out, x, by, Arc::new(forward), Arc::new(transpose))
}

#[track_caller]
fn linear(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    by: Arc<[SavedTensor]>,
    forward: Map,
    transpose: Map,
) -> Tensor {
    differentiable(op, out, &[x], move |g, wants| {
        by.iter().try_for_each(|t| t.get(wants).map(drop))?;
        if !wanted(&[g]) {
            return Ok(smallvec![Some(transpose(g)?)]);
        }
        let back = {
            let _no_grad = no_grad();
            transpose(&g.detach())?
        };
        Ok(smallvec![Some(linear(op, back, g, by.clone(), transpose.clone(), forward.clone()))])
    })
}

/// Puts an operation on the tape whose `backward` is kernels, as with [`attach`](super::attach). With `create_graph` they do not
/// run: the gradients are then those of `composed`, which makes the same result of the inputs, given as `saved`, by
/// differentiable operations. `saved` names memory that `backward` keeps anyway; behind the inputs may stand what else `composed`
/// reads, such as a mask.
#[must_use]
#[track_caller]
pub fn attach_composed(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    saved: SmallVec<[SavedTensor; 4]>,
    composed: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<Grads> + Send + Sync + 'static,
) -> Tensor {
    differentiable(op, out, inputs, move |g, wants| {
        if !wants.create_graph() {
            saved.iter().try_for_each(|t| t.check(wants))?;
            return backward(g, wants);
        }
        let inputs = saved.iter().map(|t| t.get(wants)).collect::<Result<SmallVec<[Tensor; 4]>>>()?;
        gradients(&inputs, g, wants, &composed)
    })
}

/// The gradients of what `body` makes of `inputs`, on the tape.
pub(super) fn gradients(
    inputs: &[Tensor],
    g: &Tensor,
    wants: &[bool],
    body: &(impl Fn(&[Tensor]) -> Result<Tensor> + ?Sized),
) -> Result<Grads> {
    let aliases = aliases(inputs, wants);
    let out = body(&aliases)?.to_dtype(g.dtype())?;
    let targets =
        Targets::up_to(&aliases.iter().zip(wants).filter(|(_, w)| **w).map(|(t, _)| t).collect::<Vec<_>>());
    let mut found = run_to(
        &[(out, g.clone())],
        Options { retain_graph: true, create_graph: true },
        Some(&targets),
        None,
    )?;
    take(&aliases, wants, |t| found.remove(&t))
}

/// Views of `inputs` at which a walk can end: of those that are wanted. What stands behind the inputs is given as it is.
pub(super) fn aliases(inputs: &[Tensor], wants: &[bool]) -> SmallVec<[Tensor; 4]> {
    let alias = |t: &Tensor| differentiable("alias", t.detach(), &[t], |g, _| Ok(smallvec![Some(g.clone())]));
    let wants = wants.iter().copied().chain(std::iter::repeat(false));
    inputs.iter().zip(wants).map(|(t, want)| if want { alias(t) } else { t.clone() }).collect()
}

/// The gradients that `found` has of tensors, zero where there is none.
pub(super) fn take(
    tensors: &[Tensor],
    wants: &[bool],
    mut found: impl FnMut(u64) -> Option<Tensor>,
) -> Result<Grads> {
    let mut grads = Grads::new();
    for (t, &want) in tensors.iter().zip(wants) {
        grads.push(match t.meta() {
            Some(Meta::Node(node)) if want => Some(match found(node.id) {
                Some(grad) => grad,
                None => t.zeros_like()?,
            }),
            _ => None,
        });
    }
    Ok(grads)
}
