//! Adagrad (Duchi, Hazan and Singer, 2011).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// Adagrad: divides gradients by the root of the sum of all their squares.
#[derive(Debug)]
pub struct Adagrad {
    rule: AdagradRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct AdagradRule {
    lr_decay: f64,
    weight_decay: f64,
    initial_accumulator_value: f64,
    eps: f64,
    maximize: bool,
}

impl Adagrad {
    /// Creates Adagrad with eps 1e-10. PyTorch's default learning rate is 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = AdagradRule {
            lr_decay: 0.0,
            weight_decay: 0.0,
            initial_accumulator_value: 0.0,
            eps: 1e-10,
            maximize: false,
        };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Adagrad {
    /// Sets the decay of the learning rate: step t uses lr / (1 + (t - 1) `lr_decay`).
    lr_decay: f64,
    /// Sets the weight decay (L2 penalty), which is added to the gradient.
    weight_decay: f64,
    /// Sets the initial value of the sums of squares.
    initial_accumulator_value: f64,
    /// Sets the term added to the root of the sum of squares.
    eps: f64,
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for AdagradRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Adagrad";
        check::non_negative(OP, "lr_decay", self.lr_decay)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)?;
        check::non_negative(OP, "initial_accumulator_value", self.initial_accumulator_value)?;
        check::non_negative(OP, "eps", self.eps)
    }

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", "adagrad").def("maximize", self.maximize);
        Some(kernel)
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["sum"]
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.lr_decay, self.eps, self.initial_accumulator_value, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, lr: f64) -> [f64; 3] {
        let first = if step == 1 { self.initial_accumulator_value } else { 0.0 };
        [lr / (1.0 + (step as f64 - 1.0) * self.lr_decay), first, 0.0]
    }
}
