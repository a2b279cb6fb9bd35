//! The tape: which operation made a tensor, and how its gradient flows back.
//!
//! Every differentiable operation attaches a `Node` to its result: edges to the inputs that require gradients, and
//! a closure that turns the gradient of the result into theirs. [`Tensor::backward`] walks the nodes from the newest
//! to the oldest, adds into the leaves' gradients in place, and drops each closure, with the tensors it saved, as
//! soon as it has run.
//!
//! With `create_graph` the walk itself is recorded, and its gradients have gradients: [`differentiable`],
//! [`linear_differentiable`] and [`composite_differentiable`] are for operations that allow it; what is attached by [`attach`] alone is an
//! error when a second gradient comes to it, and never a term that is missing.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::amp::low_precision_copy::LowPrecisionCopy;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::runtime::device::Device;
use crate::runtime::stream::Access;
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};
use crate::tensor::{Dims, Tensor};

mod anomaly;
mod checkpoint;
mod composite;
mod deferred_drop;
mod engine;
pub mod functional;
mod hooks;
mod inplace;
mod recompute;
mod saved;

pub use anomaly::{DetectAnomalyGuard, detect_anomaly, set_detect_anomaly};
pub use checkpoint::checkpoint;
pub use composite::{composite_differentiable, linear_differentiable, linear_differentiable_with};
pub use engine::{GradOptions, backward, grad, grad_allow_unused};
pub use hooks::HookHandle;
use hooks::HookList;
pub(crate) use inplace::{check_inplace, rebase_history, regenerate_grad_fn};
pub use recompute::{is_recomputing, update_state};
pub(crate) use recompute::{record_access, record_draw, replayed_draw};
#[doc(hidden)]
pub use recompute::{replayable_state_update, replayable_training_mode};
pub use saved::SavedTensor;

/// The gradients of an operation's inputs, in order; `None` where none is wanted.
pub type InputGrads = SmallVec<[Option<Tensor>; 4]>;

/// Takes the gradient of the result, and which inputs want theirs.
type BackwardFn = dyn Fn(&Tensor, &BackwardCtx<'_>) -> Result<InputGrads> + Send + Sync;

/// Which inputs of an operation want a gradient: a slice of truth values.
pub struct BackwardCtx<'a> {
    needs_input_grad: SmallVec<[bool; 4]>,
    /// The operation whose gradients are asked for.
    node: &'a Arc<Node>,
    /// Whether the walk is recorded.
    create_graph: bool,
    /// Whether another walk may follow.
    retain_graph: bool,
    /// Sink that takes the gradients of leaves in their place.
    captured_grads: Option<&'a engine::CapturedGrads>,
    /// What the inputs that are results have been given, by their nodes.
    pending_grads: RefCell<&'a mut FxHashMap<u64, Tensor>>,
    /// The inputs, leaves, whose sums were handed out to be added to.
    accumulated_inputs: RefCell<SmallVec<[usize; 2]>>,
    /// Gradients of nodes that are no inputs: of what a checkpoint captures.
    outer_grads: RefCell<engine::OuterGrads>,
}

impl Deref for BackwardCtx<'_> {
    type Target = [bool];

    fn deref(&self) -> &[bool] {
        &self.needs_input_grad
    }
}

impl fmt::Debug for BackwardCtx<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.needs_input_grad.fmt(f)
    }
}

impl BackwardCtx<'_> {
    /// Whether these gradients are to have gradients themselves (`create_graph`): what is done with the gradient of the result
    /// and with [`SavedTensor`]s is recorded.
    #[must_use]
    pub fn create_graph(&self) -> bool {
        self.create_graph
    }

    /// Whether the tape is kept for another walk: then what a gradient has made ahead must not be given away.
    #[must_use]
    pub fn retain_graph(&self) -> bool {
        self.retain_graph
    }

    /// The gradient that others have given an input, a result, so far. An operation that can add its own in the same pass
    /// takes this, and returns the whole sum in place of its own gradient. Others may see this memory: it is not changed.
    #[must_use]
    pub fn take_pending_grad(&self, input: usize) -> Option<Tensor> {
        match self.accumulation_edge(input)? {
            GradEdge::Node(node) => self.pending_grads.borrow_mut().remove(&node.id),
            GradEdge::Leaf(_) => None,
        }
    }

    /// An input whose sum may be added to: not while the walk is recorded, which keeps what it has seen.
    fn accumulation_edge(&self, input: usize) -> Option<&GradEdge> {
        self.node.next_edges.get(input)?.as_ref().filter(|_| !self.create_graph)
    }

    /// The gradient that an input, a leaf, has so far. An operation that can add to memory adds its own to this, and returns
    /// this.
    #[must_use]
    pub fn leaf_grad_to_accumulate(&self, input: usize) -> Option<Tensor> {
        let GradEdge::Leaf(leaf) = self.accumulation_edge(input)? else { return None };
        // A hook gets the gradient of this walk alone.
        if leaf.hooks.get().is_some() {
            return None;
        }
        // In the sink lies what operations have returned, which may be another one's gradient as well; a leaf owns its own.
        let sum = match self.captured_grads {
            Some(sink) => sink.borrow().get(&leaf.id).filter(|sum| sum.is_unique()).cloned(),
            None => lock(&leaf.grad).clone(),
        };
        let sum = sum.filter(|sum| sum.is_contiguous() && leaf.accepts_grad(sum))?;
        self.accumulated_inputs.borrow_mut().push(input);
        Some(sum)
    }
}

/// What a tensor knows about its gradient, and where an operation's input came from.
#[derive(Clone, Debug)]
pub(crate) enum GradEdge {
    /// Made by the user: gradients end here.
    Leaf(Arc<Leaf>),
    /// Made by an operation.
    Node(Arc<Node>),
}

impl GradEdge {
    /// Whether what is done with it is recorded.
    pub(crate) fn requires_grad(&self) -> bool {
        !matches!(self, Self::Leaf(leaf) if leaf.is_frozen())
    }
}

/// Where the gradient of a leaf is accumulated.
pub(crate) struct Leaf {
    id: u64,
    /// Shape, type and device, which its gradients have as well.
    shape: Dims,
    dtype: DType,
    device: Device,
    grad: Mutex<Option<Tensor>>,
    low_precision_copy: Mutex<LowPrecisionCopy>,
    hooks: OnceLock<Arc<HookList>>,
    /// Whether it is taken for a tensor without a gradient.
    is_frozen: AtomicBool,
}

/// One operation on the tape.
pub(crate) struct Node {
    op: &'static str,
    module: memory::scope::ModulePath,
    /// The line that asked for it.
    site: Option<&'static std::panic::Location<'static>>,
    id: u64,
    next_edges: SmallVec<[Option<GradEdge>; 4]>,
    backward_fn: Mutex<BackwardFnState>,
    kind: BackwardKind,
    hooks: OnceLock<Arc<HookList>>,
}

/// A node's closure, which has what the gradient needs.
enum BackwardFnState {
    /// It is there.
    Saved(Arc<BackwardFn>),
    /// A walk runs it, and frees it.
    Running,
    /// It has run.
    Freed,
}

/// What is known of an operation's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackwardKind {
    /// It runs kernels that nobody records.
    OnceDifferentiable,
    /// It is made of differentiable operations.
    Differentiable,
    /// So it is, and it gives gradients to leaves that are none of its inputs.
    Checkpoint,
}

impl Node {
    /// The operation's name.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// That its gradient has none.
    fn no_second_gradient_error(&self) -> Error {
        Error::NoSecondGradient { op: self.op, place: self.describe() }
    }

    /// The operation, its module and the line that asked for it.
    fn describe(&self) -> String {
        let mut place: Vec<String> = Vec::new();
        if !self.module.is_root() {
            place.push(format!("in {}", self.module));
        }
        place.extend(self.site.map(|site| format!("at {site}")));
        match place.is_empty() {
            true => format!("`{}`", self.op),
            false => format!("`{}` ({})", self.op, place.join(", ")),
        }
    }
}

impl fmt::Debug for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Leaf({})", self.id)
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node({} {})", self.op, self.id)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers nodes, leaves and pieces of memory in the order in which they are made.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

thread_local! {
    /// Recording is stopped.
    static NO_GRAD: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
}

/// While it lives, operations of this thread are not recorded. Guards may be dropped in any order: the innermost one that lives counts.
#[derive(Debug)]
pub struct NoGradGuard {
    _no_grad: ScopedGuard<Cell<bool>>,
}

/// Stops recording on this thread until the guard is dropped.
///
/// ```
/// # use forebay_core::autograd;
/// let guard = autograd::no_grad();
/// assert!(!autograd::is_grad_enabled());
/// drop(guard);
/// assert!(autograd::is_grad_enabled());
/// ```
#[must_use = "recording stops only while the guard lives"]
pub fn no_grad() -> NoGradGuard {
    NoGradGuard { _no_grad: ScopedGuard::new(&NO_GRAD, true) }
}

/// While it lives, operations of this thread are recorded, also inside [`no_grad`].
#[derive(Debug)]
pub struct EnableGradGuard {
    _enable_grad: ScopedGuard<Cell<bool>>,
}

/// Records on this thread until the guard is dropped, whatever [`no_grad`] stands around it.
#[must_use = "recording goes on only while the guard lives"]
pub fn enable_grad() -> EnableGradGuard {
    EnableGradGuard { _enable_grad: ScopedGuard::new(&NO_GRAD, false) }
}

/// Whether operations of this thread are recorded.
#[must_use]
pub fn is_grad_enabled() -> bool {
    !NO_GRAD.current()
}

/// Whether the result of an operation on these inputs must carry a gradient.
#[must_use]
pub fn compute_requires_grad(inputs: &[&Tensor]) -> bool {
    is_grad_enabled() && inputs.iter().any(|t| t.requires_grad())
}

/// Names a leaf among all there ever were; `None` for other tensors.
#[doc(hidden)]
pub fn leaf_id(t: &Tensor) -> Option<u64> {
    t.leaf().map(|leaf| leaf.id)
}

/// What a leaf has of a 16-bit copy; `None` for other tensors.
pub(crate) fn lock_low_precision_copy(t: &Tensor) -> Option<MutexGuard<'_, LowPrecisionCopy>> {
    // Who reads the copy reads the leaf.
    t.leaf().inspect(|_| record_access(t, Access::Read)).map(|leaf| lock(&leaf.low_precision_copy))
}

/// Fails if an input of an operation that has no gradient requires one.
///
/// # Errors
/// [`Error::NoGradient`].
pub fn check_no_grad_inputs(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    if compute_requires_grad(inputs) { Err(Error::NoGradient { op }) } else { Ok(()) }
}

/// Puts an operation on the tape, if an input requires a gradient.
///
/// `backward` gets the gradient of `out` (of its shape and dtype) and which inputs want theirs; it returns one entry
/// for each input, of that input's shape and dtype. It runs without recording: a gradient of its gradients is an error that
/// names `op`. It may hold `out` itself and any input, as a [`SavedTensor`]: whatever it holds stays in memory until the
/// backward pass has used it.
#[must_use]
#[track_caller]
pub fn once_differentiable(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<InputGrads> + Send + Sync + 'static,
) -> Tensor {
    record_node(op, out, inputs, BackwardKind::OnceDifferentiable, backward)
}

/// As [`attach`], for a `backward` that is made of differentiable operations on the gradient and on [`SavedTensor`]s, and of
/// nothing else that depends on an input: with `create_graph` it is recorded as it runs.
#[must_use]
#[track_caller]
pub fn differentiable(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<InputGrads> + Send + Sync + 'static,
) -> Tensor {
    record_node(op, out, inputs, BackwardKind::Differentiable, backward)
}

#[track_caller]
fn record_node(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    kind: BackwardKind,
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<InputGrads> + Send + Sync + 'static,
) -> Tensor {
    if !compute_requires_grad(inputs) {
        return out;
    }
    let edges = inputs.iter().map(|t| t.grad_edge()).collect();
    let backward: Arc<BackwardFn> = match inputs.iter().all(|t| t.is_current()) {
        true => Arc::new(backward),
        false => Arc::new(|_, wants| Err(inplace::stale_history_error(&wants.node.describe()))),
    };
    let node = Node::new(op, edges, kind, backward);
    // In no scope that says more: the tape keeps it for the backward pass.
    if memory::scope::current().tag == Tag::Other && !inputs.iter().any(|t| t.shares_storage(&out)) {
        out.retag(Tag::Activation);
    }
    anomaly::check_forward_output(&node, &out);
    out.with_grad_edge(Some(GradEdge::Node(node)))
}

impl Node {
    #[track_caller]
    fn new(
        op: &'static str,
        inputs: SmallVec<[Option<GradEdge>; 4]>,
        kind: BackwardKind,
        backward: Arc<BackwardFn>,
    ) -> Arc<Self> {
        Arc::new(Self {
            op,
            module: memory::scope::current().module,
            site: memory::scope::current().or_caller_site().site,
            id: next_id(),
            next_edges: inputs,
            backward_fn: Mutex::new(BackwardFnState::Saved(backward)),
            kind,
            hooks: OnceLock::new(),
        })
    }
}

impl Leaf {
    fn new(of: &Tensor) -> Arc<Self> {
        Arc::new(Self {
            id: next_id(),
            shape: of.shape().into(),
            dtype: of.dtype(),
            device: of.device().clone(),
            grad: Mutex::default(),
            low_precision_copy: Mutex::default(),
            hooks: OnceLock::new(),
            is_frozen: AtomicBool::new(false),
        })
    }

    /// Whether operations on it are recorded.
    pub(crate) fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Relaxed)
    }

    /// The gradient it has.
    pub(crate) fn grad(&self) -> Option<Tensor> {
        lock(&self.grad).clone()
    }

    /// Replaces the gradient.
    pub(crate) fn set_grad(&self, grad: Option<Tensor>) {
        *lock(&self.grad) = grad;
    }

    /// Reports whether a tensor can be its gradient.
    fn accepts_grad(&self, grad: &Tensor) -> bool {
        *self.shape == *grad.shape() && self.dtype == grad.dtype() && self.device == *grad.device()
    }

    /// Fails for a gradient that is not of its shape, type and device.
    fn check_grad(&self, grad: &Tensor, verb: &str) -> Result<()> {
        if self.accepts_grad(grad) {
            return Ok(());
        }
        if self.device != *grad.device() {
            let (left, right) = (self.device.to_string(), grad.device().to_string());
            return Err(Error::Device { op: "backward", left, right });
        }
        Err(Error::Backward(format!(
            "a leaf of {} {:?} {verb} a gradient of {} {:?}; a gradient has the shape and the type of its tensor",
            self.dtype,
            self.shape,
            grad.dtype(),
            grad.shape()
        )))
    }

    /// Adds to the gradient, in place unless it is `recorded`: then the sum has a history of its own. Where the sum was `handed` to
    /// the operation, and comes back, it is there.
    fn accumulate_grad(self: &Arc<Self>, grad: Tensor, recorded: bool, handed: bool) -> Result<()> {
        let mut slot = lock(&self.grad);
        grad.device().capture_recorder().record_grad_write(self, slot.as_ref());
        // The gradient stays in its slot until there is another: a sum that fails loses nothing.
        let made = match &*slot {
            // The operation has added to it.
            Some(sum) if handed && !recorded && sum.is_same_view(&grad) => return Ok(()),
            Some(sum) => {
                self.check_grad(sum, "has, by `set_grad`,")?;
                if !recorded {
                    // A clone the user holds sees the sum grow, as in PyTorch.
                    return sum.add_(&grad);
                }
                sum.add(&grad)?
            }
            None if grad.is_unique() && grad.is_contiguous() => grad,
            // The buffer is shared with another gradient (an expanded one, or the seed): the leaf owns its own.
            None => {
                let _scope = memory::scope::enter_tag(Tag::Gradient);
                grad.copy()?
            }
        };
        let replaced = slot.replace(made);
        drop(slot);
        // Without the lock: it may be the last to know of a whole tape.
        drop(replaced);
        Ok(())
    }
}

impl Tensor {
    /// This tensor as a leaf that accumulates a gradient: a parameter. Shares memory with `self`.
    ///
    /// # Errors
    /// The dtype is not a float.
    pub fn requires_grad_(&self) -> Result<Tensor> {
        if !self.dtype().is_float() {
            return Err(Error::dtype(
                "requires_grad_",
                self.dtype(),
                "only floats carry gradients; cast first",
            ));
        }
        Ok(self.detach().with_grad_edge(Some(GradEdge::Leaf(Leaf::new(self)))))
    }

    /// Freezes a leaf, with all clones of its handle, or lets it have gradients again: PyTorch's `requires_grad = False`. What is computed from
    /// frozen leaves alone is not recorded, and keeps nothing for a backward pass; the gradient that a leaf has is freed, so
    /// that optimisers leave it alone. [`Module::requires_grad_`](crate::nn::Module::requires_grad_) is this for all parameters.
    ///
    /// # Errors
    /// It is no leaf: make one by [`requires_grad_`](Self::requires_grad_).
    pub fn set_requires_grad(&self, on: bool) -> Result<()> {
        let Some(leaf) = self.leaf() else {
            let why = "takes a leaf; `requires_grad_` gives one, and `detach` a tensor without a history";
            return Err(Error::argument("set_requires_grad", why));
        };
        leaf.is_frozen.store(!on, Ordering::Relaxed);
        if !on {
            self.set_grad(None);
        }
        Ok(())
    }

    /// Whether a gradient flows to or through this tensor.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.has_grad_edge()
    }

    /// Whether it is a leaf: made by the user, not by a recorded operation.
    #[must_use]
    pub fn is_leaf(&self) -> bool {
        !matches!(self.grad_edge(), Some(GradEdge::Node(_)))
    }

    /// The same data without its history.
    #[must_use]
    pub fn detach(&self) -> Tensor {
        self.with_grad_edge(None)
    }

    /// The gradient accumulated in this leaf, if there is one.
    #[must_use]
    pub fn grad(&self) -> Option<Tensor> {
        self.leaf()?.grad()
    }

    /// Replaces the gradient of this leaf; `None` frees it.
    ///
    /// A gradient has the shape, the type and the device of its tensor. Any other is an error where it is used: in a backward pass that adds
    /// to it, in an optimiser's step, or in [`clip_grad_norm_`](crate::optim::clip_grad_norm_).
    pub fn set_grad(&self, grad: Option<Tensor>) {
        if let Some(leaf) = self.leaf() {
            // A captured step gives the leaf this gradient at each replay.
            if grad.is_some() {
                self.device().capture_recorder().record_grad_write(leaf, leaf.grad().as_ref());
            }
            leaf.set_grad(grad);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_may_go_in_any_order() {
        let stopped = no_grad();
        let again = enable_grad();
        drop(stopped);
        assert!(is_grad_enabled());
        drop(again);
        assert!(is_grad_enabled());
        let (one, other) = (no_grad(), no_grad());
        drop(one);
        assert!(!is_grad_enabled());
        drop(other);
        assert!(is_grad_enabled());
    }
}
