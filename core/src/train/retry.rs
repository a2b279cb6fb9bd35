//! A step that runs out of memory is made again, of smaller parts of its batches.
//!
//! The gradients of a batch whose loss is a mean over its rows are those of its parts, each weighted by its rows (or by
//! its targets that are not ignored): so a step of parts is the same step, up to the order of sums. (Dropout draws other
//! numbers for other parts.)

use super::trainer::Outcome;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Bytes;
use crate::tensor::Tensor;

/// How many rows of a batch run at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MicroBatch {
    /// `None`: all of them.
    rows: Option<usize>,
    /// Targets that the mean leaves out.
    ignored: Option<i64>,
}

impl MicroBatch {
    /// At most so many; 0 is all.
    pub(super) fn at_most(self, rows: usize) -> Self {
        Self { rows: (rows > 0).then_some(rows), ..self }
    }

    /// The loss is a mean over the targets that are not this.
    pub(super) fn ignore(self, target: i64) -> Self {
        Self { ignored: Some(target), ..self }
    }

    /// Rows at once, if they are bounded.
    pub(super) fn rows(self) -> Option<usize> {
        self.rows
    }

    /// Runs `loss` over the parts of a batch, and the backward pass of what `scale` makes of each part's loss. The outcome
    /// is that of the whole batch.
    pub(super) fn run<L: Into<Outcome>>(
        self,
        (x, y): &(Tensor, Tensor),
        scale: impl Fn(&Tensor) -> Result<Tensor>,
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<Outcome> {
        let rows = rows(x, y).unwrap_or(0);
        let pool = x.device().pool();
        let most = self.rows.filter(|&most| most < rows);
        let Some(most) = most else {
            return pool.with_batch_size(rows, || {
                let Outcome { loss, accuracy } = loss(x, y)?.into();
                scale(&loss)?.backward()?;
                Ok(Outcome { loss: loss.detach(), accuracy })
            });
        };
        let all = self.counted(y)?;
        // Parts of equal size, or nearly.
        let parts = rows.div_ceil(most);
        let mut sum: Option<Outcome> = None;
        let mut start = 0;
        for part in 0..parts {
            let length = (rows - start).div_ceil(parts - part);
            let (x, y) = (x.narrow(0, start, length)?, y.narrow(0, start, length)?);
            start += length;
            let share = match &all {
                Some(all) => Share::Counted(self.counted(&y)?.unwrap_or_else(|| all.clone()).div(all)?),
                None => Share::Rows(length as f64 / rows as f64),
            };
            // The largest of them stands for all: they differ by one row at most.
            let Outcome { loss, accuracy } = pool.with_batch_size(rows.div_ceil(parts), || {
                let Outcome { loss, accuracy } = loss(&x, &y)?.into();
                scale(&share.of(&loss)?)?.backward()?;
                Ok(Outcome { loss: loss.detach(), accuracy })
            })?;
            let add = |sum: Option<&Tensor>, t: &Tensor| {
                let t = share.of(&t.detach())?;
                sum.map_or(Ok(t.clone()), |s| s.add(&t))
            };
            let before = sum.as_ref();
            let accuracy = accuracy.map(|a| add(before.and_then(|s| s.accuracy.as_ref()), &a)).transpose()?;
            sum = Some(Outcome { loss: add(before.map(|s| &s.loss), &loss)?, accuracy });
        }
        sum.ok_or_else(|| Error::argument("fit", "a batch has no rows"))
    }

    /// How many targets count, on the device; `None` if all do.
    fn counted(self, y: &Tensor) -> Result<Option<Tensor>> {
        // In i32, as the loss sees classes: not every device computes in i64.
        let counts = |ignored: i64| {
            crate::ops::cast_index_to_i32("accumulate", y, Some(ignored))?
                .ne(crate::ops::ignore_index_to_i32(ignored))?
                .to_dtype(DType::F32)?
                .sum_all()
        };
        self.ignored.map(counts).transpose()
    }

    /// After `error`: as many rows as it says would fit, but no more than half, if fewer rows could help; else the error.
    pub(super) fn halve(&mut self, error: Error, batches: &[(Tensor, Tensor)]) -> Result<()> {
        let most = batches.iter().map(|(x, y)| rows(x, y)).try_fold(0, |most, rows| Some(most.max(rows?)));
        let now = most.map(|most| self.rows.map_or(most, |rows| rows.min(most))).filter(|&now| now > 1);
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
        self.rows = Some(rows);
        Ok(())
    }
}

/// The rows of a batch; `None` where input and target do not share them.
fn rows(x: &Tensor, y: &Tensor) -> Option<usize> {
    let (x, y) = (x.shape().first()?, y.shape().first()?);
    (x == y).then_some(*x)
}

/// The part of a batch's mean that a part of the batch is.
enum Share {
    Rows(f64),
    /// Known to the device alone.
    Counted(Tensor),
}

impl Share {
    fn of(&self, mean: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rows(share) => mean.mul(*share),
            // The mean of nothing is NaN, and counts nothing.
            Self::Counted(share) => mean.mul(share)?.masked_fill(&share.eq(0.0)?, 0.0),
        }
    }
}
