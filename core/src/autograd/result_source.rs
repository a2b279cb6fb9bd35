//! Descriptions of operations, for operations that use their results.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::bypass::find_node;
use crate::dtype::DType;
use crate::error::Result;
use crate::storage::Storage;
use crate::tensor::{Layout, Tensor};

/// Description of the operation that computed a tensor. The backward function of the operation owns it.
pub(crate) trait ResultSource: Any + Send + Sync {
    /// Computes `result`, which the operation returned, in another type. Returns `None` if a cast is better.
    fn compute_as(&self, _result: &Tensor, _dtype: DType) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

/// Attaches a description to the operation that computed `out`.
pub(crate) fn set_result_source(out: &Tensor, source: Weak<dyn ResultSource>) {
    if let Some(node) = find_node(out) {
        // A node has one result, so its source is set once.
        let _ = node.result_source.set(source);
    }
}

/// Returns the description of the operation that computed `t`, while its backward function exists.
pub(crate) fn result_source(t: &Tensor) -> Option<Arc<dyn ResultSource>> {
    find_node(t)?.result_source.get()?.upgrade()
}

/// Returns the description of the operation that computed `t`, if it has the type `S`.
pub(crate) fn result_source_of<S: ResultSource>(t: &Tensor) -> Option<Arc<S>> {
    let source: Arc<dyn Any + Send + Sync> = result_source(t)?;
    source.downcast().ok()
}

/// Reports whether an elementwise operation that is recorded computed `t`.
pub(crate) fn is_elementwise(t: &Tensor) -> bool {
    find_node(t).is_some_and(|node| node.chain_role.get().is_some() || node.op == "to_dtype")
}

/// Returns the number of recorded operations that have used `t`, also of dropped graphs. It is 0 for leaves.
pub(crate) fn use_count(t: &Tensor) -> u32 {
    find_node(t).map_or(0, |node| node.use_count.load(Ordering::Relaxed))
}

/// Notes that the operation that computed `out` casts the gradient of an addend to `dtype`, of 16 bits. An operation
/// that computes the gradient of `out` may write both types in one kernel.
pub(crate) fn set_branch_dtype(out: &Tensor, dtype: DType) {
    if let Some(node) = find_node(out) {
        let _ = node.branch_dtype.set(dtype);
    }
}

/// View of a storage with the contents at one time.
pub(crate) struct TensorState {
    storage: Weak<Storage>,
    layout: Layout,
    dtype: DType,
    version: u64,
}

impl TensorState {
    pub(crate) fn new(t: &Tensor) -> Self {
        let (storage, layout) = (t.downgrade_storage(), t.layout().clone());
        Self { storage, layout, dtype: t.dtype(), version: t.version() }
    }

    /// Reports whether `t` is the same view with the same contents.
    pub(crate) fn is_state_of(&self, t: &Tensor) -> bool {
        self.storage.ptr_eq(&t.downgrade_storage())
            && self.version == t.version()
            && self.dtype == t.dtype()
            && self.layout == *t.layout()
    }
}
