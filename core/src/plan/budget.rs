//! Making a step fit: of all ways to run it, the fastest whose peak is within the budget.

use std::fmt;
use std::sync::Arc;

use super::dry_run::boundless;
use super::segment::{Part, Saved, Segments, sets};
use crate::amp::{Autocast, autocast};
use crate::backend::null::{NullBackend, Profile, Work};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{Bytes, Config};

/// Sets of segments that are tried for each micro-batch and precision.
const SETS: usize = 25;

/// How many sets of segments to offload are tried: the first quarter of them, the first half, ...
const QUARTERS: usize = 4;

/// One way to run a step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// Rows of the batch that run at once.
    pub rows: usize,
    /// How many micro-batches of so many rows make a step: their gradients add up.
    pub count: usize,
    /// The type of [`autocast`]; `None`: everything is f32.
    pub precision: Option<DType>,
    /// What becomes of the values that segments keep, in the order of the forward pass.
    pub saved: Arc<[Saved]>,
    /// Whether the optimiser's state is in memory of the host between steps: a step calls
    /// [`Optimizer::offload_state`](crate::optim::Optimizer::offload_state) with it.
    pub offload_state: bool,
}

impl Choice {
    /// A step of `count` times `rows` rows in f32 that computes nothing again.
    #[must_use]
    pub fn new(rows: usize, count: usize) -> Self {
        Self { rows, count, precision: None, saved: Arc::default(), offload_state: false }
    }

    /// The same in f16 or bf16, by [`autocast`].
    #[must_use]
    pub fn with_precision(self, dtype: DType) -> Self {
        Self { precision: Some(dtype), ..self }
    }

    /// The same with these segments computed again, in the order of the forward pass.
    #[must_use]
    pub fn recompute(self, again: impl AsRef<[bool]>) -> Self {
        self.with(again.as_ref(), Saved::Recomputed)
    }

    /// The same with what these segments keep in memory of the host, in the order of the forward pass.
    #[must_use]
    pub fn offload(self, away: impl AsRef<[bool]>) -> Self {
        self.with(away.as_ref(), Saved::Offloaded)
    }

    /// The same with the optimiser's state in memory of the host between steps.
    #[must_use]
    pub fn with_offloaded_state(self) -> Self {
        Self { offload_state: true, ..self }
    }

    fn with(self, which: &[bool], what: Saved) -> Self {
        let of = |k: usize| match which.get(k) {
            Some(true) => what,
            _ => self.saved.get(k).copied().unwrap_or_default(),
        };
        let saved = (0..which.len().max(self.saved.len())).map(of).collect();
        Self { saved, ..self }
    }

    /// Segments are treated as this says while the guard lives: around forward and backward passes.
    pub fn segments(&self) -> Segments {
        Segments::enter(Arc::clone(&self.saved))
    }

    /// The precision's [`autocast`], for the forward pass and the loss; `None` in f32.
    ///
    /// # Errors
    /// As `autocast`.
    pub fn autocast(&self) -> Result<Option<Autocast>> {
        self.precision.map(autocast).transpose()
    }

    /// How many segments are computed again.
    #[must_use]
    pub fn recomputed(&self) -> usize {
        self.saved.iter().filter(|saved| **saved == Saved::Recomputed).count()
    }

    /// How many segments keep their values in memory of the host.
    #[must_use]
    pub fn offloaded(&self) -> usize {
        self.saved.iter().filter(|saved| **saved == Saved::Offloaded).count()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} rows, ", self.count, self.rows)?;
        match self.precision {
            Some(dtype) => write!(f, "{dtype}")?,
            None => f.write_str("f32")?,
        }
        write!(f, ", {} of {} segments computed again", self.recomputed(), self.saved.len())?;
        if self.offloaded() > 0 {
            write!(f, ", {} offloaded", self.offloaded())?;
        }
        if self.offload_state { f.write_str(", optimiser state offloaded") } else { Ok(()) }
    }
}

/// A choice and what it takes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// The way to run the step.
    pub choice: Choice,
    /// The most bytes that the pool takes from the device; `None` if a faster choice made it needless to know.
    pub peak: Option<u64>,
    /// The time of a step by the cost model of [`Budget`].
    pub seconds: f64,
}

/// What was chosen, and among what.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// The card's name.
    pub card: String,
    /// The bytes that the step may take.
    pub budget: u64,
    /// The fastest choice that fits.
    pub best: Estimate,
    /// All choices, the fastest first.
    pub table: Vec<Estimate>,
}

/// Bytes for a training step, and what may be changed to fit them.
///
/// The planner runs the step dry, for every size of micro-batch that divides the batch, every allowed precision, and sets
/// of [segments](super::segment) that are computed again or whose values go to the host, with the optimiser's state on the
/// device or on the host; and takes the fastest whose peak is within the budget, once it has run in a pool that is bounded
/// to that. The peak is exact. The time is that of a model: every kernel takes the longest of its bytes over the card's bandwidth, its operations over its rate, and a launch
/// ([`Work::seconds`](crate::backend::null::Work)); what is computed again takes its forward pass once more; copies of
/// segments run beside that, at the speed of the card's bus, and the step takes the longer of both; copies of the state
/// come on top. Choices do not depend on the budget, so a larger budget never makes a step slower, or its peak
/// smaller.
///
/// ```
/// use forebay_core::backend::null::Profile;
/// use forebay_core::nn::{Gpt, GptOptions, Module};
/// use forebay_core::optim::{AdamW, Optimizer};
/// use forebay_core::plan::Budget;
/// use forebay_core::{dtype::DType, tensor::Tensor};
///
/// let options = GptOptions { layers: 4, ..GptOptions::preset("gpt2-124m")? };
/// let plan = Budget::new(2 << 30, 8).plan(&Profile::card("rtx4090")?, |device| {
///     let net = Gpt::new(&options, device)?;
///     let mut optimizer = AdamW::new(net.parameters(), 3e-4);
///     let device = device.clone();
///     Ok(move |choice: &_| -> Result<(), forebay_core::error::Error> {
///         let choice: &forebay_core::plan::Choice = choice;
///         optimizer.offload_state(choice.offload_state);
///         for _ in 0..choice.count {
///             let text = Tensor::zeros(&[choice.rows, 256], DType::I64, &device)?;
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
    batch: usize,
    precisions: Vec<Option<DType>>,
    everything: bool,
    offload: bool,
}

impl Budget {
    /// A step of `batch` rows may take so many bytes of the device's memory, in f32.
    #[must_use]
    pub fn new(bytes: u64, batch: usize) -> Self {
        Self { bytes, batch, precisions: vec![None], everything: false, offload: true }
    }

    /// Also allows this precision: f16 or bf16. (f16 needs a `GradScaler` to train.)
    #[must_use]
    pub fn allow(mut self, precision: DType) -> Self {
        if !self.precisions.contains(&Some(precision)) {
            self.precisions.push(Some(precision));
        }
        self
    }

    /// Keeps everything on the device: nothing goes to memory of the host.
    #[must_use]
    pub fn without_offload(self) -> Self {
        Self { offload: false, ..self }
    }

    /// Measures the peaks of all choices, for a table of them; else only of those that are faster than the one that fits.
    #[must_use]
    pub fn measure_all(self) -> Self {
        Self { everything: true, ..self }
    }

    /// Finds the fastest choice that fits. `setup` makes the model and everything that stays, and returns the step: one
    /// optimiser step of [`Choice::count`] micro-batches of [`Choice::rows`] rows. Peaks are those of three steps.
    ///
    /// # Errors
    /// The batch has no rows, or more than 2^32; what the step returns; [`Error::Budget`] if nothing fits, with the smallest budget that would do.
    pub fn plan<S: FnMut(&Choice) -> Result<()>>(
        &self,
        profile: &Profile,
        setup: impl Fn(&Device) -> Result<S>,
    ) -> Result<Plan> {
        if self.batch == 0 || u32::try_from(self.batch).is_err() {
            let why = format!("a step has 1 to {} rows, not {}", u32::MAX, self.batch);
            return Err(Error::argument("plan", why));
        }
        let card = boundless(profile);
        let room = self.bytes.min(profile.room()).min(profile.config.max_memory.unwrap_or(u64::MAX));
        let mut table = Vec::new();
        for rows in (1..=self.batch).rev().filter(|rows| self.batch.is_multiple_of(*rows)) {
            for &precision in &self.precisions {
                table.extend(self.ways(rows, precision, &card, &setup)?);
            }
        }
        table.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(b.choice.rows.cmp(&a.choice.rows)));
        let mut best: Option<usize> = None;
        for (k, estimate) in table.iter_mut().enumerate() {
            let peak = peak(&card, &setup, &estimate.choice, room)?;
            estimate.peak = Some(peak);
            if best.is_none() && peak <= room && holds(&card, &setup, &estimate.choice, room)? {
                best = Some(k);
                if !self.everything {
                    break;
                }
            }
        }
        if let Some(k) = best {
            return Ok(Plan { card: card.name.clone(), budget: room, best: table[k].clone(), table });
        }
        // What a first look took bounds the rest from below.
        table.sort_by_key(|estimate| estimate.peak);
        let mut smallest: Option<(u64, String)> = None;
        let mut unbounded: Option<(u64, String)> = None;
        let below = |of: &Option<(u64, String)>, peak: u64| of.as_ref().is_none_or(|of| peak < of.0);
        for Estimate { choice, peak: least, .. } in &table {
            if !least.is_none_or(|least| below(&smallest, least)) {
                break;
            }
            let peak = peak(&card, &setup, choice, u64::MAX)?;
            if below(&smallest, peak) && holds(&card, &setup, choice, peak)? {
                smallest = Some((peak, choice.to_string()));
            } else if below(&unbounded, peak) {
                unbounded = Some((peak, choice.to_string()));
            }
        }
        let (needed, choice) = smallest.or(unbounded).unwrap_or_default();
        Err(Error::Budget { card: card.name.clone(), budget: room, needed, choice })
    }

    /// The choices of one micro-batch and precision.
    fn ways<S: FnMut(&Choice) -> Result<()>>(
        &self,
        rows: usize,
        precision: Option<DType>,
        card: &Profile,
        setup: &impl Fn(&Device) -> Result<S>,
    ) -> Result<Vec<Estimate>> {
        let count = self.batch / rows;
        let mut parts: Vec<Part> = Vec::new();
        let mut work = |choice: &Choice| -> Result<Work> {
            let measured = run(card, setup, choice, |backend, step| {
                let probe = Segments::measure(Arc::clone(backend));
                let before = backend.work();
                step()?;
                parts = probe.measured();
                // One forward pass' segments, of those of all.
                parts.truncate(parts.len() / choice.count);
                Ok(backend.work() - before)
            });
            Ok(measured?.0)
        };
        let plain = |count: usize| Choice { precision, ..Choice::new(rows, count) };
        let offload = self.offload && card.speed.host > 0.0;
        let state = if offload { work(&plain(1).with_offloaded_state())?.host_seconds } else { 0.0 };
        let one = work(&plain(1))?.seconds;
        // Each further micro-batch takes what the second one does.
        let whole = if count > 1 { one + (count - 1) as f64 * (work(&plain(2))?.seconds - one) } else { one };
        let estimate = |choice: Choice| {
            let of = |what: Saved, cost: &dyn Fn(&Part) -> f64| -> f64 {
                let those = parts.iter().zip(&*choice.saved).filter(|(_, saved)| **saved == what);
                count as f64 * those.map(|(part, _)| cost(part)).sum::<f64>()
            };
            let computed = whole + of(Saved::Recomputed, &|part| part.seconds);
            let copied = of(Saved::Offloaded, &|part| 2.0 * part.bytes as f64 / card.speed.host);
            let seconds = computed.max(copied) + if choice.offload_state { state } else { 0.0 };
            Estimate { choice, peak: None, seconds }
        };
        let choice = || Choice { saved: vec![Saved::Kept; parts.len()].into(), ..plain(count) };
        let sets = sets(&parts, SETS);
        let mut choices: Vec<Choice> = sets.iter().map(|set| choice().recompute(set)).collect();
        if state > 0.0 {
            let some = sets.iter().rev().step_by(SETS / 5);
            choices.extend(some.map(|set| choice().recompute(set).with_offloaded_state()));
        }
        if offload {
            // The earlier ones have longer to come back.
            let mut ends: Vec<usize> = (1..=QUARTERS).map(|k| parts.len() * k / QUARTERS).collect();
            ends.dedup();
            for end in ends.into_iter().filter(|end| *end > 0) {
                let away: Vec<bool> = (0..parts.len()).map(|k| k < end).collect();
                choices.push(choice().offload(&away));
                if state > 0.0 {
                    choices.push(choice().offload(&away).with_offloaded_state());
                }
            }
        }
        Ok(choices.into_iter().map(estimate).collect())
    }
}

impl Choice {
    /// The same with two micro-batches at most, which hold as much as many.
    fn short(&self) -> Self {
        Self { count: self.count.min(2), ..self.clone() }
    }
}

/// The most bytes of a choice. Two micro-batches and two steps show most of those that are above `room`; for the others,
/// blocks that lie otherwise in later micro-batches and steps count as well.
fn peak<S: FnMut(&Choice) -> Result<()>>(
    card: &Profile,
    setup: &impl Fn(&Device) -> Result<S>,
    choice: &Choice,
    room: u64,
) -> Result<u64> {
    let short = run(card, setup, &choice.short(), |_, step| step())?.1;
    if short > room {
        return Ok(short);
    }
    Ok(run(card, setup, choice, |_, step| step().and_then(|()| step()))?.1.max(short))
}

/// Whether a choice runs in a pool that may take no more than `room`: it moves and gives back what one without a bound does not, and so
/// comes to lie otherwise.
fn holds<S: FnMut(&Choice) -> Result<()>>(
    card: &Profile,
    setup: &impl Fn(&Device) -> Result<S>,
    choice: &Choice,
    room: u64,
) -> Result<bool> {
    let bounded = card.clone().with_config(Config { max_memory: Some(room), ..card.config });
    match run(&bounded, setup, choice, |_, step| step().and_then(|()| step())) {
        Ok(_) => Ok(true),
        Err(error) => error.into_out_of_memory().map(|_| false),
    }
}

/// Runs a step on a null device, and then `second`, which runs it again, and may look at it. Also the most bytes that the
/// pool took.
fn run<S: FnMut(&Choice) -> Result<()>, T>(
    card: &Profile,
    setup: &impl Fn(&Device) -> Result<S>,
    choice: &Choice,
    second: impl FnOnce(&Arc<NullBackend>, &mut dyn FnMut() -> Result<()>) -> Result<T>,
) -> Result<(T, u64)> {
    let backend = Arc::new(NullBackend::new(card.clone()));
    let device = Device::with_config(backend.clone(), card.config);
    let mut step = setup(&device)?;
    let _segments = choice.segments();
    step(choice)?;
    let value = second(&backend, &mut || step(choice))?;
    Ok((value, device.memory().peak_reserved()))
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>5} {:>6} {:>9} {:>12} {:>12} {:>12} {:>12}",
            "rows", "parts", "precision", "again", "offloaded", "peak", "step"
        )?;
        for estimate in self.table.iter().filter(|e| e.peak.is_some()) {
            let Estimate { choice, peak, seconds } = estimate;
            let mark = if *estimate == self.best {
                "  <- chosen"
            } else if *peak > Some(self.budget) {
                "  does not fit"
            } else {
                ""
            };
            writeln!(
                f,
                "{:>5} {:>6} {:>9} {:>12} {:>12} {:>12} {:>9.1} ms{mark}",
                choice.rows,
                choice.count,
                choice.precision.map_or("f32".to_owned(), |d| d.to_string()),
                format!("{} of {}", choice.recomputed(), choice.saved.len()),
                match (choice.offloaded(), choice.offload_state) {
                    (0, false) => "-".to_owned(),
                    (0, true) => "state".to_owned(),
                    (n, false) => n.to_string(),
                    (n, true) => format!("{n} + state"),
                },
                Bytes(peak.unwrap_or(0)).to_string(),
                seconds * 1e3,
            )?;
        }
        write!(
            f,
            "within {} on {}: {}; peak {}, at least {:.1} ms a step",
            Bytes(self.budget),
            self.card,
            self.best.choice,
            Bytes(self.best.peak.unwrap_or(0)),
            self.best.seconds * 1e3
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Gpt, GptOptions, Module};
    use crate::optim::{AdamW, Optimizer};
    use crate::tensor::Tensor;

    fn setup(device: &Device) -> Result<impl FnMut(&Choice) -> Result<()> + use<>> {
        let options =
            GptOptions { vocabulary: 1000, context: 256, layers: 3, heads: 4, width: 256, dropout: 0.0 };
        let net = Gpt::new(&options, device)?;
        let mut optimizer = AdamW::new(net.parameters(), 1e-3);
        let device = device.clone();
        Ok(move |choice: &Choice| {
            optimizer.offload_state(choice.offload_state);
            for _ in 0..choice.count {
                let text = Tensor::zeros(&[choice.rows, 256], DType::I64, &device)?;
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

    fn plan_on(card: &Profile, budget: u64) -> Result<Plan> {
        Budget::new(budget, 4).allow(DType::BF16).plan(card, setup)
    }

    fn plan(budget: u64) -> Result<Plan> {
        plan_on(&Profile::card("t4")?, budget)
    }

    #[test]
    fn what_is_chosen_runs_in_a_pool_of_the_budget() -> Result<()> {
        for card in [Profile::card("t4")?, Profile::card("t4")?.through_wgpu()] {
            let Err(Error::Budget { needed, .. }) = plan_on(&card, 1 << 20) else {
                panic!("1 MiB is enough");
            };
            for budget in [needed, needed + needed / 8, needed + needed / 2] {
                let choice = plan_on(&card, budget)?.best.choice;
                let bounded = Config { max_memory: Some(budget), ..card.config };
                let steps = run(&card.clone().with_config(bounded), &setup, &choice, |_, step| {
                    step().and_then(|()| step()).and_then(|()| step())
                });
                assert!(steps?.1 <= budget, "{choice} within {budget}");
            }
        }
        Ok(())
    }

    #[test]
    fn more_memory_is_never_slower_and_less_is_refused_with_what_would_do() -> Result<()> {
        let needed = match plan(1 << 20) {
            Err(Error::Budget { needed, choice, .. }) => {
                assert!(choice.contains("of 3 segments computed again"), "{choice}");
                needed
            }
            other => panic!("1 MiB is enough: {other:?}"),
        };
        assert!(matches!(plan(needed - 1), Err(Error::Budget { .. })));
        let mut before = plan(needed)?.best;
        assert_eq!(before.peak, Some(needed));
        for budget in (1..40).map(|k| needed + k * needed / 16) {
            let best = plan(budget)?.best;
            assert!(best.peak <= Some(budget) && best.peak >= before.peak, "{best:?} after {before:?}");
            assert!(best.seconds <= before.seconds, "{best:?} after {before:?}");
            before = best;
        }
        assert_eq!(before.choice, Choice::new(4, 1).recompute([false; 3]).with_precision(DType::BF16));
        Ok(())
    }
}
