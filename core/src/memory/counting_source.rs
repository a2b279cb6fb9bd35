//! Source without memory: it counts calls and bytes. Null devices and replays of traces take segments from it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use super::source::{DeviceMemory, Fence, PageRemap, SegmentId, SegmentSource, SourceError, SourceLimits};
use crate::sync::LockUnpoisoned;

/// Source that provides addresses only. Its fences have always passed.
#[derive(Debug)]
pub(crate) struct CountingSource {
    limits: SourceLimits,
    queues: u8,
    /// Memory of the simulated device.
    total_bytes: u64,
    /// Bytes that all segments together may have.
    available_bytes: u64,
    used_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    calls: AtomicU64,
    last_id: AtomicU64,
    segment_sizes: Mutex<FxHashMap<SegmentId, u64>>,
}

impl CountingSource {
    pub(crate) fn new(limits: SourceLimits, queues: u8, total_bytes: u64, available_bytes: u64) -> Self {
        Self {
            limits,
            queues,
            total_bytes,
            available_bytes,
            used_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            last_id: AtomicU64::new(0),
            segment_sizes: Mutex::default(),
        }
    }

    #[cfg(feature = "traces")]
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of calls that took, moved or returned memory.
    #[cfg(feature = "traces")]
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns an id that no segment has.
    pub(crate) fn next_id(&self) -> SegmentId {
        SegmentId(self.last_id.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Counts a call that takes memory.
    fn take_bytes(&self, bytes: u64) -> Result<(), SourceError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let before = self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > self.available_bytes {
            self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            let detail = format!("{before} of {} bytes are in use", self.available_bytes);
            return Err(SourceError::OutOfMemory { bytes, detail });
        }
        self.peak_bytes.fetch_max(before + bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Counts a call that returns memory.
    fn return_bytes(&self, bytes: u64) -> Result<(), SourceError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl SegmentSource for CountingSource {
    fn limits(&self) -> SourceLimits {
        self.limits
    }
    fn device_memory(&self) -> DeviceMemory {
        let used = self.used_bytes.load(Ordering::Relaxed);
        DeviceMemory { total: Some(self.total_bytes), free: Some(self.available_bytes - used) }
    }
    fn is_device_memory(&self) -> bool {
        false
    }
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.take_bytes(bytes)?;
        let id = self.next_id();
        self.segment_sizes.lock_unpoisoned().insert(id, bytes);
        Ok(id)
    }
    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        let bytes = self.segment_sizes.lock_unpoisoned().remove(&segment);
        self.return_bytes(bytes.unwrap_or_default())
    }
    fn reserve_addresses(&self, _bytes: u64) -> Result<SegmentId, SourceError> {
        Ok(self.next_id())
    }
    fn free_addresses(&self, _segment: SegmentId) -> Result<(), SourceError> {
        Ok(())
    }
    fn unmap(&self, _segment: SegmentId, _offset: u64, pieces: &[u64]) -> Result<(), SourceError> {
        self.return_bytes(pieces.iter().sum())
    }
    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        let moved: u64 = pieces.iter().filter(|p| p.from.is_some()).map(|p| p.bytes).sum();
        self.used_bytes.fetch_sub(moved, Ordering::Relaxed);
        self.take_bytes(pieces.iter().map(|p| p.bytes).sum())
    }
    fn map_again(&self, _pieces: &[PageRemap]) -> Result<(), SourceError> {
        self.take_bytes(0)
    }
    fn unmap_again(&self, _segment: SegmentId, _pieces: &[u64]) -> Result<(), SourceError> {
        self.return_bytes(0)
    }
    fn queue_count(&self) -> u8 {
        self.queues
    }
    fn record_fence(&self) -> Result<Fence, SourceError> {
        Ok(Fence(0))
    }
    fn is_fence_signaled(&self, _fence: Fence) -> Result<bool, SourceError> {
        Ok(true)
    }
    fn wait_fence(&self, _fence: Fence) -> Result<(), SourceError> {
        Ok(())
    }
}
