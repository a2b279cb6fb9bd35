//! Derivatives of functions of tensors, after PyTorch's `torch.autograd.functional`. Inputs are taken as they are: no history
//! of theirs is followed, and their gradients are left alone.
//!
//! ```
//! # use forebay_core::{autograd::functional, device::Device, dtype::DType, tensor::Tensor};
//! # let device = Device::null(Default::default());
//! let x = Tensor::ones(&[3], DType::F32, &device)?;
//! let (_, product) = functional::hvp(|x| x[0].pow(3.0)?.sum_all(), &[x.clone()], &[x.ones_like()?])?;
//! assert_eq!(product[0].shape(), [3]);
//! assert_eq!(functional::hessian(|x| x.pow(3.0)?.sum_all(), &x)?.shape(), [3, 3]);
//! # Ok::<(), forebay_core::error::Error>(())
//! ```

use super::{GradOptions, grad_allow_unused};
use crate::error::{Error, Result};
use crate::ops::stack;
use crate::tensor::{Dims, Tensor};

fn to_leaves(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    inputs.iter().map(Tensor::requires_grad_).collect()
}

/// Zero for what nothing depends on.
fn fill_missing_with_zeros(found: Vec<Option<Tensor>>, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    found.into_iter().zip(inputs).map(|(grad, t)| grad.map_or_else(|| t.zeros_like(), Ok)).collect()
}

fn check_vector_shapes(op: &'static str, inputs: &[Tensor], v: &[Tensor]) -> Result<()> {
    let fits = inputs.len() == v.len() && inputs.iter().zip(v).all(|(t, v)| t.shape() == v.shape());
    match fits {
        true => Ok(()),
        false => Err(Error::argument(op, "takes one vector for each input, of its shape")),
    }
}

/// What `f` gives, and the products of `v`, of its shape, with the Jacobians of the inputs.
///
/// # Errors
/// As [`grad`](super::grad), or of `f`.
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

/// What `f` gives, and the sum of the Jacobians' products with `v`, one of each input's shape: by the gradient of a gradient.
///
/// # Errors
/// As [`vjp`]; an operation of `f` has no gradient of gradients; `v` does not fit.
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
    // The gradient is linear in the gradient of y, whatever that is: the transpose of what is asked for.
    let seed = [y.detach().zeros_like()?.requires_grad_()?];
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

/// What `f` gives, a scalar, and the product of its Hessian with `v`, one of each input's shape.
///
/// # Errors
/// As [`jvp`]; `f` gives no scalar.
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
    // What does not depend on the inputs has no history.
    let (first, v): (Vec<Tensor>, Vec<Tensor>) = first
        .into_iter()
        .zip(v)
        .filter_map(|(g, v)| Some((g.filter(Tensor::requires_grad)?, v.clone())))
        .unzip();
    let options = GradOptions { grad_outputs: Some(&v), ..GradOptions::default() };
    Ok((y.detach(), fill_missing_with_zeros(grad_allow_unused(&first, &inputs, &options)?, &inputs)?))
}

/// The gradients of every element of `y` by `x`, \[y.., x..\].
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
    stack(&rows.iter().collect::<Vec<_>>(), 0)?.reshape(&shape[..])
}

/// The Jacobian of `f` at `x`, \[what f gives.., x..\]: one walk back for each element that it gives.
///
/// # Errors
/// As [`vjp`].
pub fn jacobian(f: impl FnOnce(&Tensor) -> Result<Tensor>, x: &Tensor) -> Result<Tensor> {
    let x = x.requires_grad_()?;
    jacobian_by_rows(&f(&x)?, &x)
}

/// The Hessian of `f`, which gives a scalar, at `x`: \[x.., x..\].
///
/// # Errors
/// As [`hvp`].
pub fn hessian(f: impl FnOnce(&Tensor) -> Result<Tensor>, x: &Tensor) -> Result<Tensor> {
    let x = x.requires_grad_()?;
    let y = f(&x)?;
    if !y.requires_grad() {
        return jacobian_by_rows(&x.detach(), &x);
    }
    let mut first = grad_allow_unused(&[y], std::slice::from_ref(&x), &GradOptions::create_graph())?;
    let first = first.remove(0).map_or_else(|| x.zeros_like(), Ok)?;
    jacobian_by_rows(&first, &x)
}
