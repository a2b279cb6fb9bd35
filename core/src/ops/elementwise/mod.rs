//! Elementwise operations as records, their gradients, casts, and the fusion of chains into one kernel.

pub(crate) mod activation;
pub(crate) mod binary;
pub(crate) mod cast;
pub(crate) mod expr_eval;
pub(crate) mod fusion;
pub(crate) mod operators;
pub(crate) mod pointwise;
pub(crate) mod unary;
