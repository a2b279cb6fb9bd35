//! The runtime under tensors: devices, streams, the dispatch of commands, the profiler and the recorder of captured steps.

pub(crate) mod capture;
mod card_profile;
pub mod device;
pub mod profile;
pub mod stream;
