//! Optimisers, clipping of gradients and schedules of the learning rate, as PyTorch defines them.
//!
//! A step is one kernel over several parameters at a time, which reads the gradients and changes parameters and state
//! in place; the state of parameters that are stepped together lies in one buffer. Corrections of bias are worked out
//! on the host, in f64; or, from the first step that the device may skip on, by the device, which then counts the steps.
//! Rules that need more of a parameter than its elements (LAMB, Adafactor, Muon) are made of tensor operations.
//! Hyper-parameters are the program's; [`Optimizer::state_dict`] saves what training has made.

use std::collections::BTreeMap;

use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod asgd;
mod averaged;
pub(crate) mod clip;
mod composite;
mod fused;
mod lamb;
mod lion;
mod muon;
mod plateau;
mod rmsprop;
mod rprop;
mod scaler;
pub mod schedule;
mod sgd;
mod staging_slots;
mod state_dict;

pub use adadelta::Adadelta;
pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::{Adam, AdamW, Adamax, NAdam, RAdam};
pub use asgd::Asgd;
pub use averaged::AveragedModel;
pub use clip::{ClipGradNormOptions, clip_grad_norm_, clip_grad_norm_with, clip_grad_value_};
pub use fused::ParamGroup;
pub use lamb::Lamb;
pub use lion::Lion;
pub use muon::{Muon, MuonAdjustLr};
pub use rmsprop::RmsProp;
pub use rprop::Rprop;
pub use scaler::GradScaler;
pub use schedule::LrSchedule;
pub use sgd::Sgd;

/// What changes parameters by their gradients.
pub trait Optimizer {
    /// Steps every parameter that has a gradient.
    ///
    /// # Errors
    /// A parameter's type or layout is not taken; memory runs out (for the state, at the first step). Nothing has been
    /// changed then.
    fn step(&mut self) -> Result<()>;

    /// Steps, unless the one number in `skip` (f32, on the device) is other than zero: then nothing changes, and the step does
    /// not count. This is how a [`GradScaler`](crate::optim::GradScaler) steps.
    ///
    /// The optimisers here leave that to the device; what is not overridden reads the number, and waits for it.
    ///
    /// # Errors
    /// As [`step`](Self::step); `skip` is no f32, not one number, or on another device.
    fn step_unless(&mut self, skip: &Tensor) -> Result<()> {
        if skip.item()? == 0.0 { self.step() } else { Ok(()) }
    }

    /// Keeps its state in memory of the host between steps, or on the device again: a step brings it over group by group,
    /// two at a time, and sends it back. It has the same bits. Optimisers without state ignore it.
    fn offload_state(&mut self, on: bool) {
        let _ = on;
    }

    /// What it trains, each once.
    fn parameters(&self) -> &[Tensor];

    /// The learning rate.
    fn lr(&self) -> f64;

    /// Changes the learning rate, for the steps that follow, and those of other groups of parameters in proportion.
    fn set_lr(&mut self, lr: f64);

    /// The learning rates of all groups of parameters; the first is [`lr`](Self::lr).
    fn lrs(&self) -> Vec<f64> {
        vec![self.lr()]
    }

    /// More parameters to train, with a learning rate or a weight decay of their own. Before the first step.
    ///
    /// # Errors
    /// The optimiser has no groups, or made a step; a parameter is in another group; the optimiser's learning rate is 0, and the
    /// group has one of its own.
    fn add_param_group(&mut self, group: ParamGroup) -> Result<()> {
        let _ = group;
        Err(Error::argument("add_param_group", "this optimiser has one group of parameters"))
    }

    /// The state of every parameter that has any: `3.exp_avg`, `3.step`, by the parameter's number. The tensors share
    /// memory with the optimiser: save them, or copy them. Rates and other options, which PyTorch's `param_groups` has, are not in it:
    /// they are those that the optimiser is made with, or `set_lr`.
    ///
    /// # Errors
    /// Memory runs out.
    fn state_dict(&self) -> Result<BTreeMap<String, Tensor>>;

    /// Goes on from a state of [`state_dict`](Self::state_dict), or from PyTorch's `state` under the same names, `NUMBER.NAME`.
    ///
    /// # Errors
    /// A name is missing or unexpected, or a shape is not the parameter's; memory runs out.
    fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()>;

    /// Frees every parameter's gradient.
    fn zero_grad(&self) {
        for p in self.parameters() {
            p.set_grad(None);
        }
    }

    /// Fills every gradient with zeros and keeps its memory.
    ///
    /// # Errors
    /// The device was lost.
    fn zero_grad_in_place(&self) -> Result<()> {
        self.parameters().iter().filter_map(Tensor::grad).try_for_each(|g| crate::nn::init::zeros_(&g))
    }
}

/// The options of an optimiser as setters for its construction, and its [`Optimizer`] by its rule and fused state.
macro_rules! impl_optimizer {
    ($name:ident { $($(#[$doc:meta])* $option:ident: $ty:ty,)* }) => {
        impl $name {
            /// Also writes the 16-bit copies of parameters of f32 that [`autocast`](forebay_core::amp::autocast()) would make in the next
            /// forward pass, in the pass that steps them: 2 bytes a parameter that products take stay allocated, and its
            /// cast is saved. What is computed has the same bits; a parameter that is changed in another way is cast again.
            /// [Captured](forebay_core::capture) steps read and write them too.
            #[must_use]
            pub fn low_precision_copies(mut self, on: bool) -> Self {
                self.fused.set_low_precision_copies(on);
                self
            }
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $option(mut self, $option: $ty) -> Self {
                    self.rule.$option = $option;
                    self
                }
            )*
        }
        impl $crate::optim::Optimizer for $name {
            #[track_caller]
            fn step(&mut self) -> ::forebay_core::error::Result<()> {
                self.fused.step(&self.rule, None)
            }
            #[track_caller]
            fn step_unless(&mut self, skip: &::forebay_core::tensor::Tensor) -> ::forebay_core::error::Result<()> {
                self.fused.step(&self.rule, Some(skip))
            }
            fn parameters(&self) -> &[::forebay_core::tensor::Tensor] {
                self.fused.parameters()
            }
            fn offload_state(&mut self, on: bool) {
                self.fused.set_offload_state(on);
            }
            fn lr(&self) -> f64 {
                self.fused.lr()
            }
            fn lrs(&self) -> Vec<f64> {
                self.fused.lrs()
            }
            #[track_caller]
            fn add_param_group(&mut self, group: $crate::optim::ParamGroup) -> ::forebay_core::error::Result<()> {
                self.fused.add_param_group(group)
            }
            fn set_lr(&mut self, lr: f64) {
                self.fused.set_lr(lr);
            }
            fn state_dict(
                &self,
            ) -> ::forebay_core::error::Result<std::collections::BTreeMap<String, ::forebay_core::tensor::Tensor>> {
                self.fused.state_dict(&self.rule)
            }
            fn load_state_dict(
                &mut self,
                state: &std::collections::BTreeMap<String, ::forebay_core::tensor::Tensor>,
            ) -> ::forebay_core::error::Result<()> {
                self.fused.load_state_dict(&self.rule, state)
            }
        }
    };
}
use impl_optimizer;
