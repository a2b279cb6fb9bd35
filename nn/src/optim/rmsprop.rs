//! RMSprop (Hinton, 2012; centered: Graves, 2013).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// RMSprop: divides gradients by the root of their running mean square.
#[derive(Debug)]
pub struct RmsProp {
    rule: RmsPropRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct RmsPropRule {
    alpha: f64,
    eps: f64,
    weight_decay: f64,
    momentum: f64,
    centered: bool,
    maximize: bool,
}

impl RmsProp {
    /// Creates RMSprop with alpha 0.99, eps 1e-8, no momentum and no weight decay.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = RmsPropRule {
            alpha: 0.99,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            centered: false,
            maximize: false,
        };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(RmsProp {
    /// Sets the decay of the mean square.
    alpha: f64,
    /// Sets the term added to the root of the mean square.
    eps: f64,
    /// Sets the weight decay (L2 penalty), which is added to the gradient.
    weight_decay: f64,
    /// Sets the momentum.
    momentum: f64,
    /// If true, divides by the standard deviation, with the squared running mean subtracted from the mean
    /// square.
    centered: bool,
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for RmsPropRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "RmsProp";
        check::unit_interval(OP, "alpha", self.alpha)?;
        check::non_negative(OP, "eps", self.eps)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)?;
        check::non_negative(OP, "momentum", self.momentum)
    }

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim")
            .def("algorithm", "rmsprop")
            .def("centered", self.centered)
            .def("momentum", self.momentum != 0.0)
            .def("maximize", self.maximize);
        Some(kernel)
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        let mut states = smallvec!["square_avg"];
        states.extend(self.centered.then_some("grad_avg"));
        states.extend((self.momentum != 0.0).then_some("momentum_buffer"));
        states
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.alpha, 1.0 - self.alpha, self.eps, self.momentum, 0.0, 0.0]
    }
}
