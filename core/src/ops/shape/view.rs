//! Views: other shapes and strides over the same memory, and the copy that makes one contiguous.

use std::sync::Arc;

use smallvec::smallvec;

use crate::autograd::{self, InputGrads};
use crate::error::{Error, Result};
use crate::tensor::layout::{normalize_dim, numel};
use crate::tensor::shape::{IntoDims, IntoShape, infer_shape, new_shape};
use crate::tensor::{Dims, Layout, Tensor};

/// The most parts that a tensor is split into: each is a tensor of its own on the host.
const MAX_SPLITS: usize = 1 << 20;

/// Fails for more parts than the host should make tensors of.
fn check_split_count(op: &'static str, count: usize) -> Result<()> {
    if count <= MAX_SPLITS {
        return Ok(());
    }
    Err(Error::argument(
        op,
        format!(
            "{count} parts, and at most 1,048,576 are made, each a tensor of its own; take larger ones, or `narrow` those that are needed"
        ),
    ))
}

impl Tensor {
    /// A view recorded on the tape: its gradient is `back` of the gradient.
    fn differentiable_view(
        &self,
        op: &'static str,
        layout: Layout,
        back: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Tensor {
        autograd::differentiable(op, self.with_layout(layout), &[self], move |g, _| {
            Ok(smallvec![Some(back(g)?)] as InputGrads)
        })
    }

    /// A view of a part: its gradient is zero elsewhere. `part` takes the same part of a tensor of the same shape.
    fn differentiable_subview(
        &self,
        op: &'static str,
        layout: Layout,
        part: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Tensor {
        let view = self.with_layout(layout);
        if !autograd::compute_requires_grad(&[self]) {
            return view;
        }
        let shape: Dims = self.shape().into();
        let part = Arc::new(part);
        let again = part.clone();
        autograd::linear_differentiable(
            op,
            view,
            self,
            move |x| again(x),
            move |g| {
                let whole = Tensor::zeros(&shape, g.dtype(), g.device())?;
                g.copy_into(&part(&whole)?)?;
                Ok(whole)
            },
        )
    }

    /// The same elements in another shape: a view where the strides allow it, else a copy.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros(&[2, 3, 4], DType::F32, &device)?;
    /// assert_eq!(x.reshape([6, -1])?.shape(), [6, 4]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The numbers of elements differ; memory runs out for the copy.
    pub fn reshape(&self, shape: impl IntoShape) -> Result<Tensor> {
        let shape = infer_shape("reshape", self.shape(), &shape.to_extents())?;
        if let Some(strides) = self.layout().compute_view_strides(&shape) {
            let before: Dims = self.shape().into();
            let layout = Layout::new(shape, strides, self.layout().offset());
            return Ok(self.differentiable_view("reshape", layout, move |g| g.reshape(&before[..])));
        }
        self.contiguous()?.reshape(&shape[..])
    }

    /// As [`reshape`](Self::reshape), but never copies.
    ///
    /// # Errors
    /// The strides do not allow a view of this shape; use [`reshape`](Self::reshape).
    pub fn view(&self, shape: impl IntoShape) -> Result<Tensor> {
        let shape = infer_shape("view", self.shape(), &shape.to_extents())?;
        if self.layout().compute_view_strides(&shape).is_none() {
            return Err(Error::shape(
                "view",
                "strides do not allow this without a copy; use `reshape`",
                &[self.shape(), &shape],
            ));
        }
        self.reshape(&shape[..])
    }

    /// Dimensions in another order: dimension `i` of the result is dimension `dims[i]` of `self`.
    ///
    /// # Errors
    /// `dims` is no permutation of the dimensions.
    pub fn permute(&self, dims: impl IntoDims) -> Result<Tensor> {
        let rank = self.rank();
        let dims = dims.to_dims().unwrap_or_else(|| (0..rank as isize).collect());
        let order = dims.iter().map(|&d| normalize_dim("permute", d, rank)).collect::<Result<Dims>>()?;
        let mut inverse: Dims = Dims::from_elem(usize::MAX, rank);
        for (i, &d) in order.iter().enumerate() {
            if order.len() != rank || inverse[d] != usize::MAX {
                return Err(Error::argument(
                    "permute",
                    format!("{dims:?} is no permutation of {rank} dimensions"),
                ));
            }
            inverse[d] = i;
        }
        if order.len() != rank {
            return Err(Error::argument(
                "permute",
                format!("{dims:?} is no permutation of {rank} dimensions"),
            ));
        }
        let pick = |of: &[usize]| order.iter().map(|&d| of[d]).collect::<Dims>();
        let layout = Layout::new(pick(self.shape()), pick(self.strides()), self.layout().offset());
        let inverse: smallvec::SmallVec<[isize; 6]> = inverse.iter().map(|&d| d as isize).collect();
        Ok(self.differentiable_view("permute", layout, move |g| g.permute(&inverse)))
    }

    /// Two dimensions exchanged.
    ///
    /// # Errors
    /// A dimension is out of range.
    pub fn transpose(&self, dim0: isize, dim1: isize) -> Result<Tensor> {
        let (a, b) =
            (normalize_dim("transpose", dim0, self.rank())?, normalize_dim("transpose", dim1, self.rank())?);
        let mut order: Vec<isize> = (0..self.rank() as isize).collect();
        if !order.is_empty() {
            order.swap(a, b);
        }
        self.permute(&order)
    }

    /// The transpose of a matrix; a vector stays as it is.
    ///
    /// # Errors
    /// There are more than two dimensions.
    pub fn t(&self) -> Result<Tensor> {
        match self.rank() {
            0 | 1 => Ok(self.clone()),
            2 => self.transpose(0, 1),
            _ => Err(Error::shape("t", "takes at most two dimensions; use `transpose`", &[self.shape()])),
        }
    }

    /// Stretched to `shape` by repeating extents of 1, without a copy.
    ///
    /// # Errors
    /// An extent that is not 1 differs.
    pub fn broadcast_to(&self, shape: impl IntoShape) -> Result<Tensor> {
        self.broadcast_to_shape(&new_shape("broadcast_to", shape)?)
    }

    fn broadcast_to_shape(&self, shape: &[usize]) -> Result<Tensor> {
        if shape == self.shape() {
            return Ok(self.clone());
        }
        let layout = self.layout().broadcast_to("broadcast_to", shape)?;
        let before: Dims = self.shape().into();
        Ok(self.differentiable_view("broadcast_to", layout, move |g| g.sum_to(&before)))
    }

    /// As [`broadcast_to`](Self::broadcast_to); -1 keeps an extent.
    ///
    /// # Errors
    /// An extent that is not 1 differs.
    pub fn expand(&self, shape: impl IntoShape) -> Result<Tensor> {
        let shape = shape.to_extents();
        let skip = shape.len().saturating_sub(self.rank());
        let target = shape
            .iter()
            .enumerate()
            .map(|(d, &n)| match n {
                -1 if d >= skip => Ok(self.shape()[d - skip]),
                n if n >= 0 => Ok(n as usize),
                n => Err(Error::argument("expand", format!("extent {n} of new dimension {d} is negative"))),
            })
            .collect::<Result<Dims>>()?;
        self.broadcast_to_shape(&target)
    }

    /// A new dimension of extent 1 before `dim`.
    ///
    /// # Errors
    /// `dim` is out of range.
    pub fn unsqueeze(&self, dim: isize) -> Result<Tensor> {
        let at = normalize_dim("unsqueeze", dim, self.rank() + 1)?;
        let mut shape: Dims = self.shape().into();
        shape.insert(at, 1);
        self.reshape(&shape[..])
    }

    /// Without dimension `dim`, if its extent is 1.
    ///
    /// # Errors
    /// `dim` is out of range.
    pub fn squeeze(&self, dim: isize) -> Result<Tensor> {
        let at = normalize_dim("squeeze", dim, self.rank())?;
        if self.shape().get(at) != Some(&1) {
            return Ok(self.clone());
        }
        let mut shape: Dims = self.shape().into();
        shape.remove(at);
        self.reshape(&shape[..])
    }

    /// Without any dimension of extent 1.
    ///
    /// # Errors
    /// None of its own.
    pub fn squeeze_all(&self) -> Result<Tensor> {
        let shape: Dims = self.shape().iter().copied().filter(|&n| n != 1).collect();
        self.reshape(&shape[..])
    }

    /// Dimensions `start..=end` merged into one.
    ///
    /// # Errors
    /// A dimension is out of range, or `end` comes before `start`.
    pub fn flatten(&self, start: isize, end: isize) -> Result<Tensor> {
        let (a, b) =
            (normalize_dim("flatten", start, self.rank())?, normalize_dim("flatten", end, self.rank())?);
        if self.rank() == 0 {
            return self.reshape([1usize]);
        }
        if a > b {
            return Err(Error::argument("flatten", format!("start {start} comes after end {end}")));
        }
        let mut shape: Dims = self.shape()[..a].into();
        shape.push(numel(&self.shape()[a..=b]));
        shape.extend_from_slice(&self.shape()[b + 1..]);
        self.reshape(&shape[..])
    }

    /// Dimension `dim` split into `sizes`, one of which may be -1.
    ///
    /// # Errors
    /// The sizes do not multiply to the extent.
    pub fn unflatten(&self, dim: isize, sizes: impl IntoShape) -> Result<Tensor> {
        let at = normalize_dim("unflatten", dim, self.rank())?;
        if self.rank() == 0 {
            return Err(Error::shape(
                "unflatten",
                "takes at least one dimension; a tensor without dimensions is split by `reshape`",
                &[self.shape()],
            ));
        }
        let inner = infer_shape("unflatten", &self.shape()[at..=at], &sizes.to_extents())?;
        let mut shape: Dims = self.shape()[..at].into();
        shape.extend_from_slice(&inner);
        shape.extend_from_slice(&self.shape()[at + 1..]);
        self.reshape(&shape[..])
    }

    /// `length` indices of one dimension from `start` on.
    ///
    /// # Errors
    /// The range leaves the dimension.
    pub fn narrow(&self, dim: isize, start: usize, length: usize) -> Result<Tensor> {
        let d = normalize_dim("narrow", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0);
        let end = start.saturating_add(length);
        if end > extent || self.rank() == 0 {
            let rule = format!("{start}..{end} leaves dimension {d} of extent {extent}");
            return Err(Error::argument("narrow", rule));
        }
        let mut shape: Dims = self.shape().into();
        shape[d] = length;
        let layout = Layout::new(shape, self.strides(), self.layout().offset() + start * self.strides()[d]);
        Ok(self.differentiable_subview("narrow", layout, move |t| t.narrow(dim, start, length)))
    }

    /// Every `step`-th index of one dimension, from `start` to before `stop`, both clamped to the extent.
    ///
    /// # Errors
    /// `dim` is out of range; `step` is 0.
    pub fn slice_dim(&self, dim: isize, start: usize, stop: usize, step: usize) -> Result<Tensor> {
        let d = normalize_dim("slice", dim, self.rank())?;
        if step == 0 || self.rank() == 0 {
            return Err(Error::argument("slice", "takes a tensor with dimensions and a step of at least 1"));
        }
        let stop = stop.min(self.shape()[d]);
        let start = start.min(stop);
        let mut shape: Dims = self.shape().into();
        let mut strides: Dims = self.strides().into();
        shape[d] = (stop - start).div_ceil(step);
        let offset = self.layout().offset() + start * strides[d];
        strides[d] *= step.min(self.shape()[d].max(1));
        Ok(self.differentiable_subview("slice", Layout::new(shape, strides, offset), move |t| {
            t.slice_dim(dim, start, stop, step)
        }))
    }

    /// One index of one dimension, which disappears; a negative index counts from the end.
    ///
    /// # Errors
    /// `dim` or `index` is out of range.
    pub fn select(&self, dim: isize, index: isize) -> Result<Tensor> {
        let d = normalize_dim("select", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0) as isize;
        let at = if index < 0 { index + extent } else { index };
        if at < 0 || at >= extent {
            return Err(Error::argument(
                "select",
                format!("index {index} leaves dimension {d} of extent {extent}"),
            ));
        }
        let mut shape: Dims = self.shape().into();
        let mut strides: Dims = self.strides().into();
        let offset = self.layout().offset() + at as usize * strides[d];
        shape.remove(d);
        strides.remove(d);
        Ok(self.differentiable_subview("select", Layout::new(shape, strides, offset), move |t| {
            t.select(dim, index)
        }))
    }

    /// The diagonal of two dimensions, `offset` above the main one, as the last dimension.
    ///
    /// # Errors
    /// A dimension is out of range, or both are the same.
    pub fn diagonal(&self, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        let (a, b) =
            (normalize_dim("diagonal", dim1, self.rank())?, normalize_dim("diagonal", dim2, self.rank())?);
        if a == b || self.rank() < 2 {
            return Err(Error::argument("diagonal", format!("takes two dimensions, got {dim1} and {dim2}")));
        }
        let (rows, cols) = (self.shape()[a] as isize, self.shape()[b] as isize);
        let length = if offset >= 0 {
            rows.min(cols.saturating_sub(offset))
        } else {
            rows.saturating_add(offset).min(cols)
        }
        .max(0) as usize;
        let mut start = self.layout().offset();
        if length > 0 {
            start += if offset >= 0 {
                offset as usize * self.strides()[b]
            } else {
                offset.unsigned_abs() * self.strides()[a]
            };
        }
        let keep =
            |of: &[usize]| (0..self.rank()).filter(|d| *d != a && *d != b).map(|d| of[d]).collect::<Dims>();
        let (mut shape, mut strides) = (keep(self.shape()), keep(self.strides()));
        shape.push(length);
        strides.push(self.strides()[a] + self.strides()[b]);
        Ok(self.differentiable_subview("diagonal", Layout::new(shape, strides, start), move |t| {
            t.diagonal(offset, dim1, dim2)
        }))
    }

    /// Parts of at most `size` indices of one dimension; the last may be smaller.
    ///
    /// # Errors
    /// `dim` is out of range; `size` is 0.
    pub fn split(&self, size: usize, dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("split", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0);
        if size == 0 && extent > 0 {
            return Err(Error::argument("split", "takes parts of at least one index"));
        }
        let count = if extent == 0 { 1 } else { extent.div_ceil(size) };
        check_split_count("split", count)?;
        (0..count).map(|i| self.narrow(dim, i * size, size.min(extent - i * size))).collect()
    }

    /// Parts of the given sizes of one dimension.
    ///
    /// # Errors
    /// The sizes do not add up to the extent.
    pub fn split_with_sizes(&self, sizes: &[usize], dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("split_with_sizes", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0);
        if sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(extent) {
            return Err(Error::argument(
                "split_with_sizes",
                format!("{sizes:?} does not add up to the extent {extent} of dimension {d}"),
            ));
        }
        let mut start = 0;
        sizes
            .iter()
            .map(|&n| {
                let part = self.narrow(dim, start, n);
                start += n;
                part
            })
            .collect()
    }

    /// `chunks` parts of one dimension, as equal as can be with the last ones smaller, or fewer.
    ///
    /// # Errors
    /// `dim` is out of range; `chunks` is 0.
    pub fn chunk(&self, chunks: usize, dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("chunk", dim, self.rank())?;
        if chunks == 0 {
            return Err(Error::argument("chunk", "takes at least one chunk"));
        }
        match self.shape().get(d) {
            // Of nothing there are as many parts as were asked for, as in PyTorch.
            Some(0) => check_split_count("chunk", chunks).map(|()| vec![self.clone(); chunks]),
            extent => self.split(extent.map_or(0, |n| n.div_ceil(chunks)).max(1), dim),
        }
    }

    /// `sections` parts of one dimension, the first ones one index larger where they cannot be equal; empty ones where there are
    /// more parts than indices.
    ///
    /// # Errors
    /// `dim` is out of range, or there is none; `sections` is 0.
    pub fn tensor_split(&self, sections: usize, dim: isize) -> Result<Vec<Tensor>> {
        let extent = self.checked_split_extent(dim)?;
        if sections == 0 {
            return Err(Error::argument("tensor_split", "takes at least one section"));
        }
        check_split_count("tensor_split", sections)?;
        let (size, larger) = (extent / sections, extent % sections);
        let start = |i: usize| i * size + i.min(larger);
        (0..sections).map(|i| self.narrow(dim, start(i), start(i + 1) - start(i))).collect()
    }

    /// Parts of one dimension that are cut before the given indices: `tensor_split` with indices. Negative ones count from the end; a
    /// part that would end before it starts is empty.
    ///
    /// # Errors
    /// `dim` is out of range, or there is none.
    pub fn tensor_split_at(&self, indices: &[isize], dim: isize) -> Result<Vec<Tensor>> {
        let extent = self.checked_split_extent(dim)?;
        let place = |&i: &isize| match i {
            i if i < 0 => extent.saturating_sub(i.unsigned_abs()),
            i => extent.min(i as usize),
        };
        let starts = [0].into_iter().chain(indices.iter().map(place));
        let ends = indices.iter().map(place).chain([extent]);
        starts.zip(ends).map(|(start, end)| self.narrow(dim, start, end.saturating_sub(start))).collect()
    }

    /// `sections` equal parts along dimension 1, or along the only one.
    ///
    /// # Errors
    /// There are no dimensions; `sections` does not divide the extent.
    pub fn hsplit(&self, sections: usize) -> Result<Vec<Tensor>> {
        self.split_evenly("hsplit", sections, 1, isize::from(self.rank() > 1))
    }

    /// `sections` equal parts along dimension 0 of two at least.
    ///
    /// # Errors
    /// There are fewer than two dimensions; `sections` does not divide the extent.
    pub fn vsplit(&self, sections: usize) -> Result<Vec<Tensor>> {
        self.split_evenly("vsplit", sections, 2, 0)
    }

    /// `sections` equal parts along dimension 2 of three at least.
    ///
    /// # Errors
    /// There are fewer than three dimensions; `sections` does not divide the extent.
    pub fn dsplit(&self, sections: usize) -> Result<Vec<Tensor>> {
        self.split_evenly("dsplit", sections, 3, 2)
    }

    fn split_evenly(
        &self,
        op: &'static str,
        sections: usize,
        least: usize,
        dim: isize,
    ) -> Result<Vec<Tensor>> {
        if self.rank() < least {
            let rule = format!("takes at least {least} dimensions");
            return Err(Error::shape(op, rule, &[self.shape()]));
        }
        let extent = self.dim(dim)?;
        if sections == 0 || !extent.is_multiple_of(sections) {
            let rule = format!(
                "{sections} sections do not divide the extent {extent} of dimension {dim}; `tensor_split_at` takes indices"
            );
            return Err(Error::argument(op, rule));
        }
        self.tensor_split(sections, dim)
    }

    /// The extent that is split.
    fn checked_split_extent(&self, dim: isize) -> Result<usize> {
        if self.rank() == 0 {
            return Err(Error::shape("tensor_split", "takes at least one dimension", &[self.shape()]));
        }
        let d = normalize_dim("tensor_split", dim, self.rank())?;
        Ok(self.shape()[d])
    }

    /// Every index of one dimension as a tensor of its own.
    ///
    /// # Errors
    /// `dim` is out of range.
    pub fn unbind(&self, dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("unbind", dim, self.rank())?;
        let extent = *self
            .shape()
            .get(d)
            .ok_or_else(|| Error::shape("unbind", "takes at least one dimension", &[self.shape()]))?;
        check_split_count("unbind", extent)?;
        (0..extent).map(|i| self.select(dim, i as isize)).collect()
    }

    /// The same values, row-major: `self` if it is so already, else a copy.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.copy() }
    }

    /// A row-major copy in memory of its own; PyTorch's `clone`.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn copy(&self) -> Result<Tensor> {
        let out = Tensor::empty(self.shape(), self.dtype(), self.device())?;
        self.copy_into(&out)?;
        Ok(autograd::differentiable("copy", out, &[self], |g, _| Ok(smallvec![Some(g.clone())])))
    }

    /// Whether the strides repeat an element somewhere.
    #[must_use]
    pub fn is_expanded(&self) -> bool {
        self.layout().has_internal_overlap()
    }
}
