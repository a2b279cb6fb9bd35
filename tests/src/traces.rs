//! Replays of recorded and synthetic allocation traces, compared with PyTorch's allocator.

mod changing;
mod expandable_segments;
mod language;
mod miscellaneous;
mod serving;
mod trace_builder;
mod transformers;
mod vision;
mod workloads;

use std::fmt;
use std::path::Path;

use anyhow::Result;
use forebay::memory::Config;
use forebay::memory::trace::{
    PyTorchBaseline, ReplayRow, ReplayTable, SegmentMode, Trace, replay, replay_folder,
};

/// Replays of each trace in a round, and rounds over all traces. The fastest replay counts for the time, which is
/// reported but not checked. Rounds spread a temporary slowdown over all traces.
const REPLAYS_PER_TRACE: u32 = 10;
const ROUNDS: usize = 6;
/// Seed of the synthetic workloads.
const SYNTHETIC_SEED: u64 = 1;

/// Upper bounds of reserved over requested bytes.
struct Bounds {
    /// Bound of a single workload.
    max_ratio: f64,
    /// Bound of the geometric mean.
    max_mean_ratio: f64,
}

/// Returns the bounds of recorded workloads, which the project guarantees.
fn recorded_bounds(mode: SegmentMode) -> Bounds {
    match mode {
        SegmentMode::Virtual => Bounds { max_ratio: 1.03, max_mean_ratio: 1.01 },
        SegmentMode::Plain => Bounds { max_ratio: 1.12, max_mean_ratio: 1.06 },
    }
}

/// Returns the bounds of synthetic workloads. With virtual memory these are the guarantee. With plain segments the
/// mean is within the guarantee, while single workloads on several queues exceed it.
fn synthetic_bounds(mode: SegmentMode) -> Bounds {
    match mode {
        SegmentMode::Virtual => recorded_bounds(mode),
        SegmentMode::Plain => Bounds { max_ratio: 1.17, max_mean_ratio: 1.04 },
    }
}

/// Returns the bounds of synthetic workloads of changing sizes. The smallest of them hold one segment that is a large
/// part of them.
fn changing_bounds(mode: SegmentMode) -> Bounds {
    let max_mean_ratio = match mode {
        SegmentMode::Virtual => 1.045,
        SegmentMode::Plain => 1.067,
    };
    Bounds { max_ratio: f64::INFINITY, max_mean_ratio }
}

/// Results of all replays.
#[derive(Debug)]
pub struct TraceReport {
    recorded: ReplayTable,
    synthetic: ReplayTable,
    changing: ReplayTable,
    failures: Vec<String>,
    checks: usize,
}

impl TraceReport {
    #[must_use]
    pub fn failed(&self) -> usize {
        self.failures.len()
    }
}

impl fmt::Display for TraceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}\nsynthetic workloads, with PyTorch from its model:\n{}\nof changing sizes:\n{}",
            self.recorded, self.synthetic, self.changing
        )?;
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(f, "traces: {} passed, {} failed", self.checks - self.failures.len(), self.failures.len())
    }
}

/// Replays the traces of a folder, and synthetic workloads.
///
/// A recorded trace must reserve no more and call the driver no more often than PyTorch in the same mode. It must also
/// be within the bounds above. Each mode's geometric mean has a bound as well. The model of PyTorch must agree with its
/// recorded figures. Synthetic workloads have bounds, too. In total, they must not call the driver more often than the
/// model of PyTorch does. The same holds for those of changing sizes, whose single workloads have no bounds.
pub fn check(dir: &Path) -> Result<TraceReport> {
    let mut recorded = replay_all(dir)?;
    for _ in 1..ROUNDS {
        for (row, again) in recorded.rows.iter_mut().zip(replay_all(dir)?.rows) {
            row.report.ns_per_pair = row.report.ns_per_pair.min(again.report.ns_per_pair);
        }
    }
    let mut failures: Vec<String> = recorded.rows.iter().filter_map(compare_with_pytorch).collect();
    failures.extend(check_mean_ratios(&recorded, recorded_bounds));
    let modelled = check_pytorch_model(dir, &recorded, &mut failures)?;
    let made_up = replay_synthetic(workloads::synthetic_traces(SYNTHETIC_SEED))?;
    let changing = replay_synthetic(workloads::changing_traces(SYNTHETIC_SEED))?;
    failures
        .extend(made_up.rows.iter().filter_map(|row| check_ratio(row, synthetic_bounds(row.mode).max_ratio)));
    failures.extend(check_mean_ratios(&made_up, synthetic_bounds));
    failures.extend(check_driver_calls(&made_up));
    failures.extend(check_driver_calls(&changing));
    failures.extend(check_mean_ratios(&changing, changing_bounds));
    let checks = recorded.rows.len() + modelled + made_up.rows.len() + 10;
    Ok(TraceReport { recorded, synthetic: made_up, changing, failures, checks })
}

fn replay_all(dir: &Path) -> Result<ReplayTable> {
    Ok(replay_folder(dir, Config::default(), REPLAYS_PER_TRACE)?)
}

/// Replays synthetic workloads in both modes.
fn replay_synthetic(traces: impl Iterator<Item = Trace>) -> Result<ReplayTable> {
    let traces: Vec<Trace> = traces.collect();
    let mut rows = Vec::new();
    for mode in [SegmentMode::Virtual, SegmentMode::Plain] {
        for trace in &traces {
            let report = replay(trace, Config::default(), mode, 0)?;
            let pytorch = Some(simulate_pytorch(trace, mode)?);
            rows.push(ReplayRow { workload: trace.baseline.workload.clone(), mode, report, pytorch });
        }
    }
    Ok(ReplayTable { rows })
}

/// Simulates PyTorch's allocator on a trace.
fn simulate_pytorch(trace: &Trace, mode: SegmentMode) -> Result<PyTorchBaseline> {
    if mode == SegmentMode::Virtual {
        return Ok(expandable_segments::simulate_expandable_segments(trace));
    }
    let report = replay(trace, Config::pytorch(), mode, 0)?;
    let (peak_reserved, device_allocs) = (report.peak_reserved, report.driver_calls);
    Ok(PyTorchBaseline { peak_reserved, device_allocs, ..trace.baseline.clone() })
}

/// Compares the model of PyTorch with PyTorch's recorded figures. Returns the number of comparisons.
fn check_pytorch_model(dir: &Path, recorded: &ReplayTable, failures: &mut Vec<String>) -> Result<usize> {
    for row in &recorded.rows {
        let Some(told) = &row.pytorch else { continue };
        let trace = Trace::load(&dir.join(format!("{}.trace.xz", row.workload)))?;
        let figures = |of: &PyTorchBaseline| (of.peak_reserved, of.device_allocs);
        let (simulated, recorded_figures) = (figures(&simulate_pytorch(&trace, row.mode)?), figures(told));
        if simulated != recorded_figures {
            let (workload, mode) = (&row.workload, row.mode);
            failures.push(format!(
                "{workload}, {mode}: the model of PyTorch says {simulated:?}, it was {recorded_figures:?}"
            ));
        }
    }
    Ok(recorded.rows.len())
}

/// Returns failures for geometric means above their bounds.
fn check_mean_ratios(table: &ReplayTable, bounds: impl Fn(SegmentMode) -> Bounds) -> Vec<String> {
    let above = [SegmentMode::Virtual, SegmentMode::Plain].into_iter().filter_map(|mode| {
        let (mean, bound) = (table.mean_ratio(mode), bounds(mode).max_mean_ratio);
        (mean > bound).then(|| format!("geometric mean, {mode}: {mean:.4} is above {bound}"))
    });
    above.collect()
}

/// Returns failures for modes in which all workloads together call the driver more often than PyTorch.
fn check_driver_calls(table: &ReplayTable) -> Vec<String> {
    let more = [SegmentMode::Virtual, SegmentMode::Plain].into_iter().filter_map(|mode| {
        let rows = || table.rows.iter().filter(|row| row.mode == mode);
        let ours: u64 = rows().map(|row| row.report.driver_calls).sum();
        let theirs: u64 = rows().filter_map(|row| row.pytorch.as_ref()).map(driver_calls).sum();
        (ours > theirs).then(|| format!("{mode}: {ours} calls of the driver in all, PyTorch {theirs}"))
    });
    more.collect()
}

fn driver_calls(recorded: &PyTorchBaseline) -> u64 {
    recorded.device_allocs + recorded.device_frees
}

/// Returns a failure if a replay exceeds the bound.
fn check_ratio(row: &ReplayRow, max_ratio: f64) -> Option<String> {
    let (workload, mode, ratio) = (&row.workload, row.mode, row.report.ratio());
    (ratio > max_ratio)
        .then(|| format!("{workload}, {mode}: reserved over requested is {ratio:.4}, the bound {max_ratio}"))
}

/// Returns a failure if a replay is worse than PyTorch's.
fn compare_with_pytorch(row: &ReplayRow) -> Option<String> {
    let name = format!("{}, {}", row.workload, row.mode);
    let Some(recorded) = &row.pytorch else {
        return Some(format!("{name}: PyTorch's figures are missing"));
    };
    let ours = row.report.ratio();
    let theirs = recorded.peak_reserved as f64 / recorded.peak_requested.max(1) as f64;
    let calls = driver_calls(recorded);
    if ours > theirs {
        Some(format!("{name}: reserved over requested is {ours:.4}, PyTorch's {theirs:.4}"))
    } else if row.report.driver_calls > calls {
        Some(format!("{name}: {} calls of the driver, PyTorch made {calls}", row.report.driver_calls))
    } else {
        check_ratio(row, recorded_bounds(row.mode).max_ratio)
    }
}
