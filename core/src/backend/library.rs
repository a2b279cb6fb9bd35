//! Operations that a vendor's library, or a backend's own kernels, may take over from the core.
//!
//! A backend that declines them is complete: the core then runs its portable kernels.

use super::{SegmentId, Slice};
use crate::dtype::DType;

/// Calls that a library supports, as far as they decide about memory and other kernels. Dry runs depend on
/// them, because the core's own kernels need scratch memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LibraryFeatures {
    /// Products of float matrices.
    pub matmul: bool,
    /// Batches of small 16-bit products with several batch dimensions (CUDA from sm_80 on).
    pub batched_matmul: bool,
    /// Products of 8-bit floats (CUDA from sm_89 on).
    pub f8_matmul: bool,
    /// Products with [`Epilogue::GeluGrad`] (CUDA on Hopper).
    pub gelu_grad_epilogue: bool,
    /// Convolutions from columns along the width (CUDA on Hopper).
    pub convolution: bool,
    /// All steps of a recurrent layer (CUDA on Hopper and on data-centre cards after it).
    pub recurrent: bool,
    /// Gradients of attention over long sequences in one pass, with sums in scratch memory: see
    /// [`AttentionExtents::one_pass_scratch`] (CUDA on Hopper).
    pub one_pass_attention: bool,
}

/// Operand of a library matrix product.
#[derive(Clone, Copy, Debug)]
pub struct MatrixOperand {
    /// Segment that contains the operand.
    pub segment: SegmentId,
    /// Byte offset of the first element: any multiple of the element size.
    pub offset: u64,
    /// Elements from one row to the next; 1 means that the matrix is stored transposed (column-major).
    pub row_stride: u64,
    /// Elements from one column to the next. One of the two strides is 1.
    pub col_stride: u64,
    /// Elements from one matrix of the batch to the next; 0 repeats one matrix.
    pub batch_stride: u64,
}

/// Number of rows per partial sum of [`Epilogue::GeluGrad`].
pub const GELU_GRAD_SUM_ROWS: usize = 128;

/// Work that a library product does on its result before the store. Slices are contiguous.
#[derive(Clone, Copy, Debug, Default)]
pub enum Epilogue {
    /// No additional work.
    #[default]
    None,
    /// Adds a bias of n values of c's dtype to each row.
    Bias(Slice),
    /// Adds a bias, writes the sum to `pre_activation`, and writes its GELU (tanh approximation) to c.
    GeluBias {
        /// Bias: n values of c's dtype.
        bias: Slice,
        /// Argument of GELU.
        pre_activation: MatrixOperand,
    },
    /// Multiplies the product by the derivative of GELU (tanh approximation) at x, and also writes the GELU
    /// of x. Both matrices have c's dtype and strides. Requires [`LibraryFeatures::gelu_grad_epilogue`].
    GeluGrad {
        /// Argument of GELU.
        x: MatrixOperand,
        /// GELU of x, written.
        gelu: MatrixOperand,
        /// Column sums of c before rounding, written: n f32 values for each block of [`GELU_GRAD_SUM_ROWS`]
        /// rows. The last block may have fewer rows.
        row_block_sums: Slice,
    },
    /// Writes the sums of a's rows over k: m values of a's dtype.
    RowSums(Slice),
    /// Multiplies a product of 8-bit floats by two f32 scales, one for a and one for b. Then adds a bias of n
    /// values of c's dtype.
    Scaled {
        /// Scales of a and of b; `None` means 1.
        scales: Option<[Slice; 2]>,
        /// Bias: n values of c's dtype, which has 16 bits.
        bias: Option<Slice>,
    },
}

/// Batched matrix product `c = a * b`: a is m x k, b is k x n, c is m x n. Sums accumulate in f32 (f64 for
/// f64).
#[derive(Clone, Copy, Debug)]
pub struct MatmulCall {
    /// Element type of a. b has the same type unless both are 8-bit floats.
    pub dtype: DType,
    /// Element type of b. The two 8-bit float types may be mixed.
    pub dtype_b: DType,
    /// Element type of c: that of a and b, f32 for 16-bit operands, or a wider float for 8-bit operands.
    pub dtype_out: DType,
    /// Rows of a and c.
    pub m: u64,
    /// Columns of b and c.
    pub n: u64,
    /// Columns of a, rows of b.
    pub k: u64,
    /// Number of matrices.
    pub batch: u64,
    /// Left operand.
    pub a: MatrixOperand,
    /// Right operand.
    pub b: MatrixOperand,
    /// Result; `col_stride` is 1.
    pub c: MatrixOperand,
    /// 0.0 overwrites c, 1.0 adds to it.
    pub beta: f32,
    /// Epilogue. Requires a batch of 1.
    pub epilogue: Epilogue,
}

impl MatmulCall {
    /// Reports whether the library supports the dtypes: equal floats, f32 from 16-bit floats, or 8-bit floats
    /// of which at least one is e4m3.
    #[must_use]
    pub fn has_supported_dtypes(&self) -> bool {
        if self.dtype.is_storage_only() {
            let types = [self.dtype, self.dtype_b];
            return types.contains(&DType::F8E4M3)
                && self.dtype_b.is_storage_only()
                && matches!(self.dtype_out, DType::F32 | DType::F16 | DType::BF16);
        }
        let widened = self.dtype.size() == 2 && self.dtype_out == DType::F32;
        self.dtype.is_float() && self.dtype_b == self.dtype && (self.dtype_out == self.dtype || widened)
    }

    /// Reports whether the library supports the epilogue, which needs rows aligned to 16 bytes. Tensor cores
    /// take 16-bit floats; f32 allows only a bias or row sums.
    #[must_use]
    pub fn supports_epilogue(&self) -> bool {
        if self.dtype.is_storage_only() || matches!(self.epilogue, Epilogue::Scaled { .. }) {
            return self.supports_fp8_scales();
        }
        let line = |o: &MatrixOperand| {
            (o.row_stride.max(o.col_stride) * self.dtype.size() as u64).is_multiple_of(16)
                && o.offset.is_multiple_of(16)
        };
        let aligned = || {
            [&self.a, &self.b, &self.c].into_iter().all(line)
                && self.n.is_multiple_of(16 / self.dtype.size() as u64)
                && self.m.is_multiple_of(16 / self.dtype.size() as u64)
        };
        let with_gelu = matches!(self.epilogue, Epilogue::GeluBias { .. } | Epilogue::GeluGrad { .. });
        let wide = self.dtype == DType::F32 && !with_gelu;
        match self.epilogue {
            Epilogue::None => true,
            Epilogue::GeluGrad { x, gelu, .. }
                if !(self.is_row_major_overwrite() && line(&x) && line(&gelu)) =>
            {
                false
            }
            // With results of another dtype, row sums take as long as a kernel of their own (docs/lab/2026-11.md).
            Epilogue::RowSums(_) if self.dtype_out != self.dtype => false,
            _ => {
                let narrow = self.dtype.size() == 2 && self.dtype.is_float();
                self.batch == 1 && (narrow || wide) && aligned()
            }
        }
    }

    /// Reports whether a and b are row-major and c is overwritten in their dtype.
    fn is_row_major_overwrite(&self) -> bool {
        [&self.a, &self.b].iter().all(|o| o.col_stride == 1)
            && self.dtype == self.dtype_b
            && self.dtype == self.dtype_out
            && self.beta == 0.0
    }

    /// Reports whether the library supports the scaled 8-bit product: row-major a, column-major b, rows
    /// aligned to 16 bytes.
    fn supports_fp8_scales(&self) -> bool {
        let Epilogue::Scaled { bias, .. } = self.epilogue else { return false };
        let line = |stride: u64, side: u64, o: &MatrixOperand| {
            side == 1 && stride >= self.k && stride.is_multiple_of(16) && o.offset.is_multiple_of(16)
        };
        self.dtype.is_storage_only()
            && self.batch == 1
            && self.beta == 0.0
            && [self.k, self.n].iter().all(|extent| extent.is_multiple_of(16))
            && line(self.a.row_stride, self.a.col_stride, &self.a)
            && line(self.b.col_stride, self.b.row_stride, &self.b)
            && self.c.offset.is_multiple_of(16)
            && (self.c.row_stride * self.dtype_out.size() as u64).is_multiple_of(16)
            && (bias.is_none() || self.dtype_out.size() == 2)
    }

    /// Reports whether each operand is row-major or column-major without overlap, as libraries require. A
    /// backend declines other layouts.
    #[must_use]
    pub fn is_row_or_column_major(&self) -> bool {
        let lines = |o: &MatrixOperand, rows: u64, cols: u64| {
            let by_rows = (o.col_stride == 1 || cols == 1) && (o.row_stride >= cols || rows == 1);
            let by_columns = (o.row_stride == 1 || rows == 1) && (o.col_stride >= rows || cols == 1);
            by_rows || by_columns
        };
        lines(&self.a, self.m, self.k) && lines(&self.b, self.k, self.n) && lines(&self.c, self.m, self.n)
    }
}

/// Operand of [`AttentionCall`]: contiguous rows of a head's elements.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOperand {
    /// Segment that contains the operand.
    pub segment: SegmentId,
    /// Byte offset of the first element: any multiple of the element size.
    pub offset: u64,
    /// Elements from one entry of the batch to the next.
    pub batch_stride: u64,
    /// Elements from one head to the next.
    pub head_stride: u64,
    /// Elements from one query or key to the next.
    pub row_stride: u64,
}

/// Mask of [`AttentionCall`]: a bool mask keeps weights where true, and a float mask is added to the scores.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// Element type: bool or a float.
    pub dtype: DType,
    /// Segment that contains the operand.
    pub segment: SegmentId,
    /// Byte offset of the first element: any multiple of the element size.
    pub offset: u64,
    /// Strides in elements along batch, heads, queries and keys; 0 broadcasts.
    pub strides: [u64; 4],
}

/// Dropout of [`AttentionCall`]. Each weight uses 16 bits of Philox 4x32-10. Let h count the heads of all
/// batches. The weight of query i and key j uses counter \[offset, offset, h · queries + i, j / 8\] and word
/// j / 2 % 4. An odd j uses the upper half of that word, an even j the lower half.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDropout {
    /// Four words: two of the generator's offset, then two of its seed.
    pub philox_state: Slice,
    /// Threshold below which the 16 bits drop a weight.
    pub threshold: u32,
    /// Factor of the weights that are kept.
    pub keep_scale: f32,
}

/// Attention `softmax(scale · q kᵀ + mask) · v` for each head, or its gradients. Query i attends to keys i -
/// `window_left` to i + `window_right`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall {
    /// Element type of everything but `lse` and the scratch memory.
    pub dtype: DType,
    /// Batch size.
    pub batch: u64,
    /// Heads of q and out.
    pub heads: u64,
    /// Heads of k and v. Each is shared by the same number of consecutive heads of q (grouped-query
    /// attention).
    pub kv_heads: u64,
    /// Queries per head.
    pub queries: u64,
    /// Keys per head.
    pub keys: u64,
    /// Elements per row of q, k, v and out.
    pub head_dim: u64,
    /// Number of keys before its own position that a query attends to; at most 2^30.
    pub window_left: u64,
    /// Number of keys after its own position that a query attends to; at most 2^30.
    pub window_right: u64,
    /// Factor of the scores.
    pub scale: f32,
    /// Queries.
    pub q: AttentionOperand,
    /// Keys.
    pub k: AttentionOperand,
    /// Values.
    pub v: AttentionOperand,
    /// Result: written forward, read backward. A query that attends to no key has a row of zeros.
    pub out: AttentionOperand,
    /// Logarithm of each query's sum of exponentials, 0 if it attends to no key: f32 \[batch, heads,
    /// queries\]. Written forward, read backward.
    pub lse: Slice,
    /// Mask, if any.
    pub mask: Option<AttentionMask>,
    /// Dropout, if any.
    pub dropout: Option<AttentionDropout>,
    /// If true, gradients will be requested; a backend may start to compile their kernels.
    pub requires_grad: bool,
    /// Gradient operands of a backward call.
    pub backward: Option<AttentionGradients>,
}

/// Gradient operands of a backward [`AttentionCall`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionGradients {
    /// Gradient of the result, read.
    pub out: AttentionOperand,
    /// Gradient of the queries, written.
    pub q: AttentionOperand,
    /// Gradient of the keys, written.
    pub k: AttentionOperand,
    /// Gradient of the values, written.
    pub v: AttentionOperand,
    /// Scratch memory: twice the size of `lse`, or what [`AttentionExtents::one_pass_scratch`] requests.
    pub scratch: Slice,
    /// Optional sums of the gradients over blocks of [`ROWS_PER_SUM`](Self::ROWS_PER_SUM) rows: f32 \[batch,
    /// blocks of rows, heads of q, k and v, elements\]. Requires q, k and v of one length.
    pub grad_sums: Option<Slice>,
}

impl AttentionGradients {
    /// Number of rows per sum in `grad_sums`.
    pub const ROWS_PER_SUM: u64 = 64;
}

/// Sizes of an [`AttentionCall`] that decide about its amount of work and its scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionExtents {
    /// Batch size.
    pub batch: u64,
    /// Heads of q, and those of k and v.
    pub heads: [u64; 2],
    /// Queries per head.
    pub queries: u64,
    /// Keys per head.
    pub keys: u64,
    /// Elements per row.
    pub head_dim: u64,
    /// Numbers of keys before and after its own position that a query attends to; at most 2^30.
    pub window: [u64; 2],
}

impl AttentionExtents {
    /// Queries of a tile of the pass that [`one_pass_scratch`](Self::one_pass_scratch) describes.
    pub const TILE_QUERIES: u64 = 64;
    /// Keys of a block of that pass.
    pub const BLOCK_KEYS: u64 = 192;

    /// Returns the number of pairs of a query and a key that it attends to, in one head.
    #[must_use]
    pub fn visible_pairs(&self) -> f64 {
        // Query i attends to the existing keys from i - left to i + right.
        let (n, m) = (self.queries as f64, self.keys as f64);
        let [left, right] = self.window.map(|side| side as f64);
        let below = |bound: f64| {
            // Number of pairs with key - query < bound: the sum of min(max(bound + i, 0), m) over the
            // queries.
            let first = (-bound).clamp(0.0, n);
            let full = (m - bound).clamp(first, n);
            (bound + first + bound + full - 1.0) / 2.0 * (full - first) + (n - full) * m
        };
        (below(right + 1.0) - below(-left)).max(0.0)
    }

    /// Returns the bytes of scratch memory of a backward pass of a 16-bit call without mask and dropout that
    /// computes five products instead of seven, or `None` if the call should take two passes.
    ///
    /// Blocks of keys then add their parts of the gradient of the queries to f32 sums in scratch memory. That pays
    /// off if each block adds to many tiles of queries, and if many blocks share the device. See
    /// [`LibraryFeatures::one_pass_attention`].
    #[must_use]
    pub fn one_pass_scratch(&self) -> Option<u64> {
        const HEAD_DIM: u64 = 64;
        const MIN_QUERIES_PER_KEY: f64 = 2000.0;
        const MIN_BLOCKS: u64 = 132;
        let &Self { batch, heads: [heads, kv_heads], queries, keys, head_dim, .. } = self;
        let blocks = batch * kv_heads * keys.div_ceil(Self::BLOCK_KEYS);
        let pays_off = blocks >= MIN_BLOCKS && self.visible_pairs() >= MIN_QUERIES_PER_KEY * keys as f64;
        (head_dim == HEAD_DIM && pays_off).then(|| {
            let tiles = batch * heads * queries.div_ceil(Self::TILE_QUERIES);
            // A counter of blocks and one for each tile, in lines of 128 bytes, then for each tile two values for
            // each query and the sums.
            4 * ((1 + tiles).next_multiple_of(32) + tiles * Self::TILE_QUERIES * (2 + head_dim))
        })
    }
}

impl AttentionCall {
    /// Returns the sizes.
    #[must_use]
    pub fn extents(&self) -> AttentionExtents {
        AttentionExtents {
            batch: self.batch,
            heads: [self.heads, self.kv_heads],
            queries: self.queries,
            keys: self.keys,
            head_dim: self.head_dim,
            window: [self.window_left, self.window_right],
        }
    }

    /// Returns the number of floating-point operations by the usual convention: two products forward, five
    /// backward, over visible pairs only.
    #[must_use]
    pub fn flops(&self) -> f64 {
        let products = if self.backward.is_some() { 5.0 } else { 2.0 };
        products * 2.0 * (self.batch * self.heads * self.head_dim) as f64 * self.extents().visible_pairs()
    }

    /// Returns the bytes read and written if each operand is accessed once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let rows = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys;
        let times = if self.backward.is_some() { 2 } else { 1 };
        times * self.batch * rows * self.head_dim * self.dtype.size() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionExtents;

    fn extents(batch: u64, heads: [u64; 2], queries: u64, keys: u64, window: [u64; 2]) -> AttentionExtents {
        AttentionExtents { batch, heads, queries, keys, head_dim: 64, window }
    }

    const FAR: u64 = 1 << 30;

    #[test]
    fn pairs_are_those_inside_windows_and_keys() {
        let counted = |e: AttentionExtents| {
            let [left, right] = e.window;
            let sees = |i: u64, j: u64| j + left >= i && j <= i + right;
            (0..e.queries).map(|i| (0..e.keys).filter(|&j| sees(i, j)).count()).sum::<usize>() as f64
        };
        for (queries, keys) in [(7, 7), (5, 9), (9, 5), (1, 3)] {
            for window in [[FAR, 0], [FAR, FAR], [2, 1], [0, 0], [FAR, 4]] {
                let extents = extents(1, [1, 1], queries, keys, window);
                assert_eq!(extents.visible_pairs(), counted(extents), "{extents:?}");
            }
        }
    }

    #[test]
    fn one_pass_is_for_long_sequences_of_many_heads() {
        let causal =
            |batch, heads, length| extents(batch, heads, length, length, [FAR, 0]).one_pass_scratch();
        // 3,072 tiles of 64 queries, which have one counter, two values for each query, and 64 sums.
        assert_eq!(causal(1, [12, 12], 16_384), Some(4 * (3104 + 3072 * 64 * 66)));
        assert_eq!(causal(1, [12, 6], 16_384), causal(1, [12, 12], 16_384));
        assert!(causal(1, [12, 12], 4096).is_some() && causal(8, [12, 12], 1024).is_none());
        // Few blocks, short windows, larger heads.
        assert_eq!(causal(1, [1, 1], 16_384), None);
        assert_eq!(extents(1, [12, 12], 16_384, 16_384, [1024, 0]).one_pass_scratch(), None);
        let wide = AttentionExtents { head_dim: 128, ..extents(1, [12, 12], 16_384, 16_384, [FAR, 0]) };
        assert_eq!(wide.one_pass_scratch(), None);
        assert!(extents(1, [12, 12], 2048, 2048, [FAR, FAR]).one_pass_scratch().is_some());
    }
}
