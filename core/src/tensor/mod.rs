//! Tensors: views of device memory with shape, element type and, while gradients are recorded, a history.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::backend::Slice;
use crate::dtype::DType;
use crate::error::{Error, Result, fail, fail_if};
use crate::memory::Tag;
use crate::runtime::capture::recorder::Buffer;
use crate::runtime::device::Device;
use crate::runtime::dispatch::{DispatchGuard, FusionSlot};
use crate::runtime::observer;
use crate::runtime::stream::Access;

pub(crate) mod binding;
mod create;
mod device_copy;
mod display;
pub mod dlpack;
mod external;
pub(crate) mod float8;
mod grad_extras;
pub(crate) mod grad_meta;
mod host_array;
#[doc(hidden)]
pub mod layout;
#[doc(hidden)]
pub mod offload;
pub(crate) mod shape;

use crate::storage::Storage;
use crate::sync::LockUnpoisoned;
pub(crate) use create::CapturedConstant;
pub use external::PinnedSlice;
use grad_extras::GradExtras;
use grad_meta::GradMeta;
pub use host_array::{HostArray, HostElement};
pub use layout::{Dims, Layout, MAX_TENSOR_NUMEL};
pub use shape::{Extents, IntoDims, IntoShape};

/// Tensor: a view of device memory. A clone is another handle to the same memory.
///
/// `(&a + &b)?`, `(1.0 - &a)?`, `(-&a)?` are [`add`](Self::add), [`rsub`](Self::rsub), [`neg`](Self::neg).
#[derive(Clone)]
pub struct Tensor {
    inner: Arc<TensorImpl>,
}

struct TensorImpl {
    storage: Arc<Storage>,
    layout: Layout,
    dtype: DType,
    /// Place in the autograd graph of the operation that made the tensor.
    grad_meta: OnceLock<Arc<dyn GradMeta>>,
    /// Place in the graph after later recorded in-place operations.
    rebased_meta: OnceLock<Mutex<Option<Arc<dyn GradMeta>>>>,
    /// Number of recorded writes to the storage when the history was last up to date.
    recorded_writes_seen: AtomicU32,
    /// Tensor that this is a view of.
    base: Weak<TensorImpl>,
    /// By-products of the kernel that made the tensor.
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
            grad_meta: meta.map_or_else(OnceLock::new, OnceLock::from),
            rebased_meta: OnceLock::new(),
            recorded_writes_seen: writes,
            base,
            grad_extras: None,
        }
    }
}

/// Weak handle to a tensor: see [`Tensor::downgrade`].
#[derive(Clone, Debug)]
pub struct WeakTensor(Weak<TensorImpl>);

impl WeakTensor {
    /// Returns the tensor, if its handle or a clone of it still exists.
    #[must_use]
    pub fn upgrade(&self) -> Option<Tensor> {
        Some(Tensor { inner: self.0.upgrade()? })
    }
}

impl Tensor {
    /// Creates a contiguous tensor of `shape` without clearing its memory: write it before it is read.
    ///
    /// # Errors
    /// An extent is negative, the device lacks the dtype, or the tensor exceeds what the device binds at once.
    #[doc(alias = "empty_like")]
    #[doc(alias = "new_empty")]
    #[track_caller]
    pub fn empty(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_empty(&shape.to_extents(), dtype, device)
    }

    #[track_caller]
    fn create_empty(extents: &[isize], dtype: DType, device: &Device) -> Result<Self> {
        let (shape, bytes) = Self::check_new("empty", extents, dtype, device)?;
        let storage = Arc::new(Storage::new(device, bytes)?);
        offload::track_storage(&storage);
        device.capture_recorder().record_allocation(&storage);
        let inner = TensorImpl::new(storage, Layout::contiguous_from(shape), dtype, None, Weak::new());
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the shape and the bytes of a new tensor. Errors name the operation that the user called, or `name`.
    #[track_caller]
    fn check_new(
        name: &'static str,
        extents: &[isize],
        dtype: DType,
        device: &Device,
    ) -> Result<(Dims, u64)> {
        let op = || crate::memory::scope::current_op_or(name);
        if !device.supports_dtype(dtype) {
            return Err(Error::unsupported(op(), device, format!("the adapter has no {dtype}; use f32")));
        }
        // The name of the operation is looked up for errors only.
        let shape = match shape::explicit_shape(extents) {
            Some(shape) => shape,
            None => shape::new_shape(op(), extents)?,
        };
        let Some(numel) = layout::tensor_numel(&shape) else {
            layout::check_view_numel(op(), &shape)?;
            fail!(
                argument(op()),
                "shape {shape:?} has more than 4,294,967,295 elements, the most a tensor can have"
            );
        };
        // Kernels write whole 32-bit words.
        let bytes = (numel * dtype.size()).next_multiple_of(4).max(4) as u64;
        let max = device.info().limits.max_binding_bytes;
        fail_if!(bytes > max;
            argument(op()), "a tensor {shape:?} of {dtype} takes {bytes} bytes; {device} binds at most {max} bytes at once: \
                     split it, or use a smaller element type");
        Ok((shape, bytes))
    }

    /// Returns the extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.inner.layout.shape()
    }

    /// Returns the extents, under PyTorch's name.
    #[must_use]
    pub fn size(&self) -> &[usize] {
        self.shape()
    }

    /// Returns the extent of one dimension. Negative dimensions count from the end.
    #[track_caller]
    pub fn dim(&self, dim: isize) -> Result<usize> {
        let d = layout::normalize_dim("dim", dim, self.rank())?;
        Ok(self.shape().get(d).copied().unwrap_or(1))
    }

    /// Returns the strides, in elements.
    #[must_use]
    pub fn strides(&self) -> &[usize] {
        self.inner.layout.strides()
    }

    /// Returns shape, strides and offset.
    #[doc(alias = "storage_offset")]
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.inner.layout
    }

    /// Returns the number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.layout.rank()
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.inner.layout.numel()
    }

    /// Returns the element type.
    #[doc(alias = "nbytes")]
    #[doc(alias = "element_size")]
    #[doc(alias = "itemsize")]
    #[doc(alias = "is_floating_point")]
    #[doc(alias = "is_signed")]
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.inner.dtype
    }

    /// Returns the device that holds the tensor.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.storage.device
    }

    /// Reports whether the elements are in row-major order without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.inner.layout.is_contiguous()
    }

    /// Reports whether both are views of the same storage.
    #[doc(alias = "is_set_to")]
    #[must_use]
    pub fn shares_storage(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner.storage, &other.inner.storage)
    }

    /// Tags the storage, if it has no tag yet.
    pub(crate) fn retag(&self, tag: Tag) {
        self.inner.storage.retag(tag);
    }

    /// Returns the size of the storage in elements of this tensor's type. Views may cover only a part.
    pub(crate) fn storage_len(&self) -> usize {
        self.inner.storage.bytes() as usize / self.dtype().size()
    }

    pub(crate) fn grad_meta(&self) -> Option<Arc<dyn GradMeta>> {
        self.refresh_grad_fn();
        match self.inner.rebased_meta.get() {
            None => self.inner.grad_meta.get().filter(|meta| meta.requires_grad()).cloned(),
            Some(later) => later.lock_unpoisoned().clone(),
        }
    }

    /// Reports whether the tensor has a history or is a leaf.
    pub(crate) fn has_grad_edge(&self) -> bool {
        self.refresh_grad_fn();
        match self.inner.rebased_meta.get() {
            None => self.inner.grad_meta.get().is_some_and(|meta| meta.requires_grad()),
            Some(later) => later.lock_unpoisoned().is_some(),
        }
    }

    /// Regenerates the history of a view whose base was changed by a recorded in-place operation.
    #[inline]
    fn refresh_grad_fn(&self) {
        if !self.is_current()
            && let Some(base) = self.base().filter(Tensor::is_current)
        {
            self.set_grad_meta(base.grad_meta().and_then(|meta| meta.regenerate_view(self, &base)));
        }
    }

    /// Returns the gradient data that the tensor was created with, or became a leaf with. That of a leaf never changes.
    pub(crate) fn original_grad_meta(&self) -> Option<&Arc<dyn GradMeta>> {
        self.inner.grad_meta.get()
    }

    /// Gives this handle and its clones gradient data, unless they have some. Returns false for a handle that had
    /// another history before, which was replaced.
    pub(crate) fn init_grad_meta(&self, meta: impl FnOnce() -> Arc<dyn GradMeta>) -> bool {
        let is_new = self.inner.rebased_meta.get().is_none();
        if is_new && self.inner.grad_meta.get().is_none() {
            // A handle without a history counts as a constant, so earlier writes do not outdate the new history.
            let recorded_writes = self.inner.storage.recorded_writes.load(Ordering::Relaxed);
            self.inner.recorded_writes_seen.store(recorded_writes, Ordering::Relaxed);
            self.inner.grad_meta.get_or_init(meta);
        }
        is_new
    }

    /// Returns the same memory with another history. Without a history, the result is not a view.
    pub(crate) fn with_grad_meta(&self, meta: Option<Arc<dyn GradMeta>>) -> Self {
        let TensorImpl { storage, layout, dtype, base, grad_extras, .. } = &*self.inner;
        let base = if meta.is_some() { base.clone() } else { Weak::new() };
        let mut inner = TensorImpl::new(storage.clone(), layout.clone(), *dtype, meta, base);
        // By-products have no history.
        if inner.grad_meta.get().is_none() {
            inner.grad_extras.clone_from(grad_extras);
        }
        Self { inner: Arc::new(inner) }
    }

    /// Returns the tensor that this is a view of, if it still exists.
    pub(crate) fn base(&self) -> Option<Tensor> {
        Some(Self { inner: self.inner.base.upgrade()? })
    }

    /// Counts a recorded write to the storage. All existing histories of its tensors are then outdated.
    pub(crate) fn bump_writes(&self) {
        self.inner.storage.recorded_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Replaces the history of this handle and its clones by that of the current contents.
    pub(crate) fn set_grad_meta(&self, meta: Option<Arc<dyn GradMeta>>) {
        let later = self.inner.rebased_meta.get_or_init(Mutex::default);
        let before = std::mem::replace(&mut *later.lock_unpoisoned(), meta);
        // Drop outside of the lock: this may release a whole graph.
        drop(before);
        let recorded_writes = self.inner.storage.recorded_writes.load(Ordering::Relaxed);
        self.inner.recorded_writes_seen.store(recorded_writes, Ordering::Relaxed);
    }

    /// Reports whether the history describes the current contents.
    ///
    /// A tensor without history that is not a view counts as a constant, regardless of writes.
    pub(crate) fn is_current(&self) -> bool {
        let inner = &*self.inner;
        let recorded_writes = inner.storage.recorded_writes.load(Ordering::Relaxed);
        inner.recorded_writes_seen.load(Ordering::Relaxed) == recorded_writes
            || (inner.grad_meta.get().is_none()
                && inner.rebased_meta.get().is_none()
                && inner.base.ptr_eq(&Weak::new()))
    }

    /// Creates a weak handle, which does not keep the tensor alive.
    ///
    /// The weak handle is valid while this handle or a clone exists, regardless of other tensors over the
    /// memory. Hooks use it for their own tensor: see [`register_hook`](Self::register_hook).
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

    /// Returns another view of the same memory, without history.
    #[doc(hidden)]
    pub fn with_layout(&self, layout: Layout) -> Self {
        let TensorImpl { storage, dtype, base, .. } = &*self.inner;
        // The base of a view of a view is the whole tensor.
        let base = if base.strong_count() > 0 { base.clone() } else { Arc::downgrade(&self.inner) };
        Self { inner: Arc::new(TensorImpl::new(storage.clone(), layout, *dtype, None, base)) }
    }

    /// Reports whether this is the only tensor and the only handle over its storage.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.inner) == 1 && Arc::strong_count(&self.inner.storage) == 1
    }

    /// Counts a backward function that keeps the storage.
    pub(crate) fn retain_for_backward(&self) {
        self.inner.storage.saved_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a backward function that kept the storage.
    pub(crate) fn release_from_backward(&self) {
        self.inner.storage.saved_count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Reports whether a backward function keeps the storage, so that another can save it for free.
    pub(crate) fn is_saved_for_backward(&self) -> bool {
        self.inner.storage.saved_count.load(Ordering::Relaxed) > 0
    }

    /// Returns the number of writes to the storage. Equal versions mean equal contents.
    pub(crate) fn version(&self) -> u64 {
        self.inner.storage.version()
    }

    /// Reports whether both tensors are the same view of the same storage.
    pub(crate) fn is_same_view(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.inner.storage, &other.inner.storage)
            && self.dtype() == other.dtype()
            && self.layout() == other.layout()
    }

    /// Binds the whole storage for a kernel, at an aligned offset. Returns `None` if the storage is not on
    /// the device. See [`binding`].
    pub(crate) fn bind(&self, access: Access, guard: &DispatchGuard<'_>) -> Result<Option<Slice>> {
        let slice = self.inner.storage.bind(access, guard)?;
        self.record_access(access);
        self.record_binding(slice, access);
        Ok(slice)
    }

    /// Tells the observer that the contents derive from another tensor, which is read instead.
    pub(crate) fn record_derived(&self) {
        self.record_access(Access::Write);
    }

    /// Reports an access to the observer, if one is active.
    #[inline]
    pub(crate) fn record_access(&self, access: Access) {
        if let Some(observer) = observer::current() {
            let storage: Arc<dyn Buffer> = self.inner.storage.clone();
            observer.record_access(&storage, access);
        }
    }

    /// Reports the bound memory to an active capture.
    #[inline]
    fn record_binding(&self, slice: Option<Slice>, access: Access) {
        if let Some(slice) = slice {
            self.device().capture_recorder().record_binding(&self.inner.storage, slice, access);
        }
    }

    /// Binds the storage for an operation in the pending fusion group, and sets the storage's fusion slot.
    pub(crate) fn bind_deferred(
        &self,
        access: Access,
        guard: &DispatchGuard<'_>,
        slot: FusionSlot,
    ) -> Result<Option<Slice>> {
        let slice = self.inner.storage.bind_deferred(access, guard, slot)?;
        self.record_access(access);
        self.record_binding(slice, access);
        Ok(slice)
    }

    /// Returns the role of the storage in the pending fusion group.
    pub(crate) fn fusion_slot(&self, guard: &DispatchGuard<'_>) -> FusionSlot {
        self.inner.storage.fusion_slot(guard)
    }

    /// Returns the storage, for data that operations keep with it.
    pub(crate) fn storage(&self) -> &Arc<Storage> {
        &self.inner.storage
    }

    pub(crate) fn downgrade_storage(&self) -> Weak<Storage> {
        Arc::downgrade(&self.inner.storage)
    }

    /// Returns the storage's unique id. Ids increase with each allocation.
    #[doc(hidden)]
    pub fn storage_id(&self) -> u64 {
        self.inner.storage.id
    }

    /// Runs a long transfer on a contiguous tensor's pinned bytes, without the dispatch lock.
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
        // Record the order first: unpinned memory may leave the device, and must then wait for this work.
        let ordered = self.inner.storage.order_after_enqueue(access);
        drop(pinned);
        ordered?;
        done
    }

    /// Returns the bytes of a contiguous tensor within the binding of its storage.
    pub(crate) fn byte_range_in(&self, Slice { segment, offset, .. }: Slice) -> Slice {
        let size = self.dtype().size();
        let offset = offset + (self.layout().offset() * size) as u64;
        Slice { segment, offset, bytes: (self.numel() * size) as u64 }
    }

    /// Fails if the other operand is on another device.
    #[doc(hidden)]
    #[track_caller]
    pub fn check_same_device(&self, op: &'static str, other: &Self) -> Result<()> {
        if self.device() == other.device() {
            return Ok(());
        }
        Err(Error::device(op, self.device(), other.device()))
    }
}
