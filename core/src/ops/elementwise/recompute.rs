//! Results that are computed again in the backward pass instead of being saved.
//!
//! An activation such as SiLU saves its input. A product that uses its result would save the result too, as large as
//! the input. The product keeps the activation's saved input instead, and its backward pass computes the activation
//! again. The new result fuses with the gradient, and is never written. A gated unit `gate.silu() * up` therefore saves
//! `gate` and `up` only.

use crate::autograd::{BackwardCtx, GradEdge, ResultSource, TensorState};
use crate::ops::elementwise::pointwise::{PointwiseOp, run_pointwise};
use crate::ops::prelude::*;
use crate::runtime::options::default_fusion_min_bytes;
use crate::scalar::Scalar;

/// Elementwise operation of one tensor, with its saved input and the state of its result.
pub(super) struct RecomputableResult {
    op: &'static PointwiseOp,
    attrs: SmallVec<[(&'static str, Scalar); 4]>,
    input: SavedTensor,
    output: TensorState,
}

impl ResultSource for RecomputableResult {}

impl RecomputableResult {
    /// Saves the input `x` of an operation with the result `out`. Returns `None` for results that are too small
    /// to fuse.
    pub(super) fn new(
        op: &'static PointwiseOp,
        x: &Tensor,
        attrs: &[(&'static str, Scalar)],
        out: &Tensor,
    ) -> Option<Arc<Self>> {
        let (bytes, device) = ((out.numel() * out.dtype().size()) as u64, out.device());
        // The null device does not fuse, but has the memory of a device that does.
        let planned = || device.is_null().then(default_fusion_min_bytes).flatten();
        let fuses = device.fusion_min_bytes().or_else(planned).is_some_and(|min_bytes| bytes >= min_bytes);
        (fuses && x.dtype() == out.dtype()).then(|| {
            Arc::new(Self {
                op,
                attrs: attrs.into(),
                input: SavedTensor::input(x),
                output: TensorState::new(out),
            })
        })
    }

    /// Finds the operation that computed `t`, if `t` is its unchanged result and fuses with a result of `shape`. The
    /// input must be unchanged too.
    pub(super) fn find(t: &Tensor, shape: &[usize]) -> Option<Arc<Self>> {
        let found = autograd::result_source_of::<Self>(t)?;
        (found.output.is_state_of(t) && found.input.is_unchanged() && t.shape() == shape).then_some(found)
    }

    pub(super) fn unpack_input(&self, ctx: &BackwardCtx<'_>) -> Result<Tensor> {
        self.input.unpack(ctx)
    }

    /// Computes the result again, in a backward function. In a recorded pass it has the history `edge` of the first
    /// result, so second gradients reach the first result and its hooks.
    pub(super) fn recompute(&self, edge: Option<&GradEdge>, ctx: &BackwardCtx<'_>) -> Result<Tensor> {
        let _no_grad = autograd::no_grad();
        let input = self.unpack_input(ctx)?;
        let again = run_pointwise(self.op, &[Operand::Tensor(&input)], &self.attrs)?;
        Ok(if ctx.create_graph() { again.with_grad_edge(edge.cloned()) } else { again })
    }
}
