//! The source of a pool's memory: the part of a backend that the pool calls.
//!
//! Contract. A source neither caches nor rounds: it carries out each call or returns a typed error. It may be
//! called from several threads at once. The pool never accesses memory through it. The pool returns each
//! range once, as a whole, and after every use of it has been fenced.

use std::fmt;

use thiserror::Error;

use super::Bytes;
use crate::platform;
use crate::printable::printable;

/// A segment: one piece of raw device memory, or one reserved range of virtual addresses.
///
/// On CUDA its value is the device address; elsewhere it is the backend's own handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u64);

/// Most queues of one device that are distinguished.
pub const MAX_QUEUES: u8 = 8;

/// A point in the work submitted to a device. Fences of one source are ordered: later ones have larger
/// values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(pub u64);

/// A point in one queue of a device, after all work submitted to the queue. Other queues wait for it on the
/// device; the host never does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event(pub u64);

/// Error of a source.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceError {
    /// The device has no room. The pool then goes through its slow path.
    #[error("the device has no room for {bytes} more bytes ({detail})")]
    OutOfMemory {
        /// Bytes requested.
        bytes: u64,
        /// Message of the driver.
        detail: String,
    },
    /// The device was lost, and with it all memory.
    #[error("the device was lost: {0}; open it again to go on")]
    DeviceLost(String),
    /// The driver refused for another reason.
    #[error("the driver refused {call}: {detail}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Message of the driver.
        detail: String,
    },
}

/// Properties of a driver's virtual memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtualMemory {
    /// Physical memory is mapped in multiples of this many bytes (2 MiB on CUDA).
    pub granularity: u64,
    /// Bytes of virtual addresses to reserve for an arena (PyTorch: 1 1/8 of the device's memory).
    pub reservation: u64,
}

/// Limits of a source's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceLimits {
    /// Every block starts at a multiple of this many bytes inside its segment (a power of two).
    pub alignment: u64,
    /// Largest segment, in bytes.
    pub max_segment: u64,
    /// Present where segments can grow by mapping pages into a reserved range.
    pub virtual_memory: Option<VirtualMemory>,
}

/// Bytes of the device's memory, as reported by the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Total memory of the device.
    pub total: Option<u64>,
    /// Memory that no process uses.
    pub free: Option<u64>,
}

/// A process that holds memory of a device, as reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProcess {
    /// Process id.
    pub pid: u32,
    /// The program's file name without folders; empty where the driver does not report it.
    pub name: String,
    /// Bytes held, contexts included; `None` where the driver does not report them (Windows).
    pub bytes: Option<u64>,
}

impl DeviceProcess {
    /// Reports whether it is the current process.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.pid == platform::process_id()
    }

    /// Describes the process and its usage: `python3 (pid 4242) 3.1 GiB`.
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
            name => write!(f, "{} (pid {})", printable(name), self.pid),
        }
    }
}

/// One piece of memory to map at a virtual address: one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRemap {
    /// Range and offset to map at.
    pub to: (SegmentId, u64),
    /// Size in bytes.
    pub bytes: u64,
    /// Present mapping of the memory; `None` for new memory.
    pub from: Option<(SegmentId, u64)>,
}

/// Returns the error of a source without virtual memory.
fn no_virtual_memory<T>(call: &'static str, _arguments: impl Sized) -> Result<T, SourceError> {
    let detail = "the source has no virtual memory; `limits().virtual_memory` says so".to_owned();
    Err(SourceError::Driver { call, detail })
}

/// Supplies the segments of a [`Pool`](super::Pool).
pub trait SegmentSource: Send + Sync + fmt::Debug {
    /// Returns the limits of its segments.
    fn limits(&self) -> SourceLimits;
    /// Returns the device's memory now. Fields are `None` where no driver call reports them (wgpu).
    fn device_memory(&self) -> DeviceMemory;
    /// Returns the bytes of the device's memory that vendor libraries allocated, outside of segments.
    fn library_bytes(&self) -> u64 {
        0
    }
    /// Reports whether this is real device memory, which counts towards the limit of the process. Host memory
    /// and simulated memory do not count.
    fn is_device_memory(&self) -> bool {
        true
    }
    /// Returns the processes that hold memory of the device, this one included, the largest first. Empty
    /// where the driver does not report them, as in a container. Slow: for errors and reports.
    fn processes(&self) -> Vec<DeviceProcess> {
        Vec::new()
    }

    /// Allocates a segment of exactly `bytes` bytes.
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError>;
    /// Frees a segment of [`alloc_segment`](Self::alloc_segment) immediately.
    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError>;

    /// Reserves `bytes` of addresses without memory. This and the following calls of virtual memory are made only
    /// where `limits().virtual_memory` is present; by default they fail.
    fn reserve_addresses(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        no_virtual_memory("reserve_addresses", bytes)
    }
    /// Frees a reserved range, in which nothing is mapped any more.
    fn free_addresses(&self, segment: SegmentId) -> Result<(), SourceError> {
        no_virtual_memory("free_addresses", segment)
    }
    /// Maps pieces at once: new physical memory, or memory that is mapped elsewhere, which moves. Offsets and
    /// sizes are multiples of the granularity. If it fails, none of the pieces is mapped anywhere.
    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        no_virtual_memory("remap", pieces)
    }
    /// Unmaps neighbouring pieces of [`remap`](Self::remap), which have these sizes, from `offset` on.
    fn unmap(&self, segment: SegmentId, offset: u64, pieces: &[u64]) -> Result<(), SourceError> {
        no_virtual_memory("unmap", (segment, offset, pieces))
    }

    /// Maps memory a second time, at further addresses: of each piece, `from` stays mapped. Never waits for the
    /// device. If it fails, no piece has a second mapping.
    fn map_again(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        no_virtual_memory("map_again", pieces)
    }
    /// Unmaps all pieces of one call of [`map_again`](Self::map_again), which have these sizes, from the range.
    fn unmap_again(&self, segment: SegmentId, pieces: &[u64]) -> Result<(), SourceError> {
        no_virtual_memory("unmap_again", (segment, pieces))
    }

    /// Runs [`remap`](Self::remap) after all work submitted so far and before all later work, since submitted
    /// work may still use the memory that moves.
    fn remap_after_submitted(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        let fence = self.record_fence()?;
        self.wait_fence(fence)?;
        self.remap(pieces)
    }
    /// Reports whether the source defers submitted work (until kernels are compiled). Waiting for a fence
    /// would then take long, and [`remap_after_submitted`](Self::remap_after_submitted) would not.
    fn has_deferred_work(&self) -> bool {
        false
    }

    /// Returns the number of queues whose work runs concurrently, at most [`MAX_QUEUES`]. Queue 0 always
    /// exists.
    fn queue_count(&self) -> u8 {
        1
    }
    /// Records an event after all work submitted to a queue so far.
    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        let _ = queue;
        Ok(Event(0))
    }
    /// Makes a queue wait on the device for `event`. Never blocks the host.
    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        let _ = (queue, event);
        Ok(())
    }

    /// Records a fence after all work submitted so far, on all queues.
    fn record_fence(&self) -> Result<Fence, SourceError>;
    /// Reports whether the device has passed `fence`. Never blocks.
    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError>;
    /// Blocks until the device has passed `fence`.
    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError>;
}
