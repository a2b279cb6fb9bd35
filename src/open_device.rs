//! Listing and opening devices.

use forebay_core::backend::null::CardProfile;
use forebay_core::device::Device;
use forebay_core::environment;
use forebay_core::error::{Error, Result};
use forebay_core::future::{DeviceFuture, spawn_blocking};
use forebay_core::memory::Config;
use forebay_core::platform;

/// Device found on this machine, or a backend that is unavailable and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbedDevice {
    /// Id that [`OpenDevice::open`] takes: `cuda:0`.
    pub id: String,
    /// Name of the card, or of the backend if no device was found.
    pub name: String,
    /// Description of the driver; empty if unknown.
    pub driver: String,
    /// If true, the device is a program that emulates a GPU.
    pub is_software: bool,
    /// Why it cannot be used; `None` if it can.
    pub unavailable_reason: Option<String>,
}

/// Constructors of [`Device`] by id, and a list of the devices of this machine. [`prelude`](crate::prelude) has it.
///
/// ```
/// use forebay::prelude::*;
///
/// # fn main() -> Result<()> {
/// let device = Device::open("null")?;
/// for found in Device::enumerate() {
///     println!("{}: {}", found.id, found.unavailable_reason.as_deref().unwrap_or(&found.name));
/// }
/// # drop(device);
/// # Ok(())
/// # }
/// ```
pub trait OpenDevice: Sized {
    /// Opens the device that `FOREBAY_DEVICE` names. Without this variable, opens the first CUDA device, else the
    /// first wgpu adapter (GPUs before software drivers).
    ///
    /// # Errors
    /// No device was found; the message names the missing parts.
    fn best() -> Result<Self>;

    /// Opens a device by its id: `cuda:0`, `wgpu:1`, `cuda` (the first one), or `null`. Each call returns another
    /// device with a pool of its own; clone the handle to share one.
    ///
    /// # Errors
    /// The device does not exist, or its driver is missing or too old.
    fn open(id: &str) -> Result<Self>;

    /// Opens the best device like [`best`](Self::best), on a thread of its own.
    fn best_async() -> DeviceFuture<Self>;

    /// Opens a device like [`open`](Self::open), on a thread of its own. Drivers take up to seconds to open a device.
    ///
    /// ```
    /// use forebay::prelude::*;
    ///
    /// async fn start() -> Result<Device> {
    ///     let opening = Device::open_async("null"); // begins here
    ///     opening.await
    /// }
    /// ```
    ///
    /// # Errors
    /// The device does not exist, or its driver is missing or too old.
    fn open_async(id: &str) -> DeviceFuture<Self>;

    /// Lists the devices of all backends, with the reason for each that cannot be used.
    fn enumerate() -> Vec<ProbedDevice>;

    /// Counts the usable devices of a backend (`cuda`, `wgpu`); `open` takes the indices below. 0 if the backend is
    /// missing, or this crate was built without it. A card that both backends reach is a device of each.
    fn device_count(backend: &str) -> usize {
        let of = |found: &ProbedDevice| found.id.split(':').next() == Some(backend);
        Self::enumerate().iter().filter(|found| of(found) && found.unavailable_reason.is_none()).count()
    }

    /// Opens every usable device of a backend, in order of index.
    ///
    /// # Errors
    /// One of them cannot be opened.
    fn open_all(backend: &str) -> Result<Vec<Self>> {
        (0..Self::device_count(backend)).map(|index| Self::open(&format!("{backend}:{index}"))).collect()
    }
}

/// Opens the best device of this machine: [`OpenDevice::best`].
///
/// # Errors
/// No device was found; the message names the missing parts.
pub fn best_device() -> Result<Device> {
    Device::best()
}

/// Opens a device by its id, such as `cuda:0`, `wgpu:1` or `null`: [`OpenDevice::open`].
///
/// ```
/// let device = forebay::open_device("null")?;
/// assert!(forebay::open_device("abacus").is_err());
/// # drop(device);
/// # Ok::<(), forebay::error::Error>(())
/// ```
///
/// # Errors
/// The device does not exist, or its driver is missing or too old.
pub fn open_device(id: &str) -> Result<Device> {
    Device::open(id)
}

impl OpenDevice for Device {
    fn best() -> Result<Self> {
        if let Some(id) = environment::read_text("FOREBAY_DEVICE")? {
            return Self::open(&id).map_err(|e| e.with_context(format!("FOREBAY_DEVICE={id}")));
        }
        let found = Self::enumerate();
        match found.iter().find(|f| f.unavailable_reason.is_none()) {
            Some(f) => Self::open(&f.id),
            None if found.is_empty() => Err(Error::NoDevice {
                requested: "best".into(),
                reason: "this build has no backend; enable the feature `cuda` or `wgpu` of forebay".into(),
            }),
            None => {
                let reasons: Vec<String> = found
                    .iter()
                    .map(|f| format!("{}: {}", f.id, f.unavailable_reason.as_deref().unwrap_or("")))
                    .collect();
                Err(Error::NoDevice { requested: "best".into(), reason: reasons.join("; ") })
            }
        }
    }

    fn best_async() -> DeviceFuture<Self> {
        if !platform::CAN_BLOCK {
            return Self::open_async("wgpu");
        }
        spawn_blocking(|opened| opened.complete(Self::best()))
    }

    fn open_async(id: &str) -> DeviceFuture<Self> {
        let id = id.to_owned();
        spawn_blocking(move |opened| open_then(&id, |device| opened.complete(device)))
    }

    fn open(id: &str) -> Result<Self> {
        let (backend, index) = parse_id(id)?;
        match backend {
            #[cfg(feature = "cuda")]
            "cuda" => Self::new(forebay_cuda::CudaBackend::open(index)?),
            #[cfg(feature = "wgpu")]
            "wgpu" => Self::new(forebay_wgpu::WgpuBackend::open(index)?),
            "null" if index > 0 => Err(Error::NoDevice {
                requested: id.into(),
                reason: "the null device has the index 0 alone; each `open(\"null\")` returns another device"
                    .into(),
            }),
            "null" => {
                forebay_core::variables::check()?;
                let config = Config::for_device("null", index)?;
                Ok(Self::null(CardProfile::default().with_config(config)))
            }
            _ => Err(Error::NoDevice {
                requested: id.into(),
                reason: format!("backends are {}{}", BACKENDS.join(", "), backend_hint(backend)),
            }),
        }
    }

    fn enumerate() -> Vec<ProbedDevice> {
        #[allow(unused_mut, reason = "stays empty without backends")]
        let mut all = Vec::new();
        #[cfg(feature = "cuda")]
        all.extend(forebay_cuda::probe().into_iter().map(|probed| match probed {
            Ok(f) => {
                let (major, minor) = f.compute_capability;
                ProbedDevice {
                    id: format!("cuda:{}", f.index),
                    name: f.name,
                    driver: format!("CUDA, sm_{major}{minor}, {} MiB", f.memory >> 20),
                    is_software: false,
                    unavailable_reason: None,
                }
            }
            Err(reason) => ProbedDevice::unavailable("cuda", reason.to_string()),
        }));
        #[cfg(feature = "wgpu")]
        all.extend(forebay_wgpu::WgpuBackend::enumerate().into_iter().map(|f| ProbedDevice {
            id: format!("wgpu:{}", f.index),
            name: f.name,
            driver: f.driver,
            is_software: f.software,
            unavailable_reason: f.unavailable_reason,
        }));
        #[cfg(feature = "wgpu")]
        if !all.iter().any(|f: &ProbedDevice| f.id.starts_with("wgpu")) {
            all.push(ProbedDevice::unavailable("wgpu", forebay_wgpu::WgpuBackend::no_device_reason()));
        }
        all
    }
}

/// Splits an id into its backend and index.
fn parse_id(id: &str) -> Result<(&str, usize)> {
    let (backend, index) = id.split_once(':').unwrap_or((id, "0"));
    let index = index.parse().map_err(|_| Error::NoDevice {
        requested: id.into(),
        reason: "an id is a backend and a number, such as `cuda:0` or `wgpu:1`".into(),
    })?;
    Ok((backend, index))
}

/// Opens a device and calls `done` with it. In a browser page, wgpu's answer arrives after this call.
fn open_then(id: &str, done: impl FnOnce(Result<Device>) + Send + 'static) {
    #[cfg(feature = "wgpu")]
    if let Ok(("wgpu", index)) = parse_id(id) {
        return forebay_wgpu::WgpuBackend::open_then(index, |backend| done(backend.and_then(Device::new)));
    }
    done(Device::open(id));
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
impl ProbedDevice {
    fn unavailable(id: &str, why_not: String) -> Self {
        Self {
            id: id.into(),
            name: String::new(),
            driver: String::new(),
            is_software: false,
            unavailable_reason: Some(why_not),
        }
    }
}

/// Returns advice for a name that other programs use for a device.
fn backend_hint(backend: &str) -> &'static str {
    match backend.to_ascii_lowercase().as_str() {
        "cpu" => {
            "; on a processor, wgpu runs on a software Vulkan driver, such as Mesa's lavapipe (mesa-vulkan-drivers)"
        }
        "gpu" | "mps" | "metal" | "vulkan" | "dx12" | "rocm" | "hip" | "xpu" => {
            "; wgpu reaches Metal, Vulkan and DX12"
        }
        _ => "",
    }
}

/// Backend prefixes of device ids in this build.
const BACKENDS: &[&str] = &[
    #[cfg(feature = "cuda")]
    "cuda",
    #[cfg(feature = "wgpu")]
    "wgpu",
    "null",
];
