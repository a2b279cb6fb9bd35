//! The vector product.

use forebay_shaders::KernelSpec;
use smallvec::smallvec;

use crate::autograd::{self, SavedTensor};
use crate::dtype::DType;
use crate::error::{Result, fail, fail_if};
use crate::memory;
use crate::ops::kernel::launch::{self, KernelParams, WORKGROUP_SIZE};
use crate::tensor::layout::{broadcast_shapes, collapse_dims, normalize_dim};
use crate::tensor::{Dims, Tensor};

const OP: &str = "cross";

/// a × b along `d`, of operands of one shape.
fn run_cross(a: &Tensor, b: &Tensor, d: usize) -> Result<Tensor> {
    let out = Tensor::empty(a.shape(), a.dtype(), a.device())?;
    let mut lines: Dims = a.shape().into();
    lines[d] = 1;
    let (shape, strides) = collapse_dims(&lines, &[a.strides(), b.strides(), out.strides()]);
    launch::check_rank(OP, shape.len())?;
    let n: usize = shape.iter().product();
    let spec = KernelSpec::new("cross").def("dtype", launch::shader_dtype_name(a.dtype(), a.device()));
    let mut params = KernelParams::new().size(n).size(shape.len());
    for of in [|t: &Tensor, _: usize| t.layout().offset(), |t: &Tensor, d: usize| t.strides()[d]] {
        params = [a, b, &out].into_iter().fold(params.align(), |params, t| params.size(of(t, d)));
    }
    let params = params.align().dims(&shape).dims(&strides[0]).dims(&strides[1]).dims(&strides[2]);
    launch::launch(&spec, &[a, b, &out], params, n.div_ceil(WORKGROUP_SIZE))?;
    Ok(out)
}

impl Tensor {
    /// The vector products of threes along `dim`; without one, along the first dimension of extent 3, as PyTorch's `cross`
    /// (`linalg.cross` takes -1). Shapes broadcast, types are promoted.
    ///
    /// # Errors
    /// The shapes do not broadcast; the extent of `dim` is not 3, or no extent is; a type is bool; memory runs out.
    #[track_caller]
    pub fn cross(&self, other: &Tensor, dim: Option<isize>) -> Result<Tensor> {
        let _op = memory::scope::enter_op(OP);
        self.check_same_device(OP, other)?;
        let dtype = self.dtype().promote(other.dtype());
        fail_if!(dtype == DType::Bool; dtype(OP, dtype), "takes numbers; cast with `to_dtype`");
        launch::check_device_dtype(OP, dtype, self.device())?;
        let shape = broadcast_shapes(OP, &[self.shape(), other.shape()])?;
        let d = match dim {
            Some(dim) => Some(normalize_dim(OP, dim, shape.len())?),
            None => shape.iter().position(|&n| n == 3),
        };
        let (a, b) =
            (self.to_dtype(dtype)?.broadcast_to(&shape)?, other.to_dtype(dtype)?.broadcast_to(&shape)?);
        let Some(d) = d.filter(|&d| shape.get(d) == Some(&3)) else {
            fail!(shape(OP, [self, other]), "takes vectors of three numbers along the dimension");
        };
        cross_with_grad(&a, &b, d)
    }
}

/// a × b with its gradients, which are products too.
fn cross_with_grad(a: &Tensor, b: &Tensor, d: usize) -> Result<Tensor> {
    let out = run_cross(a, b, d)?;
    let x = b.requires_grad().then(|| SavedTensor::input(a));
    let y = a.requires_grad().then(|| SavedTensor::input(b));
    Ok(autograd::differentiable(OP, out, &[a, b], move |g, wants| {
        let own = y.as_ref().map(|y| cross_with_grad(&y.unpack(wants)?, g, d)).transpose()?;
        Ok(smallvec![own, x.as_ref().map(|x| cross_with_grad(g, &x.unpack(wants)?, d)).transpose()?])
    }))
}
