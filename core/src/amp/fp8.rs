//! Scope in which linear layers multiply 8-bit floats.

use std::cell::Cell;

use crate::autograd::autocast_mode::FP8_ENABLED;
use crate::scoped_local::{GetCurrent, ScopedGuard};

/// Guard during which linear layers of this thread multiply 8-bit floats; see [`fp8()`]. Guards may be
/// dropped in any order.
#[derive(Debug)]
pub struct Fp8Guard {
    _on: ScopedGuard<Cell<bool>>,
}

/// Makes [`linear`](crate::tensor::Tensor::linear) multiply 8-bit floats on this thread until the guard is
/// dropped. [`mlp`](crate::tensor::Tensor::mlp) is then composed of such layers. The input x and the weight
/// become `f8_e4m3`, gradients `f8_e5m2`, and sums stay in f32.
///
/// Before the cast, a tensor is divided by the smallest power of two that brings its largest absolute value
/// into range. This is Transformer Engine's `Float8CurrentScaling` with `force_pow_2_scales`. Results and
/// gradients keep the dtypes that they have without this scope. Biases, weights and the optimiser's work do
/// not change.
///
/// Use it in the forward pass inside [`autocast`](super::autocast()), which chooses the dtypes around the
/// products. The backward pass of such a layer runs in 8 bits even after the scope has ended. The layer saves
/// one byte for each element of x. A second gradient is not supported. The last layer in
/// [`linear_cross_entropy`](crate::tensor::Tensor::linear_cross_entropy) stays in 16 bits.
///
/// The library multiplies 8-bit floats if [`Features::f8_matmul`](crate::backend::Features) is set (CUDA from
/// sm_89 on) and extents are multiples of 16. Otherwise the same values are multiplied as bf16. That is
/// correct, for trying it out, but slower than without this scope
/// ([`scaled_mm`](crate::tensor::Tensor::scaled_mm)).
///
/// ```
/// use forebay_core::{amp::{autocast, fp8}, device::Device, dtype::DType, tensor::Tensor};
/// let device = Device::null(Default::default());
/// let weight = Tensor::ones(&[32, 64], DType::F32, &device)?.to_leaf()?;
/// let y = {
///     let (_autocast, _fp8) = (autocast(DType::BF16)?, fp8());
///     Tensor::ones(&[16, 64], DType::F32, &device)?.linear(&weight, None)?
/// };
/// assert_eq!(y.dtype(), DType::BF16);
/// y.backward_with(&y.ones_like()?)?;
/// assert_eq!(weight.grad().map(|g| g.dtype()), Some(DType::F32));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[must_use = "layers multiply in 8 bits only while the guard lives"]
pub fn fp8() -> Fp8Guard {
    Fp8Guard { _on: ScopedGuard::new(&FP8_ENABLED, true) }
}

/// Reports whether linear layers of this thread multiply 8-bit floats.
#[must_use]
pub fn is_fp8_enabled() -> bool {
    FP8_ENABLED.current()
}
