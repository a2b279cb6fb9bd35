//! Probing a machine never panics, with a driver or without.

use forebay_core::error::Error;
use forebay_cuda::{CudaBackend, CudaUnavailable};

#[test]
fn a_missing_device_is_an_error_with_a_reason() {
    let missing = CudaBackend::device_count().unwrap_or(0);
    let Err(Error::NoDevice { requested: asked, reason }) = CudaBackend::open(missing) else {
        panic!("device {missing} of {missing} was opened");
    };
    assert_eq!(asked, format!("cuda:{missing}"));
    match CudaBackend::device_count() {
        Ok(_) => assert!(reason.contains("counted from 0"), "{reason}"),
        Err(unavailable) => assert_eq!(reason, unavailable.to_string()),
    }
}

#[test]
fn found_and_missing_libraries_are_listed() {
    let found = forebay_cuda::probe();
    match CudaBackend::device_count() {
        Ok(count) => assert_eq!(found.len(), count.max(1)),
        Err(reason) => assert_eq!(found, [Err(reason)]),
    }
    let names: Vec<_> = forebay_cuda::libraries().iter().map(|library| library.name).collect();
    assert_eq!(names, ["NVRTC", "cuBLASLt"]);
    assert_eq!(
        CudaUnavailable::NoDriver.to_string(),
        "no NVIDIA driver: libcuda.so.1 was not found; install the driver, or use the wgpu backend"
    );
}
