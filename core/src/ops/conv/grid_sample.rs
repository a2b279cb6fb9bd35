//! Images and volumes read at places that a grid names: `grid_sample` and `affine_grid` of PyTorch (Jaderberg et al., 2015). Made of
//! other operations, gradients included.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::shape::new_shape;
use crate::tensor::{IntoShape, Tensor};

/// What [`grid_sample`](Tensor::grid_sample) reads between elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GridMode {
    /// Along lines between the elements around a place, which also give the grid a gradient.
    #[default]
    Bilinear,
    /// The nearest element; the grid gets no gradient.
    Nearest,
    /// Along cubic curves through four elements along each dimension, which also give the grid a gradient; as [`InterpolateMode::Bicubic`](crate::ops::InterpolateMode::Bicubic).
    Bicubic,
}

/// What [`grid_sample`](Tensor::grid_sample) reads outside.
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

/// A place of -1 to 1 in elements of a dimension of `size`.
fn unnormalize_coordinate(grid: &Tensor, size: usize, align_corners: bool) -> Result<Tensor> {
    match align_corners {
        true => grid.add(1.0)?.mul(0.5)?.mul(size as f64 - 1.0),
        false => grid.add(1.0)?.mul(size as f64)?.sub(1.0)?.mul(0.5),
    }
}

/// A place in elements of a dimension of `size`, inside of it but for zeros.
fn apply_padding_mode(
    place: &Tensor,
    size: usize,
    padding: GridPadding,
    align_corners: bool,
) -> Result<Tensor> {
    let (n, last) = (size as f64, size as f64 - 1.0);
    let place = match padding {
        GridPadding::Zeros => return Ok(place.clone()),
        GridPadding::Border => place.clone(),
        GridPadding::Reflection => {
            // Between the middles of the outer elements, or their outer edges.
            let (low, span) = if align_corners { (0.0, last) } else { (-0.5, n) };
            if span == 0.0 {
                return place.mul(0.0);
            }
            let away = place.sub(low)?.abs()?;
            let turns = away.detach().mul(1.0 / span)?.floor()?;
            let rest = away.sub(&turns.mul(span)?)?;
            let odd = turns.remainder(2.0)?.ne(0.0)?;
            rest.neg()?.add(span)?.where_(&odd, &rest)?.add(low)?
        }
    };
    // No gradient where the edge holds: what lies there is another number.
    let outside = place.detach().le(0.0)?.logical_or(&place.detach().ge(last)?)?;
    place.detach().clamp(0.0, last)?.where_(&outside, &place)
}

/// The weights of the four elements around a place that is `t` behind the second of them (Keys, 1981, with a = -0.75).
fn cubic_weights(t: &Tensor) -> Result<[Tensor; 4]> {
    let near = |t: &Tensor| t.mul(1.25)?.sub(2.25)?.mul(t)?.mul(t)?.add(1.0);
    let far = |t: &Tensor| t.mul(-0.75)?.add(3.75)?.mul(t)?.sub(6.0)?.mul(t)?.add(3.0);
    let rest = t.neg()?.add(1.0)?;
    Ok([far(&t.add(1.0)?)?, near(t)?, near(&rest)?, far(&rest.add(1.0)?)?])
}

/// The elements of `x` \[batch, channels, all\] at whole places, of one dimension each, times weights; nothing where they are outside.
fn sample_corner(x: &Tensor, places: &[Tensor], sizes: &[usize], weight: Option<Tensor>) -> Result<Tensor> {
    let (mut index, mut inside): (Option<Tensor>, Option<Tensor>) = (None, None);
    for (at, &size) in places.iter().zip(sizes) {
        let here = at.ge(0.0)?.logical_and(&at.le(size as f64 - 1.0)?)?;
        let at =
            at.clamp(0.0, size as f64 - 1.0)?.masked_fill(&here.logical_not()?, 0.0)?.to_dtype(DType::I32)?;
        index = Some(match index {
            Some(before) => before.mul(size as i64)?.add(&at)?,
            None => at,
        });
        inside = Some(match inside {
            Some(before) => before.logical_and(&here)?,
            None => here,
        });
    }
    let (Some(index), Some(inside)) = (index, inside) else {
        return Err(Error::argument("grid_sample", "takes a grid of two or three coordinates"));
    };
    let (batch, channels) = (x.shape()[0], x.shape()[1]);
    let shape = [batch, channels, index.numel() / batch.max(1)];
    let spread = |t: &Tensor| t.reshape([batch, 1, shape[2]])?.broadcast_to(&shape);
    let read = x.gather(2, &spread(&index)?)?;
    let read = match weight {
        // Masked before the product: an infinite place has a weight that is NaN, also in the gradient of x.
        Some(weight) => {
            let weight = weight
                .to_dtype(x.dtype())?
                .masked_fill(&inside.logical_not()?.reshape(weight.shape())?, 0.0)?;
            read.mul(&spread(&weight)?)?
        }
        None => read,
    };
    read.masked_fill(&spread(&inside)?.logical_not()?, 0.0)
}

impl Tensor {
    /// `self`, \[batch, channels, height, width\] or \[batch, channels, depth, height, width\], read at the places of a grid \[batch, extents.., 2 or 3\]:
    /// x, y (and z) within -1 and 1 from edge to edge of `self`, or with `align_corners` from middle to middle of its outer elements.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, ops::{GridMode, GridPadding}, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let images = Tensor::zeros(&[2, 3, 16, 16], DType::F32, &device)?;
    /// let turned = Tensor::from_slice(&[0.8f32, -0.6, 0.0, 0.6, 0.8, 0.0], &[1, 2, 3], &device)?.broadcast_to(&[2, 2, 3])?;
    /// let grid = turned.affine_grid(&[2, 3, 24, 24], false)?;
    /// let out = images.grid_sample(&grid, GridMode::Bilinear, GridPadding::Border, false)?;
    /// assert_eq!(out.shape(), [2, 3, 24, 24]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The shapes do not fit; a dimension of `self` is empty; the types are no floats; memory runs out.
    #[track_caller]
    pub fn grid_sample(
        &self,
        grid: &Tensor,
        mode: GridMode,
        padding: GridPadding,
        align_corners: bool,
    ) -> Result<Tensor> {
        const OP: &str = "grid_sample";
        let _op = memory::scope::enter_op(OP);
        self.check_same_device(OP, grid)?;
        for dtype in [self.dtype(), grid.dtype()] {
            if !dtype.is_float() {
                return Err(Error::dtype(OP, dtype, "takes floats; cast with `to_dtype`"));
            }
        }
        let n = self.rank().wrapping_sub(2);
        let fits = matches!(n, 2 | 3)
            && grid.rank() == self.rank()
            && grid.shape()[0] == self.shape()[0]
            && grid.shape()[n + 1] == n
            && self.shape()[2..].iter().all(|&size| size > 0);
        if !fits {
            let rule = "takes [batch, channels, height, width] with a grid of [batch, height, width, 2], or both with a depth and 3";
            return Err(Error::shape(OP, rule, &[self.shape(), grid.shape()]));
        }
        let sizes = &self.shape()[2..];
        // Places need their digits: those of halves end at 2048.
        let wide = if grid.dtype() == DType::F64 { grid.clone() } else { grid.to_dtype(DType::F32)? };
        // The last coordinate of the grid is the first dimension.
        let held = |at: &Tensor, d: usize| apply_padding_mode(at, sizes[d], padding, align_corners);
        let places = (0..n).map(|d| {
            let place =
                unnormalize_coordinate(&wide.select(-1, (n - 1 - d) as isize)?, sizes[d], align_corners)?;
            // Of cubic curves the elements are held inside, not the place.
            if mode == GridMode::Bicubic { Ok(place) } else { held(&place, d) }
        });
        let places = places.collect::<Result<Vec<_>>>()?;
        // Of halves, sums of corners are rounded once.
        let narrow = self.dtype().size() == 2;
        let x = if narrow { self.to_dtype(DType::F32)? } else { self.clone() }.flatten(2, -1)?;
        // Sums over all ways to take one of the neighbours along each dimension: their places, and their weights.
        let blend = |axes: Vec<Vec<(Tensor, Tensor)>>| -> Result<Tensor> {
            let count: usize = axes.iter().map(Vec::len).product();
            let mut sum: Option<Tensor> = None;
            for mut choice in 0..count {
                let (mut at, mut weight) = (Vec::with_capacity(n), None::<Tensor>);
                for axis in &axes {
                    let (place, part) = &axis[choice % axis.len()];
                    choice /= axis.len();
                    at.push(place.clone());
                    weight = Some(match weight {
                        Some(weight) => weight.mul(part)?,
                        None => part.clone(),
                    });
                }
                let part = sample_corner(&x, &at, sizes, weight)?;
                sum = Some(match sum {
                    Some(sum) => sum.add(&part)?,
                    None => part,
                });
            }
            sum.ok_or_else(|| Error::argument(OP, "has no corners"))
        };
        let out = match mode {
            GridMode::Nearest => {
                let nearest = places.iter().map(|at| at.detach().round()).collect::<Result<Vec<_>>>()?;
                sample_corner(&x, &nearest, sizes, None)?
            }
            GridMode::Bilinear => blend(
                places
                    .iter()
                    .map(|at| {
                        let low = at.detach().floor()?;
                        let high = low.add(1.0)?;
                        let weights = (high.sub(at)?, at.sub(&low)?);
                        Ok(vec![(low, weights.0), (high, weights.1)])
                    })
                    .collect::<Result<_>>()?,
            )?,
            GridMode::Bicubic => blend(
                places
                    .iter()
                    .enumerate()
                    .map(|(d, at)| {
                        let low = at.detach().floor()?;
                        let weights = cubic_weights(&at.sub(&low)?)?.into_iter().enumerate();
                        weights.map(|(k, weight)| Ok((held(&low.add(k as f64 - 1.0)?, d)?, weight))).collect()
                    })
                    .collect::<Result<_>>()?,
            )?,
        };
        out.to_dtype(self.dtype())?.reshape(&[&self.shape()[..2], &grid.shape()[1..=n]].concat()[..])
    }

    /// The grid for [`grid_sample`](Self::grid_sample) of affine maps, `self`: \[batch, 2, 3\] for images of `size` \[batch, channels, height, width\], \[batch, 3, 4\] for
    /// volumes of \[batch, channels, depth, height, width\].
    ///
    /// # Errors
    /// The shapes do not fit; the type is no float; memory runs out.
    #[track_caller]
    pub fn affine_grid(&self, size: impl IntoShape, align_corners: bool) -> Result<Tensor> {
        const OP: &str = "affine_grid";
        let size = &new_shape(OP, size)?[..];
        let _op = memory::scope::enter_op(OP);
        let n = size.len().wrapping_sub(2);
        if !matches!(n, 2 | 3) || self.shape() != [size[0], n, n + 1] {
            let rule = "takes maps of [batch, 2, 3] for a size of 4 extents, of [batch, 3, 4] for 5";
            return Err(Error::shape(OP, rule, &[self.shape(), size]));
        }
        if !self.dtype().is_float() {
            return Err(Error::dtype(OP, self.dtype(), "takes floats; cast with `to_dtype`"));
        }
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
        let base = crate::ops::stack(&columns.iter().collect::<Vec<_>>(), -1)?.reshape([1, points, n + 1])?;
        let grid = base.broadcast_to(&[size[0], points, n + 1])?.matmul(&self.transpose(1, 2)?)?;
        grid.reshape(&[&[size[0]], extents, &[n]].concat()[..])
    }
}
