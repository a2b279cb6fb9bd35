//! Fences: numbers for points in all streams at once, for the host; and events: points in one, for the others. Both are
//! backed by the driver's events, from a pool.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use forebay_core::backend::{self, Fence, SourceError};

use crate::context::{Context, Event, Stream};
use crate::lock;

/// The driver's events of one point: one for each stream.
type Point = Arc<[Arc<Event>]>;

/// The fences of a device.
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
    pending: VecDeque<Point>,
    /// Events to use again.
    spare: Vec<Arc<Event>>,
}

impl State {
    fn event(&mut self, context: &Arc<Context>) -> Result<Arc<Event>, SourceError> {
        self.spare.pop().map_or_else(|| Event::new(context).map(Arc::new), Ok)
    }
}

/// Points in single streams.
#[derive(Debug, Default)]
pub(crate) struct Events {
    state: Mutex<Points>,
}

#[derive(Debug, Default)]
struct Points {
    last: u64,
    /// Those that may not have been passed yet, by number.
    pending: VecDeque<(u64, Arc<Event>)>,
    spare: Vec<Arc<Event>>,
}

/// Points are looked through for passed ones when there are so many.
const MANY: usize = 64;

impl Events {
    /// A point behind everything in `stream`.
    pub(crate) fn record(&self, stream: &Stream) -> Result<backend::Event, SourceError> {
        let points = &mut *lock(&self.state);
        if points.spare.is_empty() && points.pending.len() >= MANY {
            let mut kept = VecDeque::with_capacity(points.pending.len());
            for (number, event) in points.pending.drain(..) {
                match event.done()? {
                    true => points.spare.push(event),
                    false => kept.push_back((number, event)),
                }
            }
            points.pending = kept;
        }
        let event = match points.spare.pop() {
            Some(event) => event,
            None => Arc::new(Event::new(&stream.context)?),
        };
        event.record(stream)?;
        points.last += 1;
        points.pending.push_back((points.last, event));
        Ok(backend::Event(points.last))
    }

    /// Lets `stream` wait for a point.
    pub(crate) fn wait(&self, stream: &Stream, event: backend::Event) -> Result<(), SourceError> {
        let points = lock(&self.state);
        // One that is not there was passed.
        match points.pending.binary_search_by_key(&event.0, |(number, _)| *number) {
            Ok(at) => stream.wait(&points.pending[at].1),
            Err(_) => Ok(()),
        }
    }
}

impl Fences {
    /// Says that something has been enqueued. Called after the enqueueing, by the same thread: a fence that is taken
    /// later by that thread must not be mistaken for an older one.
    #[inline]
    pub(crate) fn enqueued(&self) {
        self.work.fetch_add(1, Ordering::Release);
    }

    /// A fence behind everything in these streams: all that are in use.
    pub(crate) fn record<'a>(&self, streams: impl Iterator<Item = &'a Stream>) -> Result<Fence, SourceError> {
        let mut state = lock(&self.state);
        let work = self.work.load(Ordering::Acquire);
        if work == state.covered {
            return Ok(Fence(state.last));
        }
        if state.spare.is_empty() {
            // Passed fences give their events back before new ones are made.
            while state.pending.front().map_or(Ok(false), done)? {
                self.pass_front(&mut state);
            }
        }
        let mut point = Vec::new();
        for stream in streams {
            let event = state.event(&stream.context)?;
            let recorded = event.record(stream);
            point.push(event);
            if let Err(error) = recorded {
                state.spare.append(&mut point);
                return Err(error);
            }
        }
        state.pending.push_back(point.into());
        state.last += 1;
        state.covered = work;
        Ok(Fence(state.last))
    }

    pub(crate) fn done(&self, fence: Fence) -> Result<bool, SourceError> {
        match self.point(fence)? {
            None => Ok(true),
            Some(point) => {
                let done = done(&point)?;
                drop(point);
                if done {
                    self.pass(fence);
                }
                Ok(done)
            }
        }
    }

    pub(crate) fn wait(&self, fence: Fence) -> Result<(), SourceError> {
        if let Some(point) = self.point(fence)? {
            // Without the lock: other threads go on enqueueing.
            point.iter().try_for_each(|event| event.wait())?;
            drop(point);
            self.pass(fence);
        }
        Ok(())
    }

    /// The events of a fence; `None` if the fence has been passed.
    fn point(&self, fence: Fence) -> Result<Option<Point>, SourceError> {
        if fence.0 <= self.passed.load(Ordering::Acquire) {
            return Ok(None);
        }
        let state = lock(&self.state);
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
        let mut state = lock(&self.state);
        while !state.pending.is_empty() && state.last + 1 - state.pending.len() as u64 <= fence.0 {
            self.pass_front(&mut state);
        }
    }

    fn pass_front(&self, state: &mut State) {
        if let Some(point) = state.pending.pop_front() {
            self.passed.store(state.last - state.pending.len() as u64, Ordering::Release);
            // Events that another thread still waits on are not recorded again.
            if Arc::strong_count(&point) == 1 {
                state.spare.extend(point.iter().cloned());
            }
        }
    }
}

/// Whether the device has passed all events of a point.
fn done(point: &Point) -> Result<bool, SourceError> {
    for event in point.iter() {
        if !event.done()? {
            return Ok(false);
        }
    }
    Ok(true)
}
