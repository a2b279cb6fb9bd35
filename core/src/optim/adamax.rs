//! Adamax (Kingma and Ba, 2014).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{Fused, Rule};
use super::optimizer;
use crate::tensor::Tensor;

/// Adamax: Adam with the largest gradient, which fades, in place of the mean of squares.
#[derive(Debug)]
pub struct Adamax {
    rule: Options,
    fused: Fused,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Adamax {
    /// Adamax with betas 0.9 and 0.999, eps 1e-8, no weight decay; PyTorch's rate is 0.002.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = Options { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, maximize: false };
        Self { rule, fused: Fused::new(parameters, lr) }
    }
}

optimizer!(Adamax {
    /// How much of the running mean, and of the largest gradient, stays at each step.
    betas: (f64, f64),
    /// Added to the magnitude of each gradient.
    eps: f64,
    /// The penalty on the squares of the parameters.
    weight_decay: f64,
    /// Climbs instead.
    maximize: bool,
});

impl Rule for Options {
    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", "adamax").def("maximize", self.maximize);
        Some(kernel)
    }

    fn states(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["exp_avg", "exp_inf"]
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        let (b1, b2) = self.betas;
        [weight_decay, 1.0 - b1, b2, self.eps, b1.ln().max(-1e3), lr, 0.0, 0.0]
    }

    fn at_step(&self, step: u64, lr: f64) -> [f64; 3] {
        [lr / (1.0 - self.betas.0.powf(step as f64)), 0.0, 0.0]
    }
}
