//! Recording what happens to memory: a bounded ring of events inside the pool.
//!
//! While a pool records, it writes one event of fixed size for every request, every free and every call of the device
//! that takes memory or gives it back; the newest `capacity` of them are kept. Nothing is formatted, resolved or
//! allocated on the way (with stacks, the frames of the caller are): that is done by [`Pool::snapshot`].

use std::backtrace::Backtrace;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::Tag;
use super::heap::{AllocRequest, Heap, Slot};
use super::pool::Pool;
use super::pool_state::PoolState;
use super::scope::{ModulePath, Scope};
use super::source::SegmentId;

/// What happened; the names are PyTorch's, but for `free`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// A block was lent.
    Alloc,
    /// A block was given back, and could be lent again at once.
    Free,
    /// A block was given back, and waits for a fence.
    FreeRequested,
    /// Its fence has passed.
    FreeCompleted,
    /// The device gave a segment.
    SegmentAlloc,
    /// The device got a segment back.
    SegmentFree,
    /// Memory was mapped.
    SegmentMap,
    /// Memory was unmapped.
    SegmentUnmap,
    /// A block was copied to another place, from here.
    MovedFrom,
    /// A block was copied from another place, to here.
    MovedTo,
    /// A request could not be served.
    Oom,
}

/// How much a pool records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingOptions {
    /// Events that are kept; each takes about 90 bytes.
    pub capacity: usize,
    /// Whether the stack of every request is captured: some microseconds each, and some kilobytes.
    pub stacks: bool,
}

impl RecordingOptions {
    /// Keeps the newest `capacity` events, without stacks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, stacks: false }
    }

    /// Keeps every event, and grows with them: for what ends soon, such as a dry run.
    #[must_use]
    pub fn unbounded() -> Self {
        Self::new(usize::MAX)
    }

    /// Captures the stack of every request too.
    #[must_use]
    pub fn with_stacks(self) -> Self {
        Self { stacks: true, ..self }
    }
}

impl From<usize> for RecordingOptions {
    fn from(capacity: usize) -> Self {
        Self::new(capacity)
    }
}

/// Where a request came from.
#[derive(Clone, Debug, Default)]
pub(super) struct CallSite {
    pub(super) location: Option<&'static Location<'static>>,
    pub(super) stack: Option<Arc<Backtrace>>,
}

/// Who holds, or held, a block.
#[derive(Clone, Debug, Default)]
pub(super) struct RecordedScope {
    pub(super) tag: Tag,
    pub(super) module: ModulePath,
    pub(super) op: &'static str,
    pub(super) call_site: CallSite,
}

/// Events of one operation at most, from its result's allocation to where it is recorded.
const RETAG_WINDOW: usize = 256;

/// One event.
#[derive(Clone, Debug)]
pub(super) struct RecordedEvent {
    /// Nanoseconds since recording began.
    pub(super) time: u64,
    pub(super) segment: SegmentId,
    pub(super) offset: u64,
    /// Bytes, after rounding.
    pub(super) size: u64,
    /// Bytes, as requested; for [`Action::Oom`], what the device had free.
    pub(super) requested: u64,
    pub(super) action: Action,
    pub(super) queue: u8,
    pub(super) scope: RecordedScope,
}

/// The ring, and what is known of live blocks beyond their slots.
#[derive(Clone, Debug)]
pub(super) struct EventRecorder {
    ring: Vec<RecordedEvent>,
    capacity: usize,
    /// Where the next event goes: behind the newest, in place of the oldest.
    next: usize,
    /// Events so far, those included that the ring has no more.
    total: u64,
    start: Instant,
    /// The same moment, in microseconds of the Unix time.
    pub(super) start_us: u64,
    /// Where the block in each slot came from.
    call_sites: Vec<CallSite>,
    /// The stack of the request that is being served.
    pub(super) current_stack: Option<Arc<Backtrace>>,
}

impl EventRecorder {
    fn new(recording: RecordingOptions) -> Self {
        let capacity = recording.capacity.max(1);
        let start_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        Self {
            ring: if capacity == usize::MAX { Vec::new() } else { Vec::with_capacity(capacity) },
            capacity,
            next: 0,
            total: 0,
            start: Instant::now(),
            start_us,
            call_sites: Vec::new(),
            current_stack: None,
        }
    }

    /// Nanoseconds since recording began.
    #[inline]
    pub(super) fn elapsed_ns(&self) -> u64 {
        let passed = self.start.elapsed();
        passed.as_secs() * 1_000_000_000 + u64::from(passed.subsec_nanos())
    }

    #[inline]
    pub(super) fn push(&mut self, record: RecordedEvent) {
        match self.ring.get_mut(self.next) {
            Some(oldest) => *oldest = record,
            None => self.ring.push(record),
        }
        self.next += 1;
        if self.next == self.capacity {
            self.next = 0;
        }
        self.total += 1;
    }

    /// A block that was lent a few events ago has another tag.
    pub(super) fn retag(&mut self, segment: SegmentId, offset: u64, tag: Tag) {
        let (newer, older) = self.ring.split_at_mut(self.next);
        let lent =
            |r: &&mut RecordedEvent| r.action == Action::Alloc && (r.segment, r.offset) == (segment, offset);
        if let Some(record) = older.iter_mut().chain(newer).rev().take(RETAG_WINDOW).find(lent) {
            record.scope.tag = tag;
        }
    }

    fn newest_mut(&mut self) -> Option<&mut RecordedEvent> {
        let at = self.next.checked_sub(1).unwrap_or(self.capacity - 1);
        self.ring.get_mut(at)
    }

    /// A block was lent in a slot.
    #[inline]
    fn record_call_site(&mut self, slot: u32, line: Option<&'static Location<'static>>) {
        let slot = slot as usize;
        if slot >= self.call_sites.len() {
            self.call_sites.resize(slot + 1, CallSite::default());
        }
        self.call_sites[slot] = CallSite { location: line, stack: self.current_stack.take() };
    }

    /// Where the block in a slot came from; nothing, if it was lent before recording began.
    #[inline]
    pub(super) fn call_site(&self, slot: u32) -> CallSite {
        self.call_sites.get(slot as usize).cloned().unwrap_or_default()
    }

    /// What is kept, in order.
    pub(super) fn events(&self) -> impl DoubleEndedIterator<Item = &RecordedEvent> {
        let (newer, older) = self.ring.split_at(self.next);
        older.iter().chain(newer)
    }

    /// How many events are not kept any more.
    pub(super) fn dropped_events(&self) -> u64 {
        self.total - self.ring.len() as u64
    }
}

/// What the heap tells its recorder. Nobody else sees a block lent or taken back.
impl Heap {
    /// A block was lent.
    #[inline(never)]
    pub(super) fn record_alloc(&mut self, at: u32, need: &AllocRequest) {
        let Some(recorder) = &mut self.recorder else { return };
        recorder.record_call_site(at, need.scope.site);
        self.push_block_event(Action::Alloc, at);
    }

    /// Something happens to a block that is, or was, lent.
    #[inline]
    pub(super) fn record_block(&mut self, action: Action, at: u32) {
        if self.recorder.is_some() {
            self.push_block_event(action, at);
        }
    }

    #[inline(never)]
    fn push_block_event(&mut self, action: Action, at: u32) {
        let Slot { segment, offset, size, requested, tag, module, op, arena, .. } = *self.slot(at);
        let (segment, queue) = (self.segment(segment).id, self.arenas[arena as usize].queue);
        let Some(recorder) = &mut self.recorder else { return };
        let holder = RecordedScope { tag, module, op, call_site: recorder.call_site(at) };
        let time = recorder.elapsed_ns();
        recorder.push(RecordedEvent { time, segment, offset, size, requested, action, queue, scope: holder });
    }

    /// A block in use was moved from another place.
    pub(super) fn record_move(&mut self, at: u32, from: (SegmentId, u64)) {
        self.record_block(Action::MovedFrom, at);
        if let Some(record) = self.recorder.as_mut().and_then(|r| r.newest_mut()) {
            (record.segment, record.offset) = from;
        }
        self.record_block(Action::MovedTo, at);
    }

    /// The pool took memory from the device, or gave it back.
    pub(super) fn record_segment(
        &mut self,
        action: Action,
        segment: SegmentId,
        offset: u64,
        size: u64,
        arena: u16,
    ) {
        let Some(recorder) = &mut self.recorder else { return };
        let (time, queue, holder) =
            (recorder.elapsed_ns(), self.arenas[arena as usize].queue, RecordedScope::default());
        recorder.push(RecordedEvent {
            time,
            segment,
            offset,
            size,
            requested: size,
            action,
            queue,
            scope: holder,
        });
    }

    /// A request was not served.
    pub(super) fn record_oom(&mut self, need: &AllocRequest, device_free: u64) {
        let Some(recorder) = &mut self.recorder else { return };
        let Scope { tag, module, op, site } = *need.scope;
        let site = CallSite { location: site, stack: recorder.current_stack.take() };
        recorder.push(RecordedEvent {
            time: recorder.elapsed_ns(),
            segment: SegmentId(0),
            offset: 0,
            size: need.requested,
            requested: device_free,
            action: Action::Oom,
            queue: self.arenas[need.arena as usize].queue,
            scope: RecordedScope { tag, module, op, call_site: site },
        });
    }
}

/// A block that was lent or taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationChange {
    /// Bytes after rounding; negative where it was taken back.
    pub bytes: i64,
    /// Bytes that are lent after it.
    pub allocated: u64,
    /// Bytes that the pool holds then.
    pub reserved: u64,
    /// What the block was lent for.
    pub scope: Scope,
}

impl PoolState {
    /// The blocks that were lent or taken back while it recorded: undone one by one, from what is so now.
    fn allocation_changes(&self) -> Vec<AllocationChange> {
        let Some(recorder) = &self.heap.recorder else { return Vec::new() };
        let counters = &self.heap.counters;
        let (mut allocated, mut reserved) = (counters.allocated(), counters.reserved());
        let mut changes = Vec::new();
        for record in recorder.events().rev() {
            let size = record.size as i64;
            let bytes = match record.action {
                Action::Alloc => size,
                Action::Free | Action::FreeRequested => -size,
                Action::SegmentAlloc | Action::SegmentMap => {
                    reserved = reserved.saturating_sub(record.size);
                    continue;
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    reserved += record.size;
                    continue;
                }
                Action::FreeCompleted | Action::MovedFrom | Action::MovedTo | Action::Oom => continue,
            };
            let RecordedScope { tag, module, op, call_site: ref site } = record.scope;
            let scope = Scope { tag, module, op, site: site.location };
            changes.push(AllocationChange { bytes, allocated, reserved, scope });
            allocated = allocated.saturating_add_signed(-bytes);
        }
        changes.reverse();
        changes
    }
}

impl Pool {
    /// Starts recording, or starts it anew: `pool.record(100_000)`, or `pool.record(Recording::new(100_000).with_stacks())`.
    /// [`snapshot`](Self::snapshot) has the events.
    pub fn start_recording(&self, recording: impl Into<RecordingOptions>) {
        let recording = recording.into();
        let mut state = self.shared.lock();
        state.heap.recorder = Some(Box::new(EventRecorder::new(recording)));
        self.shared.captures_stacks.store(recording.stacks, Ordering::Relaxed);
    }

    /// The blocks that were lent or taken back while the pool recorded, in order, as far as the events are kept:
    /// figures of this run of the program. [`snapshot`](Self::snapshot) has all that happened, as a value.
    #[must_use]
    pub fn allocation_changes(&self) -> Vec<AllocationChange> {
        self.shared.lock().allocation_changes()
    }

    /// Whether it records.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.shared.lock().heap.recorder.is_some()
    }

    /// Stops recording and forgets what was recorded.
    pub fn stop_recording(&self) {
        let mut state = self.shared.lock();
        state.heap.recorder = None;
        self.shared.captures_stacks.store(false, Ordering::Relaxed);
    }
}
