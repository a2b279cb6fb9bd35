//! Stochastic gradient descent.

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

/// Stochastic gradient descent with optional momentum.
#[derive(Debug)]
pub struct Sgd {
    rule: SgdRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct SgdRule {
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    maximize: bool,
}

impl Sgd {
    /// Creates plain gradient descent with this learning rate.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule =
            SgdRule { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Sgd {
    /// Sets the momentum; 0 needs no state.
    momentum: f64,
    /// Sets the dampening: the fraction of the gradient that the momentum leaves out.
    dampening: f64,
    /// Sets the weight decay (L2 penalty), which is added to the gradient.
    weight_decay: f64,
    /// If true, uses Nesterov momentum.
    nesterov: bool,
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for SgdRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Sgd";
        check::non_negative(OP, "momentum", self.momentum)?;
        check::unit_interval(OP, "dampening", self.dampening)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)?;
        if self.nesterov && self.momentum == 0.0 {
            return Err(Error::argument(
                OP,
                "`nesterov` takes a momentum above 0; set `momentum`, 0.9 is usual",
            ));
        }
        Ok(())
    }

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim")
            .def("algorithm", "sgd")
            .def("nesterov", self.nesterov)
            .def("maximize", self.maximize);
        Some(kernel)
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        if self.momentum == 0.0 { smallvec![] } else { smallvec!["momentum_buffer"] }
    }

    fn has_step_count(&self) -> bool {
        false
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.momentum, 1.0 - self.dampening, 0.0, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, _lr: f64) -> [f64; 3] {
        // The first momentum is the gradient itself, without dampening.
        if step == 1 { [0.0, 1.0, 0.0] } else { [self.momentum, 1.0 - self.dampening, 0.0] }
    }
}
