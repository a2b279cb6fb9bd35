//! Estimates how a step's memory grows with its batch size, for the advice of an out-of-memory error.
//!
//! Memory held before the step, and memory left after it (mostly gradients of parameters), does not depend on
//! the batch size. The rest is taken to be proportional to it, with two exceptions. Memory tagged
//! `parameter`, `optimizer_state` or `workspace` is constant. So is one copy of the largest parameter, because
//! its new gradient may exist at the same time as the accumulated one.
//!
//! A smaller batch peaks no higher than in proportion, even if its peak comes at another moment. So the
//! estimate for fewer rows is no less than the need, as far as the rest is proportional.

use super::Tag;
use super::pool::Pool;
use super::pool_state::PoolState;

/// Largest part of its memory that a pool keeps idle because of fragmentation, in virtual memory and in plain
/// segments. The pool releases idle memory beyond that part.
const OVERHEAD_DIVISORS: [u64; 2] = [32, 8];
/// Smallest overhead by fragmentation: with fewer rows, other blocks are small.
const MIN_OVERHEAD_BYTES: u64 = 4 << 20;
/// Tags whose memory does not depend on the batch size. (Scratch memory may or may not, by operation.)
const BATCH_INDEPENDENT_TAGS: [Tag; 3] = [Tag::Parameter, Tag::OptimizerState, Tag::Workspace];

/// Memory of a completed step, the maximum over consecutive steps of the same batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchMeasurement {
    /// Batch size, in rows.
    pub batch_size: usize,
    /// Peak of allocated bytes, including bytes held before the step.
    pub peak: u64,
    /// Bytes left for each tag after the step, in the order of [`Tag::ALL`].
    left_by_tag: [u64; Tag::COUNT],
    /// Bytes at the peak beyond those left.
    transient: u64,
    /// Transient bytes of tags that do not depend on the batch size.
    constant: u64,
    /// Overhead of the pool in bytes: fragmentation and rounding.
    overhead: u64,
}

/// Step that is running.
#[derive(Clone, Debug)]
struct RunningBatch {
    batch_size: usize,
    /// Bytes held when the step began, by tag.
    held_before: [u64; Tag::COUNT],
}

/// Batch measurements of a pool.
#[derive(Clone, Debug, Default)]
pub(super) struct BatchMemory {
    running: Option<RunningBatch>,
    measured: Option<BatchMeasurement>,
}

/// Memory of a step that failed, and how its need depends on the batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchEstimate {
    /// Batch size, in rows.
    pub batch_size: usize,
    /// Bytes held when the step began.
    pub held_before: u64,
    /// Bytes that the step had allocated, the failed request included. The step would have needed more.
    pub reached_bytes: u64,
    /// Cost model from an earlier step that completed, if there is one.
    pub earlier_step: Option<BatchCostModel>,
}

/// Memory need as a function of the batch size, from a completed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchCostModel {
    /// Batch size of the completed step, in rows.
    pub batch_size: usize,
    /// Bytes that do not depend on the batch size.
    pub fixed_bytes: u64,
    /// Bytes in proportion to the batch size, at `batch_size` rows.
    pub batch_bytes: u64,
}

/// Batch size and the memory it would need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FittingBatch {
    /// Batch size, in rows.
    pub batch_size: usize,
    /// Bytes needed.
    pub bytes: u64,
    /// If true, the bytes come from an earlier step that completed. Otherwise they are a lower bound from
    /// what the failed step had reached.
    pub is_measured: bool,
}

impl BatchEstimate {
    /// Estimates the memory for `rows` rows, at most [`batch_size`](Self::batch_size). Uses the earlier step
    /// if that had at least as many rows and its estimate is no less than [`lower_bound`](Self::lower_bound);
    /// otherwise the lower bound.
    #[must_use]
    pub fn estimate(&self, rows: usize) -> FittingBatch {
        let least = self.lower_bound(rows);
        let known = self.earlier_step.filter(|step| rows <= step.batch_size);
        let known =
            known.map(|step| step.fixed_bytes + scale_to_batch(step.batch_bytes, rows, step.batch_size));
        let known = known.filter(|bytes| *bytes >= least.bytes);
        known.map_or(least, |bytes| FittingBatch { batch_size: rows, bytes, is_measured: true })
    }

    /// Returns the least memory that `rows` rows need, from what this step had reached.
    #[must_use]
    pub fn lower_bound(&self, rows: usize) -> FittingBatch {
        let bytes = self.held_before + scale_to_batch(self.reached_bytes, rows, self.batch_size);
        FittingBatch { batch_size: rows, bytes, is_measured: false }
    }

    /// Returns half, a quarter, ... of the batch size that did not fit.
    pub(super) fn halved_batch_sizes(self) -> impl Iterator<Item = usize> + Clone {
        std::iter::successors(Some(self.batch_size), |rows| (*rows > 1).then(|| rows.div_ceil(2))).skip(1)
    }
}

/// Scales `bytes` of `all` rows to `rows` rows, rounded up.
fn scale_to_batch(bytes: u64, rows: usize, all: usize) -> u64 {
    (u128::from(bytes) * rows as u128).div_ceil(all.max(1) as u128) as u64
}

impl BatchMeasurement {
    /// Returns the maximum of both measurements if the batch sizes are equal, else the later one.
    fn merge_earlier(self, earlier: Option<Self>) -> Self {
        let Some(earlier) = earlier.filter(|e| e.batch_size == self.batch_size) else { return self };
        let mut left = self.left_by_tag;
        left.iter_mut().zip(earlier.left_by_tag).for_each(|(bytes, before)| *bytes = before.max(*bytes));
        Self {
            batch_size: self.batch_size,
            peak: self.peak.max(earlier.peak),
            left_by_tag: left,
            transient: self.transient.max(earlier.transient),
            constant: self.constant.max(earlier.constant),
            overhead: self.overhead.max(earlier.overhead),
        }
    }

    /// Returns the cost model of a step that begins with `before` bytes by tag.
    fn estimate_step(&self, before: &[u64; Tag::COUNT], largest_parameter: u64) -> BatchCostModel {
        let stays: u64 = before.iter().zip(&self.left_by_tag).map(|(now, left)| now.max(left)).sum();
        let constant = (self.constant + largest_parameter).min(self.transient);
        BatchCostModel {
            batch_size: self.batch_size,
            fixed_bytes: stays + constant + self.overhead,
            batch_bytes: self.transient - constant,
        }
    }
}

impl Pool {
    /// Starts to measure a step of `rows` rows. Returns false inside a step that is measured already.
    pub(crate) fn begin_batch(&self, rows: usize) -> bool {
        let state = &mut *self.shared.lock();
        if state.batch_memory.running.is_some() {
            return false;
        }
        let counters = &mut state.heap.counters;
        counters.begin_scoped_peaks();
        state.batch_memory.running = Some(RunningBatch { batch_size: rows, held_before: counters.by_tag() });
        true
    }

    /// Ends the step that [`begin_batch`](Self::begin_batch) started.
    pub(crate) fn end_batch(&self, succeeded: bool) {
        let state = &mut *self.shared.lock();
        let Some(running) = state.batch_memory.running.take() else { return };
        let counters = &mut state.heap.counters;
        let Some(inner) = counters.end_scoped_peaks().filter(|_| succeeded) else { return };
        let left = counters.by_tag();
        let total = |tags: &[u64; Tag::COUNT]| tags.iter().sum::<u64>();
        let still = total(&running.held_before).max(total(&left));
        let transient = inner.allocated.saturating_sub(still);
        let constant = BATCH_INDEPENDENT_TAGS.map(|tag| {
            let tag = tag as usize;
            inner.tags[tag].saturating_sub(running.held_before[tag].max(left[tag]))
        });
        let (idle, pieces) = match state.virtual_memory {
            Some(_) => {
                let idle = inner.reserved.saturating_sub(inner.allocated);
                (idle.min(inner.allocated / OVERHEAD_DIVISORS[0]), MIN_OVERHEAD_BYTES)
            }
            // Idle bytes say little here: compaction needs room to move blocks through, and a limit leaves
            // less of it.
            None => {
                (inner.allocated / OVERHEAD_DIVISORS[1], MIN_OVERHEAD_BYTES + state.config.large_segment_size)
            }
        };
        let measured = BatchMeasurement {
            batch_size: running.batch_size,
            peak: inner.allocated,
            left_by_tag: left,
            transient,
            constant: constant.iter().sum(),
            // Blocks are rounded up however few rows they hold.
            overhead: idle + pieces + inner.blocks * state.heap.rules.unit,
        };
        state.batch_memory.measured = Some(measured.merge_earlier(state.batch_memory.measured));
    }

    /// Returns the measurement of the last step of [`with_batch_size`](Self::with_batch_size) that completed.
    #[must_use]
    pub fn measured_batch(&self) -> Option<BatchMeasurement> {
        self.shared.lock().batch_memory.measured
    }

    /// Returns the most bytes that the pool may hold now, by its own limit, the process's limit and the
    /// device's free memory. Returns `None` without a limit where the driver does not report free memory.
    #[must_use]
    pub fn capacity(&self) -> Option<u64> {
        let state = self.shared.lock();
        state.capacity(state.source.device_memory())
    }
}

impl PoolState {
    /// Returns the estimate for the running step when a request of `bytes` bytes fails.
    pub(super) fn batch_estimate(&self, bytes: u64, largest_parameter: u64) -> Option<BatchEstimate> {
        let running = self.batch_memory.running.as_ref()?;
        let before = running.held_before.iter().sum::<u64>();
        let held = self.heap.counters.allocated() + bytes;
        let earlier =
            self.batch_memory.measured.map(|m| m.estimate_step(&running.held_before, largest_parameter));
        Some(BatchEstimate {
            batch_size: running.batch_size,
            held_before: before,
            reached_bytes: held.saturating_sub(before),
            earlier_step: earlier,
        })
    }
}
