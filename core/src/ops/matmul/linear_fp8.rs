//! 8-bit linear layers: operands are scaled to the type's range, cast, and multiplied (current scaling).

use crate::ops::matmul::linear::flatten_to_rows;
use crate::ops::matmul::scaled_mm::supports_fp8_extents;
use crate::ops::prelude::*;
use crate::ops::reduce::statistics::largest_magnitude;
use crate::ops::reduce::sum_columns;

/// Matrix of 8-bit floats with its scale, by which the values were divided.
struct ScaledFp8Matrix {
    fp8_values: Tensor,
    /// Column-major copy, which the library needs for one operand, or else `fp8_values`.
    column_major: Tensor,
    scale: Tensor,
}

impl ScaledFp8Matrix {
    /// Quantizes a matrix. NaN stays NaN. An infinite value becomes NaN and all others become zero. `columns`
    /// requests the column-major copy.
    fn new(x: &Tensor, dtype: DType, columns: bool) -> Result<Self> {
        /// Vectors of a thread, and extents of a workgroup's tile, as in the kernel.
        const STEPS_PER_THREAD: usize = 4;
        const TILE: usize = 64;
        let x = match x.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => contiguous_zero_offset(x)?,
            _ => contiguous_zero_offset(&x.detach().to_dtype(DType::F32)?)?,
        };
        let ([rows, across], device) = ([x.shape()[0], x.shape()[1]], x.device());
        let bytes = Tensor::empty([rows, across], dtype, device)?;
        if x.numel() == 0 {
            let scale = Tensor::ones((), DType::F32, device)?;
            return Ok(Self { column_major: bytes.clone(), fp8_values: bytes, scale });
        }
        let scale = Tensor::empty((), DType::F32, device)?;
        let transposed = columns && supports_fp8_extents(device, x.shape());
        let transposed = transposed.then(|| Tensor::empty([across, rows], dtype, device)).transpose()?;
        let largest = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            largest_magnitude(&x)?
        };
        let spec = kernel_spec! {
            "fp8_quantize", dtype: x.dtype().name(), to: dtype.name(),
            width: if x.numel().is_multiple_of(VEC4_WIDTH) { VEC4_WIDTH } else { 1 },
            transposed: transposed.is_some(), steps_per_thread: STEPS_PER_THREAD,
        };
        let groups = match transposed {
            Some(_) => rows.div_ceil(TILE) * across.div_ceil(TILE),
            None => x.numel().div_ceil(VEC4_WIDTH * STEPS_PER_THREAD * WORKGROUP_SIZE),
        };
        let tensors = bindings![&x, &largest, &scale, &bytes, &transposed];
        let params = kernel_params! { rows, columns: across };
        // `launch` would refuse storage-only types, so enqueue directly.
        launch::enqueue(device.kernel_for_spec(&spec)?, &tensors, params, [groups, 1, 1])?;
        drop(tensors);
        let columns = transposed.map_or_else(|| Ok(bytes.clone()), |transposed| transposed.t())?;
        Ok(Self { fp8_values: bytes, column_major: columns, scale })
    }
}

/// Computes x · weightᵀ + bias of checked operands. x has the result's type, and the weight is
/// two-dimensional. Saves 8-bit copies of x and the weight, if their gradients need them.
pub(crate) fn forward_with_grad(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (dtype, weight_type) = (x.dtype(), weight.dtype());
    let inputs = bindings![x, weight, bias];
    let any_requires_grad = autograd::compute_requires_grad(&inputs);
    // Each operand is saved for the gradient of the other.
    let [keeps_x, keeps_weight] = [weight, x].map(|t| any_requires_grad && t.requires_grad());
    let low = ScaledFp8Matrix::new(&flatten_to_rows(x)?, DType::F8E4M3, keeps_x)?;
    let low_weight = ScaledFp8Matrix::new(weight, DType::F8E4M3, keeps_weight)?;
    let mut shape = Dims::from_slice(x.shape());
    if let Some(last) = shape.last_mut() {
        *last = weight.shape()[0];
    }
    let added = bias.map(Tensor::detach);
    let (a, b) = (&low.fp8_values, &low_weight.fp8_values.t()?);
    let out = a.scaled_mm(b, &low.scale, &low_weight.scale, added.as_ref(), dtype)?.reshape(&shape[..])?;
    if !any_requires_grad {
        return Ok(out);
    }
    let low = keeps_x.then_some((low.column_major, low.scale));
    let low_weight = keeps_weight.then_some((low_weight.column_major, low_weight.scale));
    let (x_shape, bias_type): (Dims, _) = (x.shape().into(), bias.map(Tensor::dtype));
    Ok(autograd::once_differentiable(op, out, &inputs, move |g, ctx| {
        let g = flatten_to_rows(g)?;
        let low_g = ScaledFp8Matrix::new(&g, DType::F8E5M2, ctx.needs_input_grad[1])?;
        let dx = low_weight.as_ref().filter(|_| ctx.needs_input_grad[0]).map(|(weight, scale)| {
            low_g.fp8_values.scaled_mm(weight, &low_g.scale, scale, None, dtype)?.reshape(&x_shape[..])
        });
        let dw = low
            .as_ref()
            .filter(|_| ctx.needs_input_grad[1])
            .map(|(x, scale)| low_g.column_major.t()?.scaled_mm(x, &low_g.scale, scale, None, weight_type));
        let mut grads: InputGrads = smallvec![dx.transpose()?, dw.transpose()?];
        if let Some(bias_type) = bias_type {
            grads.push(ctx.needs_input_grad[2].then(|| sum_columns(&g, bias_type)).transpose()?);
        }
        Ok(grads)
    }))
}
