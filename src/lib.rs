//! Forebay: a tensor runtime for Rust. Runs one training loop on CUDA and, through wgpu, on every other GPU.
//!
//! Import [`prelude`] and open a device with [`Device::best()`](OpenDevice::best), or by its id with
//! [`Device::open`](OpenDevice::open). Both are methods of [`OpenDevice`], which the prelude contains, and functions of
//! this crate: [`best_device`] and [`open_device`]. Tensors and modules have everything else as methods.
//!
//! ```
//! use forebay::prelude::*;
//!
//! # fn main() -> Result<()> {
//! let device = Device::open("null")?; // or "cuda:0", "wgpu:1"; `Device::best()?` chooses
//! let x = Tensor::new([[1.0, 2.0], [3.0, 4.0]], &device)?;
//! let layer = Linear::new(2, 3, &device)?;
//! let loss = layer.forward(&x)?.square()?.mean((), false)?;
//! loss.backward()?;
//! assert_eq!(layer.weight.grad().expect("a parameter").shape(), layer.weight.shape());
//! # Ok(())
//! # }
//! ```

pub use forebay_core::{
    amp, autograd, backend, capture, device, dlpack_capsules, dtype, error, func, future, memory, ops,
    profile, stream, tensor,
};
pub use forebay_core::{
    device::Device,
    dtype::DType,
    error::{Error, Result},
    tensor::Tensor,
};
#[doc(hidden)]
pub use forebay_core::{forward_backend, platform, variables};
pub use forebay_nn::{data, io, nn, optim, plan, train};

/// CUDA-specific switches, such as [`set_allow_tf32`](cuda::set_allow_tf32), and information about its libraries.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use forebay_cuda::{
        CudaDeviceInfo, CudaUnavailable, LibraryInfo, NvtxUnavailable, allow_tf32, batched_matmul_kernels,
        can_device_access_peer, libraries, portable_kernels, probe, recurrent_kernels, set_allow_tf32,
        set_batched_matmul_kernels, set_nvtx, set_portable_kernels, set_recurrent_kernels,
    };
}

#[cfg(feature = "wgpu")]
pub use forebay_wgpu::{
    WgpuDeviceExt, WgpuOptions, WgpuSlice, WgpuTensorExt, request_wgpu_device, wgpu, wgpu_device_descriptor,
};

mod open_device;

pub use open_device::{OpenDevice, ProbedDevice, best_device, open_device};

/// Common imports of training programs.
pub mod prelude {
    pub use crate::open_device::OpenDevice;
    #[cfg(feature = "wgpu")]
    pub use crate::{WgpuDeviceExt, WgpuTensorExt};
    pub use forebay_core::amp::autocast;
    pub use forebay_core::autograd::no_grad;
    pub use forebay_core::device::Device;
    pub use forebay_core::dtype::{DType, Element};
    pub use forebay_core::error::{Error, Result};
    pub use forebay_core::ops::Reduction;
    pub use forebay_core::stream::Stream;
    pub use forebay_core::tensor::Tensor;
    pub use forebay_nn::data::{DataLoader, Dataset, FashionMnist, TensorDataset, Text};
    pub use forebay_nn::io::safetensors;
    pub use forebay_nn::nn::{
        BatchNorm1d, BatchNorm2d, Conv2d, Conv2dOptions, CrossEntropyLoss, Dropout, Embedding, Forward,
        GroupNorm, LayerNorm, Linear, Module, RmsNorm, SelfAttention, Sequential,
    };
    pub use forebay_nn::optim::schedule::WarmupCosine;
    pub use forebay_nn::optim::{
        Adam, AdamW, GradScaler, LrSchedule, Optimizer, RmsProp, Sgd, clip_grad_norm_,
    };
    pub use forebay_nn::train::{Checkpoint, Trainer};
}

/// Compiles the Rust samples of the book as documentation tests. `cargo xtask check` names a missing page.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/src/quick-start.md")]
    struct QuickStart;
    #[doc = include_str!("../docs/src/guide/tensors.md")]
    struct GuideTensors;
    #[doc = include_str!("../docs/src/guide/autograd.md")]
    struct GuideAutograd;
    #[doc = include_str!("../docs/src/guide/modules.md")]
    struct GuideModules;
    #[doc = include_str!("../docs/src/guide/data.md")]
    struct GuideData;
    #[doc = include_str!("../docs/src/guide/optimizers.md")]
    struct GuideOptimizers;
    #[doc = include_str!("../docs/src/guide/trainer.md")]
    struct GuideTrainer;
    #[doc = include_str!("../docs/src/guide/mixed-precision.md")]
    struct GuideMixedPrecision;
    #[doc = include_str!("../docs/src/guide/checkpointing.md")]
    struct GuideCheckpointing;
    #[doc = include_str!("../docs/src/guide/captured-steps.md")]
    struct GuideCapturedSteps;
    #[doc = include_str!("../docs/src/guide/profiling.md")]
    struct GuideProfiling;
    #[cfg(feature = "wgpu")]
    #[doc = include_str!("../docs/src/guide/embedding.md")]
    struct GuideEmbedding;
    #[doc = include_str!("../docs/src/guide/browser.md")]
    struct GuideBrowser;
    #[doc = include_str!("../docs/src/from/burn.md")]
    struct FromBurn;
    #[doc = include_str!("../docs/src/from/candle.md")]
    struct FromCandle;
    #[doc = include_str!("../docs/src/memory/questions.md")]
    struct MemoryQuestions;
    #[doc = include_str!("../docs/src/memory/out-of-memory.md")]
    struct MemoryOutOfMemory;
    #[doc = include_str!("../docs/src/memory/snapshots.md")]
    struct MemorySnapshots;
    #[doc = include_str!("../docs/src/memory/settings.md")]
    struct MemorySettings;
    #[doc = include_str!("../docs/src/reference/devices.md")]
    struct ReferenceDevices;
    #[doc = include_str!("../docs/src/inside/architecture.md")]
    struct InsideArchitecture;
    #[doc = include_str!("../docs/src/inside/dispatch.md")]
    struct InsideDispatch;
    #[doc = include_str!("../docs/src/inside/fusion.md")]
    struct InsideFusion;
    #[doc = include_str!("../docs/src/inside/kernels.md")]
    struct InsideKernels;
}
