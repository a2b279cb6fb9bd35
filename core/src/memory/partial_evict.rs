//! Partial eviction: some blocks of a gap move elsewhere, and the others slide together.
//!
//! This helps where a segment's free blocks do not suffice and no run of neighbours fits elsewhere as a
//! whole. Often a single small block has to go.

use super::compaction_planner::{CompactionPlanner, Gap, GapMethod, MovableRuns, take_best_fit_size};
use super::free_list::FreeBlock;

/// Most bytes copied for a request, in halves of its size. More would exhaust the migration budget.
const MAX_COPIED_HALVES: u64 = 3;

impl CompactionPlanner<'_> {
    /// Makes a free block of `size` bytes by partial eviction into the `free` blocks. If it fails, the heap
    /// is restored.
    pub(super) fn partial_evict_any(&mut self, size: u64, runs: &MovableRuns, free: &[FreeBlock]) -> bool {
        let largest = free.last().map_or(0, |e| e.size);
        let cost_limit = size.saturating_mul(MAX_COPIED_HALVES) / 2;
        for found in self.find_gaps_by(&[GapMethod::Partial], size, runs, largest, cost_limit) {
            let gap = self.build_gap(size, found);
            let Some(sent) = self.select_evicted_blocks(&gap, free) else { continue };
            if self.can_slide(&gap.blocks, |at| sent.contains(at))
                && self.try_or_restore(|planner| planner.partial_evict(&gap, &sent))
            {
                return true;
            }
        }
        false
    }

    /// Selects few and small blocks of a run to evict; `None` if they do not fit elsewhere.
    fn select_evicted_blocks(&self, gap: &Gap, free: &[FreeBlock]) -> Option<Vec<u32>> {
        let mut places = self.free_sizes(gap, free);
        let inside = gap.blocks.iter().filter(|at| self.is_free(**at)).map(|at| self.size(*at));
        let mut missing = gap.size.saturating_sub(inside.sum());
        let mut held: Vec<u32> = gap.blocks.iter().copied().filter(|at| !self.is_free(*at)).collect();
        held.sort_by_key(|at| self.size(*at));
        let mut sent = Vec::new();
        while missing > 0 {
            // The smallest sufficient block, otherwise the largest.
            let at = held.partition_point(|at| self.size(*at) < missing);
            let block = if at < held.len() { held.remove(at) } else { held.pop()? };
            let size = self.size(block);
            if take_best_fit_size(&mut places, size) {
                missing = missing.saturating_sub(size);
                sent.push(block);
            }
        }
        Some(sent)
    }

    fn partial_evict(&mut self, gap: &Gap, sent: &[u32]) -> bool {
        let (Some(&first), Some(&last)) = (gap.blocks.first(), gap.blocks.last()) else { return false };
        let ((segment, start, _), (_, _, end)) = (self.block_range(first), self.block_range(last));
        // Free blocks of the gap must not become destinations.
        let free: Vec<u32> = gap.blocks.iter().copied().filter(|at| self.is_free(*at)).collect();
        free.iter().for_each(|at| self.withdraw_free_block(*at));
        let mut left = free;
        for at in sent {
            self.freeze(*at);
            match self.relocate(*at, false) {
                Some(place) => left.push(place),
                None => return false,
            }
        }
        left.into_iter().for_each(|at| self.mark_free(at));
        let run = self.blocks_between(segment, start, end);
        let first = run.iter().position(|at| self.is_free(*at)).unwrap_or(0);
        self.slide_together(&run[first..])
    }
}
