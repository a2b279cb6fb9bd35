//! A learning rate that falls where a measured value no longer gets better.

use serde::{Deserialize, Serialize};

use super::Optimizer;
use super::schedule::log_if_invalid;
use forebay_core::check;
use forebay_core::error::Result;

/// Multiplies the learning rate by a factor after so many values in a row that were no better: PyTorch's `ReduceLROnPlateau`.
///
/// ```
/// # use forebay_nn::optim::{Optimizer, Sgd, schedule::ReduceLrOnPlateau};
/// let mut optimizer = Sgd::new(vec![], 0.1);
/// let mut scheduler = ReduceLrOnPlateau::new().patience(1);
/// for loss in [1.0, 0.9, 0.9, 0.9] {
///     scheduler.step(loss, &mut optimizer);
/// }
/// assert!((optimizer.lr() - 0.01).abs() < 1e-12);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReduceLrOnPlateau {
    is_max_mode: bool,
    factor: f64,
    patience: u64,
    threshold: f64,
    is_absolute_threshold: bool,
    cooldown: u64,
    min_lr: f64,
    eps: f64,
    state: PlateauState,
}

/// What a [`ReduceLrOnPlateau`] has seen, to be saved with a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    /// The best value; `None` before the first.
    pub best: Option<f64>,
    /// Values in a row that were no better.
    pub num_bad_epochs: u64,
    /// Values that are still not counted.
    pub cooldown_counter: u64,
    /// The learning rate that was set last, if any was.
    pub lr: Option<f64>,
}

impl Default for ReduceLrOnPlateau {
    fn default() -> Self {
        let state = PlateauState { best: None, num_bad_epochs: 0, cooldown_counter: 0, lr: None };
        Self {
            is_max_mode: false,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            is_absolute_threshold: false,
            cooldown: 0,
            min_lr: 0.0,
            eps: 1e-8,
            state,
        }
    }
}

impl ReduceLrOnPlateau {
    /// PyTorch's: smaller values are better, by at least 1e-4 of the best; a tenth of the rate after more than 10 that are not.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Larger values are better.
    #[must_use]
    pub fn maximize(self) -> Self {
        Self { is_max_mode: true, ..self }
    }

    /// What the rate is multiplied by.
    #[must_use]
    pub fn factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// How many values in a row may be no better.
    #[must_use]
    pub fn patience(self, values: u64) -> Self {
        Self { patience: values, ..self }
    }

    /// How much better a value must be, as a part of the best.
    #[must_use]
    pub fn threshold(self, threshold: f64) -> Self {
        Self { threshold, is_absolute_threshold: false, ..self }
    }

    /// How much better a value must be, in its own unit.
    #[must_use]
    pub fn absolute_threshold(self, threshold: f64) -> Self {
        Self { threshold, is_absolute_threshold: true, ..self }
    }

    /// How many values after a change do not count.
    #[must_use]
    pub fn cooldown(self, values: u64) -> Self {
        Self { cooldown: values, ..self }
    }

    /// The lowest rate.
    #[must_use]
    pub fn min_lr(self, lr: f64) -> Self {
        Self { min_lr: lr, ..self }
    }

    /// Changes of the rate that are not larger are not made.
    #[must_use]
    pub fn eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    /// Fails for options out of their ranges. [`step`](Self::step) sets a rate of NaN then, which the optimiser's next step refuses.
    ///
    /// # Errors
    /// The factor is not from 0 to below 1; another option is negative or not finite.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "ReduceLrOnPlateau";
        check::decay_factor(OP, "factor", self.factor)?;
        check::non_negative(OP, "threshold", self.threshold)?;
        check::non_negative(OP, "min_lr", self.min_lr)?;
        check::non_negative(OP, "eps", self.eps)
    }

    /// Takes the next value, and changes the optimiser's rate where it is time.
    pub fn step(&mut self, value: f64, optimizer: &mut (impl Optimizer + ?Sized)) {
        if log_if_invalid(self.check()).is_none() {
            return optimizer.set_lr(f64::NAN);
        }
        if self.state.best.is_none_or(|best| self.is_better(value, best)) && !value.is_nan() {
            self.state.best = Some(value);
            self.state.num_bad_epochs = 0;
        } else {
            self.state.num_bad_epochs += 1;
        }
        if self.state.cooldown_counter > 0 {
            self.state.cooldown_counter -= 1;
            self.state.num_bad_epochs = 0;
        }
        if self.state.num_bad_epochs > self.patience {
            let lr = (optimizer.lr() * self.factor).max(self.min_lr);
            if optimizer.lr() - lr > self.eps {
                optimizer.set_lr(lr);
            }
            self.state.cooldown_counter = self.cooldown;
            self.state.num_bad_epochs = 0;
        }
        self.state.lr = Some(optimizer.lr());
    }

    fn is_better(&self, value: f64, best: f64) -> bool {
        let by = if self.is_max_mode { self.threshold } else { -self.threshold };
        // Factors, not differences: an infinite best is beaten by any number.
        let bound = if self.is_absolute_threshold { best + by } else { best * (1.0 + by) };
        if self.is_max_mode { value > bound } else { value < bound }
    }

    /// What it has seen.
    #[must_use]
    pub fn state(&self) -> PlateauState {
        self.state
    }

    /// Goes on from what another has seen, with its rate.
    pub fn load_state(&mut self, state: PlateauState, optimizer: &mut (impl Optimizer + ?Sized)) {
        self.state = state;
        if let Some(lr) = state.lr {
            optimizer.set_lr(lr);
        }
    }
}
