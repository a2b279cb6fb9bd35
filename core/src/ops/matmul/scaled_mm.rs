//! Scaled products of 8-bit floats: by the vendor's library if it supports them, else as 16-bit products.

use crate::ops::matmul::{self, EpilogueTensors};
use crate::ops::prelude::*;

const OP: &str = "scaled_mm";
/// Alignment that the libraries require of extents, row strides and addresses of 8-bit floats.
const FP8_ALIGNMENT: usize = 16;

impl Tensor {
    /// Computes scale_a · scale_b · (`self` · b) + bias of two matrices of 8-bit floats, as `out_dtype` (f32,
    /// f16 or bf16): PyTorch's `torch._scaled_mm`.
    ///
    /// The scales are the f32 values by which the operands were divided before the cast. Each is one value,
    /// or one value for each row of `self` (\[m, 1\]) and each column of b (\[1, n\]). The bias is \[n\].
    /// Products are exact, and sums are f32. Matrix units that keep fewer bits within one instruction
    /// (Hopper's) have an error of at most 2^-11 of the sum of all |a · b|.
    ///
    /// The library multiplies the bytes on devices with
    /// [`LibraryFeatures::f8_matmul`](crate::backend::LibraryFeatures) (CUDA from sm_89 on). At least one type must be
    /// `f8_e4m3`, and the extents of b must be multiples of 16. The library takes
    /// `self` row-major and b column-major (the transpose of a weight \[n, k\]); other layouts are copied
    /// first. Otherwise both operands are cast to bf16, which represents all their values, in a workspace of
    /// 2 bytes an element. The product is then f32 before scaling.
    ///
    /// There is no gradient.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let scale = Tensor::full((), 0.5, DType::F32, &device)?;
    /// let x = Tensor::ones(&[32, 64], DType::F32, &device)?.div(&scale)?.to_dtype(DType::F8E4M3)?;
    /// let weight = Tensor::ones(&[16, 64], DType::F8E4M3, &device)?;
    /// let y = x.scaled_mm(&weight.t()?, &scale, &Tensor::ones((), DType::F32, &device)?, None, DType::BF16)?;
    /// assert_eq!((y.shape(), y.dtype()), (&[32, 16][..], DType::BF16));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The operands are not 8-bit floats, the shapes do not fit, or an input requires a gradient.
    #[track_caller]
    pub fn scaled_mm(
        &self,
        b: &Tensor,
        scale_a: &Tensor,
        scale_b: &Tensor,
        bias: Option<&Tensor>,
        out_dtype: DType,
    ) -> Result<Tensor> {
        operation!(OP);
        check_scaled_mm(self, b, [scale_a, scale_b], bias, out_dtype)?;
        let shape = [self.shape()[0], b.shape()[1]];
        let (a, b) = align_operands(self, b)?;
        if scale_a.numel() == 1 && scale_b.numel() == 1 {
            let out = Tensor::empty(shape, out_dtype, self.device())?;
            // An epilogue adds a bias of the result's type, which the library supports for 16 bits only.
            let fused = bias.filter(|_| out_dtype.size() == 2);
            let added = fused.map(|bias| contiguous_zero_offset(&bias.to_dtype(out_dtype)?)).transpose()?;
            let scales = [&contiguous_zero_offset(scale_a)?, &contiguous_zero_offset(scale_b)?];
            let finish = EpilogueTensors::Scaled { scales: Some(scales), bias: added.as_ref() };
            if matmul::try_gemm_fp8(OP, &a, &b, &out, finish)? {
                if let Some(bias) = bias.filter(|_| fused.is_none()) {
                    out.add_(bias)?;
                }
                return Ok(out);
            }
        }
        let product = multiply_unscaled(&a, &b, &shape)?;
        drop((a, b));
        // A single element of any rank acts as a scalar; row and column scales broadcast.
        let factor =
            |scale: &Tensor| if scale.numel() == 1 { scale.reshape([0usize; 0]) } else { Ok(scale.clone()) };
        let scaled = product.mul(&factor(scale_a)?)?.mul(&factor(scale_b)?)?;
        match bias {
            Some(bias) => scaled.add(&bias.to_dtype(DType::F32)?)?.to_dtype(out_dtype),
            None => scaled.to_dtype(out_dtype),
        }
    }
}

fn check_scaled_mm(
    a: &Tensor,
    b: &Tensor,
    scales: [&Tensor; 2],
    bias: Option<&Tensor>,
    out: DType,
) -> Result<()> {
    for t in [a, b] {
        fail_if!(!t.dtype().is_storage_only();
            dtype(OP, t.dtype()), "takes f8_e4m3 and f8_e5m2; scale, and cast with `to_dtype`");
    }
    let (&[m, k], &[rows, n]) = (a.shape(), b.shape()) else {
        fail!(shape(OP, [a, b]), "takes two matrices")
    };
    fail_if!(k != rows;
        shape(OP, [a, b]), "the first has {k} columns, the second {rows} rows; they must be equal");
    for (scale, lines) in scales.into_iter().zip([[m, 1], [1, n]]) {
        fail_if!(scale.dtype() != DType::F32; dtype(OP, scale.dtype()), "scales are f32");
        fail_if!(scale.numel() != 1 && scale.shape() != lines;
            shape(OP, [scale]), "a scale is one number, or one for each line: {lines:?}");
    }
    if let Some(bias) = bias {
        fail_if!(!matches!(bias.dtype(), DType::F32 | DType::F16 | DType::BF16);
            dtype(OP, bias.dtype()), "a bias is f32, f16 or bf16");
        fail_if!(bias.shape() != [n]; shape(OP, [bias]), "takes a bias of [{n}]");
    }
    fail_if!(!matches!(out, DType::F32 | DType::F16 | DType::BF16);
        dtype(OP, out), "gives f32, f16 and bf16");
    let all = [Some(a), Some(b), Some(scales[0]), Some(scales[1]), bias];
    all.into_iter().flatten().try_for_each(|t| a.check_same_device(OP, t))?;
    autograd::check_no_grad_inputs(OP, &all.into_iter().flatten().collect::<Vec<_>>())
}

/// Returns true if the library multiplies 8-bit matrices of these extents.
pub(crate) fn supports_fp8_extents(device: &Device, extents: &[usize]) -> bool {
    device.library_features().f8_matmul && extents.iter().all(|extent| extent.is_multiple_of(FP8_ALIGNMENT))
}

/// Copies the operands to the library's layout if it is used: a row-major, b column-major, aligned to 16
/// bytes.
fn align_operands(a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor)> {
    let (a, b) = (a.detach(), b.detach());
    if !supports_fp8_extents(a.device(), b.shape()) {
        return Ok((a, b));
    }
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    let by_rows = |t: Tensor| {
        let fits = t.strides()[1] == 1
            && t.strides()[0] >= t.shape()[1]
            && t.strides()[0].is_multiple_of(FP8_ALIGNMENT)
            && t.layout().offset().is_multiple_of(FP8_ALIGNMENT);
        if fits { Ok(t) } else { t.copy() }
    };
    Ok((by_rows(a)?, by_rows(b.t()?)?.t()?))
}

/// Computes a · b in f32, without the scales.
fn multiply_unscaled(a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let out = Tensor::empty(shape, DType::F32, a.device())?;
    let finish = EpilogueTensors::Scaled { scales: None, bias: None };
    if !matmul::try_gemm_fp8(OP, a, b, &out, finish)? {
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        let wide = |t: &Tensor| t.to_dtype(DType::BF16);
        matmul::gemm_into(OP, &wide(a)?, &wide(b)?, &out, false)?;
    }
    Ok(out)
}
