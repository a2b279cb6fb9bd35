//! The memory manager: a caching pool over a source of segments, with one set of rules and figures for every device.
//!
//! A [`Pool`] takes large segments from a [`SegmentSource`](source::SegmentSource) and cuts them into blocks. The rules and their names are
//! PyTorch's: best fit per queue, a small and a large pool, splitting and merging, the settings of its configuration
//! string ([`Config`]), the keys of its statistics ([`Stats`]). Beyond them:
//!
//! - every step that may have freed something is followed by a search, before memory is called exhausted;
//! - blocks are tagged when they are allocated ([`scope`]), so that [`OutOfMemory`] says who holds what;
//! - memory that is freed but not yet passed by the device is counted as pending, and is given back to the device
//!   only after a fence;
//! - the pool gives idle memory back before it grows past what the program has shown to need.
//!
//! # The ladder
//!
//! A request that no free block fits climbs rung after rung; each is counted in [`ReclaimStats`], and each that may have
//! freed something is followed by a search.
//!
//! 0. borrow: what is free for another queue serves this one, which waits for it on the device;
//! 1. poll: what waits for fences that the device has passed becomes free;
//! 2. callbacks: functions of [`Pool::on_low_memory`] may free something;
//! 3. collect: above `garbage_collection_threshold`, segments that were idle for long go back;
//! 4. compact: blocks of tensors move, in plain segments, so that what is free is in one piece, where the pool would hold as
//!    much as in the next rung; and again, in segments of any kind and if need be all of them, when the device is full;
//! 5. reclaim: idle memory goes back, or moves to where it is missing, if the pool would hold more than `1 + growth_slack` times the most that was
//!    ever in use at once;
//! 6. grow: a segment, or memory mapped where the least of it is missing;
//! 7. wait: for all fences that freed blocks wait for;
//! 8. release: all idle memory goes back, and the pool grows once more; and again, in a range of addresses, after what is in use was
//!    packed: holes are filled and blocks pushed together until hardly a page is free in part.
//!
//! Then it is an [`OutOfMemory`]. The pool and the device stay usable.
//!
//! # Cost
//!
//! A request that a free block fits takes one lock, allocates nothing, and calls the source not at all.

mod batch;
pub(crate) mod compaction;
mod compaction_planner;
mod config;
mod counters;
mod diff;
#[doc(hidden)]
pub mod fake;
mod file_kind;
mod free_list;
mod grow;
mod heap;
mod host;
mod hysteresis;
mod oom;
mod partial_evict;
mod pool;
mod pool_state;
mod private_pool;
mod process;
pub mod profiler_ranges;
mod pytorch_pickle;
mod reclaim;
mod recorder;
pub mod scope;
mod slab;
mod snapshot;
pub mod source;
mod stats;
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;
mod timeline;
pub mod trace;
#[doc(hidden)]
pub mod validation;

pub use batch::{BatchCostModel, BatchEstimate, BatchMeasurement, FittingBatch};
pub use config::{CONFIG_KEYS, Config, ENV_VARS, FitPolicy, RoundupDivisions};
pub use diff::{HeldBytes, HolderChange, MemoryGrowth, SnapshotDiff};
pub(crate) use host::HostSource;
#[doc(hidden)]
pub use oom::BytesOf;
pub use oom::OutOfMemory;
pub use pool::{Block, Pool, Request};
pub use private_pool::{PrivatePool, PrivatePoolGuard};
pub use process::{process_limit, process_reserved, set_process_limit};
pub use recorder::{Action, AllocationChange, RecordingOptions};
pub use scope::Tag;
pub use snapshot::{AllocationSite, BlockInfo, BlockState, EventInfo, Frame, SegmentInfo, Snapshot};
pub use stats::{Bytes, PoolStat, ReclaimStats, ReclaimStepStats, Stat, Stats, StatsSummary};
pub use timeline::TimelinePoint;
