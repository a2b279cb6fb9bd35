//! Reverse-mode automatic differentiation: the autograd graph and the backward pass.
//!
//! Every differentiable operation attaches a `Node` to its result. A node has edges to the inputs that
//! require gradients, and a backward function that turns the gradient of the result into theirs.
//! [`Tensor::backward`] visits the nodes from the newest to the oldest and accumulates into the leaves'
//! gradients in place. It drops each backward function, with its saved tensors, as soon as the function has
//! run.
//!
//! With `create_graph` the backward pass itself is recorded, so that its gradients have gradients.
//! [`differentiable`] supports that. A second gradient through a [`once_differentiable`] operation is an error,
//! never a missing term.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use smallvec::SmallVec;

use crate::dtype::DType;
use crate::error::{Error, Result, fail_if};
use crate::memory::{self, Tag};
use crate::runtime::device::Device;
use crate::runtime::stream::Access;
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};
use crate::storage::{Storage, next_id};
use crate::sync::LockUnpoisoned;
use crate::tensor::grad_meta::GradMeta;
use crate::tensor::{Dims, Tensor};

mod anomaly;
pub(crate) mod autocast_mode;
mod backward_ctx;
mod backward_fn_guard;
mod bypass;
mod checkpoint;
mod composite;
mod deferred_drop;
mod elementwise_chain;
mod engine;
mod hooks;
mod inplace;
pub(crate) mod low_precision_copy;
mod pending_grad;
mod recompute;
mod result_source;
mod saved;

pub use anomaly::{DetectAnomalyGuard, detect_anomaly, set_detect_anomaly};
pub use backward_ctx::BackwardCtx;
pub(crate) use bypass::{EdgeGrad, accept_cast_grad, accepts_cast_grad, find_node};
pub use checkpoint::checkpoint;
pub(crate) use composite::{
    composite_differentiable, linear_differentiable, linear_differentiable_with, part_differentiable,
};
pub(crate) use elementwise_chain::{ChainRole, has_checkpoint_since, set_chain_role};
pub use engine::{GradOptions, backward, grad, grad_allow_unused};
pub use hooks::HookHandle;
use hooks::HookList;
use inplace::regenerate_grad_fn;
pub(crate) use inplace::{check_inplace, rebase_history};
use low_precision_copy::LowPrecisionCopy;
pub(crate) use pending_grad::DimRange;
pub(crate) use recompute::is_inside_recompute;
pub use recompute::{is_recomputing, replayable_state_update, replayable_training_mode, update_state};
pub(crate) use result_source::{
    ResultSource, TensorState, is_elementwise, result_source, result_source_of, set_branch_dtype,
    set_result_source, use_count,
};
pub use saved::SavedTensor;

/// Gradients of an operation's inputs, in order; `None` for inputs that need none.
pub type InputGrads = SmallVec<[Option<Tensor>; 4]>;

/// Backward function: takes the gradient of the result and the context of the backward pass.
type BackwardFn = dyn Fn(&Tensor, &BackwardCtx<'_>) -> Result<InputGrads> + Send + Sync;

/// Destination of a tensor's gradient (PyTorch's `GradientEdge`).
#[derive(Clone, Debug)]
pub(crate) enum GradEdge {
    /// Leaf created by the user, which accumulates the gradient.
    Leaf(Arc<Leaf>),
    /// Node of the operation that produced the tensor.
    Node(Arc<Node>),
}

impl GradEdge {
    fn from_meta(meta: Arc<dyn GradMeta>) -> Option<Self> {
        let any: Arc<dyn Any + Send + Sync> = meta;
        match any.downcast::<Node>() {
            Ok(node) => Some(Self::Node(node)),
            Err(other) => other.downcast::<Leaf>().ok().map(Self::Leaf),
        }
    }

    /// Returns the node that the edge leads to.
    pub(crate) fn node(&self) -> Option<&Arc<Node>> {
        match self {
            Self::Leaf(_) => None,
            Self::Node(node) => Some(node),
        }
    }

    /// Reports whether both edges lead to the same leaf or node.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Leaf(a), Self::Leaf(b)) => Arc::ptr_eq(a, b),
            (Self::Node(a), Self::Node(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// Fails unless a gradient that `node` returned for its input `index` has that input's shape and dtype.
    #[track_caller]
    fn check_grad(&self, grad: &Tensor, node: &Node, index: usize) -> Result<()> {
        let (shape, dtype) = match self {
            Self::Leaf(leaf) => (&leaf.shape, leaf.dtype),
            Self::Node(input) => (&input.shape, input.dtype),
        };
        let accepts_other_dtype = self.node().is_some_and(|input| {
            input.kind == BackwardKind::Cast(grad.dtype())
                || (grad.dtype().size() == 2 && node.may_return_cast_grad(index))
        });
        fail_if!((grad.dtype() != dtype && !accepts_other_dtype) || **shape != *grad.shape();
            backward, "{} returned a gradient of {} {:?} for input {index}, which is {dtype} {shape:?}; \
            return one of the input's shape and type", node.describe(), grad.dtype(), grad.shape());
        Ok(())
    }

    fn into_meta(self) -> Arc<dyn GradMeta> {
        match self {
            Self::Leaf(leaf) => leaf,
            Self::Node(node) => node,
        }
    }
}

/// Gradient accumulator of a leaf tensor.
pub(crate) struct Leaf {
    id: u64,
    /// Shape, dtype and device of the leaf, which its gradients must have too.
    shape: Dims,
    dtype: DType,
    device: Device,
    grad: Mutex<Option<Tensor>>,
    low_precision_copy: Mutex<LowPrecisionCopy>,
    hooks: OnceLock<Arc<HookList>>,
    /// If true, the leaf behaves as if `requires_grad` were false.
    is_frozen: AtomicBool,
}

/// Note of a captured step: a leaf that received a gradient, with the storage of its previous gradient.
pub(crate) struct CapturedGradWrite {
    pub(crate) leaf: Arc<Leaf>,
    pub(crate) before: Option<Weak<Storage>>,
}

/// Operation in the autograd graph.
pub(crate) struct Node {
    op: &'static str,
    module: memory::scope::ModulePath,
    /// Source location of the call.
    site: memory::scope::CallSite,
    id: u64,
    /// Shape and dtype of the result, which its gradient has too.
    shape: Dims,
    dtype: DType,
    next_edges: SmallVec<[Option<GradEdge>; 4]>,
    backward_fn: Mutex<BackwardFnState>,
    kind: BackwardKind,
    hooks: OnceLock<Arc<HookList>>,
    /// Description of the operation for operations that use the result: see [`set_result_source`].
    result_source: OnceLock<Weak<dyn ResultSource>>,
    /// Type to which the backward function casts the gradient of an addend: see [`set_branch_dtype`].
    branch_dtype: OnceLock<DType>,
    /// If true, a cast may pass its gradient on in 16 bits: see [`accept_cast_grad`].
    accepts_cast_grad: AtomicBool,
    /// Inputs, as bits, whose gradient the backward function has asked to return in 16 bits, and may. All inputs from
    /// 31 on share the last bit.
    cast_grad_inputs: AtomicU32,
    /// If true, several operations use the cast: see [`mark_shared_cast`].
    is_shared_cast: AtomicBool,
    /// Role in chains of elementwise operations; unset for other operations.
    chain_role: OnceLock<ChainRole>,
    /// Number of edges that lead to this node, also those of graphs that were dropped.
    use_count: AtomicU32,
}

/// State of a node's backward function and its saved tensors.
enum BackwardFnState {
    /// Available.
    Saved(Arc<BackwardFn>),
    /// Running in a backward pass that frees it.
    Running,
    /// Freed after it ran.
    Freed,
}

/// Differentiability of an operation's backward function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackwardKind {
    /// The backward function launches kernels that are not recorded.
    OnceDifferentiable,
    /// The backward function consists of differentiable operations.
    Differentiable,
    /// Differentiable, and also produces gradients for leaves that are not inputs.
    Checkpoint,
    /// Cast of an input of this type. The backward function also takes gradients of that type. It saves nothing
    /// and is never freed, because autocast may share the cast with a graph that is recorded after a pass.
    Cast(DType),
}

impl Node {
    /// Describes the operation, its module and the source line of the call.
    fn describe(&self) -> String {
        let mut details: Vec<String> = Vec::new();
        if !self.module.is_root() {
            details.push(format!("in {}", self.module));
        }
        details.extend(self.site.map(|site| format!("at {site}")));
        match details.is_empty() {
            true => format!("`{}`", self.op),
            false => format!("`{}` ({})", self.op, details.join(", ")),
        }
    }
}

impl GradMeta for Leaf {
    fn requires_grad(&self) -> bool {
        !self.is_frozen()
    }

    fn regenerate_view(&self, view: &Tensor, base: &Tensor) -> Option<Arc<dyn GradMeta>> {
        regenerate_grad_fn(view, base)
    }
}

impl GradMeta for Node {
    fn op(&self) -> Option<&'static str> {
        Some(self.op)
    }

    fn regenerate_view(&self, view: &Tensor, base: &Tensor) -> Option<Arc<dyn GradMeta>> {
        regenerate_grad_fn(view, base)
    }
}

impl Tensor {
    /// Returns the edge to the leaf or operation that made the tensor, if operations on it are recorded.
    pub(crate) fn grad_edge(&self) -> Option<GradEdge> {
        self.grad_meta().and_then(GradEdge::from_meta)
    }

    /// Returns the leaf that this tensor is, frozen or not. Recorded operations do not write to leaves.
    pub(crate) fn leaf(&self) -> Option<&Leaf> {
        (&**self.original_grad_meta()? as &dyn Any).downcast_ref()
    }

    /// Returns a tensor of the same memory with another history.
    pub(crate) fn with_grad_edge(&self, edge: Option<GradEdge>) -> Self {
        self.with_grad_meta(edge.map(GradEdge::into_meta))
    }

    /// Gives this handle, and its clones, the history of the memory's current contents.
    fn set_grad_fn(&self, edge: Option<GradEdge>) {
        self.set_grad_meta(edge.map(GradEdge::into_meta));
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

thread_local! {
    /// True while recording is disabled.
    static NO_GRAD: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
}

/// Guard that disables recording on this thread. Guards may be dropped in any order: the innermost live guard
/// decides.
#[derive(Debug)]
pub struct NoGradGuard {
    _no_grad: ScopedGuard<Cell<bool>>,
}

/// Disables recording on this thread until the guard is dropped.
///
/// ```
/// # use forebay_core::autograd;
/// let guard = autograd::no_grad();
/// assert!(!autograd::is_grad_enabled());
/// drop(guard);
/// assert!(autograd::is_grad_enabled());
/// ```
#[doc(alias = "inference_mode")]
#[doc(alias = "set_grad_enabled")]
#[must_use = "recording stops only while the guard lives"]
pub fn no_grad() -> NoGradGuard {
    NoGradGuard { _no_grad: ScopedGuard::new(&NO_GRAD, true) }
}

/// Guard that enables recording on this thread, also inside [`no_grad`].
#[derive(Debug)]
pub struct EnableGradGuard {
    _enable_grad: ScopedGuard<Cell<bool>>,
}

/// Enables recording on this thread until the guard is dropped, even inside [`no_grad`].
#[doc(alias = "set_grad_enabled")]
#[must_use = "recording goes on only while the guard lives"]
pub fn enable_grad() -> EnableGradGuard {
    EnableGradGuard { _enable_grad: ScopedGuard::new(&NO_GRAD, false) }
}

/// Reports whether operations of this thread are recorded.
#[doc(alias = "is_inference")]
#[doc(alias = "is_inference_mode_enabled")]
#[must_use]
pub fn is_grad_enabled() -> bool {
    !NO_GRAD.current()
}

/// Reports whether the result of an operation on these inputs requires a gradient.
#[must_use]
pub fn compute_requires_grad(inputs: &[&Tensor]) -> bool {
    is_grad_enabled() && inputs.iter().any(|t| t.requires_grad())
}

/// Returns the unique id of a leaf; `None` for other tensors.
#[doc(hidden)]
pub fn leaf_id(t: &Tensor) -> Option<u64> {
    t.leaf().map(|leaf| leaf.id)
}

/// Locks the state of a leaf's low-precision copy; `None` for other tensors.
pub(crate) fn lock_low_precision_copy(t: &Tensor) -> Option<MutexGuard<'_, LowPrecisionCopy>> {
    // A read of the copy counts as a read of the leaf.
    t.leaf().inspect(|_| t.record_access(Access::Read)).map(|leaf| leaf.low_precision_copy.lock_unpoisoned())
}

/// Fails if an operation without a gradient has an input that requires one.
///
/// # Errors
/// [`Error::NoGradient`] if an input requires a gradient.
#[track_caller]
pub fn check_no_grad_inputs(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    if compute_requires_grad(inputs) { Err(Error::no_gradient(op)) } else { Ok(()) }
}

/// Records an operation whose backward function launches kernels, if an input requires a gradient.
///
/// `backward` receives the gradient of `out`, with its shape and dtype, and a flag for each input that needs
/// a gradient. It returns one entry for each input, with that input's shape and dtype. It runs without
/// recording: a second gradient is an error that names `op`. It may keep `out` and any input as
/// [`SavedTensor`]s. Everything it captures stays in memory until the backward pass has run it.
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

/// Records an operation like [`once_differentiable`], with a `backward` that is recorded under
/// `create_graph`. `backward` must consist of differentiable operations on the gradient and on
/// [`SavedTensor`]s, and must depend on the inputs in no other way.
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

/// Records an operation like [`differentiable`] with one input, whose gradient `backward` returns.
#[must_use]
#[track_caller]
pub fn differentiable_unary(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    backward: impl Fn(&Tensor, &BackwardCtx<'_>) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    differentiable(op, out, &[x], move |g, ctx| Ok(smallvec::smallvec![Some(backward(g, ctx)?)]))
}

/// Records the cast of `x` to the type of `out`. Operations that share the result may return its gradient in the
/// type of `x`: see [`BackwardCtx::shared_cast_source_dtype`].
#[must_use]
#[track_caller]
pub(crate) fn differentiable_cast(out: Tensor, x: &Tensor) -> Tensor {
    let from = x.dtype();
    record_node("to_dtype", out, &[x], BackwardKind::Cast(from), move |g, ctx| {
        let grad = if ctx.passes_cast_grad(0) { g.clone() } else { g.to_dtype(from)? };
        Ok(smallvec::smallvec![Some(grad)])
    })
}

/// Records that another operation uses a cast of [`differentiable_cast`].
pub(crate) fn mark_shared_cast(cast: &Tensor) {
    if let Some(node) = find_node(cast) {
        node.is_shared_cast.store(true, Ordering::Relaxed);
    }
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
        false => Arc::new(|_, ctx| Err(inplace::stale_history_error(&ctx.node.describe()))),
    };
    let node = Node::new(op, &out, edges, kind, backward);
    // Without a more specific scope, a result that the graph keeps for the backward pass is an activation.
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
        out: &Tensor,
        inputs: SmallVec<[Option<GradEdge>; 4]>,
        kind: BackwardKind,
        backward: Arc<BackwardFn>,
    ) -> Arc<Self> {
        for input in inputs.iter().flatten().filter_map(GradEdge::node) {
            input.use_count.fetch_add(1, Ordering::Relaxed);
        }
        let id = next_id();
        if kind == BackwardKind::Checkpoint {
            elementwise_chain::note_checkpoint(id);
        }
        Arc::new(Self {
            op,
            module: memory::scope::current().module,
            site: memory::scope::call_site(),
            id,
            shape: Dims::from_slice(out.shape()),
            dtype: out.dtype(),
            next_edges: inputs,
            backward_fn: Mutex::new(BackwardFnState::Saved(backward)),
            kind,
            hooks: OnceLock::new(),
            result_source: OnceLock::new(),
            branch_dtype: OnceLock::new(),
            accepts_cast_grad: AtomicBool::new(false),
            cast_grad_inputs: AtomicU32::new(0),
            is_shared_cast: AtomicBool::new(false),
            chain_role: OnceLock::new(),
            use_count: AtomicU32::new(0),
        })
    }
}

impl Leaf {
    fn new(of: &Tensor) -> Arc<Self> {
        Arc::new(Self {
            id: next_id(),
            shape: Dims::from_slice(of.shape()),
            dtype: of.dtype(),
            device: of.device().clone(),
            grad: Mutex::default(),
            low_precision_copy: Mutex::default(),
            hooks: OnceLock::new(),
            is_frozen: AtomicBool::new(false),
        })
    }

    /// Reports whether `requires_grad` is switched off.
    pub(crate) fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Relaxed)
    }

    pub(crate) fn grad(&self) -> Option<Tensor> {
        self.grad.lock_unpoisoned().clone()
    }

    pub(crate) fn set_grad(&self, grad: Option<Tensor>) {
        *self.grad.lock_unpoisoned() = grad;
    }

    /// Reports whether a tensor has the shape, dtype and device of the leaf.
    fn accepts_grad(&self, grad: &Tensor) -> bool {
        *self.shape == *grad.shape() && self.dtype == grad.dtype() && self.device == *grad.device()
    }

    /// Fails if a gradient does not have the leaf's shape, dtype and device.
    #[track_caller]
    fn check_grad(&self, grad: &Tensor, verb: &str) -> Result<()> {
        if self.accepts_grad(grad) {
            return Ok(());
        }
        if self.device != *grad.device() {
            return Err(Error::device("backward", &self.device, grad.device()));
        }
        Err(Error::backward(format!(
            "a leaf of {} {:?} {verb} a gradient of {} {:?}; a gradient has the shape and the type of its tensor",
            self.dtype,
            self.shape,
            grad.dtype(),
            grad.shape()
        )))
    }

    /// Notes for a captured step that the leaf receives a gradient, with its previous gradient.
    #[inline]
    fn note_grad_write(self: &Arc<Self>, device: &Device, before: Option<&Tensor>) {
        device.capture_recorder().add_note(
            || CapturedGradWrite { leaf: Arc::clone(self), before: before.map(Tensor::downgrade_storage) },
            |known: &CapturedGradWrite| Arc::ptr_eq(&known.leaf, self),
        );
    }

    /// Accumulates a gradient, in place unless the pass is `recorded` and the sum needs its own history. If
    /// `handed` is true, the operation may have added to the sum already.
    fn accumulate_grad(self: &Arc<Self>, grad: Tensor, recorded: bool, handed: bool) -> Result<()> {
        let mut slot = self.grad.lock_unpoisoned();
        self.note_grad_write(grad.device(), slot.as_ref());
        // The gradient stays in its slot until it is replaced, so a failed sum loses nothing.
        let accumulated = match &*slot {
            // The operation has accumulated in place.
            Some(sum) if handed && !recorded && sum.is_same_view(&grad) => return Ok(()),
            Some(sum) => {
                self.check_grad(sum, "has, by `set_grad`,")?;
                if !recorded {
                    // A clone held by the user sees the accumulation, as in PyTorch.
                    return sum.add_(&grad);
                }
                sum.add(&grad)?
            }
            None if grad.is_unique() && grad.is_contiguous() => grad,
            // The buffer is shared with another gradient (an expanded one, or the seed), so the leaf takes a
            // copy.
            None => {
                let _scope = memory::scope::enter_tag(Tag::Gradient);
                grad.copy()?
            }
        };
        let replaced = slot.replace(accumulated);
        drop(slot);
        // Dropped without the lock, because this may drop a whole graph.
        drop(replaced);
        Ok(())
    }
}

impl Tensor {
    /// Returns a leaf over the same memory: a tensor that accumulates a gradient, as parameters do. `self` keeps
    /// its history; continue with the leaf. PyTorch's `x.detach().requires_grad_()`.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let w = Tensor::ones([3], DType::F32, &device)?.to_leaf()?;
    /// w.square()?.sum_all()?.backward()?;
    /// assert_eq!(w.grad().expect("w is a leaf").shape(), [3]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The dtype is not a float.
    #[doc(alias = "requires_grad_")]
    #[track_caller]
    pub fn to_leaf(&self) -> Result<Tensor> {
        fail_if!(!self.dtype().is_float();
            dtype("to_leaf", self.dtype()), "only floats carry gradients; cast first");
        Ok(self.detach().with_grad_edge(Some(GradEdge::Leaf(Leaf::new(self)))))
    }

    /// Changes whether the tensor requires a gradient, in place: all clones of its handle change. Returns the handle,
    /// as PyTorch's method of this name.
    ///
    /// With `true`, a tensor without history becomes a leaf, which accumulates a gradient, and a frozen leaf thaws.
    /// With `false`, a leaf is frozen. Operations on frozen leaves alone are not recorded and save nothing for the
    /// backward pass. Freezing also frees the leaf's gradient, so that optimisers skip it. `Module::requires_grad_`
    /// does this for all parameters.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones([3], DType::F32, &device)?;
    /// x.requires_grad_(true)?;
    /// x.square()?.sum_all()?.backward()?;
    /// assert_eq!(x.grad().expect("x is a leaf").shape(), [3]);
    /// assert!(!x.requires_grad_(false)?.requires_grad());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The dtype is not a float. An operation made the tensor, and `on` is false: use [`detach`](Self::detach).
    #[track_caller]
    pub fn requires_grad_(&self, on: bool) -> Result<Tensor> {
        const OP: &str = "requires_grad_";
        if self.leaf().is_none() {
            let has_history = self.requires_grad();
            fail_if!(has_history && !on; argument(OP),
                "an operation made this tensor, so it has a history and always requires a gradient; `detach` gives a \
                 tensor without one");
            if has_history || !on {
                return Ok(self.clone());
            }
            fail_if!(!self.dtype().is_float();
                dtype(OP, self.dtype()), "only floats carry gradients; cast first");
            fail_if!(!self.init_grad_meta(|| GradEdge::Leaf(Leaf::new(self)).into_meta()); argument(OP),
                "recorded operations wrote to the memory of this view; make the leaf with `to_leaf`");
        }
        if let Some(leaf) = self.leaf() {
            leaf.is_frozen.store(!on, Ordering::Relaxed);
        }
        if !on {
            self.set_grad(None);
        }
        Ok(self.clone())
    }

    /// Reports whether a gradient flows to or through this tensor.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.has_grad_edge()
    }

    /// Reports whether the tensor is a leaf, which no recorded operation produced.
    #[must_use]
    pub fn is_leaf(&self) -> bool {
        find_node(self).is_none()
    }

    /// Returns a tensor with the same data and without history.
    #[doc(alias = "detach_")]
    #[must_use]
    pub fn detach(&self) -> Tensor {
        self.with_grad_edge(None)
    }

    /// Returns the gradient accumulated in this leaf, if any.
    #[must_use]
    pub fn grad(&self) -> Option<Tensor> {
        self.leaf()?.grad()
    }

    /// Replaces the gradient of this leaf; `None` frees it.
    ///
    /// A gradient must have the shape, dtype and device of its tensor. A mismatch is an error where the
    /// gradient is used: in a backward pass that adds to it, in an optimiser's step, or in
    /// `clip_grad_norm_`.
    pub fn set_grad(&self, grad: Option<Tensor>) {
        let edge = self.original_grad_meta().cloned().and_then(GradEdge::from_meta);
        if let Some(GradEdge::Leaf(leaf)) = edge {
            // A captured step gives the leaf this gradient at each replay.
            if grad.is_some() {
                leaf.note_grad_write(self.device(), leaf.grad().as_ref());
            }
            leaf.set_grad(grad);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_may_be_dropped_in_any_order() {
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
