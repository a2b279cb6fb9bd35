//! Private pools: parts of a pool that serve only their own requests.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use super::heap::{RETIRED_OWNER, SHARED_OWNER, STITCHED_OWNER};
use super::pool::{Pool, PoolShared};
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};

/// Memory of a [`Pool`] that serves only requests made [inside](Self::enter) it, as PyTorch's `MemPool`.
///
/// The private pool keeps the memory it has taken while it lives, so addresses in a captured step stay
/// reserved for that step. The pool's statistics count its bytes. When the private pool is dropped, its idle
/// memory returns to the device. Blocks that are still allocated stay valid; once freed, they serve any
/// request.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let own = device.pool().create_private_pool();
/// let inside = own.enter();
/// let a = Tensor::zeros(&[1 << 20], DType::F32, &device)?;
/// drop(inside);
/// drop(a);
/// let taken = device.memory().reserved();
/// // Its free memory does not serve other requests.
/// let _b = Tensor::zeros(&[1 << 20], DType::F32, &device)?;
/// assert!(device.memory().reserved() > taken);
/// drop(own);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
pub struct PrivatePool {
    shared: Arc<PoolShared>,
    id: u16,
}

impl fmt::Debug for PrivatePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivatePool({})", self.id)
    }
}

thread_local! {
    static CURRENT_POOL: ScopedLocal<Cell<u16>> = const { ScopedLocal::new(Cell::new(SHARED_OWNER)) };
}

/// Returns the id of this thread's current private pool.
#[inline]
pub(super) fn current() -> u16 {
    CURRENT_POOL.current()
}

/// Guard: while it lives, this thread allocates from a private pool.
#[derive(Debug)]
#[must_use = "a private pool serves only while the guard lives"]
pub struct PrivatePoolGuard {
    _pool_id: ScopedGuard<Cell<u16>>,
}

impl Pool {
    /// Creates a private pool within this pool.
    #[must_use]
    pub fn create_private_pool(&self) -> PrivatePool {
        // Ids are unique across pools, so a thread inside a private pool is inside no other device's.
        static NEXT_ID: AtomicU16 = AtomicU16::new(SHARED_OWNER + 1);
        let mut number = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        while matches!(number, SHARED_OWNER | STITCHED_OWNER | RETIRED_OWNER) {
            number = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.lock().private_pools.push(number);
        PrivatePool { shared: Arc::clone(&self.shared), id: number }
    }
}

impl PrivatePool {
    /// Makes this thread allocate from the private pool until the guard is dropped.
    pub fn enter(&self) -> PrivatePoolGuard {
        PrivatePoolGuard { _pool_id: ScopedGuard::new(&CURRENT_POOL, self.id) }
    }

    /// Returns the bytes of device memory that the private pool holds.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        let state = self.shared.lock();
        let own = |arena: u16| state.heap.arenas[usize::from(arena)].owner == self.id;
        let segments = state.heap.live_segments().filter(|s| own(s.arena));
        segments
            .map(|s| s.virtual_range.as_ref().map_or(s.size, |r| r.extents.iter().map(|e| e.1).sum()))
            .sum()
    }
}

impl Drop for PrivatePool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Err(error) = state.retire_private_pool(self.id) {
            log::debug!("a private pool was dropped without its device: {error}");
        }
    }
}
