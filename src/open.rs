//! Listing and opening devices.

use forebay_core::backend::null::Profile;
use forebay_core::device::Device;
use forebay_core::environment;
use forebay_core::error::{Error, Result};
use forebay_core::memory::Config;

/// Device found on this machine, or a backend that is unavailable and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Id to pass to [`OpenDevice::open`], such as `cuda:0`.
    pub id: String,
    /// Name of the card, or of the backend if no device was found.
    pub name: String,
    /// Description of the driver; empty if unknown.
    pub driver: String,
    /// True for a software driver, which runs on the CPU.
    pub software: bool,
    /// Reason why the device cannot be used; `None` if it can.
    pub why_not: Option<String>,
}

/// Constructors of [`Device`] by id, and a list of the devices of this machine.
pub trait OpenDevice: Sized {
    /// Opens the device that `FOREBAY_DEVICE` names. Without this variable, opens the first CUDA device, else the
    /// first wgpu adapter (GPUs before software drivers).
    ///
    /// # Errors
    /// No device was found; the message names the missing parts.
    fn best() -> Result<Self>;

    /// Opens a device by its id: `cuda:0`, `wgpu:1`, `cuda` (the first one), or `null`.
    ///
    /// # Errors
    /// The device does not exist, or its driver is missing or too old.
    fn open(id: &str) -> Result<Self>;

    /// Lists the devices of all backends, with the reason for those that cannot be used.
    fn available() -> Vec<Found>;

    /// Returns the number of usable devices of a backend (`cuda`, `wgpu`); `open` takes indices below this number.
    /// Returns 0 for a missing backend, or one that this build lacks. A card that both backends reach counts in each.
    fn count(backend: &str) -> usize {
        let of = |found: &Found| found.id.split(':').next() == Some(backend);
        Self::available().iter().filter(|found| of(found) && found.why_not.is_none()).count()
    }

    /// Opens every usable device of a backend, in order of index.
    ///
    /// # Errors
    /// One of the devices cannot be opened.
    fn all(backend: &str) -> Result<Vec<Self>> {
        (0..Self::count(backend)).map(|index| Self::open(&format!("{backend}:{index}"))).collect()
    }
}

impl OpenDevice for Device {
    fn best() -> Result<Self> {
        if let Some(id) = environment::read_text("FOREBAY_DEVICE")? {
            return Self::open(&id).map_err(|e| e.at(format!("FOREBAY_DEVICE={id}")));
        }
        let found = Self::available();
        match found.iter().find(|f| f.why_not.is_none()) {
            Some(f) => Self::open(&f.id),
            None => {
                let reasons: Vec<String> = found
                    .iter()
                    .map(|f| format!("{}: {}", f.id, f.why_not.as_deref().unwrap_or("")))
                    .collect();
                Err(Error::NoDevice { asked: "best".into(), reason: reasons.join("; ") })
            }
        }
    }

    fn open(id: &str) -> Result<Self> {
        let (backend, index) = id.split_once(':').unwrap_or((id, "0"));
        let index: usize = index.parse().map_err(|_| Error::NoDevice {
            asked: id.into(),
            reason: "an id is a backend and a number, as `cuda:0` or `wgpu:1`".into(),
        })?;
        match backend {
            #[cfg(feature = "cuda")]
            "cuda" => Self::new(forebay_cuda::CudaBackend::open(index)?),
            #[cfg(feature = "wgpu")]
            "wgpu" => Self::new(forebay_wgpu::WgpuBackend::open(index)?),
            "null" => {
                let config = Config::for_device("null", index)?;
                Ok(Self::null(Profile::default().with_config(config)))
            }
            _ => Err(Error::NoDevice {
                asked: id.into(),
                reason: format!("backends are {}{}", BACKENDS.join(", "), hint(backend)),
            }),
        }
    }

    fn available() -> Vec<Found> {
        #[allow(unused_mut, reason = "stays empty without backends")]
        let mut all = Vec::new();
        #[cfg(feature = "cuda")]
        all.extend(forebay_cuda::probe().into_iter().map(|probed| match probed {
            Ok(f) => {
                let (major, minor) = f.compute_capability;
                Found {
                    id: format!("cuda:{}", f.index),
                    name: f.name,
                    driver: format!("CUDA, sm_{major}{minor}, {} MiB", f.memory >> 20),
                    software: false,
                    why_not: None,
                }
            }
            Err(reason) => Found::missing("cuda", reason.to_string()),
        }));
        #[cfg(feature = "wgpu")]
        all.extend(forebay_wgpu::WgpuBackend::enumerate().into_iter().map(|f| Found {
            id: format!("wgpu:{}", f.index),
            name: f.name,
            driver: f.driver,
            software: f.software,
            why_not: f.unavailable_reason,
        }));
        #[cfg(feature = "wgpu")]
        if !all.iter().any(|f: &Found| f.id.starts_with("wgpu")) {
            all.push(Found::missing("wgpu", forebay_wgpu::WgpuBackend::no_device_reason()));
        }
        all
    }
}

impl Found {
    fn missing(id: &str, why_not: String) -> Self {
        Self {
            id: id.into(),
            name: String::new(),
            driver: String::new(),
            software: false,
            why_not: Some(why_not),
        }
    }
}

/// Returns advice for a device name that other frameworks use, such as `cpu` or `mps`.
fn hint(backend: &str) -> &'static str {
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
