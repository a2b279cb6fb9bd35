//! Search for the fastest configuration of a training step whose peak memory is within a budget.

use std::fmt;
use std::sync::Arc;

use super::dry_run::with_unlimited_memory;
use crate::nn::segment::{ActivationPolicy, SegmentCost, SegmentGuard, pareto_sets};
use crate::{DType, Device, Error, Result, fail_if};
use forebay_core::amp::{AutocastGuard, autocast};
use forebay_core::backend::null::{CardProfile, NullBackend, WorkEstimate};
use forebay_core::memory::{Bytes, Config};

/// Maximum number of recomputation sets to try for each micro-batch size and precision.
const MAX_SEGMENT_SETS: usize = 25;

/// Number of offload sets to try: the first quarter of the segments, the first half, and so on.
const OFFLOAD_FRACTIONS: usize = 4;

/// Configuration of a training step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepConfig {
    /// Rows of the batch that run at once.
    pub micro_batch_size: usize,
    /// Number of micro-batches in a step; their gradients accumulate.
    pub micro_batch_count: usize,
    /// Dtype of [`autocast`], or `None` for f32.
    pub precision: Option<DType>,
    /// Policies of the segments' saved activations, in the order of the forward pass.
    pub policies: Arc<[ActivationPolicy]>,
    /// If true, the optimiser's state is in host memory between steps. The step passes the value to
    /// [`Optimizer::offload_state`](crate::optim::Optimizer::offload_state).
    pub offload_state: bool,
}

impl StepConfig {
    /// Creates a step of `count` micro-batches of `rows` rows, in f32 and without recomputation.
    #[must_use]
    pub fn new(rows: usize, count: usize) -> Self {
        Self {
            micro_batch_size: rows,
            micro_batch_count: count,
            precision: None,
            policies: Arc::default(),
            offload_state: false,
        }
    }

    setters! {
        /// Sets the precision to f16 or bf16, by [`autocast`].
        fn with_precision(dtype: DType) { precision: Some(dtype) }
        /// Offloads the optimiser's state between steps.
        fn with_offloaded_state() { offload_state: true }
    }

    /// Recomputes the segments that are true in `segments`, in the order of the forward pass.
    #[must_use]
    pub fn with_recompute(self, segments: impl AsRef<[bool]>) -> Self {
        self.with_policy(segments.as_ref(), ActivationPolicy::Recompute)
    }

    /// Offloads the saved activations of segments that are true in `segments`, in the forward pass's order.
    #[must_use]
    pub fn with_offload(self, segments: impl AsRef<[bool]>) -> Self {
        self.with_policy(segments.as_ref(), ActivationPolicy::Offload)
    }

    fn with_policy(self, segments: &[bool], policy: ActivationPolicy) -> Self {
        let of = |k: usize| match segments.get(k) {
            Some(true) => policy,
            _ => self.policies.get(k).copied().unwrap_or_default(),
        };
        let saved = (0..segments.len().max(self.policies.len())).map(of).collect();
        Self { policies: saved, ..self }
    }

    /// Applies the policies to segments during the guard's life, which covers forward and backward passes.
    pub fn apply_segments(&self) -> SegmentGuard {
        SegmentGuard::apply_policies(Arc::clone(&self.policies))
    }

    /// Enters [`autocast`] for the forward pass and the loss; returns `None` in f32.
    #[track_caller]
    pub fn autocast(&self) -> Result<Option<AutocastGuard>> {
        self.precision.map(autocast).transpose()
    }

    /// Returns the number of recomputed segments.
    #[must_use]
    pub fn recomputed_count(&self) -> usize {
        self.count_policy(ActivationPolicy::Recompute)
    }

    /// Returns the number of offloaded segments.
    #[must_use]
    pub fn offloaded_count(&self) -> usize {
        self.count_policy(ActivationPolicy::Offload)
    }

    fn count_policy(&self, policy: ActivationPolicy) -> usize {
        self.policies.iter().filter(|own| **own == policy).count()
    }
}

impl fmt::Display for StepConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} rows, ", self.micro_batch_count, self.micro_batch_size)?;
        match self.precision {
            Some(dtype) => write!(f, "{dtype}")?,
            None => f.write_str("f32")?,
        }
        write!(f, ", {} of {} segments recomputed", self.recomputed_count(), self.policies.len())?;
        if self.offloaded_count() > 0 {
            write!(f, ", {} offloaded", self.offloaded_count())?;
        }
        if self.offload_state { f.write_str(", optimiser state offloaded") } else { Ok(()) }
    }
}

/// Configuration with its estimated cost.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// Configuration of the step.
    pub config: StepConfig,
    /// Peak bytes that the pool reserves. If the step fits only in a pool limited to the budget, the peak is
    /// that pool's. `None` if a faster configuration already fits.
    pub peak: Option<u64>,
    /// Reports whether a dry run succeeded in a pool limited to the budget. `None` without such a dry run.
    pub fits: Option<bool>,
    /// Time of a step by the cost model of [`Budget`].
    pub seconds: f64,
}

/// Chosen configuration and its alternatives.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepPlan {
    /// Name of the card.
    pub card: String,
    /// Bytes that the step may reserve.
    pub budget: u64,
    /// Fastest configuration that fits.
    pub best: Estimate,
    /// All configurations, the fastest first.
    pub estimates: Vec<Estimate>,
}

/// Memory budget of a training step, with the changes that the planner may make to meet the budget.
///
/// The planner dry-runs the step for every micro-batch size that divides the batch, and every allowed
/// precision. It combines these with sets of [segments](super::segment) to recompute or offload, and with the
/// optimiser's state on the device or on the host. The plan is the fastest configuration that runs in a pool
/// limited to the budget ([`Pool::set_limit`](forebay_core::memory::Pool::set_limit), or `max_memory_mb`).
///
/// Limit the device's pool as well. Without a limit, a small model may reserve more, in segments larger than
/// necessary. The peak is exact; the time comes from a cost model
/// ([`WorkEstimate::seconds`](forebay_core::backend::null::WorkEstimate)):
///
/// - A kernel takes the longest of its bytes over the card's bandwidth, its FLOPs over the card's rate, and a
///   launch.
/// - A recomputed segment takes its forward pass once more.
/// - Copies of offloaded segments overlap with computation at the speed of the card's bus; the step takes the
///   longer of both.
/// - Copies of the optimiser's state add to the step.
///
/// The set of configurations does not depend on the budget. A larger budget therefore never makes a step
/// slower, or its peak smaller.
///
/// ```
/// use forebay_core::{backend::null::CardProfile, dtype::DType, error::Result, tensor::Tensor};
/// use forebay_nn::nn::{Gpt, GptOptions, Module};
/// use forebay_nn::optim::{AdamW, Optimizer};
/// use forebay_nn::plan::{Budget, StepConfig};
///
/// let options = GptOptions { layers: 4, ..GptOptions::preset("gpt2-124m")? };
/// let plan = Budget::new(2 << 30, 8).plan(&CardProfile::from_card("rtx4090")?, |device| {
///     let net = Gpt::new(&options, device)?;
///     let mut optimizer = AdamW::new(net.parameters(), 3e-4);
///     let device = device.clone();
///     Ok(move |config: &StepConfig| -> Result<()> {
///         optimizer.offload_state(config.offload_state);
///         for _ in 0..config.micro_batch_count {
///             let text = Tensor::zeros(&[config.micro_batch_size, 256], DType::I64, &device)?;
///             let autocast = config.autocast()?;
///             let loss = net.forward(&text)?.flatten(0, 1)?.cross_entropy(&text.flatten(0, 1)?)?;
///             drop(autocast);
///             loss.backward()?;
///         }
///         optimizer.step()?;
///         optimizer.zero_grad();
///         Ok(())
///     })
/// })?;
/// assert!(plan.best.peak <= Some(2 << 30));
/// println!("{plan}");
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Budget {
    bytes: u64,
    batch_size: usize,
    precisions: Vec<Option<DType>>,
    measures_all: bool,
    allows_offload: bool,
}

impl Budget {
    /// Creates a budget of `bytes` of device memory for a step of `batch` rows, in f32.
    #[must_use]
    pub fn new(bytes: u64, batch: usize) -> Self {
        Self { bytes, batch_size: batch, precisions: vec![None], measures_all: false, allows_offload: true }
    }

    /// Also allows f16 or bf16. Training in f16 needs a `GradScaler`.
    #[must_use]
    pub fn allow_precision(mut self, precision: DType) -> Self {
        if !self.precisions.contains(&Some(precision)) {
            self.precisions.push(Some(precision));
        }
        self
    }

    setters! {
        /// Disables offloading to host memory.
        fn without_offload() { allows_offload: false }
        /// Measures the peaks of all configurations. By default, measurement stops at the first one that fits.
        fn measure_all() { measures_all: true }
    }

    /// Finds the fastest configuration that fits. `setup` creates the model and everything that stays
    /// allocated. It returns the step: one optimiser step of
    /// [`micro_batch_count`](StepConfig::micro_batch_count) micro-batches of
    /// [`micro_batch_size`](StepConfig::micro_batch_size) rows. Peaks are measured over three steps.
    ///
    /// # Errors
    /// The batch has no rows or more than 2^32, or the step fails. [`Error::BudgetTooSmall`] if nothing fits,
    /// with the smallest sufficient budget.
    #[track_caller]
    pub fn plan<S: FnMut(&StepConfig) -> Result<()>>(
        &self,
        profile: &CardProfile,
        setup: impl Fn(&Device) -> Result<S>,
    ) -> Result<StepPlan> {
        fail_if!(self.batch_size == 0 || u32::try_from(self.batch_size).is_err();
            argument("plan"), "a step has 1 to {} rows, not {}", u32::MAX, self.batch_size);
        let card = with_unlimited_memory(profile);
        let room = self.bytes.min(profile.pool_bytes());
        let runner = StepRunner { card: &card, setup };
        let mut table = Vec::new();
        for rows in (1..=self.batch_size).rev().filter(|rows| self.batch_size.is_multiple_of(*rows)) {
            for &precision in &self.precisions {
                table.extend(self.estimate_configs(rows, precision, &runner)?);
            }
        }
        table.sort_by(|a, b| {
            a.seconds.total_cmp(&b.seconds).then(b.config.micro_batch_size.cmp(&a.config.micro_batch_size))
        });
        let mut best: Option<usize> = None;
        let mut measured: Vec<MeasuredConfig> = Vec::new();
        for (k, estimate) in table.iter_mut().enumerate() {
            let (peaks, fits) = runner.measure_peaks(&estimate.config, room)?;
            (estimate.peak, estimate.fits) = (Some(peaks.reserved), Some(fits));
            measured.push((peaks.requested.max(room), peaks.reserved, estimate.config.clone()));
            if best.is_none() && fits {
                best = Some(k);
                if !self.measures_all {
                    break;
                }
            }
        }
        if let Some(k) = best {
            let best = table[k].clone();
            return Ok(StepPlan { card: card.name.clone(), budget: room, best, estimates: table });
        }
        let (needed, choice) = runner.find_smallest_budget(measured)?;
        Err(Error::BudgetTooSmall {
            card: card.name.clone(),
            budget: room,
            needed,
            choice: choice.to_string(),
        })
    }

    /// Estimates the configurations of one micro-batch size and precision.
    fn estimate_configs<S: FnMut(&StepConfig) -> Result<()>>(
        &self,
        rows: usize,
        precision: Option<DType>,
        runner: &StepRunner<'_, impl Fn(&Device) -> Result<S>>,
    ) -> Result<Vec<Estimate>> {
        let (count, speed) = (self.batch_size / rows, &runner.card.speed);
        let mut parts: Vec<SegmentCost> = Vec::new();
        let mut work = |choice: &StepConfig| -> Result<WorkEstimate> {
            let measured = runner.run(choice, None, |backend, step| {
                let probe = SegmentGuard::start_measuring(Arc::clone(backend));
                let before = backend.estimated_work();
                step()?;
                parts = probe.take_costs();
                // Keeps the segments of one forward pass.
                parts.truncate(parts.len() / choice.micro_batch_count);
                Ok(backend.estimated_work() - before)
            });
            Ok(measured?.0)
        };
        let config_of = |count: usize| StepConfig { precision, ..StepConfig::new(rows, count) };
        let offload = self.allows_offload && speed.host_bandwidth > 0.0;
        let state = if offload { work(&config_of(1).with_offloaded_state())?.host_seconds } else { 0.0 };
        let first_seconds = work(&config_of(1))?.seconds;
        // Each further micro-batch costs as much as the second.
        let compute_seconds = if count > 1 {
            first_seconds + (count - 1) as f64 * (work(&config_of(2))?.seconds - first_seconds)
        } else {
            first_seconds
        };
        let estimate = |choice: StepConfig| {
            let of = |policy: ActivationPolicy, cost: &dyn Fn(&SegmentCost) -> f64| -> f64 {
                let segments = parts.iter().zip(&*choice.policies).filter(|(_, saved)| **saved == policy);
                count as f64 * segments.map(|(part, _)| cost(part)).sum::<f64>()
            };
            let computed = compute_seconds + of(ActivationPolicy::Recompute, &|part| part.seconds);
            let copied =
                of(ActivationPolicy::Offload, &|part| 2.0 * part.saved_bytes as f64 / speed.host_bandwidth);
            let seconds = computed.max(copied) + if choice.offload_state { state } else { 0.0 };
            Estimate { config: choice, peak: None, fits: None, seconds }
        };
        let choice =
            || StepConfig { policies: vec![ActivationPolicy::Keep; parts.len()].into(), ..config_of(count) };
        let sets = pareto_sets(&parts, MAX_SEGMENT_SETS);
        let mut choices: Vec<StepConfig> = sets.iter().map(|set| choice().with_recompute(set)).collect();
        if state > 0.0 {
            let sparse_sets = sets.iter().rev().step_by(MAX_SEGMENT_SETS / 5);
            choices.extend(sparse_sets.map(|set| choice().with_recompute(set).with_offloaded_state()));
        }
        if offload {
            // Earlier segments have more time for the copy back.
            let mut ends: Vec<usize> =
                (1..=OFFLOAD_FRACTIONS).map(|k| parts.len() * k / OFFLOAD_FRACTIONS).collect();
            ends.dedup();
            for end in ends.into_iter().filter(|end| *end > 0) {
                let offloaded: Vec<bool> = (0..parts.len()).map(|k| k < end).collect();
                choices.push(choice().with_offload(&offloaded));
                if state > 0.0 {
                    choices.push(choice().with_offload(&offloaded).with_offloaded_state());
                }
            }
        }
        Ok(choices.into_iter().map(estimate).collect())
    }
}

/// Peak bytes of a run.
#[derive(Clone, Copy, Debug)]
struct PoolPeaks {
    /// Bytes reserved from the device.
    reserved: u64,
    /// Bytes in use, before rounding.
    requested: u64,
}

/// Lower bound of the budget by requests and failures, peak without a limit, and configuration.
type MeasuredConfig = (u64, u64, StepConfig);

/// Dry runs of one step on one card.
struct StepRunner<'a, F> {
    card: &'a CardProfile,
    setup: F,
}

impl<S: FnMut(&StepConfig) -> Result<()>, F: Fn(&Device) -> Result<S>> StepRunner<'_, F> {
    /// Runs a step on a null device, and then `second`, which runs the step again and may inspect the device.
    /// Also returns the pool's peaks.
    fn run<T>(
        &self,
        config: &StepConfig,
        max_memory: Option<u64>,
        second: impl FnOnce(&Arc<NullBackend>, &mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<(T, PoolPeaks)> {
        let backend = Arc::new(NullBackend::new(self.card.clone()));
        let max_memory = max_memory.or(self.card.config.max_memory);
        let device = Device::with_config(backend.clone(), Config { max_memory, ..self.card.config });
        let mut step = (self.setup)(&device)?;
        let _segments = config.apply_segments();
        step(config)?;
        let value = second(&backend, &mut || step(config))?;
        let stats = device.memory();
        Ok((value, PoolPeaks { reserved: stats.peak_reserved(), requested: stats.requested_bytes.all.peak }))
    }

    /// Measures the peaks of a configuration, and reports whether it fits `room`. If the peak without a limit
    /// also fits, that peak is returned.
    fn measure_peaks(&self, config: &StepConfig, room: u64) -> Result<(PoolPeaks, bool)> {
        // Two micro-batches have about the peak of more.
        let short_config =
            StepConfig { micro_batch_count: config.micro_batch_count.min(2), ..config.clone() };
        let Some(peak) = self.peak_within_limit(config, room)? else {
            return Ok((self.run(&short_config, None, |_, step| step())?.1, false));
        };
        // Includes blocks that are placed differently in later micro-batches and steps.
        let steps = |config: &StepConfig| self.run(config, None, |_, step| step().and_then(|()| step()));
        let (_, short_peaks) = steps(&short_config)?;
        let mut free = short_peaks.reserved;
        if free <= room {
            free = free.max(steps(config)?.1.reserved);
        }
        Ok((PoolPeaks { reserved: if free > room { peak } else { free }, ..short_peaks }, true))
    }

    /// Returns the peak in a pool limited to `room`, the limit that the device's pool will have. Such a pool
    /// reserves smaller segments, compacts, and releases memory. Returns `None` if the configuration does not
    /// fit.
    fn peak_within_limit(&self, config: &StepConfig, room: u64) -> Result<Option<u64>> {
        match self.run(config, Some(room), |_, step| step().and_then(|()| step())) {
            Ok((_, peaks)) => Ok(Some(peaks.reserved)),
            Err(error) => error.into_out_of_memory().map(|_| None),
        }
    }

    /// Returns the smallest budget under which a configuration runs, if none fits `room`. A dry run under this
    /// limit succeeded. No configuration runs with one granule less.
    #[track_caller]
    fn find_smallest_budget(&self, mut all: Vec<MeasuredConfig>) -> Result<(u64, StepConfig)> {
        let source = &self.card.source_limits;
        let granule = source.virtual_memory.map_or(source.alignment.max(512), |pages| pages.granularity);
        all.sort_by_key(|&(least, reserved, _)| (least, reserved));
        let mut best: Option<(u64, StepConfig)> = None;
        let mut improved = true;
        // Repeats until no configuration runs with less. With a lower limit, a configuration that was skipped may
        // run after all.
        while std::mem::take(&mut improved) {
            for (least, reserved, config) in &all {
                let below = best.as_ref().map_or(u64::MAX, |(bytes, _)| bytes.saturating_sub(granule));
                if *least > below {
                    break;
                }
                // A run needs at most its peak without a limit, except for other placement in later steps.
                let limit_bound = below.min(reserved.saturating_mul(2));
                if let Some(peak) = self.peak_within_limit(config, limit_bound)? {
                    let limit = self.find_smallest_limit(config, *least, peak.max(*least), granule)?;
                    best = Some((limit, config.clone()));
                    improved = true;
                }
            }
        }
        best.ok_or_else(|| Error::argument("plan", "the step runs out of memory at any budget"))
    }

    /// Returns the smallest pool limit under which a configuration runs: a multiple of the granule, at least
    /// `low` and about `high` bytes at most.
    fn find_smallest_limit(&self, config: &StepConfig, low: u64, high: u64, granule: u64) -> Result<u64> {
        let runs = |granules: u64| self.peak_within_limit(config, granules * granule);
        let (mut low, mut high) = (low.saturating_sub(1) / granule, high.div_ceil(granule));
        // The placement may differ in a pool of the size that a larger pool reserved.
        let mut step = 1;
        while runs(high)?.is_none() {
            (low, high, step) = (high, high + step, 2 * step);
        }
        while high > low + 1 {
            let middle = low.midpoint(high);
            match runs(middle)? {
                Some(peak) => high = peak.div_ceil(granule).clamp(low + 1, middle),
                None => low = middle,
            }
            if high < middle && runs(high)?.is_none() {
                (low, high) = (high, middle);
            }
        }
        Ok(high * granule)
    }
}

impl StepPlan {
    /// Returns the Pareto front in time and memory, the fastest first.
    #[must_use]
    pub fn pareto(&self) -> Vec<&Estimate> {
        let mut least = u64::MAX;
        let better = |estimate: &&Estimate| {
            let peak = estimate.peak.unwrap_or(u64::MAX);
            let better = peak < least;
            least = least.min(peak);
            better
        };
        let mut sorted: Vec<&Estimate> = self.estimates.iter().filter(|e| e.peak.is_some()).collect();
        sorted.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.peak.cmp(&b.peak)));
        sorted.into_iter().filter(better).collect()
    }

    fn write_row(&self, f: &mut fmt::Formatter<'_>, estimate: &Estimate) -> fmt::Result {
        let Estimate { config: choice, peak, fits, seconds } = estimate;
        let mark = if *estimate == self.best {
            "  <- chosen"
        } else if *fits == Some(false) {
            "  does not fit"
        } else {
            ""
        };
        write!(
            f,
            "\n{:>5} {:>6} {:>9} {:>12} {:>12} {:>12} {:>9.1} ms{mark}",
            choice.micro_batch_size,
            choice.micro_batch_count,
            choice.precision.map_or("f32".to_owned(), |d| d.to_string()),
            format!("{} of {}", choice.recomputed_count(), choice.policies.len()),
            match (choice.offloaded_count(), choice.offload_state) {
                (0, false) => "-".to_owned(),
                (0, true) => "state".to_owned(),
                (n, false) => n.to_string(),
                (n, true) => format!("{n} + state"),
            },
            Bytes(peak.unwrap_or(0)).to_string(),
            seconds * 1e3,
        )
    }
}

/// Prints the plan, its cost and the [Pareto front](StepPlan::pareto); `{:#}` all measured configurations.
impl fmt::Display for StepPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (best, budget) = (&self.best, Bytes(self.budget));
        let peak = Bytes(best.peak.unwrap_or(0));
        write!(f, "within {budget} on {}: {}", self.card, best.config)?;
        write!(f, "\n  peak {peak}, at least {:.1} ms a step", best.seconds * 1e3)?;
        let fastest = self.estimates.first().filter(|first| first.seconds < best.seconds);
        if let Some(Estimate { peak: Some(peak), seconds, .. }) = fastest {
            let more = 100.0 * (best.seconds / seconds - 1.0);
            write!(f, ": {more:.0} % more than the fastest of all, which takes {}", Bytes(*peak))?;
        }
        let measured: Vec<&Estimate> = self.estimates.iter().filter(|e| e.peak.is_some()).collect();
        let rows = if f.alternate() { measured.clone() } else { self.pareto() };
        let (few, all) = (rows.len(), measured.len());
        match f.alternate() {
            true => write!(f, "\nall {all} choices, the fastest first:")?,
            false => write!(f, "\n{few} of {all} choices, of which none is better in both memory and time:")?,
        }
        write!(
            f,
            "\n{:>5} {:>6} {:>9} {:>12} {:>12} {:>12} {:>12}",
            "rows", "parts", "precision", "recomputed", "offloaded", "peak", "step"
        )?;
        rows.into_iter().try_for_each(|estimate| self.write_row(f, estimate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Gpt, GptOptions, Module};
    use crate::optim::{AdamW, Optimizer};
    use forebay_core::tensor::Tensor;

    fn setup(device: &Device) -> Result<impl FnMut(&StepConfig) -> Result<()> + use<>> {
        let options =
            GptOptions { vocabulary: 1000, context: 256, layers: 3, heads: 4, width: 256, dropout: 0.0 };
        let net = Gpt::new(&options, device)?;
        let mut optimizer = AdamW::new(net.parameters(), 1e-3);
        let device = device.clone();
        Ok(move |choice: &StepConfig| {
            optimizer.offload_state(choice.offload_state);
            for _ in 0..choice.micro_batch_count {
                let text = Tensor::zeros([choice.micro_batch_size, 256], DType::I64, &device)?;
                let autocast = choice.autocast()?;
                let loss = net.forward(&text)?.mean_all()?;
                drop(autocast);
                loss.backward()?;
            }
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(())
        })
    }

    fn plan_on(card: &CardProfile, budget: u64) -> Result<StepPlan> {
        Budget::new(budget, 4).allow_precision(DType::BF16).plan(card, setup)
    }

    fn plan(budget: u64) -> Result<StepPlan> {
        plan_on(&CardProfile::from_card("t4")?, budget)
    }

    #[test]
    fn the_chosen_config_runs_in_a_pool_of_the_budget() -> Result<()> {
        for card in [CardProfile::from_card("t4")?, CardProfile::from_card("t4")?.with_wgpu_limits()] {
            let Err(Error::BudgetTooSmall { needed, .. }) = plan_on(&card, 1 << 20) else {
                panic!("1 MiB is enough");
            };
            for budget in [needed, needed + needed / 8, needed + needed / 2] {
                let choice = plan_on(&card, budget)?.best.config;
                let runner = StepRunner { card: &card, setup };
                let steps = runner.run(&choice, Some(budget), |_, step| (0..3).try_for_each(|_| step()));
                assert!(steps?.1.reserved <= budget, "{choice} within {budget}");
            }
        }
        Ok(())
    }

    #[test]
    fn more_memory_is_never_slower_and_too_little_is_an_error_with_advice() -> Result<()> {
        let needed = match plan(1 << 20) {
            Err(Error::BudgetTooSmall { needed, choice, .. }) => {
                assert!(choice.contains("of 3 segments recomputed"), "{choice}");
                needed
            }
            other => panic!("1 MiB is enough: {other:?}"),
        };
        assert!(matches!(plan(needed - 1), Err(Error::BudgetTooSmall { .. })));
        let mut before = plan(needed)?.best;
        assert_eq!(before.peak, Some(needed));
        for budget in (1..40).map(|k| needed + k * needed / 16) {
            let best = plan(budget)?.best;
            assert!(best.peak <= Some(budget) && best.peak >= before.peak, "{best:?} after {before:?}");
            assert!(best.seconds <= before.seconds, "{best:?} after {before:?}");
            before = best;
        }
        assert_eq!(
            before.config,
            StepConfig::new(4, 1).with_recompute([false; 3]).with_precision(DType::BF16)
        );
        Ok(())
    }

    /// Parameters and gradients take 5 MiB, and the state takes as much.
    #[test]
    fn offloaded_state_returns_in_groups_within_the_budget() -> Result<()> {
        use crate::nn::Linear;
        let make = |device: &Device| {
            let layers = (0..10).map(|_| Linear::new(256, 256, device)).collect::<Result<Vec<_>>>()?;
            let mut optimizer = AdamW::new(layers.parameters(), 1e-3);
            let device = device.clone();
            Ok(move |choice: &StepConfig| {
                optimizer.offload_state(choice.offload_state);
                for _ in 0..choice.micro_batch_count {
                    let x = Tensor::zeros([choice.micro_batch_size, 256], DType::F32, &device)?;
                    let out = layers.iter().try_fold(x, |x, layer| layer.forward(&x)?.relu())?;
                    out.mean_all()?.backward()?;
                }
                optimizer.step()?;
                optimizer.zero_grad();
                Ok(())
            })
        };
        for card in [CardProfile::from_card("t4")?, CardProfile::from_card("t4")?.with_wgpu_limits()] {
            let best = Budget::new(8 << 20, 16).plan(&card, make)?.best;
            assert!(best.config.offload_state && best.peak <= Some(8 << 20), "{best:?} on {}", card.name);
        }
        Ok(())
    }

    /// Tests small models of random sizes, on cards with and without virtual memory. Their pool segments
    /// would exceed their needs.
    #[test]
    fn the_smallest_budget_runs_and_one_granule_less_does_not() -> Result<()> {
        use crate::nn::Linear;
        let mut seed = 7u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((seed >> 33) % n) as usize
        };
        for k in 0..6 {
            let (inputs, hidden) = (1 + below(700), 1 + below(900));
            let (layers, batch) = (1 + below(3), 1 + below(4));
            let card = CardProfile::from_card("t4")?;
            let card = if k % 2 == 0 { card } else { card.with_wgpu_limits() };
            let granule = match card.source_limits.virtual_memory {
                Some(pages) => pages.granularity,
                None => card.source_limits.alignment.max(512),
            };
            let make = |device: &Device| {
                let first = Linear::new(inputs, hidden, device)?;
                let body =
                    (0..layers).map(|_| Linear::new(hidden, hidden, device)).collect::<Result<Vec<_>>>()?;
                let mut optimizer = AdamW::new([first.parameters(), body.parameters()].concat(), 1e-3);
                let device = device.clone();
                Ok(move |choice: &StepConfig| {
                    optimizer.offload_state(choice.offload_state);
                    for _ in 0..choice.micro_batch_count {
                        let x = Tensor::zeros([100 * choice.micro_batch_size, inputs], DType::F32, &device)?;
                        let mut x = first.forward(&x)?.relu()?;
                        for layer in &body {
                            let layer = (layer.weight.clone(), layer.bias.clone());
                            x = super::super::segment(&[&x], move |x| {
                                x[0].linear(&layer.0, layer.1.as_ref())?.relu()
                            })?;
                        }
                        x.mean_all()?.backward()?;
                    }
                    optimizer.step()?;
                    optimizer.zero_grad();
                    Ok(())
                })
            };
            let at = format!("{inputs} {hidden} {layers} {batch} on {}", card.name);
            let plan = |bytes: u64| Budget::new(bytes, batch).plan(&card, make);
            let needed = match plan(1) {
                Err(Error::BudgetTooSmall { needed, .. }) => needed,
                other => panic!("{at}: {other:?}"),
            };
            let best = plan(needed)?.best;
            assert!(best.peak.is_some_and(|peak| peak <= needed), "{at}: {best:?} within {needed}");
            assert!(
                StepRunner { card: &card, setup: make }.peak_within_limit(&best.config, needed)?.is_some(),
                "{at}: {needed} is too little"
            );
            match plan(needed - granule) {
                Err(Error::BudgetTooSmall { needed: again, .. }) => assert_eq!(again, needed, "{at}"),
                other => panic!("{at}: {granule} bytes less than {needed} do: {other:?}"),
            }
        }
        Ok(())
    }
}
