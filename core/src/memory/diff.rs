//! What two snapshots of a pool differ in, and a check that steps leave no memory behind.

use std::collections::BTreeMap;
use std::fmt;

use super::Bytes;
use super::pool::Pool;
use super::snapshot::{AllocationSite, Snapshot};
use crate::error::{Error, Result};

/// Blocks that are lent, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// How many.
    pub blocks: u64,
    /// Their bytes, after rounding.
    pub bytes: u64,
}

/// What was held for someone in two snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderChange {
    /// Who.
    pub holder: AllocationSite,
    /// What was held first.
    pub before: HeldBytes,
    /// What was held later.
    pub after: HeldBytes,
}

/// Subtracts the first number from the second one, and stays within the type: a snapshot made by hand may hold any numbers.
fn signed_difference(before: u64, after: u64) -> i64 {
    let more = i128::from(after) - i128::from(before);
    i64::try_from(more).unwrap_or(if more < 0 { i64::MIN } else { i64::MAX })
}

impl HolderChange {
    /// How many bytes more are held.
    #[must_use]
    pub fn bytes(&self) -> i64 {
        signed_difference(self.before.bytes, self.after.bytes)
    }
}

/// What changed between two snapshots: who holds more or less, what grew most first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotDiff {
    /// Only those that changed. What a tag, module, operation and line hold is one entry.
    pub changes: Vec<HolderChange>,
}

impl SnapshotDiff {
    /// The changes of each tag.
    #[must_use]
    pub fn by_tag(&self) -> BTreeMap<super::Tag, i64> {
        let mut sums = BTreeMap::new();
        for change in &self.changes {
            let sum = sums.entry(change.holder.tag).or_insert(0_i64);
            *sum = sum.saturating_add(change.bytes());
        }
        sums
    }

    /// How many bytes more are held in all.
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
        for HolderChange { holder: who, before, after } in &self.changes {
            let bytes = signed(signed_difference(before.bytes, after.bytes));
            let blocks = signed_difference(before.blocks, after.blocks);
            writeln!(f, "{bytes:>12} {blocks:>+7} blocks  {who}")?;
        }
        write!(f, "{:<16}{:>12}", "all", signed(self.bytes()))
    }
}

impl fmt::Display for AllocationSite {
    /// `activation of encoder.fc1, in matmul (src/main.rs:17)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.tag.name())?;
        if !self.module.is_empty() {
            write!(f, " of {}", self.module)?;
        }
        if !self.op.is_empty() {
            write!(f, ", in {}", self.op)?;
        }
        match self.frames.first() {
            Some(frame) if !frame.filename.is_empty() => write!(f, " ({}:{})", frame.filename, frame.line),
            _ => Ok(()),
        }
    }
}

impl Snapshot {
    /// What is held, by holder.
    #[must_use]
    pub fn totals_by_holder(&self) -> Vec<(&AllocationSite, HeldBytes)> {
        let mut sums = rustc_hash::FxHashMap::<&AllocationSite, HeldBytes>::default();
        for (block, who) in self.live_blocks() {
            let held = sums.entry(who).or_default();
            held.blocks += 1;
            held.bytes = held.bytes.saturating_add(block.size);
        }
        let mut held = sums.into_iter().collect::<Vec<_>>();
        held.sort_by(|a, b| {
            (b.1.bytes, &a.0.module, a.0.op.as_str()).cmp(&(a.1.bytes, &b.0.module, b.0.op.as_str()))
        });
        held
    }

    /// What changed from this snapshot to a later one.
    #[must_use]
    pub fn diff(&self, later: &Self) -> SnapshotDiff {
        let mut both = rustc_hash::FxHashMap::<&AllocationSite, (HeldBytes, HeldBytes)>::default();
        for (who, held) in self.totals_by_holder() {
            both.entry(who).or_default().0 = held;
        }
        for (who, held) in later.totals_by_holder() {
            both.entry(who).or_default().1 = held;
        }
        let changed = both.into_iter().filter(|(_, (before, after))| before != after);
        let mut changes = changed
            .map(|(who, (before, after))| HolderChange { holder: who.clone(), before, after })
            .collect::<Vec<_>>();
        changes.sort_by_key(|c| (std::cmp::Reverse(c.bytes()), c.holder.to_string()));
        SnapshotDiff { changes }
    }
}

/// Memory that steps left behind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} more are held after {steps} steps, {} a step:\n{diff}\nsomething keeps what a step made: a loss or another tensor with its graph, a list of results, a cache",
    Bytes(diff.bytes().max(0).unsigned_abs()), Bytes(diff.bytes().max(0).unsigned_abs() / (*steps).max(1))
)]
pub struct MemoryGrowth {
    /// How many steps were compared.
    pub steps: u64,
    /// Who holds more.
    pub diff: SnapshotDiff,
}

impl Pool {
    /// Runs `step` twice, so that what is made once is there, then `steps` times more, and fails if those leave more
    /// memory behind than there was: the error names the tags, modules, operations and lines that hold it.
    ///
    /// ```
    /// use forebay_core::memory::{Config, Pool, Request, fake::FakeSource};
    /// let pool = Pool::new(std::sync::Arc::new(FakeSource::paged(1 << 30)), Config::default());
    /// let mut kept = Vec::new();
    /// let leak = pool.assert_no_growth(10, || {
    ///     kept.push(pool.alloc(Request::new(1000).op("log_loss"))?);
    ///     Ok(())
    /// });
    /// assert!(leak.unwrap_err().to_string().contains("log_loss"));
    /// ```
    ///
    /// # Errors
    /// [`Error::Growth`]; what `step` returns.
    pub fn assert_no_growth(&self, steps: u64, mut step: impl FnMut() -> Result<()>) -> Result<()> {
        step()?;
        step()?;
        // Lines are known only of what is lent while the pool records; live blocks need no events.
        let recorded_before = self.is_recording();
        if !recorded_before {
            self.start_recording(1);
        }
        let before = self.snapshot();
        let outcome = (0..steps).try_for_each(|_| step());
        let after = self.snapshot();
        if !recorded_before {
            self.stop_recording();
        }
        outcome?;
        let diff = before.diff(&after);
        if diff.bytes() > 0 {
            Err(Error::MemoryGrowth(Box::new(MemoryGrowth { steps, diff })))
        } else {
            Ok(())
        }
    }
}
