//! Views: other shapes and strides over the same memory, and contiguous copies.

use crate::autograd::DimRange;
use crate::ops::prelude::*;
use crate::tensor::shape::{Extents, IntoShape, impossible_extent_hint, infer_shape};

/// Largest number of parts of a split, because each part is a tensor on the host.
const MAX_SPLITS: usize = 1 << 20;

/// Fails if a split has too many parts.
#[track_caller]
fn check_split_count(op: &'static str, count: usize) -> Result<()> {
    fail_if!(count > MAX_SPLITS; argument(op),
        "{count} parts, and at most 1,048,576 are made, each a tensor of its own; take larger ones, or `narrow` those that are needed");
    Ok(())
}

impl Tensor {
    /// Returns a recorded view whose gradient is `back` of the result's gradient. `back` moves elements, and may take
    /// a gradient of another type.
    fn differentiable_view(
        &self,
        op: &'static str,
        layout: Layout,
        back: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Tensor {
        let dtype = self.dtype();
        let out = autograd::differentiable_unary(op, self.with_layout(layout), self, move |g, ctx| {
            let grad = back(g)?;
            if ctx.passes_cast_grad(0) { Ok(grad) } else { grad.to_dtype(dtype) }
        });
        if autograd::accepts_cast_grad(self) {
            autograd::accept_cast_grad(&out);
        }
        out
    }

    /// Returns a recorded view of a part. The gradient is zero elsewhere. `part` takes the same part of
    /// another tensor of this shape, and is a `range` of one dimension if there is one.
    #[track_caller]
    fn differentiable_subview(
        &self,
        op: &'static str,
        layout: Layout,
        range: Option<DimRange>,
        part: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Tensor {
        autograd::part_differentiable(op, self.with_layout(layout), self, range, part)
    }

    /// Returns the elements in another shape: a view if the strides allow it, else a copy.
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
    /// The numbers of elements differ.
    #[track_caller]
    pub fn reshape(&self, shape: impl IntoShape) -> Result<Tensor> {
        self.reshape_inferred(infer_shape("reshape", self.shape(), &shape.to_extents())?)
    }

    /// Returns the elements in a shape with as many elements.
    #[track_caller]
    fn reshape_inferred(&self, shape: Dims) -> Result<Tensor> {
        let Some(strides) = self.layout().compute_view_strides(&shape) else {
            return self.contiguous()?.reshape_inferred(shape);
        };
        let layout = Layout::new(shape, strides, self.layout().offset());
        // Operations make views of what they do not record. Those need no shape for a gradient.
        if !autograd::compute_requires_grad(&[self]) {
            return Ok(self.with_layout(layout));
        }
        let before = Dims::from_slice(self.shape());
        Ok(self.differentiable_view("reshape", layout, move |g| g.reshape(&before[..])))
    }

    /// Reshapes as [`reshape`](Self::reshape) does, but never copies.
    ///
    /// # Errors
    /// The strides do not allow a view of this shape; use [`reshape`](Self::reshape).
    #[track_caller]
    pub fn view(&self, shape: impl IntoShape) -> Result<Tensor> {
        let shape = infer_shape("view", self.shape(), &shape.to_extents())?;
        fail_if!(self.layout().compute_view_strides(&shape).is_none(); shape("view", &[self.shape(), &shape]),
            "strides do not allow this without a copy; use `reshape`");
        self.reshape(&shape[..])
    }

    /// Permutes the dimensions: dimension `i` of the result is dimension `dims[i]` of `self`.
    ///
    /// # Errors
    /// `dims` is not a permutation of the dimensions.
    #[track_caller]
    pub fn permute(&self, dims: impl IntoDims) -> Result<Tensor> {
        let rank = self.rank();
        let dims = dims.to_dims().unwrap_or_else(|| (0..rank as isize).collect());
        // Pushes one by one, because collecting costs the host several times more.
        let mut order = Dims::new();
        for &d in &dims {
            order.push(normalize_dim("permute", d, rank)?);
        }
        fail_if!(order.len() != rank || (0..rank).any(|d| !order.contains(&d));
            argument("permute"), "{dims:?} is not a permutation of {rank} dimensions");
        let mut inverse: SmallVec<[isize; 6]> = SmallVec::from_elem(0, rank);
        for (i, &d) in order.iter().enumerate() {
            inverse[d] = i as isize;
        }
        let reordered = |of: &[usize]| {
            let mut reordered = Dims::new();
            order.iter().for_each(|&d| reordered.push(of[d]));
            reordered
        };
        let layout = Layout::new(reordered(self.shape()), reordered(self.strides()), self.layout().offset());
        Ok(self.differentiable_view("permute", layout, move |g| g.permute(&inverse)))
    }

    /// Returns a view with two dimensions swapped. Negative dimensions count from the end.
    ///
    /// # Errors
    /// A dimension is out of range.
    #[doc(alias = "T")]
    #[doc(alias = "H")]
    #[doc(alias = "mH")]
    #[doc(alias = "adjoint")]
    #[doc(alias = "swapaxes")]
    #[doc(alias = "swapdims")]
    #[track_caller]
    pub fn transpose(&self, dim0: isize, dim1: isize) -> Result<Tensor> {
        let (a, b) =
            (normalize_dim("transpose", dim0, self.rank())?, normalize_dim("transpose", dim1, self.rank())?);
        let mut order = Extents::new();
        (0..self.rank() as isize).for_each(|d| order.push(d));
        if !order.is_empty() {
            order.swap(a, b);
        }
        self.permute(&order)
    }

    /// Returns a transposed view of a matrix \[m, n\], as \[n, m\]. A vector or a scalar stays as it is.
    ///
    /// # Errors
    /// There are more than two dimensions.
    #[track_caller]
    pub fn t(&self) -> Result<Tensor> {
        match self.rank() {
            0 | 1 => Ok(self.clone()),
            2 => self.transpose(0, 1),
            _ => Err(Error::shape("t", "takes at most two dimensions; use `transpose`", &[self.shape()])),
        }
    }

    /// Returns a view of this shape that repeats the elements along extents of 1 and new leading dimensions.
    ///
    /// # Errors
    /// An extent is neither 1 nor that of `shape`.
    #[track_caller]
    pub fn broadcast_to(&self, shape: impl IntoShape) -> Result<Tensor> {
        self.broadcast_to_shape("broadcast_to", &new_shape("broadcast_to", shape)?)
    }

    /// Broadcasts for the operation `op`, which errors name.
    #[track_caller]
    pub(crate) fn broadcast_to_shape(&self, op: &'static str, shape: &[usize]) -> Result<Tensor> {
        if shape == self.shape() {
            return Ok(self.clone());
        }
        let layout = self.layout().broadcast_to(op, shape)?;
        let before = Dims::from_slice(self.shape());
        Ok(autograd::differentiable_unary("broadcast_to", self.with_layout(layout), self, move |g, _| {
            g.sum_to(&before)
        }))
    }

    /// Expands as [`broadcast_to`](Self::broadcast_to) does. An extent of -1 stays as it is.
    #[track_caller]
    pub fn expand(&self, shape: impl IntoShape) -> Result<Tensor> {
        let shape = shape.to_extents();
        fail_if!(shape.contains(&isize::MAX); argument("expand"),
            "{shape:?} has an impossible extent{}", impossible_extent_hint(&shape));
        let skip = shape.len().saturating_sub(self.rank());
        let mut target = Dims::with_capacity(shape.len());
        for (d, &n) in shape.iter().enumerate() {
            target.push(match n {
                -1 if d >= skip => self.shape()[d - skip],
                n if n >= 0 => n as usize,
                n => fail!(argument("expand"), "extent {n} of new dimension {d} is negative"),
            });
        }
        self.broadcast_to_shape("expand", &target)
    }

    /// Expands to the shape of `other`: [`broadcast_to`](Self::broadcast_to).
    #[track_caller]
    pub fn expand_as(&self, other: &Tensor) -> Result<Tensor> {
        self.broadcast_to(other.shape())
    }

    /// Reshapes to the shape of `other`: [`reshape`](Self::reshape).
    #[track_caller]
    pub fn reshape_as(&self, other: &Tensor) -> Result<Tensor> {
        self.reshape(other.shape())
    }

    /// Views the tensor in the shape of `other`: [`view`](Self::view).
    #[track_caller]
    pub fn view_as(&self, other: &Tensor) -> Result<Tensor> {
        self.view(other.shape())
    }

    /// Returns a view with a dimension of extent 1 at index `dim` of the result.
    ///
    /// # Errors
    /// `dim` is not between -rank - 1 and rank.
    #[track_caller]
    pub fn unsqueeze(&self, dim: isize) -> Result<Tensor> {
        let rank = self.rank() as isize;
        fail_if!(dim < -rank - 1 || dim > rank;
            argument("unsqueeze"), "dimension {dim} is out of range; a tensor of rank {rank} takes {} to {rank}", -rank - 1);
        let at = if dim < 0 { dim + rank + 1 } else { dim } as usize;
        let mut shape = Dims::from_slice(self.shape());
        shape.insert(at, 1);
        self.reshape(&shape[..])
    }

    /// Returns a view without dimension `dim` if its extent is 1, and the same tensor otherwise, as in PyTorch.
    ///
    /// # Errors
    /// `dim` is out of range.
    #[track_caller]
    pub fn squeeze(&self, dim: isize) -> Result<Tensor> {
        let at = normalize_dim("squeeze", dim, self.rank())?;
        if self.shape().get(at) != Some(&1) {
            return Ok(self.clone());
        }
        let mut shape = Dims::from_slice(self.shape());
        shape.remove(at);
        self.reshape(&shape[..])
    }

    /// Returns a view without the dimensions of extent 1.
    #[track_caller]
    pub fn squeeze_all(&self) -> Result<Tensor> {
        let shape: Dims = self.shape().iter().copied().filter(|&n| n != 1).collect();
        self.reshape(&shape[..])
    }

    /// Merges the dimensions `start..=end` into one.
    ///
    /// # Errors
    /// A dimension is out of range, or `end` comes before `start`.
    #[doc(alias = "ravel")]
    #[track_caller]
    pub fn flatten(&self, start: isize, end: isize) -> Result<Tensor> {
        let (a, b) =
            (normalize_dim("flatten", start, self.rank())?, normalize_dim("flatten", end, self.rank())?);
        if self.rank() == 0 {
            return self.reshape([1usize]);
        }
        fail_if!(a > b; argument("flatten"), "start {start} comes after end {end}");
        let mut shape = Dims::from_slice(&self.shape()[..a]);
        shape.push(numel(&self.shape()[a..=b]));
        shape.extend_from_slice(&self.shape()[b + 1..]);
        self.reshape(&shape[..])
    }

    /// Splits dimension `dim` into `sizes`, one of which may be -1.
    ///
    /// # Errors
    /// The product of the sizes is not the extent.
    #[track_caller]
    pub fn unflatten(&self, dim: isize, sizes: impl IntoShape) -> Result<Tensor> {
        let at = normalize_dim("unflatten", dim, self.rank())?;
        fail_if!(self.rank() == 0; shape("unflatten", [self]),
            "takes at least one dimension; a tensor without dimensions is split by `reshape`");
        let inner = infer_shape("unflatten", &self.shape()[at..=at], &sizes.to_extents())?;
        let mut shape = Dims::from_slice(&self.shape()[..at]);
        shape.extend_from_slice(&inner);
        shape.extend_from_slice(&self.shape()[at + 1..]);
        self.reshape(&shape[..])
    }

    /// Returns a view of `length` indices of one dimension from `start` on.
    ///
    /// # Errors
    /// The range exceeds the dimension.
    #[doc(alias = "narrow_copy")]
    #[track_caller]
    pub fn narrow(&self, dim: isize, start: usize, length: usize) -> Result<Tensor> {
        let d = normalize_dim("narrow", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0);
        let end = start.saturating_add(length);
        fail_if!(end > extent || self.rank() == 0;
            argument("narrow"), "{start}..{end} leaves dimension {d} of extent {extent}");
        let shape = with_extent(self.shape(), d, length);
        let offset = self.layout().offset() + start * self.strides()[d];
        let layout = Layout::new(shape, Dims::from_slice(self.strides()), offset);
        let range = Some(DimRange { dim: d, start, length });
        Ok(self.differentiable_subview("narrow", layout, range, move |t| t.narrow(dim, start, length)))
    }

    /// Returns a view of every `step`-th index from `start` to before `stop`, clamped to the extent.
    ///
    /// # Errors
    /// `dim` is out of range, or `step` is 0.
    #[track_caller]
    pub fn slice_dim(&self, dim: isize, start: usize, stop: usize, step: usize) -> Result<Tensor> {
        let d = normalize_dim("slice_dim", dim, self.rank())?;
        fail_if!(step == 0 || self.rank() == 0;
            argument("slice_dim"), "takes a tensor with dimensions and a step of at least 1");
        let stop = stop.min(self.shape()[d]);
        let start = start.min(stop);
        let shape = with_extent(self.shape(), d, (stop - start).div_ceil(step));
        let mut strides = Dims::from_slice(self.strides());
        let offset = self.layout().offset() + start * strides[d];
        strides[d] *= step.min(self.shape()[d].max(1));
        Ok(self.differentiable_subview("slice", Layout::new(shape, strides, offset), None, move |t| {
            t.slice_dim(dim, start, stop, step)
        }))
    }

    /// Selects one index of one dimension, and removes the dimension. A negative index counts from the end.
    ///
    /// # Errors
    /// `dim` or `index` is out of range.
    #[track_caller]
    pub fn select(&self, dim: isize, index: isize) -> Result<Tensor> {
        let d = normalize_dim("select", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0) as isize;
        let at = if index < 0 { index + extent } else { index };
        fail_if!(at < 0 || at >= extent;
            argument("select"), "index {index} leaves dimension {d} of extent {extent}");
        let mut shape = Dims::from_slice(self.shape());
        let mut strides = Dims::from_slice(self.strides());
        let offset = self.layout().offset() + at as usize * strides[d];
        shape.remove(d);
        strides.remove(d);
        let range = Some(DimRange { dim: d, start: at as usize, length: 1 });
        Ok(self.differentiable_subview("select", Layout::new(shape, strides, offset), range, move |t| {
            t.select(dim, index)
        }))
    }

    /// Returns the diagonal of two dimensions, `offset` above the main one, as the last dimension.
    #[doc(alias = "fill_diagonal_")]
    #[track_caller]
    pub fn diagonal(&self, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        let (a, b) =
            (normalize_dim("diagonal", dim1, self.rank())?, normalize_dim("diagonal", dim2, self.rank())?);
        fail_if!(a == b || self.rank() < 2;
            argument("diagonal"), "takes two dimensions, got {dim1} and {dim2}");
        let (first_row, first_column) =
            if offset < 0 { (offset.unsigned_abs(), 0) } else { (0, offset as usize) };
        let length =
            self.shape()[a].saturating_sub(first_row).min(self.shape()[b].saturating_sub(first_column));
        let mut start = self.layout().offset();
        if length > 0 {
            start += first_row * self.strides()[a] + first_column * self.strides()[b];
        }
        let keep =
            |of: &[usize]| (0..self.rank()).filter(|d| *d != a && *d != b).map(|d| of[d]).collect::<Dims>();
        let (mut shape, mut strides) = (keep(self.shape()), keep(self.strides()));
        shape.push(length);
        strides.push(self.strides()[a] + self.strides()[b]);
        Ok(self.differentiable_subview("diagonal", Layout::new(shape, strides, start), None, move |t| {
            t.diagonal(offset, dim1, dim2)
        }))
    }

    /// Splits one dimension into parts of `size` indices. The last part may be smaller.
    ///
    /// # Errors
    /// `dim` is out of range, or `size` is 0.
    #[track_caller]
    pub fn split(&self, size: usize, dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("split", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0);
        fail_if!(size == 0 && extent > 0; argument("split"), "takes parts of at least one index");
        let count = if extent == 0 { 1 } else { extent.div_ceil(size) };
        check_split_count("split", count)?;
        let _call = memory::scope::enter_call();
        (0..count).map(|i| self.narrow(dim, i * size, size.min(extent - i * size))).collect()
    }

    /// Splits one dimension into parts of these sizes.
    ///
    /// # Errors
    /// The sizes do not add up to the extent.
    #[track_caller]
    pub fn split_with_sizes(&self, sizes: &[usize], dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("split_with_sizes", dim, self.rank())?;
        let extent = self.shape().get(d).copied().unwrap_or(0);
        fail_if!(sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(extent);
            argument("split_with_sizes"),
            "{sizes:?} does not add up to the extent {extent} of dimension {d}");
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

    /// Splits one dimension into at most `chunks` parts of equal size. The last part may be smaller.
    ///
    /// # Errors
    /// `dim` is out of range, or `chunks` is 0.
    #[track_caller]
    pub fn chunk(&self, chunks: usize, dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("chunk", dim, self.rank())?;
        fail_if!(chunks == 0; argument("chunk"), "takes at least one chunk");
        match self.shape().get(d) {
            // As in PyTorch, an empty dimension gives all `chunks` parts.
            Some(0) => check_split_count("chunk", chunks).map(|()| vec![self.clone(); chunks]),
            extent => self.split(extent.map_or(0, |n| n.div_ceil(chunks)).max(1), dim),
        }
    }

    /// Splits one dimension into `sections` parts. The first parts are one index larger if the extent is not
    /// divisible, and parts may be empty.
    ///
    /// # Errors
    /// `dim` is out of range, the rank is 0, or `sections` is 0.
    #[track_caller]
    pub fn tensor_split(&self, sections: usize, dim: isize) -> Result<Vec<Tensor>> {
        let extent = self.checked_split_extent(dim)?;
        fail_if!(sections == 0; argument("tensor_split"), "takes at least one section");
        check_split_count("tensor_split", sections)?;
        let (size, larger) = (extent / sections, extent % sections);
        let start = |i: usize| i * size + i.min(larger);
        (0..sections).map(|i| self.narrow(dim, start(i), start(i + 1) - start(i))).collect()
    }

    /// Splits one dimension before these indices: PyTorch's `tensor_split` with indices. Negative indices
    /// count from the end, and a part that ends before its start is empty.
    #[track_caller]
    pub fn tensor_split_at(&self, indices: &[isize], dim: isize) -> Result<Vec<Tensor>> {
        let extent = self.checked_split_extent(dim)?;
        let resolve_bound = |&i: &isize| match i {
            i if i < 0 => extent.saturating_sub(i.unsigned_abs()),
            i => extent.min(i as usize),
        };
        let starts = [0].into_iter().chain(indices.iter().map(resolve_bound));
        let ends = indices.iter().map(resolve_bound).chain([extent]);
        starts.zip(ends).map(|(start, end)| self.narrow(dim, start, end.saturating_sub(start))).collect()
    }

    /// Splits along dimension 1, or the only dimension, into `sections` equal parts.
    ///
    /// # Errors
    /// The rank is 0, or `sections` does not divide the extent.
    #[track_caller]
    pub fn hsplit(&self, sections: usize) -> Result<Vec<Tensor>> {
        self.split_evenly("hsplit", sections, 1, isize::from(self.rank() > 1))
    }

    /// Splits along dimension 0 into `sections` equal parts. The rank is at least two.
    ///
    /// # Errors
    /// There are fewer than two dimensions, or `sections` does not divide the extent.
    #[track_caller]
    pub fn vsplit(&self, sections: usize) -> Result<Vec<Tensor>> {
        self.split_evenly("vsplit", sections, 2, 0)
    }

    /// Splits along dimension 2 into `sections` equal parts. The rank is at least three.
    ///
    /// # Errors
    /// There are fewer than three dimensions, or `sections` does not divide the extent.
    #[track_caller]
    pub fn dsplit(&self, sections: usize) -> Result<Vec<Tensor>> {
        self.split_evenly("dsplit", sections, 3, 2)
    }

    #[track_caller]
    fn split_evenly(
        &self,
        op: &'static str,
        sections: usize,
        least: usize,
        dim: isize,
    ) -> Result<Vec<Tensor>> {
        fail_if!(self.rank() < least; shape(op, [self]), "takes at least {least} dimensions");
        let extent = self.dim(dim)?;
        fail_if!(sections == 0 || !extent.is_multiple_of(sections); argument(op),
            "{sections} sections do not divide the extent {extent} of dimension {dim}; `tensor_split_at` takes indices");
        self.tensor_split(sections, dim)
    }

    #[track_caller]
    fn checked_split_extent(&self, dim: isize) -> Result<usize> {
        fail_if!(self.rank() == 0; shape("tensor_split", [self]), "takes at least one dimension");
        let d = normalize_dim("tensor_split", dim, self.rank())?;
        Ok(self.shape()[d])
    }

    /// Returns the slices of the tensor along `dim`, as views without this dimension.
    #[track_caller]
    pub fn unbind(&self, dim: isize) -> Result<Vec<Tensor>> {
        let d = normalize_dim("unbind", dim, self.rank())?;
        let Some(&extent) = self.shape().get(d) else {
            fail!(shape("unbind", [self]), "takes at least one dimension")
        };
        check_split_count("unbind", extent)?;
        (0..extent).map(|i| self.select(dim, i as isize)).collect()
    }

    /// Returns the values in row-major order: `self` if it is contiguous, else a copy.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.copy() }
    }

    /// Returns a contiguous copy: PyTorch's `clone`.
    #[doc(alias = "positive")]
    #[doc(alias = "narrow_copy")]
    #[track_caller]
    pub fn copy(&self) -> Result<Tensor> {
        let out = Tensor::empty(self.shape(), self.dtype(), self.device())?;
        self.copy_into(&out)?;
        Ok(autograd::differentiable_unary("copy", out, self, |g, _| Ok(g.clone())))
    }

    /// Reports whether the strides repeat an element.
    #[must_use]
    pub fn is_expanded(&self) -> bool {
        self.layout().has_internal_overlap()
    }
}
