//! Code that every operation shares: launches and their parameters, pointwise kernels, custom kernels, launch
//! heuristics, and the checks of scalars and indices.

pub(crate) mod custom;
pub(crate) mod heuristics;
pub(crate) mod index_check;
#[doc(hidden)]
pub mod launch;
pub(crate) mod operation;
pub(crate) mod pointwise_kernel;
