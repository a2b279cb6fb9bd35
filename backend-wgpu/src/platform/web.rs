//! A browser page, whose thread cannot wait: wgpu's answers arrive after the page returns to its event loop.
//!
//! Error scopes would need a wait. The device's error callback reports errors of creation instead, and the next call
//! returns them.

use std::sync::Arc;

use forebay_core::backend::Backend;
use forebay_core::error::Result;
use forebay_core::platform::CANNOT_BLOCK;

use crate::adapter;
use crate::backend::WgpuBackend;
use crate::gpu::Gpu;

/// If true, bindings of one launch may overlap. Browsers refuse that, because every binding is writable.
pub(crate) const BINDINGS_MAY_OVERLAP: bool = false;

/// Returns no adapters: the browser answers later.
pub(crate) fn enumerate_adapters(_instance: &wgpu::Instance, _apis: wgpu::Backends) -> Vec<wgpu::Adapter> {
    Vec::new()
}

/// Fails, because the browser answers later.
pub(crate) fn request_device(
    _adapter: &wgpu::Adapter,
    _descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Result<(wgpu::Device, wgpu::Queue), String> {
    Err(CANNOT_BLOCK.to_owned())
}

/// Runs a call. Its errors reach the device's error callback.
pub(crate) fn scope_errors<T>(_device: &wgpu::Device, call: impl FnOnce() -> T) -> (T, Option<wgpu::Error>) {
    (call(), None)
}

/// Opens a device, and calls `done` with it.
pub(crate) fn open_then(index: usize, done: impl FnOnce(Result<Arc<dyn Backend>>) + Send + 'static) {
    wasm_bindgen_futures::spawn_local(async move {
        done(open(index).await.map(|backend| Arc::new(backend) as Arc<dyn Backend>));
    });
}

/// Opens a device with all types that the browser offers. Probes would need a wait, and browsers test drivers.
async fn open(index: usize) -> Result<WgpuBackend> {
    let instance = adapter::create_instance();
    let adapters = instance.enumerate_adapters(wgpu::Backends::BROWSER_WEBGPU).await;
    let candidates = adapter::sort_candidates(adapters);
    let candidate = adapter::usable_candidate(&instance, &candidates, index)?;
    let types = adapter::probes_within(candidate.adapter.features());
    let descriptor = adapter::device_descriptor(candidate, adapter::probe_features(&types));
    let opened = candidate.adapter.request_device(&descriptor).await;
    let (device, queue) =
        opened.map_err(|error| adapter::open_error(candidate, index, &error.to_string()))?;
    let gpu = Gpu::new(device, queue);
    let (features, limits) = (descriptor.required_features, &descriptor.required_limits);
    let mut backend = adapter::wrap_device(candidate, index, gpu, features, limits);
    types.iter().for_each(|probe| (probe.mark_supported)(&mut backend.info_mut().features));
    adapter::describe_matrix_path(&mut backend, candidate.matrix_shapes().err());
    Ok(backend)
}
