//! Test of the pool against a model, for any device: random operations, with every byte of every block
//! checked. The unit tests of forebay-core include this file.
//!
//! The model knows which ranges of which segments are allocated or wait for a fence. The test fails with a
//! message if a block overlaps such a range, a byte changes, or statistics contradict each other.

use std::collections::BTreeMap;

use super::memory::source::{Fence, SegmentId, SegmentSource};
use super::memory::{Block, Error, Pool, PoolStat, Request, Result, Stat, Stats, Tag};

/// A device whose memory can be written and read.
pub(crate) trait DeviceContents {
    /// Writes all of a block: `data` has its rounded size.
    fn write(&self, block: &Block, data: &[u8]) -> Result<()>;
    /// Reads all of a block.
    fn read(&self, block: &Block, data: &mut [u8]) -> Result<()>;
    /// Returns the source of its segments.
    fn source(&self) -> &dyn SegmentSource;
    /// Returns the number of events recorded so far.
    fn event_count(&self) -> u64 {
        0
    }
    /// Reports whether queue `to` waits for an event of queue `from` that was recorded after `after` events.
    fn waits_for(&self, from: u8, to: u8, after: u64) -> bool {
        let _ = (from, to, after);
        true
    }
    /// Makes the block of a request movable, if the pool moves blocks.
    fn make_movable(&self, request: Request) -> Request {
        request
    }
    /// Returns the number of times that the pool has moved blocks.
    fn move_count(&self, pool: &Pool) -> u64 {
        let _ = pool;
        0
    }
    /// Updates the address of a block that may have moved.
    fn refresh_location(&self, pool: &Pool, block: &mut Block) {
        let _ = (pool, block);
    }
    /// Makes the device pass a fence.
    fn signal_fence(&self, fence: Fence) -> Result<()> {
        Ok(self.source().wait_fence(fence)?)
    }
}

/// One operation of the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolOp {
    /// Requests a block.
    Alloc {
        /// Bytes requested.
        bytes: u64,
        /// Queue of the request.
        queue: u8,
    },
    /// Frees the live block at this index (modulo their number).
    Free(usize),
    /// Frees the live block at this index after a fence.
    FreeAfter(usize),
    /// Passes the oldest fence that a block waits for.
    SignalFence,
    /// Calls `empty_cache`.
    EmptyCache,
    /// Calls `trim`.
    Trim(u64),
}

impl PoolOp {
    /// Decodes an operation from random bits; requests are of at most `largest` bytes.
    pub(crate) fn from_bits(bits: u64, largest: u64) -> Self {
        let (kind, queue, index) = (bits % 64, (bits >> 6) % 8, (bits >> 9) as usize % 4096);
        match kind {
            0..32 => {
                // Sizes of each magnitude are equally likely, down to 0.
                let magnitude = (bits >> 9) % u64::from(largest.ilog2() + 1);
                let bytes = (bits >> 16) % (2 << magnitude);
                Self::Alloc { bytes: bytes.min(largest), queue: u8::from(queue == 0) }
            }
            32..48 => Self::Free(index),
            48..56 => Self::FreeAfter(index),
            56..61 => Self::SignalFence,
            61 => Self::EmptyCache,
            _ => Self::Trim((bits >> 9) % (largest * 8)),
        }
    }

    /// Generates `count` operations from a seed.
    pub(crate) fn sequence(seed: u64, count: usize, largest: u64) -> Vec<Self> {
        let mut state = seed;
        let mut next = || {
            // SplitMix64
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        (0..count).map(|_| Self::from_bits(next(), largest)).collect()
    }
}

/// Summary of a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolTestSummary {
    /// Requests that were served.
    pub(crate) served: u64,
    /// Requests that ran out of memory.
    pub(crate) refused: u64,
    /// Requests that moved blocks.
    pub(crate) moves: u64,
}

/// Runs operations on a pool of the device, checks all invariants after each, and frees the remaining blocks.
///
/// # Errors
/// A message that names the operation and the broken invariant.
pub(crate) fn check_pool<D: DeviceContents + ?Sized>(
    pool: &Pool,
    device: &D,
    ops: &[PoolOp],
) -> Result<PoolTestSummary, String> {
    let mut model = PoolModel {
        pool,
        device,
        live: Vec::new(),
        pending: Vec::new(),
        occupied: BTreeMap::new(),
        uses: Vec::new(),
        seed: 0,
    };
    let mut summary = PoolTestSummary::default();
    for (number, op) in ops.iter().enumerate() {
        let outcome = model.apply_op(*op, &mut summary).and_then(|()| check_stats_invariants(&pool.stats()));
        outcome.map_err(|message| format!("operation {number}, {op:?}: {message}"))?;
    }
    model.finish()?;
    Ok(summary)
}

struct PoolModel<'a, D: ?Sized> {
    pool: &'a Pool,
    device: &'a D,
    /// Allocated blocks, and the seeds of their contents.
    live: Vec<(Block, u64)>,
    /// Blocks that wait for a fence, with the length of `uses` when the fence was recorded.
    pending: Vec<(Block, Fence, usize)>,
    /// Freed blocks, oldest first, with the number of events at the time; `None` once the host has waited.
    uses: Vec<Option<(Block, u64)>>,
    /// Ranges that are in use: (segment, start) to end.
    occupied: BTreeMap<(SegmentId, u64), u64>,
    seed: u64,
}

impl<D: DeviceContents + ?Sized> PoolModel<'_, D> {
    fn apply_op(&mut self, op: PoolOp, summary: &mut PoolTestSummary) -> Result<(), String> {
        match op {
            PoolOp::Alloc { bytes, queue } => {
                let tag = Tag::ALL[bytes as usize % Tag::COUNT];
                let (moves, events) = (self.device.move_count(self.pool), self.device.event_count());
                let request = Request::new(bytes).queue(queue).tag(tag);
                let served = self.pool.alloc(self.device.make_movable(request));
                if self.device.move_count(self.pool) != moves {
                    summary.moves += 1;
                    self.refresh_locations(events);
                }
                match served {
                    Ok(block) => {
                        summary.served += 1;
                        self.add_block(block, bytes, queue)?;
                    }
                    Err(Error::OutOfMemory(_)) => summary.refused += 1,
                    Err(other) => return Err(other.to_string()),
                }
            }
            PoolOp::Free(index) => {
                if let Some(block) = self.remove_block(index)? {
                    self.occupied.remove(&(block.segment, block.offset));
                    self.uses.push(Some((block, self.device.event_count())));
                    self.pool.free(block);
                }
            }
            PoolOp::FreeAfter(index) => {
                if let Some(block) = self.remove_block(index)? {
                    let fence = self.device.source().record_fence().map_err(to_message)?;
                    self.pending.push((block, fence, self.uses.len()));
                    self.pool.free_after(block, fence);
                }
            }
            PoolOp::SignalFence => {
                if let Some((_, fence, _)) = self.pending.first() {
                    self.device.signal_fence(*fence).map_err(to_message)?;
                }
            }
            PoolOp::EmptyCache => {
                self.pool.empty_cache().map_err(to_message)?;
            }
            PoolOp::Trim(keep) => {
                self.pool.trim(keep).map_err(to_message)?;
            }
        }
        Ok(())
    }

    /// Updates addresses after a compaction. The previous ranges were in use up to event number `events`.
    fn refresh_locations(&mut self, events: u64) {
        for (block, _) in &mut self.live {
            let before = *block;
            self.device.refresh_location(self.pool, block);
            if *block != before {
                self.uses.push(Some((before, events)));
            }
        }
        let waiting = self.pending.iter().map(|(block, ..)| block);
        let taken = self.live.iter().map(|(block, _)| block).chain(waiting);
        self.occupied = taken.map(|b| ((b.segment, b.offset), b.offset + b.size)).collect();
    }

    /// Checks that a new block overlaps no range in use, and fills it.
    fn add_block(&mut self, block: Block, bytes: u64, queue: u8) -> Result<(), String> {
        let overlaps = |b: &Block| {
            let apart = b.offset + b.size <= block.offset || block.offset + block.size <= b.offset;
            b.segment == block.segment && !apart
        };
        let mut still = Vec::new();
        for (block, fence, before) in std::mem::take(&mut self.pending) {
            if self.device.source().is_fence_signaled(fence).map_err(to_message)? {
                self.occupied.remove(&(block.segment, block.offset));
                self.uses[..before].fill(None);
            } else {
                still.push((block, fence, before));
            }
        }
        self.pending = still;
        for (before, events) in self.uses.iter().flatten().filter(|(b, _)| overlaps(b) && b.queue != queue) {
            if !self.device.waits_for(before.queue, queue, *events) {
                return Err(format!("{block:?} goes to queue {queue}, which does not wait for {before:?}"));
            }
        }
        if block.bytes != bytes || block.size < bytes {
            return Err(format!("{bytes} bytes were requested, got {block:?}"));
        }
        let (key, end) = ((block.segment, block.offset), block.offset + block.size);
        let before = self.occupied.range((block.segment, 0)..(block.segment, end)).next_back();
        if let Some((start, taken)) = before.filter(|(_, taken)| **taken > block.offset) {
            return Err(format!("{block:?} overlaps {start:?}..{taken}, which is not free"));
        }
        self.occupied.insert(key, end);
        self.seed += 1;
        self.device.write(&block, &byte_pattern(self.seed, block.size)).map_err(to_message)?;
        self.live.push((block, self.seed));
        Ok(())
    }

    /// Removes a live block after checking its contents.
    fn remove_block(&mut self, index: usize) -> Result<Option<Block>, String> {
        if self.live.is_empty() {
            return Ok(None);
        }
        let (block, seed) = self.live.swap_remove(index % self.live.len());
        let mut data = vec![0; block.size as usize];
        self.device.read(&block, &mut data).map_err(to_message)?;
        match data.iter().zip(byte_pattern(seed, block.size)).position(|(a, b)| *a != b) {
            Some(at) => Err(format!("byte {at} of {block:?} has changed")),
            None => Ok(Some(block)),
        }
    }

    fn finish(mut self) -> Result<(), String> {
        while let Some(block) = self.remove_block(0)? {
            self.pool.free(block);
        }
        self.pool.empty_cache().map_err(to_message)?;
        let stats = self.pool.stats();
        check_stats_invariants(&stats)?;
        if (stats.allocated(), stats.pending_bytes, stats.reserved()) != (0, 0, 0) {
            return Err(format!(
                "all was freed, but {} and {} pending",
                stats.summary(),
                stats.pending_bytes
            ));
        }
        Ok(())
    }
}

fn to_message(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Returns bytes that differ between blocks and positions.
fn byte_pattern(seed: u64, size: u64) -> Vec<u8> {
    let words =
        (0..size.div_ceil(8)).flat_map(|i| (seed.wrapping_mul(0x9e37_79b9) ^ i << 20 ^ i).to_le_bytes());
    words.take(size as usize).collect()
}

/// Checks the invariants between a pool's statistics.
pub(crate) fn check_stats_invariants(stats: &Stats) -> Result<(), String> {
    let of = |name: &str, pick: fn(&PoolStat) -> Stat| {
        let (allocated, active) = (pick(&stats.allocated_bytes).current, pick(&stats.active_bytes).current);
        let (reserved, requested) =
            (pick(&stats.reserved_bytes).current, pick(&stats.requested_bytes).current);
        let split = pick(&stats.inactive_split_bytes).current;
        let holds = requested <= allocated && allocated <= active && active + split <= reserved;
        let figures = format!("requested {requested}, allocated {allocated}, active {active}");
        if holds { Ok(()) } else { Err(format!("{name}: {figures}, split {split}, reserved {reserved}")) }
    };
    of("all", |s| s.all)?;
    of("small pool", |s| s.small_pool)?;
    of("large pool", |s| s.large_pool)?;
    let tags = stats.tags.iter().map(|t| t.current).sum::<u64>();
    if tags != stats.allocated() {
        return Err(format!("the tags sum up to {tags}, not to {}", stats.allocated()));
    }
    let stats = [&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.allocation];
    if stats
        .iter()
        .flat_map(|s| [s.all, s.small_pool, s.large_pool])
        .any(|s| s.current > s.peak || s.allocated < s.freed)
    {
        return Err("a figure is above its peak, or more was freed than allocated".to_owned());
    }
    Ok(())
}
