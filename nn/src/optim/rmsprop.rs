//! RMSprop (Hinton, 2012; centered: Graves, 2013).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// RMSprop: gradients divided by the root of their running mean of squares.
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
    /// RMSprop with alpha 0.99, eps 1e-8, no momentum, no weight decay.
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
    /// How much of the mean of squares stays at each step.
    alpha: f64,
    /// Added to the root of the mean of squares.
    eps: f64,
    /// The penalty on the squares of the parameters.
    weight_decay: f64,
    /// How much of the last step goes on.
    momentum: f64,
    /// Subtracts the square of the running mean: the variance, not the mean of squares.
    centered: bool,
    /// Climbs instead.
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
