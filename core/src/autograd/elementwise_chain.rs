//! Chains of elementwise operations in the backward pass.
//!
//! The gradients of `gate.silu() * up` are one kernel if nothing between them ends the pending fusion group. Two
//! things would end it: an operation that runs in between, and the release of memory that the group reads. After an
//! elementwise node, the engine therefore runs the nodes that continue its chain next. It releases the gradients and
//! saved tensors of the chain's nodes after the last one.
//!
//! This costs no memory. A node continues a chain only if its gradient can replace the incoming one in memory.
//! So nothing is allocated while the chain holds memory. The decision depends on the graph and on shapes, never on
//! pending launches. So a dry run takes the same memory as the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::Node;
use super::backward_fn_guard::BackwardFnGuard;
use super::bypass::find_node;
use crate::dtype::DType;
use crate::tensor::Tensor;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChainRole {
    /// The gradients of its inputs are elementwise, so a chain may begin with it.
    Start,
    /// The gradient of its only input has the shape and type of the result's gradient and may replace it.
    Link,
}

/// Id of the newest checkpoint. A checkpoint also produces gradients for tensors that its closure captures, without
/// edges to them. So a node older than the newest checkpoint may lack gradients after its only consumer has run.
static NEWEST_CHECKPOINT: AtomicU64 = AtomicU64::new(0);

/// Notes the creation of a checkpoint.
pub(super) fn note_checkpoint(node: u64) {
    NEWEST_CHECKPOINT.fetch_max(node, Ordering::Relaxed);
}

/// Marks the operation that computed `out` as elementwise.
pub(crate) fn set_chain_role(out: &Tensor, role: ChainRole) {
    if let Some(node) = find_node(out) {
        // A node has one result, so its role is set once.
        let _ = node.chain_role.set(role);
    }
}

/// Reports whether a leaf takes a gradient as its own.
pub(super) fn is_dense_and_unique(grad: &Tensor) -> bool {
    grad.is_unique() && grad.is_contiguous()
}

/// Reports whether a kernel may replace a gradient that has no other owner with one of type `dtype`. 16-bit elements
/// must be whole vectors, because a kernel writes the others one by one in place. Memory of the program may have an
/// owner outside.
pub(super) fn can_overwrite(grad: &Tensor, dtype: DType) -> bool {
    grad.dtype() == dtype
        && is_dense_and_unique(grad)
        && grad.storage().tracked_version().is_some()
        && grad.layout().offset() == 0
        && (grad.dtype().size() >= 4 || grad.numel().is_multiple_of(8))
}

/// Nodes of the running chain.
#[derive(Default)]
pub(super) struct ElementwiseChain {
    /// Ids of the nodes that continue the chain.
    links: SmallVec<[u64; 2]>,
    /// Saved tensors and incoming gradients that the nodes of the chain have read.
    held: Vec<(BackwardFnGuard, Option<Tensor>)>,
}

impl ElementwiseChain {
    /// Returns the id of the newest node that continues the chain. Without one, ends the chain and releases its
    /// memory.
    pub(super) fn next_link(&mut self) -> Option<u64> {
        let newest = self.links.iter().copied().max();
        match newest {
            Some(id) => self.links.retain(|link| *link != id),
            None => self.held.clear(),
        }
        newest
    }

    /// Adds the nodes that continue the chain after a node. Holds what the node has read, or releases it at the end
    /// of the chain.
    pub(super) fn extend(&mut self, links: SmallVec<[u64; 2]>, run: BackwardFnGuard, grad: Option<Tensor>) {
        self.links.extend(links);
        self.held.push((run, grad));
        if self.links.is_empty() {
            self.held.clear();
        }
    }
}

/// Reports whether a node can be the next of a chain: only the node before it has an edge to it.
pub(super) fn is_link(node: &Arc<Node>) -> bool {
    node.chain_role.get() == Some(&ChainRole::Link) && has_single_use(node) && !has_checkpoint_since(node)
}

/// Reports whether a checkpoint was created after a node.
pub(crate) fn has_checkpoint_since(node: &Node) -> bool {
    node.id < NEWEST_CHECKPOINT.load(Ordering::Relaxed)
}

/// Reports whether one edge leads to a node, and no hook reads the gradient of its result.
pub(super) fn has_single_use(node: &Node) -> bool {
    node.use_count.load(Ordering::Relaxed) == 1 && node.hooks.get().is_none()
}
