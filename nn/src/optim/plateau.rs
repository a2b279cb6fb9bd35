//! Reduction of the learning rate on a plateau of a measured value.

use serde::{Deserialize, Serialize};

use super::Optimizer;
use super::schedule::log_if_invalid;
use crate::{Result, check};

with_defaults! {
    /// Multiplies the learning rate by a factor after several values without improvement:
    /// `ReduceLROnPlateau`.
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
        is_max_mode: bool = false,
        factor: f64 = 0.1,
        patience: u64 = 10,
        threshold: f64 = 1e-4,
        is_absolute_threshold: bool = false,
        cooldown: u64 = 0,
        min_lr: f64 = 0.0,
        eps: f64 = 1e-8,
        state: PlateauState = PlateauState { best: None, num_bad_epochs: 0, cooldown_counter: 0, lr: None },
    }
}

/// State of a [`ReduceLrOnPlateau`], to be saved with a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    /// Best value, or `None` before the first.
    pub best: Option<f64>,
    /// Number of values in a row without improvement.
    pub num_bad_epochs: u64,
    /// Number of values that are still ignored.
    pub cooldown_counter: u64,
    /// Learning rate after the last value, if there was one.
    pub lr: Option<f64>,
}

impl ReduceLrOnPlateau {
    /// Creates a schedule with PyTorch's defaults. A value improves on the best if it is lower by 1e-4 of the
    /// best. More than 10 values without improvement divide the rate by 10.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Makes larger values better.
        fn maximize() { is_max_mode: true }
        /// Sets the factor of a reduction.
        fn factor(factor: f64) { factor }
        /// Sets the number of values in a row that may bring no improvement.
        fn patience(values: u64) { patience: values }
        /// Sets the minimum improvement, relative to the best value.
        fn threshold(threshold: f64) { threshold, is_absolute_threshold: false }
        /// Sets the minimum improvement in absolute terms.
        fn absolute_threshold(threshold: f64) { threshold, is_absolute_threshold: true }
        /// Sets the number of values to ignore after a reduction.
        fn cooldown(values: u64) { cooldown: values }
        /// Sets the minimum learning rate.
        fn min_lr(lr: f64) { min_lr: lr }
        /// Sets the difference below which a reduction is not applied.
        fn eps(eps: f64) { eps }
    }

    /// Checks that the options are in range. Otherwise [`step`](Self::step) sets a NaN rate, and the next
    /// step fails.
    ///
    /// # Errors
    /// The factor is not in 0..1, or another option is negative or not finite.
    #[track_caller]
    pub fn check(&self) -> Result<()> {
        const OP: &str = "ReduceLrOnPlateau";
        check::decay_factor(OP, "factor", self.factor)?;
        check::non_negative(OP, "threshold", self.threshold)?;
        check::non_negative(OP, "min_lr", self.min_lr)?;
        check::non_negative(OP, "eps", self.eps)
    }

    /// Records a value, and reduces the optimiser's learning rate if due.
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
        // A factor instead of a difference, so that any value improves on an infinite best.
        let bound = if self.is_absolute_threshold { best + by } else { best * (1.0 + by) };
        if self.is_max_mode { value > bound } else { value < bound }
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> PlateauState {
        self.state
    }

    /// Restores a state and its learning rate.
    pub fn load_state(&mut self, state: PlateauState, optimizer: &mut (impl Optimizer + ?Sized)) {
        self.state = state;
        if let Some(lr) = state.lr {
            optimizer.set_lr(lr);
        }
    }
}
