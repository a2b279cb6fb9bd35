//! Runtime below tensors: devices, streams, dispatch of commands, profiler, and recorder of captured steps.

pub(crate) mod capture;
mod card_profile;
pub mod device;
pub(crate) mod dispatch;
pub mod driver_call;
mod flushing;
pub mod future;
pub(crate) mod kernel_params;
pub(crate) mod observer;
pub(crate) mod options;
mod pool_steps;
pub mod profile;
pub mod stream;
pub(crate) mod variant_choices;
