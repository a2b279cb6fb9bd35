//! Observer of operations: what a checkpoint's body draws and accesses is recorded, and draws are replayed.
//!
//! The runtime and tensors report to the observer. Autograd implements it, and counts the bodies that run, so
//! that operations outside of checkpoints pay for one atomic load.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::runtime::capture::recorder::Buffer;
use crate::runtime::device::{Device, RandomState};
use crate::runtime::stream::Access;

pub(crate) trait OperationObserver: Sync {
    /// Reports whether this thread replays earlier operations.
    fn is_replaying(&self) -> bool;
    /// Returns the random state that the next draw must have; `None` if the device's own state decides.
    fn replayed_draw(&self, device: &Device) -> Option<RandomState>;
    fn record_draw(&self, device: &Device, state: RandomState);
    /// Records that an operation reads or writes a buffer.
    fn record_access(&self, buffer: &Arc<dyn Buffer>, access: Access);
}

/// Number of observed bodies that run on all threads.
static ACTIVE_COUNT: AtomicUsize = AtomicUsize::new(0);
static OBSERVER: OnceLock<&'static dyn OperationObserver> = OnceLock::new();

/// Counts one more observed body. The first call decides on the observer.
pub(crate) fn begin(observer: &'static dyn OperationObserver) {
    OBSERVER.get_or_init(|| observer);
    ACTIVE_COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Counts one observed body less.
pub(crate) fn end() {
    ACTIVE_COUNT.fetch_sub(1, Ordering::Relaxed);
}

/// Reports whether an observed body may run on this thread.
#[inline]
pub(crate) fn is_active() -> bool {
    ACTIVE_COUNT.load(Ordering::Relaxed) > 0
}

/// Returns the observer while observed bodies run.
#[inline]
pub(crate) fn current() -> Option<&'static dyn OperationObserver> {
    if is_active() { OBSERVER.get().copied() } else { None }
}
