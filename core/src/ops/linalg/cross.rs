//! The cross product.

use crate::ops::prelude::*;

const OP: &str = "cross";

/// Computes a × b along `d` for operands of one shape.
fn run_cross(a: &Tensor, b: &Tensor, d: usize) -> Result<Tensor> {
    let out = Tensor::empty(a.shape(), a.dtype(), a.device())?;
    let vectors = with_extent(a.shape(), d, 1);
    let (shape, strides) = collapse_dims(&vectors, &[a.strides(), b.strides(), out.strides()]);
    launch::check_rank(OP, shape.len())?;
    let n: usize = shape.iter().product();
    let spec = kernel_spec! { "cross", dtype: launch::shader_dtype_name(a.dtype(), a.device()) };
    let params = kernel_params! {
        n, rank: shape.len(), offsets: [a, b, &out].map(|t| t.layout().offset()),
        dim_strides: [a, b, &out].map(|t| t.strides()[d]), shape: &shape, a_strides: &strides[0],
        b_strides: &strides[1], out_strides: &strides[2],
    };
    launch::launch(&spec, &[a, b, &out], params, n.div_ceil(WORKGROUP_SIZE))?;
    Ok(out)
}

impl Tensor {
    /// Computes cross products along `dim`: PyTorch's `linalg.cross`. Shapes broadcast, and types are promoted.
    ///
    /// # Errors
    /// The shapes do not broadcast, `dim` does not have extent 3, or a type is bool.
    #[track_caller]
    pub fn cross(&self, other: &Tensor, dim: isize) -> Result<Tensor> {
        operation!(OP);
        self.check_same_device(OP, other)?;
        let dtype = self.dtype().promote(other.dtype());
        fail_if!(dtype == DType::Bool; dtype(OP, dtype), "takes integers and floats; cast with `to_dtype`");
        launch::check_device_dtype(OP, dtype, self.device())?;
        let shape = broadcast_shapes(OP, &[self.shape(), other.shape()])?;
        let d = normalize_dim(OP, dim, shape.len())?;
        let (a, b) =
            (self.to_dtype(dtype)?.broadcast_to(&shape)?, other.to_dtype(dtype)?.broadcast_to(&shape)?);
        fail_if!(shape.get(d) != Some(&3);
            shape(OP, [self, other]), "takes vectors of three elements along the dimension");
        cross_with_grad(&a, &b, d)
    }
}

/// Computes a × b with its gradients, which are cross products as well.
fn cross_with_grad(a: &Tensor, b: &Tensor, d: usize) -> Result<Tensor> {
    let out = run_cross(a, b, d)?;
    let x = b.requires_grad().then(|| SavedTensor::input(a));
    let y = a.requires_grad().then(|| SavedTensor::input(b));
    Ok(autograd::differentiable(OP, out, &[a, b], move |g, ctx| {
        let x_grad = y.as_ref().map(|y| cross_with_grad(&y.unpack(ctx)?, g, d)).transpose()?;
        Ok(smallvec![x_grad, x.as_ref().map(|x| cross_with_grad(g, &x.unpack(ctx)?, d)).transpose()?])
    }))
}
