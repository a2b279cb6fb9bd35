//! Memory held by all pools of this process, and its limit, which is checked when a pool grows.

use std::sync::atomic::{AtomicU64, Ordering};

static PROCESS_LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);
static PROCESS_RESERVED: AtomicU64 = AtomicU64::new(0);

/// Limits the bytes that all pools of this process hold, on all devices; `None` removes the limit. Memory
/// held already stays. A request beyond the limit goes through the slow path of its pool, as at any other
/// limit. Idle memory of other pools stays with them until they release it
/// ([`Pool::trim`](super::Pool::trim)).
///
/// Null devices take no memory, and do not count; nor does host memory.
pub fn set_process_limit(bytes: Option<u64>) {
    PROCESS_LIMIT.store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Returns the limit of [`set_process_limit`], if there is one.
#[must_use]
pub fn process_limit() -> Option<u64> {
    Some(PROCESS_LIMIT.load(Ordering::Relaxed)).filter(|bytes| *bytes < u64::MAX)
}

/// Returns the bytes that all pools of this process hold, on all devices.
#[must_use]
pub fn process_reserved() -> u64 {
    PROCESS_RESERVED.load(Ordering::Relaxed)
}

/// A pool's share of the bytes that the process holds.
#[derive(Debug, Default)]
pub(super) struct ProcessShare {
    /// If true, the pool's memory is real device memory.
    is_counted: bool,
    reserved: u64,
}

impl ProcessShare {
    pub(super) fn new(counts: bool) -> Self {
        Self { is_counted: counts, reserved: 0 }
    }

    /// Returns the limit in force, where `own` is the limit that the pool's configuration sets for the
    /// process.
    pub(super) fn limit(&self, own: Option<u64>) -> Option<u64> {
        own.into_iter().chain(process_limit()).min().filter(|_| self.is_counted)
    }

    /// Reserves `bytes` in advance unless all pools would then exceed `limit`.
    /// [`set_reserved`](Self::set_reserved) corrects the reservation afterwards.
    pub(super) fn try_reserve(&mut self, bytes: u64, limit: Option<u64>) -> bool {
        if !self.is_counted {
            return true;
        }
        let more = |all: u64| all.checked_add(bytes).filter(|all| limit.is_none_or(|limit| *all <= limit));
        let taken = PROCESS_RESERVED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        self.reserved += if taken { bytes } else { 0 };
        taken
    }

    /// Sets the bytes that the pool holds.
    pub(super) fn set_reserved(&mut self, reserved: u64) {
        if !self.is_counted || self.reserved == reserved {
            return;
        }
        if reserved > self.reserved {
            PROCESS_RESERVED.fetch_add(reserved - self.reserved, Ordering::Relaxed);
        } else {
            PROCESS_RESERVED.fetch_sub(self.reserved - reserved, Ordering::Relaxed);
        }
        self.reserved = reserved;
    }
}

impl Drop for ProcessShare {
    fn drop(&mut self) {
        self.set_reserved(0);
    }
}
