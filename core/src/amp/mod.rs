//! Automatic mixed precision: operations that are safe in 16 bits run in 16 bits, all others in f32. Weights
//! stay in f32.
//!
//! [`autocast`] is a scope around the forward pass in which every operation chooses its dtype by PyTorch's
//! lists ([`CastPolicy`]). Parameters stay in f32: each is cast once in a scope, and its gradient is cast
//! back. With [`fp8()`] inside, linear layers multiply in 8 bits. In f16, small gradients underflow:
//! `GradScaler` scales the loss, and unscales the gradients.
//!
//! ```no_run
//! # use forebay_core::{amp::autocast, dtype::DType, error::Result, tensor::Tensor};
//! # fn step(x: &Tensor, y: &Tensor, weight: &Tensor) -> Result<()> {
//! let loss = {
//!     let _autocast = autocast(DType::BF16)?;
//!     x.linear(weight, None)?.cross_entropy(y)? // a product in bf16, a loss in f32
//! };
//! loss.backward()
//! # }
//! ```

mod autocast;
mod fp8;
#[doc(hidden)]
pub mod low_precision_copy;

pub use crate::autograd::autocast_mode::{
    AutocastGuard, autocast_dtype, clear_autocast_cache, is_autocast_enabled,
};
pub use autocast::{CastPolicy, autocast, no_autocast};
pub use fp8::{Fp8Guard, fp8, is_fp8_enabled};

pub(crate) use autocast::{
    AutocastOperand, OperandCast, dispatch_autocast, dispatch_in_f32, half_to_f32, promoted_half_dtype,
};
