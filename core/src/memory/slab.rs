//! The blocks of a heap: ranges of its segments, in a slab, linked to their neighbours by address.

use std::ops::{Index, IndexMut};

use super::Tag;
use super::free_list::FreeBlock;
use super::scope::ModulePath;

/// Sizes and offsets of blocks are multiples of this, or of the source's alignment where that is larger.
pub(super) const MIN_BLOCK: u64 = 512;
/// Number that stands for no block. All its bits are set, so `a & b == NO_BLOCK` only if both are.
pub(super) const NO_BLOCK: u32 = u32::MAX;

/// State of a range of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SlotState {
    /// Free for the next request.
    Free,
    /// Allocated, at a fixed address.
    Pinned,
    /// Allocated by a holder that looks up the address: the block may move.
    Movable,
    /// Freed, but its fence has not passed.
    Pending,
    /// Free but out of reach of requests, on its way back to the device or to another address.
    Releasing,
    /// Free memory that a block uses at other addresses (a stitch).
    Borrowed,
    /// Addresses without memory.
    Unmapped,
    /// Unused entry of the slab.
    Vacant,
}

impl SlotState {
    #[inline]
    pub(super) fn is_allocated(self) -> bool {
        matches!(self, Self::Pinned | Self::Movable)
    }
}

/// One range of a segment. 64 bytes: a cache line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) offset: u64,
    pub(super) size: u64,
    /// Requested bytes. For a free block, the sequence number of the last cross-stream use, or 0.
    pub(super) requested: u64,
    pub(super) op: &'static str,
    pub(super) segment: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) generation: u32,
    pub(super) module: ModulePath,
    pub(super) arena: u16,
    pub(super) state: SlotState,
    pub(super) tag: Tag,
}

const _: () = assert!(size_of::<Slot>() <= 64);

/// Marks a free block as never used since its memory was mapped, so the device cannot be using the memory.
/// The mark is compared by address, hence the static: no name of an operation has the same address.
static NEVER_USED: &str = "\0 never used";

impl Slot {
    const VACANT: Self = Self {
        offset: 0,
        size: 0,
        requested: 0,
        op: "",
        segment: NO_BLOCK,
        prev: NO_BLOCK,
        next: NO_BLOCK,
        generation: 0,
        module: ModulePath::ROOT,
        arena: 0,
        state: SlotState::Vacant,
        tag: Tag::Other,
    };
}

impl Slot {
    /// Reports whether this is a free block that was never used since its memory was mapped.
    #[inline]
    pub(super) fn is_never_used(&self) -> bool {
        std::ptr::eq(self.op, NEVER_USED)
    }

    /// Sets or clears the mark of [`is_never_used`](Self::is_never_used).
    pub(super) fn set_never_used(&mut self, unused: bool) {
        self.op = if unused { NEVER_USED } else { "" };
    }

    /// Returns the free list's entry for this block, whose slot is `at`.
    #[inline]
    pub(super) fn to_free_block(self, at: u32) -> FreeBlock {
        let address = (u64::from(self.segment) << 40) | (self.offset / MIN_BLOCK);
        FreeBlock { size: self.size, address, slot: at, is_whole_segment: self.prev & self.next == NO_BLOCK }
    }
}

/// Blocks by slot. A slot that is vacated is reused with another generation.
#[derive(Debug)]
pub(super) struct Slab {
    slots: Vec<Slot>,
    /// First vacant slot; its `next` is the next vacant one.
    first_vacant: u32,
}

impl Index<u32> for Slab {
    type Output = Slot;

    #[inline]
    fn index(&self, at: u32) -> &Slot {
        &self.slots[at as usize]
    }
}

impl IndexMut<u32> for Slab {
    #[inline]
    fn index_mut(&mut self, at: u32) -> &mut Slot {
        &mut self.slots[at as usize]
    }
}

impl Slab {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), first_vacant: NO_BLOCK }
    }

    /// Returns a slot; `None` if `at` is out of range.
    #[inline]
    pub(super) fn get(&self, at: u32) -> Option<&Slot> {
        self.slots.get(at as usize)
    }

    /// Iterates over all blocks, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> + '_ {
        self.slots.iter().filter(|s| s.state != SlotState::Vacant)
    }

    /// Returns the size of a block if it is free.
    #[inline]
    pub(super) fn free_size(&self, at: u32) -> Option<u64> {
        let slot = self.get(at)?;
        (slot.state == SlotState::Free).then_some(slot.size)
    }

    /// Adds a block without neighbours.
    pub(super) fn add(&mut self, segment: u32, arena: u16, size: u64, state: SlotState) -> u32 {
        let at = self.alloc_slot();
        let generation = self[at].generation;
        self[at] = Slot { segment, arena, size, state, generation, ..Slot::VACANT };
        at
    }

    /// Merges `right`, the next neighbour, into `left`.
    #[inline]
    pub(super) fn merge_right(&mut self, left: u32, right: u32) {
        let Slot { size, next, requested, .. } = self[right];
        let unused = self[right].is_never_used();
        let slot = &mut self[left];
        slot.size += size;
        slot.next = next;
        slot.requested = slot.requested.max(requested);
        if !unused {
            slot.op = "";
        }
        if next != NO_BLOCK {
            self[next].prev = left;
        }
        self.free_slot(right);
    }

    /// Cuts a block after `size` bytes and returns the second part, in the same state.
    #[inline]
    pub(super) fn split(&mut self, at: u32, size: u64) -> u32 {
        let right = self.alloc_slot();
        let left = &mut self[at];
        let Slot { offset, size: both, requested, op, segment, next, arena, state, .. } = *left;
        (left.size, left.next) = (size, right);
        // Set field by field: a copy of the whole slot would stall on the fields just written.
        let rest = &mut self[right];
        (rest.offset, rest.size, rest.requested) = (offset + size, both - size, requested);
        (rest.segment, rest.prev, rest.next) = (segment, at, next);
        (rest.op, rest.module, rest.tag) = (op, ModulePath::ROOT, Tag::Other);
        (rest.arena, rest.state) = (arena, state);
        if next != NO_BLOCK {
            self[next].prev = right;
        }
        right
    }

    #[inline]
    fn alloc_slot(&mut self) -> u32 {
        if self.first_vacant == NO_BLOCK {
            self.slots.push(Slot::VACANT);
            return self.slots.len() as u32 - 1;
        }
        let at = self.first_vacant;
        self.first_vacant = self[at].next;
        at
    }

    /// Vacates a slot; handles of its block are stale from now on.
    #[inline]
    pub(super) fn free_slot(&mut self, at: u32) {
        let next = std::mem::replace(&mut self.first_vacant, at);
        let slot = &mut self[at];
        slot.state = SlotState::Vacant;
        slot.generation = slot.generation.wrapping_add(1);
        slot.next = next;
    }
}
