//! Device memory reserved for offloaded optimiser states.

use smallvec::SmallVec;

use super::fused::FusedGroup;
use crate::{DType, Device, Error, Result, Tensor};

/// Bounds of [`max_group_numel`]: transfers of 256 KiB cost more than their start, and 32 MiB gain nothing.
const MIN_GROUP_NUMEL: usize = (256 << 10) / 4;
const MAX_GROUP_NUMEL: usize = (32 << 20) / 4;

/// Returns the elements of the offloaded states of one group, of `total` elements of all states. A larger
/// state of a single parameter is a group of its own.
pub(super) fn max_group_numel(total: usize) -> usize {
    (total / 16).clamp(MIN_GROUP_NUMEL, MAX_GROUP_NUMEL)
}

/// Reserved memory on each device for the states of the group that steps, and of the next one if both fit.
/// The reservation happens before any change.
#[derive(Default)]
pub(super) struct StateStaging {
    /// Memory of the devices; empty if states stay on the devices.
    devices: SmallVec<[DeviceStaging; 1]>,
    /// Number of groups whose states have been brought to the device.
    brought: usize,
}

/// Memory of one device, in elements.
struct DeviceStaging {
    device: Device,
    /// Elements that states take at once: those of the largest group, or of two groups of usual size.
    capacity: usize,
    /// Elements of the states on the device.
    used: usize,
    /// Memory of the others.
    reserved: Option<Tensor>,
}

impl DeviceStaging {
    fn new(device: &Device, groups: &[FusedGroup]) -> Result<Self> {
        let states = || groups.iter().filter_map(|g| g.state.as_ref());
        let own = || states().filter(move |state| state.device() == device).map(Tensor::numel);
        let two_groups = (2 * max_group_numel(states().map(Tensor::numel).sum())).min(own().sum());
        let mut staging = Self {
            device: device.clone(),
            capacity: own().max().unwrap_or(0).max(two_groups),
            used: 0,
            reserved: None,
        };
        staging.reserve()?;
        Ok(staging)
    }

    /// Reserves the memory that no state uses.
    fn reserve(&mut self) -> Result<()> {
        self.reserved = None;
        let rest = self.capacity.saturating_sub(self.used);
        self.reserved = (rest > 0).then(|| Tensor::empty([rest], DType::F32, &self.device)).transpose()?;
        Ok(())
    }

    fn bring(&mut self, state: &Tensor) -> Result<()> {
        self.reserved = None;
        state.prefetch_()?;
        self.used += state.numel();
        // Without the reservation, the next state may have to wait for memory of other threads.
        self.reserve().or_else(|error| if error.is_out_of_memory() { Ok(()) } else { Err(error) })
    }
}

impl StateStaging {
    pub(super) fn new(groups: &[FusedGroup], away: bool) -> Result<Self> {
        if !away {
            return Ok(Self::default());
        }
        // Offloads states that are on the device, for example after loading.
        groups.iter().filter_map(|g| g.state.as_ref()).try_for_each(Tensor::offload_)?;
        let mut all = Self::default();
        for state in groups.iter().filter_map(|g| g.state.as_ref()) {
            if !all.devices.iter().any(|staging| staging.device == *state.device()) {
                all.devices.push(DeviceStaging::new(state.device(), groups)?);
            }
        }
        Ok(all)
    }

    /// Starts the transfers of the states of group `at`, and of the next group if both fit.
    pub(super) fn bring_states(&mut self, groups: &[FusedGroup], at: usize) -> Result<()> {
        for (next, group) in groups.iter().enumerate().take(at + 2).skip(self.brought) {
            if let Some(state) = &group.state
                && let Some(staging) = self.devices.iter_mut().find(|own| own.device == *state.device())
            {
                if next > at && staging.used + state.numel() > staging.capacity {
                    break;
                }
                match staging.bring(state) {
                    // The state comes when its group steps, into the memory that is reserved again.
                    Err(error) if next > at && error.is_out_of_memory() => {
                        let _ = staging.reserve();
                        break;
                    }
                    result => result?,
                }
            }
            self.brought = next + 1;
        }
        Ok(())
    }

    /// Offloads the state of a group that has stepped, and reserves its memory again.
    pub(super) fn offload_state(&mut self, groups: &[FusedGroup], at: usize) {
        let Some(state) = groups[at].state.as_ref() else { return };
        let Some(staging) = self.devices.iter_mut().find(|own| own.device == *state.device()) else { return };
        if let Err(error) = state.offload_() {
            return warn_offload_failed(&error);
        }
        staging.used -= state.numel();
        // The next state takes other memory if the reservation fails.
        let _ = staging.reserve();
    }
}

/// Logs a warning instead of an error, because the step itself has succeeded.
pub(super) fn warn_offload_failed(error: &Error) {
    log::warn!("the state of an optimiser stays on the device: {error}");
}
