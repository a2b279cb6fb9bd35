//! The pool's map of its memory: segments, the blocks they are cut into, and the free blocks.
//!
//! Operations of the heap neither call the source nor allocate per request. Free neighbours of a segment are
//! merged at once, so no two free blocks are adjacent.

use super::counters::{InactiveSplit, PoolCounters};
use super::free_list::{FreeBlock, FreeList};
use super::recorder::{Action, EventRecorder};
use super::scope::Scope;
use super::slab::Slab;
pub(super) use super::slab::{MIN_BLOCK, NO_BLOCK, Slot, SlotState};
use super::source::{Event, PageRemap, SegmentId};
use super::stitching::Stitch;
use super::{Block, Tag};

/// Blocks larger than a request by up to this part of it are as good as a best fit. Plain segments for several
/// requests have up to this part in addition.
pub(super) const NEAR_FIT_DIVISOR: u64 = 8;
/// Idle segments of at least this part of the peak usage are split last: a request of their size would miss
/// them.
const LARGE_IDLE_DIVISOR: u64 = 64;

/// One piece of device memory, or one range of virtual addresses.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) id: SegmentId,
    pub(super) size: u64,
    pub(super) arena: u16,
    /// The block at offset 0.
    pub(super) first_block: u32,
    /// When the segment became idle, by [`Heap::clock`].
    pub(super) idle_since: u64,
    /// Extents and holes of a virtual range; `None` for plain segments.
    pub(super) virtual_range: Option<VirtualRange>,
    /// Where the memory comes from, if it is mapped elsewhere, too.
    pub(super) stitch: Option<Box<Stitch>>,
}

/// The mapped memory of a range of virtual addresses.
#[derive(Debug, Default)]
pub(super) struct VirtualRange {
    /// Extents, each mapped by one call: (offset, size), ascending.
    pub(super) extents: Vec<(u64, u64)>,
    /// Blocks without memory, in no particular order.
    pub(super) holes: Vec<u32>,
}

/// Free list, virtual range and segments of one queue and size class (small or large).
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) queue: u8,
    pub(super) small: bool,
    pub(super) free_list: FreeList,
    /// Index of the arena's virtual range, if it has one.
    pub(super) virtual_range: Option<u32>,
    /// If true, requests are placed so that large free memory stays whole.
    pub(super) prefers_low_address: bool,
    /// Private pool that the arena serves exclusively, or [`SHARED_OWNER`] or [`RETIRED_OWNER`].
    pub(super) owner: u16,
    /// Cross-stream uses of the arena's blocks that its own queue has not waited for: (sequence number,
    /// event).
    pub(super) cross_stream_uses: Vec<(u64, Event)>,
}

impl Arena {
    /// Finds the free block for a request of `size` bytes: best fit, unless no block is nearly as small as
    /// the request. Then the choice keeps large memory whole. In a virtual range it is the lowest address, so
    /// that high memory becomes free and can move elsewhere. In plain segments it is a block of a segment
    /// that has been split already.
    #[inline]
    fn find_fit(&self, size: u64, peak_active: u64) -> Option<&FreeBlock> {
        let near_size = size.saturating_add(size / NEAR_FIT_DIVISOR);
        if self.prefers_low_address && self.virtual_range.is_some() {
            return self.free_list.lowest_address_fit(size, near_size);
        }
        let best = self.free_list.best_fit(size)?;
        if self.prefers_low_address
            && best.is_whole_segment
            && best.size > near_size
            && best.size >= peak_active / LARGE_IDLE_DIVISOR
        {
            return self.free_list.best_split_fit(best.size).or(Some(best));
        }
        Some(best)
    }

    /// Reports whether a block of `size` bytes is split for a request of `need` bytes.
    #[inline]
    fn should_split(&self, rules: &SplitRules, need: u64, size: u64) -> bool {
        let rest = size - need;
        if self.small || self.virtual_range.is_some() {
            rest >= rules.unit
        } else {
            need < rules.max_split && rest > rules.min_large_remainder.max(rules.unit - 1)
        }
    }

    /// Returns the counts of a free block. It is an inactive split, unless its memory can be returned: it is a
    /// whole segment, or lies in a virtual range.
    #[inline]
    fn inactive_split_of(&self, whole: bool, size: u64) -> InactiveSplit {
        if whole || self.virtual_range.is_some() {
            InactiveSplit::default()
        } else {
            InactiveSplit { blocks: 1, bytes: size }
        }
    }
}

/// Owner of an arena that serves all requests.
pub(super) const SHARED_OWNER: u16 = 0;
/// Owner of an arena whose private pool was dropped: its free memory serves every request.
pub(super) const RETIRED_OWNER: u16 = u16::MAX;
/// Owner of the arenas of stitches, from which no request is served directly.
pub(super) const STITCHED_OWNER: u16 = u16::MAX - 1;

/// Cross-stream uses of an arena, up to a sequence number, that a request has to wait for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingWaits {
    pub(super) arena: u16,
    pub(super) last_use: u64,
}

/// An allocation request, resolved to an arena and a rounded size.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocRequest<'a> {
    pub(super) arena: u16,
    /// Size after rounding.
    pub(super) size: u64,
    pub(super) requested: u64,
    pub(super) scope: &'a Scope,
    /// State of the block once allocated: [`SlotState::Pinned`] or [`SlotState::Movable`].
    pub(super) state: SlotState,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SplitRules {
    /// Sizes and offsets are multiples of this.
    pub(super) unit: u64,
    /// Blocks of at least this size are not split.
    pub(super) max_split: u64,
    /// Largest excess of a block over a request of at least `max_split`.
    pub(super) max_rounding: u64,
    /// If true, large requests are placed so that large free memory stays whole.
    pub(super) prefers_low_address: bool,
    /// Smallest remainder that is split off a large block.
    pub(super) min_large_remainder: u64,
}

#[derive(Debug)]
pub(super) struct Heap {
    pub(super) slab: Slab,
    pub(super) segments: Vec<Option<Segment>>,
    pub(super) arenas: Vec<Arena>,
    /// The arena of each queue and size class.
    arena_ids: [u16; 2 * (u8::MAX as usize + 1)],
    pub(super) counters: PoolCounters,
    pub(super) rules: SplitRules,
    /// Number of requests so far, which measures idleness.
    pub(super) clock: u64,
    /// Sequence number of the last cross-stream use.
    last_use: u64,
    /// Waits that the queue of the request just served still has to enqueue.
    pub(super) pending_waits: Option<PendingWaits>,
    /// Recorder, present while the pool records.
    pub(super) recorder: Option<Box<EventRecorder>>,
}

impl Heap {
    pub(super) fn new(rules: SplitRules) -> Self {
        Self {
            slab: Slab::new(),
            segments: Vec::new(),
            arenas: Vec::new(),
            arena_ids: [u16::MAX; 2 * (u8::MAX as usize + 1)],
            counters: PoolCounters::default(),
            rules,
            clock: 0,
            last_use: 0,
            pending_waits: None,
            recorder: None,
        }
    }

    /// Returns the arena of a queue and size class.
    #[inline]
    pub(super) fn get_or_create_arena(&mut self, queue: u8, small: bool) -> u16 {
        let index = usize::from(queue) * 2 + usize::from(small);
        if self.arena_ids[index] == u16::MAX {
            self.arena_ids[index] = self.add_arena(queue, small, SHARED_OWNER);
        }
        self.arena_ids[index]
    }

    pub(super) fn add_arena(&mut self, queue: u8, small: bool, owner: u16) -> u16 {
        let bins = FreeList::new();
        let low_fit = self.rules.prefers_low_address && !small;
        self.arenas.push(Arena {
            queue,
            small,
            free_list: bins,
            virtual_range: None,
            prefers_low_address: low_fit,
            owner,
            cross_stream_uses: Vec::new(),
        });
        self.arenas.len() as u16 - 1
    }

    /// Returns an arena for a private pool: its own one, a retired one without blocks in use, or a new one.
    #[cold]
    pub(super) fn get_or_create_private_arena(&mut self, owner: u16, queue: u8, small: bool) -> u16 {
        let find = |heap: &Self, owner: u16| {
            let fits = |a: &Arena| a.owner == owner && a.queue == queue && a.small == small;
            heap.arenas.iter().position(fits).map(|at| at as u16)
        };
        if let Some(own) = find(self, owner) {
            return own;
        }
        let left = find(self, RETIRED_OWNER).filter(|left| {
            let held = |s: &Slot| {
                s.arena == *left
                    && matches!(s.state, SlotState::Pinned | SlotState::Movable | SlotState::Pending)
            };
            !self.all_blocks().any(held)
        });
        match left {
            Some(left) => {
                self.arenas[usize::from(left)].owner = owner;
                left
            }
            None => self.add_arena(queue, small, owner),
        }
    }

    #[inline]
    pub(super) fn slot(&self, slot: u32) -> &Slot {
        &self.slab[slot]
    }

    #[inline]
    pub(super) fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.slab[slot]
    }

    #[inline]
    pub(super) fn segment(&self, segment: u32) -> &Segment {
        // invariant: slots and arenas refer only to existing segments
        self.segments[segment as usize].as_ref().expect("a segment that is there") // invariant: see above
    }

    #[inline]
    pub(super) fn segment_mut(&mut self, segment: u32) -> &mut Segment {
        self.segments[segment as usize].as_mut().expect("a segment that is there") // invariant: as in `segment`
    }

    pub(super) fn live_segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().flatten()
    }

    /// Iterates over the blocks of a segment with their slots, by address.
    pub(super) fn blocks(&self, segment: &Segment) -> impl Iterator<Item = (u32, &Slot)> {
        let mut next = segment.first_block;
        std::iter::from_fn(move || {
            let at = next;
            let slot = self.slab.get(at)?;
            next = slot.next;
            Some((at, slot))
        })
    }

    /// Iterates over all blocks, in no particular order.
    pub(super) fn all_blocks(&self) -> impl Iterator<Item = &Slot> + '_ {
        self.slab.iter()
    }

    /// Serves a request from free blocks. Always inlined: a call would return the block through memory.
    #[inline(always)]
    pub(super) fn take_free_block(&mut self, need: &AllocRequest) -> Option<Block> {
        let arena = &mut self.arenas[usize::from(need.arena)];
        let FreeBlock { size, address, slot, is_whole_segment: whole } =
            *arena.find_fit(need.size, self.counters.peak_active_bytes)?;
        // The oversize rule keeps large blocks whole for large requests.
        let oversize = if need.size < self.rules.max_split {
            size >= self.rules.max_split
        } else {
            size >= need.size.saturating_add(self.rules.max_rounding)
        };
        if oversize {
            return None;
        }
        let gone = arena.inactive_split_of(whole, size);
        let mut come = InactiveSplit::default();
        if arena.should_split(&self.rules, need.size, size) {
            let rest = self.slab.split(slot, need.size);
            let (size, address) = (size - need.size, address + need.size / MIN_BLOCK);
            arena.free_list.replace(slot, FreeBlock { size, address, slot: rest, is_whole_segment: false });
            come = arena.inactive_split_of(false, size);
        } else {
            arena.free_list.remove(slot);
        }
        self.counters.replace_inactive_split(arena.small, gone, come);
        Some(self.mark_allocated(slot, need))
    }

    pub(super) fn take_free_block_at(&mut self, free: u32, offset: u64, need: &AllocRequest) -> Block {
        self.remove_from_free_list(free);
        let at = self.carve(free, offset, need.size, Self::add_to_free_list);
        self.mark_allocated(at, need)
    }

    #[inline(always)]
    pub(super) fn mark_allocated(&mut self, at: u32, need: &AllocRequest) -> Block {
        let slot = &mut self.slab[at];
        slot.state = need.state;
        let used = std::mem::replace(&mut slot.requested, need.requested);
        if used > 0 {
            self.pending_waits = Some(PendingWaits { arena: slot.arena, last_use: used });
        }
        slot.tag = need.scope.tag;
        slot.module = need.scope.module;
        slot.op = need.scope.op;
        let (segment, offset, size, generation) = (slot.segment, slot.offset, slot.size, slot.generation);
        let Arena { small, queue, .. } = self.arenas[need.arena as usize];
        self.counters.record_alloc(small, size, need.requested, need.scope.tag);
        if self.recorder.is_some() {
            self.record_alloc(at, need);
        }
        let segment = self.segment(segment).id;
        Block { segment, offset, bytes: need.requested, size, queue, slot: at, generation }
    }

    /// Changes the tag of an allocated block if it is `from`, as if the block had been allocated with tag
    /// `to`.
    pub(super) fn retag(&mut self, at: u32, from: Tag, to: Tag) {
        let slot = &mut self.slab[at];
        if slot.tag != from {
            return;
        }
        slot.tag = to;
        let (segment, offset, size) = (slot.segment, slot.offset, slot.size);
        self.counters.retag(size, from, to);
        let segment = self.segment(segment).id;
        if let Some(recorder) = &mut self.recorder {
            recorder.retag(segment, offset, to);
        }
    }

    /// Returns the slot of an allocated block; `None` for a stale handle.
    #[inline]
    pub(super) fn find_slot(&self, block: &Block) -> Option<u32> {
        let slot = self.slab.get(block.slot)?;
        (slot.generation == block.generation && slot.state.is_allocated()).then_some(block.slot)
    }

    /// Returns the queue of the arena that a block belongs to.
    #[inline]
    pub(super) fn home_stream(&self, at: u32) -> u8 {
        self.arenas[usize::from(self.slab[at].arena)].queue
    }

    /// Frees an allocated block.
    #[inline]
    pub(super) fn free(&mut self, at: u32) {
        self.free_cross_stream(at, 0);
    }

    /// Frees an allocated block that other queues used, up to the sequence number `last` of
    /// [`record_cross_stream_use`](Self::record_cross_stream_use).
    #[inline(always)]
    pub(super) fn free_cross_stream(&mut self, at: u32, last: u64) {
        self.record_block(Action::Free, at);
        self.mark_freed(at);
        self.slab[at].requested = last;
        self.free_and_merge(at);
    }

    /// Records that another queue used blocks of an arena, up to `event`. Returns the use's sequence number.
    pub(super) fn record_cross_stream_use(&mut self, arena: u16, event: Event) -> u64 {
        let uses = &mut self.arenas[usize::from(arena)].cross_stream_uses;
        match uses.last() {
            Some((number, last)) if *last == event => *number,
            _ => {
                self.last_use += 1;
                uses.push((self.last_use, event));
                self.last_use
            }
        }
    }

    /// Marks an allocated block as freed but waiting for a fence.
    pub(super) fn mark_pending(&mut self, at: u32) {
        self.record_block(Action::FreeRequested, at);
        self.mark_freed(at);
        let slot = &mut self.slab[at];
        slot.state = SlotState::Pending;
        self.counters.record_pending(self.arenas[slot.arena as usize].small, slot.size);
    }

    /// Frees a pending block whose fence has passed.
    pub(super) fn complete_pending(&mut self, at: u32) {
        self.record_block(Action::FreeCompleted, at);
        let Slot { size, arena, .. } = *self.slot(at);
        self.counters.record_completed(self.arenas[arena as usize].small, size);
        self.slab[at].requested = 0;
        self.free_and_merge(at);
    }

    #[inline]
    fn mark_freed(&mut self, at: u32) {
        let slot = &mut self.slab[at];
        slot.generation = slot.generation.wrapping_add(1);
        let (size, requested, tag) = (slot.size, slot.requested, slot.tag);
        let small = self.arenas[slot.arena as usize].small;
        self.counters.record_free(small, size, requested, tag);
    }

    /// Frees a block and merges it with its free neighbours.
    #[inline(always)]
    fn free_and_merge(&mut self, mut at: u32) {
        let Slot { prev, next, arena, segment, .. } = self.slab[at];
        let arena = &mut self.arenas[usize::from(arena)];
        // The neighbour that is merged with this block; the merged block takes over its entry of the free
        // list.
        let mut neighbour = None;
        let mut gone = InactiveSplit::default();
        if let Some(size) = self.slab.free_size(next) {
            gone = arena.inactive_split_of(false, size);
            self.slab.merge_right(at, next);
            neighbour = Some(next);
        }
        if let Some(size) = self.slab.free_size(prev) {
            if let Some(next) = neighbour {
                arena.free_list.remove(next);
            }
            gone = gone + arena.inactive_split_of(false, size);
            self.slab.merge_right(prev, at);
            at = prev;
            neighbour = Some(prev);
        }
        let slot = &mut self.slab[at];
        slot.state = SlotState::Free;
        let entry = slot.to_free_block(at);
        match neighbour {
            Some(slot) => arena.free_list.replace(slot, entry),
            None => arena.free_list.insert(entry),
        }
        self.counters.replace_inactive_split(
            arena.small,
            gone,
            arena.inactive_split_of(entry.is_whole_segment, entry.size),
        );
        if entry.is_whole_segment {
            let clock = self.clock;
            let segment = self.segment_mut(segment);
            segment.idle_since = clock;
            if segment.stitch.is_some() {
                self.return_borrowed(at);
            }
        }
    }

    /// Merges a block with its neighbours in state `state`, sets that state, and returns the merged block.
    /// Free neighbours leave the free list; the block itself must not be in it.
    #[inline]
    pub(super) fn merge(&mut self, mut at: u32, state: SlotState) -> u32 {
        let next = self.slot(at).next;
        if next != NO_BLOCK && self.slot(next).state == state {
            if state == SlotState::Free {
                self.remove_from_free_list(next);
            }
            self.slab.merge_right(at, next);
        }
        let prev = self.slot(at).prev;
        if prev != NO_BLOCK && self.slot(prev).state == state {
            if state == SlotState::Free {
                self.remove_from_free_list(prev);
            }
            self.slab.merge_right(prev, at);
            at = prev;
        }
        self.slot_mut(at).state = state;
        at
    }

    /// Returns a new free block, which is neither linked to its neighbours nor in the free list.
    pub(super) fn add_free_block(&mut self, segment: u32, offset: u64, size: u64) -> u32 {
        let at = self.slab.add(segment, self.segment(segment).arena, size, SlotState::Free);
        self.slot_mut(at).offset = offset;
        at
    }

    pub(super) fn add_to_free_list(&mut self, at: u32) {
        let Slot { segment, arena, .. } = self.slab[at];
        let entry = self.slab[at].to_free_block(at);
        let arena = &mut self.arenas[usize::from(arena)];
        arena.free_list.insert(entry);
        self.counters.replace_inactive_split(
            arena.small,
            InactiveSplit::default(),
            arena.inactive_split_of(entry.is_whole_segment, entry.size),
        );
        if entry.is_whole_segment {
            self.segment_mut(segment).idle_since = self.clock;
        }
    }

    pub(super) fn remove_from_free_list(&mut self, at: u32) {
        let entry = self.slab[at].to_free_block(at);
        let arena = &mut self.arenas[usize::from(self.slab[at].arena)];
        arena.free_list.remove(at);
        self.counters.replace_inactive_split(
            arena.small,
            arena.inactive_split_of(entry.is_whole_segment, entry.size),
            InactiveSplit::default(),
        );
    }

    fn insert_segment(&mut self, id: SegmentId, size: u64, arena: u16, range: Option<VirtualRange>) -> u32 {
        let segment = match self.segments.iter().position(Option::is_none) {
            Some(index) => index as u32,
            None => {
                self.segments.push(None);
                self.segments.len() as u32 - 1
            }
        };
        let state = if range.is_some() { SlotState::Unmapped } else { SlotState::Free };
        let first = self.slab.add(segment, arena, size, state);
        let segment_value = Segment {
            id,
            size,
            arena,
            first_block: first,
            idle_since: self.clock,
            virtual_range: range,
            stitch: None,
        };
        self.segments[segment as usize] = Some(segment_value);
        segment
    }

    /// Adds a plain segment, free as a whole, and returns its number.
    pub(super) fn add_segment(&mut self, id: SegmentId, size: u64, arena: u16) -> u32 {
        let segment = self.insert_segment(id, size, arena, None);
        let small = self.arenas[arena as usize].small;
        self.counters.record_reserve(small, 1, size, size >= self.rules.max_split);
        let first = self.segment(segment).first_block;
        self.add_to_free_list(first);
        self.record_segment(Action::SegmentAlloc, id, 0, size, arena);
        segment
    }

    /// Adds a virtual range without memory.
    pub(super) fn add_range(&mut self, id: SegmentId, size: u64, arena: u16) {
        let segment = self.insert_segment(id, size, arena, Some(VirtualRange::default()));
        self.add_hole(self.segment(segment).first_block);
        self.arenas[arena as usize].virtual_range = Some(segment);
    }

    /// Adds a stitch, not in use, and returns its number.
    pub(super) fn insert_stitch(&mut self, id: SegmentId, size: u64, arena: u16, stitch: Stitch) -> u32 {
        let number = self.insert_segment(id, size, arena, None);
        let segment = self.segment_mut(number);
        segment.stitch = Some(Box::new(stitch));
        let first = segment.first_block;
        self.slot_mut(first).state = SlotState::Unmapped;
        number
    }

    /// Removes a plain segment that returns to the device. It was marked by
    /// [`mark_releasing`](Self::mark_releasing).
    pub(super) fn remove_segment(&mut self, segment: u32) -> SegmentId {
        let &Segment { id, size, arena, first_block, .. } = self.segment(segment);
        self.segments[segment as usize] = None;
        self.slab.free_slot(first_block);
        self.counters.releasing_bytes -= size;
        self.counters.record_release(
            self.arenas[arena as usize].small,
            1,
            size,
            size >= self.rules.max_split,
        );
        self.record_segment(Action::SegmentFree, id, 0, size, arena);
        id
    }

    /// Cuts `offset..offset + size` out of the block `at`, which is not in the free list. The parts keep its
    /// state, and `part` is called with each one before and after the range.
    fn carve(&mut self, mut at: u32, offset: u64, size: u64, mut part: impl FnMut(&mut Self, u32)) -> u32 {
        if self.slot(at).offset < offset {
            let front = at;
            at = self.slab.split(front, offset - self.slot(front).offset);
            part(self, front);
        }
        if self.slot(at).size > size {
            let rest = self.slab.split(at, size);
            part(self, rest);
        }
        at
    }

    /// Records that neighbouring pieces were mapped inside a hole of a range. Returns the free block they are
    /// in.
    pub(super) fn mark_mapped(&mut self, segment: u32, pieces: &[PageRemap]) -> Option<u32> {
        let PageRemap { to: (id, offset), .. } = *pieces.first()?;
        let range = self.segment(segment).virtual_range.as_ref()?;
        let around = |slot: &Slot| (slot.offset..slot.offset + slot.size).contains(&offset);
        let at = range.holes.iter().copied().find(|h| around(self.slot(*h)))?;
        let size = pieces.iter().map(|p| p.bytes).sum();
        let arena = self.segment(segment).arena;
        self.record_segment(Action::SegmentMap, id, offset, size, arena);
        self.remove_hole(at);
        let at = self.carve(at, offset, size, Self::add_hole);
        self.slot_mut(at).set_never_used(false);
        let at = self.merge(at, SlotState::Free);
        self.add_to_free_list(at);
        let small = self.arenas[arena as usize].small;
        self.counters.record_reserve(small, pieces.len() as u64, size, false);
        if let Some(range) = &mut self.segment_mut(segment).virtual_range {
            let index = range.extents.partition_point(|e| e.0 < offset);
            range.extents.splice(index..index, pieces.iter().map(|p| (p.to.1, p.bytes)));
        }
        Some(at)
    }

    /// Marks the free block after `block` as never used, if it lies entirely in the pieces that were just
    /// mapped.
    pub(super) fn mark_never_used_after(&mut self, block: u32, pieces: &[PageRemap]) {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return };
        let (from, to) = (first.to.1, last.to.1 + last.bytes);
        let next = self.slot(block).next;
        if let Some(rest) = self.slab.get(next)
            && rest.state == SlotState::Free
            && from <= rest.offset
            && rest.offset + rest.size <= to
        {
            self.slot_mut(next).set_never_used(true);
        }
    }

    /// Returns the block that contains `offset`, searching from `start_block` upwards.
    pub(super) fn find_block_at(&self, start_block: u32, offset: u64) -> (u32, &Slot) {
        let mut at = start_block;
        while self.slot(at).offset + self.slot(at).size <= offset {
            at = self.slot(at).next;
        }
        (at, self.slot(at))
    }

    /// Takes idle memory out of reach of requests, until [`remove_segment`](Self::remove_segment),
    /// [`mark_unmapped`](Self::mark_unmapped) or [`cancel_release`](Self::cancel_release). The memory lies in
    /// `start_block` or after it. Returns the block it became.
    pub(super) fn mark_releasing(&mut self, start_block: u32, offset: u64, size: u64) -> u32 {
        let at = self.find_block_at(start_block, offset).0;
        self.remove_from_free_list(at);
        let at = self.carve(at, offset, size, Self::add_to_free_list);
        self.slot_mut(at).state = SlotState::Releasing;
        self.counters.releasing_bytes += size;
        at
    }

    /// Makes a releasing block free again.
    pub(super) fn cancel_release(&mut self, at: u32) {
        self.counters.releasing_bytes -= self.slot(at).size;
        let at = self.merge(at, SlotState::Free);
        self.add_to_free_list(at);
    }

    /// Returns the extents in a block: (address, size).
    pub(super) fn extents_in_block(&self, at: u32) -> Vec<((SegmentId, u64), u64)> {
        let Slot { segment, offset, size, .. } = *self.slot(at);
        self.extents_between(segment, offset, offset + size)
    }

    /// Returns the extents between two offsets of a segment: (address, size).
    pub(super) fn extents_between(
        &self,
        segment: u32,
        offset: u64,
        end: u64,
    ) -> Vec<((SegmentId, u64), u64)> {
        let segment = self.segment(segment);
        let extents = segment.virtual_range.as_ref().map_or(&[][..], |r| &r.extents);
        let first = extents.partition_point(|e| e.0 < offset);
        let inside = extents[first..].iter().take_while(|e| e.0 < end);
        inside.map(|(offset, bytes)| ((segment.id, *offset), *bytes)).collect()
    }

    /// Records that the memory of a releasing block was unmapped.
    pub(super) fn mark_unmapped(&mut self, at: u32) {
        let Slot { segment, offset, size, prev, next, .. } = *self.slot(at);
        for neighbour in [prev, next] {
            if neighbour != NO_BLOCK && self.slot(neighbour).state == SlotState::Unmapped {
                self.remove_hole(neighbour);
            }
        }
        let at = self.merge(at, SlotState::Unmapped);
        self.add_hole(at);
        self.counters.releasing_bytes -= size;
        let small = self.arenas[self.segment(segment).arena as usize].small;
        let Some(range) = &mut self.segment_mut(segment).virtual_range else { return };
        let first = range.extents.partition_point(|e| e.0 < offset);
        let end = range.extents.partition_point(|e| e.0 < offset + size);
        range.extents.drain(first..end);
        // A releasing block consists of whole extents.
        self.counters.record_release(small, (end - first) as u64, size, false);
        let Segment { id, arena, .. } = *self.segment(segment);
        self.record_segment(Action::SegmentUnmap, id, offset, size, arena);
    }

    fn add_hole(&mut self, at: u32) {
        let segment = self.slot(at).segment;
        if let Some(range) = &mut self.segment_mut(segment).virtual_range {
            range.holes.push(at);
        }
    }

    fn remove_hole(&mut self, at: u32) {
        let segment = self.slot(at).segment;
        if let Some(range) = &mut self.segment_mut(segment).virtual_range {
            range.holes.retain(|h| *h != at);
        }
    }
}
