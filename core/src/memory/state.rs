//! What a pool keeps under its lock, and the steps of the ladder.

use std::collections::VecDeque;

use super::batch::BatchMemory;
use super::config::{Config, Fit};
use super::grow::MigrationBudget;
use super::heap::{AllocRequest, Arena, Heap, MIN_BLOCK, RETIRED, SHARED, SlotState as Is, Splitting};
use super::hysteresis::GrowthHysteresis;
use super::pool::{Block, Request, bit};
use super::process::{Share, process_reserved};
use super::source::{DeviceMemory, Fence, MAX_QUEUES, SegmentSource, VirtualMemory};
use super::stats::{ReclaimStats, Stats};
use super::{OutOfMemory, Tag};
use crate::error::Result;

/// Smaller rests of large plain blocks are not split off (PyTorch's kSmallSize).
const MIN_LARGE_REST: u64 = 1 << 20;

/// What waits for a fence.
#[derive(Clone, Copy, Debug)]
pub(super) enum Waiting {
    /// A freed block, to be reused.
    Block(u32),
    /// An idle segment, to be given back.
    Segment(u32),
    /// Extents of a range, to be unmapped: their block.
    Extents(u32),
    /// Extents of a range, to be moved to where memory is missing: their block.
    Donor(u32),
}

/// What became of an attempt to grow.
pub(super) enum Growth {
    /// The request was served.
    Served(Block),
    /// There is no room; what the source said.
    Full(String),
}

/// Blocks of extents that may move now.
#[derive(Debug, Default)]
pub(super) struct MigrationSources {
    pub(super) slots: Vec<u32>,
    /// The device may not have passed them: they move behind what it was given.
    pub(super) in_use: bool,
}

#[derive(Debug)]
pub(super) struct PoolState {
    /// The request that fails on purpose, by the heap's clock; 0 is none.
    pub(super) fails: u64,
    pub(super) heap: Heap,
    /// The private pools that live.
    pub(super) private: Vec<u16>,
    pub(super) config: Config,
    pub(super) device: Option<String>,
    pub(super) limit: Option<u64>,
    pub(super) max_segment: u64,
    pub(super) virtual_memory: Option<VirtualMemory>,
    /// In the order of the fences.
    pub(super) waiting: VecDeque<(Fence, Waiting)>,
    pub(super) donors: MigrationSources,
    pub(super) moved: MigrationBudget,
    /// Bytes that have moved lately for blocks that grow by a little each time.
    pub(super) crept: MigrationBudget,
    pub(super) rest: GrowthHysteresis,
    pub(super) share: Share,
    pub(super) rows: BatchMemory,
    pub(super) rungs: ReclaimStats,
    pub(super) num_alloc_retries: u64,
    pub(super) num_ooms: u64,
    pub(super) num_sync_all_streams: u64,
    pub(super) num_device_alloc: u64,
    /// Slots that are not to move, as often as somebody asked for that.
    pub(super) pinned: Vec<u32>,
    pub(super) has_mover: bool,
    /// Heaps whose memory planners use again.
    pub(super) spare: Vec<Heap>,
    pub(super) num_compactions: u64,
    pub(super) compacted_bytes: u64,
    num_device_free: u64,
    num_invalid_frees: u64,
}

/// Idle memory that could go back to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub(super) size: u64,
    pub(super) what: Idler,
}

/// What a piece of idle memory is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Idler {
    /// A segment.
    Segment(u32),
    /// Neighbouring extents from an offset on, in the free block at `near` or after it.
    Extents { near: u32, offset: u64 },
}

impl PoolState {
    pub(super) fn new(source: &dyn SegmentSource, config: Config) -> Self {
        let limits = source.limits();
        let rules = Splitting {
            unit: limits.alignment.max(MIN_BLOCK),
            max_split: config.max_split_size.unwrap_or(u64::MAX),
            max_rounding: config.max_non_split_rounding,
            low_fit: config.fit == Fit::Low,
            min_large_rest: MIN_LARGE_REST,
        };
        let mut heap = Heap::new(rules);
        let virtual_memory = limits.virtual_memory.filter(|_| config.expandable_segments);
        heap.counters.max_split = rules.max_split;
        let mut state = Self {
            heap,
            fails: 0,
            private: Vec::new(),
            config,
            device: None,
            limit: None,
            max_segment: limits.max_segment,
            virtual_memory,
            waiting: VecDeque::new(),
            donors: MigrationSources::default(),
            moved: MigrationBudget::default(),
            crept: MigrationBudget::default(),
            rest: GrowthHysteresis::default(),
            share: Share::new(source.is_real()),
            rows: BatchMemory::default(),
            rungs: ReclaimStats::default(),
            num_alloc_retries: 0,
            num_ooms: 0,
            num_sync_all_streams: 0,
            num_device_alloc: 0,
            num_device_free: 0,
            num_invalid_frees: 0,
            pinned: Vec::new(),
            has_mover: false,
            spare: Vec::new(),
            num_compactions: 0,
            compacted_bytes: 0,
        };
        state.set_limit(source);
        state
    }

    /// There is somebody who moves blocks.
    pub(super) fn set_mover(&mut self) {
        self.has_mover = true;
        if self.compacts() {
            // Small rests come together again.
            self.heap.rules.min_large_rest = 0;
            if self.virtual_memory.is_none() {
                self.moved = MigrationBudget::copied();
            }
        }
    }

    pub(super) fn set_limit(&mut self, source: &dyn SegmentSource) {
        let fraction = self.config.per_process_memory_fraction;
        let part = source.device_memory().total.filter(|_| fraction < 1.0);
        let part = part.map(|total| (total as f64 * fraction) as u64);
        self.limit = self.config.max_memory.into_iter().chain(part).min();
    }

    /// The bound on what all pools of the process hold, if there is one.
    pub(super) fn process_limit(&self) -> Option<u64> {
        self.share.limit(self.config.max_process_memory)
    }

    /// The most bytes that the pool may hold, as far as that is known.
    pub(super) fn room(&self, memory: DeviceMemory) -> Option<u64> {
        let reserved = self.heap.counters.reserved();
        let device = memory.free.map(|free| free.saturating_add(reserved));
        let others = process_reserved().saturating_sub(reserved);
        let process = self.process_limit().map(|limit| limit.saturating_sub(others).max(reserved));
        self.limit.into_iter().chain(device).chain(process).min()
    }

    #[inline]
    pub(super) fn need<'a>(&mut self, request: &'a Request) -> AllocRequest<'a> {
        let size = self.config.round(request.bytes, self.heap.rules.unit);
        let small = size <= self.config.small_size;
        let arena = match request.private {
            owner if owner != SHARED && self.private.contains(&owner) => {
                self.heap.private_arena(owner, request.queue, small)
            }
            // Inside a private pool of another device, too.
            _ => self.heap.arena(request.queue, small),
        };
        let held = if request.movable { Is::Loose } else { Is::Live };
        AllocRequest { arena, size, requested: request.bytes, scope: &request.scope, held }
    }

    /// Serves a request from free blocks.
    pub(super) fn take(&mut self, source: &dyn SegmentSource, need: &AllocRequest) -> Result<Option<Block>> {
        self.heap.take(need).map(|block| self.settled(source, block)).transpose()
    }

    /// A block that was just lent, once its queue waits for what it has to.
    #[inline]
    pub(super) fn settled(&mut self, source: &dyn SegmentSource, block: Block) -> Result<Block> {
        if self.heap.owes.is_some() {
            self.wait_cross_stream_uses(source, &block, block.queue)?;
        }
        Ok(block)
    }

    /// Serves a request from what is free in the arena of another queue, which it waits for on the device; of `any` kind, or of
    /// its own, small or large.
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
                && (a.owner == owner || a.owner == RETIRED)
        });
        let others: Vec<u16> = others.map(|(at, _)| at as u16).collect();
        for arena in others {
            let Some(mut block) = self.heap.take(&AllocRequest { arena, ..*need }) else { continue };
            block.queue = queue;
            self.wait_cross_stream_uses(source, &block, queue)?;
            let home = self.heap.arenas[usize::from(arena)].queue;
            if home != queue {
                let joined = source.record(home).and_then(|event| source.wait_event(queue, event));
                joined.inspect_err(|_| self.heap.free(block.slot))?;
            }
            return Ok(Some(block));
        }
        Ok(None)
    }

    /// Lets `queue` wait, on the device, for the uses by other queues of the block that it was just lent.
    #[cold]
    pub(super) fn wait_cross_stream_uses(
        &mut self,
        source: &dyn SegmentSource,
        block: &Block,
        queue: u8,
    ) -> Result<()> {
        let Some(owed) = self.heap.owes.take() else { return Ok(()) };
        let arena = &mut self.heap.arenas[usize::from(owed.arena)];
        let count = arena.uses.partition_point(|(number, _)| *number <= owed.last);
        let waited = arena.uses[..count].iter().try_for_each(|(_, event)| source.wait_event(queue, *event));
        if waited.is_ok() && queue == arena.queue {
            arena.uses.drain(..count);
        }
        waited.inspect_err(|_| self.heap.free_used(block.slot, owed.last))?;
        Ok(())
    }

    /// Takes a block back that these queues (a bit each) have used: its own queue reuses it after them.
    pub(super) fn free_used(&mut self, source: &dyn SegmentSource, slot: u32, queues: u8) -> Result<()> {
        let arena = self.heap.slot(slot).arena;
        let home = self.heap.arenas[usize::from(arena)].queue;
        let mut last = 0;
        for queue in (0..MAX_QUEUES).filter(|q| queues & bit(*q) != 0 && *q != home) {
            last = self.heap.used(arena, source.record(queue)?);
        }
        self.heap.free_used(slot, last);
        Ok(())
    }

    /// Gives back what a private pool holds that is idle, and the rest when it is.
    pub(super) fn retire(&mut self, source: &dyn SegmentSource, owner: u16) -> Result<()> {
        self.private.retain(|number| *number != owner);
        let mut own: Vec<bool> = Vec::new();
        for arena in &mut self.heap.arenas {
            own.push(arena.owner == owner);
            if arena.owner == owner {
                arena.owner = RETIRED;
            }
        }
        let mut idle = self.idle();
        let near = |heap: &Heap, i: &Idle| match i.what {
            Idler::Segment(segment) => heap.segment(segment).arena,
            Idler::Extents { near, .. } => heap.slot(near).arena,
        };
        idle.retain(|i| own[usize::from(near(&self.heap, i))]);
        self.leave(source, &idle, false)?;
        self.poll(source)
    }

    #[cold]
    pub(super) fn invalid_free(&mut self, block: &Block) {
        self.num_invalid_frees += 1;
        log::error!("a block was freed that is not held: {block:?}; nothing was freed");
    }

    pub(super) fn pend(&mut self, slot: u32, fence: Fence) {
        self.heap.pend(slot);
        self.enqueue(fence, Waiting::Block(slot));
    }

    fn enqueue(&mut self, fence: Fence, what: Waiting) {
        let at = match self.waiting.back() {
            Some((last, _)) if *last > fence => self.waiting.partition_point(|w| w.0 <= fence),
            _ => self.waiting.len(),
        };
        self.waiting.insert(at, (fence, what));
    }

    /// Does what waited for fences that the device has passed.
    pub(super) fn poll(&mut self, source: &dyn SegmentSource) -> Result<()> {
        let mut passed = None;
        while let Some((fence, what)) = self.waiting.front().copied() {
            if passed.is_none_or(|p| p < fence) {
                if !source.fence_done(fence)? {
                    break;
                }
                passed = Some(fence);
            }
            self.waiting.pop_front();
            self.passed(source, what)?;
        }
        self.share.settle(self.heap.counters.reserved());
        Ok(())
    }

    /// Does what waited, when the device is done with the memory.
    fn passed(&mut self, source: &dyn SegmentSource, what: Waiting) -> Result<()> {
        match what {
            Waiting::Block(slot) => self.heap.unpend(slot),
            Waiting::Segment(segment) => {
                if let Some(gone) = self.heap.remove_segment(segment) {
                    self.num_device_free += 1;
                    source.free_segment(gone.id)?;
                }
            }
            Waiting::Extents(slot) => {
                self.num_device_free += 1;
                let extents = self.heap.extents_of(slot);
                self.heap.unmapped(slot);
                let pieces = extents.iter().map(|e| e.1).collect::<Vec<_>>();
                if let Some(((id, offset), _)) = extents.first() {
                    source.unmap_pieces(*id, *offset, &pieces)?;
                }
            }
            Waiting::Donor(slot) => self.donors.slots.push(slot),
        }
        Ok(())
    }

    /// Idle memory: whole segments, and the whole extents of each free block in a range.
    pub(super) fn idle(&self) -> Vec<Idle> {
        let mut idle = Vec::new();
        // A private pool keeps what it has: addresses of a captured step must stay good.
        let arenas = self.heap.arenas.iter().filter(|a| matches!(a.owner, SHARED | RETIRED));
        // What is a part of a plain segment stays: it is left out before the rest is sorted.
        let some = |a: &Arena| a.bins.sorted_if(|e| e.whole || a.range.is_some());
        for free in arenas.flat_map(some) {
            let block = self.heap.slot(free.slot);
            let segment = self.heap.segment(block.segment);
            if segment.range.is_some() {
                idle.extend(self.extents(free.slot, block.offset, block.offset + block.size));
            } else if block.size == segment.size {
                idle.push(Idle { size: block.size, what: Idler::Segment(block.segment) });
            }
        }
        idle
    }

    /// The whole extents between two offsets of a free block; `None` if there are none.
    pub(super) fn extents(&self, near: u32, from: u64, to: u64) -> Option<Idle> {
        // None is smaller than a page.
        if to.saturating_sub(from) < self.virtual_memory.map_or(1, |v| v.granularity) {
            return None;
        }
        let range = self.heap.segment(self.heap.slot(near).segment).range.as_ref()?;
        let extents = &range.extents[range.extents.partition_point(|e| e.0 < from)..];
        let offset = extents.first()?.0;
        let last = extents.partition_point(|e| e.0 + e.1 <= to).checked_sub(1)?;
        let end = extents[last].0 + extents[last].1;
        Some(Idle { size: end - offset, what: Idler::Extents { near, offset } })
    }

    /// The last extents of these that make up `bytes`, or all.
    pub(super) fn cut(&self, idle: Idle, bytes: u64) -> Idle {
        let Idler::Extents { near, offset } = idle.what else { return idle };
        let end = offset + idle.size;
        let Some(range) = &self.heap.segment(self.heap.slot(near).segment).range else { return idle };
        let last = range.extents.partition_point(|e| e.0 + e.1 <= end - bytes.min(idle.size));
        let from = range.extents.get(last).map_or(offset, |e| e.0.max(offset));
        Idle { size: end - from, what: Idler::Extents { near, offset: from } }
    }

    /// Sends idle memory back to the device, as soon as it has passed what runs now.
    ///
    /// With `donors`, extents do not go back, but wait for [`grow`](Self::grow) to move them.
    pub(super) fn leave(&mut self, source: &dyn SegmentSource, idle: &[Idle], donors: bool) -> Result<u64> {
        if idle.is_empty() {
            return Ok(0);
        }
        // What nobody has had yet, since it was mapped ahead, can go at once.
        let unused = |idle: &Idle| match idle.what {
            Idler::Segment(_) => false,
            Idler::Extents { near, offset } => self.heap.slot(self.heap.block_at(near, offset)).is_unused(),
        };
        let fence = if idle.iter().all(unused) {
            None
        } else if donors && self.waiting.is_empty() && source.holds_back() {
            self.donors.in_use = true;
            None
        } else {
            Some(source.fence()?)
        };
        for Idle { size, what } in idle {
            let waiting = match *what {
                Idler::Segment(segment) => {
                    self.heap.leave_segment(segment);
                    Waiting::Segment(segment)
                }
                Idler::Extents { near, offset } => {
                    let slot = self.heap.leave_extents(near, offset, *size);
                    if donors { Waiting::Donor(slot) } else { Waiting::Extents(slot) }
                }
            };
            match fence {
                Some(fence) => self.enqueue(fence, waiting),
                None => self.passed(source, waiting)?,
            }
        }
        self.share.settle(self.heap.counters.reserved());
        Ok(idle.iter().map(|i| i.size).sum())
    }

    /// Sends idle memory back, the largest pieces first, until `bytes` bytes are on their way.
    pub(super) fn leave_all(&mut self, source: &dyn SegmentSource, bytes: u64) -> Result<u64> {
        let mut idle = self.idle();
        idle.sort_by_key(|i| std::cmp::Reverse(i.size));
        let chosen = self.first_of(idle, bytes);
        self.leave(source, &chosen, false)
    }

    /// `garbage_collection_threshold`: sends segments back that have been idle for longer than the average.
    pub(super) fn collect(&mut self, source: &dyn SegmentSource) -> Result<bool> {
        let threshold = self.config.garbage_collection_threshold;
        let Some(limit) = self.limit.filter(|_| threshold > 0.0) else { return Ok(false) };
        let bound = (limit as f64 * threshold) as u64;
        let surplus = self.heap.counters.reserved().saturating_sub(bound);
        if surplus == 0 {
            return Ok(false);
        }
        self.rungs.collect.tried += 1;
        // How long a large segment has been idle.
        let age = |i: &Idle| match i.what {
            Idler::Segment(segment) => {
                let segment = self.heap.segment(segment);
                let small = self.heap.arenas[segment.arena as usize].small;
                (!small).then(|| self.heap.clock - segment.idle_since)
            }
            Idler::Extents { .. } => None,
        };
        let mut idle = self.idle();
        idle.retain(|i| age(i).is_some());
        let average = idle.iter().filter_map(age).sum::<u64>() / (idle.len() as u64).max(1);
        idle.retain(|i| age(i) >= Some(average));
        idle.sort_by_key(|i| std::cmp::Reverse(age(i)));
        let chosen = self.first_of(idle, surplus);
        Ok(self.leave(source, &chosen, false)? > 0)
    }

    fn largest_free(&self) -> u64 {
        self.heap.arenas.iter().filter_map(|a| a.bins.largest()).map(|e| e.size).max().unwrap_or(0)
    }

    pub(super) fn stats(&self) -> Stats {
        Stats {
            largest_free: self.largest_free(),
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams,
            num_device_alloc: self.num_device_alloc,
            num_device_free: self.num_device_free,
            num_invalid_frees: self.num_invalid_frees,
            num_compactions: self.num_compactions,
            compacted_bytes: self.compacted_bytes,
            max_split_size: self.config.max_split_size,
            expandable_segments: self.virtual_memory.is_some(),
            rungs: self.rungs,
            ..self.heap.counters.read()
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.heap.counters.reset_accumulated();
        self.rungs = ReclaimStats::default();
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
        self.num_invalid_frees = 0;
        self.num_compactions = 0;
        self.compacted_bytes = 0;
    }

    pub(super) fn out_of_memory(
        &self,
        need: &AllocRequest,
        memory: DeviceMemory,
        detail: String,
    ) -> OutOfMemory {
        let counters = &self.heap.counters;
        let largest_free = self.largest_free();
        let cached = counters.reserved().saturating_sub(counters.active() + counters.leaving_bytes);
        let mut by_tag = [0; Tag::COUNT];
        let mut by_module = std::collections::BTreeMap::<_, u64>::new();
        let mut largest_parameter = 0;
        for block in self.heap.all_blocks().filter(|b| b.state.is_held()) {
            by_tag[block.tag as usize] += block.size;
            if block.tag == Tag::Parameter {
                largest_parameter = block.size.max(largest_parameter);
            }
            if !block.module.is_root() {
                *by_module.entry(block.module).or_default() += block.size;
            }
        }
        let mut by_tag = Tag::ALL.into_iter().zip(by_tag).filter(|t| t.1 > 0).collect::<Vec<_>>();
        by_tag.sort_by_key(|t| std::cmp::Reverse(t.1));
        let mut by_module = by_module.into_iter().collect::<Vec<_>>();
        by_module.sort_by_key(|m| std::cmp::Reverse(m.1));
        by_module.truncate(OutOfMemory::TOP);
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
            room: self.room(memory),
            max_segment: self.max_segment,
            rows: self.rows_need(need.size, largest_parameter),
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

    /// Gives everything back, when nobody can hold a block any more.
    pub(super) fn close(&mut self, source: &dyn SegmentSource) {
        if self.heap.segments.iter().all(Option::is_none) {
            return;
        }
        let fence = source.fence().and_then(|f| source.fence_wait(f));
        if let Err(error) = fence {
            // A lost device has lost its memory too.
            log::debug!("the pool was dropped without its device: {error}");
        }
        for segment in std::mem::take(&mut self.heap.segments).into_iter().flatten() {
            let given = match segment.range {
                None => source.free_segment(segment.id),
                Some(range) => range
                    .extents
                    .into_iter()
                    .try_for_each(|(offset, size)| source.unmap(segment.id, offset, size))
                    .and_then(|()| source.unreserve(segment.id)),
            };
            if let Err(error) = given {
                log::debug!("a segment was not given back: {error}");
            }
        }
    }
}
