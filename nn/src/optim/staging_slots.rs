//! Device memory reserved for offloaded optimiser states.

use smallvec::SmallVec;

use super::fused::FusedGroup;
use crate::{DType, Device, Error, Result, Tensor};

/// Reserved memory on each device for the states of two groups, while the other states are on the host. The
/// reservation happens before any change, and the groups of a device use it in turn.
#[derive(Default)]
pub(super) struct StagingSlots {
    /// Slots of the devices; empty if states stay on the devices.
    devices: SmallVec<[DeviceSlots; 1]>,
}

/// Slots of one device.
struct DeviceSlots {
    device: Device,
    /// Number of elements of the largest state.
    numel: usize,
    /// Slots that no group uses.
    free: SmallVec<[Tensor; 2]>,
}

impl DeviceSlots {
    fn new(device: &Device, groups: &[FusedGroup]) -> Result<Self> {
        let states = groups.iter().filter_map(|g| g.state.as_ref()).filter(|state| state.device() == device);
        let numel = states.clone().map(Tensor::numel).max().unwrap_or(0);
        let free =
            states.take(2).map(|_| Tensor::empty([numel], DType::F32, device)).collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), numel, free })
    }
}

impl StagingSlots {
    pub(super) fn new(groups: &[FusedGroup], away: bool) -> Result<Self> {
        if !away {
            return Ok(Self::default());
        }
        // Offloads states that are on the device, for example after loading.
        groups.iter().filter_map(|g| g.state.as_ref()).try_for_each(Tensor::offload_)?;
        let mut all = Self::default();
        for state in groups.iter().filter_map(|g| g.state.as_ref()) {
            if !all.devices.iter().any(|slots| slots.device == *state.device()) {
                all.devices.push(DeviceSlots::new(state.device(), groups)?);
            }
        }
        Ok(all)
    }

    /// Returns the slots of a state's device.
    fn device_slots_mut(&mut self, state: &Tensor) -> Option<&mut DeviceSlots> {
        self.devices.iter_mut().find(|slots| slots.device == *state.device())
    }

    /// Starts the transfer of a group's state to the device, in place of a slot. Called once for each group.
    pub(super) fn prefetch_state(&mut self, groups: &[FusedGroup], at: usize) -> Result<()> {
        let Some(state) = groups.get(at).and_then(|g| g.state.as_ref()) else { return Ok(()) };
        if let Some(slots) = self.device_slots_mut(state).filter(|slots| !slots.free.is_empty()) {
            slots.free.remove(0);
        }
        state.prefetch_().or_else(|error| {
            if !error.is_out_of_memory() {
                return Err(error);
            }
            // Earlier groups have stepped, so the step must not fail: frees the reserved memory for this
            // state.
            if let Some(slots) = self.device_slots_mut(state) {
                slots.free.clear();
            }
            state.prefetch_()
        })
    }

    /// Offloads the state of a group and reserves its slot again.
    pub(super) fn offload_state(&mut self, groups: &[FusedGroup], at: usize) {
        let Some(state) = groups[at].state.as_ref() else { return };
        let Some(slots) = self.device_slots_mut(state) else { return };
        if let Err(error) = state.offload_() {
            return warn_offload_failed(&error);
        }
        slots.free.extend(Tensor::empty([slots.numel], DType::F32, state.device()).ok());
    }
}

/// Logs a warning instead of an error, because the step itself has succeeded.
pub(super) fn warn_offload_failed(error: &Error) {
    log::warn!("the state of an optimiser stays on the device: {error}");
}
