//! Checks of values from files. A snapshot or trace that no pool can have written is rejected when it is
//! read, so that later sums cannot overflow.

use super::recorder::Action;
use super::snapshot::{BlockInfo, BlockState, EventInfo, SegmentInfo, Snapshot};
use super::{Bytes, Tag};
use crate::memory::error::{Error, Result};

/// Most bytes of memory, and the latest time in microseconds: 2^53. No machine has as much memory, and
/// JavaScript numbers are exact up to it.
pub(crate) const MAX_MEMORY_BYTES: u64 = 1 << 53;
/// Largest count, or sum over a program's whole run, and the end of all addresses.
const MAX_CUMULATIVE: u64 = 1 << 62;

/// Fails if a size exceeds any memory.
pub(crate) fn check_bytes(name: &str, bytes: u64) -> Result<(), String> {
    if bytes > MAX_MEMORY_BYTES {
        return Err(format!("{name} is {bytes}; no memory has more than {MAX_MEMORY_BYTES} bytes"));
    }
    Ok(())
}

/// Fails if a count is impossibly large.
pub(crate) fn check_count(name: &str, count: u64) -> Result<(), String> {
    if count > MAX_CUMULATIVE {
        return Err(format!("{name} is {count}; the most that can be is {MAX_CUMULATIVE}"));
    }
    Ok(())
}

/// Deserializes a size.
///
/// # Errors
/// The size exceeds any memory.
#[doc(hidden)]
pub fn deserialize_bytes<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let size = <u64 as serde::Deserialize>::deserialize(from)?;
    check_bytes("a size", size).map_err(serde::de::Error::custom)?;
    Ok(size)
}

/// Deserializes a count.
///
/// # Errors
/// The count is impossibly large.
#[doc(hidden)]
pub fn deserialize_count<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let number = <u64 as serde::Deserialize>::deserialize(from)?;
    check_count("a count", number).map_err(serde::de::Error::custom)?;
    Ok(number)
}

/// Returns the end of a range of addresses.
fn checked_end(name: &str, address: u64, size: u64) -> Result<u64, String> {
    check_bytes(&format!("the size of {name}"), size)?;
    let end = address.checked_add(size).filter(|end| *end <= MAX_CUMULATIVE);
    end.ok_or_else(|| format!("{name} starts at {address:#x}, which is after the last address"))
}

/// Adds to a sum of memory.
fn checked_add(name: &str, sum: &mut u64, size: u64) -> Result<(), String> {
    *sum = sum.saturating_add(size);
    check_bytes(name, *sum)
}

impl Snapshot {
    /// Checks the snapshot for contradictions: sizes and addresses that overflow, blocks that overlap or
    /// leave their segment, wrong sums, and missing holders. [`read`](Self::read) and [`load`](Self::load)
    /// call it.
    ///
    /// # Errors
    /// No pool can have such a snapshot.
    pub fn check(&self) -> Result<()> {
        self.check_consistency().map_err(|what| {
            Error::Snapshot(format!(
                "the snapshot is inconsistent: {what}; the file is damaged, or no pool wrote it: save it again"
            ))
        })
    }

    fn check_consistency(&self) -> Result<(), String> {
        check_bytes("time_us", self.time_us)?;
        check_count("dropped_events", self.dropped_events)?;
        self.check_stats()?;
        let mut total = 0;
        for (at, segment) in self.segments.iter().enumerate() {
            self.check_segment(segment).map_err(|what| format!("segment {at}: {what}"))?;
            checked_add("the size of all segments", &mut total, segment.total_size)?;
        }
        let mut segments: Vec<&SegmentInfo> = self.segments.iter().collect();
        segments.sort_by_key(|s| s.address);
        for pair in segments.windows(2) {
            if pair[0].address + pair[0].total_size > pair[1].address {
                return Err(format!(
                    "the segments at {:#x} and {:#x} overlap",
                    pair[0].address, pair[1].address
                ));
            }
        }
        self.check_events(total)
    }

    fn check_stats(&self) -> Result<(), String> {
        for (key, &value) in &self.stats {
            // Sums over the whole run may exceed the memory at any one time.
            let ever = [".allocated", ".freed"].iter().any(|end| key.ends_with(end));
            let size = key.contains("bytes") && !ever && key != "compacted_bytes";
            let name = format!("the statistic `{key}`");
            if size { check_bytes(&name, value)? } else { check_count(&name, value)? }
        }
        for (key, &current) in &self.stats {
            let Some(name) = key.strip_suffix(".current") else { continue };
            let peak = self.stats.get(&format!("{name}.peak"));
            if peak.is_some_and(|peak| *peak < current) {
                return Err(format!("the statistic `{name}` is {current}, above its peak"));
            }
        }
        let stat = |key: &str| self.stats.get(key).copied();
        for field in ["current", "peak"] {
            let [allocated, reserved] =
                ["allocated_bytes", "reserved_bytes"].map(|name| stat(&format!("{name}.all.{field}")));
            if let (Some(allocated), Some(reserved)) = (allocated, reserved)
                && allocated > reserved
            {
                return Err(format!("{field}: {allocated} bytes are allocated, and {reserved} reserved"));
            }
        }
        Ok(())
    }

    fn check_segment(&self, segment: &SegmentInfo) -> Result<(), String> {
        let last = checked_end("it", segment.address, segment.total_size)?;
        let mut at = segment.address;
        let mut sums = SegmentInfo::default();
        for (number, block) in segment.blocks.iter().enumerate() {
            self.check_block(block).map_err(|what| format!("block {number}: {what}"))?;
            let ends = checked_end("it", block.address, block.size)
                .map_err(|what| format!("block {number}: {what}"))?;
            if block.address < at || ends > last {
                return Err(format!(
                    "block {number} ({:#x} to {ends:#x}) overlaps the block before it, or lies outside of the segment ({:#x} to {last:#x})",
                    block.address, segment.address
                ));
            }
            at = ends;
            sums.add_sizes(block);
        }
        let figures = [
            ("total_size", segment.total_size, sums.total_size),
            ("allocated_size", segment.allocated_size, sums.allocated_size),
            ("active_size", segment.active_size, sums.active_size),
            ("requested_size", segment.requested_size, sums.requested_size),
        ];
        match figures.into_iter().find(|(_, stated, sum)| stated != sum) {
            Some((name, stated, sum)) => Err(format!("{name} is {stated}, and that of its blocks is {sum}")),
            None => Ok(()),
        }
    }

    fn check_block(&self, block: &BlockInfo) -> Result<(), String> {
        if block.requested_size > block.size {
            return Err(format!("{} bytes are requested of {}", block.requested_size, block.size));
        }
        self.check_holder(block.holder, block.state == BlockState::ActiveAllocated)
    }

    fn check_holder(&self, holder: Option<usize>, expected: bool) -> Result<(), String> {
        let count = self.holders.len();
        match (holder, expected) {
            (Some(index), _) if index >= count => {
                Err(format!("holder {index} is named, and there are {count}"))
            }
            (Some(_), false) => Err("it names a holder, and is not allocated".to_owned()),
            (None, true) => Err("it names no holder".to_owned()),
            _ => Ok(()),
        }
    }

    /// Undoes the events from the current state, as the timeline does: no sum may exceed any memory.
    fn check_events(&self, reserved: u64) -> Result<(), String> {
        let mut reserved = reserved;
        let mut tags = [0_u64; Tag::COUNT];
        let mut holders = vec![0_u64; self.holders.len()];
        for (block, holder) in self.live_blocks() {
            tags[holder.tag as usize] += block.size;
            if let Some(held) = block.holder.and_then(|holder| holders.get_mut(holder)) {
                *held += block.size;
            }
        }
        for (at, event) in self.events.iter().enumerate().rev() {
            let of = |what: String| format!("event {at}: {what}");
            self.check_event(event).map_err(of)?;
            match event.holder {
                None => undo_event_checked("what is reserved before it", &mut reserved, event),
                Some(index) => {
                    undo_event_checked("what its holder has before it", &mut holders[index], event)
                        .map_err(of)?;
                    let tag = self.holders[index].tag as usize;
                    undo_event_checked("what its tag has before it", &mut tags[tag], event)
                }
            }
            .map_err(of)?;
            let allocated: u64 = tags.iter().sum();
            if allocated > reserved {
                let (allocated, reserved) = (Bytes(allocated), Bytes(reserved));
                return Err(of(format!("{allocated} are allocated before it, and {reserved} reserved")));
            }
        }
        Ok(())
    }

    fn check_event(&self, event: &EventInfo) -> Result<(), String> {
        check_bytes("time_us", event.time_us)?;
        // A failed request may have been for any number of bytes.
        if event.action != Action::Oom {
            checked_end("it", event.address, event.size)?;
            check_bytes("requested_size", event.requested_size)?;
        }
        self.check_holder(event.holder, event.action.has_holder())
    }
}

/// Undoes an event's change of a sum.
fn undo_event_checked(name: &str, sum: &mut u64, event: &EventInfo) -> Result<(), String> {
    event.action.undo(sum, event.size);
    check_bytes(name, *sum)
}

impl SegmentInfo {
    /// Adds a block to the segment's sums.
    pub(super) fn add_sizes(&mut self, block: &BlockInfo) {
        let live = block.state == BlockState::ActiveAllocated;
        let awaits = block.state == BlockState::ActiveAwaitingFree;
        self.total_size += block.size;
        self.allocated_size += if live { block.size } else { 0 };
        self.active_size += if live || awaits { block.size } else { 0 };
        self.requested_size += block.requested_size;
    }
}
