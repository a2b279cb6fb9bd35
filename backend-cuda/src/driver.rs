//! Loads the driver and converts its errors: the only file that checks whether `libcuda` is installed.
//!
//! cudarc loads the driver's library and its functions on first use and panics if one is missing. A
//! [`Driver`] proves that the library and every function of [`SYMBOLS`] were found, so no later call can
//! panic. This crate calls only functions in [`SYMBOLS`].

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};
use forebay_core::backend::SourceError;
use thiserror::Error;

/// The oldest supported driver, as CUDA's version number (1000 x major + 10 x minor).
const OLDEST_DRIVER: i32 = 12_000;

/// Reason why CUDA, or one of its devices, cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// No driver is installed.
    #[error("no NVIDIA driver: libcuda.so.1 was not found; install the driver, or use the wgpu backend")]
    NoDriver,
    /// The driver is older than this crate supports.
    #[error(
        "the NVIDIA driver is too old: it supports CUDA {}.{}, and {}.{} is needed; update the driver",
        .found / 1000, .found % 1000 / 10, OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10
    )]
    OldDriver {
        /// CUDA's version number from the driver: 11040 is 11.4.
        found: i32,
    },
    /// The driver's library lacks a function: it is damaged or not a real driver.
    #[error("the NVIDIA driver's library lacks the function `{0}`; install the driver again")]
    MissingFunction(&'static str),
    /// The driver found no device.
    #[error("the NVIDIA driver found no device; look at `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// The device's index is out of range.
    #[error("there is no CUDA device {index}; the driver found {count}, counted from 0")]
    NoSuchDevice {
        /// The requested index.
        index: usize,
        /// The number of devices.
        count: usize,
    },
    /// The driver returned an error.
    #[error(transparent)]
    Driver(#[from] SourceError),
}

/// All functions of the driver that this crate calls.
const SYMBOLS: [&str; 58] = [
    "cuCtxEnablePeerAccess",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyAsync",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD32Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveClusters",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// Proof that the driver is installed, new enough, complete and initialised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    /// CUDA's version number: 13000 is 13.0.
    pub(crate) version: i32,
}

impl Driver {
    /// Loads and initialises the driver, once for the process.
    pub(crate) fn load() -> Result<Self, CudaUnavailable> {
        static DRIVER: OnceLock<Result<Driver, CudaUnavailable>> = OnceLock::new();
        DRIVER.get_or_init(Self::initialize).clone()
    }

    fn initialize() -> Result<Self, CudaUnavailable> {
        // SAFETY: loading libcuda runs its initialisers, as in every CUDA program.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaUnavailable::NoDriver);
        }
        for symbol in SYMBOLS {
            // SAFETY: the library is present, and the symbol is only looked up, never called through this
            // type.
            if unsafe { sys::culib().get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_err() {
                return Err(CudaUnavailable::MissingFunction(symbol));
            }
        }
        let mut version = 0;
        // SAFETY: the function may be called before cuInit, and writes one int.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        if version < OLDEST_DRIVER {
            return Err(CudaUnavailable::OldDriver { found: version });
        }
        // SAFETY: takes no pointers; may be called any number of times.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_SUCCESS => Ok(Self { version }),
            CUresult::CUDA_ERROR_NO_DEVICE => Err(CudaUnavailable::NoDevice),
            code => Err(error_from_code("cuInit", code).into()),
        }
    }

    pub(crate) fn device_count(self) -> Result<usize, SourceError> {
        let mut count = 0;
        // SAFETY: writes one int.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(crate) fn device(self, index: usize) -> Result<DeviceHandle, CudaUnavailable> {
        let count = self.device_count()?;
        if count == 0 {
            return Err(CudaUnavailable::NoDevice);
        }
        let ordinal = c_int::try_from(index).ok().filter(|_| index < count);
        let ordinal = ordinal.ok_or(CudaUnavailable::NoSuchDevice { index, count })?;
        let mut raw = 0;
        // SAFETY: writes one handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut raw, ordinal) })?;
        Ok(DeviceHandle { raw })
    }
}

/// A device that is not opened yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceHandle {
    pub(crate) raw: CUdevice,
}

impl DeviceHandle {
    pub(crate) fn attribute(self, attribute: CUdevice_attribute) -> Result<u32, SourceError> {
        let mut value = 0;
        // SAFETY: writes one int; `self.raw` came from cuDeviceGet.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.raw) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Reports whether kernels and copies of this device may access memory of another one.
    pub(crate) fn can_access(self, other: Self) -> Result<bool, SourceError> {
        let mut can = 0;
        // SAFETY: writes one int; both handles came from cuDeviceGet.
        check("cuDeviceCanAccessPeer", unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.raw, other.raw) })?;
        Ok(can != 0)
    }

    /// Returns the card's name.
    pub(crate) fn name(self) -> Result<String, SourceError> {
        // SAFETY: writes at most as many bytes as there are, ended by a zero.
        read_text("cuDeviceGetName", |text, bytes| unsafe { sys::cuDeviceGetName(text, bytes, self.raw) })
    }

    /// Returns the address on the PCI bus. Unlike the index, the address does not depend on
    /// `CUDA_VISIBLE_DEVICES`.
    pub(crate) fn pci_address(self) -> Result<String, SourceError> {
        // SAFETY: as above.
        read_text("cuDeviceGetPCIBusId", |text, bytes| unsafe {
            sys::cuDeviceGetPCIBusId(text, bytes, self.raw)
        })
    }

    pub(crate) fn total_memory(self) -> Result<u64, SourceError> {
        let mut bytes = 0;
        // SAFETY: writes one size.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, self.raw) })?;
        Ok(bytes as u64)
    }

    /// Returns the compute capability: (9, 0) is an H100.
    pub(crate) fn compute_capability(self) -> Result<(u32, u32), SourceError> {
        Ok((
            self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ))
    }
}

/// Returns the text that a call writes into a buffer, of which it gets the address and the bytes.
fn read_text(
    call: &'static str,
    write: impl FnOnce(*mut c_char, c_int) -> CUresult,
) -> Result<String, SourceError> {
    let mut text = [0u8; 256];
    check(call, write(text.as_mut_ptr().cast(), text.len() as c_int))?;
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).into_owned())
}

/// Converts a call's result code.
#[inline]
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), SourceError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error_from_code(call, code)) }
}

/// Converts like [`check`], for calls that allocate `bytes` bytes of device memory.
pub(crate) fn check_alloc(call: &'static str, bytes: u64, code: CUresult) -> Result<(), SourceError> {
    if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(SourceError::OutOfMemory { bytes, detail: format!("{call}: {}", describe_result(code)) });
    }
    check(call, code)
}

#[cold]
fn error_from_code(call: &'static str, code: CUresult) -> SourceError {
    use CUresult as C;
    let detail = describe_result(code);
    match code {
        // Codes after which the driver answers every call of the process with the same error ("sticky"), and
        // codes after which the device itself is gone.
        C::CUDA_ERROR_ILLEGAL_ADDRESS
        | C::CUDA_ERROR_LAUNCH_TIMEOUT
        | C::CUDA_ERROR_ASSERT
        | C::CUDA_ERROR_HARDWARE_STACK_ERROR
        | C::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | C::CUDA_ERROR_MISALIGNED_ADDRESS
        | C::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | C::CUDA_ERROR_INVALID_PC
        | C::CUDA_ERROR_LAUNCH_FAILED
        | C::CUDA_ERROR_TENSOR_MEMORY_LEAK
        | C::CUDA_ERROR_CONTAINED
        | C::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | C::CUDA_ERROR_DEINITIALIZED
        | C::CUDA_ERROR_DEVICE_UNAVAILABLE
        | C::CUDA_ERROR_ECC_UNCORRECTABLE
        | C::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | C::CUDA_ERROR_EXTERNAL_DEVICE
        | C::CUDA_ERROR_MPS_CLIENT_TERMINATED => SourceError::DeviceLost(format!("{call}: {detail}")),
        _ => SourceError::Driver { call, detail },
    }
}

/// Returns the driver's name and description of a code.
fn describe_result(code: CUresult) -> String {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: both write one pointer to a constant string, or null for a code they do not know.
    unsafe {
        let _ = sys::cuGetErrorName(code, &mut name);
        let _ = sys::cuGetErrorString(code, &mut text);
    }
    let read = |s: *const c_char| {
        // SAFETY: not null, and the driver's constant strings end in a zero.
        (!s.is_null()).then(|| unsafe { CStr::from_ptr(s) }.to_string_lossy())
    };
    match (read(name), read(text)) {
        (Some(name), Some(text)) => format!("{name}, {text}"),
        (Some(name), None) => name.into_owned(),
        _ => format!("error {}", code as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::{CudaUnavailable, OLDEST_DRIVER};

    #[test]
    fn messages_say_what_to_do() {
        assert_eq!(OLDEST_DRIVER, 12_000);
        assert_eq!(
            CudaUnavailable::OldDriver { found: 11_040 }.to_string(),
            "the NVIDIA driver is too old: it supports CUDA 11.4, and 12.0 is needed; update the driver"
        );
    }
}
