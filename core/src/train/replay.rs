//! Steps of a training loop that are captured: the first is made eagerly, the second is recorded, the others of its shapes are
//! replayed.

use super::trainer::Outcome;
use crate::capture::{Captured, Outputs};
use crate::error::{Error, Result};
use crate::runtime::device::Device;
use crate::tensor::Tensor;

/// What becomes of the next step.
#[derive(Debug, Default)]
pub(super) enum Replay {
    /// Every step is made eagerly.
    #[default]
    Off,
    /// Nothing was made yet.
    Asked,
    /// Gradients and the optimiser's state are there: the next step is recorded.
    Ready,
    Captured(Box<Captured<Vec<Outcome>>>),
    /// The last step was made, and cannot be captured.
    Failed(Error),
}

impl Outputs for Outcome {
    fn detached(&self) -> Self {
        Self { loss: self.loss.detach(), accuracy: self.accuracy.detached() }
    }

    fn tensors(&self) -> Option<Vec<Tensor>> {
        Some([self.loss.tensors()?, self.accuracy.tensors()?].concat())
    }
}

impl Outcome {
    /// Copies another one's numbers.
    fn take(&self, other: &Self) -> Result<()> {
        self.loss.copy_(&other.loss)?;
        match (&self.accuracy, &other.accuracy) {
            (Some(own), Some(other)) => own.copy_(other).map(drop),
            _ => Ok(()),
        }
    }
}

impl Replay {
    /// Captures anew: the steps to come are other ones than those before.
    pub(super) fn restart(&mut self) {
        if !matches!(self, Self::Off) {
            *self = Self::Asked;
        }
    }

    /// Whether memory may be enough without a captured step beside eager ones: then there is none any more.
    pub(super) fn gives_way(&mut self) -> bool {
        let held = matches!(self, Self::Captured(_) | Self::Ready);
        if held {
            log::warn!("memory ran out beside a captured step: steps are made eagerly");
            *self = Self::Off;
        }
        held
    }

    /// Makes a step on its batches. `make` is the eager one. An error means that none was made.
    pub(super) fn step(
        &mut self,
        device: &Device,
        batches: &[(Tensor, Tensor)],
        mut make: impl FnMut(&[(Tensor, Tensor)]) -> Result<Vec<Outcome>>,
    ) -> Result<Vec<Outcome>> {
        let inputs: Vec<&Tensor> = batches.iter().flat_map(|(x, y)| [x, y]).collect();
        match self {
            Self::Captured(step) if step.takes(&inputs) => {
                // Memory first: behind the step nothing may run out of it.
                let kept = copies(&step.outputs())?;
                let outcomes = step.run(&inputs)?;
                outcomes.iter().zip(&kept).try_for_each(|(new, kept)| kept.take(new))?;
                Ok(kept)
            }
            Self::Ready => {
                let (outcomes, step) = Captured::record(device, &inputs, |t| {
                    let pairs: Vec<_> = t.chunks_exact(2).map(|t| (t[0].clone(), t[1].clone())).collect();
                    make(&pairs)
                })?;
                let (outcomes, next) = match step.and_then(|step| Ok((copies(&outcomes)?, step))) {
                    Ok((kept, step)) => (kept, Self::Captured(Box::new(step))),
                    Err(error) if error.is_out_of_memory() => {
                        log::warn!("a captured step does not fit, steps are made eagerly: {error}");
                        (outcomes, Self::Off)
                    }
                    // The step counts; the next one tells.
                    Err(error) => (outcomes, Self::Failed(error)),
                };
                *self = next;
                Ok(outcomes)
            }
            Self::Failed(_) => match std::mem::replace(self, Self::Asked) {
                Self::Failed(error) => Err(error),
                _ => Ok(Vec::new()),
            },
            _ => {
                let outcomes = make(batches)?;
                if matches!(self, Self::Asked) {
                    *self = Self::Ready;
                }
                Ok(outcomes)
            }
        }
    }
}

/// What the next replay does not overwrite.
fn copies(outcomes: &[Outcome]) -> Result<Vec<Outcome>> {
    let copy = |outcome: &Outcome| {
        Ok(Outcome {
            loss: outcome.loss.copy()?,
            accuracy: outcome.accuracy.as_ref().map(Tensor::copy).transpose()?,
        })
    };
    outcomes.iter().map(copy).collect()
}
