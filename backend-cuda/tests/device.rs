//! Tests the backend on a real device, cuda:0; without one, each test prints a line.

mod scenarios;

use std::process::Command;
use std::sync::Arc;

use forebay_core::backend::{Backend, KernelSource, Launch, SourceError};
use forebay_core::dtype::DType;
use forebay_core::error::Error;
use forebay_cuda::CudaBackend;
use scenarios::{
    DOUBLE, MIB, MatmulCase, SCALE, a_pool_keeps_contents, copies_and_fills, copies_take_the_link, kernel,
    map, pattern, read_back, slice, uploads_and_downloads,
};

/// Runs `body` with the device.
fn on_device(body: impl FnOnce(Arc<dyn Backend>)) {
    match CudaBackend::open(0) {
        Ok(backend) => body(backend),
        Err(error) => println!("not run: {error}"),
    }
}

/// Reports whether a library is installed; prints a line if not.
fn has_library(name: &str) -> bool {
    let there =
        forebay_cuda::libraries().iter().any(|library| library.name == name && library.version.is_some());
    if !there {
        println!("not run: {name} was not found");
    }
    there
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]])).collect()
}

#[test]
fn uploads_and_downloads_transfer_all_bytes() {
    on_device(|backend| uploads_and_downloads(&*backend));
}

#[test]
fn a_pool_keeps_its_contents() {
    on_device(|backend| a_pool_keeps_contents(&backend));
}

#[test]
fn copies_and_fills_run_in_order() {
    on_device(|backend| copies_and_fills(&*backend));
}

#[test]
fn segments_grow_and_shrink_by_mapping() {
    on_device(|backend| {
        let Some(managed) = backend.limits().virtual_memory else {
            return println!("not run: the device has no virtual memory management");
        };
        let page = managed.granularity;
        let segment = backend.reserve_addresses(managed.reservation).unwrap();
        map(&*backend, segment, 0, page).unwrap();
        map(&*backend, segment, page, 4 * page).unwrap();
        let data = pattern(3 * page as usize, 5);
        backend.upload(slice(segment, 4, 3 * page), &data).unwrap();
        backend.copy(slice(segment, 3 * page + 8, page), slice(segment, page / 2, page)).unwrap();
        let mut expected = data;
        let copied = expected[page as usize / 2 - 4..][..page as usize].to_vec();
        expected.truncate(3 * page as usize);
        assert!(read_back(&*backend, slice(segment, 4, 3 * page)) == expected);
        assert!(read_back(&*backend, slice(segment, 3 * page + 8, page)) == copied);
        let error = map(&*backend, segment, 0, page).unwrap_err();
        assert!(matches!(error, SourceError::Driver { .. }), "{error}");
        // Memory is mapped and unmapped many times without leaking.
        for _ in 0..200 {
            backend.fill(slice(segment, page, 4 * page), 1).unwrap();
            backend.wait_fence(backend.record_fence().unwrap()).unwrap();
            backend.unmap(segment, page, &[4 * page]).unwrap();
            map(&*backend, segment, page, 4 * page).unwrap();
        }
        backend.wait_fence(backend.record_fence().unwrap()).unwrap();
        backend.unmap(segment, page, &[4 * page]).unwrap();
        backend.unmap(segment, 0, &[page]).unwrap();
        backend.free_addresses(segment).unwrap();
    });
}

#[test]
fn a_full_device_is_an_out_of_memory_error_and_stays_usable() {
    on_device(|backend| {
        let total = backend.device_memory().total.unwrap();
        let error = backend.alloc_segment(2 * total).unwrap_err();
        assert!(matches!(error, SourceError::OutOfMemory { .. }), "{error}");
        if let Some(managed) = backend.limits().virtual_memory {
            let segment = backend.reserve_addresses(managed.reservation).unwrap();
            let error = map(&*backend, segment, 0, managed.reservation).unwrap_err();
            assert!(matches!(error, SourceError::OutOfMemory { .. }), "{error}");
            map(&*backend, segment, 0, managed.granularity).unwrap();
            backend.unmap(segment, 0, &[managed.granularity]).unwrap();
            backend.free_addresses(segment).unwrap();
        }
        copies_and_fills(&*backend);
    });
}

#[test]
fn fences_are_signalled() {
    on_device(|backend| {
        let segment = backend.alloc_segment(64 * MIB).unwrap();
        let fences: Vec<_> = (0..300)
            .map(|word| {
                backend.fill(slice(segment, 0, 64 * MIB), word).unwrap();
                backend.record_fence().unwrap()
            })
            .collect();
        assert!(fences.is_sorted());
        backend.wait_fence(fences[150]).unwrap();
        assert_eq!(backend.is_fence_signaled(fences[150]), Ok(true));
        assert_eq!(backend.is_fence_signaled(fences[0]), Ok(true));
        backend.wait_fence(fences[299]).unwrap();
        assert_eq!(read_back(&*backend, slice(segment, 64, 4)), 299_u32.to_le_bytes());
        backend.free_segment(segment).unwrap();
    });
}

#[test]
fn kernels_run() {
    on_device(|backend| {
        if !has_library("NVRTC") {
            return;
        }
        let id = backend
            .compile(&KernelSource { overrides: &[("width", 128.0)], ..kernel(SCALE, "scale") })
            .unwrap();
        let segment = backend.alloc_segment(MIB).unwrap();
        let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (from, to) = (slice(segment, 256, 4000), slice(segment, 8192, 4000));
        backend.upload(from, &bytes).unwrap();
        backend.fill(to, 0).unwrap();
        let params = [2.0_f32.to_le_bytes(), 1.0_f32.to_le_bytes(), 990_u32.to_le_bytes()].concat();
        let launch = Launch { kernel: id, bindings: &[from, to], params: &params, groups: [8, 1, 1] };
        backend.launch(&launch).unwrap();
        let scaled =
            |n: usize| (0..1000).map(|i| if i < n { 2.0 * i as f32 + 1.0 } else { 0.0 }).collect::<Vec<_>>();
        assert_eq!(floats(&read_back(&*backend, to)), scaled(990));
        // The kernel gets the binding's length, not the segment's.
        backend.fill(to, 0).unwrap();
        let short = slice(segment, 256, 2000);
        backend.launch(&Launch { bindings: &[short, to], ..launch }).unwrap();
        assert_eq!(floats(&read_back(&*backend, to)), scaled(500));
        backend.free_segment(segment).unwrap();
    });
}

#[test]
fn products_are_exact() {
    on_device(|backend| {
        if !has_library("cuBLASLt") {
            return;
        }
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let mut done = [0, 0];
            for sizes in [[2, 3, 4], [17, 5, 9], [1, 64, 32], [64, 1, 32], [128, 96, 64], [100, 200, 257]] {
                for product in MatmulCase::new(dtype, sizes).variants() {
                    done[usize::from(product.check(&*backend))] += 1;
                }
            }
            println!("{dtype}: {} products by cuBLASLt, {} left to the core", done[1], done[0]);
            assert!(done[1] > done[0], "{dtype}: cuBLASLt refuses most products");
        }
    });
}

#[test]
fn copies_between_two_cards_take_the_link() {
    on_device(|first| match CudaBackend::open(1) {
        Ok(second) => copies_take_the_link([&*first, &*second]),
        Err(error) => println!("not run: {error}"),
    });
}

/// Runs in its own process, because the error loses every device of the process.
#[test]
fn a_lost_device_is_an_error() {
    const CHILD: &str = "FOREBAY_TEST_LOSES_THE_DEVICE";
    if std::env::var_os(CHILD).is_none() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["a_lost_device_is_an_error", "--exact", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success(),
            "{}\n{text}\n{}",
            child.status,
            String::from_utf8_lossy(&child.stderr)
        );
        return print!("{text}");
    }
    on_device(|backend| {
        if !has_library("NVRTC") {
            return;
        }
        let id = backend.compile(&kernel(DOUBLE, "double")).unwrap();
        let segment = backend.alloc_segment(MIB).unwrap();
        let nowhere = slice(forebay_core::backend::SegmentId(256), 0, 256);
        backend.launch(&Launch { kernel: id, bindings: &[nowhere], params: &[], groups: [1, 1, 1] }).unwrap();
        let error = backend.download(slice(segment, 0, 4), &mut [0; 4]).unwrap_err();
        assert!(matches!(error, Error::Driver(SourceError::DeviceLost(_))), "{error}");
        assert!(backend.upload(slice(segment, 0, 4), &[0; 4]).is_err());
        assert!(backend.record_fence().and_then(|fence| backend.wait_fence(fence)).is_err());
        drop(backend);
    });
}
