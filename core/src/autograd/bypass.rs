//! Bypasses: a backward function computes the gradients of the operations before it in one kernel.
//!
//! The nodes of these operations do not run in that pass. Their inputs receive the same gradients by the same edges. A
//! node runs as usual if anything could tell the difference: another use of its result, a hook, a recorded pass, a
//! pass for chosen tensors, or a check for NaN.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::elementwise_chain::has_single_use;
use super::engine::BackwardFnGuard;
use super::{BackwardCtx, BackwardFnState, GradEdge, Node};
use crate::dtype::DType;
use crate::error::Result;
use crate::sync::LockUnpoisoned;
use crate::tensor::Tensor;

/// Gradient for an edge of a bypassed node.
pub(crate) struct EdgeGrad {
    pub(crate) edge: GradEdge,
    pub(crate) grad: Tensor,
    /// If true, the gradient is the sum of a leaf, to which the kernel has added.
    pub(crate) is_accumulated: bool,
}

/// Nodes that do not run, and the gradients of their inputs.
pub(super) struct Bypass {
    /// Input of the running node that has no gradient.
    pub(super) input: usize,
    pub(super) nodes: SmallVec<[Arc<Node>; 2]>,
    pub(super) grads: SmallVec<[EdgeGrad; 2]>,
}

impl Bypass {
    /// Frees what the nodes have saved, unless the graph is kept.
    pub(super) fn free_nodes(&self, kept: bool) -> Result<()> {
        self.nodes.iter().try_for_each(|node| BackwardFnGuard::acquire(node, kept).map(drop))
    }
}

/// Returns the node of the operation that computed `t`.
pub(crate) fn node_of(t: &Tensor) -> Option<Arc<Node>> {
    t.grad_edge()?.node().cloned()
}

/// Lets casts pass the gradient of `out` on in 16 bits. The backward function of `out` takes either type.
pub(crate) fn accept_cast_grad(out: &Tensor) {
    if let Some(node) = node_of(out) {
        node.accepts_cast_grad.store(true, Ordering::Relaxed);
    }
}

impl Node {
    /// Returns the edge to an input, if the input requires a gradient.
    pub(crate) fn input_edge(&self, input: usize) -> Option<&GradEdge> {
        self.next_edges.get(input)?.as_ref()
    }
}

impl GradEdge {
    /// Returns the type to which the operation of this edge casts a gradient: see
    /// [`set_branch_dtype`](super::set_branch_dtype).
    pub(crate) fn branch_dtype(&self) -> Option<DType> {
        self.node()?.branch_dtype.get().copied()
    }
}

impl BackwardCtx<'_> {
    /// Reports whether nodes of which each has one use may be bypassed.
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

    /// Reports whether the gradient of the only input may be passed on in 16 bits: see [`accept_cast_grad`].
    pub(super) fn passes_cast_grad(&self) -> bool {
        self.node
            .input_edge(0)
            .and_then(GradEdge::node)
            .is_some_and(|node| node.accepts_cast_grad.load(Ordering::Relaxed) && self.can_bypass(&[node]))
    }

    /// Takes the gradient accumulated so far for an edge of a bypassed node. The flag is true for the sum of a leaf,
    /// which the kernel must overwrite.
    pub(crate) fn take_grad_of_edge(&self, edge: &GradEdge) -> Result<Option<(Tensor, bool)>> {
        Ok(match edge {
            GradEdge::Node(node) => {
                let pending = self.pending_grads.borrow_mut().remove(&node.id);
                pending.map(super::pending_grad::PendingGrad::complete).transpose()?.map(|grad| (grad, false))
            }
            GradEdge::Leaf(leaf) => self.sum_of_leaf(leaf).map(|sum| (sum, true)),
        })
    }

    /// Delivers the gradients of the inputs of `nodes`, which lead to the input `input` and do not run.
    pub(crate) fn bypass(&self, input: usize, nodes: &[&Arc<Node>], grads: SmallVec<[EdgeGrad; 2]>) {
        let nodes = nodes.iter().map(|node| Arc::clone(node)).collect();
        self.bypass.replace(Some(Bypass { input, nodes, grads }));
    }
}
