//! Forebay: a tensor runtime for Rust. Runs one training loop on CUDA and, through wgpu, on every other GPU.
//!
//! Import [`prelude`] and open a device with `Device::best()`. Tensors and modules have everything else as methods.

pub use forebay_core::*;
pub use forebay_nn::*;

/// CUDA-specific switches, such as [`set_allow_tf32`](cuda::set_allow_tf32), and information about its libraries.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use forebay_cuda::{
        CudaDeviceInfo, CudaUnavailable, LibraryInfo, NvtxUnavailable, allow_tf32, libraries,
        portable_kernels, probe, set_allow_tf32, set_nvtx, set_portable_kernels,
    };
}

mod open_device;

pub use open_device::{OpenDevice, ProbedDevice};

/// Common imports of training programs.
pub mod prelude {
    pub use crate::open_device::OpenDevice;
    pub use forebay_core::amp::autocast;
    pub use forebay_core::device::Device;
    pub use forebay_core::dtype::DType;
    pub use forebay_core::error::{Error, Result};
    pub use forebay_core::ops::Reduction;
    pub use forebay_core::stream::Stream;
    pub use forebay_core::tensor::Tensor;
    pub use forebay_nn::data::{DataLoader, Dataset, FashionMnist, Text};
    pub use forebay_nn::nn::{
        BatchNorm1d, BatchNorm2d, Conv2d, Conv2dOptions, Dropout, Embedding, Forward, GroupNorm, LayerNorm,
        Linear, Module, RmsNorm, SelfAttention, Sequential,
    };
    pub use forebay_nn::optim::{Adam, AdamW, LrSchedule, Optimizer, RmsProp, Sgd, clip_grad_norm_};
    pub use forebay_nn::train::{Checkpoint, Trainer};
}

/// Compiles the Rust samples of the documentation pages as documentation tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/architecture.md")]
    struct Architecture;
    #[doc = include_str!("../docs/autograd.md")]
    struct Autograd;
    #[doc = include_str!("../docs/devices.md")]
    struct Devices;
    #[doc = include_str!("../docs/kernels.md")]
    struct Kernels;
    #[doc = include_str!("../docs/memory.md")]
    struct Memory;
    #[doc = include_str!("../docs/modules.md")]
    struct Modules;
    #[doc = include_str!("../docs/tensors.md")]
    struct Tensors;
    #[doc = include_str!("../docs/training.md")]
    struct Training;
}
