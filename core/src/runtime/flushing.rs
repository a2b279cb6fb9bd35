//! Flushing backend: the backend as programs get it. It launches the pending fusion group before each call
//! that submits or waits.

use std::sync::Arc;

use crate::backend::{
    Backend, Command, CommandSequence, DeviceInfo, DeviceMemory, DeviceProcess, Event, Fence, KernelId,
    KernelSource, LibraryFeatures, PageRemap, PeerCopy, PendingDownload, SegmentId, SegmentSource, Slice,
    SourceError, SourceLimits, TimestampId,
};
use crate::error::Result;
use crate::forward_backend;
use crate::runtime::device::WeakDevice;

/// Wrapper of a backend, or of one of its queues, that first launches the device's pending operations.
#[derive(Debug)]
pub(crate) struct FlushingBackend {
    device: WeakDevice,
    inner: Arc<dyn Backend>,
}

impl FlushingBackend {
    pub(crate) fn new(device: WeakDevice, inner: Arc<dyn Backend>) -> Self {
        Self { device, inner }
    }

    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    /// Launches pending operations and returns the backend.
    fn flushed_inner(&self) -> &dyn Backend {
        if let Some(device) = self.device.upgrade() {
            // An error of this launch is reported by the device's next operation.
            drop(device.lock_dispatch());
        }
        &*self.inner
    }
}

impl SegmentSource for FlushingBackend {
    forward_backend! {
        inner: limits device_memory library_bytes is_device_memory processes alloc_segment free_segment
            reserve_addresses free_addresses unmap remap map_again unmap_again has_deferred_work
            queue_count
            is_fence_signaled wait_fence
    }
    forward_backend! { flushed_inner: remap_after_submitted record_event wait_event record_fence }
}

impl Backend for FlushingBackend {
    fn wait_fence_then(&self, fence: Fence, done: Box<dyn FnOnce(Result<()>) + Send>) {
        self.inner.wait_fence_then(fence, done);
    }
    forward_backend! {
        inner: info compile wait_compiled supports_pinned_host alloc_host free_host prepare_commands as_any foreign_access
            library_features
    }
    forward_backend! {
        flushed_inner: enqueue upload download start_download flush record_timestamp read_timestamps
    }
    fn copy_from_peer(&self, dst: Slice, source: &dyn Backend, src: Slice) -> Result<PeerCopy> {
        // The other device may have pending operations too.
        source.flush()?;
        self.flushed_inner().copy_from_peer(dst, source, src)
    }
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        let queue = self.inner.open_queue(number)?;
        Ok(queue.map(|inner| Arc::new(Self::new(self.device.clone(), inner)) as Arc<dyn Backend>))
    }
}
