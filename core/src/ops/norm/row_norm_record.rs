//! Recorded normalisation of rows, from which operations that use the result compute it again.
//!
//! Under autocast, a product reads the f32 result of a norm in 16 bits. In a captured step, the norm's kernel writes
//! the 16-bit result from the input once more, instead of a cast of the f32 result. If nothing else reads the f32
//! result, the plan of the step drops the first kernel. Eager steps cast, because they cannot take the first kernel
//! back.

use std::sync::Mutex;

use crate::autograd::{self, ResultSource, TensorState};
use crate::ops::norm::layer_norm::{Modulation, RowNorm, SavedRows};
use crate::ops::norm::recorded_sum::RecordedSum;
use crate::ops::prelude::*;
use crate::sync::LockUnpoisoned;

/// Normalisation of rows, with what its backward function keeps.
pub(super) struct RowNormRecord {
    pub(super) norm: RowNorm,
    pub(super) x: SavedRows,
    statistics: Mutex<Tensor>,
    /// States of the result, of x, and of weight and bias.
    output: TensorState,
    x_state: Option<TensorState>,
    parameters: SmallVec<[TensorState; 2]>,
}

impl RowNormRecord {
    pub(super) fn new(norm: RowNorm, x: SavedRows, statistics: Tensor, out: &Tensor) -> Self {
        let parameters = [&norm.weight, &norm.bias].into_iter().flatten().map(TensorState::new).collect();
        let x_state = match &x {
            SavedRows::Input(x) => Some(TensorState::new(x)),
            SavedRows::BranchAndResidual(..) => None,
        };
        let (statistics, output) = (Mutex::new(statistics), TensorState::new(out));
        Self { statistics, output, x_state, parameters, norm, x }
    }

    /// Returns the statistics of the newest kernel that normalised the rows. All have the same values.
    pub(super) fn statistics(&self) -> Tensor {
        self.statistics.lock_unpoisoned().clone()
    }

    /// Normalises the input `x` again, in a captured step, with the result in `dtype`. The statistics replace the
    /// earlier ones, so that nothing needs the earlier kernel for them.
    pub(super) fn normalize_again(
        &self,
        x: &Tensor,
        modulation: Option<Modulation<'_>>,
        dtype: DType,
    ) -> Result<Tensor> {
        // The recomputation of a checkpoint reads the segment's inputs. The terms of an input are outside of it.
        let terms = if autograd::is_inside_recompute() { None } else { RecordedSum::take_terms(x) };
        let (out, statistics) = match terms {
            None => self.norm.forward(x, None, modulation, dtype)?,
            Some([branch, residual]) => {
                let version = x.version();
                let results = self.norm.forward(&branch, Some((&residual, x)), modulation, dtype)?;
                x.storage().restore_version(version);
                x.device().capture_recorder().mark_overwritten(x.storage());
                results
            }
        };
        let replaced = std::mem::replace(&mut *self.statistics.lock_unpoisoned(), statistics);
        drop(replaced);
        Ok(out)
    }

    /// Returns the input, if `t` is the result, and neither has changed. A norm that adds two tensors keeps the terms
    /// and returns `None`.
    pub(super) fn find_input(&self, t: &Tensor) -> Option<&Tensor> {
        self.output.is_state_of(t).then(|| self.find_unchanged_input()).flatten()
    }

    /// Returns the input, if it has not changed, and neither have weight and bias.
    pub(super) fn find_unchanged_input(&self) -> Option<&Tensor> {
        let SavedRows::Input(x) = &self.x else { return None };
        let mut parameters = [&self.norm.weight, &self.norm.bias].into_iter().flatten().zip(&self.parameters);
        let is_unchanged = self.x_state.as_ref()?.is_state_of(x) && parameters.all(|(t, s)| s.is_state_of(t));
        is_unchanged.then_some(x)
    }
}

/// Reports whether a captured step should compute `result` again, in 16 bits, instead of casting it.
pub(super) fn replaces_cast(result: &Tensor, dtype: DType) -> bool {
    let recorder = result.device().capture_recorder();
    dtype.size() == 2
        && result.dtype() == DType::F32
        && result.numel() > 0
        && recorder.is_recording_here()
        // A result from before the capture is a constant of the step, although its input may change.
        && recorder.is_changed_by_replays(result.storage())
}

impl ResultSource for RowNormRecord {
    fn compute_as(&self, result: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
        let Some(x) = self.find_input(result).filter(|_| replaces_cast(result, dtype)) else {
            return Ok(None);
        };
        operation!(self.norm.op);
        self.normalize_again(x, None, dtype).map(Some)
    }
}
