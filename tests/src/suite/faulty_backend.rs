//! Backend that fails allocations from a chosen call on, or downloads, or limits bindings, and forwards everything
//! else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay::backend::{
    Backend, Command, DeviceInfo, DeviceMemory, DeviceProcess, Event, Fence, KernelId, KernelSource,
    LibraryFeatures, PageRemap, SegmentId, SegmentSource, Slice, SourceError, SourceLimits,
};
use forebay::error::{Error, Result};
use forebay::forward_backend;

/// Text of the error of a failed download.
pub(super) const NO_DOWNLOAD: &str = "the test allows none";

/// Backend described in the module's documentation.
#[derive(Debug)]
pub(super) struct FaultyBackend {
    inner: Arc<dyn Backend>,
    info: DeviceInfo,
    /// Number of allocation calls that still succeed.
    remaining_calls: AtomicU64,
    fails_downloads: AtomicBool,
}

impl FaultyBackend {
    pub(super) fn new(inner: Arc<dyn Backend>) -> Self {
        Self {
            info: inner.info().clone(),
            inner,
            remaining_calls: AtomicU64::new(u64::MAX),
            fails_downloads: AtomicBool::new(false),
        }
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

    /// Fails all downloads from now on, or no longer.
    pub(super) fn fail_downloads(&self, on: bool) {
        self.fails_downloads.store(on, Ordering::Relaxed);
    }

    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn take_call(&self, bytes: u64) -> Result<(), SourceError> {
        let less = |left: u64| left.checked_sub(1);
        match self.remaining_calls.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Ok(_) => Ok(()),
            Err(_) => Err(SourceError::OutOfMemory { bytes, detail: "requested by the test".to_owned() }),
        }
    }
}

impl SegmentSource for FaultyBackend {
    forward_backend! {
        inner: limits device_memory is_device_memory processes free_segment reserve_addresses
            free_addresses unmap queue_count record_event wait_event record_fence is_fence_signaled
            wait_fence
    }
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.take_call(bytes)?;
        self.inner.alloc_segment(bytes)
    }
    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        self.take_call(pieces.iter().map(|p| p.bytes).sum()).or_else(|full| {
            // On failure, the pages to move are unmapped.
            let moved =
                pieces.iter().filter_map(|p| p.from.map(|(segment, offset)| (segment, offset, p.bytes)));
            for (segment, offset, bytes) in moved {
                self.inner.unmap(segment, offset, &[bytes])?;
            }
            Err(full)
        })?;
        self.inner.remap(pieces)
    }
}

impl Backend for FaultyBackend {
    forward_backend! {
        inner: compile wait_compiled enqueue upload flush supports_pinned_host free_host library_features
    }
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        if self.fails_downloads.load(Ordering::Relaxed) {
            return Err(Error::argument("download", NO_DOWNLOAD));
        }
        self.inner.download(src, data)
    }
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        self.inner.open_queue(number)
    }
    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.take_call(bytes)?;
        self.inner.alloc_host(bytes)
    }
}
