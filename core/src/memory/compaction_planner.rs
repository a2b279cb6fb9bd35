//! Planner of compaction: lists the moves that make free memory contiguous, without changing the heap.

use std::cell::Cell;
use std::ops::Range;

use super::compaction::BlockMove;
use super::heap::{Arena, Heap, NO_BLOCK, SHARED_OWNER, Slot, SlotState as Is};

/// Cost of enqueuing a copy, in bytes that could be copied meanwhile.
pub(super) const COPY_COST: u64 = 1 << 20;
/// Most copies of a plan, and most blocks in a window.
const MAX_COPIES: u64 = 256;
/// Most windows tried for a request.
const MAX_WINDOWS: usize = 24;
/// Cost of releasing a segment, in bytes that could be copied meanwhile.
const RELEASE_COST: u64 = 32 << 20;
/// Segment of the moves whose destination is a segment still to be added.
const NEW_SEGMENT: u32 = u32::MAX;

/// Move of a block in use, by segments and offsets. Source and destination overlap only if the block slides
/// towards the start of its segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    slot: u32,
    size: u64,
    from: (u32, u64),
    to: (u32, u64),
}

impl Move {
    /// Returns the bytes that one copy may move, so that its source and destination do not overlap.
    fn step(&self) -> u64 {
        if self.from.0 == self.to.0 { self.from.1.abs_diff(self.to.1).min(self.size) } else { self.size }
    }
}

/// Moves that make room, in an order in which no move overwrites a block that moves later.
#[derive(Clone, Default)]
pub(super) struct Plan {
    pub(super) moves: Vec<Move>,
    /// Bytes of the moves to a new segment.
    pub(super) overflow: u64,
    /// Free memory that no move takes, by size.
    free_spans: Vec<FreeSpan>,
    /// Windows that the plan opens.
    windows: Vec<Range<usize>>,
}

/// A block that is free or may move.
#[derive(Clone, Copy)]
struct PlannedBlock {
    slot: u32,
    size: u64,
    /// Cost of moving it out of the way; 0 for a free block.
    cost: u64,
}

/// Neighbouring blocks of one segment, by their indices.
struct Run {
    segment: u32,
    blocks: Range<usize>,
    size: u64,
}

/// Contiguous free memory: a free block, or what a move leaves of one.
#[derive(Clone, Copy)]
struct FreeSpan {
    size: u64,
    /// Segment and offset.
    at: (u32, u64),
    /// Index of the free block.
    block: usize,
}

/// View of the blocks that may move for the requests of one arena. They lie in this arena, and in compatible
/// arenas of other queues, whose free blocks serve its requests too.
pub(super) struct CompactionPlanner<'a> {
    heap: &'a Heap,
    blocks: Vec<PlannedBlock>,
    runs: Vec<Run>,
    /// All free memory, by size.
    free_spans: Vec<FreeSpan>,
    /// Sum of the free spans.
    pub(super) free: u64,
    /// Start of the only window that room is made for: the first with a block that fits nowhere. If that
    /// fails, hardly any other window succeeds.
    start_without_room: Cell<Option<usize>>,
}

/// Returns an arena, and those whose free blocks its requests may use: of the same size class, without
/// virtual range.
fn compatible_arenas(heap: &Heap, arena: u16) -> Vec<u16> {
    let own = &heap.arenas[usize::from(arena)];
    let plain = |a: &Arena| a.virtual_range.is_none() && a.owner == SHARED_OWNER;
    let compatible = |(at, a): &(u16, &Arena)| *at != arena && a.small == own.small && plain(own) && plain(a);
    let others = (0..).zip(&heap.arenas).filter(compatible).map(|(at, _)| at);
    std::iter::once(arena).chain(others).collect()
}

/// Removes the smallest block that has the `missing` bytes, otherwise the largest one, from blocks sorted by
/// size.
fn next_to_evict(blocks: &mut Vec<PlannedBlock>, missing: u64) -> Option<PlannedBlock> {
    let at = blocks.partition_point(|block| block.size < missing);
    if at < blocks.len() { Some(blocks.remove(at)) } else { blocks.pop() }
}

impl Plan {
    /// Takes `size` bytes from the smallest free span that fits. The remainder stays a free span.
    fn take_best_fit(&mut self, size: u64) -> Option<(u32, u64)> {
        let at = self.free_spans.partition_point(|span| span.size < size);
        let taken = *self.free_spans.get(at)?;
        let (segment, offset) = taken.at;
        let rest = FreeSpan { size: taken.size - size, at: (segment, offset + size), ..taken };
        // The spans in between move up by one.
        let to = self.free_spans[..at].partition_point(|span| span.size < rest.size);
        self.free_spans.copy_within(to..at, to + 1);
        self.free_spans[to] = rest;
        Some(taken.at)
    }

    /// Sets the destination of the moves to a new segment.
    pub(super) fn set_new_segment(&mut self, segment: Option<u32>) {
        let Some(segment) = segment else { return };
        self.moves.iter_mut().filter(|m| m.to.0 == NEW_SEGMENT).for_each(|m| m.to.0 = segment);
    }

    pub(super) fn copies(&self, heap: &Heap) -> Vec<BlockMove> {
        let at = |(segment, offset): (u32, u64), done| (heap.segment(segment).id, offset + done);
        let mut copies = Vec::new();
        for m in &self.moves {
            copies.extend((0..m.size).step_by(m.step() as usize).map(|done| {
                let bytes = m.step().min(m.size - done);
                BlockMove { from: at(m.from, done), to: at(m.to, done), bytes }
            }));
        }
        copies
    }
}

impl<'a> CompactionPlanner<'a> {
    pub(super) fn new(heap: &'a Heap, pinned: &[u32], arena: u16) -> Self {
        let arenas = compatible_arenas(heap, arena);
        let (blocks, runs) = (Vec::with_capacity(256), Vec::with_capacity(64));
        let mut planner =
            Self { heap, blocks, runs, free_spans: Vec::new(), free: 0, start_without_room: Cell::new(None) };
        for (number, segment) in (0..).zip(&heap.segments) {
            let Some(segment) = segment.as_ref().filter(|s| arenas.contains(&s.arena)) else { continue };
            for (slot, block) in heap.blocks(segment) {
                let size = block.size;
                let cost = match block.state {
                    Is::Free => {
                        let (at, block) = ((number, block.offset), planner.blocks.len());
                        planner.free_spans.push(FreeSpan { size, at, block });
                        0
                    }
                    Is::Movable if !pinned.contains(&slot) => size + COPY_COST,
                    _ => {
                        planner.finish_run(number);
                        continue;
                    }
                };
                planner.blocks.push(PlannedBlock { slot, size, cost });
            }
            planner.finish_run(number);
        }
        planner.free = planner.free_spans.iter().map(|span| span.size).sum();
        planner.free_spans.sort_unstable_by_key(|span| (span.size, span.block));
        planner
    }

    /// Ends the current run.
    fn finish_run(&mut self, segment: u32) {
        let blocks = self.runs.last().map_or(0, |run| run.blocks.end)..self.blocks.len();
        if !blocks.is_empty() {
            let size = self.blocks[blocks.clone()].iter().map(|block| block.size).sum();
            self.runs.push(Run { segment, blocks, size });
        }
    }

    fn location(&self, block: &PlannedBlock) -> (u32, u64) {
        let slot = self.heap.slot(block.slot);
        (slot.segment, slot.offset)
    }

    /// Finds windows: the shortest parts of runs in which free blocks, and blocks in use up to a size limit, sum
    /// up to `size` bytes. The limit is 0 for sliding, and the size of the largest free block for eviction. It is
    /// `largest` for eviction to memory that is still to be freed or added. Returns the cheapest windows, in
    /// order of cost.
    pub(super) fn find_windows(&self, size: u64, largest: u64) -> Vec<Range<usize>> {
        let largest_free = self.free_spans.last().map_or(0, |span| span.size);
        let mut windows = Vec::with_capacity(256);
        for run in self.runs.iter().filter(|run| run.size >= size) {
            for largest in [0, largest_free.min(largest), largest] {
                let counts = |b: &PlannedBlock| if b.cost == 0 || b.size <= largest { b.size } else { 0 };
                let (mut end, mut sum, mut cost) = (run.blocks.start, 0, 0);
                for start in run.blocks.clone() {
                    while sum < size && end < run.blocks.end {
                        let next = &self.blocks[end];
                        (sum, cost, end) = (sum + counts(next), cost + next.cost, end + 1);
                    }
                    if sum < size {
                        break;
                    }
                    let first = &self.blocks[start];
                    // A block that stays at the start of a window is not needed there.
                    if counts(first) > 0 && end - start <= MAX_COPIES as usize {
                        windows.push((cost, start, end));
                    }
                    (sum, cost) = (sum - counts(first), cost - first.cost);
                }
            }
        }
        // Up to three limits find the same window.
        if windows.len() > 3 * MAX_WINDOWS {
            windows.select_nth_unstable(3 * MAX_WINDOWS);
            windows.truncate(3 * MAX_WINDOWS);
        }
        windows.sort_unstable();
        windows.dedup();
        windows.into_iter().take(MAX_WINDOWS).map(|(_, start, end)| start..end).collect()
    }

    /// Plans to make `size` bytes of these windows free: few and small blocks are evicted to free memory
    /// elsewhere, and the others slide together. Blocks that fit nowhere go to a new segment.
    pub(super) fn plan(&self, windows: &[Range<usize>], size: u64) -> Option<Plan> {
        let mut plan = Plan { free_spans: self.free_spans.clone(), ..Plan::default() };
        self.open(&mut plan, windows, size)?;
        let copies: u64 = plan.moves.iter().map(|m| m.size.div_ceil(m.step())).sum();
        (copies <= MAX_COPIES).then_some(plan)
    }

    /// Adds the moves that open some windows to a plan. Returns the bytes that become free.
    fn open(&self, plan: &mut Plan, windows: &[Range<usize>], size: u64) -> Option<u64> {
        let blocks = || windows.iter().flat_map(|window| &self.blocks[window.clone()]);
        plan.free_spans.retain(|span| !windows.iter().any(|window| window.contains(&span.block)));
        plan.windows.extend_from_slice(windows);
        let free: u64 = blocks().filter(|block| block.cost == 0).map(|block| block.size).sum();
        let mut held: Vec<PlannedBlock> = blocks().filter(|block| block.cost > 0).copied().collect();
        held.sort_unstable_by_key(|block| (block.size, block.slot));
        let (mut missing, mut unplaced) = (size.saturating_sub(free), Vec::new());
        while missing > 0 {
            let placed =
                next_to_evict(&mut held, missing).map(|block| (block, plan.take_best_fit(block.size)));
            let (block, to) = match placed {
                Some((block, Some(to))) => (block, to),
                Some((block, None)) => {
                    unplaced.push(block);
                    continue;
                }
                None => {
                    unplaced.sort_unstable_by_key(|block| (block.size, block.slot));
                    let block = next_to_evict(&mut unplaced, missing)?;
                    (block, self.make_room(plan, windows[0].start, block.size))
                }
            };
            plan.moves.push(Move { slot: block.slot, size: block.size, from: self.location(&block), to });
            missing = missing.saturating_sub(block.size);
        }
        let free = windows.iter().map(|window| self.slide(window.clone(), &mut plan.moves)).sum();
        (free >= size).then_some(free)
    }

    /// Returns the destination of a block of `size` bytes that fits nowhere: another window, which is opened
    /// for it, or a new segment. `start` is that of the block's window.
    fn make_room(&self, plan: &mut Plan, start: usize, size: u64) -> (u32, u64) {
        let mut windows = Vec::new();
        if self.start_without_room.get().is_none_or(|first| first == start) {
            self.start_without_room.set(Some(start));
            windows = self.find_windows(size, plan.free_spans.last().map_or(0, |span| span.size));
        }
        for window in windows {
            let is_whole = |at: usize| {
                let size = self.blocks[at].size;
                self.blocks[at].cost > 0 || plan.free_spans.iter().any(|p| p.block == at && p.size == size)
            };
            let overlaps = |other: &Range<usize>| other.start < window.end && window.start < other.end;
            if plan.windows.iter().any(overlaps) || !window.clone().all(is_whole) {
                continue;
            }
            let mut next = plan.clone();
            if let Some(free) = self.open(&mut next, std::slice::from_ref(&window), size)
                && next.overflow == plan.overflow
            {
                let last = &self.blocks[window.end - 1];
                let (segment, offset) = self.location(last);
                let offset = offset + last.size - free;
                let rest = FreeSpan { size: free - size, at: (segment, offset + size), block: usize::MAX };
                let at = next.free_spans.partition_point(|span| span.size < rest.size);
                next.free_spans.insert(at, rest);
                *plan = next;
                return (segment, offset);
            }
        }
        plan.overflow += size;
        (NEW_SEGMENT, plan.overflow - size)
    }

    /// Slides the blocks of a window together that no move evicts, towards its start. Returns the free bytes
    /// at its end. A large block is not slid by a small distance: the free memory before it stays there.
    fn slide(&self, window: Range<usize>, moves: &mut Vec<Move>) -> u64 {
        let evicted = moves.len();
        let (segment, mut from) = self.location(&self.blocks[window.start]);
        let mut to = from;
        for &PlannedBlock { slot, size, cost } in &self.blocks[window] {
            if cost > 0 && !moves[..evicted].iter().any(|m| m.slot == slot) {
                if from > to && size.div_ceil(from - to) <= MAX_COPIES {
                    moves.push(Move { slot, size, from: (segment, from), to: (segment, to) });
                } else {
                    to = from;
                }
                to += size;
            }
            from += size;
        }
        from - to
    }

    /// Plans to slide all blocks together, so that the free memory between two fixed blocks is one block.
    pub(super) fn plan_all(&self) -> Plan {
        let mut plan = Plan::default();
        for Run { blocks, .. } in &self.runs {
            if self.blocks[blocks.clone()].iter().filter(|block| block.cost == 0).count() > 1 {
                self.slide(blocks.clone(), &mut plan.moves);
            }
        }
        plan
    }

    /// Plans to evacuate plain segments, the cheapest first, of `surplus` bytes or near that, but of at least
    /// `worth` bytes. If they do not suffice, the blocks of one segment may go to a new one of at most half its
    /// size, in whole `unit`s.
    pub(super) fn plan_evacuation(&self, surplus: u64, worth: u64, unit: u64) -> Option<Plan> {
        // No room is made for blocks of segments.
        self.start_without_room.set(Some(usize::MAX));
        let is_whole = |run: &&Run| {
            let segment = self.heap.segment(run.segment);
            segment.virtual_range.is_none() && run.size == segment.size
        };
        let cost_per_byte = |run: &Run| {
            let moves: u64 = self.blocks[run.blocks.clone()].iter().map(|block| block.cost).sum();
            (moves + RELEASE_COST + run.size.saturating_sub(surplus) / 2) as f64 / run.size as f64
        };
        let mut runs: Vec<_> =
            self.runs.iter().filter(is_whole).map(|run| (cost_per_byte(run), run)).collect();
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut chosen, mut gain, mut best) = (Vec::new(), 0, None);
        // Most segments need no plan: the sum of the free memory shows that too little is free elsewhere.
        for (_, run) in &runs {
            if gain >= surplus {
                break;
            }
            if gain + run.size > self.free {
                continue;
            }
            chosen.push(run.blocks.clone());
            match self.plan(&chosen, gain + run.size).filter(|plan| plan.overflow == 0) {
                Some(plan) => (gain, best) = (gain + run.size, Some(plan)),
                None => drop(chosen.pop()),
            }
        }
        let refill = |(_, run): &(f64, &Run)| {
            let plan = self.plan(std::slice::from_ref(&run.blocks), run.size)?;
            let added = plan.overflow.next_multiple_of(unit);
            let left = run.size.saturating_sub(added);
            (added > 0 && left >= added && left >= worth && left.min(surplus) > gain)
                .then_some((added, left, plan))
        };
        let refills =
            runs.iter().filter(|(_, run)| gain < surplus && run.size <= 2 * self.free).filter_map(refill);
        if let Some((_, left, plan)) = refills.min_by_key(|(added, ..)| *added) {
            (gain, best) = (left, Some(plan));
        }
        // Segments that are idle already are released without compaction.
        best.filter(|plan| gain >= worth && !plan.moves.is_empty())
    }
}

impl Heap {
    /// Moves blocks to free memory. Handles keep their slots, and the free blocks of the segments involved are
    /// built anew.
    ///
    /// All queues wait for the copies, so earlier cross-stream uses of these segments no longer matter.
    pub(super) fn move_blocks(&mut self, moves: &[Move]) {
        let mut segments: Vec<u32> = moves.iter().flat_map(|m| [m.from.0, m.to.0]).collect();
        segments.sort_unstable();
        segments.dedup();
        let mut kept = Vec::new();
        for &segment in &segments {
            let blocks: Vec<u32> = self.blocks(self.segment(segment)).map(|(at, _)| at).collect();
            for at in blocks {
                if self.slot(at).state == Is::Free {
                    self.remove_from_free_list(at);
                    self.slab.free_slot(at);
                } else {
                    kept.push(at);
                }
            }
        }
        for m in moves {
            let arena = self.segment(m.to.0).arena;
            let slot = self.slot_mut(m.slot);
            (slot.segment, slot.offset, slot.arena) = (m.to.0, m.to.1, arena);
        }
        kept.sort_unstable_by_key(|at| (self.slot(*at).segment, self.slot(*at).offset));
        let mut kept = kept.into_iter().peekable();
        for segment in segments {
            let (mut before, mut end, mut free) = (NO_BLOCK, 0, Vec::new());
            loop {
                let next = kept.next_if(|at| self.slot(*at).segment == segment);
                let start = next.map_or(self.segment(segment).size, |at| self.slot(at).offset);
                if start > end {
                    let at = self.add_free_block(segment, end, start - end);
                    self.link(segment, before, at);
                    free.push(at);
                    before = at;
                }
                self.link(segment, before, next.unwrap_or(NO_BLOCK));
                let Some(at) = next else { break };
                let Slot { offset, size, .. } = *self.slot(at);
                (before, end) = (at, offset + size);
            }
            free.into_iter().for_each(|at| self.add_to_free_list(at));
        }
        for m in moves {
            let from = (self.segment(m.from.0).id, m.from.1);
            self.record_move(m.slot, from);
        }
    }

    /// Makes two blocks of a segment neighbours; `NO_BLOCK` stands for its ends.
    fn link(&mut self, segment: u32, left: u32, right: u32) {
        match left {
            NO_BLOCK => self.segment_mut(segment).first_block = right,
            left => self.slot_mut(left).next = right,
        }
        if right != NO_BLOCK {
            self.slot_mut(right).prev = left;
        }
    }
}
