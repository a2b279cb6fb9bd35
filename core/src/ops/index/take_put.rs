//! Copies of a tensor with a part of it replaced, and parts taken out by number: PyTorch's `*_scatter`, `take` and `put`, diagonals.

use crate::dtype::DType;
use crate::error::{Error, Result, fail, fail_if};
use crate::memory::{self, Tag};
use crate::ops::index::select;
use crate::ops::kernel::launch;
use crate::ops::reduce::scan;
use crate::tensor::layout::{broadcast_shapes, normalize_dim};
use crate::tensor::{Dims, Tensor};

/// A copy of `x` with `src` where `part` says.
#[track_caller]
fn copy_and_replace(
    op: &'static str,
    x: &Tensor,
    src: &Tensor,
    part: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let _op = memory::scope::enter_op(op);
    let out = x.copy()?;
    let place = part(&out)?;
    fail_if!(place.shape() != src.shape();
        shape(op, [place, src]), "the source has the shape of what it replaces");
    place.copy_(src)?;
    Ok(out)
}

impl Tensor {
    /// A copy with `src` in place of [`slice_dim`](Self::slice_dim) of the same arguments.
    ///
    /// # Errors
    /// As [`slice_dim`](Self::slice_dim); `src` has another shape; memory runs out.
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

    /// A copy with `src` in place of [`select`](Self::select) of the same arguments.
    ///
    /// # Errors
    /// As [`select`](Self::select); `src` has another shape; memory runs out.
    #[track_caller]
    pub fn select_scatter(&self, src: &Tensor, dim: isize, index: isize) -> Result<Tensor> {
        copy_and_replace("select_scatter", self, src, |x| x.select(dim, index))
    }

    /// A copy with `src` in place of [`diagonal`](Self::diagonal) of the same arguments.
    ///
    /// # Errors
    /// As [`diagonal`](Self::diagonal); `src` has another shape; memory runs out.
    #[track_caller]
    pub fn diagonal_scatter(&self, src: &Tensor, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        copy_and_replace("diagonal_scatter", self, src, |x| x.diagonal(offset, dim1, dim2))
    }

    /// Zeros with the last dimension along the diagonal of the dimensions `dim1` and `dim2` of the result.
    ///
    /// # Errors
    /// There are no dimensions; `dim1` and `dim2` are the same, or out of range; memory runs out.
    #[track_caller]
    pub fn diag_embed(&self, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        const OP: &str = "diag_embed";
        let _op = memory::scope::enter_op(OP);
        let Some((&n, before)) = self.shape().split_last() else {
            return Err(Error::shape(OP, "takes at least one dimension", &[self.shape()]));
        };
        let side = n.checked_add(offset.unsigned_abs()).filter(|&side| side <= u32::MAX as usize);
        let Some(side) = side else {
            fail!(argument(OP), "offset {offset} leaves every matrix that a tensor can hold");
        };
        let shape = [before, &[side, side]].concat();
        let out = Tensor::zeros(&shape, self.dtype(), self.device())?;
        out.diagonal(offset, -2, -1)?.copy_(self)?;
        out.movedim(&[-2, -1], &[dim1, dim2])
    }

    /// Of a vector the matrix with it along a diagonal, of a matrix a copy of that diagonal.
    ///
    /// # Errors
    /// There are neither one nor two dimensions; memory runs out.
    #[track_caller]
    pub fn diag(&self, diagonal: isize) -> Result<Tensor> {
        match self.rank() {
            1 => self.diag_embed(diagonal, 0, 1),
            2 => self.diagonal(diagonal, 0, 1)?.copy(),
            _ => Err(Error::shape("diag", "takes a vector or a matrix", &[self.shape()])),
        }
    }

    /// The elements whose numbers, row by row, `index` names, in its shape; negative ones count from the end.
    ///
    /// An index outside its range names nothing: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// As [`index_select`](Self::index_select).
    #[track_caller]
    pub fn take(&self, index: &Tensor) -> Result<Tensor> {
        let _op = memory::scope::enter_op("take");
        let line = self.reshape([-1])?;
        let rows = select::linearize_index("take", index, line.numel(), None, true)?;
        line.index_select(0, &rows)?.reshape(index.shape())
    }

    /// A copy with the elements of `source` at the numbers, row by row, that `index` names, which are as many: put there, or added
    /// with `accumulate`.
    ///
    /// An index outside its range names nothing: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// As [`index_put`](Self::index_put).
    #[track_caller]
    pub fn put(&self, index: &Tensor, source: &Tensor, accumulate: bool) -> Result<Tensor> {
        let _op = memory::scope::enter_op("put");
        fail_if!(index.numel() != source.numel();
            shape("put", [index, source]), "takes as many elements as numbers of them");
        let (index, source) = (index.reshape([-1])?, source.reshape([-1])?);
        self.reshape([-1])?.index_put(&[Some(&index)], &source, accumulate)?.reshape(self.shape())
    }

    /// A copy with the lines of `source` along a dimension at the places that `index` (of one dimension) names.
    ///
    /// An index outside its range names nothing: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// As [`scatter`](Self::scatter); `index` has more than one dimension, or not as many elements as `source` lines.
    #[track_caller]
    pub fn index_copy(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        const OP: &str = "index_copy";
        let _op = memory::scope::enter_op(OP);
        let d = normalize_dim(OP, dim, self.rank())?;
        let lines = source.shape().get(d).copied().unwrap_or(1);
        fail_if!(index.rank() > 1 || index.numel() != lines || source.rank() != self.rank();
            shape(OP, [self, index, source]),
            "takes an index of one dimension, and a source of this rank with a line for each");
        if self.rank() == 0 {
            return self.reshape([1])?.index_copy(0, index, &source.reshape([1])?)?.reshape([0usize; 0]);
        }
        let mut shape: Dims = std::iter::repeat_n(1, self.rank()).collect();
        shape[d] = lines;
        self.scatter(dim, &index.reshape(&shape[..])?.broadcast_to(source.shape())?, source)
    }

    /// A copy with the elements of `source`, in order, where `mask` (bool; both broadcast) holds. That `source` has enough of them is not checked: its last one
    /// is taken for those that are missing.
    ///
    /// # Errors
    /// `mask` is no bool; the shapes do not broadcast; `source` is empty, or of another type; memory runs out.
    #[track_caller]
    pub fn masked_scatter(&self, mask: &Tensor, source: &Tensor) -> Result<Tensor> {
        const OP: &str = "masked_scatter";
        let _op = memory::scope::enter_op(OP);
        launch::check_bool_mask(OP, mask)?;
        fail_if!(source.dtype() != self.dtype();
            dtype(OP, source.dtype()), "the source has the type of the tensor, {}", self.dtype());
        let shape = broadcast_shapes(OP, &[self.shape(), mask.shape()])?;
        let (x, mask) = (self.broadcast_to(&shape)?, mask.broadcast_to(&shape)?);
        if x.numel() == 0 {
            return x.copy();
        }
        fail_if!(source.numel() == 0; shape(OP, [source]), "takes a source that is not empty");
        let place = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            let counts = mask.to_dtype(DType::U32)?.reshape([-1])?.contiguous()?;
            // The first one that holds has place 0.
            scan::cumsum_counts(&counts)?.to_dtype(DType::I32)?.sub(1)?.clamp(0, source.numel() as i64 - 1)?
        };
        let picked = source.reshape([-1])?.index_select(0, &place)?.reshape(&shape[..])?;
        picked.where_(&mask, &x)
    }
}
