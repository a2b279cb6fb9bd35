//! Fences mark points in all streams at once, for the host; events mark points in one stream, for other
//! streams. Both use the driver's events, from a pool.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use forebay_core::backend::{self, Fence, SourceError};
use forebay_core::sync::LockUnpoisoned;

use crate::context::{Context, CudaEvent, CudaStream};

/// The driver's events of one fence: one for each stream.
type FenceEvents = Arc<[Arc<CudaEvent>]>;

/// The fences of a device.
#[derive(Debug, Default)]
pub(crate) struct FenceTracker {
    /// Counts enqueued work; if there is none since the last fence, recording returns that fence again.
    work_count: AtomicU64,
    /// All fences up to this one have been passed.
    last_passed: AtomicU64,
    state: Mutex<FenceState>,
}

#[derive(Debug, Default)]
struct FenceState {
    /// The last fence; 0 before the first.
    last_fence: u64,
    /// Value of `work_count` when the last fence was recorded.
    work_at_last_fence: u64,
    /// Events of fences that may not have been passed yet, oldest first; their fences end at `last_fence`
    /// without gaps.
    pending: VecDeque<FenceEvents>,
    /// Events for reuse.
    free_events: Vec<Arc<CudaEvent>>,
}

/// Takes a free event, or creates one.
fn acquire_event(
    free_events: &mut Vec<Arc<CudaEvent>>,
    context: &Arc<Context>,
) -> Result<Arc<CudaEvent>, SourceError> {
    free_events.pop().map_or_else(|| CudaEvent::new(context).map(Arc::new), Ok)
}

/// The events of single streams.
#[derive(Debug, Default)]
pub(crate) struct EventTracker {
    state: Mutex<EventState>,
}

#[derive(Debug, Default)]
struct EventState {
    last_event: u64,
    /// Events that may not have been passed yet, by number.
    pending: VecDeque<(u64, Arc<CudaEvent>)>,
    free_events: Vec<Arc<CudaEvent>>,
}

/// Number of pending events at which `record` searches for passed ones.
const SWEEP_THRESHOLD: usize = 64;

impl EventTracker {
    /// Records an event after everything enqueued in `stream`.
    pub(crate) fn record(&self, stream: &CudaStream) -> Result<backend::Event, SourceError> {
        let state = &mut *self.state.lock_unpoisoned();
        if state.free_events.is_empty() && state.pending.len() >= SWEEP_THRESHOLD {
            let mut still_pending = VecDeque::with_capacity(state.pending.len());
            for (number, event) in state.pending.drain(..) {
                match event.is_done()? {
                    true => state.free_events.push(event),
                    false => still_pending.push_back((number, event)),
                }
            }
            state.pending = still_pending;
        }
        let event = acquire_event(&mut state.free_events, &stream.context)?;
        event.record(stream)?;
        state.last_event += 1;
        state.pending.push_back((state.last_event, event));
        Ok(backend::Event(state.last_event))
    }

    /// Makes later work of `stream` wait for an event.
    pub(crate) fn wait(&self, stream: &CudaStream, event: backend::Event) -> Result<(), SourceError> {
        let state = self.state.lock_unpoisoned();
        // An event that is not pending was passed.
        match state.pending.binary_search_by_key(&event.0, |(number, _)| *number) {
            Ok(at) => stream.wait_event(&state.pending[at].1),
            Err(_) => Ok(()),
        }
    }
}

impl FenceTracker {
    /// Counts enqueued work. Must be called after enqueueing, by the same thread: otherwise that thread's
    /// next fence could be an older one.
    #[inline]
    pub(crate) fn mark_enqueued(&self) {
        self.work_count.fetch_add(1, Ordering::Release);
    }

    /// Records a fence after everything in these streams, which must be all that are in use.
    pub(crate) fn record<'a>(
        &self,
        streams: impl Iterator<Item = &'a CudaStream>,
    ) -> Result<Fence, SourceError> {
        let mut state = self.state.lock_unpoisoned();
        let work = self.work_count.load(Ordering::Acquire);
        if work == state.work_at_last_fence {
            return Ok(Fence(state.last_fence));
        }
        if state.free_events.is_empty() {
            // Events of passed fences are reused before new ones are created.
            while state.pending.front().map_or(Ok(false), all_done)? {
                self.retire_oldest(&mut state);
            }
        }
        let mut events = Vec::new();
        for stream in streams {
            let event = acquire_event(&mut state.free_events, &stream.context)?;
            let recorded = event.record(stream);
            events.push(event);
            if let Err(error) = recorded {
                state.free_events.append(&mut events);
                return Err(error);
            }
        }
        state.pending.push_back(events.into());
        state.last_fence += 1;
        state.work_at_last_fence = work;
        Ok(Fence(state.last_fence))
    }

    pub(crate) fn is_done(&self, fence: Fence) -> Result<bool, SourceError> {
        let Some(events) = self.pending_events(fence)? else { return Ok(true) };
        let done = all_done(&events)?;
        drop(events);
        if done {
            self.retire_through(fence);
        }
        Ok(done)
    }

    pub(crate) fn wait(&self, fence: Fence) -> Result<(), SourceError> {
        if let Some(events) = self.pending_events(fence)? {
            // The thread waits without the lock, so that other threads can enqueue.
            events.iter().try_for_each(|event| event.synchronize())?;
            drop(events);
            self.retire_through(fence);
        }
        Ok(())
    }

    /// Returns the events of a fence; `None` if the fence has been passed.
    fn pending_events(&self, fence: Fence) -> Result<Option<FenceEvents>, SourceError> {
        if fence.0 <= self.last_passed.load(Ordering::Acquire) {
            return Ok(None);
        }
        let state = self.state.lock_unpoisoned();
        if fence.0 > state.last_fence {
            return Err(SourceError::Driver {
                call: "cuEventQuery",
                detail: format!("there is no fence {}; the last is {}", fence.0, state.last_fence),
            });
        }
        let first = state.last_fence + 1 - state.pending.len() as u64;
        Ok(fence.0.checked_sub(first).and_then(|at| state.pending.get(at as usize)).cloned())
    }

    fn retire_through(&self, fence: Fence) {
        let mut state = self.state.lock_unpoisoned();
        while !state.pending.is_empty() && state.last_fence + 1 - state.pending.len() as u64 <= fence.0 {
            self.retire_oldest(&mut state);
        }
    }

    fn retire_oldest(&self, state: &mut FenceState) {
        if let Some(events) = state.pending.pop_front() {
            self.last_passed.store(state.last_fence - state.pending.len() as u64, Ordering::Release);
            // Events on which another thread still waits are not recorded again.
            if Arc::strong_count(&events) == 1 {
                state.free_events.extend(events.iter().cloned());
            }
        }
    }
}

/// Reports whether the device has passed all events of a fence.
fn all_done(events: &FenceEvents) -> Result<bool, SourceError> {
    events.iter().try_fold(true, |done, event| Ok(done && event.is_done()?))
}
