//! Steps of a training loop that are captured: the first is made eagerly, the second is recorded, the others of its shapes are
//! replayed.

use super::trainer::Outcome;
use crate::capture::{Captured, Outputs};
use crate::device::Device;
use crate::error::Result;
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
}

impl Outputs for Outcome {
    fn detached(&self) -> Self {
        Self { loss: self.loss.detach(), accuracy: self.accuracy.detached() }
    }
}

impl Replay {
    /// Captures anew: the steps to come are other ones than those before.
    pub(super) fn restart(&mut self) {
        if !matches!(self, Self::Off) {
            *self = Self::Asked;
        }
    }

    /// Makes a step on its batches. `make` is the eager one.
    pub(super) fn step(
        &mut self,
        device: &Device,
        batches: &[(Tensor, Tensor)],
        mut make: impl FnMut(&[(Tensor, Tensor)]) -> Result<Vec<Outcome>>,
    ) -> Result<Vec<Outcome>> {
        let inputs: Vec<&Tensor> = batches.iter().flat_map(|(x, y)| [x, y]).collect();
        match self {
            Self::Captured(step) if step.takes(&inputs) => copies(&step.run(&inputs)?),
            Self::Ready => {
                let (outcomes, step) = Captured::record(device, &inputs, |t| {
                    let pairs: Vec<_> = t.chunks_exact(2).map(|t| (t[0].clone(), t[1].clone())).collect();
                    make(&pairs)
                })?;
                let outcomes = copies(&outcomes)?;
                *self = match step {
                    Ok(step) => Self::Captured(Box::new(step)),
                    Err(error) if error.is_out_of_memory() => {
                        log::warn!("a captured step does not fit, steps are made eagerly: {error}");
                        Self::Off
                    }
                    Err(error) => return Err(error),
                };
                Ok(outcomes)
            }
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
