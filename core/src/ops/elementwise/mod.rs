//! Elementwise operations as records, their gradients, casts, and the fusion of chains into one kernel.
//!
//! A new operation is one entry in `unary` (one input), `binary` (two or three inputs) or `activation`; `pointwise`
//! defines the records and runs them.

pub(crate) mod activation;
pub(crate) mod binary;
pub(crate) mod cast;
pub(crate) mod expr_eval;
pub(crate) mod fusion;
pub(crate) mod operators;
pub(crate) mod pointwise;
mod recompute;
pub(crate) mod unary;
pub(crate) mod wide_integers;

/// Names that declarations of elementwise operations use.
pub(crate) mod prelude {
    pub(crate) use super::pointwise::GradRule::{Expr, None as NoGrad, Zero};
    pub(crate) use super::pointwise::GradVar::{A, B, C, Y};
    pub(crate) use super::pointwise::{
        PointwiseOp, TypeRule, pointwise_op, pointwise_ops, run_pointwise, run_pointwise_inplace,
        run_pointwise_inplace_grad,
    };
    pub(crate) use super::unary::unary;
}
