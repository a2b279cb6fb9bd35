//! The tape: which operation made a tensor, and how its gradient flows back.
//!
//! Every differentiable operation attaches a `Node` to its result: edges to the inputs that require gradients, and
//! a closure that turns the gradient of the result into theirs. [`Tensor::backward`] walks the nodes from the newest
//! to the oldest, adds into the leaves' gradients in place, and drops each closure, with the tensors it saved, as
//! soon as it has run.
//!
//! With `create_graph` the walk itself is recorded, and its gradients have gradients: [`attach_twice`],
//! [`attach_linear`] and [`attach_composed`] are for operations that allow it; what is attached by [`attach`] alone is an
//! error when a second gradient comes to it, and never a term that is missing.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::amp::copies::Copy;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::local::{Get, Local, Scoped};
use crate::memory::{self, Tag};
use crate::stream::Access;
use crate::tensor::{Dims, Tensor};

mod anomaly;
mod checkpoint;
mod compose;
mod dispose;
mod engine;
pub mod functional;
mod hooks;
mod inplace;
mod recompute;
mod saved;

pub use anomaly::{DetectAnomaly, detect_anomaly, set_detect_anomaly};
pub use checkpoint::checkpoint;
pub use compose::{attach_composed, attach_linear, attach_linear_by};
pub use engine::{GradOptions, backward, grad, grad_allow_unused};
pub use hooks::HookHandle;
use hooks::Hooks;
pub(crate) use inplace::{may_overwrite, overwritten, viewed_again};
pub(crate) use recompute::{drawn, drawn_before, mode_of_run, touched, updated};
pub use recompute::{is_recomputing, update_state};
pub use saved::SavedTensor;

/// The gradients of an operation's inputs, in order; `None` where none is wanted.
pub type Grads = SmallVec<[Option<Tensor>; 4]>;

/// Takes the gradient of the result, and which inputs want theirs.
type Backward = dyn Fn(&Tensor, &BackwardCtx<'_>) -> Result<Grads> + Send + Sync;

/// Which inputs of an operation want a gradient: a slice of truth values.
pub struct BackwardCtx<'a> {
    wanted: SmallVec<[bool; 4]>,
    /// The operation whose gradients are asked for.
    node: &'a Arc<Node>,
    /// Whether the walk is recorded.
    again: bool,
    /// Whether another walk may follow.
    kept: bool,
    /// Sink that takes the gradients of leaves in their place.
    sink: Option<&'a engine::Sink>,
    /// What the inputs that are results have been given, by their nodes.
    pending: RefCell<&'a mut FxHashMap<u64, Tensor>>,
    /// The inputs, leaves, whose sums were handed out to be added to.
    handed: RefCell<SmallVec<[usize; 2]>>,
    /// Gradients of nodes that are no inputs: of what a checkpoint captures.
    beyond: RefCell<engine::Beyond>,
}

impl Deref for BackwardCtx<'_> {
    type Target = [bool];

    fn deref(&self) -> &[bool] {
        &self.wanted
    }
}

impl fmt::Debug for BackwardCtx<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.wanted.fmt(f)
    }
}

impl BackwardCtx<'_> {
    /// Whether these gradients are to have gradients themselves (`create_graph`): what is done with the gradient of the result
    /// and with [`SavedTensor`]s is recorded.
    #[must_use]
    pub fn create_graph(&self) -> bool {
        self.again
    }

    /// Whether the tape is kept for another walk: then what a gradient has made ahead must not be given away.
    #[must_use]
    pub fn kept(&self) -> bool {
        self.kept
    }

    /// The gradient that others have given an input, a result, so far. An operation that can add its own in the same pass
    /// takes this, and returns the whole sum in place of its own gradient. Others may see this memory: it is not changed.
    #[must_use]
    pub fn sum(&self, input: usize) -> Option<Tensor> {
        match self.own(input)? {
            Meta::Node(node) => self.pending.borrow_mut().remove(&node.id),
            Meta::Leaf(_) => None,
        }
    }

    /// An input whose sum may be added to: not while the walk is recorded, which keeps what it has seen.
    fn own(&self, input: usize) -> Option<&Meta> {
        self.node.inputs.get(input)?.as_ref().filter(|_| !self.again)
    }

    /// The gradient that an input, a leaf, has so far. An operation that can add to memory adds its own to this, and returns
    /// this.
    #[must_use]
    pub fn sum_in_place(&self, input: usize) -> Option<Tensor> {
        let Meta::Leaf(leaf) = self.own(input)? else { return None };
        // A hook gets the gradient of this walk alone.
        if leaf.hooks.get().is_some() {
            return None;
        }
        // In the sink lies what operations have returned, which may be another one's gradient as well; a leaf owns its own.
        let sum = match self.sink {
            Some(sink) => sink.borrow().get(&leaf.id).filter(|sum| sum.is_unique()).cloned(),
            None => lock(&leaf.grad).clone(),
        };
        let sum = sum.filter(|sum| sum.is_contiguous() && leaf.fits(sum))?;
        self.handed.borrow_mut().push(input);
        Some(sum)
    }
}

/// What a tensor knows about its gradient, and where an operation's input came from.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    /// Made by the user: gradients end here.
    Leaf(Arc<Leaf>),
    /// Made by an operation.
    Node(Arc<Node>),
}

impl Meta {
    /// Whether what is done with it is recorded.
    pub(crate) fn counts(&self) -> bool {
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
    copy: Mutex<Copy>,
    hooks: OnceLock<Arc<Hooks>>,
    /// Whether it is taken for a tensor without a gradient.
    frozen: AtomicBool,
}

/// One operation on the tape.
pub(crate) struct Node {
    op: &'static str,
    module: memory::scope::ModulePath,
    /// The line that asked for it.
    site: Option<&'static std::panic::Location<'static>>,
    id: u64,
    inputs: SmallVec<[Option<Meta>; 4]>,
    backward: Mutex<Closure>,
    kind: Kind,
    hooks: OnceLock<Arc<Hooks>>,
}

/// A node's closure, which has what the gradient needs.
enum Closure {
    /// It is there.
    Saved(Arc<Backward>),
    /// A walk runs it, and frees it.
    Running,
    /// It has run.
    Freed,
}

/// What is known of an operation's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// It runs kernels that nobody records.
    Once,
    /// It is made of differentiable operations.
    Twice,
    /// So it is, and it gives gradients to leaves that are none of its inputs.
    Checkpoint,
}

impl Node {
    /// The operation's name.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// That its gradient has none.
    fn refusal(&self) -> Error {
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
    static NO_GRAD: Local<Cell<bool>> = const { Local::new(Cell::new(false)) };
}

/// While it lives, operations of this thread are not recorded. Guards may be dropped in any order: the innermost one that lives counts.
#[derive(Debug)]
pub struct NoGrad {
    _off: Scoped<Cell<bool>>,
}

/// Stops recording on this thread until the guard is dropped.
///
/// ```
/// # use forebay_core::autograd;
/// let guard = autograd::no_grad();
/// assert!(!autograd::is_enabled());
/// drop(guard);
/// assert!(autograd::is_enabled());
/// ```
#[must_use = "recording stops only while the guard lives"]
pub fn no_grad() -> NoGrad {
    NoGrad { _off: Scoped::new(&NO_GRAD, true) }
}

/// While it lives, operations of this thread are recorded, also inside [`no_grad`].
#[derive(Debug)]
pub struct EnableGrad {
    _on: Scoped<Cell<bool>>,
}

/// Records on this thread until the guard is dropped, whatever [`no_grad`] stands around it.
#[must_use = "recording goes on only while the guard lives"]
pub fn enable_grad() -> EnableGrad {
    EnableGrad { _on: Scoped::new(&NO_GRAD, false) }
}

/// Whether operations of this thread are recorded.
#[must_use]
pub fn is_enabled() -> bool {
    !NO_GRAD.now()
}

/// Whether the result of an operation on these inputs must carry a gradient.
#[must_use]
pub fn wanted(inputs: &[&Tensor]) -> bool {
    is_enabled() && inputs.iter().any(|t| t.requires_grad())
}

/// Names a leaf among all there ever were; `None` for other tensors.
pub(crate) fn leaf_id(t: &Tensor) -> Option<u64> {
    t.leaf().map(|leaf| leaf.id)
}

/// What a leaf has of a 16-bit copy; `None` for other tensors.
pub(crate) fn copy_of(t: &Tensor) -> Option<MutexGuard<'_, Copy>> {
    // Who reads the copy reads the leaf.
    t.leaf().inspect(|_| touched(t, Access::Read)).map(|leaf| lock(&leaf.copy))
}

/// Fails if an input of an operation that has no gradient requires one.
///
/// # Errors
/// [`Error::NoGradient`].
pub fn check_no_grad_inputs(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    if wanted(inputs) { Err(Error::NoGradient { op }) } else { Ok(()) }
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
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<Grads> + Send + Sync + 'static,
) -> Tensor {
    record(op, out, inputs, Kind::Once, backward)
}

/// As [`attach`], for a `backward` that is made of differentiable operations on the gradient and on [`SavedTensor`]s, and of
/// nothing else that depends on an input: with `create_graph` it is recorded as it runs.
#[must_use]
#[track_caller]
pub fn differentiable(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<Grads> + Send + Sync + 'static,
) -> Tensor {
    record(op, out, inputs, Kind::Twice, backward)
}

#[track_caller]
fn record(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    kind: Kind,
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<Grads> + Send + Sync + 'static,
) -> Tensor {
    if !wanted(inputs) {
        return out;
    }
    let edges = inputs.iter().map(|t| t.meta()).collect();
    let backward: Arc<Backward> = match inputs.iter().all(|t| t.is_current()) {
        true => Arc::new(backward),
        false => Arc::new(|_, wants| Err(inplace::outdated(&wants.node.describe()))),
    };
    let node = Node::new(op, edges, kind, backward);
    // In no scope that says more: the tape keeps it for the backward pass.
    if memory::scope::current().tag == Tag::Other && !inputs.iter().any(|t| t.shares_storage(&out)) {
        out.retag(Tag::Activation);
    }
    anomaly::made(&node, &out);
    out.with_meta(Some(Meta::Node(node)))
}

impl Node {
    #[track_caller]
    fn new(
        op: &'static str,
        inputs: SmallVec<[Option<Meta>; 4]>,
        kind: Kind,
        backward: Arc<Backward>,
    ) -> Arc<Self> {
        Arc::new(Self {
            op,
            module: memory::scope::current().module,
            site: memory::scope::current().here().site,
            id: next_id(),
            inputs,
            backward: Mutex::new(Closure::Saved(backward)),
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
            copy: Mutex::default(),
            hooks: OnceLock::new(),
            frozen: AtomicBool::new(false),
        })
    }

    /// Whether operations on it are recorded.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    /// The gradient it has.
    pub(crate) fn grad(&self) -> Option<Tensor> {
        lock(&self.grad).clone()
    }

    /// Replaces the gradient.
    pub(crate) fn set(&self, grad: Option<Tensor>) {
        *lock(&self.grad) = grad;
    }

    /// Reports whether a tensor can be its gradient.
    fn fits(&self, grad: &Tensor) -> bool {
        *self.shape == *grad.shape() && self.dtype == grad.dtype() && self.device == *grad.device()
    }

    /// Fails for a gradient that is not of its shape, type and device.
    fn check(&self, grad: &Tensor, verb: &str) -> Result<()> {
        if self.fits(grad) {
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
    fn add(self: &Arc<Self>, grad: Tensor, recorded: bool, handed: bool) -> Result<()> {
        let mut slot = lock(&self.grad);
        grad.device().capture_recorder().graded(self, slot.as_ref());
        // The gradient stays in its slot until there is another: a sum that fails loses nothing.
        let made = match &*slot {
            // The operation has added to it.
            Some(sum) if handed && !recorded && sum.is_same_view(&grad) => return Ok(()),
            Some(sum) => {
                self.check(sum, "has, by `set_grad`,")?;
                if !recorded {
                    // A clone the user holds sees the sum grow, as in PyTorch.
                    return sum.add_(&grad);
                }
                sum.add(&grad)?
            }
            None if grad.is_unique() && grad.is_contiguous() => grad,
            // The buffer is shared with another gradient (an expanded one, or the seed): the leaf owns its own.
            None => {
                let _scope = memory::scope::tag(Tag::Gradient);
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
        Ok(self.detach().with_meta(Some(Meta::Leaf(Leaf::new(self)))))
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
        leaf.frozen.store(!on, Ordering::Relaxed);
        if !on {
            self.set_grad(None);
        }
        Ok(())
    }

    /// Whether a gradient flows to or through this tensor.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.has_meta()
    }

    /// Whether it is a leaf: made by the user, not by a recorded operation.
    #[must_use]
    pub fn is_leaf(&self) -> bool {
        !matches!(self.meta(), Some(Meta::Node(_)))
    }

    /// The same data without its history.
    #[must_use]
    pub fn detach(&self) -> Tensor {
        self.with_meta(None)
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
                self.device().capture_recorder().graded(leaf, leaf.grad().as_ref());
            }
            leaf.set(grad);
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
        assert!(is_enabled());
        drop(again);
        assert!(is_enabled());
        let (one, other) = (no_grad(), no_grad());
        drop(one);
        assert!(!is_enabled());
        drop(other);
        assert!(is_enabled());
    }
}
