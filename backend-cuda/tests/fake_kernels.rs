//! Kernels on a driver that plays a device on the CPU and writes down what it is told to launch.
#![cfg(target_os = "linux")]

mod fake_cuda;
mod scenarios;

use std::fs;

use fake_cuda::Libraries::{Compiler, Driver};
use fake_cuda::{cache, count, log, on_fake, open};
use forebay_core::backend::{Command, KernelId, KernelSource, Launch};
use forebay_core::error::Error;
use scenarios::{DOUBLE, MIB, SCALE, downloaded, kernel, pattern, slice};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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

    kernels_are_compiled_once(Compiler) {
        let backend = open();
        let first = backend.compile(&kernel(DOUBLE, "double")).unwrap();
        assert_eq!(backend.compile(&kernel(DOUBLE, "double")).unwrap(), first);
        let narrow = backend.compile(&kernel(SCALE, "scale")).unwrap();
        let wide = backend.compile(&KernelSource { overrides: &[("width", 64.0)], ..kernel(SCALE, "scale") }).unwrap();
        assert!(first != narrow && narrow != wide);
        assert_eq!((count("nvrtcCompileProgram"), count("cuModuleLoadData")), (3, 3));
        // Another device finds them on the disk.
        let other = open();
        other.compile(&kernel(DOUBLE, "double")).unwrap();
        assert_eq!((count("nvrtcCompileProgram"), count("cuModuleLoadData")), (3, 4));
        // Files that are damaged, or that the driver does not take, are made again.
        let files: Vec<_> = fs::read_dir(cache()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 3);
        for file in &files {
            fs::write(file, b"damaged").unwrap();
        }
        open().compile(&kernel(DOUBLE, "double")).unwrap();
        open().compile(&kernel(DOUBLE, "double")).unwrap();
        assert_eq!(count("nvrtcCompileProgram"), 4);
    }

    a_kernel_that_is_wrong_is_named(Compiler) {
        let backend = open();
        let error = backend.compile(&kernel("fn f(", "f")).unwrap_err();
        assert!(error.to_string().starts_with("kernel `a test's kernel` does not compile: "), "{error}");
        let error = backend.compile(&kernel(DOUBLE, "triple")).unwrap_err();
        assert!(error.to_string().contains("triple"), "{error}");
        assert_eq!(count("nvrtcCompileProgram"), 0);
        let wrong = DOUBLE.replace("double", "fail_to_compile");
        let error = backend.compile(&kernel(&wrong, "fail_to_compile")).unwrap_err();
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
        backend.compile(&kernel(DOUBLE, "double")).unwrap();
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
