//! Captured training steps: runs the first eagerly, records the second, and replays later ones of its shapes.

use super::trainer::LossOutput;
use crate::{Device, Error, Result, Tensor};
use forebay_core::capture::{CaptureOutputs, CapturedStep};

/// State that determines how the next step runs.
#[derive(Debug, Default)]
pub(super) enum StepCapture {
    /// Every step runs eagerly.
    #[default]
    Disabled,
    /// No step has run yet.
    Requested,
    /// Gradients and the optimiser's state are allocated; the next step is recorded.
    WarmedUp,
    Active(Box<CapturedStep<Vec<LossOutput>>>),
    /// The last step succeeded, but cannot be captured.
    Failed(Error),
}

impl CaptureOutputs for LossOutput {
    fn detach_all(&self) -> Self {
        Self { loss: self.loss.detach(), accuracy: self.accuracy.detach_all() }
    }

    fn tensors(&self) -> Option<Vec<Tensor>> {
        Some([self.loss.tensors()?, self.accuracy.tensors()?].concat())
    }
}

impl LossOutput {
    /// Copies another output's values.
    fn copy_from(&self, other: &Self) -> Result<()> {
        self.loss.copy_(&other.loss)?;
        match (&self.accuracy, &other.accuracy) {
            (Some(own), Some(other)) => own.copy_(other).map(drop),
            _ => Ok(()),
        }
    }
}

impl StepCapture {
    /// Discards the captured step; the following steps differ from the earlier ones.
    pub(super) fn restart(&mut self) {
        if !matches!(self, Self::Disabled) {
            *self = Self::Requested;
        }
    }

    /// Disables capture after running out of memory. Reports whether this frees memory for a retry.
    pub(super) fn release_memory(&mut self) -> bool {
        let held_memory = matches!(self, Self::Active(_) | Self::WarmedUp);
        if held_memory {
            log::warn!("memory ran out while a captured step held memory; steps run eagerly from now on");
            *self = Self::Disabled;
        }
        held_memory
    }

    /// Runs a step on its batches; `make` runs an eager one. After an error, no step has been made.
    pub(super) fn run_step(
        &mut self,
        device: &Device,
        batches: &[(Tensor, Tensor)],
        mut make: impl FnMut(&[(Tensor, Tensor)]) -> Result<Vec<LossOutput>>,
    ) -> Result<Vec<LossOutput>> {
        if matches!(self, Self::Failed(_))
            && let Self::Failed(error) = std::mem::replace(self, Self::Requested)
        {
            return Err(error);
        }
        let inputs: Vec<&Tensor> = batches.iter().flat_map(|(x, y)| [x, y]).collect();
        match self {
            Self::Active(step) if step.accepts_inputs(&inputs) => {
                // Allocates first, because running out of memory after the replay would lose the step.
                let outputs = copy_outputs(&step.outputs())?;
                let outcomes = step.run(&inputs)?;
                outcomes.iter().zip(&outputs).try_for_each(|(new, copy)| copy.copy_from(new))?;
                Ok(outputs)
            }
            Self::WarmedUp => {
                let (outcomes, step) = CapturedStep::record_on_copies(device, &inputs, |t| {
                    let pairs: Vec<_> = t.chunks_exact(2).map(|t| (t[0].clone(), t[1].clone())).collect();
                    make(&pairs)
                })?;
                let (outcomes, next) = match step.and_then(|step| Ok((copy_outputs(&outcomes)?, step))) {
                    Ok((kept, step)) => (kept, Self::Active(Box::new(step))),
                    Err(error) if error.is_out_of_memory() => {
                        log::warn!("a captured step does not fit, steps run eagerly: {error}");
                        (outcomes, Self::Disabled)
                    }
                    // The step itself succeeded; the next call returns the error.
                    Err(error) => (outcomes, Self::Failed(error)),
                };
                *self = next;
                Ok(outcomes)
            }
            _ => {
                let outcomes = make(batches)?;
                if matches!(self, Self::Requested) {
                    *self = Self::WarmedUp;
                }
                Ok(outcomes)
            }
        }
    }
}

/// Copies the outputs, which the next replay would overwrite.
fn copy_outputs(outcomes: &[LossOutput]) -> Result<Vec<LossOutput>> {
    let copy = |outcome: &LossOutput| {
        Ok(LossOutput {
            loss: outcome.loss.copy()?,
            accuracy: outcome.accuracy.as_ref().map(Tensor::copy).transpose()?,
        })
    };
    outcomes.iter().map(copy).collect()
}
