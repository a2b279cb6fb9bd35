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

/// A counter with its history.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counter {
    pub(super) current: u64,
    peak: u64,
    /// Sum of all increases; no reset lowers it.
    added: u64,
    /// `current` and `added` at the last reset of the accumulated counters.
    base: (u64, u64),
}

impl Counter {
    #[inline]
    pub(super) fn add(&mut self, by: u64) {
        self.current += by;
        self.added += by;
        raise_peak(&mut self.peak, self.current);
    }

    fn to_stat(self) -> Stat {
        let allocated = self.added.saturating_sub(self.base.1);
        let freed = self.base.0 + allocated - self.current;
        Stat { current: self.current, peak: self.peak, allocated, freed }
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_accumulated(&mut self) {
        self.base = (self.current, self.added);
    }
}

/// A counter of both pools: index 0 is the large pool, 1 the small one.
#[derive(Clone, Copy, Debug, Default)]
struct PoolCounter {
    pools: [Counter; 2],
    /// Peak of both pools together.
    peak: u64,
}

impl PoolCounter {
    #[inline]
    fn add(&mut self, small: bool, by: u64) {
        self.pools[usize::from(small)].add(by);
        let total = self.total();
        raise_peak(&mut self.peak, total);
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
        self.pools[usize::from(small)].current -= by;
    }

    #[inline]
    fn total(&self) -> u64 {
        self.pools[0].current + self.pools[1].current
    }

    /// Returns the counter of active memory: this one and the `pending` one together. `peaks` are those of the
    /// large pool, the small pool and both.
    fn with_pending(mut self, pending: &Self, peaks: [u64; 3]) -> Self {
        for ((counter, pending), peak) in self.pools.iter_mut().zip(&pending.pools).zip(peaks) {
            counter.current += pending.current;
            counter.base.0 += pending.base.0;
            raise_peak(&mut counter.peak, peak);
        }
        raise_peak(&mut self.peak, peaks[2]);
        self
    }

    fn to_pool_stat(self) -> PoolStat {
        let [large_pool, small_pool] = self.pools.map(Counter::to_stat);
        let all = Stat {
            current: large_pool.current + small_pool.current,
            peak: self.peak,
            allocated: large_pool.allocated + small_pool.allocated,
            freed: large_pool.freed + small_pool.freed,
        };
        PoolStat { all, small_pool, large_pool }
    }
}

/// A counter of one tag.
#[derive(Clone, Copy, Debug, Default)]
struct TagCounter {
    counter: Counter,
    /// The peak before the last allocation.
    previous_peak: u64,
}

impl TagCounter {
    #[inline]
    fn add(&mut self, size: u64) {
        self.previous_peak = self.counter.peak;
        self.counter.add(size);
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
    blocks: PoolCounter,
    bytes: PoolCounter,
    requested: PoolCounter,
    /// Freed blocks that wait for a fence, and their bytes.
    pending_blocks: PoolCounter,
    pending_bytes: PoolCounter,
    /// Peaks of active blocks and bytes while some block was pending, of the large pool, the small pool and both.
    /// At other times, active equals allocated.
    active_peaks: [[u64; 3]; 2],
    tags: [TagCounter; Tag::COUNT],
    /// Memory of the program, which is not part of any other counter.
    pub(super) external: Counter,
    segment: PoolCounter,
    reserved_bytes: PoolCounter,
    inactive_split: PoolCounter,
    inactive_split_bytes: PoolCounter,
    oversize_segments: Counter,
    oversize_allocations: Counter,
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
        let TagCounter { counter, previous_peak } = &mut self.tags[from as usize];
        if counter.peak == counter.current {
            // If the peak includes the newest block, restore the previous peak.
            counter.peak = (*previous_peak).max(counter.current - size).min(counter.peak);
        }
        counter.current -= size;
        counter.added = counter.added.saturating_sub(size);
        self.tags[to as usize].add(size);
    }

    #[inline]
    pub(super) fn record_alloc(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        self.blocks.add(small, 1);
        self.bytes.add(small, size);
        self.requested.add(small, requested);
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
            let [large, small] = [0, 1].map(|pool| held.pools[pool].current + pending.pools[pool].current);
            peaks.iter_mut().zip([large, small, large + small]).for_each(|(peak, now)| raise_peak(peak, now));
        }
        raise_peak(&mut self.peak_active_bytes, self.bytes.total() + self.pending_bytes.total());
    }

    #[inline]
    pub(super) fn record_free(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        self.blocks.sub(small, 1);
        self.bytes.sub(small, size);
        self.requested.sub(small, requested);
        self.tags[tag as usize].counter.current -= size;
        if size >= self.max_split {
            self.oversize_allocations.current -= 1;
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
        self.oversize_segments.add(u64::from(oversize));
    }

    pub(super) fn record_release(&mut self, small: bool, count: u64, size: u64, oversize: bool) {
        self.segment.sub(small, count);
        self.reserved_bytes.sub(small, size);
        self.oversize_segments.current -= u64::from(oversize);
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved_bytes.total()
    }

    pub(super) fn active(&self) -> u64 {
        self.bytes.total() + self.pending_bytes.total()
    }

    /// Returns the bytes ever allocated.
    pub(super) fn total_allocated(&self) -> u64 {
        self.bytes.pools.iter().map(|pool| pool.added).sum()
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
        self.tags.map(|tag| tag.counter.current)
    }

    /// Begins to count the peaks of a part of the program, until
    /// [`end_scoped_peaks`](Self::end_scoped_peaks).
    pub(super) fn begin_scoped_peaks(&mut self) {
        self.outer_peaks = Some(self.current_peaks());
        self.set_peaks(&ScopedPeaks {
            tags: self.by_tag(),
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
            tags: self.tags.map(|tag| tag.counter.peak),
            allocated: self.bytes.peak,
            blocks: self.blocks.peak,
            reserved: self.reserved_bytes.peak,
        }
    }

    fn set_peaks(&mut self, marks: &ScopedPeaks) {
        for (tag, peak) in self.tags.iter_mut().zip(marks.tags) {
            tag.counter.peak = peak;
        }
        (self.bytes.peak, self.blocks.peak) = (marks.allocated, marks.blocks);
        self.reserved_bytes.peak = marks.reserved;
    }

    /// Returns statistics with the values counted here; all others are those of `totals`.
    pub(super) fn to_stats(&self, totals: Stats) -> Stats {
        if let Some(outer) = &self.outer_peaks {
            let mut all = Self { outer_peaks: None, ..self.clone() };
            all.set_peaks(&outer.merge_max(&self.current_peaks()));
            return all.to_stats(totals);
        }
        let mut tags = self.tags.map(|tag| tag.counter.to_stat());
        // A program may name blocks of the pool so, too.
        let (external, total) = (self.external.to_stat(), &mut tags[Tag::External as usize]);
        total.current += external.current;
        total.peak += external.peak;
        total.allocated += external.allocated;
        total.freed += external.freed;
        let [active_blocks, active_bytes] = self.active_peaks;
        Stats {
            allocation: self.blocks.to_pool_stat(),
            active: self.blocks.with_pending(&self.pending_blocks, active_blocks).to_pool_stat(),
            allocated_bytes: self.bytes.to_pool_stat(),
            active_bytes: self.bytes.with_pending(&self.pending_bytes, active_bytes).to_pool_stat(),
            requested_bytes: self.requested.to_pool_stat(),
            segment: self.segment.to_pool_stat(),
            reserved_bytes: self.reserved_bytes.to_pool_stat(),
            inactive_split: self.inactive_split.to_pool_stat(),
            inactive_split_bytes: self.inactive_split_bytes.to_pool_stat(),
            oversize_allocations: self.oversize_allocations.to_stat(),
            oversize_segments: self.oversize_segments.to_stat(),
            pending_bytes: self.pending_bytes(),
            tags,
            ..totals
        }
    }

    pub(super) fn reset_peak(&mut self) {
        self.outer_peaks = None;
        self.active_peaks = Default::default();
        self.raise_active_peaks();
        self.for_each_counter(Counter::reset_peak);
        self.for_each_pool_counter(|counter| counter.peak = counter.total());
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.for_each_counter(Counter::reset_accumulated);
    }

    fn for_each_counter(&mut self, mut change: impl FnMut(&mut Counter)) {
        self.for_each_pool_counter(|counter| counter.pools.iter_mut().for_each(&mut change));
        self.tags.iter_mut().for_each(|tag| change(&mut tag.counter));
        let others = [&mut self.external, &mut self.oversize_segments, &mut self.oversize_allocations];
        others.into_iter().for_each(change);
    }

    fn for_each_pool_counter(&mut self, change: impl FnMut(&mut PoolCounter)) {
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
