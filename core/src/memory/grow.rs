//! Taking memory from the source, and giving idle memory back so that less has to be taken.

use super::heap::{Need, SMALL, State as Is};
use super::source::{SegmentSource, SourceError};
use super::state::{Growth, Idle, State, Waiting};
use crate::error::Result;

const MIB: u64 = 1 << 20;

/// Where in a range a request would lie, and the memory that is missing there.
#[derive(Clone, Debug)]
struct Placement {
    segment: u32,
    offset: u64,
    /// (offset, size) of what has to be mapped.
    holes: Vec<(u64, u64)>,
    missing: u64,
}

/// A part of a gap between blocks in use.
#[derive(Clone, Copy)]
struct Part {
    offset: u64,
    size: u64,
    mapped: bool,
}

impl State {
    /// The plain segment to make for a request.
    fn segment_size(&self, need: &Need) -> u64 {
        let size = if need.size <= SMALL {
            2 * MIB
        } else if need.size < 10 * MIB {
            self.config.large_segment_size.max(need.size)
        } else {
            need.size.next_multiple_of(2 * MIB)
        };
        size.min(self.max_segment).max(need.size)
    }

    /// Sends idle memory back if the pool would hold more than the program has shown to need. Whether it did.
    pub(super) fn reclaim(&mut self, source: &dyn SegmentSource, need: &Need) -> Result<bool> {
        if !self.config.release_before_growth {
            return Ok(false);
        }
        let place = self.placement(need);
        let grow = place.as_ref().map_or_else(|| self.segment_size(need), |p| p.missing);
        let counters = &self.heap.counters;
        let active = counters.most_active.max(counters.active() + need.size);
        let target = (active as f64 * (1.0 + self.config.growth_slack)) as u64;
        let target = target.min(self.limit.unwrap_or(u64::MAX));
        let surplus = (counters.reserved() + grow).saturating_sub(target);
        if surplus == 0 {
            return Ok(false);
        }
        let mut idle = self.idle();
        if let Some(place) = place {
            let end = place.offset + need.size;
            idle.retain(|i| match i.what {
                Waiting::Extent { segment, offset, size } => {
                    segment != place.segment || offset >= end || offset + size <= place.offset
                }
                _ => true,
            });
        }
        if idle.is_empty() {
            return Ok(false);
        }
        self.rungs.reclaim.tried += 1;
        idle.sort_by_key(|i| i.size);
        let at = idle.partition_point(|i| i.size < surplus);
        let chosen = match idle.get(at) {
            // One piece that is enough, and no larger than it must be.
            Some(piece) => vec![*piece],
            None => largest(idle, surplus),
        };
        Ok(self.leave(source, &chosen)? > 0)
    }

    /// Takes memory from the source for a request.
    pub(super) fn grow(&mut self, source: &dyn SegmentSource, need: &Need) -> Result<Growth> {
        self.reserve(source, need)?;
        if let Some(place) = self.placement(need) {
            return self.map(source, need, &place);
        }
        let mut size = self.segment_size(need);
        loop {
            match self.grow_plain(source, need, size)? {
                Growth::Full(_) if size > need.size => size = need.size,
                done => return Ok(done),
            }
        }
    }

    fn grow_plain(&mut self, source: &dyn SegmentSource, need: &Need, size: u64) -> Result<Growth> {
        if let Some(full) = self.over_limit(size) {
            return Ok(Growth::Full(full));
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
            Ok(id) => {
                self.heap.add_range(id, memory.reservation, need.arena);
            }
            Err(lost @ SourceError::DeviceLost(_)) => return Err(lost.into()),
            Err(error) => {
                log::warn!("no addresses could be reserved ({error}): the pool goes on with plain segments");
                self.virtual_memory = None;
                self.heap.counters.releasable_parts = false;
            }
        }
        Ok(())
    }

    /// Where a request fits into its range with the least memory to be mapped; `None` without a range or a place.
    fn placement(&self, need: &Need) -> Option<Placement> {
        let page = self.virtual_memory?.granularity;
        let segment = self.heap.arenas[need.arena as usize].range?;
        let mut best: Option<Placement> = None;
        let mut gap: Vec<Part> = Vec::new();
        let blocks = self.heap.blocks(segment).map(|(_, b)| (b.offset, b.size, b.state));
        // A block in use ends the last gap.
        for (offset, size, state) in blocks.chain([(u64::MAX, 0, Is::Live)]) {
            if matches!(state, Is::Free | Is::Unmapped) {
                gap.push(Part { offset, size, mapped: state == Is::Free });
                continue;
            }
            for place in candidates(&gap, need.size) {
                let missing = place_in(&gap, place, need.size, page);
                let sum = missing.iter().map(|h| h.1).sum();
                let better = best.as_ref().is_none_or(|b| (sum, missing.len()) < (b.missing, b.holes.len()));
                if better {
                    best = Some(Placement { segment, offset: place, holes: missing, missing: sum });
                }
            }
            gap.clear();
        }
        best
    }

    /// Maps what is missing at a place, and serves the request there.
    fn map(&mut self, source: &dyn SegmentSource, need: &Need, place: &Placement) -> Result<Growth> {
        if let Some(full) = self.over_limit(place.missing) {
            return Ok(Growth::Full(full));
        }
        let id = self.heap.segment(place.segment).id;
        for &(offset, size) in &place.holes {
            self.num_device_alloc += 1;
            match source.map(id, offset, size) {
                Ok(()) => self.heap.mapped(place.segment, offset, size),
                Err(full @ SourceError::OutOfMemory { .. }) => return Ok(Growth::Full(full.to_string())),
                Err(other) => return Err(other.into()),
            }
        }
        let served = self.heap.block_at(place.segment, place.offset);
        let served = served.map(|free| self.heap.take_at(free, place.offset, need));
        Ok(served.map_or_else(|| Growth::Full(String::new()), Growth::Served))
    }
}

/// The largest pieces of idle memory (ascending in size) that sum up to `bytes`, or all of it.
fn largest(mut idle: Vec<Idle>, bytes: u64) -> Vec<Idle> {
    idle.reverse();
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
    let mut offsets = vec![start];
    for part in gap.iter().filter(|p| p.mapped) {
        offsets.push(part.offset);
        offsets.extend((part.offset + part.size).checked_sub(size));
    }
    offsets.retain(|o| (start..=end.saturating_sub(size)).contains(o) && end - start >= size);
    offsets
}

/// What has to be mapped for a request at an offset of a gap.
fn place_in(gap: &[Part], offset: u64, size: u64, page: u64) -> Vec<(u64, u64)> {
    let end = offset + size;
    let holes = gap.iter().filter(|p| !p.mapped && p.offset < end && offset < p.offset + p.size);
    let cut = |p: &Part| {
        let from = p.offset.max(offset / page * page);
        let to = (p.offset + p.size).min(end.next_multiple_of(page));
        (from, to - from)
    };
    holes.map(cut).collect()
}
