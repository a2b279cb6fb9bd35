//! Arguments of convolutions: one value for all spatial dimensions, or one for each.

use crate::ops::prelude::*;

/// One value for all spatial dimensions, or an array with one for each.
///
/// ```
/// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::Im2colOptions};
/// # let device = Device::null(Default::default());
/// let x = Tensor::zeros(&[1, 3, 8, 8], DType::F32, &device)?;
/// let patches = x.im2col(3, &Im2colOptions::default())?;
/// assert_eq!(patches.shape(), x.im2col([3, 3], &Im2colOptions::default())?.shape());
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
pub trait IntoSpatial<const N: usize> {
    /// Returns one value for each spatial dimension.
    fn spatial(self) -> [isize; N];
}

/// Zero padding of a convolution's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Padding<const N: usize> {
    /// Padding that keeps the input's extents. The stride must be 1.
    Same,
    /// No padding.
    #[default]
    Valid,
    /// Padding by these amounts on both sides.
    Zeros([usize; N]),
}

macro_rules! impl_into_spatial {
    ($($t:ty),*) => {$(
        impl<const N: usize> IntoSpatial<N> for $t {
            fn spatial(self) -> [isize; N] { [self as isize; N] }
        }
        impl<const N: usize> IntoSpatial<N> for [$t; N] {
            fn spatial(self) -> [isize; N] { self.map(|n| n as isize) }
        }
    )*};
}
impl_into_spatial!(i32, isize, usize);

/// Pads all dimensions by the same amount.
impl<const N: usize> From<usize> for Padding<N> {
    fn from(n: usize) -> Self {
        Self::Zeros([n; N])
    }
}

impl<const N: usize> From<[usize; N]> for Padding<N> {
    fn from(n: [usize; N]) -> Self {
        Self::Zeros(n)
    }
}

with_defaults! {
    /// Options of a convolution with `N` spatial dimensions, such as [`Tensor::conv2d`].
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::ConvolutionOptions};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros([1, 3, 8, 8], DType::F32, &device)?;
    /// let w = Tensor::zeros([6, 3, 3, 3], DType::F32, &device)?;
    /// let options = ConvolutionOptions { stride: [2, 1], padding: 1.into(), ..Default::default() };
    /// assert_eq!(x.conv2d(&w, None, &options)?.shape(), [1, 6, 4, 8]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ConvolutionOptions<const N: usize> {
        /// Stride of the kernel; 1.
        pub stride: [usize; N] = [1; N],
        /// Padding on both sides of each dimension; none ([`Padding::Valid`]).
        pub padding: Padding<N> = Padding::Valid,
        /// Distance between elements of the kernel; 1.
        pub dilation: [usize; N] = [1; N],
        /// Number of independent groups of channels; 1.
        pub groups: usize = 1,
    }

    /// Options of a transposed convolution with `N` spatial dimensions, such as [`Tensor::conv_transpose2d`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TransposedConvolutionOptions<const N: usize> {
        /// Stride of the kernel over the output; 1.
        pub stride: [usize; N] = [1; N],
        /// Number of elements removed from both sides of each output dimension; 0.
        pub padding: [usize; N] = [0; N],
        /// Number of elements added to one side of each output dimension; 0.
        pub output_padding: [usize; N] = [0; N],
        /// Number of independent groups of channels; 1.
        pub groups: usize = 1,
        /// Distance between elements of the kernel; 1.
        pub dilation: [usize; N] = [1; N],
    }
}

/// Returns the extent that a window of `taps` elements, `dilation` apart, reaches over. Saturates, so that the result
/// fits no input.
pub(crate) fn window_extent(taps: usize, dilation: usize) -> usize {
    taps.saturating_sub(1).saturating_mul(dilation).saturating_add(1)
}

/// Returns an extent with padding at both ends. Saturates.
pub(crate) fn padded_extent(extent: usize, padding: usize) -> usize {
    padding.saturating_mul(2).saturating_add(extent)
}

/// Checks that no option is below `least` or above the largest extent, and returns the values.
#[track_caller]
pub(crate) fn check_option<const N: usize>(
    op: &'static str,
    what: &str,
    values: [usize; N],
    least: usize,
) -> Result<[usize; N]> {
    check_at_least(op, what, values.map(|n| isize::try_from(n).unwrap_or(isize::MAX)), least)
}

/// Checks that no value is below `least` or above the largest extent, and returns the values.
#[doc(hidden)]
#[track_caller]
pub fn check_at_least<const N: usize>(
    op: &'static str,
    what: &str,
    values: [isize; N],
    least: usize,
) -> Result<[usize; N]> {
    fail_if!(values.iter().any(|&n| n < least as isize);
        argument(op), "{what} is {values:?}; it must be at least {least}");
    fail_if!(values.iter().any(|&n| n > i32::MAX as isize);
        argument(op), "{what} is {values:?}; it must be at most {}", i32::MAX);
    Ok(values.map(|n| n as usize))
}

/// Checks the rank: an optional batch, channels and `N` spatial dimensions. Returns the tensor with a batch,
/// and true if the batch was added.
#[track_caller]
pub(crate) fn ensure_batched<const N: usize>(op: &'static str, x: &Tensor) -> Result<(Tensor, bool)> {
    match x.rank() {
        r if r == N + 2 => Ok((x.clone(), false)),
        r if r == N + 1 => Ok((x.unsqueeze(0)?, true)),
        r => fail!(
            shape(op, [x]),
            "takes [channels, ..] or [batch, channels, ..] with {N} more dimensions, not rank {r}"
        ),
    }
}

/// Unsqueezes `[images, channels, length]` to rank 4. The spatial dimension becomes the second of two.
pub(crate) fn ensure_planar(x: &Tensor) -> Result<Tensor> {
    if x.rank() == 3 { x.unsqueeze(2) } else { Ok(x.clone()) }
}

/// Undoes [`ensure_planar`] and [`ensure_batched`].
pub(crate) fn restore_rank<const N: usize>(out: &Tensor, unbatched: bool) -> Result<Tensor> {
    // A view would be one more node of the graph.
    if N != 1 && !unbatched {
        return Ok(out.clone());
    }
    let mut shape = Dims::from_slice(out.shape());
    if N == 1 {
        shape.remove(2);
    }
    if unbatched {
        shape.remove(0);
    }
    out.reshape(&shape[..])
}

/// Arranges one to three values in the kernels' order. A single spatial dimension is the second of two.
pub(crate) fn kernel_axes<const N: usize>(values: [usize; N], fill: usize) -> [usize; 3] {
    match values[..] {
        [w] => [fill, w, fill],
        [h, w] => [h, w, fill],
        [d, h, w, ..] => [d, h, w],
        [] => [fill; 3],
    }
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType;
    use crate::error::Result;
    use crate::ops::ConvolutionOptions;
    use crate::runtime::device::Device;
    use crate::tensor::Tensor;

    #[test]
    fn results_of_planar_convolutions_are_no_views() -> Result<()> {
        let device = Device::null(Default::default());
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
        let w = zeros(&[4, 3, 3, 3])?.to_leaf()?;
        let op_of = |y: Tensor| y.grad_meta().and_then(|meta| meta.op());
        let y = zeros(&[2, 3, 8, 8])?.conv2d(&w, None, &ConvolutionOptions::default())?;
        assert_eq!((y.shape(), op_of(y.clone())), (&[2, 4, 6, 6][..], Some("conv2d")));
        // Without a batch, the result is a view.
        let y = zeros(&[3, 8, 8])?.conv2d(&w, None, &ConvolutionOptions::default())?;
        assert_eq!((y.shape(), op_of(y.clone())), (&[4, 6, 6][..], Some("reshape")));
        Ok(())
    }
}
