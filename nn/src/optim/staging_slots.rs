//! Device memory reserved for offloaded optimiser states.

use smallvec::SmallVec;

use super::fused::FusedGroup;
use crate::{DType, Error, Result, Tensor};

/// Reserved device memory for the states of two groups, while the other states are on the host. The
/// reservation happens before any change, and the groups use it in turn.
#[derive(Default)]
pub(super) struct StagingSlots {
    /// `None` while a group uses the slot. Empty if states stay on the device.
    slots: SmallVec<[Option<Tensor>; 2]>,
}

impl StagingSlots {
    pub(super) fn new(groups: &[FusedGroup], away: bool) -> Result<Self> {
        if !away {
            return Ok(Self::default());
        }
        // Offloads states that are on the device, for example after loading.
        groups.iter().filter_map(|g| g.state.as_ref()).try_for_each(Tensor::offload_)?;
        let Some(device) = groups.iter().find_map(|g| g.state.as_ref()).map(Tensor::device) else {
            return Ok(Self::default());
        };
        let allocate = |_| Tensor::empty([max_state_numel(groups)], DType::F32, device).map(Some);
        Ok(Self { slots: (0..groups.len().min(2)).map(allocate).collect::<Result<_>>()? })
    }

    /// Starts the transfer of a group's state to the device.
    pub(super) fn prefetch_state(&mut self, groups: &[FusedGroup], at: usize) -> Result<()> {
        let Some(state) = groups.get(at).and_then(|g| g.state.as_ref()) else { return Ok(()) };
        let n = self.slots.len();
        if n > 0 {
            self.slots[at % n] = None;
        }
        state.prefetch_().or_else(|error| {
            if !error.is_out_of_memory() {
                return Err(error);
            }
            // Earlier groups have stepped, so the step must not fail: frees the reserved memory for this
            // state.
            self.slots.iter_mut().for_each(|slot| *slot = None);
            state.prefetch_()
        })
    }

    /// Offloads the state of a group and reserves its slot again.
    pub(super) fn offload_state(&mut self, groups: &[FusedGroup], at: usize) {
        let n = self.slots.len();
        let Some(state) = groups[at].state.as_ref().filter(|_| n > 0) else { return };
        match state.offload_() {
            Ok(()) => {
                self.slots[at % n] =
                    Tensor::empty([max_state_numel(groups)], DType::F32, state.device()).ok();
            }
            Err(error) => warn_offload_failed(&error),
        }
    }
}

/// Returns the number of elements of the largest state.
fn max_state_numel(groups: &[FusedGroup]) -> usize {
    groups.iter().filter_map(|g| g.state.as_ref()).map(Tensor::numel).max().unwrap_or(0)
}

/// Logs a warning instead of an error, because the step itself has succeeded.
pub(super) fn warn_offload_failed(error: &Error) {
    log::warn!("the state of an optimiser stays on the device: {error}");
}
