//! CUDA backend of forebay: the driver, its virtual memory, NVRTC and cuBLASLt, all loaded at run time.
//!
//! [`CudaBackend::open`] opens a device as the core's [`Backend`](forebay_core::backend::Backend). Building
//! this crate needs no CUDA library, and a missing one causes no panic. Without a driver, with one that is
//! too old, or without a device, a [`CudaUnavailable`] names the reason. [`probe`] and [`libraries`] list
//! what is installed.
//!
//! Modules:
//! - `driver` loads the driver and turns its codes into errors; `context` owns its handles. A code after
//!   which the device no longer answers is [`DeviceLost`](forebay_core::backend::SourceError::DeviceLost).
//!   Exhausted memory is [`OutOfMemory`](forebay_core::backend::SourceError::OutOfMemory).
//! - `virtual_memory` reserves addresses and maps memory into them. Without virtual memory, or with
//!   `FOREBAY_CUDA_VMM=0`, segments are plain allocations, and the limits say so.
//! - `fences` assigns ids to points of a stream; `staging` copies through page-locked memory.
//! - `foreign` shares memory with other CUDA libraries of the process, ordered by events.
//! - `peer` opens links between two cards, over which tensors are copied without the host.
//! - `launch_thread` gives launches to the driver while the program prepares the next ones.
//! - `graph` holds the commands of a captured step, which the driver then runs as one graph.
//! - `processes` asks NVML which processes use a device.
//! - `nvtx` shows modules and operations in tools such as Nsight Systems (`FOREBAY_NVTX=1`, [`set_nvtx`]).
//! - `translate` writes CUDA C++ from the WGSL that all backends share, and `nvrtc` compiles that text for
//!   the card.
//! - `cubin_cache` keeps cubins on disk (`FOREBAY_CACHE_DIR`, else the user's cache folder); `kernels` loads
//!   and launches them.
//! - Background threads of the core ([`compile_pool`](forebay_core::backend::compile_pool)) compile several
//!   kernels at once; launches meanwhile wait in `deferred`.
//! - `native_kernels` has the kernels of `shaders/cuda`, unless portable kernels are forced. `attention` and
//!   `convolution` run on the tensor cores. `attention_f32` computes gradients of f32 attention, and `sgemm_small`
//!   small f32 products. `batched_matmul`
//!   computes batches of small products. `gelu_grad` computes a product with the gradient of a GELU. `recurrent` runs
//!   all steps of a recurrent layer. `tensor_map` describes
//!   operands to TMA.
//! - `cublaslt` computes all other products, unless [`set_portable_kernels`] or `FOREBAY_PORTABLE_KERNELS=1`
//!   forces the portable kernels; `autotune` chooses its algorithms. `toolkit` finds libraries where the
//!   loader does not look.
//! - `settings` has the switches of the process; `timestamps` measures work on the device.
//!
//! Where to add a thing:
//! - A WGSL kernel needs no code here. A WGSL feature or builtin function goes to `translate`.
//! - A kernel in CUDA C++ implements `native_kernels::NativeKernel`, in a file like `sgemm_small`, and is chosen where
//!   `backend` enqueues commands.
//! - A function of the driver or of cuBLASLt goes to the list `SYMBOLS` of `driver` or `cublaslt` first.
//! - A variable of the environment with the values 0 and 1 goes to `settings`.

pub mod attention;
pub mod attention_f32;
mod autotune;
mod backend;
pub mod batched_matmul;
mod context;
pub mod convolution;
mod cubin_cache;
mod cublaslt;
mod deferred;
mod driver;
mod fences;
mod foreign;
pub mod gelu_grad;
mod graph;
mod kernels;
mod launch_thread;
mod libraries;
mod native_kernels;
pub mod nvrtc;
mod nvtx;
mod peer;
mod processes;
pub mod recurrent;
mod settings;
pub mod sgemm_small;
mod staging;
mod tensor_map;
mod timestamps;
mod toolkit;
pub mod translate;
mod virtual_memory;

pub use backend::CudaBackend;
pub use driver::CudaUnavailable;
pub use libraries::{CudaDeviceInfo, LibraryInfo, can_device_access_peer, libraries, probe};
pub use native_kernels::NativeKernel;
pub use nvtx::{NvtxUnavailable, set_nvtx};
pub use settings::{
    allow_tf32, batched_matmul_kernels, portable_kernels, recurrent_kernels, set_allow_tf32,
    set_batched_matmul_kernels, set_portable_kernels, set_recurrent_kernels,
};
