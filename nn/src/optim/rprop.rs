//! Resilient propagation (Riedmiller and Braun, 1993).

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

/// Rprop: updates by the sign of the gradient, with a step size for each element. The size grows while the
/// sign stays and shrinks when it changes. Suitable for full-batch training.
#[derive(Debug)]
pub struct Rprop {
    rule: RpropRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct RpropRule {
    etas: (f64, f64),
    step_sizes: (f64, f64),
    maximize: bool,
}

impl Rprop {
    /// Creates Rprop with factors 0.5 and 1.2, step sizes from 1e-6 to 50, and the initial step size `lr`.
    /// PyTorch's default is 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = RpropRule { etas: (0.5, 1.2), step_sizes: (1e-6, 50.0), maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Rprop {
    /// Sets the factors of the step size after a sign change and without one.
    etas: (f64, f64),
    /// Sets the minimum and maximum step size.
    step_sizes: (f64, f64),
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for RpropRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Rprop";
        check::decay_factor(OP, "etas.0", self.etas.0)?;
        check::positive(OP, "etas.0", self.etas.0)?;
        check::at_least_one(OP, "etas.1", self.etas.1)?;
        check::non_negative(OP, "step_sizes.0", self.step_sizes.0)?;
        check::non_negative(OP, "step_sizes.1", self.step_sizes.1)?;
        if self.etas.1 == 1.0 || self.step_sizes.0 > self.step_sizes.1 {
            let why = format!(
                "`etas` are {:?}, `step_sizes` {:?}, expected the first below 1 and the second above, and sizes that rise",
                self.etas, self.step_sizes
            );
            return Err(Error::argument(OP, why));
        }
        Ok(())
    }

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", "rprop").def("maximize", self.maximize);
        Some(kernel)
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["prev", "step_size"]
    }

    fn weight_decay(&self) -> f64 {
        0.0
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        let _ = weight_decay;
        [self.etas.0, self.etas.1, self.step_sizes.0, self.step_sizes.1, lr, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, lr: f64) -> [f64; 3] {
        let _ = lr;
        [f64::from(u8::from(step == 1)), 0.0, 0.0]
    }
}
