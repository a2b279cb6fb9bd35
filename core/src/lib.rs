//! Core of forebay: tensors, operations, gradients, memory and training, independent of any GPU API.
//!
//! A [`device::Device`] is a [`backend::Backend`] with a memory [`memory::Pool`]. A [`tensor::Tensor`] is a
//! view of a block of that pool. An operation ([`ops`]) launches kernels of the shaders crate and records its
//! gradient in the autograd graph ([`autograd`]). Programs use the facade crate `forebay`, which chooses the
//! device.
//!
//! Every operation can fail for general reasons: memory runs out, or the device was lost. Tensors are on
//! different devices, or shapes neither broadcast nor fit. A dimension is out of range or repeated, or an
//! extent is negative. The device or the operation does not support a dtype. The host would read a result
//! while a capture is active. `# Errors` sections list only other errors. A function without that section has
//! no others, or those of the function that its name extends ([`tensor::Tensor::sum_all`] those of
//! [`tensor::Tensor::sum`]).

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
pub mod func;
pub mod memory;
pub mod ops;
mod runtime;
pub mod scalar;
#[doc(hidden)]
pub mod scoped_local;
mod storage;
mod sync;
pub mod tensor;
pub mod variables;

pub use runtime::{device, future, profile, stream};
