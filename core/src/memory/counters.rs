//! Counters of [`Stats`]. An allocation updates few of them; derived values are computed when they are read.

use std::ops::Add;

use super::Tag;
use super::stats::{PoolStat, Stat, Stats};

impl PoolStat {
    fn from_pools(large_pool: Stat, small_pool: Stat, peak: u64) -> Self {
        let all = Stat {
            current: large_pool.current + small_pool.current,
            peak,
            allocated: large_pool.allocated + small_pool.allocated,
            freed: large_pool.freed + small_pool.freed,
        };
        Self { all, small_pool, large_pool }
    }
}

/// Raises a peak. A branch instead of `max`: peaks seldom rise, and vectorised maxima would stall on values
/// just written.
#[inline]
fn raise_peak(peak: &mut u64, now: u64) {
    if now > *peak {
        *peak = now;
    }
}

/// A counter of both pools: index 0 is the large pool, 1 the small one.
#[derive(Clone, Copy, Debug, Default)]
struct PoolCounter {
    current: [u64; 2],
    added: [u64; 2],
    /// `current` at the last reset of the accumulated counters.
    base: [u64; 2],
    /// Peaks of the large pool, the small pool and both together.
    peak: [u64; 3],
}

impl PoolCounter {
    #[inline]
    fn add(&mut self, small: bool, by: u64) {
        let pool = usize::from(small);
        self.current[pool] += by;
        self.added[pool] += by;
        raise_peak(&mut self.peak[pool], self.current[pool]);
        let total = self.total();
        raise_peak(&mut self.peak[2], total);
    }

    #[inline]
    fn replace(&mut self, small: bool, gone: u64, come: u64) {
        if come > gone {
            self.add(small, come - gone);
        } else {
            self.sub(small, gone - come);
        }
    }

    #[inline]
    fn sub(&mut self, small: bool, by: u64) {
        self.current[usize::from(small)] -= by;
    }

    #[inline]
    fn total(&self) -> u64 {
        self.current[0] + self.current[1]
    }

    fn stat(&self, pool: usize) -> Stat {
        let (current, allocated) = (self.current[pool], self.added[pool]);
        Stat { current, peak: self.peak[pool], allocated, freed: allocated + self.base[pool] - current }
    }

    fn to_pool_stat(self) -> PoolStat {
        PoolStat::from_pools(self.stat(0), self.stat(1), self.peak[2])
    }

    fn reset_peak(&mut self) {
        self.peak = [self.current[0], self.current[1], self.total()];
    }

    fn reset_accumulated(&mut self) {
        self.added = [0; 2];
        self.base = self.current;
    }
}

/// A counter of one tag.
#[derive(Clone, Copy, Debug, Default)]
struct TagCounter {
    current: u64,
    added: u64,
    peak: u64,
    /// The peak before the last allocation.
    previous_peak: u64,
    /// `current` at the last reset of the accumulated counters.
    base: u64,
}

impl TagCounter {
    #[inline]
    fn add(&mut self, size: u64) {
        self.current += size;
        self.added += size;
        self.previous_peak = self.peak;
        raise_peak(&mut self.peak, self.current);
    }

    fn to_stat(self) -> Stat {
        let Self { current, added, peak, base, .. } = self;
        Stat { current, peak, allocated: added, freed: added + base - current }
    }
}

/// Free parts of segments: PyTorch's inactive splits, which cannot be released by themselves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InactiveSplit {
    pub(super) blocks: u64,
    pub(super) bytes: u64,
}

impl Add for InactiveSplit {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        Self { blocks: self.blocks + other.blocks, bytes: self.bytes + other.bytes }
    }
}

/// Counters that every allocation updates, of one pool. They are stored together, since they determine an
/// allocation's cost.
#[derive(Clone, Copy, Debug, Default)]
struct HeldCounters {
    blocks: u64,
    bytes: u64,
    requested: u64,
    /// Freed blocks that wait for a fence, and their bytes.
    pending_blocks: u64,
    pending_bytes: u64,
    /// Totals ever allocated.
    blocks_added: u64,
    bytes_added: u64,
    requested_added: u64,
}

/// Peaks of [`HeldCounters`].
#[derive(Clone, Copy, Debug, Default)]
struct PeakCounters {
    blocks: u64,
    bytes: u64,
    requested: u64,
    /// Peaks while some block was pending; otherwise active equals allocated.
    active_blocks: u64,
    active_bytes: u64,
}

impl PeakCounters {
    #[inline]
    fn raise_to(&mut self, held: &HeldCounters) {
        raise_peak(&mut self.blocks, held.blocks);
        raise_peak(&mut self.bytes, held.bytes);
        raise_peak(&mut self.requested, held.requested);
    }

    fn raise_active_to(&mut self, held: &HeldCounters) {
        raise_peak(&mut self.active_blocks, held.blocks + held.pending_blocks);
        raise_peak(&mut self.active_bytes, held.bytes + held.pending_bytes);
    }
}

impl HeldCounters {
    /// Returns the sum of two pools' current values.
    #[inline]
    fn sum_current(&self, other: &Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            bytes: self.bytes + other.bytes,
            requested: self.requested + other.requested,
            pending_blocks: self.pending_blocks + other.pending_blocks,
            pending_bytes: self.pending_bytes + other.pending_bytes,
            ..Self::default()
        }
    }
}

/// Peaks within a part of the program.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScopedPeaks {
    pub(super) tags: [u64; Tag::COUNT],
    pub(super) allocated: u64,
    pub(super) blocks: u64,
    pub(super) reserved: u64,
}

impl ScopedPeaks {
    fn merge_max(mut self, other: &Self) -> Self {
        self.tags.iter_mut().zip(other.tags).for_each(|(peak, other)| *peak = other.max(*peak));
        Self {
            tags: self.tags,
            allocated: self.allocated.max(other.allocated),
            blocks: self.blocks.max(other.blocks),
            reserved: self.reserved.max(other.reserved),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct PoolCounters {
    /// Counters of the large pool, then of the small one.
    held: [HeldCounters; 2],
    /// Peaks of the large pool, the small pool and both together.
    peak: [PeakCounters; 3],
    /// `held` at the last reset of the accumulated counters.
    base: [HeldCounters; 2],
    tags: [TagCounter; Tag::COUNT],
    /// Memory of the program, which is not part of any other counter.
    external: TagCounter,
    segment: PoolCounter,
    reserved_bytes: PoolCounter,
    inactive_split: PoolCounter,
    inactive_split_bytes: PoolCounter,
    oversize_segments: PoolCounter,
    oversize_allocations: PoolCounter,
    /// Bytes on their way back to the device.
    pub(super) releasing_bytes: u64,
    /// Peaks before the current part of the program, whose own peaks are being counted.
    outer_peaks: Option<ScopedPeaks>,
    pub(super) max_split: u64,
    /// Peak of the active bytes, which no reset lowers.
    pub(super) peak_active_bytes: u64,
    /// Fewest allocated bytes before a request, since the last new peak or since the reader reset the value.
    pub(super) min_active_bytes: u64,
}

impl PoolCounters {
    /// Counts memory of the program that a tensor begins to use.
    pub(super) fn record_external(&mut self, size: u64) {
        self.external.add(size);
    }

    /// Counts memory of the program that a tensor no longer uses.
    pub(super) fn release_external(&mut self, size: u64) {
        self.external.current -= size;
    }

    /// Returns the bytes of the program's memory that tensors use.
    pub(super) fn external(&self) -> u64 {
        self.external.current
    }

    /// Moves an allocated block to another tag, as if it had been allocated with that tag.
    pub(super) fn retag(&mut self, size: u64, from: Tag, to: Tag) {
        let tally = &mut self.tags[from as usize];
        if tally.peak == tally.current {
            // If the peak includes the newest block, restore the previous peak.
            tally.peak = tally.previous_peak.max(tally.current - size).min(tally.peak);
        }
        tally.current -= size;
        tally.added = tally.added.saturating_sub(size);
        self.tags[to as usize].add(size);
    }

    #[inline]
    pub(super) fn record_alloc(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        let pool = usize::from(small);
        let held = &mut self.held[pool];
        held.blocks += 1;
        held.bytes += size;
        held.requested += requested;
        held.blocks_added += 1;
        held.bytes_added += size;
        held.requested_added += requested;
        self.peak[pool].raise_to(held);
        let both = self.held[0].sum_current(&self.held[1]);
        self.peak[2].raise_to(&both);
        let least = self.min_active_bytes.min(both.bytes - size);
        self.min_active_bytes = if both.bytes > self.peak_active_bytes { u64::MAX } else { least };
        raise_peak(&mut self.peak_active_bytes, both.bytes);
        if both.pending_blocks != 0 {
            self.raise_active_peaks();
        }
        self.tags[tag as usize].add(size);
        if size >= self.max_split {
            self.oversize_allocations.add(small, 1);
        }
    }

    /// Raises the peaks of active memory, which exceeds allocated memory.
    #[cold]
    fn raise_active_peaks(&mut self) {
        let both = self.held[0].sum_current(&self.held[1]);
        for (peak, held) in self.peak.iter_mut().zip([&self.held[0], &self.held[1], &both]) {
            peak.raise_active_to(held);
        }
        raise_peak(&mut self.peak_active_bytes, both.bytes + both.pending_bytes);
    }

    #[inline]
    pub(super) fn record_free(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        let held = &mut self.held[usize::from(small)];
        held.blocks -= 1;
        held.bytes -= size;
        held.requested -= requested;
        self.tags[tag as usize].current -= size;
        if size >= self.max_split {
            self.oversize_allocations.sub(small, 1);
        }
    }

    pub(super) fn record_pending(&mut self, small: bool, size: u64) {
        let held = &mut self.held[usize::from(small)];
        held.pending_blocks += 1;
        held.pending_bytes += size;
    }

    pub(super) fn record_completed(&mut self, small: bool, size: u64) {
        let held = &mut self.held[usize::from(small)];
        held.pending_blocks -= 1;
        held.pending_bytes -= size;
    }

    /// Replaces inactive splits `gone` by `come`.
    #[inline]
    pub(super) fn replace_inactive_split(&mut self, small: bool, gone: InactiveSplit, come: InactiveSplit) {
        if gone.blocks | come.blocks != 0 {
            self.inactive_split.replace(small, gone.blocks, come.blocks);
            self.inactive_split_bytes.replace(small, gone.bytes, come.bytes);
        }
    }

    /// Records that `count` segments or extents were taken from the device.
    pub(super) fn record_reserve(&mut self, small: bool, count: u64, size: u64, oversize: bool) {
        self.segment.add(small, count);
        self.reserved_bytes.add(small, size);
        if oversize {
            self.oversize_segments.add(small, 1);
        }
    }

    pub(super) fn record_release(&mut self, small: bool, count: u64, size: u64, oversize: bool) {
        self.segment.sub(small, count);
        self.reserved_bytes.sub(small, size);
        if oversize {
            self.oversize_segments.sub(small, 1);
        }
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved_bytes.total()
    }

    pub(super) fn active(&self) -> u64 {
        self.allocated() + self.held.iter().map(|h| h.pending_bytes).sum::<u64>()
    }

    /// Returns the bytes ever allocated.
    pub(super) fn total_allocated(&self) -> u64 {
        self.held.iter().map(|h| h.bytes_added).sum()
    }

    pub(super) fn allocated(&self) -> u64 {
        self.held.iter().map(|h| h.bytes).sum()
    }

    /// Returns the bytes that are neither allocated nor free: they wait for a fence.
    pub(super) fn pending_bytes(&self) -> u64 {
        self.active() - self.allocated() + self.releasing_bytes
    }

    /// Returns the allocated bytes of each tag.
    pub(super) fn by_tag(&self) -> [u64; Tag::COUNT] {
        self.tags.map(|tag| tag.current)
    }

    /// Begins to count the peaks of a part of the program, until
    /// [`end_scoped_peaks`](Self::end_scoped_peaks).
    pub(super) fn begin_scoped_peaks(&mut self) {
        self.outer_peaks = Some(self.current_peaks());
        self.set_peaks(&ScopedPeaks {
            tags: self.by_tag(),
            allocated: self.allocated(),
            blocks: self.held.iter().map(|h| h.blocks).sum(),
            reserved: self.reserved(),
        });
    }

    /// Ends the part and returns its peaks; `None` if all peaks were reset meanwhile.
    pub(super) fn end_scoped_peaks(&mut self) -> Option<ScopedPeaks> {
        let outer = self.outer_peaks.take()?;
        let inner = self.current_peaks();
        self.set_peaks(&outer.merge_max(&inner));
        Some(inner)
    }

    fn current_peaks(&self) -> ScopedPeaks {
        ScopedPeaks {
            tags: self.tags.map(|tag| tag.peak),
            allocated: self.peak[2].bytes,
            blocks: self.peak[2].blocks,
            reserved: self.reserved_bytes.peak[2],
        }
    }

    fn set_peaks(&mut self, marks: &ScopedPeaks) {
        for (tag, peak) in self.tags.iter_mut().zip(marks.tags) {
            tag.peak = peak;
        }
        (self.peak[2].bytes, self.peak[2].blocks) = (marks.allocated, marks.blocks);
        self.reserved_bytes.peak[2] = marks.reserved;
    }

    /// Returns statistics with the values counted here; all others are those of `totals`.
    pub(super) fn to_stats(&self, totals: Stats) -> Stats {
        if let Some(outer) = &self.outer_peaks {
            let mut all = Self { outer_peaks: None, ..self.clone() };
            all.set_peaks(&outer.merge_max(&self.current_peaks()));
            return all.to_stats(totals);
        }
        let blocks = |h: &HeldCounters| h.blocks;
        let bytes = |h: &HeldCounters| h.bytes;
        let active_blocks = |h: &HeldCounters| h.blocks + h.pending_blocks;
        let active_bytes = |h: &HeldCounters| h.bytes + h.pending_bytes;
        let mut tags = self.tags.map(|t| t.to_stat());
        // A program may name blocks of the pool so, too.
        let (external, total) = (self.external.to_stat(), &mut tags[Tag::External as usize]);
        total.current += external.current;
        total.peak += external.peak;
        total.allocated += external.allocated;
        total.freed += external.freed;
        Stats {
            allocation: self.stat(blocks, |h| h.blocks_added, |p| p.blocks),
            active: self.stat(active_blocks, |h| h.blocks_added, |p| p.active_blocks.max(p.blocks)),
            allocated_bytes: self.stat(bytes, |h| h.bytes_added, |p| p.bytes),
            active_bytes: self.stat(active_bytes, |h| h.bytes_added, |p| p.active_bytes.max(p.bytes)),
            requested_bytes: self.stat(|h| h.requested, |h| h.requested_added, |p| p.requested),
            segment: self.segment.to_pool_stat(),
            reserved_bytes: self.reserved_bytes.to_pool_stat(),
            inactive_split: self.inactive_split.to_pool_stat(),
            inactive_split_bytes: self.inactive_split_bytes.to_pool_stat(),
            oversize_allocations: self.oversize_allocations.to_pool_stat().all,
            oversize_segments: self.oversize_segments.to_pool_stat().all,
            pending_bytes: self.pending_bytes(),
            tags,
            ..totals
        }
    }

    fn stat(
        &self,
        now: fn(&HeldCounters) -> u64,
        added: fn(&HeldCounters) -> u64,
        peak: fn(&PeakCounters) -> u64,
    ) -> PoolStat {
        let pool = |pool: usize| {
            let (held, base) = (&self.held[pool], &self.base[pool]);
            let allocated = added(held) - added(base);
            let freed = now(base) + allocated - now(held);
            Stat { current: now(held), peak: peak(&self.peak[pool]), allocated, freed }
        };
        PoolStat::from_pools(pool(0), pool(1), peak(&self.peak[2]))
    }

    pub(super) fn reset_peak(&mut self) {
        self.outer_peaks = None;
        self.peak = [PeakCounters::default(); 3];
        self.peak[0].raise_to(&self.held[0]);
        self.peak[1].raise_to(&self.held[1]);
        self.peak[2].raise_to(&self.held[0].sum_current(&self.held[1]));
        self.raise_active_peaks();
        self.for_each_counter(PoolCounter::reset_peak);
        self.tags.iter_mut().chain([&mut self.external]).for_each(|t| t.peak = t.current);
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.base = self.held;
        self.for_each_counter(PoolCounter::reset_accumulated);
        for tally in self.tags.iter_mut().chain([&mut self.external]) {
            (tally.added, tally.base) = (0, tally.current);
        }
    }

    fn for_each_counter(&mut self, change: impl Fn(&mut PoolCounter)) {
        let all = [
            &mut self.segment,
            &mut self.reserved_bytes,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
            &mut self.oversize_segments,
            &mut self.oversize_allocations,
        ];
        all.into_iter().for_each(change);
    }
}
