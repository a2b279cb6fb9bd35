//! PyTorch's `grid_sample` and `affine_grid` (Jaderberg et al., 2015). Composite, gradients included.

use crate::ops::prelude::*;

/// Interpolation mode of [`grid_sample`](Tensor::grid_sample).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GridMode {
    /// Linear interpolation along each dimension. The grid gets a gradient.
    #[default]
    Bilinear,
    /// Nearest element. The grid gets no gradient.
    Nearest,
    /// Cubic convolution of four elements along each dimension, as in
    /// [`InterpolateMode::Bicubic`](crate::ops::InterpolateMode::Bicubic). The grid gets a gradient.
    Bicubic,
}

/// Values that [`grid_sample`](Tensor::grid_sample) reads outside of the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GridPadding {
    /// Zeros.
    #[default]
    Zeros,
    /// The element at the edge.
    Border,
    /// The mirror image.
    Reflection,
}

/// Options of [`Tensor::grid_sample`].
#[derive(Clone, Copy, Debug, Default)]
pub struct GridSampleOptions {
    /// Interpolation; bilinear.
    pub mode: GridMode,
    /// Values outside of the input; zeros.
    pub padding_mode: GridPadding,
    /// If true, -1 and 1 are the centres of the outer elements, else the outer edges; false.
    pub align_corners: bool,
}

/// Maps a coordinate from the range -1 to 1 to elements of a dimension of `size`.
fn unnormalize_coordinate(grid: &Tensor, size: usize, align_corners: bool) -> Result<Tensor> {
    match align_corners {
        true => grid.add(1.0)?.mul(0.5)?.mul(size as f64 - 1.0),
        false => grid.add(1.0)?.mul(size as f64)?.sub(1.0)?.mul(0.5),
    }
}

/// Maps a coordinate into a dimension of `size`; with zero padding, returns the coordinate unchanged.
fn apply_padding_mode(
    coordinate: &Tensor,
    size: usize,
    padding: GridPadding,
    align_corners: bool,
) -> Result<Tensor> {
    let (n, last) = (size as f64, size as f64 - 1.0);
    // Reflect between the centres of the outer elements, or between their outer edges.
    let (low, span) = if align_corners { (0.0, last) } else { (-0.5, n) };
    let coordinate = match padding {
        GridPadding::Zeros => return Ok(coordinate.clone()),
        GridPadding::Reflection if span > 0.0 => {
            let distance = coordinate.sub(low)?.abs()?;
            let periods = distance.detach().mul(1.0 / span)?.floor()?;
            let remainder = distance.sub(&periods.mul(span)?)?;
            let is_mirrored = periods.remainder(2.0)?.ne(0.0)?;
            remainder.neg()?.add(span)?.where_(&is_mirrored, &remainder)?.add(low)?
        }
        GridPadding::Border | GridPadding::Reflection => coordinate.clone(),
    };
    // The gradient is zero where the coordinate was clamped. NaN becomes 0, as in PyTorch.
    let constant = coordinate.detach();
    let is_inside = constant.gt(0.0)?.logical_and(&constant.lt(last)?)?;
    coordinate.where_(&is_inside, &constant.fmax(0.0)?.fmin(last)?)
}

/// Replaces coordinates that are not finite by one outside of the input. Weights and gradients are then finite.
fn move_nonfinite_outside(coordinate: &Tensor) -> Result<Tensor> {
    coordinate.where_(&coordinate.detach().isfinite()?, -100.0)
}

/// Returns the weights of four neighbours at distance `t` after the second (Keys, 1981, with a = -0.75).
fn cubic_weights(t: &Tensor) -> Result<[Tensor; 4]> {
    let inner_weight = |t: &Tensor| t.mul(1.25)?.sub(2.25)?.mul(t)?.mul(t)?.add(1.0);
    let outer_weight = |t: &Tensor| t.mul(-0.75)?.add(3.75)?.mul(t)?.sub(6.0)?.mul(t)?.add(3.0);
    let complement = t.neg()?.add(1.0)?;
    Ok([
        outer_weight(&t.add(1.0)?)?,
        inner_weight(t)?,
        inner_weight(&complement)?,
        outer_weight(&complement.add(1.0)?)?,
    ])
}

/// Gathers elements of `x` \[batch, channels, numel\] at integer coordinates, one tensor for each dimension.
/// The elements are multiplied by the weights and are zero outside of the input.
fn sample_corner(
    x: &Tensor,
    coordinates: &[Tensor],
    sizes: &[usize],
    weight: Option<Tensor>,
) -> Result<Tensor> {
    // Linear index of the element, and true if it is inside of the input.
    let mut corner: Option<(Tensor, Tensor)> = None;
    for (at, &size) in coordinates.iter().zip(sizes) {
        let in_range = at.ge(0.0)?.logical_and(&at.le(size as f64 - 1.0)?)?;
        let at = at
            .clamp(0.0, size as f64 - 1.0)?
            .masked_fill(&in_range.logical_not()?, 0.0)?
            .to_dtype(DType::I32)?;
        corner = Some(match corner {
            Some((index, inside)) => (index.mul(size as i64)?.add(&at)?, inside.logical_and(&in_range)?),
            None => (at, in_range),
        });
    }
    let Some((index, inside)) = corner else {
        fail!(argument("grid_sample"), "takes a grid of two or three coordinates")
    };
    let (batch, channels) = (x.shape()[0], x.shape()[1]);
    let shape = [batch, channels, index.numel() / batch.max(1)];
    let per_channel = |t: &Tensor| t.reshape([batch, 1, shape[2]])?.broadcast_to(shape);
    let outside = per_channel(&inside)?.logical_not()?;
    // Mask before the product: a NaN weight then reaches the result, and not the gradient of x.
    let read = x.gather(2, &per_channel(&index)?)?.masked_fill(&outside, 0.0)?;
    match weight {
        Some(weight) => read.mul(&per_channel(&weight.to_dtype(x.dtype())?)?),
        None => Ok(read),
    }
}

impl Tensor {
    /// Samples `self` at the coordinates of a grid: PyTorch's `grid_sample`.
    ///
    /// `self` is \[batch, channels, height, width\] or \[batch, channels, depth, height, width\]. The grid is
    /// \[batch, output extents.., 2 or 3\] and holds x, y (and z). The coordinates -1 and 1 are the outer
    /// edges of `self`, or with `align_corners` the centres of its outer elements.
    ///
    /// A NaN coordinate reads the first element under `Border` and `Reflection`, and zero under `Zeros`. Bicubic
    /// sampling at a NaN or infinite coordinate gives NaN.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, ops::{GridPadding, GridSampleOptions}, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let images = Tensor::zeros(&[2, 3, 16, 16], DType::F32, &device)?;
    /// let turned = Tensor::from_slice(&[0.8f32, -0.6, 0.0, 0.6, 0.8, 0.0], &[1, 2, 3], &device)?;
    /// let turned = turned.broadcast_to(&[2, 2, 3])?;
    /// let grid = turned.affine_grid(&[2, 3, 24, 24], false)?;
    /// let options = GridSampleOptions { padding_mode: GridPadding::Border, ..Default::default() };
    /// let out = images.grid_sample(&grid, &options)?;
    /// assert_eq!(out.shape(), [2, 3, 24, 24]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The shapes do not fit, a dimension of `self` is empty, or a type is not a float.
    #[track_caller]
    pub fn grid_sample(&self, grid: &Tensor, options: &GridSampleOptions) -> Result<Tensor> {
        let &GridSampleOptions { mode, padding_mode: padding, align_corners } = options;
        operation!(OP = "grid_sample");
        self.check_same_device(OP, grid)?;
        for dtype in [self.dtype(), grid.dtype()] {
            fail_if!(!dtype.is_float(); dtype(OP, dtype), "takes floats; cast with `to_dtype`");
        }
        let n = self.rank().wrapping_sub(2);
        let fits = matches!(n, 2 | 3)
            && grid.rank() == self.rank()
            && grid.shape()[0] == self.shape()[0]
            && grid.shape()[n + 1] == n
            && self.shape()[2..].iter().all(|&size| size > 0);
        fail_if!(!fits; shape(OP, [self, grid]),
            "takes [batch, channels, height, width] with a grid of [batch, height, width, 2], or both with a depth and 3");
        let sizes = &self.shape()[2..];
        // Coordinates are computed in f32, because f16 holds consecutive integers only up to 2048.
        let wide = if grid.dtype() == DType::F64 { grid.clone() } else { grid.to_dtype(DType::F32)? };
        // The last coordinate of the grid is the first dimension.
        let pad_coordinate = |at: &Tensor, d: usize| apply_padding_mode(at, sizes[d], padding, align_corners);
        let coordinates = (0..n).map(|d| {
            let coordinate =
                unnormalize_coordinate(&wide.select(-1, (n - 1 - d) as isize)?, sizes[d], align_corners)?;
            match (mode, padding) {
                // Pads the coordinates of the four neighbours instead. Weights of NaN and infinities are NaN.
                (GridMode::Bicubic, _) => Ok(coordinate),
                (_, GridPadding::Zeros) => move_nonfinite_outside(&coordinate),
                _ => pad_coordinate(&coordinate, d),
            }
        });
        let coordinates = coordinates.collect::<Result<Vec<_>>>()?;
        // Sum 16-bit floats in f32, and round once.
        let narrow = self.dtype().size() == 2;
        let x = if narrow { self.to_dtype(DType::F32)? } else { self.clone() }.flatten(2, -1)?;
        // Sums over every combination of one neighbour for each dimension.
        let blend = |axes: Vec<Vec<(Tensor, Tensor)>>| -> Result<Tensor> {
            let count: usize = axes.iter().map(Vec::len).product();
            let corner = |mut choice: usize| {
                let corner_pairs = axes.iter().map(|axis| {
                    let pair = axis[choice % axis.len()].clone();
                    choice /= axis.len();
                    pair
                });
                let (at, weights): (Vec<_>, Vec<_>) = corner_pairs.unzip();
                let weight = weights.into_iter().map(Ok).reduce(|a, b| a?.mul(&b?)).transpose()?;
                sample_corner(&x, &at, sizes, weight)
            };
            let sum = (0..count).map(corner).reduce(|a, b| a?.add(&b?));
            sum.unwrap_or_else(|| fail!(argument(OP), "has no corners"))
        };
        // Neighbours of a coordinate along its dimension, with their weights.
        let neighbours = |(d, at): (usize, &Tensor)| -> Result<Vec<(Tensor, Tensor)>> {
            let low = at.detach().floor()?;
            if mode == GridMode::Bilinear {
                let high = low.add(1.0)?;
                let weights = (high.sub(at)?, at.sub(&low)?);
                return Ok(vec![(low, weights.0), (high, weights.1)]);
            }
            let weights = cubic_weights(&at.sub(&low)?)?.into_iter().enumerate();
            weights.map(|(k, weight)| Ok((pad_coordinate(&low.add(k as f64 - 1.0)?, d)?, weight))).collect()
        };
        let out = if mode == GridMode::Nearest {
            let nearest = coordinates.iter().map(|at| at.detach().round()).collect::<Result<Vec<_>>>()?;
            sample_corner(&x, &nearest, sizes, None)?
        } else {
            blend(coordinates.iter().enumerate().map(neighbours).collect::<Result<_>>()?)?
        };
        out.to_dtype(self.dtype())?.reshape(&[&self.shape()[..2], &grid.shape()[1..=n]].concat()[..])
    }

    /// Returns the grid of affine maps for [`grid_sample`](Self::grid_sample): PyTorch's `affine_grid`.
    ///
    /// For images of `size` \[batch, channels, height, width\], `self` is \[batch, 2, 3\]. For volumes of
    /// `size` \[batch, channels, depth, height, width\], `self` is \[batch, 3, 4\].
    #[track_caller]
    pub fn affine_grid(&self, size: impl IntoShape, align_corners: bool) -> Result<Tensor> {
        operation!(OP = "affine_grid");
        let size = &new_shape(OP, size)?[..];
        let n = size.len().wrapping_sub(2);
        fail_if!(!matches!(n, 2 | 3) || self.shape() != [size[0], n, n + 1]; shape(OP, &[self.shape(), size]),
            "takes maps of [batch, 2, 3] for a size of 4 extents, of [batch, 3, 4] for 5");
        fail_if!(!self.dtype().is_float(); dtype(OP, self.dtype()), "takes floats; cast with `to_dtype`");
        let extents = &size[2..];
        let mut columns = Vec::with_capacity(n + 1);
        for d in (0..n).rev() {
            let edge = match (align_corners, extents[d]) {
                (_, 0 | 1) => 0.0,
                (true, _) => 1.0,
                (false, n) => (n as f64 - 1.0) / n as f64,
            };
            let line = Tensor::linspace(-edge, edge, extents[d], self.dtype(), self.device())?;
            let mut shape = vec![1; n];
            shape[d] = extents[d];
            columns.push(line.reshape(&shape[..])?.broadcast_to(extents)?);
        }
        columns.push(Tensor::ones(extents, self.dtype(), self.device())?);
        let points: usize = extents.iter().product();
        let base = crate::ops::stack(&columns, -1)?.reshape([1, points, n + 1])?;
        let grid = base.broadcast_to([size[0], points, n + 1])?.matmul(&self.transpose(1, 2)?)?;
        grid.reshape(&[&[size[0]], extents, &[n]].concat()[..])
    }
}
