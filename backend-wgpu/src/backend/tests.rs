//! Commands that wait for the compiler, bind groups, and a lost device.

use super::*;

const KERNEL: &str = "
    @group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @compute @workgroup_size(1) fn main() { x[0] = 1u; }";

/// Opens every adapter that can be used.
fn devices() -> impl Iterator<Item = WgpuBackend> {
    let found = WgpuBackend::enumerate().into_iter().filter(|found| found.unavailable_reason.is_none());
    found.map(|found| WgpuBackend::new(found.index).unwrap())
}

fn source<'a>(label: &'a str, wgsl: &'a str) -> KernelSource<'a> {
    KernelSource { label, wgsl, entry_point: "main", overrides: &[], zero_workgroup_memory: true }
}

/// Kernels compile in the background: commands that follow such a kernel wait for it, in order.
#[test]
fn commands_run_in_order_while_kernels_are_compiled() {
    for device in devices() {
        let [a, b] = [(); 2].map(|()| device.alloc_segment(4096).unwrap());
        let [x, y] = [a, b].map(|segment| Slice { segment, offset: 0, bytes: 4 });
        device.upload(x, &1u32.to_le_bytes()).unwrap();
        let mut expected = 1u32;
        for factor in 2..10u32 {
            let wgsl = format!(
                "@group(0) @binding(0) var<storage, read_write> x: array<u32>;
                @compute @workgroup_size(1) fn main() {{ x[0] = x[0] * {factor}u + 1u; }}"
            );
            let kernel = device.compile(&source("multiply", &wgsl)).unwrap();
            // Each step reads the result of the step before, through a copy and a fill.
            device.launch(&Launch { kernel, bindings: &[x], params: &[], groups: [1, 1, 1] }).unwrap();
            device.copy(y, x).unwrap();
            device.fill(x, 0).unwrap();
            device.copy(x, y).unwrap();
            expected = expected.wrapping_mul(factor).wrapping_add(1);
        }
        let mut result = [0; 4];
        device.download(x, &mut result).unwrap();
        assert_eq!(u32::from_le_bytes(result), expected);
        let refused = source("too large", "@compute @workgroup_size(8192) fn main() {}");
        let kernel = device.compile(&refused).unwrap();
        let launch = Launch { kernel, bindings: &[], params: &[], groups: [1, 1, 1] };
        // The launch fails, or waits for the compiler and fails the next call that waits for the device.
        let error = device.launch(&launch).and_then(|()| device.download(x, &mut result)).unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
        device.download(x, &mut result).unwrap();
        assert!(matches!(device.wait_compiled(kernel), Err(Error::KernelCompilation { .. })));
        assert!(matches!(device.launch(&launch), Err(Error::KernelCompilation { .. })));
        device.download(x, &mut result).unwrap();
        assert_eq!(u32::from_le_bytes(result), expected);
    }
}

/// A program may create and drop tensors over its buffers in every frame.
#[test]
fn releasing_a_segment_drops_only_its_bind_groups() {
    for device in devices() {
        let source = source("one", KERNEL);
        let kernel = device.compile(&source).unwrap();
        let descriptor = wgpu::BufferDescriptor {
            label: None,
            size: 4096,
            usage: SEGMENT_USAGES,
            mapped_at_creation: false,
        };
        let buffer = device.wgpu_device().create_buffer(&descriptor);
        let Ok(external) = device.adopt_buffer(&buffer, 0..16) else { panic!("refused") };
        let [a, b] = [(); 2].map(|()| device.alloc_segment(4096).unwrap());
        for segment in [a, b, external] {
            let x = Slice { segment, offset: 0, bytes: 16 };
            device.launch(&Launch { kernel, bindings: &[x], params: &[], groups: [1, 1, 1] }).unwrap();
        }
        let count = || device.state.lock_unpoisoned().bind_groups.group_count();
        assert_eq!(count(), 3);
        device.release_buffer(external, &(0..16));
        assert_eq!(count(), 2);
        device.free_segment(a).unwrap();
        assert_eq!(count(), 1);
    }
}

/// `destroy` is the only way to lose a device on purpose; the effects are those of a driver crash.
#[test]
fn a_lost_device_is_an_error_of_every_call_and_never_a_panic() {
    for device in devices() {
        let source = source("one", KERNEL);
        let kernel = device.compile(&source).unwrap();
        let segment = device.alloc_segment(4096).unwrap();
        let x = Slice { segment, offset: 0, bytes: 4 };
        let launch = Launch { kernel, bindings: &[x], params: &[], groups: [1, 1, 1] };
        device.launch(&launch).unwrap();
        let fence = device.record_fence().unwrap();
        // One launch is recorded and not submitted when the device is lost.
        device.launch(&launch).unwrap();
        device.gpu.device.destroy();
        // wgpu reports the loss when the last work is done.
        let _ = device.gpu.device.poll(wgpu::PollType::wait_indefinitely());
        let lost = |result: Result<()>| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Driver(SourceError::DeviceLost(_))), "{error}");
            assert!(error.to_string().ends_with("open it again to go on"), "{error}");
        };
        lost(device.launch(&launch));
        lost(device.flush());
        lost(device.upload(x, &[0; 4]));
        lost(device.download(x, &mut [0; 4]));
        lost(device.fill(x, 1));
        lost(device.compile(&source).map(drop));
        lost(device.alloc_segment(4096).map(drop).map_err(Error::from));
        lost(device.record_fence().map(drop).map_err(Error::from));
        lost(device.free_segment(segment).map_err(Error::from));
        // The fence may be passed or lost, but the call must return.
        let _ = (device.is_fence_signaled(fence), device.wait_fence(fence));
    }
}
