//! The counters behind [`Stats`]: a few additions per operation; what can be derived is derived when it is read.

use super::Tag;
use super::stats::{PoolStat, Stat, Stats};

/// A counter of both pools: index 0 is the large pool, 1 the small one.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    current: [u64; 2],
    added: [u64; 2],
    /// `current` at the last reset of the accumulated figures.
    base: [u64; 2],
    /// The large pool's, the small pool's, and that of both.
    peak: [u64; 3],
}

impl Counter {
    #[inline]
    fn add(&mut self, small: bool, by: u64) {
        let pool = usize::from(small);
        self.current[pool] += by;
        self.added[pool] += by;
        self.peak[pool] = self.peak[pool].max(self.current[pool]);
        self.peak[2] = self.peak[2].max(self.total());
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

    fn read(&self) -> PoolStat {
        let (large_pool, small_pool) = (self.stat(0), self.stat(1));
        let all = Stat {
            current: self.total(),
            peak: self.peak[2],
            allocated: large_pool.allocated + small_pool.allocated,
            freed: large_pool.freed + small_pool.freed,
        };
        PoolStat { all, small_pool, large_pool }
    }

    fn reset_peak(&mut self) {
        self.peak = [self.current[0], self.current[1], self.total()];
    }

    fn reset_accumulated(&mut self) {
        self.added = [0; 2];
        self.base = self.current;
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    allocation: Counter,
    segment: Counter,
    active: Counter,
    inactive_split: Counter,
    allocated_bytes: Counter,
    reserved_bytes: Counter,
    active_bytes: Counter,
    inactive_split_bytes: Counter,
    requested_bytes: Counter,
    oversize_segments: Counter,
    oversize_allocations: Counter,
    tags: [Counter; Tag::COUNT],
    pub(super) pending_bytes: u64,
    pub(super) max_split: u64,
    /// The most bytes that were ever active: no reset lowers it.
    pub(super) most_active: u64,
}

impl Counters {
    #[inline]
    pub(super) fn hold(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        self.allocation.add(small, 1);
        self.active.add(small, 1);
        self.allocated_bytes.add(small, size);
        self.active_bytes.add(small, size);
        self.requested_bytes.add(small, requested);
        self.tags[tag as usize].add(small, size);
        self.most_active = self.most_active.max(self.active_bytes.total());
        if size >= self.max_split {
            self.oversize_allocations.add(small, 1);
        }
    }

    #[inline]
    pub(super) fn drop_hold(&mut self, small: bool, size: u64, requested: u64, tag: Tag) {
        self.allocation.sub(small, 1);
        self.allocated_bytes.sub(small, size);
        self.requested_bytes.sub(small, requested);
        self.tags[tag as usize].sub(small, size);
        if size >= self.max_split {
            self.oversize_allocations.sub(small, 1);
        }
    }

    #[inline]
    pub(super) fn inactive(&mut self, small: bool, size: u64) {
        self.active.sub(small, 1);
        self.active_bytes.sub(small, size);
    }

    /// A free part of a segment that cannot be given back by itself came to be.
    #[inline]
    pub(super) fn split(&mut self, small: bool, size: u64) {
        self.inactive_split.add(small, 1);
        self.inactive_split_bytes.add(small, size);
    }

    /// Such a part is gone.
    #[inline]
    pub(super) fn unsplit(&mut self, small: bool, size: u64) {
        self.inactive_split.sub(small, 1);
        self.inactive_split_bytes.sub(small, size);
    }

    pub(super) fn reserve(&mut self, small: bool, size: u64, oversize: bool) {
        self.segment.add(small, 1);
        self.reserved_bytes.add(small, size);
        if oversize {
            self.oversize_segments.add(small, 1);
        }
    }

    pub(super) fn unreserve(&mut self, small: bool, size: u64, oversize: bool) {
        self.segment.sub(small, 1);
        self.reserved_bytes.sub(small, size);
        if oversize {
            self.oversize_segments.sub(small, 1);
        }
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved_bytes.total()
    }

    pub(super) fn active(&self) -> u64 {
        self.active_bytes.total()
    }

    pub(super) fn allocated(&self) -> u64 {
        self.allocated_bytes.total()
    }

    /// What is counted here, as statistics; the rest of them is zero.
    pub(super) fn read(&self) -> Stats {
        Stats {
            allocation: self.allocation.read(),
            segment: self.segment.read(),
            active: self.active.read(),
            inactive_split: self.inactive_split.read(),
            allocated_bytes: self.allocated_bytes.read(),
            reserved_bytes: self.reserved_bytes.read(),
            active_bytes: self.active_bytes.read(),
            inactive_split_bytes: self.inactive_split_bytes.read(),
            requested_bytes: self.requested_bytes.read(),
            oversize_allocations: self.oversize_allocations.read().all,
            oversize_segments: self.oversize_segments.read().all,
            pending_bytes: self.pending_bytes,
            tags: self.tags.map(|t| t.read().all),
            ..Stats::default()
        }
    }

    pub(super) fn reset_peak(&mut self) {
        self.each(Counter::reset_peak);
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.each(Counter::reset_accumulated);
    }

    fn each(&mut self, change: impl Fn(&mut Counter)) {
        let all = [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
            &mut self.oversize_segments,
            &mut self.oversize_allocations,
        ];
        all.into_iter().chain(&mut self.tags).for_each(change);
    }
}
