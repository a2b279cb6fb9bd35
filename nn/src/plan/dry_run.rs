//! Dry runs: a step on the null device, and the memory that the step needs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::{Device, Result};
use forebay_core::backend::SourceLimits;
use forebay_core::backend::VirtualMemory;
use forebay_core::backend::null::{CardProfile, NullBackend, WorkEstimate};
use forebay_core::memory::scope::{ModulePath, Scope};
use forebay_core::memory::{AllocationChange, Bytes, Config, OutOfMemory, RecordingOptions, Tag};
use forebay_core::variables;

/// More memory than any device has, for a second run that measures a step that does not fit its card.
const UNLIMITED_BYTES: u64 = 1 << 44;
/// Maximum number of modules in the report.
const MAX_MODULES: usize = 5;

/// Result of a dry run. Sizes equal those on the real device, to the byte.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DryRun {
    /// Name of the card.
    pub card: String,
    /// Bytes that a pool can reserve on the card.
    pub available_bytes: u64,
    /// Peak bytes allocated.
    pub peak_allocated: u64,
    /// Peak bytes that the pool reserved from the device.
    pub peak_reserved: u64,
    /// Peak bytes allocated, before rounding.
    pub peak_requested: u64,
    /// Peak bytes for each tag, in the order of [`Tag::ALL`]; the peaks may be at different times.
    pub peak_by_tag: [u64; Tag::COUNT],
    /// State at the peak.
    pub peak: MemoryPeak,
    /// All allocations and frees in order, unless the step starts a recording of its own.
    pub timeline: Vec<AllocationChange>,
    /// Estimated work of the step.
    pub work: WorkEstimate,
    /// Error of the card, if the step does not fit. The other figures are then of unlimited memory.
    pub out_of_memory: Option<Box<OutOfMemory>>,
}

/// State at the time of peak memory.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MemoryPeak {
    /// Index in the timeline.
    pub timeline_index: usize,
    /// Active module.
    pub module: ModulePath,
    /// Active operation.
    pub op: &'static str,
    /// Tag of the last allocation.
    pub tag: Tag,
    /// Bytes of each tag, the largest first.
    pub by_tag: Vec<(Tag, u64)>,
    /// Bytes of each module, the largest first.
    pub by_module: Vec<(ModulePath, u64)>,
}

/// Runs `step` on a null device of this profile, with the code, pool and sizes of the real device but without
/// contents. Values read back are zeros.
///
/// The step creates its model itself. It should include a second pass if the first allocates lasting memory,
/// such as the optimiser's state. A step that does not fit the card runs again with unlimited memory.
/// [`DryRun::out_of_memory`] then has the card's error.
///
/// # Errors
/// An environment variable is invalid, or `step` fails for a reason other than memory.
#[track_caller]
pub fn dry_run<T>(profile: &CardProfile, mut step: impl FnMut(&Device) -> Result<T>) -> Result<DryRun> {
    let refused = match run_once(profile, &mut step) {
        Err(error) => error.into_out_of_memory()?,
        Ok(done) => return Ok(done),
    };
    let mut run = run_once(&with_unlimited_memory(profile), &mut step)?;
    run.available_bytes = refused.limit.unwrap_or(u64::MAX).min(profile.available_bytes());
    run.out_of_memory = Some(refused);
    Ok(run)
}

/// Returns the card with unlimited memory.
pub(super) fn with_unlimited_memory(profile: &CardProfile) -> CardProfile {
    let wide = |v: VirtualMemory| VirtualMemory { reservation: 2 * UNLIMITED_BYTES, ..v };
    CardProfile {
        total_bytes: UNLIMITED_BYTES,
        overhead_bytes: 0,
        source_limits: SourceLimits {
            virtual_memory: profile.source_limits.virtual_memory.map(wide),
            ..profile.source_limits
        },
        config: Config { max_memory: None, per_process_memory_fraction: 1.0, ..profile.config },
        ..profile.clone()
    }
}

fn run_once<T>(profile: &CardProfile, step: &mut impl FnMut(&Device) -> Result<T>) -> Result<DryRun> {
    variables::check()?;
    let backend = Arc::new(NullBackend::new(profile.clone()));
    let device = Device::with_config(backend.clone(), profile.config);
    device.pool().start_recording(RecordingOptions::unbounded());
    step(&device)?;
    let timeline = device.pool().allocation_changes();
    let stats = device.memory();
    Ok(DryRun {
        card: profile.name.clone(),
        available_bytes: device.pool().limit().unwrap_or(u64::MAX).min(profile.available_bytes()),
        peak_allocated: stats.peak_allocated(),
        peak_reserved: stats.peak_reserved(),
        peak_requested: stats.requested_bytes.all.peak,
        peak_by_tag: stats.tags.map(|t| t.peak),
        peak: MemoryPeak::from_timeline(&timeline),
        timeline,
        work: backend.estimated_work(),
        out_of_memory: None,
    })
}

impl DryRun {
    /// Reports whether the step runs in a pool limited to `budget` bytes.
    #[must_use]
    pub fn fits(&self, budget: u64) -> bool {
        self.peak_reserved <= budget
    }
}

impl MemoryPeak {
    fn from_timeline(timeline: &[AllocationChange]) -> Self {
        // The first of several maxima, like the counters.
        let Some(at) = (0..timeline.len()).rev().max_by_key(|&k| timeline[k].allocated) else {
            return Self::default();
        };
        let mut by_tag = [0i64; Tag::COUNT];
        let mut by_module = BTreeMap::<_, i64>::new();
        for change in &timeline[..=at] {
            let Scope { tag, module, .. } = change.scope;
            by_tag[tag as usize] += change.bytes;
            if !module.is_root() {
                *by_module.entry(module).or_default() += change.bytes;
            }
        }
        let Scope { tag, module, op, .. } = timeline[at].scope;
        let mut by_module = sort_largest_first(by_module);
        by_module.truncate(MAX_MODULES);
        let by_tag = sort_largest_first(Tag::ALL.into_iter().zip(by_tag));
        Self { timeline_index: at, module, op, tag, by_tag, by_module }
    }
}

fn sort_largest_first<K>(of: impl IntoIterator<Item = (K, i64)>) -> Vec<(K, u64)> {
    let positive = of.into_iter().filter_map(|(key, bytes)| Some((key, u64::try_from(bytes).ok()?)));
    let mut sorted: Vec<(K, u64)> = positive.filter(|(_, bytes)| *bytes > 0).collect();
    sorted.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    sorted
}

/// Formats sizes as `activation 3.1 GiB, parameter 500.0 MiB`.
fn format_sizes<K: fmt::Display>(held: &[(K, u64)]) -> String {
    held.iter().map(|(key, bytes)| format!("{key} {}", Bytes(*bytes))).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (allocated, reserved) = (Bytes(self.peak_allocated), Bytes(self.peak_reserved));
        let fits = if self.out_of_memory.is_none() { "fits" } else { "does not fit" };
        writeln!(
            f,
            "peak {allocated} allocated, {reserved} reserved: {fits} {}, whose pool can have {}",
            self.card,
            Bytes(self.available_bytes)
        )?;
        write!(f, "  at the peak: {}", if self.peak.op.is_empty() { "an allocation" } else { self.peak.op })?;
        if !self.peak.module.is_root() {
            write!(f, " in {}", self.peak.module)?;
        }
        write!(f, " ({})\n  held by: {}", self.peak.tag, format_sizes(&self.peak.by_tag))?;
        if !self.peak.by_module.is_empty() {
            write!(f, "\n  modules: {}", format_sizes(&self.peak.by_module))?;
        }
        let WorkEstimate { launches, flops, seconds, .. } = self.work;
        write!(
            f,
            "\n  work: {launches} launches, {:.1} TFLOP, at least {:.1} ms",
            flops / 1e12,
            seconds * 1e3
        )
    }
}
