//! Adam (Kingma and Ba, 2014) and its variants: AdamW (Loshchilov and Hutter, 2017), Adamax (Kingma and Ba,
//! 2014), NAdam (Dozat, 2016) and RAdam (Liu et al., 2019). All keep means of gradients and magnitudes.

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::fused::{FusedOptimizer, RuleOptions, UpdateRule};
use super::impl_optimizer;
use crate::{Result, Tensor, check};

/// Formula that turns the running means into an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdamVariant {
    Adam,
    Adamax,
    NAdam,
    RAdam,
}

with_defaults! {
    #[derive(Clone, Copy, Debug)]
    struct AdamRule {
        variant: AdamVariant = AdamVariant::Adam,
        betas: (f64, f64) = (0.9, 0.999),
        eps: f64 = 1e-8,
        weight_decay: f64 = 0.0,
        momentum_decay: f64 = 4e-3,
        amsgrad: bool = false,
        maximize: bool = false,
        decoupled_weight_decay: bool = false,
        weight_decay_filter: fn(&Tensor) -> bool = |_| true,
    }
}

impl AdamRule {
    /// Returns ln(q) of NAdam for q = 0.96^decay, below zero. The momentum of step i is beta1 (1 - qⁱ / 2).
    fn ln_q(&self) -> f64 {
        (self.momentum_decay * 0.96f64.ln()).min(-1e-12)
    }

    /// Returns the product of NAdam's momenta of all steps up to `t`. Sums the series of ln(1 - qⁱ / 2),
    /// whose terms are geometric in i.
    fn mu_product(&self, t: f64) -> f64 {
        let lq = self.ln_q();
        let sum = |k: f64| (k * lq).exp() * (t * k * lq).exp_m1() / (k * lq).exp_m1();
        let log: f64 = (1..54).map(|k| 0.5f64.powi(k) / f64::from(k) * sum(f64::from(k))).sum();
        (t * self.betas.0.ln() - log).exp()
    }
}

/// Defines an optimiser of the family: its variant, its initial options, and its settable options.
macro_rules! adam_optimizers {
    ($(
        $(#[$doc:meta])*
        $name:ident = $variant:ident { $($first:ident: $value:expr),* } $new:literal { $($options:tt)* }
    )*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            rule: AdamRule,
            fused: FusedOptimizer,
        }

        impl $name {
            #[doc = concat!(stringify!($name), " with betas 0.9 and 0.999, eps 1e-8, ", $new)]
            #[must_use]
            pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
                let rule = AdamRule { variant: AdamVariant::$variant $(, $first: $value)*, ..AdamRule::default() };
                Self { rule, fused: FusedOptimizer::new(parameters, lr) }
            }
        }

        impl_optimizer!($name {
            /// Sets the decays of the running mean of gradients and of the running mean of their magnitude.
            betas: (f64, f64),
            /// Sets the term added to the divisor.
            eps: f64,
            /// Sets the weight decay.
            weight_decay: f64,
            /// Sets the filter of parameters that decay; by default all do. `|p| p.rank() > 1` excludes biases and
            /// norm weights.
            weight_decay_filter: fn(&Tensor) -> bool,
            $($options)*
        });
    )*};
}

adam_optimizers! {
    /// Adam, with weight decay as an L2 penalty added to the gradient.
    Adam = Adam {} "no weight decay." {
        /// If true, divides by the largest mean square so far.
        amsgrad: bool,
    }
    /// Adam with weight decay decoupled from the gradient, 0.01 by default.
    AdamW = Adam { weight_decay: 0.01, decoupled_weight_decay: true } "weight decay 0.01." {
        /// If true, divides by the largest mean square so far.
        amsgrad: bool,
    }
    /// Adamax: Adam with a decaying maximum of gradient magnitudes instead of the mean square.
    Adamax = Adamax {} "no weight decay; PyTorch's rate is 0.002." {}
    /// NAdam: Adam with Nesterov momentum.
    NAdam = NAdam {} "momentum decay 0.004, no weight decay; PyTorch's rate is 0.002." {
        /// Sets the rate at which the momentum approaches its full value.
        momentum_decay: f64,
        /// If true, decouples weight decay from the gradient, as in AdamW.
        decoupled_weight_decay: bool,
    }
    /// RAdam: Adam that rectifies the variance of its early steps.
    RAdam = RAdam {} "no weight decay." {
        /// If true, decouples weight decay from the gradient, as in AdamW.
        decoupled_weight_decay: bool,
    }
}

impl RuleOptions for AdamRule {
    #[track_caller]
    fn check_ranges(&self) -> Result<()> {
        const OP: [&str; 4] = ["Adam", "Adamax", "NAdam", "RAdam"];
        let op = OP[self.variant as usize];
        check::betas(op, self.betas)?;
        check::non_negative(op, "eps", self.eps)?;
        check::non_negative(op, "weight_decay", self.weight_decay)?;
        check::non_negative(op, "momentum_decay", self.momentum_decay)
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn maximize(&self) -> bool {
        self.maximize
    }
}

impl UpdateRule for AdamRule {
    fn kernel(&self) -> Option<KernelSpec> {
        let algorithm = ["adam", "adamax", "nadam", "radam"][self.variant as usize];
        let kernel = KernelSpec::new("optim").def("algorithm", algorithm).def("maximize", self.maximize);
        Some(match self.variant {
            AdamVariant::Adamax => kernel,
            _ => kernel.def("decoupled", self.decoupled_weight_decay),
        })
    }

    fn derived_state_names(&self) -> &'static [&'static str] {
        if self.variant == AdamVariant::NAdam { &["mu_product"] } else { &[] }
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        let size = if self.variant == AdamVariant::Adamax { "exp_inf" } else { "exp_avg_sq" };
        let mut states = smallvec!["exp_avg", size];
        states.extend(self.amsgrad.then_some("max_exp_avg_sq"));
        states
    }

    fn has_weight_decay(&self, parameter: &Tensor) -> bool {
        (self.weight_decay_filter)(parameter)
    }

    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        let decay = if self.decoupled_weight_decay { 1.0 - lr * weight_decay } else { weight_decay };
        // Bounded where the exponential is 0, because kernels do not compute with the infinite ln(0).
        let ln = |beta: f64| beta.ln().max(-1e3);
        let (b1, b2) = self.betas;
        let ln_momentum = if self.variant == AdamVariant::NAdam { self.ln_q() } else { ln(b1) };
        match self.variant {
            AdamVariant::Adamax => [decay, 1.0 - b1, b2, self.eps, ln(b1), lr, 0.0, 0.0],
            _ => [decay, 1.0 - b1, b2, 1.0 - b2, self.eps, ln_momentum, ln(b2), lr],
        }
    }

    fn step_constants(&self, step: u64, lr: f64) -> [f64; 3] {
        let (t, (b1, b2)) = (step as f64, self.betas);
        // Bias corrections: the sum of the weights in each running mean.
        let [first, second] = [b1, b2].map(|beta| 1.0 - beta.powf(t));
        match self.variant {
            AdamVariant::Adam => [lr / first, second.sqrt(), 0.0],
            AdamVariant::Adamax => [lr / first, 0.0, 0.0],
            AdamVariant::NAdam => {
                let mu = |i: f64| b1 * (1.0 - 0.5 * (i * self.ln_q()).exp());
                let (root, product) = (second.sqrt(), self.mu_product(t));
                let now = lr * root * (1.0 - mu(t)) / (1.0 - product);
                [now, lr * root * mu(t + 1.0) / (1.0 - product * mu(t + 1.0)), root]
            }
            AdamVariant::RAdam => {
                let rho_inf = 2.0 / (1.0 - b2) - 1.0;
                let rho = rho_inf - 2.0 * t * (1.0 - second) / second;
                let rect =
                    ((rho - 4.0) * (rho - 2.0) * rho_inf / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho)).sqrt();
                [lr / first, if rho > 5.0 { rect * second.sqrt() } else { 0.0 }, 0.0]
            }
        }
    }
}
