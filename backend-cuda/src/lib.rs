//! The CUDA backend of forebay: the driver, its virtual memory, NVRTC and cuBLASLt, all found at run time.
//!
//! [`CudaBackend::open`] gives a device as the core's [`Backend`](forebay_core::backend::Backend). Nothing is
//! needed to build this crate, and nothing panics where something is missing at run time: without a driver, with
//! one that is too old and without a device there is an [`CudaUnavailable`], each with its reason; [`probe`] and
//! [`libraries`] list what there is.
//!
//! How it works, file by file:
//! - `driver` finds the driver and turns its codes into errors; `context` owns its handles. A code after which the
//!   device answers nothing any more is [`DeviceLost`](forebay_core::backend::SourceError::DeviceLost), a full
//!   device [`OutOfMemory`](forebay_core::backend::SourceError::OutOfMemory).
//! - `virtual_memory` reserves addresses and maps memory into them. Where the device has no such thing, or
//!   `FOREBAY_CUDA_VMM=0` is set, segments are plain allocations, and the limits say so.
//! - `fences` numbers points of the one stream; `staging` copies through page-locked memory.
//! - `line` gives the driver small kernels that follow each other several at once, which costs it less.
//! - `graph` keeps the commands of a captured step, which the driver then runs as one.
//! - `processes` asks NVML who else is on a device.
//! - `nvtx` tells tools such as Nsight Systems which module and operation runs (`FOREBAY_NVTX=1`, [`set_nvtx`]).
//! - `translate` writes CUDA C++ from the WGSL that all backends share, `nvrtc` compiles that for the card at hand,
//!   `cache` keeps it on disk (`FOREBAY_CACHE_DIR`, else the user's cache folder), `kernels` loads and launches. `compiler` compiles
//!   several kernels at once beside the program, and what is launched meanwhile waits in `later`.
//! - `written` has the kernels of `shaders/cuda`, unless portable ones are forced: `attention` runs on the tensor cores, `product` makes small
//!   products of f32; `tensor_map` describes their operands to the copy engine.
//! - `matmul` hands all other products to cuBLASLt, unless [`set_portable_kernels`] or `FOREBAY_PORTABLE_KERNELS=1` forces the
//!   kernels that run everywhere. `toolkit` finds the libraries where the loader does not look.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub mod attention;
mod autotune;
mod backend;
mod compiler;
mod context;
mod cublaslt;
mod deferred;
mod disk_cache;
mod driver;
mod fences;
pub mod gelu_grad;
mod graph;
mod kernels;
mod launch_batcher;
mod libraries;
mod native_kernels;
pub mod nvrtc;
mod nvtx;
mod processes;
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
pub use libraries::{CudaDeviceInfo, LibraryInfo, libraries, probe};
pub use native_kernels::NativeKernel;
pub use nvtx::{NvtxUnavailable, set_nvtx};
pub use settings::{allow_tf32, portable_kernels, set_allow_tf32, set_portable_kernels};

/// What a mutex guards, whether or not a thread panicked meanwhile.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
