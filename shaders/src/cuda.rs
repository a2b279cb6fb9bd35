//! Kernels in CUDA C++: faster forms of some of the WGSL ones, for CUDA alone. Their definitions are said at their beginnings.

/// How a kernel waits for the one in front of it; stands before all of them, the translated ones too.
pub const PDL: &str = include_str!("../cuda/pdl.cuh");
/// What the attention kernels share; stands before each of them.
pub const ATTENTION_COMMON: &str = include_str!("../cuda/attention_common.cuh");
/// Attention forward.
pub const ATTENTION_FWD: &str = include_str!("../cuda/attention_fwd.cu");
/// Attention backward, in two passes.
pub const ATTENTION_BWD: &str = include_str!("../cuda/attention_bwd.cu");
/// Pairs of 16-bit floats; stands before the kernels that have them.
pub const PACKED_HALVES: &str = include_str!("../cuda/packed_halves.cuh");
/// Stages that the copy engine fills; stands before the kernels of products.
pub const TMA_PIPELINE: &str = include_str!("../cuda/tma_pipeline.cuh");
/// The gradient that a linear layer hands to the GELU in front of it.
pub const GELU_GRAD: &str = include_str!("../cuda/gelu_grad.cu");
/// Small matrix products of f32.
pub const SGEMM_SMALL: &str = include_str!("../cuda/sgemm_small.cu");
