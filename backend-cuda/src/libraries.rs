//! What is installed: for `cargo xtask devices`, and for whoever wonders why something is missing.

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::driver::{CudaUnavailable, Driver};
use crate::{cublaslt, nvrtc, toolkit};

/// A device that the driver found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDeviceInfo {
    /// Its number, as in `cuda:0`.
    pub index: usize,
    /// The card's name.
    pub name: String,
    /// The compute capability: (9, 0) is an H100.
    pub compute_capability: (u32, u32),
    /// Bytes of memory.
    pub memory: u64,
    /// Whether segments can grow through virtual memory.
    pub virtual_memory: bool,
}

/// Everything that the driver finds, or why there is nothing. Opens no device.
pub fn probe() -> Vec<Result<CudaDeviceInfo, CudaUnavailable>> {
    let found = Driver::load().and_then(|driver| Ok((driver, driver.device_count()?)));
    match found {
        Err(reason) => vec![Err(reason)],
        Ok((_, 0)) => vec![Err(CudaUnavailable::NoDevice)],
        Ok((driver, count)) => (0..count).map(|index| describe_device(driver, index)).collect(),
    }
}

fn describe_device(driver: Driver, index: usize) -> Result<CudaDeviceInfo, CudaUnavailable> {
    let device = driver.device(index)?;
    let managed = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    Ok(CudaDeviceInfo {
        index,
        name: device.name()?,
        compute_capability: device.compute_capability()?,
        memory: device.total_memory()?,
        virtual_memory: device.attribute(managed)? != 0,
    })
}

/// The libraries beside the driver: what each is for, and its version where it was found.
#[must_use]
pub fn libraries() -> Vec<LibraryInfo> {
    toolkit::load_nvrtc();
    let nvrtc = nvrtc::version().ok().map(|(major, minor)| format!("{major}.{minor}"));
    let cublaslt = cublaslt::version().map(|v| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100));
    vec![
        LibraryInfo { name: "NVRTC", purpose: "compiles kernels", version: nvrtc },
        LibraryInfo { name: "cuBLASLt", purpose: "fast matrix products", version: cublaslt },
    ]
}

/// A library that the backend uses where it is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryInfo {
    /// Its name.
    pub name: &'static str,
    /// What for.
    pub purpose: &'static str,
    /// Its version; `None` where it was not found.
    pub version: Option<String>,
}
