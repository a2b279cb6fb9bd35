//! Context of a backward function: what the function may ask of the pass that runs it.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::bypass::Bypass;
use super::pending_grad::{DimRange, PendingGrad, WrittenRanges};
use super::{BackwardKind, GradEdge, Leaf, Node, engine};
use crate::dtype::DType;
use crate::error::Result;
use crate::sync::LockUnpoisoned;
use crate::tensor::Tensor;

/// Context of a backward function.
pub struct BackwardCtx<'a> {
    /// One flag for each input: true if the input needs a gradient.
    pub needs_input_grad: SmallVec<[bool; 4]>,
    pub(super) node: &'a Arc<Node>,
    /// If true, the backward pass is recorded.
    pub(super) create_graph: bool,
    /// If true, another backward pass may follow.
    pub(super) retain_graph: bool,
    /// If true, the gradient of the result has no other owner and may be overwritten.
    pub(super) overwrites_grad: bool,
    /// Collects the gradients of leaves instead of the leaves themselves.
    pub(super) captured_grads: Option<&'a engine::CapturedGrads>,
    /// Gradients accumulated so far for nodes, by node id.
    pub(super) pending_grads: RefCell<&'a mut FxHashMap<u64, PendingGrad>>,
    /// Indices of leaf inputs whose sums the backward function took to add to.
    pub(super) accumulated_inputs: RefCell<SmallVec<[usize; 2]>>,
    /// Input whose gradient is partly written, and the part.
    pub(super) written: RefCell<Option<(usize, WrittenRanges)>>,
    /// If true, backward functions may compute gradients in place of other nodes.
    pub(super) allows_bypass: bool,
    /// Smallest node id that the pass visits.
    pub(super) min_node_id: u64,
    /// Nodes that do not run, with the gradients of their inputs.
    pub(super) bypass: RefCell<Option<Bypass>>,
    /// Gradients of nodes that are not inputs, such as the captures of a checkpoint.
    pub(super) outer_grads: RefCell<engine::OuterGrads>,
}

impl fmt::Debug for BackwardCtx<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.needs_input_grad.fmt(f)
    }
}

impl BackwardCtx<'_> {
    /// Reports whether the gradients need gradients themselves (`create_graph`). Operations on the gradient
    /// of the result and on [`SavedTensor`](super::SavedTensor)s are then recorded.
    #[must_use]
    pub fn create_graph(&self) -> bool {
        self.create_graph
    }

    /// Reports whether the graph is retained for another backward pass. The backward function must then not
    /// give away what it computed in advance.
    #[must_use]
    pub fn retain_graph(&self) -> bool {
        self.retain_graph
    }

    /// Reports whether an operation with [`ChainRole::Link`] writes its gradient over the gradient of the
    /// result.
    pub(crate) fn overwrites_grad(&self) -> bool {
        self.overwrites_grad
    }

    /// Takes the gradient accumulated so far for a non-leaf input. An operation that can add its own gradient
    /// in the same kernel returns the whole sum as that input's gradient. The memory may be shared, so it
    /// must not be changed in place.
    #[track_caller]
    pub fn take_pending_grad(&self, input: usize) -> Result<Option<Tensor>> {
        let Some(node) = self.accumulation_edge(input).and_then(GradEdge::node) else { return Ok(None) };
        let pending = self.pending_grads.borrow_mut().remove(&node.id);
        pending.map(PendingGrad::complete).transpose()
    }

    /// Writes the gradient `g` of a range of an input's indices. `view` selects the range of a tensor of the input's
    /// `shape`. Returns the gradient of the input, whose other elements later writes or the engine fill. Returns
    /// `None` if `g` must be added instead: the input is a leaf, the pass is recorded, or the range has another
    /// gradient.
    pub(crate) fn write_grad_range(
        &self,
        input: usize,
        range: DimRange,
        g: &Tensor,
        shape: &[usize],
        view: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let Some(node) = self.accumulation_edge(input).and_then(GradEdge::node) else { return Ok(None) };
        let pending = self.pending_grads.borrow_mut().remove(&node.id);
        let (sum, mut written) = match pending {
            None => (Tensor::empty(shape, g.dtype(), g.device())?, WrittenRanges::new(range.dim)),
            Some(PendingGrad { sum, written: Some(written) })
                if sum.dtype() == g.dtype() && sum.is_unique() =>
            {
                (sum, written)
            }
            Some(other) => {
                self.pending_grads.borrow_mut().insert(node.id, other);
                return Ok(None);
            }
        };
        if !written.insert(range) {
            self.pending_grads.borrow_mut().insert(node.id, PendingGrad { sum, written: Some(written) });
            return Ok(None);
        }
        g.copy_into(&view(&sum)?)?;
        self.written.replace(Some((input, written)));
        Ok(Some(sum))
    }

    /// Returns the type from which autocast cast an input that several operations share. The gradient of the input
    /// may be returned, and is then accumulated, in this type.
    pub(crate) fn shared_cast_source_dtype(&self, input: usize) -> Option<DType> {
        self.cast_source_dtype(input, true)
    }

    /// Returns the type from which autocast cast an input that no other operation uses. The gradient of the
    /// input may be returned in this type, with values of the input's type, which saves the cast.
    pub(crate) fn own_cast_source_dtype(&self, input: usize) -> Option<DType> {
        self.cast_source_dtype(input, false)
    }

    fn cast_source_dtype(&self, input: usize, is_shared: bool) -> Option<DType> {
        let node = self.accumulation_edge(input)?.node()?;
        match node.kind {
            BackwardKind::Cast(dtype) => {
                (node.is_shared_cast.load(Ordering::Relaxed) == is_shared).then_some(dtype)
            }
            _ => None,
        }
    }

    /// Returns the 16-bit type to which the operation that computed an input casts a gradient: see
    /// [`set_branch_dtype`](super::set_branch_dtype).
    pub(crate) fn branch_dtype(&self, input: usize) -> Option<DType> {
        self.accumulation_edge(input)?.branch_dtype()
    }

    /// Returns the edge of an input whose gradient may be accumulated by the operation. There is none while
    /// the pass is recorded, because the recorded graph keeps the old sum.
    fn accumulation_edge(&self, input: usize) -> Option<&GradEdge> {
        self.node.next_edges.get(input)?.as_ref().filter(|_| !self.create_graph)
    }

    /// Returns the gradient accumulated so far for a leaf input. An operation that can accumulate in place
    /// adds its own gradient to this tensor and returns it.
    #[must_use]
    pub fn leaf_grad_to_accumulate(&self, input: usize) -> Option<Tensor> {
        let GradEdge::Leaf(leaf) = self.accumulation_edge(input)? else { return None };
        let sum = self.sum_of_leaf(leaf)?;
        self.accumulated_inputs.borrow_mut().push(input);
        Some(sum)
    }

    /// Returns the gradient accumulated so far for a leaf, if an operation may add to it in place.
    pub(super) fn sum_of_leaf(&self, leaf: &Leaf) -> Option<Tensor> {
        // A hook must see the gradient of this pass alone.
        if leaf.hooks.get().is_some() {
            return None;
        }
        // The sink holds tensors as operations returned them, which may be shared with another gradient. A
        // leaf owns its gradient.
        let sum = match self.captured_grads {
            Some(sink) => sink.borrow().get(&leaf.id).filter(|sum| sum.is_unique()).cloned(),
            None => leaf.grad.lock_unpoisoned().clone(),
        };
        sum.filter(|sum| sum.is_contiguous() && leaf.accepts_grad(sum))
    }
}
