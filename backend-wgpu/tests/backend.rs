//! Tests the backend on every adapter that wgpu finds: Mesa's lavapipe, SwiftShader, cards.
//!
//! With `FOREBAY_REQUIRE=wgpu`, a machine without an adapter fails; otherwise the tests print a line.

use std::sync::OnceLock;

use forebay_core::backend::{
    Backend, Fence, KernelId, KernelSource, Launch, SegmentId, SegmentSource, Slice, SourceError,
};
use forebay_core::error::Error;
use forebay_wgpu::WgpuBackend;

const ADD: &str = "
    struct Params { count: u32, scale: f32 }
    @group(0) @binding(0) var<storage, read> a: array<f32>;
    @group(0) @binding(1) var<storage, read> b: array<f32>;
    @group(0) @binding(2) var<storage, read_write> c: array<f32>;
    @group(1) @binding(0) var<uniform> params: Params;
    @compute @workgroup_size(64)
    fn main(@builtin(global_invocation_id) id: vec3<u32>) {
        if id.x < params.count { c[id.x] = a[id.x] + params.scale * b[id.x]; }
    }";

const INCREMENT: &str = "
    @group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @compute @workgroup_size(1) fn main() { x[0] = x[0] * 3u + 1u; }";

/// Returns the devices under test, which are opened once.
fn devices() -> &'static [WgpuBackend] {
    static DEVICES: OnceLock<Vec<WgpuBackend>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let found = WgpuBackend::enumerate();
        let usable = found.iter().filter(|found| found.unavailable_reason.is_none());
        let opened = usable.map(|found| WgpuBackend::new(found.index).unwrap()).collect::<Vec<_>>();
        for device in &opened {
            println!("on {}, {:?}", device.info(), device.info().features);
        }
        if opened.is_empty() {
            let reason = WgpuBackend::open(0).unwrap_err();
            let required =
                std::env::var("FOREBAY_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name == "wgpu"));
            assert!(!required, "{reason}");
            println!("NOT RUN: {reason}");
        }
        opened
    })
}

/// Opens the same devices again, for tests that must not share a device.
fn open_fresh_devices() -> Vec<WgpuBackend> {
    devices().iter().map(|device| WgpuBackend::new(device.info().index).unwrap()).collect()
}

fn compile(device: &WgpuBackend, wgsl: &str) -> KernelId {
    device
        .compile(&KernelSource {
            label: "test",
            wgsl,
            entry_point: "main",
            overrides: &[],
            zero_workgroup_memory: true,
        })
        .unwrap()
}

fn slice(segment: SegmentId, offset: u64, bytes: u64) -> Slice {
    Slice { segment, offset, bytes }
}

fn read_words(device: &WgpuBackend, slice: Slice) -> Vec<u32> {
    let mut bytes = vec![0; slice.bytes as usize];
    device.download(slice, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
}

fn to_bytes<T: Copy>(values: &[T], bytes: fn(T) -> [u8; 4]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}

fn upload(device: &WgpuBackend, slice: Slice, values: &[u32]) {
    device.upload(slice, &to_bytes(values, u32::to_ne_bytes)).unwrap();
}

#[test]
fn slices_of_one_segment_are_read_and_written_in_one_launch() {
    for device in devices() {
        let kernel = compile(device, ADD);
        let segment = device.alloc_segment(1 << 20).unwrap();
        let count = 1000;
        let [a, b, c] = [0, 4096, 8192].map(|offset| slice(segment, offset, 4 * count));
        let values = (0..count).map(|i| i as f32).collect::<Vec<_>>();
        device.upload(a, &to_bytes(&values, f32::to_ne_bytes)).unwrap();
        device.upload(b, &to_bytes(&values, f32::to_ne_bytes)).unwrap();
        let params = [(count as u32).to_ne_bytes(), 2f32.to_ne_bytes()].concat();
        device.launch(&Launch { kernel, bindings: &[a, b, c], params: &params, groups: [16, 1, 1] }).unwrap();
        let found = read_words(device, c).into_iter().map(f32::from_bits).collect::<Vec<_>>();
        assert_eq!(found, (0..count).map(|i| 3.0 * i as f32).collect::<Vec<_>>());
        // One slice may be read through two bindings.
        device.launch(&Launch { kernel, bindings: &[a, a, c], params: &params, groups: [16, 1, 1] }).unwrap();
        assert_eq!(read_words(device, c)[7], 21f32.to_bits());
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn downloads_at_odd_offsets_and_of_large_sizes() {
    for device in devices() {
        let large = 40 << 20;
        let segment = device.alloc_segment(large + 4096).unwrap();
        for (offset, count) in [(0, 1), (4, 1), (12, 3), (1020, 1025), (260, large as usize / 4)] {
            let values = (0..count as u32).map(|i| i.wrapping_mul(2654435761)).collect::<Vec<_>>();
            let destination = slice(segment, offset, 4 * count as u64);
            upload(device, destination, &values);
            assert!(read_words(device, destination) == values, "{count} words at {offset}");
        }
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn copies_and_fills_at_any_offset() {
    for device in devices() {
        let one = device.alloc_segment(1 << 20).unwrap();
        let other = device.alloc_segment(1 << 20).unwrap();
        let values = (0..1000).collect::<Vec<u32>>();
        upload(device, slice(one, 4, 4000), &values);
        for (to, at) in [(one, 8012), (one, 8192), (other, 4), (other, 64)] {
            device.fill(slice(to, at - 4, 4008), 0xdead_beef).unwrap();
            device.copy(slice(to, at, 4000), slice(one, 4, 4000)).unwrap();
            let found = read_words(device, slice(to, at - 4, 4008));
            assert_eq!((found[0], found[1001]), (0xdead_beef, 0xdead_beef), "around {at}");
            assert_eq!(found[1..1001], values, "at {at}");
        }
        // Vectors of four words, in one segment.
        device.copy(slice(one, 65536, 3984), slice(one, 16, 3984)).unwrap();
        assert_eq!(read_words(device, slice(one, 65536, 3984)), values[3..999]);
        for (at, bytes, word) in
            [(0, 1 << 20, 0), (4, 12, 7), (16, 32, 9), (64, 4, 0), (128, 1 << 19, u32::MAX)]
        {
            device.fill(slice(other, at, bytes), word).unwrap();
            assert!(
                read_words(device, slice(other, at, bytes)).iter().all(|&found| found == word),
                "{bytes} at {at}"
            );
        }
        // The surrounding words are unchanged.
        assert_eq!(read_words(device, slice(other, 0, 20)), [0, 7, 7, 7, 9]);
        device.free_segment(one).unwrap();
        device.free_segment(other).unwrap();
    }
}

#[test]
fn commands_run_in_the_order_of_the_calls() {
    for device in devices() {
        let kernel = compile(device, INCREMENT);
        let segment = device.alloc_segment(4096).unwrap();
        let [x, y] = [slice(segment, 0, 4), slice(segment, 256, 4)];
        let launch =
            || device.launch(&Launch { kernel, bindings: &[x], params: &[], groups: [1, 1, 1] }).unwrap();
        // Overwritten between launches without a flush: every result is of the upload right before it.
        for round in 0..50 {
            upload(device, x, &[round]);
            launch();
            device.copy(y, x).unwrap();
            upload(device, x, &[99]);
            launch();
            launch();
            device.copy(slice(segment, 512 + 4 * u64::from(round), 4), y).unwrap();
            device.fill(y, 0).unwrap();
        }
        assert_eq!(read_words(device, x), [(99 * 3 + 1) * 3 + 1]);
        let expected = (0..50).map(|round| 3 * round + 1).collect::<Vec<_>>();
        assert_eq!(read_words(device, slice(segment, 512, 200)), expected);
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn ten_thousand_launches_and_uploads_do_not_grow_memory() {
    for device in &open_fresh_devices() {
        let add = compile(device, ADD);
        let segment = device.alloc_segment(48 << 20).unwrap();
        // Uses all staging memory once, so that timing does not decide when it is allocated.
        device.upload(slice(segment, 0, 48 << 20), &vec![0; 48 << 20]).unwrap();
        let mut after_warm_up = None;
        for step in 0..10_000u64 {
            // Slices and parameters that never repeat: caches must not grow.
            let [a, b, c] =
                [0, 1, 2].map(|i| slice(segment, (step * 3 + i) % 1024 * 256, 16 + step % 50 * 4));
            let params = [4u32.to_ne_bytes(), (step as f32).to_ne_bytes()].concat();
            device
                .launch(&Launch { kernel: add, bindings: &[a, b, c], params: &params, groups: [1, 1, 1] })
                .unwrap();
            if step % 7 == 0 {
                upload(device, slice(segment, 1 << 19, 400), &[step as u32; 100]);
            }
            if step == 2_000 {
                device.wait_fence(device.record_fence().unwrap()).unwrap();
                after_warm_up = device.driver_bytes();
            }
        }
        device.wait_fence(device.record_fence().unwrap()).unwrap();
        assert!(device.driver_bytes() <= after_warm_up, "{:?} > {after_warm_up:?}", device.driver_bytes());
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn a_broken_kernel_is_an_error_that_quotes_it() {
    for device in devices() {
        let refused = |wgsl: &str, entry: &str| {
            let source = KernelSource {
                label: "broken",
                wgsl,
                entry_point: entry,
                overrides: &[],
                zero_workgroup_memory: true,
            };
            let compiled = device.compile(&source).and_then(|kernel| device.wait_compiled(kernel));
            let Error::KernelCompilation { label, message } = compiled.unwrap_err() else {
                panic!("not a kernel's")
            };
            assert_eq!(label, "broken");
            message
        };
        let message = refused("@compute @workgroup_size(1) fn main() { let x = 1u + 1.5; }", "main");
        assert!(message.contains("1u + 1.5"), "{message}");
        let message = refused(INCREMENT, "other");
        assert!(message.contains("no entry point `other`; the module has `main`"), "{message}");
        let message = refused(
            "@group(0) @binding(0) var<storage, read> x: array<u32>;
             @compute @workgroup_size(1) fn main() { x[0] = 1u; }",
            "main",
        );
        assert!(message.contains("x[0] = 1u"), "{message}");
        let message = refused(&INCREMENT.replace("binding(0)", "binding(3)"), "main");
        assert!(message.contains("storage bindings are 3"), "{message}");
        let message = refused(&INCREMENT.replace("workgroup_size(1)", "workgroup_size(8192)"), "main");
        assert!(message.contains("8192"), "{message}");
        let message =
            refused(&INCREMENT.replace("fn main", "override n: u32; fn main").replace("3u", "n"), "main");
        assert!(message.contains('n'), "{message}");
        // The device still works.
        compile(device, INCREMENT);
    }
}

#[test]
fn overrides_specialise_a_kernel() {
    let wgsl = "
        override size: u32 = 1;
        override value: f32;
        var<workgroup> sum: atomic<u32>;
        @group(0) @binding(0) var<storage, read_write> x: array<u32>;
        @compute @workgroup_size(size)
        fn main(@builtin(local_invocation_index) i: u32) {
            atomicAdd(&sum, u32(value));
            workgroupBarrier();
            if i == 0u { x[0] = atomicLoad(&sum); }
        }";
    for device in devices() {
        let segment = device.alloc_segment(256).unwrap();
        for (size, value) in [(32.0, 2.0), (128.0, 3.0)] {
            let overrides = &[("size", size), ("value", value)];
            let kernel = device
                .compile(&KernelSource {
                    label: "sum",
                    wgsl,
                    entry_point: "main",
                    overrides,
                    zero_workgroup_memory: true,
                })
                .unwrap();
            let bindings = &[slice(segment, 0, 4)];
            device.launch(&Launch { kernel, bindings, params: &[], groups: [1, 1, 1] }).unwrap();
            assert_eq!(read_words(device, bindings[0]), [(size * value) as u32]);
        }
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn a_request_too_large_for_the_device_is_an_error_and_the_device_goes_on() {
    for device in devices() {
        for bytes in [device.limits().max_segment + 256, u64::MAX / 2, u64::MAX] {
            let error = device.alloc_segment(bytes).unwrap_err();
            assert!(matches!(error, SourceError::OutOfMemory { .. }), "{error}");
        }
        let segment = device.alloc_segment(4096).unwrap();
        upload(device, slice(segment, 0, 8), &[1, 2]);
        assert_eq!(read_words(device, slice(segment, 0, 8)), [1, 2]);
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn a_call_that_breaks_the_contract_is_an_error_and_the_device_goes_on() {
    for device in devices() {
        let kernel = compile(device, ADD);
        let segment = device.alloc_segment(4096).unwrap();
        let good = [0, 256, 512].map(|offset| slice(segment, offset, 16));
        let params = [4u32.to_ne_bytes(), 1f32.to_ne_bytes()].concat();
        let groups = [1, 1, 1];
        let launch = |launch: Launch<'_>| device.launch(&launch).unwrap_err().message();
        let error = launch(Launch { kernel, bindings: &good[..2], params: &params, groups });
        assert_eq!(error, "launch: `test` binds 3 slices; got 2");
        let error = launch(Launch { kernel, bindings: &good, params: &[], groups });
        assert!(error.starts_with("launch: `test` takes 1 to "), "{error}");
        let error = launch(Launch { kernel, bindings: &good, params: &[0; 5000], groups });
        assert!(error.ends_with("parameters; got 5000"), "{error}");
        let error = launch(Launch { kernel: KernelId(9999), bindings: &good, params: &params, groups });
        assert!(error.contains("another device"), "{error}");
        // Misaligned, beyond the end, empty.
        for bad in [slice(segment, 4, 16), slice(segment, 4096, 16), slice(segment, 0, 0)] {
            let error =
                launch(Launch { kernel, bindings: &[bad, good[1], good[2]], params: &params, groups });
            assert!(error.starts_with("the driver refused create_bind_group: "), "{error}");
        }
        let stale = device.alloc_segment(4096).unwrap();
        device.free_segment(stale).unwrap();
        let error = launch(Launch {
            kernel,
            bindings: &[slice(stale, 0, 16), good[1], good[2]],
            params: &params,
            groups,
        });
        assert!(error.contains("was freed"), "{error}");
        assert!(device.download(slice(stale, 0, 4), &mut [0; 4]).is_err());
        device.launch(&Launch { kernel, bindings: &good, params: &params, groups }).unwrap();
        assert_eq!(read_words(device, good[2]), [0; 4]);
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn a_command_that_the_driver_refuses_is_an_error_of_this_or_a_later_call() {
    for device in &open_fresh_devices() {
        let kernel = compile(device, INCREMENT);
        let segment = device.alloc_segment(4096).unwrap();
        let bindings = &[slice(segment, 0, 4)];
        let launch = |x| device.launch(&Launch { kernel, bindings, params: &[], groups: [x, 1, 1] });
        // An idle device gets the launch at once, and refuses it in that call; else a later submission does.
        let error = launch(u32::MAX).and_then(|()| device.flush()).unwrap_err().to_string();
        assert!(error.starts_with("the driver refused an earlier command: "), "{error}");
        assert!(error.contains("4294967295"), "{error}");
        upload(device, bindings[0], &[1]);
        launch(1).unwrap();
        assert_eq!(read_words(device, bindings[0]), [4]);
    }
}

#[test]
fn fences_are_ordered_and_signalled() {
    for device in &open_fresh_devices() {
        let kernel = compile(device, INCREMENT);
        let segment = device.alloc_segment(4096).unwrap();
        let mut last = Fence(0);
        for _ in 0..100 {
            device
                .launch(&Launch { kernel, bindings: &[slice(segment, 0, 4)], params: &[], groups: [1, 1, 1] })
                .unwrap();
            let fence = device.record_fence().unwrap();
            assert!(fence > last);
            last = fence;
        }
        device.wait_fence(last).unwrap();
        assert!(device.is_fence_signaled(last).unwrap());
        assert_eq!(device.record_fence().unwrap(), last, "nothing new was submitted");
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn grids_larger_than_one_dimension_are_folded() {
    for device in devices() {
        // With 64 words for each group, single words need more than 65,535 groups.
        let count = 65_536 * 64 + 100;
        let segment = device.alloc_segment(8 * count + 1024).unwrap();
        let (from, to) = (slice(segment, 4, 4 * count), slice(segment, 4 * count + 516, 4 * count));
        device.fill(slice(segment, 4 * count + 512, 8), 5).unwrap();
        device.fill(from, 0x0123_4567).unwrap();
        device.copy(to, from).unwrap();
        let found = read_words(device, slice(segment, 4 * count + 512, 4 * count + 4));
        assert_eq!(found[0], 5);
        assert!(found[1..].iter().all(|&word| word == 0x0123_4567));
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn parameters_larger_than_one_submission_are_split() {
    let wgsl = "
        struct Params { values: array<vec4<u32>, 256> }
        @group(0) @binding(0) var<storage, read_write> x: array<u32>;
        @group(1) @binding(0) var<uniform> params: Params;
        @compute @workgroup_size(1) fn main() {
            x[params.values[0].x] = params.values[255].w;
        }";
    for device in devices() {
        let kernel = compile(device, wgsl);
        let segment = device.alloc_segment(4096).unwrap();
        for i in 0..200u32 {
            let mut params = vec![0; 4096];
            params[..4].copy_from_slice(&i.to_ne_bytes());
            params[4092..].copy_from_slice(&(i * i).to_ne_bytes());
            let bindings = &[slice(segment, 0, 4096)];
            device.launch(&Launch { kernel, bindings, params: &params, groups: [1, 1, 1] }).unwrap();
        }
        let expected = (0..200).map(|i| i * i).collect::<Vec<u32>>();
        assert_eq!(read_words(device, slice(segment, 0, 800)), expected);
        let large = wgsl.replace("256>", "257>");
        assert!(
            device
                .compile(&KernelSource {
                    label: "large",
                    wgsl: &large,
                    entry_point: "main",
                    overrides: &[],
                    zero_workgroup_memory: true
                })
                .is_err()
        );
        device.free_segment(segment).unwrap();
    }
}

#[test]
fn threads_share_a_device() {
    for device in devices() {
        let kernel = compile(device, INCREMENT);
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                scope.spawn(move || {
                    let segment = device.alloc_segment(4096).unwrap();
                    let x = slice(segment, 0, 4);
                    for round in 0..50 {
                        upload(device, x, &[round * 4 + thread]);
                        device
                            .launch(&Launch { kernel, bindings: &[x], params: &[], groups: [1, 1, 1] })
                            .unwrap();
                        assert_eq!(read_words(device, x), [(round * 4 + thread) * 3 + 1]);
                    }
                    device.free_segment(segment).unwrap();
                });
            }
        });
    }
}

#[test]
fn a_missing_device_is_named() {
    let error = WgpuBackend::open(1000).unwrap_err().to_string();
    assert!(error.starts_with("no device `wgpu:1000`: "), "{error}");
}
