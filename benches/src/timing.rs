//! Timing: wall time with a synchronisation around each sample, as in the peers' programs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use forebay::device::Device;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;
use serde_json::{Map, Value, json};

/// Device to benchmark, and the size of the workload.
pub(crate) struct Bench<'a> {
    pub(crate) device: &'a Device,
    pub(crate) tiny: bool,
    /// File of the timeline of gpt's step; other timelines are written next to it.
    profile: Option<PathBuf>,
    /// Names of groups, or `group/row`; empty for all.
    only: Vec<String>,
    /// If true, the device is one that a program opened.
    is_shared: bool,
    /// Sequences a step of gpt's models, if requested.
    batch: Option<usize>,
    /// Timed steps of the group models.
    pub(crate) steps: usize,
}

/// Times of an operation in milliseconds.
pub(crate) struct Timing {
    pub(crate) median_ms: f64,
    min_ms: f64,
    first_ms: f64,
    samples: usize,
    calls_per_sample: usize,
}

const SAMPLES: usize = 20;
/// Most calls of a sample. The wait at its end is a small part of so many.
pub(crate) const MAX_CALLS: usize = 50;
/// Time of the calls before the samples.
const WARM_UP: Duration = Duration::from_millis(200);
/// Warm-up of work that reaches the card's limit of power. Some seconds of it decide on the clock.
pub(crate) const LONG_WARM_UP: Duration = Duration::from_secs(2);

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl<'a> Bench<'a> {
    pub(crate) fn new(device: &'a Device, tiny: bool, profile: Option<PathBuf>) -> Self {
        Self { device, tiny, profile, only: Vec::new(), is_shared: false, batch: None, steps: 20 }
    }

    /// Restricts the run to these groups, or rows named `group/row`.
    pub(crate) fn only(self, only: Vec<String>) -> Self {
        Self { only, ..self }
    }

    /// Marks the lines as those of a shared device.
    pub(crate) fn shared(self) -> Self {
        Self { is_shared: true, ..self }
    }

    /// Sets the sequences a step of gpt's models.
    pub(crate) fn batch(self, batch: Option<usize>) -> Self {
        Self { batch, ..self }
    }

    /// Sets the number of timed steps of the group models.
    pub(crate) fn steps(self, steps: usize) -> Self {
        Self { steps, ..self }
    }

    /// Returns the sequences a step of gpt's models: those requested, or `default`.
    pub(crate) fn batch_or(&self, default: usize) -> usize {
        self.batch.unwrap_or(default)
    }

    /// Returns true if the group, or a row of it, is to run.
    pub(crate) fn wants_group(&self, group: &str) -> bool {
        let named = |name: &String| name.split('/').next() == Some(group);
        self.only.is_empty() || self.only.iter().any(named)
    }

    /// Returns true if this row of a group is to run.
    pub(crate) fn wants(&self, group: &str, row: &str) -> bool {
        let named = |name: &String| name == group || name.split_once('/') == Some((group, row));
        self.only.is_empty() || self.only.iter().any(named)
    }

    /// If profiling was requested, prints the kernel times of one step on `device` and writes its timeline under the
    /// name of `row`.
    pub(crate) fn write_profile(
        &self,
        device: &Device,
        row: &str,
        step: impl FnOnce() -> forebay::error::Result<Tensor>,
    ) -> Result<()> {
        let Some(path) = &self.profile else { return Ok(()) };
        let path =
            if row == "gpt2_train" { path.clone() } else { path.with_file_name(format!("{row}.json")) };
        let profiler = Profiler::start(device)?;
        step()?;
        let profile = profiler.finish()?;
        eprintln!("{row}\n{profile}");
        Ok(forebay::io::write_bytes(&path, profile.chrome_trace())?)
    }

    /// Times the first call alone, warms up, then takes samples of as many calls as fit into about 10 ms, at most
    /// `max_calls`. Each result is dropped when the next one exists, so that samples need little memory.
    pub(crate) fn time(&self, max_calls: usize, op: impl Fn() -> Result<Tensor>) -> Result<Timing> {
        self.time_after(WARM_UP, max_calls, op)
    }

    /// Times like [`time`](Self::time), with a warm-up of at least this long.
    pub(crate) fn time_after(
        &self,
        warm_up: Duration,
        max_calls: usize,
        op: impl Fn() -> Result<Tensor>,
    ) -> Result<Timing> {
        let sync = || self.device.synchronize();
        let timed = |n: usize| -> Result<f64> {
            sync()?;
            let mut last = None;
            let start = Instant::now();
            for _ in 0..n {
                last = Some(op()?);
            }
            sync()?;
            let elapsed = start.elapsed();
            drop(last);
            Ok(elapsed.as_secs_f64() * 1e3 / n as f64)
        };
        let first_ms = timed(1)?;
        let one =
            (0..4).map(|_| timed(1)).collect::<Result<Vec<_>>>()?.into_iter().fold(f64::INFINITY, f64::min);
        let inner = ((10.0 / one).ceil() as usize).clamp(1, max_calls.max(1));
        let samples = if one > 500.0 { 3 } else { SAMPLES };
        // An idle GPU has a low clock, and compiling left it idle.
        let warm_up = if self.tiny { Duration::ZERO } else { warm_up };
        let start = Instant::now();
        loop {
            timed(inner)?;
            if start.elapsed() >= warm_up {
                break;
            }
        }
        let all = (0..samples).map(|_| timed(inner)).collect::<Result<Vec<_>>>()?;
        let min_ms = all.iter().copied().fold(f64::INFINITY, f64::min);
        Ok(Timing { median_ms: median(all), min_ms, first_ms, samples, calls_per_sample: inner })
    }

    /// Times steps that each read their loss. After the warm-up steps, returns the median in milliseconds and the
    /// last loss, and measures peak memory.
    pub(crate) fn time_steps(
        device: &Device,
        (warm_up, steps): (usize, usize),
        mut once: impl FnMut() -> forebay::error::Result<Tensor>,
    ) -> Result<(f64, f64)> {
        for _ in 0..warm_up {
            once()?.item()?;
        }
        device.pool().reset_peak_stats();
        let mut ms = Vec::with_capacity(steps);
        let mut loss = f64::NAN;
        for _ in 0..steps {
            device.synchronize()?;
            let start = Instant::now();
            loss = once()?.item()?;
            ms.push(start.elapsed().as_secs_f64() * 1e3);
        }
        Ok((median(ms), loss))
    }

    /// Prints a JSON line.
    pub(crate) fn emit_line(&self, bench: &str, shape: &str, dtype: &str, fields: Value) {
        let mut line = Map::new();
        line.insert("peer".into(), json!("forebay"));
        let backend = self.device.info().backend;
        let backend = if self.is_shared { format!("{backend}-shared") } else { backend.to_owned() };
        line.insert("backend".into(), json!(backend));
        line.insert("bench".into(), json!(bench));
        line.insert("shape".into(), json!(shape));
        line.insert("dtype".into(), json!(dtype));
        if let Value::Object(fields) = fields {
            line.extend(fields);
        }
        println!("{}", Value::Object(line));
    }

    /// Prints the line of a timed operation, with one rate.
    pub(crate) fn emit_rate(&self, bench: &str, shape: &str, dtype: &str, t: &Timing, rate: (&str, f64)) {
        let mut fields = json!({
            "median_ms": t.median_ms, "min_ms": t.min_ms, "first_ms": t.first_ms,
            "samples": t.samples, "inner": t.calls_per_sample,
        });
        fields[rate.0] = json!(rate.1);
        self.emit_line(bench, shape, dtype, fields);
    }

    /// Returns a tensor of uniform random values in -1..1.
    pub(crate) fn random_tensor(&self, shape: &[usize], dtype: forebay::dtype::DType) -> Result<Tensor> {
        Ok(Tensor::uniform(shape, -1.0, 1.0, forebay::dtype::DType::F32, self.device)?.to_dtype(dtype)?)
    }
}
