//! State of a pool, which its lock protects, and the steps of the slow path.

use std::collections::VecDeque;
use std::sync::Arc;

use super::batch::BatchMemory;
use super::compaction::BlockMover;
use super::config::{Config, FitPolicy};
use super::creep::CreepDetector;
use super::grow::MigrationBudget;
use super::heap::{
    AllocRequest, Arena, Heap, MIN_BLOCK, RETIRED_OWNER, SHARED_OWNER, SlotState as Is, SplitRules,
};
use super::pool::{Block, Request, stream_bit};
use super::process::{ProcessShare, process_reserved};
use super::source::{DeviceMemory, Fence, MAX_QUEUES, SegmentId, SegmentSource, VirtualMemory};
use super::stats::Stats;
use super::{OutOfMemory, Tag};
use crate::memory::error::Result;

/// Smaller remainders of large plain blocks are not split off (PyTorch's kSmallSize).
const MIN_LARGE_REMAINDER: u64 = 1 << 20;

/// Action that waits for a fence.
#[derive(Clone, Copy, Debug)]
pub(super) enum PendingRelease {
    /// A freed block, to be reused.
    Block(u32),
    /// The block of an idle segment, or of extents, to be returned to the device.
    Memory(u32),
    /// The block of extents to be moved to where memory is missing.
    MigrationSource(u32),
    /// A second mapping of memory, to be unmapped.
    Stitch(SegmentId),
}

/// Blocks of extents that may move now.
#[derive(Debug, Default)]
pub(super) struct MigrationSources {
    pub(super) blocks: Vec<u32>,
    /// If true, the device may still use the blocks, so they move only after all submitted work.
    pub(super) may_be_in_use: bool,
}

#[derive(Debug)]
pub(super) struct PoolState {
    pub(super) source: Arc<dyn SegmentSource>,
    /// Moves blocks for the pool, if compaction is available.
    pub(super) mover: Option<Arc<dyn BlockMover>>,
    /// Value of the heap's clock at which a request fails on purpose; 0 for none.
    pub(super) fail_at_request: u64,
    pub(super) heap: Heap,
    /// Private pools that are alive.
    pub(super) private_pools: Vec<u16>,
    pub(super) config: Config,
    pub(super) device: Option<String>,
    pub(super) limit: Option<u64>,
    /// Largest block in bytes: the source's largest segment, rounded down to whole units.
    pub(super) max_segment: u64,
    pub(super) virtual_memory: Option<VirtualMemory>,
    /// Releases in the order of their fences.
    pub(super) pending_releases: VecDeque<(Fence, PendingRelease)>,
    pub(super) migration_sources: MigrationSources,
    pub(super) migration_budget: MigrationBudget,
    pub(super) creep: CreepDetector,
    pub(super) process_share: ProcessShare,
    pub(super) batch_memory: BatchMemory,
    /// Statistics of the slow path and of calls; the heap counts the others.
    pub(super) totals: Stats,
    /// Slots of pinned blocks, once for each pin.
    pub(super) pinned_slots: Vec<u32>,
}

/// Idle memory that could return to the device: a whole plain segment, or neighbouring extents of a range. It
/// begins at `offset`, in the free block `start_block` or after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdleMemory {
    pub(super) size: u64,
    pub(super) start_block: u32,
    pub(super) offset: u64,
}

impl PoolState {
    pub(super) fn new(source: Arc<dyn SegmentSource>, config: Config) -> Self {
        let limits = source.limits();
        let rules = SplitRules {
            unit: limits.alignment.max(MIN_BLOCK),
            max_split: config.max_split_size.unwrap_or(u64::MAX),
            max_rounding: config.max_non_split_rounding,
            prefers_low_address: config.fit == FitPolicy::LowestAddress,
            min_large_remainder: MIN_LARGE_REMAINDER,
        };
        let mut heap = Heap::new(rules);
        let virtual_memory = limits.virtual_memory.filter(|_| config.expandable_segments);
        heap.counters.max_split = rules.max_split;
        let mut state = Self {
            process_share: ProcessShare::new(source.is_device_memory()),
            source,
            mover: None,
            heap,
            fail_at_request: 0,
            private_pools: Vec::new(),
            config,
            device: None,
            limit: None,
            max_segment: limits.max_segment & !(rules.unit - 1),
            virtual_memory,
            pending_releases: VecDeque::new(),
            migration_sources: MigrationSources::default(),
            migration_budget: MigrationBudget::default(),
            creep: CreepDetector::default(),
            batch_memory: BatchMemory::default(),
            totals: Stats::default(),
            pinned_slots: Vec::new(),
        };
        state.set_limit();
        state
    }

    /// Registers the block mover and enables compaction; only the first mover counts.
    pub(super) fn set_mover(&mut self, mover: Arc<dyn BlockMover>) {
        self.mover.get_or_insert(mover);
        if self.is_compaction_enabled() {
            // Compaction joins small remainders again.
            self.heap.rules.min_large_remainder = 0;
        }
    }

    pub(super) fn set_limit(&mut self) {
        self.limit = self.config.pool_limit(self.source.device_memory().total);
    }

    /// Returns the limit on the bytes that all pools of the process hold, if there is one.
    pub(super) fn process_limit(&self) -> Option<u64> {
        self.process_share.limit(self.config.max_process_memory)
    }

    /// Returns the most bytes that the pool may hold, if that is known.
    pub(super) fn capacity(&self, memory: DeviceMemory) -> Option<u64> {
        let reserved = self.heap.counters.reserved();
        let device = memory.free.map(|free| free.saturating_add(reserved));
        let others = process_reserved().saturating_sub(reserved);
        let process = self.process_limit().map(|limit| limit.saturating_sub(others).max(reserved));
        self.limit.into_iter().chain(device).chain(process).min()
    }

    /// Returns the size of the block for a request of `bytes` bytes, unless such blocks creep.
    #[inline]
    pub(super) fn exact_size(&self, bytes: u64) -> u64 {
        let rounded = self.config.round_size(bytes, self.heap.rules.unit);
        // Rounding must not refuse a request that fits one segment.
        if bytes <= self.max_segment { rounded.min(self.max_segment) } else { rounded }
    }

    #[inline]
    pub(super) fn resolve_request<'a>(&mut self, request: &'a Request) -> AllocRequest<'a> {
        let exact = self.exact_size(request.bytes);
        let small = exact <= self.config.small_size;
        let size = self.creep.round(exact, self.heap.rules.unit).min(self.max_segment.max(exact));
        let arena = match request.private_pool {
            owner if owner != SHARED_OWNER && self.private_pools.contains(&owner) => {
                self.heap.get_or_create_private_arena(owner, request.queue, small)
            }
            // Also for a thread inside a private pool of another device.
            _ => self.heap.get_or_create_arena(request.queue, small),
        };
        let held = if request.movable { Is::Movable } else { Is::Pinned };
        AllocRequest { arena, size, requested: request.bytes, scope: &request.scope, state: held }
    }

    pub(super) fn take_free_block(&mut self, need: &AllocRequest) -> Result<Option<Block>> {
        self.heap.take_free_block(need).map(|block| self.finish_alloc(block)).transpose()
    }

    /// Completes an allocation: enqueues the pending cross-stream waits of its queue.
    #[inline]
    pub(super) fn finish_alloc(&mut self, block: Block) -> Result<Block> {
        if self.heap.pending_waits.is_some() {
            self.wait_cross_stream_uses(&block, block.queue)?;
        }
        Ok(block)
    }

    /// Serves a request from a free block of another queue's arena, which the request's queue waits for on
    /// the device. The block is of `any` size class, or of the request's own.
    pub(super) fn take_cross_stream(&mut self, need: &AllocRequest, any: bool) -> Result<Option<Block>> {
        let own = &self.heap.arenas[usize::from(need.arena)];
        let (queue, small, owner) = (own.queue, own.small, own.owner);
        let others = self.heap.arenas.iter().enumerate().filter(|(at, a)| {
            *at != usize::from(need.arena)
                && (any || a.small == small)
                && (a.owner == owner || a.owner == RETIRED_OWNER)
        });
        let others: Vec<u16> = others.map(|(at, _)| at as u16).collect();
        for arena in others {
            let Some(mut block) = self.heap.take_free_block(&AllocRequest { arena, ..*need }) else {
                continue;
            };
            block.queue = queue;
            self.wait_cross_stream_uses(&block, queue)?;
            let home = self.heap.arenas[usize::from(arena)].queue;
            if home != queue {
                let joined =
                    self.source.record_event(home).and_then(|event| self.source.wait_event(queue, event));
                joined.inspect_err(|_| self.heap.free(block.slot))?;
            }
            return Ok(Some(block));
        }
        Ok(None)
    }

    /// Makes `queue` wait, on the device, for cross-stream uses of the block that was just allocated for it.
    #[cold]
    pub(super) fn wait_cross_stream_uses(&mut self, block: &Block, queue: u8) -> Result<()> {
        let Some(owed) = self.heap.pending_waits.take() else { return Ok(()) };
        let arena = &mut self.heap.arenas[usize::from(owed.arena)];
        let count = arena.cross_stream_uses.partition_point(|(number, _)| *number <= owed.last_use);
        let waited = arena.cross_stream_uses[..count]
            .iter()
            .try_for_each(|(_, event)| self.source.wait_event(queue, *event));
        if waited.is_ok() && queue == arena.queue {
            arena.cross_stream_uses.drain(..count);
        }
        waited.inspect_err(|_| self.heap.free_cross_stream(block.slot, owed.last_use))?;
        Ok(())
    }

    /// Frees a block that these queues (a bit each) have used: its own queue reuses the block after them.
    pub(super) fn free_cross_stream(&mut self, slot: u32, queues: u8) -> Result<()> {
        let arena = self.heap.slot(slot).arena;
        let home = self.heap.arenas[usize::from(arena)].queue;
        let mut last = 0;
        for queue in (0..MAX_QUEUES).filter(|q| queues & stream_bit(*q) != 0 && *q != home) {
            last = self.heap.record_cross_stream_use(arena, self.source.record_event(queue)?);
        }
        self.heap.free_cross_stream(slot, last);
        Ok(())
    }

    /// Releases the idle memory of a private pool, and retires its arenas, so that the rest serves other
    /// requests.
    pub(super) fn retire_private_pool(&mut self, owner: u16) -> Result<()> {
        self.private_pools.retain(|number| *number != owner);
        let mut own: Vec<bool> = Vec::new();
        for arena in &mut self.heap.arenas {
            own.push(arena.owner == owner);
            if arena.owner == owner {
                arena.owner = RETIRED_OWNER;
            }
        }
        let mut idle = self.idle_memory();
        idle.retain(|i| own[usize::from(self.heap.slot(i.start_block).arena)]);
        self.release_idle(&idle, false)?;
        self.poll_fences()
    }

    #[cold]
    pub(super) fn report_invalid_free(&mut self, block: &Block) {
        self.totals.num_invalid_frees += 1;
        log::error!("a block was freed that is not held: {block:?}; nothing was freed");
    }

    pub(super) fn defer_free(&mut self, slot: u32, fence: Fence) {
        self.heap.mark_pending(slot);
        self.enqueue_release(fence, PendingRelease::Block(slot));
    }

    pub(super) fn enqueue_release(&mut self, fence: Fence, what: PendingRelease) {
        let at = match self.pending_releases.back() {
            Some((last, _)) if *last > fence => self.pending_releases.partition_point(|w| w.0 <= fence),
            _ => self.pending_releases.len(),
        };
        self.pending_releases.insert(at, (fence, what));
    }

    /// Completes releases whose fences the device has passed.
    pub(super) fn poll_fences(&mut self) -> Result<()> {
        let mut passed = None;
        while let Some((fence, what)) = self.pending_releases.front().copied() {
            if passed.is_none_or(|p| p < fence) {
                if !self.source.is_fence_signaled(fence)? {
                    break;
                }
                passed = Some(fence);
            }
            self.pending_releases.pop_front();
            self.complete_release(what)?;
        }
        self.process_share.set_reserved(self.heap.counters.reserved());
        Ok(())
    }

    /// Completes a release, when the device no longer uses the memory.
    fn complete_release(&mut self, what: PendingRelease) -> Result<()> {
        match what {
            PendingRelease::Block(slot) => self.heap.complete_pending(slot),
            PendingRelease::Memory(slot) => {
                self.totals.num_device_free += 1;
                let segment = self.heap.slot(slot).segment;
                if self.heap.segment(segment).virtual_range.is_none() {
                    let id = self.heap.remove_segment(segment);
                    return Ok(self.source.free_segment(id)?);
                }
                self.drop_stitches_of(slot, false)?;
                let extents = self.heap.extents_in_block(slot);
                self.heap.mark_unmapped(slot);
                let pieces = extents.iter().map(|e| e.1).collect::<Vec<_>>();
                if let Some(((id, offset), _)) = extents.first() {
                    self.source.unmap(*id, *offset, &pieces)?;
                }
            }
            PendingRelease::Stitch(id) => self.drop_retired_stitch(id)?,
            PendingRelease::MigrationSource(slot) => self.migration_sources.blocks.push(slot),
        }
        Ok(())
    }

    /// Returns the idle memory: whole segments, and the whole extents of each free block in a range.
    pub(super) fn idle_memory(&self) -> Vec<IdleMemory> {
        let mut idle = Vec::new();
        // A private pool keeps its memory: addresses of a captured step must stay valid.
        let arenas = self.heap.arenas.iter().filter(|a| matches!(a.owner, SHARED_OWNER | RETIRED_OWNER));
        // Parts of plain segments cannot be released, so they are dropped before sorting.
        let some = |a: &Arena| a.free_list.sorted_where(|e| e.is_whole_segment || a.virtual_range.is_some());
        for free in arenas.flat_map(some) {
            let block = self.heap.slot(free.slot);
            let segment = self.heap.segment(block.segment);
            if segment.virtual_range.is_some() {
                idle.extend(self.idle_extents(free.slot, block.offset, block.offset + block.size));
            } else if block.size == segment.size {
                idle.push(IdleMemory { size: block.size, start_block: free.slot, offset: 0 });
            }
        }
        idle
    }

    /// Returns the whole extents between two offsets of a free block, if there are any.
    pub(super) fn idle_extents(&self, start_block: u32, from: u64, to: u64) -> Option<IdleMemory> {
        // No extent is smaller than a page.
        if to.saturating_sub(from) < self.virtual_memory.map_or(1, |v| v.granularity) {
            return None;
        }
        let range = self.heap.segment(self.heap.slot(start_block).segment).virtual_range.as_ref()?;
        let extents = &range.extents[range.extents.partition_point(|e| e.0 < from)..];
        let offset = extents.first()?.0;
        let last = extents.partition_point(|e| e.0 + e.1 <= to).checked_sub(1)?;
        let end = extents[last].0 + extents[last].1;
        Some(IdleMemory { size: end - offset, start_block, offset })
    }

    /// Returns the last extents of `idle` that make up `bytes`, or all of them.
    pub(super) fn trim_idle(&self, idle: IdleMemory, bytes: u64) -> IdleMemory {
        let IdleMemory { size, start_block, offset } = idle;
        let end = offset + size;
        let Some(range) = &self.heap.segment(self.heap.slot(start_block).segment).virtual_range else {
            return idle;
        };
        let last = range.extents.partition_point(|e| e.0 + e.1 <= end - bytes.min(size));
        let from = range.extents.get(last).map_or(offset, |e| e.0.max(offset));
        IdleMemory { size: end - from, start_block, offset: from }
    }

    /// Releases idle memory to the device, after the work submitted so far.
    ///
    /// If `donors`, extents are not unmapped, but wait for [`grow`](Self::grow) to move them.
    pub(super) fn release_idle(&mut self, idle: &[IdleMemory], donors: bool) -> Result<u64> {
        if idle.is_empty() {
            return Ok(0);
        }
        // Memory that was mapped ahead and never used can be released at once.
        let unused =
            |idle: &IdleMemory| self.heap.find_block_at(idle.start_block, idle.offset).1.is_never_used();
        let fence = if idle.iter().all(unused) {
            None
        } else if donors && self.pending_releases.is_empty() && self.source.has_deferred_work() {
            self.migration_sources.may_be_in_use = true;
            None
        } else {
            Some(self.source.record_fence()?)
        };
        for &IdleMemory { size, start_block, offset } in idle {
            let slot = self.heap.mark_releasing(start_block, offset, size);
            let is_plain = self.heap.segment(self.heap.slot(slot).segment).virtual_range.is_none();
            let waiting = match donors && !is_plain {
                true => PendingRelease::MigrationSource(slot),
                false => PendingRelease::Memory(slot),
            };
            match fence {
                Some(fence) => self.enqueue_release(fence, waiting),
                None => self.complete_release(waiting)?,
            }
        }
        self.process_share.set_reserved(self.heap.counters.reserved());
        Ok(idle.iter().map(|i| i.size).sum())
    }

    /// Releases idle memory, the largest pieces first, until `bytes` bytes are being released.
    pub(super) fn release_largest_idle(&mut self, bytes: u64) -> Result<u64> {
        let mut idle = self.idle_memory();
        idle.sort_by_key(|i| std::cmp::Reverse(i.size));
        let chosen = self.select_idle(idle, bytes);
        self.release_idle(&chosen, false)
    }

    /// Applies `garbage_collection_threshold`: releases segments that have been idle for longer than the
    /// average.
    pub(super) fn collect_garbage(&mut self) -> Result<bool> {
        let threshold = self.config.garbage_collection_threshold;
        let Some(limit) = self.limit.filter(|_| threshold > 0.0) else { return Ok(false) };
        let bound = (limit as f64 * threshold) as u64;
        let surplus = self.heap.counters.reserved().saturating_sub(bound);
        if surplus == 0 {
            return Ok(false);
        }
        self.totals.reclaim_stats.collect.tried += 1;
        // Age of a large idle segment, in requests.
        let age = |i: &IdleMemory| {
            let segment = self.heap.segment(self.heap.slot(i.start_block).segment);
            let counts = segment.virtual_range.is_none() && !self.heap.arenas[segment.arena as usize].small;
            counts.then(|| self.heap.clock - segment.idle_since)
        };
        let mut idle = self.idle_memory();
        idle.retain(|i| age(i).is_some());
        let average = idle.iter().filter_map(age).sum::<u64>() / (idle.len() as u64).max(1);
        idle.retain(|i| age(i) >= Some(average));
        idle.sort_by_key(|i| std::cmp::Reverse(age(i)));
        let chosen = self.select_idle(idle, surplus);
        Ok(self.release_idle(&chosen, false)? > 0)
    }

    fn largest_free(&self) -> u64 {
        self.heap.arenas.iter().filter_map(|a| a.free_list.largest()).map(|e| e.size).max().unwrap_or(0)
    }

    pub(super) fn stats(&self) -> Stats {
        self.heap.counters.to_stats(Stats {
            largest_free: self.largest_free(),
            max_split_size: self.config.max_split_size,
            expandable_segments: self.virtual_memory.is_some(),
            ..self.totals.clone()
        })
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.heap.counters.reset_accumulated();
        self.totals = Stats::default();
    }

    pub(super) fn out_of_memory(
        &self,
        need: &AllocRequest,
        memory: DeviceMemory,
        detail: String,
    ) -> OutOfMemory {
        let counters = &self.heap.counters;
        let largest_free = self.largest_free();
        let cached = counters.reserved().saturating_sub(counters.active() + counters.releasing_bytes);
        let mut by_tag = [0; Tag::COUNT];
        let mut by_module = std::collections::BTreeMap::<_, u64>::new();
        let mut largest_parameter = 0;
        for block in self.heap.all_blocks().filter(|b| b.state.is_allocated()) {
            by_tag[block.tag as usize] += block.size;
            if block.tag == Tag::Parameter {
                largest_parameter = block.size.max(largest_parameter);
            }
            if !block.module.is_root() {
                *by_module.entry(block.module).or_default() += block.size;
            }
        }
        by_tag[Tag::External as usize] += counters.external.current;
        let mut by_tag = Tag::ALL.into_iter().zip(by_tag).filter(|t| t.1 > 0).collect::<Vec<_>>();
        by_tag.sort_by_key(|t| std::cmp::Reverse(t.1));
        let mut by_module = by_module.into_iter().collect::<Vec<_>>();
        by_module.sort_by_key(|m| std::cmp::Reverse(m.1));
        by_module.truncate(OutOfMemory::MAX_LISTED);
        OutOfMemory {
            requested: need.requested,
            op: need.scope.op,
            site: need.scope.site,
            module: need.scope.module,
            tag: need.scope.tag,
            device: self.device.clone(),
            total: memory.total,
            free: memory.free,
            processes: Vec::new(),
            limit: self.limit,
            process_limit: self.process_limit(),
            process_reserved: process_reserved(),
            capacity: self.capacity(memory),
            max_segment: self.max_segment,
            batch: self.batch_estimate(need.size, largest_parameter),
            allocated: counters.allocated(),
            pending: counters.pending_bytes(),
            cached,
            largest_free,
            reserved: counters.reserved(),
            virtual_memory: self.virtual_memory.is_some(),
            detail,
            by_tag,
            by_module,
        }
    }

    /// Returns all memory to the source when the last handle is dropped.
    pub(super) fn release_all(&mut self) {
        if self.heap.segments.iter().all(Option::is_none) {
            return;
        }
        let fence = self.source.record_fence().and_then(|f| self.source.wait_fence(f));
        if let Err(error) = fence {
            // A lost device has lost its memory too.
            log::debug!("the pool was dropped without its device: {error}");
        }
        if let Err(error) = self.drop_all_stitches() {
            log::debug!("a segment was not freed: {error}");
        }
        for segment in std::mem::take(&mut self.heap.segments).into_iter().flatten() {
            let released = match segment.virtual_range {
                None => self.source.free_segment(segment.id),
                Some(range) => range
                    .extents
                    .into_iter()
                    .try_for_each(|(offset, size)| self.source.unmap(segment.id, offset, &[size]))
                    .and_then(|()| self.source.free_addresses(segment.id)),
            };
            if let Err(error) = released {
                log::debug!("a segment was not freed: {error}");
            }
        }
    }
}
