//! What happens when no free block fits: rung after rung, each followed by a search.

use std::sync::{MutexGuard, PoisonError};

use super::Block;
use super::check::MOST_BYTES;
use super::heap::AllocRequest;
use super::pool::{Callback, Pool};
use super::state::{Growth, PoolState};
use crate::error::Result;

impl Pool {
    /// Serves a request that no free block fits.
    #[cold]
    pub(super) fn alloc_slow_path<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        need: AllocRequest<'_>,
    ) -> Result<Block> {
        let source = &*self.shared.source;
        // Sums of sizes that no memory has would overflow, in the pool and in drivers.
        if need.size > state.max_segment.min(MOST_BYTES) {
            return Err(self.out_of_memory(state, &need, String::new()));
        }

        if let Some(block) = state.take_cross_stream(source, &need, false)? {
            return Ok(block);
        }

        if !state.waiting.is_empty() {
            state.rungs.poll.tried += 1;
            state.poll(source)?;
            if let Some(block) = state.take(source, &need)? {
                state.rungs.poll.served += 1;
                return Ok(block);
            }
        }

        let callbacks = self.callbacks();
        if !callbacks.is_empty() {
            state.rungs.callbacks.tried += 1;
            drop(state);
            for callback in callbacks {
                callback(need.size);
            }
            state = self.shared.lock();
            if let Some(block) = state.take(source, &need)? {
                state.rungs.callbacks.served += 1;
                return Ok(block);
            }
        }

        if state.collect(source)? {
            state = self.wait(state)?;
            if let Some(block) = state.take(source, &need)? {
                state.rungs.collect.served += 1;
                return Ok(block);
            }
        }

        state.see_step(&need);
        if state.should_compact(&need) {
            let (served, next) = self.compact(state, &need, false)?;
            if let Some(block) = served {
                return Ok(block);
            }
            state = next;
        }

        let mut place = state.placement(&need);
        let mut least = 0;
        if let Some(size) = state.reclaim(source, &need, place.as_ref())? {
            (place, least) = (None, size);
            state = self.wait(state)?;
            if let Some(block) = state.take(source, &need)? {
                state.keep_donors();
                state.rungs.reclaim.served += 1;
                return Ok(block);
            }
        }

        state.rungs.grow.tried += 1;
        let mut detail = match state.grow(source, &need, place, least)? {
            Growth::Served(block) => {
                state.rungs.grow.served += 1;
                return Ok(block);
            }
            Growth::Full(detail) => detail,
        };

        if !state.config.fail_fast {
            let (served, next) = self.compact(state, &need, true)?;
            if let Some(block) = served {
                return Ok(block);
            }
            state = next;
            if !state.waiting.is_empty() {
                state.rungs.wait.tried += 1;
                state = self.wait(state)?;
                if let Some(block) = state.take(source, &need)? {
                    state.rungs.wait.served += 1;
                    return Ok(block);
                }
            }
            state.rungs.release.tried += 1;
            state.num_alloc_retries += 1;
            state.leave_all(source, u64::MAX)?;
            state = self.wait(state)?;
            // Another thread may have freed what fits while this one waited.
            if let Some(block) = state.take(source, &need)? {
                state.rungs.release.served += 1;
                return Ok(block);
            }
            detail = match state.grow(source, &need, None, 0)? {
                Growth::Served(block) => {
                    state.rungs.release.served += 1;
                    return Ok(block);
                }
                Growth::Full(detail) => detail,
            };
            let (served, next) = self.defragment(state, &need)?;
            if let Some(block) = served {
                return Ok(block);
            }
            state = next;
        }
        // A small block in a large segment, or the other way round, is better than none.
        if let Some(block) = state.take_cross_stream(source, &need, true)? {
            return Ok(block);
        }
        Err(self.out_of_memory(state, &need, detail))
    }

    fn callbacks(&self) -> Vec<Callback> {
        self.shared.callbacks.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the device has passed every fence that something waits for, without the lock.
    pub(super) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
    ) -> Result<MutexGuard<'a, PoolState>> {
        let source = &*self.shared.source;
        state.poll(source)?;
        if let Some(fence) = state.waiting.back().map(|w| w.0) {
            state.num_sync_all_streams += 1;
            drop(state);
            source.fence_wait(fence)?;
            state = self.shared.lock();
            state.poll(source)?;
        }
        Ok(state)
    }
}
