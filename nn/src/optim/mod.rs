//! Optimisers, gradient clipping and learning-rate schedules, as in PyTorch.
//!
//! One kernel launch steps several parameters and updates parameters and state in place. The states of these
//! parameters share a buffer. The host computes bias corrections in f64. From the first step that the device
//! may skip, the device counts the steps and computes the corrections. Rules that need more than single
//! elements (LAMB, Adafactor, Muon) run tensor operations. The program sets hyper-parameters;
//! [`Optimizer::state_dict`] saves only the state that training makes.
//!
//! A new rule is one `optimizer!` entry: in `elementwise_rules` with a branch of `optim_algorithms.wgsl`, or in
//! `composite_rules` with tensor operations. `fused` groups parameters and launches the kernels.
//!
//! `# Errors` sections list errors other than those of methods to which the text links.

use std::collections::BTreeMap;

use crate::{Result, Tensor, autograd, fail};

mod adam;
mod averaged;
pub(crate) mod clip;
mod composite;
mod composite_rules;
mod elementwise_rules;
mod fused;
mod lbfgs;
mod line_search;
mod plateau;
mod scaler;
pub mod schedule;
mod state_dict;
mod state_staging;

pub use adam::{Adam, AdamW, Adamax, NAdam, RAdam};
pub use averaged::AveragedModel;
pub use clip::{ClipGradNormOptions, clip_grad_norm_, clip_grad_norm_with, clip_grad_value_};
pub use composite_rules::{Adafactor, Lamb, Muon, MuonAdjustLr};
pub use elementwise_rules::{Adadelta, Adagrad, Asgd, Lion, RmsProp, Rprop, Sgd};
pub use fused::ParamGroup;
pub use lbfgs::{Lbfgs, LineSearch};
pub use scaler::GradScaler;
pub use schedule::LrSchedule;

/// An algorithm that updates parameters by their gradients.
pub trait Optimizer {
    /// Updates every parameter that has a gradient.
    ///
    /// # Errors
    /// The dtype or layout of a parameter is not supported. After this error, as after running out of memory,
    /// nothing has changed.
    fn step(&mut self) -> Result<()>;

    /// Evaluates the loss by `closure`, makes a step, and returns the loss before the step: PyTorch's
    /// `step(closure)`. The closure drops or zeroes the gradients, computes the loss, and calls
    /// [`backward`](Tensor::backward). [`Lbfgs`] calls the closure several times, other optimisers once.
    /// Gradients are recorded in the closure, even under [`no_grad`](autograd::no_grad()).
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::{nn::{Linear, Module}, optim::{Adam, Optimizer}};
    /// # let device = Device::null(Default::default());
    /// # let (net, x) = (Linear::new(4, 1, &device)?, Tensor::ones(&[8, 4], DType::F32, &device)?);
    /// let mut optimizer = Adam::new(net.parameters(), 1e-3);
    /// let loss = optimizer.step_with(&mut || {
    ///     net.zero_grad();
    ///     let loss = net.forward(&x)?.mean_all()?;
    ///     loss.backward()?;
    ///     Ok(loss)
    /// })?;
    /// # assert_eq!(loss.numel(), 1);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The closure fails, or the step. After an error, parameters and state are as before.
    fn step_with(&mut self, closure: &mut dyn FnMut() -> Result<Tensor>) -> Result<Tensor> {
        let loss = {
            let _grad = autograd::enable_grad();
            closure()?
        };
        self.step()?;
        Ok(loss)
    }

    /// Makes a [`step`](Self::step), unless the single value in `skip` (f32, on any device) is not zero. A
    /// skipped step changes nothing and does not count. A [`GradScaler`] steps this way.
    ///
    /// The optimisers here decide on the devices of the parameters, to which they copy the value. The default
    /// implementation waits for the value.
    ///
    /// # Errors
    /// `skip` is not a single f32.
    fn step_unless(&mut self, skip: &Tensor) -> Result<()> {
        if skip.item()? == 0.0 { self.step() } else { Ok(()) }
    }

    /// Keeps the state in host memory between steps, or on the device again. Results are bitwise equal.
    /// Optimisers without state ignore this call.
    ///
    /// A step copies the state to the device and back, one group of parameters after another. A group's state
    /// has at most a sixteenth of all bytes, but at least 256 KiB and at most 32 MiB; the state of a larger
    /// parameter is a group of its own. The next group's copy overlaps with the step if both groups together
    /// are no larger than two groups of that size, or than the largest group. Call this before the first step,
    /// because existing groups keep their sizes.
    ///
    /// [`Lamb`], [`Adafactor`], [`Muon`] and [`Lbfgs`] need all of their state at once.
    fn offload_state(&mut self, on: bool) {
        let _ = on;
    }

    /// Returns the trained parameters, each once.
    fn parameters(&self) -> &[Tensor];

    /// Returns the learning rate.
    fn lr(&self) -> f64;

    /// Sets the learning rate of the following steps, and those of other parameter groups in proportion.
    fn set_lr(&mut self, lr: f64);

    /// Returns the learning rates of all parameter groups; the first is [`lr`](Self::lr).
    fn lrs(&self) -> Vec<f64> {
        vec![self.lr()]
    }

    /// Adds parameters with their own learning rate or weight decay. Call before the first step.
    ///
    /// # Errors
    /// The optimiser does not support groups, has made a step, or has one of the parameters already. Also
    /// fails for a group with its own learning rate if the optimiser's is 0.
    #[track_caller]
    fn add_param_group(&mut self, group: ParamGroup) -> Result<()> {
        let _ = group;
        fail!(argument("add_param_group"), "this optimiser has one group of parameters")
    }

    /// Returns the state of every parameter that has any, by the parameter's index: `3.exp_avg`, `3.step`.
    /// The tensors share memory with the optimiser, so save or copy them. Learning rates and other options
    /// (PyTorch's `param_groups`) are not included; set them at construction or with `set_lr`.
    fn state_dict(&self) -> Result<BTreeMap<String, Tensor>>;

    /// Restores a state from [`state_dict`](Self::state_dict), or PyTorch's `state` by keys `INDEX.NAME`.
    ///
    /// # Errors
    /// A name is missing or unexpected, or a tensor's shape or dtype does not match.
    fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()>;

    /// Drops every parameter's gradient, as `Module::zero_grad` does.
    fn zero_grad(&self) {
        for p in self.parameters() {
            p.set_grad(None);
        }
    }
}

/// Implements setters for the options of an optimiser, and [`Optimizer`] by its rule and fused state.
macro_rules! impl_optimizer {
    ($name:ident { $($(#[$doc:meta])* $option:ident: $ty:ty,)* }) => {
        impl $name {
            setters! {
                /// If true, as by default, steps also write the 16-bit copy of each f32 parameter that
                /// [`autocast`](forebay_core::amp::autocast()) has cast. The next forward pass uses the copy instead
                /// of a cast. Copies keep 2 bytes allocated for each of their elements as long as the parameter
                /// lives. Results are bitwise equal. A parameter that changes in any other way is cast again.
                /// [Captured](forebay_core::capture) steps use the copies too.
                fn low_precision_copies(on: bool) { fused.writes_low_precision_copies: on }
                /// If true, maximises the objective.
                fn maximize(maximize: bool) { rule.maximize: maximize }
                $($(#[$doc])* fn $option($option: $ty) { rule.$option: $option })*
            }
        }
        impl $crate::optim::Optimizer for $name {
            #[track_caller]
            fn step(&mut self) -> Result<()> {
                self.fused.step(&self.rule, None)
            }
            #[track_caller]
            fn step_unless(&mut self, skip: &Tensor) -> Result<()> {
                self.fused.step(&self.rule, Some(skip))
            }
            fn parameters(&self) -> &[Tensor] {
                &self.fused.parameters
            }
            fn offload_state(&mut self, on: bool) {
                self.fused.offloads_state = on;
            }
            fn lr(&self) -> f64 {
                self.fused.lr
            }
            fn lrs(&self) -> Vec<f64> {
                self.fused.lrs()
            }
            #[track_caller]
            fn add_param_group(&mut self, group: $crate::optim::ParamGroup) -> Result<()> {
                self.fused.add_param_group(group)
            }
            fn set_lr(&mut self, lr: f64) {
                self.fused.set_lr(lr);
            }
            #[track_caller]
            fn state_dict(&self) -> Result<std::collections::BTreeMap<String, Tensor>> {
                self.fused.state_dict(&self.rule)
            }
            #[track_caller]
            fn load_state_dict(&mut self, state: &std::collections::BTreeMap<String, Tensor>) -> Result<()> {
                self.fused.load_state_dict(&self.rule, state)
            }
        }
    };
}
use impl_optimizer;

/// Defines an optimiser and its rule: options with defaults and checks (of [`ranges`]), and a constructor.
macro_rules! optimizer {
    (
        $(#[$doc:meta])*
        $name:ident($rule:ident) $(#[$new:meta])* {
            $($(#[$option_doc:meta])* $option:ident: $ty:ty = $default:expr $(=> $check:ident)?,)*
        } $(weight_decay = $weight_decay:literal $decay_doc:literal)?
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            rule: $rule,
            fused: FusedOptimizer,
        }

        #[derive(Clone, Copy, Debug)]
        struct $rule {
            $($option: $ty,)*
            weight_decay: f64,
            maximize: bool,
        }

        impl $name {
            $(#[$new])*
            #[must_use]
            pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
                let weight_decay = 0.0 $(+ $weight_decay)?;
                let rule = $rule { $($option: $default,)* weight_decay, maximize: false };
                Self { rule, fused: FusedOptimizer::new(parameters, lr) }
            }
        }

        impl_optimizer!($name {
            $($(#[$option_doc])* $option: $ty,)*
            $(#[doc = concat!("Sets the weight decay", $decay_doc)] weight_decay: f64,)?
        });

        impl $crate::optim::fused::RuleOptions for $rule {
            fn check_ranges(&self) -> Result<()> {
                $($($crate::optim::ranges::$check(stringify!($name), stringify!($option), self.$option)?;)?)*
                $crate::optim::ranges::non_negative(stringify!($name), "weight_decay", self.weight_decay)
            }

            fn weight_decay(&self) -> f64 {
                self.weight_decay
            }

            fn maximize(&self) -> bool {
                self.maximize
            }
        }
    };
}
use optimizer;

/// Range checks of options, by the type of the option.
mod ranges {
    use forebay_core::check;
    pub(super) use forebay_core::check::{at_least_one, finite, non_negative, non_positive, unit_interval};
    use forebay_core::error::Result;

    #[track_caller]
    pub(super) fn betas(op: &'static str, _name: &str, betas: (f64, f64)) -> Result<()> {
        check::betas(op, betas)
    }

    pub(super) fn finite_coefficients(
        op: &'static str,
        name: &str,
        (a, b, c): (f64, f64, f64),
    ) -> Result<()> {
        [a, b, c].into_iter().try_for_each(|x| finite(op, name, x))
    }

    pub(super) fn optional_eps(op: &'static str, _name: &str, eps: (Option<f64>, f64)) -> Result<()> {
        non_negative(op, "eps.0", eps.0.unwrap_or(0.0))?;
        non_negative(op, "eps.1", eps.1)
    }
}
