//! Hooks: user functions that observe or replace gradients during the backward pass.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::GradEdge;
use crate::error::{Error, Result, fail, fail_if};
use crate::sync::LockUnpoisoned;
use crate::tensor::{Tensor, WeakTensor};

type GradHookFn = dyn Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync;
type PostAccumulateGradHookFn = dyn Fn(&Tensor) -> Result<()> + Send + Sync;

/// Number of hooks on leaves. If it is 0, backward passes need not count the gradients of leaves.
static LEAF_HOOK_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Reports whether any leaf has a hook.
pub(super) fn has_leaf_hooks() -> bool {
    LEAF_HOOK_COUNT.load(Ordering::Relaxed) > 0
}

#[derive(Clone)]
enum Hook {
    Grad(Arc<GradHookFn>),
    PostAccumulateGrad(Arc<PostAccumulateGradHookFn>, WeakTensor),
}

/// Registered hook. Counted in [`LEAF_HOOK_COUNT`] while it exists.
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

/// Hooks of one tensor, in registration order.
#[derive(Default)]
pub(super) struct HookList(Mutex<Vec<HookEntry>>);

impl HookList {
    fn push(self: &Arc<Self>, hook: Hook, on_leaf: bool) -> HookHandle {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        LEAF_HOOK_COUNT.fetch_add(usize::from(on_leaf), Ordering::Relaxed);
        self.0.lock_unpoisoned().push(HookEntry { id, hook, on_leaf });
        HookHandle { hooks: Arc::downgrade(self), id }
    }

    /// Copies the hooks, because a running hook may register and remove hooks.
    fn cloned_hooks(&self) -> Vec<Hook> {
        self.0.lock_unpoisoned().iter().map(|entry| entry.hook.clone()).collect()
    }

    pub(super) fn clear(&self) {
        let entries = std::mem::take(&mut *self.0.lock_unpoisoned());
        // Dropped without the lock, because hooks own arbitrary values.
        drop(entries);
    }

    /// Returns the gradient after all hooks have run.
    #[track_caller]
    pub(super) fn run_grad_hooks(&self, of: &str, mut grad: Tensor) -> Result<Tensor> {
        for hook in self.cloned_hooks() {
            let Hook::Grad(see) = hook else { continue };
            let Some(other) = see(&grad)? else { continue };
            fail_if!(other.shape() != grad.shape() || other.dtype() != grad.dtype();
                backward, "a hook on {of} returned {} {:?} in place of a gradient of {} {:?}",
                other.dtype(), other.shape(), grad.dtype(), grad.shape());
            grad.check_same_device("register_hook", &other)?;
            grad = other;
        }
        Ok(grad)
    }

    /// Runs the hooks that follow the accumulation of the leaf's gradient.
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

/// Handle that can remove a hook. Dropping the handle keeps the hook until its tensor is dropped.
#[derive(Clone, Debug)]
pub struct HookHandle {
    hooks: Weak<HookList>,
    id: u64,
}

impl HookHandle {
    /// Removes the hook.
    pub fn remove(&self) {
        let Some(hooks) = self.hooks.upgrade() else { return };
        let removed = {
            let mut entries = hooks.0.lock_unpoisoned();
            entries.iter().position(|entry| entry.id == self.id).map(|at| entries.remove(at))
        };
        // Dropped without the lock, because a hook owns arbitrary values.
        drop(removed);
    }
}

impl Tensor {
    /// Registers a hook that is called with the complete gradient of this tensor in every backward pass. A
    /// tensor that the hook returns replaces the gradient, here and for everything that depends on it.
    ///
    /// A parameter that several [`checkpoint`](super::checkpoint)s capture has a separate sum for each
    /// checkpoint.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[3], DType::F32, &device)?.to_leaf()?;
    /// let handle = x.register_hook(|grad| grad.clamp(-1.0, 1.0).map(Some))?;
    /// x.exp()?.sum_all()?.backward()?;
    /// handle.remove();
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// A tensor keeps its hooks alive, so a hook that holds its own tensor creates a reference cycle. The
    /// cycle ends when the hook is removed, or, for a non-leaf, when a backward pass frees the graph. A hook
    /// that needs its tensor should hold a weak handle from [`downgrade`](Self::downgrade):
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[3], DType::F32, &device)?.to_leaf()?;
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
    /// The tensor does not require a gradient.
    #[doc(alias = "retain_grad")]
    #[doc(alias = "retains_grad")]
    #[track_caller]
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

    /// Registers a hook that is called with this leaf once a backward pass has accumulated its complete
    /// gradient. An optimiser that steps in such a hook and frees the gradient never holds all gradients at
    /// once.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let w = Tensor::ones(&[3], DType::F32, &device)?.to_leaf()?;
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
    /// The hook is called as long as this tensor handle or a clone of it exists. The hook receives the leaf
    /// and need not hold it. A hook that holds its leaf keeps the leaf alive until the hook is removed.
    ///
    /// # Errors
    /// The tensor is not a leaf that requires a gradient.
    #[track_caller]
    pub fn register_post_accumulate_grad_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let Some(leaf) = self.leaf() else {
            fail!(
                argument("register_post_accumulate_grad_hook"),
                "only a leaf that requires a gradient accumulates one; other tensors have `register_hook`"
            );
        };
        Ok(leaf
            .hooks
            .get_or_init(Arc::default)
            .push(Hook::PostAccumulateGrad(Arc::new(hook), self.downgrade()), true))
    }
}
