//! Runtime below tensors: devices, streams, dispatch of commands, profiler, and recorder of captured steps.

pub(crate) mod capture;
mod card_profile;
pub mod device;
pub mod profile;
pub mod stream;
