//! Taking memory from the source, and giving idle memory back so that less has to be taken.

use super::heap::{AllocRequest, NO_BLOCK, SHARED_OWNER, SlotState as Is};
use super::hysteresis::GrowthCause;
use super::pool_state::{GrowOutcome, IdleKind, IdleMemory, MigrationSources, PoolState};
use super::source::{PageRemap, SegmentSource, SourceError};
use crate::error::Result;

const MIB: u64 = 1 << 20;
/// What grows for small requests: a plain segment, or what is mapped at once (PyTorch's kSmallBuffer).
const SMALL_BUFFER: u64 = 2 * MIB;
/// But this part of all that small requests have, where the pool may hold that much more: fewer calls.
const SMALL_AHEAD_DIVISOR: u64 = 8;
/// In plain segments this part of the program may be ahead all the same.
const SMALL_SLACK_DIVISOR: u64 = 64;
/// From this size on a request gets a segment, or a mapping, of its own size (PyTorch's kMinLargeAlloc).
const MIN_LARGE_ALLOC: u64 = 10 * MIB;
/// For others the pool maps ahead up to this part more than the program uses; without a bound while that is less than the latter.
const MAP_AHEAD_DIVISOR: u64 = 36;
const UNBOUNDED_AHEAD_BYTES: u64 = 512 * MIB;
/// What plain segments of their own are multiples of (PyTorch's kRoundLarge).
const ROUND_LARGE: u64 = 2 * MIB;
/// Plain segments in common are this part of what the program uses, from `large_segment_size` on: fewer calls.
const SHARED_SEGMENT_DIVISOR: u64 = 32;
const MAX_SHARED_SEGMENT: u64 = 256 * MIB;
/// Memory is mapped in pieces of this part of what the program uses, which move only as a whole; but of no more than
/// PyTorch's.
const EXTENT_DIVISOR: u64 = 512;
const MAX_EXTENT: u64 = 20 * MIB;
/// Idle segments are worth giving back for growth if they are between these parts of what is missing: less is not worth
/// the calls, and more would soon be missed.
const MIN_RECLAIM_DIVISOR: u64 = 32;
const MAX_RECLAIM_FACTOR: u64 = 8;
/// Where blocks in use move, plain segments are at least this part of what the program uses, and twice `large_segment_size`
/// of one that uses as much: fewer calls, and larger holes to be made.
const COMPACT_SEGMENT_DIVISOR: u64 = 18;
/// But a quarter of what a program uses that is smaller than this: its budgets leave no room for more.
const SMALL_PROGRAM_BYTES: u64 = 32 * MIB;
const SMALL_PROGRAM_DIVISOR: u64 = 4;
/// One that would be left free by this part of it, when as many requests like the first as fit have it, is made for just those.
const MAX_TAIL_DIVISOR: u64 = 8;
/// Where idle segments of at least this part of a request go for it, so many that the new one holds as many of its size as it can:
/// the next requests are often alike. And this part of one more, for some that are larger.
const MIN_REPLACED_DIVISOR: u64 = 2;
/// But a request of more than this part of what the program uses gets one of its own: where it and another one lie side by side, a third
/// one that is a little larger would have no place, and neither fits elsewhere.
const DOMINANT_DIVISOR: u64 = 3;
const SPARE_DIVISOR: u64 = 8;
/// And a pool may hold somewhat more: each step below costs copies and calls.
const COMPACT_SLACK: f64 = 0.045;
/// A step of a program has ended where it used less than this part of the most that it ever used; what moves in each step, up to
/// this part of that, is no sign that it does not settle.
const STEP_END_DIVISOR: u64 = 2;
const STEP_MOVES_DIVISOR: u64 = 4;
/// How many bytes a program requests for each that may move: by being mapped elsewhere, for which the host and the device wait
/// for each other, or by being copied. And the pieces that a wait for the device counts as.
const REMAP_DECAY: u64 = 40;
const COPY_DECAY: u64 = 8;
const WAIT_COST_EXTENTS: u64 = 4;
/// A program that uses more than ever grows as long as that is at least this part of what moves for it.
const MIN_GROWTH_DIVISOR: u64 = 8;
/// Else its blocks grow by a little each time. Once memory has moved for them that is so many times what the program uses, the pool may
/// hold as much more as some of these blocks take, or a part of what the program uses.
const CREEP_FREE_FACTOR: u64 = 8;
const CREEP_BLOCKS: u64 = 4;
const CREEP_DIVISOR: u64 = 8;

/// The bytes that have moved lately: less by one for every so many bytes that the program requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct MigrationBudget {
    requested_per_byte: u64,
    bytes: u64,
    /// When that was, in bytes that were ever lent.
    updated_at: u64,
}

impl Default for MigrationBudget {
    fn default() -> Self {
        Self { requested_per_byte: REMAP_DECAY, bytes: 0, updated_at: 0 }
    }
}

impl MigrationBudget {
    /// Of bytes that are copied.
    pub(super) fn for_copies() -> Self {
        Self { requested_per_byte: COPY_DECAY, ..Self::default() }
    }

    fn current(&self, lent: u64) -> u64 {
        self.bytes.saturating_sub((lent - self.updated_at) / self.requested_per_byte)
    }

    pub(super) fn add(&mut self, lent: u64, bytes: u64) {
        *self = Self { bytes: self.current(lent) + bytes, updated_at: lent, ..*self };
    }

    fn subtract(&mut self, lent: u64, bytes: u64) {
        *self = Self { bytes: self.current(lent).saturating_sub(bytes), updated_at: lent, ..*self };
    }
}

/// Where in a range a request would lie, and the memory that is missing there.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    segment: u32,
    offset: u64,
    /// What has to be mapped.
    holes: Vec<Hole>,
    missing: u64,
}

/// A part of a range without memory.
#[derive(Clone, Copy, Debug)]
struct Hole {
    offset: u64,
    size: u64,
    /// Bytes from its offset to the end of the block.
    room: u64,
}

/// A part of a gap between blocks in use.
#[derive(Clone, Copy)]
struct GapSpan {
    offset: u64,
    size: u64,
    mapped: bool,
}

impl PoolState {
    fn is_small_request(&self, need: &AllocRequest) -> bool {
        self.heap.arenas[need.arena as usize].small
    }

    /// The most memory that was ever in use at once, this request included.
    fn peak_active_with(&self, need: &AllocRequest) -> u64 {
        let counters = &self.heap.counters;
        counters.peak_active_bytes.max(counters.active().saturating_add(need.size))
    }

    /// Notes whether the program has ended a step since the last one: it has come down from what it uses at most.
    pub(super) fn detect_step_end(&mut self, need: &AllocRequest) {
        let most = self.peak_active_with(need);
        let counters = &mut self.heap.counters;
        if counters.min_active_bytes < most / STEP_END_DIVISOR {
            counters.min_active_bytes = u64::MAX;
            self.migration_budget.subtract(counters.total_allocated(), most / STEP_MOVES_DIVISOR);
        }
    }

    /// The plain segment to make for large requests that share it.
    fn shared_segment_size(&self, need: &AllocRequest) -> u64 {
        let least = self.config.large_segment_size;
        // PyTorch's rules know one size, and blocks that are never split would be whole segments.
        if !self.config.release_before_growth || self.config.max_split_size.is_some() {
            return least;
        }
        if self.is_compaction_enabled() {
            return self.min_segment_size(need).min(MAX_SHARED_SEGMENT.max(least));
        }
        let part = (self.peak_active_with(need) / SHARED_SEGMENT_DIVISOR).next_multiple_of(ROUND_LARGE);
        least.max(part.min(MAX_SHARED_SEGMENT))
    }

    /// The least plain segment where blocks in use move.
    pub(super) fn min_segment_size(&self, need: &AllocRequest) -> u64 {
        let (most, least) = (self.peak_active_with(need), self.config.large_segment_size);
        let part = if most < SMALL_PROGRAM_BYTES { most / SMALL_PROGRAM_DIVISOR } else { most };
        let small = part.next_multiple_of(ROUND_LARGE).clamp(least, least.saturating_mul(2));
        small.max((most / COMPACT_SEGMENT_DIVISOR).next_multiple_of(ROUND_LARGE))
    }

    /// Whether a request gets a plain segment of its own.
    pub(super) fn has_own_segment(&self, need: &AllocRequest) -> bool {
        self.virtual_memory.is_none() && need.size >= MIN_LARGE_ALLOC
    }

    /// The plain segment to make for a request.
    pub(super) fn segment_size(&self, need: &AllocRequest) -> u64 {
        let size = if self.is_small_request(need) {
            self.small_segment_size(need)
        } else if need.size < MIN_LARGE_ALLOC {
            self.shared_segment_size(need)
        } else {
            let own = need.size.checked_next_multiple_of(ROUND_LARGE).unwrap_or(need.size);
            let slab = if self.is_compaction_enabled() { self.min_segment_size(need) } else { 0 };
            // A pool that holds too much already takes no more than it must, unless that is little.
            let over = self.heap.counters.reserved() > self.target_reserved(need);
            let odd = slab % own >= slab / MAX_TAIL_DIVISOR;
            match slab / own {
                0 => own,
                1 if over => own,
                several if odd => several * own,
                _ => slab,
            }
        };
        size.min(self.max_segment).max(need.size)
    }

    /// The plain segment to make for small requests: more for a program that has many.
    fn small_segment_size(&self, need: &AllocRequest) -> u64 {
        if !self.is_compaction_enabled() {
            return SMALL_BUFFER;
        }
        let ours = self.heap.live_segments().filter(|s| s.arena == need.arena);
        let ahead = ours.map(|s| s.size).sum::<u64>() / SMALL_AHEAD_DIVISOR;
        let slack = self.target_reserved(need).saturating_sub(self.heap.counters.reserved());
        let most = slack.max(self.peak_active_with(need) / SMALL_SLACK_DIVISOR);
        SMALL_BUFFER.max(most.min(ahead) / ROUND_LARGE * ROUND_LARGE)
    }

    /// Sends idle memory back, or where it is needed, if the pool would hold more than the program has shown to need.
    /// If it did, how large a plain segment should be that is made instead; 0 where that is up to the request.
    ///
    /// So the memory that is held stays below `1 + growth_slack` times the memory that was ever in use at once, as
    /// long as there is idle memory.
    pub(super) fn reclaim_idle(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        place: Option<&Placement>,
    ) -> Result<Option<u64>> {
        if !self.config.release_before_growth {
            return Ok(None);
        }
        let grow = place.map_or_else(|| self.segment_size(need), |p| p.missing);
        if place.is_some() && self.surplus_after_growth(need, grow) > 0 {
            let counters = &self.heap.counters;
            let what = GrowthCause { size: need.size, active: counters.active() };
            self.hysteresis.record_growth(
                counters.total_allocated(),
                what,
                counters.reserved().saturating_add(grow),
            );
        }
        let surplus = self.surplus_after_growth(need, grow);
        if surplus == 0 {
            return Ok(None);
        }
        let mut idle = self.idle_memory();
        let alike = self.find_replaceable_segments(need, &idle);
        if let Some(place) = place {
            idle = idle.into_iter().filter_map(|i| self.exclude_placement(i, place, need.size)).collect();
        }
        // Extents go in part, and only to where they are needed.
        let sizes = surplus / MIN_RECLAIM_DIVISOR..=surplus.saturating_mul(MAX_RECLAIM_FACTOR);
        idle.retain(|i| matches!(i.kind, IdleKind::Extents { .. }) || sizes.contains(&i.size));
        if idle.is_empty() && alike.is_none() {
            return Ok(None);
        }
        self.reclaim_stats.reclaim.tried += 1;
        if let Some((chosen, size)) = alike {
            self.release_idle(source, &chosen, false)?;
            return Ok(Some(size));
        }
        idle.sort_by_key(|i| i.size);
        let all = idle.iter().map(|i| i.size).sum::<u64>();
        // Where all of it can move, nothing has to be taken.
        let wanted = if place.is_some() && all >= grow { grow } else { surplus };
        // One piece that is enough, and no larger than it must be; else the largest ones.
        let chosen = match idle.iter().find(|i| i.size >= wanted) {
            Some(piece) => vec![self.trim_idle(*piece, wanted)],
            None => {
                idle.reverse();
                self.select_idle(idle, wanted)
            }
        };
        Ok((self.release_idle(source, &chosen, place.is_some())? > 0).then_some(0))
    }

    /// Idle segments that could go for one that serves several requests like this one, and how large that would be.
    fn find_replaceable_segments(
        &self,
        need: &AllocRequest,
        idle: &[IdleMemory],
    ) -> Option<(Vec<IdleMemory>, u64)> {
        let shared = self.heap.arenas[usize::from(need.arena)].owner == SHARED_OWNER;
        let alone = need.size > self.peak_active_with(need) / DOMINANT_DIVISOR;
        if !shared || alone || !self.is_compaction_enabled() || !self.has_own_segment(need) {
            return None;
        }
        let mut idle: Vec<IdleMemory> =
            idle.iter().copied().filter(|i| i.size >= need.size / MIN_REPLACED_DIVISOR).collect();
        idle.sort_by_key(|i| std::cmp::Reverse(i.size));
        let one = need.size.checked_next_multiple_of(ROUND_LARGE)?;
        let room = self.target_reserved(need).saturating_sub(self.heap.counters.reserved());
        let most = idle.iter().map(|i| i.size).sum::<u64>().saturating_add(room).min(self.max_segment);
        let all = most / one * one;
        let size = most.min(all + one / SPARE_DIVISOR) / ROUND_LARGE * ROUND_LARGE;
        (all > one).then(|| (self.select_idle(idle, self.surplus_after_growth(need, size)), size))
    }

    /// Whether blocks should move for a request, before the pool takes more memory.
    pub(super) fn should_compact(&self, need: &AllocRequest) -> bool {
        let plain = self.virtual_memory.is_none() && self.config.release_before_growth;
        plain && !self.is_small_request(need) && self.surplus(need) > 0
    }

    /// The bytes that a plain pool would hold too many, if it grew for a request.
    pub(super) fn surplus(&self, need: &AllocRequest) -> u64 {
        self.surplus_after_growth(need, self.segment_size(need))
    }

    pub(super) fn surplus_after_growth(&self, need: &AllocRequest, grow: u64) -> u64 {
        // What is held above the target already is no debt of this request.
        self.heap
            .counters
            .reserved()
            .saturating_add(grow)
            .saturating_sub(self.target_reserved(need))
            .min(grow)
    }

    /// The part of idle memory that a placement does not need where it is.
    fn exclude_placement(&self, idle: IdleMemory, place: &Placement, size: u64) -> Option<IdleMemory> {
        let IdleKind::Extents { near, offset } = idle.kind else { return Some(idle) };
        let (end, place_end) = (offset + idle.size, place.offset + size);
        if self.heap.slot(near).segment != place.segment || place_end <= offset || end <= place.offset {
            return Some(idle);
        }
        let sides = [self.idle_extents(near, offset, place.offset), self.idle_extents(near, place_end, end)];
        sides.into_iter().flatten().max_by_key(|i| i.size)
    }

    /// Keeps what was to move, and did not.
    pub(super) fn return_migration_sources(&mut self) {
        for donor in std::mem::take(&mut self.migration_sources).blocks {
            self.heap.cancel_release(donor);
        }
    }

    /// Takes memory from the source for a request, at a place that is known already, or where it fits best; a plain segment is
    /// of at least so many bytes, if there is room.
    pub(super) fn grow(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        place: Option<Placement>,
        least: u64,
    ) -> Result<GrowOutcome> {
        let grown = self.map_or_add_segment(source, need, place, least);
        self.process_share.set_reserved(self.heap.counters.reserved());
        self.return_migration_sources();
        grown
    }

    fn map_or_add_segment(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        place: Option<Placement>,
        least: u64,
    ) -> Result<GrowOutcome> {
        self.ensure_address_range(source, need)?;
        if let Some(place) = place.or_else(|| self.find_placement(need)) {
            let grown = self.map_placement(source, need, &place, true)?;
            return match grown {
                // There may be room for what is missing, and no more.
                GrowOutcome::Full(_) => self
                    .find_placement(need)
                    .map_or(Ok(grown), |p| self.map_placement(source, need, &p, false)),
                GrowOutcome::Served(_) => Ok(grown),
            };
        }
        let mut size = self.segment_size(need).max(least);
        loop {
            match self.add_segment_and_take(source, need, size)? {
                GrowOutcome::Full(_) if size > need.size => size = need.size,
                done => return Ok(done),
            }
        }
    }

    /// A new segment of so many bytes, free. Whether there was room.
    pub(super) fn add_free_segment(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        size: u64,
    ) -> Result<bool> {
        if self.exceeds_limit(size) {
            return Ok(false);
        }
        self.num_device_alloc += 1;
        match source.alloc_segment(size) {
            Ok(id) => self.heap.add_segment(id, size, need.arena),
            Err(SourceError::OutOfMemory { .. }) => return Ok(false),
            Err(other) => return Err(other.into()),
        }
        Ok(true)
    }

    fn add_segment_and_take(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        size: u64,
    ) -> Result<GrowOutcome> {
        if self.exceeds_limit(size) {
            return Ok(GrowOutcome::Full(String::new()));
        }
        self.num_device_alloc += 1;
        match source.alloc_segment(size) {
            Ok(id) => {
                self.heap.add_segment(id, size, need.arena);
                Ok(self
                    .take_free_block(source, need)?
                    .map_or_else(|| GrowOutcome::Full(String::new()), GrowOutcome::Served))
            }
            Err(full @ SourceError::OutOfMemory { .. }) => Ok(GrowOutcome::Full(full.to_string())),
            Err(other) => Err(other.into()),
        }
    }

    /// Gives an arena its range of addresses. Where that fails, the pool goes on with plain segments, and says so.
    fn ensure_address_range(&mut self, source: &dyn SegmentSource, need: &AllocRequest) -> Result<()> {
        let Some(memory) = self.virtual_memory else { return Ok(()) };
        if self.heap.arenas[need.arena as usize].virtual_range.is_some() {
            return Ok(());
        }
        match source.reserve_addresses(memory.reservation) {
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
    pub(super) fn find_placement(&self, need: &AllocRequest) -> Option<Placement> {
        let page = self.virtual_memory?.granularity;
        let segment = self.heap.arenas[need.arena as usize].virtual_range?;
        let mut best: Option<Placement> = None;
        let (mut gap, mut offsets) = (Vec::new(), Vec::new());
        // A gap without a hole is one free block, which the search has seen.
        for &hole in &self.heap.segment(segment).virtual_range.as_ref()?.holes {
            self.collect_unused_spans(hole, &mut gap);
            candidate_offsets(&gap, need.size, &mut offsets);
            for &offset in &offsets {
                let holes = holes_to_map(&gap, offset, need.size, page);
                let (missing, count) =
                    holes.clone().fold((0, 0), |(sum, count), h| (sum + h.size, count + 1));
                let key = |p: &Placement| (p.missing, p.holes.len(), p.offset);
                if best.as_ref().is_none_or(|b| (missing, count, offset) < key(b)) {
                    best = Some(Placement { segment, offset, holes: holes.collect(), missing });
                }
            }
        }
        best
    }

    /// The blocks around a hole that are not in use, by address.
    fn collect_unused_spans(&self, hole: u32, gap: &mut Vec<GapSpan>) {
        let unused = |at: u32| at != NO_BLOCK && matches!(self.heap.slot(at).state, Is::Free | Is::Unmapped);
        let mut at = hole;
        while unused(self.heap.slot(at).prev) {
            at = self.heap.slot(at).prev;
        }
        gap.clear();
        while unused(at) {
            let slot = self.heap.slot(at);
            gap.push(GapSpan { offset: slot.offset, size: slot.size, mapped: slot.state == Is::Free });
            at = slot.next;
        }
    }

    /// Brings memory to where it is missing at a place, donors first, then new memory, of that maybe `more`, and serves
    /// the request there. One call of the source.
    fn map_placement(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        place: &Placement,
        more: bool,
    ) -> Result<GrowOutcome> {
        let page = self.virtual_memory.map_or(1, |v| v.granularity);
        let id = self.heap.segment(place.segment).id;
        let MigrationSources { blocks: slots, may_be_in_use: in_use } = &self.migration_sources;
        let (in_use, unused) = (*in_use, slots.iter().all(|d| self.heap.slot(*d).is_never_used()));
        let donors = slots.iter().flat_map(|d| self.heap.extents_in_block(*d)).collect::<Vec<_>>();
        let mut donors = donors.into_iter().peekable();
        let (mut pieces, mut new) = (Vec::new(), 0);
        for (at, hole) in place.holes.iter().enumerate() {
            let mut filled = 0;
            // The last one may reach beyond the hole, where there is room.
            while let Some((from, bytes)) =
                donors.next_if(|d| filled < hole.size && filled + d.1 <= hole.room)
            {
                pieces.push(PageRemap { to: (id, hole.offset + filled), bytes, from: Some(from) });
                filled += bytes;
            }
            let mut missing = hole.size.saturating_sub(filled);
            // What is mapped ahead lies behind the last of them.
            if missing > 0 && more && at + 1 == place.holes.len() {
                let all = self.growth_size(need, new + missing, page);
                missing = missing.max(all.saturating_sub(new)).min(hole.room - filled);
            }
            new += missing;
            let each = self.extent_size(need, page);
            while missing > 0 {
                let bytes = each.min(missing);
                pieces.push(PageRemap { to: (id, hole.offset + filled), bytes, from: None });
                filled += bytes;
                missing -= bytes;
            }
        }
        if self.exceeds_limit(new) {
            return Ok(GrowOutcome::Full(String::new()));
        }
        let moved = pieces.iter().filter(|p| p.from.is_some()).map(|p| p.bytes).sum::<u64>();
        if moved > 0 {
            // Where the program uses more than ever, it still grows: what moves for that is no sign that it does not settle. But blocks that
            // grow by a little each time, as those of a cache do, move much more than that.
            let grown = self.peak_active_with(need) - self.heap.counters.peak_active_bytes;
            let (lent, cost) = (
                self.heap.counters.total_allocated(),
                moved + WAIT_COST_EXTENTS * self.extent_size(need, page),
            );
            match grown {
                0 => self.migration_budget.add(lent, cost),
                _ if grown < moved / MIN_GROWTH_DIVISOR => self.creep_budget.add(lent, cost),
                _ => {}
            }
        }
        self.consume_migration_sources(moved);
        self.num_device_alloc += 1;
        let arranged = if in_use { source.remap_after_submitted(&pieces) } else { source.remap(&pieces) };
        match arranged {
            Ok(()) => {}
            Err(full @ SourceError::OutOfMemory { .. }) => return Ok(GrowOutcome::Full(full.to_string())),
            Err(other) => return Err(other.into()),
        }
        let mut last = None;
        for run in pieces.chunk_by(|a, b| a.to.1 + a.bytes == b.to.1) {
            last = self.heap.mark_mapped(place.segment, run).map(|free| (free, run));
        }
        // The parts are one free block now.
        let Some((free, run)) = last else { return Ok(GrowOutcome::Full(String::new())) };
        let block = self.heap.take_free_block_at(free, place.offset, need);
        if unused {
            self.heap.mark_never_used_after(block.slot, run);
        }
        self.wait_cross_stream_uses(source, &block, self.heap.arenas[usize::from(need.arena)].queue)?;
        Ok(GrowOutcome::Served(block))
    }

    /// The first `bytes` bytes of the donors leave where they are.
    fn consume_migration_sources(&mut self, mut bytes: u64) {
        for donor in std::mem::take(&mut self.migration_sources).blocks {
            let sent = bytes.min(self.heap.slot(donor).size);
            bytes -= sent;
            if sent < self.heap.slot(donor).size {
                let rest = self.heap.shrink_releasing(donor, sent);
                self.heap.cancel_release(rest);
            }
            if sent > 0 {
                self.heap.mark_unmapped(donor);
            }
        }
    }

    /// How much to map for a request, where `missing` bytes must be: more at once saves calls. What is not used now
    /// moves to where it is.
    fn growth_size(&self, need: &AllocRequest, missing: u64, page: u64) -> u64 {
        let reserved = self.heap.counters.reserved();
        let slack = self.target_reserved(need).saturating_sub(reserved);
        let more = if self.is_small_request(need) {
            SMALL_BUFFER.max(page).max(slack.min(self.mapped_bytes(need) / SMALL_AHEAD_DIVISOR))
        } else {
            let rounded = missing.next_multiple_of(self.config.large_segment_size.max(1));
            let most = self.peak_active_with(need);
            match need.size < MIN_LARGE_ALLOC {
                true if most < UNBOUNDED_AHEAD_BYTES => rounded,
                true => rounded
                    .min(missing.max(slack).max((most + most / MAP_AHEAD_DIVISOR).saturating_sub(reserved))),
                false => rounded.min(missing.max(slack)),
            }
        };
        more / page * page
    }

    /// What is mapped in the range of a request.
    fn mapped_bytes(&self, need: &AllocRequest) -> u64 {
        let range = self.heap.arenas[usize::from(need.arena)].virtual_range;
        let range = range.and_then(|segment| self.heap.segment(segment).virtual_range.as_ref());
        range.map_or(0, |range| range.extents.iter().map(|extent| extent.1).sum())
    }

    /// The size of the pieces that memory is mapped in: small enough that the pool has hundreds.
    pub(super) fn extent_size(&self, need: &AllocRequest, page: u64) -> u64 {
        (self.peak_active_with(need) / EXTENT_DIVISOR / page * page).clamp(page, MAX_EXTENT.max(page))
    }

    /// What the pool holds at most, as long as idle memory can move: somewhat more than was ever in use at once.
    ///
    /// And what has moved lately beyond half of that. A program that settles does not get there. Where blocks come and go
    /// in an order that no arrangement of memory fits, holding more is cheaper than moving the same bytes again. Nor does one that
    /// repeats itself move for ever what is little: it comes to rest.
    fn target_reserved(&self, need: &AllocRequest) -> u64 {
        let most = self.peak_active_with(need);
        let copies = self.virtual_memory.is_none() && self.is_compaction_enabled();
        let (more, free) = if copies { (COMPACT_SLACK, most) } else { (0.0, most / 2) };
        let slack = (most as f64 * (1.0 + self.config.growth_slack + more)) as u64;
        let beyond = self.migration_budget.current(self.heap.counters.total_allocated()).saturating_sub(free);
        // A block that grows by a little needs some free places of its size, and no more.
        let crept = self
            .creep_budget
            .current(self.heap.counters.total_allocated())
            .saturating_sub(most.saturating_mul(CREEP_FREE_FACTOR));
        let beyond = beyond.max(crept.min(need.size.saturating_mul(CREEP_BLOCKS).max(most / CREEP_DIVISOR)));
        slack
            .saturating_add(beyond)
            .max(self.hysteresis.allowed_reserved(most))
            .min(self.limit.unwrap_or(u64::MAX))
    }

    /// As much from the front as sums up to `bytes`, or all.
    pub(super) fn select_idle(&self, idle: Vec<IdleMemory>, bytes: u64) -> Vec<IdleMemory> {
        let mut missing = bytes;
        let mut chosen = Vec::new();
        for piece in idle {
            if missing == 0 {
                break;
            }
            let piece = self.trim_idle(piece, missing);
            missing = missing.saturating_sub(piece.size);
            chosen.push(piece);
        }
        chosen
    }

    /// Whether so many bytes more are too many, for the pool or for the process, of which they are taken.
    pub(super) fn exceeds_limit(&mut self, more: u64) -> bool {
        let reserved = self.heap.counters.reserved();
        // What an attempt before this one took, and did not use.
        self.process_share.set_reserved(reserved);
        self.limit.is_some_and(|limit| reserved.saturating_add(more) > limit)
            || !self.process_share.try_reserve(more, self.process_limit())
    }
}

/// Offsets worth trying in a gap: from its start, from the start of each mapped part, and up to the end of each.
fn candidate_offsets(gap: &[GapSpan], size: u64, offsets: &mut Vec<u64>) {
    offsets.clear();
    let (Some(first), Some(last)) = (gap.first(), gap.last()) else { return };
    let (start, end) = (first.offset, last.offset + last.size);
    if end - start < size {
        return;
    }
    offsets.push(start);
    for part in gap.iter().filter(|p| p.mapped) {
        offsets.push(part.offset);
        offsets.extend((part.offset + part.size).checked_sub(size));
    }
    offsets.retain(|o| (start..=end - size).contains(o));
}

/// What has to be mapped for a request at an offset of a gap.
fn holes_to_map(gap: &[GapSpan], offset: u64, size: u64, page: u64) -> impl Iterator<Item = Hole> + Clone {
    let end = offset + size;
    let holes = gap.iter().filter(move |p| !p.mapped && p.offset < end && offset < p.offset + p.size);
    let cut = move |p: &GapSpan| {
        let from = p.offset.max(offset / page * page);
        let to = (p.offset + p.size).min(end.next_multiple_of(page));
        Hole { offset: from, size: to - from, room: p.offset + p.size - from }
    };
    holes.map(cut)
}
