//! Micro-batching: a step that runs out of memory is retried with smaller parts of its batches.
//!
//! If the loss is a mean over rows, the gradient of a batch is the weighted sum of its parts' gradients. The
//! weights are the parts' rows, or their targets that are not ignored. The step is therefore the same, up to
//! the order of sums. Dropout draws different values.

use super::trainer::LossOutput;
use crate::{DType, Error, Result, Tensor};
use forebay_core::memory::Bytes;

/// Number of rows of a batch that run at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MicroBatching {
    /// Maximum number of rows, or `None` for all.
    pub(super) max_rows: Option<usize>,
    /// Target value that the mean ignores.
    pub(super) ignore_index: Option<i64>,
}

impl MicroBatching {
    /// Runs `loss` over the parts of a batch, and the backward pass of each part's loss after `scale`. The
    /// outputs are those of the whole batch.
    #[track_caller]
    pub(super) fn forward_backward<L: Into<LossOutput>>(
        self,
        (x, y): &(Tensor, Tensor),
        scale: impl Fn(&Tensor) -> Result<Tensor>,
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<LossOutput> {
        let rows = batch_rows(x, y).unwrap_or(0);
        let pool = x.device().pool();
        let max_rows = self.max_rows.filter(|&max| max < rows);
        let Some(max_rows) = max_rows else {
            return pool.with_batch_size(rows, || {
                let LossOutput { loss, accuracy } = loss(x, y)?.into();
                scale(&loss)?.backward()?;
                Ok(LossOutput { loss: loss.detach(), accuracy })
            });
        };
        let all = self.count_targets(y)?;
        // The parts' sizes differ by at most one row.
        let parts = rows.div_ceil(max_rows);
        let mut sum: Option<LossOutput> = None;
        let mut start = 0;
        for part in 0..parts {
            let length = (rows - start).div_ceil(parts - part);
            let (x, y) = (x.narrow(0, start, length)?, y.narrow(0, start, length)?);
            start += length;
            let share = match &all {
                Some(all) => BatchWeight::TargetFraction(
                    self.count_targets(&y)?.unwrap_or_else(|| all.clone()).div(all)?,
                ),
                None => BatchWeight::RowFraction(length as f64 / rows as f64),
            };
            // The largest part represents all in the pool's measurement.
            let LossOutput { loss, accuracy } = pool.with_batch_size(rows.div_ceil(parts), || {
                let LossOutput { loss, accuracy } = loss(&x, &y)?.into();
                scale(&share.weigh_mean(&loss)?)?.backward()?;
                Ok(LossOutput { loss: loss.detach(), accuracy })
            })?;
            let add = |sum: Option<&Tensor>, t: &Tensor| {
                let t = share.weigh_mean(&t.detach())?;
                sum.map_or(Ok(t.clone()), |s| s.add(&t))
            };
            let before = sum.as_ref();
            let accuracy = accuracy.map(|a| add(before.and_then(|s| s.accuracy.as_ref()), &a)).transpose()?;
            sum = Some(LossOutput { loss: add(before.map(|s| &s.loss), &loss)?, accuracy });
        }
        sum.ok_or_else(|| Error::argument("fit", "a batch has no rows"))
    }

    /// Counts the targets that are not ignored, on the device; returns `None` if no target is ignored.
    fn count_targets(self, y: &Tensor) -> Result<Option<Tensor>> {
        // In i32, like the classes in the loss, because not every device supports i64 arithmetic.
        let counts = |ignored: i64| {
            forebay_core::ops::cast_index_to_i32("accumulate", y, Some(ignored))?
                .ne(forebay_core::ops::ignore_index_to_i32(ignored))?
                .to_dtype(DType::F32)?
                .sum_all()
        };
        self.ignore_index.map(counts).transpose()
    }

    /// Reduces the rows after an out-of-memory error: to the number that the error says would fit, but at
    /// most half. Returns the error if fewer rows cannot help.
    pub(super) fn shrink_after_oom(&mut self, error: Error, batches: &[(Tensor, Tensor)]) -> Result<()> {
        let largest = batches
            .iter()
            .map(|(x, y)| batch_rows(x, y))
            .try_fold(0, |largest, rows| Some(largest.max(rows?)));
        let now = largest
            .map(|largest| self.max_rows.map_or(largest, |rows| rows.min(largest)))
            .filter(|&now| now > 1);
        let Some(now) = now.filter(|_| error.is_out_of_memory()) else { return Err(error) };
        let half = now.div_ceil(2);
        let report = error.into_out_of_memory()?;
        // The estimate may be too high; another failure halves the rows again.
        let rows = report.fitting_batch_size().map_or(half, |fits| fits.batch_size.min(half));
        log::warn!(
            "{} in {} asked for {} that the device does not have: the step is repeated with {rows} rows at a time \
             instead of {now}",
            if report.op.is_empty() { "a request" } else { report.op },
            if report.module.is_root() { "no module".to_owned() } else { report.module.to_string() },
            Bytes(report.requested),
        );
        self.max_rows = Some(rows);
        Ok(())
    }
}

/// Returns the number of rows of a batch, or `None` if input and target differ.
fn batch_rows(x: &Tensor, y: &Tensor) -> Option<usize> {
    let (x, y) = (x.shape().first()?, y.shape().first()?);
    (x == y).then_some(*x)
}

/// Weight of a part in the mean of its batch.
enum BatchWeight {
    RowFraction(f64),
    /// Fraction that only the device knows.
    TargetFraction(Tensor),
}

impl BatchWeight {
    fn weigh_mean(&self, mean: &Tensor) -> Result<Tensor> {
        match self {
            Self::RowFraction(share) => mean.mul(*share),
            // A part without targets has a NaN mean, which contributes 0.
            Self::TargetFraction(share) => mean.mul(share)?.masked_fill(&share.eq(0.0)?, 0.0),
        }
    }
}
