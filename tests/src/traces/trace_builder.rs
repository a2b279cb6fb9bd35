//! Builder of synthetic traces: records the allocations and frees of a simulated program, with a seeded generator.

use forebay::memory::trace::{PyTorchBaseline, Trace, TraceEvent};

/// Block of the simulated program, as a slot in the trace's table.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockId(u32);

#[derive(Debug)]
pub(super) struct TraceBuilder {
    /// Queue of the following allocations.
    pub(super) queue: u8,
    events: Vec<TraceEvent>,
    /// Bytes of the block in each slot.
    slot_bytes: Vec<u64>,
    free_slots: Vec<u32>,
    requested: u64,
    peak: u64,
    seed: u64,
}

impl TraceBuilder {
    pub(super) fn new(seed: u64) -> Self {
        Self { queue: 0, events: vec![], slot_bytes: vec![], free_slots: vec![], requested: 0, peak: 0, seed }
    }

    /// Returns a random number in this range, ends included.
    pub(super) fn rand_range(&mut self, from: u64, to: u64) -> u64 {
        // SplitMix64
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        from + (z ^ (z >> 31)) % (to - from + 1)
    }

    pub(super) fn alloc(&mut self, bytes: u64) -> BlockId {
        self.requested += bytes;
        self.peak = self.peak.max(self.requested);
        let slot = self.free_slots.pop().unwrap_or(self.slot_bytes.len() as u32);
        match self.slot_bytes.get_mut(slot as usize) {
            Some(of) => *of = bytes,
            None => self.slot_bytes.push(bytes),
        }
        self.events.push(TraceEvent::Alloc { slot, bytes, queue: self.queue });
        BlockId(slot)
    }

    pub(super) fn alloc_all(&mut self, bytes: impl IntoIterator<Item = u64>) -> Vec<BlockId> {
        bytes.into_iter().map(|bytes| self.alloc(bytes)).collect()
    }

    pub(super) fn free(&mut self, blocks: impl IntoIterator<Item = BlockId>) {
        for BlockId(slot) in blocks {
            self.requested -= self.slot_bytes[slot as usize];
            self.free_slots.push(slot);
            self.events.push(TraceEvent::Free { slot });
        }
    }

    /// Allocates and frees the scratch memory of one operation.
    pub(super) fn alloc_scratch(&mut self, bytes: u64) {
        let block = self.alloc(bytes);
        self.free([block]);
    }

    /// Replaces a block by the next value of a chain: allocates the new one, then frees the old one.
    pub(super) fn replace_block(&mut self, of: &mut BlockId, bytes: u64) {
        let next = self.alloc(bytes);
        self.free([std::mem::replace(of, next)]);
    }

    pub(super) fn into_trace(self, name: &str) -> Trace {
        // PyTorch's figures for this trace are not known.
        let recorded = PyTorchBaseline {
            workload: name.to_owned(),
            allocator: String::new(),
            peak_requested: self.peak,
            peak_reserved: 0,
            device_allocs: 0,
            device_frees: 0,
        };
        Trace {
            baseline: recorded,
            events: self.events,
            slot_count: self.slot_bytes.len(),
            peak_requested: self.peak,
        }
    }
}
