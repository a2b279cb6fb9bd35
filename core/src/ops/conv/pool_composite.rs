//! Pooling of signals and volumes, and power-average pooling, composed of image pooling. Maxima and means of
//! windows separate into one pass for each dimension.

use crate::ops::conv::pool::{
    Pool1dOptions, Pool2dOptions, Pool3dOptions, PoolOptions, adaptive_max_pool2d_with_i32_indices,
    max_pool2d_with_i32_indices,
};
use crate::ops::prelude::*;

/// Pools a volume \[.., depth, height, width\] over its images, then along its depth.
#[track_caller]
fn pool_volume(
    op: &'static str,
    x: &Tensor,
    images: impl FnOnce(&Tensor) -> Result<Tensor>,
    depth: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let _call = memory::scope::enter_call();
    let &[ref lead @ .., d, h, w] = x.shape() else {
        fail!(shape(op, [x]), "takes [batch, channels, depth, height, width]")
    };
    fail_if!(!matches!(lead.len(), 1 | 2);
        shape(op, [x]), "takes [batch, channels, depth, height, width], or without the batch");
    let volumes: usize = lead.iter().product();
    let flat = images(&x.reshape([volumes, d, h, w])?)?;
    let (h, w) = (flat.shape()[2], flat.shape()[3]);
    let out = depth(&flat.reshape([volumes, d, h * w])?)?;
    out.reshape(&[lead, &[out.shape()[1], h, w]].concat()[..])
}

/// Pools a signal as an image with one row.
#[track_caller]
fn pool_signal(x: &Tensor, row: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let _call = memory::scope::enter_call();
    row(&x.unsqueeze(-2)?)?.squeeze(-2)
}

/// Pools volumes to maxima, and returns the i64 index of each maximum in its volume. `images` and `depth` return maxima
/// with i32 indices, -1 for windows without elements. `of_empty` returns the indices of such windows, if there are any,
/// from the extents of a volume and of its result.
#[track_caller]
fn find_volume_maxima(
    op: &'static str,
    x: &Tensor,
    images: impl FnOnce(&Tensor) -> Result<(Tensor, Tensor)>,
    depth: impl FnOnce(&Tensor) -> Result<(Tensor, Tensor)>,
    of_empty: impl FnOnce([usize; 3], [usize; 3]) -> Result<Option<Tensor>>,
) -> Result<(Tensor, Tensor)> {
    let (mut in_image, mut in_depth) = (None, None);
    let keep = |(out, indices), found: &mut Option<Tensor>| {
        *found = Some(indices);
        out
    };
    let first = |x: &Tensor| Ok(keep(images(x)?, &mut in_image));
    let out = pool_volume(op, x, first, |x| Ok(keep(depth(x)?, &mut in_depth)))?;
    let (Some(in_image), Some(in_depth)) = (in_image, in_depth) else { fail!(argument(op), "takes volumes") };
    let area: usize = x.shape()[x.rank() - 2..].iter().product();
    fail_if!(i32::try_from(area * x.shape()[x.rank() - 3]).is_err();
        shape(op, [x]), "takes volumes of fewer than 2³¹ elements");
    // The index among all columns of the pooled images gives the depth and the index's position.
    let columns = in_depth.shape()[2] as i64;
    let positions: usize = in_image.shape().iter().product::<usize>() / in_depth.shape()[0].max(1);
    let in_image = in_image.reshape([in_depth.shape()[0], positions])?;
    let extents = [0, 1, 2].map(|d| x.shape()[x.rank() - 3 + d]);
    let outs = [0, 1, 2].map(|d| out.shape()[out.rank() - 3 + d]);
    let of_empty = if out.numel() > 0 { of_empty(extents, outs)? } else { None };
    let plane = if of_empty.is_some() { in_depth.clamp_min(0)? } else { in_depth.clone() };
    let in_image = in_image.gather(1, &plane.flatten(1, -1)?)?.reshape(in_depth.shape())?;
    let mut index = plane.floor_divide(columns)?.mul(area as i64)?.add(&in_image)?.reshape(out.shape())?;
    if let Some(of_empty) = of_empty {
        let of_empty = of_empty.broadcast_to(index.shape())?;
        let is_empty = in_depth.lt(0)?.logical_or(&in_image.lt(0)?)?.reshape(index.shape())?;
        index = of_empty.where_(&is_empty, &index)?;
    }
    Ok((out, index.to_dtype(DType::I64)?))
}

const SIGNAL_AXES: [Option<usize>; 2] = [None, Some(0)];
const IMAGE_AXES: [Option<usize>; 2] = [Some(1), Some(2)];
const DEPTH_AXES: [Option<usize>; 2] = [Some(0), None];

impl Tensor {
    /// Returns the maximum of each window of signals \[batch, channels, length\], or without the batch.
    #[track_caller]
    pub fn max_pool1d(&self, window: impl Into<Pool1dOptions>) -> Result<Tensor> {
        let window = window.into();
        fail_if!(self.rank() == 2 && self.shape()[0] == 0;
            shape("max_pool1d", [self]), "takes at least one channel");
        pool_signal(self, |x| x.max_pool2d(window.restrict_to_axes(SIGNAL_AXES)))
    }

    /// Returns [`max_pool1d`](Self::max_pool1d) and the i64 index of each maximum in its signal.
    #[track_caller]
    pub fn max_pool1d_with_indices(&self, window: impl Into<Pool1dOptions>) -> Result<(Tensor, Tensor)> {
        let window = window.into();
        let (out, indices) =
            self.unsqueeze(-2)?.max_pool2d_with_indices(window.restrict_to_axes(SIGNAL_AXES))?;
        Ok((out.squeeze(-2)?, indices.squeeze(-2)?))
    }

    /// Returns the average of each window of signals \[batch, channels, length\], or without the batch.
    #[track_caller]
    pub fn avg_pool1d(&self, window: impl Into<Pool1dOptions>) -> Result<Tensor> {
        let window = window.into();
        pool_signal(self, |x| x.avg_pool2d(window.restrict_to_axes(SIGNAL_AXES)))
    }

    /// Returns the maximum of each window of volumes \[.., channels, depth, height, width\].
    ///
    /// Among equal maxima, the gradient goes to the first depth, then to the first element of that image.
    #[track_caller]
    pub fn max_pool3d(&self, window: impl Into<Pool3dOptions>) -> Result<Tensor> {
        let window = window.into();
        let images = |x: &Tensor| x.max_pool2d(window.restrict_to_axes(IMAGE_AXES));
        pool_volume("max_pool3d", self, images, |x| x.max_pool2d(window.restrict_to_axes(DEPTH_AXES)))
    }

    /// Returns [`max_pool3d`](Self::max_pool3d) and the i64 index of each maximum in its volume.
    ///
    /// # Errors
    /// A volume has 2³¹ or more elements. See also [`max_pool2d`](Self::max_pool2d).
    #[track_caller]
    pub fn max_pool3d_with_indices(&self, window: impl Into<Pool3dOptions>) -> Result<(Tensor, Tensor)> {
        let window = window.into();
        let pool = |x: &Tensor, axes| max_pool2d_with_i32_indices(x, window.restrict_to_axes(axes));
        let of_empty = |extents, outs| {
            let has_empty = window.has_empty_windows(extents, outs);
            has_empty.then(|| window.empty_window_indices(extents, outs, self.device())).transpose()
        };
        let (images, depth) = (|x: &Tensor| pool(x, IMAGE_AXES), |x: &Tensor| pool(x, DEPTH_AXES));
        find_volume_maxima("max_pool3d_with_indices", self, images, depth, of_empty)
    }

    /// Returns the average of each window of volumes \[.., channels, depth, height, width\].
    #[track_caller]
    pub fn avg_pool3d(&self, window: impl Into<Pool3dOptions>) -> Result<Tensor> {
        let window = window.into();
        dispatch_in_f32!("avg_pool3d", [self], |x| x.avg_pool3d(window));
        // Integer averages of the images would be rounded before those along the depth.
        fail_if!(!self.dtype().is_float();
            dtype("avg_pool3d", self.dtype()), "takes floats; cast with `to_dtype`");
        // Apply `divisor_override` in one of the two passes only.
        let image_window = Pool2dOptions {
            divisor_override: window.divisor_override.map(|_| 1),
            ..window.restrict_to_axes(IMAGE_AXES)
        };
        let depth = |x: &Tensor| x.avg_pool2d(window.restrict_to_axes(DEPTH_AXES));
        pool_volume("avg_pool3d", self, |x| x.avg_pool2d(image_window), depth)
    }

    /// Applies [`adaptive_avg_pool2d`](Self::adaptive_avg_pool2d) to signals \[.., channels, length\].
    #[track_caller]
    pub fn adaptive_avg_pool1d(&self, output: usize) -> Result<Tensor> {
        pool_signal(self, |x| x.adaptive_avg_pool2d([1, output]))
    }

    /// Applies [`adaptive_avg_pool2d`](Self::adaptive_avg_pool2d) to volumes \[batch, channels, depth,
    /// height, width\], or without the batch.
    #[track_caller]
    pub fn adaptive_avg_pool3d(&self, output: [usize; 3]) -> Result<Tensor> {
        dispatch_in_f32!("adaptive_avg_pool3d", [self], |x| x.adaptive_avg_pool3d(output));
        let [d, h, w] = output;
        let images = |x: &Tensor| x.adaptive_avg_pool2d([h, w]);
        pool_volume("adaptive_avg_pool3d", self, images, |x| x.adaptive_avg_pool2d([d, h * w]))
    }

    /// Applies [`adaptive_max_pool2d`](Self::adaptive_max_pool2d) to volumes \[batch, channels, depth,
    /// height, width\], or without the batch.
    #[track_caller]
    pub fn adaptive_max_pool3d(&self, output: [usize; 3]) -> Result<Tensor> {
        let [d, h, w] = output;
        let images = |x: &Tensor| x.adaptive_max_pool2d([h, w]);
        pool_volume("adaptive_max_pool3d", self, images, |x| x.adaptive_max_pool2d([d, h * w]))
    }

    /// Returns [`adaptive_max_pool3d`](Self::adaptive_max_pool3d) and the i64 index of each maximum in its volume.
    ///
    /// # Errors
    /// A volume has 2³¹ or more elements. See also [`adaptive_max_pool2d`](Self::adaptive_max_pool2d).
    #[track_caller]
    pub fn adaptive_max_pool3d_with_indices(&self, output: [usize; 3]) -> Result<(Tensor, Tensor)> {
        let [d, h, w] = output;
        let images = |x: &Tensor| adaptive_max_pool2d_with_i32_indices(x, [h, w]);
        let depth = |x: &Tensor| adaptive_max_pool2d_with_i32_indices(x, [d, h * w]);
        find_volume_maxima("adaptive_max_pool3d_with_indices", self, images, depth, |_, _| Ok(None))
    }

    /// Returns the p-norm (Σ x^p)^(1/p) of each window of images, or NaN if a negative sum has no real root.
    /// Only the kernel, the stride and `ceil_mode` apply.
    ///
    /// # Errors
    /// The window is padded, or p is 0 or not finite. See also [`avg_pool2d`](Self::avg_pool2d).
    #[track_caller]
    pub fn lp_pool2d(&self, p: f64, window: impl Into<Pool2dOptions>) -> Result<Tensor> {
        let window = window.into();
        lp_pool("lp_pool2d", self, p, window, |x| x.avg_pool2d(window))
    }

    /// Applies [`lp_pool2d`](Self::lp_pool2d) to signals \[batch, channels, length\], or without the batch.
    #[track_caller]
    pub fn lp_pool1d(&self, p: f64, window: impl Into<Pool1dOptions>) -> Result<Tensor> {
        let window = window.into();
        lp_pool("lp_pool1d", self, p, window, |x| x.avg_pool1d(window))
    }

    /// Applies [`lp_pool2d`](Self::lp_pool2d) to volumes \[batch, channels, depth, height, width\], or without the
    /// batch.
    #[track_caller]
    pub fn lp_pool3d(&self, p: f64, window: impl Into<Pool3dOptions>) -> Result<Tensor> {
        let window = window.into();
        lp_pool("lp_pool3d", self, p, window, |x| x.avg_pool3d(window))
    }
}

/// Returns the p-norm of windows, computed from the mean of the powers.
#[track_caller]
fn lp_pool<const N: usize>(
    op: &'static str,
    x: &Tensor,
    p: f64,
    window: PoolOptions<N>,
    mean: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if !amp::is_autocast_enabled() {
        // Under autocast, powers are f32 anyway.
        dispatch_in_f32!(op, [x], |x| lp_pool(op, &x, p, window, mean));
    }
    let _call = memory::scope::enter_call();
    fail_if!(window.padding != [0; N]; argument(op), "takes windows without padding; `pad` the input");
    fail_if!(!p.is_finite() || p == 0.0;
        argument(op), "takes a finite p other than 0, not {p}; the largest `abs` is the one of infinity");
    let size: f64 = window.kernel.iter().map(|&n| n as f64).product();
    mean(&x.pow(p)?)?.mul(size)?.pow(1.0 / p)
}
