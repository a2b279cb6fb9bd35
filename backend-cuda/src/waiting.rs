//! Work that waits for kernels that are being compiled. A queue runs its work in the order of the calls; so what follows a
//! launch that waits does too, until the program wants to see what was done: it reads, takes a fence, gives memory back.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_core::backend::{AttentionCall, Command, KernelId, Launch, MatmulCall, Slice};

/// Pieces of work that wait at most: a program that only enqueues does not grow for ever.
pub(crate) const MOST: usize = 1 << 14;
/// Bytes of the host's that wait at most, in one piece.
pub(crate) const MOST_BYTES: usize = 1 << 20;

/// A piece of work, with all that it needs.
#[derive(Debug)]
pub(crate) enum Piece {
    Launch { kernel: KernelId, bindings: Vec<Slice>, params: Vec<u8>, groups: [u32; 3] },
    Copy { dst: Slice, src: Slice },
    Fill { dst: Slice, word: u32 },
    Matmul(Box<MatmulCall>),
    Attention(Box<AttentionCall>),
    Upload { dst: Slice, data: Vec<u8> },
}

impl Piece {
    pub(crate) fn of(command: &Command<'_>) -> Self {
        match *command {
            Command::Launch(Launch { kernel, bindings, params, groups }) => {
                Self::Launch { kernel, bindings: bindings.to_vec(), params: params.to_vec(), groups }
            }
            Command::Copy { dst, src } => Self::Copy { dst, src },
            Command::Fill { dst, word } => Self::Fill { dst, word },
            Command::Matmul(call) => Self::Matmul(Box::new(*call)),
            Command::Attention(call) => Self::Attention(Box::new(*call)),
        }
    }

    /// As a command, or what is uploaded, and where to.
    pub(crate) fn command(&self) -> Result<Command<'_>, (Slice, &[u8])> {
        Ok(match self {
            Self::Launch { kernel, bindings, params, groups } => {
                Command::Launch(Launch { kernel: *kernel, bindings, params, groups: *groups })
            }
            Self::Copy { dst, src } => Command::Copy { dst: *dst, src: *src },
            Self::Fill { dst, word } => Command::Fill { dst: *dst, word: *word },
            Self::Matmul(call) => Command::Matmul(call),
            Self::Attention(call) => Command::Attention(call),
            Self::Upload { dst, data } => return Err((*dst, data)),
        })
    }
}

/// What waits in one queue, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    any: AtomicBool,
    pieces: Mutex<VecDeque<Piece>>,
}

impl Waiting {
    /// Whether anything waits.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// All of it, for changes; [`any`](Self::any) follows when they are done.
    pub(crate) fn open(&self) -> Pieces<'_> {
        Pieces { any: &self.any, pieces: self.pieces.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

/// See [`Waiting::open`].
pub(crate) struct Pieces<'a> {
    any: &'a AtomicBool,
    pub(crate) pieces: MutexGuard<'a, VecDeque<Piece>>,
}

impl Drop for Pieces<'_> {
    fn drop(&mut self) {
        self.any.store(!self.pieces.is_empty(), Ordering::Release);
    }
}
