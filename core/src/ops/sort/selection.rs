//! Selection of the first few elements of each row, without a sort.

use super::{RankStart, Sorter, Tiling};
use crate::ops::prelude::*;

/// Returns the largest number of elements that a thread holds in registers. A key takes one or two.
fn max_steps(wide: bool) -> usize {
    if wide { 16 } else { 32 }
}

/// Returns the number of elements that a workgroup ranks, as in topk.wgsl.
fn list_capacity(wide: bool) -> usize {
    if wide { 1024 } else { 1536 }
}

/// Division of rows into chunks, each of which a group of threads searches for its first elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Selection {
    /// Threads that share a chunk.
    threads_per_row: usize,
    /// Elements of a chunk that a thread holds.
    steps: usize,
    chunks: usize,
}

impl Selection {
    /// Chooses a division for the first `needed` of `extent` elements, or returns `None` if a sort is better.
    fn new(extent: usize, needed: usize, wide: bool) -> Option<Self> {
        // Few of the elements must remain.
        (extent >= 8 * needed).then(|| Self::divide(extent, needed, wide)).flatten()
    }

    /// Chooses the fewest threads that have registers for a row and for the elements that may remain of it. Longer
    /// rows are divided into chunks.
    fn divide(extent: usize, needed: usize, wide: bool) -> Option<Self> {
        let capacity = list_capacity(wide);
        // Twice as many threads as elements, so that few elements remain.
        if needed == 0 || 2 * needed > WORKGROUP_SIZE {
            return None;
        }
        let whole = (3..=WORKGROUP_SIZE.ilog2()).map(|log| 1 << log).find_map(|threads_per_row| {
            let steps = extent.div_ceil(threads_per_row);
            let fits = steps <= max_steps(wide)
                && needed * steps <= capacity / (WORKGROUP_SIZE / threads_per_row)
                && 2 * needed <= threads_per_row;
            fits.then_some(Self { threads_per_row, steps, chunks: 1 })
        });
        if whole.is_some() {
            return whole;
        }
        let steps = max_steps(wide).min(capacity / needed);
        let chunks = extent.div_ceil(WORKGROUP_SIZE * steps);
        let steps = extent.div_ceil(chunks).div_ceil(WORKGROUP_SIZE);
        Some(Self { threads_per_row: WORKGROUP_SIZE, steps, chunks })
    }

    /// Returns the loop iterations of one thread: to rank the first elements of threads, and the elements that remain.
    fn loop_iterations(&self, needed: usize) -> usize {
        let remaining = needed * self.steps;
        self.threads_per_row + remaining.div_ceil(self.threads_per_row) * (remaining + 1) + 16
    }
}

impl Sorter {
    /// Selects the requested indices of each row into `indices`, without a sort. Returns false if a sort is better.
    pub(super) fn try_select(self, x: &Tensor, tiling: &Tiling, indices: &Tensor) -> Result<bool> {
        let RankStart::Rank(first) = self.start else { return Ok(false) };
        let (needed, layout) = (first + self.count, &tiling.layout);
        let Some(mut selection) = Selection::new(layout.extent, needed, tiling.wide) else {
            return Ok(false);
        };
        let (mut elements, mut candidates) = (layout.extent, None::<Tensor>);
        while selection.chunks > 1 {
            // The first elements of every chunk remain.
            let remaining = selection.chunks * needed;
            let found = empty_workspace(&[layout.rows * remaining], DType::U32, x.device())?;
            let chunk = Self { start: RankStart::Rank(0), count: needed, ..self };
            chunk.launch_selection(x, tiling, selection, (elements, candidates.as_ref()), &found, true)?;
            (elements, candidates) = (remaining, Some(found));
            // A division exists for any number of elements, because one was found for more of them.
            let Some(next) = Selection::divide(elements, needed, tiling.wide) else { return Ok(false) };
            selection = next;
        }
        self.launch_selection(x, tiling, selection, (elements, candidates.as_ref()), indices, false)?;
        Ok(true)
    }

    /// Selects from the `elements` of each row, or from those at as many indices of `candidates`. With `partial`, the
    /// result has u32 indices of each chunk, else i64 indices of each row.
    fn launch_selection(
        self,
        x: &Tensor,
        tiling: &Tiling,
        selection: Selection,
        (elements, candidates): (usize, Option<&Tensor>),
        out: &Tensor,
        partial: bool,
    ) -> Result<()> {
        let Selection { threads_per_row, steps, chunks } = selection;
        let (first, _) = self.start_params();
        let needed = first + self.count;
        // Padding takes no memory, and powers of two need fewer kernels.
        let (padded_steps, indirect) = (steps.next_power_of_two(), candidates.is_some());
        let spec = kernel_spec! {
            "topk", kind: tiling.kind, threads_per_row, steps: padded_steps, partial, indirect,
        };
        let params = tiling.layout.params(x, |params| {
            kernel_params! {
                ..params; flip: self.flip(), nan: self.nan_key(), first, count: self.count, needed, elements,
                chunks, chunk: elements / chunks, longer_chunks: elements % chunks,
            }
        });
        let groups = (tiling.layout.rows * chunks).div_ceil(WORKGROUP_SIZE / threads_per_row);
        let params = params.loop_iterations(selection.loop_iterations(needed));
        launch::launch(&spec, &bindings![x, candidates, out], params, groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_have_memory_for_all_that_may_remain() {
        for wide in [false, true] {
            for extent in [1, 8, 9, 64, 255, 1024, 1025, 4096, 5000, 20_000, 131_072, 1 << 20, 3_000_000_000]
            {
                for needed in [0, 1, 2, 4, 5, 20, 50, 100, 128, 129, 1000] {
                    let Some(s) = Selection::new(extent, needed, wide) else {
                        assert!(
                            extent < 8 * needed || needed > 128 || needed == 0,
                            "{needed} of {extent} are sorted"
                        );
                        continue;
                    };
                    let shortest = extent / s.chunks;
                    assert!(shortest >= needed && s.threads_per_row >= needed, "{needed} of {extent}: {s:?}");
                    assert!(extent.div_ceil(s.chunks) <= s.threads_per_row * s.steps, "{extent}: {s:?}");
                    let list = list_capacity(wide) / (WORKGROUP_SIZE / s.threads_per_row);
                    assert!(needed * s.steps <= list && s.steps <= max_steps(wide), "{extent}: {s:?}");
                    assert!(s.loop_iterations(needed) < 1 << 15, "{needed} of {extent}: {s:?}");
                    assert!(s.chunks == 1 || 4 * s.chunks * needed <= extent, "{needed} of {extent}: {s:?}");
                }
            }
        }
    }

    #[test]
    fn neighbours_of_a_cloud_are_selected_by_64_threads() {
        let expected = Selection { threads_per_row: 64, steps: 16, chunks: 1 };
        assert_eq!(Selection::new(1024, 20, false), Some(expected));
        assert_eq!(Selection::new(1024, 200, false), None);
    }
}
