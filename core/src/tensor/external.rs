//! Memory that tensors share with the program: tensors over memory of the program, and memory of tensors in
//! commands of the program.

use std::sync::{Arc, Weak};

use super::{Tensor, TensorImpl, binding};
use crate::backend::Slice;
use crate::dtype::DType;
use crate::error::{Result, fail_if};
use crate::runtime::device::Device;
use crate::runtime::driver_call::is_in_driver_call;
use crate::runtime::stream::Access;
use crate::storage::{PinGuard, ReleaseExternal, Storage};
use crate::tensor::{IntoShape, Layout};

/// Kernels load up to this many bytes at once.
const LOAD_BYTES: u64 = 16;

/// Memory of a contiguous tensor, pinned at its address for commands of the program. See
/// [`Tensor::pin_for_read`].
#[must_use = "the memory may move when the guard is dropped"]
pub struct PinnedSlice {
    tensor: Tensor,
    slice: Slice,
    access: Access,
    /// Dropped last, after the access is recorded.
    _pin: PinGuard,
}

impl std::fmt::Debug for PinnedSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedSlice").field("slice", &self.slice).field("access", &self.access).finish()
    }
}

impl PinnedSlice {
    /// Returns the bytes of the tensor's elements.
    #[must_use]
    pub fn slice(&self) -> Slice {
        self.slice
    }

    /// Returns the device of the memory.
    #[doc(alias = "is_cuda")]
    #[doc(alias = "is_meta")]
    #[doc(alias = "get_device")]
    #[must_use]
    pub fn device(&self) -> &Device {
        self.tensor.device()
    }
}

impl Drop for PinnedSlice {
    fn drop(&mut self) {
        if let Err(error) = self.tensor.inner.storage.order_after_enqueue(self.access) {
            // The next operation reports it too.
            log::debug!("the access of a pinned tensor was not recorded: {error}");
        }
        if self.access == Access::Write && self.tensor.dtype() == DType::Bool {
            self.tensor.normalize_bools_later();
        }
    }
}

/// Bytes of bools, which are 0 or 1.
///
/// Bytes that come from the host are checked. Memory that other programs or kernels have written is normalised by a
/// kernel: every byte other than 0 becomes 1.
impl Tensor {
    /// Normalises bytes that this library has not written, if the elements are bools. The work is part of the step
    /// that is recorded, if any.
    pub(crate) fn normalize_bools(&self) -> Result<()> {
        // Kernels read every byte other than 0 as true, and the sign of true is written as 1.
        if self.dtype() == DType::Bool { self.detach().sign_() } else { Ok(()) }
    }

    /// Normalises bytes after the program has written them, from a destructor. The next operation returns the error.
    fn normalize_bools_later(&self) {
        let (tensor, device) = (self.clone(), self.device().clone());
        let normalize = move || {
            let recorder = tensor.device().capture_recorder();
            if let Err(error) = recorder.run_unrecorded(|| tensor.normalize_bools()) {
                tensor.device().lock_dispatch().defer_failure(error);
            }
        };
        match is_in_driver_call() {
            // The locks of the device may be held.
            true => drop(device.waiter().run(move |done| {
                match is_in_driver_call() {
                    true => log::error!(
                        "bools that a callback wrote stay as they are, because no thread can start"
                    ),
                    false => normalize(),
                }
                done.complete(Ok(()));
            })),
            false => normalize(),
        }
    }
}

impl Tensor {
    /// Creates a tensor over memory of the program, for interfaces of a backend. The pool counts the memory under
    /// [`Tag::External`](crate::memory::Tag::External). `release` runs when the last tensor over the memory is
    /// dropped, and also if this call fails. Commands that were enqueued may still use the memory then. Errors name
    /// the operation `op`, which the program called.
    ///
    /// # Safety
    /// `slice` is memory of `device` that stays valid until `release`, and until the commands enqueued so far have
    /// completed. Its contents are valid elements of `dtype`. Bytes of bools may have any value: those other than 0
    /// are overwritten by 1.
    ///
    /// # Errors
    /// The slice is not aligned or is too short: kernels load 16 bytes at once.
    pub unsafe fn from_external(
        op: &'static str,
        slice: Slice,
        shape: impl IntoShape,
        dtype: DType,
        device: &Device,
        release: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Self> {
        let release: ReleaseExternal = Box::new(release);
        let checked = Self::check_new(op, &shape.to_extents(), dtype, device)
            .and_then(|(shape, bytes)| check_slice(op, &slice, bytes, device).map(|()| (shape, bytes)));
        let (shape, bytes) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                release();
                return Err(error);
            }
        };
        let storage = Arc::new(Storage::from_external(device, slice, bytes, release));
        let inner = TensorImpl::new(storage, Layout::contiguous(&shape), dtype, None, Weak::new());
        let made = Self { inner: Arc::new(inner) };
        made.normalize_bools()?;
        Ok(made)
    }

    /// Pins the memory of a contiguous tensor for commands of the program that read it, and submits everything
    /// that was enqueued so far. The memory neither moves nor returns to the pool until the guard is dropped.
    ///
    /// # Errors
    /// The tensor is not contiguous.
    #[track_caller]
    pub fn pin_for_read(&self) -> Result<PinnedSlice> {
        self.pin_slice(Access::Read)
    }

    /// Pins the memory like [`pin_for_read`](Self::pin_for_read), for commands that write it. The writes count as
    /// in-place operations without gradient. When the guard is dropped, bytes of bools other than 0 become 1.
    ///
    /// # Errors
    /// The tensor is not contiguous.
    #[track_caller]
    pub fn pin_for_write(&self) -> Result<PinnedSlice> {
        self.pin_slice(Access::Write)
    }

    #[track_caller]
    fn pin_slice(&self, access: Access) -> Result<PinnedSlice> {
        fail_if!(!self.is_contiguous();
            argument("pin"), "expected a contiguous tensor, got shape {:?} with strides {:?}; call `contiguous` first",
            self.shape(), self.strides());
        self.device().check_not_recording("pin", "the program's own commands are not part of a replay")?;
        let tensor = self.detach();
        loop {
            let bound = binding::bind_contiguous_bytes([(&tensor, access)])?;
            let slice = bound[0];
            let Some(pin) = tensor.inner.storage.pin(access, bound.dispatch_guard()) else { continue };
            drop(bound);
            self.device().flush()?;
            return Ok(PinnedSlice { tensor, slice, access, _pin: pin });
        }
    }
}

#[track_caller]
fn check_slice(op: &'static str, slice: &Slice, bytes: u64, device: &Device) -> Result<()> {
    let alignment = device.backend().limits().alignment;
    fail_if!(!slice.offset.is_multiple_of(alignment);
        argument(op), "the memory starts at byte {} of its buffer; {device} binds at multiples of {alignment}",
        slice.offset);
    let needed = bytes.next_multiple_of(LOAD_BYTES);
    fail_if!(slice.bytes < needed;
        argument(op), "the tensor needs {needed} bytes (its {bytes}, in whole groups of {LOAD_BYTES}, which \
        kernels load at once), and the memory has {}; make the buffer larger", slice.bytes);
    Ok(())
}
