//! Copies with a replaced part, and linear indices: PyTorch's `*_scatter`, `take`, `put` and diagonals.

use crate::ops::ScatterOp;
use crate::ops::index::ScatterTarget;
use crate::ops::index::scatter::ScatterReduce;
use crate::ops::prelude::*;
use crate::ops::reduce::scan;

/// Returns a copy of `x` with `src` in the view that `part` returns.
#[track_caller]
fn copy_and_replace(
    op: &'static str,
    x: &Tensor,
    src: &Tensor,
    part: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    operation!(op);
    let out = x.copy()?;
    let replaced = part(&out)?;
    fail_if!(replaced.shape() != src.shape();
        shape(op, [replaced, src]), "the source has the shape of the replaced part");
    replaced.copy_(src)?;
    Ok(out)
}

impl Tensor {
    /// Returns a copy with `src` in place of the [`slice_dim`](Self::slice_dim) of the same arguments.
    #[track_caller]
    pub fn slice_scatter(
        &self,
        src: &Tensor,
        dim: isize,
        start: usize,
        stop: usize,
        step: usize,
    ) -> Result<Tensor> {
        copy_and_replace("slice_scatter", self, src, |x| x.slice_dim(dim, start, stop, step))
    }

    /// Returns a copy with `src` in place of the [`select`](Self::select) of the same arguments.
    #[track_caller]
    pub fn select_scatter(&self, src: &Tensor, dim: isize, index: isize) -> Result<Tensor> {
        copy_and_replace("select_scatter", self, src, |x| x.select(dim, index))
    }

    /// Returns a copy with `src` in place of the [`diagonal`](Self::diagonal) of the same arguments.
    #[track_caller]
    pub fn diagonal_scatter(&self, src: &Tensor, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        copy_and_replace("diagonal_scatter", self, src, |x| x.diagonal(offset, dim1, dim2))
    }

    /// Returns zeros with the last dimension on the diagonal of the result's dimensions `dim1` and `dim2`.
    #[track_caller]
    pub fn diag_embed(&self, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        operation!(OP = "diag_embed");
        let Some((&n, before)) = self.shape().split_last() else {
            fail!(shape(OP, [self]), "takes at least one dimension")
        };
        let side = n.checked_add(offset.unsigned_abs()).filter(|&side| side <= u32::MAX as usize);
        let Some(side) = side else {
            fail!(argument(OP), "offset {offset} leaves every matrix that a tensor can hold")
        };
        let shape = [before, &[side, side]].concat();
        let out = Tensor::zeros(&shape, self.dtype(), self.device())?;
        out.diagonal(offset, -2, -1)?.copy_(self)?;
        out.movedim([-2, -1], [dim1, dim2])
    }

    /// Returns a matrix with the vector `self` on a diagonal, or a copy of a matrix's diagonal.
    #[track_caller]
    pub fn diag(&self, diagonal: isize) -> Result<Tensor> {
        match self.rank() {
            1 => self.diag_embed(diagonal, 0, 1),
            2 => self.diagonal(diagonal, 0, 1)?.copy(),
            _ => Err(Error::shape("diag", "takes a vector or a matrix", &[self.shape()])),
        }
    }

    /// Reads elements by linear index in row-major order, in the shape of `index`: PyTorch's `take`. Negative
    /// indices count from the end.
    ///
    /// An index out of range reads as 0: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn take(&self, index: &Tensor) -> Result<Tensor> {
        operation!("take");
        let line = self.reshape([-1])?;
        let rows = select::linearize_index("take", index, line.numel(), None, true)?;
        line.index_select(0, &rows)?.reshape(index.shape())
    }

    /// Returns a copy with the elements of `source` written at the linear indices in `index`, or added with
    /// `accumulate`: PyTorch's `put`. `index` and `source` have the same number of elements.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn put(&self, index: &Tensor, source: &Tensor, accumulate: bool) -> Result<Tensor> {
        self.put_to(index, source, accumulate, ScatterTarget::Copy)
    }

    #[track_caller]
    pub(in crate::ops) fn put_to(
        &self,
        index: &Tensor,
        source: &Tensor,
        accumulate: bool,
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!("put");
        if target == ScatterTarget::Operand && !self.is_contiguous() {
            return target.store(self, self.put(index, source, accumulate)?);
        }
        fail_if!(index.numel() != source.numel();
            shape("put", [index, source]), "takes as many values as indices");
        let (index, source) = (index.reshape([-1])?, source.reshape([-1])?);
        let line = self.reshape([-1])?;
        line.index_put_to(&[Some(&index)], &source, accumulate, target)?.reshape(self.shape())
    }

    /// Returns a copy with slices of `source` written along `dim` at the one-dimensional `index`, as by
    /// [`scatter`](Self::scatter).
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn index_copy(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        self.index_copy_to(dim, index, source, ScatterTarget::Copy)
    }

    #[track_caller]
    pub(in crate::ops) fn index_copy_to(
        &self,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!(OP = "index_copy");
        let d = normalize_dim(OP, dim, self.rank())?;
        let extent = extent_or_one(source, d);
        fail_if!(index.rank() > 1 || index.numel() != extent || source.rank() != self.rank();
            shape(OP, [self, index, source]),
            "takes an index of one dimension, and a source of this rank with a slice for each");
        if self.rank() == 0 {
            let (x, source) = (self.reshape([1])?, source.reshape([1])?);
            return x.index_copy_to(0, index, &source, target)?.reshape([0usize; 0]);
        }
        let shape = with_extent(&Dims::from_elem(1, self.rank()), d, extent);
        let index = index.reshape(&shape[..])?.broadcast_to(source.shape())?;
        self.scatter_op("scatter", dim, &index, source, ScatterOp::Set, target)
    }

    /// Returns a copy with slices of `source` reduced into the slices along `dim` that the one-dimensional `index`
    /// names: PyTorch's `index_reduce`. See [`scatter_reduce`](Self::scatter_reduce).
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn index_reduce(
        &self,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
        reduce: ScatterReduce,
        include_self: bool,
    ) -> Result<Tensor> {
        self.index_reduce_to(dim, index, source, (reduce, include_self), ScatterTarget::Copy)
    }

    #[track_caller]
    pub(in crate::ops) fn index_reduce_to(
        &self,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
        (reduce, include_self): (ScatterReduce, bool),
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!(OP = "index_reduce");
        let d = normalize_dim(OP, dim, self.rank())?;
        if self.rank() == 0 {
            let (x, source) = (self.reshape([1])?, source.reshape([-1])?);
            return x
                .index_reduce_to(0, index, &source, (reduce, include_self), target)?
                .reshape([0usize; 0]);
        }
        let shape = with_extent(self.shape(), d, index.numel());
        fail_if!(index.rank() > 1 || source.shape() != &shape[..]; shape(OP, [self, index, source]),
            "the index has one dimension, and the source the shape {shape:?}");
        let shape = with_extent(&Dims::from_elem(1, self.rank()), d, index.numel());
        let index = index.reshape(&shape[..])?.broadcast_to(source.shape())?;
        self.scatter_reduce_to(dim, &index, source, (reduce, include_self), target)
    }

    /// Returns the coordinates of linear indices in row-major order, a tensor for each dimension of `shape`:
    /// PyTorch's `unravel_index`, the inverse of what [`take`](Self::take) reads.
    ///
    /// The coordinates have the dtype of the indices; i32 for u8, and for i64 on devices without 64-bit integers.
    ///
    /// # Errors
    /// The dtype is not an integer, or `shape` has an extent of 0. The dtype is i64, the device lacks 64-bit integers,
    /// and `shape` has more than 2³¹ elements.
    #[track_caller]
    pub fn unravel_index(&self, shape: impl IntoShape) -> Result<Vec<Tensor>> {
        operation!(OP = "unravel_index");
        fail_if!(!self.dtype().is_int(); dtype(OP, self.dtype()), "takes indices");
        let shape = new_shape(OP, shape)?;
        fail_if!(shape.contains(&0); shape(OP, &[&shape[..]]), "no index is inside a shape without elements");
        let mut rest = match self.dtype() {
            DType::U8 => self.to_dtype(DType::I32)?,
            DType::I64 if !self.device().info().features.i64 => {
                let count = shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent));
                if count.is_none_or(|count| count > 1 << 31) {
                    let reason = format!(
                        "the adapter has no 64-bit integers, and 32 bits do not hold all indices into {shape:?}"
                    );
                    return Err(Error::unsupported(OP, self.device(), reason));
                }
                self.to_dtype(DType::I32)?
            }
            _ => self.clone(),
        };
        let mut coordinates = Vec::with_capacity(shape.len());
        for &extent in shape.iter().rev() {
            coordinates.push(rest.remainder(extent as i64)?);
            rest = rest.floor_divide(extent as i64)?;
        }
        coordinates.reverse();
        Ok(coordinates)
    }

    /// Returns a copy with elements of `source` where `mask` is true: PyTorch's `masked_scatter`.
    ///
    /// Both tensors broadcast. The length of `source` is not checked: its last element replaces missing ones.
    ///
    /// # Errors
    /// `mask` is not bool, the shapes do not broadcast, or `source` is empty or of another type.
    #[track_caller]
    pub fn masked_scatter(&self, mask: &Tensor, source: &Tensor) -> Result<Tensor> {
        operation!(OP = "masked_scatter");
        launch::check_bool_mask(OP, mask)?;
        fail_if!(source.dtype() != self.dtype();
            dtype(OP, source.dtype()), "the source has the type of the tensor, {}", self.dtype());
        let shape = broadcast_shapes(OP, &[self.shape(), mask.shape()])?;
        let (x, mask) = (self.broadcast_to(&shape)?, mask.broadcast_to(&shape)?);
        if x.numel() == 0 {
            return x.copy();
        }
        fail_if!(source.numel() == 0; shape(OP, [source]), "takes a source that is not empty");
        let source_index = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            let counts = mask.to_dtype(DType::U32)?.reshape([-1])?.contiguous()?;
            // The first true element has position 0.
            scan::cumsum_counts(&counts)?.to_dtype(DType::I32)?.sub(1)?.clamp(0, source.numel() as i64 - 1)?
        };
        let gathered = source.reshape([-1])?.index_select(0, &source_index)?.reshape(&shape[..])?;
        gathered.where_(&mask, &x)
    }
}
