//! Operations, one folder for each family. A file has an operation's shape rule, launch and gradient.
//!
//! Operations are methods of [`Tensor`](crate::tensor::Tensor) under PyTorch's names. Operations on a list of
//! tensors ([`cat`], [`stack`], [`einsum`], [`meshgrid`]) are functions of a slice. Optional arguments form a
//! struct that implements `Default` ([`AttentionOptions`], [`CrossEntropyOptions`]), or the variant has its
//! own name (`sum_all`). A new operation is one entry in its family's file. Its kernel goes into the shaders
//! crate, unless the family generates it.
//!
//! | family | contents |
//! | --- | --- |
//! | `kernel` | code that all families share: launches, heuristics, checks of scalars and indices, `CustomOp` |
//! | `elementwise` | records with a WGSL expression and gradients; casts, fusion |
//! | `reduce` | sums, extremes and norms as records; scans, statistics |
//! | `matmul`, `attention`, `conv`, `recurrent` | products: by the vendor's library, else by the crate's kernels |
//! | `norm`, `loss` | normalisation and softmax; losses |
//! | `shape`, `create` | views, joining, padding; new tensors, copies to other devices |
//! | `index`, `sort` | gather, scatter, embedding; sorting, quantiles, sets |
//! | `linalg`, `random`, `signal` | factorisations and solvers; random values; windows of signals |
//! | `inplace` | operations that write their result into a tensor |
//!
//! A file whose name ends in `_composite` has operations that are composed of others, without kernels.

pub(crate) mod attention;
pub(crate) mod conv;
mod create;
pub(crate) mod elementwise;
pub(crate) mod index;
mod inplace;
#[doc(hidden)]
pub mod kernel;
mod linalg;
mod loss;
pub(crate) mod matmul;
pub(crate) mod norm;
mod prelude;
mod random;
pub(crate) mod recurrent;
mod reduce;
mod sequence;
mod shape;
mod signal;
#[doc(hidden)]
pub mod sort;

pub use crate::scalar::Scalar;
pub use attention::AttentionOptions;
pub use conv::grid_sample::{GridMode, GridPadding, GridSampleOptions};
pub use conv::interpolate::{InterpolateMode, InterpolateOptions};
pub use conv::pool::{Pool1dOptions, Pool2dOptions, Pool3dOptions, PoolOptions};
pub use conv::spatial::check_at_least;
pub use conv::spatial::{ConvolutionOptions, IntoSpatial, Padding, TransposedConvolutionOptions};
pub use elementwise::activation::RreluOptions;
pub use elementwise::pointwise::{IntoOperand, Operand};
pub use elementwise::unary::NanToNumOptions;
pub use index::ScatterOp;
pub use index::embedding::EmbeddingOptions;
pub use index::embedding_bag::{EmbeddingBagMode, EmbeddingBagOptions};
pub use index::scatter::ScatterReduce;
pub use index::select::SearchSortedOptions;
pub use index::select::{cast_index_to_i32, ignore_index_to_i32};
pub use kernel::custom::{CustomOp, CustomOpCall, SavedForBackward};
pub use kernel::index_check::check_lengths;
pub use kernel::index_check::{CheckIndicesGuard, check_indices, set_check_indices};
pub use linalg::SolveTriangularOptions;
pub use linalg::factorizations::{LstsqResult, LuSolveOptions};
pub use linalg::linalg_composite::{MatrixNorm, multi_dot};
pub use loss::cross_entropy::CrossEntropyOptions;
pub use loss::ctc_loss::CtcLossOptions;
pub use loss::margin_loss::{
    MultiMarginLossOptions, PoissonNllLossOptions, TripletMarginWithDistanceLossOptions,
};
pub use loss::{
    BceWithLogitsOptions, GaussianNllLossOptions, NllLossOptions, NormalizeOptions, PairwiseDistanceOptions,
    Reduction, TripletMarginLossOptions,
};
pub use matmul::AddmmOptions;
pub use matmul::einsum::einsum;
pub use norm::batch_norm::BatchNormOptions;
pub use norm::layer_norm::machine_epsilon;
pub use norm::{InstanceNormOptions, LocalResponseNormOptions, NormOptions};
pub use random::representable_range;
pub use recurrent::{RecurrentKind, RecurrentOp, RecurrentOutput};
pub use reduce::statistics::CovOptions;
pub use shape::pad::PadMode;
pub use shape::shape_composite::{
    block_diag, broadcast_tensors, cartesian_prod, column_stack, dstack, hstack, meshgrid, vstack,
};
pub use shape::strided::Im2colOptions;
pub use shape::{DiffOptions, cat, stack};
pub use sort::Interpolation;
pub use sort::sets::{IsCloseOptions, Unique};
