//! Growth: takes memory from the source, after returning or moving idle memory so that less has to be taken.

use super::Block;
use super::heap::{AllocRequest, NEAR_FIT_DIVISOR, NO_BLOCK, SHARED_OWNER, SlotState as Is};
use super::pool_state::{IdleMemory, MigrationSources, PoolState};
use super::source::{PageRemap, SegmentId, SourceError};
use crate::memory::error::{Error, Result};

const MIB: u64 = 1 << 20;
/// Rounding of plain segments, and growth for small requests (PyTorch's kRoundLarge and kSmallBuffer).
pub(super) const SEGMENT_UNIT: u64 = 2 * MIB;
/// Requests from this size on get a segment, or a mapping, of their own size (PyTorch's kMinLargeAlloc).
const MIN_LARGE_ALLOC: u64 = 10 * MIB;
/// Divisor of the peak usage that gives a notable part of it. Plain pools evacuate segments for at least this
/// part, and a shared segment without compaction is as large. A request nearly fits a free block that is
/// smaller by at most this part of it.
pub(super) const NOTABLE_DIVISOR: u64 = 36;
/// Two notable parts: the least plain segment with compaction, for fewer calls and larger gaps. Also the slack of
/// plain segments, because each step closer to the target costs copies. Creeping blocks have half of this slack:
/// their sizes are few, so one copy makes room that many of them fit.
pub(super) const COMPACT_DIVISOR: u64 = NOTABLE_DIVISOR / 2;
/// Peak usage below which a large segment more or less matters on no card. Moving it in every step can double the
/// time of a small program's step.
const SMALL_PROGRAM_BYTES: u64 = 384 * MIB;
/// Extents are this part of the peak usage, since they move only as a whole.
const EXTENT_DIVISOR: u64 = 512;
/// Requests of more than this part of the peak usage get a segment of their own. Two such blocks in one
/// segment would leave no room for a third, slightly larger one.
const DOMINANT_DIVISOR: u64 = 3;
/// A step has ended once the usage fell below this part of the peak. Migration of up to that part in each
/// step does not mean that the arrangement of memory fails to converge.
const STEP_DIVISOR: u64 = 2;
/// Allocated bytes after which one migrated byte, remapped or copied, no longer counts.
const MIGRATION_DECAY: u64 = 40;
/// Extents that one wait of host and device for each other counts as.
const WAIT_COST_EXTENTS: u64 = 4;
/// Times its peak usage that a program allocates before its slack is no more than `growth_slack`. A younger
/// program has more slack in proportion, because its peak most likely still grows into it.
const YOUTH_FACTOR: f64 = 5.0;
/// Largest slack of a young program, as a divisor of its peak usage: no program should ever hold 4 % more.
const YOUTH_DIVISOR: u64 = 32;
/// Copied bytes that do not count, in multiples of the peak usage: a copy takes no call and no wait.
const FREE_COPIES: u64 = 8;

/// Bytes that migrated lately; the sum decays by one for every [`MIGRATION_DECAY`] bytes that the program
/// allocates.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MigrationBudget {
    bytes: u64,
    /// Time of `bytes`, in bytes ever allocated.
    updated_at: u64,
}

impl MigrationBudget {
    fn current(&self, allocated: u64) -> u64 {
        self.bytes.saturating_sub((allocated - self.updated_at) / MIGRATION_DECAY)
    }

    pub(super) fn add(&mut self, allocated: u64, bytes: u64) {
        *self = Self { bytes: self.current(allocated) + bytes, updated_at: allocated };
    }

    fn subtract(&mut self, allocated: u64, bytes: u64) {
        *self = Self { bytes: self.current(allocated).saturating_sub(bytes), updated_at: allocated };
    }
}

/// Failure to take more memory.
#[derive(Debug)]
pub(super) enum GrowError {
    /// No room; the source's message, or nothing at a limit.
    Full(String),
    /// Another error.
    Failed(Error),
}

impl From<SourceError> for GrowError {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::OutOfMemory { .. } => Self::Full(error.to_string()),
            other => Self::Failed(other.into()),
        }
    }
}

impl From<Error> for GrowError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl GrowError {
    /// Returns the message if there is no room.
    ///
    /// # Errors
    /// Any other error.
    pub(super) fn into_full(self) -> Result<String> {
        match self {
            Self::Full(message) => Ok(message),
            Self::Failed(error) => Err(error),
        }
    }
}

/// Position of a request in a virtual range, and the memory missing there.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    segment: u32,
    offset: u64,
    /// Parts that have to be mapped.
    holes: Vec<Hole>,
    missing: u64,
}

impl Placement {
    /// Returns the bytes to map.
    pub(super) fn missing(&self) -> u64 {
        self.missing
    }
}

/// Part of a range without memory.
#[derive(Clone, Copy, Debug)]
struct Hole {
    offset: u64,
    size: u64,
    /// Bytes from `offset` to the end of the unmapped block.
    room: u64,
}

/// Part of a gap between blocks in use.
#[derive(Clone, Copy)]
struct GapSpan {
    offset: u64,
    size: u64,
    mapped: bool,
}

impl PoolState {
    pub(super) fn is_small_request(&self, need: &AllocRequest) -> bool {
        self.heap.arenas[need.arena as usize].small
    }

    /// Returns the peak usage, this request included.
    pub(super) fn peak_active_with(&self, need: &AllocRequest) -> u64 {
        let counters = &self.heap.counters;
        counters.peak_active_bytes.max(counters.active().saturating_add(need.size))
    }

    /// Reports whether a request takes a large part of the peak usage.
    fn is_dominant(&self, need: &AllocRequest) -> bool {
        need.size > self.peak_active_with(need) / DOMINANT_DIVISOR
    }

    /// Detects the end of a step: since the last one, the usage has fallen well below the peak. Migration
    /// that each step may do is then deducted from the budget.
    pub(super) fn detect_step_end(&mut self, need: &AllocRequest) {
        let peak = self.peak_active_with(need);
        let counters = &mut self.heap.counters;
        if counters.min_active_bytes < peak / STEP_DIVISOR {
            counters.min_active_bytes = u64::MAX;
            self.migration_budget.subtract(counters.total_allocated, peak / STEP_DIVISOR);
        }
    }

    /// Returns the size of a plain segment that large requests share. PyTorch's rules have a single size, and
    /// blocks that are never split would occupy whole segments.
    fn shared_segment_size(&self, need: &AllocRequest) -> u64 {
        let least = self.config.large_segment_size;
        if !self.config.release_before_growth || self.config.max_split_size.is_some() {
            return least;
        }
        if self.is_compaction_enabled() {
            return self.min_segment_size(need);
        }
        least.max((self.peak_active_with(need) / NOTABLE_DIVISOR).next_multiple_of(SEGMENT_UNIT))
    }

    /// Returns the smallest plain segment where compaction is enabled.
    pub(super) fn min_segment_size(&self, need: &AllocRequest) -> u64 {
        if self.creeps(need) {
            return self.creeping_segment_size(need);
        }
        let (peak, least) = (self.peak_active_with(need), self.config.large_segment_size);
        let small = peak.next_multiple_of(SEGMENT_UNIT).clamp(least, least.saturating_mul(2));
        small.max((peak / COMPACT_DIVISOR).next_multiple_of(SEGMENT_UNIT))
    }

    /// Reports whether a request gets a plain segment of its own.
    pub(super) fn has_own_segment(&self, need: &AllocRequest) -> bool {
        self.virtual_memory.is_none() && need.size >= MIN_LARGE_ALLOC
    }

    pub(super) fn segment_size(&self, need: &AllocRequest) -> u64 {
        let size = if self.is_small_request(need) {
            SEGMENT_UNIT
        } else if need.size < MIN_LARGE_ALLOC {
            self.shared_segment_size(need)
        } else {
            let own = self.own_segment_size(need);
            let slab = if self.is_compaction_enabled() { self.min_segment_size(need) } else { 0 };
            // A large unused end would be lost.
            let odd = slab % own >= slab / NEAR_FIT_DIVISOR;
            match slab / own {
                0 => own,
                several if odd => several * own,
                _ => slab,
            }
        };
        size.min(self.max_segment).max(need.size)
    }

    /// Releases idle memory, or prepares its migration, if the pool would otherwise exceed its target by
    /// growing. Returns the smallest size for the plain segment to allocate next (0 for no bound), or `None`
    /// if nothing was reclaimed.
    ///
    /// As long as there is idle memory, this keeps reserved bytes below `1 + growth_slack` times the peak
    /// usage.
    pub(super) fn reclaim_idle(
        &mut self,
        need: &AllocRequest,
        placement: Option<&Placement>,
    ) -> Result<Option<u64>> {
        if !self.config.release_before_growth {
            return Ok(None);
        }
        let grow = placement.map_or_else(|| self.segment_size(need), |p| p.missing);
        let surplus = self.surplus_after_growth(need, grow);
        if surplus == 0 {
            return Ok(None);
        }
        let mut idle = self.idle_memory();
        let alike = self.find_replaceable_segments(need, &idle);
        if let Some(placement) = placement {
            idle = idle.into_iter().filter_map(|i| self.exclude_placement(i, placement, need.size)).collect();
        }
        if idle.is_empty() && alike.is_none() {
            return Ok(None);
        }
        self.totals.reclaim_stats.reclaim.tried += 1;
        if let Some((chosen, size)) = alike {
            self.release_idle(&chosen, false)?;
            return Ok(Some(size));
        }
        idle.sort_by_key(|i| i.size);
        let all = idle.iter().map(|i| i.size).sum::<u64>();
        // If idle memory can move into all holes, no new memory is needed.
        let bytes = if placement.is_some() && all >= grow { grow } else { surplus };
        // One sufficient piece, trimmed to the need; otherwise the largest ones.
        let chosen = match idle.iter().find(|i| i.size >= bytes) {
            Some(piece) => vec![self.trim_idle(*piece, bytes)],
            None => {
                idle.reverse();
                self.select_idle(idle, bytes)
            }
        };
        Ok((self.release_idle(&chosen, placement.is_some())? > 0).then_some(0))
    }

    /// Finds idle segments to replace by one that serves several requests like this one. Returns them and the
    /// new segment's size.
    fn find_replaceable_segments(
        &self,
        need: &AllocRequest,
        idle: &[IdleMemory],
    ) -> Option<(Vec<IdleMemory>, u64)> {
        let shared = self.heap.arenas[usize::from(need.arena)].owner == SHARED_OWNER;
        if !shared || self.is_dominant(need) || !self.is_compaction_enabled() || !self.has_own_segment(need) {
            return None;
        }
        let mut idle = idle.to_vec();
        idle.sort_by_key(|i| std::cmp::Reverse(i.size));
        let one = need.size.checked_next_multiple_of(SEGMENT_UNIT)?;
        let room = self.target_reserved(need).saturating_sub(self.heap.counters.reserved());
        let max_size = idle.iter().map(|i| i.size).sum::<u64>().saturating_add(room).min(self.max_segment);
        let all = max_size / one * one;
        // The next request may be slightly larger.
        let size = max_size.min(all + one / NEAR_FIT_DIVISOR) / SEGMENT_UNIT * SEGMENT_UNIT;
        (all > one).then(|| (self.select_idle(idle, self.surplus_after_growth(need, size)), size))
    }

    /// Reports whether to compact for a request before the pool takes more memory.
    pub(super) fn should_compact(&self, need: &AllocRequest) -> bool {
        let plain = self.virtual_memory.is_none() && self.config.release_before_growth;
        plain && !self.is_small_request(need) && self.surplus(need) > 0
    }

    /// Returns the bytes by which a plain pool would exceed its target if it grew for a request.
    pub(super) fn surplus(&self, need: &AllocRequest) -> u64 {
        self.surplus_after_growth(need, self.segment_size(need))
    }

    pub(super) fn surplus_after_growth(&self, need: &AllocRequest, grow: u64) -> u64 {
        // A small program holds a large segment more rather than moving memory.
        let small = self.virtual_memory.is_some()
            && !self.is_small_request(need)
            && !self.is_dominant(need)
            && self.peak_active_with(need) < SMALL_PROGRAM_BYTES;
        let target =
            self.target_reserved(need).saturating_add(if small { self.config.large_segment_size } else { 0 });
        // Bytes above the target that are held already are not charged to this request.
        self.heap.counters.reserved().saturating_add(grow).saturating_sub(target).min(grow)
    }

    /// Returns the largest part of idle memory that a placement does not cover.
    fn exclude_placement(&self, idle: IdleMemory, placement: &Placement, size: u64) -> Option<IdleMemory> {
        let IdleMemory { size: idle_size, start_block, offset } = idle;
        let (end, placement_end) = (offset + idle_size, placement.offset + size);
        if self.heap.slot(start_block).segment != placement.segment
            || placement_end <= offset
            || end <= placement.offset
        {
            return Some(idle);
        }
        let sides = [
            self.idle_extents(start_block, offset, placement.offset),
            self.idle_extents(start_block, placement_end, end),
        ];
        sides.into_iter().flatten().max_by_key(|i| i.size)
    }

    /// Makes migration sources free again that did not move.
    pub(super) fn return_migration_sources(&mut self) {
        for donor in std::mem::take(&mut self.migration_sources).blocks {
            self.heap.cancel_release(donor);
        }
    }

    /// Takes memory from the source for a request: at `placement` if present, else where the least is missing. A
    /// plain segment has at least `least` bytes if there is room.
    pub(super) fn grow(
        &mut self,
        need: &AllocRequest,
        placement: Option<Placement>,
        least: u64,
    ) -> Result<Block, GrowError> {
        let grown = self.map_or_add_segment(need, placement, least);
        self.process_share.set_reserved(self.heap.counters.reserved());
        self.return_migration_sources();
        grown
    }

    fn map_or_add_segment(
        &mut self,
        need: &AllocRequest,
        placement: Option<Placement>,
        least: u64,
    ) -> Result<Block, GrowError> {
        self.ensure_address_range(need)?;
        if let Some(placement) = placement.or_else(|| self.find_placement(need)) {
            return match self.map_placement(need, &placement, true) {
                // There may be room for the missing bytes but not for mapping ahead.
                Err(GrowError::Full(full)) => match self.find_placement(need) {
                    Some(placement) => self.map_placement(need, &placement, false),
                    None => Err(GrowError::Full(full)),
                },
                done => done,
            };
        }
        let size = self.segment_size(need).max(least);
        match self.add_free_segment(need, size) {
            Err(GrowError::Full(_)) if size > need.size => self.add_free_segment(need, need.size)?,
            added => added?,
        };
        self.take_free_block(need)?.ok_or_else(|| GrowError::Full(String::new()))
    }

    /// Adds a free segment of `size` bytes and returns its number.
    pub(super) fn add_free_segment(&mut self, need: &AllocRequest, size: u64) -> Result<u32, GrowError> {
        self.check_limit(size)?;
        self.totals.num_device_alloc += 1;
        let id = self.source.alloc_segment(size)?;
        Ok(self.heap.add_segment(id, size, need.arena))
    }

    /// Reserves the virtual range of an arena. If that fails, the pool logs a warning and continues with
    /// plain segments.
    fn ensure_address_range(&mut self, need: &AllocRequest) -> Result<()> {
        let Some(memory) = self.virtual_memory else { return Ok(()) };
        if self.heap.arenas[need.arena as usize].virtual_range.is_some() {
            return Ok(());
        }
        match self.source.reserve_addresses(memory.reservation) {
            Ok(id) => self.heap.add_range(id, memory.reservation, need.arena),
            Err(lost @ SourceError::DeviceLost(_)) => return Err(lost.into()),
            Err(error) => {
                log::warn!("no addresses could be reserved ({error}): the pool goes on with plain segments");
                self.virtual_memory = None;
            }
        }
        Ok(())
    }

    /// Finds the placement in the arena's range that needs the least memory mapped; `None` without a range or
    /// a fitting gap.
    pub(super) fn find_placement(&self, need: &AllocRequest) -> Option<Placement> {
        let page = self.virtual_memory?.granularity;
        let segment = self.heap.arenas[need.arena as usize].virtual_range?;
        let mut best: Option<Placement> = None;
        let (mut gap, mut offsets) = (Vec::new(), Vec::new());
        // A gap without a hole is one free block, which the search has already tried.
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

    /// Collects the blocks around a hole that are not in use, by address.
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

    /// Maps the memory missing at a placement and serves the request there, with one call of the source.
    /// Migration sources are used first, then new memory. If `more`, it maps ahead.
    fn map_placement(
        &mut self,
        need: &AllocRequest,
        placement: &Placement,
        more: bool,
    ) -> Result<Block, GrowError> {
        let page = self.virtual_memory.map_or(1, |v| v.granularity);
        let id = self.heap.segment(placement.segment).id;
        let MigrationSources { blocks: slots, may_be_in_use: in_use } = &self.migration_sources;
        let (in_use, unused) = (*in_use, slots.iter().all(|d| self.heap.slot(*d).is_never_used()));
        let donors = slots.iter().flat_map(|d| self.heap.extents_in_block(*d)).collect::<Vec<_>>();
        let mut donors = donors.into_iter().peekable();
        let (mut pieces, mut new) = (Vec::new(), 0);
        for (at, hole) in placement.holes.iter().enumerate() {
            let mut filled = 0;
            // The last extent may reach beyond the hole, where there is room.
            while let Some((from, bytes)) =
                donors.next_if(|d| filled < hole.size && filled + d.1 <= hole.room)
            {
                pieces.push(PageRemap { to: (id, hole.offset + filled), bytes, from: Some(from) });
                filled += bytes;
            }
            let mut missing = hole.size.saturating_sub(filled);
            // Memory mapped ahead follows the last hole.
            if missing > 0 && more && at + 1 == placement.holes.len() {
                let all = self.growth_size(need, new + missing, page);
                missing = missing.max(all.saturating_sub(new)).min(hole.room - filled);
            }
            new += missing;
            pieces.extend(new_extents(id, hole.offset + filled, missing, self.extent_size(need, page)));
        }
        self.check_limit(new)?;
        let moved = pieces.iter().filter(|p| p.from.is_some()).map(|p| p.bytes).sum::<u64>();
        self.charge_migration(need, moved, page);
        self.consume_migration_sources(moved, in_use)?;
        let free = self.map_pieces(placement.segment, &pieces, in_use)?;
        // The pieces and their free neighbours are one block now.
        let (Some(free), Some(run)) = (free, runs(&pieces).last()) else {
            return Err(GrowError::Full(String::new()));
        };
        let block = self.heap.take_free_block_at(free, placement.offset, need);
        if unused {
            self.heap.mark_never_used_after(block.slot, run);
        }
        self.wait_cross_stream_uses(&block, self.heap.arenas[usize::from(need.arena)].queue)?;
        Ok(block)
    }

    /// Adds bytes that moved for a request to the budget. Migration while the peak usage grows does not mean that the
    /// arrangement fails to converge.
    pub(super) fn charge_migration(&mut self, need: &AllocRequest, moved: u64, page: u64) {
        if moved > 0 && self.peak_active_with(need) == self.heap.counters.peak_active_bytes {
            let cost = moved + WAIT_COST_EXTENTS * self.extent_size(need, page);
            self.migration_budget.add(self.heap.counters.total_allocated, cost);
        }
    }

    /// Maps pieces into a range with one call of the source; if `in_use`, after all submitted work. Returns
    /// the last free block that they became.
    fn map_pieces(
        &mut self,
        segment: u32,
        pieces: &[PageRemap],
        in_use: bool,
    ) -> Result<Option<u32>, GrowError> {
        self.totals.num_device_alloc += 1;
        if in_use { self.source.remap_after_submitted(pieces) } else { self.source.remap(pieces) }?;
        Ok(runs(pieces).fold(None, |_, run| self.heap.mark_mapped(segment, run)))
    }

    /// Maps memory in the smallest holes of a range, within the limits, so that the blocks around them become
    /// neighbours. Returns true if any hole was filled.
    pub(super) fn map_holes(&mut self, need: &AllocRequest) -> Result<bool> {
        let Some(page) = self.virtual_memory.map(|v| v.granularity) else { return Ok(false) };
        let Some(number) = self.heap.arenas[usize::from(need.arena)].virtual_range else { return Ok(false) };
        let segment = self.heap.segment(number);
        let holes = segment.virtual_range.iter().flat_map(|range| &range.holes).map(|at| self.heap.slot(*at));
        // The last hole is the unused end of the range.
        let mut holes: Vec<(u64, u64)> =
            holes.filter(|s| s.next != NO_BLOCK).map(|s| (s.size, s.offset)).collect();
        holes.sort_unstable();
        let reserved = self.heap.counters.reserved();
        let room = self.capacity(self.source.device_memory()).unwrap_or(u64::MAX).saturating_sub(reserved);
        let (mut new, mut pieces) = (0, Vec::new());
        for (size, offset) in holes.into_iter().take_while(|(size, _)| {
            new += size;
            new <= room
        }) {
            pieces.extend(new_extents(segment.id, offset, size, self.extent_size(need, page)));
        }
        let new = pieces.iter().map(|p| p.bytes).sum();
        if pieces.is_empty() {
            return Ok(false);
        }
        match self.check_limit(new).and_then(|()| self.map_pieces(number, &pieces, false)) {
            Ok(_) => Ok(true),
            Err(error) => error.into_full().map(|_| false),
        }
    }

    /// Unmaps the first `bytes` bytes of the migration sources and frees the rest.
    fn consume_migration_sources(&mut self, mut bytes: u64, in_use: bool) -> Result<()> {
        for donor in std::mem::take(&mut self.migration_sources).blocks {
            let sent = bytes.min(self.heap.slot(donor).size);
            bytes -= sent;
            if sent < self.heap.slot(donor).size {
                let rest = if sent == 0 { donor } else { self.heap.slab.split(donor, sent) };
                self.heap.cancel_release(rest);
            }
            if sent > 0 {
                self.drop_stitches_of(donor, in_use)?;
                self.heap.mark_unmapped(donor);
            }
        }
        Ok(())
    }

    /// Returns the bytes to map where `missing` bytes are needed: mapping more at once saves calls, and
    /// unused extents can move later. Small requests take at most a quarter of the slack.
    fn growth_size(&self, need: &AllocRequest, missing: u64, page: u64) -> u64 {
        let slack = self.target_reserved(need).saturating_sub(self.heap.counters.reserved());
        let large = self.config.large_segment_size.max(1);
        let more = if self.is_small_request(need) {
            SEGMENT_UNIT.max(page).max(slack.min(large) / 4)
        } else if need.size < MIN_LARGE_ALLOC && self.peak_active_with(need) < SMALL_PROGRAM_BYTES {
            missing.next_multiple_of(large)
        } else {
            // Creeping blocks need more soon.
            let ahead = if self.creep.slack > 0 { self.peak_active_with(need) / NOTABLE_DIVISOR } else { 0 };
            missing.next_multiple_of(large).min(missing.max(slack).max(ahead))
        };
        more / page * page
    }

    /// Returns the size of new extents: small enough that the pool has hundreds.
    pub(super) fn extent_size(&self, need: &AllocRequest, page: u64) -> u64 {
        (self.peak_active_with(need) / EXTENT_DIVISOR / page * page).max(page)
    }

    /// Returns the bytes that the pool should hold at most while idle memory can be reclaimed: somewhat more
    /// than the peak usage. The bytes that migrated lately are added, as far as they exceed what each step may
    /// migrate.
    ///
    /// A program whose arrangement of memory converges stays below that threshold. If no arrangement fits the
    /// order of its allocations, holding more is cheaper than moving the same bytes again.
    pub(super) fn target_reserved(&self, need: &AllocRequest) -> u64 {
        let (peak, allocated) = (self.peak_active_with(need), self.heap.counters.total_allocated);
        let least = self.config.growth_slack * peak as f64;
        let copies = self.virtual_memory.is_none() && self.is_compaction_enabled();
        let (slack, free) = if copies {
            let divisor = if self.creeps(need) { NOTABLE_DIVISOR } else { COMPACT_DIVISOR };
            ((least as u64).max(peak / divisor), peak.saturating_mul(FREE_COPIES))
        } else if self.virtual_memory.is_some() {
            // Memory moves for a dominant request in any case, and a small program maps ahead enough.
            let is_young = peak >= SMALL_PROGRAM_BYTES && !self.is_dominant(need);
            let factor = if is_young { YOUTH_FACTOR } else { 1.0 };
            let young = factor * least * peak as f64 / self.creep.phase_age(allocated).max(peak) as f64;
            let slack = (young as u64).min(peak / YOUTH_DIVISOR).max(least as u64);
            (slack, peak / STEP_DIVISOR)
        } else {
            (least as u64, peak / STEP_DIVISOR)
        };
        let migrated = self.migration_budget.current(allocated).saturating_sub(free);
        // A program with creeping blocks copies all of them in each step. More memory would not end that.
        let unsettled = if self.creeps(need) { 0 } else { migrated };
        peak.saturating_add(slack)
            .saturating_add(unsettled.max(self.creep.slack))
            .min(self.limit.unwrap_or(u64::MAX))
    }

    /// Selects pieces from the front until they sum up to `bytes`, or all of them.
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

    /// Reserves `more` bytes in the process's share. Fails if they would exceed the limit of the pool or of the
    /// process.
    fn check_limit(&mut self, more: u64) -> Result<(), GrowError> {
        let reserved = self.heap.counters.reserved();
        // Drops what an earlier attempt reserved and did not use.
        self.process_share.set_reserved(reserved);
        let fits = self.limit.is_none_or(|limit| reserved.saturating_add(more) <= limit)
            && self.process_share.try_reserve(more, self.process_limit());
        if fits { Ok(()) } else { Err(GrowError::Full(String::new())) }
    }
}

/// Returns the pieces that map `size` bytes of new memory at an offset of a range, in extents of `each` bytes.
fn new_extents(id: SegmentId, offset: u64, size: u64, each: u64) -> impl Iterator<Item = PageRemap> {
    let piece = move |at| PageRemap { to: (id, offset + at), bytes: each.min(size - at), from: None };
    (0..size).step_by(each as usize).map(piece)
}

/// Returns the runs of neighbouring pieces.
fn runs(pieces: &[PageRemap]) -> impl Iterator<Item = &[PageRemap]> {
    pieces.chunk_by(|a, b| a.to.1 + a.bytes == b.to.1)
}

/// Collects offsets worth trying in a gap: its start, and the start and end of each mapped part.
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

/// Returns the parts of a gap to map for a request at `offset`.
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
