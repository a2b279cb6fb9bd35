//! Linear layers of 8-bit floats: each operand is divided by what brings its largest number into the type, cast, and multiplied.

use smallvec::{SmallVec, smallvec};

use super::linear::rows;
use super::reduce::column_sums;
use crate::autograd::{self, Grads};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{self, Tag};
use crate::tensor::{Dims, Tensor};

/// Below any number that matters, and above what f32 divides by.
const LEAST: f64 = 1e-30;

/// A tensor as 8-bit floats, and the number that it was divided by.
struct Scaled {
    bytes: Tensor,
    scale: Tensor,
}

impl Scaled {
    /// NaN is NaN; an infinite number makes NaN of itself, and zeros of the others.
    fn new(x: &Tensor, dtype: DType) -> Result<Self> {
        let x = &x.detach();
        let largest = if dtype == DType::F8E4M3 { 448.0 } else { 57_344.0 };
        let scale = match x.numel() {
            0 => Tensor::ones(&[], DType::F32, x.device())?,
            _ => {
                let most = x.amax(&[], false)?.maximum(&x.amin(&[], false)?.neg()?)?.to_dtype(DType::F32)?;
                // A power of two: the division is exact, so that nothing is rounded twice.
                most.clamp(LEAST, f64::INFINITY)?.div(largest)?.log2()?.ceil()?.exp2()?
            }
        };
        // f16 does not hold every power.
        let wide = if x.dtype() == DType::BF16 { DType::BF16 } else { DType::F32 };
        let divided = {
            let _tag = memory::scope::tag(Tag::Workspace);
            x.to_dtype(wide)?.div(&scale.to_dtype(wide)?)?
        };
        Ok(Self { bytes: divided.to_dtype(dtype)?, scale })
    }

    fn t(&self) -> Result<Self> {
        Ok(Self { bytes: self.bytes.t()?, scale: self.scale.clone() })
    }

    fn mm(&self, other: &Self, bias: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
        self.bytes.scaled_mm(&other.bytes, &self.scale, &other.scale, bias, dtype)
    }
}

/// x · weightᵀ + bias, of operands that were checked: x in the type of the result, a weight of two dimensions. It keeps x and the weight in
/// bytes, as far as their gradients need them.
pub(super) fn linear(op: &'static str, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (dtype, weight_type) = (x.dtype(), weight.dtype());
    let low = Scaled::new(&rows(x)?, DType::F8E4M3)?;
    let low_weight = Scaled::new(weight, DType::F8E4M3)?;
    let mut shape: Dims = x.shape().into();
    let added = bias.map(Tensor::detach);
    let out = low.mm(&low_weight.t()?, added.as_ref(), dtype)?;
    if let Some(last) = shape.last_mut() {
        *last = weight.shape()[0];
    }
    let out = out.reshape(&shape[..])?;
    let inputs: SmallVec<[&Tensor; 3]> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    if !autograd::wanted(&inputs) {
        return Ok(out);
    }
    let low = weight.requires_grad().then_some(low);
    let low_weight = x.requires_grad().then_some(low_weight);
    let (x_shape, bias_type): (Dims, _) = (x.shape().into(), bias.map(Tensor::dtype));
    Ok(autograd::attach(op, out, &inputs, move |g, wants| {
        let g = rows(g)?;
        let low_g = Scaled::new(&g, DType::F8E5M2)?;
        let dx = low_weight.as_ref().filter(|_| wants[0]);
        let dx = dx.map(|weight| low_g.mm(weight, None, dtype)?.reshape(&x_shape[..]));
        let dw = low.as_ref().filter(|_| wants[1]).map(|x| low_g.t()?.mm(x, None, weight_type));
        let mut grads: Grads = smallvec![dx.transpose()?, dw.transpose()?];
        if let Some(bias_type) = bias_type {
            grads.push(wants[2].then(|| column_sums(&g, bias_type)).transpose()?);
        }
        Ok(grads)
    }))
}
