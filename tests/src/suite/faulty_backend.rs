//! Backend that fails allocations from a chosen call on, or limits bindings, and forwards everything else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay::backend::{
    Backend, DeviceInfo, DeviceMemory, DeviceProcess, Event, Fence, KernelId, KernelLibrary, KernelSource,
    Launch, PageRemap, SegmentId, SegmentSource, Slice, SourceError, SourceLimits,
};
use forebay::error::Result;

/// Backend described in the module's documentation.
#[derive(Debug)]
pub(super) struct FaultyBackend {
    inner: Arc<dyn Backend>,
    info: DeviceInfo,
    /// Number of allocation calls that still succeed.
    remaining_calls: AtomicU64,
}

impl FaultyBackend {
    pub(super) fn new(inner: Arc<dyn Backend>) -> Self {
        Self { info: inner.info().clone(), inner, remaining_calls: AtomicU64::new(u64::MAX) }
    }

    /// Creates a backend whose kernels bind at most this many buffers.
    pub(super) fn with_bindings(inner: Arc<dyn Backend>, bindings: u32) -> Self {
        let mut faulty = Self::new(inner);
        faulty.info.limits.max_bindings = faulty.info.limits.max_bindings.min(bindings);
        faulty
    }

    /// Lets this many more allocation calls succeed; later ones fail until the next call of this function.
    pub(super) fn allow_calls(&self, calls: u64) {
        self.remaining_calls.store(calls, Ordering::Relaxed);
    }

    fn take_call(&self, bytes: u64) -> Result<(), SourceError> {
        let less = |left: u64| left.checked_sub(1);
        match self.remaining_calls.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Ok(_) => Ok(()),
            Err(_) => Err(SourceError::OutOfMemory { bytes, detail: "the test said so".to_owned() }),
        }
    }
}

impl SegmentSource for FaultyBackend {
    fn limits(&self) -> SourceLimits {
        self.inner.limits()
    }
    fn device_memory(&self) -> DeviceMemory {
        self.inner.device_memory()
    }
    fn is_device_memory(&self) -> bool {
        self.inner.is_device_memory()
    }
    fn processes(&self) -> Vec<DeviceProcess> {
        self.inner.processes()
    }
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.take_call(bytes)?;
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
        self.take_call(bytes)?;
        self.inner.map(segment, offset, bytes)
    }
    fn unmap(&self, segment: SegmentId, offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.inner.unmap(segment, offset, bytes)
    }
    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        self.take_call(pieces.iter().map(|p| p.bytes).sum()).or_else(|full| {
            // On failure, the pages to move are unmapped.
            let moved =
                pieces.iter().filter_map(|p| p.from.map(|(segment, offset)| (segment, offset, p.bytes)));
            for (segment, offset, bytes) in moved {
                self.inner.unmap(segment, offset, bytes)?;
            }
            Err(full)
        })?;
        self.inner.remap(pieces)
    }
    fn queue_count(&self) -> u8 {
        self.inner.queue_count()
    }
    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        self.inner.record_event(queue)
    }
    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        self.inner.wait_event(queue, event)
    }
    fn record_fence(&self) -> Result<Fence, SourceError> {
        self.inner.record_fence()
    }
    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError> {
        self.inner.is_fence_signaled(fence)
    }
    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError> {
        self.inner.wait_fence(fence)
    }
}

impl Backend for FaultyBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        self.inner.compile(source)
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.inner.launch(launch)
    }
    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()> {
        self.inner.upload(dst, data)
    }
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        self.inner.download(src, data)
    }
    fn copy(&self, dst: Slice, src: Slice) -> Result<()> {
        self.inner.copy(dst, src)
    }
    fn fill(&self, dst: Slice, word: u32) -> Result<()> {
        self.inner.fill(dst, word)
    }
    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        self.inner.open_queue(number)
    }
    fn supports_pinned_host(&self) -> bool {
        self.inner.supports_pinned_host()
    }
    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.take_call(bytes)?;
        self.inner.alloc_host(bytes)
    }
    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.inner.free_host(segment)
    }
    fn library(&self) -> Option<&dyn KernelLibrary> {
        self.inner.library()
    }
}
