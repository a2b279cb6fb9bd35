//! Max unpooling and fractional max pooling. Both are composite.

use crate::ops::conv::pool::PoolOptions;
use crate::ops::conv::spatial::padded_extent;
use crate::ops::prelude::*;
use crate::tensor::layout::tensor_numel;

/// Scatters maxima to their indices over the last `N` dimensions, with zeros elsewhere.
#[track_caller]
fn max_unpool<const N: usize>(
    op: &'static str,
    x: &Tensor,
    indices: &Tensor,
    output: [usize; N],
) -> Result<Tensor> {
    fail_if!(x.shape() != indices.shape() || !matches!(x.rank().checked_sub(N), Some(1 | 2));
        shape(op, [x, indices]),
        "takes maxima and their indices in one shape: channels, {N} more dimensions, optionally with a batch before");
    if !indices.dtype().is_int() {
        let rule = "indices are integers, as pooling `_with_indices` gives them";
        return Err(Error::not_integers(op, indices.dtype(), rule));
    }
    let lead = &x.shape()[..x.rank() - N];
    let Some(size) = tensor_numel(&output) else {
        fail!(argument(op), "{output:?} has more than 4,294,967,295 elements, the most a tensor can have")
    };
    let flat = Tensor::zeros([lead, &[size]].concat(), x.dtype(), x.device())?;
    let dim = lead.len() as isize;
    let out = flat.scatter(dim, &indices.flatten(dim, -1)?, &x.flatten(dim, -1)?)?;
    out.reshape(&[lead, &output].concat()[..])
}

macro_rules! impl_max_unpool {
    ($($n:literal $op:ident $pool:ident $shape:literal;)*) => {
        impl Tensor {$(
            #[doc = concat!("Scatters maxima of [`", stringify!($pool), "`](Self::", stringify!($pool), ") to their indices in zeros \\[.., ",
                $shape, "\\]: PyTorch's `", stringify!($op), "`.")]
            ///
            /// `output` holds the extents of the pooled input. [`PoolOptions::unpool_output_size`] returns them
            /// if the windows covered the whole input. For repeated indices, one of the maxima wins.
            ///
            /// # Errors
            /// The shapes differ or have the wrong rank, or the indices are not integers. For indices out of
            /// range see [`scatter`](Self::scatter).
            #[track_caller]
            pub fn $op(&self, indices: &Tensor, output: [usize; $n]) -> Result<Tensor> {
                max_unpool(stringify!($op), self, indices, output)
            }
        )*}
    };
}
impl_max_unpool! {
    1 max_unpool1d max_pool1d_with_indices "length";
    2 max_unpool2d max_pool2d_with_indices "height, width";
    3 max_unpool3d max_pool3d_with_indices "depth, height, width";
}

impl<const N: usize> PoolOptions<N> {
    /// Returns the smallest extents that pool to `pooled`: the default output size of PyTorch's `MaxUnpool`. Extents
    /// beyond [`usize::MAX`] saturate, and [`max_unpool2d`](Tensor::max_unpool2d) refuses them.
    ///
    /// ```
    /// # use forebay_core::ops::{Pool2dOptions, PoolOptions};
    /// let window = PoolOptions { stride: [2, 1], padding: [1, 0], ..Pool2dOptions::new(3) };
    /// assert_eq!(window.unpool_output_size([4, 5]), [7, 7]);
    /// ```
    #[must_use]
    pub fn unpool_output_size(&self, pooled: [usize; N]) -> [usize; N] {
        std::array::from_fn(|d| {
            let covered = pooled[d].saturating_sub(1).saturating_mul(self.stride[d]);
            covered.saturating_add(self.kernel[d]).saturating_sub(padded_extent(0, self.padding[d]))
        })
    }
}

/// Returns the element indices of windows along a dimension of `extent` for `samples` \[planes\], as i32
/// \[planes, output · kernel\].
///
/// Window i begins at ⌊(i + s) α⌋ - ⌊s α⌋, the last ends at the edge; α = (extent - kernel) / (output - 1).
#[track_caller]
fn fractional_window_indices(
    extent: usize,
    kernel: usize,
    output: usize,
    samples: &Tensor,
) -> Result<Tensor> {
    let device = samples.device();
    let last = (extent - kernel) as f64;
    // In f32 like the samples, so that the results equal PyTorch's bit by bit.
    let alpha = f64::from(if output > 1 { last as f32 / (output - 1) as f32 } else { 0.0 });
    let s = samples.reshape([-1, 1])?;
    let steps = Tensor::arange(0.0, output as f64, 1.0, DType::F32, device)?;
    let begins = steps.add(&s)?.mul(alpha)?.floor()?.sub(&s.mul(alpha)?.floor()?)?;
    let ends = steps.ge((output - 1) as f64)?.broadcast_to(begins.shape())?;
    let begins = begins.masked_fill(&ends, last)?.to_dtype(DType::I32)?;
    let window_offsets = Tensor::arange(0.0, kernel as f64, 1.0, DType::I32, device)?;
    begins.unsqueeze(-1)?.add(&window_offsets)?.flatten(1, -1)
}

/// Returns maxima and plane indices of windows at random positions over the last `N` dimensions.
#[track_caller]
fn fractional_max_pool<const N: usize>(
    op: &'static str,
    x: &Tensor,
    kernel: [usize; N],
    output: [usize; N],
    samples: Option<&Tensor>,
    pool: impl FnOnce(&Tensor, PoolOptions<N>) -> Result<(Tensor, Tensor)>,
) -> Result<(Tensor, Tensor)> {
    let lead = x.rank().checked_sub(N).filter(|lead| matches!(lead, 1 | 2));
    let Some(lead) = lead else {
        fail!(shape(op, [x]), "takes channels, {N} more dimensions, optionally with a batch before")
    };
    let extents: [usize; N] = std::array::from_fn(|d| x.shape()[lead + d]);
    for d in 0..N {
        let needed = output[d].saturating_add(kernel[d]);
        fail_if!(kernel[d] == 0 || output[d] == 0 || needed > extents[d] + 1;
            shape(op, [x]), "{output:?} windows of {kernel:?} have no room; take fewer or smaller ones");
        // The positions of windows are computed in f32.
        fail_if!(extents[d] > 1 << 24; shape(op, [x]), "takes extents of at most 2^24");
    }
    let planes: usize = x.shape()[..lead].iter().product();
    let samples = match samples {
        Some(samples) => {
            let batch = if lead == 2 { x.shape()[0] } else { 1 };
            fail_if!(samples.shape() != [batch, planes / batch.max(1), N];
                shape(op, [samples, x]), "samples are [batch, channels, {N}]");
            samples.clone()
        }
        None => Tensor::rand([planes, N], DType::F32, x.device())?,
    };
    let samples = samples.detach().to_dtype(DType::F32)?.reshape([planes, N])?;
    let mut sampled = x.reshape(&[&[planes], &extents[..]].concat()[..])?;
    let mut plane_indices: Option<Tensor> = None;
    for d in 0..N {
        // PyTorch orders the samples of images by width, then height, and those of volumes by dimension.
        let sample = samples.select(1, if N == 2 { 1 - d as isize } else { d as isize })?;
        let index = fractional_window_indices(extents[d], kernel[d], output[d], &sample)?;
        let count = output[d] * kernel[d];
        let mut shape = vec![1; N + 1];
        (shape[0], shape[d + 1]) = (planes, count);
        let index = index.reshape(&shape[..])?;
        // Linear index of an element in its plane, in row-major order.
        plane_indices = Some(match plane_indices {
            None => index.clone(),
            Some(before) => before.mul(extents[d] as i64)?.add(&index)?,
        });
        let index_shape = with_extent(sampled.shape(), d + 1, count);
        sampled = sampled.gather(d as isize + 1, &index.broadcast_to(&index_shape)?)?;
    }
    let (out, window_indices) = pool(&sampled, PoolOptions::from_kernel(kernel))?;
    let plane_indices = plane_indices.ok_or_else(|| Error::argument(op, "has no dimensions"))?;
    let window_indices = window_indices.to_dtype(DType::I32)?.reshape([planes, output.iter().product()])?;
    let all: usize = sampled.shape()[1..].iter().product();
    let plane_indices =
        plane_indices.broadcast_to(sampled.shape())?.reshape([planes, all])?.gather(1, &window_indices)?;
    let shape = [&x.shape()[..lead], &output].concat();
    Ok((out.reshape(&shape[..])?, plane_indices.reshape(&shape[..])?.to_dtype(DType::I64)?))
}

macro_rules! impl_fractional_max_pool {
    ($($n:literal $op:ident $pool:ident $shape:literal;)*) => {
        impl Tensor {$(
            #[doc = concat!("Returns the maxima of `output` windows at random positions (Graham, 2014), and their i64 indices: PyTorch's `",
                stringify!($op), "_with_indices`.")]
            ///
            #[doc = concat!("`self` is \\[batch, channels, ", $shape, "\\], or without the batch. `samples`, \\[batch, channels, ",
                stringify!($n), "\\] from 0 to 1, place the windows. `None` draws the samples.")]
            ///
            /// # Errors
            /// The windows do not fit, or the samples have the wrong shape.
            #[track_caller]
            pub fn $op(
                &self,
                kernel: [usize; $n],
                output: [usize; $n],
                samples: Option<&Tensor>,
            ) -> Result<(Tensor, Tensor)> {
                fractional_max_pool(stringify!($op), self, kernel, output, samples, |x, window| x.$pool(window))
            }
        )*}
    };
}
impl_fractional_max_pool! {
    2 fractional_max_pool2d max_pool2d_with_indices "height, width";
    3 fractional_max_pool3d max_pool3d_with_indices "depth, height, width";
}
