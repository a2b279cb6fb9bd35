//! Recorder of memory events: a bounded ring inside the pool.
//!
//! A recording pool writes one event of fixed size for each allocation, free, and device call that takes or
//! returns memory. The newest `capacity` events are kept. Recording formats, resolves and allocates nothing,
//! except captured stacks; [`Pool::snapshot`] does that.

use std::backtrace::Backtrace;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::Tag;
use super::heap::{AllocRequest, Heap, Slot};
use super::pool::Pool;
use super::scope::Scope;
use super::source::SegmentId;
use crate::platform::{Instant, SystemTime, UNIX_EPOCH};

/// Kind of an event. The names are PyTorch's, except `free`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// A block was allocated.
    Alloc,
    /// A block was freed, and could be reused at once.
    Free,
    /// A block was freed, and waits for a fence.
    FreeRequested,
    /// The fence of a freed block has passed.
    FreeCompleted,
    /// A segment was allocated.
    SegmentAlloc,
    /// A segment was freed.
    SegmentFree,
    /// Memory was mapped.
    SegmentMap,
    /// Memory was unmapped.
    SegmentUnmap,
    /// A block was moved away from this address.
    MovedFrom,
    /// A block was moved to this address.
    MovedTo,
    /// A request failed.
    Oom,
}

impl Action {
    /// Returns the change of allocated or reserved bytes by an event of this kind and size.
    fn change(self, size: u64) -> i64 {
        let size = size as i64;
        match self {
            Self::Alloc | Self::SegmentAlloc | Self::SegmentMap => size,
            Self::Free | Self::FreeRequested | Self::SegmentFree | Self::SegmentUnmap => -size,
            Self::FreeCompleted | Self::MovedFrom | Self::MovedTo | Self::Oom => 0,
        }
    }

    /// Undoes the change of a sum by an event.
    pub(super) fn undo(self, sum: &mut u64, size: u64) {
        match self.change(1) {
            1 => *sum = sum.saturating_sub(size),
            -1 => *sum = sum.saturating_add(size),
            _ => {}
        }
    }

    /// Reports whether the event has a holder, as all but events of segments do.
    pub(super) fn has_holder(self) -> bool {
        !matches!(self, Self::SegmentAlloc | Self::SegmentFree | Self::SegmentMap | Self::SegmentUnmap)
    }
}

/// Recording options of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingOptions {
    /// Number of events kept; each takes about 90 bytes.
    pub capacity: usize,
    /// If true, the stack of every request is captured: some microseconds and some kilobytes each.
    pub stacks: bool,
}

impl RecordingOptions {
    /// Keeps the newest `capacity` events, without stacks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, stacks: false }
    }

    /// Keeps every event, for short runs such as a dry run.
    #[must_use]
    pub fn unbounded() -> Self {
        Self::new(usize::MAX)
    }

    /// Also captures the stack of every request.
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

/// Call site of a request: its line and its stack, as far as they are known.
type CallSite = (Option<&'static Location<'static>>, Option<Arc<Backtrace>>);

/// Scope of a block's allocation, and the stack if stacks are captured.
#[derive(Clone, Debug)]
pub(super) struct RecordedScope {
    pub(super) scope: Scope,
    pub(super) stack: Option<Arc<Backtrace>>,
}

/// Most events to search for the allocation of a block that is retagged: those of one operation.
const RETAG_WINDOW: usize = 256;

#[derive(Clone, Debug)]
pub(super) struct RecordedEvent {
    /// Nanoseconds since recording began.
    pub(super) time: u64,
    pub(super) segment: SegmentId,
    pub(super) offset: u64,
    /// Size in bytes, after rounding.
    pub(super) size: u64,
    /// Bytes requested; for [`Action::Oom`], the device's free memory.
    pub(super) requested: u64,
    pub(super) action: Action,
    pub(super) queue: u8,
    pub(super) holder: RecordedScope,
}

/// The ring of events, and the call sites of allocated blocks.
#[derive(Debug)]
pub(super) struct EventRecorder {
    ring: Vec<RecordedEvent>,
    capacity: usize,
    /// Index of the next event: after the newest one, in place of the oldest.
    next: usize,
    /// Number of events so far, including those overwritten.
    total: u64,
    start: Instant,
    /// `start` in microseconds of the Unix time.
    pub(super) start_us: u64,
    /// Call sites of blocks, by slot.
    call_sites: Vec<CallSite>,
    /// Stack of the request being served.
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

    /// Returns the nanoseconds since recording began.
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

    /// Changes the tag of a block that was allocated a few events ago.
    pub(super) fn retag(&mut self, segment: SegmentId, offset: u64, tag: Tag) {
        let (newer, older) = self.ring.split_at_mut(self.next);
        let is_allocation =
            |r: &&mut RecordedEvent| r.action == Action::Alloc && (r.segment, r.offset) == (segment, offset);
        if let Some(record) = older.iter_mut().chain(newer).rev().take(RETAG_WINDOW).find(is_allocation) {
            record.holder.scope.tag = tag;
        }
    }

    fn newest_mut(&mut self) -> Option<&mut RecordedEvent> {
        let at = self.next.checked_sub(1).unwrap_or(self.capacity - 1);
        self.ring.get_mut(at)
    }

    /// Records the call site of the block in a slot.
    #[inline]
    fn record_call_site(&mut self, slot: u32, line: Option<&'static Location<'static>>) {
        let slot = slot as usize;
        if slot >= self.call_sites.len() {
            self.call_sites.resize(slot + 1, CallSite::default());
        }
        self.call_sites[slot] = (line, self.current_stack.take());
    }

    /// Returns the holder of the block in a slot; without a call site if the block was allocated before recording
    /// began.
    #[inline]
    pub(super) fn holder(&self, at: u32, &Slot { tag, module, op, .. }: &Slot) -> RecordedScope {
        let (site, stack) = self.call_sites.get(at as usize).cloned().unwrap_or_default();
        RecordedScope { scope: Scope { tag, module, op, site }, stack }
    }

    /// Iterates over the kept events, in order.
    pub(super) fn events(&self) -> impl DoubleEndedIterator<Item = &RecordedEvent> {
        let (newer, older) = self.ring.split_at(self.next);
        older.iter().chain(newer)
    }

    /// Returns the number of events that were overwritten.
    pub(super) fn dropped_events(&self) -> u64 {
        self.total - self.ring.len() as u64
    }
}

/// Events that the heap reports to its recorder. All allocations and frees pass through the heap.
impl Heap {
    #[inline(never)]
    pub(super) fn record_alloc(&mut self, at: u32, need: &AllocRequest) {
        let Some(recorder) = &mut self.recorder else { return };
        recorder.record_call_site(at, need.scope.site);
        self.push_block_event(Action::Alloc, at);
    }

    /// Records an event of a block that is or was allocated.
    #[inline]
    pub(super) fn record_block(&mut self, action: Action, at: u32) {
        if self.recorder.is_some() {
            self.push_block_event(action, at);
        }
    }

    #[inline(never)]
    fn push_block_event(&mut self, action: Action, at: u32) {
        let slot = *self.slot(at);
        let Slot { segment, offset, size, requested, arena, .. } = slot;
        let (segment, queue) = (self.segment(segment).id, self.arenas[arena as usize].queue);
        let Some(recorder) = &mut self.recorder else { return };
        let (time, holder) = (recorder.elapsed_ns(), recorder.holder(at, &slot));
        recorder.push(RecordedEvent { time, segment, offset, size, requested, action, queue, holder });
    }

    /// Records that a block in use was moved.
    pub(super) fn record_move(&mut self, at: u32, from: (SegmentId, u64)) {
        self.record_block(Action::MovedFrom, at);
        if let Some(record) = self.recorder.as_mut().and_then(|r| r.newest_mut()) {
            (record.segment, record.offset) = from;
        }
        self.record_block(Action::MovedTo, at);
    }

    /// Records that the pool took or returned device memory.
    pub(super) fn record_segment(
        &mut self,
        action: Action,
        segment: SegmentId,
        offset: u64,
        size: u64,
        arena: u16,
    ) {
        let Some(recorder) = &mut self.recorder else { return };
        let (time, queue) = (recorder.elapsed_ns(), self.arenas[arena as usize].queue);
        let (requested, holder) = (size, RecordedScope { scope: Scope::NONE, stack: None });
        recorder.push(RecordedEvent { time, segment, offset, size, requested, action, queue, holder });
    }

    /// Records a failed request.
    pub(super) fn record_oom(&mut self, need: &AllocRequest, device_free: u64) {
        let Some(recorder) = &mut self.recorder else { return };
        let holder = RecordedScope { scope: *need.scope, stack: recorder.current_stack.take() };
        recorder.push(RecordedEvent {
            time: recorder.elapsed_ns(),
            segment: SegmentId(0),
            offset: 0,
            size: need.requested,
            requested: device_free,
            action: Action::Oom,
            queue: self.arenas[need.arena as usize].queue,
            holder,
        });
    }
}

/// An allocation or a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationChange {
    /// Bytes after rounding; negative for a free.
    pub bytes: i64,
    /// Allocated bytes after it.
    pub allocated: u64,
    /// Reserved bytes after it.
    pub reserved: u64,
    /// Scope of the block's allocation.
    pub scope: Scope,
}

impl Pool {
    /// Starts recording and drops earlier events: `pool.start_recording(100_000)`, or with stacks
    /// `pool.start_recording(RecordingOptions::new(100_000).with_stacks())`. [`snapshot`](Self::snapshot)
    /// returns the events.
    pub fn start_recording(&self, recording: impl Into<RecordingOptions>) {
        let recording = recording.into();
        let mut state = self.shared.lock();
        state.heap.recorder = Some(Box::new(EventRecorder::new(recording)));
        self.shared.captures_stacks.store(recording.stacks, Ordering::Relaxed);
    }

    /// Returns the recorded allocations and frees, in order, as far as their events are kept.
    /// [`snapshot`](Self::snapshot) returns all events.
    #[must_use]
    pub fn allocation_changes(&self) -> Vec<AllocationChange> {
        let state = self.shared.lock();
        let Some(recorder) = &state.heap.recorder else { return Vec::new() };
        // Reconstructed backwards from the current totals.
        let (mut allocated, mut reserved) = (state.heap.counters.allocated(), state.heap.counters.reserved());
        let mut changes = Vec::new();
        for RecordedEvent { action, size, holder, .. } in recorder.events().rev() {
            let bytes = action.change(*size);
            if !action.has_holder() {
                reserved = reserved.saturating_add_signed(-bytes);
            } else if bytes != 0 {
                changes.push(AllocationChange { bytes, allocated, reserved, scope: holder.scope });
                allocated = allocated.saturating_add_signed(-bytes);
            }
        }
        changes.reverse();
        changes
    }

    /// Reports whether the pool is recording.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.shared.lock().heap.recorder.is_some()
    }

    /// Stops recording and drops the recorded events.
    pub fn stop_recording(&self) {
        let mut state = self.shared.lock();
        state.heap.recorder = None;
        self.shared.captures_stacks.store(false, Ordering::Relaxed);
    }
}
