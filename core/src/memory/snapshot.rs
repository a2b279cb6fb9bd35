//! Snapshot of a pool: every segment, its blocks and their holders, and the recorded events.
//!
//! A snapshot can be compared with another one ([`Snapshot::diff`]), saved as JSON ([`Snapshot::save`]) and
//! loaded on another machine ([`Snapshot::load`]). It can also be written for PyTorch's tools
//! ([`Snapshot::write_pickle`]).

use std::backtrace::Backtrace;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::Tag;
use super::file_kind;
use super::heap::{Slot, SlotState as Is};
use super::pool::Pool;
use super::pool_state::PoolState;
use super::recorder::{Action, RecordedScope};
use super::scope::Scope;
use super::source::SegmentId;
use crate::atomic_write::FileError;
use crate::memory::error::{Error, Result};
use crate::platform::{SystemTime, UNIX_EPOCH};
use crate::printable::printable;

/// Segment ids below this are counters; those above are device addresses.
const MIN_DEVICE_ADDRESS: u64 = 1 << 32;
/// Synthetic address of the first segment without an address.
const SYNTHETIC_BASE: u64 = 1 << 32;
/// Alignment of synthetic addresses.
const SYNTHETIC_ALIGNMENT: u64 = 2 << 20;

/// Most bytes of a snapshot's JSON, which hold several million events.
const MAX_SNAPSHOT_BYTES: u64 = 1 << 30;

/// Reads all bytes; more than `max` are an error, as in a file without an end.
pub(super) fn read_bounded(source: impl Read, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {max} bytes"))),
        false => Ok(bytes),
    }
}

/// State of a pool at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Version of the format: 1.
    pub version: u32,
    /// Device name.
    pub device: String,
    /// Time of the snapshot, in microseconds of the Unix time.
    pub time_us: u64,
    /// Settings of the pool, as [`Config::parse`](super::Config::parse) reads them.
    pub config: String,
    /// Statistics, under the keys of [`Stats::to_map`](super::Stats::to_map).
    pub stats: BTreeMap<String, u64>,
    /// Holders that blocks and events refer to by index, without duplicates.
    pub holders: Vec<AllocationSite>,
    /// Segments, by address. A virtual range yields one segment for each stretch of mapped memory.
    pub segments: Vec<SegmentInfo>,
    /// Recorded events, in order; empty if the pool did not record.
    pub events: Vec<EventInfo>,
    /// Number of earlier events that were dropped.
    pub dropped_events: u64,
}

/// Holder of memory: the purpose and call site of its allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AllocationSite {
    /// Tag of the memory.
    pub tag: Tag,
    /// The module's path; empty if there was none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub module: String,
    /// The operation; empty if there was none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub op: String,
    /// Call site, innermost frame first: one line, or the stack if stacks were recorded. Known only for
    /// blocks allocated while the pool recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frames: Vec<Frame>,
}

/// Frame of a call stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Frame {
    /// Function name; the operation, if only a line is known.
    pub name: String,
    /// File name.
    pub filename: String,
    /// Line, from 1.
    pub line: u32,
}

/// A segment, as PyTorch's snapshots describe it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// Address of its first byte: the device address on CUDA. Without device addresses, segments are laid out
    /// one after another.
    pub address: u64,
    /// Bytes of memory in the segment.
    pub total_size: u64,
    /// Queue that the segment serves.
    pub stream: u8,
    /// If true, the segment belongs to the small pool.
    pub small: bool,
    /// Bytes of allocated blocks.
    pub allocated_size: u64,
    /// Bytes of blocks that are allocated or wait for a fence.
    pub active_size: u64,
    /// Bytes of allocated blocks, before rounding.
    pub requested_size: u64,
    /// If true, the segment is mapped memory of a virtual range.
    pub is_expandable: bool,
    /// Blocks of the segment, by address and without gaps.
    pub blocks: Vec<BlockInfo>,
}

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// Allocated.
    ActiveAllocated,
    /// Freed, but its fence has not passed.
    ActiveAwaitingFree,
    /// Free.
    Inactive,
    /// Free, and on its way back to the device.
    Releasing,
}

/// A block of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// Address of its first byte.
    pub address: u64,
    /// Size in bytes, after rounding.
    pub size: u64,
    /// Bytes requested; 0 if the block is not allocated.
    pub requested_size: u64,
    /// State of the block.
    pub state: BlockState,
    /// Holder, as an index of [`Snapshot::holders`]; absent if the block is not allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<usize>,
}

/// A recorded event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventInfo {
    /// Kind of the event.
    pub action: Action,
    /// Time, in microseconds of the Unix time.
    pub time_us: u64,
    /// Address of the memory; 0 for [`Action::Oom`].
    pub address: u64,
    /// Size in bytes, after rounding.
    pub size: u64,
    /// Bytes requested; for [`Action::Oom`], the device's free memory.
    pub requested_size: u64,
    /// Queue.
    pub stream: u8,
    /// Holder, as an index of [`Snapshot::holders`]; absent for events of segments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<usize>,
}

impl Pool {
    /// Returns the state of the pool now, with the events since [`start_recording`](Pool::start_recording).
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut state = self.shared.lock();
        // If polling fails, no further fence counts as passed.
        let _ = state.poll_fences();
        state.snapshot()
    }
}

impl PoolState {
    fn snapshot(&self) -> Snapshot {
        let recorder = self.heap.recorder.as_deref();
        let records = || recorder.into_iter().flat_map(|r| r.events());
        let ends = self.heap.live_segments().map(|s| (s.id, s.size));
        let addresses = SegmentAddresses::new(ends.chain(records().map(|r| (r.segment, r.offset + r.size))));
        let mut holders = HolderTable::default();

        let mut segments = Vec::new();
        for segment in self.heap.live_segments() {
            let arena = &self.heap.arenas[segment.arena as usize];
            let mut stretch: Option<SegmentInfo> = None;
            for (slot, block) in self.heap.blocks(segment) {
                let Some(state) = block_state(block) else {
                    segments.extend(stretch.take());
                    continue;
                };
                let address = addresses.resolve(segment.id, block.offset);
                let info = stretch.get_or_insert_with(|| SegmentInfo {
                    address,
                    stream: arena.queue,
                    small: arena.small,
                    is_expandable: segment.virtual_range.is_some(),
                    ..SegmentInfo::default()
                });
                let live = state == BlockState::ActiveAllocated;
                let holder = live.then(|| {
                    let Slot { tag, module, op, .. } = *block;
                    let unrecorded =
                        RecordedScope { scope: Scope { tag, module, op, site: None }, stack: None };
                    holders.intern(&recorder.map_or(unrecorded, |r| r.holder(slot, block)))
                });
                let requested_size = if live { block.requested } else { 0 };
                info.push_block(BlockInfo { address, size: block.size, requested_size, state, holder });
            }
            segments.extend(stretch);
        }
        segments.sort_by_key(|s| s.address);

        let events = records().map(|r| EventInfo {
            action: r.action,
            time_us: recorder.map_or(0, |recorder| recorder.start_us) + r.time / 1000,
            address: if r.action == Action::Oom { 0 } else { addresses.resolve(r.segment, r.offset) },
            size: r.size,
            requested_size: r.requested,
            stream: r.queue,
            holder: r.action.has_holder().then(|| holders.intern(&r.holder)),
        });
        let events = events.collect();
        Snapshot {
            version: Snapshot::VERSION,
            device: self.device.clone().unwrap_or_default(),
            time_us: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64),
            config: self.config.to_string(),
            stats: self.stats().to_map(),
            holders: holders.list,
            segments,
            events,
            dropped_events: recorder.map_or(0, |r| r.dropped_events()),
        }
    }
}

fn block_state(block: &Slot) -> Option<BlockState> {
    match block.state {
        Is::Pinned | Is::Movable => Some(BlockState::ActiveAllocated),
        Is::Pending => Some(BlockState::ActiveAwaitingFree),
        Is::Free => Some(BlockState::Inactive),
        Is::Releasing => Some(BlockState::Releasing),
        Is::Borrowed | Is::Unmapped | Is::Vacant => None,
    }
}

impl SegmentInfo {
    fn push_block(&mut self, block: BlockInfo) {
        self.add_sizes(&block);
        self.blocks.push(block);
    }
}

struct SegmentAddresses(FxHashMap<SegmentId, u64>);

impl SegmentAddresses {
    /// Assigns an address to each segment; `ends` are ends of known ranges in the segments.
    fn new(ends: impl Iterator<Item = (SegmentId, u64)>) -> Self {
        let mut sizes = BTreeMap::<SegmentId, u64>::new();
        for (id, end) in ends {
            let size = sizes.entry(id).or_default();
            *size = end.max(*size);
        }
        let mut next = SYNTHETIC_BASE;
        let locate = |(id, size): (SegmentId, u64)| {
            if id.0 >= MIN_DEVICE_ADDRESS {
                return (id, id.0);
            }
            let at = next;
            next += size.next_multiple_of(SYNTHETIC_ALIGNMENT);
            (id, at)
        };
        Self(sizes.into_iter().map(locate).collect())
    }

    fn resolve(&self, id: SegmentId, offset: u64) -> u64 {
        self.0.get(&id).copied().unwrap_or(id.0) + offset
    }
}

/// Interned holders.
#[derive(Default)]
struct HolderTable {
    list: Vec<AllocationSite>,
    /// Index by distinguishing fields, without comparing text.
    indices: FxHashMap<(Tag, u32, &'static str, usize, usize), usize>,
    stacks: FxHashMap<usize, Vec<Frame>>,
}

impl HolderTable {
    fn intern(&mut self, holder: &RecordedScope) -> usize {
        let RecordedScope { scope: Scope { tag, module, op, site }, stack } = holder;
        let line = site.map_or(0, |l| std::ptr::from_ref::<Location<'_>>(l) as usize);
        let stack_id = stack.as_ref().map_or(0, |s| Arc::as_ptr(s) as usize);
        *self.indices.entry((*tag, module.id(), *op, line, stack_id)).or_insert_with(|| {
            let (module, op) = (module.to_string(), (*op).to_owned());
            let line =
                site.map(|l| Frame { name: op.clone(), filename: l.file().to_owned(), line: l.line() });
            let frames = stack
                .as_deref()
                .map(|s| self.stacks.entry(stack_id).or_insert_with(|| parse_frames(s)).clone());
            let frames = frames.filter(|f| !f.is_empty()).unwrap_or_else(|| line.into_iter().collect());
            self.list.push(AllocationSite { tag: *tag, module, op, frames });
            self.list.len() - 1
        })
    }
}

/// Parses the frames of a stack and drops those of the pool. The standard library provides text only: `3:
/// name`, then `at file:line:column` on the next line.
fn parse_frames(stack: &Backtrace) -> Vec<Frame> {
    let text = stack.to_string();
    let mut frames: Vec<Frame> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(location) = line.strip_prefix("at ") {
            let mut parts = location.rsplitn(3, ':');
            let (_, number, file) = (parts.next(), parts.next(), parts.next());
            if let (Some(frame), Some(number), Some(file)) = (frames.last_mut(), number, file) {
                frame.line = number.parse().unwrap_or(0);
                frame.filename = file.to_owned();
            }
        } else if let Some((number, name)) = line.split_once(": ")
            && number.bytes().all(|b| b.is_ascii_digit())
        {
            frames.push(Frame { name: name.to_owned(), ..Frame::default() });
        }
    }
    let own =
        |f: &Frame| ["::Backtrace", "backtrace_rs", "memory::pool::"].iter().any(|n| f.name.contains(n));
    let first = frames.iter().position(|f| !own(f)).unwrap_or(frames.len());
    frames.drain(..first);
    frames
}

impl Snapshot {
    /// Version of the format that this program writes.
    pub const VERSION: u32 = 1;

    /// Returns the holder at an index of `holders`, if there is one.
    #[must_use]
    pub fn holder(&self, index: Option<usize>) -> Option<&AllocationSite> {
        self.holders.get(index?)
    }

    /// Iterates over allocated blocks with their holders.
    pub fn live_blocks(&self) -> impl Iterator<Item = (&BlockInfo, &AllocationSite)> {
        let blocks = self.segments.iter().flat_map(|s| &s.blocks);
        blocks.filter_map(|b| Some((b, self.holder(b.holder)?)))
    }

    /// Writes a file: PyTorch's pickle if the name ends in `.pickle` or `.pkl`, else JSON.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let wrong = |e: &dyn std::fmt::Display| Error::File(FileError::new(path, e.to_string()));
        let pickle = path.extension().is_some_and(|e| e == "pickle" || e == "pkl");
        crate::atomic_write::write_atomic(path, |mut file: &mut dyn Write| {
            if pickle {
                self.write_pickle(&mut file).map_err(|e| wrong(&e))
            } else {
                serde_json::to_writer(file, self).map_err(|e| wrong(&e))
            }
        })
    }

    /// Loads a JSON file that [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// The file cannot be read, is of another kind, or [`read`](Self::read) rejects it.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let wrong = |message: String| Error::File(FileError::new(path, message));
        let file = File::open(path).map_err(|e| wrong(e.to_string()))?;
        Self::read(file).map_err(|e| match e {
            Error::Snapshot(message) => wrong(message),
            other => other,
        })
    }

    /// Reads the JSON of a snapshot.
    ///
    /// # Errors
    /// The text is not a snapshot of this version, or fails [`check`](Self::check).
    pub fn read(json: impl Read) -> Result<Self> {
        let mut json = BufReader::new(json);
        let head = json.fill_buf().map_err(|e| Error::Snapshot(format!("no snapshot: {e}")))?;
        let kind = file_kind::describe(&head[..head.len().min(file_kind::HEADER_LEN)]);
        let starts = head.trim_ascii_start().starts_with(b"{\"version\"");
        // The version is read first, since the rest of the format depends on it.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let no_snapshot = |e: &dyn std::fmt::Display| {
            let e = e.to_string();
            let e = printable(&e);
            Error::Snapshot(match kind {
                Some(kind) if !starts => format!(
                    "no snapshot of memory: {kind}. A snapshot is the JSON that `snapshot.save(\"memory.json\")` writes ({e})"
                ),
                _ => format!(
                    "no snapshot of memory, or a damaged one: {e}. `snapshot.save(\"memory.json\")` writes one"
                ),
            })
        };
        if !head.trim_ascii_start().starts_with(b"{") {
            return Err(no_snapshot(&"it does not begin with `{`"));
        }
        let text = read_bounded(json, MAX_SNAPSHOT_BYTES).map_err(|e| no_snapshot(&e))?;
        let Versioned { version } = serde_json::from_slice(&text).map_err(|e| no_snapshot(&e))?;
        if version != Self::VERSION {
            return Err(Error::Snapshot(format!(
                "a snapshot of version {version}; this program reads version {}",
                Self::VERSION
            )));
        }
        let snapshot: Self = serde_json::from_slice(&text).map_err(|e| no_snapshot(&e))?;
        snapshot.check()?;
        Ok(snapshot)
    }
}
