//! Compaction: moves blocks in use so that free fragments become one free block, at the price of a copy
//! instead of growth.
//!
//! A block moves only if its request was [`movable`](Request::movable), it is not pinned and it belongs to no
//! private pool. Its holder keeps a handle and looks up the address ([`Pool::refresh_location`]) whenever
//! [`Pool::move_count`] has changed. The holder does so under the dispatch lock of the pool's [`BlockMover`],
//! which it keeps until its work is enqueued.
//!
//! Copies are enqueued under the same lock: after all work submitted to any queue, and before all later work.
//! So no operation sees a block in motion.
//!
//! The plan depends only on the requests: a device that executes nothing moves the same blocks.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use super::compaction_planner::{CompactionPlanner, Gap, GapCandidate, MovableRuns};
use super::free_list::FreeBlock;
use super::grow::SEGMENT_UNIT;
use super::heap::{AllocRequest, NO_BLOCK, SHARED_OWNER, Segment};
use super::pool::{Block, Pool, Request};
use super::pool_state::{GrowOutcome, IdleKind, PoolState};
use super::source::{PageRemap, SegmentId, SegmentSource, SourceError};
use crate::memory::error::Result;

/// Cost of enqueuing a copy, in bytes that could be copied meanwhile.
pub(super) const COPY_COST: u64 = 1 << 20;
/// Most rounds of filling holes for one request; each round leaves fewer.
const MAX_DEFRAGMENT_ROUNDS: usize = 4;
/// Segments are also evacuated for less than the surplus, if that returns this part of the peak usage.
const MIN_GAIN_DIVISOR: u64 = 32;
/// A new segment for the evicted blocks is worthwhile if it is smaller than these tenths of the request.
const SMALLER_GROWTH_TENTHS: u64 = 8;

/// Move of a block or of a part of it. Source and destination do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockMove {
    pub(crate) from: (SegmentId, u64),
    pub(crate) to: (SegmentId, u64),
    pub(crate) bytes: u64,
}

/// Guard that releases what it holds when dropped.
pub(crate) trait HeldDispatch {}

impl<T> HeldDispatch for T {}

/// Copies blocks for a pool.
pub(crate) trait BlockMover: Send + Sync + fmt::Debug {
    /// Locks dispatch, so that no operation looks up addresses until the guard is dropped. Operations that
    /// looked up addresses earlier have enqueued their work.
    fn lock_dispatch(&self) -> Box<dyn HeldDispatch + '_>;
    /// Enqueues copies on a queue, in order: after all work submitted to any queue so far, and before all
    /// later work.
    fn enqueue_copies(&self, queue: u8, moves: &[BlockMove]) -> Result<()>;
}

/// Result of a compaction attempt.
enum CompactOutcome {
    /// Blocks moved.
    Moved,
    /// Idle segments of this many bytes must be released first; otherwise the pool would exceed its target
    /// with the segment it needs.
    ReleaseFirst(u64),
    NotPossible,
}

impl PoolState {
    /// Reports whether the pool moves blocks before it grows past what the program has shown to need.
    pub(super) fn is_compaction_enabled(&self) -> bool {
        self.has_mover && self.config.compaction && self.config.max_split_size.is_none()
    }

    /// Reports whether compaction may serve a request: it is enabled and some memory is free.
    pub(super) fn can_compact(&self, need: &AllocRequest) -> bool {
        let counters = &self.heap.counters;
        let owner = self.heap.arenas[usize::from(need.arena)].owner;
        self.is_compaction_enabled()
            && owner == SHARED_OWNER
            && counters.reserved() > counters.active() + counters.releasing_bytes
    }

    fn planner(&mut self, need: &AllocRequest) -> CompactionPlanner<'_> {
        CompactionPlanner::new(&mut self.heap, &self.pinned_slots, need.arena)
    }

    /// Moves blocks to serve a request. If that fails, it may have evacuated segments, up to `surplus` bytes.
    /// With `first`, it may ask for idle segments to be released first.
    fn try_compact(
        &mut self,
        source: &dyn SegmentSource,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        surplus: u64,
        first: bool,
    ) -> Result<CompactOutcome> {
        let free = self.planner(need).free_blocks();
        let sum = free.iter().map(|e| e.size).sum::<u64>();
        let (enough, emptier) = (sum >= need.size, sum >= self.min_evacuation_gain(surplus));
        let less = self.has_own_segment(need);
        if !enough && !less && !emptier {
            return Ok(CompactOutcome::NotPossible);
        }
        // The heap changes only if a plan succeeds, so what one search found is valid for the next.
        let runs = self.planner(need).find_movable_runs();
        let found = self.planner(need).find_gaps(need.size, &runs);
        if enough
            && (self.execute_plan(mover, need, |p| p.open_any_gap(need.size, &found, &runs, &free, true))?
                || self.execute_plan(mover, need, |p| p.partial_evict_any(need.size, &runs, &free))?)
        {
            return Ok(CompactOutcome::Moved);
        }
        if less {
            match self.grow_smaller_and_evict(source, mover, need, &found, &free, first)? {
                CompactOutcome::NotPossible => {}
                done => return Ok(done),
            }
        }
        if emptier {
            self.evacuate_segments(source, mover, need, surplus, (&runs, &free), first)
        } else {
            Ok(CompactOutcome::NotPossible)
        }
    }

    /// Adds a segment of `size` bytes as a destination of moves.
    fn add_segment_for_moves(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        size: u64,
        first: bool,
    ) -> Result<CompactOutcome> {
        let over = self.surplus_after_growth(need, size);
        if first && over > 0 && self.idle_memory().iter().any(|i| matches!(i.kind, IdleKind::Segment(_))) {
            return Ok(CompactOutcome::ReleaseFirst(over));
        }
        let added = self.add_free_segment(source, need, size)?;
        Ok(if added.is_ok() { CompactOutcome::Moved } else { CompactOutcome::NotPossible })
    }

    /// Grows by less than the request: the blocks of a gap large enough for the request move to a smaller new
    /// segment.
    fn grow_smaller_and_evict(
        &mut self,
        source: &dyn SegmentSource,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        found: &[GapCandidate],
        free: &[FreeBlock],
        first: bool,
    ) -> Result<CompactOutcome> {
        let (least, most) = (self.min_segment_size(need), need.size / 10 * SMALLER_GROWTH_TENTHS);
        if least >= most {
            return Ok(CompactOutcome::NotPossible);
        }
        let planner = self.planner(need);
        let mut best: Option<(u64, Gap)> = None;
        for gap in found.iter().map(|found| planner.build_gap(need.size, *found)).filter(Gap::is_eviction) {
            let size = planner.unplaced_bytes(&gap, free, 0).next_multiple_of(SEGMENT_UNIT).max(least);
            if best.as_ref().is_none_or(|best| size < best.0) {
                best = Some((size, gap));
            }
            // No later gap can be smaller.
            if size == least {
                break;
            }
        }
        let found = best.filter(|(size, gap)| *size < most && planner.fits(gap, free, *size));
        let Some((size, gap)) = found else { return Ok(CompactOutcome::NotPossible) };
        match self.add_segment_for_moves(source, need, size, first)? {
            CompactOutcome::Moved => self.execute_gap(mover, need, &gap),
            other => Ok(other),
        }
    }

    fn execute_gap(
        &mut self,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        gap: &Gap,
    ) -> Result<CompactOutcome> {
        let made = self.execute_plan(mover, need, |planner| {
            planner.try_or_restore(|planner| planner.open_gap(gap, false))
        })?;
        Ok(if made { CompactOutcome::Moved } else { CompactOutcome::NotPossible })
    }

    /// Returns the fewest bytes worth evacuating segments for: the surplus, or a notable part of the peak
    /// usage.
    fn min_evacuation_gain(&self, surplus: u64) -> u64 {
        surplus.min(self.heap.counters.peak_active_bytes / MIN_GAIN_DIVISOR)
    }

    /// Evacuates segments of `surplus` bytes, which are then released instead of the pool growing by as much.
    /// Their blocks may move to a new, smaller segment.
    fn evacuate_segments(
        &mut self,
        source: &dyn SegmentSource,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        surplus: u64,
        (runs, free): (&MovableRuns, &[FreeBlock]),
        first: bool,
    ) -> Result<CompactOutcome> {
        let worth = self.min_evacuation_gain(surplus);
        let planner = self.planner(need);
        let segments = planner.segments_by_evacuation_cost(surplus, runs);
        let emptied = planner.select_evacuations(&segments, free, surplus, worth).map(|gap| (gap, 0));
        let enough = emptied.as_ref().is_some_and(|(gap, _)| gap.size >= surplus);
        let refilled = segments.get(..1).filter(|_| !enough).and_then(|segment| {
            let gap = planner.whole_segments_gap(segment);
            let missing = planner.unplaced_bytes(&gap, free, 0).next_multiple_of(SEGMENT_UNIT);
            let gain = gap.size.saturating_sub(missing);
            (gain >= worth.max(missing) && planner.fits(&gap, free, missing)).then_some((gap, missing))
        });
        // Choose the option that returns more memory.
        let found = refilled
            .into_iter()
            .chain(emptied)
            .max_by_key(|(gap, missing)| (gap.size - missing).min(surplus));
        // Segments that are idle already are released without compaction.
        let Some((gap, missing)) = found.filter(|(gap, _)| !planner.is_gap_idle(gap)) else {
            return Ok(CompactOutcome::NotPossible);
        };
        let there = match missing {
            0 => CompactOutcome::Moved,
            _ => self.add_segment_for_moves(source, need, missing, first)?,
        };
        if let CompactOutcome::Moved = there { self.execute_gap(mover, need, &gap) } else { Ok(there) }
    }

    /// Serves a request from free blocks of its own queue or of another one.
    fn take_any_stream(&mut self, source: &dyn SegmentSource, need: &AllocRequest) -> Result<Option<Block>> {
        match self.take_free_block(source, need)? {
            None => self.take_cross_stream(source, need, false),
            served => Ok(served),
        }
    }

    /// Slides all blocks together before a request fails. The free memory then serves the request, or can be
    /// unmapped in whole pages.
    fn compact_all(
        &mut self,
        source: &dyn SegmentSource,
        mover: &dyn BlockMover,
        need: &AllocRequest,
    ) -> Result<Option<Block>> {
        match self.execute_plan(mover, need, |planner| planner.compact_all())? {
            true => self.take_any_stream(source, need),
            false => Ok(None),
        }
    }

    /// Serves a request by moving blocks; if the device is `full`, by moving all of them as the last step.
    fn compact_and_take(
        &mut self,
        source: &dyn SegmentSource,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        full: bool,
        first: bool,
    ) -> Result<(CompactOutcome, Option<Block>)> {
        let surplus = if full { need.size } else { self.surplus(need) };
        let done = self.try_compact(source, mover, need, surplus, first)?;
        let mut served = match done {
            CompactOutcome::Moved => self.take_any_stream(source, need)?,
            CompactOutcome::ReleaseFirst(_) | CompactOutcome::NotPossible => None,
        };
        if full && served.is_none() {
            served = self.compact_all(source, mover, need)?;
        }
        Ok((done, served))
    }

    /// Maps memory in the smallest holes of a range, within the limits, so that the blocks around them become
    /// neighbours. Returns true if any hole was filled.
    fn map_holes(&mut self, source: &dyn SegmentSource, need: &AllocRequest) -> Result<bool> {
        let Some(page) = self.virtual_memory.map(|v| v.granularity) else { return Ok(false) };
        let Some(segment) = self.heap.arenas[usize::from(need.arena)].virtual_range else { return Ok(false) };
        let Segment { id, virtual_range: range, .. } = self.heap.segment(segment);
        let holes = range.iter().flat_map(|range| &range.holes).map(|at| self.heap.slot(*at));
        // The last hole is the unused end of the range.
        let mut holes: Vec<(u64, u64)> =
            holes.filter(|s| s.next != NO_BLOCK).map(|s| (s.size, s.offset)).collect();
        holes.sort_unstable();
        let (id, each) = (*id, self.extent_size(need, page));
        let reserved = self.heap.counters.reserved();
        let room = self.capacity(source.device_memory()).unwrap_or(u64::MAX).saturating_sub(reserved);
        let mut new = 0;
        let mut pieces = Vec::new();
        for (size, offset) in holes {
            if new + size > room {
                break;
            }
            new += size;
            let parts = (0..size).step_by(each as usize);
            pieces.extend(parts.map(|at| PageRemap {
                to: (id, offset + at),
                bytes: each.min(size - at),
                from: None,
            }));
        }
        if pieces.is_empty() || self.exceeds_limit(new) {
            return Ok(false);
        }
        self.totals.num_device_alloc += 1;
        match source.remap(&pieces) {
            Ok(()) => {}
            Err(SourceError::OutOfMemory { .. }) => return Ok(false),
            Err(other) => return Err(other.into()),
        }
        for run in pieces.chunk_by(|a, b| a.to.1 + a.bytes == b.to.1) {
            self.heap.mark_mapped(segment, run);
        }
        Ok(true)
    }

    /// Runs `plan` and enqueues its copies. If it fails, the heap is restored.
    fn execute_plan(
        &mut self,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        plan: impl FnOnce(&mut CompactionPlanner<'_>) -> bool,
    ) -> Result<bool> {
        let recorder = self.heap.recorder.take();
        let mut planner = self.planner(need);
        let found = plan(&mut planner);
        let (plan, before) = planner.finish();
        let queue = self.heap.arenas[usize::from(need.arena)].queue;
        let done = if found { mover.enqueue_copies(queue, &plan.copies).map(|()| true) } else { Ok(false) };
        let moved = matches!(done, Ok(true));
        if let Some(before) = before
            && !moved
        {
            self.heap = before;
        }
        self.heap.recorder = recorder;
        if !moved {
            return done;
        }
        for (slot, from) in &plan.moved {
            self.heap.record_move(*slot, *from);
        }
        self.totals.num_compactions += 1;
        self.totals.compacted_bytes += plan.bytes;
        self.migration_budget
            .add(self.heap.counters.total_allocated(), plan.bytes + COPY_COST * plan.copies.len() as u64);
        done
    }
}

impl Pool {
    /// Registers the block mover; only the first one counts.
    pub(crate) fn with_mover(self, mover: Arc<dyn BlockMover>) -> Self {
        if self.shared.mover.set(mover).is_ok() {
            self.shared.lock().set_mover();
        }
        self
    }

    /// Returns the number of compactions. While it is unchanged, addresses of blocks are valid; it does not
    /// change under the dispatch lock.
    #[inline]
    pub(crate) fn move_count(&self) -> u64 {
        self.shared.move_count.load(Ordering::Acquire)
    }

    /// Updates the address of a block after it may have moved.
    #[cold]
    pub(crate) fn refresh_location(&self, block: &mut Block) {
        let state = self.shared.lock();
        if let Some(slot) = state.heap.find_slot(block) {
            let slot = state.heap.slot(slot);
            (block.segment, block.offset) = (state.heap.segment(slot.segment).id, slot.offset);
        }
    }

    /// Pins a block at its address until a matching [`unpin`](Self::unpin). Pins nest.
    pub(crate) fn pin(&self, block: &Block) {
        self.shared.lock().pinned_slots.push(block.slot);
    }

    pub(crate) fn unpin(&self, block: &Block) {
        let pinned = &mut self.shared.lock().pinned_slots;
        if let Some(at) = pinned.iter().position(|slot| *slot == block.slot) {
            pinned.swap_remove(at);
        }
    }

    /// Compacts under the dispatch lock and searches again. Idle segments are released first where necessary.
    pub(super) fn compact<'a>(
        &'a self,
        state: MutexGuard<'a, PoolState>,
        need: &AllocRequest,
        full: bool,
    ) -> Result<(Option<Block>, MutexGuard<'a, PoolState>)> {
        let (done, block, mut state) = self.compact_once(state, need, full, !full)?;
        let CompactOutcome::ReleaseFirst(bytes) = done else { return Ok((block, state)) };
        let mut idle = state.idle_memory();
        idle.retain(|i| matches!(i.kind, IdleKind::Segment(_)));
        idle.sort_by_key(|i| std::cmp::Reverse(i.size));
        let chosen = state.select_idle(idle, bytes);
        state.release_idle(&*self.shared.source, &chosen, false)?;
        let state = self.wait_pending_fences(state)?;
        let (_, block, state) = self.compact_once(state, need, full, false)?;
        Ok((block, state))
    }

    fn compact_once<'a>(
        &'a self,
        state: MutexGuard<'a, PoolState>,
        need: &AllocRequest,
        full: bool,
        first: bool,
    ) -> Result<(CompactOutcome, Option<Block>, MutexGuard<'a, PoolState>)> {
        let shared = &*self.shared;
        let Some(mover) = shared.mover.get().filter(|_| state.can_compact(need)) else {
            return Ok((CompactOutcome::NotPossible, None, state));
        };
        drop(state);
        let _gate = mover.lock_dispatch();
        let mut state = shared.lock();
        state.totals.reclaim_stats.compact.tried += 1;
        // Another thread may have freed a fitting block.
        let (mut done, mut served) =
            (CompactOutcome::NotPossible, state.take_free_block(&*shared.source, need)?);
        if served.is_none() {
            let before = state.totals.num_compactions;
            let moved = state.compact_and_take(&*shared.source, &**mover, need, full, first);
            if state.totals.num_compactions != before {
                shared.move_count.fetch_add(1, Ordering::Release);
            }
            (done, served) = moved?;
        }
        state.totals.reclaim_stats.compact.served += u64::from(served.is_some());
        Ok((done, served, state))
    }

    /// Serves a request at the limit by defragmenting a virtual range, whose blocks and holes leave less than
    /// a page free between them. Holes are filled, blocks slid together, and the pages that become free move
    /// to where memory is missing.
    pub(super) fn defragment<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        need: &AllocRequest,
    ) -> Result<(Option<Block>, MutexGuard<'a, PoolState>)> {
        let source = &*self.shared.source;
        for _ in 0..MAX_DEFRAGMENT_ROUNDS {
            if !state.can_compact(need) || !state.map_holes(source, need)? {
                break;
            }
            let (mut served, next) = self.compact(state, need, true)?;
            state = next;
            if served.is_none() {
                state.release_largest_idle(source, u64::MAX)?;
                state = self.wait_pending_fences(state)?;
                if let GrowOutcome::Served(block) = state.grow(source, need, None, 0)? {
                    state.totals.reclaim_stats.release.served += 1;
                    served = Some(block);
                }
            }
            if served.is_some() {
                return Ok((served, state));
            }
        }
        Ok((None, state))
    }
}

impl Request {
    /// Marks the request's block as movable: its holder looks up the address under the dispatch lock.
    #[must_use]
    #[inline]
    pub(crate) fn movable(self) -> Self {
        Self { movable: true, ..self }
    }
}
