//! The functions of `vulkan.rs` on platforms without Vulkan.

pub(crate) fn knows_bfloat16(_adapter: &wgpu::Adapter) -> bool {
    false
}

pub(crate) fn request_device_with_bfloat16(
    _adapter: &wgpu::Adapter,
    _descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Option<(wgpu::Device, wgpu::Queue)> {
    None
}

pub(crate) fn total_memory(_device: &wgpu::Device) -> Option<u64> {
    None
}
