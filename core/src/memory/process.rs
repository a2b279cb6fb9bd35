//! What all pools of this process take together, and the bound on it. It is looked at when a pool grows, and not before.

use std::sync::atomic::{AtomicU64, Ordering};

static PROCESS_LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);
static PROCESS_RESERVED: AtomicU64 = AtomicU64::new(0);

/// Bounds what all pools of this process, on all devices, take together; `None` lifts the bound. What they hold already
/// stays. A request that would pass it climbs the ladder of its pool, as at any other limit; memory that other pools
/// keep idle stays theirs until they give it back ([`Pool::trim`](super::Pool::trim)).
///
/// Null devices take no memory, and do not count; nor does memory of the host.
pub fn set_process_limit(bytes: Option<u64>) {
    PROCESS_LIMIT.store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// The bound of [`set_process_limit`], if there is one.
#[must_use]
pub fn process_limit() -> Option<u64> {
    Some(PROCESS_LIMIT.load(Ordering::Relaxed)).filter(|bytes| *bytes < u64::MAX)
}

/// Bytes that all pools of this process hold, on all devices.
#[must_use]
pub fn process_reserved() -> u64 {
    PROCESS_RESERVED.load(Ordering::Relaxed)
}

/// A pool's part of what the process takes.
#[derive(Debug, Default)]
pub(super) struct ProcessShare {
    /// Whether its memory is the machine's.
    is_counted: bool,
    reserved: u64,
}

impl ProcessShare {
    pub(super) fn new(counts: bool) -> Self {
        Self { is_counted: counts, reserved: 0 }
    }

    /// The bound in force, where a pool has one of its own for the process.
    pub(super) fn limit(&self, own: Option<u64>) -> Option<u64> {
        own.into_iter().chain(process_limit()).min().filter(|_| self.is_counted)
    }

    /// Takes bytes ahead, unless all pools would hold more than `limit` then; [`settle`](Self::settle) tells what came of it.
    pub(super) fn try_reserve(&mut self, bytes: u64, limit: Option<u64>) -> bool {
        if !self.is_counted {
            return true;
        }
        let more = |all: u64| all.checked_add(bytes).filter(|all| limit.is_none_or(|limit| *all <= limit));
        let taken = PROCESS_RESERVED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        self.reserved += if taken { bytes } else { 0 };
        taken
    }

    /// The pool holds so many bytes.
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
