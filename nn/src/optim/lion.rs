//! Lion (Chen et al., 2023).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// Lion: updates by the sign of a mix of gradient and momentum, with one state value for each element.
#[derive(Debug)]
pub struct Lion {
    rule: LionRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct LionRule {
    betas: (f64, f64),
    weight_decay: f64,
    maximize: bool,
}

impl Lion {
    /// Creates Lion with betas 0.9 and 0.99 and no weight decay. The paper's learning rates are a third to a
    /// tenth of AdamW's.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = LionRule { betas: (0.9, 0.99), weight_decay: 0.0, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Lion {
    /// Sets the fraction of momentum in an update, and the decay of the momentum.
    betas: (f64, f64),
    /// Sets the weight decay, decoupled from the gradient.
    weight_decay: f64,
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for LionRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Lion";
        check::betas(OP, self.betas)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)
    }

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", "lion").def("maximize", self.maximize);
        Some(kernel)
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["exp_avg"]
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [1.0 - lr * weight_decay, lr, 1.0 - self.betas.0, 1.0 - self.betas.1, 0.0, 0.0, 0.0, 0.0]
    }
}
