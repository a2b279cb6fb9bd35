//! What a pool makes of a trace, and a table of traces beside PyTorch.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Event, Recorded, Trace, file_error};
use crate::error::Result;
use crate::memory::compact::{HeldDispatch, Move, Mover};
use crate::memory::fake::FakeSource;
use crate::memory::source::{DeviceMemory, Fence, SegmentId, SegmentSource, SourceError, SourceLimits};
use crate::memory::{Block, Bytes, Config, Pool, Request};

/// What a pool grows with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Segments that are what they are.
    Plain,
    /// Ranges of addresses, with memory where it is needed.
    Virtual,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Plain => "plain",
            Self::Virtual => "virtual",
        })
    }
}

/// What a pool made of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The most bytes that were requested and not freed.
    pub peak_requested: u64,
    /// The same after rounding.
    pub peak_allocated: u64,
    /// The most bytes the pool took from the device.
    pub peak_reserved: u64,
    /// Calls of the source that got memory, moved it or gave it back. One may be about many pieces: PyTorch counts its
    /// growth of a segment, by pieces of 20 MiB, as one too.
    pub driver_calls: u64,
    /// Bytes of blocks in use that were copied, so that memory was free in one piece.
    pub compacted_bytes: u64,
    /// The most segments, or mapped extents, that there were at once.
    pub segments: u64,
    /// Free bytes in the pool when it held the most, the request that made it grow served.
    pub free: u64,
    /// The largest free block then.
    pub largest_free: u64,
    /// The time of one request and its free, without that of the source; 0 if it was not taken.
    pub ns_per_pair: f64,
}

impl Report {
    /// Reserved over requested.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.peak_reserved as f64 / self.peak_requested.max(1) as f64
    }

    /// The part of the free memory that a request for the largest free block could not use, when the pool held the most.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.free as f64 }
    }
}

/// The memory of the card the traces were recorded on.
const DEVICE: u64 = 80 << 30;

/// Runs a trace through a pool over a source that has sizes but no memory: once for the figures, and `timed` times for
/// the time, of which the fastest counts.
///
/// # Errors
/// The configuration bounds the pool to less than the trace needs.
pub fn replay(trace: &Trace, config: Config, mode: Mode, timed: u32) -> Result<Report> {
    let mut report = Report { peak_requested: trace.peak_requested, ..Report::default() };
    let source = Arc::new(mode.source());
    let pool = run(trace, config, source.clone(), |pool| {
        // Only a request that made the pool grow can have made the peak.
        if source.peak() > report.peak_reserved {
            let now = pool.stats();
            report.peak_reserved = source.peak();
            (report.free, report.largest_free) = (now.cached(), now.largest_free);
        }
    })?;
    let stats = pool.stats();
    report.peak_allocated = stats.peak_allocated();
    report.segments = stats.segment.all.peak;
    report.driver_calls = source.calls().memory();
    report.compacted_bytes = stats.compacted_bytes;
    // A source that checks the pool's promises takes its time; this one only says yes.
    let source = Arc::new(Willing { limits: source.limits(), next: AtomicU64::new(1) });
    let mut best = None;
    for _ in 0..timed {
        let start = Instant::now();
        run(trace, config, source.clone(), |_| {})?;
        best = best.into_iter().chain([start.elapsed()]).min();
    }
    let best = best.unwrap_or(Duration::ZERO);
    report.ns_per_pair = best.as_nanos() as f64 / trace.requests().max(1) as f64;
    Ok(report)
}

impl Mode {
    fn source(self) -> FakeSource {
        match self {
            Self::Plain => FakeSource::plain(DEVICE),
            Self::Virtual => FakeSource::paged(DEVICE),
        }
    }
}

/// A source that gives whatever is asked for.
#[derive(Debug)]
struct Willing {
    limits: SourceLimits,
    next: AtomicU64,
}

impl Mover for Willing {
    fn gate(&self) -> Box<dyn HeldDispatch + '_> {
        Box::new(())
    }
    fn copy(&self, _queue: u8, _moves: &[Move]) -> Result<()> {
        Ok(())
    }
}

impl SegmentSource for Willing {
    fn limits(&self) -> SourceLimits {
        self.limits
    }
    fn device_memory(&self) -> DeviceMemory {
        DeviceMemory { total: Some(DEVICE), free: None }
    }
    fn is_real(&self) -> bool {
        false
    }
    fn alloc_segment(&self, _bytes: u64) -> Result<SegmentId, SourceError> {
        Ok(SegmentId(self.next.fetch_add(1, Ordering::Relaxed)))
    }
    fn free_segment(&self, _segment: SegmentId) -> Result<(), SourceError> {
        Ok(())
    }
    fn reserve(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.alloc_segment(bytes)
    }
    fn unreserve(&self, _segment: SegmentId) -> Result<(), SourceError> {
        Ok(())
    }
    fn map(&self, _segment: SegmentId, _offset: u64, _bytes: u64) -> Result<(), SourceError> {
        Ok(())
    }
    fn unmap(&self, _segment: SegmentId, _offset: u64, _bytes: u64) -> Result<(), SourceError> {
        Ok(())
    }
    fn fence(&self) -> Result<Fence, SourceError> {
        Ok(Fence(0))
    }
    fn fence_done(&self, _fence: Fence) -> Result<bool, SourceError> {
        Ok(true)
    }
    fn fence_wait(&self, _fence: Fence) -> Result<(), SourceError> {
        Ok(())
    }
}

/// Runs a trace, and calls `each` after each request.
fn run(
    trace: &Trace,
    config: Config,
    source: Arc<impl SegmentSource + Mover + 'static>,
    mut each: impl FnMut(&Pool),
) -> Result<Pool> {
    // As the blocks of tensors, all of them may move.
    let pool = Pool::new(source.clone(), config).with_mover(source);
    let mut table: Vec<Option<Block>> = vec![None; trace.places];
    for event in &trace.events {
        match *event {
            Event::Alloc { place, bytes, queue } => {
                table[place as usize] = Some(pool.alloc(Request::new(bytes).queue(queue).movable())?);
                each(&pool);
            }
            Event::Free { place } => {
                if let Some(block) = table[place as usize].take() {
                    pool.free(block);
                }
            }
        }
    }
    Ok(pool)
}

/// One line of the [`Table`].
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayRow {
    /// The workload.
    pub workload: String,
    /// How the pool grew.
    pub mode: Mode,
    /// What this pool made of it.
    pub report: Report,
    /// What PyTorch made of it in the same mode, if that is known.
    pub pytorch: Option<Recorded>,
}

/// All traces of a folder, in both modes, beside PyTorch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// By mode, then by workload.
    pub rows: Vec<ReplayRow>,
}

/// Replays every `*.trace.xz` of a folder in both modes. PyTorch's figures are in `reserved.jsonl` beside them.
pub fn table(folder: &Path, config: Config, runs: u32) -> Result<Table> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| file_error(folder, &e))? {
        let path = entry.map_err(|e| file_error(folder, &e))?.path();
        if path.to_string_lossy().ends_with(".trace.xz") {
            paths.push(path);
        }
    }
    paths.sort();
    let known = recorded(&folder.join("reserved.jsonl"))?;
    let traces = paths.iter().map(|p| Trace::open(p)).collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for mode in [Mode::Virtual, Mode::Plain] {
        for trace in &traces {
            let report = replay(trace, config, mode, runs)?;
            let workload = trace.recorded.workload.clone();
            let mut pytorch = known.get(&(workload.clone(), mode == Mode::Virtual)).cloned();
            if mode == Mode::Plain {
                pytorch = pytorch.or_else(|| Some(trace.recorded.clone()));
            }
            rows.push(ReplayRow { workload, mode, report, pytorch });
        }
    }
    Ok(Table { rows })
}

/// PyTorch's figures, by workload and whether its segments were expandable; none if there is no such file.
fn recorded(path: &Path) -> Result<BTreeMap<(String, bool), Recorded>> {
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let text = std::fs::read_to_string(path).map_err(|e| file_error(path, &e))?;
    let lines = text.lines().filter(|l| !l.trim().is_empty());
    lines
        .map(|line| {
            let record: Recorded = serde_json::from_str(line).map_err(|e| file_error(path, &e))?;
            Ok(((record.workload.clone(), record.allocator.contains("expandable")), record))
        })
        .collect()
}

impl Table {
    /// The geometric mean of reserved over requested in a mode.
    #[must_use]
    pub fn mean_ratio(&self, mode: Mode) -> f64 {
        mean(self.rows.iter().filter(|r| r.mode == mode).map(|r| r.report.ratio()))
    }

    /// The same of PyTorch.
    #[must_use]
    pub fn pytorch_mean_ratio(&self, mode: Mode) -> f64 {
        let rows = self.rows.iter().filter(|r| r.mode == mode);
        mean(rows.filter_map(|r| r.pytorch.as_ref()).map(pytorch_ratio))
    }
}

fn pytorch_ratio(recorded: &Recorded) -> f64 {
    recorded.peak_reserved as f64 / recorded.peak_requested.max(1) as f64
}

fn mean(ratios: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = ratios.fold((0.0, 0.0), |(sum, count), r| (sum + r.ln(), count + 1.0));
    (sum / f64::max(count, 1.0)).exp()
}

impl fmt::Display for Table {
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
                "{workload:<22}{mode:<9}{:>11}{:>11}{:>7.3}",
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
        for mode in [Mode::Virtual, Mode::Plain] {
            let (ours, theirs) = (self.mean_ratio(mode), self.pytorch_mean_ratio(mode));
            writeln!(f, "geometric mean, {mode}: {ours:.4} (PyTorch {theirs:.4})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds of the project's targets, and PyTorch's own figures, for each recorded workload.
    #[test]
    fn recorded_workloads_keep_their_bounds() -> crate::error::Result<()> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/traces");
        let table = table(&folder, Config::default(), 1)?;
        assert_eq!(table.rows.len(), 12);
        for row in &table.rows {
            let most = if row.mode == Mode::Virtual { 1.03 } else { 1.06 };
            let pytorch = row.pytorch.as_ref().map(|p| (p.peak_reserved, p.device_allocs + p.device_frees));
            let within = pytorch.is_some_and(|(reserved, theirs)| {
                row.report.peak_reserved <= reserved && row.report.driver_calls <= theirs
            });
            assert!(within && row.report.ratio() <= most, "{row:?}");
        }
        assert!(table.mean_ratio(Mode::Virtual) <= 1.01, "{table}");
        assert!(table.mean_ratio(Mode::Plain) <= 1.035, "{table}");
        Ok(())
    }
}
