//! Identity of wgpu devices and their queues.

#[cfg(any(windows, unix))]
use wgpu::hal::api;

/// Reports whether both are one device. wgpu compares ids, which are unique only within an instance. The driver's
/// device has an address of its own while it is open.
pub(crate) fn is_same_device(left: &wgpu::Device, right: &wgpu::Device) -> bool {
    left == right && driver_address(left) == driver_address(right)
}

#[cfg(any(windows, all(unix, not(target_vendor = "apple"))))]
fn driver_address(device: &wgpu::Device) -> Option<usize> {
    let address = address_in::<api::Vulkan>(device);
    #[cfg(windows)]
    let address = address.or_else(|| address_in::<api::Dx12>(device));
    address
}

#[cfg(target_vendor = "apple")]
fn driver_address(device: &wgpu::Device) -> Option<usize> {
    address_in::<api::Metal>(device)
}

/// Returns `None`: a browser's device has no driver's device, and its ids are unique.
#[cfg(not(any(windows, unix)))]
fn driver_address(_device: &wgpu::Device) -> Option<usize> {
    None
}

/// Reports whether the queue is the device's, as far as the driver's interface tells. wgpu reports commands in the
/// queue of another device to that device, so its caller would take the missing results for zeros.
pub(crate) fn is_queue_of(queue: &wgpu::Queue, device: &wgpu::Device) -> bool {
    // SAFETY: the code only compares the driver's queues, while the guards keep them alive.
    #[cfg(any(windows, all(unix, not(target_vendor = "apple"))))]
    match unsafe { (device.as_hal::<api::Vulkan>(), queue.as_hal::<api::Vulkan>()) } {
        (Some(device), Some(queue)) => return device.raw_queue() == queue.as_raw(),
        (None, None) => {}
        _ => return false,
    }
    // SAFETY: as above.
    #[cfg(windows)]
    match unsafe { (device.as_hal::<api::Dx12>(), queue.as_hal::<api::Dx12>()) } {
        (Some(device), Some(queue)) => return device.raw_queue() == queue.as_raw(),
        (None, None) => {}
        _ => return false,
    }
    let _ = (queue, device);
    true
}

/// Returns the address of the driver's device, or `None` if the device is one of another interface.
#[cfg(any(windows, unix))]
fn address_in<A: wgpu::hal::Api>(device: &wgpu::Device) -> Option<usize> {
    // SAFETY: the code only takes the address, while the guard keeps the device alive.
    unsafe { device.as_hal::<A>() }.map(|hal| std::ptr::from_ref(&*hal).addr())
}
