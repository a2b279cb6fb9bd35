//! Moving blocks that are in use: memory that is free in parts becomes free in one piece, for a copy instead of a growth.
//!
//! Contract. A block moves only if whoever holds it said that it may ([`Request::movable`]), and it is neither pinned nor of a
//! private pool. Its holder keeps a handle, and looks up where it is ([`Pool::locate`]) behind the gate of the pool's [`BlockMover`], each
//! time that blocks have moved ([`Pool::moves`]), up to where its work is enqueued. The copies are enqueued behind the gate too, after
//! all that any queue was given and before all that it is given next, so nobody sees a block on its way.
//!
//! What moves depends on nothing but the requests: a device that runs nothing moves the same.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use super::compaction_planner::{CompactionPlanner, Gap, GapCandidate, MovableRuns};
use super::free_list::FreeBlock;
use super::heap::{AllocRequest, NO_BLOCK, SHARED_OWNER, Segment};
use super::pool::{Block, Pool, Request};
use super::pool_state::{GrowOutcome, IdleKind, PoolState};
use super::source::{PageRemap, SegmentId, SegmentSource, SourceError};
use crate::error::Result;

/// What enqueuing a copy costs, in bytes that could be copied meanwhile.
pub(super) const COPY_COST: u64 = 1 << 20;
/// How deep holes are made for blocks that go to make one.
const MAX_NESTED_GAPS: usize = 2;
/// How often holes are filled for a request, at most: each time there are fewer.
const MAX_DEFRAGMENT_ROUNDS: usize = 4;
/// Segments are emptied for less than a request would need where that gives this part back of what the program has used.
const MIN_GAIN_DIVISOR: u64 = 16;
/// A new segment for what is in the way of a request is worth it below this part (of 10) of one for the request.
const SMALLER_GROWTH_TENTHS: u64 = 8;
/// And where at least this part of the request is free.
const MIN_FREE_DIVISOR: u64 = 10;
const SEGMENT_ROUNDING: u64 = 2 << 20;

/// The way of a block, or of a part of it. It does not overlap where it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockMove {
    pub(crate) from: (SegmentId, u64),
    pub(crate) to: (SegmentId, u64),
    pub(crate) bytes: u64,
}

/// Something that is held, and given up by dropping it.
pub(crate) trait HeldDispatch {}

impl<T> HeldDispatch for T {}

/// Who copies blocks for a pool.
pub(crate) trait BlockMover: Send + Sync + fmt::Debug {
    /// Keeps everyone from looking up where blocks are, until the guard is dropped. Who did before has enqueued the work.
    fn lock_dispatch(&self) -> Box<dyn HeldDispatch + '_>;
    /// Enqueues copies on a queue, in order: after all that any queue was given so far, and before all that it is given next.
    fn enqueue_copies(&self, queue: u8, moves: &[BlockMove]) -> Result<()>;
}

/// What became of moving blocks.
enum CompactOutcome {
    /// They have moved.
    Moved,
    /// Idle segments of so many bytes have to go first, or the pool would hold too much with the one that it takes.
    ReleaseFirst(u64),
    NotPossible,
}

impl PoolState {
    /// Whether the pool moves blocks instead of growing past what the program has shown to need.
    pub(super) fn is_compaction_enabled(&self) -> bool {
        self.has_mover && self.config.compaction && self.config.max_split_size.is_none()
    }

    /// Whether moving blocks may serve a request: there is something free.
    pub(super) fn can_compact(&self, need: &AllocRequest) -> bool {
        let counters = &self.heap.counters;
        let owner = self.heap.arenas[usize::from(need.arena)].owner;
        self.is_compaction_enabled()
            && owner == SHARED_OWNER
            && counters.reserved() > counters.active() + counters.releasing_bytes
    }

    /// Serves a request by moving blocks. Else it may have made segments idle that would be too many: `surplus` bytes of them. Or idle
    /// segments have to go `first`.
    fn try_compact(
        &mut self,
        source: &dyn SegmentSource,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        surplus: u64,
        first: bool,
    ) -> Result<CompactOutcome> {
        let free =
            CompactionPlanner::new(&mut self.heap, &mut self.spare_heaps, &self.pinned_slots, need.arena)
                .free_blocks();
        let sum = free.iter().map(|e| e.size).sum::<u64>();
        let (enough, emptier) = (sum >= need.size, sum >= self.min_evacuation_gain(surplus));
        let less = sum >= need.size / MIN_FREE_DIVISOR && self.has_own_segment(need);
        if !enough && !less && !emptier {
            return Ok(CompactOutcome::NotPossible);
        }
        // Unless a plan succeeds, the heap stays as it is: what was found for one is good for the next.
        let runs =
            CompactionPlanner::new(&mut self.heap, &mut self.spare_heaps, &self.pinned_slots, need.arena)
                .find_movable_runs();
        if enough || less {
            let planner =
                CompactionPlanner::new(&mut self.heap, &mut self.spare_heaps, &self.pinned_slots, need.arena);
            let found = planner.find_gaps(need.size, &runs);
            if enough
                && self.execute_plan(mover, need, |planner| {
                    planner.open_any_gap(need.size, &found, &runs, &free, MAX_NESTED_GAPS)
                })?
            {
                return Ok(CompactOutcome::Moved);
            }
            if enough
                && self
                    .execute_plan(mover, need, |planner| planner.partial_evict_any(need.size, &runs, &free))?
            {
                return Ok(CompactOutcome::Moved);
            }
            if less {
                match self.grow_smaller_and_evict(source, mover, need, &found, &free, first)? {
                    CompactOutcome::NotPossible => {}
                    done => return Ok(done),
                }
            }
        }
        if emptier {
            self.evacuate_segments(source, mover, need, surplus, (&runs, &free), first)
        } else {
            Ok(CompactOutcome::NotPossible)
        }
    }

    /// A new segment of so many bytes, for blocks that go there.
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
        Ok(if self.add_free_segment(source, need, size)? {
            CompactOutcome::Moved
        } else {
            CompactOutcome::NotPossible
        })
    }

    /// Grows by less than a request, where a segment is large enough for it: what is in that moves to the new one.
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
        let planner =
            CompactionPlanner::new(&mut self.heap, &mut self.spare_heaps, &self.pinned_slots, need.arena);
        let mut best: Option<(u64, Gap)> = None;
        for gap in found.iter().map(|found| planner.build_gap(need.size, *found)).filter(Gap::is_eviction) {
            let size = planner.unplaced_bytes(&gap, free, 0).next_multiple_of(SEGMENT_ROUNDING).max(least);
            if best.as_ref().is_none_or(|best| size < best.0) {
                best = Some((size, gap));
            }
            // None is smaller.
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
        let made = self.execute_plan(mover, need, |planner| planner.save_and_open_gap(gap, 0))?;
        Ok(if made { CompactOutcome::Moved } else { CompactOutcome::NotPossible })
    }

    /// The bytes that emptying segments has to give back: what is too many, or so much that it is worth it by itself.
    fn min_evacuation_gain(&self, surplus: u64) -> u64 {
        surplus.min(self.heap.counters.peak_active_bytes / MIN_GAIN_DIVISOR)
    }

    /// Empties segments of `surplus` bytes, so that they go back instead of the pool growing by as much. What was in them may
    /// take a new segment, a smaller one.
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
        let planner =
            CompactionPlanner::new(&mut self.heap, &mut self.spare_heaps, &self.pinned_slots, need.arena);
        let segments = planner.segments_by_evacuation_cost(surplus, runs);
        let emptied = planner.select_evacuations(&segments, free, surplus, worth).map(|gap| (gap, 0));
        let enough = emptied.as_ref().is_some_and(|(gap, _)| gap.size >= surplus);
        let refilled = segments.get(..1).filter(|_| !enough).and_then(|segment| {
            let gap = planner.whole_segments_gap(segment);
            let missing = planner.unplaced_bytes(&gap, free, 0).next_multiple_of(SEGMENT_ROUNDING);
            let gain = gap.size.saturating_sub(missing);
            (gain >= worth.max(missing) && planner.fits(&gap, free, missing)).then_some((gap, missing))
        });
        // What gives more back.
        let found = refilled
            .into_iter()
            .chain(emptied)
            .max_by_key(|(gap, missing)| (gap.size - missing).min(surplus));
        // What is idle already goes by itself.
        let Some((gap, missing)) = found.filter(|(gap, _)| !planner.is_gap_idle(gap)) else {
            return Ok(CompactOutcome::NotPossible);
        };
        let there = match missing {
            0 => CompactOutcome::Moved,
            _ => self.add_segment_for_moves(source, need, missing, first)?,
        };
        if let CompactOutcome::Moved = there { self.execute_gap(mover, need, &gap) } else { Ok(there) }
    }

    /// Serves a request from free blocks, of its own queue or another one.
    fn take_any_stream(&mut self, source: &dyn SegmentSource, need: &AllocRequest) -> Result<Option<Block>> {
        match self.take_free_block(source, need)? {
            None => self.take_cross_stream(source, need, false),
            served => Ok(served),
        }
    }

    /// Pushes all blocks together, before a request fails: what is free in small parts serves it, or can leave in whole pages.
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

    /// Serves a request by moving blocks, and where the device is `full`, at last by moving all of them.
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

    /// Maps memory in the smallest holes of a range, as far as there is room: the blocks beside them become neighbours. Whether any was.
    fn map_holes(&mut self, source: &dyn SegmentSource, need: &AllocRequest) -> Result<bool> {
        let Some(page) = self.virtual_memory.map(|v| v.granularity) else { return Ok(false) };
        let Some(segment) = self.heap.arenas[usize::from(need.arena)].virtual_range else { return Ok(false) };
        let Segment { id, virtual_range: range, .. } = self.heap.segment(segment);
        let holes = range.iter().flat_map(|range| &range.holes).map(|at| self.heap.slot(*at));
        // The last one has no end.
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
        self.num_device_alloc += 1;
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

    /// Lets `plan` move blocks, and copies them. If it fails, nothing has happened.
    fn execute_plan(
        &mut self,
        mover: &dyn BlockMover,
        need: &AllocRequest,
        plan: impl FnOnce(&mut CompactionPlanner<'_>) -> bool,
    ) -> Result<bool> {
        let recorder = self.heap.recorder.take();
        let mut planner =
            CompactionPlanner::new(&mut self.heap, &mut self.spare_heaps, &self.pinned_slots, need.arena);
        let found = plan(&mut planner);
        let (plan, before) = planner.finish();
        let queue = self.heap.arenas[usize::from(need.arena)].queue;
        let done = if found { mover.enqueue_copies(queue, &plan.copies).map(|()| true) } else { Ok(false) };
        let moved = matches!(done, Ok(true));
        if let Some(before) = before {
            let gone = if moved { before } else { std::mem::replace(&mut self.heap, before) };
            self.spare_heaps.push(gone);
        }
        self.heap.recorder = recorder;
        if !moved {
            return done;
        }
        for (slot, from) in &plan.moved {
            self.heap.record_move(*slot, *from);
        }
        self.num_compactions += 1;
        self.compacted_bytes += plan.bytes;
        self.migration_budget
            .add(self.heap.counters.total_allocated(), plan.bytes + COPY_COST * plan.copies.len() as u64);
        done
    }
}

impl Pool {
    /// The same, with somebody who moves blocks for it; one is enough.
    pub(crate) fn with_mover(self, mover: Arc<dyn BlockMover>) -> Self {
        if self.shared.mover.set(mover).is_ok() {
            self.shared.lock().set_mover();
        }
        self
    }

    /// How often blocks have moved. Unless this has changed, a block is where it was; behind the gate it does not change.
    #[inline]
    pub(crate) fn move_count(&self) -> u64 {
        self.shared.move_count.load(Ordering::Acquire)
    }

    /// Looks up where a block is.
    #[cold]
    pub(crate) fn refresh_location(&self, block: &mut Block) {
        let state = self.shared.lock();
        if let Some(slot) = state.heap.find_slot(block) {
            let slot = state.heap.slot(slot);
            (block.segment, block.offset) = (state.heap.segment(slot.segment).id, slot.offset);
        }
    }

    /// Keeps a block where it is until [`unpin`](Self::unpin), which undoes one of these.
    pub(crate) fn pin(&self, block: &Block) {
        self.shared.lock().pinned_slots.push(block.slot);
    }

    pub(crate) fn unpin(&self, block: &Block) {
        let pinned = &mut self.shared.lock().pinned_slots;
        if let Some(at) = pinned.iter().position(|slot| *slot == block.slot) {
            pinned.swap_remove(at);
        }
    }

    /// The rung: behind the gate, and with the search that follows. Idle segments that have to go first, do.
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
        state.reclaim_stats.compact.tried += 1;
        // Another thread may have freed what fits.
        let (mut done, mut served) =
            (CompactOutcome::NotPossible, state.take_free_block(&*shared.source, need)?);
        if served.is_none() {
            let before = state.num_compactions;
            let moved = state.compact_and_take(&*shared.source, &**mover, need, full, first);
            if state.num_compactions != before {
                shared.move_count.fetch_add(1, Ordering::Release);
            }
            (done, served) = moved?;
        }
        state.reclaim_stats.compact.served += u64::from(served.is_some());
        Ok((done, served, state))
    }

    /// The last rung of a range of addresses, where a hardly larger limit would do: between blocks and holes less than a page is
    /// free each time. Holes are filled, blocks pushed together, and the pages that this leaves go to where they are needed.
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
                    state.reclaim_stats.release.served += 1;
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
    /// For a block that may move: who holds it asks where it is.
    #[must_use]
    #[inline]
    pub(crate) fn movable(self) -> Self {
        Self { movable: true, ..self }
    }
}
