//! Matrices of a product in the memory of a tensor.

use crate::backend::batched_matmul::MAX_BATCH_DIMS;
use crate::ops::matmul::last_two;
use crate::tensor::Tensor;

/// Extents or strides of the batch dimensions of a product, outermost first.
pub(super) type BatchDims = [usize; 3];
const _: () = assert!(size_of::<BatchDims>() == MAX_BATCH_DIMS * size_of::<usize>());

/// Batch of matrices in a tensor: offset and strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MatrixLayout {
    pub(super) offset: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
    pub(super) batch_strides: BatchDims,
}

impl MatrixLayout {
    /// Returns the transposed matrices.
    pub(super) fn transposed(self) -> Self {
        Self { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Reports whether rows of `extent` elements consist of aligned vectors of `width` neighbours.
    pub(super) fn has_vectors(self, width: usize, extent: usize) -> bool {
        width > 1
            && self.col_stride == 1
            && [self.offset, self.row_stride, extent]
                .iter()
                .chain(&self.batch_strides)
                .all(|n| n.is_multiple_of(width))
    }

    /// Reports whether matrices of these extents have contiguous rows or columns that do not overlap.
    pub(super) fn is_row_or_column_major(self, rows: usize, cols: usize) -> bool {
        let by_rows = |layout: Self, rows, cols| {
            (layout.col_stride == 1 || cols == 1) && (layout.row_stride >= cols || rows == 1)
        };
        by_rows(self, rows, cols) || by_rows(self.transposed(), cols, rows)
    }

    /// Reports whether all matrices of a batch are the same number of elements apart.
    pub(super) fn is_uniform(self, batch: BatchDims) -> bool {
        let mut inner: Option<(usize, usize)> = None;
        for (extent, stride) in batch.into_iter().zip(self.batch_strides).rev().filter(|(n, _)| *n > 1) {
            if inner.is_some_and(|(extent, step)| stride != extent * step) {
                return false;
            }
            inner = Some((extent, stride));
        }
        true
    }

    /// Returns the matrices of a tensor whose batch dimensions have these strides.
    pub(super) fn from_tensor(t: &Tensor, strides: &[usize]) -> Self {
        let (row_stride, col_stride) = last_two(t.strides());
        Self { offset: t.layout().offset(), row_stride, col_stride, batch_strides: align_dims(strides, 0) }
    }
}

/// Returns the dimensions of a batch, with `missing` for outer dimensions that it does not have.
pub(super) fn align_dims(dims: &[usize], missing: usize) -> BatchDims {
    let mut all = [missing; MAX_BATCH_DIMS];
    let inner = &dims[dims.len().saturating_sub(MAX_BATCH_DIMS)..];
    all[MAX_BATCH_DIMS - inner.len()..].copy_from_slice(inner);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_at_equal_distances_are_uniform() {
        let is_uniform = |batch_strides, batch| {
            MatrixLayout { offset: 0, row_stride: 1, col_stride: 1, batch_strides }.is_uniform(batch)
        };
        assert!(is_uniform([0, 0, 0], [1, 1, 1]));
        assert!(is_uniform([12, 4, 2], [5, 3, 2]));
        assert!(is_uniform([7, 0, 3], [1, 1, 4]));
        assert!(is_uniform([6, 9, 2], [5, 1, 3]));
        assert!(is_uniform([0, 0, 0], [2, 3, 4]));
        assert!(!is_uniform([12, 4, 2], [5, 3, 3]));
        assert!(!is_uniform([0, 0, 2], [2, 1, 4]));
    }
}
