//! Devices that a program opens for itself, with everything that Forebay's kernels use.

use forebay_core::error::{Error, Result};
use forebay_core::fail_if;

use crate::adapter::{self, AdapterCandidate};
use crate::gpu::to_single_line;

/// Describes a device for a program that calls [`wgpu::Adapter::request_device`] itself, or whose window does. The
/// features are those of the adapter that Forebay's kernels use, and the limits are the adapter's.
///
/// A shared device of this description has all element types, and is as fast as a device that Forebay opens, with one
/// exception. wgpu calls matrix units experimental, and they need [`request_wgpu_device`].
///
/// Change the description as the program needs: add features, or choose other memory hints.
///
/// ```no_run
/// # async fn open(adapter: forebay_wgpu::wgpu::Adapter) -> Result<(), Box<dyn std::error::Error>> {
/// use forebay_core::device::Device;
/// use forebay_wgpu::{WgpuDeviceExt, wgpu, wgpu_device_descriptor};
///
/// let mut descriptor = wgpu_device_descriptor(&adapter);
/// descriptor.label = Some("window");
/// descriptor.required_features |= wgpu::Features::POLYGON_MODE_LINE;
/// let (device, queue) = adapter.request_device(&descriptor).await?;
/// let shared = Device::from_wgpu(&adapter, &device, &queue)?;
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn wgpu_device_descriptor(adapter: &wgpu::Adapter) -> wgpu::DeviceDescriptor<'static> {
    let probes = adapter::probes_within(adapter.features());
    adapter::portable_descriptor(adapter, adapter::probe_features(&probes))
}

/// Opens a device for a program that shares it with Forebay. The device has the features and limits of the program's
/// description, and those that Forebay uses. A shared device that was opened here has the speed of a device that
/// Forebay opens.
///
/// In addition to [`wgpu_device_descriptor`], the device has matrix units, if the driver has usable ones. wgpu's own
/// request cannot enable those of bf16.
///
/// # Errors
/// The adapter refuses the description. The description requests experimental features, but its `experimental_features`
/// does not enable them.
pub async fn request_wgpu_device(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Result<(wgpu::Device, wgpu::Queue)> {
    let experimental = descriptor.required_features & wgpu::Features::all_experimental_mask();
    fail_if!(!experimental.is_empty() && !descriptor.experimental_features.is_enabled();
        argument("request_wgpu_device"), "the description requests {experimental:?} without consent; set its \
        `experimental_features` to `wgpu::ExperimentalFeatures::enabled()`, or leave the features out");
    let candidate = AdapterCandidate::new(adapter.clone());
    let full = adapter::device_descriptor(&candidate, {
        let probes = adapter::probes_within(adapter.features());
        adapter::probe_features(&probes)
    });
    let merged = wgpu::DeviceDescriptor {
        required_features: descriptor.required_features | full.required_features,
        required_limits: descriptor.required_limits.clone().or_better_values_from(&full.required_limits),
        experimental_features: full.experimental_features,
        ..descriptor.clone()
    };
    // Only wgpu's own request checks limits.
    if merged.required_limits.check_limits(&adapter.limits())
        && let Some(opened) = adapter::request_with_bfloat16(&candidate, &merged)
    {
        return Ok(opened);
    }
    adapter.request_device(&merged).await.map_err(|error| Error::NoDevice {
        requested: "request_wgpu_device".into(),
        reason: format!("{} cannot be opened: {}", adapter.get_info().name, to_single_line(&error)),
    })
}
