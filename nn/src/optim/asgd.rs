//! Averaged stochastic gradient descent (Polyak and Juditsky, 1992), as PyTorch has it.

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// Descent whose parameters are averaged beside: the state `ax` is the average. A rate that is changed counts from the next step on, as in
/// all optimisers here; PyTorch's takes it a step later.
#[derive(Debug)]
pub struct Asgd {
    rule: AsgdRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct AsgdRule {
    lambd: f64,
    alpha: f64,
    t0: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Asgd {
    /// Averaged descent with lambda 1e-4, alpha 0.75, t0 1e6, no weight decay; PyTorch's rate is 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = AsgdRule { lambd: 1e-4, alpha: 0.75, t0: 1e6, weight_decay: 0.0, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Asgd {
    /// How fast parameters decay, and rates fall.
    lambd: f64,
    /// The power by which rates fall: step t + 1 has lr / (1 + lambda lr t)^alpha.
    alpha: f64,
    /// The step from which on is averaged.
    t0: f64,
    /// The penalty on the squares of the parameters.
    weight_decay: f64,
    /// Climbs instead.
    maximize: bool,
});

impl UpdateRule for AsgdRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Asgd";
        check::non_negative(OP, "lambd", self.lambd)?;
        check::finite(OP, "alpha", self.alpha)?;
        check::non_negative(OP, "t0", self.t0)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)
    }

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", "asgd").def("maximize", self.maximize);
        Some(kernel)
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["ax"]
    }

    fn derived_state_names(&self) -> &'static [&'static str] {
        &["eta", "mu"]
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, self.lambd, lr, self.alpha, self.t0, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, lr: f64) -> [f64; 3] {
        let before = step as f64 - 1.0;
        [lr / (1.0 + self.lambd * lr * before).powf(self.alpha), 1.0 / (before - self.t0).max(1.0), 0.0]
    }
}
