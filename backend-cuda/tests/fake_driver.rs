//! Tests the backend on a fake driver that simulates a device on the CPU: the calls, their order, and all
//! errors. `device.rs` has the tests for a real card.
#![cfg(target_os = "linux")]

mod fake_cuda;
mod scenarios;

use fake_cuda::Libraries::{Driver, Management, Products};
use fake_cuda::{PAGE, call_log, count_calls, old_driver, on_fake, open, toolkit};
use forebay_core::backend::{Backend, Fence, PageRemap, SourceError};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Error;
use forebay_core::memory::Config;
use forebay_core::tensor::Tensor;
use forebay_cuda::{CudaBackend, CudaUnavailable};
use scenarios::{
    MIB, MatmulCase, a_pool_keeps_contents, copies_and_fills, map, pattern, read_back, slice,
    uploads_and_downloads,
};

fn used(backend: &dyn Backend) -> u64 {
    let memory = backend.device_memory();
    memory.total.unwrap() - memory.free.unwrap()
}

on_fake! {
    a_device_says_what_it_is(Driver) {
        assert_eq!(CudaBackend::device_count(), Ok(1));
        let backend = open();
        let info = backend.info();
        assert_eq!(info.to_string(), "cuda:0 Fake GPU 0 (CUDA 13.0, sm_90)");
        assert!(!info.software && info.features.f16 && info.features.f64_math);
        assert_eq!(info.limits.max_workgroup_memory, 227 << 10);
        let limits = backend.limits();
        let managed = limits.virtual_memory.unwrap();
        assert_eq!((managed.granularity, managed.reservation), (PAGE, 288 * MIB));
        let found = forebay_cuda::probe().remove(0).unwrap();
        assert_eq!((found.compute_capability, found.memory, found.virtual_memory), ((9, 0), 256 * MIB, true));
    }

    the_processes_on_a_device_are_named(Management) {
        let backend = open();
        assert_eq!(count_calls("nvmlInit_v2"), 0, "nothing is loaded before it is requested");
        let found = backend.processes();
        let found: Vec<_> = found.iter().map(|p| (p.pid, p.name.as_str(), p.bytes.map(|b| b / MIB))).collect();
        let me = (std::process::id(), "python3", Some(5));
        assert_eq!(found, [(4242, "python3", Some(60)), me, (99, "", None)]);
        backend.processes();
        assert_eq!(count_calls("nvmlInit_v2"), 1);
    }

    processes_of_another_numbering_are_not_named(Management, "FAKE_NVML_CONTAINER" = "1") {
        assert_eq!(open().processes(), []);
        assert_eq!(count_calls("nvmlDeviceGetComputeRunningProcesses_v3"), 2);
    }

    without_the_right_to_ask_no_process_is_named(Management, "FAKE_NVML_DENIED" = "1") {
        assert_eq!(open().processes(), []);
    }

    without_nvml_no_process_is_named(Driver) {
        assert_eq!(open().processes(), []);
    }

    uploads_are_taken_at_once_and_arrive_in_order(Driver) {
        let backend = open();
        uploads_and_downloads(&*backend);
        assert!(count_calls("cuMemHostAlloc") <= 6, "4 chunks for uploads, 2 for downloads");
    }

    copies_and_fills_stay_on_the_device(Driver) {
        let backend = open();
        copies_and_fills(&*backend);
        assert_eq!(used(&*backend), 0);
    }

    a_pool_keeps_contents_in_virtual_memory(Driver, "FAKE_CUDA_MEMORY" = "67108864") {
        let backend = open();
        a_pool_keeps_contents(&backend);
        assert_eq!((used(&*backend), count_calls("cuMemUnmap")), (0, count_calls("cuMemMap")));
    }

    a_pool_keeps_contents_in_plain_segments(Driver, "FOREBAY_CUDA_VMM" = "0") {
        let backend = open();
        a_pool_keeps_contents(&backend);
        assert!(count_calls("cuMemAlloc_v2") > 10 && count_calls("cuMemMap") == 0);
        assert_eq!(used(&*backend), 0);
    }

    memory_that_cannot_be_pinned_is_done_without(Driver, "FAKE_CUDA_FAIL" = "cuMemHostAlloc:2:1") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let data = pattern(5000, 3);
        backend.upload(slice(segment, 0, 5000), &data).unwrap();
        assert_eq!(read_back(&*backend, slice(segment, 0, 5000)), data);
    }

    downloads_do_without_pinned_memory_too(Driver, "FAKE_CUDA_FAIL" = "cuMemHostAlloc:2:2") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let data = pattern(5000, 3);
        backend.upload(slice(segment, 0, 5000), &data).unwrap();
        assert_eq!(read_back(&*backend, slice(segment, 0, 5000)), data);
    }

    segments_grow_and_shrink_by_mapping(Driver) {
        let backend = open();
        let segment = backend.reserve_addresses(64 * MIB + 1).unwrap();
        map(&*backend, segment, 0, PAGE).unwrap();
        map(&*backend, segment, PAGE, 4 * PAGE).unwrap();
        assert_eq!(used(&*backend), 5 * PAGE);
        // Copies cross from one mapping into the next.
        let data = pattern(3 * PAGE as usize, 5);
        backend.upload(slice(segment, 4, 3 * PAGE), &data).unwrap();
        assert!(read_back(&*backend, slice(segment, 4, 3 * PAGE)) == data);
        let error = map(&*backend, segment, 0, PAGE).unwrap_err();
        assert!(matches!(error, SourceError::Driver { call: "cuMemMap", .. }), "{error}");
        backend.wait_fence(backend.record_fence().unwrap()).unwrap();
        backend.unmap(segment, PAGE, &[4 * PAGE]).unwrap();
        assert_eq!(used(&*backend), PAGE);
        backend.unmap(segment, 0, &[PAGE]).unwrap();
        backend.free_addresses(segment).unwrap();
        assert_eq!(used(&*backend), 0);
        assert!(backend.free_addresses(segment).is_err(), "freed twice");
        // No handle outlives its mapping.
        assert_eq!(count_calls("cuMemRelease"), count_calls("cuMemCreate"));
    }

    memory_moves_from_one_range_to_another(Driver) {
        let backend = open();
        let (old, new) = (backend.reserve_addresses(64 * MIB).unwrap(), backend.reserve_addresses(64 * MIB).unwrap());
        map(&*backend, old, 0, PAGE).unwrap();
        map(&*backend, old, 3 * PAGE, 2 * PAGE).unwrap();
        let pieces = [
            PageRemap { to: (new, 0), bytes: PAGE, from: Some((old, 0)) },
            PageRemap { to: (new, PAGE), bytes: 2 * PAGE, from: Some((old, 3 * PAGE)) },
            PageRemap { to: (new, 3 * PAGE), bytes: PAGE, from: None },
        ];
        backend.remap(&pieces).unwrap();
        assert_eq!((used(&*backend), count_calls("cuMemCreate"), count_calls("cuMemSetAccess")), (4 * PAGE, 3, 3));
        let data = pattern(4 * PAGE as usize, 5);
        backend.upload(slice(new, 0, 4 * PAGE), &data).unwrap();
        assert!(read_back(&*backend, slice(new, 0, 4 * PAGE)) == data);
        backend.wait_fence(backend.record_fence().unwrap()).unwrap();
        for PageRemap { to: (segment, offset), bytes, .. } in pieces {
            backend.unmap(segment, offset, &[bytes]).unwrap();
        }
        backend.free_addresses(old).unwrap();
        backend.free_addresses(new).unwrap();
        assert_eq!(used(&*backend), 0);
    }

    a_move_that_fails_leaves_nothing(Driver, "FAKE_CUDA_FAIL" = "cuMemMap:2:3") {
        let backend = open();
        let segment = backend.reserve_addresses(64 * MIB).unwrap();
        map(&*backend, segment, 0, PAGE).unwrap();
        let pieces = [
            PageRemap { to: (segment, 4 * PAGE), bytes: PAGE, from: Some((segment, 0)) },
            PageRemap { to: (segment, 5 * PAGE), bytes: PAGE, from: None },
        ];
        assert!(matches!(backend.remap(&pieces), Err(SourceError::OutOfMemory { .. })));
        assert_eq!(used(&*backend), 0);
        map(&*backend, segment, 0, PAGE).unwrap();
    }

    a_mapping_that_fails_half_way_leaves_nothing(Driver, "FAKE_CUDA_FAIL" = "cuMemMap:999:2") {
        let backend = open();
        let segment = backend.reserve_addresses(64 * MIB).unwrap();
        map(&*backend, segment, 0, PAGE).unwrap();
        let error = map(&*backend, segment, PAGE, PAGE).unwrap_err();
        assert_eq!(error.to_string(), "the driver refused cuMemMap: CUDA_ERROR_UNKNOWN");
        assert_eq!(used(&*backend), PAGE);
        map(&*backend, segment, PAGE, PAGE).unwrap();
    }

    a_mapping_without_access_is_undone(Driver, "FAKE_CUDA_FAIL" = "cuMemSetAccess:2:1") {
        let backend = open();
        let segment = backend.reserve_addresses(64 * MIB).unwrap();
        let error = map(&*backend, segment, 0, PAGE).unwrap_err();
        assert!(matches!(error, SourceError::OutOfMemory { bytes: PAGE, .. }), "{error}");
        assert_eq!(used(&*backend), 0);
        map(&*backend, segment, 0, PAGE).unwrap();
    }

    a_device_without_virtual_memory_says_so(Driver, "FAKE_CUDA_VMM" = "0") {
        let backend = open();
        assert_eq!(backend.limits().virtual_memory, None);
        assert!(matches!(backend.reserve_addresses(PAGE), Err(SourceError::Driver { .. })));
    }

    virtual_memory_can_be_switched_off(Driver, "FOREBAY_CUDA_VMM" = "0") {
        assert_eq!(open().limits().virtual_memory, None);
    }

    a_full_device_is_an_out_of_memory_error_and_stays_usable(Driver) {
        let backend = open();
        let error = backend.alloc_segment(300 * MIB).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the device has no room for 314572800 more bytes (cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, out of memory)"
        );
        let segment = backend.reserve_addresses(512 * MIB).unwrap();
        assert!(matches!(map(&*backend, segment, 0, 258 * MIB), Err(SourceError::OutOfMemory { .. })));
        map(&*backend, segment, 0, 256 * MIB).unwrap();
    }

    fences_are_passed_in_order(Driver) {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let nothing = backend.record_fence().unwrap();
        assert_eq!(backend.is_fence_signaled(nothing), Ok(true));
        let fence_after = |word| {
            for _ in 0..8 {
                backend.fill(slice(segment, 0, 4), word).unwrap();
            }
            backend.record_fence().unwrap()
        };
        let fences: Vec<_> = (0..4).map(fence_after).collect();
        assert!(fences.is_sorted() && nothing < fences[0]);
        assert_eq!(backend.record_fence().unwrap(), fences[3], "no work since");
        // The fake device does one piece of work for each query.
        assert_eq!(backend.is_fence_signaled(fences[3]), Ok(false));
        assert!((0..8).any(|_| backend.is_fence_signaled(fences[0]).unwrap()));
        assert_eq!(backend.is_fence_signaled(fences[3]), Ok(false));
        backend.wait_fence(fences[2]).unwrap();
        assert_eq!(backend.is_fence_signaled(fences[1]), Ok(true));
        assert!((0..8).any(|_| backend.is_fence_signaled(fences[3]).unwrap()));
        let unknown = backend.is_fence_signaled(Fence(99)).unwrap_err();
        assert!(unknown.to_string().contains("there is no fence 99; the last is 4"), "{unknown}");
        let events = count_calls("cuEventCreate");
        for word in 0..100 {
            let fence = fence_after(word);
            backend.wait_fence(fence).unwrap();
            assert_eq!(backend.is_fence_signaled(fence), Ok(true));
        }
        assert_eq!(count_calls("cuEventCreate"), events, "events are used again");
        // Fences that are never queried do not accumulate events either.
        for word in 0..100 {
            fence_after(word);
            read_back(&*backend, slice(segment, 0, 4));
        }
        assert!(count_calls("cuEventCreate") <= events + 2, "{} after {events}", count_calls("cuEventCreate"));
    }

    a_lost_device_is_told_from_other_errors_and_nothing_panics(Driver, "FAKE_CUDA_FAIL" = "cuMemsetD32Async:700:2") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let fill = || backend.fill(slice(segment, 0, 64), 1);
        fill().unwrap();
        let error = fill().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the device was lost: cuMemsetD32Async: CUDA_ERROR_ILLEGAL_ADDRESS, \
             an illegal memory access was encountered; open it again to go on"
        );
        let lost = |error: SourceError| matches!(error, SourceError::DeviceLost(_));
        assert!(lost(backend.alloc_segment(4).unwrap_err()));
        assert!(lost(backend.free_segment(segment).unwrap_err()));
        assert!(lost(backend.record_fence().unwrap_err()));
        assert!(matches!(backend.upload(slice(segment, 0, 4), &[0; 4]), Err(Error::Driver(SourceError::DeviceLost(_)))));
        assert!(backend.download(slice(segment, 0, 4), &mut [0; 4]).is_err());
        assert_eq!(backend.device_memory().free, None);
    }

    an_error_while_opening_is_an_error(Driver, "FAKE_CUDA_FAIL" = "cuStreamCreate:999:1") {
        let error = CudaBackend::open(0).unwrap_err();
        let expected = "no device `cuda:0`: the driver refused cuStreamCreate: CUDA_ERROR_UNKNOWN";
        assert_eq!(error.to_string(), expected);
        // No state of the failed attempt is left.
        assert_eq!(count_calls("cuDevicePrimaryCtxRelease_v2"), 1);
        open();
    }

    no_device(Driver, "FAKE_CUDA_DEVICES" = "0") {
        assert_eq!(CudaBackend::device_count(), Err(CudaUnavailable::NoDevice));
        assert_eq!(
            CudaBackend::open(0).unwrap_err().to_string(),
            "no device `cuda:0`: the NVIDIA driver found no device; look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        );
        assert_eq!(forebay_cuda::probe(), [Err(CudaUnavailable::NoDevice)]);
    }

    no_such_device(Driver, "FAKE_CUDA_DEVICES" = "2") {
        assert_eq!(forebay_cuda::probe().len(), 2);
        assert_eq!(
            CudaBackend::open(2).unwrap_err().to_string(),
            "no device `cuda:2`: there is no CUDA device 2; the driver found 2, counted from 0"
        );
    }

    an_old_driver(Driver, "FAKE_CUDA_VERSION" = "11040") {
        assert_eq!(CudaBackend::device_count(), Err(CudaUnavailable::OldDriver { found: 11_040 }));
        assert_eq!(call_log(), ["cuDriverGetVersion"], "nothing is called that it may not have");
    }

    a_driver_that_lacks_a_function(Driver, "LD_LIBRARY_PATH" = old_driver().to_str().unwrap()) {
        assert_eq!(CudaBackend::device_count(), Err(CudaUnavailable::MissingFunction("cuMemUnmap")));
        assert!(call_log().is_empty());
    }
}

fn square() -> MatmulCase {
    MatmulCase::new(DType::F32, [8; 3])
}

on_fake! {
    products_by_columns_are_the_products_by_rows(Products) {
        let backend = open();
        for dtype in [DType::F32, DType::F64] {
            for sizes in [[2, 3, 4], [17, 5, 9], [1, 6, 3], [6, 1, 3], [4, 4, 1]] {
                for product in MatmulCase::new(dtype, sizes).variants() {
                    assert!(product.check(&*backend), "refused: {product:?}");
                }
            }
        }
    }

    products_of_the_thread_keep_their_order(Products, "FOREBAY_CUDA_LAUNCH_THREAD" = "1") {
        let backend = open();
        for _ in 0..3 {
            for sizes in [[2, 3, 4], [17, 5, 9]] {
                for product in MatmulCase::new(DType::F32, sizes).variants() {
                    assert!(product.check(&*backend), "refused: {product:?}");
                }
            }
        }
    }

    algorithms_are_looked_up_once(Products) {
        let backend = open();
        for _ in 0..3 {
            assert!(square().check(&*backend));
        }
        assert_eq!((count_calls("heuristic"), count_calls("cublasLtMatmul")), (1, 3));
        forebay_cuda::set_allow_tf32(true);
        assert!(square().check(&*backend));
        assert_eq!(count_calls("heuristic"), 2);
        // The core handles what the library refuses, and the library is not asked again.
        let half = MatmulCase { dtype: DType::F16, ..square() };
        assert!(!half.check(&*backend) && !half.check(&*backend));
        assert_eq!(count_calls("heuristic"), 3);
        forebay_cuda::set_portable_kernels(true);
        assert!(!square().check(&*backend));
        forebay_cuda::set_portable_kernels(false);
        assert!(square().check(&*backend));
    }

    what_the_library_works_in_is_counted(Products) {
        let backend = open();
        assert_eq!(backend.library_bytes(), 0);
        assert!(square().check(&*backend));
        assert_eq!(backend.library_bytes(), 32 << 20);
    }

    portable_kernels_can_be_forced(Products, "FOREBAY_PORTABLE_KERNELS" = "1") {
        assert!(!square().check(&*open()));
        assert_eq!(count_calls("cublasLtMatmul"), 0);
    }

    a_toolkit_that_the_loader_does_not_know_is_found(Driver, "CUDA_HOME" = toolkit().to_str().unwrap()) {
        assert!(square().check(&*open()));
    }

    a_device_too_full_for_a_workspace_multiplies_all_the_same(Products, "FAKE_CUDA_MEMORY" = "16777216") {
        let backend = open();
        assert!(square().check(&*backend));
        assert_eq!(used(&*backend), 0);
    }

    tensors_are_shared_in_the_order_of_streams(Driver) {
        let device = Device::with_config(open(), Config::default());
        let x = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], [4], &device).unwrap();
        let stream = device.dlpack_stream().unwrap();
        let waits = || (count_calls("cuStreamWaitEvent"), count_calls("cuCtxSynchronize"));
        let before = waits();
        // SAFETY: the device's own stream outlives the export.
        let exported = unsafe { x.to_dlpack_on_stream(stream) }.unwrap();
        assert_eq!(waits(), (before.0 + 1, before.1), "the consumer's stream waits");
        let address = exported.tensor().data;
        // SAFETY: the only consumer is the device itself.
        let y = unsafe { Tensor::from_dlpack(exported, &device) }.unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
        drop(y);
        assert_eq!(waits(), (before.0 + 2, before.1), "the device waits for the consumer's stream");
        let unknown = x.to_dlpack().unwrap();
        assert_eq!(unknown.tensor().data, address, "the tensor does not move");
        drop(unknown);
        assert_eq!(waits(), (before.0 + 2, before.1 + 1), "without a stream, the host waits");
    }

    every_thread_finds_its_way_to_the_device(Driver) {
        let backend = open();
        let other = open();
        std::thread::scope(|scope| {
            let segment = scope.spawn(|| backend.alloc_segment(MIB).unwrap()).join().unwrap();
            other.free_segment(segment).unwrap();
            scope.spawn(|| copies_and_fills(&*other)).join().unwrap();
        });
    }
}
