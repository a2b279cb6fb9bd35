//! Tests kernels on a fake driver that simulates a device on the CPU and logs the launches.
#![cfg(target_os = "linux")]

mod fake_cuda;
mod scenarios;

use std::fs;
use std::sync::Arc;

use fake_cuda::Libraries::{Compiler, Driver};
use fake_cuda::{PAGE, cache, call_log, count_calls, on_fake, open};
use forebay_core::backend::{
    Backend, Command, KernelId, KernelSource, Launch, PageRemap, SegmentId, Slice, SourceError,
};
use forebay_core::error::{Error, Result};
use scenarios::{DOUBLE, MIB, SCALE, kernel, map, pattern, read_back, slice};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a kernel's id once it is compiled.
fn compile_and_wait(backend: &dyn Backend, source: &KernelSource<'_>) -> Result<KernelId> {
    let id = backend.compile(source)?;
    backend.wait_compiled(id).map(|()| id)
}

/// Returns a device, memory of it, and a function that launches a kernel with a number of groups.
fn doubling_launcher() -> (Arc<dyn Backend>, SegmentId, impl Fn(u32) -> Result<()>) {
    let backend = open();
    let segment = backend.alloc_segment(MIB).unwrap();
    let kernel = compile_and_wait(&*backend, &kernel(DOUBLE, "double")).unwrap();
    let own = Arc::clone(&backend);
    let launch = move |groups| {
        own.launch(&Launch {
            kernel,
            bindings: &[slice(segment, 0, 64)],
            params: &[],
            groups: [groups, 1, 1],
        })
    };
    (backend, segment, launch)
}

/// Returns the groups of all launches so far, in order.
fn launched_grids() -> Vec<u32> {
    let groups = |line: String| line.strip_prefix("launch ")?.split(',').next()?.parse().ok();
    call_log().into_iter().filter_map(groups).collect()
}

/// Launches a kernel whose compilation ends after [`release_compiler`].
fn launch_before_compiled(backend: &dyn Backend, slice: Slice) {
    let kernel = backend.compile(&kernel(DOUBLE, "double")).unwrap();
    backend.launch(&Launch { kernel, bindings: &[slice], params: &[], groups: [1, 1, 1] }).unwrap();
}

/// Releases the waiting compiler.
fn release_compiler() {
    let mut path = std::env::var_os("FAKE_CUDA_LOG").unwrap();
    path.push(".go");
    fs::write(path, "").unwrap();
}

on_fake! {
    commands_wait_for_the_compiler_in_their_order(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        backend.upload(slice(segment, 0, 64), &pattern(64, 3)).unwrap();
        // Two kernels compile at once, and the program continues.
        let [first, second] = [kernel(DOUBLE, "double"), kernel(SCALE, "scale")].map(|k| backend.compile(&k).unwrap());
        assert!(first != second);
        let bindings = [slice(segment, 0, 64)];
        backend.launch(&Launch { kernel: first, bindings: &bindings, params: &[], groups: [5, 1, 1] }).unwrap();
        // Later commands must not overtake the launch.
        backend.copy(slice(segment, 64, 8), slice(segment, 0, 8)).unwrap();
        backend.fill(slice(segment, 0, 8), 7).unwrap();
        backend.launch(&Launch { kernel: first, bindings: &bindings, params: &[], groups: [6, 1, 1] }).unwrap();
        backend.flush().unwrap();
        let wrong = Launch { kernel: first, bindings: &[], params: &[], groups: [1, 1, 1] };
        assert!(matches!(backend.launch(&wrong), Err(Error::Argument { .. })), "arguments are checked before the launch is deferred");
        let ran = || {
            let mine = |line: &String| ["launch ", "cuMemcpyAsync", "cuMemsetD32Async"].iter().any(|w| line.starts_with(w));
            let first = |line: String| line.split([',', ':']).next().unwrap_or_default().to_owned();
            call_log().into_iter().filter(mine).map(first).collect::<Vec<_>>()
        };
        assert!(ran().is_empty(), "{:?}", ran());
        release_compiler();
        assert_eq!(read_back(&*backend, slice(segment, 64, 8)), pattern(64, 3)[..8]);
        assert_eq!(ran(), ["launch 5", "cuMemcpyAsync", "cuMemsetD32Async", "launch 6"]);
        assert_eq!(read_back(&*backend, slice(segment, 0, 8)), 7_u32.to_le_bytes().repeat(2));
        // From then on nothing is deferred.
        backend.launch(&Launch { kernel: first, bindings: &bindings, params: &[], groups: [8, 1, 1] }).unwrap();
        assert_eq!(ran().last().unwrap(), "launch 8");
    }

    the_launch_thread_keeps_the_order_of_calls(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "1", "FAKE_CUDA_LAUNCH_US" = "500") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let kernels = ["2.0", "3.0"].map(|by| compile_and_wait(&*backend, &kernel(&DOUBLE.replace("2.0", by), "double")).unwrap());
        let launch = |n: u32| {
            let bindings = [slice(segment, 16 * u64::from(n), 64)];
            backend.launch(&Launch { kernel: kernels[n as usize % 2], bindings: &bindings, params: &[], groups: [n, 1, 1] }).unwrap();
        };
        let ran = || {
            let mine = |line: &String| ["launch ", "cuMemcpyAsync", "cuMemsetD32Async", "cuEventRecord"].iter().any(|w| line.starts_with(w));
            call_log().into_iter().filter(mine).collect::<Vec<_>>()
        };
        // Each launch has its own arguments.
        for _ in 0..3 {
            let before = ran().len();
            (1..=23).for_each(launch);
            assert!(ran().len() - before < 23, "the program does not wait for the launches");
            backend.flush().unwrap();
            let expected = (1..=23).map(|n| {
                let address = (segment.0 + 16 * n).to_le_bytes();
                (format!("launch {n},1,1 of"), hex(&address))
            });
            for (line, (start, argument)) in ran()[before..].iter().zip(expected) {
                assert!(line.starts_with(&start) && line.ends_with(&argument), "{line}: {start} {argument}");
            }
            assert_eq!(ran().len() - before, 23);
        }
        let before = ran().len();
        let words = || ran()[before..].iter().map(|line| line.split([',', ':']).next().unwrap_or_default().to_owned()).collect::<Vec<_>>();
        launch(3);
        launch(4);
        backend.copy(slice(segment, 64, 8), slice(segment, 0, 8)).unwrap();
        launch(5);
        backend.fill(slice(segment, 0, 8), 7).unwrap();
        launch(6);
        let event = backend.record_event(0).unwrap();
        assert_eq!(words(), ["launch 3", "launch 4", "cuMemcpyAsync", "launch 5", "cuMemsetD32Async", "launch 6", "cuEventRecord"]);
        backend.wait_event(1, event).unwrap();
        launch(11);
        let fence = backend.record_fence().unwrap();
        assert_eq!(words()[7], "launch 11");
        backend.wait_fence(fence).unwrap();
        launch(12);
        let mut first = [0; 8];
        backend.download(slice(segment, 0, 8), &mut first).unwrap();
        assert!(words().contains(&"launch 12".to_owned()));
        assert_eq!(first, *7_u32.to_le_bytes().repeat(2));
        launch(13);
        backend.free_segment(segment).unwrap();
        assert_eq!(words().last().unwrap(), "launch 13", "memory is not freed before it");
    }

    calls_beyond_the_limit_of_pending_calls_keep_their_order(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "1", "FAKE_CUDA_LAUNCH_US" = "20") {
        let (backend, _, launch) = doubling_launcher();
        (1..=2000).for_each(|n| launch(n).unwrap());
        backend.flush().unwrap();
        assert_eq!(launched_grids(), (1..=2000).collect::<Vec<_>>());
    }

    pending_calls_are_launched_by_any_thread_that_waits(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "1") {
        let (backend, _, launch) = doubling_launcher();
        launch(7).unwrap();
        // Also if that thread has never used the device.
        let other = Arc::clone(&backend);
        std::thread::spawn(move || other.wait_fence(other.record_fence().unwrap()).unwrap()).join().unwrap();
        assert_eq!(launched_grids(), [7], "{:?}", call_log());
    }

    several_threads_launch_on_one_queue(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "1") {
        let (backend, _, launch) = doubling_launcher();
        std::thread::scope(|scope| {
            for first in [1, 1001, 2001] {
                let (launch, backend) = (&launch, &backend);
                scope.spawn(move || {
                    for n in first..first + 300 {
                        launch(n).unwrap();
                        if n % 50 == 0 {
                            backend.flush().unwrap();
                            assert!(launched_grids().contains(&n), "{n}");
                        }
                    }
                });
            }
        });
        backend.flush().unwrap();
        let grids = launched_grids();
        assert_eq!(grids.len(), 900);
        for first in [1, 1001, 2001] {
            let mine: Vec<_> = grids.iter().copied().filter(|n| (first..first + 300).contains(n)).collect();
            assert_eq!(mine, (first..first + 300).collect::<Vec<_>>(), "each thread's launches keep their order");
        }
    }

    pending_calls_are_launched_before_the_device_closes(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "1", "FAKE_CUDA_LAUNCH_US" = "500") {
        let (backend, _, launch) = doubling_launcher();
        (1..=20).for_each(|n| launch(n).unwrap());
        drop((backend, launch));
        assert_eq!(launched_grids(), (1..=20).collect::<Vec<_>>());
    }

    a_program_ends_while_calls_are_pending(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "1", "FAKE_CUDA_LAUNCH_US" = "500") {
        let (backend, _, launch) = doubling_launcher();
        (1..=20).for_each(|n| launch(n).unwrap());
        std::mem::forget((backend, launch));
    }

    a_launch_that_fails_on_the_thread_is_reported_once_and_others_run(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "1", "FAKE_CUDA_FAIL" = "cuLaunchKernelEx:1:1") {
        let (backend, segment, launch) = doubling_launcher();
        (1..=7).for_each(|n| launch(n).unwrap());
        let error = backend.free_segment(segment).unwrap_err();
        assert!(error.to_string().contains("cuLaunchKernelEx"), "{error}");
        assert_eq!((launched_grids().len(), count_calls("cuMemFree_v2")), (6, 1), "the memory is freed anyway");
        launch(8).unwrap();
        backend.record_fence().unwrap();
        assert_eq!(launched_grids().len(), 7, "and the error is reported once");
    }

    the_first_launches_of_a_burst_go_to_the_driver_directly(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let (_, _, launch) = doubling_launcher();
        for round in 1..4 {
            launch(1).unwrap();
            assert_eq!(launched_grids().len(), round);
        }
    }

    without_the_launch_thread_calls_go_to_the_driver_directly(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_LAUNCH_THREAD" = "0") {
        let (_, _, launch) = doubling_launcher();
        for round in 1..100 {
            launch(1).unwrap();
            assert_eq!(launched_grids().len(), round);
        }
    }

    uses_of_a_queue_wait_for_its_deferred_launches(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let side = backend.open_queue(1).unwrap().unwrap();
        let segment = backend.alloc_segment(MIB).unwrap();
        let launch = |queue: &dyn Backend, groups: u32, content: &str| {
            let source = DOUBLE.replace("2.0", content);
            let kernel = queue.compile(&kernel(&source, "double")).unwrap();
            let bindings = [slice(segment, 0, 64)];
            queue.launch(&Launch { kernel, bindings: &bindings, params: &[], groups: [groups, 1, 1] }).unwrap();
        };
        let launches = || call_log().iter().filter(|line| line.starts_with("launch ")).count();
        launch(&*backend, 1, "2.0");
        launch(&*side, 2, "3.0");
        assert_eq!(launches(), 0);
        release_compiler();
        // A fence comes after everything on all queues.
        let fence = backend.record_fence().unwrap();
        assert_eq!(launches(), 2);
        backend.wait_fence(fence).unwrap();
        launch(&*side, 3, "4.0");
        // An event comes after everything on its own queue, and before all later work of a queue that waits
        // for it.
        let event = backend.record_event(1).unwrap();
        assert_eq!(launches(), 3);
        launch(&*backend, 4, "5.0");
        backend.wait_event(0, event).unwrap();
        assert_eq!(launches(), 4);
        launch(&*backend, 5, "6.0");
        backend.upload(slice(segment, 0, 64), &pattern(64, 1)).unwrap();
        assert_eq!(launches(), 5);
        launch(&*backend, 6, "7.0");
        let step = backend.prepare_commands(&[Command::Fill { dst: slice(segment, 0, 8), word: 7 }]).unwrap();
        assert!(step.is_some() && launches() == 6);
    }

    a_remap_keeps_its_place_among_deferred_commands(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let (old, new) = (backend.reserve_addresses(64 * MIB).unwrap(), backend.reserve_addresses(64 * MIB).unwrap());
        let kept = backend.alloc_segment(MIB).unwrap();
        map(&*backend, old, 0, PAGE).unwrap();
        backend.upload(slice(old, 0, 256), &pattern(256, 3)).unwrap();
        assert!(!backend.has_deferred_work());
        launch_before_compiled(&*backend, slice(kept, 0, 64));
        assert!(backend.has_deferred_work());
        backend.copy(slice(kept, 0, 64), slice(old, 64, 64)).unwrap();
        backend.fill(slice(old, 0, 64), 7).unwrap();
        backend
            .remap_after_submitted(&[
                PageRemap { to: (new, 0), bytes: PAGE, from: Some((old, 0)) },
                PageRemap { to: (new, PAGE), bytes: PAGE, from: None },
            ])
            .unwrap();
        // Maps new memory at the source and moves memory away from the target of the deferred remap.
        map(&*backend, old, 0, PAGE).unwrap();
        backend.remap(&[PageRemap { to: (new, 3 * PAGE), bytes: PAGE, from: Some((new, PAGE)) }]).unwrap();
        assert_eq!((count_calls("cuMemMap"), count_calls("cuMemUnmap")), (1, 0), "{:?}", call_log());
        backend.fill(slice(old, 0, 64), 9).unwrap();
        backend.copy(slice(kept, 64, 128), slice(new, 0, 128)).unwrap();
        backend.copy(slice(kept, 192, 64), slice(old, 0, 64)).unwrap();
        backend.copy(slice(new, 3 * PAGE, 64), slice(new, 0, 64)).unwrap();
        release_compiler();
        let seven = 7_u32.to_le_bytes().repeat(16);
        let expected = [&pattern(256, 3)[64..128], &seven, &pattern(256, 3)[64..128], &9_u32.to_le_bytes().repeat(16)];
        assert_eq!(read_back(&*backend, slice(kept, 0, 256)), expected.concat());
        assert_eq!(read_back(&*backend, slice(new, 3 * PAGE, 64)), seven);
        // The remap waited for the work that had used the memory, and only for that.
        let at = |name: &str| call_log().iter().position(|line| line.starts_with(name)).unwrap();
        assert!(at("launch ") < at("cuStreamSynchronize") && at("cuStreamSynchronize") < at("cuMemUnmap"), "{:?}", call_log());
        assert!(!backend.has_deferred_work());
        // With no deferred commands, the remap waits for the device.
        backend.fill(slice(old, 64, 64), 5).unwrap();
        backend.remap_after_submitted(&[PageRemap { to: (old, PAGE), bytes: PAGE, from: Some((old, 0)) }]).unwrap();
        assert_eq!(read_back(&*backend, slice(old, PAGE + 64, 64)), 5_u32.to_le_bytes().repeat(16));
        backend.wait_fence(backend.record_fence().unwrap()).unwrap();
        for (segment, offset) in [(new, 0), (new, 3 * PAGE), (old, PAGE)] {
            backend.unmap(segment, offset, &[PAGE]).unwrap();
        }
        assert_eq!(count_calls("cuMemRelease"), count_calls("cuMemCreate") + count_calls("cuMemRetainAllocationHandle"));
    }

    a_new_queue_ends_deferred_remaps(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let segment = backend.reserve_addresses(64 * MIB).unwrap();
        map(&*backend, segment, 0, PAGE).unwrap();
        launch_before_compiled(&*backend, slice(segment, 0, 64));
        let moved = |from, to| PageRemap { to: (segment, to * PAGE), bytes: PAGE, from: Some((segment, from * PAGE)) };
        backend.remap_after_submitted(&[moved(0, 1)]).unwrap();
        assert_eq!(count_calls("cuMemMap"), 1);
        release_compiler();
        let side = backend.open_queue(1).unwrap().unwrap();
        assert_eq!(count_calls("cuMemMap"), 2);
        // With a second queue in use, no remap is deferred.
        assert!(!backend.has_deferred_work());
        side.fill(slice(segment, PAGE, 64), 5).unwrap();
        backend.remap_after_submitted(&[moved(1, 2)]).unwrap();
        assert_eq!(read_back(&*backend, slice(segment, 2 * PAGE, 64)), 5_u32.to_le_bytes().repeat(16));
    }

    a_deferred_remap_that_fails_is_retried(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_CUDA_FAIL" = "cuMemMap:2:2", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let segment = backend.reserve_addresses(64 * MIB).unwrap();
        map(&*backend, segment, 0, PAGE).unwrap();
        backend.upload(slice(segment, 0, 64), &pattern(64, 3)).unwrap();
        launch_before_compiled(&*backend, slice(segment, 0, 64));
        let moved = PageRemap { to: (segment, PAGE), bytes: PAGE, from: Some((segment, 0)) };
        backend.remap_after_submitted(&[moved]).unwrap();
        backend.fill(slice(segment, PAGE, 8), 7).unwrap();
        release_compiler();
        let error = backend.download(slice(segment, PAGE, 64), &mut [0; 64]).unwrap_err();
        assert!(matches!(error, Error::Driver(SourceError::OutOfMemory { .. })), "{error}");
        let expected = [&7_u32.to_le_bytes().repeat(2), &pattern(64, 3)[8..]].concat();
        assert_eq!(read_back(&*backend, slice(segment, PAGE, 64)), expected);
    }

    a_remap_without_memory_fails_before_it_is_deferred(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let segment = backend.reserve_addresses(1024 * MIB).unwrap();
        map(&*backend, segment, 0, PAGE).unwrap();
        launch_before_compiled(&*backend, slice(segment, 0, 64));
        release_compiler();
        let pieces = [
            PageRemap { to: (segment, PAGE), bytes: PAGE, from: Some((segment, 0)) },
            PageRemap { to: (segment, 2 * PAGE), bytes: 512 * MIB, from: None },
        ];
        assert!(matches!(backend.remap_after_submitted(&pieces), Err(SourceError::OutOfMemory { .. })));
        assert_eq!(backend.device_memory().free, backend.device_memory().total, "the memory of the failed remap is unmapped");
        map(&*backend, segment, 0, PAGE).unwrap();
    }

    what_is_not_compiled_is_said_and_nothing_overtakes_it(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let wrong = DOUBLE.replace("double", "fail_to_compile");
        let kernel = backend.compile(&kernel(&wrong, "fail_to_compile")).unwrap();
        let bindings = [slice(segment, 0, 64)];
        let launch = Launch { kernel, bindings: &bindings, params: &[], groups: [1, 1, 1] };
        // The launch is accepted before the compiler reports its error.
        backend.launch(&launch).unwrap();
        backend.fill(slice(segment, 0, 8), 7).unwrap();
        release_compiler();
        let downloaded = backend.download(slice(segment, 0, 8), &mut [0; 8]).err();
        for error in [downloaded, backend.record_fence().err().map(Error::from), backend.launch(&launch).err()] {
            let message = error.unwrap().to_string();
            assert!(message.contains("it is wrong") && message.contains("a test's kernel"), "{message}");
        }
        assert_eq!(count_calls("cuMemsetD32Async"), 0);
    }

    a_module_that_runs_out_of_memory_is_loaded_later(Compiler, "FAKE_CUDA_PARAMS" = "8", "FAKE_CUDA_FAIL" = "cuModuleLoadData:2:1", "FAKE_NVRTC_WAITS" = "1") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let kernel = backend.compile(&kernel(DOUBLE, "double")).unwrap();
        let bindings = [slice(segment, 0, 64)];
        backend.launch(&Launch { kernel, bindings: &bindings, params: &[], groups: [3, 1, 1] }).unwrap();
        backend.fill(slice(segment, 0, 8), 7).unwrap();
        release_compiler();
        let error = backend.download(slice(segment, 0, 8), &mut [0; 8]).unwrap_err();
        assert!(matches!(error, Error::Driver(SourceError::Driver { call: "cuModuleLoadData", .. })), "{error}");
        assert_eq!(read_back(&*backend, slice(segment, 0, 8)), 7_u32.to_le_bytes().repeat(2));
        assert!(call_log().iter().any(|line| line.starts_with("launch 3,1,1")));
    }

    a_launch_passes_addresses_lengths_and_parameters(Compiler, "FAKE_CUDA_PARAMS" = "8,8,16,12") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let source = KernelSource { overrides: &[("width", 128.0)], ..kernel(SCALE, "scale") };
        let id = compile_and_wait(&*backend, &source).unwrap();
        let params = pattern(12, 1);
        let bindings = [slice(segment, 256, 400), slice(segment, 1024, 4096)];
        let launch = Launch { kernel: id, bindings: &bindings, params: &params, groups: [7, 2, 1] };
        backend.launch(&launch).unwrap();
        let address = |offset: u64| hex(&(segment.0 + offset).to_le_bytes());
        let lengths = [400_u64.to_le_bytes(), 4096_u64.to_le_bytes()].concat();
        let expected = format!(
            "launch 7,2,1 of 128,2,1: {} {} {} {}",
            address(256), address(1024), hex(&lengths), hex(&params)
        );
        assert_eq!(call_log().last(), Some(&expected));
        assert_eq!(count_calls("--gpu-architecture=sm_90"), 1, "{:?}", call_log());
        // With too few bindings or parameters, the driver would read out of bounds.
        assert!(matches!(backend.launch(&Launch { bindings: &bindings[..1], ..launch }), Err(Error::Argument { .. })));
        let error = backend.launch(&Launch { params: &params[..8], ..launch }).unwrap_err();
        assert_eq!(
            error.message(),
            "launch: the kernel takes 2 bindings and 12 bytes of parameters; got 2 and 8"
        );
        let unknown = KernelId(9);
        assert!(matches!(backend.launch(&Launch { kernel: unknown, ..launch }), Err(Error::Argument { .. })));
    }

    kernels_are_started_early_on_queues_and_in_order_in_graphs(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let kernel = compile_and_wait(&*backend, &kernel(DOUBLE, "double")).unwrap();
        let bindings = [slice(segment, 0, 64)];
        let launch = Launch { kernel, bindings: &bindings, params: &[], groups: [1, 1, 1] };
        let started = || (count_calls("programmatic start"), count_calls("serialised start"));
        backend.launch(&launch).unwrap();
        assert_eq!(started(), (1, 0));
        // In a graph, kernels run one after the other.
        backend.prepare_commands(&[Command::Launch(launch)]).unwrap().unwrap().enqueue().unwrap();
        assert_eq!(started(), (1, 1));
        backend.open_queue(1).unwrap().unwrap().launch(&launch).unwrap();
        backend.launch(&launch).unwrap();
        assert_eq!(started(), (3, 1));
    }

    starting_early_can_be_switched_off(Compiler, "FAKE_CUDA_PARAMS" = "8", "FOREBAY_CUDA_PDL" = "0") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        launch_before_compiled(&*backend, slice(segment, 0, 64));
        backend.wait_fence(backend.record_fence().unwrap()).unwrap();
        assert_eq!((count_calls("programmatic start"), count_calls("serialised start")), (0, 1));
    }

    a_captured_step_is_one_graph(Compiler, "FAKE_CUDA_PARAMS" = "8,8,16,12") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let id = backend.compile(&KernelSource { overrides: &[("width", 128.0)], ..kernel(SCALE, "scale") }).unwrap();
        let bindings = [slice(segment, 256, 400), slice(segment, 1024, 4096)];
        let [first, second] = [pattern(12, 1), pattern(12, 2)];
        let launch = Launch { kernel: id, bindings: &bindings, params: &first, groups: [7, 2, 1] };
        let commands = [
            Command::Fill { dst: slice(segment, 0, 8), word: 7 },
            Command::Launch(launch),
            Command::Copy { dst: slice(segment, 64, 8), src: slice(segment, 0, 8) },
        ];
        let contents = || read_back(&*backend, slice(segment, 64, 8));
        backend.fill(slice(segment, 64, 8), 1).unwrap();
        let mut step = backend.prepare_commands(&commands).unwrap().unwrap();
        assert!(step.is_driver_graph());
        assert_eq!(contents(), 1_u32.to_le_bytes().repeat(2), "preparing runs nothing");
        let runs = || call_log().into_iter().filter(|line| line.starts_with("launch 7,2,1")).collect::<Vec<_>>();
        assert!(runs().is_empty());
        step.enqueue().unwrap();
        assert_eq!(contents(), 7_u32.to_le_bytes().repeat(2));
        step.set_params(1, &second).unwrap();
        step.enqueue().unwrap();
        assert_eq!((count_calls("cuGraphLaunch"), count_calls("cuGraphInstantiateWithFlags")), (2, 1));
        let runs = runs();
        assert_eq!(runs.len(), 2);
        assert!(runs[0].ends_with(&hex(&first)) && runs[1].ends_with(&hex(&second)), "{runs:?}");
        assert!(step.set_params(0, &second).is_err(), "a fill has no parameters");
        assert!(step.set_params(1, &second[..4]).is_err());
        drop(step);
        assert_eq!((count_calls("cuGraphExecDestroy"), count_calls("cuGraphDestroy")), (1, 1));
    }

    commands_that_form_no_graph_are_left_to_the_core(Compiler, "FAKE_CUDA_FAIL" = "cuGraphInstantiateWithFlags:999:1") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let commands = [Command::Fill { dst: slice(segment, 0, 8), word: 7 }];
        assert!(backend.prepare_commands(&commands).unwrap().is_none());
        assert_eq!((count_calls("cuStreamEndCapture"), count_calls("cuGraphDestroy"), count_calls("cuGraphExecDestroy")), (1, 1, 0));
        assert!(backend.prepare_commands(&commands).unwrap().is_some());
    }

    kernels_are_compiled_once(Compiler) {
        let backend = open();
        let first = compile_and_wait(&*backend, &kernel(DOUBLE, "double")).unwrap();
        assert_eq!(compile_and_wait(&*backend, &kernel(DOUBLE, "double")).unwrap(), first);
        let narrow = compile_and_wait(&*backend, &kernel(SCALE, "scale")).unwrap();
        let wide = KernelSource { overrides: &[("width", 64.0)], ..kernel(SCALE, "scale") };
        let wide = compile_and_wait(&*backend, &wide).unwrap();
        assert!(first != narrow && narrow != wide);
        assert_eq!((count_calls("nvrtcCompileProgram"), count_calls("cuModuleLoadData")), (3, 3));
        // Another device finds the kernels on disk.
        let other = open();
        compile_and_wait(&*other, &kernel(DOUBLE, "double")).unwrap();
        assert_eq!((count_calls("nvrtcCompileProgram"), count_calls("cuModuleLoadData")), (3, 4));
        // Files that are damaged, or that the driver refuses, are written again.
        let files: Vec<_> = fs::read_dir(cache()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 3);
        for file in &files {
            fs::write(file, b"damaged").unwrap();
        }
        compile_and_wait(&*open(), &kernel(DOUBLE, "double")).unwrap();
        compile_and_wait(&*open(), &kernel(DOUBLE, "double")).unwrap();
        assert_eq!(count_calls("nvrtcCompileProgram"), 4);
    }

    errors_name_the_invalid_kernel(Compiler) {
        let backend = open();
        let error = backend.compile(&kernel("fn f(", "f")).unwrap_err();
        assert!(error.to_string().starts_with("kernel `a test's kernel` does not compile: "), "{error}");
        let error = backend.compile(&kernel(DOUBLE, "triple")).unwrap_err();
        assert!(error.to_string().contains("triple"), "{error}");
        assert_eq!(count_calls("nvrtcCompileProgram"), 0);
        let wrong = DOUBLE.replace("double", "fail_to_compile");
        for _ in 0..2 {
            let error = compile_and_wait(&*backend, &kernel(&wrong, "fail_to_compile")).unwrap_err();
            assert!(matches!(error, Error::KernelCompilation { .. }) && error.to_string().contains("it is wrong"), "{error}");
        }
        compile_and_wait(&*backend, &kernel(DOUBLE, "double")).unwrap();
    }

    without_a_compiler_the_message_says_what_to_install(Driver) {
        let libraries = forebay_cuda::libraries();
        if libraries.iter().any(|library| library.name == "NVRTC" && library.version.is_some()) {
            return println!("this machine has NVRTC where every program finds it: nothing to test");
        }
        let error = open().compile(&kernel(DOUBLE, "double")).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("NVRTC") && message.contains("install"), "{message}");
    }

    a_closed_device_frees_all_driver_objects(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let backend = open();
        let segment = backend.alloc_segment(16 * MIB).unwrap();
        backend.upload(slice(segment, 0, 10 << 20), &vec![1; 10 << 20]).unwrap();
        read_back(&*backend, slice(segment, 0, 10 << 20));
        compile_and_wait(&*backend, &kernel(DOUBLE, "double")).unwrap();
        backend.record_fence().unwrap();
        backend.free_segment(segment).unwrap();
        drop(backend);
        for (made, given_back) in [
            ("cuEventCreate", "cuEventDestroy_v2"),
            ("cuMemHostAlloc", "cuMemFreeHost"),
            ("cuModuleLoadData", "cuModuleUnload"),
            ("cuStreamCreate", "cuStreamDestroy_v2"),
            ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
        ] {
            assert!(count_calls(made) > 0 && count_calls(made) == count_calls(given_back), "{made}");
        }
        assert_eq!(call_log().last().map(String::as_str), Some("cuDevicePrimaryCtxRelease_v2"));
        // A new device works without the old context.
        open().alloc_segment(4).unwrap();
    }
}
