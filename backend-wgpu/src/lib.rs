//! The wgpu backend of forebay: every GPU with Vulkan, Metal or DX12, and software drivers.
//!
//! What is particular to it, and where:
//! - one long-lived recorder (`recorder`) collects launches, copies and fills into a command encoder and submits
//!   them in batches, so that the order of the calls is the order of the work;
//! - parameters travel in a ring of uniform buffers, uploads in a ring of mapped staging buffers, both bounded and
//!   recycled when the device has passed them (`params`, `staging`);
//! - WebGPU forbids one buffer to be read-only and read_write in one dispatch, and tensors are slices of few large
//!   buffers, so every storage binding is read_write (`kernel`);
//! - nothing of wgpu panics on the way out: creation runs inside error scopes, everything else is recorded by the
//!   device's error callbacks and returned, typed, by the next call (`gpu`).

mod adapter;
mod backend;
mod bind_groups;
mod copy_fill;
mod gpu;
mod kernel;
mod params;
mod prepared;
mod probe;
mod recorder;
mod staging;
mod timestamps;

pub use adapter::WgpuDeviceInfo;
pub use backend::WgpuBackend;
