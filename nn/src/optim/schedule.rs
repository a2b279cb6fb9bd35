//! Learning-rate schedules: the rate as a function of the step, counted from 0. They have PyTorch's names;
//! [`Warmup`] combines with any of them.
//!
//! The fields of a schedule are public, except those that `new` checks in [`SequentialLr`] and
//! [`ChainedScheduler`]. A schedule has no state except the step. A
//! [`Checkpoint`](crate::train::Checkpoint) saves the step, so a [`Trainer`](crate::train::Trainer) resumes
//! the schedule. In a custom loop, [`LrScheduler`] counts steps like PyTorch's schedulers.
//! [`ReduceLrOnPlateau`] follows a measured value and has state. Captured steps use the rate that is set at
//! each replay.
//!
//! ```
//! use forebay_nn::optim::schedule::{LrSchedule, WarmupCosine};
//! let schedule = WarmupCosine::new(3e-4, 100, 1000).min_lr(3e-5);
//! assert_eq!(schedule.lr(99), 3e-4);
//! assert!(schedule.lr(999) < schedule.lr(500));
//! ```

use std::f64::consts::PI;

use crate::optim::Optimizer;
use crate::{Result, check, fail_if};

pub use super::plateau::{PlateauState, ReduceLrOnPlateau};

/// Learning rate as a function of the step.
pub trait LrSchedule {
    /// Returns the rate of step `step`, counted from 0.
    fn lr(&self, step: u64) -> f64;

    /// Checks that the options are in range, before the first step. A [`Trainer`](crate::train::Trainer)
    /// calls this. With invalid options, an [`LrScheduler`] sets a NaN rate, and the optimiser's next step
    /// fails.
    ///
    /// # Errors
    /// An option is out of range; the error names the option.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

impl<S: LrSchedule + ?Sized> LrSchedule for &S {
    fn lr(&self, step: u64) -> f64 {
        (**self).lr(step)
    }

    fn check(&self) -> Result<()> {
        (**self).check()
    }
}

/// Schedule from a function: `FnSchedule(|step| 0.1 / (1.0 + step as f64))`.
#[derive(Clone, Copy, Debug)]
pub struct FnSchedule<F>(pub F);

impl<F: Fn(u64) -> f64> LrSchedule for FnSchedule<F> {
    fn lr(&self, step: u64) -> f64 {
        (self.0)(step)
    }
}

/// Constant rate.
#[derive(Clone, Copy, Debug)]
pub struct ConstantSchedule(pub f64);

impl LrSchedule for ConstantSchedule {
    fn lr(&self, _step: u64) -> f64 {
        self.0
    }

    #[track_caller]
    fn check(&self) -> Result<()> {
        check::non_negative("Constant", "lr", self.0)
    }
}

/// Defines a schedule by its public fields, the range checks of the fields with the names in errors, and the
/// rate. A function of the step is a type parameter, and `where` adds further checks.
macro_rules! schedule {
    (
        $(#[$doc:meta])*
        $name:ident $(<$function:ident>)? {
            $($(#[$field_doc:meta])* $field:ident: $ty:ty $([$($check:ident)+ $label:literal])?,)*
        } |$this:ident, $step:ident| $lr:expr $(, where $more:block)?
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name $(<$function>)? { $($(#[$field_doc])* pub $field: $ty,)* }

        impl $(<$function: Fn(u64) -> f64>)? LrSchedule for $name $(<$function>)? {
            fn lr(&self, $step: u64) -> f64 {
                let $this = self;
                $lr
            }

            fn check(&self) -> Result<()> {
                $($($(check::$check(stringify!($name), $label, self.$field)?;)+)?)*
                $({ let $this = self; $more })?
                Ok(())
            }
        }
    };
}

schedule! {
    /// Multiplication of the rate by `gamma` every `step_size` steps.
    #[derive(Copy)]
    StepLr {
        /// Initial rate.
        base_lr: f64 [non_negative "base"],
        /// Number of steps between changes.
        step_size: u64 [positive_count "every"],
        /// Factor of a change.
        gamma: f64 [non_negative "gamma"],
    } |this, step| this.base_lr * this.gamma.powf((step / this.step_size.max(1)) as f64)
}

schedule! {
    /// Multiplication of the rate by `gamma` at every milestone.
    MultiStepLr {
        /// Initial rate.
        base_lr: f64 [non_negative "base"],
        /// Steps at which the rate changes, in any order; a duplicate changes the rate twice.
        milestones: Vec<u64>,
        /// Factor of a change.
        gamma: f64 [non_negative "gamma"],
    } |this, step| this.base_lr * this.gamma.powf(this.milestones.iter().filter(|&&m| m <= step).count() as f64)
}

schedule! {
    /// Rate times `factor` before step `total_iters`, and the plain rate afterwards.
    #[derive(Copy)]
    ConstantLr {
        /// Plain rate.
        base_lr: f64 [non_negative "base"],
        /// Initial factor; PyTorch's default is a third.
        factor: f64 [unit_interval "factor"],
        /// Number of steps with the factor.
        total_iters: u64,
    } |this, step| if step < this.total_iters { this.base_lr * this.factor } else { this.base_lr }
}

schedule! {
    /// Rate times a factor that changes linearly from `start_factor` to `end_factor` and then stays.
    #[derive(Copy)]
    LinearLr {
        /// Rate that the factor multiplies.
        base_lr: f64 [non_negative "base"],
        /// Initial factor; PyTorch's default is a third.
        start_factor: f64 [positive unit_interval "start_factor"],
        /// Final factor; PyTorch's default is 1.
        end_factor: f64 [unit_interval "end_factor"],
        /// Number of steps between the two.
        total_iters: u64,
    } |this, step| {
        let progress = step.min(this.total_iters) as f64 / this.total_iters.max(1) as f64;
        this.base_lr * (this.start_factor + (this.end_factor - this.start_factor) * progress)
    }
}

schedule! {
    /// Multiplication of the rate by `gamma` after every step.
    #[derive(Copy)]
    ExponentialLr {
        /// Initial rate.
        base_lr: f64 [non_negative "base"],
        /// Factor of a step.
        gamma: f64 [non_negative "gamma"],
    } |this, step| this.base_lr * this.gamma.powf(step as f64)
}

schedule! {
    /// Rate times (1 - step / `total_iters`)^`power`, and 0 afterwards.
    #[derive(Copy)]
    PolynomialLr {
        /// Initial rate.
        base_lr: f64 [non_negative "base"],
        /// Number of steps until the rate is 0.
        total_iters: u64,
        /// Exponent; 1 is linear.
        power: f64 [non_negative "power"],
    } |this, step| {
        let progress = step.min(this.total_iters) as f64 / this.total_iters.max(1) as f64;
        this.base_lr * (1.0 - progress).powf(this.power)
    }
}

schedule! {
    /// Rate times a function of the step: `LambdaLr { base_lr: 0.1, factor: |step| 0.95f64.powf(step as f64) }`.
    #[derive(Copy)]
    LambdaLr<F> {
        /// Rate that the factor multiplies.
        base_lr: f64 [non_negative "base"],
        /// Factor at a step.
        factor: F,
    } |this, step| this.base_lr * (this.factor)(step)
}

schedule! {
    /// Multiplication of the previous rate by a function of the step. The cost grows with the step, because each
    /// call starts from step 1.
    #[derive(Copy)]
    MultiplicativeLr<F> {
        /// Initial rate.
        base_lr: f64 [non_negative "base"],
        /// Factor before step 1, 2, ...
        factor: F,
    } |this, step| (1..=step).fold(this.base_lr, |lr, k| lr * (this.factor)(k))
}

/// PyTorch's name for [`CosineAnnealing`].
pub type CosineAnnealingLr = CosineAnnealing;

/// PyTorch's name for [`OneCycle`].
pub type OneCycleLr = OneCycle;

schedule! {
    /// Half a cosine from `base_lr` to `eta_min` over `t_max` steps, periodic afterwards as in PyTorch.
    #[derive(Copy)]
    CosineAnnealing {
        /// Initial rate.
        base_lr: f64 [non_negative "base"],
        /// Final rate.
        eta_min: f64 [non_negative "min"],
        /// Number of steps between the two.
        t_max: u64 [positive_count "steps"],
    } |this, step| {
        let progress = step as f64 / this.t_max.max(1) as f64;
        this.eta_min + (this.base_lr - this.eta_min) * (1.0 + (PI * progress).cos()) / 2.0
    }
}

schedule! {
    /// Half a cosine from `base_lr` to `eta_min` with restarts (SGDR: Loshchilov and Hutter, 2016). The first
    /// cycle has `t_0` steps; each later one has `t_mult` times as many.
    #[derive(Copy)]
    CosineAnnealingWarmRestarts {
        /// Initial rate of every cycle.
        base_lr: f64 [non_negative "base"],
        /// Number of steps in the first cycle.
        t_0: u64 [positive_count "t_0"],
        /// Ratio of the lengths of consecutive cycles.
        t_mult: u64 [positive_count "t_mult"],
        /// Final rate of every cycle.
        eta_min: f64 [non_negative "eta_min"],
    } |this, step| {
        let (mut at, mut length) = (step, this.t_0.max(1));
        if this.t_mult <= 1 {
            at %= length;
        }
        while at >= length {
            at -= length;
            length = length.saturating_mul(this.t_mult);
        }
        this.eta_min + (this.base_lr - this.eta_min) * (1.0 + (PI * at as f64 / length as f64).cos()) / 2.0
    }
}

/// Change of the peaks of a [`CyclicLr`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CyclicMode {
    /// Constant peaks.
    Triangular,
    /// Peaks whose distance to the base halves each cycle.
    Triangular2,
    /// Peaks whose distance to the base is multiplied by this value to the power of the step.
    ExpRange(f64),
}

schedule! {
    /// Linear rise from `base_lr` to `max_lr` and linear fall, repeated (Smith, 2015).
    #[derive(Copy)]
    CyclicLr {
        /// Lowest rate.
        base_lr: f64 [non_negative "base"],
        /// Highest rate.
        max_lr: f64 [non_negative "max"],
        /// Number of rising steps; PyTorch's default is 2,000.
        step_size_up: u64,
        /// Number of falling steps.
        step_size_down: u64,
        /// Change of the peaks.
        mode: CyclicMode,
    } |this, step| {
        let (up, total) = (this.step_size_up, (this.step_size_up + this.step_size_down).max(1));
        let (cycle, at) = (step / total, step % total);
        let height = if at <= up && up > 0 {
            at as f64 / up as f64
        } else {
            (total - at) as f64 / this.step_size_down.max(1) as f64
        };
        let scale = match this.mode {
            CyclicMode::Triangular => 1.0,
            CyclicMode::Triangular2 => 0.5f64.powf(cycle as f64),
            CyclicMode::ExpRange(gamma) => gamma.powf(step as f64),
        };
        this.base_lr + (this.max_lr - this.base_lr) * height * scale
    }, where {
        if let CyclicMode::ExpRange(gamma) = this.mode {
            check::non_negative("CyclicLr", "mode", gamma)?;
        }
        check::positive_count("CyclicLr", "step_size_up", this.step_size_up.saturating_add(this.step_size_down))?;
    }
}

/// Schedules in sequence: each milestone starts the next schedule at its step 0.
pub struct SequentialLr<'a> {
    schedules: Vec<Box<dyn LrSchedule + 'a>>,
    milestones: Vec<u64>,
}

impl<'a> SequentialLr<'a> {
    /// Creates a sequence from schedules and the steps at which the second, third, ... begins.
    ///
    /// # Errors
    /// The milestones are not ascending, or not one fewer than the schedules.
    #[track_caller]
    pub fn new(schedules: Vec<Box<dyn LrSchedule + 'a>>, milestones: &[u64]) -> Result<Self> {
        let (count, expected) = (schedules.len(), schedules.len().saturating_sub(1));
        fail_if!(
            milestones.len() + 1 != count || !milestones.is_sorted();
            argument("SequentialLr"), "{count} schedules take {expected} ascending milestones, got {milestones:?}"
        );
        Ok(Self { schedules, milestones: milestones.to_vec() })
    }
}

impl LrSchedule for SequentialLr<'_> {
    fn lr(&self, step: u64) -> f64 {
        let at = self.milestones.partition_point(|&m| m <= step);
        let begin = at.checked_sub(1).map_or(0, |before| self.milestones[before]);
        self.schedules[at].lr(step - begin)
    }

    fn check(&self) -> Result<()> {
        self.schedules.iter().try_for_each(|schedule| schedule.check())
    }
}

/// Product of several schedules of one base rate: the factors of all multiply the rate.
pub struct ChainedScheduler<'a> {
    base_lr: f64,
    schedules: Vec<Box<dyn LrSchedule + 'a>>,
}

impl<'a> ChainedScheduler<'a> {
    /// Chains schedules that were created for the rate `base`.
    ///
    /// # Errors
    /// `base` is 0 or not finite, which leaves the factors undefined.
    #[track_caller]
    pub fn new(base: f64, schedules: Vec<Box<dyn LrSchedule + 'a>>) -> Result<Self> {
        fail_if!(
            base == 0.0 || !base.is_finite();
            argument("ChainedScheduler"), "takes a rate other than 0, got {base}"
        );
        Ok(Self { base_lr: base, schedules })
    }
}

impl LrSchedule for ChainedScheduler<'_> {
    fn lr(&self, step: u64) -> f64 {
        self.schedules.iter().fold(self.base_lr, |lr, schedule| lr * (schedule.lr(step) / self.base_lr))
    }

    fn check(&self) -> Result<()> {
        self.schedules.iter().try_for_each(|schedule| schedule.check())
    }
}

/// Linear rise to the initial rate of another schedule, which follows. Step i has that rate · (i + 1) /
/// steps.
#[derive(Clone, Copy, Debug)]
pub struct Warmup<S> {
    /// Number of steps of the rise.
    pub warmup_steps: u64,
    /// Schedule after the rise.
    pub schedule: S,
}

impl<S: LrSchedule> LrSchedule for Warmup<S> {
    fn lr(&self, step: u64) -> f64 {
        match step.checked_sub(self.warmup_steps) {
            Some(step) => self.schedule.lr(step),
            None => self.schedule.lr(0) * (step + 1) as f64 / self.warmup_steps as f64,
        }
    }

    fn check(&self) -> Result<()> {
        self.schedule.check()
    }
}

/// A schedule with a step counter, its only state, like PyTorch's schedulers, for custom loops.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, error::Result, tensor::Tensor};
/// # use forebay_nn::optim::{Optimizer, Sgd, schedule::{ExponentialLr, LrScheduler}};
/// # fn main() -> Result<()> {
/// # let device = Device::null(Default::default());
/// # let mut optimizer = Sgd::new(vec![Tensor::zeros(&[2], DType::F32, &device)?.to_leaf()?], 0.1);
/// let mut scheduler = LrScheduler::new(ExponentialLr { base_lr: 0.1, gamma: 0.5 }, &mut optimizer);
/// // After each step of the optimiser, or each epoch:
/// scheduler.step(&mut optimizer);
/// assert_eq!(optimizer.lr(), 0.05);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LrScheduler<S> {
    schedule: S,
    last_epoch: u64,
}

impl<S: LrSchedule> LrScheduler<S> {
    /// Creates a scheduler and sets the optimiser's rate to the schedule's initial one.
    pub fn new(schedule: S, optimizer: &mut (impl Optimizer + ?Sized)) -> Self {
        let mut scheduler = Self { schedule, last_epoch: 0 };
        scheduler.load_state(0, optimizer);
        scheduler
    }

    /// Advances by one step and sets the optimiser's rate.
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized)) {
        self.load_state(self.last_epoch.saturating_add(1), optimizer);
    }

    /// Returns the current rate.
    pub fn last_lr(&self) -> f64 {
        log_if_invalid(self.schedule.check()).map_or(f64::NAN, |()| self.schedule.lr(self.last_epoch))
    }

    /// Returns the number of steps so far.
    pub fn state(&self) -> u64 {
        self.last_epoch
    }

    /// Restores the number of steps and sets the optimiser's rate.
    pub fn load_state(&mut self, steps: u64, optimizer: &mut (impl Optimizer + ?Sized)) {
        self.last_epoch = steps;
        optimizer.set_lr(self.last_lr());
    }
}

/// Logs invalid options. The rate is then NaN, and the optimiser's next step fails.
pub(super) fn log_if_invalid(checked: Result<()>) -> Option<()> {
    checked.map_err(|error| log::error!("{error}; the learning rate is NaN")).ok()
}

schedule! {
    /// Linear warmup to the full rate, then half a cosine down.
    ///
    /// Step i of the warmup has base · (i + 1) / warmup. The cosine goes from step `warmup` to `total`.
    #[derive(Copy)]
    WarmupCosine {
        /// Full rate.
        base_lr: f64 [non_negative "base"],
        /// Number of steps in which the rate rises.
        warmup_steps: u64,
        /// Total number of steps.
        total_steps: u64,
        /// Final rate.
        min_lr: f64 [non_negative "min"],
    } |this, step| {
        if step < this.warmup_steps {
            return this.base_lr * (step + 1) as f64 / this.warmup_steps as f64;
        }
        let length = this.total_steps.saturating_sub(this.warmup_steps).max(1);
        let progress = ((step - this.warmup_steps) as f64 / length as f64).min(1.0);
        this.min_lr + (this.base_lr - this.min_lr) * (1.0 + (PI * progress).cos()) / 2.0
    }
}

impl WarmupCosine {
    /// Creates a schedule that rises for `warmup` of `total` steps to `base` and then falls to 0.
    #[must_use]
    pub fn new(base: f64, warmup: u64, total: u64) -> Self {
        Self { base_lr: base, warmup_steps: warmup, total_steps: total, min_lr: 0.0 }
    }

    setters! {
        /// Sets the final rate, instead of 0.
        fn min_lr(min: f64) { min_lr: min }
    }
}

schedule! {
    /// One-cycle policy (Smith and Topin, 2017), with cosines. The rate rises from `max_lr` / 25 to `max_lr` in
    /// the first 30 % of the steps, then falls to a 10,000th of the initial rate.
    #[derive(Copy)]
    OneCycle {
        /// Highest rate.
        max_lr: f64 [non_negative "max"],
        /// Total number of steps.
        total_steps: u64 [positive_count "total"],
        /// Fraction of the steps in which the rate rises.
        pct_start: f64 [unit_interval "rise"],
        /// Ratio of `max_lr` to the initial rate.
        div_factor: f64 [positive "div"],
        /// Ratio of the initial rate to the final one.
        final_div_factor: f64 [positive "final_div"],
    } |this, step| {
        let cosine =
            |from: f64, to: f64, progress: f64| to + (from - to) * (1.0 + (PI * progress).cos()) / 2.0;
        let first = this.max_lr / this.div_factor;
        let (top, last) = (this.pct_start * this.total_steps as f64 - 1.0, this.total_steps as f64 - 1.0);
        let step = (step as f64).min(last);
        if step <= top {
            cosine(first, this.max_lr, if top > 0.0 { step / top } else { 1.0 })
        } else {
            cosine(this.max_lr, first / this.final_div_factor, (step - top) / (last - top))
        }
    }
}

impl OneCycle {
    /// Creates PyTorch's default cycle over `total` steps.
    #[must_use]
    pub fn new(max: f64, total: u64) -> Self {
        Self { max_lr: max, total_steps: total, pct_start: 0.3, div_factor: 25.0, final_div_factor: 1e4 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn schedules_have_their_breakpoints() {
        let step = StepLr { base_lr: 1.0, step_size: 10, gamma: 0.1 };
        close(step.lr(9), 1.0);
        close(step.lr(10), 0.1);
        let cosine = CosineAnnealing { base_lr: 1.0, eta_min: 0.1, t_max: 100 };
        close(cosine.lr(0), 1.0);
        close(cosine.lr(50), 0.55);
        close(cosine.lr(100), 0.1);
        let warm = WarmupCosine::new(1.0, 10, 110).min_lr(0.1);
        close(warm.lr(0), 0.1);
        close(warm.lr(10), 1.0);
        close(warm.lr(60), 0.55);
        close(warm.lr(500), 0.1);
        let cycle = OneCycle::new(1.0, 100);
        close(cycle.lr(0), 0.04);
        close(cycle.lr(29), 1.0);
        close(cycle.lr(99), 0.04 / 1e4);
    }

    #[test]
    fn options_out_of_range_are_named_and_leave_no_rate() {
        let (nan, base) = (f64::NAN, 0.1);
        let linear =
            |start_factor, end_factor| LinearLr { base_lr: base, start_factor, end_factor, total_iters: 5 };
        let restarts = |t_0, t_mult| CosineAnnealingWarmRestarts { base_lr: base, t_0, t_mult, eta_min: 0.0 };
        let cyclic = |up, down, mode| CyclicLr {
            base_lr: base,
            max_lr: 0.2,
            step_size_up: up,
            step_size_down: down,
            mode,
        };
        let wrong: Vec<(&str, Box<dyn LrSchedule>)> = vec![
            ("lr", Box::new(ConstantSchedule(-0.1))),
            ("every", Box::new(StepLr { base_lr: base, step_size: 0, gamma: 0.5 })),
            ("gamma", Box::new(StepLr { base_lr: base, step_size: 1, gamma: nan })),
            ("gamma", Box::new(MultiStepLr { base_lr: base, milestones: vec![1], gamma: -0.5 })),
            ("factor", Box::new(ConstantLr { base_lr: base, factor: 1.5, total_iters: 3 })),
            ("start_factor", Box::new(linear(0.0, 1.0))),
            ("end_factor", Box::new(linear(0.5, nan))),
            ("gamma", Box::new(ExponentialLr { base_lr: base, gamma: f64::INFINITY })),
            ("power", Box::new(PolynomialLr { base_lr: base, total_iters: 3, power: -1.0 })),
            ("steps", Box::new(CosineAnnealing { base_lr: base, eta_min: 0.0, t_max: 0 })),
            ("min", Box::new(CosineAnnealing { base_lr: base, eta_min: nan, t_max: 3 })),
            ("t_0", Box::new(restarts(0, 1))),
            ("t_mult", Box::new(restarts(1, 0))),
            ("step_size_up", Box::new(cyclic(0, 0, CyclicMode::Triangular))),
            ("mode", Box::new(cyclic(1, 1, CyclicMode::ExpRange(nan)))),
            ("total", Box::new(OneCycle::new(0.1, 0))),
            ("rise", Box::new(OneCycle { pct_start: 1.5, ..OneCycle::new(0.1, 9) })),
            ("div", Box::new(OneCycle { div_factor: 0.0, ..OneCycle::new(0.1, 9) })),
            ("base", Box::new(WarmupCosine::new(nan, 1, 5))),
            (
                "gamma",
                Box::new(Warmup { warmup_steps: 2, schedule: ExponentialLr { base_lr: base, gamma: -1.0 } }),
            ),
        ];
        for (name, schedule) in wrong {
            let error = schedule.check().map_or_else(|error| error.to_string(), |()| String::new());
            assert!(error.contains(&format!("`{name}` is ")), "{name}: {error}");
            let mut optimizer = crate::optim::Sgd::new(Vec::new(), 0.1);
            assert!(LrScheduler::new(&*schedule, &mut optimizer).last_lr().is_nan(), "{name}");
            assert!(optimizer.lr().is_nan(), "{name}");
        }
        let mut optimizer = crate::optim::Sgd::new(Vec::new(), 0.1);
        for plateau in [
            ReduceLrOnPlateau::new().factor(1.0),
            ReduceLrOnPlateau::new().factor(nan),
            ReduceLrOnPlateau::new().threshold(-1.0),
            ReduceLrOnPlateau::new().min_lr(-1.0),
            ReduceLrOnPlateau::new().eps(nan),
        ] {
            assert!(plateau.check().is_err(), "{plateau:?}");
            let mut plateau = plateau;
            plateau.step(1.0, &mut optimizer);
            assert!(optimizer.lr().is_nan(), "{plateau:?}");
        }
    }
}
