//! Where the pool's memory comes from: the part of a backend that the pool calls.
//!
//! Contract. Nothing here is cached or rounded by the source: it does what it is told, or returns a typed error. A
//! source may be called from several threads at once. The pool never touches memory through it, and promises that
//! a range is given back once, whole, and after every use of it has been fenced.

use std::fmt;

use thiserror::Error;

use super::Bytes;

/// A segment: one piece of raw device memory, or one reserved range of addresses.
///
/// On CUDA the number is the device address; elsewhere it is the backend's own handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u64);

/// Queues of one device that are told apart.
pub const MAX_QUEUES: u8 = 8;

/// Work submitted to a device up to some moment. Fences of one source are ordered: later ones have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(pub u64);

/// A point in one queue of a device, behind everything that the queue had been given. Other queues wait for it, on the
/// device; the host never does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event(pub u64);

/// Why a source could not do what the pool asked.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceError {
    /// The device has no room. The pool answers this one with its ladder.
    #[error("the device has no room for {bytes} more bytes ({detail})")]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: u64,
        /// What the driver said.
        detail: String,
    },
    /// The device was lost; nothing on it can be used any more.
    #[error("the device was lost: {0}; open it again to go on")]
    DeviceLost(String),
    /// The driver refused for another reason.
    #[error("the driver refused {call}: {detail}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// What it said.
        detail: String,
    },
}

/// What a source's driver offers for virtual memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtualMemory {
    /// Physical memory is mapped in multiples of this many bytes (2 MiB on CUDA).
    pub granularity: u64,
    /// How many bytes of addresses to reserve for a pool (PyTorch: 1 1/8 of the device's memory).
    pub reservation: u64,
}

/// What bounds the segments of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceLimits {
    /// Every block starts at a multiple of this many bytes inside its segment (a power of two).
    pub alignment: u64,
    /// Largest segment, in bytes.
    pub max_segment: u64,
    /// Present where segments can grow by mapping pages into a reserved range.
    pub virtual_memory: Option<VirtualMemory>,
}

/// Bytes of the device, as the driver tells them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// All memory of the device.
    pub total: Option<u64>,
    /// What no process uses.
    pub free: Option<u64>,
}

/// A process that holds memory of a device, as the driver tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProcess {
    /// Its number.
    pub pid: u32,
    /// The program's file, without folders; empty where the driver does not tell it.
    pub name: String,
    /// What it holds, its contexts included; `None` where the driver does not tell it (Windows).
    pub bytes: Option<u64>,
}

impl DeviceProcess {
    /// Whether it is this one.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Who it is and what it holds: `python3 (pid 4242) 3.1 GiB`.
    #[must_use]
    pub fn describe_usage(&self) -> String {
        self.bytes.map_or_else(|| self.to_string(), |bytes| format!("{self} {}", Bytes(bytes)))
    }
}

impl fmt::Display for DeviceProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            _ if self.is_current() => f.write_str("this program"),
            "" => write!(f, "process {}", self.pid),
            name => write!(f, "{name} (pid {})", self.pid),
        }
    }
}

/// A piece of memory behind a range of addresses: what one call of [`SegmentSource::map`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRemap {
    /// The range and the offset where it shall be.
    pub to: (SegmentId, u64),
    /// Its size.
    pub bytes: u64,
    /// Where it is mapped now; `None` for new memory.
    pub from: Option<(SegmentId, u64)>,
}

/// The supplier of segments behind a [`Pool`](super::Pool).
pub trait SegmentSource: Send + Sync + fmt::Debug {
    /// What bounds its segments.
    fn limits(&self) -> SourceLimits;
    /// The device's memory now. Fields are `None` where no driver call tells them (wgpu).
    fn device_memory(&self) -> DeviceMemory;
    /// Bytes of the device's memory that the vendor's library works in, which are no segments.
    fn library_bytes(&self) -> u64 {
        0
    }
    /// Whether its memory is a device's, and counts towards the limit of the process: not the host's, nor what is played.
    fn is_device_memory(&self) -> bool {
        true
    }
    /// The processes that hold memory of the device, this one among them, the largest first; none where the driver does
    /// not tell them, or does not tell them here (in a container). Slow: for errors and reports.
    fn processes(&self) -> Vec<DeviceProcess> {
        Vec::new()
    }

    /// A new segment of exactly `bytes` bytes.
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError>;
    /// Gives a segment of [`alloc_segment`](Self::alloc_segment) back, now.
    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError>;

    /// Reserves `bytes` of addresses without memory behind them. Only where `limits().virtual_memory` is present.
    fn reserve_addresses(&self, bytes: u64) -> Result<SegmentId, SourceError>;
    /// Gives back a reserved range, in which nothing is mapped any more.
    fn free_addresses(&self, segment: SegmentId) -> Result<(), SourceError>;
    /// Puts physical memory behind `offset..offset + bytes` of a reserved range (multiples of the granularity).
    fn map(&self, segment: SegmentId, offset: u64, bytes: u64) -> Result<(), SourceError>;
    /// Takes it away again: exactly an extent that one call of [`map`](Self::map) made.
    fn unmap(&self, segment: SegmentId, offset: u64, bytes: u64) -> Result<(), SourceError>;

    /// [`unmap`](Self::unmap) for neighbouring pieces of these sizes, from `offset` on.
    fn unmap_extents(&self, segment: SegmentId, offset: u64, pieces: &[u64]) -> Result<(), SourceError> {
        let mut at = offset;
        for bytes in pieces {
            self.unmap(segment, at, *bytes)?;
            at += bytes;
        }
        Ok(())
    }
    /// Puts memory behind several pieces of ranges at once: memory that is mapped elsewhere, which moves, or new
    /// memory. If it fails, none of them is mapped, wherever it was before.
    ///
    /// Without this, memory that moves goes through the device.
    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        for (segment, offset, bytes) in pieces.iter().filter_map(|p| p.from.map(|(s, o)| (s, o, p.bytes))) {
            self.unmap(segment, offset, bytes)?;
        }
        for (number, PageRemap { to: (segment, offset), bytes, .. }) in pieces.iter().enumerate() {
            if let Err(error) = self.map(*segment, *offset, *bytes) {
                for PageRemap { to: (segment, offset), bytes, .. } in &pieces[..number] {
                    self.unmap(*segment, *offset, *bytes)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// [`remap`](Self::remap) behind everything that was submitted so far and in front of all that comes: work may still use
    /// what moves.
    fn remap_after_submitted(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        let fence = self.record_fence()?;
        self.wait_fence(fence)?;
        self.remap(pieces)
    }
    /// Whether the source holds submitted work back (for a compiler), so that waiting for a fence now would take long and
    /// [`remap_after_submitted`](Self::remap_after_submitted) would not.
    fn has_deferred_work(&self) -> bool {
        false
    }

    /// How many queues the device has, whose work runs side by side; at most [`MAX_QUEUES`]. Queue 0 is always there.
    fn queue_count(&self) -> u8 {
        1
    }
    /// A point behind everything that a queue was given so far.
    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        let _ = queue;
        Ok(Event(0))
    }
    /// Lets a queue go on only when the device has passed `event`. Never blocks.
    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        let _ = (queue, event);
        Ok(())
    }

    /// A fence after everything that has been submitted so far, on all queues.
    fn record_fence(&self) -> Result<Fence, SourceError>;
    /// Whether the device has passed `fence`. Never blocks.
    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError>;
    /// Blocks until the device has passed `fence`.
    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError>;
}
