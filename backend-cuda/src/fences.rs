//! Fences: numbers for points in the stream, each backed by an event from a pool.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_core::backend::{Fence, SourceError};

use crate::context::{Event, Stream};

/// The fences of one stream.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    /// Counts what has been enqueued; a fence with no work behind the last one is the last one again.
    work: AtomicU64,
    /// All fences up to this number have been passed.
    passed: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the last fence; 0 before the first.
    last: u64,
    /// `work` when the last fence was recorded.
    covered: u64,
    /// Events of fences that may not have been passed yet, oldest first, numbered up to `last` without gaps.
    pending: VecDeque<Arc<Event>>,
    /// Events to use again.
    spare: Vec<Arc<Event>>,
}

impl Fences {
    /// Says that something has been enqueued. Called after the enqueueing, by the same thread: a fence that is taken
    /// later by that thread must not be mistaken for an older one.
    #[inline]
    pub(crate) fn enqueued(&self) {
        self.work.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<Fence, SourceError> {
        let mut state = self.lock();
        let work = self.work.load(Ordering::Acquire);
        if work == state.covered {
            return Ok(Fence(state.last));
        }
        let event = match state.spare.pop() {
            Some(event) => event,
            None => {
                // Passed fences give their events back before a new one is made.
                while state.pending.front().map_or(Ok(false), |event| event.done())? {
                    self.pass_front(&mut state);
                }
                match state.spare.pop() {
                    Some(event) => event,
                    None => Arc::new(Event::new(&stream.context)?),
                }
            }
        };
        if let Err(error) = event.record(stream) {
            state.spare.push(event);
            return Err(error);
        }
        state.pending.push_back(event);
        state.last += 1;
        state.covered = work;
        Ok(Fence(state.last))
    }

    pub(crate) fn done(&self, fence: Fence) -> Result<bool, SourceError> {
        match self.event(fence)? {
            None => Ok(true),
            Some(event) => {
                let done = event.done()?;
                drop(event);
                if done {
                    self.pass(fence);
                }
                Ok(done)
            }
        }
    }

    pub(crate) fn wait(&self, fence: Fence) -> Result<(), SourceError> {
        if let Some(event) = self.event(fence)? {
            // Without the lock: other threads go on enqueueing.
            event.wait()?;
            drop(event);
            self.pass(fence);
        }
        Ok(())
    }

    /// The event of a fence; `None` if the fence has been passed.
    fn event(&self, fence: Fence) -> Result<Option<Arc<Event>>, SourceError> {
        if fence.0 <= self.passed.load(Ordering::Acquire) {
            return Ok(None);
        }
        let state = self.lock();
        if fence.0 > state.last {
            return Err(SourceError::Driver {
                call: "cuEventQuery",
                detail: format!("there is no fence {}; the last is {}", fence.0, state.last),
            });
        }
        let first = state.last + 1 - state.pending.len() as u64;
        Ok(fence.0.checked_sub(first).and_then(|at| state.pending.get(at as usize)).cloned())
    }

    fn pass(&self, fence: Fence) {
        let mut state = self.lock();
        while !state.pending.is_empty() && state.last + 1 - state.pending.len() as u64 <= fence.0 {
            self.pass_front(&mut state);
        }
    }

    fn pass_front(&self, state: &mut State) {
        if let Some(event) = state.pending.pop_front() {
            self.passed.store(state.last - state.pending.len() as u64, Ordering::Release);
            // An event that another thread still waits on is not recorded again.
            if Arc::strong_count(&event) == 1 {
                state.spare.push(event);
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
