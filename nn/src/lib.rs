//! Modules, optimisers, data, files, the memory planner and the training loop of forebay, on the tensors of `forebay-core`.
//!
//! Programs use the facade crate `forebay`, which re-exports the modules of both crates.

// `#[derive(Module)]` names the facade.
extern crate self as forebay;

use forebay_core::{
    device::Device,
    dtype::DType,
    error::{Error, Result},
    tensor::Tensor,
};

pub mod data;
pub mod io;
pub mod nn;
pub mod optim;
pub mod plan;
pub mod train;
