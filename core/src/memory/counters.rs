//! Counters of [`Stats`]. An allocation updates few of them; derived values are computed when they are read.

use std::ops::Add;

use super::Tag;
use super::stats::{PoolStat, Stat, Stats};

/// Raises a peak. A branch instead of `max`: peaks seldom rise, and vectorised maxima would stall on values
/// just written.
#[inline]
fn raise_peak(peak: &mut u64, now: u64) {
    if now > *peak {
        *peak = now;
    }
}

impl Stat {
    #[inline]
    pub(super) fn add(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        raise_peak(&mut self.peak, self.current);
    }

    #[inline]
    pub(super) fn sub(&mut self, by: u64) {
        self.current -= by;
        self.freed += by;
    }
}

/// Of `all`, only the peak is counted.
impl PoolStat {
    #[inline]
    fn pool_mut(&mut self, small: bool) -> &mut Stat {
        if small { &mut self.small_pool } else { &mut self.large_pool }
    }

    #[inline]
    fn add(&mut self, small: bool, by: u64) {
        self.pool_mut(small).add(by);
        let total = self.total();
        raise_peak(&mut self.all.peak, total);
    }

    #[inline]
    fn sub(&mut self, small: bool, by: u64) {
        self.pool_mut(small).sub(by);
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
    fn total(&self) -> u64 {
        self.large_pool.current + self.small_pool.current
    }

    /// Returns the counter of active memory: this one and the `pending` one together. `peaks` are those of the
    /// large pool, the small pool and both.
    fn with_pending(mut self, pending: &Self, peaks: [u64; 3]) -> Self {
        for small in [false, true] {
            let (stat, pending) =
                (self.pool_mut(small), if small { pending.small_pool } else { pending.large_pool });
            stat.current += pending.current;
            // A block that becomes pending counts as freed, and is active until its fence has passed.
            stat.freed = stat.freed + pending.freed - pending.allocated;
            raise_peak(&mut stat.peak, peaks[usize::from(small)]);
        }
        raise_peak(&mut self.all.peak, peaks[2]);
        self.with_totals()
    }

    fn with_totals(mut self) -> Self {
        let (large, small) = (self.large_pool, self.small_pool);
        self.all.current = large.current + small.current;
        self.all.allocated = large.allocated + small.allocated;
        self.all.freed = large.freed + small.freed;
        self
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct TagCounter {
    stat: Stat,
    /// The peak before the last allocation.
    previous_peak: u64,
}

impl TagCounter {
    #[inline]
    fn add(&mut self, size: u64) {
        self.previous_peak = self.stat.peak;
        self.stat.add(size);
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

/// Peaks within a part of the program.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScopedPeaks {
    pub(super) tags: [u64; Tag::COUNT],
    /// Bytes of each tag when `allocated` was reached.
    tags_at_peak: [u64; Tag::COUNT],
    pub(super) allocated: u64,
    pub(super) blocks: u64,
    pub(super) reserved: u64,
}

impl ScopedPeaks {
    fn merge_max(mut self, other: &Self) -> Self {
        self.tags.iter_mut().zip(other.tags).for_each(|(peak, other)| *peak = other.max(*peak));
        let latest = if other.allocated >= self.allocated { other } else { &self };
        Self {
            tags: self.tags,
            tags_at_peak: latest.tags_at_peak,
            allocated: self.allocated.max(other.allocated),
            blocks: self.blocks.max(other.blocks),
            reserved: self.reserved.max(other.reserved),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct PoolCounters {
    blocks: PoolStat,
    bytes: PoolStat,
    requested: PoolStat,
    /// Freed blocks that wait for a fence, and their bytes.
    pending_blocks: PoolStat,
    pending_bytes: PoolStat,
    /// Peaks of active blocks and bytes while some block was pending, of the large pool, the small pool and both.
    /// At other times, active equals allocated.
    active_peaks: [[u64; 3]; 2],
    tags: [TagCounter; Tag::COUNT],
    /// Bytes of each tag at the last peak of `bytes`, saved by the first free after the peak.
    tags_at_peak: [u64; Tag::COUNT],
    /// Memory of the program, which is not part of any other counter.
    pub(super) external: Stat,
    segment: PoolStat,
    reserved_bytes: PoolStat,
    inactive_split: PoolStat,
    inactive_split_bytes: PoolStat,
    oversize_segments: Stat,
    oversize_allocations: Stat,
    /// Bytes ever allocated; no reset lowers the sum.
    pub(super) total_allocated: u64,
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
    /// Moves an allocated block to another tag, as if it had been allocated with that tag.
    pub(super) fn retag(&mut self, size: u64, from: Tag, to: Tag) {
        let TagCounter { stat, previous_peak } = &mut self.tags[from as usize];
        if stat.peak == stat.current {
            // If the peak includes the newest block, restore the previous peak.
            stat.peak = (*previous_peak).max(stat.current - size).min(stat.peak);
        }
        stat.current -= size;
        // Another thread may have reset the sums since the allocation.
        let counted = size.min(stat.allocated);
        stat.allocated -= counted;
        stat.freed += size - counted;
        self.tags[to as usize].add(size);
    }

    #[inline]
    pub(super) fn record_alloc(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        self.blocks.add(small, 1);
        self.bytes.add(small, size);
        self.requested.add(small, requested);
        self.total_allocated += size;
        let allocated = self.bytes.total();
        let least = self.min_active_bytes.min(allocated - size);
        self.min_active_bytes = if allocated > self.peak_active_bytes { u64::MAX } else { least };
        raise_peak(&mut self.peak_active_bytes, allocated);
        if self.pending_blocks.total() != 0 {
            self.raise_active_peaks();
        }
        self.tags[tag as usize].add(size);
        if size >= self.max_split {
            self.oversize_allocations.add(1);
        }
    }

    /// Raises the peaks of active memory, which exceeds allocated memory.
    #[cold]
    fn raise_active_peaks(&mut self) {
        let counters = [(&self.blocks, &self.pending_blocks), (&self.bytes, &self.pending_bytes)];
        for (peaks, (held, pending)) in self.active_peaks.iter_mut().zip(counters) {
            let large = held.large_pool.current + pending.large_pool.current;
            let small = held.small_pool.current + pending.small_pool.current;
            peaks.iter_mut().zip([large, small, large + small]).for_each(|(peak, now)| raise_peak(peak, now));
        }
        raise_peak(&mut self.peak_active_bytes, self.bytes.total() + self.pending_bytes.total());
    }

    #[inline]
    pub(super) fn record_free(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        if self.bytes.total() == self.bytes.all.peak {
            self.tags_at_peak = self.by_tag();
        }
        self.blocks.sub(small, 1);
        self.bytes.sub(small, size);
        self.requested.sub(small, requested);
        self.tags[tag as usize].stat.sub(size);
        if size >= self.max_split {
            self.oversize_allocations.sub(1);
        }
    }

    pub(super) fn record_pending(&mut self, small: bool, size: u64) {
        self.pending_blocks.add(small, 1);
        self.pending_bytes.add(small, size);
    }

    pub(super) fn record_completed(&mut self, small: bool, size: u64) {
        self.pending_blocks.sub(small, 1);
        self.pending_bytes.sub(small, size);
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
        self.oversize_segments.add(oversize.into());
    }

    pub(super) fn record_release(&mut self, small: bool, count: u64, size: u64, oversize: bool) {
        self.segment.sub(small, count);
        self.reserved_bytes.sub(small, size);
        self.oversize_segments.sub(oversize.into());
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved_bytes.total()
    }

    pub(super) fn active(&self) -> u64 {
        self.bytes.total() + self.pending_bytes.total()
    }

    pub(super) fn allocated(&self) -> u64 {
        self.bytes.total()
    }

    /// Returns the bytes that are neither allocated nor free: they wait for a fence.
    pub(super) fn pending_bytes(&self) -> u64 {
        self.pending_bytes.total() + self.releasing_bytes
    }

    /// Returns the allocated bytes of each tag.
    pub(super) fn by_tag(&self) -> [u64; Tag::COUNT] {
        self.tags.map(|tag| tag.stat.current)
    }

    /// Returns the bytes of each tag at the last peak of the allocated bytes. A peak that no free has ended is now.
    fn tags_at_peak(&self) -> [u64; Tag::COUNT] {
        if self.bytes.total() == self.bytes.all.peak { self.by_tag() } else { self.tags_at_peak }
    }

    /// Begins to count the peaks of a part of the program, until
    /// [`end_scoped_peaks`](Self::end_scoped_peaks).
    pub(super) fn begin_scoped_peaks(&mut self) {
        self.outer_peaks = Some(self.current_peaks());
        self.set_peaks(&ScopedPeaks {
            tags: self.by_tag(),
            tags_at_peak: self.by_tag(),
            allocated: self.allocated(),
            blocks: self.blocks.total(),
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
            tags: self.tags.map(|tag| tag.stat.peak),
            tags_at_peak: self.tags_at_peak(),
            allocated: self.bytes.all.peak,
            blocks: self.blocks.all.peak,
            reserved: self.reserved_bytes.all.peak,
        }
    }

    fn set_peaks(&mut self, marks: &ScopedPeaks) {
        for (tag, peak) in self.tags.iter_mut().zip(marks.tags) {
            tag.stat.peak = peak;
        }
        (self.bytes.all.peak, self.blocks.all.peak) = (marks.allocated, marks.blocks);
        self.reserved_bytes.all.peak = marks.reserved;
        self.tags_at_peak = marks.tags_at_peak;
    }

    /// Returns statistics with the values counted here; all others are those of `totals`.
    pub(super) fn to_stats(&self, totals: Stats) -> Stats {
        if let Some(outer) = &self.outer_peaks {
            let mut all = Self { outer_peaks: None, ..self.clone() };
            all.set_peaks(&outer.merge_max(&self.current_peaks()));
            return all.to_stats(totals);
        }
        let mut tags = self.tags.map(|tag| tag.stat);
        // A program may name blocks of the pool so, too.
        let (external, total) = (self.external, &mut tags[Tag::External as usize]);
        total.current += external.current;
        total.peak += external.peak;
        total.allocated += external.allocated;
        total.freed += external.freed;
        let [active_blocks, active_bytes] = self.active_peaks;
        Stats {
            allocation: self.blocks.with_totals(),
            active: self.blocks.with_pending(&self.pending_blocks, active_blocks),
            allocated_bytes: self.bytes.with_totals(),
            active_bytes: self.bytes.with_pending(&self.pending_bytes, active_bytes),
            requested_bytes: self.requested.with_totals(),
            segment: self.segment.with_totals(),
            reserved_bytes: self.reserved_bytes.with_totals(),
            inactive_split: self.inactive_split.with_totals(),
            inactive_split_bytes: self.inactive_split_bytes.with_totals(),
            oversize_allocations: self.oversize_allocations,
            oversize_segments: self.oversize_segments,
            pending_bytes: self.pending_bytes(),
            tags,
            tags_at_peak: self.tags_at_peak(),
            ..totals
        }
    }

    pub(super) fn reset_peak(&mut self) {
        self.outer_peaks = None;
        self.active_peaks = Default::default();
        self.raise_active_peaks();
        self.for_each_stat(|stat| stat.peak = stat.current);
        self.for_each_pool_stat(|stat| stat.all.peak = stat.total());
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.for_each_stat(|stat| (stat.allocated, stat.freed) = (0, 0));
    }

    fn for_each_stat(&mut self, mut change: impl FnMut(&mut Stat)) {
        self.for_each_pool_stat(|stat| {
            [&mut stat.large_pool, &mut stat.small_pool].into_iter().for_each(&mut change)
        });
        self.tags.iter_mut().for_each(|tag| change(&mut tag.stat));
        let others = [&mut self.external, &mut self.oversize_segments, &mut self.oversize_allocations];
        others.into_iter().for_each(change);
    }

    fn for_each_pool_stat(&mut self, change: impl FnMut(&mut PoolStat)) {
        let all = [
            &mut self.blocks,
            &mut self.bytes,
            &mut self.requested,
            &mut self.pending_blocks,
            &mut self.pending_bytes,
            &mut self.segment,
            &mut self.reserved_bytes,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
        ];
        all.into_iter().for_each(change);
    }
}
