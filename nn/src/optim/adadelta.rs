//! Adadelta (Zeiler, 2012).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// Adadelta: scales gradients by the ratio of the running RMS of updates to the running RMS of gradients.
#[derive(Debug)]
pub struct Adadelta {
    rule: AdadeltaRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct AdadeltaRule {
    rho: f64,
    eps: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Adadelta {
    /// Creates Adadelta with rho 0.9, eps 1e-6 and no weight decay. PyTorch's default learning rate is 1.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = AdadeltaRule { rho: 0.9, eps: 1e-6, weight_decay: 0.0, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Adadelta {
    /// Sets the decay of the mean squares.
    rho: f64,
    /// Sets the term added to the mean squares.
    eps: f64,
    /// Sets the weight decay (L2 penalty), which is added to the gradient.
    weight_decay: f64,
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for AdadeltaRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Adadelta";
        check::unit_interval(OP, "rho", self.rho)?;
        check::non_negative(OP, "eps", self.eps)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)
    }

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", "adadelta").def("maximize", self.maximize);
        Some(kernel)
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["square_avg", "acc_delta"]
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.rho, 1.0 - self.rho, self.eps, 0.0, 0.0, 0.0]
    }
}
