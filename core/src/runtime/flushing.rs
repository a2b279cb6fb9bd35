//! Flushing backend: the backend as programs get it. It launches the pending fusion group before each call
//! that submits or waits.

use std::sync::Arc;

use crate::backend::{
    AttentionCall, Backend, Command, CommandSequence, DeviceInfo, Event, Fence, KernelId, KernelLibrary,
    KernelSource, Launch, LibraryFeatures, MatmulCall, SegmentId, Slice, TimestampId,
};
use crate::error::Result;
use crate::memory::source::{
    DeviceMemory, DeviceProcess, PageRemap, SegmentSource, SourceError, SourceLimits,
};
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
    fn limits(&self) -> SourceLimits {
        self.inner.limits()
    }
    fn device_memory(&self) -> DeviceMemory {
        self.inner.device_memory()
    }
    fn library_bytes(&self) -> u64 {
        self.inner.library_bytes()
    }
    fn is_device_memory(&self) -> bool {
        self.inner.is_device_memory()
    }
    fn processes(&self) -> Vec<DeviceProcess> {
        self.inner.processes()
    }
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.inner.alloc_segment(bytes)
    }
    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.inner.free_segment(segment)
    }
    fn reserve_addresses(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.inner.reserve_addresses(bytes)
    }
    fn free_addresses(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.inner.free_addresses(segment)
    }
    fn map(&self, segment: SegmentId, offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.inner.map(segment, offset, bytes)
    }
    fn unmap(&self, segment: SegmentId, offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.inner.unmap(segment, offset, bytes)
    }
    fn unmap_extents(&self, segment: SegmentId, offset: u64, pieces: &[u64]) -> Result<(), SourceError> {
        self.inner.unmap_extents(segment, offset, pieces)
    }
    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        self.inner.remap(pieces)
    }
    fn remap_after_submitted(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        self.flushed_inner().remap_after_submitted(pieces)
    }
    fn has_deferred_work(&self) -> bool {
        self.inner.has_deferred_work()
    }
    fn queue_count(&self) -> u8 {
        self.inner.queue_count()
    }
    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        self.flushed_inner().record_event(queue)
    }
    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        self.flushed_inner().wait_event(queue, event)
    }
    fn record_fence(&self) -> Result<Fence, SourceError> {
        self.flushed_inner().record_fence()
    }
    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError> {
        self.inner.is_fence_signaled(fence)
    }
    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError> {
        self.inner.wait_fence(fence)
    }
}

impl Backend for FlushingBackend {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        self.inner.compile(source)
    }
    fn wait_compiled(&self, kernel: KernelId) -> Result<()> {
        self.inner.wait_compiled(kernel)
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.flushed_inner().launch(launch)
    }
    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()> {
        self.flushed_inner().upload(dst, data)
    }
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        self.flushed_inner().download(src, data)
    }
    fn copy(&self, dst: Slice, src: Slice) -> Result<()> {
        self.flushed_inner().copy(dst, src)
    }
    fn fill(&self, dst: Slice, word: u32) -> Result<()> {
        self.flushed_inner().fill(dst, word)
    }
    fn flush(&self) -> Result<()> {
        self.flushed_inner().flush()
    }
    fn record_timestamp(&self) -> Result<Option<TimestampId>> {
        self.flushed_inner().record_timestamp()
    }
    fn read_timestamps(&self) -> Result<Vec<f64>> {
        self.flushed_inner().read_timestamps()
    }
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        let queue = self.inner.open_queue(number)?;
        Ok(queue.map(|inner| Arc::new(Self::new(self.device.clone(), inner)) as Arc<dyn Backend>))
    }
    fn supports_pinned_host(&self) -> bool {
        self.inner.supports_pinned_host()
    }
    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.inner.alloc_host(bytes)
    }
    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.inner.free_host(segment)
    }
    fn library(&self) -> Option<&dyn KernelLibrary> {
        self.inner.library().map(|_| self as &dyn KernelLibrary)
    }
    fn prepare_commands(&self, commands: &[Command<'_>]) -> Result<Option<Box<dyn CommandSequence>>> {
        self.inner.prepare_commands(commands)
    }
}

impl KernelLibrary for FlushingBackend {
    fn features(&self) -> LibraryFeatures {
        self.inner.library().map_or_else(LibraryFeatures::default, KernelLibrary::features)
    }
    fn matmul(&self, call: &MatmulCall) -> Result<bool> {
        Command::Matmul(call).enqueue(self.flushed_inner())
    }
    fn attention(&self, call: &AttentionCall) -> Result<bool> {
        Command::Attention(call).enqueue(self.flushed_inner())
    }
}
