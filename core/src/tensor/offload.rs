//! Tensors whose memory leaves the device for a while.

use std::sync::{Arc, Weak};

use super::{Storage, Tensor};
use crate::error::Result;
use crate::scoped_local::{NoDropCell, ScopedGuard, ScopedLocal, WithCurrent};

/// Smaller pieces stay: a copy costs more than they take.
const MIN_OFFLOAD_BYTES: u64 = 16 << 10;

thread_local! {
    /// What was allocated since a collection began, if one is under way.
    static TRACKED_STORAGES: ScopedLocal<NoDropCell<Option<Vec<Weak<Storage>>>>> = const { ScopedLocal::new(NoDropCell::new(None)) };
}

/// Notes a new storage, for the collection that is under way.
pub(crate) fn track_storage(storage: &Arc<Storage>) {
    TRACKED_STORAGES.with_current_mut(|made| {
        if let Some(made) = made {
            made.push(Arc::downgrade(storage));
        }
    });
}

/// The memory of several tensors, which leaves and comes back together. It keeps none of them alive.
#[derive(Default)]
pub struct OffloadSet {
    storages: Vec<Weak<Storage>>,
}

impl std::fmt::Debug for OffloadSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Away({} pieces)", self.storages.len())
    }
}

impl OffloadSet {
    /// Runs `body`, and collects what it has allocated.
    pub fn track_allocations<T>(body: impl FnOnce() -> T) -> (T, Self) {
        let collecting = ScopedGuard::new(&TRACKED_STORAGES, Some(Vec::new()));
        let value = body();
        let storages = TRACKED_STORAGES.with_current_mut(Option::take).unwrap_or_default();
        drop(collecting);
        (value, Self { storages })
    }

    /// Also the memory of a tensor that was there before.
    pub fn insert(&mut self, t: &Tensor) {
        self.storages.push(Arc::downgrade(&t.inner.storage));
    }

    /// Without the memory of a tensor, without small pieces, and without what has been freed.
    pub fn retain_offloadable(&mut self, here: &Tensor) {
        self.storages.retain(|weak| {
            let found = weak.upgrade().filter(|s| s.bytes() >= MIN_OFFLOAD_BYTES);
            found.is_some_and(|s| !Arc::ptr_eq(&s, &here.inner.storage))
        });
    }

    /// Starts copies to the host.
    pub fn copy_to_host(&self) -> Result<()> {
        self.storages.iter().filter_map(Weak::upgrade).try_for_each(|s| s.copy_to_host())
    }

    /// Frees what was copied and not changed since.
    pub fn evict(&self) {
        self.storages.iter().filter_map(Weak::upgrade).for_each(|s| s.evict());
    }

    /// Starts to bring everything back.
    pub fn copy_to_device(&self) -> Result<()> {
        self.storages.iter().filter_map(Weak::upgrade).try_for_each(|s| s.copy_to_device())
    }
}

impl Tensor {
    /// Moves the memory behind this tensor, and behind its views, to memory of the host; the device's goes back to the pool.
    /// The contents come back by themselves when an operation uses them, or ahead of that by
    /// [`prefetch_`](Self::prefetch_).
    ///
    /// The copy runs beside other work, and the host does not wait: memory that is reused waits for it on the device.
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
    /// The backend reaches no memory of the host; the host has no more.
    pub fn offload_(&self) -> Result<()> {
        self.inner.storage.copy_to_host()?;
        self.inner.storage.evict();
        Ok(())
    }

    /// Starts to bring the memory behind this tensor back from the host. Nothing happens where it is on the device.
    ///
    /// # Errors
    /// Memory of the device runs out.
    pub fn prefetch_(&self) -> Result<()> {
        self.inner.storage.copy_to_device()
    }

    /// Whether the memory behind it is on the host.
    #[must_use]
    pub fn is_offloaded(&self) -> bool {
        self.inner.storage.is_on_host()
    }
}
