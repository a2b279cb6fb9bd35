//! Staging memory: a bounded ring of mapped buffers for uploads, and a few buffers for downloads.

use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::Duration;

use forebay_core::backend::SourceError;
use forebay_core::error::Result as CoreResult;
use forebay_core::sync::LockUnpoisoned;

use crate::gpu::{Gpu, to_single_line};

/// Bytes of one upload buffer.
const CHUNK_BYTES: u64 = 4 << 20;
/// Maximum number of upload buffers; when all of them are in flight, an upload waits for the device.
const MAX_CHUNKS: usize = 8;
/// Interval and number of waits for an upload buffer that another thread is about to return.
const WAIT_INTERVAL: Duration = Duration::from_millis(10);
const MAX_WAITS: usize = 20;
/// Maximum bytes of one download; larger ones are split.
pub(crate) const MAX_READBACK_BYTES: u64 = 16 << 20;
/// Size of the smallest download buffer, so that all small downloads share one.
const MIN_READBACK_BYTES: u64 = 64 << 10;
/// Maximum number of cached download buffers.
const MAX_CACHED_READBACKS: usize = 2;

/// A mapped upload buffer, and the bytes used of it.
#[derive(Debug)]
struct UploadChunk {
    buffer: wgpu::Buffer,
    used: u64,
}

/// Upload buffers that were mapped again, and a condition variable for threads that wait for one.
#[derive(Debug, Default)]
struct ReturnQueue {
    inner: Mutex<ReturnedBuffers>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct ReturnedBuffers {
    mapped: Vec<wgpu::Buffer>,
    /// Buffers that could not be mapped again, because the device was lost or a callback of the program panicked.
    lost: usize,
}

/// Returns a buffer to the queue when it is dropped. If a callback of the program panics, wgpu drops other callbacks
/// without calling them.
struct ReturningBuffer {
    returns: Arc<ReturnQueue>,
    mapped: Option<wgpu::Buffer>,
}

impl ReturningBuffer {
    /// Returns the buffer; `None` if it was not mapped.
    fn finish(mut self, mapped: Option<wgpu::Buffer>) {
        self.mapped = mapped;
    }
}

impl Drop for ReturningBuffer {
    fn drop(&mut self) {
        let mut returned = self.returns.inner.lock_unpoisoned();
        match self.mapped.take() {
            Some(buffer) => returned.mapped.push(buffer),
            None => returned.lost += 1,
        }
        self.returns.arrived.notify_all();
    }
}

/// The ring of upload buffers.
#[derive(Debug, Default)]
pub(crate) struct StagingBelt {
    open: Option<UploadChunk>,
    /// Full buffers that unsubmitted commands read.
    closed: Vec<wgpu::Buffer>,
    returns: Arc<ReturnQueue>,
    buffer_count: usize,
}

impl StagingBelt {
    /// Provides room for at least one word; returns `false` if the device has to pass a submission first.
    pub(crate) fn ensure_space(&mut self, gpu: &Gpu) -> Result<bool, SourceError> {
        if let Some(chunk) = self.open.take_if(|chunk| chunk.used >= CHUNK_BYTES) {
            self.close(gpu, chunk);
        }
        if self.open.is_some() {
            return Ok(true);
        }
        let reused = {
            let mut returned = self.returns.inner.lock_unpoisoned();
            // A buffer that was replaced counts no longer.
            self.buffer_count = self.buffer_count.saturating_sub(std::mem::take(&mut returned.lost));
            returned.mapped.pop()
        };
        let buffer = match reused {
            Some(buffer) => buffer,
            None if self.buffer_count >= MAX_CHUNKS => return Ok(false),
            None => {
                let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
                match gpu.create_buffer("forebay upload", CHUNK_BYTES, usage, true) {
                    Ok(buffer) => {
                        self.buffer_count += 1;
                        buffer
                    }
                    // Out of memory is no failure while other buffers can be waited for.
                    Err(SourceError::OutOfMemory { .. }) if self.buffer_count > 0 => return Ok(false),
                    Err(error) => return Err(error),
                }
            }
        };
        self.open = Some(UploadChunk { buffer, used: 0 });
        Ok(true)
    }

    /// Returns the free bytes of the open buffer.
    pub(crate) fn open_bytes(&self) -> u64 {
        self.open.as_ref().map_or(0, |chunk| CHUNK_BYTES - chunk.used)
    }

    /// Copies as much of `data` as fits into the open buffer, and records its copy to `dst`. Returns the
    /// bytes taken.
    pub(crate) fn write(
        &mut self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        dst: &wgpu::Buffer,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, SourceError> {
        let Some(chunk) = &mut self.open else { return Ok(0) };
        let len = data.len().min((CHUNK_BYTES - chunk.used) as usize);
        let bytes = len as u64;
        let mut view = chunk
            .buffer
            .get_mapped_range_mut(chunk.used..chunk.used + bytes)
            .map_err(|error| gpu.refusal("get_mapped_range", to_single_line(&error)))?;
        view.copy_from_slice(&data[..len]);
        drop(view);
        encoder.copy_buffer_to_buffer(&chunk.buffer, chunk.used, dst, offset, bytes);
        chunk.used = (chunk.used + bytes).next_multiple_of(wgpu::MAP_ALIGNMENT);
        Ok(len)
    }

    fn close(&mut self, gpu: &Gpu, chunk: UploadChunk) {
        gpu.collect_errors(|| chunk.buffer.unmap());
        self.closed.push(chunk.buffer);
    }

    /// Unmaps the buffers that the commands about to be submitted read.
    pub(crate) fn unmap_for_submit(&mut self, gpu: &Gpu) {
        if let Some(chunk) = self.open.take_if(|chunk| chunk.used > 0) {
            self.close(gpu, chunk);
        }
    }

    /// Requests that the buffers are mapped again; a later poll completes the requests.
    pub(crate) fn map_after_submit(&mut self, gpu: &Gpu) {
        for buffer in self.closed.drain(..) {
            let returning = ReturningBuffer { returns: Arc::clone(&self.returns), mapped: None };
            let mapped = buffer.clone();
            gpu.collect_errors(|| {
                buffer.map_async(wgpu::MapMode::Write, .., move |result| {
                    returning.finish(result.ok().map(|()| mapped));
                });
            });
        }
    }

    /// Blocks until a buffer returns. The device has passed the buffer already: another thread may have polled and be
    /// about to return the buffer. That thread may run a callback of the program that waits for this thread, so
    /// after [`MAX_WAITS`] waits a new buffer replaces the missing one.
    pub(crate) fn wait_for_buffer(&mut self, gpu: &Gpu) -> Result<(), SourceError> {
        for _ in 0..MAX_WAITS {
            gpu.poll()?;
            let returned = self.returns.inner.lock_unpoisoned();
            let is_empty = |returned: &mut ReturnedBuffers| returned.mapped.is_empty() && returned.lost == 0;
            let waited = self.returns.arrived.wait_timeout_while(returned, WAIT_INTERVAL, is_empty);
            if !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
                return Ok(());
            }
        }
        self.buffer_count -= 1;
        Ok(())
    }
}

/// Free download buffers.
#[derive(Debug, Default)]
pub(crate) struct ReadbackPool {
    free: Mutex<Vec<wgpu::Buffer>>,
}

impl ReadbackPool {
    /// Returns a buffer of at least `bytes` bytes. Buffers above [`MAX_READBACK_BYTES`] are not cached.
    pub(crate) fn acquire(&self, gpu: &Gpu, bytes: u64) -> Result<wgpu::Buffer, SourceError> {
        {
            let mut free = self.free.lock_unpoisoned();
            if let Some(found) = free.iter().position(|buffer| buffer.size() >= bytes) {
                return Ok(free.swap_remove(found));
            }
        }
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        // A power of two above the cached sizes could be above the device's limit.
        let size = match bytes {
            0..=MAX_READBACK_BYTES => bytes.next_power_of_two().max(MIN_READBACK_BYTES),
            _ => bytes.next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT),
        };
        gpu.create_buffer("forebay download", size, usage, false)
    }

    /// Reads a buffer whose copy was submitted as `submission` (`None`: the device has passed it), and caches
    /// the buffer. Blocks.
    pub(crate) fn read_and_release(
        &self,
        gpu: &Gpu,
        buffer: wgpu::Buffer,
        submission: Option<wgpu::SubmissionIndex>,
        data: &mut [u8],
    ) -> Result<(), SourceError> {
        let bytes = data.len() as u64;
        let (sender, receiver) = mpsc::channel();
        gpu.collect_errors(|| {
            buffer.map_async(wgpu::MapMode::Read, ..bytes, move |result| {
                // The receiver is dropped only if waiting failed, and the caller gets that error.
                let _ = sender.send(result);
            });
        });
        let mut answer = None;
        let is_mapped = || {
            answer = answer.take().or_else(|| receiver.try_recv().ok());
            answer.is_some()
        };
        match submission {
            Some(submission) => gpu.wait(submission, is_mapped)?,
            None => gpu.poll()?,
        }
        match answer.map_or_else(|| receiver.recv(), Ok) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(gpu.refusal("map_async", to_single_line(&error))),
            // A callback of the program panicked, so wgpu dropped the answer: the view tells if the buffer is mapped.
            Err(_) => gpu.check_health()?,
        }
        self.take_mapped(gpu, buffer, data)
    }

    /// Calls `done` with the bytes of a buffer once its copy is complete, and caches the buffer. Does not block.
    pub(crate) fn read_then(
        self: Arc<Self>,
        gpu: Arc<Gpu>,
        buffer: wgpu::Buffer,
        bytes: usize,
        done: Box<dyn FnOnce(CoreResult<Vec<u8>>) + Send>,
    ) {
        let mapped = buffer.clone();
        buffer.map_async(wgpu::MapMode::Read, ..bytes as u64, move |result| {
            let mut data = vec![0; bytes];
            let read = gpu.check_health().and_then(|()| match result {
                Ok(()) => self.take_mapped(&gpu, mapped, &mut data),
                Err(error) => Err(gpu.refusal("map_async", to_single_line(&error))),
            });
            done(read.map(|()| data).map_err(Into::into));
        });
    }

    /// Copies the bytes of a mapped buffer, and caches the buffer.
    fn take_mapped(&self, gpu: &Gpu, buffer: wgpu::Buffer, data: &mut [u8]) -> Result<(), SourceError> {
        let view = buffer
            .get_mapped_range(..data.len() as u64)
            .map_err(|error| gpu.refusal("get_mapped_range", to_single_line(&error)))?;
        data.copy_from_slice(&view);
        drop(view);
        buffer.unmap();
        if buffer.size() > MAX_READBACK_BYTES {
            return Ok(());
        }
        let mut free = self.free.lock_unpoisoned();
        free.push(buffer);
        if free.len() > MAX_CACHED_READBACKS {
            // The largest buffers serve every later download.
            free.sort_by_key(|buffer| std::cmp::Reverse(buffer.size()));
            free.truncate(MAX_CACHED_READBACKS);
        }
        Ok(())
    }
}
