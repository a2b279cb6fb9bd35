//! The core of forebay: tensors, operations, gradients, memory, training. It names no GPU API.
//!
//! A [`device::Device`] is a [`backend::Backend`] with a memory [`memory::Pool`]; a [`tensor::Tensor`] is a view of a block of
//! that pool; an operation ([`ops`]) launches kernels of the shaders crate and puts its gradient on the tape
//! ([`autograd`]). Programs use the facade crate `forebay`, which chooses the device.

pub mod amp;
pub mod atomic_write;
pub mod autograd;
pub mod backend;
pub mod capture;
#[doc(hidden)]
pub mod check;
pub mod dtype;
pub mod environment;
pub mod error;
pub mod memory;
pub mod ops;
mod runtime;
#[doc(hidden)]
pub mod scoped_local;
mod storage;
pub mod tensor;

pub use runtime::{device, profile, stream};
