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
use super::pool::Pool;
use super::scope::ModulePath;
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
    /// A request could not be served.
    Oom,
}

/// How much a pool records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recording {
    /// Events that are kept; each takes 80 bytes.
    pub capacity: usize,
    /// Whether the stack of every request is captured: some microseconds each, and some kilobytes.
    pub stacks: bool,
}

impl Recording {
    /// Keeps the newest `capacity` events, without stacks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, stacks: false }
    }

    /// Captures the stack of every request too.
    #[must_use]
    pub fn with_stacks(self) -> Self {
        Self { stacks: true, ..self }
    }
}

impl From<usize> for Recording {
    fn from(capacity: usize) -> Self {
        Self::new(capacity)
    }
}

/// Where a request came from.
#[derive(Clone, Debug, Default)]
pub(super) struct Site {
    pub(super) line: Option<&'static Location<'static>>,
    pub(super) stack: Option<Arc<Backtrace>>,
}

/// Who holds, or held, a block.
#[derive(Clone, Debug, Default)]
pub(super) struct Holder {
    pub(super) tag: Tag,
    pub(super) module: ModulePath,
    pub(super) op: &'static str,
    pub(super) site: Site,
}

/// One event.
#[derive(Clone, Debug)]
pub(super) struct Record {
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
    pub(super) holder: Holder,
}

/// The ring, and what is known of live blocks beyond their slots.
#[derive(Debug)]
pub(super) struct Recorder {
    ring: Vec<Record>,
    capacity: usize,
    /// Events so far, those included that the ring has no more.
    total: u64,
    start: Instant,
    /// The same moment, in microseconds of the Unix time.
    pub(super) start_us: u64,
    /// Where the block in each slot came from.
    sites: Vec<Site>,
    /// The stack of the request that is being served.
    pub(super) stack: Option<Arc<Backtrace>>,
}

impl Recorder {
    fn new(recording: Recording) -> Self {
        let capacity = recording.capacity.max(1);
        let start_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        Self {
            ring: Vec::with_capacity(capacity),
            capacity,
            total: 0,
            start: Instant::now(),
            start_us,
            sites: Vec::new(),
            stack: None,
        }
    }

    /// Nanoseconds since recording began.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        let passed = self.start.elapsed();
        passed.as_secs() * 1_000_000_000 + u64::from(passed.subsec_nanos())
    }

    #[inline]
    pub(super) fn push(&mut self, record: Record) {
        if self.ring.len() < self.capacity {
            self.ring.push(record);
        } else {
            let at = (self.total % self.capacity as u64) as usize;
            self.ring[at] = record;
        }
        self.total += 1;
    }

    /// A block was lent in a slot.
    #[inline]
    pub(super) fn lent(&mut self, slot: u32, line: Option<&'static Location<'static>>) -> Site {
        let site = Site { line, stack: self.stack.take() };
        let slot = slot as usize;
        if slot >= self.sites.len() {
            self.sites.resize(slot + 1, Site::default());
        }
        self.sites[slot].clone_from(&site);
        site
    }

    /// Where the block in a slot came from; nothing, if it was lent before recording began.
    #[inline]
    pub(super) fn site(&self, slot: u32) -> Site {
        self.sites.get(slot as usize).cloned().unwrap_or_default()
    }

    /// What is kept, in order.
    pub(super) fn records(&self) -> impl Iterator<Item = &Record> {
        let oldest = if self.total > self.capacity as u64 { self.total % self.capacity as u64 } else { 0 };
        let (newer, older) = self.ring.split_at(oldest as usize);
        older.iter().chain(newer)
    }

    /// How many events are not kept any more.
    pub(super) fn dropped(&self) -> u64 {
        self.total - self.ring.len() as u64
    }
}

impl Pool {
    /// Starts recording, or starts it anew: `pool.record(100_000)`, or `pool.record(Recording::new(100_000).with_stacks())`.
    /// [`snapshot`](Self::snapshot) has the events.
    pub fn record(&self, recording: impl Into<Recording>) {
        let recording = recording.into();
        let mut state = self.shared.lock();
        state.heap.recorder = Some(Box::new(Recorder::new(recording)));
        self.shared.stacks.store(recording.stacks, Ordering::Relaxed);
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
        self.shared.stacks.store(false, Ordering::Relaxed);
    }
}
