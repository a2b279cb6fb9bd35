//! Lion (Chen et al., 2023).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// Lion: steps of one size, by the sign of gradient and momentum. One number is kept for each element.
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
    /// Lion with betas 0.9 and 0.99, no weight decay; the paper's rates are a third to a tenth of AdamW's.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = LionRule { betas: (0.9, 0.99), weight_decay: 0.0, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Lion {
    /// How much of the momentum is in a step, and how much of it stays.
    betas: (f64, f64),
    /// How fast parameters decay, apart from the gradient.
    weight_decay: f64,
    /// Climbs instead.
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
