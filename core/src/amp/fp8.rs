//! The scope in which linear layers multiply in 8 bits.

use std::cell::Cell;

use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};

thread_local! {
    static FP8_ENABLED: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
}

/// While it lives, linear layers of this thread multiply in 8 bits; see [`fp8()`]. Guards may be dropped in any order.
#[derive(Debug)]
pub struct Fp8Guard {
    _on: ScopedGuard<Cell<bool>>,
}

/// Lets [`linear`](crate::tensor::Tensor::linear), and [`mlp`](crate::tensor::Tensor::mlp), which is made of it then, multiply 8-bit
/// floats on this thread until the guard is dropped: x and the weight as `f8_e4m3`, gradients as `f8_e5m2`, sums in f32. Before it is cast, a
/// tensor is divided by the smallest power of two that brings its largest number into the type (Transformer Engine's
/// `Float8CurrentScaling` with `force_pow_2_scales`). Results and gradients have the types that they have without it; biases and
/// their gradients, weights and what optimisers do stay as they are.
///
/// It is meant for the forward pass, inside of [`autocast`](super::autocast()), which says what the types around the products are; the backward
/// pass of such a layer is in 8 bits whether the scope is still there or not. What is kept of x for it is a byte an element. It has no
/// gradient of its own. The last layer in [`linear_cross_entropy`](crate::tensor::Tensor::linear_cross_entropy) stays in 16 bits.
///
/// The library multiplies bytes where [`Features::f8`](crate::backend::Features) is set (CUDA from sm_89 on) and extents are multiples
/// of 16. Elsewhere the same numbers are multiplied as bf16: right, to try it out, and slower than without
/// ([`scaled_mm`](crate::tensor::Tensor::scaled_mm)).
///
/// ```
/// use forebay_core::{amp::{autocast, fp8}, device::Device, dtype::DType, tensor::Tensor};
/// let device = Device::null(Default::default());
/// let weight = Tensor::ones(&[32, 64], DType::F32, &device)?.requires_grad_()?;
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
    set_fp8_enabled(true)
}

/// Whether linear layers of this thread multiply in 8 bits.
#[must_use]
pub fn is_fp8_enabled() -> bool {
    FP8_ENABLED.current()
}

/// Turns it on or off until the guard is dropped.
pub(super) fn set_fp8_enabled(on: bool) -> Fp8Guard {
    Fp8Guard { _on: ScopedGuard::new(&FP8_ENABLED, on) }
}
