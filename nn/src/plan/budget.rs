//! Making a step fit: of all ways to run it, the fastest whose peak is within the budget.

use std::fmt;
use std::sync::Arc;

use super::dry_run::with_unlimited_memory;
use super::segment::{ActivationPolicy, SegmentCost, SegmentGuard, pareto_sets};
use forebay_core::amp::{AutocastGuard, autocast};
use forebay_core::backend::null::{CardProfile, NullBackend, WorkEstimate};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::memory::{Bytes, Config};

/// Sets of segments that are tried for each micro-batch and precision.
const MAX_SEGMENT_SETS: usize = 25;

/// How many sets of segments to offload are tried: the first quarter of them, the first half, ...
const OFFLOAD_FRACTIONS: usize = 4;

/// One way to run a step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepConfig {
    /// Rows of the batch that run at once.
    pub micro_batch_size: usize,
    /// How many micro-batches of so many rows make a step: their gradients add up.
    pub micro_batch_count: usize,
    /// The type of [`autocast`]; `None`: everything is f32.
    pub precision: Option<DType>,
    /// What becomes of the values that segments keep, in the order of the forward pass.
    pub policies: Arc<[ActivationPolicy]>,
    /// Whether the optimiser's state is in memory of the host between steps: a step calls
    /// [`Optimizer::offload_state`](crate::optim::Optimizer::offload_state) with it.
    pub offload_state: bool,
}

impl StepConfig {
    /// A step of `count` times `rows` rows in f32 that computes nothing again.
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

    /// The same in f16 or bf16, by [`autocast`].
    #[must_use]
    pub fn with_precision(self, dtype: DType) -> Self {
        Self { precision: Some(dtype), ..self }
    }

    /// The same with these segments computed again, in the order of the forward pass.
    #[must_use]
    pub fn with_recompute(self, again: impl AsRef<[bool]>) -> Self {
        self.with_policy(again.as_ref(), ActivationPolicy::Recompute)
    }

    /// The same with what these segments keep in memory of the host, in the order of the forward pass.
    #[must_use]
    pub fn with_offload(self, away: impl AsRef<[bool]>) -> Self {
        self.with_policy(away.as_ref(), ActivationPolicy::Offload)
    }

    /// The same with the optimiser's state in memory of the host between steps.
    #[must_use]
    pub fn with_offloaded_state(self) -> Self {
        Self { offload_state: true, ..self }
    }

    fn with_policy(self, which: &[bool], what: ActivationPolicy) -> Self {
        let of = |k: usize| match which.get(k) {
            Some(true) => what,
            _ => self.policies.get(k).copied().unwrap_or_default(),
        };
        let saved = (0..which.len().max(self.policies.len())).map(of).collect();
        Self { policies: saved, ..self }
    }

    /// Segments are treated as this says while the guard lives: around forward and backward passes.
    pub fn apply_segments(&self) -> SegmentGuard {
        SegmentGuard::apply_policies(Arc::clone(&self.policies))
    }

    /// The precision's [`autocast`], for the forward pass and the loss; `None` in f32.
    ///
    /// # Errors
    /// As `autocast`.
    pub fn autocast(&self) -> Result<Option<AutocastGuard>> {
        self.precision.map(autocast).transpose()
    }

    /// How many segments are computed again.
    #[must_use]
    pub fn recomputed_count(&self) -> usize {
        self.policies.iter().filter(|saved| **saved == ActivationPolicy::Recompute).count()
    }

    /// How many segments keep their values in memory of the host.
    #[must_use]
    pub fn offloaded_count(&self) -> usize {
        self.policies.iter().filter(|saved| **saved == ActivationPolicy::Offload).count()
    }
}

impl fmt::Display for StepConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} rows, ", self.micro_batch_count, self.micro_batch_size)?;
        match self.precision {
            Some(dtype) => write!(f, "{dtype}")?,
            None => f.write_str("f32")?,
        }
        write!(f, ", {} of {} segments computed again", self.recomputed_count(), self.policies.len())?;
        if self.offloaded_count() > 0 {
            write!(f, ", {} offloaded", self.offloaded_count())?;
        }
        if self.offload_state { f.write_str(", optimiser state offloaded") } else { Ok(()) }
    }
}

/// A choice and what it takes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// The way to run the step.
    pub config: StepConfig,
    /// The most bytes that the pool takes from the device: in a pool that is bounded to the budget, if it needs that to fit. `None` if a
    /// faster choice made it needless to know.
    pub peak: Option<u64>,
    /// If `Some(true)`, it ran dry in a pool that is bounded to the budget; `None` where that was not tried.
    pub fits: Option<bool>,
    /// The time of a step by the cost model of [`Budget`].
    pub seconds: f64,
}

/// What was chosen, and among what.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepPlan {
    /// The card's name.
    pub card: String,
    /// The bytes that the step may take.
    pub budget: u64,
    /// The fastest choice that fits.
    pub best: Estimate,
    /// All choices, the fastest first.
    pub estimates: Vec<Estimate>,
}

/// Bytes for a training step, and what may be changed to fit them.
///
/// The planner runs the step dry, for every size of micro-batch that divides the batch, every allowed precision, and sets
/// of [segments](super::segment) that are computed again or whose values go to the host, with the optimiser's state on the
/// device or on the host; and takes the fastest that runs in a pool that is bounded to the budget
/// ([`Pool::set_limit`](forebay_core::memory::Pool::set_limit), or `max_memory_mb`). Bound the device's pool as well: a small model may take more
/// without a bound, in segments that are larger than it needs. The peak is exact. The time is that of a model: every kernel takes the longest
/// of its bytes over the card's bandwidth, its operations over its rate, and a launch
/// ([`Work::seconds`](forebay_core::backend::null::Work)); what is computed again takes its forward pass once more; copies of
/// segments run beside that, at the speed of the card's bus, and the step takes the longer of both; copies of the state
/// come on top. Choices do not depend on the budget, so a larger budget never makes a step slower, or its peak
/// smaller.
///
/// ```
/// use forebay_core::backend::null::CardProfile;
/// use forebay_nn::nn::{Gpt, GptOptions, Module};
/// use forebay_nn::optim::{AdamW, Optimizer};
/// use forebay_nn::plan::Budget;
/// use forebay_core::{dtype::DType, tensor::Tensor};
///
/// let options = GptOptions { layers: 4, ..GptOptions::preset("gpt2-124m")? };
/// let plan = Budget::new(2 << 30, 8).plan(&CardProfile::from_card("rtx4090")?, |device| {
///     let net = Gpt::new(&options, device)?;
///     let mut optimizer = AdamW::new(net.parameters(), 3e-4);
///     let device = device.clone();
///     Ok(move |choice: &_| -> Result<(), forebay_core::error::Error> {
///         let choice: &forebay_nn::plan::StepConfig = choice;
///         optimizer.offload_state(choice.offload_state);
///         for _ in 0..choice.micro_batch_count {
///             let text = Tensor::zeros(&[choice.micro_batch_size, 256], DType::I64, &device)?;
///             let autocast = choice.autocast()?;
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
    /// A step of `batch` rows may take so many bytes of the device's memory, in f32.
    #[must_use]
    pub fn new(bytes: u64, batch: usize) -> Self {
        Self { bytes, batch_size: batch, precisions: vec![None], measures_all: false, allows_offload: true }
    }

    /// Also allows this precision: f16 or bf16. (f16 needs a `GradScaler` to train.)
    #[must_use]
    pub fn allow_precision(mut self, precision: DType) -> Self {
        if !self.precisions.contains(&Some(precision)) {
            self.precisions.push(Some(precision));
        }
        self
    }

    /// Keeps everything on the device: nothing goes to memory of the host.
    #[must_use]
    pub fn without_offload(self) -> Self {
        Self { allows_offload: false, ..self }
    }

    /// Measures the peaks of all choices, for a table of them; else only of those that are faster than the one that fits.
    #[must_use]
    pub fn measure_all(self) -> Self {
        Self { measures_all: true, ..self }
    }

    /// Finds the fastest choice that fits. `setup` makes the model and everything that stays, and returns the step: one
    /// optimiser step of [`StepConfig::count`] micro-batches of [`StepConfig::rows`] rows. Peaks are those of three steps.
    ///
    /// # Errors
    /// The batch has no rows, or more than 2^32; what the step returns; [`Error::Budget`] if nothing fits, with the smallest budget that would do.
    pub fn plan<S: FnMut(&StepConfig) -> Result<()>>(
        &self,
        profile: &CardProfile,
        setup: impl Fn(&Device) -> Result<S>,
    ) -> Result<StepPlan> {
        if self.batch_size == 0 || u32::try_from(self.batch_size).is_err() {
            let why = format!("a step has 1 to {} rows, not {}", u32::MAX, self.batch_size);
            return Err(Error::argument("plan", why));
        }
        let card = with_unlimited_memory(profile);
        let room =
            self.bytes.min(profile.available_bytes()).min(profile.config.max_memory.unwrap_or(u64::MAX));
        let mut table = Vec::new();
        for rows in (1..=self.batch_size).rev().filter(|rows| self.batch_size.is_multiple_of(*rows)) {
            for &precision in &self.precisions {
                table.extend(self.estimate_configs(rows, precision, &card, &setup)?);
            }
        }
        table.sort_by(|a, b| {
            a.seconds.total_cmp(&b.seconds).then(b.config.micro_batch_size.cmp(&a.config.micro_batch_size))
        });
        let mut best: Option<usize> = None;
        let mut tried: Vec<MeasuredConfig> = Vec::new();
        for (k, estimate) in table.iter_mut().enumerate() {
            let (peaks, fits) = measure_peaks(&card, &setup, &estimate.config, room)?;
            (estimate.peak, estimate.fits) = (Some(peaks.reserved), Some(fits));
            tried.push((peaks.requested.max(room), peaks.reserved, estimate.config.clone()));
            if best.is_none() && fits {
                best = Some(k);
                if !self.measures_all {
                    break;
                }
            }
        }
        if let Some(k) = best {
            return Ok(StepPlan {
                card: card.name.clone(),
                budget: room,
                best: table[k].clone(),
                estimates: table,
            });
        }
        let (needed, choice) = find_smallest_budget(&card, &setup, tried)?;
        Err(Error::BudgetTooSmall {
            card: card.name.clone(),
            budget: room,
            needed,
            choice: choice.to_string(),
        })
    }

    /// The choices of one micro-batch and precision.
    fn estimate_configs<S: FnMut(&StepConfig) -> Result<()>>(
        &self,
        rows: usize,
        precision: Option<DType>,
        card: &CardProfile,
        setup: &impl Fn(&Device) -> Result<S>,
    ) -> Result<Vec<Estimate>> {
        let count = self.batch_size / rows;
        let mut parts: Vec<SegmentCost> = Vec::new();
        let mut work = |choice: &StepConfig| -> Result<WorkEstimate> {
            let measured = run_dry(card, setup, choice, |backend, step| {
                let probe = SegmentGuard::start_measuring(Arc::clone(backend));
                let before = backend.estimated_work();
                step()?;
                parts = probe.take_costs();
                // One forward pass' segments, of those of all.
                parts.truncate(parts.len() / choice.micro_batch_count);
                Ok(backend.estimated_work() - before)
            });
            Ok(measured?.0)
        };
        let plain = |count: usize| StepConfig { precision, ..StepConfig::new(rows, count) };
        let offload = self.allows_offload && card.speed.host_bandwidth > 0.0;
        let state = if offload { work(&plain(1).with_offloaded_state())?.host_seconds } else { 0.0 };
        let one = work(&plain(1))?.seconds;
        // Each further micro-batch takes what the second one does.
        let whole = if count > 1 { one + (count - 1) as f64 * (work(&plain(2))?.seconds - one) } else { one };
        let estimate = |choice: StepConfig| {
            let of = |what: ActivationPolicy, cost: &dyn Fn(&SegmentCost) -> f64| -> f64 {
                let those = parts.iter().zip(&*choice.policies).filter(|(_, saved)| **saved == what);
                count as f64 * those.map(|(part, _)| cost(part)).sum::<f64>()
            };
            let computed = whole + of(ActivationPolicy::Recompute, &|part| part.seconds);
            let copied = of(ActivationPolicy::Offload, &|part| {
                2.0 * part.saved_bytes as f64 / card.speed.host_bandwidth
            });
            let seconds = computed.max(copied) + if choice.offload_state { state } else { 0.0 };
            Estimate { config: choice, peak: None, fits: None, seconds }
        };
        let choice =
            || StepConfig { policies: vec![ActivationPolicy::Keep; parts.len()].into(), ..plain(count) };
        let sets = pareto_sets(&parts, MAX_SEGMENT_SETS);
        let mut choices: Vec<StepConfig> = sets.iter().map(|set| choice().with_recompute(set)).collect();
        if state > 0.0 {
            let some = sets.iter().rev().step_by(MAX_SEGMENT_SETS / 5);
            choices.extend(some.map(|set| choice().with_recompute(set).with_offloaded_state()));
        }
        if offload {
            // The earlier ones have longer to come back.
            let mut ends: Vec<usize> =
                (1..=OFFLOAD_FRACTIONS).map(|k| parts.len() * k / OFFLOAD_FRACTIONS).collect();
            ends.dedup();
            for end in ends.into_iter().filter(|end| *end > 0) {
                let away: Vec<bool> = (0..parts.len()).map(|k| k < end).collect();
                choices.push(choice().with_offload(&away));
                if state > 0.0 {
                    choices.push(choice().with_offload(&away).with_offloaded_state());
                }
            }
        }
        Ok(choices.into_iter().map(estimate).collect())
    }
}

impl StepConfig {
    /// The same with two micro-batches at most, which hold as much as many.
    fn with_at_most_two_micro_batches(&self) -> Self {
        Self { micro_batch_count: self.micro_batch_count.min(2), ..self.clone() }
    }
}

/// The most bytes of a choice, and whether it fits `room`. What fits has the peak that it has without a bound, if that fits as well.
fn measure_peaks<S: FnMut(&StepConfig) -> Result<()>>(
    card: &CardProfile,
    setup: &impl Fn(&Device) -> Result<S>,
    choice: &StepConfig,
    room: u64,
) -> Result<(PoolPeaks, bool)> {
    let steps = |choice: &StepConfig| -> Result<PoolPeaks> {
        Ok(run_dry(card, setup, choice, |_, step| step().and_then(|()| step()))?.1)
    };
    match peak_within_limit(card, setup, choice, room)? {
        Some(peak) => {
            // Blocks that lie otherwise in later micro-batches and steps count as well.
            let short = steps(&choice.with_at_most_two_micro_batches())?;
            let free = if short.reserved > room {
                short.reserved
            } else {
                short.reserved.max(steps(choice)?.reserved)
            };
            Ok((PoolPeaks { reserved: if free > room { peak } else { free }, ..short }, true))
        }
        // Two micro-batches show most of it.
        None => {
            Ok((run_dry(card, setup, &choice.with_at_most_two_micro_batches(), |_, step| step())?.1, false))
        }
    }
}

/// The most bytes of a choice in a pool that may take no more than `room`, as it will be used on the device: such a pool takes smaller
/// segments, moves blocks and gives memory back. `None` if it does not fit.
fn peak_within_limit<S: FnMut(&StepConfig) -> Result<()>>(
    card: &CardProfile,
    setup: &impl Fn(&Device) -> Result<S>,
    choice: &StepConfig,
    room: u64,
) -> Result<Option<u64>> {
    let bounded = card.clone().with_config(Config { max_memory: Some(room), ..card.config });
    match run_dry(&bounded, setup, choice, |_, step| step().and_then(|()| step())) {
        Ok((_, peaks)) => Ok(Some(peaks.reserved)),
        Err(error) => error.into_out_of_memory().map(|_| None),
    }
}

/// The least budget that a choice can run with, for what is held at once and what was tried, the most that it takes without a bound, and it.
type MeasuredConfig = (u64, u64, StepConfig);

/// The smallest budget under which one of the choices runs: it was run dry under that limit, and none of them runs with one granule less. None
/// of them fits `room`.
fn find_smallest_budget<S: FnMut(&StepConfig) -> Result<()>>(
    card: &CardProfile,
    setup: &impl Fn(&Device) -> Result<S>,
    mut all: Vec<MeasuredConfig>,
) -> Result<(u64, StepConfig)> {
    let source = &card.source_limits;
    let granule = source.virtual_memory.map_or(source.alignment.max(512), |pages| pages.granularity);
    all.sort_by_key(|&(least, reserved, _)| (least, reserved));
    let mut best: Option<(u64, StepConfig)> = None;
    let mut found = true;
    // Until no choice runs with less: with less, one that was passed over may run after all.
    while std::mem::take(&mut found) {
        for (least, reserved, choice) in &all {
            let below = best.as_ref().map_or(u64::MAX, |(bytes, _)| bytes.saturating_sub(granule));
            if *least > below {
                break;
            }
            // It takes no more without a bound, but for what lies otherwise in later steps.
            let most = below.min(reserved.saturating_mul(2));
            if let Some(peak) = peak_within_limit(card, setup, choice, most)? {
                best = Some((
                    find_smallest_limit(card, setup, choice, *least, peak.max(*least), granule)?,
                    choice.clone(),
                ));
                found = true;
            }
        }
    }
    best.ok_or_else(|| Error::argument("plan", "the step runs out of memory at any budget"))
}

/// The smallest limit of the pool under which a choice runs: a multiple of the granule, at least `low` bytes and about `most` at most.
fn find_smallest_limit<S: FnMut(&StepConfig) -> Result<()>>(
    card: &CardProfile,
    setup: &impl Fn(&Device) -> Result<S>,
    choice: &StepConfig,
    low: u64,
    most: u64,
    granule: u64,
) -> Result<u64> {
    let runs = |granules: u64| peak_within_limit(card, setup, choice, granules * granule);
    let (mut low, mut most) = (low.saturating_sub(1) / granule, most.div_ceil(granule));
    // What it took in a larger pool may lie otherwise in one of that size.
    let mut step = 1;
    while runs(most)?.is_none() {
        (low, most, step) = (most, most + step, 2 * step);
    }
    while most > low + 1 {
        let middle = low.midpoint(most);
        match runs(middle)? {
            Some(peak) => most = peak.div_ceil(granule).clamp(low + 1, middle),
            None => low = middle,
        }
        if most < middle && runs(most)?.is_none() {
            (low, most) = (most, middle);
        }
    }
    Ok(most * granule)
}

/// The most bytes of a run.
#[derive(Clone, Copy, Debug)]
struct PoolPeaks {
    /// Bytes that the pool took from the device.
    reserved: u64,
    /// Bytes held at once, before rounding.
    requested: u64,
}

/// Runs a step on a null device, and then `second`, which runs it again, and may look at it. Also the most bytes that the
/// pool took.
fn run_dry<S: FnMut(&StepConfig) -> Result<()>, T>(
    card: &CardProfile,
    setup: &impl Fn(&Device) -> Result<S>,
    choice: &StepConfig,
    second: impl FnOnce(&Arc<NullBackend>, &mut dyn FnMut() -> Result<()>) -> Result<T>,
) -> Result<(T, PoolPeaks)> {
    let backend = Arc::new(NullBackend::new(card.clone()));
    let device = Device::with_config(backend.clone(), card.config);
    let mut step = setup(&device)?;
    let _segments = choice.apply_segments();
    step(choice)?;
    let value = second(&backend, &mut || step(choice))?;
    let stats = device.memory();
    Ok((value, PoolPeaks { reserved: stats.peak_reserved(), requested: stats.requested_bytes.all.peak }))
}

impl StepPlan {
    /// Those choices of which no other one is faster and takes less memory too, the fastest first.
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

/// The choice and what it costs, then the [Pareto front](Plan::pareto); `{:#}` has all choices that were measured.
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
            "rows", "parts", "precision", "again", "offloaded", "peak", "step"
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
                let text = Tensor::zeros(&[choice.micro_batch_size, 256], DType::I64, &device)?;
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
    fn what_is_chosen_runs_in_a_pool_of_the_budget() -> Result<()> {
        for card in [CardProfile::from_card("t4")?, CardProfile::from_card("t4")?.with_wgpu_limits()] {
            let Err(Error::BudgetTooSmall { needed, .. }) = plan_on(&card, 1 << 20) else {
                panic!("1 MiB is enough");
            };
            for budget in [needed, needed + needed / 8, needed + needed / 2] {
                let choice = plan_on(&card, budget)?.best.config;
                let bounded = Config { max_memory: Some(budget), ..card.config };
                let steps = run_dry(&card.clone().with_config(bounded), &setup, &choice, |_, step| {
                    step().and_then(|()| step()).and_then(|()| step())
                });
                assert!(steps?.1.reserved <= budget, "{choice} within {budget}");
            }
        }
        Ok(())
    }

    #[test]
    fn more_memory_is_never_slower_and_less_is_refused_with_what_would_do() -> Result<()> {
        let needed = match plan(1 << 20) {
            Err(Error::BudgetTooSmall { needed, choice, .. }) => {
                assert!(choice.contains("of 3 segments computed again"), "{choice}");
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

    /// Small models of random sizes, on cards with and without virtual memory: their segments would be larger than what they need.
    #[test]
    fn the_smallest_budget_is_one_that_runs_and_one_granule_less_does_not() -> Result<()> {
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
                        let x = Tensor::zeros(&[100 * choice.micro_batch_size, inputs], DType::F32, &device)?;
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
                peak_within_limit(&card, &make, &best.config, needed)?.is_some(),
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
