//! The memory manager: a caching pool over a source of segments, with the same rules and statistics on every
//! device.
//!
//! A [`Pool`] takes large segments from a [`SegmentSource`](source::SegmentSource) and cuts them into blocks.
//! The rules and their names are PyTorch's: best fit per queue, a small and a large pool, splitting and
//! merging. So are the settings of the configuration string ([`Config`]) and the keys of the statistics
//! ([`Stats`]). Differences from PyTorch:
//!
//! - every step that may have freed memory is followed by a search, before the pool grows or fails;
//! - blocks carry the tag, module and operation they were allocated for ([`scope`]), so [`OutOfMemory`] can
//!   list their holders;
//! - freed blocks that the device may still use count as pending, and their memory returns to the device only
//!   after a fence;
//! - the pool returns idle memory before it grows past what the program has shown to need.
//!
//! # The slow path
//!
//! A request that no free block fits goes through these steps. [`ReclaimStats`] counts steps 1 to 9, and a
//! search follows each step that may have freed memory.
//!
//! 0. cross-stream: a free block of another queue serves the request, whose queue waits for the other one on
//!    the device;
//! 1. poll: blocks whose fences the device has passed become free;
//! 2. callbacks: functions registered with [`Pool::on_low_memory`] may free memory;
//! 3. collect: above `garbage_collection_threshold`, segments that were idle for long return to the device;
//! 4. compact: tensors' blocks in plain segments move to join free memory, if the pool would otherwise hold
//!    as much as in the next step. Once the device is full, segments of any kind are compacted, all of them
//!    if necessary;
//! 5. stitch: if the pool would hold more than `1 + growth_slack` times its peak usage, scattered idle memory
//!    is mapped a second time, side by side;
//! 6. reclaim: otherwise, idle memory returns to the device or moves to where memory is missing;
//! 7. grow: the pool allocates a segment, or maps memory where the least is missing;
//! 8. wait: the host waits for all fences of freed blocks;
//! 9. release: all idle memory returns to the device, and the pool grows once more. A virtual range is then
//!    defragmented: its holes are filled and its blocks slid together, until hardly any page is partly free.
//!
//! If all steps fail, the result is an [`OutOfMemory`]; the pool and the device stay usable.
//!
//! # Cost
//!
//! A request that a free block fits takes one lock, allocates no host memory and does not call the source.

mod batch;
pub(crate) mod compaction;
mod compaction_planner;
mod config;
mod counters;
pub(crate) mod counting_source;
mod creep;
mod diff;
pub(crate) mod error;
mod file_kind;
mod free_list;
mod grow;
mod heap;
mod oom;
mod pool;
mod pool_state;
mod private_pool;
mod process;
#[doc(hidden)]
pub mod profiler_ranges;
mod pytorch_pickle;
mod reclaim;
mod recorder;
pub mod scope;
mod slab;
mod snapshot;
pub mod source;
mod stats;
mod stitching;
#[cfg(test)]
mod tests;
mod timeline;
#[cfg(feature = "traces")]
pub mod trace;
#[doc(hidden)]
pub mod validation;

pub use batch::{BatchCostModel, BatchEstimate, BatchMeasurement, FittingBatch};
pub use config::{Config, ENV_VARS, FitPolicy, RoundupDivisions};
pub use diff::{HeldBytes, HolderChange, MemoryGrowth, SnapshotDiff};
pub use error::{Error, FileError, InvalidVariable, Result};
pub use oom::{BytesOf, OutOfMemory};
pub use pool::{Block, Pool, Request};
pub use private_pool::{PrivatePool, PrivatePoolGuard};
pub use process::{process_limit, process_reserved, set_process_limit};
pub use recorder::{Action, AllocationChange, RecordingOptions};
pub use scope::Tag;
pub use snapshot::{AllocationSite, BlockInfo, BlockState, EventInfo, Frame, SegmentInfo, Snapshot};
pub use stats::{Bytes, PoolStat, ReclaimStats, ReclaimStepStats, Stat, Stats};
pub use timeline::TimelinePoint;
