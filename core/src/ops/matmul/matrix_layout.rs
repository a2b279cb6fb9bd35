//! Matrices of a product in the memory of a tensor.

use super::{last_two, outer_and_inner};
use crate::tensor::Tensor;

/// Batch of matrices in a tensor: offset and strides in elements, with at most two batch dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MatrixLayout {
    pub(super) offset: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
    pub(super) outer_stride: usize,
    pub(super) inner_stride: usize,
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
            && [self.offset, self.row_stride, self.outer_stride, self.inner_stride, extent]
                .iter()
                .all(|n| n.is_multiple_of(width))
    }

    /// Returns the matrices of a tensor whose batch dimensions have these strides.
    pub(super) fn from_tensor(t: &Tensor, steps: &[usize]) -> Self {
        let (row, col) = last_two(t.strides());
        let (outer, inner) = outer_and_inner(steps, 0);
        Self {
            offset: t.layout().offset(),
            row_stride: row,
            col_stride: col,
            outer_stride: outer,
            inner_stride: inner,
        }
    }
}
