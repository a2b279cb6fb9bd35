//! Host memory that a device copies from and to, as a segment source. A pool over it has the usual rules and
//! statistics, without rounding to powers of two.

use std::sync::Arc;

use super::Backend;
use crate::memory::source::{
    DeviceMemory, Event, Fence, SegmentId, SegmentSource, SourceError, SourceLimits,
};

/// The page-locked (CUDA) or host-visible (wgpu) memory of a backend.
#[derive(Debug)]
pub(crate) struct HostSource(pub(crate) Arc<dyn Backend>);

/// Returns the error of a source without virtual memory.
fn unsupported<T>(call: &'static str) -> Result<T, SourceError> {
    let detail = "memory of the host has no virtual memory of the device's".to_owned();
    Err(SourceError::Driver { call, detail })
}

impl SegmentSource for HostSource {
    fn limits(&self) -> SourceLimits {
        SourceLimits { virtual_memory: None, ..self.0.limits() }
    }
    fn device_memory(&self) -> DeviceMemory {
        DeviceMemory::default()
    }
    fn is_device_memory(&self) -> bool {
        false
    }
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.0.alloc_host(bytes)
    }
    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.0.free_host(segment)
    }
    fn reserve_addresses(&self, _bytes: u64) -> Result<SegmentId, SourceError> {
        unsupported("reserve")
    }
    fn free_addresses(&self, _segment: SegmentId) -> Result<(), SourceError> {
        unsupported("unreserve")
    }
    fn map(&self, _segment: SegmentId, _offset: u64, _bytes: u64) -> Result<(), SourceError> {
        unsupported("map")
    }
    fn unmap(&self, _segment: SegmentId, _offset: u64, _bytes: u64) -> Result<(), SourceError> {
        unsupported("unmap")
    }
    fn queue_count(&self) -> u8 {
        self.0.queue_count()
    }
    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        self.0.record_event(queue)
    }
    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        self.0.wait_event(queue, event)
    }
    fn record_fence(&self) -> Result<Fence, SourceError> {
        self.0.record_fence()
    }
    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError> {
        self.0.is_fence_signaled(fence)
    }
    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError> {
        self.0.wait_fence(fence)
    }
}
