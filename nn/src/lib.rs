//! Modules, optimisers, data, files, the memory planner and the training loop of forebay, on the tensors of
//! `forebay-core`.
//!
//! Programs use the facade crate `forebay`, which re-exports the modules of both crates.

// `#[derive(Module)]` names the facade.
extern crate self as forebay;

#[macro_use(with_defaults)]
extern crate forebay_core;

use forebay_core::{
    autograd, check,
    device::Device,
    dtype::DType,
    error::{Error, Result},
    fail, fail_if,
    memory::{self, Tag},
    tensor::Tensor,
};

/// Defines methods that return the value with some fields replaced: `fn eps(eps: f64) { eps }`, or with another
/// value, `fn causal() { options.is_causal: true }`.
macro_rules! setters {
    (@value $field:ident) => { $field };
    (@value $($field:tt).+ : $value:expr) => { $value };
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) { $($($field:tt).+ $(: $value:expr)?),+ })+) => {$(
        $(#[$doc])*
        #[must_use = "the method returns the changed value"]
        pub fn $name(mut self $(, $arg: $ty)*) -> Self {
            $(self.$($field).+ = setters!(@value $($field).+ $(: $value)?);)+
            self
        }
    )+};
}

pub mod data;
pub mod io;
pub mod nn;
pub mod optim;
pub mod plan;
pub mod train;
