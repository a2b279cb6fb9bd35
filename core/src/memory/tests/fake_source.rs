//! A simulated segment source that checks the pool's contract.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

use super::pool_model::DeviceContents;
use crate::memory::compaction::{BlockMove, BlockMover, HeldDispatch};
use crate::memory::source::{
    DeviceMemory, DeviceProcess, Event, Fence, MAX_QUEUES, PageRemap, SegmentId, SegmentSource, SourceError,
    SourceLimits, VirtualMemory,
};
use crate::memory::{self, Block, Pool, Request};
use crate::sync::LockUnpoisoned;

/// Number of calls of a [`FakeSource`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SourceCalls {
    /// Calls of `alloc_segment`.
    pub(crate) alloc: u64,
    /// Calls of `free_segment`.
    pub(crate) free: u64,
    /// Calls of `reserve_addresses` and `free_addresses`.
    pub(crate) reserve: u64,
    /// Calls of `map` and `remap`.
    pub(crate) map: u64,
    /// Calls of `unmap` and `unmap_extents`.
    pub(crate) unmap: u64,
    /// Pieces of `remap` that moved.
    pub(crate) moved_pieces: u64,
    /// Calls of `map_again` and `unmap_again`.
    pub(crate) map_again: u64,
    /// Calls of `remap_after_submitted`.
    pub(crate) remaps_after_submitted: u64,
    /// Bytes of blocks that were copied.
    pub(crate) copied_bytes: u64,
    /// Calls of `wait_fence`.
    pub(crate) fence_waits: u64,
}

impl SourceCalls {
    /// Returns the number of calls that take or return memory.
    pub(crate) fn memory_calls(&self) -> u64 {
        self.alloc + self.free + self.map + self.unmap + self.map_again
    }
}

#[derive(Debug, Default)]
struct FakeDeviceState {
    last_id: u64,
    /// Plain segments and their sizes.
    segments: HashMap<SegmentId, u64>,
    /// Ranges, their sizes and their extents: offset to size.
    ranges: HashMap<SegmentId, (u64, BTreeMap<u64, u64>)>,
    used: u64,
    peak: u64,
    calls: SourceCalls,
    /// Injected failures of `alloc_segment`, `map` and `reserve_addresses`, counted from now: 0 is the next
    /// call.
    failures: Vec<(u64, SourceError)>,
    submitted: u64,
    signaled: u64,
    has_manual_fences: bool,
    has_deferred_work: bool,
    /// Second mappings: where the memory is mapped first, and its size.
    second_mappings: BTreeMap<(SegmentId, u64), ((SegmentId, u64), u64)>,
    /// Violations of the contract by the pool.
    violations: Vec<String>,
    /// Queues of the events so far.
    events: Vec<u8>,
    /// Last event waited for, by (queue of the event, waiting queue).
    waits: HashMap<(u8, u8), u64>,
    /// Contents of mapped memory, by segment and offset of the piece; absent if contents are not kept.
    contents: Option<BTreeMap<(SegmentId, u64), Vec<u8>>>,
    /// Other processes on the device.
    processes: Vec<DeviceProcess>,
}

/// A simulated device of `capacity` bytes that checks the pool's contract. Fences pass at once by default.
#[derive(Debug)]
pub(crate) struct FakeSource {
    capacity: u64,
    limits: SourceLimits,
    is_device_memory: bool,
    state: Mutex<FakeDeviceState>,
}

impl FakeSource {
    /// Creates a device with plain segments only.
    pub(crate) fn plain(capacity: u64) -> Self {
        let limits = SourceLimits { alignment: 256, max_segment: u64::MAX, virtual_memory: None };
        Self { capacity, limits, is_device_memory: false, state: Mutex::default() }
    }

    /// Sets the size of the largest segment in bytes.
    #[must_use]
    pub(crate) fn with_max_segment(mut self, bytes: u64) -> Self {
        self.limits.max_segment = bytes;
        self
    }

    /// Creates a device with virtual memory in pages of 2 MiB.
    pub(crate) fn paged(capacity: u64) -> Self {
        let reservation = (capacity + capacity / 8).next_multiple_of(2 << 20);
        let virtual_memory = Some(VirtualMemory { granularity: 2 << 20, reservation });
        let limits = SourceLimits { alignment: 512, max_segment: u64::MAX, virtual_memory };
        Self { capacity, limits, is_device_memory: false, state: Mutex::default() }
    }

    /// Changes the limits.
    pub(crate) fn with_limits(mut self, change: impl FnOnce(&mut SourceLimits)) -> Self {
        change(&mut self.limits);
        self
    }

    /// Keeps contents, for [`write`](Self::write) and [`read`](Self::read).
    pub(crate) fn with_contents(self) -> Self {
        self.lock().contents = Some(BTreeMap::new());
        self
    }

    /// Makes its memory count towards the limit of the process.
    pub(crate) fn with_device_memory(mut self) -> Self {
        self.is_device_memory = true;
        self
    }

    /// Adds other processes, which hold the bytes that they report.
    pub(crate) fn with_processes(self, processes: Vec<DeviceProcess>) -> Self {
        {
            let mut state = self.lock();
            state.used += processes.iter().filter_map(|p| p.bytes).sum::<u64>();
            state.processes = processes;
        }
        self
    }

    /// Writes to a segment. Writing to unmapped addresses is an error.
    pub(crate) fn write(&self, segment: SegmentId, offset: u64, data: &[u8]) -> Result<(), SourceError> {
        self.lock().for_each_mapping(segment, offset, data.len(), |at, piece| {
            piece.copy_from_slice(&data[at..at + piece.len()]);
        })
    }

    /// Reads from a segment. Reading from unmapped addresses is an error.
    pub(crate) fn read(&self, segment: SegmentId, offset: u64, data: &mut [u8]) -> Result<(), SourceError> {
        self.lock().for_each_mapping(segment, offset, data.len(), |at, piece| {
            data[at..at + piece.len()].copy_from_slice(piece);
        })
    }

    fn lock(&self) -> MutexGuard<'_, FakeDeviceState> {
        self.state.lock_unpoisoned()
    }

    /// Returns the number of recorded events.
    pub(crate) fn recorded_events(&self) -> u64 {
        self.lock().events.len() as u64
    }

    /// Returns the last event of queue `from` that queue `to` was told to wait for, counted from 1.
    pub(crate) fn last_waited_event(&self, from: u8, to: u8) -> Option<u64> {
        self.lock().waits.get(&(from, to)).copied()
    }

    /// Returns the calls so far.
    pub(crate) fn calls(&self) -> SourceCalls {
        self.lock().calls
    }

    /// Returns the bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.lock().used
    }

    /// Returns the peak of the bytes in use.
    pub(crate) fn peak(&self) -> u64 {
        self.lock().peak
    }

    /// Returns the pool's violations of the contract.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Makes the `nth` call from now of `alloc_segment`, `reserve_addresses` or `map` fail; 0 is the next
    /// one.
    pub(crate) fn fail_nth_call(&self, nth: u64, error: SourceError) {
        self.lock().failures.push((nth, error));
    }

    /// Makes fences pass only on [`signal_fence`](Self::signal_fence), or when they are waited for.
    pub(crate) fn set_manual_fences(&self) {
        self.lock().has_manual_fences = true;
    }

    /// Simulates deferred work: memory is remapped after submitted work, without waiting on the host.
    pub(crate) fn set_deferred_work(&self) {
        self.lock().has_deferred_work = true;
    }

    /// Makes the device pass every fence up to this one.
    pub(crate) fn signal_fence(&self, fence: Fence) {
        let mut state = self.lock();
        state.signaled = state.signaled.max(fence.0);
    }
}

impl FakeDeviceState {
    fn take_failure(&mut self) -> Result<(), SourceError> {
        let due = self.failures.iter().position(|f| f.0 == 0);
        for failure in &mut self.failures {
            failure.0 = failure.0.saturating_sub(1);
        }
        due.map_or(Ok(()), |at| Err(self.failures.swap_remove(at).1))
    }

    fn take_bytes(&mut self, bytes: u64, capacity: u64) -> Result<(), SourceError> {
        self.take_failure()?;
        if self.used.saturating_add(bytes) > capacity {
            let detail = format!("{} of {capacity} bytes are free", capacity - self.used);
            return Err(SourceError::OutOfMemory { bytes, detail });
        }
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
    }

    /// Calls `each` for every part of a range of memory, with the part's offset in the range.
    fn for_each_mapping(
        &mut self,
        segment: SegmentId,
        offset: u64,
        length: usize,
        mut each: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SourceError> {
        let mut done = 0;
        while done < length {
            let at = offset + done as u64;
            let second = self.second_mappings.range((segment, 0)..=(segment, at)).next_back();
            let (segment, at) = match second {
                Some((&(_, start), &(first, bytes))) if at < start + bytes => (first.0, first.1 + at - start),
                _ => (segment, at),
            };
            let pieces =
                self.contents.as_mut().and_then(|c| c.range_mut((segment, 0)..=(segment, at)).next_back());
            let inside = pieces.and_then(|((_, start), bytes)| bytes.get_mut((at - start) as usize..));
            let Some(bytes) = inside.filter(|b| !b.is_empty()) else {
                return Err(self.record_violation(format!("{segment:?} has no memory at {at}")));
            };
            let count = bytes.len().min(length - done);
            each(done, &mut bytes[..count]);
            done += count;
        }
        Ok(())
    }

    /// Adds contents of new memory, which is not zeroed, as on a device.
    fn add_contents(&mut self, segment: SegmentId, offset: u64, bytes: u64) {
        if let Some(contents) = &mut self.contents {
            contents.insert((segment, offset), vec![0xa5; bytes as usize]);
        }
    }

    fn remove_contents(&mut self, segment: SegmentId, offset: u64) {
        if let Some(contents) = &mut self.contents {
            contents.remove(&(segment, offset));
        }
    }

    fn record_violation(&mut self, what: String) -> SourceError {
        self.violations.push(what.clone());
        SourceError::Driver { call: "fake", detail: what }
    }

    /// Maps a piece of memory in a range.
    fn insert_mapping(&mut self, to: (SegmentId, u64), bytes: u64, page: u64) -> Result<(), SourceError> {
        let (segment, offset) = to;
        let fits = self.ranges.get(&segment).is_some_and(|(size, mapped)| {
            let before = mapped.range(..offset + bytes).next_back().map_or(0, |(o, b)| o + b);
            before <= offset
                && offset + bytes <= *size
                && offset.is_multiple_of(page)
                && bytes.is_multiple_of(page)
        });
        if !fits || bytes == 0 {
            return Err(self.record_violation(format!("map of {segment:?} at {offset}, {bytes} bytes")));
        }
        if let Some((_, mapped)) = self.ranges.get_mut(&segment) {
            mapped.insert(offset, bytes);
        }
        self.add_contents(segment, offset, bytes);
        Ok(())
    }

    /// Unmaps a piece of memory of a range.
    fn remove_mapping(&mut self, from: (SegmentId, u64), bytes: u64) -> Result<(), SourceError> {
        let (segment, offset) = from;
        let gone = self.ranges.get_mut(&segment).and_then(|(_, mapped)| mapped.remove(&offset));
        if gone != Some(bytes) {
            let what = format!("unmap of {segment:?} at {offset}, {bytes} bytes: {gone:?} there");
            return Err(self.record_violation(what));
        }
        if !self.has_deferred_work && self.second_mappings.values().any(|(first, _)| *first == from) {
            return Err(self.record_violation(format!("{from:?} has a second mapping")));
        }
        self.remove_contents(segment, offset);
        Ok(())
    }

    fn next_id(&mut self) -> SegmentId {
        self.last_id += 1;
        SegmentId(self.last_id)
    }
}

impl BlockMover for FakeSource {
    fn lock_dispatch(&self) -> Box<dyn HeldDispatch + '_> {
        Box::new(())
    }

    fn enqueue_copies(&self, queue: u8, moves: &[BlockMove]) -> memory::Result<()> {
        let others = || (0..MAX_QUEUES).filter(|other| *other != queue);
        for other in others() {
            self.wait_event(queue, self.record_event(other)?)?;
        }
        for BlockMove { from, to, bytes } in moves {
            if self.lock().contents.is_some() {
                let mut data = vec![0; *bytes as usize];
                self.read(from.0, from.1, &mut data)?;
                self.write(to.0, to.1, &data)?;
            }
            self.lock().calls.copied_bytes += bytes;
        }
        let done = self.record_event(queue)?;
        Ok(others().try_for_each(|other| self.wait_event(other, done))?)
    }
}

impl SegmentSource for FakeSource {
    fn limits(&self) -> SourceLimits {
        self.limits
    }

    fn device_memory(&self) -> DeviceMemory {
        DeviceMemory { total: Some(self.capacity), free: Some(self.capacity - self.used()) }
    }

    fn is_device_memory(&self) -> bool {
        self.is_device_memory
    }

    fn processes(&self) -> Vec<DeviceProcess> {
        self.lock().processes.clone()
    }

    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        let mut state = self.lock();
        state.calls.alloc += 1;
        if bytes > self.limits.max_segment {
            return Err(state.record_violation(format!("a segment of {bytes} bytes is too large")));
        }
        state.take_bytes(bytes, self.capacity)?;
        let id = state.next_id();
        state.segments.insert(id, bytes);
        state.add_contents(id, 0, bytes);
        Ok(id)
    }

    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        let mut state = self.lock();
        state.calls.free += 1;
        match state.segments.remove(&segment) {
            Some(bytes) => {
                state.used -= bytes;
                state.remove_contents(segment, 0);
            }
            None => return Err(state.record_violation(format!("{segment:?} was freed but is not there"))),
        }
        Ok(())
    }

    fn reserve_addresses(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        let mut state = self.lock();
        state.calls.reserve += 1;
        state.take_failure()?;
        let id = state.next_id();
        state.ranges.insert(id, (bytes, BTreeMap::new()));
        Ok(id)
    }

    fn free_addresses(&self, segment: SegmentId) -> Result<(), SourceError> {
        let mut state = self.lock();
        state.calls.reserve += 1;
        match state.ranges.remove(&segment) {
            Some((_, mapped)) if mapped.is_empty() => Ok(()),
            other => Err(state.record_violation(format!("unreserve of {segment:?}: {other:?}"))),
        }
    }

    fn unmap(&self, segment: SegmentId, offset: u64, pieces: &[u64]) -> Result<(), SourceError> {
        let mut state = self.lock();
        state.calls.unmap += 1;
        let mut at = offset;
        for bytes in pieces {
            state.remove_mapping((segment, at), *bytes)?;
            state.used -= bytes;
            at += bytes;
        }
        Ok(())
    }

    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        let mut state = self.lock();
        state.calls.map += 1;
        for PageRemap { from, bytes, .. } in pieces {
            if let Some(from) = *from {
                state.calls.moved_pieces += 1;
                state.remove_mapping(from, *bytes)?;
                state.used -= bytes;
            }
        }
        state.take_bytes(pieces.iter().map(|p| p.bytes).sum(), self.capacity)?;
        let page = self.limits.virtual_memory.map_or(1, |v| v.granularity);
        pieces.iter().try_for_each(|p| state.insert_mapping(p.to, p.bytes, page))
    }

    fn map_again(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        let mut state = self.lock();
        state.calls.map_again += 1;
        state.take_failure()?;
        for PageRemap { to, bytes, from } in pieces {
            let mapped = |from: &(SegmentId, u64)| state.ranges.get(&from.0)?.1.get(&from.1).copied();
            let there = from.as_ref().and_then(mapped);
            let Some(from) = from.filter(|_| there == Some(*bytes)) else {
                return Err(state.record_violation(format!("second mapping of {from:?}, {bytes} bytes")));
            };
            state.second_mappings.insert(*to, (from, *bytes));
        }
        Ok(())
    }

    fn unmap_again(&self, segment: SegmentId, pieces: &[u64]) -> Result<(), SourceError> {
        let mut state = self.lock();
        state.calls.map_again += 1;
        let mut at = 0;
        for bytes in pieces {
            if state.second_mappings.remove(&(segment, at)).map(|s| s.1) != Some(*bytes) {
                return Err(state.record_violation(format!("{segment:?} has no second mapping at {at}")));
            }
            at += bytes;
        }
        Ok(())
    }

    fn has_deferred_work(&self) -> bool {
        self.lock().has_deferred_work
    }

    fn remap_after_submitted(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        self.lock().calls.remaps_after_submitted += 1;
        self.remap(pieces)
    }

    fn queue_count(&self) -> u8 {
        MAX_QUEUES
    }

    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        let events = &mut self.lock().events;
        events.push(queue);
        Ok(Event(events.len() as u64))
    }

    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        let mut state = self.lock();
        let from = event.0.checked_sub(1).and_then(|at| state.events.get(at as usize).copied());
        match from {
            Some(from) => {
                let last = state.waits.entry((from, queue)).or_default();
                *last = event.0.max(*last);
            }
            None => state.violations.push(format!("there is no {event:?}")),
        }
        Ok(())
    }

    fn record_fence(&self) -> Result<Fence, SourceError> {
        let mut state = self.lock();
        state.submitted += 1;
        if !state.has_manual_fences {
            state.signaled = state.submitted;
        }
        Ok(Fence(state.submitted))
    }

    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError> {
        Ok(self.lock().signaled >= fence.0)
    }

    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError> {
        let mut state = self.lock();
        state.calls.fence_waits += 1;
        state.signaled = state.signaled.max(fence.0);
        Ok(())
    }
}

impl DeviceContents for FakeSource {
    fn write(&self, block: &Block, data: &[u8]) -> memory::Result<()> {
        Ok(self.write(block.segment, block.offset, data)?)
    }

    fn read(&self, block: &Block, data: &mut [u8]) -> memory::Result<()> {
        Ok(self.read(block.segment, block.offset, data)?)
    }

    fn source(&self) -> &dyn SegmentSource {
        self
    }

    fn event_count(&self) -> u64 {
        self.recorded_events()
    }

    fn waits_for(&self, from: u8, to: u8, after: u64) -> bool {
        self.last_waited_event(from, to).is_some_and(|last| last > after)
    }

    fn signal_fence(&self, fence: Fence) -> memory::Result<()> {
        self.signal_fence(fence);
        Ok(())
    }

    fn make_movable(&self, request: Request) -> Request {
        request.movable()
    }

    fn move_count(&self, pool: &Pool) -> u64 {
        pool.move_count()
    }

    fn refresh_location(&self, pool: &Pool, block: &mut Block) {
        pool.refresh_location(block);
    }
}
