//! Allocator traces of real workloads, beside what PyTorch made of them.

use std::fmt;
use std::path::Path;

use anyhow::Result;
use forebay::memory::Config;
use forebay::memory::trace::{Mode, Recorded, Row, Table, table};

/// Replays of each trace, and rounds of them over all traces; the fastest counts for the time, which is told and not
/// judged. A processor that is slow for a while is slow for a round, and not for a trace.
const RUNS: u32 = 10;
const ROUNDS: usize = 6;

/// The most that the geometric mean of reserved over requested memory may be.
const MEANS: [(Mode, f64); 2] = [(Mode::Virtual, 1.01), (Mode::Plain, 1.06)];
/// The most that it may be of one workload.
const BOUNDS: [(Mode, f64); 2] = [(Mode::Virtual, 1.03), (Mode::Plain, 1.12)];

/// What the traces came to.
#[derive(Debug)]
pub struct Report {
    table: Table,
    failures: Vec<String>,
    checks: usize,
}

impl Report {
    /// How many checks failed.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.failures.len()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.table)?;
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(f, "traces: {} passed, {} failed", self.checks - self.failures.len(), self.failures.len())
    }
}

/// Replays the traces of a folder. One passes if it holds no more over what was requested and calls the driver no more often than PyTorch in
/// the same mode, and keeps to the bounds above; and each mode's geometric mean has a bound.
pub fn check(dir: &Path) -> Result<Report> {
    let mut table = once(dir)?;
    for _ in 1..ROUNDS {
        for (row, again) in table.rows.iter_mut().zip(once(dir)?.rows) {
            row.report.ns_per_pair = row.report.ns_per_pair.min(again.report.ns_per_pair);
        }
    }
    let mut failures: Vec<String> = table.rows.iter().filter_map(worse).collect();
    for (mode, bound) in MEANS {
        let mean = table.mean_ratio(mode);
        if mean > bound {
            failures.push(format!("geometric mean, {mode}: {mean:.4} is above {bound}"));
        }
    }
    Ok(Report { checks: table.rows.len() + MEANS.len(), failures, table })
}

fn once(dir: &Path) -> Result<Table> {
    Ok(table(dir, Config::default(), RUNS)?)
}

/// What is worse about a replay than PyTorch's own.
fn worse(row: &Row) -> Option<String> {
    let name = format!("{}, {}", row.workload, row.mode);
    let Some(Recorded { peak_requested, peak_reserved, device_allocs, device_frees, .. }) = &row.pytorch
    else {
        return Some(format!("{name}: PyTorch's figures are missing"));
    };
    let (ours, theirs) = (row.report.ratio(), *peak_reserved as f64 / (*peak_requested).max(1) as f64);
    let calls = device_allocs + device_frees;
    let most = BOUNDS.iter().find(|b| b.0 == row.mode).map_or(1.0, |b| b.1);
    if ours > theirs.min(most) {
        Some(format!("{name}: reserved over requested is {ours:.4}, PyTorch's {theirs:.4}, the bound {most}"))
    } else if row.report.driver_calls > calls {
        Some(format!("{name}: {} calls of the driver, PyTorch made {calls}", row.report.driver_calls))
    } else {
        None
    }
}
