//! Bypasses: a backward function computes the gradients of the operations before it in one kernel.
//!
//! The nodes of these operations do not run in that pass. Their inputs receive the same gradients by the same edges. A
//! node runs as usual if anything could tell the difference: another use of its result, a hook, a recorded pass, a
//! pass for chosen tensors, or a check for NaN.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::backward_fn_guard::BackwardFnGuard;
use super::elementwise_chain::has_single_use;
use super::{BackwardCtx, BackwardFnState, GradEdge, Node};
use crate::dtype::DType;
use crate::error::Result;
use crate::sync::LockUnpoisoned;
use crate::tensor::Tensor;

/// Gradient for an edge of a bypassed node.
pub(crate) struct EdgeGrad {
    pub(crate) edge: GradEdge,
    pub(crate) grad: Tensor,
    /// If true, `grad` is the accumulated gradient of a leaf. The kernel has added to it already.
    pub(crate) is_accumulated: bool,
}

/// Nodes that do not run, and the gradients of their inputs.
pub(super) struct Bypass {
    /// Index of the running node's input that leads to the bypassed nodes, and gets no gradient itself.
    pub(super) input: usize,
    pub(super) nodes: SmallVec<[Arc<Node>; 2]>,
    pub(super) grads: SmallVec<[EdgeGrad; 2]>,
}

impl Bypass {
    /// Frees the saved tensors of the nodes, unless the graph is retained.
    pub(super) fn free_nodes(&self, retain_graph: bool) -> Result<()> {
        self.nodes.iter().try_for_each(|node| BackwardFnGuard::acquire(node, retain_graph).map(drop))
    }
}

/// Returns the node of the operation that computed `t`.
pub(crate) fn find_node(t: &Tensor) -> Option<Arc<Node>> {
    t.grad_edge()?.node().cloned()
}

/// Lets the backward function of a cast that reads `out` return a gradient in 16 bits. The backward function of `out`
/// takes gradients of both types.
pub(crate) fn accept_cast_grad(out: &Tensor) {
    if let Some(node) = find_node(out) {
        node.accepts_cast_grad.store(true, Ordering::Relaxed);
    }
}

/// Reports whether the gradient of a tensor may be passed on in 16 bits: see [`accept_cast_grad`].
pub(crate) fn accepts_cast_grad(t: &Tensor) -> bool {
    find_node(t).is_some_and(|node| node.accepts_cast_grad.load(Ordering::Relaxed))
}

impl Node {
    /// Returns the edge to an input, if the input requires a gradient.
    pub(crate) fn input_edge(&self, input: usize) -> Option<&GradEdge> {
        self.next_edges.get(input)?.as_ref()
    }

    /// Notes that the gradient of an input may be returned in 16 bits.
    fn allow_cast_grad(&self, input: usize) {
        self.cast_grad_inputs.fetch_or(cast_grad_bit(input), Ordering::Relaxed);
    }

    /// Reports whether the gradient of an input may be returned in 16 bits.
    pub(super) fn may_return_cast_grad(&self, input: usize) -> bool {
        self.cast_grad_inputs.load(Ordering::Relaxed) & cast_grad_bit(input) != 0
    }
}

/// Returns the bit of an input in `Node::cast_grad_inputs`.
fn cast_grad_bit(input: usize) -> u32 {
    1 << input.min(31)
}

impl GradEdge {
    /// Returns the type to which the operation of this edge casts a gradient: see
    /// [`set_branch_dtype`](super::set_branch_dtype).
    pub(crate) fn branch_dtype(&self) -> Option<DType> {
        self.node()?.branch_dtype.get().copied()
    }
}

impl BackwardCtx<'_> {
    /// Reports whether all nodes may be bypassed. The result of each must have one use, no gradient so far, and a
    /// backward function that has not run.
    pub(crate) fn can_bypass(&self, nodes: &[&Arc<Node>]) -> bool {
        let pending = self.pending_grads.borrow();
        self.allows_bypass
            && nodes.iter().all(|node| {
                has_single_use(node)
                    && node.id >= self.min_node_id
                    && !pending.contains_key(&node.id)
                    && matches!(*node.backward_fn.lock_unpoisoned(), BackwardFnState::Saved(_))
            })
    }

    /// Reports whether the gradient of an input may be passed on in 16 bits: see [`accept_cast_grad`].
    pub(crate) fn passes_cast_grad(&self, input: usize) -> bool {
        let cast = self.node.input_edge(input).and_then(GradEdge::node);
        let passes = cast
            .is_some_and(|cast| cast.accepts_cast_grad.load(Ordering::Relaxed) && self.can_bypass(&[cast]));
        if passes {
            self.node.allow_cast_grad(input);
        }
        passes
    }

    /// Takes the gradient accumulated so far for an edge of a bypassed node. The flag is true for the gradient of a
    /// leaf, which the kernel must overwrite with the new sum.
    pub(crate) fn take_grad_of_edge(&self, edge: &GradEdge) -> Result<Option<(Tensor, bool)>> {
        Ok(match edge {
            GradEdge::Node(node) => {
                let pending = self.pending_grads.borrow_mut().remove(&node.id);
                pending.map(super::pending_grad::PendingGrad::complete).transpose()?.map(|grad| (grad, false))
            }
            GradEdge::Leaf(leaf) => self.sum_of_leaf(leaf).map(|sum| (sum, true)),
        })
    }

    /// Bypasses `nodes`, to which the input `input` of the running node leads. `grads` are the gradients of their
    /// inputs.
    pub(crate) fn bypass_nodes(&self, input: usize, nodes: &[&Arc<Node>], grads: SmallVec<[EdgeGrad; 2]>) {
        let nodes = nodes.iter().map(|node| Arc::clone(node)).collect();
        self.bypass.replace(Some(Bypass { input, nodes, grads }));
    }
}
