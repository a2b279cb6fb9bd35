//! Backward function of a node while a pass runs it.

use std::sync::Arc;

use super::{BackwardFn, BackwardFnState, BackwardKind, Node};
use crate::error::{Result, fail};
use crate::sync::LockUnpoisoned;

/// Backward function of a node while a pass runs it. Passes that retain the graph share it; a pass that does
/// not retain the graph owns and frees it.
pub(super) struct BackwardFnGuard {
    pub(super) backward_fn: Arc<BackwardFn>,
    /// Node whose backward function is freed with this guard.
    node_to_free: Option<Arc<Node>>,
    /// If true, passes that retain the graph may run the function concurrently.
    pub(super) is_shared: bool,
}

impl BackwardFnGuard {
    #[track_caller]
    pub(super) fn acquire(node: &Arc<Node>, kept: bool) -> Result<Self> {
        let kept = kept || matches!(node.kind, BackwardKind::Cast(_));
        let mut closure = node.backward_fn.lock_unpoisoned();
        let why = match &*closure {
            BackwardFnState::Saved(backward) => {
                let backward = Arc::clone(backward);
                if !kept {
                    *closure = BackwardFnState::Running;
                }
                // From here on no other pass can acquire the function if this pass frees it. Its saved
                // tensors may then be given away, unless another pass still runs the function.
                let is_shared = kept || Arc::strong_count(&backward) > 1;
                return Ok(Self {
                    backward_fn: backward,
                    node_to_free: (!kept).then(|| node.clone()),
                    is_shared,
                });
            }
            BackwardFnState::Running => {
                "is in use by another pass (of another thread, or around this one), which frees the saved tensors"
            }
            BackwardFnState::Freed => "has already run backward, and its saved tensors are freed",
        };
        fail!(
            backward,
            "`{}` {why}; every pass but the last one needs `retain_graph` of `GradOptions`, and the last one comes after the others",
            node.op
        );
    }
}

impl Drop for BackwardFnGuard {
    fn drop(&mut self) {
        let Some(node) = &self.node_to_free else { return };
        *node.backward_fn.lock_unpoisoned() = BackwardFnState::Freed;
        // No pass visits this node again, and hooks that hold their own tensor would keep it alive for ever.
        if let Some(hooks) = node.hooks.get() {
            hooks.clear();
        }
    }
}
