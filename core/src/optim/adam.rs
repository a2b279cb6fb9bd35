//! Adam (Kingma and Ba, 2014) and AdamW (Loshchilov and Hutter, 2017).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{Fused, Rule};
use super::optimizer;
use crate::tensor::Tensor;

/// Adam; weight decay is a penalty added to the gradient.
#[derive(Debug)]
pub struct Adam {
    rule: Options,
    fused: Fused,
}

/// Adam with weight decay apart from the gradient, 0.01 unless set.
#[derive(Debug)]
pub struct AdamW {
    rule: Options,
    fused: Fused,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    decays: fn(&Tensor) -> bool,
}

impl Options {
    fn new(weight_decay: f64, decoupled: bool) -> Self {
        let (betas, eps) = ((0.9, 0.999), 1e-8);
        Self { betas, eps, weight_decay, amsgrad: false, maximize: false, decoupled, decays: |_| true }
    }
}

impl Adam {
    /// Adam with betas 0.9 and 0.999, eps 1e-8, no weight decay.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        Self { rule: Options::new(0.0, false), fused: Fused::new(parameters, lr) }
    }
}

impl AdamW {
    /// AdamW with betas 0.9 and 0.999, eps 1e-8, weight decay 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        Self { rule: Options::new(0.01, true), fused: Fused::new(parameters, lr) }
    }
}

macro_rules! options {
    ($name:ident) => {
        optimizer!($name {
            /// How much of the running mean, and of the mean of squares, stays at each step.
            betas: (f64, f64),
            /// Added to the root of the mean of squares.
            eps: f64,
            /// How fast parameters decay.
            weight_decay: f64,
            /// Which of them decay, all unless set: `|p| p.rank() > 1` leaves out biases and the weights of norms.
            decays: fn(&Tensor) -> bool,
            /// Divides by the largest mean of squares so far.
            amsgrad: bool,
            /// Climbs instead.
            maximize: bool,
        });
    };
}
options!(Adam);
options!(AdamW);

impl Rule for Options {
    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim")
            .def("algorithm", "adam")
            .def("decoupled", self.decoupled)
            .def("maximize", self.maximize);
        Some(kernel)
    }

    fn states(&self) -> SmallVec<[&'static str; 3]> {
        let mut states = smallvec!["exp_avg", "exp_avg_sq"];
        states.extend(self.amsgrad.then_some("max_exp_avg_sq"));
        states
    }

    fn decays(&self, parameter: &Tensor) -> bool {
        (self.decays)(parameter)
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        let decay = if self.decoupled { 1.0 - lr * weight_decay } else { weight_decay };
        // The smallest logarithm whose power is 0: that of 0 itself is infinite, which kernels do not compute with.
        let ln = |beta: f64| beta.ln().max(-1e3);
        let (b1, b2) = self.betas;
        [decay, 1.0 - b1, b2, 1.0 - b2, self.eps, ln(b1), ln(b2), lr]
    }

    fn at_step(&self, step: u64, lr: f64) -> [f64; 3] {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        [lr / correction(self.betas.0), correction(self.betas.1).sqrt(), 0.0]
    }
}
