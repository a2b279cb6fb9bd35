//! Schedules: the learning rate as a function of the step, counted from 0.
//!
//! ```
//! use forebay_core::optim::schedule::{Schedule, WarmupCosine};
//! let schedule = WarmupCosine::new(3e-4, 100, 1000).to(3e-5);
//! assert_eq!(schedule.lr(99), 3e-4);
//! assert!(schedule.lr(999) < schedule.lr(500));
//! ```

use std::f64::consts::PI;

/// The learning rate of every step.
pub trait Schedule {
    /// The rate for step `step`, counted from 0.
    fn lr(&self, step: u64) -> f64;
}

/// A schedule from a function: `Lambda(|step| 0.1 / (1.0 + step as f64))`.
#[derive(Clone, Copy, Debug)]
pub struct Lambda<F>(pub F);

impl<F: Fn(u64) -> f64> Schedule for Lambda<F> {
    fn lr(&self, step: u64) -> f64 {
        (self.0)(step)
    }
}

/// One rate for all steps.
#[derive(Clone, Copy, Debug)]
pub struct Constant(pub f64);

impl Schedule for Constant {
    fn lr(&self, _step: u64) -> f64 {
        self.0
    }
}

/// The rate times `gamma` after every `every` steps.
#[derive(Clone, Copy, Debug)]
pub struct StepLr {
    /// The first rate.
    pub base: f64,
    /// Steps from one change to the next.
    pub every: u64,
    /// The factor of a change.
    pub gamma: f64,
}

impl Schedule for StepLr {
    fn lr(&self, step: u64) -> f64 {
        self.base * self.gamma.powf((step / self.every.max(1)) as f64)
    }
}

/// Half a cosine from `base` to `min` over `steps` steps; periodic beyond, as PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct CosineAnnealing {
    /// The first rate.
    pub base: f64,
    /// The last.
    pub min: f64,
    /// Steps from one to the other.
    pub steps: u64,
}

impl Schedule for CosineAnnealing {
    fn lr(&self, step: u64) -> f64 {
        let progress = step as f64 / self.steps.max(1) as f64;
        self.min + (self.base - self.min) * (1.0 + (PI * progress).cos()) / 2.0
    }
}

/// A linear rise to the full rate, then half a cosine down.
///
/// Step i of the rise has base · (i + 1) / warmup; step `warmup` begins the cosine, which would end at step `total`.
#[derive(Clone, Copy, Debug)]
pub struct WarmupCosine {
    base: f64,
    warmup: u64,
    total: u64,
    min: f64,
}

impl WarmupCosine {
    /// Rises for `warmup` of `total` steps to `base`, then falls to 0.
    #[must_use]
    pub fn new(base: f64, warmup: u64, total: u64) -> Self {
        Self { base, warmup, total, min: 0.0 }
    }

    /// Falls to `min` instead of 0.
    #[must_use]
    pub fn to(mut self, min: f64) -> Self {
        self.min = min;
        self
    }
}

impl Schedule for WarmupCosine {
    fn lr(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.base * (step + 1) as f64 / self.warmup as f64;
        }
        let length = self.total.saturating_sub(self.warmup).max(1);
        let progress = ((step - self.warmup) as f64 / length as f64).min(1.0);
        self.min + (self.base - self.min) * (1.0 + (PI * progress).cos()) / 2.0
    }
}

/// The one-cycle policy (Smith and Topin, 2017), with cosines: from `max` / 25 up to `max` in the first 30 % of the
/// steps, then down to a 10,000th of the first rate.
#[derive(Clone, Copy, Debug)]
pub struct OneCycle {
    /// The highest rate.
    pub max: f64,
    /// All steps.
    pub total: u64,
    /// The part of the steps that rises.
    pub rise: f64,
    /// `max` over the first rate.
    pub div: f64,
    /// The first rate over the last.
    pub final_div: f64,
}

impl OneCycle {
    /// PyTorch's cycle over `total` steps.
    #[must_use]
    pub fn new(max: f64, total: u64) -> Self {
        Self { max, total, rise: 0.3, div: 25.0, final_div: 1e4 }
    }
}

impl Schedule for OneCycle {
    fn lr(&self, step: u64) -> f64 {
        let cosine =
            |from: f64, to: f64, progress: f64| to + (from - to) * (1.0 + (PI * progress).cos()) / 2.0;
        let first = self.max / self.div;
        let (top, last) = (self.rise * self.total as f64 - 1.0, self.total as f64 - 1.0);
        let step = (step as f64).min(last);
        if step <= top {
            cosine(first, self.max, if top > 0.0 { step / top } else { 1.0 })
        } else {
            cosine(self.max, first / self.final_div, (step - top) / (last - top))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn schedules_have_their_corners() {
        let step = StepLr { base: 1.0, every: 10, gamma: 0.1 };
        close(step.lr(9), 1.0);
        close(step.lr(10), 0.1);
        let cosine = CosineAnnealing { base: 1.0, min: 0.1, steps: 100 };
        close(cosine.lr(0), 1.0);
        close(cosine.lr(50), 0.55);
        close(cosine.lr(100), 0.1);
        let warm = WarmupCosine::new(1.0, 10, 110).to(0.1);
        close(warm.lr(0), 0.1);
        close(warm.lr(10), 1.0);
        close(warm.lr(60), 0.55);
        close(warm.lr(500), 0.1);
        let cycle = OneCycle::new(1.0, 100);
        close(cycle.lr(0), 0.04);
        close(cycle.lr(29), 1.0);
        close(cycle.lr(99), 0.04 / 1e4);
    }
}
