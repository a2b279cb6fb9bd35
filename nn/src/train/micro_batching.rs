//! A step that runs out of memory is made again, of smaller parts of its batches.
//!
//! The gradients of a batch whose loss is a mean over its rows are those of its parts, each weighted by its rows (or by
//! its targets that are not ignored): so a step of parts is the same step, up to the order of sums. (Dropout draws other
//! numbers for other parts.)

use super::trainer::LossOutput;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::memory::Bytes;
use forebay_core::tensor::Tensor;

/// How many rows of a batch run at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MicroBatching {
    /// `None`: all of them.
    max_rows: Option<usize>,
    /// Targets that the mean leaves out.
    ignore_index: Option<i64>,
}

impl MicroBatching {
    /// At most so many; 0 is all.
    pub(super) fn with_max_rows(self, rows: usize) -> Self {
        Self { max_rows: (rows > 0).then_some(rows), ..self }
    }

    /// The loss is a mean over the targets that are not this.
    pub(super) fn with_ignore_index(self, target: i64) -> Self {
        Self { ignore_index: Some(target), ..self }
    }

    /// Rows at once, if they are bounded.
    pub(super) fn max_rows(self) -> Option<usize> {
        self.max_rows
    }

    /// Runs `loss` over the parts of a batch, and the backward pass of what `scale` makes of each part's loss. The outcome
    /// is that of the whole batch.
    pub(super) fn forward_backward<L: Into<LossOutput>>(
        self,
        (x, y): &(Tensor, Tensor),
        scale: impl Fn(&Tensor) -> Result<Tensor>,
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<LossOutput> {
        let rows = batch_rows(x, y).unwrap_or(0);
        let pool = x.device().pool();
        let most = self.max_rows.filter(|&most| most < rows);
        let Some(most) = most else {
            return pool.with_batch_size(rows, || {
                let LossOutput { loss, accuracy } = loss(x, y)?.into();
                scale(&loss)?.backward()?;
                Ok(LossOutput { loss: loss.detach(), accuracy })
            });
        };
        let all = self.count_targets(y)?;
        // Parts of equal size, or nearly.
        let parts = rows.div_ceil(most);
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
            // The largest of them stands for all: they differ by one row at most.
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

    /// How many targets count, on the device; `None` if all do.
    fn count_targets(self, y: &Tensor) -> Result<Option<Tensor>> {
        // In i32, as the loss sees classes: not every device computes in i64.
        let counts = |ignored: i64| {
            forebay_core::ops::cast_index_to_i32("accumulate", y, Some(ignored))?
                .ne(forebay_core::ops::ignore_index_to_i32(ignored))?
                .to_dtype(DType::F32)?
                .sum_all()
        };
        self.ignore_index.map(counts).transpose()
    }

    /// After `error`: as many rows as it says would fit, but no more than half, if fewer rows could help; else the error.
    pub(super) fn shrink_after_oom(&mut self, error: Error, batches: &[(Tensor, Tensor)]) -> Result<()> {
        let most =
            batches.iter().map(|(x, y)| batch_rows(x, y)).try_fold(0, |most, rows| Some(most.max(rows?)));
        let now = most.map(|most| self.max_rows.map_or(most, |rows| rows.min(most))).filter(|&now| now > 1);
        let Some(now) = now.filter(|_| error.is_out_of_memory()) else { return Err(error) };
        let half = now.div_ceil(2);
        let report = error.into_out_of_memory()?;
        // An estimate may be wrong, and the step run out again: then it is halved again.
        let rows = report.fitting_batch_size().map_or(half, |fits| fits.batch_size.min(half));
        log::warn!(
            "{} in {} asked for {} that the device does not have: the step is made again, of {rows} rows at a time \
             instead of {now}",
            if report.op.is_empty() { "a request" } else { report.op },
            if report.module.is_root() { "no module".to_owned() } else { report.module.to_string() },
            Bytes(report.requested),
        );
        self.max_rows = Some(rows);
        Ok(())
    }
}

/// The rows of a batch; `None` where input and target do not share them.
fn batch_rows(x: &Tensor, y: &Tensor) -> Option<usize> {
    let (x, y) = (x.shape().first()?, y.shape().first()?);
    (x == y).then_some(*x)
}

/// The part of a batch's mean that a part of the batch is.
enum BatchWeight {
    RowFraction(f64),
    /// Known to the device alone.
    TargetFraction(Tensor),
}

impl BatchWeight {
    fn weigh_mean(&self, mean: &Tensor) -> Result<Tensor> {
        match self {
            Self::RowFraction(share) => mean.mul(*share),
            // The mean of nothing is NaN, and counts nothing.
            Self::TargetFraction(share) => mean.mul(share)?.masked_fill(&share.eq(0.0)?, 0.0),
        }
    }
}
