//! Coming to rest: steps that are alike should not move the same memory again and again.
//!
//! A pool that holds hardly more than a program uses has to move memory while it finds an arrangement that a step fits into. Not every
//! step has one, and what has moved lately (see `Moved` in `grow`) does not tell: a large program may move a little in each step for ever.
//! Such a program repeats itself, and that can be seen: memory is missing for a request of the same size while as much is in use, over and
//! over, with the same number of bytes lent in between. Layers that are alike are no such steps: each of them leaves something.

/// How many growths are remembered: those of some steps.
const HISTORY_LEN: usize = 128;
/// How often memory was missing for the same request before, so that it would be for ever (a program that has just begun still
/// settles by itself), and the most that is held for it, as a part of what was ever in use at once: more where less did not do.
const STAGES: [(usize, u64); 2] = [(3, 36), (16, 12)];
/// That it is at least, in programs so small that pages count.
const MIN_SLACK_BYTES: u64 = 16 << 20;

/// What memory was missing for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GrowthCause {
    /// The size of the request.
    pub(super) size: u64,
    /// The bytes that were in use by then.
    pub(super) active: u64,
}

/// The latest growths that memory had to move for, and what the pool may hold so that they end.
#[derive(Debug)]
pub(super) struct GrowthHysteresis {
    /// The bytes that were ever lent by then.
    recent: [(u64, GrowthCause); HISTORY_LEN],
    next: usize,
    allowed: [u64; STAGES.len()],
}

impl Default for GrowthHysteresis {
    fn default() -> Self {
        Self { recent: [(0, GrowthCause::default()); HISTORY_LEN], next: 0, allowed: [0; _] }
    }
}

impl GrowthHysteresis {
    /// What the pool may hold, where at most `most` bytes were in use at once; 0 where it need not hold more.
    pub(super) fn allowed_reserved(&self, most: u64) -> u64 {
        let stages = self.allowed.iter().zip(STAGES);
        let held =
            stages.map(|(held, (_, part))| *held.min(&most.saturating_add(MIN_SLACK_BYTES.max(most / part))));
        held.max().unwrap_or(0)
    }

    /// Memory is missing after `lent` bytes were ever lent. Where that comes again and again for the same, the pool may hold `held` bytes,
    /// which is what it would if it grew.
    pub(super) fn record_growth(&mut self, lent: u64, what: GrowthCause, held: u64) {
        let ago = |&(at, of): &(u64, GrowthCause)| lent.checked_sub(at).filter(|ago| of == what && *ago > 0);
        let times = |period| self.recent.iter().filter_map(ago).filter(|ago| ago % period == 0).count();
        let times = self.recent.iter().filter_map(ago).map(times).max().unwrap_or(0);
        for (most, (least, _)) in self.allowed.iter_mut().zip(STAGES) {
            if times >= least {
                *most = held.max(*most);
            }
        }
        self.recent[self.next] = (lent, what);
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
    fn what_comes_again_and_again_is_held() {
        let mut rest = GrowthHysteresis::default();
        for step in 1..=3 {
            rest.record_growth(step * 10 * GIB + 5, of(100), 2 * GIB);
            rest.record_growth(step * 10 * GIB + 7, of(200), 2 * GIB);
            assert_eq!(rest.allowed_reserved(2 * GIB), 0, "step {step}");
        }
        rest.record_growth(40 * GIB + 5, of(100), 2 * GIB + 99);
        assert_eq!(rest.allowed_reserved(2 * GIB), 2 * GIB + 99);
    }

    #[test]
    fn what_comes_at_any_time_is_not() {
        let mut rest = GrowthHysteresis::default();
        let mut lent = 0;
        for step in 0..1000_u64 {
            lent += GIB + step * step * 512;
            rest.record_growth(lent, of((step % 3 + 1) * 512), u64::MAX);
        }
        assert_eq!(rest.allowed_reserved(GIB), 0);
    }

    #[test]
    fn layers_are_not_steps() {
        let mut rest = GrowthHysteresis::default();
        for layer in 0..100 {
            rest.record_growth(layer * GIB, GrowthCause { size: 512, active: layer * 1024 }, u64::MAX);
        }
        assert_eq!(rest.allowed_reserved(GIB), 0);
    }

    #[test]
    fn there_is_a_bound() {
        let mut rest = GrowthHysteresis::default();
        (1..=16).for_each(|step| rest.record_growth(step * GIB, of(512), u64::MAX));
        assert_eq!(rest.allowed_reserved(36 * GIB), 37 * GIB);
        assert_eq!(rest.allowed_reserved(1 << 20), 17 << 20);
        rest.record_growth(17 * GIB, of(512), u64::MAX);
        assert_eq!(rest.allowed_reserved(36 * GIB), 39 * GIB);
    }
}
