//! Memory over time, reconstructed backwards: the current state is known, and each event can be undone.

use super::Tag;
use super::snapshot::{AllocationSite, Snapshot};

/// Memory after an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimelinePoint {
    /// Event, as an index of [`Snapshot::events`].
    pub event: usize,
    /// Time, in microseconds of the Unix time.
    pub time_us: u64,
    /// Bytes allocated for each tag, in the order of [`Tag::ALL`].
    pub by_tag: [u64; Tag::COUNT],
    /// Bytes taken from the device.
    pub reserved: u64,
}

impl TimelinePoint {
    /// Returns the bytes allocated.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.by_tag.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

impl Snapshot {
    /// Returns the memory after each recorded event.
    #[must_use]
    pub fn timeline(&self) -> Vec<TimelinePoint> {
        let mut now = TimelinePoint::default();
        for segment in &self.segments {
            now.reserved = now.reserved.saturating_add(segment.total_size);
        }
        for (block, holder) in self.live_blocks() {
            let sum = &mut now.by_tag[holder.tag as usize];
            *sum = sum.saturating_add(block.size);
        }
        let mut moments = vec![now; self.events.len()];
        for (at, (event, moment)) in self.events.iter().zip(&mut moments).enumerate().rev() {
            *moment = TimelinePoint { event: at, time_us: event.time_us, ..now };
            match self.holder(event.holder) {
                Some(holder) => event.action.undo(&mut now.by_tag[holder.tag as usize], event.size),
                None => event.action.undo(&mut now.reserved, event.size),
            }
        }
        moments
    }

    /// Returns the first moment of the largest allocated memory in the recording.
    #[must_use]
    pub fn peak(&self) -> Option<TimelinePoint> {
        self.timeline().into_iter().reduce(|peak, m| if m.allocated() > peak.allocated() { m } else { peak })
    }

    /// Returns the bytes of each holder after an event, the largest first.
    #[must_use]
    pub fn holders_at(&self, event: usize) -> Vec<(&AllocationSite, u64)> {
        let mut sums = vec![0_u64; self.holders.len()];
        let blocks = self.segments.iter().flat_map(|s| &s.blocks);
        for (holder, size) in blocks.filter_map(|b| Some((b.holder?, b.size))) {
            if let Some(sum) = sums.get_mut(holder) {
                *sum = sum.saturating_add(size);
            }
        }
        for event in self.events.iter().skip(event + 1).rev() {
            if let Some(sum) = event.holder.and_then(|holder| sums.get_mut(holder)) {
                event.action.undo(sum, event.size);
            }
        }
        let mut held: Vec<_> = self.holders.iter().zip(sums).filter(|(_, bytes)| *bytes > 0).collect();
        held.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        held
    }
}
