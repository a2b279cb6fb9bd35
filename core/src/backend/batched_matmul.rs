//! Batches of matrix products with several batch dimensions, for a backend's own kernels.
//!
//! A vendor's library takes one stride between the matrices of an operand. These calls have a stride for each of three
//! batch dimensions, so operands that broadcast or are transposed need no copies. Kernels for them pay for small
//! matrices, whose time is that of memory.

use super::SegmentId;
use crate::dtype::DType;

/// Largest number of batch dimensions of a call.
pub const MAX_BATCH_DIMS: usize = 3;

/// Operand of a [`BatchedMatmulCall`].
#[derive(Clone, Copy, Debug)]
pub struct BatchedOperand {
    /// Segment that contains the operand.
    pub segment: SegmentId,
    /// Byte offset of the first element: any multiple of the element size.
    pub offset: u64,
    /// Elements from one row to the next.
    pub row_stride: u64,
    /// Elements from one column to the next.
    pub col_stride: u64,
    /// Elements from one matrix to the next, for each batch dimension. 0 repeats a matrix of a or b, and sums the
    /// matrices of c.
    pub batch_strides: [u64; MAX_BATCH_DIMS],
}

/// Products `c = a * b` of batches: a is m x k, b is k x n, c is m x n. Sums accumulate in f32.
#[derive(Clone, Copy, Debug)]
pub struct BatchedMatmulCall {
    /// Element type of a and b: f16 or bf16.
    pub dtype: DType,
    /// Element type of c: that of a and b, or f32.
    pub dtype_out: DType,
    /// Rows of a and c.
    pub m: u64,
    /// Columns of b and c.
    pub n: u64,
    /// Columns of a, rows of b.
    pub k: u64,
    /// Extents of the batch dimensions, outermost first; 1 if there are fewer.
    pub batch: [u64; MAX_BATCH_DIMS],
    /// Left operand.
    pub a: BatchedOperand,
    /// Right operand.
    pub b: BatchedOperand,
    /// Result; `col_stride` is 1. A dimension with a stride of 0 is summed, in order.
    pub c: BatchedOperand,
    /// If true, the products are added to c.
    pub accumulate: bool,
}

/// Partition of a [`BatchedMatmulCall`] over thread blocks, and over the warps of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchedMatmulTiling {
    /// Rows and columns of c that a block computes.
    pub rows: u32,
    /// Columns of c that a block computes.
    pub cols: u32,
    /// Terms of the sums in one stage.
    pub depth: u32,
    /// Warps that split the rows and the columns, and groups of warps that split the sums.
    pub warps: [u32; 3],
    /// Stages in shared memory.
    pub stages: u32,
}

/// Tile with the most blocks.
const SMALLEST_TILE: BatchedMatmulTiling = BatchedMatmulTiling::new([16, 16], 256, [1, 1, 4]);
/// Terms of the sum in one instruction.
const TERMS: u64 = 16;
/// Most stages in shared memory.
const MAX_STAGES: u64 = 3;

// Rates of the cost model, which are those of an H100. Other cards differ in all of them alike.

/// Multiprocessors. With fewer blocks, a call has a part of the rates below.
const UNITS: f64 = 132.0;
/// Bytes of device memory for each nanosecond, and bytes that blocks load from the second cache.
const MEMORY_RATE: f64 = 2400.0;
const CACHE_RATE: f64 = 4000.0;
/// Floating-point operations of the kernel and of a library's kernels, for each nanosecond.
const KERNEL_FLOPS: f64 = 200_000.0;
const LIBRARY_FLOPS: f64 = 600_000.0;
/// Part of the loads and of the arithmetic that does not overlap with other work.
const OVERLAP: f64 = 0.1;
/// Nanoseconds from one launch to the next.
const LAUNCH_NS: f64 = 2500.0;
/// Nanoseconds that a kernel must save, because each variant must be compiled at its first use.
const MIN_SAVED_NS: f64 = 2000.0;
/// Bytes for each nanosecond of a library's product of matrices with at most this number of multiplications, and of
/// larger ones. Measured on an H100: 63 to 436 GB/s for matrices of 16 and 64 rows.
const LIBRARY_SMALL_RATE: f64 = 500.0;
const LIBRARY_SMALL_PRODUCT: u64 = 1 << 20;
const LIBRARY_RATE: f64 = 2600.0;

impl BatchedMatmulTiling {
    /// Tiles among which the cost model chooses. Calls have at most their depth and their stages.
    pub const ALL: [Self; 9] = [
        Self::new([64, 64], 64, [2, 2, 1]),
        Self::new([16, 256], 32, [1, 4, 1]),
        Self::new([256, 16], 32, [4, 1, 1]),
        SMALLEST_TILE,
        Self::new([32, 32], 128, [2, 2, 1]),
        Self::new([16, 64], 128, [1, 4, 1]),
        Self::new([64, 16], 128, [4, 1, 1]),
        Self::new([64, 128], 32, [2, 2, 1]),
        Self::new([128, 64], 32, [2, 2, 1]),
    ];

    const fn new([rows, cols]: [u32; 2], depth: u32, warps: [u32; 3]) -> Self {
        Self { rows, cols, depth, warps, stages: MAX_STAGES as u32 }
    }

    /// Returns the bytes of shared memory: the stages, or the sums of all warps in f32. `mn_major` says whether lines
    /// of a and of b run along the rows and columns of c.
    #[must_use]
    pub fn shared_bytes(&self, mn_major: [bool; 2]) -> u32 {
        let tile = |extent: u32, across: bool| {
            let (lines, length) = if across { (self.depth, extent) } else { (extent, self.depth) };
            // Lines have a padding of 16 bytes.
            lines * (length * 2 + 16)
        };
        let stages = self.stages * (tile(self.rows, mn_major[0]) + tile(self.cols, mn_major[1]));
        stages.max(self.warps[2] * self.rows * (self.cols + 8) * 4)
    }

    /// Adapts the depth and the stages to a call.
    fn for_call(self, call: &BatchedMatmulCall) -> Self {
        let least = u64::from(self.warps[2]) * TERMS;
        let depth = u64::from(self.depth).min(call.k.next_power_of_two().max(least));
        let steps = call.k.div_ceil(depth).saturating_mul(call.terms());
        Self { depth: depth as u32, stages: steps.min(MAX_STAGES) as u32, ..self }
    }
}

impl BatchedMatmulCall {
    /// Returns the number of matrices that are added for each matrix of c.
    fn terms(&self) -> u64 {
        let summed = self.batch.iter().zip(self.c.batch_strides).filter(|(_, stride)| *stride == 0);
        summed.map(|(extent, _)| extent).product()
    }

    /// Returns the number of matrices of c.
    fn results(&self) -> u64 {
        self.batch.iter().product::<u64>() / self.terms().max(1)
    }

    /// Reports whether lines of a and of b run along the rows and columns of c: neighbours in memory are in the next
    /// row of a, or the next column of b. Returns `None` if neither rows nor columns are contiguous.
    #[must_use]
    pub fn mn_major(&self) -> Option<[bool; 2]> {
        let across = |line_stride: u64, sum_stride: u64, extent: u64| match (line_stride, sum_stride) {
            (_, 1) => Some(false),
            (1, _) => Some(true),
            // The stride of a dimension of one element has no meaning.
            _ if self.k == 1 => Some(false),
            _ if extent == 1 => Some(true),
            _ => None,
        };
        Some([
            across(self.a.row_stride, self.a.col_stride, self.m)?,
            across(self.b.col_stride, self.b.row_stride, self.n)?,
        ])
    }

    /// Returns the elements between lines of a and of b.
    #[must_use]
    pub fn line_strides(&self, [a_across, b_across]: [bool; 2]) -> [u64; 2] {
        let a = if a_across { self.a.col_stride } else { self.a.row_stride };
        [a, if b_across { self.b.row_stride } else { self.b.col_stride }]
    }

    /// Returns the partition for tensor cores; `None` if the types or layouts are not supported. Depends on no card,
    /// because dry runs need the same answer.
    #[must_use]
    pub fn tiling(&self) -> Option<BatchedMatmulTiling> {
        self.choose_tiling().map(|(tiling, _)| tiling)
    }

    /// Reports whether a kernel supports the call, and saves time compared with `library` nanoseconds.
    #[must_use]
    pub fn is_faster_than(&self, library: f64) -> bool {
        self.choose_tiling().is_some_and(|(_, time)| time + MIN_SAVED_NS <= library)
    }

    fn choose_tiling(&self) -> Option<(BatchedMatmulTiling, f64)> {
        if !self.is_supported() {
            return None;
        }
        let tilings = BatchedMatmulTiling::ALL.into_iter().map(|tile| tile.for_call(self));
        tilings
            .map(|tiling| (tiling, self.estimate_tile_time(&tiling)))
            .min_by(|(_, time), (_, other)| time.total_cmp(other))
    }

    /// Reports whether a kernel can load a and b in vectors of 16 bytes and store c by rows.
    fn is_supported(&self) -> bool {
        let Some(across) = self.mn_major() else { return false };
        let halves = matches!(self.dtype, DType::F16 | DType::BF16);
        let vectors = |operand: &BatchedOperand, stride: u64, lines: u64| {
            let batch = self.batch.iter().zip(operand.batch_strides);
            operand.offset.is_multiple_of(16)
                && (lines == 1 || stride.is_multiple_of(8))
                && batch.into_iter().all(|(extent, stride)| *extent == 1 || stride.is_multiple_of(8))
        };
        let [a_line, b_line] = self.line_strides(across);
        let [a_lines, b_lines] =
            [if across[0] { self.k } else { self.m }, if across[1] { self.k } else { self.n }];
        let sizes = [self.m, self.n, self.k];
        let is_indexed = |extent: &u64| (1..1 << 30).contains(extent);
        let matrices = self.batch.iter().try_fold(1_u64, |product, extent| product.checked_mul(*extent));
        let elements = sizes.iter().try_fold(matrices.unwrap_or(0), |product, x| product.checked_mul(*x));
        halves
            && (self.dtype_out == self.dtype || self.dtype_out == DType::F32)
            && sizes.iter().all(is_indexed)
            && matrices.is_some_and(|matrices| is_indexed(&matrices))
            && elements.is_some_and(|elements| elements < 1 << 56)
            && (self.c.col_stride == 1 || self.n == 1)
            && (self.c.row_stride >= self.n || self.m == 1)
            && vectors(&self.a, a_line, a_lines)
            && vectors(&self.b, b_line, b_lines)
            && self.blocks(&SMALLEST_TILE) < 1 << 31
    }

    /// Returns the number of thread blocks.
    #[must_use]
    pub fn blocks(&self, tiling: &BatchedMatmulTiling) -> u64 {
        let tiles = self.m.div_ceil(tiling.rows.into()) * self.n.div_ceil(tiling.cols.into());
        tiles.saturating_mul(self.results())
    }

    /// Estimates nanoseconds: the longest of device memory, the second cache and arithmetic, and a part of the others.
    fn estimate_tile_time(&self, tiling: &BatchedMatmulTiling) -> f64 {
        let blocks = self.blocks(tiling) as f64;
        let share = (blocks / UNITS).min(1.0);
        let [rows, cols] = [tiling.rows, tiling.cols].map(u64::from);
        let terms = (self.k * self.terms()) as f64;
        let loaded = blocks * (rows.min(self.m) + cols.min(self.n)) as f64 * terms * 2.0;
        let steps = self.k.next_multiple_of(TERMS * u64::from(tiling.warps[2])) * self.terms();
        let flops = blocks * (2 * rows * cols) as f64 * steps as f64;
        let (loads, sums) = (loaded / (CACHE_RATE * share), flops / (KERNEL_FLOPS * share));
        let memory = self.bytes() as f64 / MEMORY_RATE;
        // Of tiles that memory bounds alike, the one with the least other work is faster.
        LAUNCH_NS + memory.max(loads).max(sums) + OVERLAP * (loads + sums)
    }

    /// Estimates the nanoseconds of a vendor's library for this product: the launches that it takes, and the copies of
    /// `copied` bytes before them.
    #[must_use]
    pub fn estimate_library_time(&self, launches: u64, copied: u64) -> f64 {
        let is_small = self.m * self.n * self.k <= LIBRARY_SMALL_PRODUCT;
        let rate = if is_small { LIBRARY_SMALL_RATE } else { LIBRARY_RATE };
        let product = (self.bytes() as f64 / rate).max(self.flops() as f64 / LIBRARY_FLOPS);
        copy_time(copied) + LAUNCH_NS * launches as f64 + product
    }

    /// Returns the number of floating-point operations.
    #[must_use]
    pub fn flops(&self) -> u64 {
        2 * self.m * self.n * self.k * self.batch.iter().product::<u64>()
    }

    /// Returns the bytes read and written if each element of a, b and c is accessed once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let matrices = |operand: &BatchedOperand| {
            let dims = self.batch.iter().zip(operand.batch_strides);
            dims.filter(|(_, stride)| *stride != 0).map(|(extent, _)| extent).product::<u64>()
        };
        let read = matrices(&self.a) * self.m * self.k + matrices(&self.b) * self.k * self.n;
        let times = if self.accumulate { 2 } else { 1 };
        let written = times * matrices(&self.c) * self.m * self.n;
        read * self.dtype.size() as u64 + written * self.dtype_out.size() as u64
    }
}

/// Estimates the nanoseconds that copies take which write `copied` bytes.
pub(crate) fn copy_time(copied: u64) -> f64 {
    if copied == 0 { 0.0 } else { LAUNCH_NS + 2.0 * copied as f64 / MEMORY_RATE }
}

/// Nanoseconds from one launch of a library's product to the next.
pub(crate) fn launches_time(launches: u64) -> f64 {
    LAUNCH_NS * launches as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(row_stride: u64, col_stride: u64, batch_strides: [u64; 3]) -> BatchedOperand {
        BatchedOperand { segment: SegmentId(0), offset: 0, row_stride, col_stride, batch_strides }
    }

    fn call([m, n, k]: [u64; 3], batch: [u64; 3]) -> BatchedMatmulCall {
        let strides = |size: u64| [size * batch[1] * batch[2], size * batch[2], size];
        BatchedMatmulCall {
            dtype: DType::BF16,
            dtype_out: DType::BF16,
            m,
            n,
            k,
            batch,
            a: operand(k, 1, strides(m * k)),
            b: operand(n, 1, strides(k * n)),
            c: operand(n, 1, strides(m * n)),
            accumulate: false,
        }
    }

    #[test]
    fn tiles_fit_every_card_and_cover_their_warps() {
        for tile in BatchedMatmulTiling::ALL {
            assert!(
                tile.rows % (16 * tile.warps[0]) == 0 && tile.cols % (16 * tile.warps[1]) == 0,
                "{tile:?}"
            );
            assert!(tile.depth % (16 * tile.warps[2]) == 0, "{tile:?}");
            for mn_major in [[false, false], [false, true], [true, false], [true, true]] {
                // The limit of sm_86 and sm_89.
                assert!(tile.shared_bytes(mn_major) <= 99 << 10, "{tile:?}");
            }
        }
    }

    #[test]
    fn tiles_follow_the_shape_of_the_product() {
        let tile = |sizes, batch| {
            let tiling = call(sizes, batch).tiling();
            tiling.map(|t| [t.rows, t.cols, t.depth, t.stages])
        };
        assert_eq!(tile([64, 64, 64], [8, 16, 16]), Some([64, 64, 64, 1]));
        assert_eq!(tile([16, 4096, 16], [8, 16, 1]), Some([16, 256, 16, 1]));
        assert_eq!(tile([4096, 16, 16], [8, 16, 1]), Some([256, 16, 16, 1]));
        assert_eq!(tile([16, 16, 4096], [8, 16, 1]), Some([16, 16, 256, 3]));
    }

    #[test]
    fn summed_dimensions_are_terms_of_fewer_results() {
        let mut summed = call([64, 64, 64], [8, 16, 16]);
        summed.c.batch_strides[2] = 0;
        assert_eq!((summed.terms(), summed.results()), (16, 128));
        assert_eq!(summed.tiling().map(|t| t.stages), Some(3));
        assert_eq!(summed.bytes(), 2 * 4096 * (2 * 2048 + 128));
    }

    #[test]
    fn layouts_without_vectors_are_declined() {
        let plain = call([64, 64, 64], [1, 4, 4]);
        assert!(plain.tiling().is_some());
        let declined = |change: &dyn Fn(&mut BatchedMatmulCall)| {
            let mut call = plain;
            change(&mut call);
            call.tiling().is_none()
        };
        assert!(declined(&|c| c.dtype = DType::F32));
        assert!(declined(&|c| c.dtype_out = DType::F16));
        assert!(declined(&|c| c.a.row_stride = 65));
        assert!(declined(&|c| c.a.col_stride = 2));
        assert!(declined(&|c| c.b.offset = 8));
        assert!(declined(&|c| c.b.batch_strides[1] = 4));
        assert!(declined(&|c| c.c.row_stride = 63));
        assert!(declined(&|c| c.k = 0));
        assert!(declined(&|c| c.batch[0] = 1 << 40));
        // Strides of dimensions of one element do not matter.
        assert!(!declined(&|c| c.b.batch_strides[0] = 3));
    }

    #[test]
    fn small_matrices_are_faster_than_in_the_library_and_large_ones_are_not() {
        let is_faster = |sizes, batch, launches, copied| {
            let call = call(sizes, batch);
            call.is_faster_than(call.estimate_library_time(launches, copied))
        };
        assert!(is_faster([64, 64, 64], [8, 16, 16], 1, 0));
        assert!(is_faster([16, 4096, 16], [8, 16, 1], 8, 0));
        assert!(is_faster([16, 16, 4096], [8, 16, 1], 8, 0));
        assert!(!is_faster([8, 8, 8], [1, 1, 4], 1, 0), "not worth a kernel");
        assert!(!is_faster([1024, 1024, 1024], [1, 1, 16], 1, 0));
        assert!(!is_faster([1024, 1024, 64], [1, 1, 96], 1, 0));
        assert!(is_faster([1024, 1024, 64], [8, 1, 12], 1, 3 << 26));
    }
}
