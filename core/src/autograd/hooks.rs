//! Functions of a user that see gradients on their way.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::{GradEdge, lock};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, WeakTensor};

type GradHookFn = dyn Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync;
type PostAccumulateGradHookFn = dyn Fn(&Tensor) -> Result<()> + Send + Sync;

/// How many hooks there are on leaves: without one, no walk counts what comes to a leaf.
static LEAF_HOOK_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether there is a hook on some leaf.
pub(super) fn has_leaf_hooks() -> bool {
    LEAF_HOOK_COUNT.load(Ordering::Relaxed) > 0
}

#[derive(Clone)]
enum Hook {
    Grad(Arc<GradHookFn>),
    PostAccumulateGrad(Arc<PostAccumulateGradHookFn>, WeakTensor),
}

/// A hook in its place, counted while it is there.
struct HookEntry {
    id: u64,
    hook: Hook,
    on_leaf: bool,
}

impl Drop for HookEntry {
    fn drop(&mut self) {
        LEAF_HOOK_COUNT.fetch_sub(usize::from(self.on_leaf), Ordering::Relaxed);
    }
}

/// The hooks of one tensor, in the order of their registration.
#[derive(Default)]
pub(super) struct HookList(Mutex<Vec<HookEntry>>);

impl HookList {
    fn push(self: &Arc<Self>, hook: Hook, on_leaf: bool) -> HookHandle {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        LEAF_HOOK_COUNT.fetch_add(usize::from(on_leaf), Ordering::Relaxed);
        lock(&self.0).push(HookEntry { id, hook, on_leaf });
        HookHandle { hooks: Arc::downgrade(self), id }
    }

    /// They may register and remove others while they run.
    fn cloned_hooks(&self) -> Vec<Hook> {
        lock(&self.0).iter().map(|entry| entry.hook.clone()).collect()
    }

    /// Takes all hooks away.
    pub(super) fn clear(&self) {
        let entries = std::mem::take(&mut *lock(&self.0));
        // What they hold is dropped without the lock.
        drop(entries);
    }

    /// The gradient as the hooks leave it.
    pub(super) fn run_grad_hooks(&self, of: &str, mut grad: Tensor) -> Result<Tensor> {
        for hook in self.cloned_hooks() {
            let Hook::Grad(see) = hook else { continue };
            let Some(other) = see(&grad)? else { continue };
            if other.shape() != grad.shape() || other.dtype() != grad.dtype() {
                return Err(Error::Backward(format!(
                    "a hook on {of} returned {} {:?} in place of a gradient of {} {:?}",
                    other.dtype(),
                    other.shape(),
                    grad.dtype(),
                    grad.shape()
                )));
            }
            grad.check_same_device("register_hook", &other)?;
            grad = other;
        }
        Ok(grad)
    }

    /// The leaf has its gradient.
    pub(super) fn run_post_accumulate_grad_hooks(&self) -> Result<()> {
        for hook in self.cloned_hooks() {
            if let Hook::PostAccumulateGrad(after, leaf) = hook
                && let Some(leaf) = leaf.upgrade()
            {
                after(&leaf)?;
            }
        }
        Ok(())
    }
}

/// What takes a hook away again. Dropping it leaves the hook where it is, until its tensor is gone.
#[derive(Clone)]
pub struct HookHandle {
    hooks: Weak<HookList>,
    id: u64,
}

impl HookHandle {
    /// Takes the hook away.
    pub fn remove(&self) {
        let Some(hooks) = self.hooks.upgrade() else { return };
        let removed = {
            let mut entries = lock(&hooks.0);
            entries.iter().position(|entry| entry.id == self.id).map(|at| entries.remove(at))
        };
        // What it holds is dropped without the lock.
        drop(removed);
    }
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HookHandle({})", self.id)
    }
}

impl Tensor {
    /// Calls `hook` with the gradient of this tensor in every backward pass that reaches it, once all parts of it are summed.
    /// What it returns takes the gradient's place, here and for all that it flows on to.
    ///
    /// A parameter that several [`checkpoint`](super::checkpoint)s capture has a sum for each of them.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[3], DType::F32, &device)?.requires_grad_()?;
    /// let handle = x.register_hook(|grad| grad.clamp(-1.0, 1.0).map(Some))?;
    /// x.exp()?.sum_all()?.backward()?;
    /// handle.remove();
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// A tensor keeps its hooks, so a hook that holds its own tensor keeps that alive: until it is removed, and for a result until a backward
    /// pass frees the tape. A hook that needs its tensor has it by [`downgrade`](Self::downgrade), which keeps nothing:
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[3], DType::F32, &device)?.requires_grad_()?;
    /// let weak = x.downgrade();
    /// x.register_hook(move |grad| match weak.upgrade() {
    ///     Some(x) => grad.add(&x.detach().mul(0.01)?).map(Some), // weight decay
    ///     None => Ok(None),
    /// })?;
    /// x.exp()?.sum_all()?.backward()?;
    /// drop(x);
    /// assert_eq!(device.memory().allocated(), 0);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The tensor requires no gradient.
    pub fn register_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let (hooks, on_leaf) = match self.grad_edge() {
            Some(GradEdge::Leaf(leaf)) => (leaf.hooks.get_or_init(Arc::default).clone(), true),
            Some(GradEdge::Node(node)) => (node.hooks.get_or_init(Arc::default).clone(), false),
            None => return Err(Error::argument("register_hook", "the tensor does not require a gradient")),
        };
        Ok(hooks.push(Hook::Grad(Arc::new(hook)), on_leaf))
    }

    /// Calls `hook` with this leaf when a backward pass has added all it has to its gradient. An optimiser that steps here,
    /// and frees the gradient, never has all gradients in memory at once.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let w = Tensor::ones(&[3], DType::F32, &device)?.requires_grad_()?;
    /// w.register_post_accumulate_grad_hook(|w| {
    ///     if let Some(grad) = w.grad() {
    ///         w.sub_(&grad.mul(0.1)?)?; // nothing is recorded here
    ///     }
    ///     w.set_grad(None);
    ///     Ok(())
    /// })?;
    /// w.exp()?.sum_all()?.backward()?;
    /// assert!(w.grad().is_none());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// It is called as long as this handle of the tensor, or a clone of it, is there. It is given the leaf, and need not hold it: one that
    /// does keeps the leaf alive until it is removed.
    ///
    /// # Errors
    /// The tensor is no leaf that requires a gradient.
    pub fn register_post_accumulate_grad_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let Some(leaf) = self.leaf() else {
            return Err(Error::argument(
                "register_post_accumulate_grad_hook",
                "only a leaf that requires a gradient accumulates one; other tensors have `register_hook`",
            ));
        };
        Ok(leaf
            .hooks
            .get_or_init(Arc::default)
            .push(Hook::PostAccumulateGrad(Arc::new(hook), self.downgrade()), true))
    }
}
