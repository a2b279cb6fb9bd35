//! Dispatch: the lock under which work enters a queue, and the launches that wait under it.
//!
//! Operations may defer launches to combine them. The runtime keeps deferred launches as [`PendingLaunches`]
//! and knows nothing else about them. Everything that takes the dispatch lock launches them first. So every
//! submission finds all earlier work.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::error::{Error, Result};
use crate::memory::scope;
use crate::runtime::capture::recorder;
use crate::runtime::device::Device;
use crate::runtime::driver_call::{check_not_in_callback, is_in_driver_call};
use crate::sync::LockUnpoisoned;

/// Launches that operations have deferred, in order to launch them together.
pub(crate) trait PendingLaunches: Any + fmt::Debug + Send {
    fn is_empty(&self) -> bool;

    fn queue(&self) -> u8;

    /// Reports whether a later step reads the result of a pending step.
    fn is_read(&self, step: u8) -> bool;

    /// Enqueues the pending launches, and leaves none. The result of step `dropped` is about to be freed, but is
    /// written nevertheless.
    fn launch(&mut self, device: &Device, dropped: Option<u8>) -> Result<()>;
}

/// Role of a storage in the pending launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FusionSlot {
    /// Group of launches, or 0 for none.
    pub(crate) group_id: u64,
    /// Step that writes the storage, or `None` if the group reads it.
    pub(crate) step: Option<u8>,
}

/// State that the dispatch lock protects.
#[derive(Debug)]
pub(crate) struct DispatchState {
    /// Id of the pending group, unique among the device's groups.
    group_id: u64,
    pending: Option<Box<dyn PendingLaunches>>,
    /// Error of an earlier launch, kept until a caller can return it.
    deferred_error: Option<Error>,
}

impl DispatchState {
    /// Returns the id of the pending group.
    pub(crate) fn group_id(&self) -> u64 {
        self.group_id
    }

    /// Reports whether no launch is pending.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pending.as_ref().is_none_or(|pending| pending.is_empty())
    }

    /// Stores an error for the next caller that can return one.
    pub(crate) fn defer_failure(&mut self, error: Error) {
        self.deferred_error.get_or_insert(error);
    }

    /// Returns the unreported error of an earlier launch.
    pub(crate) fn take_failure(&mut self) -> Result<()> {
        self.deferred_error.take().map_or(Ok(()), Err)
    }

    /// Returns the pending launches, which are of one type for a device.
    pub(crate) fn pending_mut<P: PendingLaunches + Default>(&mut self) -> &mut P {
        if !self.pending.as_ref().is_some_and(|pending| (&**pending as &dyn Any).is::<P>()) {
            self.pending = Some(Box::new(P::default()));
        }
        let pending =
            self.pending.as_mut().and_then(|pending| (&mut **pending as &mut dyn Any).downcast_mut());
        // invariant: the lines above replace launches of another type
        pending.expect("the pending launches have this type")
    }
}

/// Dispatch lock of a device, and the id of its pending group, which is read without the lock.
#[derive(Debug)]
pub(crate) struct DispatchQueue {
    state: Mutex<DispatchState>,
    group_id: AtomicU64,
}

impl Default for DispatchQueue {
    fn default() -> Self {
        Self {
            state: Mutex::new(DispatchState { group_id: 1, pending: None, deferred_error: None }),
            group_id: AtomicU64::new(1),
        }
    }
}

impl DispatchQueue {
    /// Takes the lock without launching what is pending.
    #[inline]
    pub(crate) fn lock(&self) -> DispatchGuard<'_> {
        DispatchGuard(self.state.lock_unpoisoned())
    }

    /// Reports whether another thread holds the lock.
    pub(crate) fn is_locked(&self) -> bool {
        matches!(self.state.try_lock(), Err(TryLockError::WouldBlock))
    }
}

/// Dispatch lock, held from operand lookup until the work is enqueued. While a thread holds it, no other
/// thread enqueues work, records an event or moves memory. Addresses therefore stay valid until the work is
/// in its queue. Taking this lock launches what is pending.
///
/// Lock order: dispatch lock, pool, storage state, synchronisation state. No memory is allocated while this
/// lock is held, because an allocation may move memory.
#[derive(Debug)]
#[must_use = "dropping the guard releases the dispatch lock"]
pub(crate) struct DispatchGuard<'a>(MutexGuard<'a, DispatchState>);

impl Deref for DispatchGuard<'_> {
    type Target = DispatchState;

    fn deref(&self) -> &DispatchState {
        &self.0
    }
}

impl DerefMut for DispatchGuard<'_> {
    fn deref_mut(&mut self) -> &mut DispatchState {
        &mut self.0
    }
}

impl Device {
    /// Takes the dispatch lock and launches what is pending.
    #[inline]
    pub(crate) fn lock_dispatch(&self) -> DispatchGuard<'_> {
        let mut guard = self.stream_set().dispatch.lock();
        self.flush_pending(&mut guard);
        guard
    }

    /// Takes the dispatch lock, and launches what is pending only if it waits on another queue than `queue`.
    /// For callers that enqueue nothing on `queue` and record no event there.
    #[inline]
    pub(crate) fn lock_dispatch_on_queue(&self, queue: u8) -> DispatchGuard<'_> {
        let mut guard = self.stream_set().dispatch.lock();
        if guard.pending.as_ref().is_some_and(|pending| !pending.is_empty() && pending.queue() != queue) {
            self.flush_pending(&mut guard);
        }
        guard
    }

    /// Launches what is pending. Stores an error for [`DispatchState::take_failure`].
    #[inline]
    pub(crate) fn flush_pending(&self, guard: &mut DispatchGuard<'_>) {
        if !guard.is_empty() {
            self.launch_pending(guard, None);
        }
    }

    fn launch_pending(&self, guard: &mut DispatchGuard<'_>, dropped: Option<u8>) {
        let state = &mut **guard;
        let Some(pending) = state.pending.as_mut().filter(|pending| !pending.is_empty()) else { return };
        // Pending launches belong to the step that is being captured.
        if let Err(error) = self.capture_recorder().run_recorded(|| pending.launch(self, dropped)) {
            state.defer_failure(error);
        }
        state.group_id += 1;
        self.stream_set().dispatch.group_id.store(state.group_id, Ordering::Release);
    }

    /// Fails if this thread cannot enqueue work on the device now: inside a callback of the driver, and while the
    /// thread records a step on another device.
    #[inline]
    pub(crate) fn check_can_enqueue(&self, op: &'static str) -> Result<()> {
        if is_in_driver_call() || recorder::is_any_active() {
            let op = scope::current_op_or(op);
            check_not_in_callback(op)?;
            recorder::check_device(op, self)?;
        }
        Ok(())
    }

    /// Launches what is pending, and returns its error or an earlier one.
    #[doc(hidden)]
    pub fn flush_fusion(&self) -> Result<()> {
        check_not_in_callback("flush")?;
        self.lock_dispatch().take_failure()
    }

    /// Launches a group before memory that the group uses returns to the pool. A result that only other steps
    /// have read is dropped without being written.
    #[inline]
    pub(crate) fn flush_before_free(&self, slot: FusionSlot) {
        let dispatch = &self.stream_set().dispatch;
        if slot.group_id != dispatch.group_id.load(Ordering::Acquire) {
            return;
        }
        let mut guard = dispatch.lock();
        let is_read = |step: u8| guard.pending.as_ref().is_some_and(|pending| pending.is_read(step));
        if guard.group_id == slot.group_id && !slot.step.is_some_and(is_read) {
            self.launch_pending(&mut guard, slot.step);
        }
    }
}
