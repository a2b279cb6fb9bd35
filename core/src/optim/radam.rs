//! RAdam (Liu et al., 2019).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{Fused, Rule};
use super::optimizer;
use crate::tensor::Tensor;

/// RAdam: Adam whose first steps are not divided by a variance that is not known yet.
#[derive(Debug)]
pub struct RAdam {
    rule: Options,
    fused: Fused,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    decoupled_weight_decay: bool,
    maximize: bool,
}

impl RAdam {
    /// RAdam with betas 0.9 and 0.999, eps 1e-8, no weight decay.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = Options {
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled_weight_decay: false,
            maximize: false,
        };
        Self { rule, fused: Fused::new(parameters, lr) }
    }
}

optimizer!(RAdam {
    /// How much of the running mean, and of the mean of squares, stays at each step.
    betas: (f64, f64),
    /// Added to the root of the mean of squares.
    eps: f64,
    /// The penalty on the squares of the parameters.
    weight_decay: f64,
    /// Weights decay apart from the gradient, as in AdamW.
    decoupled_weight_decay: bool,
    /// Climbs instead.
    maximize: bool,
});

impl Rule for Options {
    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim")
            .def("algorithm", "radam")
            .def("decoupled", self.decoupled_weight_decay)
            .def("maximize", self.maximize);
        Some(kernel)
    }

    fn states(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["exp_avg", "exp_avg_sq"]
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        let decay = if self.decoupled_weight_decay { 1.0 - lr * weight_decay } else { weight_decay };
        let (b1, b2) = self.betas;
        [decay, 1.0 - b1, b2, 1.0 - b2, self.eps, b1.ln().max(-1e3), b2.ln().max(-1e3), lr]
    }

    fn at_step(&self, step: u64, lr: f64) -> [f64; 3] {
        let (t, (b1, b2)) = (step as f64, self.betas);
        let short = 1.0 - b2.powf(t);
        let most = 2.0 / (1.0 - b2) - 1.0;
        let rho = most - 2.0 * t * (1.0 - short) / short;
        let rect = ((rho - 4.0) * (rho - 2.0) * most / ((most - 4.0) * (most - 2.0) * rho)).sqrt();
        [lr / (1.0 - b1.powf(t)), if rho > 5.0 { rect * short.sqrt() } else { 0.0 }, 0.0]
    }
}
