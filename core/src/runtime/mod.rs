//! Runtime below tensors: devices, streams, dispatch of commands, profiler, and recorder of captured steps.

pub(crate) mod capture;
pub mod device;
pub mod profile;
pub mod stream;
