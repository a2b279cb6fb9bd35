//! Copies between the host and the device, through page-locked memory.
//!
//! The driver copies pageable memory in its own way, with waits that depend on the size and the system. Staging it
//! here makes an upload what the contract says everywhere: the bytes have been taken when the call returns, and the
//! device copies them in its own time.

use std::sync::Arc;

use forebay_core::backend::SourceError;

use crate::context::{Context, Event, PinnedBuffer, Stream};

/// Bytes of one piece of staging memory.
const CHUNK_BYTES: usize = 4 << 20;
/// How many pieces uploads go round.
const MAX_UPLOAD_CHUNKS: usize = 4;
/// Uploads start at multiples of this many bytes, for the copy engine's sake.
const UPLOAD_ALIGNMENT: usize = 256;

/// One piece of staging memory and the moment when the device is done with it.
#[derive(Debug)]
struct StagingChunk {
    memory: PinnedBuffer,
    copied: Event,
}

impl StagingChunk {
    fn new(context: &Arc<Context>) -> Result<Self, SourceError> {
        Ok(Self { memory: PinnedBuffer::new(context, CHUNK_BYTES)?, copied: Event::new(context)? })
    }
}

/// A ring of staging memory, through which uploads pass. It grows to its full size as it is used.
#[derive(Debug, Default)]
pub(crate) struct UploadRing {
    chunks: Vec<StagingChunk>,
    /// The piece that is being filled.
    current: usize,
    /// How much of it is taken.
    used: usize,
}

impl UploadRing {
    /// Enqueues a copy of `data` to `dst` on the device; `data` has been read when this returns.
    pub(crate) fn upload(&mut self, stream: &Stream, dst: u64, data: &[u8]) -> Result<(), SourceError> {
        let mut done = 0;
        while done < data.len() {
            if (self.chunks.is_empty() || self.used >= CHUNK_BYTES)
                && let Err(error) = self.next_chunk(stream)
            {
                return self.upload_unstaged(stream, dst + done as u64, &data[done..], error);
            }
            let part = &data[done..data.len().min(done + CHUNK_BYTES - self.used)];
            let chunk = &mut self.chunks[self.current];
            // SAFETY: `next_chunk` waited until the device was done with the piece, and bytes from `used` on have
            // not been given to it since.
            let staged = unsafe { chunk.memory.write(self.used, part) };
            let staged = staged.ok_or(OUT_OF_CHUNK)?;
            self.used = (self.used + part.len()).next_multiple_of(UPLOAD_ALIGNMENT);
            // SAFETY: the staged bytes stay until `next_chunk` has waited for this copy.
            unsafe { stream.copy_from_host(dst + done as u64, staged, part.len()) }?;
            done += part.len();
        }
        Ok(())
    }

    /// Goes on to a piece that the device does not read: a new one while there are few, else the oldest.
    fn next_chunk(&mut self, stream: &Stream) -> Result<(), SourceError> {
        if let Some(full) = self.chunks.get(self.current) {
            full.copied.record(stream)?;
        }
        let mut next = (self.current + 1) % self.chunks.len().max(1);
        let idle = match self.chunks.get(next) {
            Some(chunk) => chunk.copied.is_done()?,
            None => false,
        };
        if !idle && self.chunks.len() < MAX_UPLOAD_CHUNKS {
            // Into its place in the ring: after the newest, before the oldest.
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

    /// Where no page-locked memory can be had: through the driver's own staging, and waiting for it.
    fn upload_unstaged(
        &self,
        stream: &Stream,
        dst: u64,
        data: &[u8],
        error: SourceError,
    ) -> Result<(), SourceError> {
        if !matches!(error, SourceError::OutOfMemory { .. }) {
            return Err(error);
        }
        log::debug!("uploading without page-locked memory: {error}");
        // SAFETY: `data` is borrowed until the copy is done, for which the next line waits.
        unsafe { stream.copy_from_host(dst, data.as_ptr(), data.len()) }?;
        stream.synchronize()
    }
}

/// Two pieces of staging memory, through which downloads pass: the device fills one while the host empties the
/// other.
#[derive(Debug, Default)]
pub(crate) struct DownloadBuffers {
    buffers: [Option<StagingChunk>; 2],
}

impl DownloadBuffers {
    /// Copies from `src` on the device into `data`, after everything enqueued before.
    pub(crate) fn download(&mut self, stream: &Stream, src: u64, data: &mut [u8]) -> Result<(), SourceError> {
        let parts = data.len().div_ceil(CHUNK_BYTES);
        for half in self.buffers.iter_mut().take(parts).filter(|half| half.is_none()) {
            match StagingChunk::new(&stream.context) {
                Ok(chunk) => *half = Some(chunk),
                Err(error @ SourceError::OutOfMemory { .. }) => {
                    log::debug!("downloading without page-locked memory: {error}");
                    // SAFETY: `data` is borrowed until the copy is done, for which the next line waits.
                    unsafe { stream.copy_to_host(data.as_mut_ptr(), src, data.len()) }?;
                    return stream.synchronize();
                }
                Err(error) => return Err(error),
            }
        }
        for at in 0..=parts {
            if at < parts
                && let Some(chunk) = &mut self.buffers[at % 2]
            {
                let bytes = CHUNK_BYTES.min(data.len() - at * CHUNK_BYTES);
                let target = chunk.memory.write_target(bytes).ok_or(OUT_OF_CHUNK)?;
                // SAFETY: the half has been emptied below, and is read again only after its event.
                unsafe { stream.copy_to_host(target, src + (at * CHUNK_BYTES) as u64, bytes) }?;
                chunk.copied.record(stream)?;
            }
            if let (Some(before), Some(chunk)) = (at.checked_sub(1), &self.buffers[(at + 1) % 2]) {
                chunk.copied.synchronize()?;
                let start = before * CHUNK_BYTES;
                let end = data.len().min(start + CHUNK_BYTES);
                // SAFETY: the device has filled it, as was just waited for, and gets it again with the next part.
                unsafe { chunk.memory.read(&mut data[start..end]) };
            }
        }
        Ok(())
    }
}

/// A piece that does not hold what was to be put into it: a fault of this file.
const OUT_OF_CHUNK: SourceError = SourceError::Driver { call: "staging", detail: String::new() };
