//! A snapshot of a pool: every segment and what lies in it, who holds it, and what was recorded before.
//!
//! It is a value: it can be compared with another one ([`Snapshot::diff`]), kept as JSON ([`Snapshot::save`]), written
//! for PyTorch's tools ([`Snapshot::write_pickle`]), and read on another machine ([`Snapshot::open`]).

use std::backtrace::Backtrace;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::Tag;
use super::file_kind;
use super::heap::{Slot, SlotState as Is};
use super::pool::Pool;
use super::pool_state::PoolState;
use super::recorder::{Action, RecordedScope};
use super::source::SegmentId;
use crate::error::{Error, Result};

/// Handles below this are numbers that count; those above it are addresses.
const MIN_DEVICE_ADDRESS: u64 = 1 << 32;
/// Where segments without addresses of their own are shown.
const SYNTHETIC_BASE: u64 = 1 << 32;
/// What they start at multiples of.
const SYNTHETIC_ALIGNMENT: u64 = 2 << 20;

/// The state of a pool at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The version of this form: 1.
    pub version: u32,
    /// The device's name.
    pub device: String,
    /// When, in microseconds of the Unix time.
    pub time_us: u64,
    /// The pool's settings, as [`Config::parse`](super::Config::parse) reads them.
    pub config: String,
    /// The statistics, under the keys of [`Stats::to_map`](super::Stats::to_map).
    pub stats: BTreeMap<String, u64>,
    /// Everybody who is named below, once.
    pub holders: Vec<AllocationSite>,
    /// The segments, by address. A range of addresses gives one for each stretch that has memory.
    pub segments: Vec<SegmentInfo>,
    /// What was recorded, in order; empty if nothing was.
    pub events: Vec<EventInfo>,
    /// How many events came before them, and were not kept.
    pub dropped_events: u64,
}

/// Who holds memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AllocationSite {
    /// What for.
    pub tag: Tag,
    /// The module's path; empty if there was none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub module: String,
    /// The operation; empty if there was none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub op: String,
    /// Where in the program, innermost first: one line, or the stack if stacks were recorded. Known only of blocks
    /// that were lent while the pool recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frames: Vec<Frame>,
}

/// A line of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Frame {
    /// The function; the operation, where only a line is known.
    pub name: String,
    /// The file.
    pub filename: String,
    /// The line, from 1.
    pub line: u32,
}

/// A segment, as PyTorch's snapshots describe it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// Its first byte: the device address on CUDA. Where there are no addresses, segments are shown one after another.
    pub address: u64,
    /// Bytes of memory in it.
    pub total_size: u64,
    /// The queue it serves.
    pub stream: u8,
    /// Whether it is of the small pool.
    pub small: bool,
    /// Bytes that are lent.
    pub allocated_size: u64,
    /// Bytes that are lent or wait for a fence.
    pub active_size: u64,
    /// Bytes that are lent, before rounding.
    pub requested_size: u64,
    /// Whether it is a part of a range of addresses that memory is mapped into.
    pub is_expandable: bool,
    /// What it is cut into, without a gap, by address.
    pub blocks: Vec<BlockInfo>,
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// Lent.
    ActiveAllocated,
    /// Freed, but a fence has not passed.
    ActiveAwaitingFree,
    /// Free.
    Inactive,
    /// Free, and on its way back to the device.
    Releasing,
}

/// A part of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// Its first byte.
    pub address: u64,
    /// Bytes, after rounding.
    pub size: u64,
    /// Bytes, as requested; 0 if it is not lent.
    pub requested_size: u64,
    /// Whether it is lent.
    pub state: BlockState,
    /// Who holds it: a place in [`Snapshot::holders`]; absent if nobody does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<usize>,
}

/// Something that happened to memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventInfo {
    /// What.
    pub action: Action,
    /// When, in microseconds of the Unix time.
    pub time_us: u64,
    /// Where; 0 for [`Action::Oom`].
    pub address: u64,
    /// Bytes, after rounding.
    pub size: u64,
    /// Bytes, as requested; for [`Action::Oom`], what the device had free.
    pub requested_size: u64,
    /// The queue.
    pub stream: u8,
    /// For whom: a place in [`Snapshot::holders`]; absent where the pool acts for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<usize>,
}

impl Action {
    /// Whether it is about a block, not about a segment or a failure.
    pub(super) fn has_holder(self) -> bool {
        !matches!(self, Self::SegmentAlloc | Self::SegmentFree | Self::SegmentMap | Self::SegmentUnmap)
    }
}

impl Pool {
    /// The state of the pool now, and what was [recorded](Pool::record).
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut state = self.shared.lock();
        // A device that cannot say what it has passed has passed nothing more.
        let _ = state.poll_fences(&*self.shared.source);
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
                let who = live.then(|| {
                    let Slot { tag, module, op, .. } = *block;
                    let site = recorder.map(|r| r.call_site(slot)).unwrap_or_default();
                    holders.intern(&RecordedScope { tag, module, op, call_site: site })
                });
                let requested_size = if live { block.requested } else { 0 };
                info.push_block(BlockInfo { address, size: block.size, requested_size, state, holder: who });
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
            holder: r.action.has_holder().then(|| holders.intern(&r.scope)),
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
        Is::Unmapped | Is::Vacant => None,
    }
}

impl SegmentInfo {
    fn push_block(&mut self, block: BlockInfo) {
        self.add_sizes(&block);
        self.blocks.push(block);
    }
}

/// Where segments are shown.
struct SegmentAddresses(FxHashMap<SegmentId, u64>);

impl SegmentAddresses {
    /// From everything that is known to lie in each segment: where it ends.
    fn new(ends: impl Iterator<Item = (SegmentId, u64)>) -> Self {
        let mut sizes = BTreeMap::<SegmentId, u64>::new();
        for (id, end) in ends {
            let size = sizes.entry(id).or_default();
            *size = end.max(*size);
        }
        let mut next = SYNTHETIC_BASE;
        let place = |(id, size): (SegmentId, u64)| {
            if id.0 >= MIN_DEVICE_ADDRESS {
                return (id, id.0);
            }
            let at = next;
            next += size.next_multiple_of(SYNTHETIC_ALIGNMENT);
            (id, at)
        };
        Self(sizes.into_iter().map(place).collect())
    }

    fn resolve(&self, id: SegmentId, offset: u64) -> u64 {
        self.0.get(&id).copied().unwrap_or(id.0) + offset
    }
}

/// Everybody, once.
#[derive(Default)]
struct HolderTable {
    list: Vec<AllocationSite>,
    /// Found by what makes them different, without comparing text.
    indices: FxHashMap<(Tag, u32, &'static str, usize, usize), usize>,
    stacks: FxHashMap<usize, Vec<Frame>>,
}

impl HolderTable {
    fn intern(&mut self, holder: &RecordedScope) -> usize {
        let RecordedScope { tag, module, op, call_site: site } = holder;
        let line = site.location.map_or(0, |l| std::ptr::from_ref::<Location<'_>>(l) as usize);
        let stack = site.stack.as_ref().map_or(0, |s| Arc::as_ptr(s) as usize);
        *self.indices.entry((*tag, module.id(), *op, line, stack)).or_insert_with(|| {
            let line = site.location.map(|l| Frame {
                name: (*op).to_owned(),
                filename: l.file().to_owned(),
                line: l.line(),
            });
            let frames = site
                .stack
                .as_deref()
                .map(|s| self.stacks.entry(stack).or_insert_with(|| parse_frames(s)).clone());
            let frames = frames.filter(|f| !f.is_empty()).unwrap_or_else(|| line.into_iter().collect());
            self.list.push(AllocationSite {
                tag: *tag,
                module: module.to_string(),
                op: (*op).to_owned(),
                frames,
            });
            self.list.len() - 1
        })
    }
}

/// The frames of a stack, without those of the pool. The standard library gives them as text only:
/// `3: name`, and below it `at file:line:column`.
fn parse_frames(stack: &Backtrace) -> Vec<Frame> {
    let text = stack.to_string();
    let mut frames: Vec<Frame> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(place) = line.strip_prefix("at ") {
            let mut parts = place.rsplitn(3, ':');
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
    /// The version that is written.
    pub const VERSION: u32 = 1;

    /// Who is at a place of `holders`; nobody, if there is no such place.
    #[must_use]
    pub fn holder(&self, place: Option<usize>) -> Option<&AllocationSite> {
        self.holders.get(place?)
    }

    /// Blocks that are lent, with their holders.
    pub fn live_blocks(&self) -> impl Iterator<Item = (&BlockInfo, &AllocationSite)> {
        let blocks = self.segments.iter().flat_map(|s| &s.blocks);
        blocks.filter_map(|b| Some((b, self.holder(b.holder)?)))
    }

    /// Writes a file: PyTorch's form if its name ends in `.pickle` or `.pkl`, else JSON.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let wrong = |e: &dyn std::fmt::Display| Error::File {
            path: path.display().to_string(),
            message: e.to_string(),
        };
        let pickle = path.extension().is_some_and(|e| e == "pickle" || e == "pkl");
        crate::atomic_write::write_atomic(path, |mut file: &mut dyn Write| {
            if pickle {
                self.write_pickle(&mut file).map_err(|e| wrong(&e))
            } else {
                serde_json::to_writer(file, self).map_err(|e| wrong(&e))
            }
        })
    }

    /// Reads a file of JSON that [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// The file cannot be read, is another kind of file, or is what [`read`](Self::read) refuses.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let wrong = |message: String| Error::File { path: path.display().to_string(), message };
        let file = File::open(path).map_err(|e| wrong(e.to_string()))?;
        Self::read(file).map_err(|e| match e {
            Error::Snapshot(message) => wrong(message),
            other => other,
        })
    }

    /// Reads the JSON of a snapshot from anywhere.
    ///
    /// # Errors
    /// It is no snapshot of this version, or fails its [`check`](Self::check).
    pub fn read(json: impl Read) -> Result<Self> {
        let mut json = BufReader::new(json);
        let head = json.fill_buf().map_err(|e| Error::Snapshot(format!("no snapshot: {e}")))?;
        let kind = file_kind::describe(&head[..head.len().min(file_kind::HEADER_LEN)]);
        let starts = head.trim_ascii_start().starts_with(b"{\"version\"");
        // Versions differ in the rest of the form, so the version is read first.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let no_snapshot = |e: &dyn std::fmt::Display| {
            Error::Snapshot(match kind {
                Some(kind) if !starts => format!(
                    "no snapshot of memory: {kind}. A snapshot is the JSON that `snapshot.save(\"memory.json\")` writes ({e})"
                ),
                _ => format!(
                    "no snapshot of memory, or a damaged one: {e}. `snapshot.save(\"memory.json\")` writes one"
                ),
            })
        };
        let mut text = Vec::new();
        json.read_to_end(&mut text).map_err(|e| no_snapshot(&e))?;
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
