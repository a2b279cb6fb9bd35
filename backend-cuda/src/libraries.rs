//! Lists the devices and libraries that are installed, for `cargo xtask devices` and for diagnosis.

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::driver::{CudaUnavailable, Driver};
use crate::{cublaslt, nvrtc, toolkit};

/// A device that the driver found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDeviceInfo {
    /// Device index, as in `cuda:0`.
    pub index: usize,
    /// The card's name.
    pub name: String,
    /// The compute capability: (9, 0) is an H100.
    pub compute_capability: (u32, u32),
    /// Bytes of memory.
    pub memory: u64,
    /// If true, segments can grow through virtual memory.
    pub virtual_memory: bool,
}

/// Lists the devices that the driver finds, or the reason why there are none. Opens no device.
pub fn probe() -> Vec<Result<CudaDeviceInfo, CudaUnavailable>> {
    let driver_and_count = Driver::load().and_then(|driver| Ok((driver, driver.device_count()?)));
    match driver_and_count {
        Err(reason) => vec![Err(reason)],
        Ok((_, 0)) => vec![Err(CudaUnavailable::NoDevice)],
        Ok((driver, count)) => (0..count).map(|index| describe_device(driver, index)).collect(),
    }
}

/// Reports whether a device may access the memory of another one, over NVLink or PCIe: PyTorch's
/// `torch.cuda.can_device_access_peer`. Copies between such devices do not pass through host memory.
pub fn can_device_access_peer(device: usize, peer: usize) -> Result<bool, CudaUnavailable> {
    let driver = Driver::load()?;
    Ok(driver.device(device)?.can_access(driver.device(peer)?)?)
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

/// Lists the libraries that the backend uses in addition to the driver, with purpose and version.
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
    /// Name of the library.
    pub name: &'static str,
    /// Purpose of the library.
    pub purpose: &'static str,
    /// Version; `None` if the library was not found.
    pub version: Option<String>,
}
