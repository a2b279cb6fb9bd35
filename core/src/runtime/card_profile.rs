//! Profile of an open device, for dry runs of it.

use crate::backend::null::{CardProfile, CardSpeed};
use crate::runtime::device::Device;

impl CardProfile {
    /// Returns the profile of an open device, whose dry runs reserve the same bytes as the device.
    #[must_use]
    pub fn from_device(device: &Device) -> Self {
        let (info, backend) = (device.info(), device.raw_backend());
        let speed = Self::from_full_name(&info.name).unwrap_or_default().speed;
        let host_bandwidth = if backend.supports_pinned_host() { speed.host_bandwidth } else { 0.0 };
        let memory = backend.device_memory();
        // Free memory plus the pool's own. Without the driver's report, the limit is unknown.
        let total = memory.free.map(|free| free + device.memory().reserved()).or(memory.total);
        Self {
            name: info.name.clone(),
            total_bytes: total.unwrap_or(1 << 44),
            overhead_bytes: 0,
            is_software: info.software,
            library: device.library_features(),
            queues: backend.queue_count(),
            source_limits: backend.limits(),
            features: info.features,
            limits: info.limits,
            config: device.pool().config(),
            speed: CardSpeed { host_bandwidth, ..speed },
        }
    }
}
