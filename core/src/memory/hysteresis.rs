//! Growth hysteresis: ends migration of the same memory in every step of a repeating program.
//!
//! A pool that holds hardly more than a program uses moves memory until it finds an arrangement that fits a
//! step. Some steps have no such arrangement. The bytes moved lately
//! ([`MigrationBudget`](super::grow::MigrationBudget)) do not show that, because a large program may move a
//! little in every step, for ever.
//!
//! Such a program is recognised by its repetition. Memory is missing again and again for requests of one
//! size, with equal bytes in use, and equal bytes allocated in between. Repeating layers do not look like
//! that, because each layer leaves memory in use.

use super::grow::{DOMINANT_DIVISOR, NOTABLE_DIVISOR, SMALL_PROGRAM_BYTES, UNSETTLED_DIVISOR};

/// Number of growths remembered: those of some steps.
const HISTORY_LEN: usize = 128;
/// Stages: how often memory must have been missing for the same request, and the largest slack then held, as
/// a divisor of the peak usage. A program that has just begun still converges without slack. Each further stage serves
/// programs for which the earlier ones did not suffice: the last one, those that move a large block in each step.
const STAGES: [(usize, u64); 3] = [(3, NOTABLE_DIVISOR), (16, UNSETTLED_DIVISOR), (32, DOMINANT_DIVISOR)];
/// Smallest slack, for programs so small that the page size matters.
const MIN_SLACK_BYTES: u64 = 16 << 20;

/// The request that memory was missing for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GrowthCause {
    /// Size of the request.
    pub(super) size: u64,
    /// Bytes in use at the time.
    pub(super) active: u64,
}

/// Latest growths that needed migration, and what the pool may hold to end it.
#[derive(Debug)]
pub(super) struct GrowthHysteresis {
    /// Growths, each with the bytes ever allocated by then.
    recent: [(u64, GrowthCause); HISTORY_LEN],
    next: usize,
    allowed: [u64; STAGES.len()],
}

impl Default for GrowthHysteresis {
    fn default() -> Self {
        Self { recent: [(0, GrowthCause::default()); HISTORY_LEN], next: 0, allowed: [0; STAGES.len()] }
    }
}

impl GrowthHysteresis {
    /// Returns the bytes that the pool may hold at a peak usage of `peak`; 0 if no slack is needed. The slack of a
    /// small program may be as large as one dominant request.
    pub(super) fn allowed_reserved(&self, peak: u64) -> u64 {
        let stages = self.allowed.iter().zip(STAGES);
        let held = stages.map(|(&held, (_, part))| {
            let part = if peak < SMALL_PROGRAM_BYTES { DOMINANT_DIVISOR } else { part };
            held.min(peak.saturating_add(MIN_SLACK_BYTES.max(peak / part)))
        });
        held.max().unwrap_or(0)
    }

    /// Records that memory was missing after `allocated` bytes had ever been allocated. If the same cause repeats
    /// with a period, the pool may hold `held` bytes, its size after growing.
    pub(super) fn record_growth(&mut self, allocated: u64, what: GrowthCause, held: u64) {
        let ago =
            |&(at, of): &(u64, GrowthCause)| allocated.checked_sub(at).filter(|ago| of == what && *ago > 0);
        let times = |period| self.recent.iter().filter_map(ago).filter(|ago| ago % period == 0).count();
        let times = self.recent.iter().filter_map(ago).map(times).max().unwrap_or(0);
        for (stage_limit, (least, _)) in self.allowed.iter_mut().zip(STAGES) {
            if times >= least {
                *stage_limit = held.max(*stage_limit);
            }
        }
        self.recent[self.next] = (allocated, what);
        self.next = (self.next + 1) % HISTORY_LEN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn of(size: u64) -> GrowthCause {
        GrowthCause { size, active: GIB }
    }

    #[test]
    fn repeated_growth_is_held() {
        let mut hysteresis = GrowthHysteresis::default();
        for step in 1..=3 {
            hysteresis.record_growth(step * 10 * GIB + 5, of(100), 2 * GIB);
            hysteresis.record_growth(step * 10 * GIB + 7, of(200), 2 * GIB);
            assert_eq!(hysteresis.allowed_reserved(2 * GIB), 0, "step {step}");
        }
        hysteresis.record_growth(40 * GIB + 5, of(100), 2 * GIB + 99);
        assert_eq!(hysteresis.allowed_reserved(2 * GIB), 2 * GIB + 99);
    }

    #[test]
    fn irregular_growth_is_not_held() {
        let mut hysteresis = GrowthHysteresis::default();
        let mut allocated = 0;
        for step in 0..1000_u64 {
            allocated += GIB + step * step * 512;
            hysteresis.record_growth(allocated, of((step % 3 + 1) * 512), u64::MAX);
        }
        assert_eq!(hysteresis.allowed_reserved(GIB), 0);
    }

    #[test]
    fn layers_are_not_steps() {
        let mut hysteresis = GrowthHysteresis::default();
        for layer in 0..100 {
            hysteresis.record_growth(layer * GIB, GrowthCause { size: 512, active: layer * 1024 }, u64::MAX);
        }
        assert_eq!(hysteresis.allowed_reserved(GIB), 0);
    }

    #[test]
    fn hysteresis_is_bounded() {
        let mut hysteresis = GrowthHysteresis::default();
        (1..=16).for_each(|step| hysteresis.record_growth(step * GIB, of(512), u64::MAX));
        assert_eq!(hysteresis.allowed_reserved(36 * GIB), 37 * GIB);
        assert_eq!(hysteresis.allowed_reserved(1 << 20), 17 << 20);
        assert_eq!(hysteresis.allowed_reserved(189 << 20), 252 << 20);
        (17..=32).for_each(|step| hysteresis.record_growth(step * GIB, of(512), u64::MAX));
        assert_eq!(hysteresis.allowed_reserved(36 * GIB), 39 * GIB);
        hysteresis.record_growth(33 * GIB, of(512), u64::MAX);
        assert_eq!(hysteresis.allowed_reserved(36 * GIB), 48 * GIB);
    }
}
