//! Operations, one file a family: the shape rule, the launch and the gradient of each stand side by side.
//!
//! Operations are methods of [`Tensor`](crate::tensor::Tensor) under PyTorch's names; what joins several tensors ([`cat`],
//! [`stack`], [`einsum`], [`meshgrid`]) is a function of a slice of them. Arguments with defaults are a struct of options, with
//! `Default` ([`Attention`], [`CrossEntropy`]), or have a name of their own (`sum_all`). A new operation is one entry in
//! its family's file, and a kernel in the shaders crate where the family does not generate it.

mod activation;
pub(crate) mod attention;
mod batch_norm;
mod binary;
mod cast;
mod conv;
mod cross;
mod cross_entropy;
mod ctc_loss;
pub(crate) mod custom;
mod distance;
mod einsum;
mod embedding;
mod embedding_bag;
mod expr_eval;
mod factorizations;
pub(crate) mod fusion;
mod grid_sample;
mod heuristics;
pub(crate) mod im2col;
mod index;
mod index_check;
mod interpolate;
pub(crate) mod launch;
mod layer_norm;
mod linalg;
mod linalg_composite;
mod linear;
mod linear_cross_entropy;
mod linear_fp8;
mod loss;
mod margin_loss;
pub(crate) mod matmul;
mod matmul_tiling;
mod norm;
mod operators;
pub(crate) mod pointwise;
mod pointwise_kernel;
mod pool;
mod pool_composite;
mod random;
mod recurrent;
mod reduce;
mod rotary;
pub(crate) mod scalar;
mod scaled_mm;
mod scan;
mod scatter;
mod select;
mod sets;
mod shape;
mod shape_composite;
mod signal;
mod softmax;
mod sort;
mod spatial;
mod statistics;
mod strided;
mod svd;
mod take_put;
mod unary;
mod unpool;

pub use attention::AttentionOptions;
pub use cross_entropy::CrossEntropyOptions;
pub use ctc_loss::CtcLossOptions;
pub use custom::{CustomOp, CustomOpCall, SavedForBackward};
pub use einsum::einsum;
pub use embedding::EmbeddingOptions;
pub use embedding_bag::{EmbeddingBagMode, EmbeddingBagOptions};
pub use factorizations::LstsqResult;
pub use grid_sample::{GridMode, GridPadding};
pub use index::ScatterOp;
pub use index_check::{CheckIndicesGuard, check_indices, set_check_indices};
pub use interpolate::{InterpolateMode, InterpolateOptions};
pub(crate) use layer_norm::machine_epsilon;
pub use linalg_composite::{MatrixNorm, multi_dot};
pub use loss::Reduction;
pub use pointwise::{Operand, Scalar};
pub use pool::{Pool1dOptions, Pool2dOptions, Pool3dOptions, PoolOptions};
pub(crate) use random::representable_range;
pub use recurrent::{RecurrentKind, RecurrentOp, RecurrentOutput};
pub use scatter::ScatterReduce;
pub(crate) use select::{cast_index_to_i32, ignore_index_to_i32};
pub use sets::Unique;
pub use shape::{PadMode, cat, stack};
pub use shape_composite::{
    block_diag, broadcast_tensors, cartesian_prod, column_stack, dstack, hstack, meshgrid, vstack,
};
pub use sort::Interpolation;
pub(crate) use spatial::check_at_least;
pub use spatial::{IntoSpatial, Padding};
