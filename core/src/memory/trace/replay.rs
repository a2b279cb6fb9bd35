//! Replays traces through a pool, and compares the results with PyTorch's.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{PyTorchBaseline, Trace, TraceEvent, file_error};
use crate::memory::compaction::{BlockMove, BlockMover, HeldDispatch};
use crate::memory::counting_source::CountingSource;
use crate::memory::snapshot::read_bounded;
use crate::memory::source::{MAX_QUEUES, SourceLimits, VirtualMemory};
use crate::memory::{Block, Bytes, Config, Pool, Request, Result};
use crate::printable::printable;

/// Kind of segments that a pool grows with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentMode {
    /// Plain segments of fixed size.
    Plain,
    /// Virtual ranges, with memory mapped where it is needed.
    Virtual,
}

impl fmt::Display for SegmentMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Plain => "plain",
            Self::Virtual => "virtual",
        })
    }
}

/// Result of a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplayReport {
    /// Peak of the requested bytes in use.
    pub peak_requested: u64,
    /// Peak of the allocated bytes, which are rounded.
    pub peak_allocated: u64,
    /// Peak of the bytes taken from the device.
    pub peak_reserved: u64,
    /// Calls of the source that took, moved or returned memory. One call may map many pieces. PyTorch's
    /// growth of a segment by several pieces of 20 MiB counts as one call too.
    pub driver_calls: u64,
    /// Bytes of blocks in use that compaction copied.
    pub compacted_bytes: u64,
    /// Peak number of segments, or of mapped extents.
    pub segments: u64,
    /// Free bytes in the pool at the peak of reserved bytes, after the request that made it grow.
    pub free: u64,
    /// Largest free block at that moment.
    pub largest_free: u64,
    /// Nanoseconds for one request and its free, without the source's time; 0 if not measured.
    pub ns_per_pair: f64,
}

impl ReplayReport {
    /// Returns reserved over requested bytes, at their peaks.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.peak_reserved as f64 / self.peak_requested.max(1) as f64
    }

    /// Returns the part of the free memory outside of the largest free block, at the peak of reserved bytes.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.free as f64 }
    }
}

/// Memory of the card on which the traces were recorded.
const DEVICE_BYTES: u64 = 80 << 30;

/// Replays a trace through a pool over a source without memory: once for the statistics, and `timed` times
/// for the fastest time.
///
/// # Errors
/// The configuration limits the pool to less than the trace needs.
pub fn replay(trace: &Trace, config: Config, mode: SegmentMode, timed: u32) -> Result<ReplayReport> {
    let mut report = ReplayReport { peak_requested: trace.peak_requested, ..ReplayReport::default() };
    let source = Arc::new(counting_source(mode));
    let pool = run_trace(trace, config, source.clone(), |pool| {
        // Only a request that made the pool grow can have raised the peak.
        let peak = source.peak_bytes();
        if peak > report.peak_reserved {
            let now = pool.stats();
            report.peak_reserved = peak;
            (report.free, report.largest_free) = (now.cached(), now.largest_free);
        }
    })?;
    let stats = pool.stats();
    report.peak_allocated = stats.peak_allocated();
    report.segments = stats.segment.all.peak;
    report.driver_calls = source.calls();
    report.compacted_bytes = stats.compacted_bytes;
    let mut best = None;
    for _ in 0..timed {
        let start = Instant::now();
        run_trace(trace, config, Arc::new(counting_source(mode)), |_| {})?;
        best = best.into_iter().chain([start.elapsed()]).min();
    }
    let best = best.unwrap_or(Duration::ZERO);
    report.ns_per_pair = best.as_nanos() as f64 / trace.request_count().max(1) as f64;
    Ok(report)
}

/// Returns a source like the card of the recordings.
fn counting_source(mode: SegmentMode) -> CountingSource {
    let reservation = DEVICE_BYTES / 8 * 9;
    let (alignment, virtual_memory) = match mode {
        SegmentMode::Plain => (256, None),
        SegmentMode::Virtual => (512, Some(VirtualMemory { granularity: 2 << 20, reservation })),
    };
    let limits = SourceLimits { alignment, max_segment: u64::MAX, virtual_memory };
    CountingSource::new(limits, MAX_QUEUES, DEVICE_BYTES, DEVICE_BYTES)
}

impl BlockMover for CountingSource {
    fn lock_dispatch(&self) -> Box<dyn HeldDispatch + '_> {
        Box::new(())
    }
    fn enqueue_copies(&self, _queue: u8, _moves: &[BlockMove]) -> Result<()> {
        Ok(())
    }
}

/// Replays a trace, and calls `each` after each request.
fn run_trace(
    trace: &Trace,
    config: Config,
    source: Arc<CountingSource>,
    mut each: impl FnMut(&Pool),
) -> Result<Pool> {
    // All blocks may move, as those of tensors may.
    let pool = Pool::new(source.clone(), config).with_mover(source);
    let mut table: Vec<Option<Block>> = vec![None; trace.slot_count];
    for event in &trace.events {
        match *event {
            TraceEvent::Alloc { slot, bytes, queue } => {
                table[slot as usize] = Some(pool.alloc(Request::new(bytes).queue(queue).movable())?);
                each(&pool);
            }
            TraceEvent::Free { slot } => {
                if let Some(block) = table[slot as usize].take() {
                    pool.free(block);
                }
            }
        }
    }
    Ok(pool)
}

/// One row of a [`ReplayTable`].
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayRow {
    /// Name of the workload.
    pub workload: String,
    /// Kind of segments.
    pub mode: SegmentMode,
    /// This pool's result.
    pub report: ReplayReport,
    /// PyTorch's result in the same mode, if known.
    pub pytorch: Option<PyTorchBaseline>,
}

/// Results for all traces of a folder in both modes, compared with PyTorch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplayTable {
    /// Rows by mode, then by workload.
    pub rows: Vec<ReplayRow>,
}

/// Replays every `*.trace.xz` of a folder in both modes. PyTorch's results are read from `reserved.jsonl` in
/// the same folder.
pub fn replay_folder(folder: &Path, config: Config, runs: u32) -> Result<ReplayTable> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| file_error(folder, &e))? {
        let path = entry.map_err(|e| file_error(folder, &e))?.path();
        if path.to_string_lossy().ends_with(".trace.xz") {
            paths.push(path);
        }
    }
    paths.sort();
    let known = read_baselines(&folder.join("reserved.jsonl"))?;
    let traces = paths.iter().map(|p| Trace::load(p)).collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for mode in [SegmentMode::Virtual, SegmentMode::Plain] {
        for trace in &traces {
            let report = replay(trace, config, mode, runs)?;
            let workload = trace.baseline.workload.clone();
            let mut pytorch = known.get(&(workload.clone(), mode == SegmentMode::Virtual)).cloned();
            if mode == SegmentMode::Plain {
                pytorch = pytorch.or_else(|| Some(trace.baseline.clone()));
            }
            rows.push(ReplayRow { workload, mode, report, pytorch });
        }
    }
    Ok(ReplayTable { rows })
}

/// Most bytes of a file of PyTorch's results.
const MAX_BASELINE_BYTES: u64 = 64 << 20;

/// Reads PyTorch's results, by workload and by expandable segments; empty if there is no such file.
fn read_baselines(path: &Path) -> Result<BTreeMap<(String, bool), PyTorchBaseline>> {
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let read = std::fs::File::open(path).and_then(|file| read_bounded(file, MAX_BASELINE_BYTES));
    let text = read.and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other));
    let text = text.map_err(|e| file_error(path, &e))?;
    let lines = text.lines().filter(|l| !l.trim().is_empty());
    lines
        .map(|line| {
            let record: PyTorchBaseline = serde_json::from_str(line).map_err(|e| file_error(path, &e))?;
            Ok(((record.workload.clone(), record.allocator.contains("expandable")), record))
        })
        .collect()
}

impl ReplayTable {
    /// Returns the geometric mean of reserved over requested bytes in a mode.
    #[must_use]
    pub fn mean_ratio(&self, mode: SegmentMode) -> f64 {
        geometric_mean(self.rows.iter().filter(|r| r.mode == mode).map(|r| r.report.ratio()))
    }

    /// Returns PyTorch's geometric mean of reserved over requested bytes in a mode.
    #[must_use]
    pub fn pytorch_mean_ratio(&self, mode: SegmentMode) -> f64 {
        let rows = self.rows.iter().filter(|r| r.mode == mode);
        geometric_mean(rows.filter_map(|r| r.pytorch.as_ref()).map(pytorch_ratio))
    }
}

fn pytorch_ratio(recorded: &PyTorchBaseline) -> f64 {
    recorded.peak_reserved as f64 / recorded.peak_requested.max(1) as f64
}

fn geometric_mean(ratios: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = ratios.fold((0.0, 0.0), |(sum, count), r| (sum + r.ln(), count + 1.0));
    (sum / f64::max(count, 1.0)).exp()
}

impl fmt::Display for ReplayTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<22}{:<9}{:>11}{:>11}{:>7}{:>9}{:>7}{:>9}{:>11}{:>8}",
            "workload",
            "mode",
            "requested",
            "reserved",
            "ratio",
            "PyTorch",
            "calls",
            "PyTorch",
            "copied",
            "ns/pair"
        )?;
        for ReplayRow { workload, mode, report, pytorch } in &self.rows {
            write!(
                f,
                "{:<22}{mode:<9}{:>11}{:>11}{:>7.3}",
                printable(workload),
                Bytes(report.peak_requested),
                Bytes(report.peak_reserved),
                report.ratio()
            )?;
            match pytorch {
                Some(p) => write!(f, "{:>9.3}", pytorch_ratio(p))?,
                None => write!(f, "{:>9}", "-")?,
            }
            write!(f, "{:>7}", report.driver_calls)?;
            match pytorch {
                Some(p) => write!(f, "{:>9}", p.device_allocs + p.device_frees)?,
                None => write!(f, "{:>9}", "-")?,
            }
            writeln!(f, "{:>11}{:>8.1}", Bytes(report.compacted_bytes), report.ns_per_pair)?;
        }
        for mode in [SegmentMode::Virtual, SegmentMode::Plain] {
            let (ours, theirs) = (self.mean_ratio(mode), self.pytorch_mean_ratio(mode));
            writeln!(f, "geometric mean, {mode}: {ours:.4} (PyTorch {theirs:.4})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the project's targets and PyTorch's results for each recorded workload.
    #[test]
    fn recorded_workloads_stay_within_their_bounds() -> crate::memory::error::Result<()> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/traces");
        let table = replay_folder(&folder, Config::default(), 1)?;
        assert_eq!(table.rows.len(), 12);
        for row in &table.rows {
            let max_ratio = if row.mode == SegmentMode::Virtual { 1.03 } else { 1.06 };
            let pytorch = row.pytorch.as_ref().map(|p| (p.peak_reserved, p.device_allocs + p.device_frees));
            let within = pytorch.is_some_and(|(reserved, theirs)| {
                row.report.peak_reserved <= reserved && row.report.driver_calls <= theirs
            });
            assert!(within && row.report.ratio() <= max_ratio, "{row:?}");
        }
        assert!(table.mean_ratio(SegmentMode::Virtual) <= 1.01, "{table}");
        assert!(table.mean_ratio(SegmentMode::Plain) <= 1.035, "{table}");
        Ok(())
    }
}
