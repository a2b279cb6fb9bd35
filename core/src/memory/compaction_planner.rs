//! Planner of compaction: changes a heap as if blocks had moved, and lists the copies that the moves need.

use super::compaction::{BlockMove, COPY_COST};
use super::free_list::FreeBlock;
use super::heap::{Arena, Heap, NO_BLOCK, SHARED_OWNER, Slot, SlotState as Is};
use super::source::SegmentId;

/// Most copies, and most blocks to evict, for one request.
const MAX_COPIES: usize = 256;
/// Most gaps tried for a request.
const MAX_GAPS: usize = 16;
/// Most copies to slide one block: each copies at most the sliding distance, so that source and destination
/// do not overlap.
const MAX_SLIDE_STEPS: u64 = 1024;
/// Cost of releasing a segment, in bytes that could be copied meanwhile.
const RELEASE_COST: u64 = 32 << 20;
/// Neighbouring blocks that can become one free block.
#[derive(Clone, Debug)]
pub(super) struct Gap {
    cost: u64,
    /// Bytes that the free block needs.
    pub(super) size: u64,
    pub(super) blocks: Vec<u32>,
    method: GapMethod,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GapMethod {
    /// Slides the blocks in use together.
    Slide,
    /// Moves the blocks in use elsewhere.
    Evict,
    /// Moves some blocks elsewhere and slides the others together.
    Partial,
}

/// A block as seen by the search for gaps.
#[derive(Clone, Copy)]
pub(super) struct RunBlock {
    pub(super) slot: u32,
    pub(super) is_free: bool,
    pub(super) size: u64,
    pub(super) cost: u64,
}

/// Neighbouring blocks of one segment that are all free or movable.
#[derive(Clone, Copy)]
pub(super) struct MovableRun {
    segment: u32,
    /// End of the run in [`MovableRuns::blocks`].
    end: usize,
    size: u64,
    free: u64,
    cost: u64,
}

/// All movable runs of some segments, collected in one pass and shared by all searches.
#[derive(Default)]
pub(super) struct MovableRuns {
    blocks: Vec<RunBlock>,
    runs: Vec<MovableRun>,
}

impl MovableRuns {
    /// Ends the current run.
    fn finish_run(&mut self, segment: u32) {
        let start = self.runs.last().map_or(0, |run| run.end);
        let mut run = MovableRun { segment, end: self.blocks.len(), size: 0, free: 0, cost: 0 };
        for block in &self.blocks[start..] {
            run.size += block.size;
            run.free += if block.is_free { block.size } else { 0 };
            run.cost += block.cost;
        }
        if run.size > 0 {
            self.runs.push(run);
        }
    }

    /// Iterates over runs of at least `size` bytes, with their blocks.
    pub(super) fn iter_at_least(&self, size: u64) -> impl Iterator<Item = (&MovableRun, &[RunBlock])> {
        let starts = std::iter::once(0).chain(self.runs.iter().map(|run| run.end));
        let all = starts.zip(&self.runs).map(|(start, run)| (run, &self.blocks[start..run.end]));
        all.filter(move |(run, _)| run.size >= size)
    }
}

/// Candidate for a gap: cost, first block, number of blocks, method.
pub(super) type GapCandidate = (u64, u32, usize, GapMethod);

/// Collects the cheapest [`MAX_GAPS`] gaps of at most a cost.
struct CheapestGaps {
    candidates: Vec<GapCandidate>,
    cost_limit: u64,
}

impl CheapestGaps {
    /// Adds the shortest parts of a run that can become a free block of `size` bytes. Partial eviction counts
    /// on blocks of at most `largest` bytes to fit elsewhere.
    fn search(&mut self, run: &[RunBlock], size: u64, method: GapMethod, largest: u64) {
        let gives = |block: &RunBlock| match method {
            _ if block.is_free => block.size,
            GapMethod::Evict => block.size,
            GapMethod::Partial if block.size <= largest => block.size,
            GapMethod::Partial | GapMethod::Slide => 0,
        };
        let (mut end, mut sum, mut cost) = (0, 0, 0);
        for (start, first) in run.iter().enumerate() {
            while sum < size {
                let Some(next) = run.get(end) else { return };
                (sum, cost, end) = (sum + gives(next), cost + next.cost, end + 1);
            }
            if cost <= self.cost_limit
                && end - start <= MAX_COPIES
                && (first.is_free || method != GapMethod::Slide)
            {
                if self.candidates.len() == 4 * MAX_GAPS {
                    self.cost_limit = self.candidates.select_nth_unstable(MAX_GAPS - 1).1.0;
                    self.candidates.truncate(MAX_GAPS);
                }
                self.candidates.push((cost, first.slot, end - start, method));
            }
            (sum, cost) = (sum - gives(first), cost - first.cost);
        }
    }
}

/// Takes `size` bytes from the smallest of `places` that fits, whose remainder stays a place. Returns false
/// if none fits. `places` stay sorted.
pub(super) fn take_best_fit_size(places: &mut [u64], size: u64) -> bool {
    let at = places.partition_point(|place| *place < size);
    if at == places.len() {
        return false;
    }
    let rest = places[at] - size;
    // The places in between move up by one.
    let to = places[..at].partition_point(|place| *place < rest);
    places.copy_within(to..at, to + 1);
    places[to] = rest;
    true
}

impl Gap {
    /// Reports whether the gap's blocks move elsewhere.
    pub(super) fn is_eviction(&self) -> bool {
        self.method == GapMethod::Evict
    }
}

/// Steps that carry out the moves of a planner.
#[derive(Clone, Debug, Default)]
pub(super) struct CompactionPlan {
    /// Copies, in order.
    pub(super) copies: Vec<BlockMove>,
    /// Slots of the moved blocks and their previous addresses.
    pub(super) moved: Vec<(u32, (SegmentId, u64))>,
    pub(super) bytes: u64,
}

/// Plans moves of the blocks of one arena, and of compatible arenas of other queues, whose free blocks serve
/// its requests too.
pub(super) struct CompactionPlanner<'a> {
    heap: &'a mut Heap,
    /// The heap before the first move, if blocks have moved.
    heap_before: Option<Heap>,
    pinned: &'a [u32],
    arenas: Vec<u16>,
    plan: CompactionPlan,
    /// Blocks that must not move: they are about to move, or have moved.
    frozen: Vec<u32>,
    /// If true, room may still be made for a gap whose blocks do not fit elsewhere yet. If that fails for the
    /// cheapest such gap, hardly any other succeeds.
    can_nest: bool,
}

/// Returns an arena, and those whose free blocks its requests may use: of the same size class, without
/// virtual range.
fn compatible_arenas(heap: &Heap, arena: u16) -> Vec<u16> {
    let own = &heap.arenas[usize::from(arena)];
    let plain = |a: &Arena| a.virtual_range.is_none() && a.owner == SHARED_OWNER;
    let beside = |at: u16, a: &Arena| at != arena && a.small == own.small && plain(own) && plain(a);
    let others = (0..).zip(&heap.arenas).filter(|(at, a)| beside(*at, a)).map(|(at, _)| at);
    std::iter::once(arena).chain(others).collect()
}

impl<'a> CompactionPlanner<'a> {
    pub(super) fn new(heap: &'a mut Heap, pinned: &'a [u32], arena: u16) -> Self {
        let arenas = compatible_arenas(heap, arena);
        let (plan, frozen) = (CompactionPlan::default(), Vec::new());
        Self { heap, heap_before: None, pinned, arenas, plan, frozen, can_nest: true }
    }

    /// Returns the plan and the heap before it; `None` if no block has moved.
    pub(super) fn finish(self) -> (CompactionPlan, Option<Heap>) {
        for at in self.frozen {
            self.heap.slot_mut(at).state = Is::Movable;
        }
        (self.plan, self.heap_before)
    }

    /// Returns the free blocks, by size.
    pub(super) fn free_blocks(&self) -> Vec<FreeBlock> {
        let bins = |arena: &u16| self.heap.arenas[usize::from(*arena)].free_list.sorted_by_size();
        let mut free: Vec<FreeBlock> = self.arenas.iter().flat_map(bins).collect();
        if self.arenas.len() > 1 {
            free.sort_by_key(|e| e.size);
        }
        free
    }

    /// Returns the best-fitting free block for a block of `size` bytes.
    fn find_best_fit(&self, size: u64) -> Option<u32> {
        let bins = self.arenas.iter().map(|arena| &self.heap.arenas[usize::from(*arena)].free_list);
        bins.filter_map(|bins| bins.best_fit(size)).min_by_key(|e| e.size).map(|e| e.slot)
    }

    fn can_move(&self, at: u32) -> bool {
        match self.heap.slot(at).state {
            Is::Free => true,
            Is::Movable => !self.pinned.contains(&at),
            _ => false,
        }
    }

    pub(super) fn is_free(&self, at: u32) -> bool {
        self.heap.slot(at).state == Is::Free
    }

    pub(super) fn size(&self, at: u32) -> u64 {
        self.heap.slot(at).size
    }

    /// Returns the cost of moving a block out of the way.
    fn move_cost(&self, at: u32) -> u64 {
        if self.is_free(at) { 0 } else { self.size(at) + COPY_COST }
    }

    fn location(&self, at: u32) -> (SegmentId, u64) {
        let slot = self.heap.slot(at);
        (self.heap.segment(slot.segment).id, slot.offset)
    }

    /// Builds a gap of `size` bytes from a candidate of [`find_gaps`](Self::find_gaps).
    pub(super) fn build_gap(&self, size: u64, (cost, first, count, how): GapCandidate) -> Gap {
        let next = |at: &u32| Some(self.heap.slot(*at).next);
        Gap {
            cost,
            size,
            blocks: std::iter::successors(Some(first), next).take(count).collect(),
            method: how,
        }
    }

    /// Collects all movable runs.
    pub(super) fn find_movable_runs(&self) -> MovableRuns {
        let mut runs = MovableRuns { blocks: Vec::with_capacity(256), runs: Vec::with_capacity(64) };
        for (number, segment) in (0..).zip(&self.heap.segments) {
            let Some(segment) = segment.as_ref().filter(|s| self.arenas.contains(&s.arena)) else { continue };
            for (at, slot) in self.heap.blocks(segment) {
                if self.can_move(at) {
                    let is_free = slot.state == Is::Free;
                    runs.blocks.push(RunBlock {
                        slot: at,
                        is_free,
                        size: slot.size,
                        cost: self.move_cost(at),
                    });
                } else {
                    runs.finish_run(number);
                }
            }
            runs.finish_run(number);
        }
        runs
    }

    /// Finds gaps for a free block of `size` bytes, the cheapest first.
    pub(super) fn find_gaps(&self, size: u64, runs: &MovableRuns) -> Vec<GapCandidate> {
        self.find_gaps_by(&[GapMethod::Slide, GapMethod::Evict], size, runs, 0, u64::MAX)
    }

    /// Finds the cheapest gaps that these methods open, at a cost of at most `cost_limit`.
    pub(super) fn find_gaps_by(
        &self,
        methods: &[GapMethod],
        size: u64,
        runs: &MovableRuns,
        largest: u64,
        cost_limit: u64,
    ) -> Vec<GapCandidate> {
        let mut found = CheapestGaps { candidates: Vec::with_capacity(4 * MAX_GAPS), cost_limit };
        for (_, run) in runs.iter_at_least(size) {
            methods.iter().for_each(|method| found.search(run, size, *method, largest));
        }
        found.candidates.sort_unstable();
        found.candidates.truncate(MAX_GAPS);
        found.candidates
    }

    /// Creates a free block of at least `size` bytes. If it fails, the heap is restored.
    fn create_free_block(&mut self, size: u64) -> bool {
        let (free, runs) = (self.free_blocks(), self.find_movable_runs());
        self.open_any_gap(size, &self.find_gaps(size, &runs), &runs, &free, false)
    }

    /// Reports whether all blocks of a gap have a place now.
    fn can_open(&self, gap: &Gap, free: &[FreeBlock]) -> bool {
        match gap.method {
            GapMethod::Slide => self.can_slide(&gap.blocks, |_| false),
            _ => self.fits(gap, free, 0),
        }
    }

    /// Opens the first candidate of [`find_gaps`](Self::find_gaps) that can be opened. `free` are the free
    /// blocks. If `nest`, room may be made first for the blocks to evict. If it fails, the heap is restored.
    pub(super) fn open_any_gap(
        &mut self,
        size: u64,
        found: &[GapCandidate],
        runs: &MovableRuns,
        free: &[FreeBlock],
        nest: bool,
    ) -> bool {
        let sum = free.iter().map(|e| e.size).sum::<u64>();
        for &found in found {
            let gap = self.build_gap(size, found);
            if !self.can_open(&gap, free) {
                // A block without a fitting place needs a gap of its own, for which as much must be free.
                if !gap.is_eviction() || !nest || !self.can_nest || gap.cost > sum + size {
                    continue;
                }
                self.can_nest = false;
                if !self.may_open_gap(&gap, runs, free) {
                    continue;
                }
            }
            if self.try_or_restore(|planner| planner.open_gap(&gap, nest)) {
                return true;
            }
        }
        false
    }

    /// Reports whether there may be room for the largest block of a gap that fits nowhere. This check needs
    /// no copy of the heap, which few such gaps are worth.
    fn may_open_gap(&self, gap: &Gap, runs: &MovableRuns, free: &[FreeBlock]) -> bool {
        let Some(size) = self.unplaced_sizes(gap, free, 0).next() else { return true };
        // A free block at an end of the gap may not be needed for it.
        let held = |at: &u32| gap.blocks.contains(at) && !self.is_free(*at);
        let mut gaps = self.find_gaps(size, runs).into_iter().map(|found| self.build_gap(size, found));
        gaps.any(|gap| !gap.blocks.iter().any(held) && self.can_open(&gap, free))
    }

    /// Runs `moves` and reports whether it succeeded; if not, the heap is restored.
    pub(super) fn try_or_restore(&mut self, moves: impl FnOnce(&mut Self) -> bool) -> bool {
        let (heap, plan, frozen) = (self.heap.clone(), self.plan.clone(), self.frozen.clone());
        if moves(self) && self.plan.copies.len() <= MAX_COPIES {
            // Blocks are frozen while another gap is being opened.
            if frozen.is_empty() {
                self.heap_before = Some(heap);
            }
            return true;
        }
        (*self.heap, self.plan, self.frozen) = (heap, plan, frozen);
        false
    }

    /// Opens a gap in a heap that has been saved.
    pub(super) fn open_gap(&mut self, gap: &Gap, nest: bool) -> bool {
        match gap.method {
            GapMethod::Slide => self.slide_together(&gap.blocks),
            _ => self.evict_gap(gap, nest),
        }
    }

    /// Returns the bytes of a gap's blocks that do not fit into `free`, the
    /// [`free_blocks`](Self::free_blocks), and `more` bytes of a new segment.
    pub(super) fn unplaced_bytes(&self, gap: &Gap, free: &[FreeBlock], more: u64) -> u64 {
        self.unplaced_sizes(gap, free, more).sum()
    }

    /// Reports whether all blocks of a gap fit into `free` and `more` bytes of a new segment.
    pub(super) fn fits(&self, gap: &Gap, free: &[FreeBlock], more: u64) -> bool {
        self.unplaced_sizes(gap, free, more).next().is_none()
    }

    /// Returns the sizes of the blocks that do not fit, the largest first.
    fn unplaced_sizes(&self, gap: &Gap, free: &[FreeBlock], more: u64) -> impl Iterator<Item = u64> {
        let mut held: Vec<u64> = Vec::with_capacity(gap.blocks.len());
        let mut places = self.free_sizes(gap, free);
        held.extend(gap.blocks.iter().filter(|at| !self.is_free(**at)).map(|at| self.size(*at)));
        let excess = gap.blocks.iter().map(|at| self.size(*at)).sum::<u64>().saturating_sub(gap.size);
        let end = [gap.blocks.last(), gap.blocks.first()].into_iter().flatten();
        let spare = end.filter(|at| self.is_free(**at) && self.size(**at) > excess).map(|_| excess).next();
        for size in spare.into_iter().chain([more]).filter(|size| *size > 0) {
            places.insert(places.partition_point(|place| *place < size), size);
        }
        held.sort_unstable();
        held.into_iter().rev().filter(move |size| !take_best_fit_size(&mut places, *size))
    }

    /// Returns the sorted sizes of the free blocks outside of a gap, with capacity for two more.
    pub(super) fn free_sizes(&self, gap: &Gap, free: &[FreeBlock]) -> Vec<u64> {
        let mut places: Vec<u64> = Vec::with_capacity(free.len() + 2);
        places.extend(free.iter().map(|e| e.size));
        for at in gap.blocks.iter().filter(|at| self.is_free(**at)) {
            let (size, place) = (self.size(*at), places.partition_point(|place| *place < self.size(*at)));
            if places.get(place) == Some(&size) {
                places.remove(place);
            }
        }
        places
    }

    /// Reports whether blocks can be slid together in few copies each, where the blocks in `gone` have left.
    pub(super) fn can_slide(&self, blocks: &[u32], gone: impl Fn(&u32) -> bool) -> bool {
        let mut way = 0;
        blocks.iter().all(|at| {
            let is_free = self.is_free(*at) || gone(at);
            way += if is_free { self.size(*at) } else { 0 };
            is_free || way == 0 || self.size(*at).div_ceil(way) <= MAX_SLIDE_STEPS
        })
    }

    /// Slides all movable blocks together, so that the free memory between two fixed blocks is one block.
    /// Returns true if blocks moved; the heap was saved then.
    pub(super) fn compact_all(&mut self) -> bool {
        let saved = self.heap.clone();
        let segments = self.heap.live_segments().filter(|s| self.arenas.contains(&s.arena));
        let blocks: Vec<Vec<u32>> =
            segments.map(|s| self.heap.blocks(s).map(|(at, _)| at).collect()).collect();
        for run in blocks
            .iter()
            .flat_map(|blocks| blocks.split(|at| !self.can_move(*at)))
            .map(<[u32]>::to_vec)
            .collect::<Vec<_>>()
        {
            self.compact_run(&run);
        }
        let moved = !self.plan.copies.is_empty();
        self.heap_before = moved.then_some(saved);
        moved
    }

    /// Slides the blocks of a movable run together.
    fn compact_run(&mut self, run: &[u32]) {
        let (mut part, mut way) = (Vec::new(), 0);
        for &at in run {
            let is_free = self.is_free(at);
            // A large block is not slid by a small distance: the free memory before it stays there.
            if !is_free && way > 0 && self.size(at).div_ceil(way) > MAX_SLIDE_STEPS {
                self.slide_if_split(&part);
                (part, way) = (Vec::new(), 0);
            }
            if is_free || way > 0 {
                way += if is_free { self.size(at) } else { 0 };
                part.push(at);
            }
        }
        self.slide_if_split(&part);
    }

    /// Slides blocks together, the first of which is free, if another one is free too.
    fn slide_if_split(&mut self, part: &[u32]) {
        if part.iter().filter(|at| self.is_free(**at)).count() > 1 {
            self.slide_together(part);
        }
    }

    /// Slides the blocks in use together and merges the free ones after them.
    pub(super) fn slide_together(&mut self, blocks: &[u32]) -> bool {
        let (Some(&first), Some(&last)) = (blocks.first(), blocks.last()) else { return false };
        let (prev, next) = (self.heap.slot(first).prev, self.heap.slot(last).next);
        let Slot { segment, mut offset, .. } = *self.heap.slot(first);
        let (mut chain, mut hole, mut free) = (Vec::new(), NO_BLOCK, 0);
        for &at in blocks {
            let size = self.size(at);
            if self.is_free(at) {
                self.heap.remove_from_free_list(at);
                free += size;
                match hole {
                    NO_BLOCK => hole = at,
                    _ => self.heap.vacate(at),
                }
                continue;
            }
            let (id, from) = self.location(at);
            if from != offset {
                let step = from - offset;
                for done in (0..size).step_by(step as usize) {
                    let bytes = step.min(size - done);
                    self.plan.copies.push(BlockMove {
                        from: (id, from + done),
                        to: (id, offset + done),
                        bytes,
                    });
                }
                self.record_moved(at, (id, from));
                self.heap.slot_mut(at).offset = offset;
            }
            offset += size;
            chain.push(at);
        }
        if hole == NO_BLOCK {
            return false;
        }
        let slot = self.heap.slot_mut(hole);
        (slot.offset, slot.size, slot.requested) = (offset, free, 0);
        chain.push(hole);
        let mut before = prev;
        for at in chain {
            self.heap.slot_mut(at).prev = before;
            match before {
                NO_BLOCK => self.heap.segment_mut(segment).first_block = at,
                before => self.heap.slot_mut(before).next = at,
            }
            before = at;
        }
        self.heap.slot_mut(hole).next = next;
        if next != NO_BLOCK {
            self.heap.slot_mut(next).prev = hole;
        }
        self.mark_free(hole);
        true
    }

    /// Moves the blocks in use of a gap elsewhere.
    fn evict_gap(&mut self, gap: &Gap, nest: bool) -> bool {
        let (mut free, held) = self.freeze_gap(gap);
        for at in held {
            match self.relocate(at, nest) {
                Some(left) => free.push(left),
                None => return false,
            }
        }
        free.into_iter().for_each(|at| self.mark_free(at));
        true
    }

    /// Withdraws the free blocks of a gap, and freezes those in use so that only [`relocate`](Self::relocate)
    /// moves them. Returns both, the latter by size.
    fn freeze_gap(&mut self, gap: &Gap) -> (Vec<u32>, Vec<u32>) {
        let mut excess = gap.blocks.iter().map(|at| self.size(*at)).sum::<u64>().saturating_sub(gap.size);
        let (mut free, mut held) = (Vec::new(), Vec::new());
        for &block in &gap.blocks {
            if !self.is_free(block) {
                held.push(block);
                continue;
            }
            self.heap.remove_from_free_list(block);
            let (mut at, size) = (block, self.size(block));
            // Memory at the ends that the gap does not need may serve as a destination.
            if excess > 0 && excess < size && Some(&block) == gap.blocks.last() {
                let rest = self.heap.split(block, size - excess);
                self.heap.add_to_free_list(rest);
                excess = 0;
            } else if excess > 0 && excess < size && Some(&block) == gap.blocks.first() {
                at = self.heap.split(block, excess);
                self.heap.add_to_free_list(block);
                excess = 0;
            }
            self.heap.slot_mut(at).state = Is::Releasing;
            free.push(at);
        }
        held.iter().for_each(|at| self.freeze(*at));
        held.sort_by_key(|at| std::cmp::Reverse(self.size(*at)));
        (free, held)
    }

    /// Moves a block elsewhere. Returns the block it left, which is withdrawn and in no free list.
    pub(super) fn relocate(&mut self, at: u32, nest: bool) -> Option<u32> {
        let size = self.size(at);
        let to = match self.find_best_fit(size) {
            Some(to) => to,
            None if nest && self.create_free_block(size) => self.find_best_fit(size)?,
            None => return None,
        };
        self.heap.remove_from_free_list(to);
        if self.size(to) > size {
            let rest = self.heap.split(to, size);
            self.heap.add_to_free_list(rest);
        }
        let (from, there) = (self.location(at), self.location(to));
        self.plan.copies.push(BlockMove { from, to: there, bytes: size });
        self.record_moved(at, from);
        self.heap.swap_slots(at, to);
        let left = self.heap.slot_mut(to);
        // Other queues wait for the copies, so earlier cross-stream uses no longer matter.
        (left.state, left.requested) = (Is::Releasing, 0);
        Some(to)
    }

    fn record_moved(&mut self, at: u32, from: (SegmentId, u64)) {
        self.plan.bytes += self.size(at);
        if self.plan.moved.iter().all(|(slot, _)| *slot != at) {
            self.plan.moved.push((at, from));
        }
    }

    /// Withdraws a free block from the free list.
    pub(super) fn withdraw_free_block(&mut self, at: u32) {
        self.heap.remove_from_free_list(at);
        self.heap.slot_mut(at).state = Is::Releasing;
    }

    /// Freezes a block in use, so that only [`relocate`](Self::relocate) moves it.
    pub(super) fn freeze(&mut self, at: u32) {
        self.heap.slot_mut(at).state = Is::Pinned;
        self.frozen.push(at);
    }

    /// Returns a block's segment, first byte and end.
    pub(super) fn block_range(&self, at: u32) -> (u32, u64, u64) {
        let Slot { segment, offset, size, .. } = *self.heap.slot(at);
        (segment, offset, offset + size)
    }

    /// Returns the blocks of a segment that overlap `start..end`.
    pub(super) fn blocks_between(&self, segment: u32, start: u64, end: u64) -> Vec<u32> {
        let inside = |slot: &Slot| slot.offset < end && slot.offset + slot.size > start;
        let blocks = self.heap.blocks(self.heap.segment(segment));
        blocks.filter(|(_, slot)| inside(slot)).map(|(at, _)| at).collect()
    }

    pub(super) fn mark_free(&mut self, at: u32) {
        let at = self.heap.merge(at, Is::Free);
        self.heap.add_to_free_list(at);
    }

    /// Returns the plain segments that can be evacuated, by cost per byte.
    pub(super) fn segments_by_evacuation_cost(&self, surplus: u64, runs: &MovableRuns) -> Vec<u32> {
        let mut segments = Vec::new();
        for (run, _) in runs.iter_at_least(0) {
            let segment = self.heap.segment(run.segment);
            // All blocks of the segment may move.
            if segment.virtual_range.is_none() && run.size == segment.size {
                let cost = run.cost + RELEASE_COST + segment.size.saturating_sub(surplus) / 2;
                segments.push((run.segment, cost as f64 / segment.size as f64));
            }
        }
        segments.sort_by(|a, b| a.1.total_cmp(&b.1));
        segments.into_iter().map(|(at, _)| at).collect()
    }

    /// Selects segments, in order, whose blocks fit into free memory elsewhere. Their sizes sum up to
    /// `surplus` bytes or come near, but to at least `worth`.
    pub(super) fn select_evacuations(
        &self,
        segments: &[u32],
        free: &[FreeBlock],
        surplus: u64,
        worth: u64,
    ) -> Option<Gap> {
        let alone = |at: &&u32| self.fits(&self.whole_segments_gap(&[**at]), free, 0);
        let (mut chosen, mut found) = (Vec::new(), None);
        // Blocks that do not fit alone do not fit together with others.
        for segment in segments.iter().filter(alone) {
            chosen.push(*segment);
            let gap = self.whole_segments_gap(&chosen);
            if !self.fits(&gap, free, 0) {
                chosen.pop();
                continue;
            }
            let enough = gap.size >= surplus;
            found = Some(gap);
            if enough {
                break;
            }
        }
        found.filter(|gap| gap.size >= worth)
    }

    /// Reports whether all blocks of a gap are free.
    pub(super) fn is_gap_idle(&self, gap: &Gap) -> bool {
        gap.blocks.iter().all(|at| self.is_free(*at))
    }

    /// Returns the gap that consists of whole segments.
    pub(super) fn whole_segments_gap(&self, segments: &[u32]) -> Gap {
        let segments = || segments.iter().map(|at| self.heap.segment(*at));
        let blocks = segments().flat_map(|s| self.heap.blocks(s)).map(|(at, _)| at).collect();
        Gap { cost: 0, size: segments().map(|s| s.size).sum(), blocks, method: GapMethod::Evict }
    }
}

impl Heap {
    /// Swaps the positions of two blocks, so that handles keep their slots.
    fn swap_slots(&mut self, a: u32, b: u32) {
        let (of_a, of_b) = (*self.slot(a), *self.slot(b));
        let other = |at: u32| match at {
            _ if at == a => b,
            _ if at == b => a,
            _ => at,
        };
        for (at, place) in [(a, of_b), (b, of_a)] {
            let slot = self.slot_mut(at);
            (slot.segment, slot.offset, slot.size) = (place.segment, place.offset, place.size);
            slot.arena = place.arena;
            (slot.prev, slot.next) = (other(place.prev), other(place.next));
        }
        for at in [a, b] {
            let Slot { prev, next, segment, .. } = *self.slot(at);
            match prev {
                NO_BLOCK => self.segment_mut(segment).first_block = at,
                prev => self.slot_mut(prev).next = at,
            }
            if next != NO_BLOCK {
                self.slot_mut(next).prev = at;
            }
        }
    }
}
