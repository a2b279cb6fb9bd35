//! NAdam (Dozat, 2016).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{Fused, Rule};
use super::optimizer;
use crate::tensor::Tensor;

/// NAdam: Adam that looks one step of momentum ahead.
#[derive(Debug)]
pub struct NAdam {
    rule: Options,
    fused: Fused,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    momentum_decay: f64,
    decoupled_weight_decay: bool,
    maximize: bool,
}

impl NAdam {
    /// NAdam with betas 0.9 and 0.999, eps 1e-8, momentum decay 0.004, no weight decay; PyTorch's rate is 0.002.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = Options {
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            momentum_decay: 4e-3,
            decoupled_weight_decay: false,
            maximize: false,
        };
        Self { rule, fused: Fused::new(parameters, lr) }
    }
}

optimizer!(NAdam {
    /// How much of the running mean, and of the mean of squares, stays at each step.
    betas: (f64, f64),
    /// Added to the root of the mean of squares.
    eps: f64,
    /// The penalty on the squares of the parameters.
    weight_decay: f64,
    /// How fast the momentum grows to its full size.
    momentum_decay: f64,
    /// Weights decay apart from the gradient, as in AdamW.
    decoupled_weight_decay: bool,
    /// Climbs instead.
    maximize: bool,
});

impl Options {
    /// The logarithm of q = 0.96^decay, below zero: the momentum of step i is beta1 (1 - qⁱ / 2).
    fn ln_q(&self) -> f64 {
        (self.momentum_decay * 0.96f64.ln()).min(-1e-12)
    }

    /// The product of the momenta of all steps up to `t`: ln(1 - qⁱ / 2) as its series, whose terms are geometric in i.
    fn mu_product(&self, t: f64) -> f64 {
        let lq = self.ln_q();
        let sum = |k: f64| (k * lq).exp() * (t * k * lq).exp_m1() / (k * lq).exp_m1();
        let log: f64 = (1..54).map(|k| 0.5f64.powi(k) / f64::from(k) * sum(f64::from(k))).sum();
        (t * self.betas.0.ln() - log).exp()
    }
}

impl Rule for Options {
    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim")
            .def("algorithm", "nadam")
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
        [decay, 1.0 - b1, b2, 1.0 - b2, self.eps, self.ln_q(), b2.ln().max(-1e3), lr]
    }

    fn at_step(&self, step: u64, lr: f64) -> [f64; 3] {
        let (t, lq) = (step as f64, self.ln_q());
        let mu = |i: f64| self.betas.0 * (1.0 - 0.5 * (i * lq).exp());
        let root = (1.0 - self.betas.1.powf(t)).sqrt();
        let product = self.mu_product(t);
        [
            lr * root * (1.0 - mu(t)) / (1.0 - product),
            lr * root * mu(t + 1.0) / (1.0 - product * mu(t + 1.0)),
            root,
        ]
    }
}
