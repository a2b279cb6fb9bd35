//! Backend that forwards to the wgpu backend, and suspends the module where a call must wait.

use std::sync::{Arc, Mutex, PoisonError};

use forebay::backend::{
    Backend, Command, CommandSequence, DeviceInfo, DeviceMemory, Fence, KernelId, KernelSource, PageRemap,
    PendingDownload, SegmentId, SegmentSource, Slice, SourceError, SourceLimits,
};
use forebay::error::Result;
use forebay::forward_backend;

// The page's module suspends the calling stack until the event loop has run.
#[link(wasm_import_module = "./suspend.js")]
unsafe extern "C" {
    safe fn suspend();
}

/// Function that receives the result of a wait.
type Callback<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// Starts a wait, and suspends the module until its callback is called.
fn suspend_until<T: Send + 'static>(start: impl FnOnce(Callback<T>)) -> Result<T> {
    let result = Arc::new(Mutex::new(None));
    let to = Arc::clone(&result);
    start(Box::new(move |found| *to.lock().unwrap_or_else(PoisonError::into_inner) = Some(found)));
    loop {
        if let Some(found) = result.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return found;
        }
        suspend();
    }
}

/// The backend.
#[derive(Debug)]
pub(crate) struct SuspendingBackend(pub(crate) Arc<dyn Backend>);

impl SuspendingBackend {
    fn inner(&self) -> &dyn Backend {
        &*self.0
    }
}

impl SegmentSource for SuspendingBackend {
    forward_backend! {
        inner: limits device_memory alloc_segment free_segment reserve_addresses free_addresses unmap remap record_fence
            is_fence_signaled
    }
    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError> {
        suspend_until(|done| self.0.wait_fence_then(fence, done))
            .map_err(|error| SourceError::Driver { call: "wait_fence", detail: error.to_string() })
    }
}

impl Backend for SuspendingBackend {
    forward_backend! {
        inner: info compile wait_compiled enqueue upload start_download flush prepare_commands as_any
    }
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        let pending = self.0.start_download(src)?;
        let bytes = suspend_until(|done| pending.finish_then(data.len(), done))?;
        data.copy_from_slice(&bytes);
        Ok(())
    }
    fn wait_fence_then(&self, fence: Fence, done: Box<dyn FnOnce(Result<()>) + Send>) {
        self.0.wait_fence_then(fence, done);
    }
}
