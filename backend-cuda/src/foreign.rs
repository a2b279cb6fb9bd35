//! Memory and streams shared with other CUDA libraries of the process, such as PyTorch.
//!
//! All of them use the device's primary context, so addresses and streams of one are valid in the other.

use cudarc::driver::sys::CUstream;
use forebay_core::backend::{ForeignAccess, SegmentId, Slice};
use forebay_core::error::Result;
use forebay_core::tensor::dlpack::DL_CUDA;

use crate::backend::{BLOCK_ALIGNMENT, CudaBackend, slice_address};
use crate::context::CudaEvent;

/// Converts DLPack's number of a stream to a handle; 1 and 2 are the driver's names of the default streams.
fn to_stream(stream: u64) -> CUstream {
    std::ptr::with_exposed_provenance_mut(stream as usize)
}

impl ForeignAccess for CudaBackend {
    fn dlpack_device(&self) -> (i32, i32) {
        (DL_CUDA, forebay_core::backend::Backend::info(self).index as i32)
    }

    fn address(&self, slice: Slice) -> u64 {
        slice_address(slice)
    }

    fn slice_at(&self, address: u64, bytes: u64) -> Slice {
        // A segment's id is its address.
        let offset = address % BLOCK_ALIGNMENT;
        Slice { segment: SegmentId(address - offset), offset, bytes }
    }

    fn stream(&self) -> Result<u64> {
        Ok(self.drained_stream()?.flushed_handle()?.expose_provenance() as u64)
    }

    unsafe fn signal_stream(&self, stream: u64) -> Result<()> {
        let own_stream = self.drained_stream()?;
        let event = CudaEvent::new(&own_stream.context)?;
        event.record(own_stream)?;
        // SAFETY: the caller's promise. The driver keeps a destroyed event until its waits are over.
        Ok(unsafe { event.make_foreign_wait(to_stream(stream)) }?)
    }

    unsafe fn wait_for_stream(&self, stream: u64) -> Result<()> {
        let own_stream = self.drained_stream()?;
        let event = CudaEvent::new(&own_stream.context)?;
        // SAFETY: the caller's promise.
        unsafe { event.record_foreign(to_stream(stream)) }?;
        own_stream.wait_event(&event)?;
        self.mark_enqueued();
        Ok(())
    }

    fn synchronize_context(&self) -> Result<()> {
        Ok(self.drained_stream()?.context.synchronize()?)
    }
}
