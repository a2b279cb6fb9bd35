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
use super::state::PoolState;
use crate::error::Result;

/// The part of its memory that a pool holds idle at most because it is in pieces, in virtual memory and in plain segments:
/// the rest would have gone back.
const OVERHEAD: [u64; 2] = [32, 8];
/// The smallest pieces that it takes: with fewer rows, other blocks are small.
const PIECES: u64 = 4 << 20;
/// What does not grow with the rows. (Scratch memory does or does not, by the operation.)
const CONSTANT: [Tag; 3] = [Tag::Parameter, Tag::OptimizerState, Tag::Workspace];

/// What a step of so many rows took, that ran to its end: the most that steps of the same number took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Measured {
    /// Rows that ran at once.
    pub rows: usize,
    /// The most bytes that were held, with what had been held before the step.
    pub peak: u64,
    /// Bytes that were left for each tag when it was done, in the order of [`Tag::ALL`].
    left: [u64; Tag::COUNT],
    /// Bytes at the peak beyond those that were left.
    transient: u64,
    /// Transient ones of tags that do not grow with the rows.
    constant: u64,
    /// What the pool needs beside.
    overhead: u64,
}

/// A step that runs.
#[derive(Clone, Debug)]
struct Running {
    rows: usize,
    /// Bytes held when it began.
    before: [u64; Tag::COUNT],
}

/// What a pool knows of rows.
#[derive(Clone, Debug, Default)]
pub(super) struct BatchMemory {
    running: Option<Running>,
    measured: Option<Measured>,
}

/// A step that ran out of memory, and how its need depends on the rows that run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowsNeed {
    /// Rows that ran at once.
    pub at_once: usize,
    /// Bytes that were held when the step began.
    pub before: u64,
    /// Bytes that it had come to hold, the request included: the step would have needed more.
    pub reached: u64,
    /// What is known of a step before it that ran to its end.
    pub earlier: Option<EarlierStep>,
}

/// What a step needs, by one that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EarlierStep {
    /// Rows that ran at once.
    pub rows: usize,
    /// Bytes that do not grow with the rows.
    pub fixed: u64,
    /// Bytes that do, of so many rows.
    pub growing: u64,
}

/// A number of rows, and what it would need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FittingRows {
    /// Rows that run at once.
    pub rows: usize,
    /// Bytes that they need.
    pub bytes: u64,
    /// Whether the bytes are those of an earlier step that ran to its end; else they are no more than what the step that
    /// failed had reached, and it may need more.
    pub measured: bool,
}

impl RowsNeed {
    /// What so many rows at once need, no more of them than [`at_once`](Self::at_once): by an earlier step, if one of no fewer
    /// rows is known and this step is not larger than that one was; else [`at_least`](Self::at_least).
    #[must_use]
    pub fn need(&self, rows: usize) -> FittingRows {
        let least = self.at_least(rows);
        let known = self.earlier.filter(|step| rows <= step.rows);
        let known = known.map(|step| step.fixed + part(step.growing, rows, step.rows));
        let known = known.filter(|bytes| *bytes >= least.bytes);
        known.map_or(least, |bytes| FittingRows { rows, bytes, measured: true })
    }

    /// What they need at least, by what this step had reached.
    #[must_use]
    pub fn at_least(&self, rows: usize) -> FittingRows {
        let bytes = self.before + part(self.reached, rows, self.at_once);
        FittingRows { rows, bytes, measured: false }
    }

    /// The half, the quarter, ... of the rows that did not fit.
    pub(super) fn halves(self) -> impl Iterator<Item = usize> + Clone {
        std::iter::successors(Some(self.at_once), |rows| (*rows > 1).then(|| rows.div_ceil(2))).skip(1)
    }
}

/// `rows` of `all` rows' bytes.
fn part(bytes: u64, rows: usize, all: usize) -> u64 {
    (u128::from(bytes) * rows as u128).div_ceil(all.max(1) as u128) as u64
}

impl Measured {
    /// At least that of another step of as many rows; else that of the later one.
    fn and(self, earlier: Option<Self>) -> Self {
        let Some(earlier) = earlier.filter(|e| e.rows == self.rows) else { return self };
        let mut left = self.left;
        left.iter_mut().zip(earlier.left).for_each(|(bytes, before)| *bytes = before.max(*bytes));
        Self {
            rows: self.rows,
            peak: self.peak.max(earlier.peak),
            left,
            transient: self.transient.max(earlier.transient),
            constant: self.constant.max(earlier.constant),
            overhead: self.overhead.max(earlier.overhead),
        }
    }

    /// What a step needs that begins with these bytes.
    fn from(&self, before: &[u64; Tag::COUNT], largest_parameter: u64) -> EarlierStep {
        let stays: u64 = before.iter().zip(&self.left).map(|(now, left)| now.max(left)).sum();
        let constant = (self.constant + largest_parameter).min(self.transient);
        EarlierStep {
            rows: self.rows,
            fixed: stays + constant + self.overhead,
            growing: self.transient - constant,
        }
    }
}

impl PoolState {
    /// A step begins; `false` if one runs already.
    fn begin_rows(&mut self, rows: usize) -> bool {
        if self.rows.running.is_some() {
            return false;
        }
        self.heap.counters.begin_marks();
        self.rows.running = Some(Running { rows, before: self.heap.counters.by_tag() });
        true
    }

    /// It ends, at its end or with an error.
    fn end_rows(&mut self, done: bool) {
        let Some(running) = self.rows.running.take() else { return };
        let counters = &mut self.heap.counters;
        let Some(inner) = counters.end_marks().filter(|_| done) else { return };
        let left = counters.by_tag();
        let total = |tags: &[u64; Tag::COUNT]| tags.iter().sum::<u64>();
        let still = total(&running.before).max(total(&left));
        let transient = inner.allocated.saturating_sub(still);
        let constant = CONSTANT.map(|tag| {
            let tag = tag as usize;
            inner.tags[tag].saturating_sub(running.before[tag].max(left[tag]))
        });
        let (idle, pieces) = match self.virtual_memory {
            Some(_) => {
                let idle = inner.reserved.saturating_sub(inner.allocated);
                (idle.min(inner.allocated / OVERHEAD[0]), PIECES)
            }
            // Not by what was idle: blocks move while there is room to move them through, which there is less of at a limit.
            None => (inner.allocated / OVERHEAD[1], PIECES + self.config.large_segment_size),
        };
        let measured = Measured {
            rows: running.rows,
            peak: inner.allocated,
            left,
            transient,
            constant: constant.iter().sum(),
            // Blocks are rounded up, however few rows they hold.
            overhead: idle + pieces + inner.blocks * self.heap.rules.unit,
        };
        self.rows.measured = Some(measured.and(self.rows.measured));
    }

    /// What is known of the step that runs, at a request of so many bytes that cannot be served.
    pub(super) fn rows_need(&self, bytes: u64, largest_parameter: u64) -> Option<RowsNeed> {
        let running = self.rows.running.as_ref()?;
        let before = running.before.iter().sum::<u64>();
        let held = self.heap.counters.allocated() + bytes;
        let earlier = self.rows.measured.map(|m| m.from(&running.before, largest_parameter));
        Some(RowsNeed { at_once: running.rows, before, reached: held.saturating_sub(before), earlier })
    }
}

/// Ends a step, whatever becomes of it.
struct Ending<'a> {
    pool: &'a Pool,
    done: bool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.pool.shared.lock().end_rows(self.done);
    }
}

impl Pool {
    /// Runs a step, forward and backward, that has so many rows of a batch on the device at once. If it runs out of memory, the
    /// error says how many would fit, by what it had reached, and better by steps before it that ran to their end:
    /// [`OutOfMemory::fitting_rows`](super::OutOfMemory::fitting_rows). A [`Trainer`](crate::train::Trainer) runs all of its steps so.
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
    /// let error = device.pool().with_rows(16, || step(16)).unwrap_err().into_out_of_memory()?;
    /// let fits = error.fitting_rows().map_or(1, |fits| fits.rows);
    /// assert_eq!(fits, 8);
    /// device.pool().with_rows(fits, || step(fits))?;
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    pub fn with_batch_size<T>(&self, rows: usize, step: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.shared.lock().begin_rows(rows.max(1)) {
            return step();
        }
        let mut ending = Ending { pool: self, done: false };
        let result = step();
        ending.done = result.is_ok();
        result
    }

    /// What the last step of [`with_rows`](Self::with_rows) that ran to its end took.
    #[must_use]
    pub fn measured_rows(&self) -> Option<Measured> {
        self.shared.lock().rows.measured
    }

    /// The most bytes that the pool may hold now: by its limits, and by what the device has free. `None` where nothing bounds
    /// it and the driver does not tell.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        let state = self.shared.lock();
        let memory = self.shared.source.device_memory();
        state.room(memory)
    }
}
