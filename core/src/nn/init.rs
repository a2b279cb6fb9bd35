//! Initial values of parameters, as PyTorch's `nn.init`. The functions whose names end in `_` overwrite a tensor; the
//! random ones draw from its device's stream.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::tensor::Tensor;

/// A parameter: tagged as one and recorded for gradients, from `make`, which allocates it.
///
/// # Errors
/// What `make` returns; its dtype is no float.
#[track_caller]
pub fn parameter(make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    buffer(make)?.requires_grad_()
}

/// A buffer: a tensor of a module that is saved and not trained.
///
/// # Errors
/// What `make` returns.
#[track_caller]
pub fn buffer(make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    // The line of the caller: what a closure calls would name the closure's.
    let _scope = memory::scope::enter_scope(memory::scope::Scope {
        tag: Tag::Parameter,
        ..memory::scope::current().here()
    });
    make()
}

/// How many inputs one output of a weight \[out, in, ...\] sums over, and how many outputs one input reaches.
///
/// # Errors
/// There are fewer than two dimensions.
#[track_caller]
pub fn fans(weight: &Tensor) -> Result<(usize, usize)> {
    let &[out, inputs, ref window @ ..] = weight.shape() else {
        return Err(Error::shape("init", "takes a weight of at least two dimensions", &[weight.shape()]));
    };
    let window: usize = window.iter().product();
    Ok((inputs * window, out * window))
}

fn replace(t: &Tensor, make: impl FnOnce(&[usize], DType, &Device) -> Result<Tensor>) -> Result<()> {
    let _tag = memory::scope::tag(Tag::Workspace);
    t.detach().copy_(&make(t.shape(), t.dtype(), t.device())?)
}

/// Uniform numbers in low ≤ x < high.
///
/// # Errors
/// The dtype is no float; memory runs out.
#[track_caller]
pub fn uniform_(t: &Tensor, low: f64, high: f64) -> Result<()> {
    replace(t, |shape, dtype, device| Tensor::uniform(shape, low, high, dtype, device))
}

/// Normal numbers.
///
/// # Errors
/// The dtype is no float; memory runs out.
#[track_caller]
pub fn normal_(t: &Tensor, mean: f64, std: f64) -> Result<()> {
    replace(t, |shape, dtype, device| Tensor::normal(shape, mean, std, dtype, device))
}

/// One number everywhere.
///
/// # Errors
/// Memory runs out.
#[track_caller]
pub fn constant_(t: &Tensor, value: f64) -> Result<()> {
    replace(t, |_, dtype, device| Tensor::full(&[], value, dtype, device))
}

/// Zeros.
///
/// # Errors
/// Memory runs out.
#[track_caller]
pub fn zeros_(t: &Tensor) -> Result<()> {
    constant_(t, 0.0)
}

/// Ones.
///
/// # Errors
/// Memory runs out.
#[track_caller]
pub fn ones_(t: &Tensor) -> Result<()> {
    constant_(t, 1.0)
}

/// Uniform numbers that keep the variance through a layer whose activation is a leaky ReLU of slope `a` (0 for a ReLU);
/// layers use √5, which gives the bound 1/√fan_in.
///
/// # Errors
/// The weight has fewer than two dimensions; the dtype is no float; memory runs out.
#[track_caller]
pub fn kaiming_uniform_(t: &Tensor, a: f64) -> Result<()> {
    let bound = (6.0 / ((1.0 + a * a) * fans(t)?.0 as f64)).sqrt();
    uniform_(t, -bound, bound)
}

/// The normal form of [`kaiming_uniform_`].
///
/// # Errors
/// As [`kaiming_uniform_`].
#[track_caller]
pub fn kaiming_normal_(t: &Tensor, a: f64) -> Result<()> {
    normal_(t, 0.0, (2.0 / ((1.0 + a * a) * fans(t)?.0 as f64)).sqrt())
}

/// Uniform numbers that keep the variance forward and backward (Glorot).
///
/// # Errors
/// As [`kaiming_uniform_`].
#[track_caller]
pub fn xavier_uniform_(t: &Tensor, gain: f64) -> Result<()> {
    let (fan_in, fan_out) = fans(t)?;
    let bound = gain * (6.0 / (fan_in + fan_out) as f64).sqrt();
    uniform_(t, -bound, bound)
}

/// The normal form of [`xavier_uniform_`].
///
/// # Errors
/// As [`kaiming_uniform_`].
#[track_caller]
pub fn xavier_normal_(t: &Tensor, gain: f64) -> Result<()> {
    let (fan_in, fan_out) = fans(t)?;
    normal_(t, 0.0, gain * (2.0 / (fan_in + fan_out) as f64).sqrt())
}

/// The default of layers with a window or a matrix: uniform within 1/√fan_in, weight and bias alike.
#[track_caller]
pub(super) fn layer_uniform(shape: &[usize], fan_in: usize, device: &Device) -> Result<Tensor> {
    let bound = if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f64).sqrt() };
    parameter(|| Tensor::uniform(shape, -bound, bound, DType::F32, device))
}
