//! Stitching: serves a large request from scattered idle extents by mapping them a second time, side by side.
//!
//! Nothing is unmapped, so the host does not wait: a queue's work uses the memory in its order, by whichever
//! address. While the block is in use, its extents are out of reach of other requests ("borrowed"). Once the block
//! is freed, they are free again at their own addresses.
//!
//! The second mapping, a [`Stitch`], stays. A later request of the same size takes it if its extents are idle.
//! So a program that repeats its steps calls the driver in none of them. A stitch is dropped before its memory
//! leaves its own addresses.

use super::Block;
use super::grow::Placement;
use super::heap::{
    AllocRequest, Arena, Heap, PendingWaits, SHARED_OWNER, STITCHED_OWNER, Segment, SlotState as Is,
};
use super::pool_state::{IdleMemory, PendingRelease, PoolState};
use super::recorder::Action;
use super::source::{PageRemap, SegmentId, SourceError};
use crate::memory::error::Result;

/// Most stitches of a pool: more than the different requests of a step, and few enough to search.
const MAX_STITCHES: usize = 128;
/// A stitched block has at least this many extents, since the unused end of the last one is lost meanwhile.
const MIN_STITCHED_EXTENTS: u64 = 6;

/// Idle memory by segment, offset and size.
type Run = (u32, u64, u64);

/// A segment whose memory is mapped at other addresses, too.
#[derive(Debug)]
pub(super) struct Stitch {
    /// The memory at its own addresses.
    runs: Vec<Run>,
    /// Size of the request that it was made for.
    first_request: u64,
    /// Sizes of the extents.
    extents: Vec<u64>,
    /// Blocks of the memory at its own addresses, while the stitch is in use.
    borrowed: Vec<u32>,
    /// If true, the stitch is about to be unmapped.
    retired: bool,
}

impl Heap {
    /// Returns the arena of a queue's stitches.
    fn get_or_create_stitched_arena(&mut self, queue: u8) -> u16 {
        let fits = |a: &Arena| a.owner == STITCHED_OWNER && a.queue == queue;
        match self.arenas.iter().position(fits) {
            Some(at) => at as u16,
            None => self.add_arena(queue, false, STITCHED_OWNER),
        }
    }

    /// Iterates over the stitches by their numbers.
    fn stitches(&self) -> impl Iterator<Item = (u32, &Segment, &Stitch)> {
        (0..).zip(&self.segments).filter_map(|(number, segment)| {
            let segment = segment.as_ref()?;
            Some((number, segment, segment.stitch.as_deref()?))
        })
    }

    /// Allocates the block of a stitch, whose memory is `pieces`.
    fn take_stitch(&mut self, number: u32, pieces: &[IdleMemory], need: &AllocRequest) -> Block {
        let mut borrowed = Vec::with_capacity(pieces.len());
        for &IdleMemory { size, start_block, offset } in pieces {
            let at = self.mark_releasing(start_block, offset, size);
            self.counters.releasing_bytes -= size;
            let slot = self.slot_mut(at);
            slot.state = Is::Borrowed;
            slot.set_never_used(false);
            borrowed.push(at);
        }
        self.record_borrowing(Action::SegmentUnmap, &borrowed);
        let clock = self.clock;
        let segment = self.segment_mut(number);
        segment.idle_since = clock;
        let (id, size, arena, first) = (segment.id, need.size, segment.arena, segment.first_block);
        if let Some(stitch) = &mut segment.stitch {
            stitch.borrowed = borrowed;
        }
        self.record_segment(Action::SegmentMap, id, 0, size, arena);
        self.slot_mut(first).size = size;
        self.mark_allocated(first, &AllocRequest { arena, ..*need })
    }

    /// Makes the memory of a stitch free again at its own addresses. `at` is the block of the stitch, which was
    /// freed.
    #[cold]
    pub(super) fn return_borrowed(&mut self, at: u32) {
        self.remove_from_free_list(at);
        let slot = self.slot_mut(at);
        slot.state = Is::Unmapped;
        let last_use = std::mem::take(&mut slot.requested);
        let (number, arena, size) = (slot.segment, slot.arena, slot.size);
        let segment = self.segment_mut(number);
        let id = segment.id;
        let borrowed = segment.stitch.as_mut().map(|s| std::mem::take(&mut s.borrowed)).unwrap_or_default();
        self.record_segment(Action::SegmentUnmap, id, 0, size, arena);
        self.record_borrowing(Action::SegmentMap, &borrowed);
        // What other queues still do with the memory is now waited for at its own addresses.
        let uses = std::mem::take(&mut self.arenas[usize::from(arena)].cross_stream_uses);
        for at in borrowed {
            let slot = self.slot_mut(at);
            slot.requested = last_use;
            let home = &mut self.arenas[usize::from(self.slab[at].arena)].cross_stream_uses;
            for used in &uses {
                if let Err(index) = home.binary_search_by_key(&used.0, |(sequence, _)| *sequence) {
                    home.insert(index, *used);
                }
            }
            let at = self.merge(at, Is::Free);
            self.add_to_free_list(at);
        }
    }

    /// Records that borrowed blocks left or came back to their own addresses.
    fn record_borrowing(&mut self, action: Action, borrowed: &[u32]) {
        for at in borrowed {
            let slot = *self.slot(*at);
            self.record_segment(action, self.segment(slot.segment).id, slot.offset, slot.size, slot.arena);
        }
    }

    fn remove_stitch(&mut self, number: u32) {
        let first = self.segment(number).first_block;
        self.segments[number as usize] = None;
        self.slab.free_slot(first);
    }
}

impl PoolState {
    /// Serves a request from scattered idle memory of its queue, if there is enough.
    ///
    /// # Errors
    /// The device was lost.
    pub(super) fn stitch(&mut self, need: &AllocRequest, placement: &Placement) -> Result<Option<Block>> {
        let arena = &self.heap.arenas[usize::from(need.arena)];
        let page = self.virtual_memory.map_or(1, |v| v.granularity);
        if !self.config.release_before_growth
            || arena.small
            || arena.owner != SHARED_OWNER
            || need.size < MIN_STITCHED_EXTENTS * self.extent_size(need, page)
            || self.surplus_after_growth(need, placement.missing()) == 0
        {
            return Ok(None);
        }
        self.totals.reclaim_stats.stitch.tried += 1;
        let arena = &self.heap.arenas[usize::from(need.arena)];
        let queue = arena.queue;
        let mut idle = self.idle_memory();
        idle.retain(|i| {
            let arena = &self.heap.arenas[usize::from(self.heap.slot(i.start_block).arena)];
            arena.queue == queue && arena.owner == SHARED_OWNER
        });
        let (number, pieces) = match self.find_stitch(need, queue, &idle) {
            Some(found) => found,
            None => {
                // Low addresses first, as for all requests: steps that repeat then find the same memory.
                idle.sort_by_key(|i| i.offset);
                let pieces = self.select_idle(idle, need.size);
                if pieces.iter().map(|i| i.size).sum::<u64>() < need.size {
                    return Ok(None);
                }
                match self.add_stitch(need.size, queue, &pieces) {
                    Ok(number) => (number, pieces),
                    Err(lost @ SourceError::DeviceLost(_)) => return Err(lost.into()),
                    Err(error) => {
                        log::debug!("idle memory could not be mapped a second time: {error}");
                        return Ok(None);
                    }
                }
            }
        };
        let block = self.heap.take_stitch(number, &pieces, need);
        // Other queues may still use the memory.
        let borrowed =
            self.heap.segment(number).stitch.as_ref().map(|s| s.borrowed.clone()).unwrap_or_default();
        for at in borrowed {
            let (arena, last_use) = (self.heap.slot(at).arena, self.heap.slot(at).requested);
            if last_use > 0 {
                self.heap.slot_mut(at).requested = 0;
                self.heap.pending_waits = Some(PendingWaits { arena, last_use });
                self.wait_cross_stream_uses(&block, queue)?;
            }
        }
        self.retire_old_stitches()?;
        Ok(Some(block))
    }

    /// Finds the smallest stitch for a request whose memory is idle. Returns it and that memory.
    fn find_stitch(
        &self,
        need: &AllocRequest,
        queue: u8,
        idle: &[IdleMemory],
    ) -> Option<(u32, Vec<IdleMemory>)> {
        let page = self.virtual_memory?.granularity;
        let locate = |&(number, offset, size): &Run| {
            let inside = |i: &&IdleMemory| {
                self.heap.slot(i.start_block).segment == number
                    && i.offset <= offset
                    && offset + size <= i.offset + i.size
            };
            let start_block = idle.iter().find(inside)?.start_block;
            Some(IdleMemory { size, start_block, offset })
        };
        // Of several requests that end in the same extent, each can take the others' stitches.
        let near = need.size.next_multiple_of(self.extent_size(need, page));
        let fitting = self.heap.stitches().filter_map(|(number, segment, stitch)| {
            let fits = need.size <= segment.size
                && stitch.first_request <= near
                && self.heap.arenas[usize::from(segment.arena)].queue == queue
                && stitch.borrowed.is_empty()
                && !stitch.retired;
            if !fits {
                return None;
            }
            let pieces = stitch.runs.iter().map(locate).collect::<Option<Vec<_>>>()?;
            Some((segment.size, number, pieces))
        });
        fitting.min_by_key(|(size, number, _)| (*size, *number)).map(|(_, number, pieces)| (number, pieces))
    }

    /// Maps idle memory a second time. Returns the number of the stitch.
    fn add_stitch(&mut self, size: u64, queue: u8, pieces: &[IdleMemory]) -> Result<u32, SourceError> {
        let (mut runs, mut extents, mut from) = (Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            let number = self.heap.slot(piece.start_block).segment;
            runs.push((number, piece.offset, piece.size));
            for (address, bytes) in self.heap.extents_between(number, piece.offset, piece.offset + piece.size)
            {
                from.push(address);
                extents.push(bytes);
            }
        }
        let id = self.source.reserve_addresses(extents.iter().sum())?;
        self.totals.num_device_alloc += 1;
        let mut offset = 0;
        let mapped = extents.iter().zip(from).map(|(&bytes, from)| {
            let to = (id, offset);
            offset += bytes;
            PageRemap { to, bytes, from: Some(from) }
        });
        let mapped: Vec<PageRemap> = mapped.collect();
        if let Err(error) = self.source.map_again(&mapped) {
            self.source.free_addresses(id)?;
            return Err(error);
        }
        let arena = self.heap.get_or_create_stitched_arena(queue);
        let stitch = Stitch { runs, first_request: size, extents, borrowed: Vec::new(), retired: false };
        let size = stitch.extents.iter().sum();
        Ok(self.heap.insert_stitch(id, size, arena, stitch))
    }

    /// Retires the stitches that were not used for the longest time, if there are too many.
    fn retire_old_stitches(&mut self) -> Result<()> {
        let live = || self.heap.stitches().filter(|(_, _, stitch)| !stitch.retired);
        if live().count() > MAX_STITCHES
            && let Some((number, ..)) = live()
                .filter(|(_, _, s)| s.borrowed.is_empty())
                .min_by_key(|(_, segment, _)| segment.idle_since)
        {
            self.retire_stitch(number)?;
        }
        Ok(())
    }

    /// Unmaps a stitch that is not in use, after the work submitted so far.
    fn retire_stitch(&mut self, number: u32) -> Result<()> {
        let fence = self.source.record_fence()?;
        let segment = self.heap.segment_mut(number);
        let id = segment.id;
        if let Some(stitch) = &mut segment.stitch {
            stitch.retired = true;
        }
        self.enqueue_release(fence, PendingRelease::Stitch(id));
        Ok(())
    }

    /// Drops a retired stitch, unless it is gone already.
    pub(super) fn drop_retired_stitch(&mut self, id: SegmentId) -> Result<()> {
        let number = self.heap.stitches().find(|(_, segment, _)| segment.id == id).map(|s| s.0);
        number.map_or(Ok(()), |number| Ok(self.drop_stitch(number)?))
    }

    fn drop_stitch(&mut self, number: u32) -> Result<(), SourceError> {
        let segment = self.heap.segment_mut(number);
        let id = segment.id;
        let extents = segment.stitch.take().map(|s| s.extents).unwrap_or_default();
        self.heap.remove_stitch(number);
        self.totals.num_device_free += 1;
        self.source.unmap_again(id, &extents)?;
        self.source.free_addresses(id)
    }

    /// Drops the stitches of memory that leaves its own addresses. If it `may_be_in_use`, they are unmapped after
    /// the work submitted so far.
    pub(super) fn drop_stitches_of(&mut self, slot: u32, may_be_in_use: bool) -> Result<()> {
        let leaving = *self.heap.slot(slot);
        let overlaps = |&(number, offset, size): &Run| {
            number == leaving.segment
                && offset < leaving.offset + leaving.size
                && leaving.offset < offset + size
        };
        let stitches = self.heap.stitches().filter(|(_, _, s)| s.runs.iter().any(overlaps));
        let stitches: Vec<(u32, bool)> = stitches.map(|(number, _, s)| (number, s.retired)).collect();
        for (number, retired) in stitches {
            match may_be_in_use {
                false => self.drop_stitch(number)?,
                true if !retired => self.retire_stitch(number)?,
                true => {}
            }
        }
        Ok(())
    }

    /// Drops all stitches, which no work uses any more.
    pub(super) fn drop_all_stitches(&mut self) -> Result<(), SourceError> {
        let all: Vec<u32> = self.heap.stitches().map(|s| s.0).collect();
        all.into_iter().try_for_each(|number| self.drop_stitch(number))
    }
}
