//! The map of the pool's memory: segments, the blocks they are cut into, and which of them are free.
//!
//! Nothing here calls the source or allocates per operation. A free block next to a free block of the same segment does not
//! exist: they are merged at once.

use super::bins::{Bins, Entry};
use super::counters::{Counters, Parts};
use super::record::{Action, Recorder};
use super::scope::Scope;
use super::slab::Slab;
pub(super) use super::slab::{MIN_BLOCK, NONE, Slot, SlotState};
use super::source::{Event, Piece, SegmentId};
use super::{Block, Tag};

/// Blocks that are larger than a request by up to this part of it are as good as a best fit.
const NEAR: u64 = 8;
/// Idle segments of at least this part of what the program uses are split last: a request of their size would miss them.
const LARGE: u64 = 64;

/// One piece of memory, or one range of addresses.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) id: SegmentId,
    pub(super) size: u64,
    pub(super) arena: u16,
    /// The block at offset 0.
    pub(super) first: u32,
    /// When it became idle, in requests.
    pub(super) idle_since: u64,
    /// What is known of a range of addresses; `None` for plain segments.
    pub(super) range: Option<Range>,
}

/// A range of addresses, and the memory behind it.
#[derive(Clone, Debug, Default)]
pub(super) struct Range {
    /// What was mapped by one call each: (offset, size), ascending.
    pub(super) extents: Vec<(u64, u64)>,
    /// The blocks without memory, in no order.
    pub(super) holes: Vec<u32>,
}

/// The blocks of one queue, small or large.
#[derive(Clone, Debug)]
pub(super) struct Arena {
    pub(super) queue: u8,
    pub(super) small: bool,
    pub(super) bins: Bins,
    /// Its range of addresses, if it has one.
    pub(super) range: Option<u32>,
    /// Whether requests go where they leave memory whole.
    pub(super) low_fit: bool,
    /// The private pool whose requests alone it serves; or [`SHARED`], or [`RETIRED`].
    pub(super) owner: u16,
    /// Uses of its blocks by other queues, by number, for which its own queue has not waited.
    pub(super) uses: Vec<(u64, Event)>,
}

impl Arena {
    /// The free block for a request of `size` bytes. Best fit; but where no block is nearly as small as the request, one that
    /// leaves memory whole: in a range the lowest address, so that the high ones become free and their memory can be used
    /// elsewhere; in plain segments one that has been split already.
    #[inline]
    fn fit(&self, size: u64, most_active: u64) -> Option<&Entry> {
        let near = size.saturating_add(size / NEAR);
        if self.low_fit && self.range.is_some() {
            return self.bins.low_fit(size, near);
        }
        let best = self.bins.best_fit(size)?;
        if self.low_fit && best.whole && best.size > near && best.size >= most_active / LARGE {
            return self.bins.best_part(best.size).or(Some(best));
        }
        Some(best)
    }

    /// Whether a block of `size` bytes is split for a request of `need`.
    #[inline]
    fn splits(&self, rules: &Splitting, need: u64, size: u64) -> bool {
        let rest = size - need;
        if self.small || self.range.is_some() {
            rest >= rules.unit
        } else {
            need < rules.max_split && rest > rules.min_large_rest.max(rules.unit - 1)
        }
    }

    /// What a free block counts as: a part, unless it is a whole segment or in a range, whose memory can leave.
    #[inline]
    fn part(&self, whole: bool, size: u64) -> Parts {
        if whole || self.range.is_some() { Parts::default() } else { Parts { blocks: 1, bytes: size } }
    }
}

/// The owner of an arena that serves all requests.
pub(super) const SHARED: u16 = 0;
/// The owner of an arena whose private pool is gone: what is free in it is anyone's.
pub(super) const RETIRED: u16 = u16::MAX;

/// Uses by other queues that a request has to wait for: those of an arena, up to a number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owed {
    pub(super) arena: u16,
    pub(super) last: u64,
}

/// A request as the heap sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocRequest<'a> {
    pub(super) arena: u16,
    /// After rounding.
    pub(super) size: u64,
    pub(super) requested: u64,
    pub(super) scope: &'a Scope,
    /// Held as [`State::Live`] or [`State::Loose`].
    pub(super) held: SlotState,
}

/// The rules of splitting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitting {
    /// What sizes and offsets are multiples of.
    pub(super) unit: u64,
    /// Blocks of at least this size are not split.
    pub(super) max_split: u64,
    /// How much larger than a request of at least `max_split` a block may be.
    pub(super) max_rounding: u64,
    /// Whether large requests go where they leave memory whole.
    pub(super) low_fit: bool,
    /// The smallest rest of a large block that is split off.
    pub(super) min_large_rest: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Heap {
    slab: Slab,
    pub(super) segments: Vec<Option<Segment>>,
    pub(super) arenas: Vec<Arena>,
    /// The arena of each queue and pool.
    arena_of: [u16; 2 * (u8::MAX as usize + 1)],
    pub(super) counters: Counters,
    pub(super) rules: Splitting,
    /// Requests so far: the clock of idleness.
    pub(super) clock: u64,
    /// Uses by other queues so far.
    last_use: u64,
    /// What the queue of the request just served has to wait for.
    pub(super) owes: Option<Owed>,
    /// Present while the pool records.
    pub(super) recorder: Option<Box<Recorder>>,
}

impl Heap {
    pub(super) fn new(rules: Splitting) -> Self {
        Self {
            slab: Slab::new(),
            segments: Vec::new(),
            arenas: Vec::new(),
            arena_of: [u16::MAX; _],
            counters: Counters::default(),
            rules,
            clock: 0,
            last_use: 0,
            owes: None,
            recorder: None,
        }
    }

    /// Becomes like another one, in the memory that it has, but records nothing.
    pub(super) fn copy_from(&mut self, other: &Self) {
        self.slab.copy_from(&other.slab);
        self.segments.clone_from(&other.segments);
        let mut old = std::mem::take(&mut self.arenas).into_iter();
        let copy = |arena: &Arena| {
            let Some(Arena { mut bins, mut uses, .. }) = old.next() else { return arena.clone() };
            bins.clone_from(&arena.bins);
            uses.clone_from(&arena.uses);
            Arena { bins, uses, ..*arena }
        };
        self.arenas = other.arenas.iter().map(copy).collect();
        (self.clock, self.last_use) = (other.clock, other.last_use);
        (self.arena_of, self.owes) = (other.arena_of, other.owes);
        self.counters = other.counters.clone();
        self.recorder = None;
    }

    /// The arena of a queue, small or large.
    #[inline]
    pub(super) fn arena(&mut self, queue: u8, small: bool) -> u16 {
        let place = usize::from(queue) * 2 + usize::from(small);
        if self.arena_of[place] == u16::MAX {
            self.arena_of[place] = self.new_arena(queue, small, SHARED);
        }
        self.arena_of[place]
    }

    fn new_arena(&mut self, queue: u8, small: bool, owner: u16) -> u16 {
        let bins = Bins::new();
        let low_fit = self.rules.low_fit && !small;
        self.arenas.push(Arena { queue, small, bins, range: None, low_fit, owner, uses: Vec::new() });
        self.arenas.len() as u16 - 1
    }

    /// The arena of a private pool: its own, one that another has left empty, or a new one.
    #[cold]
    pub(super) fn private_arena(&mut self, owner: u16, queue: u8, small: bool) -> u16 {
        let find = |heap: &Self, owner: u16| {
            let fits = |a: &Arena| a.owner == owner && a.queue == queue && a.small == small;
            heap.arenas.iter().position(fits).map(|at| at as u16)
        };
        if let Some(own) = find(self, owner) {
            return own;
        }
        let left = find(self, RETIRED).filter(|left| {
            let held = |s: &Slot| {
                s.arena == *left && matches!(s.state, SlotState::Live | SlotState::Loose | SlotState::Pending)
            };
            !self.all_blocks().any(held)
        });
        match left {
            Some(left) => {
                self.arenas[usize::from(left)].owner = owner;
                left
            }
            None => self.new_arena(queue, small, owner),
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
        // invariant: slots and arenas name only segments that are there
        self.segments[segment as usize].as_ref().expect("a segment that is there") // invariant: see above
    }

    #[inline]
    pub(super) fn segment_mut(&mut self, segment: u32) -> &mut Segment {
        self.segments[segment as usize].as_mut().expect("a segment that is there") // invariant: as in `segment`
    }

    /// The segments that are there.
    pub(super) fn live_segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().flatten()
    }

    /// The blocks of a segment with their slots, by address.
    pub(super) fn blocks(&self, segment: &Segment) -> impl Iterator<Item = (u32, &Slot)> {
        let mut next = segment.first;
        std::iter::from_fn(move || {
            let at = next;
            let slot = self.slab.get(at)?;
            next = slot.next;
            Some((at, slot))
        })
    }

    /// All blocks, in no order.
    pub(super) fn all_blocks(&self) -> impl Iterator<Item = &Slot> + '_ {
        self.slab.iter()
    }

    #[inline]
    fn is_small(&self, segment: u32) -> bool {
        self.arenas[self.segment(segment).arena as usize].small
    }

    /// Serves a request from free blocks. As a call of its own it would hand the block over through memory.
    #[inline(always)]
    pub(super) fn take(&mut self, need: &AllocRequest) -> Option<Block> {
        let arena = &mut self.arenas[usize::from(need.arena)];
        let Entry { size, address, slot, whole } = *arena.fit(need.size, self.counters.most_active)?;
        // The oversize rule keeps large blocks whole for large requests.
        let oversize = if need.size < self.rules.max_split {
            size >= self.rules.max_split
        } else {
            size >= need.size.saturating_add(self.rules.max_rounding)
        };
        if oversize {
            return None;
        }
        let gone = arena.part(whole, size);
        let mut come = Parts::default();
        if arena.splits(&self.rules, need.size, size) {
            let rest = self.slab.split(slot, need.size);
            let (size, address) = (size - need.size, address + need.size / MIN_BLOCK);
            arena.bins.replace(slot, Entry { size, address, slot: rest, whole: false });
            come = arena.part(false, size);
        } else {
            arena.bins.remove(slot);
        }
        self.counters.resplit(arena.small, gone, come);
        Some(self.hold(slot, need))
    }

    /// Serves a request from a free block at an offset inside it.
    pub(super) fn take_at(&mut self, mut free: u32, offset: u64, need: &AllocRequest) -> Block {
        self.unlist(free);
        if self.slot(free).offset < offset {
            let front = free;
            free = self.split(front, offset - self.slot(front).offset);
            self.list(front);
        }
        if self.slot(free).size > need.size {
            let rest = self.split(free, need.size);
            self.list(rest);
        }
        self.hold(free, need)
    }

    #[inline(always)]
    fn hold(&mut self, at: u32, need: &AllocRequest) -> Block {
        let slot = &mut self.slab[at];
        slot.state = need.held;
        let used = std::mem::replace(&mut slot.requested, need.requested);
        if used > 0 {
            self.owes = Some(Owed { arena: slot.arena, last: used });
        }
        slot.tag = need.scope.tag;
        slot.module = need.scope.module;
        slot.op = need.scope.op;
        let (segment, offset, size, generation) = (slot.segment, slot.offset, slot.size, slot.generation);
        let Arena { small, queue, .. } = self.arenas[need.arena as usize];
        self.counters.hold(small, size, need.requested, need.scope.tag);
        if self.recorder.is_some() {
            self.record_lent(at, need);
        }
        let segment = self.segment(segment).id;
        Block { segment, offset, bytes: need.requested, size, queue, slot: at, generation }
    }

    /// Changes the tag of a block that is held, if it is `from`: as if it had been allocated with the other one.
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

    /// The slot of a block that is held; `None` for a stale handle.
    #[inline]
    pub(super) fn find(&self, block: &Block) -> Option<u32> {
        let slot = self.slab.get(block.slot)?;
        (slot.generation == block.generation && slot.state.is_held()).then_some(block.slot)
    }

    /// The queue whose arena a block is of.
    #[inline]
    pub(super) fn home(&self, at: u32) -> u8 {
        self.arenas[usize::from(self.slab[at].arena)].queue
    }

    /// Frees a held block.
    #[inline]
    pub(super) fn free(&mut self, at: u32) {
        self.free_used(at, 0);
    }

    /// Frees a held block that another queue used, by a number of [`used`](Self::used).
    #[inline(always)]
    pub(super) fn free_used(&mut self, at: u32, last: u64) {
        self.record_block(Action::Free, at);
        self.drop_hold(at);
        self.slab[at].requested = last;
        self.reuse(at);
    }

    /// Notes that blocks of an arena were used by another queue up to `event`. Returns the use's number.
    pub(super) fn used(&mut self, arena: u16, event: Event) -> u64 {
        let uses = &mut self.arenas[usize::from(arena)].uses;
        match uses.last() {
            Some((number, last)) if *last == event => *number,
            _ => {
                self.last_use += 1;
                uses.push((self.last_use, event));
                self.last_use
            }
        }
    }

    /// A held block that waits for a fence from now on.
    pub(super) fn pend(&mut self, at: u32) {
        self.record_block(Action::FreeRequested, at);
        self.drop_hold(at);
        let slot = &mut self.slab[at];
        slot.state = SlotState::Pending;
        self.counters.pend(self.arenas[slot.arena as usize].small, slot.size);
    }

    /// A pending block whose fence has passed.
    pub(super) fn unpend(&mut self, at: u32) {
        self.record_block(Action::FreeCompleted, at);
        let Slot { size, arena, .. } = *self.slot(at);
        self.counters.unpend(self.arenas[arena as usize].small, size);
        self.slab[at].requested = 0;
        self.reuse(at);
    }

    #[inline]
    fn drop_hold(&mut self, at: u32) {
        let slot = &mut self.slab[at];
        slot.generation = slot.generation.wrapping_add(1);
        let (size, requested, tag) = (slot.size, slot.requested, slot.tag);
        let small = self.arenas[slot.arena as usize].small;
        self.counters.drop_hold(small, size, requested, tag);
    }

    /// Makes a block free, and one with its free neighbours.
    #[inline(always)]
    fn reuse(&mut self, mut at: u32) {
        let Slot { prev, next, arena, segment, .. } = self.slab[at];
        let arena = &mut self.arenas[usize::from(arena)];
        // The neighbour that this block becomes a part of, or that becomes a part of it: its place is taken over.
        let mut neighbour = None;
        let mut gone = Parts::default();
        if let Some(size) = self.slab.free_size(next) {
            gone = arena.part(false, size);
            self.slab.absorb(at, next);
            neighbour = Some(next);
        }
        if let Some(size) = self.slab.free_size(prev) {
            if let Some(next) = neighbour {
                arena.bins.remove(next);
            }
            gone = gone + arena.part(false, size);
            self.slab.absorb(prev, at);
            at = prev;
            neighbour = Some(prev);
        }
        let slot = &mut self.slab[at];
        slot.state = SlotState::Free;
        let entry = slot.entry(at);
        match neighbour {
            Some(slot) => arena.bins.replace(slot, entry),
            None => arena.bins.insert(entry),
        }
        self.counters.resplit(arena.small, gone, arena.part(entry.whole, entry.size));
        if entry.whole {
            self.segment_mut(segment).idle_since = self.clock;
        }
    }

    /// Joins a block with its neighbours of state `state`, whose state it takes, and returns what it became. Free
    /// neighbours leave their bins; the block itself is in none.
    #[inline]
    pub(super) fn merge(&mut self, mut at: u32, state: SlotState) -> u32 {
        let next = self.slot(at).next;
        if next != NONE && self.slot(next).state == state {
            if state == SlotState::Free {
                self.unlist(next);
            }
            self.slab.absorb(at, next);
        }
        let prev = self.slot(at).prev;
        if prev != NONE && self.slot(prev).state == state {
            if state == SlotState::Free {
                self.unlist(prev);
            }
            self.slab.absorb(prev, at);
            at = prev;
        }
        self.slot_mut(at).state = state;
        at
    }

    /// Cuts a block after `size` bytes and returns the second part, of the same state. Neither is in a bin.
    pub(super) fn split(&mut self, at: u32, size: u64) -> u32 {
        self.slab.split(at, size)
    }

    /// Gives the number of a block back that is a part of another one now.
    pub(super) fn vacate(&mut self, at: u32) {
        self.slab.vacate(at);
    }

    /// Puts a free block into its bin.
    pub(super) fn list(&mut self, at: u32) {
        let Slot { segment, arena, .. } = self.slab[at];
        let entry = self.slab[at].entry(at);
        let arena = &mut self.arenas[usize::from(arena)];
        arena.bins.insert(entry);
        self.counters.resplit(arena.small, Parts::default(), arena.part(entry.whole, entry.size));
        if entry.whole {
            self.segment_mut(segment).idle_since = self.clock;
        }
    }

    /// Takes a free block out of its bin.
    pub(super) fn unlist(&mut self, at: u32) {
        let entry = self.slab[at].entry(at);
        let arena = &mut self.arenas[usize::from(self.slab[at].arena)];
        arena.bins.remove(at);
        self.counters.resplit(arena.small, arena.part(entry.whole, entry.size), Parts::default());
    }

    fn add(&mut self, id: SegmentId, size: u64, arena: u16, range: Option<Range>) -> u32 {
        let segment = match self.segments.iter().position(Option::is_none) {
            Some(place) => place as u32,
            None => {
                self.segments.push(None);
                self.segments.len() as u32 - 1
            }
        };
        let state = if range.is_some() { SlotState::Unmapped } else { SlotState::Free };
        let first = self.slab.add(segment, arena, size, state);
        let segment_value = Segment { id, size, arena, first, idle_since: self.clock, range };
        self.segments[segment as usize] = Some(segment_value);
        segment
    }

    /// A new plain segment, free as a whole.
    pub(super) fn add_segment(&mut self, id: SegmentId, size: u64, arena: u16) {
        let segment = self.add(id, size, arena, None);
        let small = self.arenas[arena as usize].small;
        self.counters.reserve(small, 1, size, size >= self.rules.max_split);
        let first = self.segment(segment).first;
        self.list(first);
        self.record_segment(Action::SegmentAlloc, id, 0, size, arena);
    }

    /// A new range of addresses, without memory.
    pub(super) fn add_range(&mut self, id: SegmentId, size: u64, arena: u16) {
        let segment = self.add(id, size, arena, Some(Range::default()));
        self.add_hole(self.segment(segment).first);
        self.arenas[arena as usize].range = Some(segment);
    }

    /// Takes an idle segment out of reach, until [`remove_segment`](Self::remove_segment).
    pub(super) fn leave_segment(&mut self, segment: u32) {
        let first = self.segment(segment).first;
        self.unlist(first);
        self.slot_mut(first).state = SlotState::Leaving;
        self.counters.leaving_bytes += self.slot(first).size;
    }

    /// Forgets a segment that left.
    pub(super) fn remove_segment(&mut self, segment: u32) -> Option<Segment> {
        let gone = self.segments[segment as usize].take()?;
        self.slab.vacate(gone.first);
        let small = self.arenas[gone.arena as usize].small;
        if gone.range.is_none() {
            self.counters.leaving_bytes -= gone.size;
            self.counters.unreserve(small, 1, gone.size, gone.size >= self.rules.max_split);
            self.record_segment(Action::SegmentFree, gone.id, 0, gone.size, gone.arena);
        }
        Some(gone)
    }

    /// Cuts `offset..offset + size` out of the block at `at`, which is in no bin; the parts keep its state.
    fn carve(&mut self, mut at: u32, offset: u64, size: u64, mut part: impl FnMut(&mut Self, u32)) -> u32 {
        if self.slot(at).offset < offset {
            let front = at;
            at = self.split(front, offset - self.slot(front).offset);
            part(self, front);
        }
        if self.slot(at).size > size {
            let rest = self.split(at, size);
            part(self, rest);
        }
        at
    }

    /// Neighbouring pieces of memory were mapped in a range, inside a hole. Returns the free block they are in.
    pub(super) fn mapped(&mut self, segment: u32, pieces: &[Piece]) -> Option<u32> {
        let Piece { to: (id, offset), .. } = *pieces.first()?;
        let range = self.segment(segment).range.as_ref()?;
        let around = |slot: &Slot| (slot.offset..slot.offset + slot.size).contains(&offset);
        let at = range.holes.iter().copied().find(|h| around(self.slot(*h)))?;
        let size = pieces.iter().map(|p| p.bytes).sum();
        let arena = self.segment(segment).arena;
        self.record_segment(Action::SegmentMap, id, offset, size, arena);
        self.drop_hole(at);
        let at = self.carve(at, offset, size, Self::add_hole);
        self.slot_mut(at).set_unused(false);
        let at = self.merge(at, SlotState::Free);
        self.list(at);
        let small = self.arenas[arena as usize].small;
        self.counters.reserve(small, pieces.len() as u64, size, false);
        if let Some(range) = &mut self.segment_mut(segment).range {
            let place = range.extents.partition_point(|e| e.0 < offset);
            range.extents.splice(place..place, pieces.iter().map(|p| (p.to.1, p.bytes)));
        }
        Some(at)
    }

    /// Notes that nobody has had what lies free behind a block, as far as it is in neighbouring pieces that were mapped just now.
    pub(super) fn note_unused(&mut self, block: u32, pieces: &[Piece]) {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return };
        let (from, to) = (first.to.1, last.to.1 + last.bytes);
        let next = self.slot(block).next;
        if let Some(rest) = self.slab.get(next)
            && rest.state == SlotState::Free
            && from <= rest.offset
            && rest.offset + rest.size <= to
        {
            self.slot_mut(next).set_unused(true);
        }
    }

    /// The block at an offset, which is that at `near` or comes after it.
    pub(super) fn block_at(&self, near: u32, offset: u64) -> u32 {
        let mut at = near;
        while self.slot(at).offset + self.slot(at).size <= offset {
            at = self.slot(at).next;
        }
        at
    }

    /// Takes free extents out of reach, until [`unmapped`](Self::unmapped) or [`stay`](Self::stay). They lie in the
    /// block at `near`, or after it. Returns their own block.
    pub(super) fn leave_extents(&mut self, near: u32, offset: u64, size: u64) -> u32 {
        let at = self.block_at(near, offset);
        self.unlist(at);
        let at = self.carve(at, offset, size, Self::list);
        self.slot_mut(at).state = SlotState::Leaving;
        self.counters.leaving_bytes += size;
        at
    }

    /// Lets only the first `size` bytes of a block leave. Returns the rest, which is still to [`stay`](Self::stay).
    pub(super) fn leave_less(&mut self, at: u32, size: u64) -> u32 {
        if size == 0 { at } else { self.split(at, size) }
    }

    /// Keeps what was to leave.
    pub(super) fn stay(&mut self, at: u32) {
        self.counters.leaving_bytes -= self.slot(at).size;
        let at = self.merge(at, SlotState::Free);
        self.list(at);
    }

    /// The extents in a block: where they are, and their sizes.
    pub(super) fn extents_of(&self, at: u32) -> Vec<((SegmentId, u64), u64)> {
        let Slot { segment, offset, size, .. } = *self.slot(at);
        let segment = self.segment(segment);
        let extents = segment.range.as_ref().map_or(&[][..], |r| &r.extents);
        let first = extents.partition_point(|e| e.0 < offset);
        let inside = extents[first..].iter().take_while(|e| e.0 < offset + size);
        inside.map(|(offset, bytes)| ((segment.id, *offset), *bytes)).collect()
    }

    /// The memory of a block that had left was taken away.
    pub(super) fn unmapped(&mut self, at: u32) {
        let Slot { segment, offset, size, prev, next, .. } = *self.slot(at);
        for neighbour in [prev, next] {
            if neighbour != NONE && self.slot(neighbour).state == SlotState::Unmapped {
                self.drop_hole(neighbour);
            }
        }
        let at = self.merge(at, SlotState::Unmapped);
        self.add_hole(at);
        self.counters.leaving_bytes -= size;
        let small = self.is_small(segment);
        let Some(range) = &mut self.segment_mut(segment).range else { return };
        let first = range.extents.partition_point(|e| e.0 < offset);
        let end = range.extents.partition_point(|e| e.0 < offset + size);
        range.extents.drain(first..end);
        // A block that leaves is made of whole extents.
        self.counters.unreserve(small, (end - first) as u64, size, false);
        let Segment { id, arena, .. } = *self.segment(segment);
        self.record_segment(Action::SegmentUnmap, id, offset, size, arena);
    }

    fn add_hole(&mut self, at: u32) {
        let segment = self.slot(at).segment;
        if let Some(range) = &mut self.segment_mut(segment).range {
            range.holes.push(at);
        }
    }

    fn drop_hole(&mut self, at: u32) {
        let segment = self.slot(at).segment;
        if let Some(range) = &mut self.segment_mut(segment).range {
            range.holes.retain(|h| *h != at);
        }
    }
}
