//! Kernels on a driver that plays a device on the CPU and writes down what it is told to launch.
#![cfg(target_os = "linux")]

mod fake_cuda;
mod scenarios;

use std::fs;

use fake_cuda::Libraries::{Compiler, Driver};
use fake_cuda::{cache, count, hold_compiler, log, on_fake, open};
use forebay_core::backend::{Backend, Command, KernelId, KernelSource, Launch, SegmentId, SourceError};
use forebay_core::error::Error;
use scenarios::{DOUBLE, MIB, SCALE, downloaded, kernel, pattern, slice};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Runs a kernel of one binding and no parameters, and waits until it is compiled.
fn run(backend: &dyn Backend, segment: SegmentId, id: KernelId) -> Result<(), Error> {
    let bindings = [slice(segment, 0, 256)];
    backend.launch(&Launch { kernel: id, bindings: &bindings, params: &[], groups: [1, 1, 1] })?;
    backend.flush()
}

fn launches() -> Vec<String> {
    log().into_iter().filter(|line| line.starts_with("launch")).collect()
}

on_fake! {
    a_launch_hands_over_addresses_lengths_and_parameters(Compiler, "FAKE_CUDA_PARAMS" = "8,8,16,12") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let id = backend.compile(&KernelSource { overrides: &[("width", 128.0)], ..kernel(SCALE, "scale") }).unwrap();
        let params = pattern(12, 1);
        let bindings = [slice(segment, 256, 400), slice(segment, 1024, 4096)];
        let launch = Launch { kernel: id, bindings: &bindings, params: &params, groups: [7, 2, 1] };
        backend.launch(&launch).unwrap();
        backend.flush().unwrap();
        let address = |offset: u64| hex(&(segment.0 + offset).to_le_bytes());
        let lengths = [400_u64.to_le_bytes(), 4096_u64.to_le_bytes()].concat();
        let expected = format!(
            "launch 7,2,1 of 128,2,1: {} {} {} {}",
            address(256), address(1024), hex(&lengths), hex(&params)
        );
        assert_eq!(log().last(), Some(&expected));
        assert_eq!(count("--gpu-architecture=sm_90"), 1, "{:?}", log());
        // Too few bindings or parameters would let the driver read what is not there.
        assert!(matches!(backend.launch(&Launch { bindings: &bindings[..1], ..launch }), Err(Error::Argument { .. })));
        let error = backend.launch(&Launch { params: &params[..8], ..launch }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "launch: the kernel takes 2 bindings and 12 bytes of parameters; got 2 and 8"
        );
        let unknown = KernelId(9);
        assert!(matches!(backend.launch(&Launch { kernel: unknown, ..launch }), Err(Error::Argument { .. })));
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
        let contents = || downloaded(&*backend, slice(segment, 64, 8));
        backend.fill(slice(segment, 64, 8), 1).unwrap();
        let mut step = backend.prepare(&commands).unwrap().unwrap();
        assert!(step.is_graph());
        assert_eq!(contents(), 1_u32.to_le_bytes().repeat(2), "preparing runs nothing");
        let runs = || log().into_iter().filter(|line| line.starts_with("launch 7,2,1")).collect::<Vec<_>>();
        assert!(runs().is_empty());
        step.enqueue().unwrap();
        assert_eq!(contents(), 7_u32.to_le_bytes().repeat(2));
        step.set_params(1, &second).unwrap();
        step.enqueue().unwrap();
        assert_eq!((count("cuGraphLaunch"), count("cuGraphInstantiateWithFlags")), (2, 1));
        let runs = runs();
        assert_eq!(runs.len(), 2);
        assert!(runs[0].ends_with(&hex(&first)) && runs[1].ends_with(&hex(&second)), "{runs:?}");
        assert!(step.set_params(0, &second).is_err(), "a fill has no parameters");
        assert!(step.set_params(1, &second[..4]).is_err());
        drop(step);
        assert_eq!((count("cuGraphExecDestroy"), count("cuGraphDestroy")), (1, 1));
    }

    a_step_that_is_no_graph_is_left_to_the_core(Compiler, "FAKE_CUDA_FAIL" = "cuGraphInstantiateWithFlags:999:1") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let commands = [Command::Fill { dst: slice(segment, 0, 8), word: 7 }];
        assert!(backend.prepare(&commands).unwrap().is_none());
        assert_eq!((count("cuStreamEndCapture"), count("cuGraphDestroy"), count("cuGraphExecDestroy")), (1, 1, 0));
        assert!(backend.prepare(&commands).unwrap().is_some());
    }

    kernels_are_compiled_once(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let double = || {
            let backend = open();
            let segment = backend.alloc_segment(MIB).unwrap();
            let id = backend.compile(&kernel(DOUBLE, "double")).unwrap();
            run(&*backend, segment, id).unwrap();
            (backend, segment, id)
        };
        let (backend, segment, first) = double();
        assert_eq!(backend.compile(&kernel(DOUBLE, "double")).unwrap(), first);
        let [triple, half] = ["triple", "half"].map(|name| {
            let id = backend.compile(&kernel(&DOUBLE.replace("double", name), name)).unwrap();
            run(&*backend, segment, id).unwrap();
            id
        });
        assert!(first != triple && triple != half);
        assert_eq!((count("nvrtcCompileProgram"), count("cuModuleLoadData")), (3, 3));
        // Another device finds them on the disk.
        let other = double();
        assert_eq!((count("nvrtcCompileProgram"), count("cuModuleLoadData")), (3, 4));
        drop(other);
        // Files that are damaged, or that the driver does not take, are made again.
        let files: Vec<_> = fs::read_dir(cache()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 3);
        for file in &files {
            fs::write(file, b"damaged").unwrap();
        }
        double();
        double();
        assert_eq!(count("nvrtcCompileProgram"), 4);
    }

    work_behind_a_kernel_that_is_being_compiled_waits_in_order(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let at = |offset| slice(segment, offset, 8);
        let held = hold_compiler();
        let id = backend.compile(&kernel(DOUBLE, "double")).unwrap();
        backend.fill(at(0), 1).unwrap();
        assert_eq!(count("cuMemsetD32Async"), 1, "nothing has to wait yet");
        backend.launch(&Launch { kernel: id, bindings: &[at(256)], params: &[], groups: [1, 1, 1] }).unwrap();
        backend.copy(at(64), at(0)).unwrap();
        let mut data = pattern(8, 3);
        backend.upload(at(128), &data).unwrap();
        let uploaded = data.clone();
        data.fill(0);
        backend.fill(at(0), 2).unwrap();
        assert!(launches().is_empty());
        assert_eq!((count("cuMemsetD32Async"), count("cuMemcpyAsync")), (1, 0));
        // What a launch is given is wrong at once.
        let few = Launch { kernel: id, bindings: &[], params: &[], groups: [1, 1, 1] };
        assert!(matches!(backend.launch(&few), Err(Error::Argument { .. })));
        drop(held);
        let contents = |offset| downloaded(&*backend, at(offset));
        assert_eq!(contents(64), 1_u32.to_le_bytes().repeat(2), "the copy saw what was there before it");
        assert_eq!(contents(0), 2_u32.to_le_bytes().repeat(2));
        assert_eq!(contents(128), uploaded);
        assert_eq!(launches().len(), 1);
        // From now on nothing waits.
        run(&*backend, segment, id).unwrap();
        backend.fill(at(0), 3).unwrap();
        assert_eq!((launches().len(), count("cuMemsetD32Async")), (2, 3));
    }

    memory_does_not_go_before_what_waits_for_a_kernel(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let id = backend.compile(&kernel(DOUBLE, "double")).unwrap();
        let launch = Launch { kernel: id, bindings: &[slice(segment, 0, 256)], params: &[], groups: [1, 1, 1] };
        backend.launch(&launch).unwrap();
        backend.free_segment(segment).unwrap();
        assert_eq!(launches().len(), 1);
        let other = backend.alloc_segment(MIB).unwrap();
        let id = backend.compile(&kernel(&DOUBLE.replace("double", "half"), "half")).unwrap();
        backend.launch(&Launch { kernel: id, bindings: &[slice(other, 0, 256)], ..launch }).unwrap();
        drop(backend);
        assert_eq!(launches().len(), 2, "a device that is closed has done its work");
    }

    a_kernel_that_does_not_compile_is_an_error_of_what_follows(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let at = |offset| slice(segment, offset, 8);
        backend.fill(at(0), 1).unwrap();
        let wrong = DOUBLE.replace("double", "fail_to_compile");
        let held = hold_compiler();
        let id = backend.compile(&kernel(&wrong, "fail_to_compile")).unwrap();
        let launch = Launch { kernel: id, bindings: &[slice(segment, 0, 256)], params: &[], groups: [1, 1, 1] };
        backend.launch(&launch).unwrap();
        backend.fill(at(0), 2).unwrap();
        drop(held);
        let error = backend.fence().unwrap_err();
        assert!(
            matches!(&error, SourceError::Driver { detail, .. } if detail.contains("it is wrong")),
            "{error}"
        );
        assert_eq!(downloaded(&*backend, at(0)), 1_u32.to_le_bytes().repeat(2), "what came behind is not run");
        // Every launch of it says so, and the device goes on.
        let error = backend.launch(&launch).and_then(|()| backend.flush()).unwrap_err();
        assert!(matches!(error, Error::Kernel { .. }), "{error}");
        let good = backend.compile(&kernel(DOUBLE, "double")).unwrap();
        run(&*backend, segment, good).unwrap();
    }

    kernels_are_compiled_where_they_are_needed_if_that_is_wanted(Compiler, "FOREBAY_COMPILE_THREADS" = "0") {
        open().compile(&kernel(DOUBLE, "double")).unwrap();
        assert_eq!(count("nvrtcCompileProgram"), 1);
    }

    a_kernel_that_is_wrong_is_named(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let backend = open();
        let segment = backend.alloc_segment(MIB).unwrap();
        let error = backend.compile(&kernel("fn f(", "f")).unwrap_err();
        assert!(error.to_string().starts_with("kernel `a test's kernel` does not compile: "), "{error}");
        let error = backend.compile(&kernel(DOUBLE, "triple")).unwrap_err();
        assert!(error.to_string().contains("triple"), "{error}");
        assert_eq!(count("nvrtcCompileProgram"), 0);
        let wrong = DOUBLE.replace("double", "fail_to_compile");
        let id = backend.compile(&kernel(&wrong, "fail_to_compile")).unwrap();
        let error = run(&*backend, segment, id).unwrap_err();
        assert!(matches!(error, Error::Kernel { .. }) && error.to_string().contains("it is wrong"), "{error}");
        backend.compile(&kernel(DOUBLE, "double")).unwrap();
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

    everything_is_given_back(Compiler, "FAKE_CUDA_PARAMS" = "8") {
        let backend = open();
        let segment = backend.alloc_segment(16 * MIB).unwrap();
        backend.upload(slice(segment, 0, 10 << 20), &vec![1; 10 << 20]).unwrap();
        downloaded(&*backend, slice(segment, 0, 10 << 20));
        let id = backend.compile(&kernel(DOUBLE, "double")).unwrap();
        run(&*backend, segment, id).unwrap();
        backend.fence().unwrap();
        backend.free_segment(segment).unwrap();
        drop(backend);
        for (made, given_back) in [
            ("cuEventCreate", "cuEventDestroy_v2"),
            ("cuMemHostAlloc", "cuMemFreeHost"),
            ("cuModuleLoadData", "cuModuleUnload"),
            ("cuStreamCreate", "cuStreamDestroy_v2"),
            ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
        ] {
            assert!(count(made) > 0 && count(made) == count(given_back), "{made}");
        }
        assert_eq!(log().last().map(String::as_str), Some("cuDevicePrimaryCtxRelease_v2"));
        // And a new one finds its way without the old one's context.
        open().alloc_segment(4).unwrap();
    }
}
