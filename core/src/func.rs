//! Derivatives of functions of tensors, after PyTorch's `torch.func` and `torch.autograd.functional`. The
//! functions ignore the history of the inputs and do not change their gradients.
//!
//! ```
//! # use forebay_core::{func, device::Device, dtype::DType, tensor::Tensor};
//! # let device = Device::null(Default::default());
//! let x = Tensor::ones(&[3], DType::F32, &device)?;
//! let (_, product) = func::hvp(|x| x[0].pow(3.0)?.sum_all(), &[x.clone()], &[x.ones_like()?])?;
//! assert_eq!(product[0].shape(), [3]);
//! assert_eq!(func::hessian(|x| x.pow(3.0)?.sum_all(), &x)?.shape(), [3, 3]);
//! # Ok::<(), forebay_core::error::Error>(())
//! ```

use crate::autograd::{GradOptions, grad_allow_unused};
use crate::error::{Result, fail_if};
use crate::ops::stack;
use crate::tensor::{Dims, Tensor};

#[track_caller]
fn to_leaves(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    inputs.iter().map(Tensor::to_leaf).collect()
}

/// Replaces missing gradients with zeros.
#[track_caller]
fn fill_missing_with_zeros(found: Vec<Option<Tensor>>, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    found.into_iter().zip(inputs).map(|(grad, t)| grad.map_or_else(|| t.zeros_like(), Ok)).collect()
}

#[track_caller]
fn check_vector_shapes(op: &'static str, inputs: &[Tensor], v: &[Tensor]) -> Result<()> {
    let fits = inputs.len() == v.len() && inputs.iter().zip(v).all(|(t, v)| t.shape() == v.shape());
    fail_if!(!fits; argument(op), "takes one vector for each input, of its shape");
    Ok(())
}

/// Returns the result of `f` and the vector-Jacobian products of `v`, which has the result's shape, for each
/// input.
///
/// # Errors
/// Those of [`grad`](crate::autograd::grad) and of `f`.
#[track_caller]
pub fn vjp(
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    v: &Tensor,
) -> Result<(Tensor, Vec<Tensor>)> {
    let inputs = to_leaves(inputs)?;
    let y = f(&inputs)?;
    if !y.requires_grad() {
        return Ok((y, fill_missing_with_zeros(vec![None; inputs.len()], &inputs)?));
    }
    let seeds = [v.clone()];
    let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
    let found = grad_allow_unused(std::slice::from_ref(&y), &inputs, &options)?;
    Ok((y.detach(), fill_missing_with_zeros(found, &inputs)?))
}

/// Returns the result of `f` and the Jacobian-vector product summed over the inputs. `v` has one vector of
/// each input's shape. The product is computed by double backward.
///
/// # Errors
/// Those of [`vjp`], an operation of `f` that is only once differentiable, and a `v` that does not match the
/// inputs.
#[track_caller]
pub fn jvp(
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    v: &[Tensor],
) -> Result<(Tensor, Tensor)> {
    check_vector_shapes("jvp", inputs, v)?;
    let inputs = to_leaves(inputs)?;
    let y = f(&inputs)?;
    if !y.requires_grad() {
        return Ok((y.clone(), y.zeros_like()?));
    }
    // The gradient is linear in the gradient of y, so any seed works; the gradient with respect to the seed
    // is the transposed product.
    let seed = [y.detach().zeros_like()?.to_leaf()?];
    let options = GradOptions { grad_outputs: Some(&seed), ..GradOptions::create_graph() };
    let found = grad_allow_unused(std::slice::from_ref(&y), &inputs, &options)?;
    let (back, v): (Vec<Tensor>, Vec<Tensor>) = found
        .into_iter()
        .zip(v)
        .filter_map(|(g, v)| Some((g.filter(Tensor::requires_grad)?, v.clone())))
        .unzip();
    let options = GradOptions { grad_outputs: Some(&v), ..GradOptions::default() };
    let found = grad_allow_unused(&back, &seed, &options)?;
    Ok((y.detach(), fill_missing_with_zeros(found, &seed)?.remove(0)))
}

/// Returns the scalar result of `f` and the product of its Hessian with `v`, which has one vector of each
/// input's shape.
///
/// # Errors
/// Those of [`jvp`], and an `f` that does not return a scalar.
#[track_caller]
pub fn hvp(
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    v: &[Tensor],
) -> Result<(Tensor, Vec<Tensor>)> {
    check_vector_shapes("hvp", inputs, v)?;
    let inputs = to_leaves(inputs)?;
    let y = f(&inputs)?;
    let first = match y.requires_grad() {
        true => grad_allow_unused(std::slice::from_ref(&y), &inputs, &GradOptions::create_graph())?,
        false => vec![None; inputs.len()],
    };
    // Gradients that do not depend on the inputs have no history.
    let (first, v): (Vec<Tensor>, Vec<Tensor>) = first
        .into_iter()
        .zip(v)
        .filter_map(|(g, v)| Some((g.filter(Tensor::requires_grad)?, v.clone())))
        .unzip();
    let options = GradOptions { grad_outputs: Some(&v), ..GradOptions::default() };
    Ok((y.detach(), fill_missing_with_zeros(grad_allow_unused(&first, &inputs, &options)?, &inputs)?))
}

/// Returns the gradients of every element of `y` with respect to `x`: \[y.., x..\].
#[track_caller]
fn jacobian_by_rows(y: &Tensor, x: &Tensor) -> Result<Tensor> {
    let shape: Dims = y.shape().iter().chain(x.shape()).copied().collect();
    if !y.requires_grad() || y.numel() == 0 {
        return Tensor::zeros(&shape, x.dtype(), x.device());
    }
    let flat = y.reshape([-1])?;
    let row = |k: usize| {
        let one = flat.select(0, k as isize)?;
        let options = GradOptions { retain_graph: Some(true), ..GradOptions::default() };
        let found = grad_allow_unused(&[one], std::slice::from_ref(x), &options)?;
        Ok(fill_missing_with_zeros(found, std::slice::from_ref(x))?.remove(0))
    };
    let rows = (0..flat.numel()).map(row).collect::<Result<Vec<_>>>()?;
    stack(&rows, 0)?.reshape(&shape[..])
}

/// Returns the Jacobian of `f` at `x`, \[result.., x..\], by one backward pass for each element of the
/// result.
#[track_caller]
pub fn jacobian(f: impl FnOnce(&Tensor) -> Result<Tensor>, x: &Tensor) -> Result<Tensor> {
    let x = x.to_leaf()?;
    jacobian_by_rows(&f(&x)?, &x)
}

/// Returns the Hessian of the scalar function `f` at `x`: \[x.., x..\].
#[track_caller]
pub fn hessian(f: impl FnOnce(&Tensor) -> Result<Tensor>, x: &Tensor) -> Result<Tensor> {
    let x = x.to_leaf()?;
    let y = f(&x)?;
    if !y.requires_grad() {
        return jacobian_by_rows(&x.detach(), &x);
    }
    let mut first = grad_allow_unused(&[y], std::slice::from_ref(&x), &GradOptions::create_graph())?;
    let first = first.remove(0).map_or_else(|| x.zeros_like(), Ok)?;
    jacobian_by_rows(&first, &x)
}
