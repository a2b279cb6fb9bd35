//! Differences between two snapshots of a pool, and a check that steps leave no memory behind.

use std::collections::BTreeMap;
use std::fmt;

use super::Bytes;
use super::snapshot::{AllocationSite, Snapshot};
use crate::printable::printable;

/// Allocated blocks and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes after rounding.
    pub bytes: u64,
}

/// Change of a holder's memory between two snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderChange {
    /// The holder.
    pub holder: AllocationSite,
    /// Memory in the earlier snapshot.
    pub before: HeldBytes,
    /// Memory in the later snapshot.
    pub after: HeldBytes,
}

/// Returns `after - before`, saturating, since a hand-made snapshot may contain any values.
fn signed_difference(before: u64, after: u64) -> i64 {
    let more = i128::from(after) - i128::from(before);
    i64::try_from(more).unwrap_or(if more < 0 { i64::MIN } else { i64::MAX })
}

impl HolderChange {
    /// Returns the change in bytes.
    #[must_use]
    pub fn bytes(&self) -> i64 {
        signed_difference(self.before.bytes, self.after.bytes)
    }
}

/// Changes between two snapshots by holder, the largest growth first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotDiff {
    /// Holders that changed; each combination of tag, module, operation and line is one entry.
    pub changes: Vec<HolderChange>,
}

impl SnapshotDiff {
    /// Returns the change in bytes of each tag.
    #[must_use]
    pub fn by_tag(&self) -> BTreeMap<super::Tag, i64> {
        let mut sums = BTreeMap::new();
        for change in &self.changes {
            let sum = sums.entry(change.holder.tag).or_insert(0_i64);
            *sum = sum.saturating_add(change.bytes());
        }
        sums
    }

    /// Returns the total change in bytes.
    #[must_use]
    pub fn bytes(&self) -> i64 {
        self.changes.iter().map(HolderChange::bytes).fold(0, i64::saturating_add)
    }
}

impl fmt::Display for SnapshotDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let signed = |bytes: i64| {
            let sign = if bytes < 0 { "-" } else { "+" };
            format!("{sign}{}", Bytes(bytes.unsigned_abs()))
        };
        for (tag, bytes) in self.by_tag() {
            writeln!(f, "{tag:<16}{:>12}", signed(bytes))?;
        }
        for HolderChange { holder, before, after } in &self.changes {
            let bytes = signed(signed_difference(before.bytes, after.bytes));
            let blocks = signed_difference(before.blocks, after.blocks);
            writeln!(f, "{bytes:>12} {blocks:>+7} blocks  {holder}")?;
        }
        write!(f, "{:<16}{:>12}", "all", signed(self.bytes()))
    }
}

impl fmt::Display for AllocationSite {
    /// Formats a holder: `activation of encoder.fc1, in matmul (src/main.rs:17)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.tag.name())?;
        if !self.module.is_empty() {
            write!(f, " of {}", printable(&self.module))?;
        }
        if !self.op.is_empty() {
            write!(f, ", in {}", printable(&self.op))?;
        }
        match self.frames.first() {
            Some(frame) if !frame.filename.is_empty() => {
                write!(f, " ({}:{})", printable(&frame.filename), frame.line)
            }
            _ => Ok(()),
        }
    }
}

impl Snapshot {
    /// Returns the memory of each holder, the largest first.
    #[must_use]
    pub fn totals_by_holder(&self) -> Vec<(&AllocationSite, HeldBytes)> {
        let mut sums = rustc_hash::FxHashMap::<&AllocationSite, HeldBytes>::default();
        for (block, holder) in self.live_blocks() {
            let held = sums.entry(holder).or_default();
            held.blocks += 1;
            held.bytes = held.bytes.saturating_add(block.size);
        }
        let mut held = sums.into_iter().collect::<Vec<_>>();
        held.sort_by(|a, b| {
            (b.1.bytes, &a.0.module, a.0.op.as_str()).cmp(&(a.1.bytes, &b.0.module, b.0.op.as_str()))
        });
        held
    }

    /// Returns the changes from this snapshot to a later one.
    #[must_use]
    pub fn diff(&self, later: &Self) -> SnapshotDiff {
        let mut both = rustc_hash::FxHashMap::<&AllocationSite, (HeldBytes, HeldBytes)>::default();
        for (holder, held) in self.totals_by_holder() {
            both.entry(holder).or_default().0 = held;
        }
        for (holder, held) in later.totals_by_holder() {
            both.entry(holder).or_default().1 = held;
        }
        let changed = both.into_iter().filter(|(_, (before, after))| before != after);
        let mut changes = changed
            .map(|(holder, (before, after))| HolderChange { holder: holder.clone(), before, after })
            .collect::<Vec<_>>();
        changes.sort_by_key(|c| (std::cmp::Reverse(c.bytes()), c.holder.to_string()));
        SnapshotDiff { changes }
    }
}

/// Error: steps left memory behind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} more are held after {steps} steps, {} a step:\n{diff}\nsomething keeps tensors of earlier steps: a loss or another tensor with its graph, a list of results, a cache",
    Bytes(diff.bytes().max(0).unsigned_abs()), Bytes(diff.bytes().max(0).unsigned_abs() / (*steps).max(1))
)]
pub struct MemoryGrowth {
    /// Number of steps compared.
    pub steps: u64,
    /// Holders whose memory changed.
    pub diff: SnapshotDiff,
}
