//! Model of PyTorch's allocator with `expandable_segments:True` (c10/cuda/CUDACachingAllocator.cpp, 2.11), which agrees
//! with all recorded figures. The default allocator's model is [`Config::pytorch`](forebay::memory::Config::pytorch).

use std::collections::{BTreeMap, BTreeSet};

use forebay::memory::trace::{PyTorchBaseline, Trace, TraceEvent};

const MIB: u64 = 1 << 20;
/// Larger than the address space that any workload needs.
const ADDRESS_SPACE: u64 = 1 << 46;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    Free,
    Allocated,
    Unmapped,
}

/// Expandable segment of one queue, for small or large allocations.
#[derive(Debug)]
struct ExpandableSegment {
    /// Granularity of mapping.
    page_size: u64,
    /// Blocks by address: size and state.
    blocks: BTreeMap<u64, (u64, BlockState)>,
    /// Free blocks, ordered by size, then by address.
    free: BTreeSet<(u64, u64)>,
    mapped: u64,
    calls: u64,
}

impl ExpandableSegment {
    fn new(small: bool) -> Self {
        let blocks = BTreeMap::from([(0, (ADDRESS_SPACE, BlockState::Unmapped))]);
        let page = if small { 2 * MIB } else { 20 * MIB };
        Self { page_size: page, blocks, free: BTreeSet::new(), mapped: 0, calls: 0 }
    }

    fn next_block(&self, at: u64) -> Option<(u64, u64, BlockState)> {
        let next = self.blocks.range(at + 1..).next();
        next.map(|(at, (bytes, state))| (*at, *bytes, *state))
    }

    fn prev_block(&self, at: u64) -> Option<(u64, u64, BlockState)> {
        let before = self.blocks.range(..at).next_back();
        before.map(|(at, (bytes, state))| (*at, *bytes, *state))
    }

    /// Returns the size of a free block including unmapped memory after it, as in `get_free_block`.
    fn expandable_size(&self, (bytes, at): (u64, u64)) -> u64 {
        match self.next_block(at) {
            Some((_, more, BlockState::Unmapped)) => bytes + more,
            _ => bytes,
        }
    }

    fn alloc(&mut self, bytes: u64) -> u64 {
        let mut fits = self.free.range((bytes, 0)..).copied();
        let mut found = fits.next();
        while let (Some(best), Some(next)) = (found, fits.next()) {
            if self.expandable_size(next) >= self.expandable_size(best) {
                break;
            }
            found = Some(next);
        }
        let at = found.map_or_else(|| self.expand(bytes), |(_, at)| at);
        self.split_and_allocate(at, bytes)
    }

    /// Maps memory at the first address with enough free or unmapped space: `try_allocate_expandable_block`.
    fn expand(&mut self, bytes: u64) -> u64 {
        let holes = self.blocks.iter().filter(|(_, of)| of.1 == BlockState::Unmapped).map(|(at, _)| *at);
        let addresses = holes.map(|at| match self.prev_block(at) {
            Some((before, _, BlockState::Free)) => before,
            _ => at,
        });
        let room = |at: &u64| {
            let unused = self.blocks.range(at..).take_while(|(_, of)| of.1 != BlockState::Allocated);
            unused
                .map(|(_, of)| of.0)
                .scan(0, |sum, of| {
                    *sum += of;
                    Some(*sum)
                })
                .any(|sum| sum >= bytes)
        };
        let mut at = addresses.filter(room).min().unwrap_or(0);
        loop {
            let (size, state) = self.blocks[&at];
            match state {
                BlockState::Unmapped => at = self.map(at, size.min(bytes)),
                _ if size >= bytes => return at,
                _ => {
                    let (next, more, _) = self.next_block(at).unwrap_or((at, 0, BlockState::Allocated));
                    at = self.map(next, more.min(bytes - size));
                }
            }
        }
    }

    /// Maps the first bytes of an unmapped block, and returns the free block that contains them: `map_block`.
    fn map(&mut self, at: u64, bytes: u64) -> u64 {
        let (size, bytes) = (self.blocks[&at].0, bytes.next_multiple_of(self.page_size));
        if size > bytes {
            self.blocks.insert(at + bytes, (size - bytes, BlockState::Unmapped));
        }
        self.mapped += bytes;
        self.calls += 1;
        self.blocks.insert(at, (bytes, BlockState::Allocated));
        self.free_block(at)
    }

    fn split_and_allocate(&mut self, at: u64, bytes: u64) -> u64 {
        let (size, _) = self.blocks[&at];
        self.free.remove(&(size, at));
        if size > bytes {
            self.blocks.insert(at + bytes, (size - bytes, BlockState::Free));
            self.free.insert((size - bytes, at + bytes));
        }
        self.blocks.insert(at, (bytes, BlockState::Allocated));
        at
    }

    /// Frees a block and merges it with its free neighbours.
    fn free_block(&mut self, mut at: u64) -> u64 {
        let (mut bytes, _) = self.blocks[&at];
        if let Some((next, more, BlockState::Free)) = self.next_block(at) {
            self.blocks.remove(&next);
            self.free.remove(&(more, next));
            bytes += more;
        }
        if let Some((before, more, BlockState::Free)) = self.prev_block(at) {
            self.blocks.remove(&at);
            self.free.remove(&(more, before));
            (at, bytes) = (before, bytes + more);
        }
        self.blocks.insert(at, (bytes, BlockState::Free));
        self.free.insert((bytes, at));
        at
    }
}

/// Simulates PyTorch's allocator with expandable segments on a trace.
pub(super) fn simulate_expandable_segments(trace: &Trace) -> PyTorchBaseline {
    let mut segments: BTreeMap<(u8, bool), ExpandableSegment> = BTreeMap::new();
    let mut held = vec![((0, false), 0); trace.slot_count];
    for event in &trace.events {
        match *event {
            TraceEvent::Alloc { slot, bytes, queue } => {
                let bytes = bytes.max(1).next_multiple_of(512);
                let of = (queue, bytes <= MIB);
                let segment = segments.entry(of).or_insert_with(|| ExpandableSegment::new(of.1));
                held[slot as usize] = (of, segment.alloc(bytes));
            }
            TraceEvent::Free { slot } => {
                let (of, at) = held[slot as usize];
                if let Some(segment) = segments.get_mut(&of) {
                    segment.free_block(at);
                }
            }
        }
    }
    PyTorchBaseline {
        allocator: "expandable".to_owned(),
        // No memory is unmapped.
        peak_reserved: segments.values().map(|s| s.mapped).sum(),
        device_allocs: segments.values().map(|s| s.calls).sum(),
        device_frees: 0,
        ..trace.baseline.clone()
    }
}
