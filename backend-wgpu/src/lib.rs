//! The wgpu backend of forebay: every GPU with Vulkan, Metal or DX12, software drivers, and WebGPU in a
//! browser.
//!
//! Design:
//! - One long-lived recorder (`recorder`) collects launches, copies and fills in a command encoder and
//!   submits them in batches. So work runs in the order of the calls.
//! - Parameters are immediates, or pass through a ring of uniform buffers if they are large (`params`). Uploads
//!   pass through a ring of mapped buffers (`staging`). Both rings are bounded and recycled after the device has
//!   passed them.
//! - Products of 16-bit matrices use matrix units where the driver has them (`spirv`).
//! - WebGPU forbids a buffer to be read-only and read_write in one dispatch. Tensors are slices of few large
//!   buffers, so every storage binding is read_write (`kernel`).
//! - wgpu must not panic. Creation runs inside error scopes; the device's error callbacks record all other
//!   errors, and the next call returns them, typed (`gpu`).
//! - A browser page cannot wait: its reads and fences call back (`platform`).
//!
//! Where to add a thing:
//! - A kernel needs no code here: `kernel` accepts every WGSL module of `forebay-shaders`.
//! - `adapter` chooses the features and limits of a device, and `probe` tests the types that drivers get wrong.
//! - `backend` implements the core's traits; a new command of the core also needs a `PreparedCommand` (`prepared`).
//! - `shared` and `request` are the interface of programs that have a wgpu device of their own.
//! - `offline` serves tests of kernels without a device, and `timestamps` the profiler.

mod adapter;
mod aliasing;
mod backend;
mod bind_groups;
mod copy_fill;
mod gpu;
mod identity;
mod kernel;
pub mod offline;
mod params;
#[cfg_attr(target_family = "wasm", path = "platform/web.rs")]
#[cfg_attr(not(target_family = "wasm"), path = "platform/native.rs")]
mod platform;
mod prepared;
mod probe;
mod recorder;
mod request;
mod shared;
mod spirv;
mod staging;
mod timestamps;
mod uniformity;
#[cfg_attr(not(any(windows, all(unix, not(target_vendor = "apple")))), path = "vulkan_absent.rs")]
mod vulkan;

pub use adapter::WgpuDeviceInfo;
pub use backend::WgpuBackend;
pub use request::{request_wgpu_device, wgpu_device_descriptor};
pub use shared::{WgpuDeviceExt, WgpuOptions, WgpuSlice, WgpuTensorExt};
pub use wgpu;
