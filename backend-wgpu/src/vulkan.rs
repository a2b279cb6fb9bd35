//! Vulkan in places that wgpu's own interface does not reach: heap sizes, and bf16 in matrix units.

use std::ffi::{CStr, c_void};

use wgpu::hal::api::Vulkan;

const BFLOAT16_EXTENSION: &CStr = c"VK_KHR_shader_bfloat16";

/// `VkPhysicalDeviceShaderBfloat16FeaturesKHR`.
#[repr(C)]
struct Bfloat16Features {
    structure_type: i32,
    next: *const c_void,
    bfloat16_type: u32,
    bfloat16_dot_product: u32,
    bfloat16_cooperative_matrix: u32,
}

/// `VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR`.
const BFLOAT16_FEATURES: i32 = 1_000_141_000;

/// Reports whether the adapter's driver knows bf16 in shaders.
pub(crate) fn knows_bfloat16(adapter: &wgpu::Adapter) -> bool {
    // SAFETY: the code only queries extensions, while the guard keeps the adapter alive.
    unsafe { adapter.as_hal::<Vulkan>() }
        .is_some_and(|adapter| adapter.physical_device_capabilities().supports_extension(BFLOAT16_EXTENSION))
}

/// Opens a device with bf16 matrices, which wgpu's own interface cannot request. `None` if the driver refuses.
pub(crate) fn request_device_with_bfloat16(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Option<(wgpu::Device, wgpu::Queue)> {
    let mut features = Bfloat16Features {
        structure_type: BFLOAT16_FEATURES,
        next: std::ptr::null(),
        bfloat16_type: 1,
        bfloat16_dot_product: 0,
        bfloat16_cooperative_matrix: 1,
    };
    // SAFETY: the guard keeps the adapter alive while its device is opened.
    let hal = unsafe { adapter.as_hal::<Vulkan>() }?;
    // SAFETY: the callback adds an extension that `knows_bfloat16` found, with its features. `features` outlives
    // the call, and stays at the head of the chain that it continues.
    let opened = unsafe {
        hal.open_with_callback(
            descriptor.required_features,
            &descriptor.required_limits,
            &descriptor.memory_hints,
            Some(Box::new(|arguments| {
                arguments.extensions.push(BFLOAT16_EXTENSION);
                features.next = arguments.create_info.p_next;
                arguments.create_info.p_next = (&raw const features).cast();
            })),
        )
    };
    let opened = opened.inspect_err(|error| log::warn!("no bf16 in matrix units: {error}")).ok()?;
    drop(hal);
    // SAFETY: the device was opened from this adapter with these features and limits.
    unsafe { adapter.create_device_from_hal(opened, descriptor) }.ok()
}

/// Returns the bytes of the device's largest local heap. (No API reports the free bytes.)
pub(crate) fn total_memory(device: &wgpu::Device) -> Option<u64> {
    /// `VK_MEMORY_HEAP_DEVICE_LOCAL_BIT`.
    const DEVICE_LOCAL: u32 = 1;
    // SAFETY: the code only queries the heaps, while the guard keeps the device alive.
    let device = unsafe { device.as_hal::<Vulkan>() }?;
    let instance = device.shared_instance().raw_instance();
    // SAFETY: the physical device is of this instance.
    let memory = unsafe { instance.get_physical_device_memory_properties(device.raw_physical_device()) };
    let heaps = &memory.memory_heaps[..memory.memory_heap_count as usize];
    heaps.iter().filter(|heap| heap.flags.as_raw() & DEVICE_LOCAL != 0).map(|heap| heap.size).max()
}

/// Reports whether a Vulkan loader was found.
#[cfg(unix)] // Windows' drivers install the loader.
pub(crate) fn has_loader(instance: &wgpu::Instance) -> bool {
    // SAFETY: the code only checks whether the instance exists.
    unsafe { instance.as_hal::<Vulkan>() }.is_some()
}
