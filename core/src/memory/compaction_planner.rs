//! What moving blocks would come to: changes of a heap, as if they had moved, and the copies that this takes.

use super::compaction::{BlockMove, COPY_COST};
use super::free_list::FreeBlock;
use super::heap::{Arena, Heap, NO_BLOCK, SHARED_OWNER, Slot, SlotState as Is};
use super::source::SegmentId;

/// Copies that one request may cause, and blocks in its way.
const MAX_COPIES: usize = 256;
/// Gaps that are tried for a request.
const MAX_GAPS: usize = 16;
/// Gaps that are tried for it although, as things lie, the blocks in its way do not fit elsewhere: room is made for them first. The
/// cheapest one does, or hardly any.
const MAX_NESTED_ATTEMPTS: usize = 1;
/// Steps that a block is pushed in, each no longer than it goes.
const MAX_SLIDE_STEPS: u64 = 32;
/// The same, where there is no other way left.
const MAX_FULL_SLIDE_STEPS: u64 = 1024;
/// What giving a segment back costs, in bytes that could be copied meanwhile.
const RELEASE_COST: u64 = 32 << 20;
/// Segments that may be emptied together, of those that cost the least.
const MAX_EVACUATED_SEGMENTS: usize = 32;

/// Neighbouring blocks that could become a free one.
#[derive(Clone, Debug)]
pub(super) struct Gap {
    cost: u64,
    /// How large it has to be.
    pub(super) size: u64,
    pub(super) blocks: Vec<u32>,
    method: GapMethod,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GapMethod {
    /// The blocks in use are pushed together.
    Slide,
    /// They go elsewhere.
    Evict,
}

/// A block that a search for gaps passes: what they need to know of it.
#[derive(Clone, Copy)]
pub(super) struct RunBlock {
    pub(super) slot: u32,
    pub(super) is_free: bool,
    pub(super) size: u64,
    pub(super) cost: u64,
}

/// Neighbours that may move: those of one segment, one behind the other, up to one that may not.
#[derive(Clone, Copy)]
pub(super) struct MovableRun {
    segment: u32,
    /// Where it ends in the list of blocks.
    end: usize,
    size: u64,
    free: u64,
    cost: u64,
}

/// All runs of some segments, from one walk: whoever looks for something passes them.
#[derive(Default)]
pub(super) struct MovableRuns {
    blocks: Vec<RunBlock>,
    runs: Vec<MovableRun>,
}

impl MovableRuns {
    /// Ends the last one.
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

    /// Those of at least `size` bytes, with their blocks.
    pub(super) fn iter_at_least(&self, size: u64) -> impl Iterator<Item = (&MovableRun, &[RunBlock])> {
        let starts = std::iter::once(0).chain(self.runs.iter().map(|run| run.end));
        let all = starts.zip(&self.runs).map(|(start, run)| (run, &self.blocks[start..run.end]));
        all.filter(move |(run, _)| run.size >= size)
    }
}

/// The shortest parts of a run of blocks that are enough.
fn find_gaps_in_run((of, run): (&MovableRun, &[RunBlock]), size: u64, found: &mut CheapestGaps) {
    for how in [GapMethod::Slide, GapMethod::Evict] {
        if how == GapMethod::Slide && of.free < size {
            continue;
        }
        let gives = |block: &RunBlock| if how == GapMethod::Evict || block.is_free { block.size } else { 0 };
        let (mut end, mut sum, mut cost) = (0, 0, 0);
        for (start, first) in run.iter().enumerate() {
            while sum < size {
                let Some(next) = run.get(end) else { break };
                (sum, cost, end) = (sum + gives(next), cost + next.cost, end + 1);
            }
            if sum < size {
                break;
            }
            if end - start <= MAX_COPIES && (how == GapMethod::Evict || first.is_free) {
                found.push((cost, first.slot, end - start, how));
            }
            (sum, cost) = (sum - gives(first), cost - first.cost);
        }
    }
}

/// The cheapest [`GAPS`] of some gaps.
struct CheapestGaps {
    candidates: Vec<GapCandidate>,
    /// What costs more than this is none of them.
    cost_limit: u64,
}

impl CheapestGaps {
    fn new() -> Self {
        Self { candidates: Vec::with_capacity(4 * MAX_GAPS), cost_limit: u64::MAX }
    }

    #[inline]
    fn push(&mut self, gap: GapCandidate) {
        if gap.0 > self.cost_limit {
            return;
        }
        if self.candidates.len() == 4 * MAX_GAPS {
            self.cost_limit = self.candidates.select_nth_unstable(MAX_GAPS - 1).1.0;
            self.candidates.truncate(MAX_GAPS);
        }
        self.candidates.push(gap);
    }

    /// The cheapest first.
    fn into_sorted(mut self) -> Vec<GapCandidate> {
        self.candidates.sort_unstable();
        self.candidates.truncate(MAX_GAPS);
        self.candidates
    }
}

/// Puts a block into the smallest of these places that it fits into, of which the rest stays. Whether there was one.
pub(super) fn take_best_fit_size(places: &mut [u64], size: u64) -> bool {
    let at = places.partition_point(|place| *place < size);
    if at == places.len() {
        return false;
    }
    let rest = places[at] - size;
    // What lies between moves up by one.
    let to = places[..at].partition_point(|place| *place < rest);
    places.copy_within(to..at, to + 1);
    places[to] = rest;
    true
}

/// A gap: what it costs, its first block, how many they are, and how.
pub(super) type GapCandidate = (u64, u32, usize, GapMethod);

impl Gap {
    /// Whether its blocks go elsewhere.
    pub(super) fn is_eviction(&self) -> bool {
        self.method == GapMethod::Evict
    }
}

/// What has to be done so that blocks are where a planner has put them.
#[derive(Clone, Debug, Default)]
pub(super) struct CompactionPlan {
    /// In order.
    pub(super) copies: Vec<BlockMove>,
    /// The slots of the blocks that have moved, and where they were.
    pub(super) moved: Vec<(u32, (SegmentId, u64))>,
    pub(super) bytes: u64,
}

/// Moves blocks of an arena of a heap, on paper, and of those of other queues: what is free in one serves all of them.
pub(super) struct CompactionPlanner<'a> {
    heap: &'a mut Heap,
    /// Heaps whose memory is used for what is saved.
    spare_heaps: &'a mut Vec<Heap>,
    /// The heap before anything moved, once something has.
    heap_before: Option<Heap>,
    pinned: &'a [u32],
    arenas: Vec<u16>,
    plan: CompactionPlan,
    /// Blocks that must not move: on their way elsewhere, or there.
    frozen: Vec<u32>,
    nested_attempts_left: usize,
}

/// An arena, and those of plain segments whose free blocks its requests may borrow.
fn compatible_arenas(heap: &Heap, arena: u16) -> Vec<u16> {
    let own = &heap.arenas[usize::from(arena)];
    let plain = |a: &Arena| a.virtual_range.is_none() && a.owner == SHARED_OWNER;
    let beside = |at: u16, a: &Arena| at != arena && a.small == own.small && plain(own) && plain(a);
    let others = (0..).zip(&heap.arenas).filter(|(at, a)| beside(*at, a)).map(|(at, _)| at);
    std::iter::once(arena).chain(others).collect()
}

impl<'a> CompactionPlanner<'a> {
    pub(super) fn new(heap: &'a mut Heap, spare: &'a mut Vec<Heap>, pinned: &'a [u32], arena: u16) -> Self {
        let (plan, frozen) = (CompactionPlan::default(), Vec::new());
        let arenas = compatible_arenas(heap, arena);
        Self {
            heap,
            spare_heaps: spare,
            heap_before: None,
            pinned,
            arenas,
            plan,
            frozen,
            nested_attempts_left: MAX_NESTED_ATTEMPTS,
        }
    }

    /// What is to be done, and the heap as it was; `None` if nothing has moved in it.
    pub(super) fn finish(self) -> (CompactionPlan, Option<Heap>) {
        for at in self.frozen {
            self.heap.slot_mut(at).state = Is::Movable;
        }
        (self.plan, self.heap_before)
    }

    fn copy_heap(&mut self) -> Heap {
        let mut copy = self.spare_heaps.pop().unwrap_or_else(|| Heap::new(self.heap.rules));
        copy.copy_from(self.heap);
        copy
    }

    fn save(&mut self) -> (Heap, usize, usize, usize, u64) {
        let heap = self.copy_heap();
        let CompactionPlan { copies, moved, bytes } = &self.plan;
        (heap, self.frozen.len(), copies.len(), moved.len(), *bytes)
    }

    fn restore(&mut self, (heap, frozen, copies, moved, bytes): (Heap, usize, usize, usize, u64)) {
        self.spare_heaps.push(std::mem::replace(self.heap, heap));
        self.frozen.truncate(frozen);
        self.plan.copies.truncate(copies);
        self.plan.moved.truncate(moved);
        self.plan.bytes = bytes;
    }

    /// The free blocks, by size.
    pub(super) fn free_blocks(&self) -> Vec<FreeBlock> {
        let bins = |arena: &u16| self.heap.arenas[usize::from(*arena)].free_list.sorted_by_size();
        let mut free: Vec<FreeBlock> = self.arenas.iter().flat_map(bins).collect();
        if self.arenas.len() > 1 {
            free.sort_by_key(|e| e.size);
        }
        free
    }

    /// The free block that a block of `size` bytes goes to.
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

    /// What it costs to get a block out of the way.
    fn move_cost(&self, at: u32) -> u64 {
        if self.is_free(at) { 0 } else { self.size(at) + COPY_COST }
    }

    fn location(&self, at: u32) -> (SegmentId, u64) {
        let slot = self.heap.slot(at);
        (self.heap.segment(slot.segment).id, slot.offset)
    }

    /// A way to a free block of `size` bytes, as it was [found](Self::find).
    pub(super) fn build_gap(&self, size: u64, (cost, first, count, how): GapCandidate) -> Gap {
        let next = |at: &u32| Some(self.heap.slot(*at).next);
        Gap {
            cost,
            size,
            blocks: std::iter::successors(Some(first), next).take(count).collect(),
            method: how,
        }
    }

    /// All runs of neighbours that may move.
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

    /// The cheapest ways to a free block of `size` bytes, the cheapest first.
    pub(super) fn find_gaps(&self, size: u64, runs: &MovableRuns) -> Vec<GapCandidate> {
        let mut found = CheapestGaps::new();
        runs.iter_at_least(size).for_each(|run| find_gaps_in_run(run, size, &mut found));
        found.into_sorted()
    }

    /// Makes a free block of at least `size` bytes. If it fails, the heap is as it was.
    fn create_free_block(&mut self, size: u64, depth: usize) -> bool {
        let free = self.free_blocks();
        free.iter().map(|e| e.size).sum::<u64>() >= size && {
            let runs = self.find_movable_runs();
            self.open_any_gap(size, &self.find_gaps(size, &runs), &runs, &free, depth)
        }
    }

    /// Opens the first of the gaps that were [found](Self::find) for which that can be done. `free` are the free blocks. If it
    /// fails, the heap is as it was.
    pub(super) fn open_any_gap(
        &mut self,
        size: u64,
        found: &[GapCandidate],
        runs: &MovableRuns,
        free: &[FreeBlock],
        depth: usize,
    ) -> bool {
        let sum = free.iter().map(|e| e.size).sum::<u64>();
        let largest = free.last().map_or(0, |e| e.size);
        for &found in found {
            let gap = self.build_gap(size, found);
            let fits = match gap.method {
                GapMethod::Slide => self.can_slide(&gap.blocks, |_| false),
                GapMethod::Evict => self.evictions_fit_within(&gap, largest) && self.fits(&gap, free, 0),
            };
            // What does not fit as it lies fits only if there is as much free.
            let nested = gap.method == GapMethod::Evict
                && depth > 0
                && self.nested_attempts_left > 0
                && gap.cost <= sum + size;
            if !fits && !nested {
                continue;
            }
            self.nested_attempts_left = self.nested_attempts_left.saturating_sub(usize::from(!fits));
            if !fits && !self.may_open_gap(&gap, runs, free) {
                continue;
            }
            if self.try_or_restore(|planner| planner.open_gap(&gap, depth)) {
                return true;
            }
        }
        false
    }

    /// Whether there may be a way to room for the largest block that is in the way of a gap and fits nowhere: seen without a copy of the
    /// heap, which few of these gaps are worth.
    fn may_open_gap(&self, gap: &Gap, runs: &MovableRuns, free: &[FreeBlock]) -> bool {
        let Some(size) = self.unplaced_sizes(gap, free, 0).next() else { return true };
        let largest = free.last().map_or(0, |e| e.size);
        // What is free at an end of it may be left over.
        let mut there: Vec<u32> = gap.blocks.iter().copied().filter(|at| !self.is_free(*at)).collect();
        there.sort_unstable();
        self.find_gaps(size, runs).into_iter().map(|found| self.build_gap(size, found)).any(|gap| {
            gap.blocks.iter().all(|at| there.binary_search(at).is_err())
                && match gap.method {
                    GapMethod::Slide => self.can_slide(&gap.blocks, |_| false),
                    GapMethod::Evict => self.evictions_fit_within(&gap, largest) && self.fits(&gap, free, 0),
                }
        })
    }

    /// Whether none of the blocks in the way of a gap is larger than this.
    fn evictions_fit_within(&self, gap: &Gap, largest: u64) -> bool {
        gap.blocks.iter().all(|at| self.is_free(*at) || self.size(*at) <= largest)
    }

    /// Whether moving blocks so succeeds; if not, the heap is as it was.
    pub(super) fn try_or_restore(&mut self, moves: impl FnOnce(&mut Self) -> bool) -> bool {
        let saved = self.save();
        // Inside another gap, blocks are frozen.
        let first = self.frozen.is_empty();
        if moves(self) && self.plan.copies.len() <= MAX_COPIES {
            match first {
                true => self.heap_before = Some(saved.0),
                false => self.spare_heaps.push(saved.0),
            }
            return true;
        }
        self.restore(saved);
        false
    }

    /// Makes a gap. If it fails, the heap is good for nothing but to be thrown away.
    pub(super) fn save_and_open_gap(&mut self, gap: &Gap, depth: usize) -> bool {
        self.heap_before = Some(self.copy_heap());
        self.open_gap(gap, depth)
    }

    /// The same, of a heap that has been saved.
    fn open_gap(&mut self, gap: &Gap, depth: usize) -> bool {
        match gap.method {
            GapMethod::Slide => self.slide_together(&gap.blocks),
            GapMethod::Evict => self.evict_gap(gap, depth),
        }
    }

    /// How many bytes in the way of a gap do not fit into what is free elsewhere, of the [`free_blocks`](Self::free_blocks), with
    /// `more` bytes of a new segment.
    pub(super) fn unplaced_bytes(&self, gap: &Gap, free: &[FreeBlock], more: u64) -> u64 {
        self.unplaced_sizes(gap, free, more).sum()
    }

    /// Whether they fit.
    pub(super) fn fits(&self, gap: &Gap, free: &[FreeBlock], more: u64) -> bool {
        self.unplaced_sizes(gap, free, more).next().is_none()
    }

    /// The sizes of the blocks that do not fit, the largest first.
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

    /// The sizes of the free blocks outside of a gap, in order, with room for few more.
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

    /// Whether blocks can be pushed together in few steps, where some of them are `gone` by then.
    pub(super) fn can_slide(&self, blocks: &[u32], gone: impl Fn(&u32) -> bool) -> bool {
        let mut way = 0;
        blocks.iter().all(|at| {
            let is_free = self.is_free(*at) || gone(at);
            way += if is_free { self.size(*at) } else { 0 };
            is_free || way == 0 || self.size(*at).div_ceil(way) <= MAX_SLIDE_STEPS
        })
    }

    /// Pushes all blocks together that may move, so that all that is free between two that may not is one block. Whether that
    /// changes anything; if so, the heap was saved.
    pub(super) fn compact_all(&mut self) -> bool {
        let saved = self.copy_heap();
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
        match self.plan.copies.is_empty() {
            true => self.spare_heaps.push(saved),
            false => self.heap_before = Some(saved),
        }
        !self.plan.copies.is_empty()
    }

    /// The same, of neighbours that may move.
    fn compact_run(&mut self, run: &[u32]) {
        let (mut part, mut way) = (Vec::new(), 0);
        for &at in run {
            let is_free = self.is_free(at);
            // A large block is not pushed a little: what lies before it stays there.
            if !is_free && way > 0 && self.size(at).div_ceil(way) > MAX_FULL_SLIDE_STEPS {
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

    /// Pushes blocks together, the first of which is free, if others are.
    fn slide_if_split(&mut self, part: &[u32]) {
        if part.iter().filter(|at| self.is_free(**at)).count() > 1 {
            self.slide_together(part);
        }
    }

    /// Pushes the blocks in use together, so that the free ones between them are one.
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

    /// Moves the blocks in use elsewhere.
    fn evict_gap(&mut self, gap: &Gap, depth: usize) -> bool {
        let (mut free, held) = self.freeze_gap(gap);
        for at in held {
            match self.relocate(at, depth) {
                Some(left) => free.push(left),
                None => return false,
            }
        }
        free.into_iter().for_each(|at| self.mark_free(at));
        true
    }

    /// Takes what is free in a gap out of reach, and keeps what is in use from moving but by [`send`](Self::send): both are returned,
    /// the latter by size.
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
            // What of the ends is not needed may serve as a place for others.
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

    /// Moves a block elsewhere. Returns what is left: a block in no bin, and out of reach.
    pub(super) fn relocate(&mut self, at: u32, depth: usize) -> Option<u32> {
        let size = self.size(at);
        let to = match self.find_best_fit(size) {
            Some(to) => to,
            None if depth > 0 && self.create_free_block(size, depth - 1) => self.find_best_fit(size)?,
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
        // The other queues wait for the copies: for none of the uses before.
        (left.state, left.requested) = (Is::Releasing, 0);
        Some(to)
    }

    fn record_moved(&mut self, at: u32, from: (SegmentId, u64)) {
        self.plan.bytes += self.size(at);
        if self.plan.moved.iter().all(|(slot, _)| *slot != at) {
            self.plan.moved.push((at, from));
        }
    }

    /// Takes a free block out of reach.
    pub(super) fn withdraw_free_block(&mut self, at: u32) {
        self.heap.remove_from_free_list(at);
        self.heap.slot_mut(at).state = Is::Releasing;
    }

    /// Keeps a block in use from moving but by [`send`](Self::send).
    pub(super) fn freeze(&mut self, at: u32) {
        self.heap.slot_mut(at).state = Is::Pinned;
        self.frozen.push(at);
    }

    /// Where a block lies: its segment, and its first byte and the one behind its last.
    pub(super) fn block_range(&self, at: u32) -> (u32, u64, u64) {
        let Slot { segment, offset, size, .. } = *self.heap.slot(at);
        (segment, offset, offset + size)
    }

    /// The blocks of a segment that have bytes between two offsets.
    pub(super) fn blocks_between(&self, segment: u32, start: u64, end: u64) -> Vec<u32> {
        let inside = |slot: &Slot| slot.offset < end && slot.offset + slot.size > start;
        let blocks = self.heap.blocks(self.heap.segment(segment));
        blocks.filter(|(_, slot)| inside(slot)).map(|(at, _)| at).collect()
    }

    pub(super) fn mark_free(&mut self, at: u32) {
        let at = self.heap.merge(at, Is::Free);
        self.heap.add_to_free_list(at);
    }

    /// Plain segments that could be emptied, to give `surplus` bytes back: first the one that costs the least for its size.
    pub(super) fn segments_by_evacuation_cost(&self, surplus: u64, runs: &MovableRuns) -> Vec<u32> {
        let mut segments = Vec::new();
        for (run, _) in runs.iter_at_least(0) {
            let segment = self.heap.segment(run.segment);
            // All of it may move.
            if segment.virtual_range.is_none() && run.size == segment.size {
                let cost = run.cost + RELEASE_COST + segment.size.saturating_sub(surplus) / 2;
                segments.push((run.segment, cost as f64 / segment.size as f64));
            }
        }
        segments.sort_by(|a, b| a.1.total_cmp(&b.1));
        segments.into_iter().map(|(at, _)| at).collect()
    }

    /// Segments of these whose blocks fit into what is free elsewhere, taken in order: of `surplus` bytes together, or as near to that as
    /// they come, but of no less than `worth`.
    pub(super) fn select_evacuations(
        &self,
        segments: &[u32],
        free: &[FreeBlock],
        surplus: u64,
        worth: u64,
    ) -> Option<Gap> {
        let largest = free.last().map_or(0, |e| e.size);
        let small = |(_, slot): (u32, &Slot)| slot.state == Is::Free || slot.size <= largest;
        let alone = |at: &&u32| {
            self.heap.blocks(self.heap.segment(**at)).all(small)
                && self.fits(&self.whole_segments_gap(&[**at]), free, 0)
        };
        let (mut chosen, mut found) = (Vec::new(), None);
        // What does not fit by itself does not fit beside others.
        for segment in segments.iter().filter(alone).take(MAX_EVACUATED_SEGMENTS) {
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

    /// Whether nothing in a gap has to move.
    pub(super) fn is_gap_idle(&self, gap: &Gap) -> bool {
        gap.blocks.iter().all(|at| self.is_free(*at))
    }

    /// All of these segments.
    pub(super) fn whole_segments_gap(&self, segments: &[u32]) -> Gap {
        let segments = || segments.iter().map(|at| self.heap.segment(*at));
        let blocks = segments().flat_map(|s| self.heap.blocks(s)).map(|(at, _)| at).collect();
        Gap { cost: 0, size: segments().map(|s| s.size).sum(), blocks, method: GapMethod::Evict }
    }
}

impl Heap {
    /// Lets two slots change places; who holds one keeps its number.
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
