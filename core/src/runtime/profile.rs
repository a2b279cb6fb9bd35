//! Profiler: records every kernel, product and copy with its operation, module, time, bytes and allocated
//! memory. A profile displays as a table and exports a timeline for a browser.
//!
//! ```
//! use forebay_core::{device::Device, dtype::DType, profile::Profiler, tensor::Tensor};
//! # let device = Device::null(Default::default());
//! let x = Tensor::ones(&[64, 64], DType::F32, &device)?;
//! let profiler = Profiler::start(&device)?;
//! x.matmul(&x)?.relu()?;
//! let profile = profiler.finish()?;
//! println!("{profile}"); // a line for each kernel: calls, time, GB/s and part of the card's
//! assert_eq!(profile.spans.last().map(|span| span.op), Some("relu"));
//! let timeline = profile.chrome_trace(); // for chrome://tracing and Perfetto
//! # Ok::<(), forebay_core::error::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::json;

use crate::backend::{Backend, Command, PeakRates, TimestampId};
use crate::error::{Result, fail_if};
use crate::memory::scope;
use crate::runtime::device::Device;
use crate::sync::LockUnpoisoned;

/// Kernel, product, copy or fill that the device ran.
#[derive(Clone, Debug)]
pub struct Span {
    /// Name of the kernel or kind of work: `softmax dtype=f32`, `matmul bf16 8192x768x3072`, `copy`.
    pub name: Arc<str>,
    /// Operation that launched the work.
    pub op: &'static str,
    /// Path of the operation's module.
    pub module: String,
    /// Queue that ran the work.
    pub queue: u8,
    /// Bytes of all bindings: the traffic if each binding is accessed once.
    pub bytes: u64,
    /// Floating-point operations of a product; 0 for other work.
    pub flops: u64,
    /// Start in nanoseconds since the profile's first span; 0 if the device has no clock.
    pub start: f64,
    /// Duration in nanoseconds without idle time before the work; 0 if the device has no clock.
    pub duration: f64,
    /// Bytes allocated from the device's pool at the time of the enqueue.
    pub allocated: u64,
}

/// Totals of one kernel.
#[derive(Clone, Debug, Default)]
pub struct KernelTotal {
    /// Name of the kernel.
    pub name: Arc<str>,
    /// Number of runs.
    pub calls: u64,
    /// Total duration in nanoseconds.
    pub duration: f64,
    /// Total bytes.
    pub bytes: u64,
    /// Total floating-point operations of products.
    pub flops: u64,
}

/// Work of a device while a [`Profiler`] ran. Displays as a table, the longest kernels first.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Spans in call order.
    pub spans: Vec<Span>,
    device: String,
    peak: PeakRates,
}

/// Records the work of a device from [`start`](Self::start) to [`finish`](Self::finish). Timestamps cost a
/// few microseconds for each kernel, so a profiled program is slower; the measured durations are not
/// affected.
#[derive(Debug)]
#[must_use = "recording stops when it is dropped"]
pub struct Profiler {
    device: Device,
}

impl Profiler {
    /// Starts to record the work of all threads.
    ///
    /// # Errors
    /// Another profiler records the device.
    pub fn start(device: &Device) -> Result<Self> {
        device.synchronize()?;
        fail_if!(device.span_recorder().active.swap(true, Ordering::AcqRel);
            argument("Profiler"), "{device} is recorded by another profiler");
        device.span_recorder().lock_spans().clear();
        Ok(Self { device: device.clone() })
    }

    /// Waits for the device and returns the profile.
    pub fn finish(self) -> Result<Profile> {
        let device = self.device.clone();
        device.flush_fusion()?;
        drop(self);
        let raws = std::mem::take(&mut *device.span_recorder().lock_spans());
        let times = device.raw_backend().read_timestamps()?;
        let time = |stamp: TimestampId| times.get(stamp.0 as usize).copied().unwrap_or(0.0);
        let first = raws.iter().filter_map(|raw| Some(time(raw.timestamps?.0))).fold(f64::INFINITY, f64::min);
        let mut ends = [f64::NEG_INFINITY; 256];
        let spans = raws.into_iter().map(|raw| {
            let (start, end) =
                raw.timestamps.map_or((0.0, 0.0), |(from, to)| (time(from) - first, time(to) - first));
            // The queue may have been busy when the start was recorded.
            let start = start.max(ends[usize::from(raw.queue)]);
            ends[usize::from(raw.queue)] = end;
            Span {
                name: raw.name,
                op: raw.scope.op,
                module: raw.scope.module.to_string(),
                queue: raw.queue,
                bytes: raw.bytes,
                flops: raw.flops,
                start,
                duration: (end - start).max(0.0),
                allocated: raw.allocated,
            }
        });
        let spans = spans.collect();
        Ok(Profile { spans, device: device.to_string(), peak: device.info().peak_rates })
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        self.device.span_recorder().active.store(false, Ordering::Release);
    }
}

impl Profile {
    /// Returns the totals of each kernel, the longest first.
    #[must_use]
    pub fn kernel_totals(&self) -> Vec<KernelTotal> {
        let mut rows: BTreeMap<&str, KernelTotal> = BTreeMap::new();
        for span in &self.spans {
            let row = rows
                .entry(&span.name)
                .or_insert_with(|| KernelTotal { name: span.name.clone(), ..KernelTotal::default() });
            row.calls += 1;
            row.duration += span.duration;
            row.bytes += span.bytes;
            row.flops += span.flops;
        }
        let mut rows: Vec<KernelTotal> = rows.into_values().collect();
        rows.sort_by(|a, b| b.duration.total_cmp(&a.duration).then(b.bytes.cmp(&a.bytes)));
        rows
    }

    /// Returns the nanoseconds from the start of the first span to the end of the last.
    #[must_use]
    pub fn elapsed(&self) -> f64 {
        self.spans.iter().map(|span| span.start + span.duration).fold(0.0, f64::max)
    }

    /// Returns the sum of all durations in nanoseconds.
    #[must_use]
    pub fn busy_time(&self) -> f64 {
        self.spans.iter().map(|span| span.duration).sum()
    }

    /// Returns a timeline in Chrome's trace format for `chrome://tracing` and Perfetto. The timeline has a
    /// row for each queue, modules and operations as arguments, and allocated memory as a curve.
    #[must_use]
    pub fn chrome_trace(&self) -> String {
        let us = |ns: f64| ns / 1e3;
        let events = self.spans.iter().flat_map(|span| {
            let kernel = json!({
                "name": &*span.name, "cat": span.op, "ph": "X", "pid": self.device, "tid": span.queue,
                "ts": us(span.start), "dur": us(span.duration),
                "args": { "module": span.module, "op": span.op, "bytes": span.bytes, "flops": span.flops },
            });
            let memory = json!({
                "name": "allocated", "ph": "C", "pid": self.device, "ts": us(span.start), "args": { "bytes": span.allocated },
            });
            [kernel, memory]
        });
        json!({ "displayTimeUnit": "ns", "traceEvents": events.collect::<Vec<_>>() }).to_string()
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (elapsed, busy) = (self.elapsed(), self.busy_time());
        writeln!(
            f,
            "{}: {} launches in {:.3} ms, {:.3} ms of them busy",
            self.device,
            self.spans.len(),
            elapsed / 1e6,
            busy / 1e6
        )?;
        writeln!(
            f,
            "{:>9} {:>6} {:>6} {:>9} {:>5} {:>8} {:>5}  kernel",
            "us", "%", "calls", "GB/s", "%", "TFLOP/s", "%"
        )?;
        let percent = |rate: f64, peak: Option<f64>| {
            peak.map_or(String::new(), |peak| format!("{:.0}", 100.0 * rate / peak))
        };
        for row in self.kernel_totals() {
            let rate = |what: u64| if row.duration > 0.0 { what as f64 / row.duration * 1e9 } else { 0.0 };
            let (bytes, flops) = (rate(row.bytes), rate(row.flops));
            let mut products = [String::new(), String::new()];
            if row.flops > 0 {
                write!(products[0], "{:.1}", flops / 1e12)?;
                products[1] = percent(flops, self.peak.flops_per_second);
            }
            writeln!(
                f,
                "{:>9.1} {:>6.1} {:>6} {:>9.1} {:>5} {:>8} {:>5}  {}",
                row.duration / 1e3,
                100.0 * row.duration / busy.max(1.0),
                row.calls,
                bytes / 1e9,
                percent(bytes, self.peak.bytes_per_second),
                products[0],
                products[1],
                row.name
            )?;
        }
        Ok(())
    }
}

/// Span whose timestamps are not resolved yet.
pub(crate) struct RawSpan {
    name: Arc<str>,
    scope: scope::Scope,
    queue: u8,
    bytes: u64,
    flops: u64,
    timestamps: Option<(TimestampId, TimestampId)>,
    allocated: u64,
}

/// Description of work for the profiler.
pub(crate) struct WorkItem {
    pub(crate) name: Arc<str>,
    pub(crate) bytes: u64,
    pub(crate) flops: u64,
}

impl WorkItem {
    pub(crate) fn without_flops(name: &'static str, bytes: u64) -> Self {
        Self { name: name.into(), bytes, flops: 0 }
    }
}

/// Recorded spans of a device.
#[derive(Default)]
pub(crate) struct SpanRecorder {
    active: AtomicBool,
    spans: Mutex<Vec<RawSpan>>,
}

impl SpanRecorder {
    fn lock_spans(&self) -> MutexGuard<'_, Vec<RawSpan>> {
        self.spans.lock_unpoisoned()
    }
}

impl Device {
    /// Enqueues a command on this thread's queue. All device work goes through here.
    #[inline]
    pub(crate) fn enqueue(&self, work: impl FnOnce() -> WorkItem, command: &Command<'_>) -> Result<()> {
        self.try_enqueue(work, command).map(drop)
    }

    /// Enqueues a command that the backend may decline by returning `false`.
    #[inline]
    pub(crate) fn try_enqueue(&self, work: impl FnOnce() -> WorkItem, command: &Command<'_>) -> Result<bool> {
        self.try_enqueue_on(self.current_queue(), scope::current(), work, command)
    }

    /// Enqueues a command on queue `queue`, attributed to `scope`, and records it if a step is captured.
    #[inline]
    pub(crate) fn try_enqueue_on(
        &self,
        queue: u8,
        scope: scope::Scope,
        work: impl FnOnce() -> WorkItem,
        command: &Command<'_>,
    ) -> Result<bool> {
        let done = self.enqueue_timed(queue, scope, work, |backend| backend.enqueue(command))?;
        if done && self.capture_recorder().is_recording_here() {
            self.capture_recorder().push_command(self, queue, scope, command)?;
        }
        Ok(done)
    }

    /// Enqueues a transfer from or to the host, which captured steps do not contain.
    pub(crate) fn enqueue_transfer(
        &self,
        work: impl FnOnce() -> WorkItem,
        transfer: impl FnOnce(&Arc<dyn Backend>) -> Result<()>,
    ) -> Result<()> {
        self.enqueue_timed(self.current_queue(), scope::current(), work, |backend| {
            transfer(backend).map(|()| true)
        })
        .map(drop)
    }

    /// Enqueues work, surrounded by timestamps while a profiler runs.
    #[inline]
    pub(crate) fn enqueue_timed(
        &self,
        queue: u8,
        scope: scope::Scope,
        work: impl FnOnce() -> WorkItem,
        enqueue: impl FnOnce(&Arc<dyn Backend>) -> Result<bool>,
    ) -> Result<bool> {
        let backend = self.queue_backend(queue)?;
        if !self.is_profiled() {
            return enqueue(backend);
        }
        let allocated = self.pool().stats().allocated();
        let from = backend.record_timestamp()?;
        let done = enqueue(backend)?;
        let stamps = from.zip(backend.record_timestamp()?);
        if done {
            let WorkItem { name, bytes, flops } = work();
            let raw = RawSpan { name, scope, queue, bytes, flops, timestamps: stamps, allocated };
            self.span_recorder().lock_spans().push(raw);
        }
        Ok(done)
    }

    #[inline]
    pub(crate) fn is_profiled(&self) -> bool {
        self.span_recorder().active.load(Ordering::Relaxed)
    }
}
