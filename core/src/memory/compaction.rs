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

use super::compaction_planner::{COPY_COST, CompactionPlanner, Plan};
use super::grow::{NOTABLE_DIVISOR, SEGMENT_UNIT};
use super::heap::{AllocRequest, SHARED_OWNER};
use super::pool::{Block, Pool, Request};
use super::pool_state::PoolState;
use super::reclaim::StepResult;
use super::source::SegmentId;
use crate::memory::error::Result;

/// Most rounds of filling holes for one request; each round leaves fewer.
const MAX_DEFRAGMENT_ROUNDS: usize = 4;
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

impl PoolState {
    /// Reports whether the pool moves blocks before it grows past what the program has shown to need.
    pub(super) fn is_compaction_enabled(&self) -> bool {
        self.mover.is_some() && self.config.compaction && self.config.max_split_size.is_none()
    }

    /// Reports whether compaction may serve a request: it is enabled and some memory is free.
    pub(super) fn can_compact(&self, need: &AllocRequest) -> bool {
        let counters = &self.heap.counters;
        let owner = self.heap.arenas[usize::from(need.arena)].owner;
        self.is_compaction_enabled()
            && owner == SHARED_OWNER
            && counters.reserved() > counters.active() + counters.releasing_bytes
    }

    /// Plans moves that serve a request, or else evacuate segments of about `surplus` bytes. Returns the size
    /// of the new segment that the plan needs, or 0.
    fn plan_compaction(&self, need: &AllocRequest, surplus: u64) -> Option<(Plan, u64)> {
        // The new segment of a plan must save a part of the request.
        let min_segment = self.min_segment_size(need);
        let max_segment = if self.has_own_segment(need) { need.size / 10 * SMALLER_GROWTH_TENTHS } else { 0 };
        // Segments are also evacuated for less than the surplus, if that returns a notable part of the peak.
        let worth = surplus.min(self.heap.counters.peak_active_bytes / NOTABLE_DIVISOR);
        let planner = CompactionPlanner::new(&self.heap, &self.pinned_slots, need.arena);
        let mut best: Option<(Plan, u64)> = None;
        let may_open = planner.free >= need.size || min_segment.max(need.size - planner.free) < max_segment;
        let windows = if may_open { planner.find_windows(need.size, u64::MAX) } else { Vec::new() };
        for window in windows {
            let Some(plan) = planner.plan(&[window], need.size) else { continue };
            if plan.overflow == 0 {
                return Some((plan, 0));
            }
            let size = plan.overflow.next_multiple_of(SEGMENT_UNIT).max(min_segment);
            if size < best.as_ref().map_or(max_segment, |best| best.1) {
                best = Some((plan, size));
            }
        }
        best.or_else(|| {
            let plan = planner.plan_evacuation(surplus, worth, SEGMENT_UNIT)?;
            let size = plan.overflow.next_multiple_of(SEGMENT_UNIT);
            Some((plan, size))
        })
    }

    /// Moves blocks to serve a request. If that fails, it may have evacuated segments. Or it returns the bytes of
    /// idle memory to release first, so that the pool does not exceed its target with the segment it needs.
    fn try_compact(&mut self, need: &AllocRequest, full: bool) -> Result<(Option<Block>, u64)> {
        let surplus = if full { need.size } else { self.surplus(need) };
        let mut served = None;
        if let Some((mut plan, size)) = self.plan_compaction(need, surplus) {
            let over = self.surplus_after_growth(need, size);
            if !full && over > 0 && !self.idle_memory().is_empty() {
                return Ok((None, over));
            }
            let added = if size > 0 { self.add_free_segment(need, size).map(Some) } else { Ok(None) };
            match added {
                Ok(segment) => {
                    plan.set_new_segment(segment);
                    served = self.execute_plan(need, &plan)?;
                }
                Err(error) => drop(error.into_full()?),
            }
        }
        if full && served.is_none() {
            // All blocks slide together before a request fails. The free memory then serves the request, or
            // can be unmapped in whole pages.
            let plan = CompactionPlanner::new(&self.heap, &self.pinned_slots, need.arena).plan_all();
            served = self.execute_plan(need, &plan)?;
        }
        Ok((served, 0))
    }

    /// Enqueues the copies of a plan, moves its blocks and searches again. If the copies fail, nothing has
    /// changed.
    fn execute_plan(&mut self, need: &AllocRequest, plan: &Plan) -> Result<Option<Block>> {
        let Some(mover) = self.mover.as_ref().filter(|_| !plan.moves.is_empty()) else { return Ok(None) };
        let copies = plan.copies(&self.heap);
        mover.enqueue_copies(self.heap.arenas[usize::from(need.arena)].queue, &copies)?;
        self.heap.move_blocks(&plan.moves);
        let bytes: u64 = copies.iter().map(|copy| copy.bytes).sum();
        self.totals.num_compactions += 1;
        self.totals.compacted_bytes += bytes;
        self.migration_budget
            .add(self.heap.counters.total_allocated, bytes + COPY_COST * copies.len() as u64);
        match self.take_free_block(need)? {
            None => self.take_cross_stream(need, false),
            served => Ok(served),
        }
    }
}

impl Pool {
    /// Registers the block mover; only the first one counts.
    pub(crate) fn with_mover(self, mover: Arc<dyn BlockMover>) -> Self {
        self.shared.lock().set_mover(mover);
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

    /// Compacts under the dispatch lock and searches again. Idle memory is released first where necessary.
    pub(super) fn compact<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        need: &AllocRequest,
        full: bool,
    ) -> StepResult<'a> {
        let shared = &*self.shared;
        while let Some(mover) = state.mover.clone().filter(|_| state.can_compact(need)) {
            drop(state);
            let dispatch = mover.lock_dispatch();
            state = shared.lock();
            state.totals.reclaim_stats.compact.tried += 1;
            // Another thread may have freed a fitting block.
            let mut served = state.take_free_block(need)?;
            let mut release = 0;
            if served.is_none() {
                let before = state.totals.num_compactions;
                let done = state.try_compact(need, full);
                if state.totals.num_compactions != before {
                    shared.move_count.fetch_add(1, Ordering::Release);
                }
                (served, release) = done?;
            }
            state.totals.reclaim_stats.compact.served += u64::from(served.is_some());
            if release == 0 {
                return Ok((served, state));
            }
            drop(dispatch);
            state.release_largest_idle(release)?;
            state = self.wait_pending_fences(state)?;
        }
        Ok((None, state))
    }

    /// Serves a request at the limit by defragmenting a virtual range, whose blocks and holes leave less than
    /// a page free between them. Holes are filled, blocks slid together, and the pages that become free move
    /// to where memory is missing.
    pub(super) fn defragment<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        need: &AllocRequest,
    ) -> StepResult<'a> {
        for _ in 0..MAX_DEFRAGMENT_ROUNDS {
            if !state.can_compact(need) || !state.map_holes(need)? {
                break;
            }
            let (mut served, next) = self.compact(state, need, true)?;
            state = next;
            if served.is_none() {
                state.release_largest_idle(u64::MAX)?;
                state = self.wait_pending_fences(state)?;
                match state.grow(need, None, 0) {
                    Ok(block) => {
                        state.totals.reclaim_stats.release.served += 1;
                        served = Some(block);
                    }
                    Err(error) => drop(error.into_full()?),
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
