//! Optimisers whose rules are kernels over single elements.
//!
//! - SGD, and averaged SGD (Polyak and Juditsky, 1992, in PyTorch's variant)
//! - RMSprop (Hinton, 2012; centered: Graves, 2013)
//! - Adagrad (Duchi, Hazan and Singer, 2011)
//! - Adadelta (Zeiler, 2012)
//! - Rprop (Riedmiller and Braun, 1993)
//! - Lion (Chen et al., 2023)

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, UpdateRule};
use super::{impl_optimizer, optimizer};
use crate::{Result, Tensor, check, fail_if};

optimizer! {
    /// Stochastic gradient descent with optional momentum.
    Sgd(SgdRule)
    /// Creates plain gradient descent with this learning rate.
    {
        /// Sets the momentum; 0 needs no state.
        momentum: f64 = 0.0 => non_negative,
        /// Sets the dampening: the fraction of the gradient that the momentum leaves out.
        dampening: f64 = 0.0 => unit_interval,
        /// If true, uses Nesterov momentum.
        nesterov: bool = false,
    } weight_decay = 0.0 " (L2 penalty), which is added to the gradient."
}

impl UpdateRule for SgdRule {
    const HAS_STEP_COUNT: bool = false;

    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", "sgd").def("nesterov", self.nesterov);
        Some(kernel.def("maximize", self.maximize))
    }

    #[track_caller]
    fn check_combination(&self) -> Result<()> {
        fail_if!(
            self.nesterov && self.momentum == 0.0;
            argument("Sgd"), "`nesterov` takes a momentum above 0; set `momentum`, 0.9 is usual"
        );
        Ok(())
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        if self.momentum == 0.0 { smallvec![] } else { smallvec!["momentum_buffer"] }
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.momentum, 1.0 - self.dampening, 0.0, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, _lr: f64) -> [f64; 3] {
        // The first momentum is the gradient itself, without dampening.
        if step == 1 { [0.0, 1.0, 0.0] } else { [self.momentum, 1.0 - self.dampening, 0.0] }
    }
}

optimizer! {
    /// RMSprop: divides gradients by the root of their running mean square.
    RmsProp(RmsPropRule)
    /// Creates RMSprop with alpha 0.99, eps 1e-8, no momentum and no weight decay.
    {
        /// Sets the decay of the mean square.
        alpha: f64 = 0.99 => unit_interval,
        /// Sets the term added to the root of the mean square.
        eps: f64 = 1e-8 => non_negative,
        /// Sets the momentum.
        momentum: f64 = 0.0 => non_negative,
        /// If true, divides by the deviation: subtracts the squared running mean from the mean square.
        centered: bool = false,
    } weight_decay = 0.0 " (L2 penalty), which is added to the gradient."
}

impl UpdateRule for RmsPropRule {
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

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.alpha, 1.0 - self.alpha, self.eps, self.momentum, 0.0, 0.0]
    }
}

optimizer! {
    /// Adagrad: divides gradients by the root of the sum of all their squares.
    Adagrad(AdagradRule)
    /// Creates Adagrad with eps 1e-10. PyTorch's default learning rate is 0.01.
    {
        /// Sets the decay of the learning rate: step t uses lr / (1 + (t - 1) `lr_decay`).
        lr_decay: f64 = 0.0 => non_negative,
        /// Sets the initial value of the sums of squares.
        initial_accumulator_value: f64 = 0.0 => non_negative,
        /// Sets the term added to the root of the sum of squares.
        eps: f64 = 1e-10 => non_negative,
    } weight_decay = 0.0 " (L2 penalty), which is added to the gradient."
}

impl UpdateRule for AdagradRule {
    const ALGORITHM: Option<&'static str> = Some("adagrad");
    const STATES: &'static [&'static str] = &["sum"];

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.lr_decay, self.eps, self.initial_accumulator_value, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, lr: f64) -> [f64; 3] {
        let first = if step == 1 { self.initial_accumulator_value } else { 0.0 };
        [lr / (1.0 + (step as f64 - 1.0) * self.lr_decay), first, 0.0]
    }
}

optimizer! {
    /// Adadelta: scales gradients by the ratio of the running RMS of updates to the running RMS of gradients.
    Adadelta(AdadeltaRule)
    /// Creates Adadelta with rho 0.9, eps 1e-6 and no weight decay. PyTorch's default learning rate is 1.
    {
        /// Sets the decay of the mean squares.
        rho: f64 = 0.9 => unit_interval,
        /// Sets the term added to the mean squares.
        eps: f64 = 1e-6 => non_negative,
    } weight_decay = 0.0 " (L2 penalty), which is added to the gradient."
}

impl UpdateRule for AdadeltaRule {
    const ALGORITHM: Option<&'static str> = Some("adadelta");
    const STATES: &'static [&'static str] = &["square_avg", "acc_delta"];

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, lr, self.rho, 1.0 - self.rho, self.eps, 0.0, 0.0, 0.0]
    }
}

optimizer! {
    /// Gradient descent that also averages the parameters; the state `ax` is the average. A changed learning rate
    /// applies to the next step, as in all optimisers here. PyTorch's applies one step later.
    Asgd(AsgdRule)
    /// Creates averaged descent with lambda 1e-4, alpha 0.75, t0 1e6 and no weight decay. PyTorch's default
    /// learning rate is 0.01.
    {
        /// Sets the decay of parameters and learning rate.
        lambd: f64 = 1e-4 => non_negative,
        /// Sets the exponent of the learning rate's decay: step t + 1 uses lr / (1 + lambda lr t)^alpha.
        alpha: f64 = 0.75 => finite,
        /// Sets the step at which averaging begins.
        t0: f64 = 1e6 => non_negative,
    } weight_decay = 0.0 " (L2 penalty), which is added to the gradient."
}

impl UpdateRule for AsgdRule {
    const ALGORITHM: Option<&'static str> = Some("asgd");
    const STATES: &'static [&'static str] = &["ax"];

    fn derived_state_names(&self) -> &'static [&'static str] {
        &["eta", "mu"]
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [weight_decay, self.lambd, lr, self.alpha, self.t0, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, lr: f64) -> [f64; 3] {
        let before = step as f64 - 1.0;
        [lr / (1.0 + self.lambd * lr * before).powf(self.alpha), 1.0 / (before - self.t0).max(1.0), 0.0]
    }
}

optimizer! {
    /// Rprop: updates by the sign of the gradient, with a step size for each element. The size grows while the
    /// sign stays and shrinks when it changes. Suitable for full-batch training.
    Rprop(RpropRule)
    /// Creates Rprop with factors 0.5 and 1.2, step sizes from 1e-6 to 50, and the initial step size `lr`.
    /// PyTorch's default is 0.01.
    {
        /// Sets the factors of the step size after a sign change and without one.
        etas: (f64, f64) = (0.5, 1.2),
        /// Sets the minimum and maximum step size.
        step_sizes: (f64, f64) = (1e-6, 50.0),
    }
}

impl UpdateRule for RpropRule {
    const ALGORITHM: Option<&'static str> = Some("rprop");
    const STATES: &'static [&'static str] = &["prev", "step_size"];

    #[track_caller]
    fn check_combination(&self) -> Result<()> {
        const OP: &str = "Rprop";
        check::decay_factor(OP, "etas.0", self.etas.0)?;
        check::positive(OP, "etas.0", self.etas.0)?;
        check::at_least_one(OP, "etas.1", self.etas.1)?;
        check::non_negative(OP, "step_sizes.0", self.step_sizes.0)?;
        check::non_negative(OP, "step_sizes.1", self.step_sizes.1)?;
        fail_if!(
            self.etas.1 == 1.0 || self.step_sizes.0 > self.step_sizes.1;
            argument(OP),
            "`etas` are {:?}, `step_sizes` {:?}, expected the first below 1 and the second above, and sizes that rise", self.etas, self.step_sizes
        );
        Ok(())
    }

    fn launch_constants(&self, _weight_decay: f64, lr: f64) -> [f64; 8] {
        [self.etas.0, self.etas.1, self.step_sizes.0, self.step_sizes.1, lr, 0.0, 0.0, 0.0]
    }

    fn step_constants(&self, step: u64, _lr: f64) -> [f64; 3] {
        [f64::from(u8::from(step == 1)), 0.0, 0.0]
    }
}

optimizer! {
    /// Lion: updates by the sign of a mix of gradient and momentum, with one state value for each element.
    Lion(LionRule)
    /// Creates Lion with betas 0.9 and 0.99 and no weight decay. The paper's learning rates are a third to a
    /// tenth of AdamW's.
    {
        /// Sets the fraction of momentum in an update, and the decay of the momentum.
        betas: (f64, f64) = (0.9, 0.99) => betas,
    } weight_decay = 0.0 ", decoupled from the gradient."
}

impl UpdateRule for LionRule {
    const ALGORITHM: Option<&'static str> = Some("lion");
    const STATES: &'static [&'static str] = &["exp_avg"];

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        [1.0 - lr * weight_decay, lr, 1.0 - self.betas.0, 1.0 - self.betas.1, 0.0, 0.0, 0.0, 0.0]
    }
}
