//! Allocator traces of real workloads and of ones that were made up, beside what PyTorch made of them.

mod language;
mod others;
mod peer;
mod program;
mod serving;
mod transformers;
mod vision;
mod workloads;

use std::fmt;
use std::path::Path;

use anyhow::Result;
use forebay::memory::Config;
use forebay::memory::trace::{Mode, Recorded, Row, Table, Trace, replay, table};

/// Replays of each trace, and rounds of them over all traces; the fastest counts for the time, which is told and not
/// judged. A processor that is slow for a while is slow for a round, and not for a trace.
const RUNS: u32 = 10;
const ROUNDS: usize = 6;
/// The seed of the workloads that were made up.
const SEED: u64 = 1;

/// What some workloads may come to, reserved over requested.
struct Bounds {
    /// Of one.
    each: f64,
    /// Their geometric mean.
    mean: f64,
}

/// Of recorded workloads: what the project has promised.
fn promised(mode: Mode) -> Bounds {
    match mode {
        Mode::Virtual => Bounds { each: 1.03, mean: 1.01 },
        Mode::Plain => Bounds { each: 1.12, mean: 1.06 },
    }
}

/// Of those that were made up: what holds now. In ranges that is the promise, and so is the mean in plain segments, where queues that take turns
/// are above it.
fn kept(mode: Mode) -> Bounds {
    match mode {
        Mode::Virtual => promised(mode),
        Mode::Plain => Bounds { each: 1.17, mean: 1.04 },
    }
}

/// What the traces came to.
#[derive(Debug)]
pub struct Report {
    recorded: Table,
    made_up: Table,
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
        writeln!(f, "{}\nmade up, PyTorch as its model says:\n{}", self.recorded, self.made_up)?;
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(f, "traces: {} passed, {} failed", self.checks - self.failures.len(), self.failures.len())
    }
}

/// Replays the traces of a folder, and workloads that were made up.
///
/// A recorded one passes if it holds no more over what was requested and calls the driver no more often than PyTorch in the same mode, and
/// keeps to the bounds above; and each mode's geometric mean has a bound. The model of PyTorch has to agree with what was recorded. Workloads that were
/// made up have bounds too, and all of them together call the driver no more often than PyTorch, as its model says.
pub fn check(dir: &Path) -> Result<Report> {
    let mut recorded = once(dir)?;
    for _ in 1..ROUNDS {
        for (row, again) in recorded.rows.iter_mut().zip(once(dir)?.rows) {
            row.report.ns_per_pair = row.report.ns_per_pair.min(again.report.ns_per_pair);
        }
    }
    let mut failures: Vec<String> = recorded.rows.iter().filter_map(worse).collect();
    failures.extend(means(&recorded, promised));
    let modelled = model(dir, &recorded, &mut failures)?;
    let made_up = made_up()?;
    failures.extend(made_up.rows.iter().filter_map(|row| above(row, kept(row.mode).each)));
    failures.extend(means(&made_up, kept));
    failures.extend(more_calls(&made_up));
    let checks = recorded.rows.len() + modelled + made_up.rows.len() + 6;
    Ok(Report { recorded, made_up, failures, checks })
}

fn once(dir: &Path) -> Result<Table> {
    Ok(table(dir, Config::default(), RUNS)?)
}

/// The workloads that were made up, in both modes.
fn made_up() -> Result<Table> {
    let traces: Vec<Trace> = workloads::all(SEED).collect();
    let mut rows = Vec::new();
    for mode in [Mode::Virtual, Mode::Plain] {
        for trace in &traces {
            let report = replay(trace, Config::default(), mode, 0)?;
            let pytorch = Some(pytorch(trace, mode)?);
            rows.push(Row { workload: trace.recorded.workload.clone(), mode, report, pytorch });
        }
    }
    Ok(Table { rows })
}

/// What PyTorch makes of a trace, by its rules.
fn pytorch(trace: &Trace, mode: Mode) -> Result<Recorded> {
    if mode == Mode::Virtual {
        return Ok(peer::expandable(trace));
    }
    let report = replay(trace, Config::pytorch(), mode, 0)?;
    let (peak_reserved, device_allocs) = (report.peak_reserved, report.driver_calls);
    Ok(Recorded { peak_reserved, device_allocs, ..trace.recorded.clone() })
}

/// Compares the model of PyTorch with its figures. Returns how many there were.
fn model(dir: &Path, recorded: &Table, failures: &mut Vec<String>) -> Result<usize> {
    for row in &recorded.rows {
        let Some(told) = &row.pytorch else { continue };
        let trace = Trace::open(&dir.join(format!("{}.trace.xz", row.workload)))?;
        let figures = |of: &Recorded| (of.peak_reserved, of.device_allocs);
        let (says, was) = (figures(&pytorch(&trace, row.mode)?), figures(told));
        if says != was {
            let (workload, mode) = (&row.workload, row.mode);
            failures.push(format!("{workload}, {mode}: the model of PyTorch says {says:?}, it was {was:?}"));
        }
    }
    Ok(recorded.rows.len())
}

/// The geometric means that are above their bounds.
fn means(table: &Table, bounds: impl Fn(Mode) -> Bounds) -> Vec<String> {
    let above = [Mode::Virtual, Mode::Plain].into_iter().filter_map(|mode| {
        let (mean, bound) = (table.mean_ratio(mode), bounds(mode).mean);
        (mean > bound).then(|| format!("geometric mean, {mode}: {mean:.4} is above {bound}"))
    });
    above.collect()
}

/// The modes in which all workloads together call the driver more often than PyTorch.
fn more_calls(table: &Table) -> Vec<String> {
    let more = [Mode::Virtual, Mode::Plain].into_iter().filter_map(|mode| {
        let rows = || table.rows.iter().filter(|row| row.mode == mode);
        let ours: u64 = rows().map(|row| row.report.driver_calls).sum();
        let theirs: u64 = rows().filter_map(|row| row.pytorch.as_ref()).map(calls).sum();
        (ours > theirs).then(|| format!("{mode}: {ours} calls of the driver in all, PyTorch {theirs}"))
    });
    more.collect()
}

fn calls(recorded: &Recorded) -> u64 {
    recorded.device_allocs + recorded.device_frees
}

/// What is above a bound about a replay.
fn above(row: &Row, most: f64) -> Option<String> {
    let (workload, mode, ratio) = (&row.workload, row.mode, row.report.ratio());
    (ratio > most)
        .then(|| format!("{workload}, {mode}: reserved over requested is {ratio:.4}, the bound {most}"))
}

/// What is worse about a replay than PyTorch's own.
fn worse(row: &Row) -> Option<String> {
    let name = format!("{}, {}", row.workload, row.mode);
    let Some(recorded) = &row.pytorch else {
        return Some(format!("{name}: PyTorch's figures are missing"));
    };
    let ours = row.report.ratio();
    let theirs = recorded.peak_reserved as f64 / recorded.peak_requested.max(1) as f64;
    let calls = calls(recorded);
    if ours > theirs {
        Some(format!("{name}: reserved over requested is {ours:.4}, PyTorch's {theirs:.4}"))
    } else if row.report.driver_calls > calls {
        Some(format!("{name}: {} calls of the driver, PyTorch made {calls}", row.report.driver_calls))
    } else {
        above(row, promised(row.mode).each)
    }
}
