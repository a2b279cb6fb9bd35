//! Launch heuristics of memory-bound kernels: threads for each row, outstanding reads, and workgroups for
//! each sum. The constants were measured on an H100 (docs/lab/2026-11.md).

use crate::dtype::DType;
use crate::ops::kernel::launch::WORKGROUP_SIZE;

/// Number of workgroups that keep a large device busy.
const TARGET_WORKGROUPS: usize = 1024;

/// Loop iterations of one thread above which its work is split over more workgroups. Some drivers end longer
/// loops, and long loops are slow on all devices. Kernels run few loops, one after another.
pub(crate) const MAX_LOOP_ITERATIONS: usize = 1 << 13;

/// Returns the number of workgroups that share each of `outputs` results of `extent` steps, and the steps of
/// each workgroup. `threads_per_row` threads work on one result together. A step takes `iterations` loop
/// iterations.
pub(crate) fn split_reduction(
    outputs: usize,
    extent: usize,
    threads_per_row: usize,
    iterations: usize,
) -> (usize, usize) {
    let target_splits = (TARGET_WORKGROUPS / outputs.div_ceil(WORKGROUP_SIZE / threads_per_row).max(1))
        .min(extent / (16 * threads_per_row));
    let max_chunk = (MAX_LOOP_ITERATIONS / iterations).max(1) * threads_per_row;
    let splits = target_splits.max(extent.div_ceil(max_chunk)).max(1);
    let chunk = extent.div_ceil(splits).next_multiple_of(4 * threads_per_row);
    (extent.div_ceil(chunk.max(1)).max(1), chunk)
}

/// Number of neighbouring elements in one aligned vector read.
pub(crate) const VEC4_WIDTH: usize = 4;

/// Returns true if kernels read elements of this type four at a time.
pub(crate) fn supports_vec4(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::U32)
}

/// Returns true if lines along the last dimension begin at vectors of `width` elements and are contiguous.
pub(crate) fn has_vector_lines(offset: usize, strides: &[usize], width: usize) -> bool {
    let (last, outer) = strides.split_last().unwrap_or((&1, &[]));
    *last == 1 && outer.iter().chain([&offset]).all(|n| n.is_multiple_of(width))
}

/// Least extent of the rows and columns of tiles. Shorter ones leave most of a tile empty.
const MIN_TILED_EXTENT: usize = 16;

/// Returns true if kernels read rows or columns of this extent through tiles.
pub(crate) fn suits_tiles(extent: usize) -> bool {
    extent >= MIN_TILED_EXTENT
}

/// Returns the dimension along which an input has adjacent elements, if it is not the last one, and if the extents of
/// both suit tiles. Kernels that write along the last dimension read such inputs through tiles.
pub(crate) fn find_tiled_dim(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let last = shape.len().checked_sub(1)?;
    let is_read_across = suits_tiles(shape[last]) && strides[last] > 1;
    (0..last).rev().find(|&d| is_read_across && strides[d] == 1 && suits_tiles(shape[d]))
}

/// Thread layout of a reduction. A step is one read of a thread: one element or four.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReduceConfig {
    /// Threads that share one output, or one vector of four outputs.
    pub(crate) threads_per_row: usize,
    /// Reads that a thread has in flight.
    pub(crate) unroll: usize,
    pub(crate) chunk: usize,
    /// Partial results of one output.
    pub(crate) splits: usize,
}

impl ReduceConfig {
    /// Chooses the layout for `outputs` (or vectors of four outputs) of `steps` each. If `across` is true,
    /// neighbouring threads hold neighbouring outputs.
    pub(crate) fn new(outputs: usize, steps: usize, across: bool) -> Self {
        let threads_per_row = match steps {
            0..=4 => 1,
            // Eight adjacent vectors of four fill a cache line. Fewer outputs leave threads for more steps.
            _ if across => match outputs {
                0 => 1,
                1 => WORKGROUP_SIZE,
                2..=8 => 32,
                9..=512 if steps >= 64 => 32,
                _ => 8,
            },
            // Threads of neighbouring outputs read the same cache lines, and need not combine their values.
            5..=8 if outputs >= TARGET_WORKGROUPS * WORKGROUP_SIZE => 1,
            5..=32 => 8,
            33..=256 => 32,
            _ => WORKGROUP_SIZE,
        };
        let groups = outputs.div_ceil(WORKGROUP_SIZE / threads_per_row).max(1);
        let iterations = steps.div_ceil(threads_per_row);
        let unroll = match iterations {
            0..=3 => 1,
            4..=7 => 4,
            _ => 8,
        };
        // Split the work if there are few workgroups. Each part keeps at least 16 loop iterations.
        let splits = if groups * 2 <= TARGET_WORKGROUPS {
            (TARGET_WORKGROUPS / groups).min(iterations / 16).max(1)
        } else {
            1
        };
        // Split further if a thread's loop would grow too long, since each read may take several iterations.
        let splits = splits.max(if steps <= u32::MAX as usize {
            steps.div_ceil(MAX_LOOP_ITERATIONS * threads_per_row)
        } else {
            1
        });
        let chunk = steps.div_ceil(splits).next_multiple_of(threads_per_row * unroll);
        Self { threads_per_row, unroll, chunk, splits: steps.div_ceil(chunk).max(1) }
    }
}

/// Register layout of rows that several threads share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowConfig {
    pub(crate) threads_per_row: usize,
    pub(crate) width: usize,
    /// Steps that a thread holds in registers, or 0 if a row is too long for registers.
    pub(crate) register_steps: usize,
}

/// Steps in a thread's registers above which more threads share a row.
const MAX_STEPS_PER_THREAD: usize = 4;

impl RowConfig {
    /// Chooses the layout for contiguous rows. A thread holds at most `max_steps` steps of [`VEC4_WIDTH`]
    /// elements.
    pub(crate) fn for_contiguous_rows(extent: usize, quads: bool, max_steps: usize) -> Self {
        let width = if quads { VEC4_WIDTH } else { 1 };
        let steps = extent.div_ceil(width).max(1);
        let threads_per_row = [1, 8, 32, 64, 128]
            .into_iter()
            .find(|threads_per_row| steps <= MAX_STEPS_PER_THREAD * threads_per_row)
            .unwrap_or(WORKGROUP_SIZE);
        let register_steps = steps.div_ceil(threads_per_row);
        Self {
            threads_per_row,
            width,
            register_steps: if register_steps * width <= max_steps * VEC4_WIDTH { register_steps } else { 0 },
        }
    }

    /// Chooses the layout for strided rows, where neighbouring threads hold elements of neighbouring rows.
    pub(crate) fn for_strided_rows(extent: usize) -> Self {
        let threads_per_row = match extent {
            0..=16 => 1,
            17..=128 => 8,
            _ => 32,
        };
        let register_steps = extent.div_ceil(threads_per_row).max(1);
        Self {
            threads_per_row,
            width: 1,
            register_steps: if register_steps <= 16 { register_steps } else { 0 },
        }
    }

    /// Returns the number of workgroups that hold `rows` at once.
    pub(crate) fn workgroups(&self, rows: usize) -> usize {
        rows.div_ceil(WORKGROUP_SIZE / self.threads_per_row)
    }

    /// Returns the number of workgroups of a grid-stride loop over rows that ends with partial sums.
    pub(crate) fn grid_stride_workgroups(&self, rows: usize) -> usize {
        // One iteration over rows contains the iterations that sum over the threads of a row.
        let iterations = 1024 * (WORKGROUP_SIZE / self.threads_per_row);
        self.workgroups(rows).min((TARGET_WORKGROUPS / 2).max(rows.div_ceil(iterations)))
    }

    /// Returns the number of workgroups that share each of `groups` groups of rows in a grid-stride loop.
    pub(crate) fn grid_stride_splits(&self, rows_per_group: usize, groups: usize) -> usize {
        let least = self.grid_stride_workgroups(rows_per_group * groups).div_ceil(groups.max(1));
        self.workgroups(rows_per_group).min(least).max(1)
    }
}

/// Returns the number of rows of a strip, a multiple of `step`. `tiles` workgroups share a strip, and each
/// writes its own partial sums at its end.
pub(crate) fn rows_per_strip(rows: usize, tiles: usize, step: usize) -> usize {
    let strips = (2 * TARGET_WORKGROUPS).div_ceil(tiles.max(1));
    rows.div_ceil(strips).next_multiple_of(step).max(4 * step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reduce_config_covers_its_steps_and_keeps_short_rows_whole() {
        for outputs in [1, 3, 8, 9, 100, 2048, 100_000] {
            for steps in [1, 4, 5, 31, 257, 2048, 8192, 1 << 24] {
                for across in [false, true] {
                    let s = ReduceConfig::new(outputs, steps, across);
                    assert!(s.chunk * s.splits >= steps && s.chunk * (s.splits - 1) < steps, "{s:?}");
                    assert!(
                        WORKGROUP_SIZE.is_multiple_of(s.threads_per_row) && s.splits <= TARGET_WORKGROUPS,
                        "{s:?}"
                    );
                    assert!(s.splits == 1 || steps / s.splits >= 8 * s.threads_per_row, "{steps}: {s:?}");
                }
            }
        }
    }

    #[test]
    fn shared_outputs_cover_their_steps_in_short_loops() {
        for outputs in [0, 1, 7, 512, 1025, 1 << 20] {
            for extent in [0, 1, 255, 4096, 100_000, 20_000_000, u32::MAX as usize] {
                for threads_per_row in [32, WORKGROUP_SIZE] {
                    let (splits, chunk) = split_reduction(outputs, extent, threads_per_row, 1);
                    assert!(
                        chunk * splits >= extent && (splits == 1 || chunk * (splits - 1) < extent),
                        "{outputs} of {extent}"
                    );
                    assert!(
                        chunk.div_ceil(threads_per_row) <= MAX_LOOP_ITERATIONS + 4
                            && splits.div_ceil(threads_per_row) <= MAX_LOOP_ITERATIONS
                    );
                    assert!(extent >= 16 * threads_per_row || splits == 1);
                }
            }
        }
    }

    #[test]
    fn full_sums_fill_the_device_and_rows_need_one_stage() {
        assert_eq!(ReduceConfig::new(1, 1 << 24, false).splits, TARGET_WORKGROUPS);
        assert_eq!(
            ReduceConfig::new(8192, 2048, false),
            ReduceConfig { threads_per_row: 256, unroll: 8, chunk: 2048, splits: 1 }
        );
        let neighbours = ReduceConfig::new(1 << 20, 5, false);
        assert_eq!((neighbours.threads_per_row, neighbours.unroll, neighbours.splits), (1, 4, 1));
        let columns = ReduceConfig::new(2048, 8192, true);
        assert_eq!((columns.threads_per_row, columns.splits), (8, 16));
    }
}
