//! Work on its way into a stream: at once, or behind a kernel that is still being compiled (`waiting`).

use std::sync::PoisonError;

use forebay_core::backend::{Command, Slice, SourceError};
use forebay_core::error::{Error, Result};

use crate::backend::{Device, Queue, address};
use crate::context::Stream;
use crate::waiting::{MOST, MOST_BYTES, Piece, Pieces};

impl Device {
    /// Takes a command for a queue; `false` where it is a library's that does not do it. An error may be that of a command
    /// before: one whose kernel does not compile. What came behind that one is not run either.
    #[inline]
    pub(crate) fn offer(&self, queue: &Queue, command: &Command<'_>) -> Result<bool> {
        if !queue.waiting.any() {
            // Most commands are launches: they look their kernel up once.
            if let Command::Launch(launch) = command {
                if self.kernels.launch(&queue.stream, launch, false)? {
                    self.fences.enqueued();
                    return Ok(true);
                }
            } else if self.is_ready(command) {
                return self.enqueue(queue, &queue.stream, command);
            }
        }
        self.offer_behind(queue, command)
    }

    #[cold]
    fn offer_behind(&self, queue: &Queue, command: &Command<'_>) -> Result<bool> {
        let taken = match command {
            Command::Launch(launch) => self.kernels.check(launch).map(|()| true)?,
            Command::Copy { .. } | Command::Fill { .. } => true,
            Command::Matmul(call) => queue.matmul.takes(&self.context, call)?,
            Command::Attention(call) => self.attention.takes(&self.context, &self.kernels, call)?,
        };
        if !taken {
            return Ok(false);
        }
        let mut waiting = queue.waiting.open();
        let full = waiting.pieces.len() >= MOST;
        self.catch_up(queue, &mut waiting, full)?;
        if waiting.pieces.is_empty() && self.is_ready(command) {
            return self.enqueue(queue, &queue.stream, command);
        }
        waiting.pieces.push_back(Piece::of(command));
        Ok(true)
    }

    /// Takes bytes of the host for a queue.
    pub(crate) fn upload(&self, queue: &Queue, dst: Slice, data: &[u8]) -> Result<()> {
        if queue.waiting.any() {
            let mut waiting = queue.waiting.open();
            self.catch_up(queue, &mut waiting, data.len() > MOST_BYTES)?;
            if !waiting.pieces.is_empty() {
                waiting.pieces.push_back(Piece::Upload { dst, data: data.to_vec() });
                return Ok(());
            }
        }
        let mut uploads = queue.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        let uploaded = uploads.upload(&queue.stream, address(dst), data);
        // Also where it failed: a part of it may have been enqueued.
        self.fences.enqueued();
        Ok(uploaded?)
    }

    /// Enqueues all that waits in a queue, and waits for its kernels.
    #[inline]
    pub(crate) fn settle(&self, queue: &Queue) -> Result<()> {
        if queue.waiting.any() { self.catch_up(queue, &mut queue.waiting.open(), true) } else { Ok(()) }
    }

    /// The same for all queues: memory is about to go, or the host to look.
    pub(crate) fn settle_all(&self) -> Result<(), SourceError> {
        self.all_queues().try_for_each(|queue| self.settle(queue)).map_err(|error| match error {
            Error::Source(error) => error,
            error => SourceError::Driver { call: "an earlier launch", detail: error.to_string() },
        })
    }

    /// Enqueues what waits, up to what is not ready, or waiting for that too.
    fn catch_up(&self, queue: &Queue, waiting: &mut Pieces<'_>, wait: bool) -> Result<()> {
        let pieces = &mut waiting.pieces;
        while let Some(piece) = pieces.front() {
            let done = match piece.command() {
                Ok(command) if wait || self.is_ready(&command) => {
                    let done = self.enqueue(queue, &queue.stream, &command);
                    done.and_then(|done| if done { Ok(()) } else { Err(declined(&command)) })
                }
                Ok(_) => return Ok(()),
                Err((dst, data)) => {
                    let mut uploads = queue.uploads.lock().unwrap_or_else(PoisonError::into_inner);
                    let uploaded = uploads.upload(&queue.stream, address(dst), data);
                    self.fences.enqueued();
                    uploaded.map_err(Error::from)
                }
            };
            if let Err(error) = done {
                // What came behind would work on what was not made.
                log::debug!("{} pieces of work behind a failure are not run", pieces.len() - 1);
                pieces.clear();
                return Err(error);
            }
            pieces.pop_front();
        }
        Ok(())
    }

    fn is_ready(&self, command: &Command<'_>) -> bool {
        match command {
            Command::Launch(launch) => self.kernels.is_ready(launch.kernel),
            Command::Attention(call) => self.attention.is_ready(&self.kernels, call),
            Command::Copy { .. } | Command::Fill { .. } | Command::Matmul(_) => true,
        }
    }

    /// Hands a command to a stream, which may be one that writes a graph down.
    pub(crate) fn enqueue(&self, queue: &Queue, stream: &Stream, command: &Command<'_>) -> Result<bool> {
        let done = match *command {
            Command::Launch(ref launch) => self.kernels.launch(stream, launch, true)?,
            Command::Copy { dst, src } => {
                if dst.bytes > 0 {
                    // SAFETY: the core has checked that the slices lie inside their segments and do not overlap.
                    unsafe { stream.copy(address(dst), address(src), dst.bytes.min(src.bytes)) }?;
                }
                true
            }
            Command::Fill { dst, word } => {
                if dst.bytes > 0 {
                    // SAFETY: the core has checked that the slice lies inside its segment; it starts at a multiple of 4.
                    unsafe { stream.fill(address(dst), word, dst.bytes / 4) }?;
                }
                true
            }
            Command::Matmul(call) => queue.matmul.run(stream, call)?,
            Command::Attention(call) => self.attention.run(&self.context, &self.kernels, stream, call)?,
        };
        self.fences.enqueued();
        Ok(done)
    }
}

/// A library's call that was taken, and then was not done: the core's own kernels can no longer stand in for it.
fn declined(command: &Command<'_>) -> Error {
    let (call, what) = match command {
        Command::Attention(_) => ("attention", "its kernel does not compile (a warning says why)"),
        _ => (
            "cublasLtMatmul",
            "the library refuses a product that it offered algorithms for, perhaps on a full device",
        ),
    };
    let detail = format!("{what}; the same step again runs on the portable kernels, or has more room");
    Error::Source(SourceError::Driver { call, detail })
}
