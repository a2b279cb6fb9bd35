//! Kernels without a device: adapters that are only described, and the modules that the backend hands to wgpu, for
//! checks of writers and compilers.

use forebay_core::backend::{DeviceInfo, KernelSource, Limits};
use forebay_core::error::Result;

use crate::adapter;
use crate::gpu::MAX_IMMEDIATE_BYTES;
use crate::kernel;

/// Adapter whose device is not opened, because its driver may have no card.
#[derive(Clone, Debug)]
pub struct OfflineAdapter {
    /// wgpu's adapter.
    pub adapter: wgpu::Adapter,
    /// Features that the backend requests when it opens the device.
    pub enabled: wgpu::Features,
    /// Description of the device. Types that the driver reports count as working, because no probe runs.
    pub info: DeviceInfo,
    /// Maximum bytes of immediates.
    pub max_immediate_bytes: u32,
}

/// Describes the adapter of an index as if its device were open.
///
/// # Errors
/// wgpu has no adapter `index`, or the backend cannot use it.
pub fn find_adapter(index: usize) -> Result<OfflineAdapter> {
    adapter::describe_offline(index)
}

/// Returns the module of a kernel in the form that the backend hands to wgpu. The device has immediates of at most
/// `max_immediate_bytes`; browsers have none.
///
/// # Errors
/// The module does not validate, or its bindings break the contract of [`KernelSource`].
pub fn lower_kernel(
    limits: &Limits,
    max_immediate_bytes: u32,
    source: &KernelSource<'_>,
) -> Result<naga::Module> {
    Ok(kernel::lower(limits, max_immediate_bytes.min(MAX_IMMEDIATE_BYTES), source)?.module)
}
