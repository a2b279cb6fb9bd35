//! Blocks that creep: they grow by a little each time, as those of a cache do that grows by `cat`.
//!
//! Each new block is slightly too large for the memory that the last one left. So every step would move memory
//! or call the driver for every block. The pool detects such blocks among the requests that no free block fits.
//!
//! Plain segments: sizes are rounded up to few size classes. Blocks of one class exchange their memory for many
//! steps without a copy. New segments have the size of the request rather than a part of the program, because a
//! larger one would soon have an unused end.
//!
//! Virtual segments: the pool holds the room of two more blocks, and maps a large segment at once.

use super::grow::{COMPACT_DIVISOR, NOTABLE_DIVISOR, SEGMENT_UNIT};
use super::heap::{AllocRequest, NEAR_FIT_DIVISOR};
use super::pool_state::PoolState;

/// Series of growing blocks that are observed at the same time, such as those of two models.
const SERIES: usize = 4;
/// A series creeps once its blocks have grown this many times in a row. Random sizes rarely do.
const CREEP_STEPS: u32 = 3;
/// Size classes between two powers of two: blocks keep their class for more steps with fewer, and waste less
/// with more.
const SIZE_CLASSES: u64 = 32;
/// Sizes of segments for creeping blocks between two powers of two. All segments of a cache are replaced when
/// their blocks outgrow them, so smaller steps call the driver more often.
const SEGMENT_CLASSES: u64 = 16;
/// Least step between such sizes. Drivers hand out whole MiB in any case.
const MIN_SEGMENT_STEP: u64 = 1 << 20;
/// Slack of creeping blocks in virtual segments, as a divisor of the peak usage. Two of them may leave too
/// little where earlier growth has split the memory.
const CREEP_DIVISOR: u64 = 13;

/// Sizes that have grown one after the other.
#[derive(Clone, Copy, Debug, Default)]
struct Series {
    last: u64,
    /// Times in a row that the size has grown.
    steps: u32,
}

/// Detects blocks that creep.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CreepDetector {
    /// The latest series first.
    series: [Series; SERIES],
    /// Sizes that are rounded up: the least one, and how many.
    rounded: (u64, u64),
    /// If true, some blocks have crept.
    has_crept: bool,
    /// Peak usage after it last rose by more than half a block at once.
    base_peak: u64,
    /// Slack for the current request in virtual segments, in bytes.
    pub(super) slack: u64,
    /// Peak usage when it last had grown by a notable part, and the bytes allocated until then.
    phase: (u64, u64),
}

impl CreepDetector {
    /// Adds the size of a request that no free block fits. Returns true if its series creeps.
    fn observe(&mut self, size: u64) -> bool {
        let is_near = |s: &Series| s.last.abs_diff(size) <= s.last / NEAR_FIT_DIVISOR;
        let at = self.series.iter().position(is_near);
        let steps = match at.map(|at| self.series[at]) {
            Some(Series { last, steps }) if last < size => steps + 1,
            Some(Series { last, steps }) if last == size => steps,
            _ => 0,
        };
        self.series[..=at.unwrap_or(SERIES - 1)].rotate_right(1);
        self.series[0] = Series { last: size, steps };
        self.has_crept |= steps >= CREEP_STEPS;
        steps >= CREEP_STEPS
    }

    /// Reports whether blocks of this size creep in plain segments.
    #[inline]
    fn is_rounded(&self, size: u64) -> bool {
        size.wrapping_sub(self.rounded.0) < self.rounded.1
    }

    /// Rounds a size up to its class if such blocks creep. Classes are multiples of `unit`.
    #[inline]
    pub(super) fn round(&self, size: u64, unit: u64) -> u64 {
        if self.is_rounded(size) {
            size.next_multiple_of(class_step(size, SIZE_CLASSES).max(unit))
        } else {
            size
        }
    }

    /// Stops rounding, because the device is full.
    pub(super) fn stop_rounding(&mut self) {
        self.rounded = (0, 0);
    }

    /// Returns the bytes that the program allocated in its current phase of growth, if it has creeping blocks.
    /// Otherwise, returns the bytes that it has allocated in all.
    pub(super) fn phase_age(&self, allocated: u64) -> u64 {
        let (peak, start) = self.phase;
        if self.has_crept { allocated - start + peak } else { allocated }
    }
}

/// Returns the step between `classes` sizes that lie between two powers of two.
#[inline]
fn class_step(size: u64, classes: u64) -> u64 {
    ((1 << size.max(1).ilog2()) / classes).max(1)
}

impl PoolState {
    /// Detects whether the blocks of a request creep. Returns the request, rounded up to its size class.
    pub(super) fn detect_creep<'a>(&mut self, need: &AllocRequest<'a>) -> AllocRequest<'a> {
        let (peak, allocated) = (self.peak_active_with(need), self.heap.counters.total_allocated);
        if peak - peak / (NEAR_FIT_DIVISOR + 1) > self.creep.phase.0 {
            self.creep.phase = (peak, allocated);
        }
        self.creep.slack = 0;
        let is_plain = self.virtual_memory.is_none();
        if self.is_small_request(need) || (is_plain && !self.is_compaction_enabled()) {
            return *need;
        }
        let creeps = self.creep.observe(need.size);
        if !is_plain {
            self.detect_virtual_creep(need);
        } else if creeps {
            let margin = need.size / NEAR_FIT_DIVISOR;
            self.creep.rounded = (need.size - margin, 2 * margin);
            let size = self.creep.round(need.size, self.heap.rules.unit);
            return AllocRequest { size: size.min(self.max_segment), ..*need };
        }
        *need
    }

    /// Detects whether a request nearly fits, while such requests alone have raised the peak usage by at least
    /// one block. Moving pages would then split the memory more with each block, so the pool gets more slack.
    fn detect_virtual_creep(&mut self, need: &AllocRequest) {
        let peak = self.peak_active_with(need);
        let largest = self.heap.arenas[usize::from(need.arena)].free_list.largest();
        if largest.is_some_and(|free| free.size >= need.size - need.size / NOTABLE_DIVISOR) {
            if peak.saturating_sub(self.creep.base_peak) >= need.size {
                self.creep.slack = need.size.saturating_mul(2).max(peak / CREEP_DIVISOR);
            }
        } else if peak - self.heap.counters.peak_active_bytes > need.size / 2 {
            self.creep.base_peak = peak;
        }
    }

    /// Reports whether the blocks of a request creep in plain segments.
    pub(super) fn creeps(&self, need: &AllocRequest) -> bool {
        self.creep.is_rounded(need.size)
    }

    /// Returns the size of a plain segment for a creeping block: that of the block in coarse steps, or as much
    /// as the target leaves.
    pub(super) fn creeping_segment_size(&self, need: &AllocRequest) -> u64 {
        let room = self.target_reserved(need).saturating_sub(self.heap.counters.reserved());
        let most = self.peak_active_with(need) / COMPACT_DIVISOR;
        let own = self.own_segment_size(need);
        (room.min(most) / SEGMENT_UNIT * SEGMENT_UNIT).max(own)
    }

    /// Returns the size of a plain segment for one block alone.
    pub(super) fn own_segment_size(&self, need: &AllocRequest) -> u64 {
        let step = match self.creeps(need) {
            true => class_step(need.size, SEGMENT_CLASSES).max(MIN_SEGMENT_STEP),
            false => SEGMENT_UNIT,
        };
        need.size.checked_next_multiple_of(step).unwrap_or(need.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_grow_by_little_creep() {
        let mut detector = CreepDetector::default();
        let found: Vec<bool> = [1000, 1010, 1020, 1020, 1100].map(|size| detector.observe(size)).into();
        assert_eq!(found, [false, false, false, false, true]);
        // Other sizes in between belong to other series.
        assert!(!detector.observe(5000));
        assert!(detector.observe(1100));
        assert!(!detector.observe(1090), "a smaller size ends the series");
    }

    #[test]
    fn sizes_that_vary_do_not_creep() {
        let mut detector = CreepDetector::default();
        let sizes = [100, 900, 300, 310, 290, 700, 720, 650, 500, 400];
        assert!(sizes.iter().cycle().take(100).all(|size| !detector.observe(*size)));
    }

    #[test]
    fn creeping_sizes_are_rounded_to_classes() {
        let mut detector = CreepDetector { rounded: (1 << 20, 1 << 20), ..CreepDetector::default() };
        assert_eq!(detector.round((1 << 20) + 1, 512), (1 << 20) + (1 << 15));
        assert_eq!(detector.round((1 << 20) - 1, 512), (1 << 20) - 1);
        assert_eq!(detector.round((2 << 20) + 1, 512), (2 << 20) + 1);
        detector.stop_rounding();
        assert_eq!(detector.round((1 << 20) + 1, 512), (1 << 20) + 1);
    }
}
