//! Memory on the device for the states of two groups, while the states of the others are on the host.

use smallvec::SmallVec;

use super::fused::FusedGroup;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

/// Room on the device for the states of two groups, while those of the others are on the host: taken before anything
/// changes, and lent to one group after the other.
#[derive(Default)]
pub(super) struct StagingSlots {
    /// `None` while a group has it. Empty where states stay on the device.
    slots: SmallVec<[Option<Tensor>; 2]>,
}

impl StagingSlots {
    pub(super) fn new(groups: &[FusedGroup], away: bool) -> Result<Self> {
        if !away {
            return Ok(Self::default());
        }
        // What is on the device, as after loading, leaves first.
        groups.iter().filter_map(|g| g.state.as_ref()).try_for_each(Tensor::offload_)?;
        let Some(device) = groups.iter().find_map(|g| g.state.as_ref()).map(Tensor::device) else {
            return Ok(Self::default());
        };
        let place = |_| Tensor::empty(&[max_state_numel(groups)], DType::F32, device).map(Some);
        Ok(Self { slots: (0..groups.len().min(2)).map(place).collect::<Result<_>>()? })
    }

    /// Starts to bring a group's state over.
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
            // Groups before this one have made their step: what is held for others is for it.
            self.slots.iter_mut().for_each(|place| *place = None);
            state.prefetch_()
        })
    }

    /// Sends it back.
    pub(super) fn offload_state(&mut self, groups: &[FusedGroup], at: usize) {
        let n = self.slots.len();
        let Some(state) = groups[at].state.as_ref().filter(|_| n > 0) else { return };
        match state.offload_() {
            Ok(()) => {
                self.slots[at % n] =
                    Tensor::empty(&[max_state_numel(groups)], DType::F32, state.device()).ok();
            }
            Err(error) => warn_offload_failed(&error),
        }
    }
}

/// Elements of the largest state.
fn max_state_numel(groups: &[FusedGroup]) -> usize {
    groups.iter().filter_map(|g| g.state.as_ref()).map(Tensor::numel).max().unwrap_or(0)
}

/// The step was made, so this is no error of it.
pub(super) fn warn_offload_failed(error: &Error) {
    log::warn!("the state of an optimiser stays on the device: {error}");
}
