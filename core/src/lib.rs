//! Core of forebay: tensors, operations, gradients, memory and training, independent of any GPU API.
//!
//! A [`device::Device`] is a [`backend::Backend`] with a memory [`memory::Pool`]. A [`tensor::Tensor`] is a
//! view of a block of that pool. An operation ([`ops`]) launches kernels of the shaders crate and records its
//! gradient in the autograd graph ([`autograd`]). Programs use the facade crate `forebay`, which chooses the
//! device.
//!
//! Every operation fails in these general cases:
//! - Memory runs out, or the device is lost.
//! - Tensors are on different devices, or their shapes neither broadcast nor fit the description.
//! - A dimension is out of range or repeated, the rank is not the described one, or an extent is negative.
//! - The device or the operation does not support a dtype.
//! - The operation reads a result on the host while a capture is active.
//!
//! `# Errors` sections list only other errors. A function without that section has no others, except those of
//! functions to which its text links, or whose name it extends ([`tensor::Tensor::sum_all`] extends
//! [`tensor::Tensor::sum`]).

pub mod amp;
pub mod atomic_write;
pub mod autograd;
pub mod backend;
pub mod capture;
#[doc(hidden)]
pub mod check;
#[doc(hidden)]
pub mod disk_cache;
pub mod dtype;
pub mod environment;
pub mod error;
pub mod func;
pub mod memory;
pub mod ops;
#[doc(hidden)]
pub mod platform;
#[doc(hidden)]
pub mod printable;
mod runtime;
pub mod scalar;
#[doc(hidden)]
pub mod scoped_local;
mod storage;
#[doc(hidden)]
pub mod sync;
pub mod tensor;
pub mod variables;

#[doc(hidden)]
pub use runtime::driver_call;
pub use runtime::{device, future, profile, stream};
