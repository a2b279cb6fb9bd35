//! Convolutions that a backend's own kernels compute from columns along the width.

use super::Slice;
use crate::dtype::DType;

/// Convolution of 16-bit floats in three dimensions, or one of its gradients, as an implicit matrix product. There is
/// one group. Images of two dimensions have a depth of 1. The columns contain the stride and the dilation along the
/// width.
///
/// Operands are contiguous, and begin at multiples of 16 bytes. Images are \[images, channels, depth, height, width\].
/// Columns along the width have one row of pixels for each tap of the filter's width: \[images, channels, filter width,
/// input depth, input height, output width\]. For a filter of width 1 and a stride of 1, they are the image.
///
/// Position (z, y, x) and tap (s, t, u) of the product read plane `z · stride + first_tap + tap_step · s` and line
/// `y · stride + first_tap + tap_step · t`, each with the numbers of its dimension, and pixel `x` of column `u`. Planes
/// and lines outside of the image are zero.
#[derive(Clone, Copy, Debug)]
pub struct ConvolutionCall {
    /// Element type of everything but the partial sums: f16 or bf16.
    pub dtype: DType,
    /// Number of images.
    pub images: u64,
    /// Channels of the columns.
    pub channels: u64,
    /// Depth and height of the images from which the columns are made.
    pub input: [u64; 2],
    /// Channels of the result, or of the output's gradient.
    pub rows: u64,
    /// Depth, height and width of the positions.
    pub output: [u64; 3],
    /// Depth, height and width of the filter, at most [`MAX_KERNEL`](Self::MAX_KERNEL).
    pub kernel: [u64; 3],
    /// Distance in planes and in lines from one position to the next, at most [`MAX_STRIDE`](Self::MAX_STRIDE).
    pub stride: [u64; 2],
    /// Plane and line of the first tap for position 0.
    pub first_tap: [i64; 2],
    /// Distance in planes and in lines from one tap to the next: the dilation, negative for mirrored taps.
    pub tap_step: [i64; 2],
    /// Columns along the width, read.
    pub columns: Slice,
    /// Product to compute, and its other operands.
    pub product: ConvolutionProduct,
}

/// Product of a [`ConvolutionCall`].
#[derive(Clone, Copy, Debug)]
pub enum ConvolutionProduct {
    /// Sums over taps and channels: the output, or the gradient of the input.
    Output {
        /// Weights \[taps, channels, row pitch\], where the pitch is the number of rows, rounded up to a multiple of
        /// [`ROW_ALIGNMENT`](ConvolutionCall::ROW_ALIGNMENT).
        weights: Slice,
        /// Bias: one value for each row.
        bias: Option<Slice>,
        /// Result, written: \[images, rows, output depth, output height, output width\].
        out: Slice,
    },
    /// Sums over images and positions: the gradient of the weights.
    WeightGrad {
        /// Gradient of the output, read: \[images, rows, output depth, output height, output width\].
        grad: Slice,
        /// Partial sums, written: f32 \[splits, rows, taps, channels\].
        partial: Slice,
        /// Number of ranges of positions with a sum of their own.
        splits: u64,
    },
}

/// Multiprocessors of the card for which [`ConvolutionCall::weight_grad_splits`] chooses: an H100. Dry runs need
/// a number that does not depend on the card.
const MULTIPROCESSORS: u64 = 132;
/// Limit in bytes of partial sums.
const MAX_PARTIAL_BYTES: u64 = 64 << 20;
/// Smallest number of pixels in a split.
const MIN_SPLIT_PIXELS: u64 = 2048;

impl ConvolutionCall {
    /// Largest extent of a filter.
    pub const MAX_KERNEL: u64 = 7;
    /// Largest stride, which is the copy engine's.
    pub const MAX_STRIDE: u64 = 8;
    /// Weights have rows in multiples of this number of elements, 16 bytes.
    pub const ROW_ALIGNMENT: u64 = 8;
    /// Positions of a tile of [`ConvolutionProduct::Output`].
    pub const TILE_POSITIONS: u64 = 256;
    /// Columns of a tile of [`ConvolutionProduct::WeightGrad`].
    pub const TILE_COLUMNS: u64 = 256;
    /// Positions in one stage of [`ConvolutionProduct::WeightGrad`].
    pub const STAGE_POSITIONS: u64 = 64;

    /// Returns the width of the blocks of pixels that cover the positions of a plane best. A block has `pixels` pixels,
    /// and is 16, 32 or 64 wide. Returns `None` if more than a quarter of the blocks' pixels lay outside.
    #[must_use]
    pub fn block_width([height, width]: [u64; 2], pixels: u64) -> Option<u64> {
        let covered = |block: u64| width.next_multiple_of(block) * height.next_multiple_of(pixels / block);
        let best = [64, 32, 16].into_iter().min_by_key(|&block| covered(block))?;
        (covered(best) * 3 <= width * height * 4).then_some(best)
    }

    /// Returns the number of rows of a tile for this number of rows.
    #[must_use]
    pub fn tile_rows(rows: u64) -> u64 {
        if rows <= 64 { 64 } else { 128 }
    }

    /// Returns the number of channels of a stage or of a panel of columns: 16, 32 or 64. Larger ones are faster,
    /// unless many of their channels do not exist.
    #[must_use]
    pub fn channel_block(channels: u64) -> u64 {
        let fits = |&block: &u64| channels.next_multiple_of(block) * 8 <= channels * 9;
        [64, 32].into_iter().find(fits).unwrap_or(16)
    }

    /// Returns the number of tiles of the weights' gradient.
    #[must_use]
    pub fn weight_grad_tiles(rows: u64, channels: u64, taps: u64) -> u64 {
        let block = Self::channel_block(channels);
        let panels = taps * channels.div_ceil(block);
        rows.div_ceil(Self::tile_rows(rows)) * panels.div_ceil(Self::TILE_COLUMNS / block)
    }

    /// Returns the number of splits of the weights' gradient that keeps all multiprocessors busy.
    #[must_use]
    pub fn weight_grad_splits(rows: u64, channels: u64, taps: u64, positions: u64) -> u64 {
        let tiles = Self::weight_grad_tiles(rows, channels, taps).max(1);
        let by_memory = MAX_PARTIAL_BYTES / (4 * rows * channels * taps).max(1);
        let most = (positions / MIN_SPLIT_PIXELS).min(by_memory).clamp(1, MULTIPROCESSORS);
        // Time in units of one tile over all positions, times a common multiple of the splits' numbers.
        let time = |splits: u64| (tiles * splits).div_ceil(MULTIPROCESSORS) as f64 / splits as f64;
        let best = (1..=most).map(time).fold(f64::INFINITY, f64::min);
        (1..=most).find(|&splits| time(splits) <= 1.05 * best).unwrap_or(1)
    }

    /// Reports whether the sizes, types and alignments are those that the kernels support.
    #[must_use]
    pub fn is_supported(&self) -> bool {
        let operands: [Slice; 2] = match self.product {
            ConvolutionProduct::Output { weights, out, .. } => [weights, out],
            ConvolutionProduct::WeightGrad { grad, partial, .. } => [grad, partial],
        };
        let pixels = match self.product {
            ConvolutionProduct::Output { .. } => Self::TILE_POSITIONS,
            ConvolutionProduct::WeightGrad { .. } => Self::STAGE_POSITIONS,
        };
        let positions = self.output.iter().fold(self.images, |all, &n| all.saturating_mul(n));
        // Each split has pixels.
        let splits = match self.product {
            ConvolutionProduct::Output { .. } => 1,
            ConvolutionProduct::WeightGrad { splits, .. } => splits,
        };
        let counts = [self.images, self.channels, self.rows, splits];
        let sides = self.input.iter().chain(&self.output);
        matches!(self.dtype, DType::F16 | DType::BF16)
            && counts.iter().chain(sides).all(|n| (1..1 << 20).contains(n))
            && self.input[0] * self.kernel[2] < 1 << 20
            && positions < 1 << 31
            && splits <= positions.div_ceil(Self::STAGE_POSITIONS)
            && self.output[2].is_multiple_of(8)
            && self.kernel.iter().all(|n| (1..=Self::MAX_KERNEL).contains(n))
            && self.stride.iter().all(|n| (1..=Self::MAX_STRIDE).contains(n))
            && self.first_tap.iter().all(|first| first.abs() < 1 << 20)
            && self.tap_step.iter().all(|step| (1..1 << 16).contains(&step.abs()))
            && Self::block_width([self.output[1], self.output[2]], pixels).is_some()
            && [self.columns].iter().chain(&operands).all(|slice| slice.offset.is_multiple_of(16))
    }

    /// Returns the number of floating-point operations.
    #[must_use]
    pub fn flops(&self) -> u64 {
        let products = self.output.iter().chain(&self.kernel).product::<u64>();
        2 * self.images * self.rows * self.channels * products
    }

    /// Returns the bytes read and written if each operand is accessed once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let size = self.dtype.size() as u64;
        let columns = self.channels * self.kernel[2] * self.input[0] * self.input[1] * self.output[2];
        let images = self.images * (columns + self.rows * self.output.iter().product::<u64>()) * size;
        let weights = self.rows * self.channels * self.kernel.iter().product::<u64>();
        images
            + match self.product {
                ConvolutionProduct::Output { .. } => weights * size,
                ConvolutionProduct::WeightGrad { splits, .. } => weights * splits * 4,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::ConvolutionCall;

    #[test]
    fn blocks_cover_the_positions_with_little_waste() {
        let width = |height, width| ConvolutionCall::block_width([height, width], 256);
        assert_eq!(width(64, 64), Some(64));
        assert_eq!(width(32, 32), Some(32));
        assert_eq!(width(16, 16), Some(16));
        assert_eq!(width(224, 224), Some(32));
        assert_eq!(width(56, 56), Some(64));
        assert_eq!(width(1, 256), None);
        assert_eq!(width(8, 8), None);
        // A quarter outside is allowed, and more is not.
        assert_eq!(width(16, 24), Some(32));
        assert_eq!(width(16, 23), None);
    }

    #[test]
    fn few_channels_use_small_blocks() {
        let blocks = [3, 16, 32, 48, 64, 96, 128, 250, 320].map(ConvolutionCall::channel_block);
        assert_eq!(blocks, [16, 16, 32, 16, 64, 32, 64, 64, 64]);
    }

    #[test]
    fn splits_fill_the_card_within_the_memory_limit() {
        let splits = |rows, channels, taps, positions| {
            ConvolutionCall::weight_grad_splits(rows, channels, taps, positions)
        };
        // Five tiles, and 26 splits of each: 130 blocks.
        assert_eq!(ConvolutionCall::weight_grad_tiles(128, 128, 9), 5);
        assert_eq!(splits(128, 128, 9, 1 << 18), 26);
        assert_eq!(ConvolutionCall::weight_grad_tiles(256, 256, 9), 18);
        assert_eq!(splits(256, 256, 9, 1 << 16), 7);
        // Of 128 possible splits, 122 are at most 5 % slower.
        assert_eq!(splits(128, 3, 9, 1 << 18), 122);
        // A tile for each multiprocessor or more needs no splits; few positions allow none.
        assert_eq!(splits(2048, 512, 9, 4096), 1);
        assert_eq!(splits(64, 64, 9, 1024), 1);
    }
}
