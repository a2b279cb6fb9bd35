//! State of a pool, which its lock protects, and the steps of the slow path.

use std::collections::VecDeque;

use super::batch::BatchMemory;
use super::config::{Config, FitPolicy};
use super::grow::{CreepDetector, MigrationBudget};
use super::heap::{
    AllocRequest, Arena, Heap, MIN_BLOCK, RETIRED_OWNER, SHARED_OWNER, SlotState as Is, SplitRules,
};
use super::hysteresis::GrowthHysteresis;
use super::pool::{Block, Request, stream_bit};
use super::process::{ProcessShare, process_reserved};
use super::source::{DeviceMemory, Fence, MAX_QUEUES, SegmentSource, VirtualMemory};
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
    /// An idle segment, to be returned to the device.
    Segment(u32),
    /// The block of extents to be unmapped.
    Extents(u32),
    /// The block of extents to be moved to where memory is missing.
    MigrationSource(u32),
}

/// Outcome of an attempt to grow.
pub(super) enum GrowOutcome {
    /// The request was served.
    Served(Block),
    /// No room; the source's message.
    Full(String),
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
    pub(super) hysteresis: GrowthHysteresis,
    pub(super) process_share: ProcessShare,
    pub(super) batch_memory: BatchMemory,
    /// Statistics of the slow path and of calls; the heap counts the others.
    pub(super) totals: Stats,
    /// Slots of pinned blocks, once for each pin.
    pub(super) pinned_slots: Vec<u32>,
    pub(super) has_mover: bool,
}

/// Idle memory that could return to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdleMemory {
    pub(super) size: u64,
    pub(super) kind: IdleKind,
}

/// Kind of a piece of idle memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum IdleKind {
    /// A whole segment.
    Segment(u32),
    /// Neighbouring extents from `offset` on, in the free block `start_block` or after it.
    Extents { start_block: u32, offset: u64 },
}

impl PoolState {
    pub(super) fn new(source: &dyn SegmentSource, config: Config) -> Self {
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
            hysteresis: GrowthHysteresis::default(),
            process_share: ProcessShare::new(source.is_device_memory()),
            batch_memory: BatchMemory::default(),
            totals: Stats::default(),
            pinned_slots: Vec::new(),
            has_mover: false,
        };
        state.set_limit(source);
        state
    }

    /// Registers the block mover and enables compaction.
    pub(super) fn set_mover(&mut self) {
        self.has_mover = true;
        if self.is_compaction_enabled() {
            // Compaction joins small remainders again.
            self.heap.rules.min_large_remainder = 0;
        }
    }

    pub(super) fn set_limit(&mut self, source: &dyn SegmentSource) {
        let fraction = self.config.per_process_memory_fraction;
        let part = source.device_memory().total.filter(|_| fraction < 1.0);
        let part = part.map(|total| (total as f64 * fraction) as u64);
        self.limit = self.config.max_memory.into_iter().chain(part).min();
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

    #[inline]
    pub(super) fn resolve_request<'a>(&mut self, request: &'a Request) -> AllocRequest<'a> {
        let rounded = self.config.round_size(request.bytes, self.heap.rules.unit);
        // Rounding must not refuse a request that fits one segment.
        let size = if request.bytes <= self.max_segment { rounded.min(self.max_segment) } else { rounded };
        let small = size <= self.config.small_size;
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

    /// Serves a request from free blocks.
    pub(super) fn take_free_block(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
    ) -> Result<Option<Block>> {
        self.heap.take_free_block(need).map(|block| self.finish_alloc(source, block)).transpose()
    }

    /// Completes an allocation: enqueues the pending cross-stream waits of its queue.
    #[inline]
    pub(super) fn finish_alloc(&mut self, source: &dyn SegmentSource, block: Block) -> Result<Block> {
        if self.heap.pending_waits.is_some() {
            self.wait_cross_stream_uses(source, &block, block.queue)?;
        }
        Ok(block)
    }

    /// Serves a request from a free block of another queue's arena, which the request's queue waits for on
    /// the device. The block is of `any` size class, or of the request's own.
    pub(super) fn take_cross_stream(
        &mut self,
        source: &dyn SegmentSource,
        need: &AllocRequest,
        any: bool,
    ) -> Result<Option<Block>> {
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
            self.wait_cross_stream_uses(source, &block, queue)?;
            let home = self.heap.arenas[usize::from(arena)].queue;
            if home != queue {
                let joined = source.record_event(home).and_then(|event| source.wait_event(queue, event));
                joined.inspect_err(|_| self.heap.free(block.slot))?;
            }
            return Ok(Some(block));
        }
        Ok(None)
    }

    /// Makes `queue` wait, on the device, for cross-stream uses of the block that was just allocated for it.
    #[cold]
    pub(super) fn wait_cross_stream_uses(
        &mut self,
        source: &dyn SegmentSource,
        block: &Block,
        queue: u8,
    ) -> Result<()> {
        let Some(owed) = self.heap.pending_waits.take() else { return Ok(()) };
        let arena = &mut self.heap.arenas[usize::from(owed.arena)];
        let count = arena.cross_stream_uses.partition_point(|(number, _)| *number <= owed.last_use);
        let waited = arena.cross_stream_uses[..count]
            .iter()
            .try_for_each(|(_, event)| source.wait_event(queue, *event));
        if waited.is_ok() && queue == arena.queue {
            arena.cross_stream_uses.drain(..count);
        }
        waited.inspect_err(|_| self.heap.free_cross_stream(block.slot, owed.last_use))?;
        Ok(())
    }

    /// Frees a block that these queues (a bit each) have used: its own queue reuses the block after them.
    pub(super) fn free_cross_stream(
        &mut self,
        source: &dyn SegmentSource,
        slot: u32,
        queues: u8,
    ) -> Result<()> {
        let arena = self.heap.slot(slot).arena;
        let home = self.heap.arenas[usize::from(arena)].queue;
        let mut last = 0;
        for queue in (0..MAX_QUEUES).filter(|q| queues & stream_bit(*q) != 0 && *q != home) {
            last = self.heap.record_cross_stream_use(arena, source.record_event(queue)?);
        }
        self.heap.free_cross_stream(slot, last);
        Ok(())
    }

    /// Releases the idle memory of a private pool, and retires its arenas, so that the rest serves other
    /// requests.
    pub(super) fn retire_private_pool(&mut self, source: &dyn SegmentSource, owner: u16) -> Result<()> {
        self.private_pools.retain(|number| *number != owner);
        let mut own: Vec<bool> = Vec::new();
        for arena in &mut self.heap.arenas {
            own.push(arena.owner == owner);
            if arena.owner == owner {
                arena.owner = RETIRED_OWNER;
            }
        }
        let mut idle = self.idle_memory();
        let arena_of = |heap: &Heap, i: &IdleMemory| match i.kind {
            IdleKind::Segment(segment) => heap.segment(segment).arena,
            IdleKind::Extents { start_block, .. } => heap.slot(start_block).arena,
        };
        idle.retain(|i| own[usize::from(arena_of(&self.heap, i))]);
        self.release_idle(source, &idle, false)?;
        self.poll_fences(source)
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

    fn enqueue_release(&mut self, fence: Fence, what: PendingRelease) {
        let at = match self.pending_releases.back() {
            Some((last, _)) if *last > fence => self.pending_releases.partition_point(|w| w.0 <= fence),
            _ => self.pending_releases.len(),
        };
        self.pending_releases.insert(at, (fence, what));
    }

    /// Completes releases whose fences the device has passed.
    pub(super) fn poll_fences(&mut self, source: &dyn SegmentSource) -> Result<()> {
        let mut passed = None;
        while let Some((fence, what)) = self.pending_releases.front().copied() {
            if passed.is_none_or(|p| p < fence) {
                if !source.is_fence_signaled(fence)? {
                    break;
                }
                passed = Some(fence);
            }
            self.pending_releases.pop_front();
            self.complete_release(source, what)?;
        }
        self.process_share.set_reserved(self.heap.counters.reserved());
        Ok(())
    }

    /// Completes a release, when the device no longer uses the memory.
    fn complete_release(&mut self, source: &dyn SegmentSource, what: PendingRelease) -> Result<()> {
        match what {
            PendingRelease::Block(slot) => self.heap.complete_pending(slot),
            PendingRelease::Segment(segment) => {
                if let Some(gone) = self.heap.remove_segment(segment) {
                    self.totals.num_device_free += 1;
                    source.free_segment(gone.id)?;
                }
            }
            PendingRelease::Extents(slot) => {
                self.totals.num_device_free += 1;
                let extents = self.heap.extents_in_block(slot);
                self.heap.mark_unmapped(slot);
                let pieces = extents.iter().map(|e| e.1).collect::<Vec<_>>();
                if let Some(((id, offset), _)) = extents.first() {
                    source.unmap_extents(*id, *offset, &pieces)?;
                }
            }
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
                idle.push(IdleMemory { size: block.size, kind: IdleKind::Segment(block.segment) });
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
        Some(IdleMemory { size: end - offset, kind: IdleKind::Extents { start_block, offset } })
    }

    /// Returns the last extents of `idle` that make up `bytes`, or all of them.
    pub(super) fn trim_idle(&self, idle: IdleMemory, bytes: u64) -> IdleMemory {
        let IdleKind::Extents { start_block, offset } = idle.kind else { return idle };
        let end = offset + idle.size;
        let Some(range) = &self.heap.segment(self.heap.slot(start_block).segment).virtual_range else {
            return idle;
        };
        let last = range.extents.partition_point(|e| e.0 + e.1 <= end - bytes.min(idle.size));
        let from = range.extents.get(last).map_or(offset, |e| e.0.max(offset));
        IdleMemory { size: end - from, kind: IdleKind::Extents { start_block, offset: from } }
    }

    /// Releases idle memory to the device, after the work submitted so far.
    ///
    /// If `donors`, extents are not unmapped, but wait for [`grow`](Self::grow) to move them.
    pub(super) fn release_idle(
        &mut self,
        source: &dyn SegmentSource,
        idle: &[IdleMemory],
        donors: bool,
    ) -> Result<u64> {
        if idle.is_empty() {
            return Ok(0);
        }
        // Memory that was mapped ahead and never used can be released at once.
        let unused = |idle: &IdleMemory| match idle.kind {
            IdleKind::Segment(_) => false,
            IdleKind::Extents { start_block, offset } => {
                self.heap.slot(self.heap.find_block_at(start_block, offset)).is_never_used()
            }
        };
        let fence = if idle.iter().all(unused) {
            None
        } else if donors && self.pending_releases.is_empty() && source.has_deferred_work() {
            self.migration_sources.may_be_in_use = true;
            None
        } else {
            Some(source.record_fence()?)
        };
        for IdleMemory { size, kind: what } in idle {
            let waiting = match *what {
                IdleKind::Segment(segment) => {
                    self.heap.mark_segment_releasing(segment);
                    PendingRelease::Segment(segment)
                }
                IdleKind::Extents { start_block, offset } => {
                    let slot = self.heap.mark_extents_releasing(start_block, offset, *size);
                    if donors { PendingRelease::MigrationSource(slot) } else { PendingRelease::Extents(slot) }
                }
            };
            match fence {
                Some(fence) => self.enqueue_release(fence, waiting),
                None => self.complete_release(source, waiting)?,
            }
        }
        self.process_share.set_reserved(self.heap.counters.reserved());
        Ok(idle.iter().map(|i| i.size).sum())
    }

    /// Releases idle memory, the largest pieces first, until `bytes` bytes are being released.
    pub(super) fn release_largest_idle(&mut self, source: &dyn SegmentSource, bytes: u64) -> Result<u64> {
        let mut idle = self.idle_memory();
        idle.sort_by_key(|i| std::cmp::Reverse(i.size));
        let chosen = self.select_idle(idle, bytes);
        self.release_idle(source, &chosen, false)
    }

    /// Applies `garbage_collection_threshold`: releases segments that have been idle for longer than the
    /// average.
    pub(super) fn collect_garbage(&mut self, source: &dyn SegmentSource) -> Result<bool> {
        let threshold = self.config.garbage_collection_threshold;
        let Some(limit) = self.limit.filter(|_| threshold > 0.0) else { return Ok(false) };
        let bound = (limit as f64 * threshold) as u64;
        let surplus = self.heap.counters.reserved().saturating_sub(bound);
        if surplus == 0 {
            return Ok(false);
        }
        self.totals.reclaim_stats.collect.tried += 1;
        // Age of a large idle segment, in requests.
        let age = |i: &IdleMemory| match i.kind {
            IdleKind::Segment(segment) => {
                let segment = self.heap.segment(segment);
                let small = self.heap.arenas[segment.arena as usize].small;
                (!small).then(|| self.heap.clock - segment.idle_since)
            }
            IdleKind::Extents { .. } => None,
        };
        let mut idle = self.idle_memory();
        idle.retain(|i| age(i).is_some());
        let average = idle.iter().filter_map(age).sum::<u64>() / (idle.len() as u64).max(1);
        idle.retain(|i| age(i) >= Some(average));
        idle.sort_by_key(|i| std::cmp::Reverse(age(i)));
        let chosen = self.select_idle(idle, surplus);
        Ok(self.release_idle(source, &chosen, false)? > 0)
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
        by_tag[Tag::External as usize] += counters.external();
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
    pub(super) fn release_all(&mut self, source: &dyn SegmentSource) {
        if self.heap.segments.iter().all(Option::is_none) {
            return;
        }
        let fence = source.record_fence().and_then(|f| source.wait_fence(f));
        if let Err(error) = fence {
            // A lost device has lost its memory too.
            log::debug!("the pool was dropped without its device: {error}");
        }
        for segment in std::mem::take(&mut self.heap.segments).into_iter().flatten() {
            let released = match segment.virtual_range {
                None => source.free_segment(segment.id),
                Some(range) => range
                    .extents
                    .into_iter()
                    .try_for_each(|(offset, size)| source.unmap(segment.id, offset, size))
                    .and_then(|()| source.free_addresses(segment.id)),
            };
            if let Err(error) = released {
                log::debug!("a segment was not freed: {error}");
            }
        }
    }
}
