//! Kernels without a GPU: the modules that the backend hands to wgpu, for checks of writers and compilers.

use forebay_core::backend::{KernelSource, Limits};
use forebay_core::error::Result;

use crate::adapter;
use crate::backend::WgpuBackend;
use crate::gpu::MAX_IMMEDIATE_BYTES;
use crate::kernel;

/// Returns the module of a kernel in the form that the backend hands to wgpu on a device with immediates.
///
/// # Errors
/// The module does not validate, or its bindings break the contract of [`KernelSource`].
pub fn lower_kernel(limits: &Limits, source: &KernelSource<'_>) -> Result<naga::Module> {
    Ok(kernel::lower(limits, MAX_IMMEDIATE_BYTES, source)?.module)
}

/// Returns the module of a kernel in the form that the backend hands to wgpu in a browser, which has no immediates.
///
/// # Errors
/// See [`lower_kernel`].
pub fn lower_web_kernel(limits: &Limits, source: &KernelSource<'_>) -> Result<naga::Module> {
    Ok(kernel::lower(limits, 0, source)?.module)
}

/// Opens a wgpu device without running its probes, so that a driver without a card compiles kernels. Types that the
/// driver reports count as working.
///
/// # Errors
/// wgpu has no adapter `index`, or the driver does not open it.
pub fn open_unprobed(index: usize) -> Result<WgpuBackend> {
    adapter::open_unprobed(index)
}
