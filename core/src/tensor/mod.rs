//! Tensors: a view of device memory with a shape, an element type and, while gradients are recorded, a history.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::backend::Slice;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Tag;
use crate::runtime::capture::recorder::Buffer;
use crate::runtime::device::Device;
use crate::runtime::dispatch::{DispatchGuard, FusionSlot};
use crate::runtime::observer;
use crate::runtime::stream::Access;

pub(crate) mod binding;
mod create;
mod display;
pub(crate) mod float8;
mod grad_extras;
pub(crate) mod grad_meta;
pub mod layout;
#[doc(hidden)]
pub mod offload;
pub(crate) mod shape;

use crate::storage::Storage;
pub(crate) use create::CapturedConstant;
use grad_extras::GradExtras;
use grad_meta::GradMeta;
pub use layout::{Dims, Layout};
pub use shape::{Extents, IntoDims, IntoShape};

/// A tensor. Cloning it clones a handle: both see the same memory. `(&a + &b)?`, `(1.0 - &a)?` and `(-&a)?` are [`add`](Self::add),
/// [`rsub`](Self::rsub) and [`neg`](Self::neg).
#[derive(Clone)]
pub struct Tensor {
    inner: Arc<TensorImpl>,
}

struct TensorImpl {
    storage: Arc<Storage>,
    layout: Layout,
    dtype: DType,
    /// What it was made by.
    grad_meta: Option<Arc<dyn GradMeta>>,
    /// What a recorded operation in place has made of it since.
    rebased_meta: OnceLock<Mutex<Option<Arc<dyn GradMeta>>>>,
    /// How many recorded operations had written to its memory when its history was right.
    recorded_writes_seen: AtomicU32,
    /// The tensor that this is a view of.
    base: Weak<TensorImpl>,
    /// What was made of its numbers besides.
    grad_extras: Option<Arc<GradExtras>>,
}

impl TensorImpl {
    fn new(
        storage: Arc<Storage>,
        layout: Layout,
        dtype: DType,
        meta: Option<Arc<dyn GradMeta>>,
        base: Weak<TensorImpl>,
    ) -> Self {
        let writes = AtomicU32::new(storage.recorded_writes.load(Ordering::Relaxed));
        Self {
            storage,
            layout,
            dtype,
            grad_meta: meta,
            rebased_meta: OnceLock::new(),
            recorded_writes_seen: writes,
            base,
            grad_extras: None,
        }
    }
}

/// Handle on a tensor that does not keep it alive: see [`Tensor::downgrade`].
#[derive(Clone)]
pub struct WeakTensor(Weak<TensorImpl>);

impl fmt::Debug for WeakTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakTensor")
    }
}

impl WeakTensor {
    /// Gives the tensor, if its handle or a clone of that is still there.
    #[must_use]
    pub fn upgrade(&self) -> Option<Tensor> {
        Some(Tensor { inner: self.0.upgrade()? })
    }
}

/// Whether somebody still has a tensor's memory.
pub(crate) struct WeakStorage(Weak<Storage>);

impl WeakStorage {
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl Tensor {
    /// Creates a contiguous tensor of `shape` without clearing its memory: write it before it is read.
    ///
    /// # Errors
    /// An extent is negative, the device lacks the dtype, or the tensor exceeds what the device binds at once.
    #[track_caller]
    pub fn empty(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_empty(&shape.to_extents(), dtype, device)
    }

    #[track_caller]
    fn create_empty(extents: &[isize], dtype: DType, device: &Device) -> Result<Self> {
        // The operation that asks for it, which the user called.
        let op = || match crate::memory::scope::current().op {
            "" => "empty",
            op => op,
        };
        if !device.supports_dtype(dtype) {
            return Err(Error::Unsupported {
                op: op(),
                device: device.to_string(),
                reason: format!("the adapter has no {dtype}; use f32"),
            });
        }
        let shape = &shape::new_shape(op(), extents)?[..];
        layout::check_view_numel(op(), shape)?;
        let Some(numel) = layout::tensor_numel(shape) else {
            return Err(Error::argument(
                op(),
                format!("shape {shape:?} has more than 4,294,967,295 elements, the most a tensor can have"),
            ));
        };
        // Kernels write whole 32-bit words.
        let bytes = (numel * dtype.size()).next_multiple_of(4).max(4) as u64;
        let max = device.info().limits.max_binding_bytes;
        if bytes > max {
            return Err(Error::argument(
                op(),
                format!(
                    "a tensor {shape:?} of {dtype} takes {bytes} bytes; {device} binds at most {max} bytes at once: \
                     split it, or use a smaller element type"
                ),
            ));
        }
        let storage = Arc::new(Storage::new(device, bytes)?);
        offload::track_storage(&storage);
        device.capture_recorder().record_allocation(&storage);
        let inner = TensorImpl::new(storage, Layout::contiguous(shape), dtype, None, Weak::new());
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.inner.layout.shape()
    }

    /// The extents, as PyTorch spells it.
    #[must_use]
    pub fn size(&self) -> &[usize] {
        self.shape()
    }

    /// The extent of one dimension; negative counts from the end.
    ///
    /// # Errors
    /// `dim` is out of range.
    pub fn dim(&self, dim: isize) -> Result<usize> {
        let d = layout::normalize_dim("dim", dim, self.rank())?;
        Ok(self.shape().get(d).copied().unwrap_or(1))
    }

    /// The strides, in elements.
    #[must_use]
    pub fn strides(&self) -> &[usize] {
        self.inner.layout.strides()
    }

    /// Shape, strides and offset.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.inner.layout
    }

    /// Number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.layout.rank()
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.inner.layout.numel()
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.inner.dtype
    }

    /// The device it is on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.storage.device
    }

    /// Whether its elements lie row-major without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.inner.layout.is_contiguous()
    }

    /// Whether both are views of one piece of memory.
    #[must_use]
    pub fn shares_storage(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner.storage, &other.inner.storage)
    }

    /// Tags its memory, if it has no tag yet.
    pub(crate) fn retag(&self, tag: Tag) {
        self.inner.storage.retag(tag);
    }

    /// How many elements of its type the storage has, which other views may see more of.
    pub(crate) fn storage_len(&self) -> usize {
        self.inner.storage.bytes() as usize / self.dtype().size()
    }

    pub(crate) fn grad_meta(&self) -> Option<Arc<dyn GradMeta>> {
        self.refresh_grad_fn();
        match self.inner.rebased_meta.get() {
            None => self.inner.grad_meta.as_ref().filter(|meta| meta.requires_grad()).cloned(),
            Some(later) => later.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// Whether it has a history, or is a leaf.
    pub(crate) fn has_grad_edge(&self) -> bool {
        self.refresh_grad_fn();
        self.inner
            .rebased_meta
            .get()
            .map_or(self.inner.grad_meta.as_ref().is_some_and(|meta| meta.requires_grad()), |_| {
                self.grad_meta().is_some()
            })
    }

    /// A view of a tensor that a recorded operation has written to since has the history of what it sees now.
    #[inline]
    fn refresh_grad_fn(&self) {
        if !self.is_current()
            && let Some(base) = self.base().filter(Tensor::is_current)
        {
            self.set_grad_meta(base.grad_meta().and_then(|meta| meta.regenerate_view(self, &base)));
        }
    }

    /// Returns the place that the tensor was created with: that of a leaf, frozen or not, never changes.
    pub(crate) fn original_grad_meta(&self) -> Option<&Arc<dyn GradMeta>> {
        self.inner.grad_meta.as_ref()
    }

    /// The same memory with another history; a tensor without one is nobody's view.
    pub(crate) fn with_grad_meta(&self, meta: Option<Arc<dyn GradMeta>>) -> Self {
        let TensorImpl { storage, layout, dtype, base, grad_extras: beside, .. } = &*self.inner;
        let base = if meta.is_some() { base.clone() } else { Weak::new() };
        let mut inner = TensorImpl::new(storage.clone(), layout.clone(), *dtype, meta, base);
        // What was made besides has no history.
        if inner.grad_meta.is_none() {
            inner.grad_extras.clone_from(beside);
        }
        Self { inner: Arc::new(inner) }
    }

    /// The tensor that this is a view of, if somebody still has it.
    pub(crate) fn base(&self) -> Option<Tensor> {
        Some(Self { inner: self.inner.base.upgrade()? })
    }

    /// Tells that a recorded operation has written to the memory: every history of it is of the past.
    pub(crate) fn bump_writes(&self) {
        self.inner.storage.recorded_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives this handle, and its clones, the history of what the memory holds now.
    pub(crate) fn set_grad_meta(&self, meta: Option<Arc<dyn GradMeta>>) {
        let later = self.inner.rebased_meta.get_or_init(Mutex::default);
        let before = std::mem::replace(&mut *later.lock().unwrap_or_else(PoisonError::into_inner), meta);
        // Without the lock: it may be the last to know of a whole tape.
        drop(before);
        self.inner
            .recorded_writes_seen
            .store(self.inner.storage.recorded_writes.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Whether its history is that of what the memory holds. One that never had any, and is no view, is a constant whatever is written.
    pub(crate) fn is_current(&self) -> bool {
        let TensorImpl {
            recorded_writes_seen: writes,
            storage,
            grad_meta: meta,
            rebased_meta: later,
            base,
            ..
        } = &*self.inner;
        writes.load(Ordering::Relaxed) == storage.recorded_writes.load(Ordering::Relaxed)
            || (meta.is_none() && later.get().is_none() && base.ptr_eq(&Weak::new()))
    }

    /// Makes a handle that does not keep the tensor alive. It holds as long as this handle or a clone of it is there, and not other
    /// tensors over the same memory. Hooks use it for their own tensor: see [`register_hook`](Self::register_hook).
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[3], DType::F32, &device)?;
    /// let weak = x.downgrade();
    /// assert!(weak.upgrade().is_some());
    /// drop(x);
    /// assert!(weak.upgrade().is_none());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[must_use]
    pub fn downgrade(&self) -> WeakTensor {
        WeakTensor(Arc::downgrade(&self.inner))
    }

    /// Another view of the same memory, without history.
    #[doc(hidden)]
    pub fn with_layout(&self, layout: Layout) -> Self {
        let TensorImpl { storage, dtype, base, .. } = &*self.inner;
        // A view of a view is one of the whole.
        let base = if base.strong_count() > 0 { base.clone() } else { Arc::downgrade(&self.inner) };
        Self { inner: Arc::new(TensorImpl::new(storage.clone(), layout, *dtype, None, base)) }
    }

    /// Whether no other tensor sees this memory.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.inner) == 1 && Arc::strong_count(&self.inner.storage) == 1
    }

    /// A gradient keeps its memory from now on.
    pub(crate) fn retain_for_backward(&self) {
        self.inner.storage.saved_count.fetch_add(1, Ordering::Relaxed);
    }

    /// One that kept it is gone.
    pub(crate) fn release_from_backward(&self) {
        self.inner.storage.saved_count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a gradient keeps its memory, so that another one may count on it without holding more.
    pub(crate) fn is_saved_for_backward(&self) -> bool {
        self.inner.storage.saved_count.load(Ordering::Relaxed) > 0
    }

    /// How often its memory was written: the same number, the same contents.
    pub(crate) fn version(&self) -> u64 {
        self.inner.storage.version()
    }

    /// Whether it is the same memory, seen in the same way.
    pub(crate) fn is_same_view(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.inner.storage, &other.inner.storage)
            && self.dtype() == other.dtype()
            && self.layout() == other.layout()
    }

    /// What a kernel binds: the whole storage, from an aligned offset. `None` if it is not on the device. See [`binding`].
    pub(crate) fn bind(&self, access: Access, gate: &DispatchGuard<'_>) -> Result<Option<Slice>> {
        let slice = self.inner.storage.bind(access, gate)?;
        self.record_access(access);
        self.record_binding(slice);
        Ok(slice)
    }

    /// Reports an access to the observer, if one is active.
    #[inline]
    pub(crate) fn record_access(&self, access: Access) {
        if let Some(observer) = observer::current() {
            let storage: Arc<dyn Buffer> = self.inner.storage.clone();
            observer.record_access(&storage, access);
        }
    }

    /// Tells the step that is recorded, if one is, where the memory is.
    #[inline]
    fn record_binding(&self, slice: Option<Slice>) {
        if let Some(slice) = slice.filter(|_| self.device().capture_recorder().is_recording_here()) {
            self.device().capture_recorder().record_binding(&self.inner.storage, slice);
        }
    }

    /// The same for an operation that waits, and what this is to it.
    pub(crate) fn bind_deferred(
        &self,
        access: Access,
        gate: &DispatchGuard<'_>,
        mark: FusionSlot,
    ) -> Result<Option<Slice>> {
        let slice = self.inner.storage.bind_deferred(access, gate, mark)?;
        self.record_access(access);
        self.record_binding(slice);
        Ok(slice)
    }

    /// What it is to operations that wait.
    pub(crate) fn fusion_slot(&self, gate: &DispatchGuard<'_>) -> FusionSlot {
        self.inner.storage.fusion_slot(gate)
    }

    /// Its memory, which this does not keep.
    pub(crate) fn downgrade_storage(&self) -> Weak<Storage> {
        Arc::downgrade(&self.inner.storage)
    }

    /// The number of its memory: larger than that of older memory.
    #[doc(hidden)]
    pub fn storage_id(&self) -> u64 {
        self.inner.storage.id
    }

    pub(crate) fn weak_storage(&self) -> WeakStorage {
        WeakStorage(Arc::downgrade(&self.inner.storage))
    }

    /// Does what takes long with the bytes of a contiguous tensor: others enqueue their work meanwhile.
    pub(crate) fn with_pinned_bytes<R>(
        &self,
        access: Access,
        work: impl FnOnce(Slice) -> Result<R>,
    ) -> Result<R> {
        let bound = binding::bind_contiguous_bytes([(self, access)])?;
        let slice = bound[0];
        let pinned = self.inner.storage.pin(access, bound.dispatch_guard());
        drop(bound);
        let done = work(slice);
        // Its order first: memory that leaves the device when it is pinned no more waits for it there.
        let ordered = self.inner.storage.order_after_enqueue(access);
        drop(pinned);
        ordered?;
        done
    }

    /// The bytes of a contiguous tensor, in what its storage was bound to.
    pub(crate) fn byte_range_in(&self, Slice { segment, offset, .. }: Slice) -> Slice {
        let size = self.dtype().size();
        let offset = offset + (self.layout().offset() * size) as u64;
        Slice { segment, offset, bytes: (self.numel() * size) as u64 }
    }

    /// The other operand of an operation must be on the same device.
    #[doc(hidden)]
    pub fn check_same_device(&self, op: &'static str, other: &Self) -> Result<()> {
        if self.device() == other.device() {
            return Ok(());
        }
        Err(Error::Device { op, left: self.device().to_string(), right: other.device().to_string() })
    }
}
