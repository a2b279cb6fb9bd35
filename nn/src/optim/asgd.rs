//! Averaged stochastic gradient descent (Polyak and Juditsky, 1992), in PyTorch's variant.

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// Gradient descent that also averages the parameters; the state `ax` is the average. A changed learning rate
/// applies to the next step, as in all optimisers here. PyTorch's applies one step later.
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
    /// Creates averaged descent with lambda 1e-4, alpha 0.75, t0 1e6 and no weight decay. PyTorch's default
    /// learning rate is 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = AsgdRule { lambd: 1e-4, alpha: 0.75, t0: 1e6, weight_decay: 0.0, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Asgd {
    /// Sets the decay of parameters and learning rate.
    lambd: f64,
    /// Sets the exponent of the learning rate's decay: step t + 1 uses lr / (1 + lambda lr t)^alpha.
    alpha: f64,
    /// Sets the step at which averaging begins.
    t0: f64,
    /// Sets the weight decay (L2 penalty), which is added to the gradient.
    weight_decay: f64,
    /// If true, maximises the objective.
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
