//! Code that every operation shares: launches and their parameters, pointwise kernels, custom kernels, launch
//! heuristics, and the checks of scalars and indices.
//!
//! `launch` is the one place where operations meet the backend. Choices of threads and workgroups belong to
//! `heuristics`.

pub(crate) mod custom;
pub(crate) mod heuristics;
pub(crate) mod index_check;
#[doc(hidden)]
pub mod launch;
pub(crate) mod operation;
pub(crate) mod pointwise_kernel;
