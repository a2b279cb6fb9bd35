//! The tape: which operation made a tensor, and how its gradient flows back.
//!
//! Every differentiable operation attaches a `Node` to its result: edges to the inputs that require gradients, and
//! a closure that turns the gradient of the result into theirs. [`Tensor::backward`] walks the nodes from the newest
//! to the oldest, adds into the leaves' gradients in place, and drops each closure, with the tensors it saved, as
//! soon as it has run.

use std::cell::{Cell, RefCell};
use std::collections::BinaryHeap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::amp;
use crate::amp::copies::Copy;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::tensor::Tensor;

mod checkpoint;
pub use checkpoint::checkpoint;

/// The gradients of an operation's inputs, in order; `None` where none is wanted.
pub type Grads = SmallVec<[Option<Tensor>; 4]>;

/// Takes the gradient of the result, and which inputs want theirs.
type Backward = dyn Fn(&Tensor, &Wants<'_>) -> Result<Grads> + Send + Sync;

/// Which inputs of an operation want a gradient: a slice of truth values.
pub struct Wants<'a> {
    wanted: SmallVec<[bool; 4]>,
    inputs: &'a [Option<Edge>],
    /// What the inputs that are results have been given, by their nodes.
    pending: RefCell<&'a mut FxHashMap<u64, Tensor>>,
}

impl Deref for Wants<'_> {
    type Target = [bool];

    fn deref(&self) -> &[bool] {
        &self.wanted
    }
}

impl fmt::Debug for Wants<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.wanted.fmt(f)
    }
}

impl Wants<'_> {
    /// The gradient that others have given an input, a result, so far. An operation that can add its own in the same pass
    /// takes this, and returns the whole sum in place of its own gradient. Others may see this memory: it is not changed.
    #[must_use]
    pub fn sum(&self, input: usize) -> Option<Tensor> {
        match self.inputs.get(input)?.as_ref()? {
            Edge::Node(node) => self.pending.borrow_mut().remove(&node.id),
            Edge::Leaf(_) => None,
        }
    }

    /// The gradient that an input, a leaf, has so far. An operation that can add to memory adds its own to this, and returns
    /// this.
    #[must_use]
    pub fn sum_in_place(&self, input: usize) -> Option<Tensor> {
        let Edge::Leaf(leaf) = self.inputs.get(input)?.as_ref()? else { return None };
        // In the sink lies what operations have returned, which may be another one's gradient as well; a leaf owns its own.
        let sunk = SINK.with_borrow(|sink| {
            sink.as_ref().map(|sink| sink.get(&leaf.id).filter(|sum| sum.is_unique()).cloned())
        });
        sunk.unwrap_or_else(|| lock(&leaf.grad).clone()).filter(Tensor::is_contiguous)
    }
}

/// What a tensor knows about its gradient.
#[derive(Debug)]
pub(crate) enum Meta {
    /// Made by the user: gradients end here.
    Leaf(Arc<Leaf>),
    /// Made by an operation.
    Node(Arc<Node>),
}

/// Where the gradient of a leaf is accumulated.
pub(crate) struct Leaf {
    id: u64,
    grad: Mutex<Option<Tensor>>,
    copy: Mutex<Copy>,
}

/// One operation on the tape.
pub(crate) struct Node {
    op: &'static str,
    module: memory::scope::ModulePath,
    /// The line that asked for it.
    site: Option<&'static std::panic::Location<'static>>,
    id: u64,
    inputs: SmallVec<[Option<Edge>; 4]>,
    backward: Mutex<Option<Box<Backward>>>,
}

#[derive(Clone)]
enum Edge {
    Leaf(Arc<Leaf>),
    Node(Arc<Node>),
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

impl Drop for Node {
    // A long chain would otherwise be dropped by recursion, and overflow the stack.
    fn drop(&mut self) {
        let mut stack: Vec<Arc<Node>> = Vec::new();
        let pull = |node: &mut Node, stack: &mut Vec<Arc<Node>>| {
            stack.extend(node.inputs.drain(..).flatten().filter_map(|e| match e {
                Edge::Node(n) => Some(n),
                Edge::Leaf(_) => None,
            }));
        };
        pull(self, &mut stack);
        drop(lock(&self.backward).take());
        while let Some(next) = stack.pop() {
            if let Some(mut node) = Arc::into_inner(next) {
                pull(&mut node, &mut stack);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

thread_local! {
    static NO_GRAD: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, operations of this thread are not recorded.
#[derive(Debug)]
pub struct NoGrad(());

impl Drop for NoGrad {
    fn drop(&mut self) {
        NO_GRAD.with(|n| n.set(n.get() - 1));
    }
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
    NO_GRAD.with(|n| n.set(n.get() + 1));
    NoGrad(())
}

/// While it lives, operations of this thread are recorded, also inside [`no_grad`].
#[derive(Debug)]
pub struct EnableGrad(u32);

impl Drop for EnableGrad {
    fn drop(&mut self) {
        NO_GRAD.with(|n| n.set(self.0));
    }
}

/// Records on this thread until the guard is dropped, whatever [`no_grad`] stands around it.
#[must_use = "recording goes on only while the guard lives"]
pub fn enable_grad() -> EnableGrad {
    EnableGrad(NO_GRAD.with(|n| n.replace(0)))
}

/// Whether operations of this thread are recorded.
#[must_use]
pub fn is_enabled() -> bool {
    NO_GRAD.with(|n| n.get() == 0)
}

/// Whether the result of an operation on these inputs must carry a gradient.
#[must_use]
pub fn wanted(inputs: &[&Tensor]) -> bool {
    is_enabled() && inputs.iter().any(|t| t.requires_grad())
}

/// Names a leaf among all there ever were; `None` for other tensors.
pub(crate) fn leaf_id(t: &Tensor) -> Option<u64> {
    match t.meta() {
        Some(Meta::Leaf(leaf)) => Some(leaf.id),
        _ => None,
    }
}

/// What a leaf has of a 16-bit copy; `None` for other tensors.
pub(crate) fn copy_of(t: &Tensor) -> Option<MutexGuard<'_, Copy>> {
    match t.meta() {
        Some(Meta::Leaf(leaf)) => Some(lock(&leaf.copy)),
        _ => None,
    }
}

/// Fails if an input of an operation that has no gradient requires one.
///
/// # Errors
/// [`Error::NoGradient`].
pub fn refuse(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    if wanted(inputs) { Err(Error::NoGradient { op }) } else { Ok(()) }
}

/// Puts an operation on the tape, if an input requires a gradient.
///
/// `backward` gets the gradient of `out` (of its shape and dtype) and which inputs want theirs; it returns one entry
/// for each input, of that input's shape and dtype. It runs without recording. It may hold `out` itself and any
/// input: whatever it holds stays in memory until the backward pass has used it.
#[must_use]
#[track_caller]
pub fn attach(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    backward: impl Fn(&Tensor, &Wants<'_>) -> Result<Grads> + Send + Sync + 'static,
) -> Tensor {
    if !wanted(inputs) {
        return out;
    }
    let inputs = inputs
        .iter()
        .map(|t| match t.meta() {
            Some(Meta::Leaf(leaf)) => Some(Edge::Leaf(leaf.clone())),
            Some(Meta::Node(node)) => Some(Edge::Node(node.clone())),
            None => None,
        })
        .collect();
    let node = Node {
        op,
        module: memory::scope::current().module,
        site: memory::scope::current().here().site,
        id: next_id(),
        inputs,
        backward: Mutex::new(Some(Box::new(backward))),
    };
    out.with_meta(Some(Meta::Node(Arc::new(node))))
}

/// A node that waits for its turn; the newest first.
struct Ready(Arc<Node>);

impl PartialEq for Ready {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}
impl Eq for Ready {}
impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Ready {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.id.cmp(&other.0.id)
    }
}

/// `sum += more`, in place where nobody else sees `sum`.
fn accumulate(sum: Tensor, more: Tensor) -> Result<Tensor> {
    if sum.is_unique() && sum.is_contiguous() {
        sum.add_(&more)?;
        return Ok(sum);
    }
    sum.add(&more)
}

/// How [`run`] ends.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    /// Keep the tape for another pass.
    pub(crate) retain_graph: bool,
}

thread_local! {
    /// While [`grad`] runs: the gradient of every leaf reached, by the leaf's id, instead of the leaf's own. Also what
    /// a checkpoint reaches inside.
    static SINK: RefCell<Option<FxHashMap<u64, Tensor>>> = const { RefCell::new(None) };
}

/// Gives a leaf its gradient, or the sink if there is one.
fn collect(leaf: &Arc<Leaf>, grad: Tensor) -> Result<()> {
    // The sum is taken out while it is added to: operations must not find the sink borrowed.
    let before = SINK.with(|s| Some(s.borrow_mut().as_mut()?.remove(&leaf.id)));
    let Some(before) = before else { return leaf.add(grad) };
    let sum = match before {
        Some(sum) if sum.is_same(&grad) => sum,
        Some(sum) => accumulate(sum, grad)?,
        None => grad,
    };
    SINK.with(|s| s.borrow_mut().as_mut().map(|sink| sink.insert(leaf.id, sum)));
    Ok(())
}

/// Takes the gradient that a leaf was given, wherever it went.
fn take_grad(t: &Tensor) -> Option<Tensor> {
    let Some(Meta::Leaf(leaf)) = t.meta() else { return None };
    let collected = SINK.with(|s| s.borrow_mut().as_mut()?.remove(&leaf.id));
    collected.or_else(|| lock(&leaf.grad).take())
}

/// Walks the tape back from `root` with the gradient `seed`.
pub(crate) fn run(roots: &[(Tensor, Tensor)], options: Options) -> Result<()> {
    let _no_grad = no_grad();
    // Each operation's gradient is computed in the types that the forward pass has chosen.
    let _as_given = amp::suspend();
    let mut pending: FxHashMap<u64, Tensor> = FxHashMap::default();
    let mut heap: BinaryHeap<Ready> = BinaryHeap::new();
    let deliver =
        |edge: &Edge, grad: Tensor, pending: &mut FxHashMap<u64, Tensor>, heap: &mut BinaryHeap<Ready>| {
            match edge {
                Edge::Leaf(leaf) => collect(leaf, grad)?,
                Edge::Node(node) => {
                    let sum = match pending.remove(&node.id) {
                        Some(sum) => accumulate(sum, grad)?,
                        None => {
                            heap.push(Ready(node.clone()));
                            grad
                        }
                    };
                    pending.insert(node.id, sum);
                }
            }
            Ok::<(), Error>(())
        };
    for (root, seed) in roots {
        match root.meta() {
            Some(Meta::Leaf(leaf)) => {
                deliver(&Edge::Leaf(leaf.clone()), seed.clone(), &mut pending, &mut heap)?
            }
            Some(Meta::Node(node)) => {
                deliver(&Edge::Node(node.clone()), seed.clone(), &mut pending, &mut heap)?
            }
            None => return Err(Error::Backward("the tensor does not require a gradient".into())),
        }
    }
    while let Some(Ready(node)) = heap.pop() {
        let Some(grad) = pending.remove(&node.id) else { continue };
        let backward = {
            let mut slot = lock(&node.backward);
            slot.take().ok_or_else(|| {
                Error::Backward(format!(
                    "`{}` was already walked, and what it saved is freed; use `backward_retain` for the first pass",
                    node.op
                ))
            })?
        };
        let wanted = node.inputs.iter().map(Option::is_some).collect();
        let wants = Wants { wanted, inputs: &node.inputs, pending: RefCell::new(&mut pending) };
        // Until the gradients are delivered: one that must be copied or summed is this node's as well.
        let _scope = memory::scope::enter_scope(memory::scope::Scope {
            module: node.module,
            tag: Tag::Gradient,
            op: node.op,
            site: node.site,
        });
        let grads = backward(&grad, &wants)?;
        drop(grad);
        if options.retain_graph {
            *lock(&node.backward) = Some(backward);
        } else {
            drop(backward);
        }
        if grads.len() != node.inputs.len() {
            return Err(Error::Backward(format!(
                "`{}` returned {} gradients for {} inputs",
                node.op,
                grads.len(),
                node.inputs.len()
            )));
        }
        for (edge, grad) in node.inputs.iter().zip(grads) {
            match (edge, grad) {
                (Some(edge), Some(grad)) => deliver(edge, grad, &mut pending, &mut heap)?,
                (Some(_), None) => {
                    return Err(Error::Backward(format!(
                        "`{}` lost a gradient: an input requires one and got none",
                        node.op
                    )));
                }
                (None, _) => {}
            }
        }
    }
    Ok(())
}

impl Leaf {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { id: next_id(), grad: Mutex::default(), copy: Mutex::default() })
    }

    /// The gradient it has.
    pub(crate) fn grad(&self) -> Option<Tensor> {
        lock(&self.grad).clone()
    }

    /// Replaces the gradient.
    pub(crate) fn set(&self, grad: Option<Tensor>) {
        *lock(&self.grad) = grad;
    }

    fn add(self: &Arc<Self>, grad: Tensor) -> Result<()> {
        let mut slot = lock(&self.grad);
        grad.device().tape().graded(self, slot.as_ref());
        *slot = Some(match slot.take() {
            None if grad.is_unique() && grad.is_contiguous() => grad,
            // The buffer is shared with another gradient (an expanded one, or the seed): the leaf owns its own.
            None => {
                let _scope = memory::scope::tag(Tag::Gradient);
                grad.copy()?
            }
            // The operation has added to it.
            Some(sum) if sum.is_same(&grad) => sum,
            Some(sum) if sum.shape() == grad.shape() => {
                // A clone the user holds sees the sum grow, as in PyTorch.
                sum.add_(&grad)?;
                sum
            }
            Some(sum) => {
                return Err(Error::Backward(format!(
                    "a gradient of shape {:?} meets one of shape {:?}",
                    grad.shape(),
                    sum.shape()
                )));
            }
        });
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
        Ok(self.detach().with_meta(Some(Meta::Leaf(Leaf::new()))))
    }

    /// Whether a gradient flows to or through this tensor.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.meta().is_some()
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
        match self.meta() {
            Some(Meta::Leaf(leaf)) => lock(&leaf.grad).clone(),
            _ => None,
        }
    }

    /// Replaces the gradient of this leaf; `None` frees it.
    pub fn set_grad(&self, grad: Option<Tensor>) {
        if let Some(Meta::Leaf(leaf)) = self.meta() {
            *lock(&leaf.grad) = grad;
        }
    }

    /// Adds the gradient of this scalar to every leaf it came from, and frees the tape.
    ///
    /// # Errors
    /// It is not a scalar, has no history, or was walked before; or memory runs out.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_with(&self.seed()?)
    }

    /// As [`backward`](Self::backward), and keeps the tape for another pass.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    #[track_caller]
    pub fn backward_retain(&self) -> Result<()> {
        run(&[(self.clone(), self.seed()?)], Options { retain_graph: true })
    }

    /// As [`backward`](Self::backward) for a tensor of any shape, whose own gradient is `grad`.
    ///
    /// # Errors
    /// `grad` has another shape or dtype, or as [`backward`](Self::backward).
    pub fn backward_with(&self, grad: &Tensor) -> Result<()> {
        if grad.shape() != self.shape() || grad.dtype() != self.dtype() {
            return Err(Error::Backward(format!(
                "the gradient is {} {:?}, the tensor {} {:?}",
                grad.dtype(),
                grad.shape(),
                self.dtype(),
                self.shape()
            )));
        }
        run(&[(self.clone(), grad.detach())], Options::default())
    }

    #[track_caller]
    fn seed(&self) -> Result<Tensor> {
        if self.numel() != 1 {
            return Err(Error::Backward(format!(
                "a tensor of shape {:?} is no scalar; reduce it (`mean`, `sum`) or give its gradient to `backward_with`",
                self.shape()
            )));
        }
        let _scope = memory::scope::tag(Tag::Gradient);
        Tensor::ones(self.shape(), self.dtype(), self.device())
    }
}

/// The gradients of `outputs` (with theirs in `seeds`) with respect to `inputs`, without touching the leaves'
/// accumulated ones. `None` where no path leads.
///
/// # Errors
/// As [`Tensor::backward`]; an input is not a leaf.
pub fn grad(outputs: &[Tensor], seeds: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
    let ids = inputs
        .iter()
        .map(|t| match t.meta() {
            Some(Meta::Leaf(leaf)) => Ok(leaf.id),
            _ => Err(Error::Backward("`grad` takes inputs that are leaves which require gradients".into())),
        })
        .collect::<Result<Vec<_>>>()?;
    let roots: Vec<_> = outputs.iter().cloned().zip(seeds.iter().cloned()).collect();
    let around = SINK.with(|s| s.replace(Some(FxHashMap::default())));
    let walked = run(&roots, Options::default());
    let mut sink = SINK.with(|s| s.replace(around)).unwrap_or_default();
    walked?;
    Ok(ids.iter().map(|id| sink.remove(id)).collect())
}
