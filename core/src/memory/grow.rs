//! Taking memory from the source, and giving idle memory back so that less has to be taken.

use super::heap::{NONE, Need, State as Is};
use super::source::{SegmentSource, SourceError};
use super::state::{Growth, Idle, Piece, State};
use crate::error::Result;

const MIB: u64 = 1 << 20;
/// What grows for small requests: a plain segment, or what is mapped at once (PyTorch's kSmallBuffer).
const SMALL_PIECE: u64 = 2 * MIB;
/// From this size on a request gets a segment, or a mapping, of its own size (PyTorch's kMinLargeAlloc).
const OWN_SEGMENT: u64 = 10 * MIB;
/// What plain segments of their own are multiples of (PyTorch's kRoundLarge).
const ROUND_LARGE: u64 = 2 * MIB;
/// Memory is mapped in extents of at most this, or of an eighth of what the program uses, where that is more: an
/// extent goes back only as a whole, and each one is a call of the driver.
const MAX_EXTENT: u64 = 128 * MIB;
const MAX_EXTENT_PART: u64 = 8;
/// Idle memory is worth giving back for growth if it is between these parts of what is missing: less is not worth
/// the calls, and more would soon be missed.
const LEAST_PIECE: u64 = 16;
const LARGEST_PIECE: u64 = 4;

/// Where in a range a request would lie, and the memory that is missing there.
#[derive(Clone, Debug)]
struct Placement {
    segment: u32,
    offset: u64,
    /// What has to be mapped.
    holes: Vec<Hole>,
    missing: u64,
}

/// A part of a range without memory.
#[derive(Clone, Copy, Debug)]
struct Hole {
    /// The block it lies in.
    slot: u32,
    offset: u64,
    size: u64,
    /// Bytes from its offset to the end of the block.
    room: u64,
}

/// A part of a gap between blocks in use.
#[derive(Clone, Copy)]
struct Part {
    slot: u32,
    offset: u64,
    size: u64,
    mapped: bool,
}

impl State {
    fn is_small(&self, need: &Need) -> bool {
        self.heap.arenas[need.arena as usize].small
    }

    /// The most memory that was ever in use at once, this request included.
    fn most_active(&self, need: &Need) -> u64 {
        let counters = &self.heap.counters;
        counters.most_active.max(counters.active().saturating_add(need.size))
    }

    /// The plain segment to make for a request.
    fn segment_size(&self, need: &Need) -> u64 {
        let size = if self.is_small(need) {
            SMALL_PIECE
        } else if need.size < OWN_SEGMENT {
            self.config.large_segment_size
        } else {
            need.size.checked_next_multiple_of(ROUND_LARGE).unwrap_or(need.size)
        };
        size.min(self.max_segment).max(need.size)
    }

    /// Sends idle memory back if the pool would hold more than the program has shown to need. Whether it did.
    ///
    /// So the memory that is held stays below `1 + growth_slack` times the memory that was ever in use at once, as
    /// long as there is idle memory of a fitting size.
    pub(super) fn reclaim(&mut self, source: &dyn SegmentSource, need: &Need) -> Result<bool> {
        if !self.config.release_before_growth {
            return Ok(false);
        }
        let place = self.placement(need);
        let grow = place.as_ref().map_or_else(|| self.segment_size(need), |p| p.missing);
        let target = (self.most_active(need) as f64 * (1.0 + self.config.growth_slack)) as u64;
        // What is held above the target already is no debt of this request.
        let surplus = self.heap.counters.reserved().saturating_add(grow).saturating_sub(target).min(grow);
        if surplus == 0 {
            return Ok(false);
        }
        let mut idle = self.idle();
        idle.retain(|i| (surplus / LEAST_PIECE..=surplus.saturating_mul(LARGEST_PIECE)).contains(&i.size));
        if let Some(place) = place {
            let end = place.offset + need.size;
            idle.retain(|i| match i.what {
                Piece::Extent { near, offset } => {
                    let elsewhere = self.heap.slot(near).segment != place.segment;
                    elsewhere || offset >= end || offset + i.size <= place.offset
                }
                Piece::Segment(_) => true,
            });
        }
        if idle.is_empty() {
            return Ok(false);
        }
        self.rungs.reclaim.tried += 1;
        idle.sort_by_key(|i| i.size);
        // One piece that is enough, and no larger than it must be; else the largest ones.
        let chosen = match idle.iter().find(|i| i.size >= surplus) {
            Some(piece) => vec![*piece],
            None => {
                idle.reverse();
                first_of(idle, surplus)
            }
        };
        Ok(self.leave(source, &chosen)? > 0)
    }

    /// Takes memory from the source for a request.
    pub(super) fn grow(&mut self, source: &dyn SegmentSource, need: &Need) -> Result<Growth> {
        self.reserve(source, need)?;
        if let Some(place) = self.placement(need) {
            let grown = self.map(source, need, &place, true)?;
            return match grown {
                // There may be room for what is missing, and no more.
                Growth::Full(_) => {
                    self.placement(need).map_or(Ok(grown), |p| self.map(source, need, &p, false))
                }
                Growth::Served(_) => Ok(grown),
            };
        }
        let mut size = self.segment_size(need);
        loop {
            match self.add_segment(source, need, size)? {
                Growth::Full(_) if size > need.size => size = need.size,
                done => return Ok(done),
            }
        }
    }

    fn add_segment(&mut self, source: &dyn SegmentSource, need: &Need, size: u64) -> Result<Growth> {
        if self.over_limit(size) {
            return Ok(Growth::Full(String::new()));
        }
        self.num_device_alloc += 1;
        match source.alloc_segment(size) {
            Ok(id) => {
                self.heap.add_segment(id, size, need.arena);
                Ok(self.heap.take(need).map_or_else(|| Growth::Full(String::new()), Growth::Served))
            }
            Err(full @ SourceError::OutOfMemory { .. }) => Ok(Growth::Full(full.to_string())),
            Err(other) => Err(other.into()),
        }
    }

    /// Gives an arena its range of addresses. Where that fails, the pool goes on with plain segments, and says so.
    fn reserve(&mut self, source: &dyn SegmentSource, need: &Need) -> Result<()> {
        let Some(memory) = self.virtual_memory else { return Ok(()) };
        if self.heap.arenas[need.arena as usize].range.is_some() {
            return Ok(());
        }
        match source.reserve(memory.reservation) {
            Ok(id) => self.heap.add_range(id, memory.reservation, need.arena),
            Err(lost @ SourceError::DeviceLost(_)) => return Err(lost.into()),
            Err(error) => {
                log::warn!("no addresses could be reserved ({error}): the pool goes on with plain segments");
                self.virtual_memory = None;
            }
        }
        Ok(())
    }

    /// Where a request fits into its range with the least memory to be mapped; `None` without a range or a place.
    fn placement(&self, need: &Need) -> Option<Placement> {
        let page = self.virtual_memory?.granularity;
        let segment = self.heap.arenas[need.arena as usize].range?;
        let mut best: Option<Placement> = None;
        // A gap without a hole is one free block, which the search has seen.
        for &hole in &self.heap.segment(segment).range.as_ref()?.holes {
            let gap = self.gap(hole);
            for offset in candidates(&gap, need.size) {
                let holes = holes(&gap, offset, need.size, page);
                let missing = holes.iter().map(|h| h.size).sum();
                let key = |p: &Placement| (p.missing, p.holes.len(), p.offset);
                let place = Placement { segment, offset, holes, missing };
                if best.as_ref().is_none_or(|b| key(&place) < key(b)) {
                    best = Some(place);
                }
            }
        }
        best
    }

    /// The blocks around a hole that are not in use, by address.
    fn gap(&self, hole: u32) -> Vec<Part> {
        let unused = |at: u32| at != NONE && matches!(self.heap.slot(at).state, Is::Free | Is::Unmapped);
        let mut at = hole;
        while unused(self.heap.slot(at).prev) {
            at = self.heap.slot(at).prev;
        }
        let mut gap = Vec::new();
        while unused(at) {
            let slot = self.heap.slot(at);
            gap.push(Part { slot: at, offset: slot.offset, size: slot.size, mapped: slot.state == Is::Free });
            at = slot.next;
        }
        gap
    }

    /// Maps what is missing at a place, or `more`, and serves the request there.
    fn map(
        &mut self,
        source: &dyn SegmentSource,
        need: &Need,
        place: &Placement,
        more: bool,
    ) -> Result<Growth> {
        let page = self.virtual_memory.map_or(1, |v| v.granularity);
        let most = (self.most_active(need) / MAX_EXTENT_PART / page * page).max(MAX_EXTENT);
        let piece = match need.size {
            _ if self.is_small(need) => SMALL_PIECE,
            0..OWN_SEGMENT => self.config.large_segment_size,
            _ => 0,
        };
        let mut free = None;
        for hole in &place.holes {
            // More at once for requests that are not large, where there is room for it, saves calls.
            let roomy = hole.size.max(piece / page * page).min(hole.room);
            let bytes = if more && !self.over_limit(roomy) { roomy } else { hole.size };
            if self.over_limit(bytes) {
                return Ok(Growth::Full(String::new()));
            }
            let each = bytes.div_ceil(bytes.div_ceil(most)).next_multiple_of(page);
            let (mut at, end) = (hole.slot, hole.offset + bytes);
            let mut offset = hole.offset;
            while offset < end {
                let size = each.min(end - offset);
                self.num_device_alloc += 1;
                match source.map(self.heap.segment(place.segment).id, offset, size) {
                    Ok(()) => {
                        let block = self.heap.mapped(at, offset, size);
                        free = Some(block);
                        // The rest of the hole follows.
                        at = self.heap.slot(block).next;
                    }
                    Err(full @ SourceError::OutOfMemory { .. }) => return Ok(Growth::Full(full.to_string())),
                    Err(other) => return Err(other.into()),
                }
                offset += size;
            }
        }
        // The parts are one free block now.
        let served = free.map(|free| self.heap.take_at(free, place.offset, need));
        Ok(served.map_or_else(|| Growth::Full(String::new()), Growth::Served))
    }

    fn over_limit(&self, more: u64) -> bool {
        self.limit.is_some_and(|limit| self.heap.counters.reserved().saturating_add(more) > limit)
    }
}

/// As many pieces from the front as sum up to `bytes`, or all.
pub(super) fn first_of(mut idle: Vec<Idle>, bytes: u64) -> Vec<Idle> {
    let mut sum = 0;
    let enough = idle.iter().position(|i| {
        sum += i.size;
        sum >= bytes
    });
    idle.truncate(enough.map_or(idle.len(), |at| at + 1));
    idle
}

/// Offsets worth trying in a gap: from its start, from the start of each mapped part, and up to the end of each.
fn candidates(gap: &[Part], size: u64) -> Vec<u64> {
    let (Some(first), Some(last)) = (gap.first(), gap.last()) else { return Vec::new() };
    let (start, end) = (first.offset, last.offset + last.size);
    if end - start < size {
        return Vec::new();
    }
    let mut offsets = vec![start];
    for part in gap.iter().filter(|p| p.mapped) {
        offsets.push(part.offset);
        offsets.extend((part.offset + part.size).checked_sub(size));
    }
    offsets.retain(|o| (start..=end - size).contains(o));
    offsets
}

/// What has to be mapped for a request at an offset of a gap.
fn holes(gap: &[Part], offset: u64, size: u64, page: u64) -> Vec<Hole> {
    let end = offset + size;
    let holes = gap.iter().filter(|p| !p.mapped && p.offset < end && offset < p.offset + p.size);
    let cut = |p: &Part| {
        let from = p.offset.max(offset / page * page);
        let to = (p.offset + p.size).min(end.next_multiple_of(page));
        Hole { slot: p.slot, offset: from, size: to - from, room: p.offset + p.size - from }
    };
    holes.map(cut).collect()
}
