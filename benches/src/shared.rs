//! A device that a program opens and shares, whose speed is compared with that of an own device.

use anyhow::{Context, Result, bail};
use forebay::device::Device;
use forebay::prelude::*;
use forebay::{ProbedDevice, WgpuDeviceExt, request_wgpu_device, wgpu};

/// Opens the adapter of a wgpu device once more, as a program does that shares its device.
pub(crate) fn open_shared(own: &Device) -> Result<Device> {
    let info = own.info();
    if info.backend != "wgpu" {
        bail!("--shared-device compares wgpu devices, and {info} is none; pass --device wgpu:0");
    }
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let apis = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let adapters = pollster::block_on(instance.enumerate_adapters(apis.with_env()));
    // Equal cards have consecutive ids, in the order of the adapters.
    let own_id = format!("wgpu:{}", info.index);
    let is_equal = |device: &ProbedDevice| device.id.starts_with("wgpu") && device.name == info.name;
    let devices = Device::enumerate().into_iter().filter(is_equal);
    let position = devices.take_while(|device| device.id != own_id).count();
    let adapter = adapters.into_iter().filter(|adapter| adapter.get_info().name == info.name).nth(position);
    let adapter = adapter.with_context(|| format!("wgpu lists no adapter `{}` any more", info.name))?;
    let descriptor = wgpu::DeviceDescriptor::default();
    let (device, queue) = pollster::block_on(request_wgpu_device(&adapter, &descriptor))?;
    let shared = Device::from_wgpu(&adapter, &device, &queue)?;
    eprintln!("shared: {}", shared.info());
    if shared.info().features != info.features {
        eprintln!("the features differ: {:?}, shared {:?}", info.features, shared.info().features);
    }
    Ok(shared)
}
