//! How much of a step's memory grows with the rows of its batch: what the advice of an out-of-memory error is computed
//! from.
//!
//! What was held when a step began, and what is left when it is done (the gradients of parameters, mostly), stays whatever
//! the number of rows. The rest is taken to grow with them, but for memory tagged `parameter`, `optimizer_state` or
//! `workspace`, and once the largest parameter: its gradient may be computed beside the one it is added to. The moment of the peak
//! moves with the rows, and never upwards: so the estimate for fewer rows is no less than the need, as far as the rest
//! does grow with the rows.

use super::Tag;
use super::pool::Pool;
use super::pool_state::PoolState;
use crate::error::Result;

/// The part of its memory that a pool holds idle at most because it is in pieces, in virtual memory and in plain segments:
/// the rest would have gone back.
const OVERHEAD_DIVISORS: [u64; 2] = [32, 8];
/// The smallest pieces that it takes: with fewer rows, other blocks are small.
const MIN_OVERHEAD_BYTES: u64 = 4 << 20;
/// What does not grow with the rows. (Scratch memory does or does not, by the operation.)
const BATCH_INDEPENDENT_TAGS: [Tag; 3] = [Tag::Parameter, Tag::OptimizerState, Tag::Workspace];

/// What a step of so many rows took, that ran to its end: the most that steps of the same number took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchMeasurement {
    /// Rows that ran at once.
    pub batch_size: usize,
    /// The most bytes that were held, with what had been held before the step.
    pub peak: u64,
    /// Bytes that were left for each tag when it was done, in the order of [`Tag::ALL`].
    left_by_tag: [u64; Tag::COUNT],
    /// Bytes at the peak beyond those that were left.
    transient: u64,
    /// Transient ones of tags that do not grow with the rows.
    constant: u64,
    /// What the pool needs beside.
    overhead: u64,
}

/// A step that runs.
#[derive(Clone, Debug)]
struct RunningBatch {
    batch_size: usize,
    /// Bytes held when it began.
    held_before: [u64; Tag::COUNT],
}

/// What a pool knows of rows.
#[derive(Clone, Debug, Default)]
pub(super) struct BatchMemory {
    running: Option<RunningBatch>,
    measured: Option<BatchMeasurement>,
}

/// A step that ran out of memory, and how its need depends on the rows that run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchEstimate {
    /// Rows that ran at once.
    pub batch_size: usize,
    /// Bytes that were held when the step began.
    pub held_before: u64,
    /// Bytes that it had come to hold, the request included: the step would have needed more.
    pub reached_bytes: u64,
    /// What is known of a step before it that ran to its end.
    pub earlier_step: Option<BatchCostModel>,
}

/// What a step needs, by one that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchCostModel {
    /// Rows that ran at once.
    pub batch_size: usize,
    /// Bytes that do not grow with the rows.
    pub fixed_bytes: u64,
    /// Bytes that do, of so many rows.
    pub batch_bytes: u64,
}

/// A number of rows, and what it would need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FittingBatch {
    /// Rows that run at once.
    pub batch_size: usize,
    /// Bytes that they need.
    pub bytes: u64,
    /// Whether the bytes are those of an earlier step that ran to its end; else they are no more than what the step that
    /// failed had reached, and it may need more.
    pub is_measured: bool,
}

impl BatchEstimate {
    /// What so many rows at once need, no more of them than [`at_once`](Self::at_once): by an earlier step, if one of no fewer
    /// rows is known and this step is not larger than that one was; else [`at_least`](Self::at_least).
    #[must_use]
    pub fn estimate(&self, rows: usize) -> FittingBatch {
        let least = self.lower_bound(rows);
        let known = self.earlier_step.filter(|step| rows <= step.batch_size);
        let known =
            known.map(|step| step.fixed_bytes + scale_to_batch(step.batch_bytes, rows, step.batch_size));
        let known = known.filter(|bytes| *bytes >= least.bytes);
        known.map_or(least, |bytes| FittingBatch { batch_size: rows, bytes, is_measured: true })
    }

    /// What they need at least, by what this step had reached.
    #[must_use]
    pub fn lower_bound(&self, rows: usize) -> FittingBatch {
        let bytes = self.held_before + scale_to_batch(self.reached_bytes, rows, self.batch_size);
        FittingBatch { batch_size: rows, bytes, is_measured: false }
    }

    /// The half, the quarter, ... of the rows that did not fit.
    pub(super) fn halved_batch_sizes(self) -> impl Iterator<Item = usize> + Clone {
        std::iter::successors(Some(self.batch_size), |rows| (*rows > 1).then(|| rows.div_ceil(2))).skip(1)
    }
}

/// `rows` of `all` rows' bytes.
fn scale_to_batch(bytes: u64, rows: usize, all: usize) -> u64 {
    (u128::from(bytes) * rows as u128).div_ceil(all.max(1) as u128) as u64
}

impl BatchMeasurement {
    /// At least that of another step of as many rows; else that of the later one.
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

    /// What a step needs that begins with these bytes.
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

impl PoolState {
    /// A step begins; `false` if one runs already.
    fn begin_batch(&mut self, rows: usize) -> bool {
        if self.batch_memory.running.is_some() {
            return false;
        }
        self.heap.counters.begin_scoped_peaks();
        self.batch_memory.running =
            Some(RunningBatch { batch_size: rows, held_before: self.heap.counters.by_tag() });
        true
    }

    /// It ends, at its end or with an error.
    fn end_batch(&mut self, done: bool) {
        let Some(running) = self.batch_memory.running.take() else { return };
        let counters = &mut self.heap.counters;
        let Some(inner) = counters.end_scoped_peaks().filter(|_| done) else { return };
        let left = counters.by_tag();
        let total = |tags: &[u64; Tag::COUNT]| tags.iter().sum::<u64>();
        let still = total(&running.held_before).max(total(&left));
        let transient = inner.allocated.saturating_sub(still);
        let constant = BATCH_INDEPENDENT_TAGS.map(|tag| {
            let tag = tag as usize;
            inner.tags[tag].saturating_sub(running.held_before[tag].max(left[tag]))
        });
        let (idle, pieces) = match self.virtual_memory {
            Some(_) => {
                let idle = inner.reserved.saturating_sub(inner.allocated);
                (idle.min(inner.allocated / OVERHEAD_DIVISORS[0]), MIN_OVERHEAD_BYTES)
            }
            // Not by what was idle: blocks move while there is room to move them through, which there is less of at a limit.
            None => {
                (inner.allocated / OVERHEAD_DIVISORS[1], MIN_OVERHEAD_BYTES + self.config.large_segment_size)
            }
        };
        let measured = BatchMeasurement {
            batch_size: running.batch_size,
            peak: inner.allocated,
            left_by_tag: left,
            transient,
            constant: constant.iter().sum(),
            // Blocks are rounded up, however few rows they hold.
            overhead: idle + pieces + inner.blocks * self.heap.rules.unit,
        };
        self.batch_memory.measured = Some(measured.merge_earlier(self.batch_memory.measured));
    }

    /// What is known of the step that runs, at a request of so many bytes that cannot be served.
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

/// Ends a step, whatever becomes of it.
struct BatchGuard<'a> {
    pool: &'a Pool,
    succeeded: bool,
}

impl Drop for BatchGuard<'_> {
    fn drop(&mut self) {
        self.pool.shared.lock().end_batch(self.succeeded);
    }
}

impl Pool {
    /// Runs a step, forward and backward, that has so many rows of a batch on the device at once. If it runs out of memory, the
    /// error says how many would fit, by what it had reached, and better by steps before it that ran to their end:
    /// [`OutOfMemory::fitting_batch_size`](super::OutOfMemory::fitting_batch_size). A `Trainer` runs all of its steps so.
    ///
    /// Only the outermost of several counts.
    ///
    /// # Errors
    /// Those of `step`.
    ///
    /// ```
    /// use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    ///
    /// let device = Device::null(Default::default());
    /// device.pool().set_limit(Some(64 << 20));
    /// let step = |rows: usize| Tensor::zeros(&[rows, 1 << 20], DType::F32, &device)?.exp();
    /// let error = device.pool().with_batch_size(16, || step(16)).unwrap_err().into_out_of_memory()?;
    /// let fits = error.fitting_batch_size().map_or(1, |fits| fits.batch_size);
    /// assert_eq!(fits, 8);
    /// device.pool().with_batch_size(fits, || step(fits))?;
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    pub fn with_batch_size<T>(&self, rows: usize, step: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.shared.lock().begin_batch(rows.max(1)) {
            return step();
        }
        let mut ending = BatchGuard { pool: self, succeeded: false };
        let result = step();
        ending.succeeded = result.is_ok();
        result
    }

    /// What the last step of [`with_batch_size`](Self::with_batch_size) that ran to its end took.
    #[must_use]
    pub fn measured_batch(&self) -> Option<BatchMeasurement> {
        self.shared.lock().batch_memory.measured
    }

    /// The most bytes that the pool may hold now: by its limits, and by what the device has free. `None` where nothing bounds
    /// it and the driver does not tell.
    #[must_use]
    pub fn capacity(&self) -> Option<u64> {
        let state = self.shared.lock();
        let memory = self.shared.source.device_memory();
        state.capacity(memory)
    }
}
