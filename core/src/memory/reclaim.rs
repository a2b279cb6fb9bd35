//! Slow path of an allocation: the steps for a request that no free block fits, each followed by a search.

use std::sync::{Arc, MutexGuard};

use super::Block;
use super::heap::AllocRequest;
use super::pool::Pool;
use super::pool_state::PoolState;
use super::validation::MAX_MEMORY_BYTES;
use crate::memory::error::Result;
use crate::platform;
use crate::sync::RwLockUnpoisoned;

/// Result of a step: the block, if the step served the request, and the lock.
pub(super) type StepResult<'a> = Result<(Option<Block>, MutexGuard<'a, PoolState>)>;

/// Serves the request from free blocks, and counts it for a step of the slow path.
macro_rules! search_after {
    ($state:ident, $need:ident, $step:ident) => {
        if let Some(block) = $state.take_free_block($need)? {
            $state.totals.reclaim_stats.$step.served += 1;
            return Ok((Some(block), $state));
        }
    };
}

impl Pool {
    /// Serves a request that no free block fits, by the steps that the module's documentation lists.
    #[cold]
    pub(super) fn alloc_slow_path<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        mut need: AllocRequest<'_>,
    ) -> Result<Block> {
        // Sums of impossible sizes would overflow, in the pool and in drivers.
        if need.size > state.max_segment.min(MAX_MEMORY_BYTES) {
            return Err(self.out_of_memory(state, &need, String::new()));
        }
        if let Some(block) = state.take_cross_stream(&need, false)? {
            return Ok(block);
        }
        let mut detail = String::new();
        let (mut served, mut state) = self.search_after_frees(state, &need)?;
        if served.is_none() {
            (served, state) = self.compact_or_grow(state, &need, &mut detail)?;
        }
        if served.is_none() {
            need.size = state.exact_size(need.requested);
            state.creep.stop_rounding();
        }
        if served.is_none() && !state.config.fail_fast {
            (served, state) = self.alloc_on_full_device(state, &need, &mut detail)?;
        }
        // As a last resort, a small block may come from a large segment, or a large one from a small segment.
        if served.is_none() {
            served = state.take_cross_stream(&need, true)?;
        }
        served.map_or_else(|| Err(self.out_of_memory(state, &need, detail)), Ok)
    }

    /// Searches after passed fences, callbacks and garbage collection have freed blocks.
    fn search_after_frees<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        need: &AllocRequest<'_>,
    ) -> StepResult<'a> {
        if !state.pending_releases.is_empty() {
            state.totals.reclaim_stats.poll.tried += 1;
            state.poll_fences()?;
            search_after!(state, need, poll);
        }

        let callbacks = self.shared.callbacks.read_unpoisoned().clone();
        if !callbacks.is_empty() {
            state.totals.reclaim_stats.callbacks.tried += 1;
            drop(state);
            for callback in callbacks {
                callback(need.size);
            }
            state = self.shared.lock();
            search_after!(state, need, callbacks);
        }

        if state.collect_garbage()? {
            state = self.wait_pending_fences(state)?;
            search_after!(state, need, collect);
        }
        Ok((None, state))
    }

    /// Compacts the pool or stitches pages where that is cheaper than growth. Otherwise the pool grows, by idle
    /// memory of its own or by new memory. `detail` receives the driver's message if the device is full.
    fn compact_or_grow<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        need: &AllocRequest<'_>,
        detail: &mut String,
    ) -> StepResult<'a> {
        state.detect_step_end(need);
        let need = &state.detect_creep(need);
        if state.should_compact(need) {
            let (served, next) = self.compact(state, need, false)?;
            state = next;
            if served.is_some() {
                return Ok((served, state));
            }
        }

        let mut placement = state.find_placement(need);
        if let Some(placement) = &placement
            && let Some(block) = state.stitch(need, placement)?
        {
            state.totals.reclaim_stats.stitch.served += 1;
            return Ok((Some(block), state));
        }
        let mut least = 0;
        if let Some(size) = state.reclaim_idle(need, placement.as_ref())? {
            (placement, least) = (None, size);
            state = self.wait_pending_fences(state)?;
            if let Some(block) = state.take_free_block(need)? {
                state.return_migration_sources();
                state.totals.reclaim_stats.reclaim.served += 1;
                return Ok((Some(block), state));
            }
        }

        state.totals.reclaim_stats.grow.tried += 1;
        match state.grow(need, placement, least) {
            Ok(block) => {
                state.totals.reclaim_stats.grow.served += 1;
                return Ok((Some(block), state));
            }
            Err(error) => *detail = error.into_full()?,
        }
        Ok((None, state))
    }

    /// Serves a request although the device is full: by full compaction, by a wait for pending releases, by growth
    /// after the release of all idle memory, or by defragmentation.
    fn alloc_on_full_device<'a>(
        &'a self,
        state: MutexGuard<'a, PoolState>,
        need: &AllocRequest<'_>,
        detail: &mut String,
    ) -> StepResult<'a> {
        let (served, mut state) = self.compact(state, need, true)?;
        if served.is_some() {
            return Ok((served, state));
        }
        if !state.pending_releases.is_empty() {
            state.totals.reclaim_stats.wait.tried += 1;
            state = self.wait_pending_fences(state)?;
            search_after!(state, need, wait);
        }
        state.totals.reclaim_stats.release.tried += 1;
        state.totals.num_alloc_retries += 1;
        state.release_largest_idle(u64::MAX)?;
        state = self.wait_pending_fences(state)?;
        // Another thread may have freed a fitting block while this one waited.
        search_after!(state, need, release);
        match state.grow(need, None, 0) {
            Ok(block) => {
                state.totals.reclaim_stats.release.served += 1;
                return Ok((Some(block), state));
            }
            Err(error) => *detail = error.into_full()?,
        }
        self.defragment(state, need)
    }

    /// Waits, without the lock, until the device has passed every fence of the pending releases. Only polls the
    /// fences on a platform that cannot block.
    pub(super) fn wait_pending_fences<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
    ) -> Result<MutexGuard<'a, PoolState>> {
        state.poll_fences()?;
        if let Some(fence) = state.pending_releases.back().map(|w| w.0).filter(|_| platform::CAN_BLOCK) {
            state.totals.num_sync_all_streams += 1;
            let source = Arc::clone(&state.source);
            drop(state);
            source.wait_fence(fence)?;
            state = self.shared.lock();
            state.poll_fences()?;
        }
        Ok(state)
    }
}
