//! Host memory that a device copies from and to, as a segment source. A pool over it has the usual rules and
//! statistics, without rounding to powers of two.

use std::sync::Arc;

use super::Backend;
use crate::forward_backend;
use crate::memory::source::{
    DeviceMemory, Event, Fence, SegmentId, SegmentSource, SourceError, SourceLimits,
};

/// The page-locked (CUDA) or host-visible (wgpu) memory of a backend.
#[derive(Debug)]
pub(crate) struct HostSource(pub(crate) Arc<dyn Backend>);

impl HostSource {
    fn backend(&self) -> &dyn Backend {
        &*self.0
    }
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
    forward_backend! { backend: queue_count record_event wait_event record_fence is_fence_signaled wait_fence }
}
