//! A picture of a pool: every segment, and what lies in it.

use serde::Serialize;

use super::heap::State as Is;
use super::pool::Pool;
use super::state::State;

/// A segment, as PyTorch's snapshots describe it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SegmentInfo {
    /// The source's number for it: the device address on CUDA.
    pub address: u64,
    /// Bytes of memory in it.
    pub total_size: u64,
    /// The queue it serves.
    pub stream: u8,
    /// `small` or `large`.
    pub segment_type: &'static str,
    /// Bytes that are lent.
    pub allocated_size: u64,
    /// Bytes that are lent or wait for a fence.
    pub active_size: u64,
    /// Whether it is a range of addresses that memory is mapped into.
    pub is_expandable: bool,
    /// What it is cut into, by address; unmapped addresses are left out.
    pub blocks: Vec<BlockInfo>,
}

/// A part of a segment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BlockInfo {
    /// Its first byte in the segment.
    pub offset: u64,
    /// Bytes, after rounding.
    pub size: u64,
    /// Bytes, as requested; 0 if it is not lent.
    pub requested_size: u64,
    /// `active_allocated`, `active_awaiting_free`, `inactive`, or `leaving` (on its way back to the device).
    pub state: &'static str,
    /// What it was lent for; absent if it is not lent.
    pub tag: Option<&'static str>,
    /// The module it was lent to; empty if there was none.
    pub module: String,
    /// The operation it was lent to; empty if there was none.
    pub op: &'static str,
}

impl Pool {
    /// Every segment with its blocks, for reports.
    #[must_use]
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.shared.lock().snapshot()
    }
}

impl State {
    fn snapshot(&self) -> Vec<SegmentInfo> {
        let segments = self.heap.live_segments().map(|segment| {
            let arena = &self.heap.arenas[segment.arena as usize];
            let mut info = SegmentInfo {
                address: segment.id.0,
                total_size: 0,
                stream: arena.queue,
                segment_type: if arena.small { "small" } else { "large" },
                allocated_size: 0,
                active_size: 0,
                is_expandable: segment.range.is_some(),
                blocks: Vec::new(),
            };
            for block in self.heap.blocks(segment) {
                let state = match block.state {
                    Is::Live => "active_allocated",
                    Is::Pending => "active_awaiting_free",
                    Is::Free => "inactive",
                    Is::Leaving => "leaving",
                    Is::Unmapped | Is::Vacant => continue,
                };
                let live = block.state == Is::Live;
                info.total_size += block.size;
                info.allocated_size += if live { block.size } else { 0 };
                info.active_size += if live || block.state == Is::Pending { block.size } else { 0 };
                info.blocks.push(BlockInfo {
                    offset: block.offset,
                    size: block.size,
                    requested_size: if live { block.requested } else { 0 },
                    state,
                    tag: live.then(|| block.tag.name()),
                    module: if live { block.module.to_string() } else { String::new() },
                    op: if live { block.op } else { "" },
                });
            }
            info
        });
        segments.collect()
    }
}
