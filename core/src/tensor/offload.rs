//! Offloading: tensors whose memory moves to the host temporarily.

use std::sync::{Arc, Weak};

use super::{Storage, Tensor};
use crate::error::Result;
use crate::scoped_local::{NoDropCell, ScopedGuard, ScopedLocal, WithCurrent};

/// Smallest storage that is offloaded. Smaller ones cost more to copy than they free.
const MIN_OFFLOAD_BYTES: u64 = 16 << 10;

thread_local! {
    /// Storages allocated since tracking began, if tracking is active.
    static TRACKED_STORAGES: ScopedLocal<NoDropCell<Option<Vec<Weak<Storage>>>>> = const { ScopedLocal::new(NoDropCell::new(None)) };
}

/// Adds a new storage to the active tracking, if any.
pub(crate) fn track_storage(storage: &Arc<Storage>) {
    TRACKED_STORAGES.with_current_mut(|made| {
        if let Some(made) = made {
            made.push(Arc::downgrade(storage));
        }
    });
}

/// Storages that are offloaded and restored together. Does not keep them alive.
#[derive(Debug, Default)]
pub struct OffloadSet {
    storages: Vec<Weak<Storage>>,
}

impl OffloadSet {
    /// Runs `body`, and collects the storages that it allocates.
    pub fn track_allocations<T>(body: impl FnOnce() -> T) -> (T, Self) {
        let collecting = ScopedGuard::new(&TRACKED_STORAGES, Some(Vec::new()));
        let value = body();
        let storages = TRACKED_STORAGES.with_current_mut(Option::take).unwrap_or_default();
        drop(collecting);
        (value, Self { storages })
    }

    /// Adds the storage of an existing tensor.
    pub fn insert(&mut self, t: &Tensor) {
        self.storages.push(Arc::downgrade(&t.inner.storage));
    }

    /// Removes the storage of `here`, small storages and freed storages.
    pub fn retain_offloadable(&mut self, here: &Tensor) {
        self.storages.retain(|weak| {
            let found = weak.upgrade().filter(|s| s.bytes() >= MIN_OFFLOAD_BYTES);
            found.is_some_and(|s| !Arc::ptr_eq(&s, &here.inner.storage))
        });
    }

    /// Starts the copies to the host.
    pub fn copy_to_host(&self) -> Result<()> {
        self.storages.iter().filter_map(Weak::upgrade).try_for_each(|s| s.copy_to_host())
    }

    /// Frees the device memory of storages that were copied and not changed since.
    pub fn evict(&self) {
        self.storages.iter().filter_map(Weak::upgrade).for_each(|s| s.evict());
    }

    /// Starts the copies back to the device.
    pub fn copy_to_device(&self) -> Result<()> {
        self.storages.iter().filter_map(Weak::upgrade).try_for_each(|s| s.copy_to_device())
    }
}

impl Tensor {
    /// Moves the storage of this tensor and its views to host memory. The device memory returns to the pool.
    ///
    /// The next operation that uses the contents brings them back, or [`prefetch_`](Self::prefetch_) earlier.
    /// The copy overlaps with other work; reused memory waits for it on the device, not on the host.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[1 << 20], DType::F32, &device)?;
    /// x.offload_()?;
    /// assert!(x.is_offloaded() && device.memory().allocated() == 0);
    /// let y = x.exp()?;
    /// assert!(!x.is_offloaded());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The backend cannot access host memory, or host memory runs out.
    #[track_caller]
    pub fn offload_(&self) -> Result<()> {
        self.inner.storage.copy_to_host()?;
        self.inner.storage.evict();
        Ok(())
    }

    /// Starts to copy the storage back from the host. No-op if the storage is on the device.
    #[track_caller]
    pub fn prefetch_(&self) -> Result<()> {
        self.inner.storage.copy_to_device()
    }

    /// Reports whether the storage is on the host.
    #[must_use]
    pub fn is_offloaded(&self) -> bool {
        self.inner.storage.is_on_host()
    }
}
