//! A program of an operating system: calls that wgpu answers asynchronously block until the answer.

use std::sync::Arc;

use forebay_core::backend::Backend;
use forebay_core::error::Result;

use crate::backend::WgpuBackend;
use crate::gpu::to_single_line;

/// If true, bindings of one launch may overlap, also those that the kernel writes.
pub(crate) const BINDINGS_MAY_OVERLAP: bool = true;

pub(crate) fn enumerate_adapters(instance: &wgpu::Instance, apis: wgpu::Backends) -> Vec<wgpu::Adapter> {
    pollster::block_on(instance.enumerate_adapters(apis))
}

/// Opens a device. The error is a message.
pub(crate) fn request_device(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Result<(wgpu::Device, wgpu::Queue), String> {
    pollster::block_on(adapter.request_device(descriptor)).map_err(|error| to_single_line(&error))
}

/// Runs a call inside error scopes, which are per thread. Returns its result, and the first error.
pub(crate) fn scope_errors<T>(device: &wgpu::Device, call: impl FnOnce() -> T) -> (T, Option<wgpu::Error>) {
    let full = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let invalid = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let result = call();
    let internal = pollster::block_on(internal.pop());
    let invalid = pollster::block_on(invalid.pop());
    let full = pollster::block_on(full.pop());
    (result, full.or(invalid).or(internal))
}

/// Opens a device, and calls `done` with it.
pub(crate) fn open_then(index: usize, done: impl FnOnce(Result<Arc<dyn Backend>>) + Send + 'static) {
    done(WgpuBackend::open(index));
}
