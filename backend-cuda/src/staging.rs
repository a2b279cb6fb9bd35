//! Copies between host and device through page-locked memory.
//!
//! The driver's copies of pageable memory may block, depending on size and system. Staging gives uploads the
//! same contract everywhere: the bytes have been read when the call returns, and the device copies them
//! asynchronously.

use std::sync::{Arc, Mutex};

use forebay_core::backend::{PendingDownload, SourceError};
use forebay_core::error::Result;
use forebay_core::sync::LockUnpoisoned;

use crate::context::{Context, CudaEvent, CudaStream, PinnedBuffer};

const CHUNK_BYTES: usize = 4 << 20;
/// Maximum number of chunks in the upload ring.
const MAX_UPLOAD_CHUNKS: usize = 4;
/// Alignment of uploads in bytes, for fast DMA.
const UPLOAD_ALIGNMENT: usize = 256;

/// A chunk of staging memory and the event after the device's last use of the chunk.
#[derive(Debug)]
pub(crate) struct StagingChunk {
    memory: PinnedBuffer,
    copied: CudaEvent,
}

impl StagingChunk {
    fn new(context: &Arc<Context>) -> Result<Self, SourceError> {
        Ok(Self { memory: PinnedBuffer::new(context, CHUNK_BYTES)?, copied: CudaEvent::new(context)? })
    }
}

/// A ring of staging chunks for uploads. The ring grows with use up to its full size.
#[derive(Debug, Default)]
pub(crate) struct UploadRing {
    chunks: Vec<StagingChunk>,
    /// Index of the chunk that is being filled.
    current: usize,
    /// Bytes used of the current chunk.
    used: usize,
}

impl UploadRing {
    /// Enqueues a copy of `data` to `dst` on the device; `data` has been read when this returns.
    pub(crate) fn upload(&mut self, stream: &CudaStream, dst: u64, data: &[u8]) -> Result<(), SourceError> {
        let mut done = 0;
        while done < data.len() {
            if (self.chunks.is_empty() || self.used >= CHUNK_BYTES)
                && let Err(error) = self.next_chunk(stream)
            {
                return self.upload_unstaged(stream, dst + done as u64, &data[done..], error);
            }
            let part = &data[done..data.len().min(done + CHUNK_BYTES - self.used)];
            let chunk = &mut self.chunks[self.current];
            // SAFETY: `next_chunk` waited until the device was done with the chunk, and no copy since then
            // uses bytes from `used` on.
            let staged = unsafe { chunk.memory.write(self.used, part) };
            let staged = staged.ok_or(OUT_OF_CHUNK)?;
            self.used = (self.used + part.len()).next_multiple_of(UPLOAD_ALIGNMENT);
            // SAFETY: the staged bytes stay until `next_chunk` has waited for this copy.
            unsafe { stream.copy_from_host(dst + done as u64, staged, part.len()) }?;
            done += part.len();
        }
        Ok(())
    }

    /// Advances to a chunk that the device does not read: a new one up to the maximum, else the oldest.
    fn next_chunk(&mut self, stream: &CudaStream) -> Result<(), SourceError> {
        if let Some(full) = self.chunks.get(self.current) {
            full.copied.record(stream)?;
        }
        let mut next = (self.current + 1) % self.chunks.len().max(1);
        let is_idle = match self.chunks.get(next) {
            Some(chunk) => chunk.copied.is_done()?,
            None => false,
        };
        if !is_idle && self.chunks.len() < MAX_UPLOAD_CHUNKS {
            // Inserts the chunk into the ring in order: after the newest, before the oldest.
            next = (self.current + 1).min(self.chunks.len());
            match StagingChunk::new(&stream.context) {
                Ok(chunk) => self.chunks.insert(next, chunk),
                Err(SourceError::OutOfMemory { .. }) if !self.chunks.is_empty() => {
                    next %= self.chunks.len();
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(chunk) = self.chunks.get(next) {
            // A new event counts as passed.
            chunk.copied.synchronize()?;
        }
        (self.current, self.used) = (next, 0);
        Ok(())
    }

    /// Uploads without page-locked memory, through the driver's own staging, and waits.
    fn upload_unstaged(
        &self,
        stream: &CudaStream,
        dst: u64,
        data: &[u8],
        error: SourceError,
    ) -> Result<(), SourceError> {
        if !matches!(error, SourceError::OutOfMemory { .. }) {
            return Err(error);
        }
        log::debug!("uploading without page-locked memory: {error}");
        // SAFETY: `data` is borrowed until the copy is done; the next line waits for the copy.
        unsafe { stream.copy_from_host(dst, data.as_ptr(), data.len()) }?;
        stream.synchronize()
    }
}

/// Copies from `src` on the device into `data`, after everything enqueued before. The device fills one chunk while
/// the host empties another.
pub(crate) fn download(
    stream: &CudaStream,
    src: u64,
    data: &mut [u8],
    idle: &Arc<ChunkPool>,
) -> Result<(), SourceError> {
    let mut pending: Option<(PendingChunks, &mut [u8])> = None;
    for (from, part) in (src..).step_by(CHUNK_BYTES).zip(data.chunks_mut(CHUNK_BYTES)) {
        match PendingChunks::enqueue(stream, from, part.len() as u64, idle) {
            Ok(chunks) => {
                if let Some((earlier, part)) = pending.replace((chunks, part)) {
                    earlier.read(part)?;
                }
            }
            Err(error @ SourceError::OutOfMemory { .. }) => {
                log::debug!("downloading without page-locked memory: {error}");
                // SAFETY: `part` is borrowed until the copy is done; the next line waits for the copy.
                unsafe { stream.copy_to_host(part.as_mut_ptr(), from, part.len()) }?;
                stream.synchronize()?;
            }
            Err(error) => return Err(error),
        }
    }
    pending.map_or(Ok(()), |(chunks, part)| chunks.read(part))
}

/// Idle staging chunks, kept for the next downloads.
pub(crate) type ChunkPool = Mutex<Vec<StagingChunk>>;

/// Maximum number of idle chunks.
const MAX_IDLE_CHUNKS: usize = 4;

/// Copy to staging chunks that was enqueued. The driver frees a chunk after the copies to it.
pub(crate) struct PendingChunks {
    chunks: Vec<StagingChunk>,
    idle: Arc<ChunkPool>,
}

impl PendingChunks {
    /// Enqueues a copy of `bytes` bytes from `src` on the device.
    pub(crate) fn enqueue(
        stream: &CudaStream,
        src: u64,
        bytes: u64,
        idle: &Arc<ChunkPool>,
    ) -> Result<Self, SourceError> {
        let mut pending = Self { chunks: Vec::new(), idle: Arc::clone(idle) };
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(CHUNK_BYTES as u64);
            let reused = idle.lock_unpoisoned().pop();
            let mut chunk = match reused {
                Some(chunk) => chunk,
                None => StagingChunk::new(&stream.context)?,
            };
            let target = chunk.memory.write_target(part as usize).ok_or(OUT_OF_CHUNK)?;
            // SAFETY: no earlier copy uses the chunk, and it is read only after its event.
            unsafe { stream.copy_to_host(target, src + done, part as usize) }?;
            chunk.copied.record(stream)?;
            pending.chunks.push(chunk);
            done += part;
        }
        Ok(pending)
    }

    /// Waits for the copy, and moves its bytes to `data`.
    fn read(self, data: &mut [u8]) -> Result<(), SourceError> {
        let Self { chunks, idle } = self;
        for (chunk, part) in chunks.into_iter().zip(data.chunks_mut(CHUNK_BYTES)) {
            chunk.copied.synchronize()?;
            // SAFETY: the device has filled the chunk, as was just waited for.
            unsafe { chunk.memory.read(part) };
            let mut idle = idle.lock_unpoisoned();
            if idle.len() < MAX_IDLE_CHUNKS {
                idle.push(chunk);
            }
        }
        Ok(())
    }
}

impl PendingDownload for PendingChunks {
    fn finish(self: Box<Self>, data: &mut [u8]) -> Result<()> {
        Ok(self.read(data)?)
    }
}

/// A write outside of a chunk: a bug of this module.
const OUT_OF_CHUNK: SourceError = SourceError::Driver { call: "staging", detail: String::new() };
